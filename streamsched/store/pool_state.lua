-- The atomic steps on one pool's keys. A script does not roll back, so every step checks first and writes then.
--
-- KEYS: 1 meta  2 jobs  3 runs  4 nodes  5 queue
-- meta fields: epoch (the owner's), seq (of the last commit), state (the core's scalars), position (journal and input
--              offsets, outbox), summary (for the router and for status)

local function acquire(at_least)
  local stored = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
  local epoch = math.max(stored, tonumber(at_least)) + 1
  redis.call('HSET', KEYS[1], 'epoch', string.format('%d', epoch))
  return epoch
end

-- 1: done (or was done: a retry after a lost answer), 0: another epoch owns the pool, -1: the data is not what it was
local function may_write(epoch, before, seq)
  local stored = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '-1')
  if stored > epoch then return 0 end
  if stored < epoch then return -1 end
  local at = redis.call('HGET', KEYS[1], 'seq') or '0'
  if at ~= before and at ~= seq then return -1 end
  return 1
end

local function write_hash(key, from, pairs_count)
  for i = 0, pairs_count - 1 do
    local name, value = ARGV[from + 2 * i], ARGV[from + 2 * i + 1]
    if value == '' then redis.call('HDEL', key, name) else redis.call('HSET', key, name, value) end
  end
  return from + 2 * pairs_count
end

-- ARGV: 'acquire' epoch | 'check' epoch seq | as follows
-- ARGV: 1 'commit' | 'reset'  2 epoch  3 seq before  4 seq  5 n meta fields  6 n jobs  7 n runs  8 n nodes
--       9 n queue, then name/value pairs in that order (an empty value deletes; for the queue it is a score)
local function commit(reset)
  local epoch = tonumber(ARGV[2])
  if reset then
    if tonumber(redis.call('HGET', KEYS[1], 'epoch') or '-1') ~= epoch then return 0 end
    redis.call('DEL', KEYS[2], KEYS[3], KEYS[4], KEYS[5])
  else
    local answer = may_write(epoch, ARGV[3], ARGV[4])
    if answer ~= 1 then return answer end
  end
  local at = write_hash(KEYS[1], 10, tonumber(ARGV[5]))
  at = write_hash(KEYS[2], at, tonumber(ARGV[6]))
  at = write_hash(KEYS[3], at, tonumber(ARGV[7]))
  at = write_hash(KEYS[4], at, tonumber(ARGV[8]))
  for i = 0, tonumber(ARGV[9]) - 1 do
    local name, score = ARGV[at + 2 * i], ARGV[at + 2 * i + 1]
    if score == '' then redis.call('ZREM', KEYS[5], name) else redis.call('ZADD', KEYS[5], score, name) end
  end
  redis.call('HSET', KEYS[1], 'seq', ARGV[4])
  return 1
end

if ARGV[1] == 'acquire' then return acquire(ARGV[2]) end
if ARGV[1] == 'check' then return may_write(tonumber(ARGV[2]), ARGV[3], ARGV[3]) end
return commit(ARGV[1] == 'reset')

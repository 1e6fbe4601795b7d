-- The atomic steps on one pool's keys. A script does not roll back, so every step checks first and writes then.
--
-- KEYS: 1 meta  2 jobs  3 runs  4 nodes  5 tenants  6 queue
-- meta fields: epoch (the owner's), seq (of the last commit), state (the core's scalars), position (journal and input
--              offsets, outbox), summary (for the router and for status). Without `state` the pool counts as not there.
--
-- ARGV: 'acquire' epoch        a new epoch above this and above the stored one; returns it
--       'check'   epoch seq [summary]   whether the stored state is the one that this owner last wrote; if so, the summary
--       'clear'   epoch        begin to write it anew
--       'fill'    epoch '' ''  n... pairs...   part of a state written anew
--       'commit'  epoch before seq  n... pairs...   from record `before` to record `seq`
-- n...: numbers of pairs for meta, jobs, runs, nodes, tenants, queue; then name and value of each. An empty value deletes;
-- for the queue the value is a score.
--
-- Answers: 1 done (or was done: a retry after a lost answer), 0 another epoch owns the pool, -1 the data is not what it was.
-- A key of another type than ours is data that is not what it was: the takeover that follows replaces it.

local DONE, FENCED, LOST = 1, 0, -1

local function is(key, type)
  local found = redis.call('TYPE', key)['ok']
  return found == type or found == 'none'
end

local function ours()
  for key = 1, 5 do
    if not is(KEYS[key], 'hash') then return false end
  end
  return is(KEYS[6], 'zset')
end

local function acquire(at_least)
  if not is(KEYS[1], 'hash') then redis.call('DEL', KEYS[1]) end
  local stored = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0') or 0
  local epoch = math.max(stored, tonumber(at_least)) + 1
  redis.call('HSET', KEYS[1], 'epoch', string.format('%d', epoch))
  return epoch
end

local function owner(epoch)
  if not is(KEYS[1], 'hash') then return LOST end
  local stored = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '-1') or -1
  if stored > epoch then return FENCED end
  if stored < epoch then return LOST end
  return DONE
end

local function at_record(epoch, before, seq)
  local answer = owner(epoch)
  if answer ~= DONE then return answer end
  if not ours() then return LOST end
  local at = redis.call('HGET', KEYS[1], 'seq') or '0'
  if at ~= before and at ~= seq then return LOST end
  return DONE
end

local function clear(epoch)
  local answer = owner(epoch)
  if answer == DONE then
    redis.call('DEL', KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6])
    redis.call('HDEL', KEYS[1], 'seq', 'state', 'position', 'summary')
  end
  return answer
end

local function write()
  local at = 11
  for key = 1, 5 do
    for _ = 1, tonumber(ARGV[4 + key]) do
      local name, value = ARGV[at], ARGV[at + 1]
      if value == '' then redis.call('HDEL', KEYS[key], name) else redis.call('HSET', KEYS[key], name, value) end
      at = at + 2
    end
  end
  for _ = 1, tonumber(ARGV[10]) do
    local name, score = ARGV[at], ARGV[at + 1]
    if score == '' then redis.call('ZREM', KEYS[6], name) else redis.call('ZADD', KEYS[6], score, name) end
    at = at + 2
  end
end

local step, epoch = ARGV[1], tonumber(ARGV[2])
if step == 'acquire' then return acquire(ARGV[2]) end
if step == 'check' then
  local answer = at_record(epoch, ARGV[3], ARGV[3])
  if answer == DONE and ARGV[4] then redis.call('HSET', KEYS[1], 'summary', ARGV[4]) end
  return answer
end
if step == 'clear' then return clear(epoch) end
local answer = owner(epoch)
if step == 'commit' then answer = at_record(epoch, ARGV[3], ARGV[4]) end
if answer == DONE and not ours() then answer = LOST end
if answer ~= DONE then return answer end
write()
if step == 'commit' then redis.call('HSET', KEYS[1], 'seq', ARGV[4]) end
return DONE

-- The atomic steps on the job index.
--
-- KEYS: 1 jobs   job -> its pool; with a ~ behind it if the pool has forgotten the job and nobody has asked for it since
--       2 pools  pool -> the generation under which all its jobs were written (behind `writing:` until all are)
--       3 gone   the jobs that one pool has forgotten, by when (its step names the pool)
--
-- ARGV: 'claim'  n pools... job wish job wish...   false when the index is not whole; else the generation and a pool per job
--       'find'   jobs...             whether something had to be mended, then a pool or nothing per job
--       'whole'  pools...            1 or 0
--       'now'                        the generation
--       'begin'  pool                the pool's jobs are written anew from here
--       'put'    pool jobs...
--       'end'    pool                1: they are all in; 0: something was lost meanwhile, begin again
--       'look'   pool before         whether the pool's jobs are in, then jobs forgotten before that time
--       'forget' pool now jobs...
--       'settle' pool n kept... gone...   jobs of 'look' that the pool has again, and those to be taken out
--
-- The generation is the server's own name for this run of it. A copy of the data comes back in another run (a restart, a
-- replica that took over), so what an old copy says of `pools` is recognised as old by the first step that asks.
--
-- What is not ours (a key of another type, a value that is no name) is taken out, and `pools` with it: then every pool
-- writes its jobs again, and what was under the damage comes back. Answers tell of it by -1.

local function generation()
  local name = ''
  for _, section in ipairs({'server', 'replication'}) do
    local info = redis.pcall('INFO', section)
    if type(info) == 'string' then
      for _, field in ipairs({'run_id', 'master_replid'}) do
        name = name .. (string.match(info, field .. ':(%w+)') or '')
      end
    end
  end
  return name
end

local function is(key, type)
  local found = redis.call('TYPE', key)['ok']
  return found == type or found == 'none'
end

local function mend()
  if KEYS[3] and not is(KEYS[3], 'zset') then redis.call('DEL', KEYS[3]) end
  if is(KEYS[1], 'hash') and is(KEYS[2], 'hash') then return false end
  if not is(KEYS[1], 'hash') then redis.call('DEL', KEYS[1]) end
  redis.call('DEL', KEYS[2])
  return true
end

local function is_name(value)
  return #value <= 254 and string.match(value, '^%w[%w%._:/@+%-]*~?$')
end

local function throw_out(job)
  redis.call('HDEL', KEYS[1], job)
  redis.call('DEL', KEYS[2])
end

local function pool_in(value)
  return (string.gsub(value, '~$', ''))
end

local function whole(first, last)
  local now = generation()
  for i = first, last do
    if redis.call('HGET', KEYS[2], ARGV[i]) ~= now then return false end
  end
  return now
end

local function claim()
  local last = 2 + tonumber(ARGV[2])
  local now = whole(3, last)
  if not now then return false end
  local mended = false
  for i = last + 1, #ARGV, 2 do
    local found = redis.call('HGET', KEYS[1], ARGV[i])
    if found and not is_name(found) then
      throw_out(ARGV[i])
      mended = true
    end
  end
  if mended then return -1 end
  local answer = {now}
  for i = last + 1, #ARGV, 2 do
    local found = redis.call('HGET', KEYS[1], ARGV[i])
    local pool = found and pool_in(found) or ARGV[i + 1]
    if found ~= pool then redis.call('HSET', KEYS[1], ARGV[i], pool) end
    answer[#answer + 1] = pool
  end
  return answer
end

local function find(mended)
  local answer = {mended and -1 or 0}
  for i = 2, #ARGV do
    local found = redis.call('HGET', KEYS[1], ARGV[i])
    if found and not is_name(found) then
      throw_out(ARGV[i])
      answer[1] = -1
      found = false
    end
    answer[i] = found and pool_in(found)
  end
  return answer
end

local function begin()
  local now = generation()
  if redis.call('HGET', KEYS[2], ARGV[2]) ~= now then redis.call('HSET', KEYS[2], ARGV[2], 'writing:' .. now) end
  return 1
end

local function finish()
  local now = generation()
  local found = redis.call('HGET', KEYS[2], ARGV[2])
  if found ~= now and found ~= 'writing:' .. now then return 0 end
  redis.call('HSET', KEYS[2], ARGV[2], now)
  return 1
end

local function look()
  local due = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', ARGV[3], 'LIMIT', 0, 5000)
  table.insert(due, 1, whole(2, 2) and 1 or 0)
  return due
end

local function forget()
  for i = 4, #ARGV do
    if redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[2] then
      redis.call('HSET', KEYS[1], ARGV[i], ARGV[2] .. '~')
      redis.call('ZADD', KEYS[3], ARGV[3], ARGV[i])
    end
  end
end

local function settle()
  for i = 4, #ARGV do
    if redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[2] .. '~' then
      if i < 4 + tonumber(ARGV[3]) then
        redis.call('HSET', KEYS[1], ARGV[i], ARGV[2])
      else
        redis.call('HDEL', KEYS[1], ARGV[i])
      end
    end
    redis.call('ZREM', KEYS[3], ARGV[i])
  end
end

local step, mended = ARGV[1], mend()
if step == 'claim' then return mended and -1 or claim() end
if step == 'find' then return find(mended) end
if step == 'whole' then return mended and -1 or (whole(2, #ARGV) and 1 or 0) end
if step == 'now' then return generation() end
if step == 'begin' then return begin() end
if step == 'end' then return finish() end
if step == 'look' then return look() end
if step == 'forget' then return forget() end
if step == 'settle' then return settle() end
for i = 3, #ARGV do redis.call('HSET', KEYS[1], ARGV[i], ARGV[2]) end
return 1

-- What the run-time predictor of one pool has learned: pieces, and a head that says which of them count.
--
-- KEYS: 1 meta       of the pool (pool_state.lua): its epoch says whose writes are taken
--       2 predictor  fields: head (JSON), SLOT:NUMBER (a piece); a new state goes to the slot that the head does not name
--
-- ARGV: 'put'  epoch number piece   a field and its piece
--       'end'  epoch head slot n    from now on these n pieces of this slot count; what else is there goes
--
-- Answers: 1 done, 0 another epoch owns the pool (or none does: Redis was flushed).

local function owns(epoch)
  local stored = redis.pcall('HGET', KEYS[1], 'epoch')
  return type(stored) == 'string' and stored == epoch
end

if not owns(ARGV[2]) then return 0 end
if redis.call('TYPE', KEYS[2])['ok'] ~= 'hash' then redis.call('DEL', KEYS[2]) end
if ARGV[1] == 'put' then
  redis.call('HSET', KEYS[2], ARGV[3], ARGV[4])
  return 1
end
redis.call('HSET', KEYS[2], 'head', ARGV[3])
for _, name in ipairs(redis.call('HKEYS', KEYS[2])) do
  local slot, number = string.match(name, '^(%d):(%d+)$')
  if name ~= 'head' and (slot ~= ARGV[4] or tonumber(number) >= tonumber(ARGV[5])) then
    redis.call('HDEL', KEYS[2], name)
  end
end
return 1

#!lua
-- Add one holder's entries.
--
-- Race prevented: a store node was paused, declared dead and started anew; then the old process wakes up and sends what
-- it had queued. Reading the entry and writing it in two commands would let the old write land on the new entry and
-- hide it. Here an entry of a newer incarnation stays.
--
-- KEYS[1]  prefix of the namespace's block keys      KEYS[2]  the shard's events      KEYS[3]  its numbers
-- ARGV     namespace, hashes packed, bytes of one hash, events kept, blocks in one event, holder,
--          incarnation (20 digits), tier
-- Returns  how many entries are new or changed
local packed, width = ARGV[2], tonumber(ARGV[3])
local holder, incarnation, tier = ARGV[6], ARGV[7], ARGV[8]
local entry = incarnation .. ':' .. tier
local incarnation_pattern = '^(' .. string.rep('%d', 20) .. '):'
local changed = {}

for start = 1, #packed, width do
  local block_hash = string.sub(packed, start, start + width - 1)
  local key = KEYS[1] .. block_hash
  local standing = redis.pcall('HGET', key, holder)
  if type(standing) == 'table' then -- another type: junk under our prefix
    redis.call('DEL', key)
    standing = false
  end
  local standing_incarnation = standing and string.match(standing, incarnation_pattern)
  local is_newer = standing_incarnation and standing_incarnation > incarnation
  if standing ~= entry and not is_newer then
    redis.call('HSET', key, holder, entry)
    changed[#changed + 1] = block_hash
  end
end

if #changed > 0 then
  local at = {events = KEYS[2], numbers = KEYS[3], namespace = ARGV[1], width = width, kept = ARGV[4],
    split = tonumber(ARGV[5])}
  append_event(at, holder, incarnation, '+', tier, changed)
end
return #changed

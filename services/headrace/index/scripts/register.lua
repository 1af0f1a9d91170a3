#!lua
-- Add one holder's entries.
--
-- Race prevented: a store node was paused, declared dead and started anew; then the old process wakes up and sends what
-- it had queued. Reading the entry and writing it in two commands would let the old write land on the new entry and
-- hide it. Here an entry of a newer incarnation stays.
--
-- KEYS[1]  prefix of the namespace's block keys      KEYS[2]  the holder's events
-- ARGV     holder, incarnation (20 digits), tier, hashes packed, bytes of one hash, events kept
-- Returns  how many entries are new or changed
local holder, incarnation, tier, packed, width = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
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
  local function append()
    return redis.pcall('XADD', KEYS[2], 'MAXLEN', '~', ARGV[6], string.gsub(incarnation, '^0+', '') .. '-*',
      'op', '+', 'tier', tier, 'blocks', table.concat(changed))
  end
  local appended = append()
  if type(appended) == 'table' and string.find(appended.err, 'WRONGTYPE', 1, true) then
    redis.call('DEL', KEYS[2])
    append()
  end
  -- Any other refusal: the stream has events of a newer incarnation, and nobody needs those of an older one.
end
return #changed

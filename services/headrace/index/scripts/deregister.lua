#!lua flags=allow-oom
-- Take one holder's entries back.
--
-- Race prevented: an evicting store node dies; its next incarnation finds the same block whole in the arena and
-- registers it; then the late removal arrives. It must not take the new entry: the block would be held and never found.
--
-- KEYS[1]  prefix of the namespace's block keys      KEYS[2]  the shard's events      KEYS[3]  its numbers
-- ARGV     namespace, hashes packed, bytes of one hash, events kept, blocks in one event, holder,
--          incarnation (20 digits)
-- Returns  how many entries were removed
local packed, width = ARGV[2], tonumber(ARGV[3])
local holder, incarnation = ARGV[6], ARGV[7]
local incarnation_pattern = '^(' .. string.rep('%d', 20) .. '):'
local removed = {}

for start = 1, #packed, width do
  local block_hash = string.sub(packed, start, start + width - 1)
  local key = KEYS[1] .. block_hash
  local standing = redis.pcall('HGET', key, holder)
  if type(standing) == 'string' then
    local standing_incarnation = string.match(standing, incarnation_pattern)
    if not (standing_incarnation and standing_incarnation > incarnation) then
      redis.call('HDEL', key, holder)
      removed[#removed + 1] = block_hash
    end
  end
end

if #removed > 0 then
  local at = {events = KEYS[2], numbers = KEYS[3], namespace = ARGV[1], width = width, kept = ARGV[4],
    split = tonumber(ARGV[5])}
  append_event(at, holder, incarnation, '-', '', removed)
end
return #removed

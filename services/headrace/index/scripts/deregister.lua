#!lua flags=allow-oom
-- Take one holder's entries back.
--
-- Race prevented: an evicting store node dies; its next incarnation finds the same block whole in the arena and
-- registers it; then the late removal arrives. It must not take the new entry: the block would be held and never found.
--
-- KEYS[1]  prefix of the namespace's block keys      KEYS[2]  the holder's events
-- ARGV     holder, incarnation (20 digits), hashes packed, bytes of one hash, events kept
-- Returns  how many entries were removed
local holder, incarnation, packed, width = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
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
  -- Refused when the stream has events of a newer incarnation, or is junk: then `register` replaces it.
  redis.pcall('XADD', KEYS[2], 'MAXLEN', '~', ARGV[5], string.gsub(incarnation, '^0+', '') .. '-*',
    'op', '-', 'blocks', table.concat(removed))
end
return #removed

#!lua flags=allow-oom
-- Remove entries that were found dead.
--
-- Race prevented: between the look that found an entry dead and its removal, the holder may have come back and
-- registered the block again under its new incarnation. Only the value that was seen is removed.
--
-- KEYS[1]  prefix of the namespace's block keys
-- ARGV     block hash, holder, value seen, block hash, holder, value seen, ...
-- Returns  how many entries were removed
local removed = 0
for i = 1, #ARGV, 3 do
  local key = KEYS[1] .. ARGV[i]
  if redis.pcall('HGET', key, ARGV[i + 1]) == ARGV[i + 2] then
    removed = removed + redis.call('HDEL', key, ARGV[i + 1])
  end
end
return removed

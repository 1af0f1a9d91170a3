#!lua flags=allow-oom
-- Remove entries that were found dead.
--
-- Race prevented: between the look that found an entry dead and its removal, the holder may have come back and
-- registered the block again under its new incarnation. Only the value that was seen is removed. Should the holder come
-- back under the same incarnation, mirrors must know that it has lost entries here: an event says so.
--
-- KEYS[1]  prefix of the namespace's block keys      KEYS[2]  the shard's events      KEYS[3]  its numbers
-- ARGV     namespace, events kept, block hash, holder, value seen, block hash, holder, value seen, ...
-- Returns  how many entries were removed
local removed, swept = 0, {}
for i = 3, #ARGV, 3 do
  local key = KEYS[1] .. ARGV[i]
  if redis.pcall('HGET', key, ARGV[i + 1]) == ARGV[i + 2] then
    removed = removed + redis.call('HDEL', key, ARGV[i + 1])
    local incarnation = string.match(ARGV[i + 2], '^(' .. string.rep('%d', 20) .. '):')
    if incarnation then swept[incarnation .. ARGV[i + 1]] = {ARGV[i + 1], incarnation} end
  end
end

local at = {events = KEYS[2], numbers = KEYS[3], namespace = ARGV[1], width = 16, kept = ARGV[2], split = 1}
for _, owner in pairs(swept) do
  append_event(at, owner[1], owner[2], '?', '', {})
end
return removed

#!lua flags=no-writes
-- The entries of some blocks of one namespace, as many blocks in order as have at most so many entries together; at
-- least one.
--
-- Race prevented: none. It is one command where there would be one for each block, and what is sent is bounded by
-- entries: one block that a thousand holders have is as much to read as a thousand blocks.
--
-- KEYS[1]  prefix of the namespace's block keys
-- ARGV     hashes packed, bytes of one hash, most entries, most holders of one block
-- Returns  for each block that was read: how many parts follow (-1: the key is junk), holder, value, holder, value, ...
local packed, width, entries_left, holders_max = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local reply = {}
for start = 1, #packed, width do
  local key = KEYS[1] .. string.sub(packed, start, start + width - 1)
  local size = redis.pcall('HLEN', key)
  if type(size) == 'table' then
    reply[#reply + 1] = -1
  else
    entries_left = entries_left - size
    if entries_left < 0 and start > 1 then break end
    local parts = redis.call('HRANDFIELD', key, holders_max, 'WITHVALUES')
    reply[#reply + 1] = #parts
    for _, part in ipairs(parts) do reply[#reply + 1] = part end
  end
end
return reply

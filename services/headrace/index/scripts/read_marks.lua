#!lua flags=no-writes
-- Where a shard's events and their numbers stand.
--
-- Race prevented: an event between the reading of the newest id and of the numbers would be counted and never read, or
-- read and not be expected. A script sees one instant.
--
-- KEYS[1]  the shard's events      KEYS[2]  its numbers
-- Returns  {newest id, events ever, field, number, field, number, ...}; "0-0" and 0 without a stream
local reply = {'0-0', 0}
local stream = redis.pcall('XINFO', 'STREAM', KEYS[1])
if not stream.err then
  for i = 1, #stream, 2 do
    if stream[i] == 'last-generated-id' then reply[1] = stream[i + 1] end
    if stream[i] == 'entries-added' then reply[2] = stream[i + 1] end
  end
end
local numbers = redis.pcall('HGETALL', KEYS[2])
if not numbers.err then
  for _, part in ipairs(numbers) do reply[#reply + 1] = part end
end
return reply

#!lua flags=no-writes
-- Where a shard's events and their numbers stand.
--
-- Race prevented: an event between the reading of the newest id and of the numbers would be counted and never read, or
-- read and not be expected. A script sees one instant.
--
-- KEYS[1]  the shard's events      KEYS[2]  its numbers
-- Returns  {newest id, "0-0" when there is none, field, number, field, number, ...}
local newest = redis.pcall('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
local numbers = redis.pcall('HGETALL', KEYS[2])
local reply = {not newest.err and newest[1] and newest[1][1] or '0-0'}
if numbers.err then return reply end
for _, part in ipairs(numbers) do reply[#reply + 1] = part end
return reply

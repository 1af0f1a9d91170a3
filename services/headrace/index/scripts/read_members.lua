#!lua
-- All standing liveness records; forgets the ids of members whose record has run out.
--
-- Race prevented: a member announces itself between the look that found its record gone and the removal of its id. Its
-- record would stand and never be listed. A script lets nobody in between.
--
-- KEYS[1]  ids of all members
-- ARGV     prefix of the records' keys, most members to read, most bytes of a record
-- Returns  {junk records, holder, record, holder, record, ...}
local prefix, members_max, bytes_max = ARGV[1], ARGV[2], tonumber(ARGV[3])
local reply = {0}
local holders = redis.pcall('SRANDMEMBER', KEYS[1], members_max)
if holders.err then return {1} end
for _, holder in ipairs(holders) do
  local key = prefix .. holder
  local bytes = redis.pcall('STRLEN', key)
  local ttl_ms = redis.call('PTTL', key)
  if ttl_ms == -2 then
    redis.pcall('SREM', KEYS[1], holder) -- refused by a read-only replica: then it stays a little longer
  elseif type(bytes) == 'table' or bytes > bytes_max or ttl_ms == -1 then
    reply[1] = reply[1] + 1
  else
    reply[#reply + 1] = holder
    reply[#reply + 1] = redis.call('GET', key)
  end
end
return reply

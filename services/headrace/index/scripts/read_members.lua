#!lua flags=no-writes
-- All standing liveness records.
--
-- Race prevented: a member announces a new incarnation between the look at its lifetime and the reading of its record.
-- A script sees one instant. It writes nothing, so that it also works on a read-only replica and when Redis is full.
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
  if type(bytes) == 'table' or bytes > bytes_max or ttl_ms == -1 then
    reply[1] = reply[1] + 1
  elseif ttl_ms ~= -2 then -- -2: it has run out
    reply[#reply + 1] = holder
    reply[#reply + 1] = redis.call('GET', key)
  end
end
return reply

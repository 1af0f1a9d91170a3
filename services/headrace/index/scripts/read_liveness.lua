#!lua flags=no-writes
-- Under which incarnation some holders are alive, and for how long their records stand yet.
--
-- Race prevented: a record that is put anew between the reading of its incarnation and of its lifetime would lend the
-- new lifetime to the old incarnation. A script sees one instant.
--
-- KEYS[1]  ids of all members
-- ARGV     prefix of the records' keys, holder, holder, ...
-- Returns  for each holder in order: the first 20 bytes of its record ("" without one), its TTL in ms
local reply = {}
for i = 2, #ARGV do
  local head = redis.pcall('GETRANGE', ARGV[1] .. ARGV[i], 0, 19)
  reply[#reply + 1] = type(head) == 'string' and head or ''
  reply[#reply + 1] = redis.call('PTTL', ARGV[1] .. ARGV[i])
end
return reply

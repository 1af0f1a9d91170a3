#!lua flags=allow-oom
-- Remove a liveness record.
--
-- Race prevented: a process that stops slowly withdraws after its successor has announced itself; the successor's
-- record must stay.
--
-- KEYS[1]  ids of all members      KEYS[2]  this member's record
-- ARGV     holder, incarnation (20 digits)
-- Returns  1 when the record was removed
local standing = redis.pcall('GETRANGE', KEYS[2], 0, 19)
if type(standing) ~= 'string' or standing == '' or standing > ARGV[2] then return 0 end
redis.call('DEL', KEYS[2])
redis.pcall('SREM', KEYS[1], ARGV[1])
return 1

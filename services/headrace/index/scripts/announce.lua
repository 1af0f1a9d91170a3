#!lua flags=allow-oom
-- Put or refresh a liveness record.
--
-- Race prevented: the heartbeat of a process that was paused and replaced must not push out its successor's record:
-- with it all entries of the successor would count as dead. Also, the id of a member whose record has run out is forgotten
-- here and not by a reader: were look and removal two commands, a member that announces itself in between would never be
-- listed again.
--
-- KEYS[1]  ids of all members      KEYS[2]  this member's record
-- ARGV     holder, incarnation (20 digits), record, TTL in ms, prefix of the records' keys, ids to look at
-- Returns  1 when no record of this incarnation stood, 0 when one did, -1 when a newer one stands
local standing = redis.pcall('GETRANGE', KEYS[2], 0, 19)
-- Another type, or without a TTL: not ours.
local is_junk = type(standing) == 'table' or redis.call('PTTL', KEYS[2]) == -1
if is_junk then
  redis.call('DEL', KEYS[2])
  standing = ''
end
if string.match(standing, '^' .. string.rep('%d', 20) .. '$') and standing > ARGV[2] then return -1 end

redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
if type(redis.pcall('SADD', KEYS[1], ARGV[1])) == 'table' then
  redis.call('DEL', KEYS[1])
  redis.call('SADD', KEYS[1], ARGV[1])
end
for _, holder in ipairs(redis.call('SRANDMEMBER', KEYS[1], ARGV[6])) do
  if redis.call('EXISTS', ARGV[5] .. holder) == 0 then redis.call('SREM', KEYS[1], holder) end
end
return standing == ARGV[2] and 0 or 1

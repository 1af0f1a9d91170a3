#!lua flags=allow-oom
-- Leave a reader's own mark, as a member leaves its record, and tell whether the last one still stood.
--
-- Race prevented: Redis comes back empty between the look and the writing, so that the reader takes its new mark for the
-- one that it lost and the members that have not announced themselves again for dead.
--
-- KEYS[1]  the reader's mark
-- ARGV     TTL in ms
-- Returns  1 when it stood, 0 when not
local stood = redis.call('EXISTS', KEYS[1])
redis.call('SET', KEYS[1], '', 'PX', ARGV[1])
return stood

#!lua flags=allow-oom
-- Leave a reader's next mark, as a member leaves its record, and tell which one stood.
--
-- Race prevented: Redis comes back empty between the look and the writing, so that the reader takes its new mark for the
-- one that it lost and the members that have not announced themselves again for dead. Also, of two listings at the same
-- time the earlier one's mark may come last; it must not hide that the later one's stood.
--
-- KEYS[1]  the reader's mark
-- ARGV     TTL in ms, number of the mark
-- Returns  the number that stood, "" when none did
local stood = redis.call('GET', KEYS[1])
local highest = math.max(tonumber(stood or 0), tonumber(ARGV[2]))
redis.call('SET', KEYS[1], string.format('%d', highest), 'PX', ARGV[1])
return stood or ''

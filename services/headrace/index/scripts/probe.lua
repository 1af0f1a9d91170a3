#!lua flags=allow-oom
-- Leave a reader's next mark, as a member leaves its record, and tell which one stood.
--
-- Race prevented: Redis comes back empty between the look and the writing, so that the reader takes its new mark for the
-- one that it lost and the members that have not announced themselves again for dead. Also, of two listings at the same
-- time the earlier one's mark may come last; it must not hide that the later one's stood. And one whose answer was lost
-- may have come upon nothing; that it left a mark must not hide this from the next.
--
-- KEYS[1]  the reader's mark
-- ARGV     TTL in ms, number of the mark
-- Returns  the mark that stood, "" when none did: the number that it began with when there was none, and the highest since
local stood = redis.call('GET', KEYS[1])
local first, highest = string.match(stood or '', '^(%d+):(%d+)$')
local left = string.format('%d:%d', first or ARGV[2], math.max(highest or 0, ARGV[2]))
redis.call('SET', KEYS[1], left, 'PX', ARGV[1])
return first and stood or ''

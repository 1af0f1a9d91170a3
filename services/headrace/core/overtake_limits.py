"""Bounds of loading a prefix against computing it, each with its reason. Which file has which bounds: `limits.py`."""

# What a load may cost more than it has saved before the rest is computed instead: a share of computing everything, and
# a round trip. Looked at every OVERTAKE_WATCH_MS, and when the time is over; never sooner again than OVERTAKE_LOOK_MS.
OVERTAKE_SHARE = 0.05
OVERTAKE_WATCH_MS = 20
OVERTAKE_LOOK_MS = 1

# What it takes to end a load and begin the step: so much earlier it is ended.
OVERTAKE_END_MS = 3

# A round trip, from the wish to the first block, is the longest of the last ROUND_TRIPS_KEPT on that way: of equal
# chances, one healthy load in 33 takes longer. Never less than one thread of a process may hold up the others (MIN: the
# interpreter's switch interval; `load_patience_ms` asks for more), or quick ways would be left for nothing. What more
# busy cores take is measured like all else. And as long as processes may wait for their turn where all of them wait
# (MAX) while fewer than ROUND_TRIPS_KNOWN answers were measured, since the first ones open connections.
ROUND_TRIPS_KEPT = 32
ROUND_TRIPS_KNOWN = 8
OVERTAKE_ROUND_TRIP_MIN_MS = 5
OVERTAKE_ROUND_TRIP_MAX_MS = 250

# From this many times what was predicted on, a load is late, and must be faster than computing from there.
OVERTAKE_LATE_FACTOR = 2.0

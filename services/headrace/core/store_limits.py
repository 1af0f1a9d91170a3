"""Bounds of what a store node does by itself (its disk, its drain, what it removes, how it is looked at), with their
reasons.

As `limits.py`, which has those of what it is asked for.
"""

from headrace.core.limits import ADMIN_CALL_TIMEOUT_MS, STORE_CALL_TIMEOUT_MS

# How often a store node's event loop tells the process beside it that it turns, and how long without that until it is
# killed and started anew. Its longest steps, checks of all books and tables of budgets, take some seconds at 200,000
# blocks; an arena is checked again in a second for 2 GB, so that a node is back long before an operator would look.
NODE_BEAT_MS = 1_000
NODE_STALL_MS = 30_000

# Blocks that one step of background work removes (expired, or evicted ahead of need): 512 removals are 5 to 20 ms of
# the event loop with the adaptive policy, and the next step follows at once when more are due.
BACKGROUND_REMOVALS_MAX = 512

# Segments that a disk tier's bound is cut into: reclaiming one gives up 3 % at a time, and at 1 TB it is 32 GB. A block
# larger than a segment is not kept: 1.4 MiB fit from 45 MiB of disk on.
DISK_SEGMENTS = 32

# Blocks that one node keeps on disk: the index of them is in memory, at about 1 KB each, so 128 MB at the bound. And
# records in one segment: a tier of small blocks has as many segments, too, when it comes to that bound.
DISK_BLOCKS_MAX = 131_072
DISK_SEGMENT_RECORDS_MAX = DISK_BLOCKS_MAX // DISK_SEGMENTS

# Files of given up segments that a disk may keep while further segments are given up in their place: with so many, an
# eighth of the tier, it is one that removes nothing (read-only, say), and the rest of it is worth more read than lost.
DISK_KEPT_MAX = DISK_SEGMENTS // 8

# Bytes of evicted blocks that wait to be written to disk: 64 MiB are 46 blocks of 1.4 MiB, a tenth of a second of a
# 0.6 GB/s disk. Beyond it a block is dropped: neither writers nor readers wait for the disk.
DEMOTE_QUEUE_BYTES_MAX = 64 * 1024 * 1024

# How long a lease waits for blocks to come from disk: half of what the whole call may take. At 1 GB/s it is 700 blocks
# of 1.4 MiB; what has not come by then is computed.
PROMOTE_TIMEOUT_MS = 1_000

# Bytes read from disk in one step and then copied into the arena on the event loop (8 MiB: 1 ms); one block at least.
PROMOTE_BATCH_BYTES = 8 * 1024 * 1024

# Threads that read from disk: two overlap one's checking with the other's waiting; with the batch they bound memory.
DISK_READERS = 2

# After a promotion ran out of time nobody asks the disk for so long: one that hangs costs one reader its time, not all.
# Marks and removals that the disk refused are tried again as late.
DISK_PAUSE_MS = 5_000

# How long an operator's eviction waits for the disk to take what was removed, so that it stays removed after a crash.
DISK_SETTLE_TIMEOUT_MS = 5_000

# How long one batch of blocks may take to a peer while a node is drained, and how many blocks travel at once: four of
# 1.4 MiB keep a 10 Gbit/s link busy for 5 ms, about as long as the two round trips around them.
DRAIN_BLOCK_TIMEOUT_MS = 5_000
DRAIN_BLOCKS_IN_FLIGHT = 4

# How often a drain says how far it is; counting 200,000 blocks takes it about 20 ms.
DRAIN_PROGRESS_MS = 500

assert NODE_BEAT_MS * 10 <= NODE_STALL_MS
assert PROMOTE_TIMEOUT_MS < STORE_CALL_TIMEOUT_MS
assert DISK_SETTLE_TIMEOUT_MS < ADMIN_CALL_TIMEOUT_MS

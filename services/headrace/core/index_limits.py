"""Bounds of the index, of its mirrors and members, and of the events that tell what nodes hold, each with its reason.

As `limits.py`.
"""

# Redis is local or near: a command slower than this is as good as a miss.
INDEX_TIMEOUT_MS = 250

# Index updates queued in one holder while Redis is away; beyond, the oldest go and the holder re-registers everything.
INDEX_QUEUE_BLOCKS_MAX = 65_536

# Blocks in one index command: keeps one Lua call under a millisecond.
INDEX_BATCH_BLOCKS = 512

# Times of one embedded Valkey server: it is up in about 50 ms; on a loaded two-core machine seconds have been seen.
EMBEDDED_VALKEY_START_TIMEOUT_MS = 10_000
EMBEDDED_VALKEY_STOP_TIMEOUT_MS = 2_000

# Memory of an embedded Valkey server. One entry costs about 200 bytes (key 60, hash of one holder 60, table slots), so
# this is 1.3 M blocks: at 64 tokens and 1.5 MB a block far more than the host tiers of a small cluster hold.
EMBEDDED_INDEX_BYTES_MAX = 256 * 1024 * 1024

# Connections of one process to each Redis server for the index, and for membership (kept apart, so that lookups cannot
# starve the heartbeat). A command holds one for about 0.3 ms: 256 requests in flight wait 10 ms at most. 100 processes
# x 10 are 1,000 clients, a tenth of Redis's default limit.
INDEX_CONNECTIONS_MAX = 8
MEMBERSHIP_CONNECTIONS_MAX = 2

# After a timeout or a lost connection nobody asks Redis for this long, then one caller tries. A slow Redis therefore
# costs one caller INDEX_TIMEOUT_MS in every INDEX_TIMEOUT_MS + INDEX_PAUSE_MS, and all others nothing.
INDEX_PAUSE_MS = 500

# Servers of a Redis Cluster that are asked in turn where keys lie. Each has a share of the call's time: 50 ms of 250 is
# enough to connect with TLS, and of four servers one answers unless the cluster is down.
INDEX_CLUSTER_ASKED_MAX = 4

# Times that one command of a cluster is sent on: a slot that has just moved (MOVED), is on its way again (ASK), and has
# arrived before the command did.
INDEX_REDIRECTIONS_MAX = 3

# Holders of one block that a lookup considers. Every one costs log2(8,192) = 13 probes of about 1 us in the worst case:
# 13 ms at the bound; a block that more holders have is hot everywhere and needs no further candidates.
INDEX_HOLDERS_MAX = 1_024

# Shards of the index, each in one Redis Cluster slot with one stream of events: the number of primaries over which an
# index can spread, and the number of streams that a mirror reads in one command.
INDEX_SHARDS = 8

# Events kept per shard for mirrors, and blocks in one event. At 64 x 16 bytes and 120 bytes around them an event has
# 1.1 KiB at most (2.1 with SHA-256), a stream 9 MiB and all eight 72: a quarter of an embedded server's memory, if
# every shard is written to in whole batches. Usual events have one to eight blocks: 2 MiB for a busy model's shard.
# A mirror that stands still is 8,192 events behind in 8 s at 1,000 changes a second; then it reads all entries again.
INDEX_EVENTS_MAX = 8_192
INDEX_EVENT_BLOCKS_MAX = 64

# Blocks that a gateway mirrors: 100 to 135 bytes each with up to sixty holders in the index, 230 to 260 with a
# thousand, so 260 MB at the bound. An index of more is asked in Redis as if there were no mirror, and read again after
# INDEX_MIRROR_RETRY_MS.
INDEX_MIRROR_BLOCKS_MAX = 1_000_000

# Reading all entries: keys in one SCAN, entries in one reply. About 2 ms of the event loop each, then others have their
# turn; 100,000 blocks of three holders are 400 pages and one second of a processor, beside the requests.
INDEX_MIRROR_PAGE_KEYS = 256
INDEX_MIRROR_PAGE_ENTRIES = 1_024

# Events taken from each shard in one reply: 8 x 32 x 2.2 KiB are 0.6 MiB at most.
INDEX_MIRROR_EVENTS = 32

# How long one reading waits for an event. It must end well within INDEX_TIMEOUT_MS, or quiet would pass for an outage.
INDEX_MIRROR_WAIT_MS = 100

# How often a cluster's streams are looked at when there are no events: they lie in several slots, and no one command
# waits for all of them. 50 looks a second at 8 streams are 400 commands of 2 us, 0.1 % of a server's time for each
# gateway; an event is 10 ms older than it would be on one server.
INDEX_MIRROR_POLL_MS = 20

# After events have come, others are let gather for this long: on a busy index a mirror is woken 200 times a second and
# not for every event. With 32 events of a shard in one reply it keeps up with 6,400 a second, and without the pause
# when there are more.
INDEX_MIRROR_GATHER_MS = 5

# How often a mirror looks who is alive (2 ms of Redis's time for 1,000 holders, so ten gateways take 4 % of it), and
# whether events were lost without a trace. Of a new holder or incarnation it asks at once.
INDEX_MIRROR_LIVENESS_MS = 500
INDEX_MIRROR_AUDIT_MS = 1_000

# A mirror that was level with Redis this lately answers by itself; after that Redis is asked first. When Redis does not
# answer, the mirror does for as long as a node's hints are mostly good: at a thousandth of its blocks replaced each
# second, 97 % of them still are after half a minute.
INDEX_MIRROR_FRESH_MS = 1_000
INDEX_MIRROR_KEEP_MS = 30_000

# Blocks of dead holders that are dropped in one step: 1 to 2 ms.
INDEX_MIRROR_DROP_BLOCKS = 4_096

# Times between two readings of all entries: after a loss, and when there were too many.
INDEX_MIRROR_REREAD_MS = 1_000
INDEX_MIRROR_RETRY_MS = 60_000

# How long a gateway that starts waits for its mirror before it takes calls: a million blocks are read in 10 s of a
# processor, and another gateway (or none, and then its callers wait) serves meanwhile.
INDEX_MIRROR_START_MS = 30_000

# Keys that one sweep call looks at: 8 pages of 512, each page four round trips of about 1 ms.
SWEEP_PAGE_KEYS = 512
SWEEP_PAGES_MAX = 8

# A liveness record is about 1 KB; more than this is junk and is not even read.
MEMBER_RECORD_BYTES_MAX = 16_384

# A timer that fires this much too late means that our own loop stood still, not that Redis did. Replies that came
# meanwhile are read within this time; a stalled loop may thus cost one more of it, never one per command.
INDEX_STALL_GRACE_MS = 50

# Ids of members that one announcement looks at, to forget those whose record has run out. Every live member looks at 8
# in each refresh, so ids of the dead are outrun however many restarts there are.
FORGET_MEMBERS_PER_ANNOUNCE = 8

# Junk in Redis is logged once in this time, however much of it there is: one line a minute is seen and fills no disk.
JUNK_LOG_INTERVAL_MS = 60_000

# Live holders in one deployment; more names than this under the members key are junk, of which a sample is read.
MEMBERS_MAX = 4_096

# Waits between tries at an index that is away: short enough to be back within a refresh, doubling from the first.
INDEX_RETRY_MS = 100
INDEX_RETRY_MS_MAX = 2_000

# How often a store node looks for index entries of dead holders, and how many of them a step removes. While steps find
# some they follow each other, with a rest this many times as long as a step. An entry takes the node 40 us and Redis 25
# (measured on two busy cores): a step is a quarter of a second, a million entries are gone in six minutes, and one node
# takes 8 % of Redis's time meanwhile. Eight nodes together are as much as it should have to do for this; of more, each
# rests longer.
INDEX_SWEEP_MS = 30_000
INDEX_SWEEP_ENTRIES = 4_096
INDEX_SWEEP_REST = 4
INDEX_SWEEPERS_MAX = 8

# How often a store node registers all that it holds again, for a Redis that evicts entries by itself and tells nobody:
# at most this often, and no more blocks a second than this. 200 a second are 0.4 commands of less than 1 ms, 0.04 % of
# Redis's time for each node; 10,000 blocks (14 GB) are right again within a minute, 100,000 within nine.
INDEX_REREGISTER_MS = 30_000
INDEX_REREGISTER_BLOCKS_PER_S = 200

# Tokens of the blocks in one batch of KV events, after which it is closed: at most 2,048 x 5 bytes of token ids and,
# with blocks of one token, 2,048 x 9 bytes of hashes: under 32 KiB, plus one block. 64-token blocks: 32 of them, 11 KB.
KV_EVENTS_BATCH_TOKENS = 2_048

# Batches of KV events kept for replay (vLLM's default too), and their bytes: a batch is one turn of the event loop, so
# this is ten seconds of a node that is written to without pause, minutes of others. What is older costs a snapshot.
KV_EVENTS_KEPT_BATCHES_MAX = 10_000
KV_EVENTS_KEPT_BYTES_MAX = 32 * 1024 * 1024

# The first sequence number of a run is its incarnation (milliseconds) times this: a run would have to send over a
# million batches a second for its numbers to reach the next run's. 1.8e12 x 1,024 stays under 2^53, which any reader
# can count with.
KV_EVENTS_SEQUENCE_STRIDE = 1_024

# Batches queued for one subscriber that does not read; beyond, it loses messages and replays. Usually 350 bytes each
# (0.7 MB), at the bound of a batch 64 MiB, until the heartbeat finds that it is gone.
KV_EVENTS_SUBSCRIBER_BATCHES_MAX = 2_048

# How often a silent subscriber is asked for a sign of life; after three times that it is cut off and its queue freed.
KV_EVENTS_HEARTBEAT_MS = 10_000

# A subscription is a topic and a replay request 8 bytes: who sends more is not a follower and is disconnected.
KV_EVENTS_REQUEST_BYTES_MAX = 1_024

# Replay requests that wait for their turn: every router asks after a restart of the node, and 64 are many routers. One
# that finds no room is not answered; its asker hears nothing and asks again.
KV_EVENTS_REQUESTS_MAX = 64

# Replies queued for one asker of a replay (64 x 32 KiB = 2 MiB); then it must read before more are sent.
KV_EVENTS_REPLAY_AHEAD_BATCHES = 64

# Bytes of one message that a follower of KV events takes: a batch is under 64 KiB, and other publishers' are a few MB.
KV_EVENTS_FOLLOWED_BATCH_BYTES_MAX = 16 * 1024 * 1024

# How often an asker whose queue is full is looked at: 64 batches each time are 6,400 a second, a full buffer in 2 s.
KV_EVENTS_REPLAY_POLL_MS = 10

# One replay: a snapshot of 100,000 blocks is 35 MB, a second of encoding; 10 s covers a slow asker, and the next in
# line waits no longer for one that hangs. Without its end marker a replay is incomplete and is asked for again.
KV_EVENTS_REPLAY_TIMEOUT_MS = 10_000

assert 2 * INDEX_MIRROR_WAIT_MS < INDEX_TIMEOUT_MS < INDEX_MIRROR_FRESH_MS

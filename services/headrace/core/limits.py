"""Bounds of the system, each with its reason and arithmetic. Some parts have files of their own beside this one:

    front_door_limits.py   what a stranger can make a gateway do
    index_limits.py        the index, its mirrors and members, and the events that tell what nodes hold
    store_limits.py        what a store node does by itself
    overtake_limits.py     loading a prefix against computing it
    draft_limits.py        speculative decoding
    telemetry_limits.py    what is told to the outside: spans and ports of metrics

Deployment-dependent sizes are in `config.py` instead.
"""

# A chain is sent whole in one lookup: 8,192 blocks x 32 bytes = 256 KiB, well under a gRPC message's bound.
CHAIN_BLOCKS_MAX = 8_192

# Smallest and largest block that hashing and transfer make sense for: 1 token is legal (slow), 1,024 is the largest
# block whose KV (2 x 80 layers x 8 heads x 128 x 2 B x 1,024 = 320 MiB) still fits a slot and a transfer deadline.
BLOCK_TOKENS_MIN = 1
BLOCK_TOKENS_MAX = 1_024

# A header is ~100 bytes of fields plus up to 5 bytes a token id: 1,024 x 5 + 512 < 8 KiB.
HEADER_BYTES_MAX = 8_192

# One message of a streamed payload: a block of the usual models (64 tokens x 23 KiB = 1.4 MiB) is one message, which
# the receiver uses where it lies; 69 MB measured 62 ms at 2 MiB (4 MiB HTTP/2 frames), 77 ms at 512 KiB.
# A stream has one message in flight on the sender's side and a window of about one at the receiver.
FETCH_CHUNK_BYTES = 2 * 1024 * 1024

# Freed memory that a process with payload streams keeps for the next messages: some eight buffers of FETCH_CHUNK_BYTES
# for each of a dozen streams at once. Allocations above the second figure still go back to the kernel when they are
# freed (the most that the C library allows): it is above any message.
FREED_MEMORY_KEPT_BYTES = 192 * 1024 * 1024
HEAP_ALLOCATION_BYTES_MAX = 32 * 1024 * 1024

# The largest gRPC message in either direction: a lease reply for 8,192 blocks of 64 tokens is
# 8,192 x (8,192 header bound) worst case, in practice 8,192 x 450 B = 3.7 MB; 16 MiB leaves room.
GRPC_MESSAGE_BYTES_MAX = 16 * 1024 * 1024

# Blocks in one lease: bounds the reply and what one reader can keep from eviction (64-token blocks: 131,072 tokens).
LEASE_BLOCKS_MAX = 2_048

# Blocks in one reserve call: a writer publishes as blocks complete, so a batch is a prefill chunk, not a prompt.
RESERVE_BLOCKS_MAX = 256

# A request body: 4 MiB of JSON is about 1 M tokens of English; beyond that it is refused before parsing.
REQUEST_BODY_BYTES_MAX = 4 * 1024 * 1024

# What is read and thrown away of a body that is too large, so that a client which is still sending sees the 413 instead
# of a reset connection. Beyond it the connection is closed.
REQUEST_DRAIN_BYTES_MAX = 64 * 1024 * 1024

# Characters of one prompt before tokenising: a tokenizer takes about 1 s per MB, so this bounds it to a few seconds.
PROMPT_CHARS_MAX = 4 * 1024 * 1024

# A request id echoed from a client header is cut here; it is a label, never an identity.
CLIENT_REQUEST_ID_CHARS_MAX = 128

# Choices per request; each is a decode attempt of its own.
CHOICES_MAX = 8

# Events buffered between one choice of a request with several and the client; a full buffer holds that choice's worker
# stream back, as a slow reader of a single choice does by itself.
CHOICE_EVENTS_MAX = 64

# Output tokens when the caller names no maximum (OpenAI's completions API: 16). A chat answer is rarely longer, and a
# worker sets blocks aside for all of it: 1,024 tokens are 16 blocks of 64.
COMPLETION_TOKENS_DEFAULT = 16
OUTPUT_TOKENS_DEFAULT = 1_024

# Characters of a cache salt; it is only hashed.
CACHE_SALT_CHARS_MAX = 256

# Stop strings: each delta is scanned for all of them.
STOP_STRINGS_MAX = 16
STOP_STRING_CHARS_MAX = 256

# Alternatives reported per token; OpenAI's bound.
LOGPROBS_MAX = 20

# A reader copies at >= 0.5 GB/s: 2,048 blocks x 1.5 MB = 3 GB take 6 s; 30 s covers a stalled scheduler.
LEASE_TTL_MS = 30_000

# A writer fills one slot in milliseconds; 10 s covers a paused process without keeping the slot for long.
RESERVATION_TTL_MS = 10_000

# How long one call waits at a store node for a block that is being computed, and how many calls may: each is some 10 KB
# and a timer. A worker that waits for a whole prompt asks again after each block that came. Half of the node's calls:
# were all of them readers that wait, nobody could store what they wait for.
LEASE_WAIT_MS_MAX = 10_000
LEASE_WAITERS_MAX = 256

# How often a store node looks for expired leases and reservations.
EXPIRY_SCAN_MS = 500

# Liveness records: refreshed three times per TTL, so that two lost refreshes are survived.
MEMBER_TTL_MS = 6_000
MEMBER_REFRESH_MS = 2_000

# One control call (lease, reserve, commit, release) to a store node; the work is in memory.
STORE_CALL_TIMEOUT_MS = 2_000

# A whole load of a prefix may take at most this long before the rest is recomputed.
LOAD_PREFIX_TIMEOUT_MS = 20_000

# How often a load looks for a shorter prefix whose window is whole, when blocks vanish or are broken on the way. Each
# time costs at most one window's transfer; a third failure in a row says that somebody is emptying the store.
LOAD_WINDOW_ATTEMPTS = 3

# Blocks without bytes that a pool remembers for those that stand on them, for each block that it has room for: a
# sequence of 64 windows whose last one is kept needs as many. 1,000 blocks of 64 tokens x 64 x 0.8 kB = 51 MB.
POOL_NAMES_PER_BLOCK_MAX = 64

# How long a step waits for blocks of a preempted sequence that are stored before they are given up, until another one
# gives way: storing a batch of 8 blocks of 1.5 MB takes 10 ms, and a store node that is away never answers.
SAVE_PATIENCE_MS = 50

# Payload bytes that one load has received and not yet copied into the pool: enough to keep receiving while a copy runs
# (32 MiB is 20 ms of copying at 1.5 GB/s), small enough that 16 loads at once stay at 512 MiB.
LOAD_AHEAD_BYTES_MAX = 32 * 1024 * 1024

# What one of several remote nodes is given to deliver at once: 12 ms at 1.4 GB/s, ten times what leasing it takes, and
# all that a load loses of each node when time ends. At least one block.
LOAD_PIECE_BYTES = 16 * 1024 * 1024

# A node that delivers nothing for so long, or needs longer than that for LOAD_PIECE_BYTES (16 MB/s), loses its piece to
# another one that waits for work: a stalled process comes back within it, and computing the piece takes about as long.
LOAD_STALL_MS = 1_000

# How often a node that waits for work looks at those that are busy.
LOAD_WATCH_MS = 100

# Remote store nodes that one load asks, best hint first: each costs a round trip, and a third copy is rarely longer.
LOAD_NODES_MAX = 3

# How long a reader waits for the answer to a release. The lease ends by itself, so this only frees slots earlier; it
# must stay well under the second within which a cancelled request stops.
RELEASE_TIMEOUT_MS = 500

# Blocks that one worker has computed and not yet published. Each keeps a pool block from reuse, so this is a quarter of
# the default pool (32,768 / 64 = 512 blocks); beyond it publishing is skipped, since decoding must not wait.
PUBLISH_QUEUE_BLOCKS = 128

# Blocks published by one reserve call: bounds the buffers of a sink that sends them (8 x 1.5 MB) and how long a
# reservation waits for its turn to be filled.
PUBLISH_BATCH_BLOCKS = 8

# A store node that failed is not asked again for this long: one failed call per second costs nobody, while a node that
# restarts is back in use soon after it is.
NODE_QUARANTINE_MS = 1_000

# How long a stopping worker lets running calls finish before it ends them; the gateway then tries them elsewhere.
DRAIN_TIMEOUT_MS = 5_000

# Attempt ids that a worker remembers, to refuse a call that arrives twice. A duplicate comes within a call's deadline;
# 4,096 attempts are minutes of work for one worker.
ATTEMPTS_REMEMBERED = 4_096

# Claims at one store node of which a worker does not know if they still stand: four for each request that a gateway
# has in flight, at 40 characters each one call of 40 KB. More are left to their own expiry.
LOST_CLAIMS_MAX = 1_024

# How often a worker tells a store node which lost claims to end: blocks are kept from eviction that much longer, and a
# node that is away is asked twice a second.
LOST_CLAIMS_RETRY_MS = 500

# Names and ids of claims that a store node remembers: about 100 bytes each, 7 MB. A thousand leases a second are 2,000
# of them, so a name is known for LEASE_TTL_MS, after which nothing of it is left to end.
CLAIM_NAMES_MAX = 65_536

# Characters of a claim's name: ours have less than 40.
CLAIM_NAME_CHARS_MAX = 64

# How patient a decode worker is with a prefill of which no further block comes: twice what the prefill worker says that
# the whole takes, at least what a stalled process or a step of a full batch takes, at most what one waiting call may.
HAND_OFF_PATIENCE_FACTOR = 2.0
HAND_OFF_PATIENCE_MS_MIN = 2_000
HAND_OFF_PATIENCE_MS_MAX = LEASE_WAIT_MS_MAX

# Share of a pool that may wait for the first block of prefills elsewhere. The other half is for prompts that are
# computed here, so that two workers which prefill for each other do not wait for each other.
HAND_OFF_POOL_SHARE = 0.5

# How long a prefill may go on after the first token came without it: its answer, which settles what was cached, is
# usually on its way by then. Also the longest that the end of a stream waits for that answer.
HAND_OFF_GRACE_MS = 1_000

# A prefill attempt: 8,192 tokens at 200 tok/s on a slow shared core.
PREFILL_TIMEOUT_MS = 60_000

# A request's deadline when the client names none, and the longest it may name.
REQUEST_TIMEOUT_MS_DEFAULT = 300_000
REQUEST_TIMEOUT_MS_MAX = 3_600_000

# What a client's transport waits beyond the request's deadline, so that the server's typed answer at the deadline (one
# network round trip and a scheduler stall away) arrives before the transport gives up without a reason.
CLIENT_DEADLINE_GRACE_MS = 5_000

# What a client waits for an admin call. The gateway gives each holder ADMIN_CALL_TIMEOUT_MS, an eviction asks all of
# them twice (evict, then list for the price), and a holder that hangs must still be told by name: 2 x 10 s and a third
# for rendering.
ADMIN_CLIENT_TIMEOUT_MS = 30_000

# What a client waits for the end of a node's drain: 256 GB at 1 Gbit/s take 34 minutes.
DRAIN_CLIENT_TIMEOUT_MS = 3_600_000

# Requests in flight per gateway replica, all stages together, and the tokens of their prompts (36 bytes each: 72 MB);
# beyond: 503 with Retry-After, or 429 for a tenant that has its share.
GATEWAY_INFLIGHT_MAX = 256
GATEWAY_PROMPT_TOKENS_MAX = 2_000_000

# Sequences waiting for blocks in one worker, and the tokens of their prompts together (36 bytes each: 36 MB); beyond:
# Overloaded, and the gateway tries another worker.
WORKER_WAITING_MAX = 64
WORKER_WAITING_TOKENS_MAX = 1_000_000

# Accounts that are ahead in what they had and do not wait, which a worker remembers: as many as there may be API keys,
# and about 200 bytes each.
FAIR_ACCOUNTS_MAX = 1_024

# Priorities lie in -4..4. Each counts as the next higher one after 30 s unserved (core/queue_order.py), so the lowest
# is not passed any more after 8 x 30 = 240 s: within the 300 s that a request has by default.
PRIORITY_MAX = 4

# The longest that an overloaded server tells its callers to wait: a longer prediction is no better than this one.
RETRY_AFTER_MS_MAX = 60_000

# A worker accepts a call as soon as its event loop turns, long before the first token. 10 s covers a loop that shares
# two busy cores with model loading; a worker that needs longer is stopped, gone or cut off, and another one is tried.
WORKER_ACCEPT_TIMEOUT_MS = 10_000

# Evicting from a worker's pool waits for the engine's current step (a prefill chunk: a second on a slow core).
WORKER_EVICT_TIMEOUT_MS = 5_000

# What a worker whose queue is full tells callers to wait: the queue moves when one of its sequences ends, which at some
# ten tokens a second and a hundred tokens a reply is a matter of seconds.
WORKER_RETRY_AFTER_MS = 2_000

# One engine step takes a prefill chunk's time: a second on a slow core, several on an overloaded host. A step that
# has not ended for this long hangs; a worker that is only busy ends one all the time.
ENGINE_STALL_MS = 30_000

# Steps that fail in a row until an engine counts as broken: a device that has gone fails all of them, in milliseconds
# each, while one sequence that cannot be computed is ended by its first.
FAILED_STEPS_MAX = 8

# How long stopping waits for the step under way. Less than ENGINE_STALL_MS, since whoever stops a worker has decided.
ENGINE_STOP_TIMEOUT_MS = 15_000

# Events buffered between the engine thread and one stream's consumer. A consumer that is this far behind (4,096 tokens
# are minutes of decoding) is not reading: its stream is ended.
STREAM_EVENTS_MAX = 4_096

# How often a gateway re-reads who is alive: half the refresh period of the records, so that load figures are at most
# 3 s old (2 s since the worker wrote them, 1 s since we read them).
WORKER_TABLE_REFRESH_MS = 1_000

# The pause before it is read out of turn, for requests that name a worker or a model which is not known: such requests,
# however many, cost ten readings a second.
WORKER_TABLE_PAUSE_MS = 100

# A worker that failed a call is not chosen for this long: after it, either its record has expired or it lives.
WORKER_SUSPECT_MS = 6_000

# How long a gateway keeps the workers it knows while the membership service lists nobody at all (a Redis that came back
# empty): workers announce themselves again within one refresh period, two for a lost call.
WORKER_TABLE_KEEP_MS = 6_000

# Threads that tokenise: two keep both cores of a small host busy; prompts beyond wait, as many as may be in flight.
TOKENIZER_THREADS = 2

# What an overloaded gateway tells its callers to wait: about one short request.
RETRY_AFTER_MS = 1_000

# One admin call over all holders: each holder has this long; one that does not answer is reported, not waited for.
ADMIN_CALL_TIMEOUT_MS = 10_000

# Blocks in one listing; 10,000 entries of about 500 bytes stay under a gRPC message's bound.
LIST_BLOCKS_MAX = 10_000

# Block hashes named in one report of an eviction: 10,000 of 32 bytes are 320 KB, as many blocks as a listing has.
EVICT_HASHES_MAX = 10_000

# Removals that a store node remembers, to say why a prompt missed: about 200 bytes each (hash, time, reason), 3 MB. At
# a hundred evictions a second they reach back three minutes, at one a minute more than a week.
REMOVALS_REMEMBERED = 16_384

# Requests whose prompts a gateway keeps, to explain their misses by id, and the tokens of all of them together: a token
# id takes about 36 bytes, so 1 M tokens are 36 MB.
RECENT_PROMPTS_MAX = 256
RECENT_PROMPT_TOKENS_MAX = 1_000_000

# Decisions that a gateway remembers for explanations, and plans beside the chosen one in each: 1,024 of about 5 KB.
RECENT_DECISIONS_MAX = 1_024
DECISION_PLANS_MAX = 12

# Placements that are believed before the index knows of them, at the same time: each lasts about as long as its prompt
# takes to compute, and a gateway has at most 256 requests under way.
PREDICTED_CHAINS_MAX = 1_024

# Holders that a gateway remembers after they are gone: a few restarts of every holder of a small cluster.
HOLDERS_REMEMBERED = 256

# Clocks of nodes and gateway may differ by this much before `doctor` says so: ages and times to live are shown in
# seconds, and NTP keeps hosts within some ten milliseconds.
CLOCK_SKEW_MS_MAX = 2_000

# Chains that nodes hold, and as many of recent requests, which `doctor` compares with the index: each costs a lookup of
# 1 to 5 ms, so that the whole takes under 3 s.
DOCTOR_CHAINS_MAX = 256

# How long `doctor` waits before it looks again where index and node differ: registration is a few milliseconds behind,
# and after an outage of the index as long as one retry.
DOCTOR_RECHECK_MS = 1_000

# Chains about which one node is asked itself, at 1 to 5 ms each: more differences do not change what is to be done.
DOCTOR_DIFFERENCES_MAX = 64

# How often a health watcher is told of a change, at the latest.
HEALTH_WATCH_MS = 500

# Further tries at another worker after WorkerUnavailable, before the first token was sent.
ATTEMPTS_MAX = 3

# Store nodes whose speed a worker announces, those that it read from last: a load asks three, and 64 entries of 150
# bytes at most are well below what a record may have.
WORKER_LINKS_MAX = 64

# Leases a store node keeps at once: 4,096 readers that never came back hold 4,096 x 2,048 references (64 MB) at worst,
# for one LEASE_TTL_MS. Beyond it a lookup is a miss.
STORE_LEASES_MAX = 4_096

# Blocks of one lease that a reader may report as broken: each costs the node one pass over its bytes, on its event loop
# (16 x 1.4 MiB take 2 ms). A reader stops at its first doubt, so it names one.
SUSPECTS_MAX = 16

# Calls in progress in one store node, streams and waiting ones included; beyond it gRPC refuses at once and the caller
# recomputes. A stream holds one message of FETCH_CHUNK_BYTES: 256 slow readers that wait for nothing hold 512 MB.
STORE_RPCS_MAX = 512

# Share of an arena for one chain: a longer prompt would flush all others for blocks that its own tail pushes out again.
CHAIN_SHARE_MAX = 0.75

# Namespaces whose lookups a store node counts apart; beyond it the oldest count is folded into nothing and forgotten.
STORE_NAMESPACES_MAX = 1_024

# Time that calls in progress get to finish when a store node is stopped.
STOP_GRACE_MS = 2_000

# Length of an API key. Ours have 46 characters (256 random bits); 20 drawn at random from 64 signs are still 120 bits,
# which nobody guesses, and the upper bound keeps the hashing of what strangers send to a few microseconds.
API_KEY_CHARS_MIN = 20
API_KEY_CHARS_MAX = 512

# Keys in a tenants file. Every call is compared with all of them, at about 1 us each: 1 ms at the bound.
API_KEYS_MAX = 1_024

# A tenants file of API_KEYS_MAX keys at 101 characters, each with a tenant around it, takes about 200 KB.
TENANTS_FILE_BYTES_MAX = 1024 * 1024

# Names of evicted blocks that a policy remembers for each block held, to know one that comes back. 100 bytes a name,
# against 64 KiB and more for a block: under 1 %. On the public conversation trace 2 to 8 measure alike.
EVICTION_GHOSTS_PER_BLOCK = 4

# Names in one directory of the adaptive policy. Its four directories cost about 1.5 KB a name, so 384 MB at the bound,
# which an arena reaches at 94 GB (360 KiB blocks). Beyond it a directory stands for the best part of the arena only.
EVICTION_DIRECTORY_NAMES_MAX = 262_144

# Accounts with a budget on one node: each is an eviction order of its own. As many as API keys.
BUDGETS_MAX = 1_024

# How often a gateway looks whether all nodes have the same budgets when nothing is known to have changed: ten gateways
# ask each node once a second, and a quota that a hung node missed is there this long after it answers again.
CARRY_BUDGETS_MS = 10_000

# Namespaces of one account, one for each model that was ever served: with BUDGETS_MAX accounts a table of 34 bytes each
# is 4.5 MB, which still goes in one message.
BUDGET_NAMESPACES_MAX = 128

# Share of an arena that all protected minima together may take, and with what is pinned (unless pins alone may take
# more): the rest must be able to turn over, or everybody without a minimum is refused.
PROTECTED_SHARE_MAX = 0.8

# Characters of an affinity key; OpenAI's prompt_cache_key has at most 64.
AFFINITY_KEY_CHARS_MAX = 256

# Shortest time to live: the scan for what is over runs each second, and a request must end before its blocks do.
TTL_S_MIN = 10

# How soon a worker looks again for blocks of its pool whose time is over: each look passes over all that it keeps,
# 70,000 blocks in about 10 ms, and nobody is promised less than a second.
DEVICE_EXPIRY_SCAN_MS = 1_000

# Orders that a worker keeps about prefixes which go at a moment, and of one namespace: a tenant may order for its own
# blocks and must leave room for others. With the tokens of their prefixes (36 bytes each) they are 36 MB at the bound.
# What it only heard of from store nodes has as much room of its own (250 bytes each); of that the oldest goes.
DEVICE_ORDERS_MAX = 1_024
DEVICE_ORDERS_PER_NAMESPACE_MAX = 64
DEVICE_ORDER_TOKENS_MAX = 1_000_000

# Longest time to live, 366 days: longer is "until room is needed", which is the default.
TTL_S_MAX = 366 * 86_400

assert MEMBER_REFRESH_MS * 3 <= MEMBER_TTL_MS
assert STORE_CALL_TIMEOUT_MS < RESERVATION_TTL_MS < LEASE_TTL_MS
assert LOAD_PREFIX_TIMEOUT_MS < LEASE_TTL_MS
assert WORKER_SUSPECT_MS >= MEMBER_TTL_MS
assert WORKER_TABLE_KEEP_MS >= 2 * MEMBER_REFRESH_MS
assert LEASE_BLOCKS_MAX <= CHAIN_BLOCKS_MAX
assert 2 * LEASE_WAITERS_MAX <= STORE_RPCS_MAX
assert FETCH_CHUNK_BYTES * 4 <= GRPC_MESSAGE_BYTES_MAX
assert LOAD_AHEAD_BYTES_MAX >= 4 * FETCH_CHUNK_BYTES
assert LOAD_AHEAD_BYTES_MAX >= 2 * LOAD_PIECE_BYTES
assert LOAD_WATCH_MS < LOAD_STALL_MS < STORE_CALL_TIMEOUT_MS < LOAD_PREFIX_TIMEOUT_MS
assert RELEASE_TIMEOUT_MS < 1_000
assert PUBLISH_BATCH_BLOCKS <= RESERVE_BLOCKS_MAX
assert 2 * ADMIN_CALL_TIMEOUT_MS < ADMIN_CLIENT_TIMEOUT_MS

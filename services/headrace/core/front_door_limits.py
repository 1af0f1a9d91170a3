"""Bounds of what a stranger can make a gateway do, with their reasons: rates, connections, calls, audit lines, and what
parsing, hashing and writing may cost it. Those of a request's size and of what it may ask for are in `limits.py`."""

from headrace.core.limits import API_KEYS_MAX

# Tenants whose rates a gateway keeps, at some 300 bytes each: as many as there may be keys, and as many again of
# tenants that have left the file while their minute was not over.
RATE_ACCOUNTS_MAX = 2 * API_KEYS_MAX

# The highest rate that a tenants file may name: more is a mistake, and a level of it is still exact in a double.
RATE_PER_MINUTE_MAX = 1_000_000_000

# Request line and headers of one HTTP request. Browsers and proxies send 8 KiB at most; a key has API_KEY_CHARS_MAX.
HTTP_HEAD_BYTES_MAX = 32 * 1024

# From the first byte (or the connection, if none comes) to the end of the headers: they fit in a few packets.
HTTP_HEAD_TIMEOUT_MS = 10_000

# From the headers to the end of the body: REQUEST_BODY_BYTES_MAX at 0.6 Mbit/s, and a refused one is drained meanwhile.
HTTP_BODY_TIMEOUT_MS = 60_000

# From the head of a gRPC call to the end of its one message, which clients send at once: GRPC_MESSAGE_BYTES_MAX at 5
# Mbit/s. Until then a call takes one of the places that a server has. Reflection, the one call of many messages, has as
# long in all: a tool asks a dozen short questions, and asks anew by another call.
GRPC_MESSAGE_TIMEOUT_MS = 30_000

# Calls of one proxy that wait for their message at once; beyond it the one that has waited longest is ended, and may be
# tried again. A message comes with its call: an honest one waits for a round trip, and 4,096 of them in 50 ms are more
# than a proxy serves. 80 MB at 20 kB each.
GRPC_SILENT_CALLS_MAX = 4_096

# Calls of one connection at once; a client of gRPC keeps the next one back until one of them has ended. A thousand
# callers behind one proxy have room.
GRPC_CALLS_OF_CONNECTION_MAX = 1_024

# Connections to one gRPC port, as many as by HTTP; more are closed before a handshake.
GRPC_CONNECTIONS_MAX = 2_048

# One on which no call was made for so long is closed, so that who opens many and does nothing does not keep them. Its
# client opens another one for its next call and notices nothing.
GRPC_CONNECTION_IDLE_MS = 600_000

# And one of that age takes no new calls, is left the longest request's time for those it has, and is closed. gRPC lets
# no server end a call whose client takes nothing, not even its status: that call lasts as long as its connection.
GRPC_CONNECTION_AGE_MS = 3_600_000

# A client that takes nothing for so long while something waits for it is gone or means harm: its connection is closed
# and its work ends. 60 s are more than any network needs to come back without losing its connections.
UNREAD_TIMEOUT_MS = 60_000

# Connections to one proxy: a thousand callers with some to spare. Each may hold its head, 64 KiB of a body in the
# transport and as much of an answer: 160 KiB each, 320 MiB in all.
HTTP_CONNECTIONS_MAX = 2_048

# Requests that wait on one connection for the answer to the one before: clients send the next after the answer, and a
# proxy's few. One packet of 256 KiB holds 14,000 of the smallest, and each costs 3 KB once it is parsed.
HTTP_REQUESTS_AHEAD_MAX = 16

# Bytes of bodies that one proxy keeps, so as to ask another gateway when one dies: 64 of the largest. A request beyond
# it is passed on as it comes and asked once.
HTTP_KEPT_BYTES_MAX = 256 * 1024 * 1024

# How long what a refused client still sends is read and thrown away, so that it sees the answer.
HTTP_LINGER_MS = 1_000

# Callers who watch one gateway's health at once: they show no key, their calls never end, and each takes one of the
# calls that a gateway has at once (twice GATEWAY_INFLIGHT_MAX). A load balancer or two with several addresses each.
HEALTH_WATCHES_MAX = 32

# How often calls that were refused for their key leave an audit line: a line of 200 to 800 bytes each second at most.
AUDIT_REFUSALS_MS = 1_000

# Addresses named in one such line; more of them are one attack and are counted.
AUDIT_PEERS_MAX = 16

# What a line keeps of a list and of a text that a caller names: one call may carry half a million hashes, 16 MB of log.
AUDIT_VALUES_MAX = 16
AUDIT_CHARS_MAX = 200

# How long calls may go on by a channel whose certificate was replaced: as long as the longest call of all.
OLD_CHANNEL_GRACE_S = 3_600.0

# A body up to so many bytes is parsed on the event loop, which takes 1 ms; a larger one in a thread.
PARSED_ON_LOOP_BYTES_MAX = 64 * 1024

# Threads of a gateway that parse large bodies and write answers with log-probabilities, all together. Each takes the
# interpreter from the event loop for a switch interval at a time, so that several keep the loop waiting longer than if
# it did the work itself: 8 bodies of 4 MB at once held it for 0.59 s in as many threads, for 0.09 s on the loop, and
# for 0.05 s in one thread.
BODY_THREADS = 1

# Log-probabilities of one answer that is sent whole, all choices together: 100,000 are 7 MB of JSON, which a thread
# writes in 0.8 s. A stream has no such bound, since each token's are written as it comes.
LOGPROBS_OF_REPLY_MAX = 100_000

# Characters of a chat message's `name`; OpenAI's bound.
SPEAKER_CHARS_MAX = 64

# What an error repeats of the name of a field that is not known here: twice the longest that is known, so that a
# mistyped one is recognised. A name may be as long as its body.
FIELD_NAME_CHARS_MAX = 64

# Prompts up to so many tokens are hashed on the event loop, which takes 1 ms; a longer one in a tokenizer's thread.
HASHED_ON_LOOP_TOKENS_MAX = 16_384

# Blocks whose texts one job of a tokenizer's thread decodes: a listing has LIST_BLOCKS_MAX, 20 times as many, and
# prompts that come meanwhile wait for one job and not for the whole listing.
DECODED_BLOCKS_OF_JOB_MAX = 500

# How long a gateway that starts waits for the tokenizers of models that are served already: the first one imports for
# 3 s on a quiet machine. One that takes calls sooner keeps its first callers waiting for as long, while others, or the
# gateway that it replaces, could serve them.
TOKENIZERS_START_MS = 30_000

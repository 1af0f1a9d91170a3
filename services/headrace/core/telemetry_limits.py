"""Bounds of what is told to the outside: spans on their way to a collector, and ports that metrics are read from."""

# Spans that wait for the collector in one process. A request makes about 20 (a prompt of 32k tokens that is published
# block by block a few hundred), a span takes about 2 kB: 4 MB at most. What finds no room is dropped, oldest first.
TRACE_QUEUE_SPANS = 2_048
# Spans of one message to the collector: about 250 kB as protobuf, far below gRPC's 4 MiB.
TRACE_BATCH_SPANS = 512
# Spans leave at least this often: a person who looks for a request just made waits no longer.
TRACE_EXPORT_EVERY_MS = 1_000
# A collector that has not taken a message by then is away; its spans are dropped, and the next message tries again.
TRACE_EXPORT_TIMEOUT_MS = 5_000
# What a process that stops may wait for its last spans to leave. Shorter than any grace period of a stop.
TRACE_FLUSH_MS = 2_000
# With metrics_port P, the parts of one host use P..P + 31: a store node, and a gateway and workers for each of 8 GPUs
# three times over. A part that finds all of them taken does not start.
METRICS_PORTS = 32
# Connections to one process's metrics at once: two Prometheus servers and a person or two, each for one scrape. A
# thread of 8 MB of addresses and some 100 kB of memory each.
METRICS_CONNECTIONS_MAX = 16
# One scrape from its connection to its end: Prometheus' own time limit is 10 s.
METRICS_SCRAPE_MS = 10_000
# How long a gateway tells of members that are gone: long enough for whoever is called for them, short enough that
# workers which an autoscaler has ended do not fill the answer.
GONE_REMEMBERED_MS = 900_000

assert TRACE_BATCH_SPANS <= TRACE_QUEUE_SPANS

"""Every metric of Headrace, declared once.

Rules: one prefix, base units, `_total` on counters, label values from a bounded set that is known here (a caller's
text, a request id or a token never becomes a label), rates and ratios left to PromQL. Each process (and each part under
test) makes its own `Metrics` with its own registry: nothing is registered globally, so two instances in one process
never collide. What to count and when is decided in `metered_ports.py` and `collectors.py`; domain code has no metrics.
"""

from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.process_collector import ProcessCollector

from headrace.core.block import CacheSource, Tier
from headrace.core.decision import PlanReason
from headrace.core.errors import (
    BlockCorrupt,
    BlockMissing,
    CacheFault,
    IndexUnavailable,
    LeaseExpired,
    StoreFull,
    StoreUnavailable,
)
from headrace.telemetry.refused_calls import REFUSED_CALLS

# First tokens take from a few milliseconds (warm) to minutes (a cold long prompt on CPU).
TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
# Further tokens: one decode step, from about 5 ms (GPU) to seconds (a full batch on CPU, or behind a prefill chunk).
ITL_BUCKETS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
# Index calls are bounded by INDEX_TIMEOUT_MS (250 ms); a local server answers in well under a millisecond.
INDEX_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)


# Of workers, nodes and gateways; Serve's proxies say the same of theirs among Ray's metrics, behind `ray_`.
CERTIFICATE_ENDS = "headrace_tls_certificate_expiry_timestamp_seconds"


class TransferDirection(StrEnum):
    """Which way KV bytes went, seen from the worker."""

    LOAD = "load"  # from a store node into the worker's pool
    PUBLISH = "publish"  # from the worker's pool into a store node


class EvictionReason(StrEnum):
    """Why a block left its tier before anybody asked for something else to be there."""

    CAPACITY = "capacity"  # room was needed
    QUOTA = "quota"  # its tenant has more than its quota
    ADMIN = "admin"  # somebody asked for it
    TTL = "ttl"  # its time to live was over


class Outcome(StrEnum):
    """How a stream of tokens ended."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


FAULT_KINDS: dict[type[CacheFault], str] = {
    BlockMissing: "block_missing",
    BlockCorrupt: "block_corrupt",
    StoreUnavailable: "store_unavailable",
    StoreFull: "store_full",
    LeaseExpired: "lease_expired",
    IndexUnavailable: "index_unavailable",
}
RECOVERY_KINDS = ("index_unavailable", "prefill_failed", "new_attempt")
REQUEST_OUTCOMES = ("finished", "failed", "cancelled", "refused", "invalid")
REFUSAL_REASONS = ("requests_per_minute", "tokens_per_minute", "concurrent_max", "share", "full")
INDEX_CALLS = ("longest_prefix", "register", "deregister", "sweep")


class Metrics:
    """The metrics of one process and the registry they live in. Series with fixed labels exist from the start, at 0."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=self.registry)
        self._declare_cache()
        self._declare_requests()
        self._declare_index()

    def _declare_cache(self) -> None:
        self.prefix_cache_queries = Counter(
            "headrace_prefix_cache_queries",
            "Prompt tokens of finished requests that were allowed to read the cache.",
            registry=self.registry,
        )
        self.prefix_cache_hits = Counter(
            "headrace_prefix_cache_hits",
            "Of those, tokens whose KV was not computed for the request.",
            registry=self.registry,
        )
        self.cached_tokens = Counter(
            "headrace_cached_tokens",
            "Cached tokens of finished requests, by the way they reached the decode worker; sums to the hits.",
            ["source"],
            registry=self.registry,
        )
        self.kv_transfer_bytes = Counter(
            "headrace_kv_transfer_bytes",
            "KV payload bytes moved between workers and store nodes.",
            ["direction", "tier", "via"],
            registry=self.registry,
        )
        self.evicted_blocks = Counter(
            "headrace_evicted_blocks", "Blocks evicted.", ["reason", "tier"], registry=self.registry
        )
        self.tls_connections = Counter(
            "headrace_tls_connections",
            "Connections begun on a store node's port under TLS; those that it then refused are among them.",
            registry=self.registry,
        )
        self.verify_failures = Counter(
            "headrace_verify_failures",
            "Blocks refused on use, each a miss and a recompute.",
            ["kind"],
            registry=self.registry,
        )
        self.cache_faults = Counter(
            "headrace_cache_faults",
            "Faults of the cache that a request survived by computing.",
            ["kind"],
            registry=self.registry,
        )
        for source in CacheSource:
            self.cached_tokens.labels(source)
        for direction in TransferDirection:
            for via in (CacheSource.SHARED_MEMORY, CacheSource.GRPC):
                self.kv_transfer_bytes.labels(direction, Tier.HOST, via)
            self.kv_transfer_bytes.labels(direction, Tier.DISK, "file")
        for reason in EvictionReason:
            for tier in Tier:
                self.evicted_blocks.labels(reason, tier)
        for kind in FAULT_KINDS.values():
            self.cache_faults.labels(kind)
        for kind in ("header", "checksum"):
            self.verify_failures.labels(kind)

    def _declare_requests(self) -> None:
        self.time_to_first_token_seconds = Histogram(
            "headrace_time_to_first_token_seconds",
            "Request accepted to first token sent.",
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.inter_token_latency_seconds = Histogram(
            "headrace_inter_token_latency_seconds",
            "Gap between consecutive tokens of one stream.",
            buckets=ITL_BUCKETS_S,
            registry=self.registry,
        )
        self.requests = Counter(
            "headrace_requests", "Generation streams that ended, by outcome.", ["outcome"], registry=self.registry
        )
        self.client_requests = Counter(
            "headrace_client_requests",
            "Requests of clients that are over, by outcome.",
            ["outcome"],
            registry=self.registry,
        )
        self.refused_requests = Counter(
            "headrace_refused_requests",
            "Requests of clients that were refused for want of room, by tenant and by what was used up.",
            ["tenant", "reason"],  # tenants are those of the operator's file: as many as it names
            registry=self.registry,
        )
        self.refused_calls = Counter(
            "headrace_refused_calls",
            "Calls of a gateway's APIs, or of a store node's, that ended with an error before anything was passed on.",
            ["reason"],
            registry=self.registry,
        )
        for refused in REFUSED_CALLS:
            self.refused_calls.labels(refused)
        self.good_requests = Counter(
            "headrace_good_requests",
            "Of those, the finished ones within ttft_slo_ms and itl_slo_ms.",
            registry=self.registry,
        )
        self.router_decisions = Counter(
            "headrace_router_decisions",
            "Worker choices, by the reason that decided them.",
            ["reason"],
            registry=self.registry,
        )
        self.recoveries = Counter(
            "headrace_recoveries",
            "Faults that became a slower answer instead of a failed request.",
            ["kind"],
            registry=self.registry,
        )
        for reason in PlanReason:
            self.router_decisions.labels(reason)
        for kind in RECOVERY_KINDS:
            self.recoveries.labels(kind)
        for outcome in Outcome:
            self.requests.labels(outcome)
        for ended in REQUEST_OUTCOMES:
            self.client_requests.labels(ended)

    def _declare_index(self) -> None:
        self.index_call_seconds = Histogram(
            "headrace_index_call_seconds",
            "Time of one index call.",
            ["call"],
            buckets=INDEX_BUCKETS_S,
            registry=self.registry,
        )
        self.index_failures = Counter(
            "headrace_index_failures",
            "Index calls that were not answered in time or at all.",
            ["call"],
            registry=self.registry,
        )
        for call in INDEX_CALLS:
            self.index_call_seconds.labels(call)
            self.index_failures.labels(call)

    def count_fault(self, fault: CacheFault) -> None:
        """Count one fault that became a recompute; a block refused on use also counts as a verify failure."""
        self.cache_faults.labels(FAULT_KINDS[type(fault)]).inc()
        if isinstance(fault, BlockCorrupt):
            self.verify_failures.labels("checksum" if "checksum" in fault.why else "header").inc()

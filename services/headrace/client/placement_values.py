"""Why a request went where it went, as plain values. Times are seconds; costs are seconds, too."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """One plan that was considered. `cost_s` is the longer of wait and fetch, and all terms after them."""

    prefill_worker: str  # "": the decode worker computes the prompt
    decode_worker: str
    device_tokens: int  # in the pool of the worker that computes
    loaded_tokens: int  # fetched by it from store nodes
    computed_tokens: int
    wait_s: float  # until prompts before it are computed
    fetch_s: float  # meanwhile
    compute_s: float
    hand_off_s: float  # until the decode worker has what was computed, and the first token
    price_s: float  # what the work costs others: while no worker is free, and prompts that it passes
    interference_s: float  # ... and what it takes from decodes beside it
    decode_s: float  # the first output tokens
    memory_s: float  # until a running sequence ends and leaves room
    ttft_s: float
    cost_s: float
    barred: str  # not empty: why it could not be chosen whatever it costs


@dataclass(frozen=True, slots=True)
class RouteOutcome:
    """What in fact happened; None is what is not known (yet)."""

    ttft_s: float | None
    fetch_s: float | None
    compute_s: float | None
    decode_worker: str  # "": the request has not ended well (yet)
    cached_device_tokens: int
    cached_shared_memory_tokens: int
    cached_grpc_tokens: int

    @property
    def cached_tokens(self) -> int:
        """Sum over the sources."""
        return self.cached_device_tokens + self.cached_shared_memory_tokens + self.cached_grpc_tokens


@dataclass(frozen=True, slots=True)
class RouteExplanation:
    """One decision of the gateway."""

    request_id: str
    model: str
    unix_ms: int
    prompt_tokens: int
    reason: str
    settled_by: str  # "asked", "cost", "held", "near", "load" or "hash"
    attempts: int
    price: float  # seconds of answer that a second of computing was worth
    chosen: RoutePlan
    others: tuple[RoutePlan, ...]  # the next best, least cost first
    num_considered: int
    predicted_ttft_s: float  # the chosen plan's ttft_s and overhead_s
    overhead_s: float
    outcome: RouteOutcome

"""Which workers serve a request: a pure decision over a snapshot, without clock, network or randomness of its own.

First rule: longest match, then least loaded, under a load cap. The signature of `choose_workers` is the seam for a cost
model in seconds: a better rule reads the same request and snapshot and returns the same plan.

This file does not know how matches are found, how calls are made, or what a failed call means.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.core.block import CacheSource, HolderId
from headrace.core.errors import InvalidRequest
from headrace.core.generation import GenerateRequest, WorkerId
from headrace.core.members import PrefixMatch, WorkerRecord


class PlanReason(StrEnum):
    """Why the decode worker was chosen: the `reason` label of routing counts."""

    ASKED = "asked"  # the request names it
    MATCH = "match"  # it has the longest match among workers under the load cap
    CAPPED = "capped"  # a worker with a longer match was over the load cap
    LEAST_LOADED = "least_loaded"  # nobody has a match


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """The two numbers of the first rule (see `config.GatewaySettings`)."""

    local_prefill_tokens: int
    load_cap: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is known at the moment of choosing. All of it may be stale; a plan is a hint until a worker accepts it."""

    workers: Sequence[WorkerRecord]  # live workers of the request's model and namespace, and no others
    match: PrefixMatch
    in_flight: Mapping[WorkerId, int] = field(default_factory=dict)  # this gateway's own calls, exact
    failed: frozenset[WorkerId] = frozenset()  # workers that already failed in this request

    def load(self, worker: WorkerRecord) -> int:
        """Requests on a worker. Its own count lags by a refresh but includes other gateways' calls; ours is exact but
        includes only ours. The larger of two lower bounds; their sum would count our calls twice."""
        return max(worker.running + worker.waiting, self.in_flight.get(worker.worker_id, 0))


@dataclass(frozen=True, slots=True)
class Plan:
    """Who decodes, who prefills first (None: the decode worker computes what is missing), and where blocks are."""

    decode: WorkerRecord
    prefill: WorkerRecord | None
    missing_tokens: int  # prompt tokens that nobody the decode worker may read from is believed to hold
    hint_nodes: tuple[str, ...]  # store nodes believed to hold a part of the prefix, longest first
    reason: PlanReason


@dataclass(frozen=True, slots=True)
class NoWorker:
    """No live worker can decode this request."""

    why: str


def choose_workers(
    request: GenerateRequest, snapshot: Snapshot, rule: RoutingRule, *, tie_break: Callable[[WorkerId], float]
) -> Plan | NoWorker:
    """Choose by longest match, then least load, among workers under the load cap; those who are equal by that are
    settled by the request's affinity key when it has one, else by `tie_break` (smallest wins).

    A worker matches with what its own pool holds and with what its host's store node holds, as far as the request may
    read from there. The load cap drops workers with more than `load_cap` requests above the least loaded candidate, so
    a hot prefix spreads. Up to `local_prefill_tokens` missing tokens are the decode worker's own; more go to a prefill
    worker, if one is there and the decode worker may read what it publishes.
    Raises InvalidRequest when the request names a worker that cannot serve it.
    """
    _check_asked(request, snapshot.workers)
    if request.cache.affinity_key:
        tie_break = functools.partial(_affinity, request.trust_group, request.cache.affinity_key)
    assert all(w.model == request.model for w in snapshot.workers)
    serving = [w for w in snapshot.workers if w.worker_id not in snapshot.failed]
    decoders = [w for w in serving if w.role.decodes and _fits_decode(w, request)]
    if request.decode_worker is not None:
        decoders = [w for w in decoders if w.worker_id == request.decode_worker]
    if not decoders:
        return NoWorker(why=_why_no_decoder(request, snapshot))
    ranked = _rank(decoders, request, snapshot, rule, tie_break=tie_break, near="")
    decode = ranked[0]
    reachable = _reachable_blocks(decode, request, snapshot.match)
    missing_tokens = len(request.prompt.token_ids) - reachable * request.prompt.block_tokens
    prefillers = [w for w in serving if w.role.prefills and w is not decode and _can_hand_over(w, decode, request)]
    return Plan(
        decode=decode,
        prefill=_choose_prefill(
            prefillers,
            request,
            snapshot,
            rule,
            tie_break=tie_break,
            near=decode.store_node,
            missing_tokens=missing_tokens,
        ),
        missing_tokens=missing_tokens,
        hint_nodes=_nodes_best_first(snapshot.match),
        reason=_reason(decode, decoders, request, snapshot.match),
    )


def _choose_prefill(
    prefillers: list[WorkerRecord],
    request: GenerateRequest,
    snapshot: Snapshot,
    rule: RoutingRule,
    *,
    tie_break: Callable[[WorkerId], float],
    near: str,
    missing_tokens: int,
) -> WorkerRecord | None:
    """Who computes the missing tokens, as in `_rank`; None when the decode worker does it itself."""
    missing_blocks = missing_tokens // request.prompt.block_tokens
    if missing_blocks == 0:
        return None  # only a partial block is missing, and those are never published
    if request.prefill_worker is not None:
        return next((w for w in prefillers if w.worker_id == request.prefill_worker), None)
    if missing_tokens <= rule.local_prefill_tokens or not prefillers:
        return None
    return _rank(prefillers, request, snapshot, rule, tie_break=tie_break, near=near)[0]


def _rank(
    workers: list[WorkerRecord],
    request: GenerateRequest,
    snapshot: Snapshot,
    rule: RoutingRule,
    *,
    tie_break: Callable[[WorkerId], float],
    near: str,
) -> list[WorkerRecord]:
    """Workers under the load cap, best first. `near` is a store node that breaks ties of match and load."""
    least = min(snapshot.load(w) for w in workers)
    allowed = [w for w in workers if snapshot.load(w) <= least + rule.load_cap]
    assert allowed, "the least loaded worker is always under the cap"

    def order(worker: WorkerRecord) -> tuple[int, int, bool, int, float]:
        local = local_blocks(worker, request, snapshot.match)
        device = _device_blocks(worker, request, snapshot.match)
        away = bool(near) and worker.store_node != near
        return (-local, snapshot.load(worker), away, -device, tie_break(worker.worker_id))

    return sorted(allowed, key=order)


def _affinity(trust_group: str, key: str, worker_id: WorkerId) -> float:
    """A worker's place for a key, smallest best (rendezvous hashing): every gateway agrees without asking, and a worker
    that comes or goes moves only the keys that it wins or won. The trust group is hashed with it, so that no tenant can
    tell or choose where another one's requests go; lengths keep the parts apart."""
    parts = [part.encode() for part in (trust_group, key, worker_id)]
    spelled = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return int.from_bytes(hashlib.blake2b(spelled, digest_size=8).digest(), "little")


def local_blocks(worker: WorkerRecord, request: GenerateRequest, match: PrefixMatch) -> int:
    """Leading blocks that a worker can use without a network: in its own pool or in its host's arena."""
    maps_node = worker.store_node_near and CacheSource.SHARED_MEMORY in request.cache.sources
    shared = match.of(_node_holder(worker)) if maps_node else 0
    return max(_device_blocks(worker, request, match), shared)


def _device_blocks(worker: WorkerRecord, request: GenerateRequest, match: PrefixMatch) -> int:
    return match.of(worker.holder_id) if CacheSource.DEVICE in request.cache.sources else 0


def _reachable_blocks(worker: WorkerRecord, request: GenerateRequest, match: PrefixMatch) -> int:
    """Leading blocks that a worker can use at all: other workers' pools cannot be read, other hosts' arenas can."""
    reachable = local_blocks(worker, request, match)
    if CacheSource.GRPC in request.cache.sources:
        reachable = max([reachable, *(n for holder, n in match.num_blocks_by_holder.items() if _is_node(holder))])
    return min(reachable, len(request.prompt.chain))


def _can_hand_over(prefill: WorkerRecord, decode: WorkerRecord, request: GenerateRequest) -> bool:
    """Whether blocks that `prefill` publishes can reach `decode` under the request's own rules."""
    if not request.cache.publish or not _fits_prefill(prefill, request):
        return False
    same_node = decode.store_node_near and bool(decode.store_node) and prefill.store_node == decode.store_node
    sources = request.cache.sources
    return CacheSource.GRPC in sources or (same_node and CacheSource.SHARED_MEMORY in sources)


def _fits_decode(worker: WorkerRecord, request: GenerateRequest) -> bool:
    tokens = len(request.prompt.token_ids) + request.sampling.max_tokens
    return tokens <= tokens_max(worker)


def _fits_prefill(worker: WorkerRecord, request: GenerateRequest) -> bool:
    return len(request.prompt.token_ids) <= tokens_max(worker)


def tokens_max(worker: WorkerRecord) -> int:
    """Prompt plus output that one sequence may have on a worker: its context, or all of its pool if that is less."""
    return min(worker.context_tokens_max, worker.pool_blocks * worker.namespace.layout.block_tokens)


def _check_asked(request: GenerateRequest, workers: Sequence[WorkerRecord]) -> None:
    """Refuse named workers that do not exist, have the other role, serve something else or cannot be of use."""
    for param, asked, role in (
        ("decode_worker", request.decode_worker, "decode"),
        ("prefill_worker", request.prefill_worker, "prefill"),
    ):
        if asked is None:
            continue
        able = [w for w in workers if (w.role.decodes if role == "decode" else w.role.prefills)]
        if asked not in {w.worker_id for w in able}:
            known = ", ".join(sorted(w.worker_id for w in able)) or "none"
            raise InvalidRequest(
                f"{param} {asked[:200]!r} is not a live {role} worker of model {request.model!r}; there are: {known}",
                param=param,
            )
    if request.prefill_worker is not None and not (request.cache.publish and request.cache.reads):
        raise InvalidRequest(
            "prefill_worker needs the cache for the hand-over; a request that bypasses or does not publish is computed"
            " by its decode worker alone",
            param="prefill_worker",
        )


def _why_no_decoder(request: GenerateRequest, snapshot: Snapshot) -> str:
    live = [w for w in snapshot.workers if w.role.decodes]
    if not live:
        return f"no decode worker of model {request.model!r} is live"
    tokens = len(request.prompt.token_ids) + request.sampling.max_tokens
    if all(tokens > tokens_max(w) for w in live):
        return f"no live decode worker has room for {tokens} tokens"
    tried = sorted(w.worker_id for w in live if w.worker_id in snapshot.failed)
    return f"of {len(live)} decode workers none is left to try (failed in this request: {', '.join(tried) or 'none'})"


def _reason(
    decode: WorkerRecord, decoders: list[WorkerRecord], request: GenerateRequest, match: PrefixMatch
) -> PlanReason:
    if request.decode_worker is not None:
        return PlanReason.ASKED
    longest = max(local_blocks(w, request, match) for w in decoders)
    if longest == 0:
        return PlanReason.LEAST_LOADED
    return PlanReason.MATCH if local_blocks(decode, request, match) == longest else PlanReason.CAPPED


def _nodes_best_first(match: PrefixMatch) -> tuple[str, ...]:
    return tuple(holder.removeprefix("node:") for holder in match.best_first() if _is_node(holder))


def _node_holder(worker: WorkerRecord) -> HolderId:
    return HolderId(f"node:{worker.store_node}")


def _is_node(holder: HolderId) -> bool:
    return holder.startswith("node:")

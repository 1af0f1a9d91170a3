"""How many workers and how much memory a workload needs: room by arithmetic, hits by replay, seconds by simulation.

Owns the search for the cheapest cluster that meets the targets. Its figures are as good as the rates that it is given:
those of `model_shape.estimate_costs` are estimates, and a plan is a place to start measuring from.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from headrace.core.block import KvCodec
from headrace.core.errors import InvalidRequest
from headrace.core.step_costs import DecodeCost, LinkCost, PrefillCost
from headrace.simulate.cluster_model import ClusterModel
from headrace.simulate.headrace_policy import HeadracePolicy
from headrace.simulate.model_shape import Machine, ModelShape, device_kv_tokens, estimate_costs
from headrace.simulate.read_trace import Trace
from headrace.simulate.replay_routing import RoutingResult, replay_as_it_came
from headrace.simulate.reuse_by_size import ReuseRow, found_share, reuse_by_size
from headrace.simulate.worker_room import WindowsRow, WorkerRoom

CONTEXTS = (2_048, 8_192, 32_768, 131_072)
CONCURRENCIES = (1, 8, 32, 128)  # sequences on one worker at the same time

# The first so many requests are simulated: percentiles of fewer are noise, more only take longer.
SIMULATED_REQUESTS_MAX = 2_000

# Simulations of one search, at most: three stores, and a few numbers of workers each.
SIMULATIONS_MAX = 24

# Length that the effect of a codec is shown for.
USUAL_CONTEXT_TOKENS = 8_192

# Shares of the host memory that is offered to the store.
STORE_SHARES = (0.0, 0.5, 1.0)

# Cold prefill work over capacity at which the search begins: less is never enough with queues at random.
FIRST_LOAD = 0.9

# More workers that leave this share of p90 are no help.
HELPS_SHARE = 0.98

ROUND_TRIP_S = 0.0002


@dataclass(frozen=True, slots=True)
class Targets:
    """What 90 of 100 requests must have, and what things cost in any unit of money."""

    ttft_s: float
    itl_s: float
    worker_cost: float = 1.0
    host_gib_cost: float = 0.0005


@dataclass(frozen=True, slots=True)
class ContextRow:
    """How many sequences of one length a worker can run: as memory has room, and as the ITL target allows."""

    context_tokens: int
    fit: int
    within_itl: int
    itl_ms: float  # of as many as fit and are allowed
    itl_ms_at: tuple[float | None, ...]  # of each of CONCURRENCIES; None where memory has no room for so many


@dataclass(frozen=True, slots=True)
class ClusterRow:
    """One cluster that was simulated."""

    prefill_workers: int
    decode_workers: int
    host_gib: float
    hit_rate: float
    ttft_s_p90: float
    itl_ms_p90: float
    meets: bool
    cost: float


@dataclass(frozen=True, slots=True)
class CodecRow:
    """What the same memory holds, and which workers are enough, when KV is kept in another way."""

    name: str
    token_bytes: int  # in the store and on the wire, scales counted
    device_tokens: int
    host_tokens: int
    sequences: int  # of USUAL_CONTEXT_TOKENS that one worker has room for
    cluster: ClusterRow | None  # the cheapest of what was tried; None: nothing was, or nothing meets the targets


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """Everything that a plan says. Costs are of a model without windows, which `windows` has the shares of."""

    kv_token_bytes: int
    device_tokens: int
    device_blocks: int
    block_tokens: int
    host_tokens: int
    codecs: tuple[CodecRow, ...]  # first: as the model computes it
    prefill: PrefillCost
    decode: DecodeCost
    windows: WindowsRow | None  # None where no layer has one
    contexts: tuple[ContextRow, ...]
    reuse: tuple[ReuseRow, ...]
    requests_per_s: float
    prompt_tokens_mean: float
    output_tokens_mean: float
    prefill_workers_busy: float  # as many workers' time as prefill takes, with the hits of the store that was chosen
    decode_workers_busy: float
    simulated: tuple[ClusterRow, ...]
    chosen: ClusterRow | None  # None: nothing that was tried meets the targets


def plan_capacity(
    model: ModelShape,
    machine: Machine,
    trace: Trace,
    targets: Targets,
    *,
    costs: tuple[PrefillCost, DecodeCost] | None = None,
    report: Callable[[str], None],
) -> CapacityPlan:
    """Plan for a trace at its own times. `costs`: measured ones; None for the estimate. Simulates up to 24 clusters."""
    if len(trace.requests) < 2 or trace.requests[-1].arrival_s <= trace.requests[0].arrival_s:
        raise InvalidRequest("a plan needs requests that come at different times", param="trace")
    prefill, decode = costs or estimate_costs(model, machine)
    room = WorkerRoom(model, trace, device_kv_tokens(model, machine))
    host_tokens = int(machine.host_bytes // model.kv_token_bytes)
    cluster = ClusterModel(
        name="planned", prefill_workers=1, decode_workers=1, mixed_workers=0,
        prefill=replace(prefill, attention_s=prefill.attention_s * model.attended_share(room.usual_tokens)),
        decode=replace(decode, kv_token_s=decode.kv_token_s * room.share(model.seen_tokens(room.usual_tokens))),
        network=LinkCost(machine.network_bytes_per_s, ROUND_TRIP_S), kv_token_bytes=model.kv_token_bytes,
        moved_share=room.moved_share, device_tokens=0, host_tokens=host_tokens,
        ttft_slo_s=targets.ttft_s, itl_slo_s=targets.itl_s,
    )  # fmt: skip
    cluster = room.fill(cluster)
    if decode.step_seconds(1, 1) > targets.itl_s:
        raise InvalidRequest(
            f"one sequence alone takes {decode.step_seconds(1, 1) * 1e3:.1f} ms a token: no cluster of such workers "
            f"meets {targets.itl_s * 1e3:.1f} ms", param="itl_ms",
        )  # fmt: skip
    simulated = _search(trace, cluster, targets, room=room, report=report)
    meeting = [row for row in simulated if row.meets]
    chosen = min(meeting, key=lambda row: (row.cost, row.ttft_s_p90), default=None)
    hit_rate = (chosen or simulated[-1]).hit_rate
    requests = trace.requests
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    return CapacityPlan(
        kv_token_bytes=model.kv_token_bytes,
        device_tokens=room.device_tokens,
        device_blocks=room.device_tokens // trace.block_tokens,
        block_tokens=trace.block_tokens,
        host_tokens=host_tokens,
        codecs=tuple(_compare_codecs(model, machine, trace, cluster, targets, room=room, chosen=chosen, report=report)),
        prefill=prefill,
        decode=decode,
        windows=room.windows_row(),
        contexts=tuple(
            context_row(size, decode, fit=room.fit(size), itl_s=targets.itl_s, seen_tokens=model.seen_tokens(size))
            for size in CONTEXTS
        ),
        reuse=tuple(reuse_by_size(trace)),
        requests_per_s=len(requests) / span_s,
        prompt_tokens_mean=sum(each.input_tokens for each in requests) / len(requests),
        output_tokens_mean=sum(each.output_tokens for each in requests) / len(requests),
        prefill_workers_busy=_cold_seconds(trace, cluster.prefill) * (1 - hit_rate) / span_s,
        decode_workers_busy=_decode_workers(trace, cluster, room, targets.itl_s),
        simulated=tuple(simulated),
        chosen=chosen,
    )


def context_row(
    context_tokens: int, decode: DecodeCost, *, fit: int, itl_s: float, seen_tokens: float | None = None
) -> ContextRow:
    """Concurrency at one context length, of which memory has room for `fit`. seen_tokens: what a step reads of such a
    context, in tokens with all layers; None: all of it."""
    seen_tokens = context_tokens if seen_tokens is None else seen_tokens
    each_s = decode.sequence_s + decode.kv_token_s * seen_tokens
    within = max(0, int((itl_s - decode.base_s) / each_s + 1e-9))
    batch = min(fit, within)

    def step_ms(sequences: int) -> float:
        return float(decode.step_seconds(sequences, sequences * seen_tokens)) * 1e3

    return ContextRow(
        context_tokens, fit, within, step_ms(batch) if batch else 0.0,
        tuple(step_ms(sequences) if sequences <= fit else None for sequences in CONCURRENCIES),
    )  # fmt: skip


def _compare_codecs(
    model: ModelShape,
    machine: Machine,
    trace: Trace,
    cluster: ClusterModel,
    targets: Targets,
    *,
    room: WorkerRoom,
    chosen: ClusterRow | None,
    report: Callable[[str], None],
) -> Iterator[CodecRow]:
    """As computed, int8 in the store, int8 in the GPU as well: room in the same memory, and from the cluster that was
    chosen the workers that can be done without."""
    yield _codec_row("as computed", cluster, room, chosen)
    if model.kv_bytes == 1:
        return  # it is kept in eight bits already
    host_share = 0.0
    if chosen is not None and machine.host_bytes:
        workers = chosen.prefill_workers + chosen.decode_workers
        host_share = chosen.host_gib * 2**30 / workers / machine.host_bytes
    for name, codec in (("int8 in the store", KvCodec.INT8), ("int8 in the GPU too", KvCodec.INT8_TOKEN)):
        token_bytes = model.coded_token_bytes(codec, block_tokens=trace.block_tokens)
        kept = replace(cluster, kv_token_bytes=round(token_bytes), host_tokens=int(machine.host_bytes // token_bytes))
        kept_room = room
        if codec == KvCodec.INT8_TOKEN:  # the store keeps the pool's own bytes
            read_s = cluster.decode.kv_token_s * token_bytes / model.kv_token_bytes
            kept_room = replace(room, room_tokens=device_kv_tokens(model, machine, token_bytes=token_bytes))
            kept = kept_room.fill(replace(kept, decode=replace(cluster.decode, kv_token_s=read_s)))
        found = None
        if chosen is not None:
            search = _Search(trace, kept, targets, kept_room, report)
            found = search.shrink(chosen, host_tokens=int(kept.host_tokens * host_share))
        yield _codec_row(name, kept, kept_room, found)


def _codec_row(name: str, cluster: ClusterModel, room: WorkerRoom, found: ClusterRow | None) -> CodecRow:
    return CodecRow(
        name, cluster.kv_token_bytes, room.device_tokens, cluster.host_tokens,
        room.fit(USUAL_CONTEXT_TOKENS), found,
    )  # fmt: skip


def _search(
    trace: Trace, cluster: ClusterModel, targets: Targets, *, room: WorkerRoom, report: Callable[[str], None]
) -> list[ClusterRow]:
    """For each store size, the fewest prefill and decode workers that meet the targets, by trying from below."""
    search = _Search(trace, cluster, targets, room, report)
    for share in STORE_SHARES:
        host_tokens = int(cluster.host_tokens * share)
        if host_tokens or not share:
            search.grow(host_tokens)
    return search.rows


class _Search:
    """What was tried so far."""

    def __init__(
        self, trace: Trace, cluster: ClusterModel, targets: Targets, room: WorkerRoom, report: Callable[[str], None]
    ) -> None:
        self._trace = replace(trace, requests=trace.requests[:SIMULATED_REQUESTS_MAX])
        self._cluster, self._targets, self._room, self._report = cluster, targets, room, report
        self.rows: list[ClusterRow] = []
        self._tried: set[tuple[int, int, int]] = set()

    def grow(self, host_tokens: int) -> None:
        """Add what is short until the targets are met, no more can help, or it costs more than what was found."""
        requests = self._trace.requests
        cold = _cold_seconds(self._trace, self._cluster.prefill) / (requests[-1].arrival_s - requests[0].arrival_s)
        found = found_share(self._trace, math.ceil(cold) * (self._room.device_tokens + host_tokens))
        prefillers = max(1, math.ceil(cold * (1 - found) / FIRST_LOAD))
        decoders = max(1, math.ceil(_decode_workers(self._trace, self._cluster, self._room, self._targets.itl_s)))
        before_s_p90 = math.inf
        while (row := self._try(prefillers, decoders, host_tokens)) is not None and not row.meets:
            in_step = row.itl_ms_p90 <= self._targets.itl_s * 1e3
            if in_step and row.ttft_s_p90 > before_s_p90 * HELPS_SHARE:
                return  # more workers do not make a single prompt faster
            before_s_p90 = row.ttft_s_p90
            if not in_step:
                decoders += _step(decoders, row.itl_ms_p90 / (self._targets.itl_s * 1e3))
            if row.ttft_s_p90 > self._targets.ttft_s:
                prefillers += _step(prefillers, row.ttft_s_p90 / self._targets.ttft_s)
        self._take_away(row, host_tokens)

    def shrink(self, known: ClusterRow, *, host_tokens: int) -> ClusterRow | None:
        """The cheapest that meets the targets, from what did with other memory downwards; None: not even that."""
        self._take_away(self._try(known.prefill_workers, known.decode_workers, host_tokens), host_tokens)
        meeting = [row for row in self.rows if row.meets]
        return min(meeting, key=lambda row: (row.cost, row.ttft_s_p90), default=None)

    def _take_away(self, row: ClusterRow | None, host_tokens: int) -> None:
        """Try with one worker less of each kind while the targets are met: both may have grown where one was enough."""
        while row is not None and row.meets:
            fewer = [(row.prefill_workers, row.decode_workers - 1), (row.prefill_workers - 1, row.decode_workers)]
            smaller = (self._try(*workers, host_tokens) for workers in fewer if min(workers) > 0)
            row = next((each for each in smaller if each is not None and each.meets), None)

    def _try(self, prefillers: int, decoders: int, host_tokens: int) -> ClusterRow | None:
        """Simulate it; None if it was tried, costs more than what was found, or there were too many already."""
        tried = replace(self._cluster, prefill_workers=prefillers, decode_workers=decoders, host_tokens=host_tokens)
        best = min((row.cost for row in self.rows if row.meets), default=math.inf)
        key = (prefillers, decoders, host_tokens)
        if key in self._tried or len(self.rows) >= SIMULATIONS_MAX or _cost(tried, self._targets) >= best:
            return None
        self._tried.add(key)
        host_gib = host_tokens * tried.kv_token_bytes / 2**30
        self._report(f"simulating {prefillers} prefill and {decoders} decode workers, {host_gib:,.0f} GiB each")
        self.rows.append(_cluster_row(replay_as_it_came(self._trace, tried, HeadracePolicy), tried, self._targets))
        return self.rows[-1]


def _step(workers: int, excess: float) -> int:
    """How many more to try: one when it is close, up to a half more when it is far off."""
    return max(1, int(workers * min(0.5, (excess - 1) / 8)))


def _cluster_row(result: RoutingResult, cluster: ClusterModel, targets: Targets) -> ClusterRow:
    return ClusterRow(
        prefill_workers=cluster.prefill_workers,
        decode_workers=cluster.decode_workers,
        host_gib=_host_gib(cluster),
        hit_rate=result.device_hit_rate + result.host_hit_rate,
        ttft_s_p90=result.ttft_s_p90,
        itl_ms_p90=result.itl_ms_p90,
        meets=result.ttft_s_p90 <= targets.ttft_s and result.itl_ms_p90 <= targets.itl_s * 1e3,
        cost=_cost(cluster, targets),
    )


def _cost(cluster: ClusterModel, targets: Targets) -> float:
    return cluster.num_workers * targets.worker_cost + _host_gib(cluster) * targets.host_gib_cost


def _host_gib(cluster: ClusterModel) -> float:
    return cluster.num_workers * cluster.host_tokens * cluster.kv_token_bytes / 2**30


def _cold_seconds(trace: Trace, prefill: PrefillCost) -> float:
    return sum(float(prefill.seconds(0, request.input_tokens)) for request in trace.requests)


def _decode_workers(trace: Trace, cluster: ClusterModel, room: WorkerRoom, itl_s: float) -> float:
    """Workers' time that decoding takes when batches are as large as memory and the ITL target allow."""
    requests = trace.requests
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    output = sum(request.output_tokens for request in requests)
    # Each output token reads the sequence's KV once: the mean context weighs by output tokens.
    context = sum(r.output_tokens * (r.input_tokens + r.output_tokens / 2) for r in requests) / output
    context = max(1, int(context))
    row = context_row(context, cluster.decode, fit=room.fit(context), itl_s=itl_s)
    batch = max(1, min(row.fit, row.within_itl))
    step_s = float(cluster.decode.step_seconds(batch, batch * context))
    return output / span_s * step_s / batch

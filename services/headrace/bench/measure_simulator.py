"""`headrace bench simulator`: one load, sent to a live system and simulated, side by side with the error.

The simulated cluster has the constants that the live workers announced while the load ran, so that whatever else the
machine did then is in both. Owns how a planned load becomes a trace, and what is compared by which formula:

    TTFT           first token - planned arrival
    ITL            (last token - first token) / (tokens - 1), one value an answer
    cached share   prompt tokens found / prompt tokens
    error          simulated / live - 1; none where the live figure is unknown
"""

import asyncio
import random
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any

from headrace.bench.generate_load import LoadBounds, Report
from headrace.bench.measure_serving import ServingEndpoint, Workload, measure_load, opened, plan_workload
from headrace.bench.planned_requests import FIRST_TOKEN, TOKEN_KINDS, PlannedRequest
from headrace.bench.serving_report import LoadReport, Table
from headrace.bench.serving_tally import Slo
from headrace.client import AsyncHeadraceClient, Sampling
from headrace.core.clock import SystemClock
from headrace.core.errors import IndexUnavailable
from headrace.core.members import WorkerRecord
from headrace.core.ports import Membership
from headrace.index.redis_membership import RedisMembership
from headrace.simulate.cluster_model import ClusterModel
from headrace.simulate.fit_cluster import FittedTo, fit_cluster
from headrace.simulate.headrace_policy import HeadracePolicy
from headrace.simulate.read_trace import Trace, TracedRequest
from headrace.simulate.replay_routing import RoutingResult, replay_as_it_came

# How often workers are asked what they measured; they announce it every two seconds.
LISTED_EVERY_S = 1.0

# Requests one after the other on the idle system, for what a request takes beside all work: the median of so many.
IDLE_REQUESTS = 15
IDLE_PROMPT_TOKENS = 24
IDLE_TIMEOUT_S = 60.0

# Share of the load that goes before it: workers know nothing of themselves when they begin.
WARM_UP_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class LiveSystem:
    """What is measured, and those of its settings that its workers do not announce."""

    grpc_address: str
    redis_url: str
    host_bytes: int
    prefill_chunk_tokens: int
    local_prefill_tokens: int


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One figure of one run."""

    run: int
    figure: str
    live: float | None  # None: no answer had what it is of
    simulated: float

    @property
    def error(self) -> float | None:
        """Relative to the live one; None where that is unknown, or 0 and the simulated one is not."""
        if self.live:
            return self.simulated / self.live - 1
        return 0.0 if self.simulated == self.live else None


@dataclass(frozen=True, slots=True)
class SimulatorReport:
    """All runs, and the cluster that the last one was simulated with."""

    model: str
    workload: str
    figures: tuple[ComparedFigure, ...]
    cluster: ClusterModel
    remarks_made: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The report for scripts. Times in milliseconds, shares and errors as numbers."""
        rows = [
            {**asdict(each), "error": None if each.error is None else round(each.error, 4)} for each in self.figures
        ]
        return {
            "model": self.model, "workload": self.workload, "rows": rows, "error_p50": self.usual_errors(),
            "cluster": asdict(self.cluster), "remarks": list(self.remarks_made),
        }  # fmt: skip

    def usual_errors(self) -> dict[str, float | None]:
        """Of each figure, the median of the error's size over the runs that have one."""
        sizes: dict[str, list[float]] = {each.figure: [] for each in self.figures}
        for each in self.figures:
            if each.error is not None:
                sizes[each.figure].append(abs(each.error))
        return {name: round(median(known), 4) if known else None for name, known in sizes.items()}

    def remarks(self) -> list[str]:
        """What a reader must know to judge the figures."""
        return list(self.remarks_made)

    def tables(self) -> list[Table]:
        """Each run, then the size of the error over all."""
        rows = [
            [
                str(each.run),
                each.figure,
                _shown(each.live, ",.3g"),
                f"{each.simulated:,.3g}",
                _shown(each.error, "+.0%"),
            ]
            for each in self.figures
        ]
        sizes = [[name, _shown(size, ".0%")] for name, size in self.usual_errors().items()]
        return [
            (f"{self.workload}, model {self.model}", ["run ", "figure ", "live ", "simulated ", "error "], rows),
            ("", ["figure ", "size of the error, median of the runs "], sizes),
        ]


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def measure_simulator(
    system: LiveSystem, workload: Workload, *, runs: int, bounds: LoadBounds, slo: Slo, report: Report
) -> SimulatorReport:
    """Load the system `runs` times, each time with other prompts, and simulate the same. Needs it to be idle before.

    Raises as `measure_serving`; IndexUnavailable when its workers cannot be listed.
    """
    return asyncio.run(_measure(system, workload, runs=runs, bounds=bounds, slo=slo, report=report))


async def _measure(
    system: LiveSystem, workload: Workload, *, runs: int, bounds: LoadBounds, slo: Slo, report: Report
) -> SimulatorReport:
    membership = RedisMembership(system.redis_url)
    try:
        return await compare_with_live(system, membership, workload, runs=runs, bounds=bounds, slo=slo, report=report)
    finally:
        await membership.close()


async def compare_with_live(
    system: LiveSystem,
    membership: Membership,
    workload: Workload,
    *,
    runs: int,
    bounds: LoadBounds,
    slo: Slo,
    report: Report,
) -> SimulatorReport:
    """As `measure_simulator`, with the membership that the system's workers announce themselves in."""
    endpoint = ServingEndpoint(grpc_address=system.grpc_address)
    report("warming up: workers learn what their steps cost")
    first = replace(workload, seed=workload.seed + runs)
    await measure_load(endpoint, first, bounds=_share_of(bounds, WARM_UP_SHARE), slo=slo, report=report)
    request_s = await _idle_request_s(endpoint)
    report(f"a request takes {request_s * 1e3:.1f} ms beside the work of workers")
    figures: list[ComparedFigure] = []
    remarks: list[str] = []
    for run in range(runs):
        asked = replace(workload, seed=workload.seed + run)
        live, listings = await _load_and_list(endpoint, asked, membership, bounds=bounds, slo=slo, report=report)
        trace = await _trace_of(endpoint, asked, listings, bounds=bounds)
        cluster = fit_cluster(listings, _fitted_to(system, trace, request_s=request_s, slo=slo))
        figures += _compare(run + 1, live, replay_as_it_came(trace, cluster, HeadracePolicy))
        remarks += [f"run {run + 1}: {remark}" for remark in live.remarks()]
        if live.interrupted:
            break
    return SimulatorReport(live.model, live.workload, tuple(figures), cluster, tuple(remarks))


def _share_of(bounds: LoadBounds, share: float) -> LoadBounds:
    return replace(
        bounds,
        requests_max=None if bounds.requests_max is None else max(1, int(bounds.requests_max * share)),
        duration_s=None if bounds.duration_s is None else bounds.duration_s * share,
    )


async def _idle_request_s(endpoint: ServingEndpoint) -> float:
    """What a short prompt's only token takes on the idle system, less what its worker says that it took of that."""
    draw, clock = random.Random(0), SystemClock()
    beside_s = []
    async with AsyncHeadraceClient(endpoint.grpc_address) as client:
        for _ in range(IDLE_REQUESTS):
            prompt = tuple(FIRST_TOKEN + draw.randrange(TOKEN_KINDS) for _ in range(IDLE_PROMPT_TOKENS))
            begun_s = clock.now_s()
            answer = await client.generate(
                prompt, sampling=Sampling(max_tokens=1, ignore_eos=True), timeout_s=IDLE_TIMEOUT_S
            )
            took_s = clock.now_s() - begun_s
            outcome = (await client.explain_route(answer.request_id)).outcome
            if outcome.compute_s is not None:
                beside_s.append(took_s - outcome.compute_s - (outcome.fetch_s or 0.0))
    return max(0.0, median(beside_s)) if beside_s else 0.0


async def _load_and_list(
    endpoint: ServingEndpoint,
    workload: Workload,
    membership: Membership,
    *,
    bounds: LoadBounds,
    slo: Slo,
    report: Report,
) -> tuple[LoadReport, list[Sequence[WorkerRecord]]]:
    """The load, and who announced what while it ran."""
    listings: list[Sequence[WorkerRecord]] = []

    async def list_workers() -> None:
        while True:
            with suppress(IndexUnavailable):  # the machine is busy: one listing less
                listings.append(await membership.workers())
            await asyncio.sleep(LISTED_EVERY_S)

    async with asyncio.TaskGroup() as group:
        listing = group.create_task(list_workers())
        live = await measure_load(endpoint, workload, bounds=bounds, slo=slo, report=report)
        listing.cancel()
    return live, listings or [await membership.workers()]


async def _trace_of(
    endpoint: ServingEndpoint, workload: Workload, listings: Sequence[Sequence[WorkerRecord]], *, bounds: LoadBounds
) -> Trace:
    """The same requests again, as a trace in the live system's blocks."""
    async with opened(endpoint) as (_, model):
        planned = list(plan_workload(workload, model, bounds=bounds, as_words=False, report=lambda line: None))
    sent = [each for each in planned if bounds.duration_s is None or each.arrival_s <= bounds.duration_s]
    return trace_of(sent[: bounds.requests_max], block_tokens=listings[-1][0].namespace.layout.block_tokens)


def trace_of(planned: Iterable[PlannedRequest], *, block_tokens: int) -> Trace:
    """Requests with token ids, as a trace: a full block has a number, the same wherever all before it is the same."""
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    requests = []
    for each in planned:
        assert not isinstance(each.prompt, str), "prompts of made-up requests are token ids"
        chain, parent = [], -1
        for end in range(block_tokens, len(each.prompt) + 1, block_tokens):
            parent = numbers.setdefault((parent, each.prompt[end - block_tokens : end]), len(numbers))
            chain.append(parent)
        requests.append(TracedRequest(len(each.prompt), tuple(chain), each.arrival_s, each.max_tokens))
    return Trace(tuple(requests), block_tokens, num_blocks=len(numbers))


def _fitted_to(system: LiveSystem, trace: Trace, *, request_s: float, slo: Slo) -> FittedTo:
    return FittedTo(
        name="fitted",
        host_bytes=system.host_bytes,
        prefill_chunk_tokens=system.prefill_chunk_tokens,
        local_prefill_tokens=system.local_prefill_tokens,
        request_s=request_s,
        mean_context_tokens=fmean(each.input_tokens + each.output_tokens / 2 for each in trace.requests),
        ttft_slo_s=slo.ttft_ms / 1e3,
        itl_slo_s=slo.itl_ms / 1e3,
    )


def _compare(run: int, live: LoadReport, found: RoutingResult) -> list[ComparedFigure]:
    tally = live.tally
    pairs = [
        ("TTFT p50, ms", tally.ttft.percentile(50), found.ttft_s_p50 * 1e3),
        ("TTFT p90, ms", tally.ttft.percentile(90), found.ttft_s_p90 * 1e3),
        ("ITL p50, ms", tally.tpot.percentile(50), found.itl_ms_p50),
        ("ITL p90, ms", tally.tpot.percentile(90), found.itl_ms_p90),
        ("cached share", tally.cached_share, found.device_hit_rate + found.host_hit_rate),
    ]
    return [ComparedFigure(run, name, measured, simulated) for name, measured, simulated in pairs]

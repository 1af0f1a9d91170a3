"""`headrace bench route`: what it costs a gateway to hash a prompt, to look it up and to choose its workers.

Over the gateway's own code: `hash_prompt`; `MirroredBlocks`, by which the mirror of the index answers a lookup;
`choose_workers` over the columns that the worker table keeps between two listings. `plan` is that choice with all that
a gateway keeps of it (`RoutePlanner.plan`: predicted blocks, planned work, the decision for `headrace explain`).

Times are processor time of the one thread that does it, which is how long it holds a gateway's event loop: what else
runs on the machine takes nothing from them but the caches. Owns the population; judges nothing.
"""

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from typing import Any

import numpy as np

from headrace.bench.serving_report import Table
from headrace.core.block import (
    Chain,
    HashAlgorithm,
    HashedPrompt,
    HolderId,
    KvLayout,
    Namespace,
    hash_prompt,
)
from headrace.core.candidate_costs import Snapshot
from headrace.core.choose_workers import Plan, RoutingRule, choose_workers
from headrace.core.clock import SystemClock
from headrace.core.generation import GenerateRequest, RequestId, SamplingParams, WorkerId
from headrace.core.members import PrefixMatch, WorkerRecord, WorkerRole
from headrace.core.worker_columns import WorkerColumns
from headrace.gateway.planner import RoutePlanner
from headrace.gateway.worker_table import WorkerTable
from headrace.index.mirrored_blocks import Alive, MirroredBlocks
from headrace.index.redis_keys import Event, Op

BLOCKS = 8_192
BLOCK_TOKENS = 16
WORKER_COUNTS = (64, 256, 1_000)
CALLS = 300

# Different prompts that are asked for in turn: one alone would lie in the processor's caches as no prompt does.
PROMPTS = 4

# Workers of one host share a store node, and one of so many computes prompts only.
WORKERS_PER_NODE = 8
WORKERS_PER_PREFILLER = 4

# Half of the workers know nothing of these prompts. Of the others, most have the beginning that all prompts have, some
# a part that ends anywhere, few all of it, as drawn for each prompt; one worker in any case has all. A host's store
# node has as much as the best of its workers.
SHARE_KNOWING = 0.5
SHARE_HEAD, SHARE_PART = 0.6, 0.3
HEAD_SHARE_OF_PROMPT = 1 / 16


# Processor seconds of this thread so far.
CpuClock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class RouteRow:
    """One number of workers. Microseconds; each percentile is of its own distribution, so they do not add up."""

    blocks: int
    workers: int
    lookup_us_p50: float
    lookup_us_p99: float
    choose_us_p50: float
    choose_us_p99: float
    lookup_choose_us_p50: float
    lookup_choose_us_p99: float
    plan_us_p50: float
    plan_us_p99: float


@dataclass(frozen=True, slots=True)
class RouteReport:
    """All rows, and hashing in 10^6 tokens a second."""

    hash_mtok_per_s: float
    rows: tuple[RouteRow, ...]

    def as_json(self) -> dict[str, Any]:
        """The report for scripts."""
        rows = [{name: round(value, 1) for name, value in asdict(row).items()} for row in self.rows]
        return {"hash_mtok_per_s": round(self.hash_mtok_per_s, 2), "rows": rows}

    def tables(self) -> list[Table]:
        """Title, columns and rows."""
        rows = [
            [
                f"{row.blocks:,}",
                f"{row.workers:,}",
                *(f"{us / 1e3:.3f}" for us in (row.lookup_us_p50, row.lookup_us_p99)),
                *(f"{us / 1e3:.3f}" for us in (row.choose_us_p50, row.choose_us_p99)),
                *(f"{us / 1e3:.3f}" for us in (row.lookup_choose_us_p50, row.lookup_choose_us_p99)),
                *(f"{us / 1e3:.3f}" for us in (row.plan_us_p50, row.plan_us_p99)),
            ]
            for row in self.rows
        ]
        columns = "blocks,workers,lookup p50,p99,choose p50,p99,both p50,p99,plan p50,p99"
        title = f"processor ms; hashing: {self.hash_mtok_per_s:.1f} million tokens a second in blocks of {BLOCK_TOKENS}"
        return [(title, columns.split(","), rows)]


def measure_routing(
    *,
    report: Callable[[str], None],
    worker_counts: Sequence[int] = WORKER_COUNTS,
    blocks: int = BLOCKS,
    calls: int = CALLS,
    seed: int = 0,
    clock: CpuClock = time.thread_time,
) -> RouteReport:
    """Measure each part `calls` times for each number of workers, over a population that the seed decides."""
    rate = measure_hashing(blocks * BLOCK_TOKENS, clock=clock)
    report(f"hashing: {rate:.1f} million tokens/s")
    rows = []
    for workers in worker_counts:
        report(f"{workers:,} workers, prompts of {blocks:,} blocks")
        rows.append(_Population(workers, blocks=blocks, seed=seed).measure(calls, clock))
    return RouteReport(hash_mtok_per_s=rate, rows=tuple(rows))


def measure_hashing(tokens: int, *, passes: int = 20, clock: CpuClock = time.thread_time) -> float:
    """10^6 tokens a second, the median pass."""
    times_s = []
    for number in range(passes):
        token_ids = np.random.default_rng(number).integers(0, 128_000, tokens).tolist()
        started_s = clock()
        _hash(token_ids)
        times_s.append(clock() - started_s)
    return tokens / float(np.median(times_s)) / 1e6


def _hash(token_ids: Sequence[int]) -> HashedPrompt:
    return hash_prompt(NAMESPACE.id, token_ids, block_tokens=BLOCK_TOKENS, algorithm=HashAlgorithm.XXH3_128)


NAMESPACE = Namespace(
    model_id="bench",
    weights_digest="w",
    tokenizer_digest="t",
    adapter_digest="",
    layout=KvLayout(dtype="bfloat16", num_layers=32, num_kv_heads=8, head_dim=128, block_tokens=BLOCK_TOKENS),
    position_digest="p",
    numerics_probe="n",
    hash_algorithm=HashAlgorithm.XXH3_128,
    trust_group="default",
)


class _Population:
    """Workers, prompts, and who has how much of each."""

    def __init__(self, num_workers: int, *, blocks: int, seed: int) -> None:
        draw = random.Random(f"{seed}/{num_workers}")
        self._records = tuple(_make_record(number, draw) for number in range(num_workers))
        self._columns = WorkerColumns(self._records)
        self._events: Counter[HolderId] = Counter()  # that the mirror was told of each
        self._mirror = MirroredBlocks({})
        head = [draw.randrange(128_000) for _ in range(int(blocks * HEAD_SHARE_OF_PROMPT) * BLOCK_TOKENS)]
        rest = blocks * BLOCK_TOKENS - len(head)
        prompts = [_hash([*head, *(draw.randrange(128_000) for _ in range(rest))]) for _ in range(PROMPTS)]
        knowing = [record for record in self._records if draw.random() < SHARE_KNOWING]
        for prompt in prompts:
            depths = {record: _draw_depth(draw, len(head) // BLOCK_TOKENS, blocks) for record in knowing}
            self._hold(prompt.chain, depths | {draw.choice(self._records): blocks})
        self._mirror.observe({holder: Alive(1, math.inf) for holder in self._events}, now_s=0.0)
        self._blocks = blocks
        self._requests = [
            GenerateRequest(
                request_id=RequestId(f"r{number}"),
                model=NAMESPACE.model_id,
                prompt=prompt,
                sampling=SamplingParams(max_tokens=256),
            )
            for number, prompt in enumerate(prompts)
        ]
        table = WorkerTable(SystemClock())
        table.replace(self._records)
        self._rule = RoutingRule(local_prefill_tokens=256)
        self._planner = RoutePlanner(table, self._rule, clock=SystemClock())

    def _hold(self, chain: Chain, depths: Mapping[WorkerRecord, int]) -> None:
        """Let workers have so much of a chain, and their store nodes as much as the best of them."""
        holder_to_depth: dict[HolderId, int] = {}
        for record, depth in depths.items():
            for holder in (record.holder_id, HolderId(f"node:{record.store_node}")):
                holder_to_depth[holder] = max(depth, holder_to_depth.get(holder, 0))
        for holder, depth in holder_to_depth.items():
            self._events[holder] += 1
            told = Event(holder, 1, self._events[holder], Op.REGISTERED, NAMESPACE.id, chain[:depth])
            assert self._mirror.apply(0, told)

    def _look_up(self, request: GenerateRequest) -> PrefixMatch:
        return self._mirror.longest_prefix(request.prompt.namespace, request.prompt.chain, now_s=0.0)

    def _choose(self, request: GenerateRequest, match: PrefixMatch) -> None:
        plan = choose_workers(request, Snapshot(workers=self._columns, match=match), self._rule)
        assert isinstance(plan, Plan), plan

    def measure(self, calls: int, clock: CpuClock) -> RouteRow:
        """Each part by itself, and lookup and choice as one."""
        matches = {request.request_id: self._look_up(request) for request in self._requests}
        assert all(match.num_blocks == self._blocks for match in matches.values())
        lookup = self._times_us(self._look_up, calls, clock)
        choose = self._times_us(lambda request: self._choose(request, matches[request.request_id]), calls, clock)
        both = self._times_us(lambda request: self._choose(request, self._look_up(request)), calls, clock)
        plan = self._times_us(self._plan_with(matches), calls, clock)
        return RouteRow(self._blocks, len(self._records), *lookup, *choose, *both, *plan)

    def _plan_with(self, matches: dict[RequestId, PrefixMatch]) -> Callable[[GenerateRequest], None]:
        def plan(request: GenerateRequest) -> None:
            self._planner.plan(request, matches[request.request_id], failed=frozenset())
            self._planner.ended(request.request_id)

        return plan

    def _times_us(self, act: Callable[[GenerateRequest], Any], calls: int, clock: CpuClock) -> tuple[float, float]:
        """p50 and p99 of single calls, after as many as there are prompts."""
        for request in self._requests:
            act(request)
        times_us = []
        for request in islice(cycle(self._requests), calls):
            started_s = clock()
            act(request)
            times_us.append((clock() - started_s) * 1e6)
        p50, p99 = np.percentile(times_us, (50, 99))
        return float(p50), float(p99)


def _make_record(number: int, draw: random.Random) -> WorkerRecord:
    waiting = draw.randrange(8) if draw.random() < 0.5 else 0
    running = draw.randrange(32)
    return WorkerRecord(
        worker_id=WorkerId(f"w{number}"),
        incarnation=1,
        role=WorkerRole.PREFILL if number % WORKERS_PER_PREFILLER == 0 else WorkerRole.DECODE,
        host=f"h{number // WORKERS_PER_NODE}",
        store_node=f"n{number // WORKERS_PER_NODE}",
        model=NAMESPACE.model_id,
        namespace=NAMESPACE,
        context_tokens_max=1_000_000,
        pool_blocks=100_000,
        free_blocks=100_000 - running * 100,
        pid=1,
        running=running,
        waiting=waiting,
        queue_s=waiting * draw.random(),
    )


def _draw_depth(draw: random.Random, head_blocks: int, num_blocks: int) -> int:
    """Leading blocks of a worker that knows anything."""
    at = draw.random()
    if at < SHARE_HEAD:
        return head_blocks
    return draw.randrange(head_blocks, num_blocks) if at < SHARE_HEAD + SHARE_PART else num_blocks

"""How fast blocks are fetched on this machine, beside what the machine itself can do.

Owns the processes that are measured against (an index, a store node, a raw sender), the order of passes and the
statistics. What each column moves and copies is `data_paths.py`'s. Every column of every block size is measured once
in each round, in turn, so that a noisy neighbour hits all of them alike; the figures are medians over the rounds.
Needs no model.
"""

import asyncio
import mmap
import random
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

import redis

from headrace.bench.data_paths import (
    PASS_TIMEOUT_S,
    BlockRun,
    Move,
    RawLoopback,
    RedisGet,
    StoreRead,
    WorkerLoad,
    check_blocks,
    copy_in_memory,
    store_run,
)
from headrace.bench.processor_time import cpu_seconds
from headrace.bench.raw_sender import make_bytes
from headrace.bench.report import FetchReport, FetchRow
from headrace.blocks.host_arena import host_id
from headrace.config import StoreSettings
from headrace.core.block import HashAlgorithm, KvLayout, NamespaceId, hash_prompt
from headrace.core.clock import Deadline, SystemClock
from headrace.core.members import StoreNodeRecord
from headrace.core.ports import PrefixPool
from headrace.engine.paged_kv import PagedKV
from headrace.index.embedded_valkey import EmbeddedValkey
from headrace.index.redis_membership import RedisMembership
from headrace.transfer.channels import Channels
from headrace.transfer.fetch_blocks import GrpcStore
from headrace.transfer.shared_memory import SharedMemoryStore
from headrace.verify.store_process import StoreProcess

Report = Callable[[str], None]

# 64 KiB, 360 KiB (16 tokens of the built-in model), 1 MiB and 4 MiB, each as a layout that gives exactly this size.
LAYOUTS = (
    KvLayout("bfloat16", num_layers=4, num_kv_heads=4, head_dim=64, block_tokens=16),
    KvLayout("bfloat16", num_layers=30, num_kv_heads=3, head_dim=64, block_tokens=16),
    KvLayout("bfloat16", num_layers=32, num_kv_heads=8, head_dim=64, block_tokens=16),
    KvLayout("bfloat16", num_layers=32, num_kv_heads=8, head_dim=64, block_tokens=64),
)
# One pass: more than the caches of usual processors together with its destination, less than the embedded index server
# may keep (four runs of it, 256 MiB).
RUN_BYTES = 48 * 1024 * 1024
ROUNDS_MAX = 12
ROUNDS_MIN = 3
# After this many seconds no further round is begun.
MEASURE_BUDGET_S = 20.0
# A node that serves has announced itself or is about to; on a busy machine that takes a while.
ANNOUNCE_TIMEOUT_S = 60.0
# Single blocks read per row, round and way: 12 rounds give 192, enough for a 99th percentile.
LATENCY_SAMPLES = 16
SEED = 20_260


def measure_fetch(
    *, report: Report, run_bytes: int = RUN_BYTES, rounds_max: int = ROUNDS_MAX, budget_s: float = MEASURE_BUDGET_S
) -> FetchReport:
    """Measure everything; about half a minute. Blocks. Every copy is compared with what was stored, untimed.

    Raises CacheFault when the store node fails or a copy differs, ConfigInvalid when the arena does not fit.
    """
    return asyncio.run(_measure(report, run_bytes, rounds_max, budget_s))


async def _measure(report: Report, run_bytes: int, rounds_max: int, budget_s: float) -> FetchReport:
    report("starting an index, a store node and a sender")
    async with _build_bench(run_bytes) as bench:
        report("storing the blocks")
        await bench.store()
        started_s, rounds = time.monotonic(), 0
        while rounds < rounds_max and (rounds < ROUNDS_MIN or time.monotonic() - started_s < budget_s):
            await bench.round(rounds)
            rounds += 1
            report(f"round {rounds} of {rounds_max}")
        return FetchReport(
            rows=tuple(bench.row(run) for run in bench.runs),
            passes=rounds,
            run_bytes=run_bytes,
            seconds=time.monotonic() - started_s,
        )


def make_runs(run_bytes: int) -> list[BlockRun]:
    """One prompt per layout, as long as its blocks fit into `run_bytes`; all with the same bytes."""
    namespace, payloads = NamespaceId(secrets.token_hex(16)), memoryview(make_bytes(SEED, run_bytes))
    runs = []
    for number, layout in enumerate(LAYOUTS):
        num_blocks = run_bytes // layout.block_bytes
        token_ids = [number + 1] * (num_blocks * layout.block_tokens)
        prompt = hash_prompt(namespace, token_ids, block_tokens=layout.block_tokens, algorithm=HashAlgorithm.XXH3_128)
        runs.append(BlockRun(layout=layout, prompt=prompt, payloads=payloads[: num_blocks * layout.block_bytes]))
    return runs


@dataclass(frozen=True, slots=True)
class _Cpu:
    """Processor time spent by this process and the store node's on one kind of move, and the bytes moved."""

    seconds: float = 0.0
    moved_bytes: int = 0


class _Bench:
    """The ways that are compared, and every figure so far."""

    def __init__(
        self,
        runs: list[BlockRun],
        *,
        ways: dict[str, Move],
        redis_get: RedisGet,
        shared_memory: SharedMemoryStore,
        node: StoreNodeRecord,
    ) -> None:
        self.runs = runs
        self._ways = ways
        self._redis_get = redis_get
        self._shared_memory = shared_memory
        self._node = node
        # Page-aligned, as a pool is: some processors copy at half their speed to sixteen bytes behind a page's start.
        self._destination = memoryview(mmap.mmap(-1, max(len(run.payloads) for run in runs)))
        self._gbps: dict[tuple[int, str], list[float]] = defaultdict(list)
        self._latency_us: dict[tuple[int, str], list[float]] = defaultdict(list)
        self._cpu: dict[tuple[int, str], _Cpu] = defaultdict(_Cpu)

    async def store(self) -> None:
        """Have every run in the store node and in the Redis server."""
        for run in self.runs:
            await store_run(run, self._shared_memory, SystemClock())
            self._redis_get.store(run)

    async def round(self, number: int) -> None:
        """Every way once for every run, and single blocks; each round begins with another way."""
        names = list(self._ways)
        for run in self.runs:
            for name in names[number % len(names) :] + names[: number % len(names)]:
                await self._pass(run, name)
            for name in ("grpc", "shm"):
                await self._sample_latency(run, name)

    async def _pass(self, run: BlockRun, name: str) -> None:
        size = len(run.payloads)
        # Also puts the caches into the same state before every pass.
        self._destination[:size] = bytes(size)
        cpu_before_s = self._cpu_s()
        seconds = await self._ways[name](run, self._destination)
        cpu, spent_s = self._cpu[run.block_bytes, name], self._cpu_s() - cpu_before_s
        self._cpu[run.block_bytes, name] = _Cpu(cpu.seconds + spent_s, cpu.moved_bytes + size)
        self._gbps[run.block_bytes, name].append(size / seconds / 1e9)
        if not isinstance(self._ways[name], WorkerLoad):
            check_blocks(run, self._destination, range(run.num_blocks))

    async def _sample_latency(self, run: BlockRun, name: str) -> None:
        way = self._ways[name]
        assert isinstance(way, StoreRead)
        for _ in range(LATENCY_SAMPLES):
            index = random.randrange(run.num_blocks)
            seconds = await way.read_one(run, self._destination, index)
            self._latency_us[run.block_bytes, name].append(seconds * 1e6)
            check_blocks(run, self._destination, range(index, index + 1))

    def row(self, run: BlockRun) -> FetchRow:
        """The figures of one block size."""
        size = run.block_bytes
        rate = {name: statistics.median(self._gbps[size, name]) for name in self._ways}
        cpu_s_per_gb = {
            name: cpu.seconds / cpu.moved_bytes * 1e9 for (at, name), cpu in self._cpu.items() if at == size
        }
        percentile = {
            name: statistics.quantiles(self._latency_us[size, name], n=100, method="inclusive")
            for name in ("grpc", "shm")
        }
        return FetchRow(
            block_bytes=size,
            memcpy_gbps=rate["memcpy"],
            tcp_gbps=rate["tcp"],
            redis_get_gbps=rate["redis"],
            grpc_gbps=rate["grpc"],
            shm_gbps=rate["shm"],
            loaded_grpc_gbps=rate["loaded grpc"],
            loaded_shm_gbps=rate["loaded shm"],
            grpc_us_p50=percentile["grpc"][49],
            grpc_us_p99=percentile["grpc"][98],
            shm_us_p50=percentile["shm"][49],
            shm_us_p99=percentile["shm"][98],
            cpu_s_per_gb=cpu_s_per_gb["grpc"],
            shm_cpu_s_per_gb=cpu_s_per_gb["shm"],
        )

    def _cpu_s(self) -> float:
        """Processor time so far of this process and of the store node's, user and system."""
        return time.process_time() + cpu_seconds([self._node.pid])


@asynccontextmanager
async def _build_bench(run_bytes: int) -> AsyncIterator[_Bench]:
    """Start what is measured; everything ends with the scope."""
    runs, clock = make_runs(run_bytes), SystemClock()
    async with AsyncExitStack() as parts:
        valkey = EmbeddedValkey()
        redis_url = await asyncio.to_thread(valkey.start)
        parts.callback(valkey.stop)
        settings = StoreSettings(
            # An own name: a store node of a running system on this host must not be touched.
            node_id=f"bench-{secrets.token_hex(4)}",
            arena_mb=64 + (len(runs) + 1) * run_bytes // 2**20,  # headers fill a page each at worst: 5 % of 64 KiB
        )
        parts.enter_context(StoreProcess(settings, redis_url=redis_url))
        node = await _announced_node(redis_url, settings.node_id, clock)
        channels = Channels()
        parts.push_async_callback(channels.close)
        client = redis.Redis.from_url(redis_url, socket_timeout=PASS_TIMEOUT_S)
        parts.callback(client.close)
        connection = parts.enter_context(_connected_sender(run_bytes))
        grpc_store, shared_memory = GrpcStore(node, channels, clock), SharedMemoryStore(node, channels, clock)
        parts.callback(shared_memory.close)
        pools: dict[int, PrefixPool] = {run.block_bytes: PagedKV(run.layout, run.num_blocks) for run in runs}
        redis_get = RedisGet(client)
        ways: dict[str, Move] = {
            "memcpy": copy_in_memory,
            "shm": StoreRead(shared_memory, clock),
            "tcp": RawLoopback(connection),
            "grpc": StoreRead(grpc_store, clock),
            "redis": redis_get,
            "loaded shm": WorkerLoad(shared_memory, node.node_id, pools=pools, clock=clock),
            "loaded grpc": WorkerLoad(grpc_store, node.node_id, pools=pools, clock=clock),
        }
        yield _Bench(runs, ways=ways, redis_get=redis_get, shared_memory=shared_memory, node=node)


async def _announced_node(redis_url: str, node_id: str, clock: SystemClock) -> StoreNodeRecord:
    """The node's record, which it announces when it is ready."""
    membership = RedisMembership(redis_url, clock=clock)
    try:
        async with Deadline.after(ANNOUNCE_TIMEOUT_S, clock).scope("see the store node"):
            while True:
                for record in await membership.store_nodes():
                    if record.node_id == node_id:
                        assert record.host == host_id(StoreSettings().arena_dir)
                        return record
                await asyncio.sleep(0.02)
    finally:
        await membership.close()


@contextmanager
def _connected_sender(num_bytes: int) -> Iterator[socket.socket]:
    """A connection to a `raw_sender` process, which ends with the scope."""
    command = [sys.executable, "-m", "headrace.bench.raw_sender", str(SEED), str(num_bytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            with socket.create_connection(("127.0.0.1", port), timeout=PASS_TIMEOUT_S) as connection:
                yield connection
        finally:
            process.kill()

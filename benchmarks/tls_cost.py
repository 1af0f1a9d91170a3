"""What mutual TLS costs where blocks cross from host to host: the same blocks from two store nodes, one under it.

    python benchmarks/tls_cost.py --rounds 12

Both nodes are processes of their own on this machine, read in turn over loopback by the reader that workers have, so a
busy machine slows both alike: the ratio is what to look at. Processor time is of the reader and the node together.
"""

import argparse
import asyncio
import os
import secrets
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

from headrace.admin.create_certificates import create_certificates
from headrace.bench.data_paths import BlockRun, StoreRead, store_run
from headrace.bench.measure_fetch import make_runs
from headrace.config import NetworkSettings, StoreSettings
from headrace.core.clock import SystemClock
from headrace.core.members import StoreNodeRecord
from headrace.index.embedded_valkey import EmbeddedValkey
from headrace.index.redis_membership import RedisMembership
from headrace.transfer.channels import Channels
from headrace.transfer.fetch_blocks import GrpcStore
from headrace.transfer.shared_memory import SharedMemoryStore
from headrace.transfer.tls_files import tls_of_parts
from headrace.verify.store_process import StoreProcess

RUN_BYTES = 48 * 1024 * 1024
SEE_WITHIN_S = 60.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Processor time so far of a process, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


async def seen(redis_url: str, names: set[str]) -> dict[str, StoreNodeRecord]:
    """The nodes' records, which they announce when they are ready."""
    membership = RedisMembership(redis_url, clock=SystemClock())
    try:
        async with asyncio.timeout(SEE_WITHIN_S):
            while True:
                found = {record.node_id: record for record in await membership.store_nodes()}
                if names <= set(found):
                    return found
                await asyncio.sleep(0.1)
    finally:
        await membership.close()


async def measure(rounds: int) -> None:
    runs, clock = make_runs(RUN_BYTES), SystemClock()
    destination = memoryview(bytearray(RUN_BYTES))
    async with AsyncExitStack() as parts:
        files = create_certificates(
            Path(parts.enter_context(tempfile.TemporaryDirectory())), hosts=("127.0.0.1",), days=1
        )
        secure = NetworkSettings(tls_cert_file=files.cert_file, tls_key_file=files.key_file, tls_ca_file=files.ca_file)
        valkey = EmbeddedValkey()
        redis_url = valkey.start()
        parts.callback(valkey.stop)
        networks = {f"tls-cost-{secrets.token_hex(4)}": network for network in (NetworkSettings(), secure)}
        for name, network in networks.items():
            settings = StoreSettings(node_id=name, arena_mb=64 + (len(runs) + 1) * RUN_BYTES // 2**20)
            parts.enter_context(StoreProcess(settings, redis_url=redis_url, network=network))
        records = await seen(redis_url, set(networks))
        reads: dict[str, tuple[StoreRead, int]] = {}
        for way, (name, network) in zip(("plain", "tls"), networks.items(), strict=True):
            channels = Channels(tls_of_parts(network))
            parts.push_async_callback(channels.close)
            local = SharedMemoryStore(records[name], channels, clock)
            for run in runs:
                await store_run(run, local, clock)
            local.close()
            reads[way] = (StoreRead(GrpcStore(records[name], channels, clock), clock), records[name].pid)
        for run in runs:
            await compare(run, reads, destination, rounds=rounds)


async def compare(
    run: BlockRun, reads: dict[str, tuple[StoreRead, int]], destination: memoryview, *, rounds: int
) -> None:
    """Print one row."""
    wall: dict[str, list[float]] = {way: [] for way in reads}
    cpu: dict[str, list[float]] = {way: [] for way in reads}
    one: dict[str, list[float]] = {way: [] for way in reads}
    for number in range(rounds + 1):
        for way in list(reads)[:: 1 if number % 2 else -1]:
            read, pid = reads[way]
            before = time.process_time() + cpu_s(pid)
            seconds = await read(run, destination)
            used = time.process_time() + cpu_s(pid) - before
            assert bytes(destination[: len(run.payloads)]) == run.payloads, "a copy differs"
            single = [await read.read_one(run, destination, index) for index in range(min(8, run.num_blocks))]
            if number:  # the first one warms up
                wall[way].append(seconds)
                cpu[way].append(used)
                one[way] += single
    gigabytes = len(run.payloads) / 1e9
    rate = {way: gigabytes / statistics.median(times) for way, times in wall.items()}
    ratio = statistics.median(a / b for a, b in zip(wall["tls"], wall["plain"], strict=True))
    used = {way: sum(times) / rounds / gigabytes for way, times in cpu.items()}
    late = {way: 1e6 * statistics.median(times) for way, times in one.items()}
    print(
        f"{run.block_bytes / 1024:7,.0f} KiB  plain {rate['plain']:5.2f} GB/s  tls {rate['tls']:5.2f} GB/s  "
        f"time x{ratio:4.2f}  cpu {used['plain']:4.2f} -> {used['tls']:4.2f} s/GB  "
        f"one block {late['plain']:6.0f} -> {late['tls']:6.0f} us",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    asyncio.run(measure(parser.parse_args().rounds))

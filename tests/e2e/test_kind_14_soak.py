"""Calls that are given up, in numbers: what they leave in the processes of a live system."""

import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from live_load import make_token_ids, wait_until_at_rest
from local_system import LocalSystem, wait_until

from headrace.client.values import Sampling
from headrace.core.errors import HeadraceError
from headrace_cluster.local_instance import processes_of

CALLS = 400
STORMS_MAX = 3  # what is kept for each call grows with every one of them; what an allocator keeps does not


def serving_processes(system: LocalSystem) -> Iterator[int]:
    """The proxies, the gateway, the workers and the store node."""
    for pid, command in processes_of(system.state.instance_id).items():
        if any(name in command for name in ("Proxy", "Gateway", "Worker", "StoreNode", "store")):
            yield pid


def footprint(pid: int) -> tuple[int, int]:
    """Open files, and resident KiB."""
    resident_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return len(os.listdir(f"/proc/{pid}/fd")), resident_pages * os.sysconf("SC_PAGE_SIZE") // 1024


def give_up(system: LocalSystem, number: int) -> None:
    """A streaming call, left at some moment: before its first event, in the middle, or by dropping the object."""
    chosen = random.Random(number)
    prompt = make_token_ids(chosen.randint(1, 60), seed=140_000 + number % 50)
    stream = system.client.stream(prompt, sampling=Sampling(max_tokens=500, ignore_eos=True), timeout_s=60)
    if number % 20 == 0:
        return  # dropped
    leaving = threading.Timer(chosen.random() * 0.1, stream.close)
    leaving.start()
    try:
        for _ in stream:
            pass
    except HeadraceError:
        pass
    finally:
        leaving.cancel()


def test_hundreds_of_calls_given_up_leave_neither_files_nor_memory(system: LocalSystem):
    """Fails when a call that its client left keeps a socket, a queue or a buffer anywhere on its way."""

    def storm(first: int, count: int) -> None:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda number: give_up(system, number), range(first, first + count)))
        wait_until_at_rest(system)

    storm(0, CALLS // 2)
    pids = list(serving_processes(system))
    assert len(pids) >= 5
    files = {pid: footprint(pid)[0] for pid in pids}

    def files_are_few() -> bool:
        return all(footprint(pid)[0] <= files[pid] * 1.1 + 4 for pid in pids)

    for number in range(1, 1 + STORMS_MAX):
        before = {pid: footprint(pid)[1] for pid in pids}
        storm(number * CALLS, CALLS)
        wait_until(files_are_few, what="files where they were")
        after = {pid: footprint(pid)[1] for pid in pids}
        if all(after[pid] <= before[pid] * 1.1 for pid in pids):
            break
    else:
        raise AssertionError(f"each storm leaves more: {before} KiB before the last, {after} after it")

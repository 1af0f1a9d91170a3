"""A store node that stands still and is not dead: it is killed, and what it held is found by the next one."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from store_calls_kit import publish, read
from store_kit import make_header, make_prompt, payload_of

from headrace.core.members import StoreNodeRecord

NODE = str(Path(__file__).with_name("stalling_node.py"))
# A process whose loop turns until it is told on its standard input to hang; looked at as a node is.
TURNING = """
import asyncio, sys, time
from headrace.store.end_when_stalled import end_when_stalled

async def main():
    task = asyncio.create_task(end_when_stalled(log_format="json", node_id="n1", stall_ms=int(sys.argv[1])))
    await asyncio.to_thread(sys.stdin.readline)
    time.sleep(3_600)

asyncio.run(main())
"""


# What Ray makes of the actor's class, without Ray: a node until it is told on its standard input to stop.
ACTOR = """
import asyncio, sys
from headrace.config import config_to_flat, load_config
from headrace_cluster.store_actor import StoreActor

async def main():
    names = ("node_id", "arena_dir", "redis_url")
    settings = config_to_flat(load_config(dict(zip(names, sys.argv[1:])) | {"arena_mb": "1"}, environ={}))
    actor = object.__new__(StoreActor)
    await actor.__init__(settings)
    print(await actor.ready(), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await actor.stop()

asyncio.run(main())
"""


@asynccontextmanager
async def running(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ended(process: asyncio.subprocess.Process) -> list[dict[str, str]]:
    """Wait until it was killed; what it and the process beside it had logged."""
    assert process.stderr is not None
    async with asyncio.timeout(120):
        log = await process.stderr.read()  # ends when neither of them has it open
        assert await process.wait() == -signal.SIGKILL
    return [json.loads(line) for line in log.splitlines() if line.startswith(b"{")]


def watchers(pid: int) -> set[int]:
    """The processes beside a process that look whether it stands still."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"kill_stalled" in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def runs(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())  # of one that nobody has reaped yet it is empty
    except (FileNotFoundError, ProcessLookupError):
        return False


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not holds():  # noqa: ASYNC110 (other processes have no event for us)
            await asyncio.sleep(0.02)


async def test_a_node_that_was_stopped_is_killed_and_its_successor_has_the_blocks(nodes, tmp_path) -> None:
    """Fails when a stopped process keeps the arena: its record runs out, and nobody takes its place."""
    prompt = make_prompt(61, 4)
    async with running(NODE, "stalls", str(tmp_path), "5000") as process:
        assert process.stdout is not None
        record = StoreNodeRecord(**json.loads(await process.stdout.readline()))
        assert await publish(nodes.grpc(record), prompt, range(4)) == 4
        process.send_signal(signal.SIGSTOP)
        (said,) = [line for line in await ended(process) if line["level"] == "CRITICAL"]
        assert said["message"] == "the event loop has stood still for 5 s: the process is killed"
        assert (said["part"], said["id"]) == ("store node", "stalls")
    async with running(NODE, "stalls", str(tmp_path), "60000") as process:
        assert process.stdout is not None
        successor = StoreNodeRecord(**json.loads(await process.stdout.readline()))
        assert successor.incarnation > record.incarnation
        assert await read(nodes.grpc(successor), prompt) == [payload_of(make_header(prompt, i)) for i in range(4)]


async def test_a_process_whose_loop_hangs_is_killed() -> None:
    """Fails when only a process that gets no processor counts as stalled."""
    async with running("-c", TURNING, "500") as process:
        assert process.stdin is not None
        process.stdin.write(b"hang\n")
        await process.stdin.drain()
        assert [line["logger"] for line in await ended(process)] == ["headrace.store.kill_stalled"]


async def test_the_process_that_looks_is_replaced_when_it_dies() -> None:
    """Fails when a node is looked at by nobody for the rest of its life, since memory was short once."""
    async with running("-c", TURNING, "3000") as process:
        await until(lambda: bool(watchers(process.pid)))
        (first,) = watchers(process.pid)
        os.kill(first, signal.SIGKILL)
        await until(lambda: bool(watchers(process.pid) - {first}))
        assert process.returncode is None


async def test_a_node_is_looked_at_by_one_process_that_ends_with_it(nodes) -> None:
    """Fails when a node's own process has nobody beside it, or leaves it behind."""
    killed, stopped = await nodes.start("killed"), await nodes.start("stopped")
    await until(lambda: all(watchers(node.process.pid) for node in (killed, stopped)))
    beside = [watchers(node.process.pid) for node in (killed, stopped)]
    assert [len(pids) for pids in beside] == [1, 1]
    await killed.kill()
    assert await stopped.terminate() == 0
    await until(lambda: not any(runs(pid) for pids in beside for pid in pids))


async def test_rays_actor_is_looked_at_as_any_node_is(nodes, tmp_path) -> None:
    """Fails when a node under Ray stands still for ever, since only a process that died is started again."""
    async with running("-c", ACTOR, "acts", str(tmp_path), nodes.redis_url) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert int(await process.stdout.readline()) == process.pid
        await until(lambda: bool(watchers(process.pid)))
        (beside,) = watchers(process.pid)
        process.stdin.write(b"stop\n")
        await process.stdin.drain()
        async with asyncio.timeout(120):
            assert await process.wait() == 0
        await until(lambda: not runs(beside))

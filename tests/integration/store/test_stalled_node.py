"""A store node that stands still and is not dead: it is killed, and what it held is found by the next one."""

import asyncio
import contextlib
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
    sys.executable = sys.argv[2] if len(sys.argv) > 2 else sys.executable
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
    if sys.argv[4:] == ["unwatched"]:
        sys.executable = None  # with which no process can be started, and that is no error of the world
    await actor.__init__(settings)
    print(await actor.ready(), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await actor.stop()

asyncio.run(main())
"""


@asynccontextmanager
async def running(*command: str, stderr: int = asyncio.subprocess.PIPE) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=stderr,
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
        # Said at each look until its end has come through, which on a busy machine is after the next look.
        said = next(line for line in await ended(process) if line["level"] == "CRITICAL")
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
        assert {line["logger"] for line in await ended(process)} == {"headrace.store.kill_stalled"}


async def test_a_process_is_killed_also_when_nobody_reads_its_log() -> None:
    """Fails when the process that looks hangs in its own line about the stall, in a pipe that is full."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write_end, b"." * 4_096)
    os.set_blocking(write_end, True)
    async with running("-c", TURNING, "500", stderr=write_end) as process:
        os.close(write_end)
        await until(lambda: bool(watchers(process.pid)))
        beside = watchers(process.pid)
        assert process.stdin is not None
        process.stdin.write(b"hang\n")
        await process.stdin.drain()
        async with asyncio.timeout(120):
            assert await process.wait() == -signal.SIGKILL
        await until(lambda: not any(runs(pid) for pid in beside))
    os.close(read_end)


async def test_a_process_that_nobody_can_look_at_says_so_once() -> None:
    """Fails when a machine that lets no process be started fills the log with a line for each try."""
    async with running("-c", TURNING, "10", "/nowhere/python") as process:
        assert process.stderr is not None
        said = [await process.stderr.readline()]
        await asyncio.sleep(0.5)  # dozens of tries
        process.kill()
        said += (await process.stderr.read()).splitlines()
        assert [line.strip() for line in said] == [
            b"nobody looks whether this process stands still, for now: No such file or directory"
        ]


async def test_the_process_that_looks_is_replaced_when_it_dies() -> None:
    """Fails when a node is looked at by nobody for the rest of its life, since memory was short once."""
    async with running("-c", TURNING, "10000") as process:
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


async def test_rays_actor_ends_when_it_can_be_looked_at_by_nobody(nodes, tmp_path) -> None:
    """Fails when what looks at a node dies of a bug in silence, and the node goes on without it."""
    async with running("-c", ACTOR, "unwatched", str(tmp_path), nodes.redis_url, "unwatched") as process:
        async with asyncio.timeout(120):
            _, log = await process.communicate()
        assert process.returncode == 1
        assert b"its process ends and is started again" in log

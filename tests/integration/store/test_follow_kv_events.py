"""`headrace cache events` as an operator runs it, against a real node; and the follower in the client that it uses."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
import zmq
from store_kit import fill, make_header, make_prompt

from headrace.blocks.claims import SlotReserved
from headrace.client.follow_kv_events import follow_kv_events
from headrace.config import StoreSettings
from headrace.core.block import payload_digest
from headrace.core.clock import SystemClock
from headrace.core.generation import EvictSelector
from headrace.index.memory_index import MemoryIndex, MemoryMembership
from headrace.store.service import StoreNodeService

SETTINGS = StoreSettings(
    node_id="n1", arena_mb=1, kv_events_endpoint="tcp://127.0.0.1:*", kv_events_replay_endpoint="tcp://127.0.0.1:*"
)


def store(service: StoreNodeService, token: int, num_blocks: int) -> None:
    prompt = make_prompt(token, num_blocks)
    for outcome in service.node.reserve([make_header(prompt, i) for i in range(num_blocks)]):
        assert isinstance(outcome, SlotReserved)
        fill(outcome)
        service.node.commit(outcome.reservation_id, payload_digest(outcome.buffer))


async def store_now_and_then(service: StoreNodeService) -> None:
    """Tells of a gap whoever subscribed too late for the message before."""
    for token in range(2, 200):
        store(service, token, 1)
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("layout", ["map", "array"])
async def test_an_operator_sees_what_is_held_and_then_what_changes(tmp_path: Path, layout: str):
    """Fails when the command does not begin with the inventory, or its lines are not what happened."""
    clock = SystemClock()
    membership = MemoryMembership(clock)
    settings = replace(SETTINGS, arena_dir=str(tmp_path), kv_events_layout=layout)
    service = StoreNodeService(settings, index=MemoryIndex(membership), membership=membership, clock=clock)
    await service.start()
    following = storing = None
    try:
        store(service, 1, 3)
        following = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "headrace.admin.cli", "cache", "events", "--json", "--count", "4",
            "--endpoint", service.kv_events.endpoint, "--replay-endpoint", service.kv_events.replay_endpoint,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert following.stdout is not None
        lines = [json.loads(await asyncio.wait_for(following.stdout.readline(), 60)) for _ in range(2)]
        service.node.evict(EvictSelector(), dry_run=False)
        storing = asyncio.create_task(store_now_and_then(service))
        lines += [json.loads(await asyncio.wait_for(following.stdout.readline(), 60)) for _ in range(2)]
        assert await following.wait() == 0
        assert [line["event"] for line in lines] == ["AllBlocksCleared", "BlockStored", "BlockRemoved", "BlockStored"]
        chain = make_prompt(1, 3).chain
        assert [f"{number:016x}" for number in lines[1]["block_hashes"]] == [h[-8:].hex() for h in chain]
        assert lines[2]["block_hashes"] == lines[1]["block_hashes"][::-1]
    finally:
        if following is not None and following.returncode is None:
            following.kill()
            await following.wait()
        if storing is not None:
            storing.cancel()
            await asyncio.gather(storing, return_exceptions=True)
        await service.stop()


@contextmanager
def publishing() -> Iterator[tuple[zmq.Socket[bytes], str]]:
    with zmq.Context() as context, context.socket(zmq.XPUB) as socket:
        socket.linger = 0
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        yield socket, f"tcp://127.0.0.1:{port}"


def message(sequence: int) -> list[bytes]:
    return [b"kv@n1", sequence.to_bytes(8, "big"), msgpack.packb([1.5, [{"type": "AllBlocksCleared"}], 0])]


async def test_without_replays_a_gap_is_shown_with_its_size():
    """Fails when a follower goes on over lost batches as if nothing had happened."""
    with publishing() as (socket, endpoint):
        following = follow_kv_events(endpoint)
        first = asyncio.create_task(asyncio.to_thread(next, following))
        await asyncio.to_thread(socket.recv)  # the subscription
        for sequence in (7, 8, 12):
            socket.send_multipart(message(sequence))
        seen = [await first, *(await asyncio.to_thread(lambda: [next(following) for _ in range(3)]))]
        following.close()
        assert [(event.sequence, event.name) for event in seen] == [
            (7, "AllBlocksCleared"),
            (8, "AllBlocksCleared"),
            (12, "Missed"),
            (12, "AllBlocksCleared"),
        ]
        assert seen[2].fields == {"num_batches": 3}


def test_an_endpoint_that_is_none_is_wrong_usage():
    done = subprocess.run(
        [sys.executable, "-m", "headrace.admin.cli", "cache", "events", "--endpoint", "nonsense"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "nonsense" in done.stderr


def test_without_pyzmq_the_command_names_its_extra():
    code = "import sys; sys.modules['zmq'] = None\nfrom headrace.admin.cli import main\nmain(['cache', 'events'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 8, done.stderr
    assert "pip install 'headrace[events]'" in done.stderr

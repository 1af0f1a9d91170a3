"""Draining a store node while processes die: what a killed peer had goes to another, and a restart ends the order."""

import asyncio
import os
import signal
from typing import Any

import grpc.aio
from store_calls_kit import publish, read
from store_kit import make_prompt

from headrace.wire.v1 import admin_pb2 as pb
from headrace.wire.v1 import admin_pb2_grpc as pb_grpc

PROMPTS = [make_prompt(700 + number, 12) for number in range(40)]


def peer(node: Any) -> pb.DrainPeer:
    return pb.DrainPeer(node_id=node.record.node_id, address=node.record.address)


async def committed_blocks(nodes: Any, node: Any) -> int:
    reply = await pb_grpc.CacheAdminStub(nodes.channels.to(node.record.address)).Stat(pb.StatRequest())
    return reply.holders[0].committed_blocks


async def test_a_peer_killed_while_it_takes_blocks_costs_time_and_no_block(nodes) -> None:
    """Fails when blocks that went to the killed peer are lost, or the drain hangs on it."""

    async def last_step(call: Any) -> pb.DrainNodeProgress:
        while (step := await call.read()) is not grpc.aio.EOF:
            last = step
        return last

    for attempt in range(5):  # until the kill comes before the end
        old, doomed, other = [await nodes.start(f"{name}{attempt}") for name in ("old", "doomed", "other")]
        writer = nodes.grpc(old.record)
        for prompt in PROMPTS:
            assert await publish(writer, prompt, range(12)) == 12
        admin = pb_grpc.NodeAdminStub(nodes.channels.to(old.record.address))
        order = pb.DrainRequest(peers=[peer(doomed), peer(other)], who="ops")
        draining = asyncio.create_task(last_step(admin.Drain(order)))
        async with asyncio.timeout(60):
            while await committed_blocks(nodes, doomed) < 10:  # noqa: ASYNC110 (another process has no event)
                await asyncio.sleep(0)
            os.kill(old.process.pid, signal.SIGSTOP)
            ended, _ = await asyncio.wait([draining], timeout=0.5)  # what it had said by then arrives
            if not ended:
                await doomed.kill()
            os.kill(old.process.pid, signal.SIGCONT)
            last = await draining
        if not ended:
            break
    assert (last.done, last.state, last.refused_blocks) == (True, "drained", 0)
    assert last.moved_blocks + last.present_blocks == last.total_blocks == 40 * 12
    assert dict(last.moved_to) == {other.record.node_id: 40 * 12}
    for prompt in PROMPTS:
        assert len(await read(nodes.grpc(other.record), prompt)) == 12


async def test_a_drained_node_that_is_killed_serves_again_with_what_it_held(nodes) -> None:
    """Fails when the order to drain outlives the process that got it, or the blocks do not."""
    node = await nodes.start("old")
    assert await publish(nodes.grpc(node.record), PROMPTS[0], range(12)) == 12
    admin = pb_grpc.NodeAdminStub(nodes.channels.to(node.record.address))
    assert [step.state async for step in admin.Drain(pb.DrainRequest(without_moving=True))] == ["draining"]
    assert await publish(nodes.grpc(node.record), PROMPTS[1], range(12)) == 0
    await node.kill()
    node = await nodes.start("old")
    assert not node.record.draining
    assert len(await read(nodes.grpc(node.record), PROMPTS[0])) == 12
    assert await publish(nodes.grpc(node.record), PROMPTS[1], range(12)) == 12

"""A lease that waits for a block which is being written, over real gRPC."""

import asyncio
from dataclasses import replace

import pytest
from store_calls_kit import deadline, publish
from store_kit import make_prompt

from headrace.blocks.block_waiters import BlockWaiters
from headrace.core.block import BlockHash, NamespaceId
from headrace.core.ports import Lease, LeaseTerms
from headrace.transfer.channels import build_server
from headrace.transfer.fetch_blocks import GrpcStore
from headrace.transfer.serve_blocks import serve_blocks


class PatientWaiters(BlockWaiters):
    """Waits that end by what happens, and never by time."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = self.cancelled = 0

    async def wait(self, namespace: NamespaceId, block_hash: BlockHash, *, timeout_s: float) -> None:
        assert timeout_s > 0
        self.waits += 1
        try:
            await super().wait(namespace, block_hash, timeout_s=600)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


def lease(store: GrpcStore, prompt, *, first_block: int, wait_s: float) -> "asyncio.Task[Lease]":
    return asyncio.create_task(
        store.lease_prefix(
            prompt.namespace,
            prompt.chain,
            first_block=first_block,
            deadline=deadline(),
            terms=LeaseTerms(wait_s=wait_s),
        )
    )


async def until_waiting(service, num_waiting: int) -> None:
    async with asyncio.timeout(60):
        while service.node.waiters.num_waiting != num_waiting:  # noqa: ASYNC110 (a node has no event for this)
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("way", ["grpc", "shared_memory"])
async def test_a_lease_is_answered_when_its_first_block_is_committed(nodes, way: str) -> None:
    """Fails when the wait ends with time only, at another block, or before the bytes can be read."""
    async with nodes.inside() as service:
        service.node.waiters = PatientWaiters()
        store, prompt = getattr(nodes, way)(service.record), make_prompt(1, 4)
        await publish(nodes.grpc(service.record), prompt, [0, 1])
        waiting = lease(store, prompt, first_block=3, wait_s=9.5)
        await until_waiting(service, 1)
        await publish(nodes.grpc(service.record), prompt, [2])
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await publish(nodes.grpc(service.record), prompt, [3])
        granted = await waiting
        assert [header.block_hash for header in granted.headers] == [prompt.chain[3]]
        await store.release(granted)
        assert service.node.waiters.num_waiting == 0


async def test_what_is_there_is_leased_without_waiting(nodes) -> None:
    """Fails when a caller waits for more than its first block."""
    async with nodes.inside() as service:
        service.node.waiters = waiters = PatientWaiters()
        store, prompt = nodes.grpc(service.record), make_prompt(1, 4)
        await publish(store, prompt, [0, 1])
        granted = await lease(store, prompt, first_block=1, wait_s=9.5)
        assert (len(granted.headers), waiters.waits) == (1, 0)
        await store.release(granted)


async def test_a_wait_is_over_in_time_and_answers_with_nothing(nodes) -> None:
    """Fails when a block that never comes is an error, or holds the caller longer than it asked for."""
    async with nodes.inside() as service:
        granted = await lease(nodes.grpc(service.record), make_prompt(1, 1), first_block=0, wait_s=0.1)
        assert (granted.lease_id, granted.headers) == ("", ())
        assert service.node.waiters.num_waiting == 0


async def test_a_call_that_is_cancelled_waits_no_more_at_the_node_and_takes_no_lease_later(nodes) -> None:
    """Fails when a reader that is gone keeps a place at the node, or gets blocks that nobody will give back."""
    async with nodes.inside() as service:
        store, prompt = nodes.grpc(service.record), make_prompt(1, 1)
        waiting = lease(store, prompt, first_block=0, wait_s=9.5)
        await until_waiting(service, 1)
        waiting.cancel()
        await asyncio.wait([waiting])
        await until_waiting(service, 0)
        await publish(store, prompt, [0])
        await store.end_lost_claims()
        assert service.node.stat().leased_blocks == 0


async def test_a_node_that_drains_or_stops_lets_its_callers_go(nodes) -> None:
    """Fails when callers wait for blocks that a node will not take any more."""
    async with nodes.inside() as service:
        service.node.waiters = waiters = PatientWaiters()
        store, prompt = nodes.grpc(service.record), make_prompt(1, 1)
        waiting = lease(store, prompt, first_block=0, wait_s=9.5)
        await until_waiting(service, 1)
        service.node.waiters.close()
        assert (await waiting).headers == ()
        service.node.waiters.open()
        waiting = lease(store, prompt, first_block=0, wait_s=9.5)
        await until_waiting(service, 1)
        await service.stop()
        await asyncio.wait([waiting])
        assert (waiters.waits, waiters.cancelled) == (2, 0), "it was cut off and not let go"


async def test_readers_that_wait_leave_room_for_whoever_stores_what_they_wait_for(nodes) -> None:
    """Fails when a node's calls can all be waiting ones: the prefill that they wait for is refused, and they wait in
    vain. By small bounds, half and half as the real ones are, so that a slow machine has them all at once, too."""
    waiters_max, rpcs_max = 4, 8
    async with nodes.inside() as service:
        service.node.waiters = BlockWaiters(waiters_max=waiters_max)
        server = build_server(rpcs_max=rpcs_max)
        serve_blocks(server, service.node)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        store, prompt = nodes.grpc(replace(service.record, address=f"127.0.0.1:{port}")), make_prompt(1, 1)
        waiting = [lease(store, prompt, first_block=0, wait_s=9.5) for _ in range(rpcs_max)]
        await until_waiting(service, waiters_max)
        async with asyncio.timeout(60):
            while sum(each.done() for each in waiting) < rpcs_max - waiters_max:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await publish(store, prompt, [0]) == 1
        granted = await asyncio.gather(*waiting)
        assert sum(bool(each.headers) for each in granted) >= waiters_max
        await asyncio.gather(*(store.release(each) for each in granted))
        await server.stop(None)

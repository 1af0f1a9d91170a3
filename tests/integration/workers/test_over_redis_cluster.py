"""All parts over a Redis Cluster, as the documented user: they find each other, what is asked twice is a hit, and the
doctor finds the index as it is."""

import asyncio
from contextlib import AsyncExitStack

import grpc.aio
from restricted_redis import refused, restricted

from headrace.gateway.examine_system import examine_system
from headrace.gateway.fleet import Fleet

from .traced_system import ComposedSystem, composed_system

PROMPT = "0123456789abcdef" * 6


async def ills(system: ComposedSystem) -> set[tuple[str, str]]:
    """What the doctor finds wrong."""
    async with AsyncExitStack() as opened:
        channels = {}

        def channel_to(address: str) -> grpc.aio.Channel:
            if address not in channels:
                channels[address] = grpc.aio.insecure_channel(address)
                opened.push_async_callback(channels[address].close)
            return channels[address]

        findings = await examine_system(Fleet(system.gateway._service, channel_to=channel_to))
    assert {"index", "store node", "index entries", "worker"} <= {each.check for each in findings}
    return {(each.check, each.detail) for each in findings if not each.ok}


async def test_a_system_finds_its_parts_and_its_blocks_in_a_cluster(tiny_models, empty_cluster_url, tmp_path):
    """Fails when a part asks a server for what another one has: then nobody is listed, or nothing is found."""
    async with composed_system(tiny_models, restricted(empty_cluster_url), tmp_path) as system:
        assert (await system.complete(PROMPT)).status_code == 200
        await system.published()
        async with asyncio.timeout(60):
            while True:
                asked = await system.complete(PROMPT)
                if asked.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 80:
                    break
                await asyncio.sleep(0.05)
        async with asyncio.timeout(60):
            while found := await ills(system):
                assert {check for check, _ in found} == {"index entries"}, found  # on their way there
                await asyncio.sleep(0.1)
    assert refused(empty_cluster_url) == "*0"

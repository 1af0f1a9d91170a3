"""What a lookup costs on the wire, counted between client and server."""

import asyncio
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from patient_redis import patient_index, patient_membership

from headrace.core.block import HashAlgorithm, HolderId, NamespaceId, Tier, hash_prompt
from headrace.core.limits import CHAIN_BLOCKS_MAX
from headrace.core.members import StoreNodeRecord

NAMESPACE = NamespaceId("0f" * 16)
HOLDERS = 40


@dataclass
class CountingProxy:
    """Passes bytes on; a round trip begins whenever the client speaks after the server did."""

    target_port: int
    round_trips: int = 0
    port: int = 0
    server_spoke: bool = True
    serving: list[asyncio.Task] = field(default_factory=list)

    async def __aenter__(self) -> "CountingProxy":
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        await self.server.wait_closed()
        await asyncio.gather(*self.serving, return_exceptions=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.serving.append(asyncio.current_task())
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target_port)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_client: bool) -> None:
            while chunk := await source.read(1 << 20):
                if is_client and self.server_spoke:
                    self.round_trips += 1
                self.server_spoke = not is_client
                sink.write(chunk)
                await sink.drain()
            sink.close()

        async with asyncio.TaskGroup() as pumps:
            pumps.create_task(pump(reader, up_writer, is_client=True))
            pumps.create_task(pump(up_reader, writer, is_client=False))


@pytest.mark.parametrize("algorithm", list(HashAlgorithm))
async def test_the_longest_chain_over_many_holders_takes_two_round_trips(empty_valkey_url, send_raw, algorithm):
    # Fails when a probe, a holder or a liveness record costs a round trip of its own.
    chain = hash_prompt(NAMESPACE, range(CHAIN_BLOCKS_MAX), block_tokens=1, algorithm=algorithm).chain
    writer, membership = patient_index(empty_valkey_url), patient_membership(empty_valkey_url)
    expected = {}
    for number in range(HOLDERS):
        node = StoreNodeRecord(
            node_id=str(number), incarnation=5, host="h", address="x:1", arena_path="/dev/shm/a", pid=1
        )
        await membership.announce(node, ttl_ms=60_000)
        depth = 1 + (number * 997) % 2_000 if number else CHAIN_BLOCKS_MAX
        expected[node.holder_id] = depth
        await writer.register(
            holder=node.holder_id, incarnation=5, tier=Tier.HOST, namespace=NAMESPACE, blocks=chain[:depth]
        )
    await send_raw("SCRIPT", "FLUSH")
    async with CountingProxy(urlsplit(empty_valkey_url).port) as proxy:
        index = patient_index(f"redis://127.0.0.1:{proxy.port}/0")
        for round_trips in (3, 2, 2):  # the first sends the script
            proxy.round_trips = 0
            match = await index.longest_prefix(NAMESPACE, chain)
            assert match.num_blocks_by_holder == expected
            assert proxy.round_trips == round_trips
        await index.close()
    await writer.close()
    await membership.close()


async def test_a_chain_that_nobody_has_takes_one_round_trip(empty_valkey_url):
    chain = hash_prompt(NAMESPACE, range(100), block_tokens=1, algorithm=HashAlgorithm.XXH3_128).chain
    async with CountingProxy(urlsplit(empty_valkey_url).port) as proxy:
        index = patient_index(f"redis://127.0.0.1:{proxy.port}/0")
        await index.longest_prefix(NAMESPACE, chain)
        proxy.round_trips = 0
        assert (await index.longest_prefix(NAMESPACE, chain)).num_blocks_by_holder == {}
        assert proxy.round_trips == 1
        await index.close()


async def test_a_lookup_touches_few_keys_on_the_server(empty_valkey_url, send_raw):
    # Fails when the script walks the chain: 8,192 probes for one holder instead of 2 + log2(8,192).
    chain = hash_prompt(NAMESPACE, range(CHAIN_BLOCKS_MAX), block_tokens=1, algorithm=HashAlgorithm.XXH3_128).chain
    index = patient_index(empty_valkey_url)
    await index.register(
        holder=HolderId("node:a"), incarnation=1, tier=Tier.HOST, namespace=NAMESPACE, blocks=chain[:5_000]
    )
    await send_raw("CONFIG", "RESETSTAT")
    await index.longest_prefix(NAMESPACE, chain)
    stats = (await send_raw("INFO", "commandstats")).decode()
    probes = [line for line in stats.splitlines() if line.startswith("cmdstat_hmget:")]
    assert int(probes[0].split("calls=")[1].split(",")[0]) <= 1 + 13
    await index.close()

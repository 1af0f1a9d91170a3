"""Prompts that are used once and never again: what a node and the index remember of them has a bound."""

import asyncio
import gc
from collections import OrderedDict, deque
from pathlib import Path

from patient_redis import patient_connections, patient_index, patient_membership
from store_calls_kit import CLOCK
from store_kit import fill, make_header, make_prompt

from headrace.blocks.claims import SlotReserved
from headrace.config import StoreSettings
from headrace.core.block import payload_digest
from headrace.store.service import StoreNodeService

ROUND = 1_200


def entries_of_containers() -> int:
    """How much all containers of this process hold: what is kept for ever is in one of them."""
    gc.collect()
    kinds = (dict, list, set, deque, OrderedDict)
    return sum(len(found) for found in gc.get_objects() if type(found) in kinds)


async def test_thousands_of_prompts_used_once_level_off_in_the_node_and_in_redis(
    tmp_path: Path, empty_valkey_url: str
) -> None:
    """Fails when an account, a policy or the index keeps something of each block that ever was. Only the log of
    removals grows, up to a bound of its own, and is left out."""
    index, membership = patient_index(empty_valkey_url), patient_membership(empty_valkey_url)
    connections = patient_connections(empty_valkey_url, connections_max=1, clock=CLOCK)
    settings = StoreSettings(node_id="grows", arena_mb=1, arena_dir=str(tmp_path))
    service = StoreNodeService(settings, index=index, membership=membership, clock=CLOCK)
    await service.start()
    held: list[int] = []
    keys: list[int] = []
    try:
        for rounds in range(5):
            for number in range(ROUND):
                header = make_header(make_prompt(rounds * ROUND + number, 1), 0)
                (slot,) = service.node.reserve([header])
                assert isinstance(slot, SlotReserved)
                fill(slot)
                service.node.commit(slot.reservation_id, payload_digest(slot.buffer))
                if number % 250 == 0:
                    await asyncio.sleep(0)
            async with asyncio.timeout(60):
                while len(service._changes):  # noqa: ASYNC110 (the queue has no event for us)
                    await asyncio.sleep(0.01)
            held.append(entries_of_containers() - len(service._removals._removals))
            async with connections.call() as redis:
                keys += await redis.round_trip(("DBSIZE",))
        blocks = service.node.stat().committed_blocks
        assert blocks < ROUND / 4
        assert all(count <= 2 * blocks + 20 for count in keys), keys
        assert held[4] - held[1] < ROUND / 4, held
    finally:
        await service.stop(remove_arena=True)
        await connections.close()
        await index.close()
        await membership.close()

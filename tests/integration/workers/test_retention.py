"""A request's time to live in every tier of a real worker and a real store node."""

from headrace.core.clock import SystemClock
from headrace.core.generation import BlockInfo, CacheControl, EvictSelector
from headrace.core.limits import LIST_BLOCKS_MAX
from headrace.core.retention import Retention

FOR_TEN_MINUTES = CacheControl(retention=Retention(ttl_s=600))


def seconds_left(blocks: list[BlockInfo]) -> list[int | None]:
    """Of each block, by position; None: not bounded."""
    now = SystemClock().unix_ms()
    ordered = sorted(blocks, key=lambda block: block.position)
    return [round((b.expires_unix_ms - now) / 1_000) if b.expires_unix_ms else None for b in ordered]


async def test_a_request_bounds_its_blocks_on_the_device_and_in_the_arena(make_worker, store_node, prompts):
    """Fails when one tier of the two, or what the answer filled, is kept longer than was asked for."""
    one, two = await make_worker("one"), await make_worker("two")

    def everywhere() -> list[list[int | None]]:
        listings = [list(each.worker.list_device(EvictSelector(), limit=LIST_BLOCKS_MAX).blocks) for each in (one, two)]
        listings.append(store_node.node.list_blocks(EvictSelector())[0])
        return [seconds_left(blocks) for blocks in listings]

    await one.decode(prompts(30), cache=FOR_TEN_MINUTES, max_tokens=12)  # 3 blocks of the prompt, 2 of the answer
    await one.published()
    await two.decode(prompts(30), cache=FOR_TEN_MINUTES)  # loads them from the node
    await two.published()
    device_one, device_two, arena = everywhere()
    assert len(device_one) == len(arena) == 5
    assert len(device_two) == 4
    assert all(left is not None and 540 <= left <= 601 for left in (*device_one, *device_two, *arena))
    assert (await one.decode(prompts(30))).cached.device == 24  # a request without a bound uses three of them
    await one.published()
    device_one, device_two, _ = everywhere()
    assert [left is None for left in device_one] == [True, True, True, True, False]  # and computes the fourth again
    assert None not in device_two

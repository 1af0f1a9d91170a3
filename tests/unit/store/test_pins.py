"""Pins: what they keep, what they take, when they are refused, when they end, and that a crash does not lose them."""

import pytest
from store_kit import ChangeLog, StoreKit, fill, make_branch, make_header, make_kit, make_prompt

from headrace.blocks.claims import SlotReserved
from headrace.core.generation import ControlOutcome, EvictSelector
from headrace.core.ports import NotStored
from headrace.core.retention import NO_END_UNIX_MS, Retention
from headrace.store.node_rules import NodeRules
from headrace.store.recover_arena import recover_arena
from headrace.store.store_node import StoreNode

UNIT = 4_096


def named(*hashes: bytes) -> EvictSelector:
    return EvictSelector(block_hashes=hashes)


def restarted(kit: StoreKit) -> StoreKit:
    """The process was killed between two steps; the next one is on the same memory."""
    arena, changes = kit.arena.reattached(), ChangeLog()
    node = StoreNode(arena, node_id="n1", clock=kit.clock, changes=changes, recovered=recover_arena(arena))
    node.check_integrity()
    return StoreKit(kit.clock, arena, changes, node)


def test_a_pin_keeps_the_whole_prefix_through_a_flood_that_takes_everything_else() -> None:
    """Fails when room is made without asking for pins."""
    kit, kept, other = make_kit(blocks=8), make_prompt(1, 3), make_prompt(2, 3)
    kit.store(kept, range(3))
    kit.store(other, range(3))
    report = kit.node.pin(EvictSelector(prefix_token_ids=kept.token_ids), until_unix_ms=None)
    assert (report.outcome, report.blocks, report.tokens, report.bytes) == (ControlOutcome.DONE, 3, 12, 3 * UNIT)
    assert (report.pinned_bytes, report.pin_bytes_max, report.until_unix_ms) == (3 * UNIT, 4 * UNIT, 0)
    for flood in range(10, 20):
        kit.clock.seconds += 1
        kit.store(make_prompt(flood, 5), range(5))
        kit.node.check_integrity()
    assert (kit.held(kept), kit.held(other)) == (3, 0)


def test_a_pin_means_the_last_full_block_of_the_prefix_and_not_what_follows() -> None:
    kit, prompt = make_kit(), make_prompt(1, 5)
    kit.store(prompt, range(5))
    report = kit.node.pin(EvictSelector(prefix_token_ids=prompt.token_ids[:10]), until_unix_ms=None)
    assert report.blocks == 2
    infos, _ = kit.node.list_blocks(EvictSelector(), limit=9)
    assert [info.protected_by_pin for info in infos] == [True, True, False, False, False]
    assert [info.pinned_until_unix_ms for info in infos] == [0, NO_END_UNIX_MS, 0, 0, 0]


def test_pins_take_the_bytes_of_the_union_of_their_prefixes() -> None:
    kit = make_kit(blocks=16)
    branches = [make_branch(1, tail, head_blocks=3, tail_blocks=2) for tail in (5, 6)]
    for branch in branches:
        kit.store(branch, range(5))
    first = kit.node.pin(named(branches[0].chain[4]), until_unix_ms=None)
    assert (first.blocks, first.pinned_bytes) == (5, 5 * UNIT)
    second = kit.node.pin(named(branches[1].chain[4]), until_unix_ms=None)
    assert (second.blocks, second.bytes, second.pinned_bytes) == (5, 5 * UNIT, 7 * UNIT)
    assert kit.node.stat().pinned_bytes == 7 * UNIT
    kit.node.check_integrity()
    taken_back = kit.node.unpin(named(branches[0].chain[4]))
    assert (taken_back.blocks, taken_back.pinned_bytes) == (2, 5 * UNIT)
    assert kit.node.unpin(named(branches[1].chain[4])).pinned_bytes == 0
    kit.node.check_integrity()


def test_a_pin_beyond_its_share_is_refused_with_the_arithmetic_and_changes_nothing() -> None:
    """Eight blocks, of which pins may take four."""
    kit, first, second = make_kit(blocks=8), make_prompt(1, 3), make_prompt(2, 2)
    kit.store(first, range(3))
    kit.store(second, range(2))
    kit.node.pin(named(first.chain[2]), until_unix_ms=None)
    report = kit.node.pin(named(second.chain[1]), until_unix_ms=None)
    assert report.outcome is ControlOutcome.REFUSED
    assert (
        report.why == "8192 bytes more than the 12288 pinned already are 20480; pins may take 16384, 50% of the arena"
    )
    assert (report.blocks, report.pinned_bytes) == (0, 3 * UNIT)
    assert kit.node.counters.refused_pins == 1
    assert kit.held(second) == 2
    assert kit.node.pin(named(second.chain[0]), until_unix_ms=None).outcome is ControlOutcome.DONE
    # Full to the last byte, a pin that takes nothing more still goes through.
    assert kit.node.pin(named(first.chain[0]), until_unix_ms=None).pinned_bytes == 4 * UNIT
    kit.node.check_integrity()


def test_a_pin_of_several_blocks_is_all_or_nothing() -> None:
    kit, first, second = make_kit(blocks=8), make_prompt(1, 3), make_prompt(2, 3)
    kit.store(first, range(3))
    kit.store(second, range(3))
    report = kit.node.pin(named(first.chain[2], second.chain[2]), until_unix_ms=None)
    assert (report.outcome, report.pinned_bytes) == (ControlOutcome.REFUSED, 0)
    assert kit.node.evict(EvictSelector(), dry_run=True).blocks == 6


def test_a_pin_ends_at_its_moment_and_can_be_prolonged_until_then() -> None:
    kit, prompt = make_kit(), make_prompt(1, 2)
    kit.store(prompt, range(2))
    kit.node.pin(named(prompt.chain[1]), until_unix_ms=kit.clock.unix_ms() + 5_000)
    longer = kit.node.pin(named(prompt.chain[1]), until_unix_ms=kit.clock.unix_ms() + 9_000)
    assert (longer.until_unix_ms, longer.pinned_bytes) == (kit.clock.unix_ms() + 9_000, 2 * UNIT)
    kit.clock.seconds += 8.999
    assert kit.node.expire() == 0
    assert kit.node.evict(EvictSelector(), dry_run=True).blocks == 0
    kit.clock.seconds += 0.001
    assert kit.node.expire() == 1
    kit.node.check_integrity()
    assert kit.node.evict(EvictSelector(), dry_run=False).blocks == 2


def test_pins_end_in_the_order_of_their_ends() -> None:
    kit, prompts = make_kit(blocks=16), [make_prompt(n, 1) for n in range(4)]
    for seconds, prompt in zip((7, 3, 9, 5), prompts, strict=True):
        kit.store(prompt, range(1))
        kit.node.pin(named(prompt.chain[0]), until_unix_ms=kit.clock.unix_ms() + seconds * 1_000)
    ended = []
    for _ in range(10):
        kit.clock.seconds += 1
        ended.append(kit.node.expire())
        kit.node.check_integrity()
    assert ended == [0, 0, 1, 0, 1, 0, 1, 0, 1, 0]


def test_an_operators_eviction_leaves_what_is_pinned_and_counts_it() -> None:
    kit, prompt = make_kit(), make_prompt(1, 4)
    kit.store(prompt, range(4))
    kit.node.pin(named(prompt.chain[1]), until_unix_ms=None)
    report = kit.node.evict(EvictSelector(), dry_run=False)
    assert (report.blocks, report.skipped_pinned_blocks, report.skipped_leased_blocks) == (2, 2, 0)
    assert kit.held(prompt) == 2
    kit.node.unpin(named(prompt.chain[1]))
    assert kit.node.evict(EvictSelector(), dry_run=False).blocks == 2


def test_what_is_unpinned_can_leave_for_room_at_once() -> None:
    """Fails when the policy is not offered the block again: the flood then finds no victim."""
    kit, prompt = make_kit(blocks=4), make_prompt(1, 2)
    kit.store(prompt, range(2))
    kit.node.pin(named(prompt.chain[1]), until_unix_ms=None)
    flood = make_prompt(2, 3)
    kit.store(flood, range(2))
    lease = kit.node.lease(flood.namespace, flood.chain, first_block=0)
    (refused,) = kit.node.reserve([make_header(make_prompt(3, 1), 0)])
    assert isinstance(refused, NotStored)
    kit.node.unpin(named(prompt.chain[1]))
    (granted,) = kit.node.reserve([make_header(make_prompt(3, 1), 0)])
    assert isinstance(granted, SlotReserved)
    assert kit.held(prompt) == 1
    kit.node.release(lease.lease_id)
    kit.node.check_integrity()


def test_only_what_can_be_read_is_pinned() -> None:
    kit, prompt = make_kit(), make_prompt(1, 2)
    assert kit.node.pin(named(prompt.chain[0]), until_unix_ms=None).outcome is ControlOutcome.NOT_HELD
    (reserved, _) = kit.node.reserve([make_header(prompt, i) for i in range(2)])
    fill(reserved)
    assert kit.node.pin(named(*prompt.chain), until_unix_ms=None).outcome is ControlOutcome.NOT_HELD
    kit.store(make_prompt(2, 1), range(1))
    assert kit.node.unpin(named(make_prompt(2, 1).chain[0])).why == "it is not pinned"


def test_broken_bytes_win_over_a_pin() -> None:
    """Fails when a pinned block that does not check out is kept, or keeps counting."""
    kit, prompt = make_kit(), make_prompt(1, 3)
    kit.store(prompt, range(3))
    kit.node.pin(named(prompt.chain[2]), until_unix_ms=None)
    lease = kit.node.lease(prompt.namespace, prompt.chain, first_block=0)
    other = kit.node.lease(prompt.namespace, prompt.chain, first_block=0)
    kit.arena.payload(lease.blocks[1].slot, 4)[:] = b"torn"
    kit.node.release(lease.lease_id, [1])
    kit.node.check_integrity()
    assert kit.held(prompt) == 1
    assert (kit.node.stat().pinned_bytes, kit.node.counters.dropped_pins) == (0, 1)
    kit.node.release(other.lease_id)
    kit.node.check_integrity()
    assert kit.arena.free_bytes == kit.arena.data_bytes - UNIT


def test_pins_survive_a_crash_with_their_ends() -> None:
    kit, prompt, timed = make_kit(), make_prompt(1, 2), make_prompt(2, 2)
    kit.store(prompt, range(2))
    kit.store(timed, range(2))
    kit.node.pin(named(prompt.chain[1]), until_unix_ms=None)
    kit.node.pin(named(timed.chain[0]), until_unix_ms=kit.clock.unix_ms() + 60_000)
    kit = restarted(kit)
    assert kit.node.stat().pinned_bytes == 3 * UNIT
    assert kit.node.evict(EvictSelector(), dry_run=False).blocks == 1
    kit.clock.seconds += 60
    kit = restarted(kit)
    kit.node.expire()
    assert kit.node.evict(EvictSelector(), dry_run=False).blocks == 1
    kit.node.unpin(named(prompt.chain[1]))
    kit = restarted(kit)
    assert kit.node.stat().pinned_bytes == 0


def test_pins_that_are_more_than_a_smaller_share_stay_and_no_more_are_taken() -> None:
    kit, prompt, other = make_kit(), make_prompt(1, 3), make_prompt(2, 1)
    kit.store(prompt, range(3))
    kit.store(other, range(1))
    kit.node.pin(named(prompt.chain[2]), until_unix_ms=None)
    arena = kit.arena.reattached()
    node = StoreNode(
        arena, node_id="n1", clock=kit.clock, recovered=recover_arena(arena), rules=NodeRules(pin_share=0.25)
    )
    assert (node.stat().pinned_bytes, node.stat().pin_bytes_max) == (3 * UNIT, 2 * UNIT)
    assert node.pin(named(other.chain[0]), until_unix_ms=None).outcome is ControlOutcome.REFUSED
    assert node.pin(named(prompt.chain[0]), until_unix_ms=None).outcome is ControlOutcome.DONE
    node.check_integrity()


@pytest.mark.parametrize("pinned_first", [True, False])
def test_a_pin_wins_over_a_time_to_live(pinned_first: bool) -> None:
    kit, prompt = make_kit(), make_prompt(1, 2)
    if pinned_first:
        kit.store(prompt, range(2))
        kit.node.pin(named(prompt.chain[1]), until_unix_ms=None)
        kit.node.set_ttl(named(prompt.chain[0]), expires_unix_ms=kit.clock.unix_ms() + 20_000)
    else:
        kit.store(prompt, range(2), retention=Retention(ttl_s=20))
        kit.node.pin(named(prompt.chain[1]), until_unix_ms=None)
    kit.clock.seconds += 100
    kit.node.expire()
    kit.node.check_integrity()
    assert kit.held(prompt) == 2
    kit.node.unpin(named(prompt.chain[1]))
    kit.node.expire()
    kit.node.check_integrity()
    assert kit.held(prompt) == 0

"""Times to live: they slide with use, leave leaves first, survive a crash; an operator's order is a fixed moment."""

from dataclasses import replace
from pathlib import Path

import pytest
from disk_kit import DiskKit, make_disk_kit
from store_kit import ChangeLog, StoreKit, fill, make_branch, make_header, make_kit, make_prompt

from headrace.blocks.claims import SlotReserved
from headrace.core.block import HashedPrompt, payload_digest
from headrace.core.errors import LeaseExpired
from headrace.core.generation import ControlOutcome, EvictSelector
from headrace.core.retention import KEEP, Retention
from headrace.core.store_limits import BACKGROUND_REMOVALS_MAX
from headrace.store.recover_arena import recover_arena
from headrace.store.removal_log import TIME_OVER, RemovalLog
from headrace.store.store_node import StoreNode

MINUTE = Retention(ttl_s=60)
HOUR = Retention(ttl_s=3_600)


def named(*hashes: bytes) -> EvictSelector:
    return EvictSelector(block_hashes=hashes)


def use(kit: StoreKit, prompt: HashedPrompt, retention: Retention | None, *, first_block: int = 0) -> None:
    kit.node.release(
        kit.node.lease(prompt.namespace, prompt.chain, first_block=first_block, retention=retention).lease_id
    )


def wait(kit: StoreKit, seconds: float) -> None:
    kit.clock.seconds += seconds
    kit.node.expire()
    kit.node.check_integrity()


def restarted(kit: StoreKit) -> StoreKit:
    """The process was killed between two steps; the next one is on the same memory."""
    arena, changes = kit.arena.reattached(), ChangeLog()
    node = StoreNode(arena, node_id="n1", clock=kit.clock, changes=changes, recovered=recover_arena(arena))
    node.check_integrity()
    return StoreKit(kit.clock, arena, changes, node)


def expiries(kit: StoreKit) -> list[float]:
    """Seconds left of each listed block, heads first; 0: no bound."""
    infos, _ = kit.node.list_blocks(EvictSelector(tier="host"), limit=100)
    return [info.expires_unix_ms and (info.expires_unix_ms - kit.clock.unix_ms()) / 1_000 for info in infos]


def test_blocks_go_when_nobody_used_them_for_their_time_to_live() -> None:
    kit, prompt, kept = make_kit(), make_prompt(1, 3), make_prompt(2, 2)
    kit.store(prompt, range(3), retention=MINUTE)
    kit.store(kept, range(2))
    wait(kit, 59.9)
    assert kit.held(prompt) == 3
    wait(kit, 0.1)
    assert (kit.held(prompt), kit.held(kept)) == (0, 2)
    assert kit.node.counters.expired_blocks == 3
    wait(kit, 1_000_000)
    assert kit.held(kept) == 2


def test_a_use_starts_the_time_anew_for_all_before_the_used_block() -> None:
    kit, prompt = make_kit(), make_prompt(1, 4)
    kit.store(prompt, range(4), retention=MINUTE)
    wait(kit, 40)
    lease = kit.node.lease(prompt.namespace, prompt.chain[:3], first_block=2, retention=MINUTE)
    kit.node.release(lease.lease_id)
    assert expiries(kit) == [60, 60, 60, 20]
    wait(kit, 20)
    assert kit.held(prompt) == 3
    wait(kit, 39.9)
    assert kit.held(prompt) == 3
    wait(kit, 0.1)
    assert kit.held(prompt) == 0


def test_the_longest_that_any_user_asked_for_holds() -> None:
    kit, prompt = make_kit(), make_prompt(1, 1)
    kit.store(prompt, range(1), retention=MINUTE)
    use(kit, prompt, HOUR)
    use(kit, prompt, MINUTE)
    assert expiries(kit) == [3_600]
    wait(kit, 3_590)
    use(kit, prompt, MINUTE)
    assert expiries(kit) == [60]
    use(kit, prompt, KEEP)
    assert expiries(kit) == [0]
    use(kit, prompt, MINUTE)
    wait(kit, 1_000_000)
    assert kit.held(prompt) == 1


def test_offering_a_stored_block_again_is_a_use() -> None:
    kit, prompt = make_kit(), make_prompt(1, 2)
    kit.store(prompt, range(2), retention=MINUTE)
    kit.clock.seconds += 50
    kit.node.reserve([make_header(prompt, 1)], retention=MINUTE)
    assert expiries(kit) == [60, 60]
    assert kit.node.evict(EvictSelector(idle_for_s=50), dry_run=True).blocks == 0


def test_an_operators_reading_keeps_nothing_longer() -> None:
    kit, prompt = make_kit(), make_prompt(1, 2)
    kit.store(prompt, range(2), retention=MINUTE)
    kit.clock.seconds += 50
    use(kit, prompt, None)
    assert expiries(kit) == [10, 10]


def test_a_block_that_stays_longer_keeps_all_before_it() -> None:
    """Fails when a parent may leave, or leaves the disk, before a child of another request."""
    kit = make_kit(blocks=16)
    short, long = (make_branch(1, tail, head_blocks=2, tail_blocks=2) for tail in (5, 6))
    kit.store(short, range(4), retention=MINUTE)
    kit.store(long, range(2, 4), retention=HOUR)
    wait(kit, 60)
    assert (kit.held(short), kit.held(long)) == (2, 4)
    assert expiries(kit) == [3_540] * 4
    wait(kit, 3_540)
    assert kit.held(long) == 0


def test_the_time_runs_from_the_commit_whatever_order_the_blocks_are_committed_in() -> None:
    kit, prompt = make_kit(), make_prompt(1, 3)
    (head,) = kit.node.reserve([make_header(prompt, 0)], retention=Retention(ttl_s=10))
    (middle,) = kit.node.reserve([make_header(prompt, 1)], retention=MINUTE)
    (tail,) = kit.node.reserve([make_header(prompt, 2)], retention=HOUR)
    kit.clock.seconds += 5
    for reserved in (tail, middle, head):
        assert isinstance(reserved, SlotReserved)
        fill(reserved)
        kit.node.commit(reserved.reservation_id, payload_digest(reserved.buffer))
        kit.node.check_integrity()
    assert expiries(kit) == [3_600] * 3


def test_what_is_read_when_its_time_is_over_goes_when_the_reader_is_done() -> None:
    kit, prompt = make_kit(), make_prompt(1, 2)
    kit.store(prompt, range(2), retention=Retention(ttl_s=10))
    lease = kit.node.lease(prompt.namespace, prompt.chain, first_block=0, retention=None)
    wait(kit, 20)
    assert kit.held(prompt) == 2
    kit.node.release(lease.lease_id)
    wait(kit, 0)
    assert kit.held(prompt) == 0


def test_times_to_live_survive_a_crash() -> None:
    kit, prompt = make_kit(), make_prompt(1, 3)
    kit.store(prompt, range(2), retention=MINUTE)
    kit.store(prompt, range(2, 3), retention=Retention(ttl_s=90, on_disk=False))
    kit = restarted(kit)
    assert expiries(kit) == [90, 90, 90]
    use(kit, prompt, HOUR)
    kit = restarted(kit)
    assert expiries(kit) == [3_600] * 3
    kit.clock.seconds += 10_000
    kit = restarted(kit)
    wait(kit, 0)
    assert kit.held(prompt) == 0
    assert kit.changes.registered == set()


def test_what_went_is_remembered_with_the_reason() -> None:
    kit = make_kit()
    removals = RemovalLog(kit.clock)
    kit = make_kit(follower=removals)
    kit.node.room.because = removals.because
    prompt, ordered = make_prompt(1, 1), make_prompt(2, 1)
    kit.store(prompt, range(1), retention=MINUTE)
    kit.store(ordered, range(1))
    kit.node.set_ttl(named(ordered.chain[0]), expires_unix_ms=kit.clock.unix_ms() + 30_000)
    wait(kit, 60)
    for gone in (prompt, ordered):
        removal = removals.find(gone.namespace, gone.chain[0])
        assert removal is not None
        assert removal.reason == TIME_OVER


def test_a_step_of_expiry_is_bounded_and_the_next_one_goes_on() -> None:
    """One chain and many heads: with the sliding time each leaf alone, with the order as one subtree."""
    for ordered in (False, True):
        kit = make_kit(blocks=1_022)
        prompt = make_prompt(1, 700)
        kit.store(prompt, range(700), retention=KEEP if ordered else MINUTE)
        if ordered:
            kit.node.set_ttl(named(prompt.chain[0]), expires_unix_ms=kit.clock.unix_ms() + 60_000)
        kit.clock.seconds += 60
        assert kit.node.expire() == BACKGROUND_REMOVALS_MAX
        assert kit.node.has_due
        assert kit.held(prompt) == 700 - BACKGROUND_REMOVALS_MAX
        kit.node.check_integrity()
        assert kit.node.expire() == 700 - BACKGROUND_REMOVALS_MAX
        assert not kit.node.has_due
        kit.node.check_integrity()


def test_an_order_takes_the_whole_subtree_at_its_moment_whatever_the_use() -> None:
    kit = make_kit(blocks=16)
    branches = [make_branch(1, tail, head_blocks=2, tail_blocks=2) for tail in (5, 6)]
    for branch in branches:
        kit.store(branch, range(4))
    other = make_prompt(9, 2)
    kit.store(other, range(2))
    report = kit.node.set_ttl(
        EvictSelector(prefix_token_ids=branches[0].token_ids[:8]), expires_unix_ms=kit.clock.unix_ms() + 30_000
    )
    assert (report.outcome, report.blocks, report.tokens) == (ControlOutcome.DONE, 5, 20)
    assert (report.bytes, report.until_unix_ms) == (5 * 4_096, kit.clock.unix_ms() + 30_000)
    assert sorted(expiries(kit)) == [0, 0, 0, 30, 30, 30, 30, 30]
    wait(kit, 29.9)
    for branch in branches:
        use(kit, branch, HOUR)
    assert [kit.held(branch) for branch in branches] == [4, 4]
    wait(kit, 0.1)
    assert [kit.held(branch) for branch in (*branches, other)] == [1, 1, 2]


def test_an_order_hides_at_once_what_is_read_and_frees_it_when_the_last_reader_is_done() -> None:
    """Fails when a prefix that is always read by somebody outlives the order."""
    kit, prompt = make_kit(), make_prompt(1, 3)
    kit.store(prompt, range(2))
    kit.node.set_ttl(named(prompt.chain[0]), expires_unix_ms=kit.clock.unix_ms() + 10_000)
    kit.clock.seconds += 9
    (reserved,) = kit.node.reserve([make_header(prompt, 2)])
    lease = kit.node.lease(prompt.namespace, prompt.chain, first_block=0)
    wait(kit, 1)
    assert kit.held(prompt) == 0
    assert kit.changes.registered == set()
    assert len(list(kit.node.leased_payloads(lease.lease_id))) == 2
    assert isinstance(reserved, SlotReserved)
    with pytest.raises(LeaseExpired):
        kit.node.commit(reserved.reservation_id, 1)
    kit.node.release(lease.lease_id)
    kit.node.check_integrity()
    assert kit.arena.free_bytes == kit.arena.data_bytes


def test_a_broken_block_that_waits_for_its_reader_is_not_ordered_about_again() -> None:
    kit, prompt = make_kit(), make_prompt(1, 2)
    kit.store(prompt, range(2))
    kit.node.set_ttl(named(prompt.chain[0]), expires_unix_ms=kit.clock.unix_ms() + 10_000)
    first, second = (kit.node.lease(prompt.namespace, prompt.chain, first_block=0) for _ in range(2))
    kit.arena.payload(first.blocks[0].slot, 4)[:] = b"torn"
    kit.node.release(first.lease_id, [0])
    wait(kit, 10)
    assert kit.node.counters.expired_blocks == 0
    kit.node.release(second.lease_id)
    wait(kit, 0)
    assert kit.arena.free_bytes == kit.arena.data_bytes


def test_an_order_can_be_changed_and_taken_back() -> None:
    kit, prompt = make_kit(), make_prompt(1, 2)
    kit.store(prompt, range(2), retention=HOUR)
    selector, now = named(prompt.chain[0]), kit.clock.unix_ms()
    assert kit.node.set_ttl(selector, expires_unix_ms=None).outcome is ControlOutcome.NOT_HELD
    kit.node.set_ttl(selector, expires_unix_ms=now + 30_000)
    kit.node.set_ttl(selector, expires_unix_ms=now + 20_000)
    kit.node.set_ttl(selector, expires_unix_ms=now + 50_000)
    wait(kit, 49)
    assert kit.held(prompt) == 2
    taken_back = kit.node.set_ttl(selector, expires_unix_ms=None)
    assert (taken_back.outcome, taken_back.blocks, taken_back.until_unix_ms) == (ControlOutcome.DONE, 2, 0)
    wait(kit, 100)
    assert expiries(kit) == [3_451, 3_451]
    assert kit.node.set_ttl(named(make_prompt(2, 1).chain[0]), expires_unix_ms=1).outcome is ControlOutcome.NOT_HELD


def test_an_order_later_than_the_sliding_time_is_kept_for_what_could_not_leave_then() -> None:
    """Fails when the one moment that passes without effect takes the other one's watch with it."""
    kit, prompt = make_kit(), make_prompt(1, 2)
    kit.store(prompt, range(2), retention=Retention(ttl_s=10))
    kit.node.set_ttl(named(prompt.chain[0]), expires_unix_ms=kit.clock.unix_ms() + 40_000)
    lease = kit.node.lease(prompt.namespace, prompt.chain, first_block=0, retention=None)
    wait(kit, 20)
    assert kit.held(prompt) == 2
    wait(kit, 20)
    assert kit.held(prompt) == 0
    kit.node.release(lease.lease_id)
    kit.node.check_integrity()


def test_orders_survive_a_crash() -> None:
    kit, prompt = make_kit(), make_prompt(1, 3)
    kit.store(prompt, range(3))
    kit.node.set_ttl(named(prompt.chain[1]), expires_unix_ms=kit.clock.unix_ms() + 30_000)
    kit = restarted(kit)
    wait(kit, 30)
    assert kit.held(prompt) == 1
    kit = restarted(kit)
    assert kit.held(prompt) == 1


def test_under_an_order_only_what_a_pin_keeps_stays_until_the_pin_ends() -> None:
    kit = make_kit(blocks=16)
    pinned, other = (make_branch(1, tail, head_blocks=2, tail_blocks=3) for tail in (5, 6))
    kit.store(pinned, range(5))
    kit.store(other, range(5))
    kit.node.pin(named(pinned.chain[3]), until_unix_ms=kit.clock.unix_ms() + 60_000)
    kit.node.set_ttl(named(pinned.chain[0]), expires_unix_ms=kit.clock.unix_ms() + 30_000)
    wait(kit, 30)
    assert (kit.held(pinned), kit.held(other)) == (4, 2)
    wait(kit, 29)
    assert kit.held(pinned) == 4
    wait(kit, 1)
    assert kit.held(pinned) == 0


def test_a_second_pin_does_not_keep_what_the_first_one_let_go_after_the_order() -> None:
    kit = make_kit(blocks=16)
    first, second = (make_branch(1, tail, head_blocks=2, tail_blocks=2) for tail in (5, 6))
    for branch in (first, second):
        kit.store(branch, range(4))
        kit.node.pin(named(branch.chain[3]), until_unix_ms=None)
    kit.node.set_ttl(named(first.chain[0]), expires_unix_ms=kit.clock.unix_ms() + 10_000)
    wait(kit, 10)
    kit.node.unpin(named(first.chain[3]))
    wait(kit, 0)
    assert (kit.held(first), kit.held(second)) == (2, 4)


# On disk


def fill_arena(kit: DiskKit, *, first: int = 100, prompts: int = 4) -> None:
    """Push everything that can leave out of an arena of four blocks."""
    for n in range(first, first + prompts):
        kit.clock.seconds += 0.001
        kit.store(make_prompt(n, 1), range(1))
    kit.node.check_integrity()


@pytest.mark.parametrize("retention", [MINUTE, Retention(on_disk=False)])
def test_what_has_a_bounded_time_or_shall_not_be_on_disk_is_not_written_there(
    tmp_path: Path, retention: Retention
) -> None:
    kit, prompt = make_disk_kit(tmp_path), make_prompt(1, 2)
    kit.store(prompt, range(2), retention=retention)
    fill_arena(kit)
    assert kit.node.disk.counters.evicted_by_operator == 0, "it was written and then taken back"
    kit.work()
    assert kit.held(prompt) == 0
    kit.restart()
    assert kit.held(prompt) == 0


def test_a_user_without_a_bound_lets_the_block_go_to_disk_after_all(tmp_path: Path) -> None:
    kit, prompt = make_disk_kit(tmp_path), make_prompt(1, 2)
    kit.store(prompt, range(2), retention=Retention(ttl_s=60, on_disk=False))
    use(kit, prompt, KEEP)
    fill_arena(kit)
    kit.work()
    assert kit.held(prompt) == 2
    kit.clock.seconds += 1_000
    kit.restart()
    assert kit.held(prompt) == 2


def test_a_block_that_the_disk_keeps_has_no_bound_when_it_is_stored_again_with_one(tmp_path: Path) -> None:
    """Fails when the copy of somebody who asked for no bound leaves with the time of somebody who did."""
    kit, prompt = make_disk_kit(tmp_path), make_prompt(1, 1)
    kit.store(prompt, range(1))
    fill_arena(kit)
    kit.work()
    kit.store(prompt, range(1), retention=MINUTE)
    wait(kit, 1_000)
    assert kit.held(prompt) == 1
    assert kit.node.lease(prompt.namespace, prompt.chain, first_block=0).blocks


def test_an_order_takes_both_tiers_and_nothing_comes_back_after_a_crash(tmp_path: Path) -> None:
    kit, prompt = make_disk_kit(tmp_path), make_prompt(1, 3)
    kit.store(prompt, range(3))
    fill_arena(kit)
    kit.work()
    assert kit.promote(replace(prompt, chain=prompt.chain[:2])) == 2
    report = kit.node.set_ttl(named(prompt.chain[0]), expires_unix_ms=kit.clock.unix_ms() + 30_000)
    assert (report.blocks, report.tokens) == (2 + 3, 5 * 4)
    wait(kit, 30)
    assert kit.held(prompt) == 0
    kit.work()
    kit.restart()
    assert kit.held(prompt) == 0
    kit.node.check_integrity()


def test_an_order_takes_from_disk_what_stands_on_a_pinned_block(tmp_path: Path) -> None:
    kit, prompt = make_disk_kit(tmp_path), make_prompt(1, 3)
    kit.store(prompt, range(3))
    fill_arena(kit)
    kit.work()
    assert kit.promote(replace(prompt, chain=prompt.chain[:1])) == 1
    kit.node.pin(named(prompt.chain[0]), until_unix_ms=None)
    report = kit.node.set_ttl(named(prompt.chain[0]), expires_unix_ms=kit.clock.unix_ms() + 30_000)
    assert report.why == "what a pin keeps goes when that ends"
    wait(kit, 30)
    assert kit.held(prompt) == 1
    assert [kit.node.disk.get((prompt.namespace, block)) is None for block in prompt.chain] == [False, True, True]
    kit.node.unpin(named(prompt.chain[0]))
    wait(kit, 0)
    assert kit.held(prompt) == 0


def test_a_block_with_an_order_that_leaves_for_room_takes_its_copy_on_disk_along(tmp_path: Path) -> None:
    """Its order stands in the arena's record; fails when the disk keeps the block without it."""
    kit, prompt = make_disk_kit(tmp_path), make_prompt(1, 2)
    kit.store(prompt, range(2))
    fill_arena(kit)
    kit.work()
    kit.promote(prompt)
    kit.node.set_ttl(named(prompt.chain[0]), expires_unix_ms=kit.clock.unix_ms() + 1_000_000)
    fill_arena(kit, first=200, prompts=40)
    kit.work()
    assert kit.held(prompt) == 0
    kit.restart()
    assert kit.held(prompt) == 0


def test_what_the_disk_alone_has_cannot_be_ordered_about_and_the_answer_says_why(tmp_path: Path) -> None:
    kit, prompt = make_disk_kit(tmp_path), make_prompt(1, 2)
    kit.store(prompt, range(2))
    fill_arena(kit)
    for report in (
        kit.node.pin(EvictSelector(prefix_token_ids=prompt.token_ids), until_unix_ms=None),
        kit.node.set_ttl(named(prompt.chain[1]), expires_unix_ms=kit.clock.unix_ms() + 30_000),
    ):
        assert (report.outcome, report.why) == (ControlOutcome.NOT_HELD, "on disk only: read it once, or warm it")
    kit.work()
    kit.promote(prompt)
    assert kit.node.pin(EvictSelector(prefix_token_ids=prompt.token_ids), until_unix_ms=None).blocks == 2


def test_a_lease_says_which_of_the_blocks_and_of_those_before_them_are_to_go_by_order() -> None:
    """Fails when a reader cannot know that what it copies is ordered away, or hears of what is over or taken back."""
    kit, prompt = make_kit(), make_prompt(1, 6)
    kit.store(prompt, range(6))

    def told(num_blocks: int = 6, first_block: int = 3) -> list[tuple[int, int]]:
        run = kit.node.lease(prompt.namespace, prompt.chain[:num_blocks], first_block=first_block)
        kit.node.release(run.lease_id)
        return [(prompt.chain.index(block_hash), in_ms) for block_hash, in_ms in run.ends_ms]

    assert told() == []
    now = kit.clock.unix_ms()
    for position, seconds in ((1, 30), (4, 20)):
        kit.node.set_ttl(named(prompt.chain[position]), expires_unix_ms=now + 1_000 * seconds)
    wait(kit, 5)
    assert sorted(told()) == [(1, 25_000), (4, 15_000)]
    assert told(num_blocks=4) == [(1, 25_000)]
    kit = restarted(kit)
    assert sorted(told()) == [(1, 25_000), (4, 15_000)]
    kit.node.pin(named(prompt.chain[5]), until_unix_ms=None)
    wait(kit, 20)
    assert told() == [(1, 5_000)], "the moment of what a pin keeps is over"
    kit.node.set_ttl(named(prompt.chain[1]), expires_unix_ms=None)
    assert told() == []

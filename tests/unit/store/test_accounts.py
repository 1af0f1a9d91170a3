"""Quotas and protected minima of trust groups on one node, what is evicted ahead of need, and the books of accounts."""

from dataclasses import replace
from pathlib import Path

import pytest
from disk_kit import make_disk_kit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_kit import BLOCK_TOKENS, LAYOUT, HandClock, StoreKit, make_header, make_kit

from headrace.blocks.block_codec import encode_header
from headrace.blocks.disk_tier import record_bytes
from headrace.blocks.host_arena import HostArena
from headrace.core.block import HashAlgorithm, HashedPrompt, NamespaceId, hash_prompt
from headrace.core.budgets import AccountUsage, Budget
from headrace.core.errors import InvalidRequest
from headrace.core.eviction import PolicyName
from headrace.core.generation import ControlOutcome, ControlReport, EvictSelector
from headrace.core.limits import BUDGET_NAMESPACES_MAX, BUDGETS_MAX
from headrace.core.store_limits import BACKGROUND_REMOVALS_MAX, DEMOTE_QUEUE_BYTES_MAX
from headrace.store.node_rules import NodeRules
from headrace.store.recover_arena import recover_arena
from headrace.store.removal_log import OVER_QUOTA, RemovalLog
from headrace.store.store_node import StoreNode

MODEL = NamespaceId("00" * 16)
GROUPS = {name: NamespaceId(f"{number:02x}" * 16) for number, name in enumerate("abc", start=1)}
SALTED = NamespaceId("a1" * 16)  # group a's, narrowed by a salt
UNIT = 4_096  # bytes that one block of the kit takes in the arena


def prompt_of(group: str, token: int, num_blocks: int = 1, *, salted: bool = False) -> HashedPrompt:
    """A prompt of one trust group ("": the deployment's own)."""
    namespace = GROUPS.get(group, MODEL)
    narrowed_from: tuple[NamespaceId, ...] = () if namespace == MODEL else (MODEL,)
    if salted:
        namespace, narrowed_from = SALTED, (MODEL, namespace)
    tokens = [token * 1_000 + i for i in range(num_blocks * BLOCK_TOKENS)]
    hashed = hash_prompt(namespace, tokens, block_tokens=BLOCK_TOKENS, algorithm=HashAlgorithm.XXH3_128)
    return HashedPrompt(namespace, hashed.token_ids, hashed.chain, BLOCK_TOKENS, narrowed_from)


def budget_of(group: str, *, blocks_max: int | None = None, blocks_min: int = 0, at: int = 1) -> Budget:
    bytes_max = None if blocks_max is None else blocks_max * UNIT
    return Budget(group, (GROUPS[group],), bytes_max, blocks_min * UNIT, set_unix_ms=at, set_by="operator")


def store(kit: StoreKit, prompt: HashedPrompt) -> int:
    """Store a whole prompt; how many blocks were taken."""
    taken = len(kit.store(prompt, range(len(prompt.chain))))
    kit.node.check_integrity()
    return taken


def usage_of(kit: StoreKit, group: str) -> AccountUsage:
    return next(usage for usage in kit.node.room.usage() if usage.account == group)


def blocks_of(kit: StoreKit, group: str) -> int:
    return usage_of(kit, group).host_blocks


def test_a_block_counts_for_the_account_of_the_closest_namespace():
    """Fails when a salted block is nobody's, or a group's block counts for the model that all groups share."""
    kit = make_kit()
    everything = Budget("", (MODEL,), 100 * UNIT, set_unix_ms=1)
    kit.node.room.set_budgets([budget_of("a"), budget_of("b"), everything])
    for prompt in (prompt_of("a", 1, 2), prompt_of("a", 2, salted=True), prompt_of("b", 1), prompt_of("c", 1)):
        store(kit, prompt)
    found = {usage.account: (usage.host_blocks, usage.host_bytes) for usage in kit.node.room.usage()}
    assert found == {"a": (3, 3 * UNIT), "b": (1, UNIT), "": (1, UNIT)}
    kit.node.room.set_budgets([Budget("whole model", (MODEL,), set_unix_ms=2)])
    assert {group: blocks_of(kit, group) for group in ("a", "b", "whole model", "")} == {
        "a": 3,
        "b": 1,
        "whole model": 1,
        "": 0,
    }


def test_what_was_stored_before_a_budget_is_set_counts_and_leaves_in_the_order_of_its_use():
    kit = make_kit()
    for token in (1, 2, 3):
        kit.clock.seconds += 1
        store(kit, prompt_of("a", token))
    kit.clock.seconds += 1
    first = prompt_of("a", 1)
    kit.node.release(kit.node.lease(first.namespace, first.chain, first_block=0).lease_id)
    kit.node.room.set_budgets([budget_of("a", blocks_max=3)])
    assert blocks_of(kit, "a") == 3
    store(kit, prompt_of("a", 4))
    assert [kit.held(prompt_of("a", token)) for token in (1, 2, 3, 4)] == [1, 0, 1, 1]


def test_an_account_at_its_quota_pays_with_its_own_oldest_blocks():
    """Fails when somebody else's block goes, although the arena has room, or the quota is exceeded."""
    kit = make_kit(blocks=8)
    store(kit, prompt_of("b", 1, 2))
    kit.node.room.set_budgets([budget_of("a", blocks_max=3)])
    for token in range(1, 7):
        assert store(kit, prompt_of("a", token)) == 1
        assert blocks_of(kit, "a") == min(token, 3)
    assert kit.held(prompt_of("b", 1, 2)) == 2
    assert [kit.held(prompt_of("a", token)) for token in range(1, 7)] == [0, 0, 0, 1, 1, 1]
    assert (usage_of(kit, "a").evicted_blocks, usage_of(kit, "a").refused_blocks) == (3, 0)
    assert kit.node.counters.evicted_for_room == 0


def test_an_account_at_its_quota_keeps_what_it_uses():
    kit = make_kit(blocks=8)
    kit.node.room.set_budgets([budget_of("a", blocks_max=3)])
    for token in (1, 2, 3):
        store(kit, prompt_of("a", token))
    used = prompt_of("a", 1)
    kit.node.release(kit.node.lease(used.namespace, used.chain, first_block=0).lease_id)
    store(kit, prompt_of("a", 4))
    assert [kit.held(prompt_of("a", token)) for token in (1, 2, 3, 4)] == [1, 0, 1, 1]


def test_a_block_is_refused_when_all_that_its_account_may_have_is_in_use():
    kit = make_kit(blocks=8)
    kit.node.room.set_budgets([budget_of("a", blocks_max=2)])
    prompt = prompt_of("a", 1, 2)
    store(kit, prompt)
    lease = kit.node.lease(prompt.namespace, prompt.chain, first_block=0)
    assert store(kit, prompt_of("a", 2)) == 0
    assert usage_of(kit, "a").refused_blocks == 1
    kit.node.release(lease.lease_id)
    assert store(kit, prompt_of("a", 2)) == 1


def test_what_is_pinned_counts_for_the_quota_and_does_not_go_for_it():
    kit = make_kit(blocks=8)
    kit.node.room.set_budgets([budget_of("a", blocks_max=2)])
    pinned = prompt_of("a", 1, 2)
    store(kit, pinned)
    kit.node.pin(EvictSelector(block_hashes=(pinned.chain[1],)), until_unix_ms=None)
    assert usage_of(kit, "a").pinned_bytes == 2 * UNIT
    assert store(kit, prompt_of("a", 2)) == 0
    assert kit.held(pinned) == 2
    kit.node.unpin(EvictSelector(block_hashes=(pinned.chain[1],)))
    assert usage_of(kit, "a").pinned_bytes == 0
    assert store(kit, prompt_of("a", 2)) == 1


def test_a_prompt_longer_than_the_quota_keeps_its_head_and_takes_no_more():
    """Fails when the blocks behind the quota push out their own prefix."""
    kit = make_kit(blocks=8)
    kit.node.room.set_budgets([budget_of("a", blocks_max=3)])
    assert store(kit, prompt_of("a", 1, 5)) == 3
    assert kit.held(prompt_of("a", 1, 5)) == 3
    assert usage_of(kit, "a").refused_blocks == 2


def test_a_quota_of_nothing_stores_nothing():
    kit = make_kit()
    kit.node.room.set_budgets([budget_of("a", blocks_max=0)])
    assert store(kit, prompt_of("a", 1)) == 0
    assert store(kit, prompt_of("b", 1)) == 1


def test_what_a_quota_evicts_is_remembered_with_that_reason():
    removals = RemovalLog(HandClock())
    kit = make_kit(follower=removals)
    kit.node.room.because = removals.because
    kit.node.room.set_budgets([budget_of("a", blocks_max=1)])
    store(kit, prompt_of("a", 1))
    store(kit, prompt_of("a", 2))
    found = removals.find(GROUPS["a"], prompt_of("a", 1).chain[0])
    assert found is not None
    assert found.reason == OVER_QUOTA


@pytest.mark.parametrize("policy", PolicyName)
def test_a_flood_by_others_cannot_take_a_protected_minimum(policy):
    """Fails when the oldest block of all, which is protected, goes; or when what is above the minimum stays."""
    kit = make_kit(blocks=8)
    kit.node = StoreNode(kit.arena, node_id="n1", clock=kit.clock, rules=NodeRules(eviction_policy=policy))
    kit.node.room.set_budgets([budget_of("a", blocks_min=3)])
    for token in range(5):
        store(kit, prompt_of("a", token))
    for token in range(60):
        assert store(kit, prompt_of("b", token)) == 1
    assert (blocks_of(kit, "a"), blocks_of(kit, "")) == (3, 5)
    kit.node.check_integrity()


def test_an_account_below_its_minimum_gets_its_room_from_others():
    kit = make_kit(blocks=8)
    kit.node.room.set_budgets([budget_of("a", blocks_min=3)])
    for token in range(8):
        store(kit, prompt_of("b", token))
    for token in range(3):
        assert store(kit, prompt_of("a", token)) == 1
    assert (blocks_of(kit, "a"), blocks_of(kit, "")) == (3, 5)


def test_a_protected_account_replaces_its_own_block_when_others_have_none_to_give():
    kit = make_kit(blocks=8)
    kit.node.room.set_budgets([budget_of("a", blocks_min=3), budget_of("b", blocks_min=3)])
    for token in range(3):
        store(kit, prompt_of("a", token))
        store(kit, prompt_of("b", token))
    in_use = prompt_of("c", 1, 2)
    store(kit, in_use)
    kit.node.lease(in_use.namespace, in_use.chain, first_block=0)
    assert store(kit, prompt_of("c", 2)) == 0
    assert store(kit, prompt_of("a", 9)) == 1
    assert (blocks_of(kit, "a"), blocks_of(kit, "b")) == (3, 3)
    assert kit.held(prompt_of("a", 0)) == 0


def test_what_a_minimum_kept_can_leave_once_its_account_has_more():
    """Fails when leaves that the policy was refused are never offered again: then the newest of the account go."""
    kit = make_kit(blocks=8)
    kit.node.room.set_budgets([budget_of("a", blocks_min=2)])
    for token in range(2):
        store(kit, prompt_of("a", token))
    for token in range(12):
        store(kit, prompt_of("b", token))  # both of a's blocks were named and kept
    for token in range(2, 5):
        store(kit, prompt_of("a", token))
    for token in range(12, 40):
        store(kit, prompt_of("b", token))
    assert [kit.held(prompt_of("a", token)) for token in range(5)] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("change", ["lowered", "of another"])
def test_what_a_minimum_kept_can_leave_once_the_table_says_so(change):
    kit = make_kit(blocks=4)
    kit.node.room.set_budgets([budget_of("a", blocks_min=3)])
    for token in range(3):
        store(kit, prompt_of("a", token))
    for token in range(6):
        store(kit, prompt_of("b", token))
    rows = [budget_of("a", at=2)] if change == "lowered" else [budget_of("a", at=2), budget_of("b", blocks_min=2, at=2)]
    kit.node.room.set_budgets(rows)
    for token in range(6, 16):
        assert store(kit, prompt_of("b", token)) == 1
    assert blocks_of(kit, "a") == 0


@pytest.mark.parametrize("also_in_use", [False, True], ids=["free", "in use"])
def test_a_withheld_leaf_is_found_when_there_is_no_other_and_its_account_can_spare_it(also_in_use):
    """Fails when a leaf that the policy was refused is forgotten although its account has one to spare, or is taken
    from under its reader."""
    kit = make_kit(blocks=4)
    kit.node = StoreNode(kit.arena, node_id="n1", clock=kit.clock, rules=NodeRules(eviction_policy=PolicyName.LRU))
    kit.node.room.set_budgets([budget_of("a", blocks_min=2)])
    for group, token in (("a", 0), ("a", 1), ("b", 0), ("b", 1)):
        store(kit, prompt_of(group, token))
    store(kit, prompt_of("b", 2))  # both of a's were named and kept; b's oldest went
    store(kit, prompt_of("a", 2))  # one more than the minimum: a's first is offered again
    assert (blocks_of(kit, "a"), blocks_of(kit, "")) == (3, 1)
    in_use = [prompt_of("b", 2), prompt_of("a", 0), prompt_of("a", 2)]
    for prompt in [*in_use, *([prompt_of("a", 1)] if also_in_use else [])]:
        assert kit.node.lease(prompt.namespace, prompt.chain, first_block=0).blocks
    assert store(kit, prompt_of("b", 9)) == (0 if also_in_use else 1)
    assert kit.held(prompt_of("a", 1)) == (1 if also_in_use else 0)


def test_minima_beyond_the_share_that_may_be_protected_are_refused_with_the_arithmetic():
    kit = make_kit(blocks=10)
    table = kit.node.room.set_budgets([budget_of("a", blocks_min=5)])
    with pytest.raises(InvalidRequest, match=f"{9 * UNIT} bytes in all; at most {8 * UNIT} of this node's {10 * UNIT}"):
        kit.node.room.set_budgets([budget_of("b", blocks_min=4), budget_of("c", blocks_max=1)])
    assert kit.node.room.budgets() == table
    kit.node.room.set_budgets([budget_of("b", blocks_min=3)])


def restarted(kit: StoreKit, *, pin_share: float) -> StoreKit:
    arena = kit.arena.reattached()
    recovered = recover_arena(arena)
    node = StoreNode(arena, node_id="n1", clock=kit.clock, recovered=recovered, rules=NodeRules(pin_share=pin_share))
    return StoreKit(kit.clock, arena, kit.changes, node)


def pin(kit: StoreKit, prompt: HashedPrompt) -> ControlReport:
    report = kit.node.pin(EvictSelector(block_hashes=(prompt.chain[-1],)), until_unix_ms=None)
    kit.node.check_integrity()
    return report


def test_a_pin_that_does_not_fit_beside_what_is_protected_is_refused_with_the_arithmetic():
    """Fails when pins and minima are each within their own bound, and together more than the arena: what is protected
    could not be kept. What is both, pinned and protected, is needed once."""
    kit = make_kit(blocks=10)  # pins may take 5, minima 8, both together 8
    kit.node.room.set_budgets([budget_of("a", blocks_min=6)])
    store(kit, prompt_of("b", 1, 2))
    store(kit, prompt_of("b", 2))
    store(kit, prompt_of("a", 1, 2))
    assert pin(kit, prompt_of("b", 1, 2)).outcome is ControlOutcome.DONE
    refused = pin(kit, prompt_of("b", 2))
    assert refused.outcome is ControlOutcome.REFUSED
    assert f"{UNIT} bytes more than the {2 * UNIT} pinned already, with protected minima of {6 * UNIT}" in refused.why
    assert f"are {9 * UNIT}; pins and minima together may take {8 * UNIT} of the arena" in refused.why
    assert pin(kit, prompt_of("a", 1, 2)).outcome is ControlOutcome.DONE
    kit.node.room.set_budgets([budget_of("a", blocks_min=5, at=2)])
    assert pin(kit, prompt_of("b", 2)).outcome is ControlOutcome.DONE


def test_a_minimum_that_does_not_fit_beside_what_is_pinned_is_refused_with_the_arithmetic():
    kit = make_kit(blocks=10)
    store(kit, prompt_of("b", 1, 4))
    assert pin(kit, prompt_of("b", 1, 4)).outcome is ControlOutcome.DONE
    arithmetic = f"would be {5 * UNIT} bytes in all, which with {4 * UNIT} pinned, less what is both, are {9 * UNIT}"
    with pytest.raises(InvalidRequest, match=f"{arithmetic}; .* may take {8 * UNIT} of this node's {10 * UNIT} bytes"):
        kit.node.room.set_budgets([budget_of("a", blocks_min=5)])
    assert kit.node.room.budgets() == ()
    kit.node.room.set_budgets([budget_of("a", blocks_min=4)])
    kit.node.room.set_budgets([budget_of("b", blocks_min=4)])  # what is pinned is part of it
    kit.node.check_integrity()


def test_a_node_that_keeps_too_much_already_takes_every_word_that_asks_for_no_more():
    """Fails when the arena of another run, in which pins had a larger share, bars a quota or a lower minimum."""
    kit = make_kit(blocks=10)
    store(kit, prompt_of("b", 1, 7))
    kit = restarted(kit, pin_share=0.9)
    kit.node.room.set_budgets([budget_of("a", blocks_min=2)])
    assert pin(kit, prompt_of("b", 1, 7)).outcome is ControlOutcome.DONE
    kit = restarted(kit, pin_share=0.5)
    with pytest.raises(InvalidRequest, match="lower a minimum"):
        kit.node.room.set_budgets([budget_of("a", blocks_min=2)])
    kit.node.room.set_budgets([budget_of("a", blocks_max=2)])
    kit.node.check_integrity()


def test_a_table_has_a_bound_of_accounts_and_each_of_namespaces():
    kit = make_kit()
    many = [Budget(f"group:{number}", set_unix_ms=1) for number in range(BUDGETS_MAX + 1)]
    with pytest.raises(InvalidRequest, match=str(BUDGETS_MAX)):
        kit.node.room.set_budgets(many)
    spaces = [NamespaceId(f"{number:032x}") for number in range(BUDGET_NAMESPACES_MAX + 2)]
    kit.node.room.set_budgets([Budget("a", tuple(spaces[:-2]), set_unix_ms=1)])
    (row,) = kit.node.room.set_budgets([Budget("a", tuple(spaces[-2:]), set_unix_ms=2)])
    assert len(row.namespaces) == BUDGET_NAMESPACES_MAX
    assert set(spaces[-2:]) <= set(row.namespaces), "the newest were left out"


# Ahead of need


def test_room_is_made_ahead_of_need_and_not_a_block_more():
    kit = make_kit(blocks=10)
    for token in range(10):
        store(kit, prompt_of("a", token))
    assert kit.node.room.evict_ahead(0.3) == 3
    assert (kit.arena.free_bytes, blocks_of(kit, "")) == (3 * UNIT, 7)
    assert kit.node.room.evict_ahead(0.3) == 0
    kit.node.check_integrity()


def test_nothing_in_use_or_protected_goes_ahead_of_need():
    kit = make_kit(blocks=10)
    kit.node.room.set_budgets([budget_of("a", blocks_min=4)])
    for token in range(4):
        store(kit, prompt_of("a", token))
    read = prompt_of("b", 1, 4)
    store(kit, read)
    kit.node.lease(read.namespace, read.chain, first_block=0)
    store(kit, prompt_of("c", 1, 2))
    assert kit.node.room.evict_ahead(0.5) == 2
    assert (blocks_of(kit, "a"), kit.held(read)) == (4, 4)
    kit.node.check_integrity()


def test_an_account_whose_quota_was_lowered_loses_what_is_too_much_ahead_of_need():
    kit = make_kit(blocks=8)
    for token in range(5):
        store(kit, prompt_of("a", token))
    kit.node.room.set_budgets([budget_of("a", blocks_max=2)])
    assert kit.node.room.evict_ahead(0.0) == 3
    assert [kit.held(prompt_of("a", token)) for token in range(5)] == [0, 0, 0, 1, 1]


def test_one_step_ahead_of_need_is_bounded():
    kit = make_kit()
    arena = HostArena.in_memory((BACKGROUND_REMOVALS_MAX + 60) * UNIT)
    kit = StoreKit(kit.clock, arena, kit.changes, StoreNode(arena, node_id="n1", clock=kit.clock))
    for token in range(BACKGROUND_REMOVALS_MAX + 40):
        kit.store(prompt_of("a", token), [0])
    kit.node.room.set_budgets([budget_of("a", blocks_max=20)])
    assert [kit.node.room.evict_ahead(1.0) for _ in range(3)] == [BACKGROUND_REMOVALS_MAX, 40, 0]


# The disk


def test_the_disk_takes_no_more_of_an_account_than_its_quota(tmp_path: Path):
    """Fails when the quota bounds the arena alone: then a flood fills the disk."""
    kit = make_disk_kit(tmp_path, blocks=4)
    header = make_header(prompt_of("a", 1), 0)
    copy_bytes = record_bytes(len(encode_header(header)), header.payload_bytes)
    kit.node.room.set_budgets([Budget("a", (GROUPS["a"],), 2 * copy_bytes, set_unix_ms=1)])
    for token in range(10):
        store(kit, prompt_of("a", token))
        kit.work()
    usage = usage_of(kit, "a")
    assert (usage.disk_blocks, usage.disk_bytes) == (2, 2 * copy_bytes)
    assert usage.host_bytes <= 2 * copy_bytes
    for token in range(6):
        store(kit, prompt_of("b", token))
        kit.work()
    assert usage_of(kit, "").disk_blocks >= 2
    kit.node.check_integrity()


def test_what_the_disk_holds_is_counted_again_after_a_restart_and_a_change_of_the_table(tmp_path: Path):
    kit = make_disk_kit(tmp_path, blocks=2)
    for token in range(5):
        store(kit, prompt_of("a", token))
        kit.work()
    kit.restart()
    assert usage_of(kit, "").disk_blocks == 3
    kit.node.room.set_budgets([budget_of("a")])
    assert (usage_of(kit, "").disk_blocks, usage_of(kit, "a").disk_blocks, blocks_of(kit, "a")) == (0, 3, 2)
    kit.node.check_integrity()


def test_room_ahead_of_need_waits_for_a_disk_that_is_behind(tmp_path: Path):
    """Fails when blocks that the disk would have taken a moment later are dropped for room that nobody needs yet."""
    large = replace(LAYOUT, head_dim=128 * 1_024)  # 8 MiB a block: seven of them fill the queue, with their headers
    kit = make_disk_kit(tmp_path, segments=2, segment_blocks=45_000)
    kit.arena = HostArena.in_memory(80 << 20)
    kit.restart()
    for token in range(9):
        kit.store(prompt_of("a", token), [0], large)
    assert kit.node.room.evict_ahead(0.99) == DEMOTE_QUEUE_BYTES_MAX // large.block_bytes - 1
    assert kit.node.room.evict_ahead(0.99) == 0
    assert kit.work() == 7
    assert kit.node.room.evict_ahead(0.99) == 2
    assert kit.node.disk.counters.dropped_demotions == 0


# Any sequence

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.sampled_from("abc"), st.integers(0, 5), st.integers(1, 3)),
        st.tuples(st.just("read"), st.sampled_from("abc"), st.integers(0, 5), st.integers(1, 3)),
        st.tuples(st.just("budget"), st.sampled_from("abc"), st.integers(0, 3), st.integers(3, 9)),
        st.tuples(st.just("evict"), st.sampled_from("abc"), st.just(0), st.just(0)),
        st.tuples(st.just("ahead"), st.sampled_from("abc"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("wait"), st.sampled_from("abc"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS, st.sampled_from([PolicyName.ADAPTIVE, PolicyName.LRU, PolicyName.ARC]))
def test_whatever_happens_books_are_exact_quotas_hold_and_minima_are_kept(steps, policy):
    """Fails, for example, when an account is counted twice, a quota is exceeded, or another's newcomer takes what is
    protected."""
    kit = make_kit(blocks=12)
    kit.node = StoreNode(kit.arena, node_id="n1", clock=kit.clock, rules=NodeRules(eviction_policy=policy))
    bounds: dict[str, tuple[int, int]] = {}
    for at, (step, group, number, length) in enumerate(steps, start=1):
        kit.clock.seconds += 1
        before = {name: blocks_of(kit, name) for name in bounds}
        prompt = prompt_of(group, number, max(1, length))
        if step == "store":
            kit.store(prompt, range(len(prompt.chain)))
            for name, (least, most) in bounds.items():
                now = blocks_of(kit, name)
                assert now <= max(most, before[name]), "more than the quota"
                assert now >= min(least, before[name]), "less than the minimum"
        elif step == "read":
            kit.node.lease(prompt.namespace, prompt.chain, first_block=0)
        elif step == "budget":
            kit.node.room.set_budgets([budget_of(group, blocks_min=number, blocks_max=length, at=at)])
            bounds[group] = (number, length)
        elif step == "evict":
            kit.node.evict(EvictSelector(namespace=GROUPS[group]), dry_run=False)
        elif step == "ahead":
            kit.node.room.evict_ahead(number / 12)
            assert all(blocks_of(kit, name) >= min(bounds[name][0], before[name]) for name in bounds)
        else:
            kit.clock.seconds += 60
            kit.node.expire()
        kit.node.check_integrity()


def test_headers_of_the_kit_take_one_unit():
    """What this file's arithmetic rests on."""
    header = make_header(prompt_of("a", 1, salted=True), 0)
    assert header.payload_bytes < UNIT == HostArena.in_memory(8 * UNIT).data_bytes // 6

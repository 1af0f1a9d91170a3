"""What a full store node lets go: never a prefix in steady use for the sake of prompts that nobody asks for again."""

import pytest
from store_kit import ChangeLog, HandClock, StoreKit, make_branch, make_prompt

from headrace.blocks.host_arena import HostArena
from headrace.core.block import HashedPrompt
from headrace.core.eviction import PolicyName
from headrace.store.node_rules import NodeRules
from headrace.store.store_node import StoreNode

ARENA_BLOCKS = 40
SCAN_BLOCKS = 8
STEADY = make_prompt(1, 4)


def make_kit(policy: PolicyName) -> StoreKit:
    clock, changes = HandClock(), ChangeLog()
    arena = HostArena.in_memory((ARENA_BLOCKS + 2) * 4_096)
    node = StoreNode(arena, node_id="n1", clock=clock, changes=changes, rules=NodeRules(eviction_policy=policy))
    return StoreKit(clock, arena, changes, node)


def ask(kit: StoreKit, prompt: HashedPrompt) -> int:
    """One request as a worker makes it: lease what is held, release it, publish the rest; the leading blocks held."""
    lease = kit.node.lease(prompt.namespace, prompt.chain, first_block=0)
    found = len(lease.blocks)
    kit.node.release(lease.lease_id)
    kit.store(prompt, range(found, len(prompt.chain)))
    kit.clock.seconds += 1
    kit.node.check_integrity()
    return found


def steady_hits(kit: StoreKit, *, scans_between: int, rounds: int) -> list[int]:
    """Blocks that a steady prompt finds each time, with prompts in between that are never asked for again."""
    found, scanned = [], 0
    for _ in range(rounds):
        found.append(ask(kit, STEADY))
        for _ in range(scans_between):
            scanned += 1
            ask(kit, make_prompt(1_000 + scanned, SCAN_BLOCKS))
    return found


@pytest.mark.parametrize("policy", list(PolicyName))
def test_a_scan_does_not_push_out_a_prefix_in_steady_use(policy) -> None:
    """The scan is several times the store; between two uses of the prefix comes half a store of it."""
    assert steady_hits(make_kit(policy), scans_between=2, rounds=20)[1:] == [4] * 19


@pytest.mark.parametrize("policy", [PolicyName.ADAPTIVE, PolicyName.GDSF, PolicyName.LFU, PolicyName.ARC])
def test_a_prefix_outlives_scans_larger_than_the_store_once_its_uses_are_known(policy) -> None:
    """Between two uses come 48 blocks through a store of 40; least recently used would never hit again."""
    assert steady_hits(make_kit(PolicyName.LRU), scans_between=6, rounds=12) == [0] * 12
    assert steady_hits(make_kit(policy), scans_between=6, rounds=30)[-10:] == [4] * 10


def test_a_burst_of_scans_leaves_a_prefix_that_was_used_steadily_before() -> None:
    kit = make_kit(PolicyName.ADAPTIVE)
    for _ in range(30):
        ask(kit, STEADY)
        ask(kit, make_branch(1, 7, head_blocks=1, tail_blocks=2))
    for scanned in range(4):
        ask(kit, make_prompt(2_000 + scanned, SCAN_BLOCKS))
    assert ask(kit, STEADY) == 4

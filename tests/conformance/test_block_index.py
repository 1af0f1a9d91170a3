"""What every BlockIndex does: in memory, in a real Valkey server or cluster, and mirrored from there."""

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from patient_redis import patient_index, patient_membership
from restricted_redis import empty

from headrace.core.block import BlockHash, Chain, HashAlgorithm, HolderId, NamespaceId, Tier, hash_prompt
from headrace.core.clock import SystemClock
from headrace.core.index_limits import INDEX_BATCH_BLOCKS
from headrace.core.limits import CHAIN_BLOCKS_MAX
from headrace.core.members import NO_MATCH, StoreNodeRecord
from headrace.index.memory_index import MemoryIndex, MemoryMembership

NAMESPACE = NamespaceId("0f" * 16)
OTHER_NAMESPACE = NamespaceId("1e" * 16)
TTL_MS = 60_000
A, B = HolderId("node:a"), HolderId("node:b")


def make_chain(num_blocks: int, *, first_token: int = 0, algorithm: HashAlgorithm = HashAlgorithm.XXH3_128) -> Chain:
    tokens = range(first_token, first_token + num_blocks)
    return hash_prompt(NAMESPACE, tokens, block_tokens=1, algorithm=algorithm).chain


def make_node(holder: HolderId, incarnation: int) -> StoreNodeRecord:
    return StoreNodeRecord(
        node_id=holder.removeprefix("node:"),
        incarnation=incarnation,
        host="host",
        address="127.0.0.1:1",
        arena_path="/dev/shm/arena",
        pid=1,
    )


@pytest.fixture(params=["memory", "redis", "mirror", "cluster", "cluster mirror"])
def implementation(request) -> str:
    return request.param


async def announce(under_test, holder: HolderId, incarnation: int = 1, ttl_ms: int = TTL_MS) -> None:
    await under_test.membership.announce(make_node(holder, incarnation), ttl_ms=ttl_ms)


async def register(under_test, holder: HolderId, blocks: Chain, incarnation: int = 1) -> None:
    await under_test.index.register(
        holder=holder, incarnation=incarnation, tier=Tier.HOST, namespace=NAMESPACE, blocks=blocks
    )


async def deregister(under_test, holder: HolderId, blocks: Chain, incarnation: int = 1) -> None:
    await under_test.index.deregister(holder=holder, incarnation=incarnation, namespace=NAMESPACE, blocks=blocks)


async def match(under_test, chain: Chain) -> dict[HolderId, int]:
    return (await under_test.index.longest_prefix(NAMESPACE, chain)).num_blocks_by_holder


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 8, 13])
async def test_the_leading_run_is_found_at_every_depth_for_many_holders_at_once(under_test, num_blocks):
    # Fails when the bisection is off by one anywhere: holder d keeps exactly the first d blocks.
    chain = make_chain(num_blocks)
    for depth in range(1, num_blocks + 1):
        await announce(under_test, HolderId(f"node:{depth}"))
        await register(under_test, HolderId(f"node:{depth}"), chain[:depth])
    expected = {HolderId(f"node:{depth}"): depth for depth in range(1, num_blocks + 1)}
    assert await match(under_test, chain) == expected


async def test_nothing_registered_matches_nothing(under_test):
    await announce(under_test, A)
    assert await under_test.index.longest_prefix(NAMESPACE, make_chain(5)) == NO_MATCH


async def test_an_empty_chain_matches_nothing(under_test):
    assert await under_test.index.longest_prefix(NAMESPACE, ()) == NO_MATCH


async def test_a_branch_is_followed_only_as_far_as_the_chains_agree(under_test):
    await announce(under_test, A)
    shared = hash_prompt(NAMESPACE, [1, 2, 3, 4], block_tokens=1, algorithm=HashAlgorithm.XXH3_128).chain
    other = hash_prompt(NAMESPACE, [1, 2, 9, 9], block_tokens=1, algorithm=HashAlgorithm.XXH3_128).chain
    await register(under_test, A, shared)
    assert await match(under_test, other) == {A: 2}


async def test_namespaces_do_not_see_each_other(under_test):
    await announce(under_test, A)
    chain = make_chain(3)
    await register(under_test, A, chain)
    assert await under_test.index.longest_prefix(OTHER_NAMESPACE, chain) == NO_MATCH


async def test_sha256_chains_are_matched_too(under_test):
    await announce(under_test, A)
    chain = make_chain(5, algorithm=HashAlgorithm.SHA256)
    await register(under_test, A, chain[:4])
    assert await match(under_test, chain) == {A: 4}


async def test_entries_of_a_holder_that_never_announced_itself_are_not_returned(under_test):
    await register(under_test, A, make_chain(3))
    assert await match(under_test, make_chain(3)) == {}


async def test_entries_die_with_their_holders_record(under_test):
    await announce(under_test, A, ttl_ms=1_500)
    await announce(under_test, B)
    chain = make_chain(3)
    await register(under_test, A, chain)
    await register(under_test, B, chain[:1])
    assert await match(under_test, chain) == {A: 3, B: 1}
    await under_test.pass_time_ms(1_600)
    assert await match(under_test, chain) == {B: 1}


async def test_entries_of_an_older_incarnation_are_not_returned(under_test):
    # Fails when the first block's new incarnation vouches for deeper entries of the old one.
    chain = make_chain(6)
    await announce(under_test, A, 1)
    await register(under_test, A, chain, 1)
    await announce(under_test, A, 2)
    assert await match(under_test, chain) == {}
    await register(under_test, A, chain[:2], 2)
    assert await match(under_test, chain) == {A: 2}


async def test_a_late_registration_of_an_older_incarnation_does_not_hide_the_newer_entry(under_test):
    chain = make_chain(3)
    await announce(under_test, A, 2)
    await register(under_test, A, chain, 2)
    await register(under_test, A, chain, 1)
    assert await match(under_test, chain) == {A: 3}


async def test_a_late_removal_of_an_older_incarnation_does_not_take_the_newer_entry(under_test):
    chain = make_chain(3)
    await announce(under_test, A, 2)
    await register(under_test, A, chain, 2)
    await deregister(under_test, A, chain, 1)
    assert await match(under_test, chain) == {A: 3}


async def test_incarnations_are_compared_as_whole_numbers(under_test):
    # Fails when they are compared as text of different lengths, or as doubles (2**53 + 1 is none).
    chain = make_chain(2)
    for older, newer in ((9, 10), (2**53, 2**53 + 1), (1_700_000_000_000_000_000, 1_700_000_000_000_000_001)):
        await announce(under_test, A, newer)
        await register(under_test, A, chain, newer)
        await deregister(under_test, A, chain, older)
        assert await match(under_test, chain) == {A: 2}


async def test_registering_twice_and_removing_twice_are_harmless(under_test):
    await announce(under_test, A)
    chain = make_chain(3)
    for _ in range(2):
        await register(under_test, A, chain)
        assert await match(under_test, chain) == {A: 3}
    for _ in range(2):
        await deregister(under_test, A, chain[2:])
        assert await match(under_test, chain) == {A: 2}


async def test_removing_what_nobody_registered_is_harmless(under_test):
    await announce(under_test, A)
    await deregister(under_test, A, make_chain(3))
    assert await match(under_test, make_chain(3)) == {}


async def test_removing_one_holders_entry_leaves_the_others(under_test):
    chain = make_chain(3)
    for holder in (A, B):
        await announce(under_test, holder)
        await register(under_test, holder, chain)
    await deregister(under_test, A, chain[::-1])
    assert await match(under_test, chain) == {B: 3}


async def test_more_blocks_than_one_command_takes_are_registered_and_removed_whole(under_test):
    await announce(under_test, A)
    chain = make_chain(2 * INDEX_BATCH_BLOCKS + 1)
    await register(under_test, A, chain)
    assert await match(under_test, chain) == {A: len(chain)}
    await deregister(under_test, A, chain[:0:-1])
    assert await match(under_test, chain) == {A: 1}


async def test_a_chain_past_the_bound_is_matched_up_to_the_bound(under_test):
    await announce(under_test, A)
    chain = make_chain(CHAIN_BLOCKS_MAX + 2)
    await register(under_test, A, chain)
    assert await match(under_test, chain) == {A: CHAIN_BLOCKS_MAX}


async def test_sweeping_removes_what_no_record_vouches_for(under_test):
    # The dead incarnation is announced once more afterwards: if its entries were left, they would match.
    chain = make_chain(4)
    await announce(under_test, A, 1)
    await register(under_test, A, chain, 1)
    await announce(under_test, B, 7)
    await register(under_test, B, chain, 7)
    await under_test.membership.withdraw(make_node(A, 1))
    assert await under_test.index.sweep({B: 7}, limit=100) == 4
    await announce(under_test, A, 1)
    assert await match(under_test, chain) == {B: 4}


async def test_sweeping_removes_entries_of_an_older_incarnation_of_a_live_holder(under_test):
    chain = make_chain(4)
    await register(under_test, A, chain, 1)
    await announce(under_test, A, 2)
    await register(under_test, A, chain[:1], 2)
    assert await under_test.index.sweep({A: 2}, limit=100) == 3
    assert await match(under_test, chain) == {A: 1}


async def test_sweeping_spares_a_holder_that_started_after_the_caller_looked(under_test):
    await announce(under_test, A, 2)
    await register(under_test, A, make_chain(3), 2)
    assert await under_test.index.sweep({A: 1}, limit=100) == 0
    assert await under_test.index.sweep({}, limit=100) == 0
    assert await match(under_test, make_chain(3)) == {A: 3}


async def test_sweeping_spares_a_holder_that_the_caller_knows_to_be_alive(under_test):
    await register(under_test, A, make_chain(3), 2)
    assert await under_test.index.sweep({A: 2}, limit=100) == 0
    await announce(under_test, A, 2)
    assert await match(under_test, make_chain(3)) == {A: 3}


async def test_sweeping_removes_at_most_the_limit_and_goes_on_next_time(under_test):
    await register(under_test, A, make_chain(25))
    removed = [await under_test.index.sweep({}, limit=10) for _ in range(4)]
    assert removed == [10, 10, 5, 0]


SEQUENCES = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
HOLDERS = st.sampled_from([A, B])


class IndexMachine(RuleBasedStateMachine):
    """Memory, Redis and a plain dictionary, told the same things; they must agree after every step.

    Holders start, stop, register and remove as real ones do: under one incarnation what they keep is prefix-closed.
    What an older incarnation still sends comes late and in any order.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.runner = asyncio.Runner()
        self.memory_members = MemoryMembership(SystemClock())
        self.memory = MemoryIndex(self.memory_members)
        self.redis_members = patient_membership(url)
        self.redis = patient_index(url)
        self.last_incarnation = {A: 0, B: 0}
        self.alive: dict[HolderId, int] = {}
        self.entries: dict[tuple[HolderId, BlockHash], int] = {}
        self.seen: set[tuple[int, ...]] = {(0,)}

    def both(self, call):
        results = [self.runner.run(call(index)) for index in (self.memory, self.redis)]
        assert results[0] == results[1]
        return results[0]

    def chain(self, sequence: tuple[int, ...]) -> Chain:
        return hash_prompt(NAMESPACE, sequence, block_tokens=1, algorithm=HashAlgorithm.XXH3_128).chain

    @initialize()
    def start_empty(self) -> None:
        empty(self.url)

    @rule(holder=HOLDERS)
    def start_holder(self, holder: HolderId) -> None:
        self.last_incarnation[holder] += 1
        self.alive[holder] = self.last_incarnation[holder]
        node = make_node(holder, self.alive[holder])
        for members in (self.memory_members, self.redis_members):
            assert self.runner.run(members.announce(node, ttl_ms=TTL_MS)) is True

    @rule(holder=HOLDERS)
    def stop_holder(self, holder: HolderId) -> None:
        if holder in self.alive:
            node = make_node(holder, self.alive.pop(holder))
            for members in (self.memory_members, self.redis_members):
                self.runner.run(members.withdraw(node))

    @rule(holder=HOLDERS, sequence=SEQUENCES, age=st.sampled_from([0, 0, 0, 1]))
    def register(self, holder: HolderId, sequence: tuple[int, ...], age: int) -> None:
        incarnation = self.last_incarnation[holder] - age
        if incarnation < 1:
            return
        self.seen.add(sequence)
        for block_hash in self.chain(sequence):
            if self.entries.get((holder, block_hash), 0) <= incarnation:
                self.entries[holder, block_hash] = incarnation
        self.both(
            lambda index: index.register(
                holder=holder, incarnation=incarnation, tier=Tier.HOST, namespace=NAMESPACE, blocks=self.chain(sequence)
            )
        )

    @precondition(lambda self: len(self.seen) > 1)
    @rule(holder=HOLDERS, sequence=SEQUENCES, age=st.sampled_from([0, 0, 1]))
    def deregister_with_descendants(self, holder: HolderId, sequence: tuple[int, ...], age: int) -> None:
        incarnation = self.last_incarnation[holder] - age
        if incarnation < 1:
            return
        below = {
            known[:length]
            for known in self.seen
            for length in range(len(sequence), len(known) + 1)
            if known[: len(sequence)] == sequence
        }
        blocks = tuple(self.chain(known)[-1] for known in sorted(below, key=len, reverse=True))
        for block_hash in blocks:
            if self.entries.get((holder, block_hash), incarnation + 1) <= incarnation:
                del self.entries[holder, block_hash]
        self.both(
            lambda index: index.deregister(holder=holder, incarnation=incarnation, namespace=NAMESPACE, blocks=blocks)
        )

    @rule()
    def sweep(self) -> None:
        dead = [key for key, incarnation in self.entries.items() if self.alive.get(key[0]) != incarnation]
        for key in dead:
            del self.entries[key]
        assert self.both(lambda index: index.sweep(dict(self.alive), limit=10_000)) == len(dead)

    @invariant()
    def all_agree(self) -> None:
        for sequence in sorted(self.seen, key=len)[-6:]:
            expected = {}
            for holder, incarnation in self.alive.items():
                depth = 0
                for block_hash in self.chain(sequence):
                    if self.entries.get((holder, block_hash)) != incarnation:
                        break
                    depth += 1
                if depth:
                    expected[holder] = depth
            chain = self.chain(sequence)
            found = self.both(lambda index, chain=chain: index.longest_prefix(NAMESPACE, chain))
            assert found.num_blocks_by_holder == expected

    def teardown(self) -> None:
        self.runner.run(self.redis.close())
        self.runner.run(self.redis_members.close())
        self.runner.close()


def test_memory_and_redis_agree_with_a_dictionary_after_any_history(empty_redis_url):
    # Fails when any of the three disagrees on a match or on what a sweep removes.
    run_state_machine_as_test(
        lambda: IndexMachine(empty_redis_url),
        settings=settings(
            max_examples=8 if "cluster" in empty_redis_url else 60,
            stateful_step_count=40,
            deadline=None,
            print_blob=True,
        ),
    )

"""What a mirror knows follows from what it was told, and it tells when that is not enough."""

from itertools import count

import pytest

from headrace.core.block import BlockHash, Chain, HashAlgorithm, HolderId, NamespaceId, hash_prompt
from headrace.core.index_limits import INDEX_MIRROR_DROP_BLOCKS, INDEX_SWEEP_MS
from headrace.core.limits import CHAIN_BLOCKS_MAX, HOLDERS_REMEMBERED
from headrace.core.members import NO_MATCH
from headrace.index.mirrored_blocks import Alive, MirroredBlocks, Owner
from headrace.index.redis_keys import Event, Op

NAMESPACE, SALTED = NamespaceId("0f" * 16), NamespaceId("1e" * 16)
A, B = HolderId("node:a"), HolderId("node:b")
CHAIN = hash_prompt(NAMESPACE, range(8), block_tokens=1, algorithm=HashAlgorithm.XXH3_128).chain
FOREVER = 1e9


class Told:
    """MirroredBlocks that are told of events numbered as a writer numbers them."""

    def __init__(self) -> None:
        self.blocks = MirroredBlocks({})
        self.numbers: dict[Owner, count] = {}

    def tell(self, holder: HolderId, blocks: Chain, *, op: Op = Op.REGISTERED, incarnation: int = 1) -> bool:
        number = next(self.numbers.setdefault(Owner(holder, incarnation), count(1)))
        told = self.blocks.apply(0, Event(holder, incarnation, number, op, NAMESPACE, blocks))
        self.blocks.check_integrity()
        return told

    def observe(self, *, now_s: float = 0.0, until_s: float = FOREVER, **alive: int) -> bool:
        live = {HolderId(f"node:{name}"): Alive(incarnation, until_s) for name, incarnation in alive.items()}
        whole = self.blocks.observe(live, now_s=now_s)
        self.blocks.check_integrity()
        return whole

    def match(self, *, now_s: float = 0.0) -> dict[HolderId, int]:
        return self.blocks.longest_prefix(NAMESPACE, CHAIN, now_s=now_s).num_blocks_by_holder

    def drop_all(self) -> int:
        steps = 0
        while self.blocks.is_dropping:
            self.blocks.drop_some()
            self.blocks.check_integrity()
            steps += 1
        return steps


@pytest.fixture
def told() -> Told:
    return Told()


def test_only_who_is_alive_is_named_and_only_while_the_record_stands(told: Told):
    told.tell(A, CHAIN)
    told.tell(B, CHAIN[:3])
    assert told.match() == {}
    assert told.blocks.has_unobserved
    told.observe(a=1, until_s=5.0)
    assert not told.blocks.has_unobserved
    assert told.match(now_s=4.9) == {A: 8}
    assert told.match(now_s=5.0) == {}


def test_a_holder_that_was_observed_has_its_later_blocks_named_at_once(told: Told):
    told.tell(A, CHAIN[:1])
    told.observe(a=1)
    told.tell(A, CHAIN[1:4])
    assert told.match() == {A: 4}


@pytest.mark.parametrize("number", [1, 3, 7])
def test_a_number_that_does_not_follow_the_last_one_is_a_loss(told: Told, number: int):
    told.tell(A, CHAIN[:1])
    assert not told.blocks.apply(0, Event(A, 1, number, Op.REGISTERED, NAMESPACE, CHAIN[1:]))


def test_numbers_are_counted_for_each_shard_holder_and_incarnation():
    # Fails when what two of them send passes for a gap, or what came before the reading does.
    blocks = MirroredBlocks({(0, Owner(A, 1)): 41})
    for shard, holder, incarnation, number in ((0, A, 1, 42), (1, A, 1, 1), (0, B, 1, 1), (0, A, 2, 1), (0, A, 1, 43)):
        assert blocks.apply(shard, Event(holder, incarnation, number, Op.REGISTERED, NAMESPACE, CHAIN[:1]))


def test_the_next_incarnation_replaces_what_it_names_and_removes_also_what_the_older_had(told: Told):
    told.tell(A, CHAIN)
    told.tell(A, CHAIN[:2], incarnation=2)
    told.tell(A, CHAIN[3:], op=Op.DEREGISTERED, incarnation=2)
    assert told.blocks.num_blocks == 3
    told.observe(a=1)
    assert told.match() == {}  # as in Redis: the entry of block 0 is the successor's
    told.observe(a=2)
    assert told.match() == {A: 2}


def test_an_older_incarnation_removes_nothing_of_a_newer_one(told: Told):
    told.tell(A, CHAIN, incarnation=2)
    told.tell(A, CHAIN, op=Op.DEREGISTERED, incarnation=1)
    told.observe(a=2)
    assert told.match() == {A: 8}


def test_a_replaced_incarnation_is_dropped_and_its_number_used_again_only_when_no_block_has_it(told: Told):
    told.tell(A, CHAIN)
    told.observe(a=2)
    assert told.blocks.num_holders == 1
    assert told.match() == {}
    told.tell(B, CHAIN[:2])  # while A's bits are still set: B must not be given them
    told.observe(a=2, b=1)
    assert told.match() == {B: 2}
    told.drop_all()
    assert (told.blocks.num_blocks, told.blocks.num_holders) == (2, 1)
    told.tell(A, CHAIN[:4], incarnation=2)
    told.observe(a=2, b=1)
    assert told.match() == {A: 4, B: 2}
    assert told.blocks.num_holders == 2


def test_who_is_gone_is_kept_for_a_while_and_then_dropped(told: Told):
    told.tell(A, CHAIN)
    told.observe(now_s=100.0)
    told.observe(now_s=100.0 + INDEX_SWEEP_MS / 1_000 - 1)
    assert told.observe(now_s=100.0 + INDEX_SWEEP_MS / 1_000 - 1, a=1)
    assert told.match() == {A: 8}  # it was only slow
    told.observe(now_s=200.0)
    told.observe(now_s=200.0 + INDEX_SWEEP_MS / 1_000)
    told.drop_all()
    assert told.blocks.num_blocks == 0


def test_who_comes_back_after_it_was_dropped_must_be_read_again(told: Told):
    # Its entries may still be in Redis, and no event will name them.
    told.tell(A, CHAIN)
    told.observe(now_s=0.0)
    told.observe(now_s=INDEX_SWEEP_MS / 1_000)
    assert told.blocks.watched() == [A]
    assert told.tell(A, CHAIN[:2])  # late, of a dead one
    assert told.blocks.num_holders == 1  # the one that is being dropped
    assert not told.observe(now_s=INDEX_SWEEP_MS / 1_000, a=1)


def test_what_is_read_of_a_dropped_incarnation_is_left_out(told: Told):
    told.tell(A, CHAIN)
    told.observe(a=2)
    told.drop_all()
    told.blocks.found(NAMESPACE, CHAIN[0], [Owner(A, 1), Owner(B, 1)])
    told.blocks.check_integrity()
    assert (told.blocks.num_blocks, told.blocks.num_holders) == (1, 1)


def test_a_sweep_of_who_is_alive_must_be_read_again_and_one_of_the_dead_drops_it(told: Told):
    told.tell(A, CHAIN)
    told.tell(B, CHAIN)
    told.observe(a=1)
    assert told.tell(B, (), op=Op.SWEPT)
    assert not told.tell(A, (), op=Op.SWEPT)


def test_dropping_takes_bounded_steps_also_over_many_small_namespaces(told: Told):
    blocks = [BlockHash(b"%016d" % number) for number in range(2 * INDEX_MIRROR_DROP_BLOCKS + 1)]
    told.tell(A, tuple(blocks))
    for number in range(50):
        told.blocks.found(NamespaceId(f"{number:032x}"), CHAIN[0], [Owner(A, 1)])
    told.observe(a=2)
    assert told.drop_all() == 3
    assert told.blocks.num_blocks == 0


def test_namespaces_are_apart_and_go_with_their_last_block(told: Told):
    told.blocks.found(SALTED, CHAIN[0], [Owner(A, 1)])
    told.observe(a=1)
    assert told.match() == {}
    assert told.blocks.longest_prefix(SALTED, CHAIN, now_s=0.0).num_blocks_by_holder == {A: 1}
    told.blocks.apply(1, Event(A, 1, 1, Op.DEREGISTERED, SALTED, CHAIN[:1]))
    told.blocks.check_integrity()
    assert told.blocks.longest_prefix(SALTED, CHAIN, now_s=0.0) == NO_MATCH


def test_those_who_left_are_remembered_up_to_a_bound(told: Told):
    for number in range(HOLDERS_REMEMBERED + 50):
        told.tell(HolderId(f"node:{number}"), CHAIN[:1])
    told.observe(now_s=0.0)
    told.observe(now_s=INDEX_SWEEP_MS / 1_000)
    told.drop_all()
    assert len(told.blocks.watched()) == HOLDERS_REMEMBERED
    assert told.blocks.num_blocks == told.blocks.num_holders == 0


class CountedHash(bytes):
    """A block hash that counts how often it is looked up."""

    looked_up = 0
    __eq__ = bytes.__eq__

    def __hash__(self) -> int:
        CountedHash.looked_up += 1
        return bytes.__hash__(self)


def test_the_longest_chain_over_a_thousand_holders_takes_few_look_ups():
    # Fails when the chain is walked (8,192 look-ups) or each holder is bisected by itself (1,000 x 13).
    told, depths = Told(), [512 * (number % 16 + 1) for number in range(1_000)]
    chain = hash_prompt(NAMESPACE, range(CHAIN_BLOCKS_MAX), block_tokens=1, algorithm=HashAlgorithm.XXH3_128).chain
    for number, depth in enumerate(depths):
        told.blocks.apply(0, Event(HolderId(f"node:{number}"), 1, 1, Op.REGISTERED, NAMESPACE, chain[:depth]))
    told.observe(**{str(number): 1 for number in range(1_000)})
    counted = tuple(BlockHash(CountedHash(block_hash)) for block_hash in chain)
    CountedHash.looked_up = 0
    match = told.blocks.longest_prefix(NAMESPACE, counted, now_s=0.0).num_blocks_by_holder
    assert match == {HolderId(f"node:{number}"): depth for number, depth in enumerate(depths)}
    assert CountedHash.looked_up <= 2 + 16 * 13

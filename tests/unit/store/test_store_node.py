"""Rules of one store node, each on its own; `test_store_machine.py` mixes them."""

from dataclasses import replace

import pytest
from store_kit import LAYOUT, fill, make_branch, make_header, make_kit, make_prompt, payload_of

from headrace.blocks.claims import SlotReserved
from headrace.core.block import payload_digest
from headrace.core.errors import BlockCorrupt, LeaseExpired
from headrace.core.generation import EvictSelector
from headrace.core.limits import STORE_LEASES_MAX
from headrace.core.ports import AlreadyStored, NotStored
from headrace.store.recover_arena import recover_arena

ALL = EvictSelector()


def test_a_block_can_be_read_only_after_its_commit() -> None:
    kit, prompt = make_kit(), make_prompt(1, 1)
    (reserved,) = kit.node.reserve([make_header(prompt, 0)])
    fill(reserved)
    assert kit.held(prompt) == 0
    kit.node.commit(reserved.reservation_id, payload_digest(reserved.buffer))
    assert kit.held(prompt) == 1
    assert kit.changes.changes == [("added", prompt.chain[0])]


def test_wrong_bytes_are_refused_at_commit_and_their_slot_is_free_again() -> None:
    kit, prompt = make_kit(), make_prompt(1, 1)
    (reserved,) = kit.node.reserve([make_header(prompt, 0)])
    fill(reserved)
    digest = payload_digest(reserved.buffer)
    reserved.buffer[7] ^= 1
    with pytest.raises(BlockCorrupt, match="checksum"):
        kit.node.commit(reserved.reservation_id, digest)
    assert kit.node.stat().free_blocks == 8
    assert kit.changes.changes == []


def test_a_header_whose_hash_does_not_follow_from_its_tokens_reserves_nothing() -> None:
    kit, prompt = make_kit(), make_prompt(1, 2)
    forged = replace(make_header(prompt, 1), token_ids=(6, 6, 6, 6))
    with pytest.raises(BlockCorrupt, match="block_hash"):
        kit.node.reserve([make_header(prompt, 0), forged])
    assert kit.node.stat().reserved_blocks == 0


def test_a_second_writer_of_the_same_block_has_nothing_to_do() -> None:
    kit, prompt = make_kit(), make_prompt(1, 1)
    (first,) = kit.node.reserve([make_header(prompt, 0)])
    assert kit.node.reserve([make_header(prompt, 0)]) == (AlreadyStored(prompt.chain[0]),)
    fill(first)
    kit.node.commit(first.reservation_id, payload_digest(first.buffer))
    assert kit.node.reserve([make_header(prompt, 0)]) == (AlreadyStored(prompt.chain[0]),)
    assert kit.node.stat().committed_blocks == 1


def test_a_block_without_its_parent_is_not_stored() -> None:
    kit, prompt = make_kit(), make_prompt(1, 3)
    assert kit.node.reserve([make_header(prompt, 1)]) == (NotStored(prompt.chain[1]),)


def test_blocks_committed_out_of_order_become_visible_in_order() -> None:
    kit, prompt = make_kit(), make_prompt(1, 3)
    reserved = kit.node.reserve([make_header(prompt, i) for i in range(3)])
    for index, visible in ((2, 0), (1, 0), (0, 3)):
        fill(reserved[index])
        kit.node.commit(reserved[index].reservation_id, payload_digest(reserved[index].buffer))
        assert kit.held(prompt) == visible
    assert kit.changes.changes == [("added", block_hash) for block_hash in prompt.chain]


def test_an_aborted_block_takes_the_blocks_behind_it_along() -> None:
    kit, prompt = make_kit(), make_prompt(1, 3)
    first, second, third = kit.node.reserve([make_header(prompt, i) for i in range(3)])
    fill(second)
    kit.node.commit(second.reservation_id, payload_digest(second.buffer))
    kit.node.abort(first.reservation_id)
    assert kit.node.stat().free_blocks == 8
    with pytest.raises(LeaseExpired):
        kit.node.commit(third.reservation_id, 0)


def test_a_reservation_ends_by_itself_and_its_late_commit_is_refused() -> None:
    kit, prompt = make_kit(reservation_ttl_ms=10_000), make_prompt(1, 1)
    (reserved,) = kit.node.reserve([make_header(prompt, 0)])
    fill(reserved)
    kit.clock.seconds += 10
    with pytest.raises(LeaseExpired):
        kit.node.commit(reserved.reservation_id, payload_digest(reserved.buffer))
    assert kit.node.stat().free_blocks == 8


def test_a_stalled_writer_that_scribbles_over_the_next_owner_is_found_out() -> None:
    """The first writer's reservation expired, the second owns the slot: neither commit nor reader trusts the bytes."""
    kit, old, new = make_kit(), make_prompt(1, 1), make_prompt(2, 1)
    (stalled,) = kit.node.reserve([make_header(old, 0)])
    kit.clock.seconds += 11
    (owner,) = kit.node.reserve([make_header(new, 0)])
    assert owner.slot == stalled.slot
    fill(owner)
    digest = payload_digest(owner.buffer)
    kit.node.commit(owner.reservation_id, digest)
    stalled.buffer[:4] = b"late"
    run = kit.node.lease(new.namespace, new.chain, first_block=0)
    (payload,) = kit.node.leased_payloads(run.lease_id)
    assert payload_digest(payload) != run.blocks[0].header.payload_xxh3
    kit.node.release(run.lease_id, suspects=[0])
    assert kit.held(new) == 0
    assert ("removed", new.chain[0]) in kit.changes.changes
    assert kit.store(new, [0]), "the block can be stored anew"


def test_a_false_suspicion_costs_nothing() -> None:
    kit, prompt = make_kit(), make_prompt(1, 2)
    kit.store(prompt, range(2))
    run = kit.node.lease(prompt.namespace, prompt.chain, first_block=0)
    kit.node.release(run.lease_id, suspects=[0, 1, 99])
    assert kit.held(prompt) == 2


def test_a_broken_block_leaves_memory_only_when_its_last_reader_has() -> None:
    kit, prompt = make_kit(), make_prompt(1, 3)
    kit.store(prompt, range(3))
    reader = kit.node.lease(prompt.namespace, prompt.chain, first_block=0)
    finder = kit.node.lease(prompt.namespace, prompt.chain, first_block=0)
    kit.arena.payload(finder.blocks[1].slot, 4)[:] = b"torn"
    kit.node.release(finder.lease_id, suspects=[1])
    assert kit.held(prompt) == 1, "the broken block and the one behind it are out of sight at once"
    assert kit.node.stat().free_blocks == 5, "but not yet out of memory"
    assert kit.node.reserve([make_header(prompt, 1)]) == (NotStored(prompt.chain[1]),)
    kit.node.check_integrity()
    kit.node.release(reader.lease_id)
    assert kit.node.stat().free_blocks == 7
    assert len(kit.store(prompt, [1, 2])) == 2


def test_a_lease_covers_the_run_from_the_block_asked_for() -> None:
    kit, prompt = make_kit(), make_prompt(1, 5)
    kit.store(prompt, range(4))
    run = kit.node.lease(prompt.namespace, prompt.chain, first_block=1)
    assert [block.header.position for block in run.blocks] == [1, 2, 3]
    payloads = [bytes(view) for view in kit.node.leased_payloads(run.lease_id)]
    assert payloads == [payload_of(block.header) for block in run.blocks]


def test_nothing_held_is_no_lease() -> None:
    kit, prompt = make_kit(), make_prompt(1, 1)
    assert kit.node.lease(prompt.namespace, prompt.chain, first_block=0).lease_id == ""


def test_a_lease_past_its_time_reads_nothing_more() -> None:
    kit, prompt = make_kit(lease_ttl_ms=30_000), make_prompt(1, 2)
    kit.store(prompt, range(2))
    run = kit.node.lease(prompt.namespace, prompt.chain, first_block=0)
    payloads = kit.node.leased_payloads(run.lease_id)
    next(payloads)
    kit.clock.seconds += 30
    with pytest.raises(LeaseExpired):
        next(payloads)


def test_releasing_twice_is_releasing_once() -> None:
    kit, prompt = make_kit(), make_prompt(1, 1)
    kit.store(prompt, [0])
    one = kit.node.lease(prompt.namespace, prompt.chain, first_block=0)
    two = kit.node.lease(prompt.namespace, prompt.chain, first_block=0)
    kit.node.release(one.lease_id)
    kit.node.release(one.lease_id)
    assert kit.node.evict(ALL, dry_run=False).skipped_leased_blocks == 1
    kit.node.release(two.lease_id)
    assert kit.node.evict(ALL, dry_run=False).blocks == 1


def test_lookups_that_are_never_fetched_pin_nothing_for_ever() -> None:
    kit, prompt = make_kit(), make_prompt(1, 2)
    kit.store(prompt, range(2))
    for _ in range(1_000):
        kit.node.lease(prompt.namespace, prompt.chain, first_block=0)
    kit.clock.seconds += 31
    assert len(kit.store(make_prompt(2, 6), range(6))) == 6
    assert kit.node.stat().leased_blocks == 0


def test_leases_are_bounded_and_beyond_the_bound_a_lookup_is_a_miss() -> None:
    kit, prompt = make_kit(), make_prompt(1, 1)
    kit.store(prompt, [0])
    runs = [kit.node.lease(prompt.namespace, prompt.chain, first_block=0) for _ in range(STORE_LEASES_MAX + 1)]
    assert runs[-2].lease_id
    assert not runs[-1].lease_id


def test_room_is_made_by_the_oldest_tail_and_only_as_much_as_is_needed() -> None:
    kit, old, young, new = make_kit(blocks=8), make_prompt(1, 4), make_prompt(2, 4), make_prompt(3, 2)
    kit.store(old, range(4))
    kit.clock.seconds += 1
    kit.store(young, range(4))
    kit.clock.seconds += 1
    assert len(kit.store(new, range(2))) == 2
    assert (kit.held(old), kit.held(young), kit.held(new)) == (2, 4, 2)


def test_a_use_keeps_a_chain_from_being_the_oldest() -> None:
    kit, used, unused = make_kit(blocks=8), make_prompt(1, 4), make_prompt(2, 4)
    kit.store(used, range(4))
    kit.clock.seconds += 1
    kit.store(unused, range(4))
    kit.clock.seconds += 1
    kit.node.release(kit.node.lease(used.namespace, used.chain, first_block=3).lease_id)
    kit.clock.seconds += 1
    kit.store(make_prompt(3, 2), range(2))
    assert (kit.held(used), kit.held(unused)) == (4, 2)


def test_leased_blocks_never_make_room() -> None:
    kit, read = make_kit(blocks=8), make_prompt(1, 6)
    kit.store(read, range(6))
    kit.node.lease(read.namespace, read.chain, first_block=0)
    kit.clock.seconds += 1
    stored = kit.store(make_prompt(2, 4), range(4))
    assert len(stored) == 2
    assert kit.held(read) == 6


def test_a_chain_longer_than_its_share_does_not_flush_the_others() -> None:
    kit, others, giant = make_kit(blocks=8), make_prompt(1, 2), make_prompt(2, 20)
    kit.store(others, range(2))
    kit.clock.seconds += 1
    assert len(kit.store(giant, range(20))) == 6
    assert kit.held(others) == 2


def test_blocks_of_another_size_share_the_arena() -> None:
    """The larger block needs three neighbouring units: oldest tails go until there are three."""
    kit, small = make_kit(blocks=8), make_prompt(1, 6)
    kit.store(small, range(6))
    kit.clock.seconds += 1
    large_layout = replace(LAYOUT, num_layers=5)
    large = make_prompt(7, 1)
    assert len(kit.store(large, [0], large_layout)) == 1
    assert kit.held(small) == 5
    kit.node.check_integrity()


def test_a_block_larger_than_the_arena_is_not_stored() -> None:
    kit = make_kit(blocks=8)
    header = make_header(make_prompt(1, 1), 0, replace(LAYOUT, num_layers=100))
    assert kit.node.reserve([header]) == (NotStored(header.block_hash),)


def test_an_eviction_by_hash_takes_the_block_and_all_behind_it() -> None:
    kit = make_kit()
    left, right = (make_branch(1, tail, head_blocks=2, tail_blocks=2) for tail in (2, 3))
    kit.store(left, range(4))
    kit.store(right, range(4))
    report = kit.node.evict(EvictSelector(block_hashes=(left.chain[2],)), dry_run=False)
    assert (report.blocks, report.tokens, report.holder) == (2, 8, "node:n1")
    assert (kit.held(left), kit.held(right)) == (2, 4)
    assert kit.node.evict(EvictSelector(block_hashes=(left.chain[0],)), dry_run=False).blocks == 4
    assert kit.held(right) == 0


def test_a_dry_run_says_what_would_go_and_takes_nothing() -> None:
    kit, prompt = make_kit(), make_prompt(1, 4)
    kit.store(prompt, range(4))
    kit.node.lease(prompt.namespace, prompt.chain[:2], first_block=0)
    dry = kit.node.evict(ALL, dry_run=True)
    assert kit.held(prompt) == 4
    assert replace(kit.node.evict(ALL, dry_run=False), dry_run=True) == dry
    assert (dry.blocks, dry.skipped_leased_blocks) == (2, 2)


def test_a_head_with_a_leased_tail_stays() -> None:
    kit, prompt = make_kit(), make_prompt(1, 3)
    kit.store(prompt, range(3))
    kit.node.lease(prompt.namespace, prompt.chain, first_block=2)
    report = kit.node.evict(ALL, dry_run=False)
    assert (report.blocks, report.skipped_leased_blocks) == (0, 3)


def test_an_idle_selector_takes_only_what_has_not_been_used() -> None:
    kit, idle, used = make_kit(), make_prompt(1, 2), make_prompt(2, 2)
    kit.store(idle, range(2))
    kit.store(used, range(2))
    kit.clock.seconds += 60
    kit.node.release(kit.node.lease(used.namespace, used.chain, first_block=1).lease_id)
    assert kit.node.evict(EvictSelector(idle_for_s=60), dry_run=False).blocks == 2
    assert (kit.held(idle), kit.held(used)) == (0, 2)


def test_listing_and_books_agree() -> None:
    kit, prompt = make_kit(), make_prompt(1, 3)
    kit.store(prompt, range(3))
    kit.node.lease(prompt.namespace, prompt.chain, first_block=0)
    kit.node.lease(prompt.namespace, make_prompt(2, 5).chain, first_block=0)
    infos, total = kit.node.list_blocks(ALL, limit=2)
    stat = kit.node.stat()
    assert [info.position for info in infos] == [0, 1]
    assert total == stat.committed_blocks == stat.leased_blocks == 3
    assert infos[0].leases == infos[0].hits == 1
    assert (stat.lookups_tokens, stat.hits_tokens) == (8 * 4, 3 * 4)
    payload_bytes = make_header(prompt, 0).payload_bytes
    assert (stat.lookups, stat.written_bytes, stat.read_bytes) == (2, 3 * payload_bytes, 3 * payload_bytes)


def test_a_restarted_node_finds_its_blocks_under_a_larger_incarnation() -> None:
    kit, prompt = make_kit(), make_prompt(1, 3)
    kit.store(prompt, range(3))
    arena = kit.arena.reattached()
    recovered = recover_arena(arena)
    assert [block.header.position for block in recovered.blocks] == [0, 1, 2]
    assert recovered.freed == {}
    assert arena.begin_incarnation(0) > kit.node.incarnation


@pytest.mark.parametrize("damage", ["payload", "header", "record units"])
def test_recovery_keeps_what_is_before_a_damaged_block_and_frees_the_rest(damage: str) -> None:
    kit, prompt = make_kit(), make_prompt(1, 4)
    kit.store(prompt, range(4))
    slot = kit.node.lease(prompt.namespace, prompt.chain, first_block=0).blocks[2].slot
    unit = kit.arena.payload(slot, 4_096)
    if damage == "payload":
        unit[0] ^= 1
    elif damage == "header":
        unit[-20] ^= 1
    else:
        record = next(record for record in kit.arena.records() if record.slot == slot)
        assert record.units == 1
        kit.arena._memory[4_096 + 32 * slot] = 2
    arena = kit.arena.reattached()
    recovered = recover_arena(arena)
    assert [block.header.position for block in recovered.blocks] == [0, 1]
    assert sum(recovered.freed.values()) == 2
    assert recovered.freed["its parent is gone"] == 1
    arena.check_integrity()
    assert arena.free_bytes == 6 * 4_096


def test_a_reserved_but_uncommitted_slot_is_free_after_a_crash() -> None:
    kit, prompt = make_kit(), make_prompt(1, 2)
    kit.store(prompt, [0])
    (reserved,) = kit.node.reserve([make_header(prompt, 1)])
    assert isinstance(reserved, SlotReserved)
    fill(reserved)
    arena = kit.arena.reattached()
    assert len(recover_arena(arena).blocks) == 1
    assert arena.free_bytes == 7 * 4_096

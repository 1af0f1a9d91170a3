"""The log of KV events: numbers without a gap, bounds, and replays that give a follower the whole truth."""

import asyncio

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_events_kit import AllBlocksCleared, BlockStored, Follower, decode_maps
from store_kit import BLOCK_TOKENS, HandClock, make_header, make_prompt

from headrace.core.block import BlockHeader
from headrace.core.index_limits import KV_EVENTS_BATCH_TOKENS, KV_EVENTS_SEQUENCE_STRIDE
from headrace.store.kv_event_format import EventFormat, EventHashes
from headrace.store.kv_event_log import EventBatch, KvEventLog

FIRST = 1_000 * KV_EVENTS_SEQUENCE_STRIDE


def make_log(*, begun: bool = True, batches_max: int = 100, bytes_max: int = 1 << 20) -> KvEventLog:
    log = KvEventLog(
        EventFormat(hashes=EventHashes.BYTES), clock=HandClock(), batches_max=batches_max, bytes_max=bytes_max
    )
    if begun:
        log.begin(1_000)
    return log


def make_headers(token: int, num_blocks: int) -> list[BlockHeader]:
    prompt = make_prompt(token, num_blocks)
    return [make_header(prompt, i) for i in range(num_blocks)]


def feed(follower: Follower, batches: list[EventBatch]) -> Follower:
    for batch in batches:
        follower.apply(batch.sequence, batch.payload)
    return follower


def held_by(follower: Follower) -> set[object]:
    return set(follower.held)


def test_changes_of_one_turn_are_one_batch():
    log = make_log()
    for header in make_headers(1, 3):
        log.added(header)
    [batch] = log.take_unsent()
    assert batch.sequence == FIRST
    cleared, stored = decode_maps(batch.payload).events
    assert isinstance(cleared, AllBlocksCleared)
    assert isinstance(stored, BlockStored)
    assert len(stored.block_hashes) == 3
    assert log.take_unsent() == []


def test_a_batch_is_closed_when_it_is_full():
    """Fails when one step that adds thousands of blocks makes one message of them all."""
    log = make_log()
    log.take_unsent()
    num_blocks = 2 * KV_EVENTS_BATCH_TOKENS // BLOCK_TOKENS
    for header in make_headers(1, num_blocks):
        log.added(header)
    batches = log.take_unsent()
    assert [batch.sequence for batch in batches] == [FIRST + 1, FIRST + 2]
    assert all(len(batch.payload) < 32_768 for batch in batches)


async def test_waiting_ends_with_a_change():
    log = make_log()
    log.take_unsent()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(log.wait(), 0.02)
    log.added(make_headers(1, 1)[0])
    await log.wait()


def test_blocks_found_again_are_the_first_thing_said():
    """Fails when recovered blocks, which are added before the numbering begins, are not told."""
    log = make_log(begun=False)
    headers = make_headers(1, 4)
    for header in headers:
        log.added(header)
    log.begin(1_000)
    follower = feed(Follower(), log.take_unsent())
    assert held_by(follower) == {header.block_hash for header in headers}


def test_a_replay_from_a_kept_number_is_exactly_what_followed():
    log = make_log()
    sent = []
    for header in make_headers(1, 5):
        log.added(header)
        sent += log.take_unsent()
    assert list(log.replay(FIRST + 2)) == sent[2:]
    assert list(log.replay(FIRST + 5)) == []


def test_a_replay_contains_changes_that_were_not_sent_yet():
    log = make_log()
    log.take_unsent()
    log.added(make_headers(1, 1)[0])
    replayed = list(log.replay(FIRST + 1))
    assert replayed == log.take_unsent()


def test_a_replay_from_before_the_buffer_is_a_snapshot():
    """Fails when the kept tail is sent as if it were everything."""
    log = make_log(batches_max=2)
    headers = make_headers(1, 6)
    for header in headers:
        log.added(header)
        log.take_unsent()
    log.removed(headers[5].namespace, headers[5].block_hash)
    replayed = list(log.replay(0))
    assert isinstance(decode_maps(replayed[0].payload).events[0], AllBlocksCleared)
    follower = feed(Follower(), replayed)
    assert held_by(follower) == {header.block_hash for header in headers[:5]}
    assert follower.last == FIRST + 6, "the snapshot ends where the live stream goes on"


def test_a_snapshot_of_nothing_still_clears():
    log = make_log(batches_max=1)
    [header] = make_headers(1, 1)
    log.added(header)
    log.take_unsent()
    log.removed(header.namespace, header.block_hash)
    [batch] = log.replay(0)
    assert [type(event) for event in decode_maps(batch.payload).events] == [AllBlocksCleared]


def test_a_snapshot_fits_into_the_numbers_that_are_missing():
    """Fails when a snapshot begins below the number asked for: a follower passes over what it thinks it has."""
    log = make_log(batches_max=1)
    headers = make_headers(1, 4 * KV_EVENTS_BATCH_TOKENS // BLOCK_TOKENS)
    for header in headers:
        log.added(header)
    last = log.take_unsent()[-1].sequence
    for missing in (2, 3):
        replayed = list(log.replay(last - missing + 1))
        assert len(replayed) <= missing
        assert replayed[0].sequence > last - missing
        assert replayed[-1].sequence == last
        follower = Follower()
        follower.last = last - missing
        assert held_by(feed(follower, replayed)) == {header.block_hash for header in headers}


def test_a_restart_is_a_gap_to_whoever_followed_the_last_run():
    """Fails when numbers begin anew: a follower would pass over the new run as something it has."""
    old = make_log()
    for header in make_headers(1, 3):
        old.added(header)
    follower = feed(Follower(), old.take_unsent())
    new = make_log(begun=False)
    [found_again] = make_headers(1, 1)
    new.added(found_again)
    new.begin(1_001)
    new.take_unsent()
    assert follower.misses_before(1_001 * KV_EVENTS_SEQUENCE_STRIDE)
    feed(follower, list(new.replay(follower.last + 1)))
    assert held_by(follower) == {found_again.block_hash}


def test_a_number_from_the_future_gets_the_whole_truth():
    log = make_log()
    headers = make_headers(1, 2)
    for header in headers:
        log.added(header)
    replayed = list(log.replay(1 << 62))
    assert held_by(feed(Follower(), replayed)) == {header.block_hash for header in headers}


@pytest.mark.parametrize("bytes_max", [1, 600, 4_000])
def test_the_buffer_stays_within_its_bytes(bytes_max: int):
    log = make_log(bytes_max=bytes_max)
    for header in make_headers(1, 50):
        log.added(header)
        log.take_unsent()
        log.check_integrity()
    assert len(list(log.replay(FIRST + 49))) == 1, "the latest batch is always kept"


def test_nobody_needs_to_take_what_is_recorded():
    """A publisher that stands still costs a bounded buffer, and its gap is seen."""
    log = make_log(batches_max=3)
    for header in make_headers(1, 5 * KV_EVENTS_BATCH_TOKENS // BLOCK_TOKENS):
        log.added(header)
        log.check_integrity()
    batches = log.take_unsent()
    assert len(batches) == 3
    assert batches[0].sequence > FIRST


def test_time_is_in_seconds():
    log = make_log()
    assert msgpack.unpackb(log.take_unsent()[0].payload)[0] == HandClock().unix_ms() / 1_000


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=60),
    batches_max=st.integers(1, 6),
)
def test_a_follower_that_replays_its_gaps_holds_what_the_node_holds(
    steps: list[tuple[int, bool, bool, bool]], batches_max: int
):
    """Chains grow and shrink, messages are lost at random: after a replay nothing is missing, stale or orphaned."""
    log, follower = make_log(batches_max=batches_max), Follower()
    chains = {i: make_headers(i + 1, 8) for i in range(4)}
    lengths = dict.fromkeys(chains, 0)
    feed(follower, list(log.replay(0)))
    for chain, grows, is_turn_over, is_lost in steps:
        if grows and lengths[chain] < 8:
            log.added(chains[chain][lengths[chain]])
            lengths[chain] += 1
        elif not grows and lengths[chain] > 0:
            lengths[chain] -= 1
            header = chains[chain][lengths[chain]]
            log.removed(header.namespace, header.block_hash)
        if not is_turn_over:
            continue
        for batch in log.take_unsent():
            if is_lost:
                continue
            if follower.misses_before(batch.sequence):
                feed(follower, list(log.replay(follower.last + 1)))
            follower.apply(batch.sequence, batch.payload)
        log.check_integrity()
    feed(follower, list(log.replay(follower.last + 1)))
    assert held_by(follower) == {h.block_hash for i, n in lengths.items() for h in chains[i][:n]}
    assert follower.orphans == 0

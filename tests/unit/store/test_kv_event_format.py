"""KV events are what a reader of vLLM's schema expects, in both layouts and both kinds of hashes."""

from dataclasses import replace

import msgpack
import pytest
from kv_events_kit import (
    AllBlocksCleared as DecodedCleared,
)
from kv_events_kit import (
    BlockRemoved as DecodedRemoved,
)
from kv_events_kit import (
    BlockStored as DecodedStored,
)
from kv_events_kit import (
    ClearedArray,
    RemovedArray,
    StoredArray,
    decode_arrays,
    decode_maps,
)
from store_kit import BLOCK_TOKENS, NAMESPACE, make_branch, make_header, make_prompt

from headrace.core.block import HashAlgorithm, NamespaceId
from headrace.store.kv_event_format import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventFormat,
    EventHashes,
    EventLayout,
    merge_events,
)

PROMPT = make_prompt(1, 3)
HEADERS = tuple(make_header(PROMPT, i) for i in range(3))
EVENTS = [AllBlocksCleared(), BlockStored(HEADERS[:2]), BlockRemoved(NAMESPACE, PROMPT.chain[1:2])]


def low(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


def test_maps_decode_with_the_current_schema():
    """Fails when a field is renamed, missing or of another type."""
    batch = decode_maps(EventFormat().encode(EVENTS, unix_s=12.5))
    assert (batch.ts, batch.data_parallel_rank) == (12.5, 0)
    assert batch.events == [
        DecodedCleared(),
        DecodedStored(
            block_hashes=[low(PROMPT.chain[0]), low(PROMPT.chain[1])],
            parent_block_hash=None,
            token_ids=list(PROMPT.token_ids[: 2 * BLOCK_TOKENS]),
            block_size=BLOCK_TOKENS,
            lora_id=None,
            medium="CPU",
            lora_name=None,
        ),
        DecodedRemoved(block_hashes=[low(PROMPT.chain[1])], medium="CPU"),
    ]


def test_arrays_decode_with_the_schema_before_maps():
    """Fails when a field moves: readers of arrays tell fields by their place."""
    batch = decode_arrays(EventFormat(layout=EventLayout.ARRAY).encode(EVENTS, unix_s=12.5))
    assert batch.data_parallel_rank == 0
    assert batch.events == [
        ClearedArray(),
        StoredArray(
            block_hashes=[low(PROMPT.chain[0]), low(PROMPT.chain[1])],
            parent_block_hash=None,
            token_ids=list(PROMPT.token_ids[: 2 * BLOCK_TOKENS]),
            block_size=BLOCK_TOKENS,
            lora_id=None,
            medium="CPU",
            lora_name=None,
        ),
        RemovedArray(block_hashes=[low(PROMPT.chain[1])], medium="CPU"),
    ]


@pytest.mark.parametrize("layout", list(EventLayout))
def test_the_outer_batch_is_an_array_of_three_in_both_layouts(layout: EventLayout):
    """Readers in Rust want the rank to be there even where it says nothing."""
    batch = msgpack.unpackb(EventFormat(layout=layout).encode([], unix_s=1.0))
    assert batch == [1.0, [], 0]


@pytest.mark.parametrize("algorithm", list(HashAlgorithm))
def test_whole_hashes_are_written_as_bytes_and_end_in_the_integers(algorithm: HashAlgorithm):
    """A reader that folds bytes to 64 bits (llm-d) arrives at the integers that the other form has."""
    prompt = make_prompt(1, 2, algorithm=algorithm)
    stored = [BlockStored((make_header(prompt, 1),))]
    [whole] = decode_maps(EventFormat(hashes=EventHashes.BYTES).encode(stored, unix_s=1.0)).events
    [folded] = decode_maps(EventFormat(hashes=EventHashes.INT).encode(stored, unix_s=1.0)).events
    assert isinstance(whole, DecodedStored)
    assert isinstance(folded, DecodedStored)
    assert (whole.block_hashes, whole.parent_block_hash) == ([prompt.chain[1]], prompt.chain[0])
    assert folded.block_hashes == [low(h) for h in whole.block_hashes if isinstance(h, bytes)]
    assert folded.parent_block_hash == low(prompt.chain[0])


def test_a_map_says_which_namespace_a_block_is_of():
    batch = msgpack.unpackb(EventFormat().encode(EVENTS, unix_s=1.0))
    assert [event.get("namespace") for event in batch[1]] == [None, NAMESPACE, NAMESPACE]


def test_neighbours_of_one_chain_become_one_event_and_others_do_not():
    """Fails when blocks of two branches are joined: the second would get the wrong parent."""
    left, right = (make_branch(1, tail, head_blocks=1, tail_blocks=2) for tail in (2, 3))
    headers = [make_header(left, 0), make_header(left, 1), make_header(right, 1), make_header(right, 2)]
    merged = merge_events([BlockStored((header,)) for header in headers])
    assert merged == [BlockStored(tuple(headers[:2])), BlockStored(tuple(headers[2:]))]


def test_a_stored_block_between_two_removals_keeps_its_place():
    """Fails when removals are joined across it: a block that left and came back would be lost."""
    removal = BlockRemoved(NAMESPACE, PROMPT.chain[2:])
    events = [removal, BlockStored(HEADERS[2:]), removal]
    assert merge_events(events) == events


def test_removals_of_two_namespaces_are_two_events():
    other = NamespaceId("ff" * 16)
    removals = [BlockRemoved(space, PROMPT.chain[:1]) for space in (NAMESPACE, NAMESPACE, other)]
    assert merge_events(removals) == [
        BlockRemoved(NAMESPACE, PROMPT.chain[:1] * 2),
        BlockRemoved(other, PROMPT.chain[:1]),
    ]


def test_blocks_of_another_size_are_an_event_of_their_own():
    """`block_size` is one number for all blocks of an event."""
    longer = replace(HEADERS[1], token_ids=(*HEADERS[1].token_ids, 7))
    assert len(merge_events([BlockStored(HEADERS[:1]), BlockStored((longer,))])) == 2

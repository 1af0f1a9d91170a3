"""What a store node's KV events say so far: numbered batches, the latest of them kept for replay, and a snapshot.

Owns the sequence numbers and the buffer. Rules:

- Batches are numbered without a gap. The first number of a run is made from the node's incarnation, so numbers grow
  over restarts: a follower that was there before sees a restart as an ordinary gap.
- Everything is bounded, and recording a change never waits: batches are kept up to a count and a number of bytes, and
  the oldest are dropped. What was dropped is covered by the snapshot.
- A snapshot is AllBlocksCleared and then BlockStored for all that is held. Its numbers end with the latest batch's and
  do not begin before the number that was asked for, so a follower applies it like any other replay.

Knows nothing of sockets. One event loop.
"""

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from headrace.core.block import BlockHash, BlockHeader, NamespaceId
from headrace.core.clock import Clock
from headrace.core.index_limits import (
    KV_EVENTS_BATCH_TOKENS,
    KV_EVENTS_KEPT_BATCHES_MAX,
    KV_EVENTS_KEPT_BYTES_MAX,
    KV_EVENTS_SEQUENCE_STRIDE,
)
from headrace.store.kv_event_format import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventFormat,
    KvEvent,
    merge_events,
)


@dataclass(frozen=True, slots=True)
class EventBatch:
    """One message: its number and its payload."""

    sequence: int
    payload: bytes


class KvEventLog:
    """Follows a node's changes (`BlockChanges`) from before its first one; numbers them from `begin` on."""

    def __init__(
        self,
        event_format: EventFormat,
        *,
        clock: Clock,
        batches_max: int = KV_EVENTS_KEPT_BATCHES_MAX,
        bytes_max: int = KV_EVENTS_KEPT_BYTES_MAX,
    ) -> None:
        assert batches_max >= 1
        self._format = event_format
        self._clock = clock
        self._batches_max = batches_max
        self._bytes_max = bytes_max
        # Parents before children, since blocks are added in that order and a parent leaves after its children.
        self._held: dict[tuple[NamespaceId, BlockHash], BlockHeader] = {}
        self._open: list[KvEvent] = []
        self._open_tokens = 0
        self._kept: deque[EventBatch] = deque()
        self._kept_bytes = 0
        self._next_sequence = 0
        self._num_unsent = 0
        self._begun = False
        self._something = asyncio.Event()

    def begin(self, incarnation: int) -> None:
        """Number batches from this incarnation on. The first ones say all that the node found again."""
        assert not self._begun
        self._begun = True
        self._next_sequence = incarnation * KV_EVENTS_SEQUENCE_STRIDE
        self._record(AllBlocksCleared(), tokens=0)
        for header in self._held.values():
            self._record(BlockStored((header,)), tokens=len(header.token_ids))

    def added(self, header: BlockHeader) -> None:
        """As `BlockChanges.added`."""
        self._held[header.namespace, header.block_hash] = header
        if self._begun:
            self._record(BlockStored((header,)), tokens=len(header.token_ids))

    def removed(self, namespace: NamespaceId, block_hash: BlockHash) -> None:
        """As `BlockChanges.removed`."""
        header = self._held.pop((namespace, block_hash))
        if self._begun:
            self._record(BlockRemoved(namespace, (block_hash,)), tokens=len(header.token_ids))

    async def wait(self) -> None:
        """Return when there is something to send."""
        await self._something.wait()

    def take_unsent(self) -> list[EventBatch]:
        """Batches that nobody took yet, in order; those that the bounds dropped meanwhile are not among them."""
        self._seal()
        self._something.clear()
        unsent = list(islice(reversed(self._kept), self._num_unsent))
        self._num_unsent = 0
        return unsent[::-1]

    def replay(self, start_sequence: int) -> Iterator[EventBatch]:
        """Batches from that number to the latest as of this call; a snapshot when not all of them are kept.

        Nothing for the number after the latest. A number from the future (a node that lost its arena and its clock)
        gets a snapshot too, with numbers below it.
        """
        assert self._begun
        self._seal()
        if self._kept[0].sequence <= start_sequence <= self._next_sequence:
            return iter([batch for batch in self._kept if batch.sequence >= start_sequence])
        return self._snapshot(start_sequence, tuple(self._held.values()), last_sequence=self._next_sequence - 1)

    def check_integrity(self) -> None:
        """Numbers have no gap, and the buffer is within its bounds."""
        sequences = [batch.sequence for batch in self._kept]
        assert sequences == list(range(self._next_sequence - len(sequences), self._next_sequence))
        assert self._kept_bytes == sum(len(batch.payload) for batch in self._kept)
        assert len(self._kept) <= self._batches_max
        assert self._kept_bytes <= self._bytes_max or len(self._kept) == 1
        assert self._num_unsent <= len(self._kept)

    def _record(self, event: KvEvent, *, tokens: int) -> None:
        self._open.append(event)
        self._open_tokens += max(1, tokens)
        if self._open_tokens >= KV_EVENTS_BATCH_TOKENS:
            self._seal()
        self._something.set()

    def _seal(self) -> None:
        """Close the open batch: number it, keep it, and drop the oldest beyond the bounds."""
        if not self._open:
            return
        batch = self._encode(self._next_sequence, self._open)
        self._open, self._open_tokens = [], 0
        self._next_sequence += 1
        self._num_unsent += 1
        self._kept.append(batch)
        self._kept_bytes += len(batch.payload)
        while len(self._kept) > 1 and (len(self._kept) > self._batches_max or self._kept_bytes > self._bytes_max):
            self._kept_bytes -= len(self._kept.popleft().payload)
        self._num_unsent = min(self._num_unsent, len(self._kept))

    def _encode(self, sequence: int, events: Sequence[KvEvent]) -> EventBatch:
        return EventBatch(sequence, self._format.encode(merge_events(events), unix_s=self._clock.unix_ms() / 1_000))

    def _snapshot(
        self, start_sequence: int, headers: Sequence[BlockHeader], *, last_sequence: int
    ) -> Iterator[EventBatch]:
        """The state as of `last_sequence`, encoded batch by batch as it is taken."""
        num_tokens = sum(len(header.token_ids) for header in headers)
        batch_tokens = KV_EVENTS_BATCH_TOKENS
        if start_sequence <= last_sequence:
            # As many batches as there are numbers to give: floor(t / (floor(t / n) + 1)) + 1 <= n.
            batch_tokens = max(batch_tokens, num_tokens // (last_sequence - start_sequence + 1) + 1)
        chunks = list(_chunks(headers, batch_tokens)) or [()]
        first_sequence = last_sequence - len(chunks) + 1
        assert first_sequence >= 0
        assert first_sequence >= start_sequence or start_sequence > last_sequence
        for number, chunk in enumerate(chunks):
            cleared: list[KvEvent] = [AllBlocksCleared()] if number == 0 else []
            yield self._encode(first_sequence + number, [*cleared, *(BlockStored((header,)) for header in chunk)])


def _chunks(headers: Sequence[BlockHeader], batch_tokens: int) -> Iterator[tuple[BlockHeader, ...]]:
    """Cut where a piece has `batch_tokens` tokens or more."""
    chunk: list[BlockHeader] = []
    tokens = 0
    for header in headers:
        chunk.append(header)
        tokens += len(header.token_ids)
        if tokens >= batch_tokens:
            yield tuple(chunk)
            chunk, tokens = [], 0
    if chunk:
        yield tuple(chunk)

"""A run of wanted blocks, shared out among the holders that deliver it at the same time.

        first                                          end
          |  own node  | piece of b | piece of c | open  |
          |=====>      |==>         |====>       |       |      ===> delivered and verified

Owns who delivers which blocks, what is left for somebody else, and how far the run is unbroken. Pieces are given out
from the front, since only the unbroken run counts and time may end at any moment; no block is two holders' at once,
since two copies into the same place of a pool could undo each other's verification. Knows nothing of leases, headers
or pools. One event loop; every method but `claim` is one step.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from headrace.core.block import CacheSource
from headrace.core.clock import Clock
from headrace.core.limits import LOAD_STALL_MS, LOAD_WATCH_MS, STORE_CALL_TIMEOUT_MS
from headrace.core.ports import BlockSource

# However small blocks are: a node that delivers a hundred of them a second is not slow.
_PACE_MAX_S = 0.01


@dataclass(slots=True, eq=False)
class Holder:
    """One source of one load."""

    kind: CacheSource
    node_id: str
    source: BlockSource
    piece_blocks: int  # given to it at once
    holds_until: int  # it has no block of the run from here on, as far as is known


@dataclass(slots=True, eq=False)
class Piece:
    """Blocks [next_block, end_block) are one holder's to deliver; [first_block, next_block) it has delivered."""

    holder: Holder
    first_block: int
    end_block: int  # goes down when the holder has less, or when less is wanted
    next_block: int
    progress_s: float  # when it was claimed, leased, or a block was delivered last
    worker: asyncio.Task[None]
    leased_s: float | None = None  # None until the holder has granted a lease
    is_taken: bool = False  # its holder was too slow, and is being stopped


class SplitRun:
    """Blocks [first_block, end_block) of a prompt, while they are loaded."""

    def __init__(self, first_block: int, end_block: int, *, piece_blocks: int, clock: Clock) -> None:
        assert first_block <= end_block
        self.end_block = end_block  # goes down to where the run cannot go on
        self._first_block = first_block
        self._clock = clock
        self._open = [range(first_block, end_block)] if end_block > first_block else []  # nobody's, in order
        self._pieces: list[Piece] = []
        self._block_to_source: dict[int, CacheSource] = {}
        self._holders: list[Holder] = []
        self._changed = asyncio.Event()
        self._pace_max_s = max(LOAD_STALL_MS / 1000 / piece_blocks, _PACE_MAX_S)

    def join(self, holder: Holder) -> None:
        """One more holder, which has not been asked yet what it has. All join before the first one claims."""
        self._holders.append(holder)

    async def claim(self, holder: Holder) -> Piece | None:
        """The foremost blocks that are nobody's and that the holder may have; for the calling task to deliver.

        Waits while others deliver blocks that may come back. Meanwhile, whoever is too slow is stopped: this holder is
        idle and may have the same. None when nothing is left that it could do.
        """
        while True:
            piece = self._open_piece(holder)
            if piece is not None:
                return piece
            may_come_back = [piece for piece in self._pieces if piece.next_block < holder.holds_until]
            if not may_come_back:
                return None
            for piece in may_come_back:
                if not piece.is_taken and self._is_late(piece):
                    piece.is_taken = True
                    piece.worker.cancel()
            changed = self._changed
            with suppress(TimeoutError):
                async with asyncio.timeout(LOAD_WATCH_MS / 1000):
                    await changed.wait()

    def leased(self, piece: Piece, num_blocks: int) -> None:
        """The holder has granted so many leading blocks of its piece; the others it does not have."""
        piece.leased_s = piece.progress_s = self._clock.now_s()
        end_block = piece.first_block + num_blocks
        if end_block < piece.end_block:
            rest, piece.end_block = range(end_block, piece.end_block), end_block
            piece.holder.holds_until = end_block
            self._reopen(rest)

    def delivered(self, piece: Piece) -> None:
        """The next block of the piece is in its place and verified."""
        if piece.next_block < self.end_block:
            self._block_to_source[piece.next_block] = piece.holder.kind
        piece.next_block += 1
        piece.progress_s = self._clock.now_s()

    def give_back(self, piece: Piece) -> None:
        """The holder is done with its piece; what it has not delivered is anybody's again."""
        self._pieces.remove(piece)
        self._reopen(range(piece.next_block, piece.end_block))

    def leave(self, holder: Holder) -> None:
        """The holder delivers nothing more. Without anybody for a block, the run ends there."""
        self._holders.remove(holder)
        self._end_where_nobody_is_left()

    def end_at(self, block: int) -> None:
        """No block from this one on is wanted any more; whoever works for them only is stopped."""
        if block >= self.end_block:
            return
        self.end_block = block
        self._open = [range(gap.start, min(gap.stop, block)) for gap in self._open if gap.start < block]
        self._block_to_source = {at: kind for at, kind in self._block_to_source.items() if at < block}
        for piece in self._pieces:
            piece.end_block = max(piece.next_block, min(piece.end_block, block))
            if piece.next_block >= block and piece.worker is not asyncio.current_task():
                piece.worker.cancel()
        self._notify()

    @property
    def num_delivered(self) -> int:
        """Blocks that are in their places, also behind a gap."""
        return len(self._block_to_source)

    def unbroken_sources(self) -> tuple[CacheSource, ...]:
        """Where each block of the unbroken leading run came from."""
        sources: list[CacheSource] = []
        while (kind := self._block_to_source.get(self._first_block + len(sources))) is not None:
            sources.append(kind)
        return tuple(sources)

    def check_integrity(self) -> None:
        """Every wanted block is delivered, one holder's, or nobody's, and only one of these."""
        blocks = [at for gap in self._open for at in gap] + list(self._block_to_source)
        for piece in self._pieces:
            blocks += [at for at in range(piece.next_block, piece.end_block) if at < self.end_block]
        assert sorted(blocks) == list(range(self._first_block, self.end_block)), "a block is lost, or twice somebody's"
        assert [gap.start for gap in self._open] == sorted(gap.start for gap in self._open)

    def _open_piece(self, holder: Holder) -> Piece | None:
        if not self._open or self._open[0].start >= holder.holds_until:
            return None
        gap = self._open.pop(0)
        end_block = min(gap.stop, gap.start + holder.piece_blocks, holder.holds_until)
        if end_block < gap.stop:
            self._open.insert(0, range(end_block, gap.stop))
        worker = asyncio.current_task()
        assert worker is not None
        piece = Piece(
            holder=holder,
            first_block=gap.start,
            end_block=end_block,
            next_block=gap.start,
            progress_s=self._clock.now_s(),
            worker=worker,
        )
        self._pieces.append(piece)
        return piece

    def _is_late(self, piece: Piece) -> bool:
        """Whether a piece comes so slowly that an idle holder does better: silence, or too long for each block.

        A lease has its own time limit and may include a read from disk; a pace is known after some blocks only.
        """
        now_s, stall_s = self._clock.now_s(), LOAD_STALL_MS / 1000
        silence_s = now_s - piece.progress_s
        if piece.leased_s is None:
            return silence_s >= stall_s + STORE_CALL_TIMEOUT_MS / 1000
        delivering_s, num_delivered = now_s - piece.leased_s, piece.next_block - piece.first_block
        return silence_s >= stall_s or delivering_s >= stall_s / 2 + num_delivered * self._pace_max_s

    def _reopen(self, gap: range) -> None:
        gap = range(gap.start, min(gap.stop, self.end_block))
        if gap:
            self._open = sorted([*self._open, gap], key=lambda each: each.start)
        self._end_where_nobody_is_left()
        self._notify()

    def _end_where_nobody_is_left(self) -> None:
        for gap in self._open:
            if not any(holder.holds_until > gap.start for holder in self._holders):
                self.end_at(gap.start)
                return

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

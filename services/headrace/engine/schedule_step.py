"""Deciding what one step of the engine computes: which sequences, which of their tokens, and who gives way.

Pure: sees numbers of tokens and blocks, returns a plan. It knows nothing of tensors, threads, text or hashes; taking
and giving back blocks is the engine's.

The rules, in order:

1. Sequences join in the order of their turns, while the batch has room. One that lost its blocks joins
   when blocks for all its tokens can be had; others that hold theirs may pass it, since their blocks are what it needs.
2. Every sequence that only lacks its newest token gets one row. This comes first, so that a long prompt never stops
   running streams.
3. What remains of `prefill_chunk_tokens` goes to prompts, in the order of their turns (`turns.py`: by priority, fair
   between accounts, shortest first with ageing); at the same turn, oldest first. A step's length is so bounded by
   `prefill_chunk_tokens + batch_sequences_max` rows.
4. A sequence whose next block another one of the batch computes gets no rows, and takes that block when it is there.
5. When blocks run short, one holder gives way and comes back later: the one that is back soonest (`choose_victim.py`),
   never the oldest while there is another. The oldest therefore always gets on, and nothing is preempted for ever.
6. Drafts of tokens (`speculation.py`) come last: they have what prompts left of `prefill_chunk_tokens`, and open a
   block only where enough are free that nobody gives way for it and no sequence waits for blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.core.key_window import EVERYTHING, KeyWindow


@dataclass(frozen=True, slots=True)
class SequenceState:
    """What scheduling sees of one sequence. KV of positions [0, num_computed) is valid; `num_target` are wanted."""

    key: int  # grows in the order of admission
    num_computed: int
    num_target: int  # decode: all tokens known so far; prefill: the tokens of the prompt's full blocks
    num_blocks: int  # held now; 0 after preemption
    in_batch: bool
    wants_logits: bool  # of the last target position
    turn: int = 0  # place among prompts, lower first
    first_block: int = 0  # earlier ones were given back, since the model's window has passed them
    leader: int | None = None  # key of the sequence that computes this one's next block
    num_drafts: int = 0  # tokens behind the target that might be computed, too: of those who lack their newest only
    end_near: int = 0  # of a model with near parts: they are held as far as this block

    def __post_init__(self) -> None:
        assert 0 <= self.num_computed < self.num_target


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The bounds of one step."""

    prefill_chunk_tokens: int
    batch_sequences_max: int
    block_tokens: int
    window: KeyWindow = EVERYTHING  # of what the model reads
    near_window: KeyWindow = EVERYTHING  # of what the layers read whose KV is in near parts, if blocks have some

    def step_rows(self, rows: int) -> int:
        """How many of so many rows one step may compute of one sequence."""
        return self.near_window.step_rows(self.window.step_rows(rows))


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """Compute positions [start, stop) of one sequence, after it has been given `new_blocks` more blocks."""

    key: int
    start: int
    stop: int
    new_blocks: int
    num_logits: int  # of the last so many positions
    num_drafts: int = 0  # so many of the last positions are drafts
    new_near: int = 0  # near parts that it must be given, too


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. `joins`: who enters the batch now, with nothing to take but what `rows` says; `rows` may be empty."""

    joins: tuple[int, ...]
    rows: tuple[PlannedRows, ...]


@dataclass(frozen=True, slots=True)
class Resume:
    """Take blocks for `num_blocks` of this preempted sequence, as many as a sequence may hold at once, then plan again
    (some may be found by hash)."""

    key: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Preempt:
    """So many blocks are missing, or near parts of some: release one sequence's that holds some, then plan again."""

    num_missing: int
    near: bool = False


def schedule_step(
    sequences: Sequence[SequenceState],
    limits: StepLimits,
    *,
    available_blocks: int,
    available_near: int = 0,
    may_preempt: bool = True,
) -> StepPlan | Resume | Preempt:
    """Decide the next step, or the change of blocks that must come before it.

    sequences:        all runs, in the batch or waiting for it, in any order.
    available_blocks: blocks that can be taken now, and available_near: near parts of some.
    may_preempt:      else blocks are on their way, and who needs one that is not there sits this step out.
    Returns a plan whose rows need at most `available_blocks`; its rows are empty only when no sequence can run now.
    """
    by_turn = sorted(sequences, key=lambda sequence: (sequence.turn, sequence.leader is not None, sequence.key))
    room = limits.batch_sequences_max - sum(sequence.in_batch for sequence in by_turn)
    assert room >= 0
    joins: list[SequenceState] = []
    for sequence in by_turn:
        if sequence.in_batch or room == len(joins):
            continue
        if sequence.num_blocks > 0:
            joins.append(sequence)
            continue
        num_blocks = _blocks_for(sequence.num_target, limits)
        needed, needed_near = limits.window.held_blocks(num_blocks), 0
        if limits.near_window.bounded:
            needed_near = limits.near_window.held_blocks(num_blocks)
        # What the others grow by in this step is theirs: else this one would be resumed and preempted in turn for ever.
        others = _plan_rows(_batch(by_turn, joins), limits)
        if needed + _growth(others) <= available_blocks and needed_near + _near_growth(others) <= available_near:
            return Resume(key=sequence.key, num_blocks=num_blocks)
    rows = _plan_rows(_batch(by_turn, joins), limits)
    missing, missing_near = _growth(rows) - available_blocks, _near_growth(rows) - available_near
    if missing > 0 or missing_near > 0:
        if len(by_turn) == 1 and (limits.window.bounded or missing <= 0):
            # What it lacks is what its window has passed, and what is being published yet: it is there in a moment.
            return StepPlan(joins=(), rows=())
        if may_preempt:
            return Preempt(num_missing=missing) if missing > 0 else Preempt(num_missing=missing_near, near=True)
        rows = _that_fit(rows, available_blocks, available_near)
    if any(sequence.num_drafts for sequence in by_turn):
        waits_for_blocks = any(sequence.num_blocks == 0 for sequence in by_turn)
        # Whoever is here may grow by one more block before the drafts' blocks are needed anyway.
        spare_blocks = 0 if waits_for_blocks else available_blocks - _growth(rows) - len(by_turn)
        if limits.near_window.bounded:
            spare_blocks = min(spare_blocks, available_near - _near_growth(rows) - len(by_turn))
        rows = _with_drafts(rows, {sequence.key: sequence for sequence in by_turn}, limits, spare_blocks=spare_blocks)
    return StepPlan(joins=tuple(sequence.key for sequence in joins), rows=tuple(rows))


def _batch(by_turn: Sequence[SequenceState], joins: Sequence[SequenceState]) -> list[SequenceState]:
    return [sequence for sequence in by_turn if sequence.in_batch or sequence in joins]


def _growth(rows: Sequence[PlannedRows]) -> int:
    return sum(row.new_blocks for row in rows)


def _near_growth(rows: Sequence[PlannedRows]) -> int:
    return sum(row.new_near for row in rows)


def _plan_rows(batch: Sequence[SequenceState], limits: StepLimits) -> list[PlannedRows]:
    """Rows for newest tokens first, then prompt chunks, in the batch's order within each."""
    in_batch = {sequence.key for sequence in batch}
    batch = [sequence for sequence in batch if sequence.leader not in in_batch]
    rows = [_rows(sequence, 1, limits) for sequence in batch if _lacks_newest_only(sequence)]
    left = limits.prefill_chunk_tokens
    for sequence in batch:
        if left == 0:
            break
        if not _lacks_newest_only(sequence):
            num_rows = limits.step_rows(min(left, sequence.num_target - sequence.num_computed))
            rows.append(_rows(sequence, num_rows, limits))
            left -= num_rows
    return rows


def _that_fit(rows: Sequence[PlannedRows], available_blocks: int, available_near: int) -> list[PlannedRows]:
    """The rows that need no block, and of the others as many as can be had, the oldest sequence's first."""
    left, left_near = available_blocks, available_near
    fit = set()
    for row in sorted(rows, key=lambda row: row.key):
        if row.new_blocks <= left and row.new_near <= left_near:
            left -= row.new_blocks
            left_near -= row.new_near
            fit.add(row.key)
    return [row for row in rows if row.key in fit]


def _with_drafts(
    rows: Sequence[PlannedRows], by_key: Mapping[int, SequenceState], limits: StepLimits, *, spare_blocks: int
) -> list[PlannedRows]:
    """The same rows, with drafts behind those of newest tokens as far as there is room for them."""
    left = limits.prefill_chunk_tokens
    left -= sum(row.stop - row.start for row in rows if not _lacks_newest_only(by_key[row.key]))
    drafted = []
    for row in rows:
        sequence = by_key[row.key]
        wanted = (
            min(sequence.num_drafts, left, limits.step_rows(1 + left) - 1)
            if _lacks_newest_only(sequence) and sequence.wants_logits
            else 0
        )
        blocks = sequence.first_block + sequence.num_blocks + row.new_blocks
        wanted_blocks = _blocks_for(row.stop + wanted, limits)
        more_blocks = min(max(0, spare_blocks), max(0, wanted_blocks - blocks))
        num_drafts = min(wanted, (blocks + more_blocks) * limits.block_tokens - row.stop)
        more_near = 0
        if limits.near_window.bounded:
            near = sequence.end_near + row.new_near
            more_near = min(max(0, spare_blocks), max(0, wanted_blocks - near))
            num_drafts = min(num_drafts, (near + more_near) * limits.block_tokens - row.stop)
        spare_blocks -= max(more_blocks, more_near)
        left -= num_drafts
        drafted.append(
            replace(
                row,
                stop=row.stop + num_drafts,
                new_blocks=row.new_blocks + more_blocks,
                new_near=row.new_near + more_near,
                num_logits=row.num_logits + num_drafts,
                num_drafts=num_drafts,
            )
        )
    return drafted


def _lacks_newest_only(sequence: SequenceState) -> bool:
    return sequence.num_target - sequence.num_computed == 1


def _rows(sequence: SequenceState, num_rows: int, limits: StepLimits) -> PlannedRows:
    stop = sequence.num_computed + num_rows
    new_near = 0
    if limits.near_window.bounded:
        new_near = max(0, _blocks_for(stop, limits) - sequence.end_near)
    return PlannedRows(
        key=sequence.key,
        start=sequence.num_computed,
        stop=stop,
        new_blocks=max(0, _blocks_for(stop, limits) - sequence.first_block - sequence.num_blocks),
        num_logits=int(sequence.wants_logits and stop == sequence.num_target),
        new_near=new_near,
    )


def _blocks_for(num_tokens: int, limits: StepLimits) -> int:
    return -(-num_tokens // limits.block_tokens)

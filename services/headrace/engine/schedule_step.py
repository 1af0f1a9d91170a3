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

    def __post_init__(self) -> None:
        assert 0 <= self.num_computed < self.num_target


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The bounds of one step."""

    prefill_chunk_tokens: int
    batch_sequences_max: int
    block_tokens: int
    window: KeyWindow = EVERYTHING  # of what the model reads


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """Compute positions [start, stop) of one sequence, after it has been given `new_blocks` more blocks."""

    key: int
    start: int
    stop: int
    new_blocks: int
    num_logits: int  # of the last so many positions
    num_drafts: int = 0  # so many of the last positions are drafts


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
    """So many blocks are missing: release those of one sequence that holds some, then plan again."""

    num_missing: int


def schedule_step(
    sequences: Sequence[SequenceState], limits: StepLimits, *, available_blocks: int, may_preempt: bool = True
) -> StepPlan | Resume | Preempt:
    """Decide the next step, or the change of blocks that must come before it.

    sequences:        all runs, in the batch or waiting for it, in any order.
    available_blocks: blocks that can be taken now.
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
        needed = limits.window.held_blocks(_blocks_for(sequence.num_target, limits))
        # What the others grow by in this step is theirs: else this one would be resumed and preempted in turn for ever.
        if needed + _growth(_plan_rows(_batch(by_turn, joins), limits)) <= available_blocks:
            return Resume(key=sequence.key, num_blocks=_blocks_for(sequence.num_target, limits))
    rows = _plan_rows(_batch(by_turn, joins), limits)
    if _growth(rows) > available_blocks:
        if limits.window.bounded and len(by_turn) == 1:
            # What it lacks is what its window has passed, and what is being published yet: it is there in a moment.
            return StepPlan(joins=(), rows=())
        if may_preempt:
            return Preempt(num_missing=_growth(rows) - available_blocks)
        rows = _that_fit(rows, available_blocks)
    if any(sequence.num_drafts for sequence in by_turn):
        waits_for_blocks = any(sequence.num_blocks == 0 for sequence in by_turn)
        # Whoever is here may grow by one more block before the drafts' blocks are needed anyway.
        spare_blocks = 0 if waits_for_blocks else available_blocks - _growth(rows) - len(by_turn)
        rows = _with_drafts(rows, {sequence.key: sequence for sequence in by_turn}, limits, spare_blocks=spare_blocks)
    return StepPlan(joins=tuple(sequence.key for sequence in joins), rows=tuple(rows))


def _batch(by_turn: Sequence[SequenceState], joins: Sequence[SequenceState]) -> list[SequenceState]:
    return [sequence for sequence in by_turn if sequence.in_batch or sequence in joins]


def _growth(rows: Sequence[PlannedRows]) -> int:
    return sum(row.new_blocks for row in rows)


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
            num_rows = limits.window.step_rows(min(left, sequence.num_target - sequence.num_computed))
            rows.append(_rows(sequence, num_rows, limits))
            left -= num_rows
    return rows


def _that_fit(rows: Sequence[PlannedRows], available_blocks: int) -> list[PlannedRows]:
    """The rows that need no block, and of the others as many as can be had, the oldest sequence's first."""
    left = available_blocks
    fit = set()
    for row in sorted(rows, key=lambda row: row.key):
        if row.new_blocks <= left:
            left -= row.new_blocks
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
            min(sequence.num_drafts, left, limits.window.step_rows(1 + left) - 1)
            if _lacks_newest_only(sequence) and sequence.wants_logits
            else 0
        )
        blocks = sequence.first_block + sequence.num_blocks + row.new_blocks
        more_blocks = min(max(0, spare_blocks), max(0, _blocks_for(row.stop + wanted, limits) - blocks))
        num_drafts = min(wanted, (blocks + more_blocks) * limits.block_tokens - row.stop)
        spare_blocks -= more_blocks
        left -= num_drafts
        drafted.append(
            replace(
                row,
                stop=row.stop + num_drafts,
                new_blocks=row.new_blocks + more_blocks,
                num_logits=row.num_logits + num_drafts,
                num_drafts=num_drafts,
            )
        )
    return drafted


def _lacks_newest_only(sequence: SequenceState) -> bool:
    return sequence.num_target - sequence.num_computed == 1


def _rows(sequence: SequenceState, num_rows: int, limits: StepLimits) -> PlannedRows:
    stop = sequence.num_computed + num_rows
    return PlannedRows(
        key=sequence.key,
        start=sequence.num_computed,
        stop=stop,
        new_blocks=max(0, _blocks_for(stop, limits) - sequence.first_block - sequence.num_blocks),
        num_logits=int(sequence.wants_logits and stop == sequence.num_target),
    )


def _blocks_for(num_tokens: int, limits: StepLimits) -> int:
    return -(-num_tokens // limits.block_tokens)

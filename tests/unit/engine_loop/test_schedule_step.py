"""The plan of one step: bounded, fair to running streams, and always able to go on."""

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.choose_victim import BlockHolder, choose_victim
from headrace.engine.schedule_step import (
    PlannedRows,
    Preempt,
    Resume,
    SequenceState,
    StepLimits,
    StepPlan,
    schedule_step,
)

LIMITS = StepLimits(prefill_chunk_tokens=8, batch_sequences_max=4, block_tokens=4)


def make_sequence(
    key: int, *, computed: int, target: int, blocks: int | None = None, in_batch: bool = True
) -> SequenceState:
    return SequenceState(
        key=key,
        num_computed=computed,
        num_target=target,
        num_blocks=-(-target // 4) if blocks is None else blocks,
        in_batch=in_batch,
        wants_logits=True,
    )


def plan(sequences: list[SequenceState], *, available: int = 100, limits: StepLimits = LIMITS) -> StepPlan:
    planned = schedule_step(sequences, limits, available_blocks=available)
    assert isinstance(planned, StepPlan)
    return planned


def test_a_long_prompt_does_not_stop_running_streams() -> None:
    """Fails if prompt chunks are planned before newest tokens, or eat their places."""
    prompt = make_sequence(1, computed=0, target=1000)
    streams = [make_sequence(key, computed=20, target=21) for key in (2, 3, 4)]
    rows = plan([prompt, *streams]).rows
    assert [(row.key, row.stop - row.start) for row in rows] == [(2, 1), (3, 1), (4, 1), (1, 8)]


def test_prompts_share_one_chunk_oldest_first() -> None:
    rows = plan([make_sequence(2, computed=0, target=30), make_sequence(1, computed=5, target=10)]).rows
    assert [(row.key, row.start, row.stop) for row in rows] == [(1, 5, 10), (2, 0, 3)]


def test_prompts_are_computed_in_the_order_of_their_turns() -> None:
    """Fails if the age decides where a turn has been settled."""
    old = replace(make_sequence(1, computed=0, target=30), turn=1)
    young = replace(make_sequence(2, computed=0, target=5), turn=0)
    waiting = [replace(make_sequence(k, computed=0, target=9, in_batch=False), turn=5 - k) for k in (3, 4)]
    planned = plan([old, young, *waiting], limits=replace(LIMITS, batch_sequences_max=3))
    assert [(row.key, row.stop) for row in planned.rows] == [(2, 5), (1, 3)]
    assert planned.joins == (4,)


def test_logits_are_wanted_of_the_last_known_token_only() -> None:
    rows = plan([make_sequence(1, computed=0, target=5), make_sequence(2, computed=0, target=9)]).rows
    assert [row.num_logits for row in rows] == [1, 0]


def test_sequences_join_in_order_of_admission_while_the_batch_has_room() -> None:
    running = [make_sequence(key, computed=4, target=5) for key in (1, 2, 3)]
    waiting = [make_sequence(key, computed=0, target=3, in_batch=False) for key in (5, 4)]
    planned = plan([*running, *waiting])
    assert planned.joins == (4,)
    assert 5 not in [row.key for row in planned.rows]


def test_a_row_that_opens_a_block_is_given_one() -> None:
    rows = plan([make_sequence(1, computed=4, target=5, blocks=1)]).rows
    assert rows == (PlannedRows(key=1, start=4, stop=5, new_blocks=1, num_logits=1),)


def test_somebody_gives_way_when_blocks_run_short() -> None:
    """Fails if a step is planned that needs more blocks than there are, or if it is not said how many are missing."""
    old = make_sequence(1, computed=4, target=5, blocks=1)
    young = make_sequence(2, computed=0, target=12, blocks=1)
    assert schedule_step([old, young], LIMITS, available_blocks=1) == Preempt(num_missing=1)
    assert schedule_step([old, young], LIMITS, available_blocks=0) == Preempt(num_missing=2)


def test_a_preempted_sequence_resumes_when_all_its_tokens_fit_besides_the_others_growth() -> None:
    grows = make_sequence(1, computed=4, target=5, blocks=1)
    preempted = make_sequence(2, computed=0, target=9, blocks=0, in_batch=False)
    assert schedule_step([grows, preempted], LIMITS, available_blocks=4) == Resume(key=2, num_blocks=3)
    assert [row.key for row in plan([grows, preempted], available=3).rows] == [1]


def test_who_holds_blocks_may_pass_a_preempted_one_that_does_not_fit() -> None:
    """Else both would wait: the one for the blocks of the other."""
    preempted = make_sequence(1, computed=0, target=40, blocks=0, in_batch=False)
    holder = make_sequence(2, computed=0, target=4, in_batch=False)
    assert plan([preempted, holder], available=2).joins == (2,)


def test_who_lacks_what_another_one_computes_waits_for_it_and_only_while_that_one_runs() -> None:
    """Fails if both are computed, if the leader waits behind its followers, or if somebody waits for one that cannot
    join the batch."""
    leader = replace(make_sequence(2, computed=0, target=30), turn=1)
    follower = replace(make_sequence(1, computed=0, target=30), turn=1, leader=2)
    other = replace(make_sequence(3, computed=0, target=4), turn=5)
    assert [row.key for row in plan([leader, follower, other]).rows] == [2]
    short = replace(leader, num_target=4)
    assert [(row.key, row.stop) for row in plan([short, follower, other]).rows] == [(2, 4), (3, 4)]
    outside = replace(leader, in_batch=False)
    assert plan([replace(follower, in_batch=False), outside], limits=replace(LIMITS, batch_sequences_max=1)).joins == (
        2,
    )
    full = replace(LIMITS, batch_sequences_max=1)
    assert [row.key for row in plan([outside, follower], limits=full).rows] == [1]


def test_drafts_have_what_prompts_left_and_stop_nobody() -> None:
    """Fails if a draft delays a prompt's chunk or somebody's newest token, or makes a step longer than its bound."""
    prompt = make_sequence(1, computed=0, target=6)
    streams = [replace(make_sequence(key, computed=20, target=21, blocks=7), num_drafts=3) for key in (2, 3)]
    rows = plan([prompt, *streams]).rows
    assert {row.key: (row.stop - row.start, row.num_drafts, row.num_logits) for row in rows} == {
        1: (6, 0, 1),
        2: (3, 2, 3),
        3: (1, 0, 1),
    }
    long_prompt = make_sequence(1, computed=0, target=1000)
    assert [row.num_drafts for row in plan([long_prompt, *streams]).rows] == [0, 0, 0]


def test_a_draft_opens_a_block_only_where_plenty_are_free() -> None:
    """Fails if a draft takes a block that somebody else's next token, or a sequence without blocks, would need."""
    stream = replace(make_sequence(1, computed=6, target=7, blocks=2), num_drafts=5)
    other = make_sequence(2, computed=6, target=7, blocks=2)
    (row, _) = plan([stream, other], available=2).rows
    assert (row.num_drafts, row.new_blocks) == (1, 0)
    (row, _) = plan([stream, other], available=3).rows
    assert (row.num_drafts, row.new_blocks) == (5, 1)
    preempted = make_sequence(3, computed=0, target=400, blocks=0, in_batch=False)
    (row, _) = plan([stream, other, preempted], available=30).rows
    assert (row.num_drafts, row.new_blocks) == (1, 0)


@dataclass
class Simulated:
    prompt: int
    output: int
    computed: int = 0
    known: int = 0
    blocks: int = 0
    in_batch: bool = False


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=8),
    pool_blocks=st.integers(13, 30),
    chunk=st.integers(1, 20),
    batch=st.integers(1, 5),
    block_tokens=st.integers(4, 7),
    drafts=st.integers(0, 4),
)
def test_every_sequence_finishes_within_bounds_whatever_the_pool(
    sizes: list[tuple[int, int]], pool_blocks: int, chunk: int, batch: int, block_tokens: int, drafts: int
) -> None:
    """Runs plans to the end. Fails on a livelock (preempt and resume for ever), an overdraft or an over-full step."""
    limits = StepLimits(prefill_chunk_tokens=chunk, batch_sequences_max=batch, block_tokens=block_tokens)
    todo = {key: Simulated(prompt=p, output=o, known=p) for key, (p, o) in enumerate(sizes)}
    num_plans = 0
    while todo:
        num_plans += 1
        assert num_plans < 4_000
        available = pool_blocks - sum(s.blocks for s in todo.values())
        states = [
            SequenceState(
                key,
                s.computed,
                s.known,
                s.blocks,
                s.in_batch,
                wants_logits=True,
                num_drafts=min(drafts, s.output - (s.known - s.prompt) - 1) if s.known - s.computed == 1 else 0,
            )
            for key, s in todo.items()
        ]
        match schedule_step(states, limits, available_blocks=available):
            case Preempt(num_missing=num_missing):
                holders = [BlockHolder(key, s.blocks, float(s.computed)) for key, s in todo.items() if s.blocks]
                key = choose_victim(holders, num_missing=num_missing)
                assert todo[key].blocks > 0
                todo[key].blocks, todo[key].computed, todo[key].in_batch = 0, 0, False
            case Resume(key=key, num_blocks=num_blocks):
                assert todo[key].blocks == 0
                todo[key].blocks = num_blocks
            case StepPlan(joins=joins, rows=rows):
                for key in joins:
                    todo[key].in_batch = True
                assert rows, "nobody can go on although nothing else holds blocks"
                assert sum(row.new_blocks for row in rows) <= available
                assert len({row.key for row in rows}) == len(rows) <= batch
                assert sum(row.stop - row.start for row in rows) <= chunk + batch
                for row in rows:
                    sequence = todo[row.key]
                    assert sequence.in_batch
                    assert row.start == sequence.computed < row.stop - row.num_drafts <= sequence.known
                    sequence.blocks += row.new_blocks
                    assert row.stop <= sequence.blocks * block_tokens
                    kept = (row.key + num_plans) % (row.num_drafts + 1)  # of the drafts, and the rest is wrong
                    sequence.computed = row.stop - row.num_drafts + kept
                    if row.num_logits:
                        assert row.num_drafts <= row.num_logits - 1
                        sequence.known += 1 + kept
                        if sequence.known - sequence.prompt == sequence.output:
                            del todo[row.key]

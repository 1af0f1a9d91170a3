"""What a prompt waits for where the shortest remaining prompt comes first, worked out by hand."""

import numpy as np
import pytest

from headrace.core.overtaking import WaitingPrompts, queue_before

ALL = np.array([True, True])


def make_waiting(*prompts: tuple[int, float, float]) -> WaitingPrompts:
    """Each (worker, planned seconds, seconds waited)."""
    rows, work_s, waited_s = zip(*prompts, strict=True) if prompts else ((), (), ())
    return WaitingPrompts(np.array(rows, dtype=np.int64), np.array(work_s, float), np.array(waited_s, float))


def test_a_prompt_waits_for_what_ranks_before_it_and_the_rest_waits_for_it():
    """On worker 0 are 1.05 s of work that nobody told of, and 0.65 and 0.15 s that wait; a prompt of 0.35 s comes."""
    waiting = make_waiting((0, 0.65, 0.0), (0, 0.15, 0.0))
    before_s, overtaken = queue_before(np.array([1.85, 0.0]), np.full(2, 0.35), waiting, in_order=ALL)
    assert before_s.tolist() == pytest.approx([1.2, 0.0])
    assert overtaken.tolist() == [1, 0]


def test_a_prompt_that_has_waited_is_passed_by_shorter_ones_only():
    """Of 0.65 s of work, half a second of waiting takes 0.25 s, and 0.35 s pass; 0.7 s take 0.35 s, and they do not."""
    waiting = make_waiting((0, 0.65, 0.5), (1, 0.65, 0.7))
    before_s, overtaken = queue_before(np.array([0.65, 0.65]), np.full(2, 0.35), waiting, in_order=ALL)
    assert before_s.tolist() == pytest.approx([0.0, 0.65])
    assert overtaken.tolist() == [1, 0]


def test_of_a_prompt_that_was_begun_only_what_its_queue_has_left_counts():
    """Planned as 10 s, 1 s left: a prompt of 2 s waits for it, although it is shorter than what was planned."""
    before_s, overtaken = queue_before(
        np.array([1.0, 0.0]), np.full(2, 2.0), make_waiting((0, 10.0, 0.0)), in_order=ALL
    )
    assert before_s.tolist() == [1.0, 0.0]
    assert overtaken.tolist() == [0, 0]


def test_where_workers_do_other_things_as_well_all_of_a_queue_is_waited_for():
    waiting = make_waiting((0, 5.0, 0.0), (1, 5.0, 0.0))
    before_s, overtaken = queue_before(np.array([5.0, 5.0]), np.full(2, 1.0), waiting, in_order=np.array([True, False]))
    assert before_s.tolist() == [0.0, 5.0]
    assert overtaken.tolist() == [1, 0]


def test_without_prompts_that_wait_a_queue_is_what_it_is():
    before_s, overtaken = queue_before(np.array([2.0, 3.0]), np.full(2, 1.0), make_waiting(), in_order=ALL)
    assert before_s.tolist() == [2.0, 3.0]
    assert overtaken.tolist() == [0, 0]

"""On how many threads small steps run: trials say it, on a clock that the tests make up."""

from headrace.engine.thread_choice import (
    PAUSE_STEPS_MAX,
    PAUSE_STEPS_MIN,
    SETTLING_STEPS,
    SLOW_STEPS,
    TRIAL_STEPS,
    WARM_STEPS,
    ThreadChoice,
)

ROWS = 4


def run_steps(choice, num_steps, seconds_on, *, rows=ROWS):
    """seconds_on: threads -> what a step takes on so many. Returns the threads of each step."""
    counts = []
    for _ in range(num_steps):
        counts.append(choice.choose(rows))
        choice.took(rows, seconds_on(counts[-1]))
    return counts


def test_a_trial_runs_both_in_turn_and_the_faster_one_has_the_steps_after_it():
    for seconds_on, chosen in ((lambda threads: 1 / threads, 2), (lambda threads: threads, 1)):
        choice = ThreadChoice(2)
        counts = run_steps(choice, SETTLING_STEPS + 10, seconds_on)
        assert counts[WARM_STEPS:][:2] == [1, 2]
        assert set(counts[SETTLING_STEPS:]) == {chosen}


def test_the_first_steps_are_no_trials():
    """Fails if a step that makes the buffers counted for one thread: all threads would win whatever they take."""
    choice = ThreadChoice(2)
    assert run_steps(choice, WARM_STEPS, lambda threads: 100.0) == [1] * WARM_STEPS
    assert run_steps(choice, SETTLING_STEPS, lambda threads: threads)[-1] == 1


def test_all_threads_must_be_worth_the_core_that_they_take():
    choice = ThreadChoice(2)
    assert run_steps(choice, SETTLING_STEPS + 1, lambda threads: 1.0 - 0.01 * threads)[-1] == 1


def test_a_hopeless_trial_ends_with_its_first_step_on_all_threads():
    """Fails if a step that waits for a taken core were tried over and over."""
    choice = ThreadChoice(2)
    counts = run_steps(choice, PAUSE_STEPS_MIN, lambda threads: 10.0 if threads == 2 else 1.0)
    assert counts.count(2) == 1


def test_trials_that_change_nothing_become_rare_and_never_end():
    """Fails if a taken core cost more than a hundredth of the steps in the long run, or a free one were not found."""
    choice = ThreadChoice(2)
    taken = run_steps(choice, 20 * PAUSE_STEPS_MAX, lambda threads: 10.0 if threads == 2 else 1.0)
    assert 0 < taken[-10 * PAUSE_STEPS_MAX :].count(2) <= 11
    free = run_steps(choice, PAUSE_STEPS_MAX + SETTLING_STEPS + 1, lambda threads: 1 / threads)
    assert free[-1] == 2


def test_slow_steps_in_a_row_bring_the_next_trial_forward():
    """Another process has taken a core: it is noticed after a few steps, not at the end of the pause."""
    choice = ThreadChoice(2)
    assert run_steps(choice, SETTLING_STEPS + 1, lambda threads: 1 / threads)[-1] == 2
    counts = run_steps(choice, SLOW_STEPS + 3, lambda threads: 10.0 if threads == 2 else 1.0)
    assert counts == [2] * SLOW_STEPS + [1, 2, 1]


def test_steps_of_other_numbers_of_rows_have_trials_of_their_own():
    choice = ThreadChoice(2)
    assert run_steps(choice, SETTLING_STEPS + 1, lambda threads: threads)[-1] == 1
    assert run_steps(choice, SETTLING_STEPS + 1, lambda threads: 1 / threads, rows=16)[-1] == 2
    assert choice.choose(ROWS) == 1


def test_without_a_second_thread_or_pinned_nothing_is_tried():
    assert set(run_steps(ThreadChoice(1), 50, lambda threads: 1.0)) == {1}
    choice = ThreadChoice(4)
    choice.pin(4)
    assert set(run_steps(choice, 50, lambda threads: 100.0)) == {4}


def test_one_step_that_another_process_held_up_does_not_decide_a_trial():
    """Fails if means were compared: one step of twice its time outweighs what the other three have saved."""
    choice = ThreadChoice(2)
    held_up = iter([1.0, 0.8, 1.0, 2.0, 1.0, 0.8, 1.0, 0.8])
    run_steps(choice, WARM_STEPS, lambda threads: 1.0)
    run_steps(choice, 2 * TRIAL_STEPS, lambda threads: next(held_up))
    assert choice.choose(ROWS) == 2

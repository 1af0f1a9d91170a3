"""Any sequence of what readers, writers, operators, time and sudden death do to a store node keeps its promises.

See `store_machine.py` for the rules and for what is compared after each step. Every run takes the same steps; a failure
prints the shortest sequence that leads to it.
"""

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from store_machine import StoreMachine
from store_machine_control import ControlMachine
from store_machine_disk import DiskMachine

STEPS_MIN = 100_000
STEPS_PER_EXAMPLE = 60
PARTS = [(ControlMachine, 1, 340), (ControlMachine, 2, 340), (ControlMachine, 3, 340), (ControlMachine, 4, 340)]
PARTS += [(DiskMachine, 5, 250), (DiskMachine, 6, 250)]
parts_run: set[int] = set()


@pytest.mark.timeout(600)  # twenty seconds each on a core of its own
@pytest.mark.parametrize(("machine", "seed_number", "examples"), PARTS)
def test_nothing_that_happens_to_a_store_node_breaks_its_books(
    machine: type[StoreMachine], seed_number: int, examples: int
) -> None:
    """Fails, for example, when a freed slot keeps its record, room is made of a pinned or leased block, a quota is off
    by one unit, a death leaves terms half written, or what was evicted comes back after a restart."""
    run_state_machine_as_test(
        seed(seed_number)(type(f"{machine.__name__}{seed_number}", (machine,), {})),
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS_PER_EXAMPLE,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    parts_run.add(seed_number)


def test_the_store_machine_took_a_hundred_thousand_steps() -> None:
    """Nobody shrinks the test above unseen."""
    if parts_run != {number for _, number, _ in PARTS}:
        pytest.skip("only some of the parts ran, or one failed")
    assert StoreMachine.steps_run >= STEPS_MIN

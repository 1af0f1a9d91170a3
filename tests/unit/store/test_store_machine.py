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

STEPS_PER_EXAMPLE = 60
# Each with its seed, its examples, and the steps that it takes at least: a hundred thousand in all, by however many
# processes.
PARTS = [*((ControlMachine, number, 370, 18_000) for number in (1, 2, 3, 4))]
PARTS += [(DiskMachine, 5, 290, 14_000), (DiskMachine, 6, 290, 14_000)]
assert sum(steps_min for *_, steps_min in PARTS) >= 100_000


@pytest.mark.slow
@pytest.mark.timeout(1_200)  # twenty seconds each on a core of its own
@pytest.mark.parametrize(("machine", "seed_number", "examples", "steps_min"), PARTS)
def test_nothing_that_happens_to_a_store_node_breaks_its_books(
    machine: type[StoreMachine], seed_number: int, examples: int, steps_min: int
) -> None:
    """Fails, for example, when a freed slot keeps its record, room is made of a pinned or leased block, a quota is off
    by one unit, a death leaves terms half written, or what was evicted comes back after a restart."""
    steps_before = StoreMachine.steps_run
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
    assert StoreMachine.steps_run - steps_before >= steps_min, "somebody shrank it"

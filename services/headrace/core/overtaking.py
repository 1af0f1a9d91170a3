"""What of a queue a prompt waits for, where workers compute the shortest remaining prompt first: what ranks before it.

A short prompt passes the long ones; each of those then waits for its work as well, which `choose_placement.py` counts.
Pure, over arrays. Which prompts wait is the caller's to say: what it does not know of counts as computed before.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.core.queue_order import AGEING_PER_S

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WaitingPrompts:
    """Prompts that were sent to workers and have no first token yet, in any order: arrays of [prompts]."""

    rows: Ints  # their workers
    work_s: Floats  # as it was planned
    waited_s: Floats


def queue_before(
    queue_s: Floats, work_s: Floats, waiting: WaitingPrompts, *, in_order: NDArray[np.bool_]
) -> tuple[Floats, Ints]:
    """Seconds that a prompt waits on each worker, and how many there wait for it: arrays of [num_workers].

    queue_s: until all that is there is computed.  work_s: of the prompt on each worker.
    in_order: workers that compute the shortest first and do nothing else; on the others it waits for all.
    Of a prompt that was begun less is left than was planned, and never more than all of its queue.
    """
    rows = waiting.rows
    left_s = np.minimum(waiting.work_s, queue_s[rows])
    passed = in_order[rows] & (work_s[rows] < left_s - AGEING_PER_S * waiting.waited_s)
    passed_s = np.bincount(rows, weights=left_s * passed, minlength=len(queue_s))
    overtaken: Ints = np.bincount(rows[passed], minlength=len(queue_s))
    before_s: Floats = np.maximum(queue_s - passed_s, 0.0)
    return before_s, overtaken

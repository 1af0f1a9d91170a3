"""On how many threads a step of few rows runs: on one or on all, whichever was faster lately.

Two threads read weights and KV faster than one as long as nobody else wants their cores. With another process on one of
them every operator waits for the slower thread, milliseconds at a time. Which of the two it is, nothing but trying
shows, and it changes from minute to minute: so from time to time some steps run on one thread and on all in turn, and
those between two trials run as the last one says.

This file owns those trials. It may follow the clock because no bit of a result depends on the number of threads, which
`numerics_probe.py` looks at before exactness is claimed: where one does, there is one thread to choose from. It knows
nothing of models, and asks nobody for the time.
"""

from dataclasses import dataclass, field
from statistics import median

# Steps on either side of a trial, in turn, so that what drifts (contexts, other work on the machine) hits both alike.
# Their medians are compared: one step in which another process had a core says nothing of the others.
TRIAL_STEPS = 4

# The first steps of a size make buffers and fill caches: no trial's.
WARM_STEPS = 2

# After so many steps of a size it runs on the threads that are faster.
SETTLING_STEPS = WARM_STEPS + 2 * TRIAL_STEPS

# All threads lose a trial at once when a step took this many times the one before it on one thread: with a core taken
# by another process a step takes ten times as long, and nobody should wait for several of those.
HOPELESS = 2.5

# All threads must be this much faster: they take the core from the other processes of the host, too.
WORTH = 0.95

# Steps until the next trial. Each one that changes nothing doubles it: with a core taken a trial costs about ten steps,
# a hundredth of the last pause, and a core that has become free is noticed within half a minute of decoding.
PAUSE_STEPS_MIN = 32
PAUSE_STEPS_MAX = 1024

# So many slow steps in a row bring the next trial forward: another process has come. Slow: so many times what all
# threads took in the trial that chose them. A longer context makes a step slow, too, and then a trial does no harm.
SLOW_STEPS = 3
SLOW = 1.6


@dataclass(slots=True)
class _Size:
    """Steps of about equally many rows."""

    threads: int = 1  # as the last trial says
    steps_left: int = WARM_STEPS  # until the next trial
    pause_steps: int = PAUSE_STEPS_MIN
    slow_steps: int = 0  # in a row
    usual_s: float = 0.0  # of a step on the threads that were chosen
    tried_s: list[float] = field(default_factory=list)  # on one thread, on all, on one, ...


class ThreadChoice:
    """`choose` before a step, `took` after it."""

    def __init__(self, threads_max: int) -> None:
        assert threads_max >= 1
        self._threads_max = threads_max
        self._sizes: dict[int, _Size] = {}
        self._pinned: int | None = None

    def pin(self, threads: int) -> None:
        """So many from now on, whatever is faster."""
        self._pinned = threads

    def choose(self, num_rows: int) -> int:
        """Threads for the next step of so many rows."""
        if self._pinned is not None or self._threads_max == 1:
            return self._pinned or 1
        size = self._size(num_rows)
        if size.steps_left > 0:
            return size.threads
        return self._threads_max if len(size.tried_s) % 2 else 1

    def took(self, num_rows: int, seconds: float) -> None:
        """How long the step took that `choose` was last asked for."""
        if self._pinned is not None or self._threads_max == 1:
            return
        size = self._size(num_rows)
        if size.steps_left > 0:
            self._watch(size, seconds)
            return
        size.tried_s.append(seconds)
        on_one, on_all = size.tried_s[::2], size.tried_s[1::2]
        hopeless = len(on_one) == len(on_all) and on_all[-1] > HOPELESS * on_one[-1]
        if hopeless or len(on_all) == TRIAL_STEPS:
            all_are_worth = not hopeless and median(on_all) < WORTH * median(on_one)
            self._settle(size, self._threads_max if all_are_worth else 1)

    def _size(self, num_rows: int) -> _Size:
        return self._sizes.setdefault(num_rows.bit_length(), _Size())

    def _watch(self, size: _Size, seconds: float) -> None:
        size.steps_left -= 1
        is_slow = size.threads > 1 and seconds > SLOW * size.usual_s
        size.slow_steps = size.slow_steps + 1 if is_slow else 0
        if size.slow_steps == SLOW_STEPS:
            size.slow_steps = size.steps_left = 0

    def _settle(self, size: _Size, threads: int) -> None:
        same = threads == size.threads
        size.pause_steps = min(2 * size.pause_steps, PAUSE_STEPS_MAX) if same else PAUSE_STEPS_MIN
        size.threads, size.steps_left, size.slow_steps = threads, size.pause_steps, 0
        of_chosen = size.tried_s[1::2] if threads > 1 else size.tried_s[::2]
        size.usual_s = median(of_chosen)
        size.tried_s.clear()

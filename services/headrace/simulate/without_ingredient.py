"""Headrace's routing with one ingredient switched off, to see what each is worth; and baselines that are given one.

A study's tools: no gateway runs them. By name in `VARIANTS`, which `headrace simulate --policy` takes too.
"""

import numpy as np

from headrace.core.choose_placement import Copy, Placement
from headrace.simulate.baseline_policies import BASELINES, LeastWork, Mooncake
from headrace.simulate.headrace_policy import HeadracePolicy, Queue
from headrace.simulate.replay_routing import PolicyClass
from headrace.simulate.simulated_fleet import QueueOrder, SimulatedRequest


class WithoutPrice(HeadracePolicy):
    """A second of GPU costs nothing, however long all queues are."""

    name = "headrace-without-price"

    def price(self, queue_s: np.ndarray) -> float:
        """Always 0."""
        return 0.0


class WithoutPredictions(HeadracePolicy):
    """What was decided and is not there yet does not count."""

    name = "headrace-without-predictions"

    def predicted_depths(self, request: SimulatedRequest) -> np.ndarray:
        """Always 0."""
        return np.zeros(self._fleet.model.num_workers, dtype=np.int32)


class WithoutOvertaking(HeadracePolicy):
    """A prompt counts all that waits as before it, and nobody as behind, whatever the order of workers is."""

    name = "headrace-without-overtaking"

    def queue_before(self, request: SimulatedRequest, depth: np.ndarray) -> Queue:
        """All of every queue."""
        queue_s = self._fleet.queue_s()
        return Queue(queue_s, np.zeros(len(queue_s), dtype=np.int64))


class FirstCome(HeadracePolicy):
    """Workers take prompts as they come."""

    name = "headrace-first-come"
    order = QueueOrder.FIRST_COME


class AlwaysDisaggregated(HeadracePolicy):
    """A decode worker never computes a prompt."""

    name = "headrace-always-disaggregated"

    def choose_decode(
        self, request: SimulatedRequest, placed: Placement, *, depth: np.ndarray, queue: Queue
    ) -> tuple[int, float | None]:
        """The decode worker, which never computes the prompt itself."""
        return self.least_busy_decoder(), None


class CopiesApart(HeadracePolicy):
    """Every host keeps what it computed itself, as the published systems do."""

    name = "headrace-copies-apart"
    keeps_chains_together = False


class NeverFetching(HeadracePolicy):
    """Nothing is fetched from a host's memory: each worker has its own GPU's cache alone."""

    name = "headrace-never-fetching"

    def best_copy(self, request: SimulatedRequest) -> tuple[Copy | None, int]:
        """There is none."""
        return None, -1


class MooncakeTogether(Mooncake):
    """Mooncake's rule over a pool that keeps chains together."""

    name = "mooncake-together"
    keeps_chains_together = True


class LeastWorkTogether(LeastWork):
    """Least work over a pool that keeps chains together."""

    name = "least-work-together"
    keeps_chains_together = True


class MooncakeShortest(Mooncake):
    """Mooncake's rule with workers that take the shortest remaining prompt first."""

    name = "mooncake-shortest-first"
    order = QueueOrder.SHORTEST_REMAINING


VARIANTS: dict[str, PolicyClass] = {
    variant.name: variant
    for variant in (
        WithoutPrice,
        WithoutPredictions,
        WithoutOvertaking,
        FirstCome,
        AlwaysDisaggregated,
        CopiesApart,
        NeverFetching,
        MooncakeTogether,
        LeastWorkTogether,
        MooncakeShortest,
    )
}
assert not set(VARIANTS) & set(BASELINES)

"""Equal beginnings that are computed at the same time: which runs wait for another one that computes their next block.

Runs that lack the same block, by hash, form a group. One of them leads: it is computed, in the turn of whoever of the
group is first. Those that may take blocks from the pool follow: they get no rows while their leader gets some, and
before the next step they take from the pool what it has filled (`BlockPool.take_next`). A leader follows nobody, so
nobody waits in a circle; when it ends or gives way, the next step's group has another leader.

It knows nothing of steps or of who holds which block. Everything here belongs to the step thread.
"""

from collections.abc import Iterable

from headrace.core.block import BlockHash
from headrace.engine.run import Run


def follow_runs(runs: Iterable[Run]) -> None:
    """Name every follower's leader, and give leaders the turn of the first of their group. After `settle_turns`."""
    groups: dict[BlockHash, list[Run]] = {}
    for run in runs:
        run.leader = None
        if (block_hash := run.next_block) is not None:
            groups.setdefault(block_hash, []).append(run)
    for group in groups.values():
        leaders = [run for run in group if run.leaves_blocks]
        if len(group) < 2 or not leaders:
            continue
        leader = min(leaders, key=_rank)
        for run in group:
            if run is not leader and run.may_take_next:
                run.leader = leader.key
                leader.turn = min(leader.turn, run.turn)


def _rank(run: Run) -> tuple[bool, int, bool, int, int]:
    """Lowest leads: one that can go on now, is farthest within the block, or has computed some of its prompt itself:
    what it then computes is what nobody else has to, and the others' prefixes stay theirs without a gap."""
    return not run.in_batch, -run.num_computed, run.first_computed is None, run.turn, run.key

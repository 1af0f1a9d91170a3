"""What happened in a store node's disk tier, as numbers for metrics and operators."""

from dataclasses import dataclass


@dataclass(slots=True)
class DiskCounters:
    """What happened in the disk tier since the start; only ever rising."""

    demoted_blocks: int = 0
    demoted_bytes: int = 0
    promoted_blocks: int = 0
    promoted_bytes: int = 0
    dropped_demotions: int = 0  # the queue was full, or the block too large
    write_failures: int = 0
    evicted_for_room: int = 0
    evicted_by_operator: int = 0
    dropped_corrupt: int = 0
    dropped_orphans: int = 0

    @property
    def evicted_blocks(self) -> int:
        """Blocks whose copy here was given up, whatever the reason."""
        return self.evicted_for_room + self.evicted_by_operator + self.dropped_corrupt + self.dropped_orphans

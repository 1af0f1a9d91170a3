"""A reader's and a writer's claim as a store node holds them; owned by the node, never handed out."""

from dataclasses import dataclass

from headrace.store.held_blocks import HeldBlock


@dataclass(slots=True)
class HeldLease:
    """A lease and the blocks that it keeps from eviction."""

    blocks: tuple[HeldBlock, ...]
    expires_at_s: float


@dataclass(slots=True)
class HeldReservation:
    """A reservation and the block whose slot is being filled."""

    block: HeldBlock
    expires_at_s: float

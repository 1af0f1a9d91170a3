"""What a store node hands out: runs of blocks under a reader's lease, and slots under a writer's reservation.

Plain values between the node, the servers in front of it and the adapters of workers. They know nothing of transport.
"""

from dataclasses import dataclass

from headrace.core.block import BlockHash, BlockHeader
from headrace.core.ports import AlreadyStored, NotStored


@dataclass(frozen=True, slots=True)
class LeasedBlock:
    """One readable block: where its payload lies, and its header both parsed and as the arena holds it."""

    slot: int
    header: BlockHeader
    header_bytes: bytes


@dataclass(frozen=True, slots=True)
class LeasedRun:
    """Consecutive blocks of one chain under one lease; `lease_id` is "" when there are none."""

    lease_id: str
    incarnation: int
    expires_in_ms: int
    blocks: tuple[LeasedBlock, ...]
    ends_ms: tuple[tuple[BlockHash, int], ...] = ()  # operators' orders about these blocks, as in `ports.Lease`


@dataclass(frozen=True, slots=True)
class SlotReserved:
    """A slot for one block to be written: fill `buffer` (the slot itself), then commit `reservation_id`."""

    reservation_id: str
    slot: int
    header: BlockHeader
    buffer: memoryview  # writable, `header.payload_bytes` long


SlotOutcome = SlotReserved | AlreadyStored | NotStored

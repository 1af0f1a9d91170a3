"""Readers' and writers' claims as a store node holds them; owned by the node, never handed out."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.core.clock import Clock
from headrace.core.errors import LeaseExpired
from headrace.core.retention import KEEP, Retention
from headrace.store.held_blocks import HeldBlock


@dataclass(slots=True)
class HeldLease:
    """A lease and the blocks that it keeps from eviction."""

    blocks: tuple[HeldBlock, ...]
    expires_at_s: float
    num_wide: int = 0  # of so many leading blocks the wide part only is read

    def read_bytes(self, index: int) -> int:
        """How much of a block's payload the reader reads."""
        header = self.blocks[index].header
        return header.layout.wide_bytes if index < self.num_wide else header.payload_bytes


@dataclass(slots=True)
class HeldReservation:
    """A reservation and the block whose slot is being filled."""

    block: HeldBlock
    expires_at_s: float
    retention: Retention = KEEP  # counted anew from the commit


@dataclass(slots=True)
class HeldClaims:
    """Both books by id. Equal times to live make insertion order the order of expiry."""

    clock: Clock
    leases: dict[str, HeldLease] = field(default_factory=dict)
    reservations: dict[str, HeldReservation] = field(default_factory=dict)

    def live_lease(self, lease_id: str) -> HeldLease:
        """A lease that still protects its blocks. Raises LeaseExpired."""
        held = self.leases.get(lease_id)
        if held is None or held.expires_at_s <= self.clock.now_s():
            raise LeaseExpired(lease_id)
        return held

    def live_reservation(self, reservation_id: str) -> HeldReservation:
        """A reservation whose slot may still be filled. Raises LeaseExpired."""
        held = self.reservations.get(reservation_id)
        if held is None or held.expires_at_s <= self.clock.now_s():
            raise LeaseExpired(reservation_id)
        return held

    def take_lapsed_leases(self) -> Iterator[HeldLease]:
        """Strike off the leases whose time is up, one by one."""
        while self.leases:
            lease_id, lease = next(iter(self.leases.items()))
            if lease.expires_at_s > self.clock.now_s():
                return
            del self.leases[lease_id]
            yield lease

    def lapsed_reservations(self) -> Iterator[HeldReservation]:
        """Reservations whose time is up; the caller strikes each off, with those that stand on it, before the next."""
        while self.reservations:
            reservation = next(iter(self.reservations.values()))
            if reservation.expires_at_s > self.clock.now_s():
                return
            yield reservation

    def check_integrity(self) -> None:
        """What ends first stands first."""
        for book in (self.leases, self.reservations):
            ends = [held.expires_at_s for held in book.values()]
            assert ends == sorted(ends), "a claim would end late"

"""Members that were there lately and are not now: what an operator wants to know of a host that has gone silent.

A Membership tells only who is there. This one wraps it and remembers what every reading told, for a while and in
bounds; it changes no answer. Whether a member left by itself or died is not known here.
"""

from dataclasses import dataclass

from headrace.core.clock import Clock
from headrace.core.limits import HOLDERS_REMEMBERED
from headrace.core.members import GatewayRecord, MemberRecord, StoreNodeRecord, WorkerRecord
from headrace.core.ports import Membership
from headrace.core.telemetry_limits import GONE_REMEMBERED_MS


@dataclass(frozen=True, slots=True)
class GoneMember:
    """One that was there; `last_seen_unix_ms` is the last reading that had it."""

    member: str  # as a holder is named: "node:ID", "worker:ID", "gateway:ID"
    host: str
    last_seen_unix_ms: int


class SeenMembership:
    """A Membership that remembers whom it has told of."""

    def __init__(self, membership: Membership, clock: Clock) -> None:
        self._membership = membership
        self._clock = clock
        self._seen: dict[str, GoneMember] = {}  # longest unseen first
        self._there: dict[type, tuple[MemberRecord, ...]] = {}  # the last reading of each kind

    async def announce(self, record: MemberRecord, *, ttl_ms: int) -> bool:
        """As Membership.announce."""
        return await self._membership.announce(record, ttl_ms=ttl_ms)

    async def withdraw(self, record: MemberRecord) -> None:
        """As Membership.withdraw."""
        await self._membership.withdraw(record)

    async def store_nodes(self) -> tuple[StoreNodeRecord, ...]:
        """As Membership.store_nodes."""
        records = await self._membership.store_nodes()
        self._saw(StoreNodeRecord, records)
        return records

    async def workers(self) -> tuple[WorkerRecord, ...]:
        """As Membership.workers."""
        records = await self._membership.workers()
        self._saw(WorkerRecord, records)
        return records

    async def gateways(self) -> tuple[GatewayRecord, ...]:
        """As Membership.gateways."""
        records = await self._membership.gateways()
        self._saw(GatewayRecord, records)
        return records

    def gone(self) -> list[GoneMember]:
        """Who was in a reading of the last GONE_REMEMBERED_MS and not in the last one, longest gone first."""
        there = {record.holder_id for records in self._there.values() for record in records}
        since_unix_ms = self._clock.unix_ms() - GONE_REMEMBERED_MS
        return [
            seen for seen in self._seen.values() if seen.member not in there and seen.last_seen_unix_ms >= since_unix_ms
        ]

    def last_store_nodes(self) -> list[StoreNodeRecord]:
        """Those of the last reading; none before the first."""
        return [record for record in self._there.get(StoreNodeRecord, ()) if isinstance(record, StoreNodeRecord)]

    def last_workers(self) -> list[WorkerRecord]:
        """As `last_store_nodes`."""
        return [record for record in self._there.get(WorkerRecord, ()) if isinstance(record, WorkerRecord)]

    def last_gateways(self) -> list[GatewayRecord]:
        """As `last_store_nodes`."""
        return [record for record in self._there.get(GatewayRecord, ()) if isinstance(record, GatewayRecord)]

    def _saw(self, kind: type, records: tuple[MemberRecord, ...]) -> None:
        unix_ms = self._clock.unix_ms()
        self._there[kind] = records
        for record in records:
            self._seen.pop(record.holder_id, None)
            self._seen[record.holder_id] = GoneMember(record.holder_id, record.host, unix_ms)
        while len(self._seen) > HOLDERS_REMEMBERED:
            del self._seen[next(iter(self._seen))]

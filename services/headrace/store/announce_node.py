"""Keep a store node's record standing, and notice when it had fallen."""

import asyncio
from collections.abc import Callable

from headrace.core.clock import Clock
from headrace.core.errors import IndexUnavailable
from headrace.core.index_limits import INDEX_REREGISTER_BLOCKS_PER_S, INDEX_REREGISTER_MS
from headrace.core.limits import MEMBER_REFRESH_MS, MEMBER_TTL_MS
from headrace.core.members import StoreNodeRecord
from headrace.core.ports import Membership
from headrace.store.register_blocks import PendingChanges


async def announce_node(
    record: Callable[[], StoreNodeRecord],
    changes: PendingChanges,
    membership: Membership,
    *,
    clock: Clock,
    reregister_ms: int = INDEX_REREGISTER_MS,
) -> None:
    """Refresh the node's record until cancelled. A record that did not stand means that Redis lost it and perhaps all
    entries with it (or that it is the first): the inventory is registered again. So it is every `reregister_ms`, or
    less often when it is large, since a Redis that is short of memory evicts entries and tells nobody."""
    reregister_at_s = clock.now_s() + reregister_ms / 1_000
    while True:
        try:
            if await membership.announce(record(), ttl_ms=MEMBER_TTL_MS):
                changes.want_restart()
            if clock.now_s() >= reregister_at_s:
                paced_s = changes.inventory_blocks / INDEX_REREGISTER_BLOCKS_PER_S
                reregister_at_s = clock.now_s() + max(reregister_ms / 1_000, paced_s)
                changes.want_restart()
        except IndexUnavailable:
            pass  # the next refresh tries again; the index itself reports that it is away
        await asyncio.sleep(MEMBER_REFRESH_MS / 1_000)

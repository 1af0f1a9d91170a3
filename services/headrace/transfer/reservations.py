"""What becomes of the places that a store node reserves for a batch of blocks: which count, how the rest go back."""

import asyncio
from collections.abc import Sequence

from headrace.core.errors import CacheFault
from headrace.core.limits import RELEASE_TIMEOUT_MS
from headrace.core.ports import AlreadyStored, BlockSink, NotStored, Reservation, ReserveOutcome


def leading_outcomes(outcomes: Sequence[ReserveOutcome]) -> list[Reservation | AlreadyStored]:
    """Those before the first block that is not stored: what stands behind it would never be found."""
    leading: list[Reservation | AlreadyStored] = []
    for outcome in outcomes:
        if isinstance(outcome, NotStored):
            break
        leading.append(outcome)
    return leading


async def give_back(sink: BlockSink, reservations: Sequence[Reservation]) -> None:
    """Abort each, within RELEASE_TIMEOUT_MS; a node that does not answer lets them expire."""
    try:
        async with asyncio.timeout(RELEASE_TIMEOUT_MS / 1000):
            for reservation in reservations:
                await sink.abort(reservation)
    except (TimeoutError, CacheFault):
        return

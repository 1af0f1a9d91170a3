"""Servers of one test's own (to be paused or killed), and a raw way to talk to them."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from free_ports import free_ports
from patient_redis import patient_connections

from headrace.core.clock import SystemClock
from headrace.index.embedded_valkey import EmbeddedValkey

SendRaw = Callable[..., Awaitable[Any]]


@pytest.fixture
def own_server() -> Iterator[EmbeddedValkey]:
    """May be started again: nobody takes its port meanwhile."""
    with EmbeddedValkey(port=free_ports(1)[0]) as server:
        yield server


@pytest.fixture
async def send_raw(empty_valkey_url: str) -> AsyncIterator[SendRaw]:
    """Send any command to the shared, emptied server."""
    connections = patient_connections(empty_valkey_url, connections_max=1, clock=SystemClock())

    async def send(*command: bytes | str | int) -> Any:
        async with connections.call() as redis:
            [reply] = await redis.round_trip(command)
        assert not isinstance(reply, Exception), reply
        return reply

    yield send
    await connections.close()

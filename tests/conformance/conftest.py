"""All implementations of the index ports, behind one face."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest
from patient_redis import patient_index, patient_membership
from restricted_redis import refused, restricted
from settled_mirror import SettledMirror

from headrace.core.ports import BlockIndex, Membership
from headrace.index.memory_index import MemoryIndex, MemoryMembership


class SettableClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.time_s = 1_000.0

    def now_s(self) -> float:
        return self.time_s

    def unix_ms(self) -> int:
        return int(self.time_s * 1000)


@dataclass(frozen=True, slots=True)
class IndexUnderTest:
    """An index, the membership it believes, and how to let time pass for both."""

    index: BlockIndex
    membership: Membership
    pass_time_ms: Callable[[int], Awaitable[None]]


@pytest.fixture(params=["memory", "redis", "cluster"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Which of them; a module may add mirrors, which are readers and have no membership of their own."""
    return str(request.param)


@pytest.fixture(params=["one server", "cluster"])
def empty_redis_url(request: pytest.FixtureRequest) -> str:
    """URL of an empty Redis of each kind."""
    return request.getfixturevalue("empty_cluster_url" if request.param == "cluster" else "empty_valkey_url")


@pytest.fixture
async def under_test(implementation: str, request: pytest.FixtureRequest) -> AsyncIterator[IndexUnderTest]:
    if implementation == "memory":
        clock = SettableClock()

        async def move_clock(ms: int) -> None:
            clock.time_s += ms / 1000

        membership = MemoryMembership(clock)
        yield IndexUnderTest(MemoryIndex(membership), membership, move_clock)
        return

    async def sleep(ms: int) -> None:
        await asyncio.sleep(ms / 1000)

    # As a user who may do no more than docs/security.md says: what else the index asks for is refused, and seen.
    open_url = request.getfixturevalue("empty_cluster_url" if "cluster" in implementation else "empty_valkey_url")
    url = restricted(open_url)
    index = SettledMirror(url) if "mirror" in implementation else patient_index(url)
    redis_membership = patient_membership(url)
    yield IndexUnderTest(index, redis_membership, sleep)
    await index.close()
    await redis_membership.close()
    assert refused(open_url) == "*0"

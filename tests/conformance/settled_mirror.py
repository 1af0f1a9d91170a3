"""A mirror of the index that is driven by hand, so that it has heard of everything before it answers."""

from patient_redis import patient_index, patient_mirror

from headrace.core.block import Chain, NamespaceId
from headrace.core.clock import SystemClock
from headrace.core.members import PrefixMatch
from headrace.index.index_mirror import Pace

AT_ONCE = Pace(wait_ms=0, gather_ms=0, liveness_ms=0, audit_ms=0, reread_ms=0, retry_ms=0)
STEPS_MAX = 300


class SettledMirror:
    """An IndexMirror whose `longest_prefix` first follows until nothing is left to hear, and then answers from memory.
    Everything else is the mirror's."""

    def __init__(self, url: str) -> None:
        self._redis = patient_index(url)
        self._clock = SystemClock()
        self.mirror = patient_mirror(self._redis, url, clock=self._clock, pace=AT_ONCE)
        self.register = self.mirror.register
        self.deregister = self.mirror.deregister
        self.sweep = self.mirror.sweep

    async def longest_prefix(self, namespace: NamespaceId, chain: Chain) -> PrefixMatch:
        await self.settle()
        assert self.mirror.answers, "void: Redis would be asked"
        return await self.mirror.longest_prefix(namespace, chain)

    async def settle(self) -> None:
        """Step until two steps in a row found nothing that was not known: the first may have met a new holder, of whom
        the second knows whether it is alive."""
        good = 0
        for _ in range(STEPS_MAX):
            began_s = self._clock.now_s()
            await self.mirror.step()
            self.mirror.check_integrity()
            stat = self.mirror.stat()
            good = good + 1 if stat.answers and stat.lag_s <= self._clock.now_s() - began_s else 0
            if good == 2:
                return
        raise AssertionError(f"the mirror does not settle: {self.mirror.stat()}")

    def knows_stream(self, shard: int) -> bool:
        """Whether the mirror would see by the ids that a stream was taken away; so if it has not begun."""
        read_to = self.mirror._read_to
        return not read_to or read_to[shard] > (0, 0)

    async def close(self) -> None:
        await self.mirror.close()
        await self._redis.close()

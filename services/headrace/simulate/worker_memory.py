"""One memory of a simulated worker or host: cached blocks under an eviction policy, and tokens of running sequences.

The policy is the one that store nodes run (`core/eviction.py`). A block that a sequence uses cannot leave; what a
sequence writes for itself (its output, its partial last block) is private and counts against the same room.
"""

from collections.abc import Sequence

from headrace.core.eviction import EvictionPolicy, PolicyName, make_policy
from headrace.core.prefix_map import PrefixMap
from headrace.core.recompute_cost import recompute_seconds


class WorkerMemory:
    """Room for `capacity_tokens`. `holder` is its number in `held`, the map of who has what, which it keeps true."""

    def __init__(
        self, capacity_tokens: int, *, block_tokens: int, policy: PolicyName, holder: int, held: PrefixMap[int]
    ) -> None:
        self.capacity_tokens = capacity_tokens
        self.private_tokens = 0
        self._block_tokens = block_tokens
        self._policy: EvictionPolicy[int] = make_policy(policy)
        self._uses: dict[int, int] = {}  # blocks that sequences run on, and how many
        self._holder = holder
        self._held = held

    @property
    def used_tokens(self) -> int:
        """Tokens of cached blocks and private ones."""
        return len(self._policy) * self._block_tokens + self.private_tokens

    @property
    def busy_tokens(self) -> int:
        """Tokens that cannot be evicted now."""
        return len(self._uses) * self._block_tokens + self.private_tokens

    def num_leading(self, chain: Sequence[int]) -> int:
        """Leading blocks of a chain that are held."""
        found = 0
        for block in chain:
            if block not in self._policy:
                break
            found += 1
        return found

    def use(self, chain: Sequence[int]) -> None:
        """A sequence runs on these blocks, all held; one look-up of the policy."""
        self._policy.used(chain)
        for block in chain:
            self._uses[block] = self._uses.get(block, 0) + 1

    def end_use(self, chain: Sequence[int]) -> None:
        """The sequence has ended."""
        for block in reversed(chain):
            self._uses[block] -= 1
            if not self._uses[block]:
                del self._uses[block]
                self._policy.offer(block)

    def fits(self, tokens: int) -> bool:
        """Whether so many more could be had, by evicting all that is not in use."""
        return self.busy_tokens + tokens <= self.capacity_tokens

    def take_private(self, tokens: int) -> None:
        """Room for a sequence's own tokens; cached blocks make way."""
        self.private_tokens += tokens
        while self.used_tokens > self.capacity_tokens and self._evict_one(None):
            pass

    def add(self, chain: Sequence[int]) -> int:
        """Keep a chain as far as there is room; returns how many leading blocks are held then."""
        first = self.num_leading(chain)
        for position in range(first, len(chain)):
            parent = chain[position - 1] if position else None
            while self.used_tokens + self._block_tokens > self.capacity_tokens:
                if not self._evict_one(parent):
                    return position
            self._policy.added(
                chain[position],
                parent,
                size_bytes=self._block_tokens,
                recompute_s=recompute_seconds(self._block_tokens, context_tokens=position * self._block_tokens),
            )
            self._held.add(self._holder, chain[position : position + 1])
        return len(chain)

    def _evict_one(self, keep: int | None) -> bool:
        victim = self._policy.victim(keep, may_leave=self._is_idle)
        if victim is None:
            return False
        self._policy.removed(victim)
        self._held.remove(self._holder, (victim,))
        return True

    def _is_idle(self, block: int) -> bool:
        return block not in self._uses

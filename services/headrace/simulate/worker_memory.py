"""The memories of a simulated worker: what its GPU caches beside its running sequences, and what its host keeps behind.

A GPU gives up the least recently used leaf, as engines do; a host runs the policy of store nodes (`core/eviction.py`).
Both are closed under prefixes, keep `held` (the map of who has what) true, and never give up what they must keep.
"""

from collections import OrderedDict
from collections.abc import Sequence

from headrace.core.eviction import EvictionPolicy, PolicyName, make_policy
from headrace.core.prefix_map import PrefixMap
from headrace.core.recompute_cost import recompute_seconds


class DeviceMemory:
    """Room for `capacity_tokens` on one GPU. `holder` is its number in `held`.

    A block that a sequence uses cannot leave; what a sequence writes for itself (its output, its partial last block) is
    private and takes of the same room. Idle blocks stand in one queue, the tail of a chain always before its head, so
    the first one is a leaf, and a step costs the same however full the memory is.
    """

    def __init__(self, capacity_tokens: int, *, block_tokens: int, holder: int, held: PrefixMap[int]) -> None:
        self.capacity_tokens = capacity_tokens
        self._private_tokens = 0
        self._block_tokens = block_tokens
        self._idle: OrderedDict[int, None] = OrderedDict()  # first to go first
        self._uses: dict[int, int] = {}  # blocks that sequences run on, and how many
        self._holder = holder
        self._held = held

    @property
    def used_tokens(self) -> int:
        """Tokens of cached blocks and private ones."""
        return (len(self._idle) + len(self._uses)) * self._block_tokens + self._private_tokens

    @property
    def busy_tokens(self) -> int:
        """Tokens that cannot be evicted now."""
        return len(self._uses) * self._block_tokens + self._private_tokens

    def num_leading(self, chain: Sequence[int]) -> int:
        """Leading blocks of a chain that need not be computed."""
        return self._num_kept(chain)

    def _num_kept(self, chain: Sequence[int]) -> int:
        """Leading blocks of a chain that are here."""
        idle, uses, found = self._idle, self._uses, 0
        for block in chain:
            if block not in idle and block not in uses:
                break
            found += 1
        return found

    def begin(self, held: Sequence[int], tokens: int) -> None:
        """A sequence of so many tokens runs on these leading blocks, all held; cached blocks make way for the rest."""
        idle, uses = self._idle, self._uses
        for block in held:
            count = uses.get(block, 0)
            if not count:
                del idle[block]
            uses[block] = count + 1
        self._private_tokens += tokens - len(held) * self._block_tokens
        self._evict(self.used_tokens - self.capacity_tokens)

    def end(self, held: Sequence[int], tokens: int) -> None:
        """The sequence has ended; the blocks it ran on are the most recently used ones now."""
        idle, uses = self._idle, self._uses
        for block in reversed(held):
            count = uses[block] - 1
            if count:
                uses[block] = count
            else:
                del uses[block]
                idle[block] = None
        self._private_tokens -= tokens - len(held) * self._block_tokens

    def fits(self, tokens: int) -> bool:
        """Whether so many more could be had, by evicting all that is not in use."""
        return self.busy_tokens + tokens <= self.capacity_tokens

    def add(self, chain: Sequence[int]) -> int:
        """Keep a chain as far as there is room; returns how many leading blocks are held then."""
        first = self._num_kept(chain)
        idle = self._idle
        for block in reversed(chain[:first]):
            if block in idle:
                idle.move_to_end(block)
        num_ours = sum(block in idle for block in chain[:first])
        wanted_tokens = (len(chain) - first) * self._block_tokens
        self._evict(self.used_tokens + wanted_tokens - self.capacity_tokens, keep_last=num_ours)
        room_blocks = max(0, self.capacity_tokens - self.used_tokens) // self._block_tokens
        end = min(len(chain), first + room_blocks)
        new = chain[first:end]
        for block in reversed(new):
            idle[block] = None
        for block in reversed(chain[:first]):
            if block in idle:
                idle.move_to_end(block)
        self._held.add(self._holder, new)
        return end

    def add_computed(self, chain: Sequence[int], *, first: int) -> int:
        """As `add`, of a chain that was computed here from block `first` on."""
        return self.add(chain)

    def _evict(self, tokens: int, *, keep_last: int = 0) -> None:
        """Free that many tokens if possible; the `keep_last` most recent idle blocks stay."""
        idle = self._idle
        count = min(-(-tokens // self._block_tokens), len(idle) - keep_last)
        if count > 0:
            self._held.remove(self._holder, [idle.popitem(last=False)[0] for _ in range(count)])


class HostMemory:
    """Room for `capacity_tokens` on one host, under an eviction policy. `holder` is its number in `held`."""

    def __init__(
        self, capacity_tokens: int, *, block_tokens: int, policy: PolicyName, holder: int, held: PrefixMap[int]
    ) -> None:
        self.capacity_tokens = capacity_tokens
        self._blocks_max = capacity_tokens // block_tokens
        self._block_tokens = block_tokens
        self._policy: EvictionPolicy[int] = make_policy(policy)
        self._holder = holder
        self._held = held
        self._recompute_s: list[float] = []  # of the block at each position

    def num_leading(self, chain: Sequence[int]) -> int:
        """Leading blocks of a chain that are held."""
        policy, found = self._policy, 0
        for block in chain:
            if block not in policy:
                break
            found += 1
        return found

    def read(self, chain: Sequence[int]) -> None:
        """Somebody reads these blocks, all held: one look-up of the policy."""
        self._policy.used(chain)

    def add(self, chain: Sequence[int]) -> int:
        """Keep a chain as far as there is room; returns how many leading blocks are held then."""
        first, policy = self.num_leading(chain), self._policy
        for position in range(first, len(chain)):
            parent = chain[position - 1] if position else None
            while len(policy) >= self._blocks_max:
                victim = policy.victim(parent)
                if victim is None:
                    return position
                policy.removed(victim)
                self._held.remove(self._holder, (victim,))
            policy.added(chain[position], parent, size_bytes=self._block_tokens, recompute_s=self._seconds_at(position))
            self._held.add(self._holder, chain[position : position + 1])
        return len(chain)

    def _seconds_at(self, position: int) -> float:
        while len(self._recompute_s) <= position:
            context = len(self._recompute_s) * self._block_tokens
            self._recompute_s.append(recompute_seconds(self._block_tokens, context_tokens=context))
        return self._recompute_s[position]

"""A simulated GPU's memory of a model with windows: two accounts, as a worker's pool has them.

The first is a `DeviceMemory` of what layers without a window have of a block; where every layer has one, of no more
than the block's name. The second is of near parts: a block's KV in the layers with a window. A sequence holds two
windows of them and two blocks at most. Those that nobody holds stay until room is needed, longest unused first whatever
stands on them, and a prefix is found when all of it is in the first account and its last window in the second
(`engine/layered_pool.py`).
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from headrace.core.errors import InvalidRequest
from headrace.core.key_window import KeyWindow, model_window
from headrace.core.prefix_map import PrefixMap
from headrace.simulate.cluster_model import ClusterModel
from headrace.simulate.worker_memory import DeviceMemory


def make_device_memory(model: ClusterModel, *, block_tokens: int, holder: int, held: PrefixMap[int]) -> DeviceMemory:
    """One worker's. Raises InvalidRequest for layers with a window that have no room."""
    if not model.window_tokens:
        return DeviceMemory(model.device_tokens, block_tokens=block_tokens, holder=holder, held=held)
    if model.near_tokens < block_tokens:
        raise InvalidRequest(
            f"{model.name}: near_tokens must be at least a block's {block_tokens} where window_tokens is given, not "
            f"{model.near_tokens}", param="cluster",
        )  # fmt: skip
    window = model_window([model.window_tokens], block_tokens=block_tokens)
    return WindowedMemory(model.device_tokens, near_tokens=model.near_tokens, window=window, holder=holder, held=held)


class WindowedMemory(DeviceMemory):
    """As DeviceMemory, with room for `near_tokens` in the layers that see a window only. What `held` says is the first
    account's: a depth may be more than is found."""

    def __init__(
        self, capacity_tokens: int, *, near_tokens: int, window: KeyWindow, holder: int, held: PrefixMap[int]
    ) -> None:
        super().__init__(capacity_tokens, block_tokens=window.block_tokens, holder=holder, held=held)
        self._window = window
        self._near_blocks_max = near_tokens // window.block_tokens
        self._near_idle: OrderedDict[int, None] = OrderedDict()  # first to go first
        self._near_uses: dict[int, int] = {}
        self._near_own = 0  # near parts that sequences have for themselves

    @property
    def busy_tokens(self) -> int:
        """As DeviceMemory, of the account that is fuller."""
        near_share = (len(self._near_uses) + self._near_own) / self._near_blocks_max
        return max(super().busy_tokens, round(near_share * self.capacity_tokens))

    def num_leading(self, chain: Sequence[int]) -> int:
        """Blocks of the longest prefix of which everything is here that is read of it."""
        longest = unbroken = 0
        for index, block in enumerate(chain[: self._num_kept(chain)]):
            unbroken = unbroken + 1 if block in self._near_idle or block in self._near_uses else 0
            if unbroken >= index + 1 - self._window.first_of_prefix(index + 1):
                longest = index + 1
        return longest

    def begin(self, held: Sequence[int], tokens: int) -> None:
        """As DeviceMemory: of near parts it uses the last window of what is held."""
        super().begin(held, tokens)
        for block in self._window_of(held):
            self._near_idle.pop(block, None)
            self._near_uses[block] = self._near_uses.get(block, 0) + 1
        self._near_own += self._own_parts(held, tokens)
        self._make_near_room()

    def end(self, held: Sequence[int], tokens: int) -> None:
        """As DeviceMemory."""
        super().end(held, tokens)
        self._near_own -= self._own_parts(held, tokens)
        for block in reversed(self._window_of(held)):
            self._near_uses[block] -= 1
            if not self._near_uses[block]:
                del self._near_uses[block]
                self._near_idle[block] = None

    def fits(self, tokens: int) -> bool:
        """As DeviceMemory, in both accounts."""
        near = len(self._near_uses) + self._near_own + self._own_parts((), tokens)
        return super().busy_tokens + tokens <= self.capacity_tokens and near <= self._near_blocks_max

    def add(self, chain: Sequence[int]) -> int:
        """As DeviceMemory. The chain came from elsewhere: of near parts its last window."""
        end = super().add(chain)
        self._keep_near(self._window_of(chain[:end]))
        return end

    def add_computed(self, chain: Sequence[int], *, first: int) -> int:
        """As DeviceMemory. Near parts are there of the window before block `first`, and of all that was computed."""
        end = super().add(chain)
        self._keep_near(chain[self._window.first_of_prefix(min(first, end)) : end])
        return end

    def _window_of(self, prefix: Sequence[int]) -> Sequence[int]:
        """The blocks that are read behind a prefix."""
        return prefix[self._window.first_of_prefix(len(prefix)) :]

    def _own_parts(self, held: Sequence[int], tokens: int) -> int:
        """Near parts that a sequence of so many tokens has for itself at most, beside the window that it stands on."""
        num_window = len(self._window_of(held))
        num_blocks = -(-tokens // self._window.block_tokens) - len(held)
        return self._window.held_blocks(num_window + num_blocks) - num_window

    def _keep_near(self, blocks: Iterable[int]) -> None:
        """Those that are here already keep their place: a pool has them once, and who computed them again frees his."""
        for block in blocks:
            if block not in self._near_uses:
                self._near_idle.setdefault(block)
        self._make_near_room()

    def _make_near_room(self) -> None:
        while self._near_idle and len(self._near_idle) + len(self._near_uses) + self._near_own > self._near_blocks_max:
            self._near_idle.popitem(last=False)

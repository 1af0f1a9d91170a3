"""What a model's layers see of a sequence, each in its own window, and so what is read, held and moved of its KV.

A layer with a window of w tokens reads min(keys, w) of them (`key_window.py` has the windows' blocks). Amounts here are
in layer-tokens, one token's keys and values in one layer: times `2 x kv heads x head dim x bytes` they are bytes. Pure;
`docs/windows.md` says how a worker's pool comes to hold so much, and its tests compare these figures with real pools.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headrace.core.key_window import KeyWindow, model_window, near_parts


@dataclass(frozen=True, slots=True)
class LayerWindows:
    """`tokens`: of each layer how many positions it reads, the computed one among them; None for all."""

    tokens: tuple[int | None, ...]

    def __post_init__(self) -> None:
        assert self.tokens

    @property
    def num_layers(self) -> int:
        """All of them."""
        return len(self.tokens)

    @property
    def near_layers(self) -> int:
        """Layers whose KV is in a part of its own: those with a window, where others see everything."""
        windowed = sum(window is not None for window in self.tokens)
        return 0 if windowed == self.num_layers else windowed

    @property
    def widest(self) -> int | None:
        """The widest window; None where no layer has one."""
        return max((window for window in self.tokens if window is not None), default=None)

    def near_window(self, block_tokens: int) -> KeyWindow:
        """What those layers read; everything where there are none."""
        near = [window for window in self.tokens if window is not None] if self.near_layers else [None]
        return model_window(near, block_tokens=block_tokens)

    def keys_read(self, keys: float) -> float:
        """Layer-tokens that the last of so many positions reads: the sum of min(keys, w) over the layers."""
        return sum(keys if window is None else min(keys, window) for window in self.tokens)

    def keys_touched(self, tokens: int, context_tokens: int) -> int:
        """Layer-tokens that at least one of `tokens` positions behind `context_tokens` others reads."""
        end = context_tokens + tokens
        return sum(end if window is None else min(end, window + tokens - 1) for window in self.tokens)

    def pairs(self, tokens: int, context_tokens: int) -> float:
        """Pairs of a position and a key it reads, all layers together: the sum of `keys_read` over `tokens` positions
        behind `context_tokens` others, in closed form.

        Of a layer, n (n + 1) / 2 pairs up to position n, and w for each position from the w-th on.
        """

        def up_to(position: int, window: int | None) -> float:
            inside = position if window is None else min(position, window)
            return inside * (inside + 1) / 2 + (position - inside) * inside

        end = context_tokens + tokens
        return sum(up_to(end, window) - up_to(context_tokens, window) for window in self.tokens)

    def context_of(self, layer_tokens: float) -> int | None:
        """The shortest context whose last position reads so many layer-tokens; None: none is long enough."""
        if None not in self.tokens and self.keys_read(self.widest or 0) < layer_tokens:
            return None
        low, high = 0, max(1, -int(-layer_tokens // 1))  # one layer that sees everything would be enough
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.keys_read(middle) >= layer_tokens else (middle + 1, high)
        return low

    def held(self, tokens: int, *, block_tokens: int) -> int:
        """Layer-tokens that a sequence of so many tokens holds of a pool at most, in whole blocks: of a layer without a
        window all its blocks, of the others two windows and two blocks (`KeyWindow.held_blocks`)."""
        return sum(
            layers * window.held_blocks(-(-tokens // block_tokens)) * block_tokens
            for layers, window in self._parts(block_tokens)
        )

    def moved(self, tokens: int, *, block_tokens: int) -> int:
        """Layer-tokens that a hit of so many tokens moves, in full blocks: of the layers that have a window, one."""
        num_blocks = tokens // block_tokens
        return sum(
            layers * (num_blocks - window.first_of_prefix(num_blocks)) * block_tokens
            for layers, window in self._parts(block_tokens)
        )

    def pool(self, sequences: int, tokens: int, *, block_tokens: int) -> int:
        """Layer-tokens of a pool with room for so many sequences of so many tokens each.

        Where blocks have two parts, a worker with `batch_sequences_max` of `sequences` has near parts for these and for
        what is being published (`key_window.near_parts`).
        """
        num_blocks = -(-tokens // block_tokens)
        if not self.near_layers:
            return sequences * self.held(tokens, block_tokens=block_tokens)
        num_near = near_parts(sequences * num_blocks, sequences, self.near_window(block_tokens))
        wide_layers = self.num_layers - self.near_layers
        return (wide_layers * sequences * num_blocks + self.near_layers * num_near) * block_tokens

    def fitting_sequences(self, room: float, tokens: int, *, block_tokens: int) -> int:
        """The most sequences of so many tokens each whose `pool` is within `room` layer-tokens."""
        return _most(room, lambda sequences: self.pool(sequences, tokens, block_tokens=block_tokens))

    def fitting_tokens(self, room: float, sequences: int, *, block_tokens: int) -> int | None:
        """The longest that each of so many sequences may be, in whole blocks; None: however long, there is room."""

        def pool(num_blocks: int) -> int:
            return self.pool(sequences, num_blocks * block_tokens, block_tokens=block_tokens)

        if None not in self.tokens:
            [(_, window)] = self._parts(block_tokens)
            if pool(2 * window.prefix_blocks + 2) <= room:
                return None
        return _most(room, pool) * block_tokens

    def _parts(self, block_tokens: int) -> Iterator[tuple[int, KeyWindow]]:
        """The pool's parts: how many layers, and what a sequence holds of them."""
        if not self.near_layers:
            yield self.num_layers, model_window(self.tokens, block_tokens=block_tokens)
            return
        yield self.num_layers - self.near_layers, KeyWindow(None, block_tokens)
        yield self.near_layers, self.near_window(block_tokens)


def _most(room: float, needed: Callable[[int], int]) -> int:
    """The largest number for which no more than `room` is needed; needs grow with it."""
    high = 1
    while needed(high) <= room:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= room else (low, middle)
    return low

"""A worker's GPU as room for KV: how many sequences fit, what windows spare of them, and a simulated worker's pool.

Owns the arithmetic of one worker's memory for one workload; layers' windows are `core/layer_windows.py`'s.
"""

from dataclasses import dataclass, replace

from headrace.core.key_window import model_window, near_parts
from headrace.simulate.cluster_model import ClusterModel
from headrace.simulate.model_shape import ModelShape
from headrace.simulate.read_trace import Trace


@dataclass(frozen=True, slots=True)
class WindowsRow:
    """What windows spare of the KV of a sequence as long as the workload's, of all layers' KV for all tokens."""

    layers: int  # that have a window
    widest_tokens: int
    context_tokens: int
    held_share: float  # of a worker's pool, at most
    seen_share: float  # read by a decode step
    moved_share: float  # by a hit


@dataclass(frozen=True, slots=True)
class WorkerRoom:
    """A worker's GPU with room for `room_tokens` tokens of which all layers are kept, and the sequences in it."""

    model: ModelShape
    trace: Trace
    room_tokens: int

    @property
    def usual_tokens(self) -> int:
        """Of the workload's sequences, in the mean."""
        requests = self.trace.requests
        return max(1, sum(each.input_tokens + each.output_tokens for each in requests) // len(requests))

    def fit(self, context_tokens: int) -> int:
        """How many sequences of so many tokens there is room for (`LayerWindows.pool`; without windows, as if blocks
        were single tokens)."""
        if not self.model.windows:
            return self.room_tokens // context_tokens
        layer_tokens = self.room_tokens * self.model.layers
        return self.model.layer_windows.fitting_sequences(
            layer_tokens, context_tokens, block_tokens=self.trace.block_tokens
        )

    @property
    def device_tokens(self) -> int:
        """Tokens of sequences as long as the workload's that there is room for."""
        return max(1, self.fit(self.usual_tokens)) * self.usual_tokens if self.model.windows else self.room_tokens

    def fill(self, cluster: ClusterModel) -> ClusterModel:
        """The cluster with such GPUs: with the pool of a worker whose batch is as many of the workload's sequences as
        there is room for. Where all layers have a window, `device_tokens` are those of the prefixes whose last windows
        there is room for."""
        windows, block_tokens = self.model.layer_windows, self.trace.block_tokens
        if windows.widest is None:
            return replace(cluster, device_tokens=self.room_tokens)
        window = model_window((each for each in windows.tokens if each is not None), block_tokens=block_tokens)
        usual_blocks, sequences = -(-self.usual_tokens // block_tokens), max(1, self.fit(self.usual_tokens))
        num_blocks = sequences * usual_blocks
        num_near = near_parts(num_blocks, sequences, window)
        if not windows.near_layers:
            num_near = max(1, self.room_tokens // block_tokens)
            num_blocks = max(num_near, num_near // window.prefix_blocks * usual_blocks)
        return replace(
            cluster,
            device_tokens=num_blocks * block_tokens,
            near_tokens=num_near * block_tokens,
            window_tokens=windows.widest,
        )

    @property
    def moved_share(self) -> float:
        """What a hit moves of a prefix as long as the workload's sequences, in whole blocks: at most all of it."""
        if not self.model.windows:
            return 1.0
        whole_blocks = -(-self.usual_tokens // self.trace.block_tokens) * self.trace.block_tokens
        return self.model.moved_tokens(whole_blocks, block_tokens=self.trace.block_tokens) / whole_blocks

    def share(self, tokens: float) -> float:
        """So many tokens, of a sequence as long as the workload's."""
        return tokens / self.usual_tokens

    def windows_row(self) -> WindowsRow | None:
        """None where no layer has a window."""
        windows = self.model.layer_windows
        if windows.widest is None:
            return None
        held = self.model.held_tokens(self.usual_tokens, block_tokens=self.trace.block_tokens)
        return WindowsRow(
            layers=sum(window is not None for window in windows.tokens),
            widest_tokens=windows.widest,
            context_tokens=self.usual_tokens,
            held_share=self.share(held),
            seen_share=self.share(self.model.seen_tokens(self.usual_tokens)),
            moved_share=self.moved_share,
        )

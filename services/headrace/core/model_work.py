"""What computing with a model multiplies and reads, and the least time that a machine needs for it (its roofline).

Pure arithmetic over a dense decoder: every weight of its linear layers is used once for each token, and every pair of a
query and a key it may see costs one product with the key and one with the value; a layer with a window sees no more
keys than that (`layer_windows.py`). Norms, activations and rotations are left out: they are some per cent of the
operations. Williams et al., "Roofline", CACM 2009, has the model of a machine.
"""

from dataclasses import dataclass

from headrace.core.layer_windows import LayerWindows


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """What one worker's share of a machine reaches at most."""

    flops_per_s: float  # of large matrix products in the model's number format; a multiplication and an addition are 2
    bytes_per_s: float  # reading memory from end to end

    @property
    def balance(self) -> float:
        """Operations a byte: work below it is limited by memory, work above it by arithmetic."""
        return self.flops_per_s / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Work:
    """One step's operations, and the bytes that must be read for it at least."""

    flops: float
    num_bytes: float

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flops / self.num_bytes

    def least_seconds(self, limits: MachineLimits) -> float:
        """The roofline: as if arithmetic and reading went on side by side, and nothing else took time."""
        return max(self.flops / limits.flops_per_s, self.num_bytes / limits.bytes_per_s)

    def is_bandwidth_bound(self, limits: MachineLimits) -> bool:
        """Whether reading takes longer than multiplying."""
        return self.intensity < limits.balance


@dataclass(frozen=True, slots=True)
class ModelWork:
    """A model, as far as operations and bytes need it."""

    layer_weights: int  # numbers in the linear layers of all blocks
    output_weights: int  # numbers in the output layer, which only rows that want logits go through
    weight_bytes: int  # of one number
    layer_attention_width: int  # of one layer: query heads x head_dim
    layer_kv_bytes: int  # of one token in one layer
    windows: LayerWindows

    @property
    def kv_token_bytes(self) -> int:
        """KV of one token in all layers, whatever they see of it later."""
        return self.windows.num_layers * self.layer_kv_bytes

    @property
    def step_bytes(self) -> int:
        """Weights that any step reads."""
        return (self.layer_weights + self.output_weights) * self.weight_bytes

    def decode_step(self, sequences: int, context_tokens: int) -> Work:
        """One token for each of `sequences`, each behind `context_tokens` others: the weights once, and of each
        sequence's KV once what its layers see."""
        keys = self.windows.keys_read(context_tokens + 1)
        flops = 2 * (self.layer_weights + self.output_weights) + 4 * self.layer_attention_width * keys
        return Work(sequences * flops, self.step_bytes + sequences * keys * self.layer_kv_bytes)

    def prefill(self, tokens: int, context_tokens: int = 0) -> Work:
        """`tokens` of one prompt in one step, behind `context_tokens` that are there; logits of the last one."""
        pairs = self.windows.pairs(tokens, context_tokens)
        flops = 2 * (self.layer_weights * tokens + self.output_weights) + 4 * self.layer_attention_width * pairs
        touched = self.windows.keys_touched(tokens, context_tokens)
        return Work(flops, self.step_bytes + touched * self.layer_kv_bytes)

    def compute_bound_batch(self, context_tokens: int, limits: MachineLimits) -> float | None:
        """Sequences from which on a decode step is limited by arithmetic, b in `b x flops / F = (W + b x KV) / B`.

        None: never, since each sequence's KV takes longer to read than its arithmetic takes.
        """
        one = self.decode_step(1, context_tokens)
        kv_bytes = one.num_bytes - self.step_bytes
        gained_s = one.flops / limits.flops_per_s - kv_bytes / limits.bytes_per_s
        return self.step_bytes / limits.bytes_per_s / gained_s if gained_s > 0 else None

    def kv_passes_weights_tokens(self, sequences: int = 1) -> int | None:
        """Tokens of each of so many sequences from which on a step reads more KV than weights; None: it never does,
        since windows bound what it reads."""
        return self.windows.context_of(self.step_bytes / (sequences * self.layer_kv_bytes))

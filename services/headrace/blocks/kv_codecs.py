"""KV codecs: between numbers in the model's dtype and the bytes that a store or a quantised pool keeps.

Owns the arithmetic of int8 and fp8 (e4m3) and the order of a coded payload. Two rules:

- A scale is kept as the largest magnitude of its numbers (amax), in the model's dtype, and the number of that magnitude
  has the largest code. So amax survives decoding bit for bit, and every other number comes back so near to its code
  that it gets the same code again: encode(decode(b)) == b for every b that encode made. A block that is stored and
  loaded again and again does not drift.
- What is not finite has no code. A scale below 2^-100 (bfloat16 and float32) is kept as 0, and so are its numbers:
  the products below would leave the range of normal numbers.

Plain torch operations on any device; each product is rounded once, in float32. Knows nothing of pools or headers.
"""

import threading
from collections.abc import Iterator

import torch

from headrace.core.block import KvCodec, KvLayout
from headrace.core.errors import BlockCorrupt

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# Numbers that are worked on at once: their float32 copies (1 MiB) stay in a core's own cache.
STEP_NUMBERS = 256 * 1024

# Of each dtype: an integer as wide, the bits without the sign, the first of them that are not finite, those of 2^-100.
_BITS = {
    torch.bfloat16: (torch.int16, 0x7FFF, 0x7F80, 27 << 7),
    torch.float16: (torch.int16, 0x7FFF, 0x7C00, 0),
    torch.float32: (torch.int32, 0x7FFFFFFF, 0x7F800000, 27 << 23),
}
_INT8_MAX, _E4M3_MAX = 127.0, 448.0
# A float32 with e4m3's bits shifted into its own exponent and mantissa is the number times 2^(7 - 127).
_E4M3_SHIFT, _E4M3_MASK, _E4M3_EXPONENT = 20, -0x78100000, 2.0**120


class BlockCoder:
    """Blocks of one coded layout to bytes and back. In any number of threads at once: each has work space of its own.

    A block is `layout.shape` in the model's dtype, with any strides; its bytes are `layout.block_bytes` of uint8,
    contiguous, on the same device: the scales, then one code for each number in the block's order. Scales are
    `[num_layers, 2, num_kv_heads, block_tokens]`; in int8 `[num_layers, num_kv_heads, head_dim]` for the keys, then
    `[num_layers, num_kv_heads, block_tokens]` for the values.
    """

    def __init__(self, layout: KvLayout) -> None:
        assert layout.codec != KvCodec.RAW
        self.layout = layout
        self._is_int8 = is_int8(layout.codec)
        self._by_channel = layout.codec == KvCodec.INT8
        layers, _, heads, block_tokens, head_dim = layout.shape
        self._layers_at_once = min(layers, max(1, STEP_NUMBERS // (heads * block_tokens * head_dim)))
        self._work = threading.local()

    def encode(self, block: torch.Tensor, coded: torch.Tensor) -> None:
        """Fill `coded`. Raises BlockCorrupt when a number of the block is not finite; `coded` is then of no use."""
        work, whole_scales = self._work_space(block.device), []
        for layers, which, scales, codes in self._pieces(coded):
            numbers, axis = block[layers, which], self._axis(which)
            amax = scales[layers].copy_(amax_of(numbers, axis))
            write_codes(work[: len(numbers)].copy_(numbers), amax.unsqueeze(axis), codes, int8=self._is_int8)
            whole_scales.append(amax)
        if not all(is_finite(amax) for amax in whole_scales):
            raise BlockCorrupt(b"", f"it holds numbers that are not finite, and {self.layout.codec} has none for them")

    def decode(self, coded: torch.Tensor, block: torch.Tensor) -> None:
        """Fill `block` with what the bytes say. Any bytes are taken: what they are worth their checksum says."""
        work = self._work_space(block.device)
        for layers, which, scales, codes in self._pieces(coded):
            amax = scales[layers].unsqueeze(self._axis(which))
            block[layers, which].copy_(read_codes(codes, amax, work[: codes.shape[0]], int8=self._is_int8))

    def _axis(self, which: int) -> int:
        """Over what a scale's numbers lie in a layer's `[num_kv_heads, block_tokens, head_dim]`."""
        return -2 if self._by_channel and which == 0 else -1

    def _pieces(self, coded: torch.Tensor) -> Iterator[tuple[slice, int, torch.Tensor, torch.Tensor]]:
        """Some layers' keys (0) or values (1) at a time: which, all scales of that kind, and the piece's codes."""
        assert coded.numel() == self.layout.block_bytes
        layers, _, heads, block_tokens, head_dim = shape = self.layout.shape
        numbers = layers * 2 * heads * block_tokens * head_dim
        scales = coded[: coded.numel() - numbers].view(TORCH_DTYPES[self.layout.dtype])
        codes = coded[-numbers:].view(shape)
        if self._by_channel:
            num_keys = layers * heads * head_dim
            by_kind = scales[:num_keys].view(layers, heads, head_dim), scales[num_keys:].view(layers, heads, -1)
        else:
            both = scales.view(layers, 2, heads, block_tokens)
            by_kind = both[:, 0], both[:, 1]
        for first in range(0, layers, self._layers_at_once):
            piece = slice(first, min(layers, first + self._layers_at_once))
            for which in (0, 1):
                yield piece, which, by_kind[which], codes[piece, which]

    def _work_space(self, device: torch.device) -> torch.Tensor:
        """This thread's own float32 numbers, `[layers at once, num_kv_heads, block_tokens, head_dim]`."""
        kept: torch.Tensor | None = getattr(self._work, "numbers", None)
        if kept is None:
            shape = (self._layers_at_once, *self.layout.shape[2:])
            kept = self._work.numbers = torch.empty(shape, dtype=torch.float32, device=device)
        return kept


def encode_rows(rows: torch.Tensor, *, codec: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (uint8) of rows `[..., head_dim]` and each row's scale `[...]` in the rows' dtype.

    A row that is not finite has a scale that is not, and is not finite when it is read.
    """
    amax, codes = amax_of(rows, -1), torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
    write_codes(rows.to(torch.float32, copy=True), amax.unsqueeze(-1), codes, int8=is_int8(codec))
    return codes, amax


def decode_rows(codes: torch.Tensor, amax: torch.Tensor, out: torch.Tensor, *, codec: str) -> torch.Tensor:
    """`out`, filled with the rows that these codes `[..., head_dim]` and scales `[...]` stand for."""
    work = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    return out.copy_(read_codes(codes, amax.unsqueeze(-1), work, int8=is_int8(codec)))


def is_int8(codec: str) -> bool:
    """Whether a code is an integer; else it is an e4m3 number."""
    return codec in (KvCodec.INT8, KvCodec.INT8_TOKEN)


def amax_of(numbers: torch.Tensor, axis: int) -> torch.Tensor:
    """The largest magnitude along an axis, in the numbers' dtype.

    Taken from the bits without the sign, whose order is that of the magnitudes: several times as fast as by number,
    and what is not finite is larger than all that is.
    """
    integer, magnitude, _, tiny = _BITS[numbers.dtype]
    bits = numbers.view(integer).bitwise_and(magnitude).amax(axis)
    return bits.masked_fill_(bits < tiny, 0).view(numbers.dtype)


def is_finite(amax: torch.Tensor) -> bool:
    """Whether every number behind these scales is finite."""
    integer, _, endless, _ = _BITS[amax.dtype]
    return bool((amax.view(integer) < endless).all())


def write_codes(numbers: torch.Tensor, amax: torch.Tensor, codes: torch.Tensor, *, int8: bool) -> None:
    """Fill `codes` (uint8) with the codes of `numbers` (float32, overwritten) under scales that broadcast to them."""
    scale = amax.float()
    to_code = torch.where(scale > 0, (_INT8_MAX if int8 else _E4M3_MAX) / scale, 0.0)
    numbers.mul_(to_code)
    if int8:
        codes.view(torch.int8).copy_(numbers.round_())
        return
    codes.view(torch.float8_e4m3fn).copy_(numbers)
    if amax.dtype == torch.float16:
        # Near float16's smallest numbers its own steps are as wide as e4m3's, and a number that was rounded to both may
        # get the code beside the first one's. From the second time on it is always the same.
        numbers.copy_(read_codes(codes, amax, numbers, int8=False).to(torch.float16)).mul_(to_code)
        codes.view(torch.float8_e4m3fn).copy_(numbers)


def read_codes(codes: torch.Tensor, amax: torch.Tensor, numbers: torch.Tensor, *, int8: bool) -> torch.Tensor:
    """`numbers` (float32), filled with what the codes stand for. The largest code gives amax itself, in every dtype."""
    if int8 and amax.dtype != torch.float32:
        # One pass over the numbers less. What float32 rounds otherwise then, amax's own dtype rounds away for amax.
        return numbers.copy_(codes.view(torch.int8)).mul_(amax.float().mul_(1 / _INT8_MAX))
    if int8:
        numbers.copy_(codes.view(torch.int8)).mul_(1 / _INT8_MAX)
    else:
        # What torch's own conversion gives, at several times its speed.
        bits = numbers.view(torch.int32).copy_(codes.view(torch.int8))
        bits.bitwise_left_shift_(_E4M3_SHIFT).bitwise_and_(_E4M3_MASK)
        numbers.mul_(_E4M3_EXPONENT / _E4M3_MAX)
    return numbers.mul_(amax.float())

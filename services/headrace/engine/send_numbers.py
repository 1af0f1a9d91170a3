"""Whole numbers of a step, on their way to the device in one copy: token ids, positions, tables of pages.

To a CUDA device a copy from ordinary memory makes the host wait until the stream's kernels are done, and every copy
costs some microseconds whatever its size. So what belongs together goes into one pinned buffer, and the host goes on:
torch's allocator gives pinned memory to nobody else before the copy that reads it has ended.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

Numbers = Sequence[int] | np.ndarray[Any, Any]


def send_numbers(parts: Sequence[Numbers], device: torch.device) -> list[torch.Tensor]:
    """Each part as `[length]` int64 on the device, in order; all are views of one buffer."""
    lengths = [len(part) for part in parts]
    packed = torch.empty(sum(lengths), dtype=torch.int64, pin_memory=device.type == "cuda")
    np.concatenate(parts, out=packed.numpy(), casting="unsafe")  # an empty list has no whole numbers, says numpy
    return list(packed.to(device, non_blocking=True).split(lengths))

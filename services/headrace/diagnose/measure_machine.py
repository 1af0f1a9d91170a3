"""What this machine's processor and memory reach: the two lines of its roofline, measured.

Owns the two measurements. They take the best of several tries: a limit is what the machine can do, and other work can
only make a try slower. It knows nothing of models.
"""

import time
from collections.abc import Callable

import torch

from headrace.core.model_work import MachineLimits

# One operand that no cache holds: reading it is reading memory.
READ_BYTES = 256 * 1024 * 1024
READ_COLUMNS = 8_192
# Edges of the square products that are tried: small ones fit the caches, large ones hide their start.
PRODUCT_SIZES = (512, 1_024, 2_048)
CUDA_PRODUCT_SIZES = (4_096, 8_192)
TRIES = 7


def measure_machine(dtype: torch.dtype, device: torch.device, *, threads: int) -> MachineLimits:
    """Measure with torch's own operators, on so many threads of this process; a second or two on a CPU."""
    previous = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return MachineLimits(measure_flops_per_s(dtype, device), measure_bytes_per_s(device))
    finally:
        torch.set_num_threads(previous)


def measure_bytes_per_s(device: torch.device) -> float:
    """A matrix-vector product in float32 over READ_BYTES: what a decode step does with a layer's weights."""
    matrix = torch.ones((READ_BYTES // 4 // READ_COLUMNS, READ_COLUMNS), device=device)
    vector = torch.ones(READ_COLUMNS, device=device)
    return READ_BYTES / _least_seconds(lambda: torch.mv(matrix, vector), device)


def measure_flops_per_s(dtype: torch.dtype, device: torch.device) -> float:
    """The best rate of square matrix products in `dtype`."""
    rates = []
    for size in CUDA_PRODUCT_SIZES if device.type == "cuda" else PRODUCT_SIZES:
        left, right = (torch.ones((size, size), dtype=dtype, device=device) for _ in range(2))
        rates.append(2 * size**3 / _least_seconds(lambda left=left, right=right: left @ right, device))
    return max(rates)


def _least_seconds(act: Callable[[], object], device: torch.device) -> float:
    """The fastest of TRIES, after one that does not count."""
    times = []
    for _ in range(1 + TRIES):
        started_s = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started_s)
    return min(times[1:])

"""Keeping the memory of payload messages in the process, instead of handing it back to the kernel after each one.

A message of a megabyte is allocated, filled and freed several times on its way through gRPC. By default the C library
returns such memory at once, and the kernel then maps and zeroes every page of it anew: measured with messages of
1.4 MiB, 3,800 page faults for 48 MiB and a quarter of the reader's processor time. Knows nothing of messages.
"""

import ctypes

from headrace.core.limits import FREED_MEMORY_KEPT_BYTES, HEAP_ALLOCATION_BYTES_MAX

# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_message_memory() -> bool:
    """Let this process keep up to FREED_MEMORY_KEPT_BYTES of what it has freed. Idempotent.

    False, and no effect, where the C library has no such setting (any but glibc); everything works without it.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    heap = mallopt(_M_MMAP_THRESHOLD, HEAP_ALLOCATION_BYTES_MAX)
    return bool(mallopt(_M_TRIM_THRESHOLD, FREED_MEMORY_KEPT_BYTES) and heap)

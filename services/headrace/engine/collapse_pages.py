"""Put the process's large memory into huge pages, once a model is loaded.

A decode step reads all weights once. In pages of 4 KiB that is an entry of the page table for every 4 KiB, read from
memory too, and the processor's prefetching stops at each page's end. Weights that oneDNN has packed lie in memory that
torch did not allocate, so nothing else asks for huge pages for them.

This file owns which mappings are collapsed. It changes no byte, and where a kernel cannot do it nothing happens.
"""

import ctypes
from collections.abc import Iterable, Iterator
from pathlib import Path

HUGE_PAGE_BYTES = 2 << 20
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # of <linux/mman.h>; the second since Linux 6.1

# Share of a mapping that must be in memory already: what was never touched (stacks of threads, reserves of allocators)
# would be mapped by this.
RESIDENT_MIN = 0.9


def collapse_pages(smaps: Path = Path("/proc/self/smaps")) -> int:
    """Ask for huge pages where this process's private memory is in use; returns the bytes that were asked for.

    Takes a tenth of a second for a few hundred megabytes, which are copied.
    """
    try:
        text = smaps.read_bytes().decode("utf-8", errors="surrogateescape")  # names of files are bytes
    except OSError:
        return 0
    madvise = ctypes.CDLL(None).madvise
    asked = 0
    for start, stop in list(dense_mappings(text.split("\n")[:-1])):
        where, size = ctypes.c_void_p(start), ctypes.c_size_t(stop - start)
        # What it answers does not matter: without huge pages everything is as it was.
        if madvise(where, size, MADV_HUGEPAGE) == 0:
            madvise(where, size, MADV_COLLAPSE)
            asked += stop - start
    return asked


def dense_mappings(lines: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Of /proc/self/smaps: whole huge pages of private writable memory without a file, mostly resident."""
    start = stop = 0
    for line in lines:
        words = line.split()
        if not words[0].endswith(":"):  # "start-stop rights offset device inode name", where the name may be missing
            private = words[1] == "rw-p" and words[4] == "0"
            start, stop = (int(address, 16) if private else 0 for address in words[0].split("-"))
        elif words[0] == "Rss:":
            resident_bytes = int(words[1]) * 1024
            first = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            last = stop // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
            if first < last and resident_bytes >= RESIDENT_MIN * (stop - start):
                yield first, last

"""Processor time of processes, as Linux counts it: what a measurement costs, whatever else the machine does."""

import os
from collections.abc import Iterable
from pathlib import Path

_CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_seconds(process_ids: Iterable[int]) -> float:
    """Processor time so far, user and system, of these processes and of children that they have waited for.

    Those that have ended count nothing. proc(5): fields 14 to 17 of `stat`, in clock ticks.
    """
    total = 0.0
    for process_id in process_ids:
        try:
            fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(int(ticks) for ticks in fields[11:15]) / _CLOCK_TICKS_PER_S
    return total

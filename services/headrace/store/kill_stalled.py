"""The process beside a store node that kills it when its event loop stands still; `end_when_stalled.py` starts it.

Looks are counted and not time: what stops both processes (a frozen container, a machine that sleeps) is no stall, and
on a busy machine the one that looks is as late as the one that is looked at.
"""

import logging
import os
import select
import signal
import sys
from collections.abc import Callable

from headrace.telemetry.logs import set_up_logs

_log = logging.getLogger("headrace.store.kill_stalled")  # run by `-m`, this module has another name
_SAY_TIMEOUT_S = 5


def kill_stalled(look: Callable[[], bytes | None], kill: Callable[[], None], *, looks_max: int) -> None:
    """Look at a process until it has ended, and kill it after so many looks in a row that heard no beat; once more at
    each look after that.

    look: waits a while for beats; None when there were none, b"" when the process has ended.
    """
    silent_looks = 0
    while (heard := look()) != b"":
        silent_looks = 0 if heard else silent_looks + 1
        if silent_looks >= looks_max:
            kill()


def main(arguments: list[str]) -> None:
    """Arguments: watched pid (our parent's), ms of a look, ms of a stall, format of the log, node id. Beats come on
    standard input, which ends with the process."""
    watched_pid, look_ms, stall_ms = map(int, arguments[:3])
    log_format, node_id = arguments[3:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # which may come to both: the other one says when
        signal.signal(number, signal.SIG_IGN)
    set_up_logs(log_format, part="store node", instance_id=node_id)
    beats = sys.stdin.fileno()

    def look() -> bytes | None:
        return os.read(beats, 4_096) if select.select([beats], [], [], look_ms / 1_000)[0] else None

    def kill() -> None:
        if os.getppid() == watched_pid:  # never another process that got its number
            os.kill(watched_pid, signal.SIGKILL)
            signal.alarm(_SAY_TIMEOUT_S)  # ends this process too where nobody reads the log that both of them write
            _log.critical("the event loop has stood still for %g s: the process is killed", stall_ms / 1_000)
            signal.alarm(0)

    kill_stalled(look, kill, looks_max=max(1, stall_ms // look_ms))


if __name__ == "__main__":
    main(sys.argv[1:])

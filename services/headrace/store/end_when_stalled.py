"""End a store node's process when its event loop stands still, so that whoever keeps it running starts another one.

A process that was stopped, or whose loop hangs on a disk, can neither end itself nor is it dead for those who look at
processes, and its arena stays locked. So a small process beside it kills it (`kill_stalled.py`); the successor finds
the arena again as after any other death. A busy node is not a stalled one: its loop turns between any two calls, and
that is what is looked at, not how long a call takes.
"""

import asyncio
import logging
import os
import subprocess
import sys

from headrace.core.store_limits import NODE_BEAT_MS, NODE_STALL_MS
from headrace.store import kill_stalled

_log = logging.getLogger(__name__)


async def end_when_stalled(*, log_format: str, node_id: str, stall_ms: int = NODE_STALL_MS) -> None:
    """Beat from this event loop until cancelled; while it is awaited, a loop that stands still for `stall_ms` ends the
    process by SIGKILL. The process beside it ends with this one, and is replaced where it dies itself."""
    beat_ms = min(NODE_BEAT_MS, stall_ms // 10)
    told = False
    while True:
        try:
            watcher = _start_watcher(str(beat_ms), str(stall_ms), log_format, node_id)
        except OSError as error:
            if not told:
                _log.warning("nobody looks whether this process stands still, for now: %s", error.strerror)
            told = True
        else:
            told = False
            try:
                await _beat(watcher, every_ms=beat_ms)
            finally:
                _end(watcher)
            _log.warning("the process that looks whether this one stands still has died and is replaced")
        await asyncio.sleep(stall_ms / 1_000)


def _start_watcher(*settings: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-P", "-m", kill_stalled.__name__, str(os.getpid()), *settings]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    assert watcher.stdin is not None
    os.set_blocking(watcher.stdin.fileno(), False)
    return watcher


async def _beat(watcher: "subprocess.Popen[bytes]", *, every_ms: int) -> None:
    """Until nobody is there to hear it."""
    assert watcher.stdin is not None
    while True:
        try:
            os.write(watcher.stdin.fileno(), b".")
        except BlockingIOError:
            pass  # it was stopped itself: what it has not heard yet is enough
        except BrokenPipeError:
            return
        await asyncio.sleep(every_ms / 1_000)


def _end(watcher: "subprocess.Popen[bytes]") -> None:
    assert watcher.stdin is not None
    watcher.kill()
    watcher.wait()
    watcher.stdin.close()

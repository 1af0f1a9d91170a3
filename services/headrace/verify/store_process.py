"""A store node as a child process that can be killed and started again over the same arena."""

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import asdict
from types import TracebackType
from typing import Self

from headrace.blocks.host_arena import remove_arena
from headrace.config import NetworkSettings, StoreSettings
from headrace.core.errors import StoreUnavailable

# Importing, opening the arena and checking what it holds: seconds, on a machine that is busy with other things too.
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0


class StoreProcess:
    """One node. Leaving the context ends the process and removes the arena's file, whatever happened."""

    def __init__(self, settings: StoreSettings, *, redis_url: str, network: NetworkSettings | None = None) -> None:
        assert settings.node_id, "a name of its own, so that no other node's arena is touched"
        self._settings = settings
        self._network = network or NetworkSettings()
        self._redis_url = redis_url
        self._process: subprocess.Popen[bytes] | None = None
        self.incarnation = 0

    def start(self) -> None:
        """Start the process and wait until the node serves. Raises StoreUnavailable with its last words."""
        settings = self._settings
        arguments = [
            *("--redis-url", self._redis_url),
            *("--node-id", settings.node_id),
            *("--arena-dir", settings.arena_dir),
            *("--arena-mb", str(settings.arena_mb)),
        ]
        for name, path in asdict(self._network).items():
            if name.endswith("_file") and path:
                arguments += [f"--{name.replace('_', '-')}", path]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headrace.store.service", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")},
        )
        self.incarnation = int(json.loads(self._first_line(self._process))["incarnation"])

    def _first_line(self, process: "subprocess.Popen[bytes]") -> str:
        """The node's record, which it prints when it is ready."""
        assert process.stdout is not None
        give_up_at = time.monotonic() + START_TIMEOUT_S
        line = b""
        while not line.endswith(b"\n"):
            left_s = give_up_at - time.monotonic()
            if left_s <= 0 or not select.select([process.stdout], [], [], left_s)[0]:
                raise StoreUnavailable(self._settings.node_id, f"it was not ready within {START_TIMEOUT_S:.0f} s")
            part = os.read(process.stdout.fileno(), 4_096)
            if not part:
                raise StoreUnavailable(self._settings.node_id, f"its process ended with code {process.wait()}")
            line += part
        return line.decode()

    def kill(self) -> None:
        """SIGKILL: no clean-up of any kind happens in the process. The arena's file stays."""
        assert self._process is not None
        self._process.kill()
        self._reap(self._process)

    def _reap(self, process: "subprocess.Popen[bytes]") -> None:
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
        if self._process is not None:
            self._reap(self._process)
        remove_arena(self._settings.arena_dir, self._settings.node_id)

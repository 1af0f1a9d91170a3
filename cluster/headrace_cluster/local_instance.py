"""One running system on this machine: what is known of it, and which processes and files are its own.

Owns `state.json` and the mark by which processes are recognised: every process of an instance inherits
`HEADRACE_INSTANCE=<id>` in its environment, whoever started it (our supervisor, Ray, Serve), so that none is missed and
no stranger's process is touched. Knows neither how a system is started nor what it serves.
"""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.blocks.disk_tier import remove_disk
from headrace.blocks.host_arena import budgets_path
from headrace.core.errors import ConfigInvalid

INSTANCE_VARIABLE = "HEADRACE_INSTANCE"
STATE_FILE = "state.json"
CONFIG_FILE = "config.json"
PROGRESS_FILE = "progress.log"
LOG_FILE = "supervisor.log"

# A killed process is gone within milliseconds; on a loaded machine the kernel takes longer to free a large arena.
KILL_WAIT_S = 10.0

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class InstanceState:
    """What `state.json` holds. `ready` is False while the system is starting or stopping."""

    instance_id: str
    pid: int  # the supervisor's
    ready: bool
    http_url: str
    grpc_target: str
    redis_url: str
    arena_path: str
    ray_temp_dir: str
    started: tuple[str, ...]  # parts in the order of their start
    # How a caller on this machine checks the gateway's certificate, and what it shows; "" for plain text.
    tls_ca_file: str = ""
    tls_cert_file: str = ""
    tls_key_file: str = ""
    disk_path: str = ""  # of the store node's disk tier; "" where there is none, or it outlives the instance

    @property
    def client_tls(self) -> dict[str, str]:
        """The files of TLS as a client takes them."""
        return {
            "tls_ca_file": self.tls_ca_file,
            "tls_cert_file": self.tls_cert_file,
            "tls_key_file": self.tls_key_file,
        }


def read_state(state_dir: Path) -> InstanceState | None:
    """The recorded instance, dead or alive; None when there is none. Raises ConfigInvalid for a record that is no
    build's like this one."""
    try:
        fields = json.loads((state_dir / STATE_FILE).read_text(encoding="utf-8"))
        return InstanceState(**{**fields, "started": tuple(fields["started"])})
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:  # half of one after a power cut, or a newer build's
        raise ConfigInvalid(
            "state_dir",
            f"{state_dir / STATE_FILE} is not understood ({error}); delete it if what it names is gone",
        ) from error


def write_state(state_dir: Path, state: InstanceState) -> None:
    """Replace the record in one step, so that a reader never sees half of it."""
    scratch = state_dir / (STATE_FILE + ".new")
    write_private(scratch, json.dumps(asdict(state), indent=1) + "\n")
    scratch.replace(state_dir / STATE_FILE)


def write_private(path: Path, text: str) -> None:
    """Write a file that this user alone may read: settings hold a Redis' password."""
    path.unlink(missing_ok=True)  # one from before keeps its mode
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")


def is_alive(state: InstanceState) -> bool:
    """Whether the instance's supervisor runs; its id may by now belong to a stranger, which the mark tells."""
    return _carries_mark(state.pid, state.instance_id)


def processes_of(instance_id: str) -> dict[int, str]:
    """Every live process of the instance: id -> command line, cut to 80 characters."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _carries_mark(int(entry.name), instance_id):
            found[int(entry.name)] = _command_line(int(entry.name))
    found.pop(os.getpid(), None)
    return found


def kill_processes_of(instance_id: str, report: Report) -> None:
    """SIGKILL what is left of the instance, until nothing is. Raises TimeoutError naming what cannot be killed."""
    give_up_at = time.monotonic() + KILL_WAIT_S
    told: set[int] = set()
    while left := processes_of(instance_id):
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"these processes do not end: {left}")
        for pid, command in left.items():
            if pid not in told:
                report(f"killed process {pid}: {command}")
                told.add(pid)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)


def remove_files_of(state: InstanceState, report: Report) -> None:
    """Remove the arena with its budgets, the disk tier and Ray's session directory. Idempotent."""
    if state.arena_path and Path(state.arena_path).exists():
        budgets_path(Path(state.arena_path)).unlink(missing_ok=True)
        Path(state.arena_path).unlink()
        report(f"removed {state.arena_path}")
    if state.disk_path and remove_disk(Path(state.disk_path)):
        report(f"removed {state.disk_path}")
    if state.ray_temp_dir and Path(state.ray_temp_dir).exists():
        shutil.rmtree(state.ray_temp_dir)
        report(f"removed {state.ray_temp_dir}")


def _carries_mark(pid: int, instance_id: str) -> bool:
    """A zombie has no environment any more and does not count: it is dead."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    return f"{INSTANCE_VARIABLE}={instance_id}".encode() in environment.split(b"\0")


def _command_line(pid: int) -> str:
    """Program name and arguments, without the program's directory."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return " ".join(" ".join([Path(words[0]).name, *words[1:]]).split())[:80]

"""Start and stop a whole system on one machine.

Owns what `headrace up` and `headrace down` do from outside: start a detached supervisor (`supervisor.py`), follow its
progress, and make sure that nothing is left when it ends, fails or is killed. One instance per state directory.
"""

import fcntl
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from headrace.compose import check_drafter, check_tenants, prepare_model
from headrace.config import Config, config_to_flat
from headrace.core.errors import HeadraceError
from headrace.core.limits import GRPC_MESSAGE_BYTES_MAX
from headrace.engine.drafter import NGRAM, OFF
from headrace.telemetry.tracing import check_tracing
from headrace.transfer.check_network import check_network, check_own_calls, name_to_call
from headrace_cluster.local_instance import (
    CONFIG_FILE,
    INSTANCE_VARIABLE,
    LOG_FILE,
    PROGRESS_FILE,
    STATE_FILE,
    InstanceState,
    Report,
    is_alive,
    kill_processes_of,
    read_state,
    remove_files_of,
    write_private,
)
from headrace_cluster.proxy_http import CALLBACK, CALLBACK_VARIABLE, MESSAGE_BYTES_VARIABLE

# The supervisor has its own bound for each part it starts (`supervisor.py`); this is above their sum.
START_TIMEOUT_S = 900.0
# Streams under way get 10 s of grace, then Serve, the store node, Ray and the index take a few seconds each.
STOP_TIMEOUT_S = 60.0
# Its memory is gone when this is waited for; the kernel needs milliseconds for the rest.
REAP_TIMEOUT_S = 5.0
POLL_S = 0.1


class LaunchFailed(HeadraceError):
    """The system did not come up, or one is up already; the message says why."""


def launch_local(config: Config, *, report: Report) -> InstanceState:
    """Start a system and return when it serves. Raises LaunchFailed with the cause; then nothing is left running.

    `report` gets a line for each step. Ctrl-C (or any exception from `report`) ends what was started.
    """
    config = _with_absolute_paths(config)
    state_dir = config.cluster.state_path.resolve()
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _only_one(state_dir):
        running = read_state(state_dir)
        if running is not None and is_alive(running):
            raise LaunchFailed(f"a system is up already at {running.http_url}; end it first (headrace down)")
        _clean_up(state_dir, report)
        check_network(config, front_door=config.gateway.http_host)
        name_to_call(config, config.gateway.http_host)
        check_own_calls(config)
        check_tenants(config.gateway)
        check_tracing(config.telemetry.otlp_endpoint)
        check_drafter(config.model, config.engine)
        prepare_model(config.model, report=report)
        instance_id = secrets.token_hex(4)
        write_private(state_dir / CONFIG_FILE, json.dumps(config_to_flat(config)))
        write_private(state_dir / PROGRESS_FILE, "")
        report(f"starting; all parts log to {state_dir / LOG_FILE}")
        supervisor = _spawn_supervisor(state_dir, instance_id)
        try:
            return _follow(supervisor, state_dir, report)
        except BaseException:
            _stop_supervisor(supervisor.pid, lambda: supervisor.poll() is None)
            kill_processes_of(instance_id, report)
            _clean_up(state_dir, report)
            raise


def _with_absolute_paths(config: Config) -> Config:
    """Gateways read the tenants file, workers the draft model, and all the TLS files, in processes with other working
    directories."""
    named = {key: path for key, path in asdict(config.network).items() if key.endswith("_file") and path}
    absolute: dict[str, Any] = {key: str(Path(path).expanduser().absolute()) for key, path in named.items()}
    config = replace(config, network=replace(config.network, **absolute))
    if config.gateway.tenants_file:
        path = str(Path(config.gateway.tenants_file).expanduser().resolve())
        config = replace(config, gateway=replace(config.gateway, tenants_file=path))
    draft = Path(config.engine.speculation).expanduser()
    if config.engine.speculation not in (OFF, NGRAM) and draft.is_dir():
        config = replace(config, engine=replace(config.engine, speculation=str(draft.resolve())))
    return config


def down(state_dir: Path, *, report: Report) -> bool:
    """End the instance of this state directory and verify that nothing of it is left. True when there was one."""
    state_dir = state_dir.expanduser().resolve()
    if not state_dir.exists():
        return False
    with _only_one(state_dir):
        return _clean_up(state_dir, report)


def _clean_up(state_dir: Path, report: Report) -> bool:
    state = read_state(state_dir)
    if state is None:
        return False
    if is_alive(state):
        report(f"stopping {', '.join(reversed(state.started)) or 'what was started'}")
        _stop_supervisor(state.pid, lambda: is_alive(state))
    kill_processes_of(state.instance_id, report)
    _reap(state.pid)
    remove_files_of(state, report)
    (state_dir / STATE_FILE).unlink(missing_ok=True)
    return True


def _spawn_supervisor(state_dir: Path, instance_id: str) -> "subprocess.Popen[bytes]":
    """Detached: its own session, so that Ctrl-C in this terminal and its closing do not reach the system."""
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    environment |= {
        INSTANCE_VARIABLE: instance_id,
        "PYTHONUNBUFFERED": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's processes know each other by this token, which nobody else has; without it Ray would write one to the
        # user's home.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # Serve replaces a proxy after three failed checks. At its own ten seconds apiece the front door of a system
        # on one machine would be shut for half a minute; a check costs a call of 1 ms.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
        CALLBACK_VARIABLE: CALLBACK,
        MESSAGE_BYTES_VARIABLE: str(GRPC_MESSAGE_BYTES_MAX),
    }
    write_private(state_dir / LOG_FILE, "")
    with open(state_dir / LOG_FILE, "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "headrace_cluster.supervisor", str(state_dir), instance_id],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )


def _follow(supervisor: "subprocess.Popen[bytes]", state_dir: Path, report: Report) -> InstanceState:
    """Pass progress on until the system is ready. The last line of a supervisor that gives up is the cause."""
    give_up_at = time.monotonic() + START_TIMEOUT_S
    last = "it printed nothing"
    with open(state_dir / PROGRESS_FILE, encoding="utf-8") as progress:
        while time.monotonic() < give_up_at:
            ended = supervisor.poll() is not None
            for line in progress:
                last = line.rstrip()
                report(last)
            state = read_state(state_dir)
            if state is not None and state.ready:
                return state
            if ended:
                raise LaunchFailed(f"the system did not start: {last} (log: {state_dir / LOG_FILE})")
            time.sleep(POLL_S)
    raise LaunchFailed(f"the system was not ready after {START_TIMEOUT_S:.0f} s: {last} (log: {state_dir / LOG_FILE})")


def _stop_supervisor(pid: int, runs: Callable[[], bool]) -> None:
    """SIGTERM, and wait until it is gone, for a bounded time."""
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    give_up_at = time.monotonic() + STOP_TIMEOUT_S
    while runs() and time.monotonic() < give_up_at:
        time.sleep(POLL_S)


def _reap(pid: int) -> None:
    """A supervisor that this very process started stays a zombie until it is waited for."""
    give_up_at = time.monotonic() + REAP_TIMEOUT_S
    try:
        while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < give_up_at:
            time.sleep(POLL_S / 10)
    except ChildProcessError:
        return


@contextmanager
def _only_one(state_dir: Path) -> Iterator[None]:
    """One start or stop at a time per state directory; the lock goes with its process."""
    with open(state_dir / "lock", "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LaunchFailed(f"another start or stop is under way in {state_dir}") from None
        yield

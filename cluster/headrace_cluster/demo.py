"""`headrace demo`: the point of the whole, shown on a system of this machine in one table.

Owns which system is asked, and how its parts are killed: with SIGKILL, as they are processes of this machine. What is
asked and how answers are judged is `ask_every_path.py`'s.
"""

import os
import signal
from collections.abc import Callable

from headrace.client import HeadraceClient
from headrace.client.admin_values import StoreNodeStatus, WorkerStatus
from headrace.config import Config
from headrace_cluster.ask_every_path import ask_every_path
from headrace_cluster.demo_report import DemoReport
from headrace_cluster.launch_local import launch_local
from headrace_cluster.local_instance import InstanceState, is_alive, read_state

Report = Callable[[str], None]


def demo(config: Config, *, report: Report) -> tuple[DemoReport, InstanceState]:
    """Start a system unless one runs, and ask by every path. Leaves the system up.

    Raises LaunchFailed and what `ask_every_path` does.
    """
    state = _running_system(config, report)
    api_key = os.environ.get("HEADRACE_API_KEY", "")
    with HeadraceClient(state.grpc_target, api_key=api_key, **state.client_tls) as client:
        return ask_every_path(client, kill=_kill, report=report), state


def _running_system(config: Config, report: Report) -> InstanceState:
    running = read_state(config.cluster.state_path)
    if running is not None and running.ready and is_alive(running):
        report(f"using the system that is up at {running.http_url}, with the settings that it has")
        return running
    return launch_local(config, report=report)


def _kill(part: WorkerStatus | StoreNodeStatus) -> None:
    os.kill(part.pid, signal.SIGKILL)

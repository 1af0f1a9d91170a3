"""The mark by which an instance's processes are found, and the record of it."""

import os
import subprocess
import sys
from pathlib import Path

from headrace_cluster.local_instance import (
    INSTANCE_VARIABLE,
    InstanceState,
    is_alive,
    kill_processes_of,
    processes_of,
    read_state,
    write_state,
)

SLEEPER = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"


def make_state(pid: int, instance_id: str) -> InstanceState:
    return InstanceState(
        instance_id=instance_id,
        pid=pid,
        ready=True,
        http_url="http://127.0.0.1:1",
        grpc_target="127.0.0.1:2",
        redis_url="redis://127.0.0.1:3/0",
        arena_path="/dev/shm/none",
        ray_temp_dir="/tmp/none",
        started=("Ray", "Serve"),
    )


def test_every_descendant_is_found_and_killed_and_no_stranger_is():
    """Fails when a grandchild in another session is missed, or an id that merely begins alike is taken for ours."""
    ours, other = "unit-a", "unit-ab"
    commands = [(ours, SLEEPER), (other, SLEEPER)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], env={**os.environ, INSTANCE_VARIABLE: mark}, start_new_session=True
        )
        for mark, code in commands
    ]
    try:
        while len(processes_of(ours)) < 2 or len(processes_of(other)) < 2:
            assert all(process.poll() is None for process in processes)
        said: list[str] = []
        kill_processes_of(ours, said.append)
        assert len(said) == 2
        assert not processes_of(ours)
        assert len(processes_of(other)) == 2
    finally:
        kill_processes_of(other, print)
        for process in processes:
            process.wait(10)


def test_the_record_is_read_as_it_was_written_and_a_stranger_with_the_pid_is_not_taken_for_it(tmp_path: Path):
    state = make_state(os.getpid(), "unit-c")
    assert read_state(tmp_path) is None
    write_state(tmp_path, state)
    assert read_state(tmp_path) == state
    assert not is_alive(state)

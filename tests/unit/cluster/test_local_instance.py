"""The mark by which an instance's processes are found, and the record of it."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.blocks.disk_tier import open_disk
from headrace.blocks.host_arena import budgets_path
from headrace.compose import own_disk_path
from headrace.config import StoreSettings
from headrace.core.errors import ConfigInvalid
from headrace_cluster.local_instance import (
    INSTANCE_VARIABLE,
    InstanceState,
    is_alive,
    kill_processes_of,
    processes_of,
    read_state,
    remove_files_of,
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


@pytest.mark.parametrize("text", ["", "{", "[]", '{"instance_id": "a"}', '{"started": [], "of a newer build": 1}'])
def test_a_record_that_is_not_understood_is_named(tmp_path: Path, text: str):
    """Fails when `up` or `down` ends in a traceback after a power cut or a change of version."""
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(ConfigInvalid, match=r"state\.json is not understood"):
        read_state(tmp_path)


def test_after_a_hard_kill_nothing_of_the_store_node_is_left_but_strangers_files(tmp_path: Path):
    """Fails when `down` leaves a killed node's disk tier or budgets behind, or deletes what is not the node's."""
    arena, disk = tmp_path / "headrace-n1.arena", tmp_path / "headrace-n1.disk"
    budgets_path(arena).write_text("{}")
    arena.touch()
    open_disk(disk, 1 << 20).close()
    (disk / "segment-0000000000000001.blocks").write_bytes(b"blocks")
    (tmp_path / "notes.txt").touch()
    state = replace(make_state(1, "unit-d"), arena_path=str(arena), disk_path=str(disk))
    said: list[str] = []
    for _ in range(2):
        remove_files_of(state, said.append)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert said == [f"removed {arena}", f"removed {disk}"]


def test_a_disk_tier_whose_place_was_chosen_outlives_the_instance(tmp_path: Path):
    """Fails when `down` deletes a cache that an operator keeps for the next start."""
    assert (
        own_disk_path(StoreSettings(node_id="n1", disk_gb=1)) == Path.home() / ".cache/headrace/blocks/headrace-n1.disk"
    )
    assert own_disk_path(StoreSettings(node_id="n1", disk_gb=1, disk_dir=str(tmp_path))) is None
    assert own_disk_path(StoreSettings(node_id="n1", disk_gb=0)) is None

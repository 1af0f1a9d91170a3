"""The Serve config file, deployed and scaled on a Ray of its own: who goes, and what becomes of streams under way."""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace_cluster.local_instance import INSTANCE_VARIABLE, kill_processes_of

SCRIPT = Path(__file__).with_name("scale_on_ray.py")
TOKENS = 400


@pytest.fixture(scope="module")
def happened(valkey_url: str, tiny_model: Path) -> Iterator[dict]:
    """What the script says; nothing of it is left after."""
    instance_id = secrets.token_hex(4)
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | {
        INSTANCE_VARIABLE: instance_id,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    try:
        done = subprocess.run(
            [sys.executable, SCRIPT, valkey_url, str(tiny_model)],
            capture_output=True,
            text=True,
            env=environment,
            timeout=1_100,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3_000:]
        yield json.loads(done.stdout.splitlines()[-1])
    finally:
        kill_processes_of(instance_id, print)
        for left in Path("/dev/shm").glob("headrace-ray*"):
            left.unlink()


def test_of_three_workers_the_one_that_still_starts_goes(happened: dict):
    """Fails when a worker that serves is ended while another one, that serves nobody, is kept."""
    assert happened["while_starting"] == {"streams": [TOKENS] * 4}


def test_a_worker_that_is_scaled_in_loses_none_of_its_streams(happened: dict):
    """Fails when a worker ends with its streams under way, or calls go on to one that is ending."""
    assert happened["scale_in"] == {"streams": [TOKENS] * 4, "answers_after": 4}


def test_of_two_applications_behind_a_proxy_commands_reach_the_one_that_is_named(happened: dict, tiny_model: Path):
    """Fails when a command reaches the other model's application, or none without saying what to name."""
    reached = happened["beside_another"]
    assert reached["of_the_file"] == [tiny_model.name]
    assert reached["second"] == ["another-model"]
    for told in (reached["unnamed"], reached["unknown"]):
        assert "none of its applications" in told
        assert "`--application`" in told

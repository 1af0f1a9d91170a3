"""A system that cannot start says why, and leaves nothing behind."""

import shutil
import socket
from pathlib import Path

import pytest
from local_system import make_config

from headrace.core.errors import ConfigInvalid, ModelRefused
from headrace_cluster.launch_local import LaunchFailed, launch_local
from headrace_cluster.local_instance import read_state


def test_a_model_that_cannot_be_loaded_fails_the_start_with_its_own_error(tmp_path: Path, tiny_model: Path):
    """Fails when the worker's error is lost on the way, or the start is retried without end."""
    progress: list[str] = []
    no_weights = tmp_path / "no-weights-here"
    no_weights.mkdir()
    shutil.copy(tiny_model / "config.json", no_weights)
    config = make_config(no_weights, tmp_path / "state", prefill_workers=0, decode_workers=1)
    with pytest.raises(LaunchFailed, match="no-weights-here"):
        launch_local(config, report=progress.append)
    assert any(line.startswith("removed /tmp/headrace-") for line in progress)
    assert read_state(tmp_path / "state") is None


@pytest.mark.parametrize(
    ("config_json", "why"),
    [
        (None, "no such directory"),
        ("", "config.json cannot be used"),
        ('{"model_type": "mamba"}', "architecture mamba"),
    ],
)
def test_a_model_that_is_wrong_at_first_sight_is_refused_before_anything_starts(
    tmp_path: Path, config_json: str | None, why: str
):
    """Fails when a wrong path is told by the workers only, after Ray has started."""
    model, progress = tmp_path / "model", []
    if config_json is not None:
        model.mkdir()
        (model / "config.json").write_text(config_json)
    with pytest.raises(ModelRefused, match=why):
        launch_local(make_config(model, tmp_path / "state"), report=progress.append)
    assert progress == []
    assert read_state(tmp_path / "state") is None


def test_a_tenants_file_with_a_mistake_is_refused_before_anything_starts(tmp_path: Path):
    """Fails when the mistake is found by the gateways only, or lets everybody in."""
    config = make_config(tmp_path, tmp_path / "state", tenants_file=str(tmp_path / "none"), hash_algorithm="sha256")
    with pytest.raises(ConfigInvalid, match=r"tenants_file.*cannot be read"):
        launch_local(config, report=print)
    assert read_state(tmp_path / "state") is None


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"http_host": "0.0.0.0"}, r"http_host.*tenants_file"),
        ({"store_host": "192.0.2.77"}, r"store_host.*plain text"),
        ({"tls_cert_file": "/none/cert.pem", "tls_key_file": "/none/key.pem"}, r"tls_cert_file.*cannot be read"),
    ],
)
def test_a_system_that_would_let_strangers_in_is_refused_before_anything_starts(
    tmp_path: Path, settings: dict[str, str], told: str
):
    """Fails when a system listens beyond loopback without keys or TLS and nobody said that it may."""
    progress: list[str] = []
    with pytest.raises(ConfigInvalid, match=told):
        launch_local(make_config(tmp_path, tmp_path / "state", **settings), report=progress.append)
    assert progress == []
    assert read_state(tmp_path / "state") is None


def test_a_taken_port_that_was_asked_for_is_refused_by_name(tmp_path: Path, tiny_model: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchFailed, match=f"http_port.*{port} is taken"):
            launch_local(make_config(tiny_model, tmp_path / "state", http_port=port), report=print)
    assert read_state(tmp_path / "state") is None


def test_an_interrupted_start_ends_what_it_started(tmp_path: Path, tiny_model: Path):
    """Ctrl-C raises KeyboardInterrupt in the launcher; a `report` that raises it is the same from the inside."""
    lines: list[str] = []

    def interrupt_when_ray_runs(line: str) -> None:
        lines.append(line)
        if "started Ray" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch_local(make_config(tiny_model, tmp_path / "state"), report=interrupt_when_ray_runs)
    assert any("started Ray" in line for line in lines)
    assert read_state(tmp_path / "state") is None

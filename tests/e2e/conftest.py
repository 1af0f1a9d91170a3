"""One local system for all end-to-end tests: 2 gateways, 1 prefill and 2 decode workers on a tiny model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from local_system import LocalSystem, make_config
from tiny_model import make_tiny_model

from headrace.client.client import HeadraceClient
from headrace_cluster.launch_local import down, launch_local


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starting a system takes a minute where others compute, and the first test of each does that, too. What a system
    of many processes does on two cores depends on who else computes there: so those with a system of their own come
    first, before there is the one that all others share."""
    ours = [item for item in items if item.path.parent == Path(__file__).parent]
    for item in ours:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1_200))
        item.add_marker(pytest.mark.alone)
    in_order = iter(sorted(ours, key=lambda item: "system" in getattr(item, "fixturenames", ())))
    items[:] = [next(in_order) if item in ours else item for item in items]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture(scope="session")
def system(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSystem]:
    # `test_live_system` ends with its `down`: modules that use it have names that sort before.
    state_dir = tmp_path_factory.mktemp("state")
    progress: list[str] = []
    state = launch_local(make_config(tiny_model, state_dir, gateways=2), report=progress.append)
    client = HeadraceClient(state.grpc_target)
    yield LocalSystem(state=state, state_dir=state_dir, progress=progress, client=client)
    client.close()
    down(state_dir, report=print)

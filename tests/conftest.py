"""Servers that tests share: one real Valkey process for the whole run, and one cluster; and where tests are at home."""

import signal
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, settings
from restricted_redis import empty
from valkey_cluster import ValkeyCluster

from headrace.index.embedded_valkey import EmbeddedValkey
from headrace.torch_environment import set_torch_environment

# As in every process that computes, before a test module loads torch.
set_torch_environment()

# How long an example takes tells what else the machine does, not whether the code is right. The examples are the same
# in every run, so that a change is judged by itself; `pytest --hypothesis-profile=explore` looks for new ones.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("headrace", derandomize=True, **PATIENT)
settings.register_profile("explore", **PATIENT)
settings.load_profile("headrace")

# A shell starts what runs in its background with Ctrl-C ignored, and so would be all processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow ones come first where processes share the tests: the last file of all is then short, and none of them waits
    for the other's. Those that run one by one keep their order, which some of them rely on."""

    def waits(item: pytest.Item) -> bool:
        return item.get_closest_marker("slow") is None or item.get_closest_marker("alone") is not None

    items.sort(key=waits)


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A home of the run's own: whatever starts in a test remembers there what it has checked of a model, and keeps its
    state there."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[EmbeddedValkey]:
    """The run's one server. Do not stop, pause or kill it: start an EmbeddedValkey of your own for that."""
    with EmbeddedValkey() as server:
        yield server


@pytest.fixture(scope="session")
def valkey_url(valkey_server: EmbeddedValkey) -> str:
    """URL of the run's server, with whatever earlier tests left in it."""
    return valkey_server.url


@pytest.fixture
def empty_valkey_url(valkey_url: str) -> str:
    """URL of the run's server, emptied for this test."""
    address = urlsplit(valkey_url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(b"FLUSHALL\r\n")
        assert connection.recv(16) == b"+OK\r\n"
    return valkey_url


@pytest.fixture(scope="session")
def valkey_cluster() -> Iterator[ValkeyCluster]:
    """The run's one cluster of three primaries. Do not stop, pause or kill any, nor move slots: start a ValkeyCluster
    of your own for that."""
    with ValkeyCluster() as cluster:
        yield cluster


@pytest.fixture
def empty_cluster_url(valkey_cluster: ValkeyCluster) -> str:
    """URL of the run's cluster, emptied for this test."""
    empty(valkey_cluster.url)
    return valkey_cluster.url

"""Where the parts of one host serve their metrics, so that a monitor can name the port."""

import urllib.request
from collections.abc import Iterator

import pytest
from free_ports import free_ports

from headrace.core.errors import ConfigInvalid
from headrace.core.telemetry_limits import METRICS_PORTS
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.metrics_server import MetricsServer, other_metrics_ports, start_metrics_server


@pytest.fixture
def running() -> Iterator[list[MetricsServer]]:
    servers: list[MetricsServer] = []
    yield servers
    for server in servers:
        server.close()


def serve(running: list[MetricsServer], ports) -> MetricsServer:
    running.append(start_metrics_server(Metrics().registry, "127.0.0.1", ports))
    return running[-1]


def test_the_parts_of_a_host_take_the_first_free_ports_after_its_store_nodes(running):
    """Fails when the one worker of a pod is not at the port that a monitor names, or two parts collide."""
    first = free_ports(3)[0]
    assert serve(running, (first,)).port == first
    ports = [serve(running, other_metrics_ports(first)).port for _ in range(2)]
    assert ports[0] == first + 1
    assert first + 1 < ports[1] < first + METRICS_PORTS
    assert urllib.request.urlopen(f"http://127.0.0.1:{ports[1]}/metrics", timeout=60).status == 200


def test_a_port_that_is_taken_is_refused_by_the_settings_name_and_the_ports(running):
    """Fails when a second store node of a host starts without its metrics, or somewhere else."""
    taken = serve(running, (0,)).port
    with pytest.raises(ConfigInvalid, match=rf"metrics_port.*port {taken} of 127\.0\.0\.1"):
        start_metrics_server(Metrics().registry, "127.0.0.1", (taken,))
    with pytest.raises(ConfigInvalid, match=rf"any port of {taken}\.\.{taken}"):
        start_metrics_server(Metrics().registry, "127.0.0.1", (taken, taken))


def test_no_ports_are_named_without_a_first_one():
    """Fails when the parts of a system without the setting meet at a port of their own."""
    assert tuple(other_metrics_ports(0)) == (0,)
    assert len(other_metrics_ports(9_400)) == METRICS_PORTS - 1


@pytest.mark.parametrize("accepted", ["application/openmetrics-text;version=x", "text/plain;version=.", ";=;", "\xff"])
def test_metrics_are_told_whatever_their_reader_says_that_it_accepts(running, capfd, accepted: str):
    """Fails when a header of a stranger's is an error of ours, with a traceback in the log for each."""
    asked = urllib.request.Request(
        f"http://127.0.0.1:{serve(running, (0,)).port}/metrics", headers={"Accept": accepted}
    )
    with urllib.request.urlopen(asked, timeout=60) as page:
        assert b"headrace_cached_tokens_total" in page.read()
    assert "Traceback" not in capfd.readouterr().err

"""Metrics by HTTPS: the parts' certificate, renewed as elsewhere; and what a stranger at that port may cost."""

import socket
import ssl
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from certificates_kit import LOCAL, Pki

from headrace.admin.create_certificates import CertificatePaths, create_certificates
from headrace.config import NetworkSettings
from headrace.core.telemetry_limits import METRICS_CONNECTIONS_MAX
from headrace.telemetry.collectors import CertificateCollector
from headrace.telemetry.metrics import CERTIFICATE_ENDS, Metrics
from headrace.telemetry.metrics_server import MetricsServer, start_metrics_server
from headrace.transfer.https_context import metrics_context


@contextmanager
def served(paths: CertificatePaths | None, *, scrape_ms: int = 60_000) -> Iterator[MetricsServer]:
    network = NetworkSettings()
    if paths is not None:
        network = NetworkSettings(tls_cert_file=paths.cert_file, tls_key_file=paths.key_file, tls_ca_file=paths.ca_file)
    server = start_metrics_server(
        Metrics().registry, "127.0.0.1", context=metrics_context(network), scrape_ms=scrape_ms
    )
    try:
        yield server
    finally:
        server.close()


def scrape(server: MetricsServer, paths: CertificatePaths | None) -> bytes:
    """As Prometheus does: it knows the authority, and has no certificate."""
    context = None if paths is None else ssl.create_default_context(cafile=paths.ca_file)
    scheme = "http" if paths is None else "https"
    with urllib.request.urlopen(f"{scheme}://127.0.0.1:{server.port}/metrics", timeout=60, context=context) as page:
        return page.read()


@pytest.fixture(params=["plain text", "TLS"])
def paths(request: pytest.FixtureRequest, pki: Pki) -> CertificatePaths | None:
    return pki.good if request.param == "TLS" else None


def test_metrics_are_read_without_a_certificate_and_not_in_plain_text(pki: Pki):
    with served(pki.good) as server:
        assert b"headrace_cached_tokens_total" in scrape(server, pki.good)
        with pytest.raises(OSError):  # noqa: PT011 - how a connection ends that nobody answers differs
            scrape(server, None)
        with pytest.raises(OSError, match="certificate verify failed"):
            scrape(server, pki.stranger)


def test_a_renewed_certificate_is_shown_without_a_restart(own_pki: Pki):
    with served(own_pki.good) as server:
        before = ssl.get_server_certificate(("127.0.0.1", server.port), timeout=60)
        create_certificates(Path(own_pki.good.cert_file).parent, hosts=LOCAL, days=3)
        assert ssl.get_server_certificate(("127.0.0.1", server.port), timeout=60) != before
        assert b"headrace_cached_tokens_total" in scrape(server, own_pki.good)


def test_metrics_tell_when_the_certificate_in_force_ends(own_pki: Pki):
    """Fails when it is the first one's for ever, or when a set that is not taken is told of."""
    good = own_pki.good
    network = NetworkSettings(tls_cert_file=good.cert_file, tls_key_file=good.key_file, tls_ca_file=good.ca_file)
    context, metrics = metrics_context(network), Metrics()
    assert context is not None
    CertificateCollector(lambda: context.ends_unix_s, metrics=metrics)
    days = lambda: (metrics.registry.get_sample_value(CERTIFICATE_ENDS) - time.time()) / 86_400  # noqa: E731
    assert days() == pytest.approx(2, abs=0.1)
    create_certificates(Path(good.cert_file).parent, hosts=LOCAL, days=3)
    assert days() == pytest.approx(3, abs=0.1)
    create_certificates(Path(good.cert_file).parent, hosts=LOCAL, days=-1)
    assert days() == pytest.approx(3, abs=0.1), "an expired one is not taken"


def connect(server: MetricsServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def test_whoever_connects_and_says_nothing_holds_up_nobody(paths: CertificatePaths | None):
    """Fails when a handshake, or a head that does not come, is waited for where connections are accepted."""
    with served(paths) as server, connect(server):
        assert b"headrace_cached_tokens_total" in scrape(server, paths)


def test_connections_beyond_the_bound_are_closed_and_slow_ones_are_ended(paths: CertificatePaths | None):
    """Fails when each connection is a thread for as long as its client likes."""
    with served(paths, scrape_ms=200) as server, ExitStack() as open_ones:
        silent = [open_ones.enter_context(connect(server)) for _ in range(METRICS_CONNECTIONS_MAX)]
        with connect(server) as one_more:
            assert closed(one_more)
        assert all(map(closed, silent))
    with served(paths) as server:
        assert b"headrace_cached_tokens_total" in scrape(server, paths)


def closed(connection: socket.socket) -> bool:
    """Whether the other side ends it; waits for that."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True

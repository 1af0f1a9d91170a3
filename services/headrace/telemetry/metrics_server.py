"""The HTTP endpoint of one process's metrics, served from threads of its own: a busy event loop is to be seen, too.

Owns the ports and what a connection may cost, since anybody may connect who reaches the port: no key is asked for, and
under TLS no certificate. Knows no metric.
"""

import contextlib
import logging
import socket
import ssl
import sys
import time
from collections.abc import Sequence
from socketserver import ThreadingMixIn
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import choose_encoder

from headrace.core.errors import ConfigInvalid
from headrace.core.telemetry_limits import METRICS_CONNECTIONS_MAX, METRICS_PORTS, METRICS_SCRAPE_MS

_log = logging.getLogger(__name__)


def start_metrics_server(
    registry: CollectorRegistry,
    host: str,
    ports: Sequence[int] = (0,),
    *,
    context: ssl.SSLContext | None = None,
    scrape_ms: int = METRICS_SCRAPE_MS,
) -> "MetricsServer":
    """Serve `registry` on `host` at the first of these ports that is free; 0 is any free one, which `.port` names.

    context: what makes it HTTPS. scrape_ms: how long a connection may last. Raises ConfigInvalid where all ports are
    taken, or the host is not this machine's.
    """
    why = ""
    for port in ports:
        try:
            server = _Server(host, port, registry=registry, context=context, scrape_s=scrape_ms / 1_000)
        except OSError as error:
            why = str(error.strerror or error)
            continue
        return MetricsServer(server)
    named = f"port {ports[0]}" if len(ports) == 1 else f"any port of {ports[0]}..{ports[-1]}"
    raise ConfigInvalid("metrics_port", f"cannot listen on {named} of {host} ({why}); choose another, or 0 for any")


def other_metrics_ports(metrics_port: int) -> Sequence[int]:
    """Where workers and gateways serve theirs: a store node has the port of the setting itself, so that a monitor can
    name it; the one worker of a pod has the next."""
    if metrics_port == 0:
        return (0,)
    return range(metrics_port + 1, metrics_port + METRICS_PORTS)


class MetricsServer:
    """A running endpoint: `http://host:port/metrics`, or https."""

    def __init__(self, server: "_Server") -> None:
        self._server = server
        self._thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._server.server_port

    def close(self) -> None:
        """Stop serving, free the port, join the thread. Idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


def _accepting_anything(app: Any) -> Any:
    """The same WSGI app. prometheus_client 0.26 raises for an `Accept` whose version is no number, and each such
    request would be an error of ours with a traceback: it is answered as if it said nothing."""

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        try:
            choose_encoder(environ.get("HTTP_ACCEPT", ""))
        except (TypeError, ValueError):
            environ = {**environ, "HTTP_ACCEPT": ""}
        return app(environ, start_response)

    return answer


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *_: Any) -> None:
        """Scrapes are not logged."""


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, the handshake in it too: whoever connects and says nothing holds up nobody."""

    daemon_threads = True

    def __init__(
        self, host: str, port: int, *, registry: CollectorRegistry, context: ssl.SSLContext | None, scrape_s: float
    ) -> None:
        self.address_family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self._context = context
        self._scrape_s = scrape_s
        self._open: dict[socket.socket, tuple[float, socket.socket]] = {}  # as accepted: since when, and as spoken by
        super().__init__((str(address[0]), port), _Handler)
        self.set_app(_accepting_anything(make_wsgi_app(registry)))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin to serve a connection, unless there are too many."""
        if len(self._open) >= METRICS_CONNECTIONS_MAX:
            self.shutdown_request(request)
            return
        self._open[request] = (time.monotonic(), request)
        super().process_request(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection, in its thread."""
        if self._context is None:
            super().finish_request(request, client_address)
            return
        with self._context.wrap_socket(request, server_side=True, do_handshake_on_connect=False) as spoken:
            self._open[request] = (self._open[request][0], spoken)
            spoken.do_handshake()
            super().finish_request(spoken, client_address)

    def shutdown_request(self, request: Any) -> None:
        """As ever, and the connection is over."""
        self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called twice a second: end what takes too long, however busily."""
        for since_s, spoken in list(self._open.values()):
            if time.monotonic() - since_s > self._scrape_s:
                with contextlib.suppress(OSError):  # it may just have ended by itself
                    socket.socket.shutdown(spoken, socket.SHUT_RDWR)  # the thread that serves it sees its end

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks, or whose TLS does, is its own business."""
        if not isinstance(sys.exception(), OSError):
            _log.exception("metrics could not be served")

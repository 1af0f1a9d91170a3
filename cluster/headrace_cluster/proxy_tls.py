"""TLS of Serve's proxies: HTTPS whose certificate is renewed without a restart, and a gRPC API that speaks TLS at all.

Serve 2.60 reads the files of its `http_options` (`ssl_certfile`, `ssl_keyfile`, `ssl_ca_certs`) once, asks no client
for a certificate whatever `ssl_ca_certs` says, and opens its gRPC port in plain text on every interface. Here both
listen where `http_options.host` says and go by the same three files. Runs inside the proxies: Serve's own seam for the
gRPC port and uvicorn's maker of TLS contexts are replaced before either server is made.
"""

import logging
import weakref
from collections.abc import Callable
from typing import Any

import ray
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.config import HTTPOptions

from headrace.core.errors import ConfigInvalid
from headrace.transfer.channels import bind_server
from headrace.transfer.https_context import HttpsContext
from headrace.transfer.tls_files import Tls, TlsFiles

_log = logging.getLogger(__name__)

EVERY_INTERFACE = ("0.0.0.0", "::", "")
# The controller answers between two steps of its loop, each of which takes milliseconds.
CONTROLLER_TIMEOUT_S = 30.0

# Servers whose port was opened here, so that one which Serve opened by itself is known for it.
_opened: "weakref.WeakSet[Any]" = weakref.WeakSet()


def set_up_tls(count_refused: Callable[[str], None], *, shown: Callable[[float], None] | None = None) -> None:
    """Have this process's servers made as told above. count_refused: called with the reason at each HTTPS connection
    whose handshake failed (`https_context.py:REASONS`). shown: called at each with when its certificate ends."""
    import uvicorn.config
    from ray.serve._private import default_impl

    def https_context(keyfile: Any, certfile: Any, **others: Any) -> HttpsContext:
        files = _files(HTTPOptions(ssl_keyfile=keyfile, ssl_certfile=certfile, ssl_ca_certs=others.get("ca_certs")))
        return HttpsContext(Tls(files), refused=count_refused, shown=shown)

    uvicorn.config.create_ssl_context = https_context  # type: ignore[assignment]
    default_impl.add_grpc_address = open_grpc_port  # type: ignore[assignment]


def open_grpc_port(server: Any, address: str) -> None:
    """Instead of Serve's `add_grpc_address`: where the HTTP API listens, and with its certificate."""
    options = serve_http_options()
    assert options is not None, "a proxy without a controller"
    listen_on(server, options, port=int(address.rpartition(":")[2]))


def listen_on(server: Any, options: HTTPOptions, *, port: int) -> int:
    """Open the gRPC port by Serve's HTTP options; the port. Raises ConfigInvalid, RuntimeError."""
    host = "[::]" if options.host in EVERY_INTERFACE else options.host
    tls = Tls(_files(options)) if options.ssl_certfile else None
    opened = bind_server(server, f"{host}:{port}", tls=tls)
    _opened.add(server)
    return opened


def check_opened_here(server: Any) -> None:
    """Refuse a server that Serve opened by itself, on every interface and in plain text, while its HTTP API is to have
    less than that. Raises ConfigInvalid."""
    options = serve_http_options() if ray.is_initialized() and server not in _opened else None
    if options is not None and (options.ssl_certfile or options.host not in EVERY_INTERFACE):
        raise ConfigInvalid(
            "tls_cert_file" if options.ssl_certfile else "http_host",
            "Serve's proxies would serve gRPC in plain text on every interface: set "
            "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=headrace_cluster.proxy_http.middlewares in the environment of "
            "every Ray node",
        )


def serve_http_options() -> HTTPOptions | None:
    """How the HTTP API is served; None where no Serve runs."""
    if not ray.is_initialized():
        return None
    try:
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return None
    options: Any = ray.get(controller.get_http_config.remote(), timeout=CONTROLLER_TIMEOUT_S)
    return options


def _files(options: HTTPOptions) -> TlsFiles:
    return TlsFiles(
        cert_file=options.ssl_certfile or "",
        key_file=options.ssl_keyfile or "",
        ca_file=options.ssl_ca_certs or "",
        ca_setting="tls_client_ca_file",
    )

"""Which gateway a command talks to: `--address`, HEADRACE_ADDRESS, the local system's own, or the default port; who it
says it is: `--api-key` or HEADRACE_API_KEY, which nothing here prints; which of several applications behind one Serve
proxy it means: `--application` or HEADRACE_APPLICATION; and the files of TLS, under their settings' names:
`--tls-ca-file`, HEADRACE_TLS_CA_FILE, or what the local system says of itself."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import click

from headrace.client import Access, HeadraceClient
from headrace.config import load_config

HOST_AND_PORT = re.compile(r".+:\d{1,5}")
ADDRESS_VARIABLE = "HEADRACE_ADDRESS"
API_KEY_VARIABLE = "HEADRACE_API_KEY"
APPLICATION_VARIABLE = "HEADRACE_APPLICATION"
ACCESS_META = "headrace.access"
TLS_SETTINGS = {
    "tls_ca_file": "Authorities (PEM) of which the gateway's certificate must be; this makes it TLS.",
    "tls_cert_file": "Certificate (PEM) to show to a gateway that asks for one.",
    "tls_key_file": "Private key (PEM) of that certificate.",
}


class GatewayAddress(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """`HOST:PORT` of a gateway's gRPC API."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Take it, or fail where no connection could come of it, which gRPC would tell as a gateway that is down."""
        address = str(value)
        if not HOST_AND_PORT.fullmatch(address) or address.startswith(("http://", "https://")):
            self.fail(
                f"{address!r} is not HOST:PORT, as 127.0.0.1:9000 (of the gRPC API, not the HTTP one)", param, ctx
            )
        return address


def address_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--address`, which the command gets resolved, and what else a client takes (`Access`), which `connect` finds
    by itself."""
    for name, text in reversed(TLS_SETTINGS.items()):
        command = click.option(
            f"--{name.replace('_', '-')}",
            name,
            envvar=f"HEADRACE_{name.upper()}",
            expose_value=False,
            callback=_remember,
            metavar="FILE",
            help=text,
        )(command)
    command = click.option(
        "--api-key",
        envvar=API_KEY_VARIABLE,
        expose_value=False,
        callback=_remember,
        metavar="KEY",
        help=f"API key, where there are tenants. Better set {API_KEY_VARIABLE}: other users see a command line.",
    )(command)
    command = click.option(
        "--application",
        envvar=APPLICATION_VARIABLE,
        expose_value=False,
        callback=_remember,
        metavar="NAME",
        help="Application of Ray Serve that is meant, where its proxy serves several.",
    )(command)
    return click.option(
        "--address",
        envvar=ADDRESS_VARIABLE,
        type=GatewayAddress(),
        callback=_resolve_address,
        metavar="HOST:PORT",
        help="gRPC address of the gateway. Default: the local system's, else the grpc_port setting on 127.0.0.1.",
    )(command)


def _remember(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
    given = (value or "").strip()
    if given:
        ctx.meta.setdefault(ACCESS_META, {})[parameter.name] = given


def _resolve_address(ctx: click.Context, _: click.Parameter, value: str | None) -> str:
    """The address that was named, else the local system's, which also says which files its TLS goes by."""
    if value:
        return value
    config = load_config()
    state = ready_state(config.cluster.state_path)
    for name in TLS_SETTINGS:
        if state.get(name):
            ctx.meta.setdefault(ACCESS_META, {}).setdefault(name, str(state[name]))
    return str(state.get("grpc_target") or "") or f"127.0.0.1:{config.gateway.grpc_port}"


def ready_state(directory: Path) -> dict[str, Any]:
    """What the local system of that directory says of itself. Empty when none runs from there, or its file is half
    written: then there is nothing to talk to yet."""
    try:
        state = json.loads((directory / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) and state.get("ready") else {}


def connect(address: str) -> HeadraceClient:
    """A client of that gateway, with the command's access to it; use it as a context manager."""
    # gRPC's own lines about a handshake that failed would only be in the way of the error that says it better.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    return HeadraceClient(address, **access_of(click.get_current_context()))


def access_of(context: click.Context) -> Access:
    """API key, application and files of TLS that the command was given."""
    return cast(Access, context.meta.get(ACCESS_META, {}))

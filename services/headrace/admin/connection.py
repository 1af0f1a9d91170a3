"""Which gateway a command talks to: `--address`, HEADRACE_ADDRESS, the local system's own, or the default port; and
who it says it is: `--api-key` or HEADRACE_API_KEY, which nothing here prints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from headrace.client import HeadraceClient
from headrace.config import load_config

ADDRESS_VARIABLE = "HEADRACE_ADDRESS"
API_KEY_VARIABLE = "HEADRACE_API_KEY"
API_KEY_META = "headrace.api_key"


def address_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--address`, which the command gets resolved, and `--api-key`, which `connect` finds by itself."""
    command = click.option(
        "--api-key",
        envvar=API_KEY_VARIABLE,
        expose_value=False,
        callback=_remember_api_key,
        metavar="KEY",
        help=f"API key, where there are tenants. Better set {API_KEY_VARIABLE}: other users see a command line.",
    )(command)
    return click.option(
        "--address",
        envvar=ADDRESS_VARIABLE,
        callback=lambda _ctx, _param, value: value or default_address(),
        metavar="HOST:PORT",
        help="gRPC address of the gateway. Default: the local system's, else the grpc_port setting on 127.0.0.1.",
    )(command)


def _remember_api_key(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
    ctx.meta[API_KEY_META] = (value or "").strip()


def default_address() -> str:
    """The address in the running local system's state file, or the configured port."""
    config = load_config()
    return _address_in(state_directory(config.cluster.state_dir)) or f"127.0.0.1:{config.gateway.grpc_port}"


def state_directory(setting: str) -> Path:
    """Where a local system keeps its state; the `state_dir` setting, "" for its default."""
    return Path(setting).expanduser() if setting else Path.home() / ".local" / "state" / "headrace"


def _address_in(directory: Path) -> str:
    """ "" when no system runs from there, or its file is half written: then there is nothing to talk to yet."""
    try:
        state = json.loads((directory / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(state.get("grpc_target") or "") if isinstance(state, dict) and state.get("ready") else ""


def connect(address: str) -> HeadraceClient:
    """A client of that gateway, with the command's API key; use it as a context manager."""
    return HeadraceClient(address, api_key=click.get_current_context().meta.get(API_KEY_META, ""))

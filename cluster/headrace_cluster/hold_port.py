"""Ports of a local system, held from the moment that they are chosen until it ends.

Serve's proxies listen seconds after that, and again whenever one dies; meanwhile nobody else may be given the port.
"""

import socket
from contextlib import suppress

from headrace.config import GatewaySettings
from headrace.core.errors import ConfigInvalid

# Ports tried after a default one that is taken.
PORTS_TRIED = 50


def hold_port(key: str, host: str, wanted: int) -> socket.socket:
    """The wanted port; another one when it was left to us (0) or is a default that is taken. Raises ConfigInvalid."""
    if wanted == 0:
        return hold_free_port(host)
    is_default = wanted == getattr(GatewaySettings(), key)
    for port in range(wanted, wanted + (PORTS_TRIED if is_default else 1)):
        with suppress(OSError):
            return hold_free_port(host, port)
    if is_default:
        raise ConfigInvalid(key, f"ports {wanted}..{wanted + PORTS_TRIED - 1} are taken; choose another or 0")
    raise ConfigInvalid(key, f"port {wanted} is taken; choose another or 0 for any free one")


def hold_free_port(host: str, port: int = 0) -> socket.socket:
    """This port, or any free one (0), which nobody else gets while it is open. Serve's proxies share it, as they set
    SO_REUSEPORT, too; without listening this takes none of their connections. Raises OSError when it is taken."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        try:
            held.bind((host, port))  # without sharing yet: of two that come at the same moment one gets it
        except OSError:
            if port == 0 or not can_bind(host, port):
                raise
            # Nobody has it, but connections of an earlier proxy are still ending there. Who shares it may bind.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind((host, port))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError:
        held.close()
        raise
    return held


def can_bind(host: str, port: int) -> bool:
    """Whether the port is free on that address ("" for all of them)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True

"""gRPC channels and servers of Headrace: one set of options for both ends, and TLS where it is set. There is no other
way to open one.

Owns message size, keepalive and reconnect settings. Both ends get the same sizes and compatible pings: a server that
allows fewer pings than its clients send drops them ("too many pings"), and a limit set on one side only fails on the
other. Knows nothing of what is sent.
"""

from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from headrace.core.front_door_limits import (
    GRPC_CALLS_OF_CONNECTION_MAX,
    GRPC_CONNECTION_AGE_MS,
    GRPC_CONNECTION_IDLE_MS,
    GRPC_CONNECTIONS_MAX,
    HTTP_HEAD_TIMEOUT_MS,
)
from headrace.core.limits import GRPC_MESSAGE_BYTES_MAX, REQUEST_TIMEOUT_MS_MAX, STORE_RPCS_MAX
from headrace.transfer.message_memory import keep_message_memory
from headrace.transfer.renewed_channel import RenewedBlockingChannel, RenewedChannel
from headrace.transfer.tls_files import Tls, TlsMaterial
from headrace.wire.abort_call import Tell, say_nothing_of_undelivered, unheard
from headrace.wire.refuse_undecodable import UndecodableRefused

Options = Sequence[tuple[str, Any]]

_KEEPALIVE_MS = 20_000
_KEEPALIVE_TIMEOUT_MS = 5_000
_COMMON_OPTIONS = (
    ("grpc.max_send_message_length", GRPC_MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", GRPC_MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_frame_size", 4 * 1024 * 1024),  # a payload message in one frame instead of a hundred: 20 % faster
)
_CHANNEL_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.enable_retries", 0),  # a retry is a new attempt with its own budget, never hidden in the transport
    ("grpc.initial_reconnect_backoff_ms", 50),  # a restarted node is found again at once
    # gRPC's name for how long one attempt to connect may take: two round trips to a far or a busy host.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
)
_SERVER_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
    # A stalled event loop can deliver two pings at once; that is not worth a connection with payloads under way.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # two nodes on one port would share its calls; the second must fail to bind
)
# What a stranger's connections may cost, for servers that strangers reach (`core/front_door_limits.py`).
FRONT_DOOR_OPTIONS: Options = (
    ("grpc.max_allowed_incoming_connections", GRPC_CONNECTIONS_MAX),
    ("grpc.max_concurrent_streams", GRPC_CALLS_OF_CONNECTION_MAX),
    ("grpc.server_handshake_timeout_ms", HTTP_HEAD_TIMEOUT_MS),  # of TLS, and until HTTP/2 begins
    ("grpc.max_connection_idle_ms", GRPC_CONNECTION_IDLE_MS),
    ("grpc.max_connection_age_ms", GRPC_CONNECTION_AGE_MS),
    ("grpc.max_connection_age_grace_ms", REQUEST_TIMEOUT_MS_MAX),
)


class Channels:
    """One channel per address, made on first use, all closed together. For one event loop."""

    def __init__(self, tls: Tls | None = None) -> None:
        """tls: what this process shows and trusts; None for plain text."""
        keep_message_memory()
        self._tls = tls
        self._address_to_channel: dict[str, grpc.aio.Channel] = {}

    def to(self, address: str) -> grpc.aio.Channel:
        """The channel to an address; connects lazily and reconnects by itself."""
        channel = self._address_to_channel.get(address)
        if channel is None:
            channel = open_channel(address, tls=self._tls, options=_CHANNEL_OPTIONS)
            self._address_to_channel[address] = channel
        return channel

    async def drop(self, address: str) -> None:
        """Close the channel to an address that is not used any more (a node that left)."""
        channel = self._address_to_channel.pop(address, None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        """Close all; calls in progress are cancelled."""
        channels = list(self._address_to_channel.values())
        self._address_to_channel.clear()
        for channel in channels:
            await channel.close()


def open_channel(address: str, *, tls: Tls | None, options: Options) -> Any:
    """A channel of grpc.aio, in plain text without `tls`."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return RenewedChannel(tls, lambda credentials: grpc.aio.secure_channel(address, credentials, options=options))


def open_blocking_channel(address: str, *, tls: Tls | None, options: Options) -> Any:
    """A channel for threads, in plain text without `tls`."""
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return RenewedBlockingChannel(tls, lambda credentials: grpc.secure_channel(address, credentials, options=options))


def build_server(
    *,
    rpcs_max: int = STORE_RPCS_MAX,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    options: Options = (),
    tell: Tell = unheard,
) -> grpc.aio.Server:
    """A server with the options that match `Channels`, and with these besides; beyond `rpcs_max` calls at once it
    refuses, never queues. Request bytes that do not decode are INVALID_ARGUMENT, not an error of the server, of which
    `tell` hears."""
    keep_message_memory()
    say_nothing_of_undelivered()
    return grpc.aio.server(
        interceptors=(*interceptors, UndecodableRefused(tell)),
        options=(*_SERVER_OPTIONS, *options),
        maximum_concurrent_rpcs=rpcs_max,
    )


def bind_server(
    server: grpc.aio.Server, address: str, *, tls: Tls | None, connected: Callable[[], None] | None = None
) -> int:
    """Have a server listen, in plain text without `tls`; its port. Raises RuntimeError when that cannot be.

    With authorities among the files, a peer that shows no certificate of theirs is refused before its first byte is
    read. connected: called, in a thread of gRPC's, at the beginning of each connection under TLS.
    """
    if tls is None:
        return int(server.add_insecure_port(address))
    return int(server.add_secure_port(address, _server_credentials(tls, connected)))


def _server_credentials(tls: Tls, connected: Callable[[], None] | None) -> grpc.ServerCredentials:
    material = tls.current()
    used = [material]

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """gRPC asks at each new connection; None: as before."""
        if connected is not None:
            connected()
        newest = tls.current()
        if newest is used[0]:
            return None
        used[0] = newest
        return _certificates(newest)

    return grpc.dynamic_ssl_server_credentials(_certificates(material), changed, bool(material.ca))


def _certificates(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], material.ca or None)

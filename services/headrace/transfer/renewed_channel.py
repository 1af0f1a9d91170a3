"""A gRPC channel under TLS that follows its files: when they change, calls go by a new one, with new credentials.

gRPC's own channels keep the credentials that they were made with. Here calls under way end on the channel that they
began on, which is closed after the last of them. Knows nothing of what is called; a stub takes it for a channel.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from headrace.core.front_door_limits import OLD_CHANNEL_GRACE_S
from headrace.transfer.tls_files import Tls, TlsMaterial


class RenewedChannel:
    """As grpc.aio.Channel, as far as stubs use one, and `close`. For one event loop."""

    def __init__(self, tls: Tls, open_channel: Callable[[grpc.ChannelCredentials], Any]) -> None:
        self._tls = tls
        self._open = open_channel
        self._material: TlsMaterial | None = None
        self._channel: Any = None
        self._ending: dict[asyncio.Task[None], Any] = {}  # and the old channel that each closes
        self._closed = False

    def unary_unary(self, *arguments: Any, **named: Any) -> "_Method":
        """As grpc.aio.Channel.unary_unary; so the three below."""
        return _Method(self, "unary_unary", arguments, named)

    def unary_stream(self, *arguments: Any, **named: Any) -> "_Method":
        """As grpc.aio.Channel.unary_stream."""
        return _Method(self, "unary_stream", arguments, named)

    def stream_unary(self, *arguments: Any, **named: Any) -> "_Method":
        """As grpc.aio.Channel.stream_unary."""
        return _Method(self, "stream_unary", arguments, named)

    def stream_stream(self, *arguments: Any, **named: Any) -> "_Method":
        """As grpc.aio.Channel.stream_stream."""
        return _Method(self, "stream_stream", arguments, named)

    def now(self) -> Any:
        """The channel that a call goes by that begins now."""
        if self._closed:
            raise grpc.aio.UsageError("Channel is closed.")
        material = self._tls.current()
        if material is not self._material:
            old, self._channel = self._channel, self._open(channel_credentials(material))
            self._material = material
            self._retire(old)
        return self._channel

    def _retire(self, old: Any) -> None:
        if old is not None:
            ending = asyncio.get_running_loop().create_task(old.close(OLD_CHANNEL_GRACE_S), name="close an old channel")
            self._ending[ending] = old
            ending.add_done_callback(lambda ended: self._ending.pop(ended, None))

    async def close(self) -> None:
        """Close all; calls in progress are cancelled. Idempotent."""
        self._closed = True
        channel, self._channel = self._channel, None
        ending = dict(self._ending)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        # Once more and without grace: a closing that was cut off leaves its channel's calls alone.
        for open_still in (*ending.values(), channel):
            if open_still is not None:
                await open_still.close()


class RenewedBlockingChannel(RenewedChannel):
    """As grpc.Channel, as far as stubs use one, and `close`. Safe for concurrent use by several threads.

    An old channel is let go and not closed, since closing would cancel its calls: it ends with the last of them.
    """

    def now(self) -> Any:
        """As RenewedChannel.now. Raises ValueError on a closed channel, as gRPC's own do."""
        if self._closed:
            raise ValueError("Cannot invoke RPC on closed channel!")
        return super().now()

    def _retire(self, old: Any) -> None:
        """Nothing to do: whoever reads a stream holds what it needs."""

    def close(self) -> None:  # type: ignore[override]
        """Cancel every call of the newest channel and close it. Idempotent."""
        self._closed = True
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


class _Method:
    """One RPC of a stub: the newest channel's, looked up at each call."""

    def __init__(self, channel: RenewedChannel, kind: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._channel = channel
        self._kind = kind
        self._arguments = arguments
        self._named = named
        self._made: tuple[Any, Any] = (None, None)  # a channel and its method, together: several threads may renew it

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        channel = self._channel.now()
        made_for, method = self._made
        if channel is not made_for:
            method = getattr(channel, self._kind)(*self._arguments, **self._named)
            self._made = (channel, method)
        return method(*arguments, **named)


def channel_credentials(material: TlsMaterial) -> grpc.ChannelCredentials:
    """What a client trusts and shows; without authorities it trusts those that grpcio brings."""
    return grpc.ssl_channel_credentials(material.ca or None, material.key or None, material.cert or None)

"""The bounds on strangers hold at Serve's own proxies, not only where they are tested apart."""

import socket
import struct
from urllib.parse import urlsplit

import grpc
import pytest
from local_system import LocalSystem

from headrace.core.front_door_limits import GRPC_CALLS_OF_CONNECTION_MAX, HTTP_HEAD_BYTES_MAX
from headrace.core.limits import GRPC_MESSAGE_BYTES_MAX


def test_a_head_without_end_is_refused_by_the_http_proxy(system: LocalSystem):
    """Fails when Serve's proxies speak another HTTP than ours."""
    address = urlsplit(system.state.http_url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nx-more: " + b"x" * 2 * HTTP_HEAD_BYTES_MAX)
        assert connection.recv(100).startswith(b"HTTP/1.1 431")


def test_a_message_above_the_limit_is_refused_by_the_grpc_proxy_before_it_is_read(system: LocalSystem):
    """Fails when Serve's proxies take messages of 2 GiB, which is what they do unless they are told."""
    with grpc.insecure_channel(system.state.grpc_target, options=[("grpc.max_send_message_length", -1)]) as channel:
        call = channel.unary_unary("/headrace.v1.Inference/ListModels")
        with pytest.raises(grpc.RpcError) as refused:
            call(bytes(GRPC_MESSAGE_BYTES_MAX + 1_000), timeout=60)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_the_grpc_proxy_tells_how_many_calls_a_connection_may_have_at_once(system: LocalSystem):
    """By its HTTP/2 settings. Fails when one connection may hold calls without end, which is what gRPC allows."""
    host, _, port = system.state.grpc_target.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection, connection.makefile("rb") as answer:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack(">HBBBL", 0, 0, 4, 0, 0))
        size_high, size_low, kind, _, _ = struct.unpack(">HBBBL", answer.read(9))
        assert kind == 4, "a server begins with its settings"
        told = dict(struct.iter_unpack(">HL", answer.read((size_high << 8) + size_low)))
    assert told[3] == GRPC_CALLS_OF_CONNECTION_MAX

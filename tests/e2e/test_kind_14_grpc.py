"""What breaks gRPC's rules or limits is told by a typed error through Serve's proxy, and the channel stays usable."""

import grpc
import pytest
from local_system import LocalSystem

from headrace.core.errors import InvalidRequest
from headrace.wire.status import ERROR_KEY

BAD_UTF8 = b"\x12\x03\xff\xfe\xfd"  # the prompt's text, three bytes that are no UTF-8
CUT = b"\x0a\x50abc"
UNARY = ["Inference/ListModels", "CacheAdmin/ListBlocks", "CacheAdmin/Stat", "CacheAdmin/Evict", "CacheAdmin/Status"]


@pytest.fixture
def channel(system: LocalSystem):
    with grpc.insecure_channel(system.state.grpc_target) as channel:
        yield channel


def refused_with(failed: grpc.RpcError) -> str:
    assert failed.code() is grpc.StatusCode.INVALID_ARGUMENT, failed
    return dict(failed.trailing_metadata())[ERROR_KEY]


@pytest.mark.parametrize("data", [BAD_UTF8, CUT], ids=["bad UTF-8", "cut"])
def test_a_stream_request_that_cannot_be_read_is_the_callers_fault(channel: grpc.Channel, data: bytes):
    """Fails when Serve's proxy answers UNKNOWN, which clients take for a fault of the server and try again."""
    with pytest.raises(grpc.RpcError) as failed:
        list(channel.unary_stream("/headrace.v1.Inference/Generate")(data, timeout=60))
    assert refused_with(failed.value) == "InvalidRequest"


@pytest.mark.parametrize("method", UNARY)
def test_a_unary_request_that_cannot_be_read_is_the_callers_fault(channel: grpc.Channel, method: str):
    with pytest.raises(grpc.RpcError) as failed:
        channel.unary_unary(f"/headrace.v1.{method}")(CUT, timeout=60)
    assert refused_with(failed.value) == "InvalidRequest"


@pytest.mark.parametrize("megabytes", [3.9, 4.1, 15.9, 17.0])
def test_a_prompt_of_any_size_gets_a_typed_answer(system: LocalSystem, megabytes: float):
    """Fails when a transport's limit ends the call without a reason, or the channel with it."""
    with pytest.raises(InvalidRequest):
        system.client.generate("x" * int(megabytes * 2**20), timeout_s=60)
    assert system.client.list_models()

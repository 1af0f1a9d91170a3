"""A client that leaves is heard of where Serve waits for the replica, wherever the proxy happens to stand."""

import asyncio
from collections.abc import AsyncGenerator

import grpc
import pytest
from ray.exceptions import ActorDiedError

from headrace_cluster.caller_presence import CALLER_KEY, Presence
from headrace_cluster.proxy_services import naming_caller, unavailable_when_died, write_stream


class Replica:
    """Gives numbers; notes when the wait for the next one is cancelled, as Serve's response generator does."""

    def __init__(self, count: int) -> None:
        self.numbers: asyncio.Queue[int] = asyncio.Queue()
        self.count = count
        self.cancelled = False

    async def next(self) -> int:
        try:
            return await self.numbers.get()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


def nested_as_in_serve(replica: Replica):
    """Generators within generators, none of which closes the one below it; the inner one swallows and goes on."""

    async def inner() -> AsyncGenerator[object, None]:
        status = "ok"
        try:
            for _ in range(replica.count):
                yield await replica.next()
        except BaseException:
            status = "cancelled"
        yield status

    async def outer(request: object, context: object) -> AsyncGenerator[int, None]:
        async for message in inner():
            if isinstance(message, int):
                yield message

    return outer


class Client:
    """A gRPC context whose network takes messages until it is blocked."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.code = None
        self.details = ""
        self.takes = asyncio.Event()
        self.takes.set()

    async def send_initial_metadata(self, metadata) -> None:
        assert self.received == []

    async def write(self, message: int) -> None:
        await self.takes.wait()
        self.received.append(message)

    def set_code(self, code) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details


async def test_all_messages_arrive_in_order_and_the_stream_ends():
    replica, client = Replica(3), Client()
    for number in range(3):
        replica.numbers.put_nowait(number)
    await write_stream(nested_as_in_serve(replica))(None, client)
    assert client.received == [0, 1, 2]
    assert not replica.cancelled


@pytest.mark.parametrize(
    ("given", "blocked"), [(1, False), (1, True), (2, True)], ids=["waiting", "writing", "writing with one more there"]
)
async def test_leaving_is_heard_at_the_replica(given: int, blocked: bool):
    """Fails when the cancellation is thrown at a suspended outer generator, which drops the inner one as it is."""
    replica, client = Replica(100), Client()
    if blocked:
        client.takes.clear()
    for number in range(given):
        replica.numbers.put_nowait(number)
    call = asyncio.create_task(write_stream(nested_as_in_serve(replica))(None, client))
    for _ in range(100):  # nothing but this loop takes part
        await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call], timeout=60)
    assert call.done()
    assert replica.cancelled


class Ended:
    """A gRPC context after Serve's handler has set its code."""

    def __init__(self, code: object, details: str) -> None:
        self.now: list[object] = [code, details]

    def code(self) -> object:
        return self.now[0]

    def details(self) -> object:
        return self.now[1]

    def set_code(self, code: object) -> None:
        self.now[0] = code

    def set_details(self, details: str) -> None:
        self.now[1] = details


@pytest.mark.parametrize("streams", [False, True], ids=["unary", "stream"])
async def test_a_gateway_that_died_under_a_call_is_unavailable_and_other_failures_stay_what_they_are(streams: bool):
    """Fails when a client is told of an internal error where trying again helps, or of a death where nobody died."""

    async def answer(request: object, context: object) -> bytes:
        return b""

    async def stream(request: object, context: object) -> AsyncGenerator[bytes, None]:
        yield b""

    async def code_after(code: object, details: str) -> object:
        context = Ended(code, details)
        ended = unavailable_when_died(stream if streams else answer)(None, context)
        if streams:
            assert [message async for message in ended] == [b""]
        else:
            assert await ended == b""
        return context.code()

    died = str(ActorDiedError())
    assert await code_after(grpc.StatusCode.INTERNAL, died) is grpc.StatusCode.UNAVAILABLE
    assert await code_after(13, died) is grpc.StatusCode.UNAVAILABLE
    assert await code_after(grpc.StatusCode.INTERNAL, "a bug") is grpc.StatusCode.INTERNAL
    assert await code_after(grpc.StatusCode.NOT_FOUND, died) is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(("says", "attempts"), [(0, 2), (1, 1)], ids=["nothing yet", "something"])
async def test_a_stream_of_which_nothing_came_when_its_gateway_died_is_asked_for_once_more(says: int, attempts: int):
    """Fails when a request that was not started fails, or one that was is started twice."""
    context, asked = Ended(0, ""), []

    async def stream(request: object, context: Ended) -> AsyncGenerator[bytes, None]:
        asked.append(request)
        if len(asked) == 1:
            for _ in range(says):
                yield b"accepted"
            context.set_code(grpc.StatusCode.INTERNAL)
            context.set_details(str(ActorDiedError()))
            return
        assert not context.code()
        assert not context.details()
        yield b"done"

    messages = [message async for message in unavailable_when_died(stream)("request", context)]
    assert len(asked) == attempts
    assert messages == ([b"accepted"] if says else [b"done"])
    assert context.code() == (grpc.StatusCode.UNAVAILABLE if says else 0)


async def test_a_stream_names_the_proxy_that_must_live_for_it_and_a_client_cannot():
    """Fails when a gateway is not told whom it works for, or connects to where a client says."""

    class Sent:
        def invocation_metadata(self) -> list[tuple[str, str]]:
            return [("a", "b"), (CALLER_KEY, "10.0.0.1:22")]

        def peer(self) -> str:
            return "the client"

    async def stream(request: object, context: Sent) -> AsyncGenerator[object, None]:
        yield context.invocation_metadata()
        yield context.peer()

    presence = Presence("127.0.0.1")
    metadata, peer = [message async for message in naming_caller(stream, presence)(None, Sent())]
    assert metadata == [("a", "b"), (CALLER_KEY, await presence.address())]
    assert peer == "the client"
    await presence.close()


async def test_a_client_that_never_reads_ends_its_call_and_the_work_for_it():
    """Fails when a message waits for ever for a client that takes nothing."""
    replica, client = Replica(3), Client()
    client.takes.clear()
    replica.numbers.put_nowait(1)
    handler = write_stream(nested_as_in_serve(replica), unread_timeout_ms=20)
    async with asyncio.timeout(30):
        await handler(None, client)
    assert replica.cancelled
    assert client.received == []
    assert client.code is grpc.StatusCode.DEADLINE_EXCEEDED

"""A request whose gateway died before it answered is asked again; one that was answered, or left, is not."""

import json

import pytest

from headrace.core.limits import REQUEST_BODY_BYTES_MAX
from headrace_cluster.proxy_http import CALL_ATTEMPTS, TryAgainWhenDied

START = {"type": "http.response.start", "status": 200, "headers": []}
END = {"type": "http.response.body", "body": b"ok"}


class Front:
    """A client's connection, and gateways of which the first few die."""

    def __init__(self, *body: bytes, dying: int = 0, dies_after: int = 0, leaves: bool = False) -> None:
        self.to_come = [
            {"type": "http.request", "body": part, "more_body": number < len(body) - 1}
            for number, part in enumerate(body)
        ]
        self.dying = dying
        self.dies_after = dies_after  # messages
        self.leaves = leaves
        self.bodies: list[bytes] = []  # as each gateway read them
        self.sent: list[dict] = []

    async def receive(self) -> dict:
        return self.to_come.pop(0) if self.to_come else {"type": "http.disconnect"}

    async def send(self, message: dict) -> None:
        self.sent.append(message)

    async def gateways(self, scope, receive, send) -> None:
        read = b""
        while True:
            message = await receive()
            read += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.bodies.append(read)
        if self.leaves:
            assert (await receive())["type"] == "http.disconnect"
            return
        dies = len(self.bodies) <= self.dying
        for message in [START, END][: self.dies_after if dies else None]:
            await send(message)

    async def ask(self) -> None:
        await TryAgainWhenDied(self.gateways)({"type": "http"}, self.receive, self.send)


async def test_a_request_that_was_not_answered_is_asked_again_with_the_same_body():
    front = Front(b"ab", b"cd", dying=1)
    await front.ask()
    assert front.bodies == [b"abcd", b"abcd"]
    assert front.sent == [START, END]


@pytest.mark.parametrize("dies_after", [1, 2])
async def test_an_answer_that_has_begun_is_not_asked_for_again(dies_after: int):
    """Fails when a client is sent the beginnings of two answers."""
    front = Front(b"ab", dying=1, dies_after=dies_after)
    await front.ask()
    assert front.bodies == [b"ab"]
    assert front.sent == [START, END][:dies_after]


async def test_a_request_under_which_every_gateway_dies_kills_two_of_them_and_says_when_to_come_back():
    front = Front(b"ab", dying=100)
    await front.ask()
    assert len(front.bodies) == CALL_ATTEMPTS == 2
    head, body = front.sent
    assert head["status"] == 503
    assert int(dict(head["headers"])[b"retry-after"]) >= 1
    assert json.loads(body["body"])["error"]["code"] == "worker_unavailable"


async def test_a_request_whose_client_has_left_is_not_asked_again():
    front = Front(b"ab", leaves=True)
    await front.ask()
    assert (len(front.bodies), front.sent) == (1, [])


async def test_a_body_over_the_bound_goes_through_once_and_whole():
    """Fails when a proxy keeps whatever is sent to it, or loses a part of it."""
    parts = [b"x" * (REQUEST_BODY_BYTES_MAX // 2)] * 4
    front = Front(*parts, dying=1)
    await front.ask()
    assert front.bodies == [b"".join(parts)]
    assert front.sent[0]["status"] == 503


async def test_bodies_are_kept_as_far_as_there_is_room_and_then_passed_on_as_they_come():
    """Fails when strangers can have a proxy keep any number of bodies, or room is not given back."""
    small = Front(b"ab", b"cd", dying=1)
    asked = TryAgainWhenDied(small.gateways, kept_bytes_max=3)
    await asked({"type": "http"}, small.receive, small.send)
    assert small.bodies == [b"abcd", b"abcd"]  # whole when its last part came: nothing was left to keep
    large = Front(b"abcd", b"ef", dying=1)
    asked = TryAgainWhenDied(large.gateways, kept_bytes_max=3)
    await asked({"type": "http"}, large.receive, large.send)
    assert large.bodies == [b"abcdef"]
    assert large.sent[0]["status"] == 503
    assert asked._kept._bytes == 0


async def test_the_second_gateway_is_asked_for_the_same_path_as_the_first():
    """Fails when what Serve wrote into the scope of the first attempt is taken for the caller's own."""
    asked: list[str] = []

    async def serve(scope, receive, send) -> None:
        asked.append(scope.get("root_path", ""))
        scope["root_path"] = "/chat"

    front = Front(b"ab")
    await TryAgainWhenDied(serve)({"type": "http", "path": "/chat/v1"}, front.receive, front.send)
    assert asked == ["", ""]

"""Which application behind a Serve proxy a client means, and how it is told that there is none of that name."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from headrace.client import ApplicationUnknown, AsyncHeadraceClient, GatewayUnreachable, HeadraceClient
from headrace.core.errors import InvalidRequest, UnknownModel
from tests.unit.client.test_client import call_in_every_way

NOT_FOUND = grpc.StatusCode.NOT_FOUND
SAID = "Application 'x' not found. Ping /ray.serve.RayServeAPIService/ListApplications for available applications."


def test_the_application_goes_with_every_call_and_without_one_nothing_does(small_gateway):
    """Fails when a kind of call could reach another model's application than the one that was named."""
    for application, expected in (("small", "small"), ("", None)):
        small_gateway.applications.clear()
        with HeadraceClient(small_gateway.address, application=application) as client:
            call_in_every_way(client)
        assert small_gateway.applications == [expected] * 6


async def test_the_application_goes_with_calls_over_asyncio(small_gateway):
    async with AsyncHeadraceClient(small_gateway.address, application="small") as client:
        await client.generate("x")
        await client.list_models()
    assert small_gateway.applications == ["small"] * 2


@pytest.mark.parametrize("application", ["line\nbreak", "é", " spaces around"])
def test_what_cannot_be_sent_as_an_application_is_refused(small_gateway, application):
    """Fails when a mistake surfaces as a transport error, or reaches the proxy as another name."""
    with pytest.raises(InvalidRequest, match="application"):
        HeadraceClient(small_gateway.address, application=application)


def test_a_client_refuses_an_argument_that_it_does_not_know(small_gateway):
    with pytest.raises(TypeError, match="api_kee"):
        HeadraceClient(small_gateway.address, api_kee="")


class Refuses(grpc.GenericRpcHandler):
    """As Serve's proxy answers any call for which it finds no application."""

    def service(self, handler_call_details):
        return grpc.unary_unary_rpc_method_handler(lambda request, context: context.abort(NOT_FOUND, SAID))


@pytest.fixture
def proxy() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1), handlers=[Refuses()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(grace=None)


def test_a_proxy_that_finds_no_application_is_told_of_as_such(proxy):
    """Fails when Serve's own words, which name neither option nor argument, are all that a caller gets."""
    told = pytest.raises(ApplicationUnknown, match=r"Application 'x' not found\).*--application")
    with HeadraceClient(proxy, application="x") as client, told as refused:
        client.status()
    assert isinstance(refused.value, GatewayUnreachable)
    assert refused.value.address == proxy


def test_a_gateways_own_words_are_not_taken_for_the_proxys(small_gateway):
    """Fails when a caller can have an answer of the gateway look like another one by what it asks for."""
    small_gateway.failure = UnknownModel(SAID, [])
    with HeadraceClient(small_gateway.address) as client, pytest.raises(InvalidRequest):
        client.generate("x")

"""Callers of a gateway under TLS: both clients, the command line, HTTPS, and whoever tries without."""

import asyncio
import json
import ssl
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc.aio
import pytest
import uvicorn
from certificates_kit import Pki
from click.testing import CliRunner
from ray.serve.config import HTTPOptions
from tiny_gateway import make_worker_record, tiny_gateway

from headrace.admin.cli import main
from headrace.client import AsyncHeadraceClient, GatewayUnreachable, HeadraceClient, Sampling, TlsFailed
from headrace.core.errors import ConfigInvalid
from headrace.gateway.openai_http import build_http_app
from headrace.gateway.serve_grpc import serve_grpc
from headrace.transfer.channels import Channels, build_server
from headrace.transfer.https_context import HttpsContext
from headrace.transfer.tls_files import Tls
from headrace_cluster.proxy_tls import listen_on

PROMPT = "twenty-four characters.."


@asynccontextmanager
async def gateway_of(tls: Tls | None, model_path: str) -> AsyncIterator[str]:
    """The address of a gateway's gRPC API."""
    async with tiny_gateway(make_worker_record("w"), model_path=model_path) as gateway, AsyncExitStack() as stack:
        channels = Channels()
        stack.push_async_callback(channels.close)
        server, port = await serve_grpc(gateway.service, address="127.0.0.1:0", channel_to=channels.to, tls=tls)
        stack.push_async_callback(server.stop, 0)
        yield f"127.0.0.1:{port}"


def one_way(pki: Pki) -> Tls:
    """A gateway that shows its certificate and asks for none."""
    shown = pki.unchecked(pki.good)
    shown._material = type(shown._material)(shown._material.cert, shown._material.key, b"")
    return shown


async def test_both_clients_talk_to_a_gateway_whose_authority_they_were_told(pki: Pki, model_path: str):
    async with gateway_of(one_way(pki), model_path) as address:
        async with AsyncHeadraceClient(address, tls_ca_file=pki.good.ca_file) as client:
            answer = await client.generate(PROMPT, sampling=Sampling(max_tokens=2), timeout_s=60)
            assert len(answer.token_ids) == 2

        def ask() -> int:
            with HeadraceClient(address, tls_ca_file=pki.good.ca_file) as client:
                return len(client.generate(PROMPT, sampling=Sampling(max_tokens=3), timeout_s=60).token_ids)

        assert await asyncio.to_thread(ask) == 3


async def test_a_gateway_that_asks_callers_for_certificates_takes_those_of_their_authority_only(
    pki: Pki, model_path: str
):
    """Fails when any certificate lets callers in, that of a part among them, or none is asked for."""
    async with gateway_of(pki.tls(pki.good, pki.caller), model_path) as address:
        for shown, is_let_in in ((pki.caller, True), (pki.good, False), (None, False)):
            named = {"tls_cert_file": shown.cert_file, "tls_key_file": shown.key_file} if shown else {}
            async with AsyncHeadraceClient(address, tls_ca_file=pki.good.ca_file, **named) as client:
                if is_let_in:
                    assert await client.list_models()
                    continue
                told = f"does not accept the certificate in {pki.good.cert_file}" if shown else "tls_cert_file"
                with pytest.raises(TlsFailed, match=told):
                    await client.list_models()


@pytest.mark.parametrize(
    ("shown", "trusted", "told"),
    [
        ("expired", "good", "its certificate has expired"),
        ("elsewhere", "good", "its certificate does not name 127.0.0.1"),
        ("good", "stranger", r"its certificate is not of an authority in \S+/stranger/ca.pem"),
        (None, "good", "it does not speak TLS"),
        ("good", None, r"it may want TLS \(tls_ca_file\)"),
    ],
)
async def test_a_caller_is_told_why_there_is_no_tls_with_the_gateway(
    pki: Pki, model_path: str, shown: str | None, trusted: str | None, told: str
):
    """Fails when an error says no more than that the gateway cannot be reached, or a wrong certificate is accepted."""
    tls = pki.unchecked(getattr(pki, shown)) if shown else None
    async with gateway_of(tls, model_path) as address:
        named = {"tls_ca_file": getattr(pki, trusted).ca_file} if trusted else {}

        def ask() -> None:
            with HeadraceClient(address, **named) as client:
                client.list_models()

        async with AsyncHeadraceClient(address, **named) as client:
            with pytest.raises(TlsFailed, match=told):
                await client.list_models()
        with pytest.raises(TlsFailed, match=told):
            await asyncio.to_thread(ask)


async def test_a_gateway_that_is_not_there_is_not_taken_for_a_matter_of_tls(pki: Pki):
    async with AsyncHeadraceClient("127.0.0.1:9", tls_ca_file=pki.good.ca_file) as client:
        with pytest.raises(GatewayUnreachable, match="Connection refused") as missing:
            await client.list_models()
    assert not isinstance(missing.value, TlsFailed)


def test_a_client_is_not_made_with_a_file_that_cannot_be_used(pki: Pki):
    with pytest.raises(ConfigInvalid, match=r"tls_ca_file.*/none cannot be read"):
        HeadraceClient("127.0.0.1:9", tls_ca_file="/none")
    with pytest.raises(ConfigInvalid, match=r"tls_key_file.*set together"):
        HeadraceClient("127.0.0.1:9", tls_ca_file=pki.good.ca_file, tls_cert_file=pki.good.cert_file)


async def test_the_command_line_goes_by_its_flags_its_environment_or_the_systems_own_state(
    pki: Pki, model_path: str, tmp_path
):
    """Fails when a command opens its channel without the files, or what `up` wrote down is not read."""
    async with gateway_of(pki.tls(pki.good, pki.caller), model_path) as address:
        files = {
            "tls_ca_file": pki.good.ca_file,
            "tls_cert_file": pki.caller.cert_file,
            "tls_key_file": pki.caller.key_file,
        }
        words = ["models", "--address", address]

        def run(*more: str, **environment: str):
            return CliRunner().invoke(main, [*words, *more], env=environment)

        flags = [word for name, path in files.items() for word in (f"--{name.replace('_', '-')}", path)]
        by_flags = await asyncio.to_thread(run, *flags)
        assert by_flags.exit_code == 0, by_flags.output
        by_environment = await asyncio.to_thread(run, **{f"HEADRACE_{k.upper()}": v for k, v in files.items()})
        assert by_environment.exit_code == 0, by_environment.output
        without = await asyncio.to_thread(run)
        assert (without.exit_code, "it may want TLS" in without.output) == (6, True)

        state = {"ready": True, "grpc_target": address, **files}
        (tmp_path / "state.json").write_text(json.dumps(state))
        words = ["models"]
        by_state = await asyncio.to_thread(run, HEADRACE_STATE_DIR=str(tmp_path))
        assert by_state.exit_code == 0, by_state.output


@asynccontextmanager
async def https_of(context: HttpsContext, model_path: str) -> AsyncIterator[int]:
    """The port of a gateway's HTTP API under TLS, served as Serve's proxies do: by uvicorn."""
    async with tiny_gateway(make_worker_record("w"), model_path=model_path) as gateway:
        config = uvicorn.Config(build_http_app(gateway.service), port=0, log_level="error", lifespan="off")
        config.load()
        config.ssl = context
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        async with asyncio.timeout(60):
            while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.01)
        try:
            yield server.servers[0].sockets[0].getsockname()[1]
        finally:
            server.should_exit = True
            await serving


def trusting(paths, shown=None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=paths.ca_file)
    if shown is not None:
        context.load_cert_chain(shown.cert_file, shown.key_file)
    return context


def models(port: int, context: ssl.SSLContext | None) -> int:
    scheme = "http" if context is None else "https"
    with urllib.request.urlopen(f"{scheme}://127.0.0.1:{port}/v1/models", context=context, timeout=60) as reply:
        return reply.status


async def test_https_serves_who_checks_it_and_counts_whom_it_refuses_by_the_reason(pki: Pki, model_path: str):
    """Fails when plain text is answered, a caller without a certificate is served, or nobody notices."""
    refused: list[str] = []
    context = HttpsContext(pki.tls(pki.good, pki.caller), refused=refused.append)
    async with https_of(context, model_path) as port:
        ask = lambda tls: asyncio.to_thread(models, port, tls)  # noqa: E731
        assert await ask(trusting(pki.good, pki.caller)) == 200
        assert refused == []
        for tls, reason in (
            (None, "plain_text"),
            (trusting(pki.good), "no_certificate"),
            (trusting(pki.good, pki.stranger), "bad_certificate"),
            (trusting(pki.stranger, pki.caller), "refused_by_client"),
        ):
            with pytest.raises(OSError):  # noqa: PT011 - how it is told depends on who closes first
                await ask(tls)
            async with asyncio.timeout(60):
                while not refused:  # noqa: ASYNC110 - the handshake's end has no event
                    await asyncio.sleep(0.01)
            assert [refused.pop()] == [reason]
            assert refused == []
        assert await ask(trusting(pki.good, pki.caller)) == 200


async def test_the_grpc_port_of_serves_proxies_has_the_certificate_of_its_http_options(pki: Pki):
    """Fails when Serve's gRPC port is in plain text beside HTTPS, or on other interfaces than the HTTP API."""

    async def answer(request: bytes, context: Any) -> bytes:
        return b"served"

    handlers = {"M": grpc.unary_unary_rpc_method_handler(answer)}
    options = HTTPOptions(host="127.0.0.1", port=8000, ssl_certfile=pki.good.cert_file, ssl_keyfile=pki.good.key_file)
    server = build_server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    port = listen_on(server, options, port=0)
    await server.start()
    secure, plain = Channels(pki.tls(None)), Channels()
    try:
        call = lambda channels: channels.to(f"127.0.0.1:{port}").unary_unary("/t.T/M")(b"", timeout=60)  # noqa: E731
        assert await call(secure) == b"served"
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await call(plain)
    finally:
        await secure.close()
        await plain.close()
        await server.stop(0)

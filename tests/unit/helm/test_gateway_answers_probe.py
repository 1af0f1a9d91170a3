"""The probes of a gateway's pod, asked of a gateway: what each status means."""

import asyncio

import httpx
from rendered_chart import EVERYTHING, ray_pods, render
from tiny_gateway import make_worker_record, tiny_gateway, write_tokenizer

from headrace.gateway.openai_http import build_http_app


def readiness_path() -> str:
    (container,) = ray_pods(render({}))["gateway"]["spec"]["containers"]
    return container["readinessProbe"]["httpGet"]["path"]


async def loaded(service) -> None:
    """Returns when the gateway has its tokenizer, as the kubelet asks until it has."""
    async with asyncio.timeout(60):
        while not service.ready():  # noqa: ASYNC110  (the service tells nobody that it became ready)
            await asyncio.sleep(0.02)


async def status(service, path: str) -> int:
    transport = httpx.ASGITransport(app=build_http_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        return (await http.get(path)).status_code


async def test_a_gateway_is_ready_when_a_worker_could_answer(tmp_path):
    """Fails when the chart asks a path that only says that the process lives."""
    model = write_tokenizer(tmp_path)
    async with tiny_gateway(make_worker_record("one"), model_path=model) as gateway:
        await loaded(gateway.service)
        assert await status(gateway.service, readiness_path()) == 200
    async with tiny_gateway(model_path=model) as gateway:
        assert await status(gateway.service, readiness_path()) == 503
        assert await status(gateway.service, "/health") == 200


async def test_the_paths_that_ingress_and_route_carry_are_the_gateways(tmp_path):
    """Fails for a path that leads nowhere, or when `/` (and so the metrics) is carried."""
    manifests = render(EVERYTHING)
    ingress = next(m for m in manifests if m["kind"] == "Ingress")["spec"]["rules"][0]["http"]["paths"]
    route = next(m for m in manifests if m["kind"] == "HTTPRoute")["spec"]["rules"][0]["matches"]
    assert {path["path"] for path in ingress} == {match["path"]["value"] for match in route}
    async with tiny_gateway(make_worker_record("one"), model_path=write_tokenizer(tmp_path)) as gateway:
        await loaded(gateway.service)
        for path in (path["path"] for path in ingress):
            assert await status(gateway.service, f"{path}/models" if path == "/v1" else path) == 200

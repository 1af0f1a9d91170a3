"""Whatever alerts, dashboards and pages name of metrics, a part that runs has, with the labels that are asked for."""

import asyncio
import json
import re
from contextlib import suppress
from pathlib import Path

import yaml
from httpx import AsyncClient
from promql import parse

from headrace.core.errors import IndexUnavailable

from .traced_system import ComposedSystem, composed_system

ROOT = Path(__file__).parents[3]
FILES = ROOT / "helm" / "headrace" / "files"
# What Prometheus adds to what it scrapes, and the chart's monitors with it.
TARGET_LABELS = {
    "namespace",
    "service",
    "pod",
    "container",
    "instance",
    "job",
    "endpoint",
    "app_kubernetes_io_component",
    "app_kubernetes_io_instance",
}
SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? \S+$", re.MULTILINE)
TYPED = re.compile(r"^# TYPE (\w+) ", re.MULTILINE)
# Series that exist only once something has happened.
LATER: dict[str, set[str]] = {
    "headrace_refused_requests_total": {"tenant", "reason"},
    "headrace_tls_certificate_expiry_timestamp_seconds": set(),  # under TLS
    "ray_headrace_tls_certificate_expiry_timestamp_seconds": set(),  # of Serve's proxies, among Ray's
}


async def test_every_metric_that_is_named_anywhere_is_one_of_a_running_part(tiny_models, empty_valkey_url, tmp_path):
    """Fails when a metric or a label is renamed and an alert, a panel or a page goes on naming the old one."""
    disk = tmp_path / "disk"
    settings = {"disk_gb": 0.01, "disk_dir": str(disk), "speculation": "ngram"}
    async with composed_system(tiny_models, empty_valkey_url, tmp_path, **settings) as system:
        assert (await system.complete("a prompt of some length. " * 8)).status_code == 200
        await system.published()
        ports = [worker.record().metrics_port for worker in system.calls.workers.values()]
        ports.append(system.node._service.record.metrics_port)
        ports.append(await metrics_port_of_gateway(system))
        assert len(set(ports)) == 4
        async with AsyncClient(timeout=60) as http:
            pages = [(await http.get(f"http://127.0.0.1:{port}/metrics")).text for port in ports]
    known: dict[str, set[str]] = dict(LATER)
    for name, labels in (match.groups() for page in pages for match in SAMPLE.finditer(page)):
        known.setdefault(name, set()).update(re.findall(r'(\w+)="', labels or ""))
    for where, expression in expressions():
        named = parse(expression)
        for metric, labels in named.metrics.items():
            assert metric in known, f"{where}: {metric}"
            assert labels <= known[metric] | TARGET_LABELS, f"{where}: {metric} has no {labels - known[metric]}"
        for labels, metrics in named.grouped_by:
            for metric in metrics:
                assert labels <= known[metric] | TARGET_LABELS, f"{where}: {metric} has no {labels - known[metric]}"
    families = known.keys() | {name for page in pages for name in TYPED.findall(page)}
    families |= {name.removesuffix("_total") for name in known} | named_by_ray()
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for name in re.findall(r"\bheadrace_[a-z_]+\b(?![/.:{(]?\w*\.py)", path.read_text(encoding="utf-8")):
            assert name in families, f"{path.relative_to(ROOT)}: {name}"


async def metrics_port_of_gateway(system: ComposedSystem) -> int:
    """As it is announced, once it is."""
    async with asyncio.timeout(60):
        while True:
            with suppress(IndexUnavailable):  # a busy machine does not answer in 250 ms
                for gateway in await system.gateway._service.membership.gateways():
                    return gateway.metrics_port
            await asyncio.sleep(0.05)


RAY_RESOURCES = {"headrace_gateway", "headrace_prefill", "headrace_decode"}  # the chart's, of its pods


def named_by_ray() -> set[str]:
    """What the cluster package calls by such names: itself, and what Serve's proxies count among Ray's own metrics."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "cluster").rglob("*.py")]
    return RAY_RESOURCES | {"headrace_cluster"} | {name for t in texts for name in re.findall(r"\bheadrace_\w+", t)}


def expressions() -> list[tuple[str, str]]:
    found = []
    for path in FILES.glob("*.yaml"):
        groups = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
        found += [(rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]
    for path in FILES.glob("*.json"):
        board = json.loads(path.read_text(encoding="utf-8"))
        found += [(panel["title"], target["expr"]) for panel in board["panels"] for target in panel["targets"]]
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                found.append((variable["name"], variable["query"].split("(")[1].split(",")[0]))
    return found

"""What may reach the pods of a release, what is measured of them, and how they end."""

import json
import re
import shlex
import subprocess
import time
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from grpc_health.v1 import health_pb2
from helm_python import HelmError
from promql import parse
from rendered_chart import (
    CHART,
    EVERYTHING,
    EXTERNAL_REDIS,
    LAPTOP,
    ROOT,
    SIZES,
    Manifest,
    merged,
    one,
    ray_pods,
    render,
    serve_config,
    size,
)

from headrace.admin.cli import main
from headrace.config import settings_table
from headrace.core.telemetry_limits import METRICS_PORTS
from headrace.wire.v1 import admin_pb2, inference_pb2
from headrace_cluster.serve_app import REPLICA_GRACE_S

RAY_PORTS = {6379, 8265, 10001, 52365}
# Ray drains its node for so long before it ends, when its container is told to end.
RAY_DRAIN_S = 30
EVERY = {
    **{name: size(name) for name in SIZES},
    "everything": EVERYTHING,
    "external": merged(EVERYTHING, EXTERNAL_REDIS),
    "laptop": merged(EVERYTHING, LAPTOP),
}
each = pytest.mark.parametrize("name", EVERY)


@cache
def rendered(name: str) -> list[Manifest]:
    return render(EVERY[name])


def policies(name: str) -> dict[str, Any]:
    found = [m for m in rendered(name) if m["kind"] == "NetworkPolicy"]
    return {m["metadata"]["name"].rpartition("-")[2]: m["spec"] for m in found}


def labels_of_pods(name: str) -> dict[str, dict[str, str]]:
    return {component: pod["metadata"]["labels"] for component, pod in ray_pods(rendered(name)).items()}


@each
def test_everything_is_denied_but_what_is_allowed_by_name(name: str):
    deny = policies(name)["deny"]
    assert deny["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in deny
    assert "egress" not in deny
    selector = deny["podSelector"]["matchLabels"].items()
    for labels in labels_of_pods(name).values():
        assert selector <= labels.items()


@each
def test_rays_ports_open_to_pods_of_the_release_and_to_the_operator_only(name: str):
    """Fails when a port of Ray's own, or all ports, are opened to anybody else."""
    for policy, spec in policies(name).items():
        for rule in spec.get("ingress", []):
            ports = {port["port"] for port in rule.get("ports", [])}
            if policy == "ray":
                (peer,) = rule["from"]
                assert set(peer) == {"podSelector"}
                assert peer["podSelector"] == spec["podSelector"]
            elif policy == "operator":
                assert ports == {8265, 8000}
                assert rule["from"][0]["podSelector"]["matchLabels"]
            elif policy == "metrics":
                ours, *rays = rule["ports"]
                assert (ours["port"], ours["endPort"]) == (9400, 9400 + METRICS_PORTS - 1)
                # Ray's own, where its proxies say when the certificate ends that callers are shown.
                shown = "ssl_certfile" in serve_config(rendered(name))["http_options"]
                assert [port["port"] for port in rays] == ([8080] if shown else [])
                assert rule["from"]
            elif policy == "redis":
                assert ports == {6379}
                assert spec["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "redis"
            else:
                assert ports
                assert not ports & RAY_PORTS
                assert rule["from"]


@each
def test_services_and_routes_lead_to_the_gateways_two_ports_only(name: str):
    manifests = rendered(name)
    service = one(manifests, "Service", "-gateway")["spec"]
    assert [port["targetPort"] for port in service["ports"]] == [8000, 9000]
    matching = [c for c, labels in labels_of_pods(name).items() if service["selector"].items() <= labels.items()]
    assert matching == ["head" if "gateway" not in labels_of_pods(name) else "gateway"]
    for kind in ("Ingress", "HTTPRoute", "GRPCRoute"):
        for manifest in (m for m in manifests if m["kind"] == kind):
            assert "metrics" not in json.dumps(manifest["spec"])
    kinds = [m["spec"].get("type", "ClusterIP") for m in manifests if m["kind"] == "Service"]
    assert set(kinds) == {"ClusterIP"}


def grpc_services(admin: bool) -> set[str]:
    route = one(render(merged(EVERYTHING, {"grpcRoute": {"admin": admin}})), "GRPCRoute")["spec"]
    (rule,) = route["rules"]
    assert [backend["port"] for backend in rule["backendRefs"]] == [9000]
    return {match["method"]["service"] for match in rule["matches"]}


def test_the_grpc_route_carries_services_that_gateways_have_and_admins_calls_only_when_asked():
    """Fails for a service under another name, or when whoever is outside could try an admin's calls unasked."""
    named = {
        service.full_name
        for proto in (inference_pb2, admin_pb2, health_pb2)
        for service in proto.DESCRIPTOR.services_by_name.values()
    }
    assert grpc_services(admin=True) <= named
    assert grpc_services(admin=True) - grpc_services(admin=False) == {"headrace.v1.CacheAdmin"}
    assert "headrace.v1.Inference" in grpc_services(admin=False)


@each
def test_a_redis_that_is_bundled_is_reached_by_rays_pods_and_reaches_nobody(name: str):
    found = policies(name)
    assert ("redis" in found) == (EVERY[name].get("redis", {}).get("mode", "bundled") == "bundled")
    assert all(
        "redis" not in (spec["podSelector"].get("matchExpressions") or [{"values": []}])[0]["values"]
        for spec in found.values()
    )


@each
def test_every_budget_selects_pods_of_its_kind(name: str):
    """Fails when a budget names a kind of pods that this size does not have, or leaves one out."""
    budgets = [m for m in rendered(name) if m["kind"] == "PodDisruptionBudget"]
    kinds = labels_of_pods(name)
    if set(kinds) == {"head"}:
        assert budgets == []
        return
    selectors = [budget["spec"]["selector"]["matchLabels"].items() for budget in budgets]
    for component, labels in kinds.items():
        assert sum(selector <= labels.items() for selector in selectors) == (component != "head")


@each
def test_a_budget_says_how_many_pods_stay_so_that_one_of_a_kind_may_go(name: str):
    """In the only way that works for Ray's pods. With `maxUnavailable` Kubernetes asks the pods' owner how many there
    should be, and where that cannot tell (it has no `scale` subresource) lets none go: no node could be drained."""
    budgets = [m for m in rendered(name) if m["kind"] == "PodDisruptionBudget"]
    cluster = one(rendered(name), "RayService")["spec"]["rayClusterConfig"]
    replicas = {group["groupName"]: group["replicas"] for group in cluster.get("workerGroupSpecs", [])}
    for budget in budgets:
        kind = budget["metadata"]["labels"]["app.kubernetes.io/component"]
        assert budget["spec"]["minAvailable"] == replicas[kind] - 1
        assert "maxUnavailable" not in budget["spec"]
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_no_budget_asks_for_more_pods_than_there_are():
    budgets = [m for m in render({"podDisruptionBudgets": {"maxUnavailable": 9}}) if m["kind"] == "PodDisruptionBudget"]
    assert [budget["spec"]["minAvailable"] for budget in budgets] == [0, 0, 0]


def test_with_workers_together_there_are_pods_for_the_kind_that_needs_more():
    values = {"workersTogether": True, "settings": {"prefill_workers": 6, "decode_workers": 2, "decode_workers_max": 8}}
    cluster = one(render(values), "RayService")["spec"]["rayClusterConfig"]
    (both,) = (group for group in cluster["workerGroupSpecs"] if group["groupName"] == "both")
    assert [both[key] for key in ("replicas", "minReplicas", "maxReplicas")] == [6, 6, 8]


@each
def test_aliveness_asks_nobody_but_the_pods_own_ray(name: str):
    """Neither Redis nor the head's store nor a worker: their fault must not start this pod again."""
    for component, pod in ray_pods(rendered(name)).items():
        (container,) = pod["spec"]["containers"]
        own = {"path": "/api/local_raylet_healthz", "port": 52365}
        assert container["livenessProbe"]["httpGet"] == own
        assert container["startupProbe"]["httpGet"] == own
        ready = container["readinessProbe"]["httpGet"]
        expected = {"head": ("/api/gcs_healthz", 8265), "gateway": ("/ready", 8000)}
        assert (ready["path"], ready["port"]) == expected.get(component, ("/metrics", 9401))


@each
def test_a_pod_has_time_for_all_that_it_does_before_it_ends(name: str):
    for pod in ray_pods(rendered(name)).values():
        script = (
            pod["spec"]["containers"][0].get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [""])
        )
        waits = [int(n) for n in re.findall(r"(?:timeout|sleep) (\d+)", script[-1])]  # beside each other
        assert pod["spec"]["terminationGracePeriodSeconds"] >= RAY_DRAIN_S + max(waits, default=0)


@each
def test_pods_of_workers_stay_as_long_as_the_streams_of_gateways(name: str):
    """The pods of a cluster that was replaced end together: fails when a gateway's streams outlive their workers."""
    scripts = {
        component: pod["spec"]["containers"][0].get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        for component, pod in ray_pods(rendered(name)).items()
    }
    assert [component for component, script in scripts.items() if script is None] == ["head"] * (len(scripts) > 1)
    assert {re.findall(r"sleep (\d+) &", script[-1])[0] for script in scripts.values() if script} == {"60"}


def test_what_a_pod_does_before_its_end_takes_its_time_and_ends_well(tmp_path: Path):
    """The command itself, with no gateway to be found. Fails when it does not wait for streams, or a drain that comes
    to nothing fails the pod's end."""
    container = ray_pods(render({"drain": {"gatewaySeconds": 2, "storeSeconds": 1}}))["decode"]["spec"]["containers"][0]
    (tmp_path / "headrace").write_text("#!/bin/sh\nexit 6\n")
    (tmp_path / "headrace").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOSTNAME": "decode-1"}
    began = time.monotonic()
    subprocess.run(container["lifecycle"]["preStop"]["exec"]["command"], env=environment, check=True, timeout=60)
    assert time.monotonic() - began >= 2


@each
def test_a_replica_that_is_replaced_has_time_for_its_streams(name: str):
    """As long as a request may take: fails when a deployment has Serve's own few seconds."""
    for deployment in serve_config(rendered(name))["applications"][0]["deployments"]:
        assert deployment["graceful_shutdown_timeout_s"] >= REPLICA_GRACE_S


def test_the_drain_before_the_end_is_a_command_that_exists():
    """Fails when the command or its option is renamed, or its address is not that of the gateway's Service."""
    for component in ("prefill", "decode"):
        (container,) = ray_pods(rendered("values"))[component]["spec"]["containers"]
        script = container["lifecycle"]["preStop"]["exec"]["command"][-1]
        (line,) = (line for line in script.splitlines() if line.startswith("timeout"))
        words = shlex.split(line.partition("||")[0])
        assert words[:3] == ["timeout", "120", "headrace"]
        command: click.Command = main
        for word in words[3:5]:
            assert isinstance(command, click.Group)
            command = command.commands[word]
        assert {"--address"} <= {option for parameter in command.params for option in parameter.opts}
        assert words[5:] == ["$HOSTNAME", "--address", "demo-headrace-gateway:9000"]
        assert one(rendered("values"), "Service", "-gateway")


def test_an_admins_key_is_in_the_pods_that_drain_with_it_and_in_no_others():
    holders = {
        component
        for component, pod in ray_pods(rendered("everything")).items()
        for variable in pod["spec"]["containers"][0]["env"]
        if variable["name"] == "HEADRACE_API_KEY"
    }
    assert holders == {"prefill", "decode"}


@each
def test_what_monitors_scrape_is_let_through(name: str):
    """Fails for a size that makes a monitor whose targets no policy opens, or no pod has: all of them would be down."""
    monitors = {m["kind"]: m["spec"] for m in rendered(name) if m["kind"] in ("ServiceMonitor", "PodMonitor")}
    if monitors:
        (rule,) = policies(name)["metrics"]["ingress"]
        assert rule["from"]
    if "ServiceMonitor" in monitors:
        chosen = one(rendered(name), "Service", "-gateway")["spec"]["selector"].items()
        (pod,) = (p for p in ray_pods(rendered(name)).values() if chosen <= p["metadata"]["labels"].items())
        declared = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
        asked = {endpoint["targetPort"] for endpoint in monitors["ServiceMonitor"]["endpoints"]}
        asked -= {"metrics"}  # Ray's own, which KubeRay declares
        assert asked == {port for port in declared if port.startswith("metrics-")} - {"metrics-0"}


def test_the_drain_checks_the_gateways_certificate_where_there_is_one():
    (container,) = ray_pods(rendered("everything"))["decode"]["spec"]["containers"]
    script = container["lifecycle"]["preStop"]["exec"]["command"][-1]
    asked = "--address demo-headrace-gateway.inference.svc:9000 --tls-ca-file /etc/headrace/callers/ca.crt ||"
    assert asked in script
    assert "/etc/headrace/callers" in [mount["mountPath"] for mount in container["volumeMounts"]]


@each
def test_every_part_of_a_pod_has_a_port_for_its_metrics_that_the_monitor_names(name: str):
    """Fails when a pod holds more parts than it declares ports for, or a monitor asks for fewer."""
    config = serve_config(rendered(name))["applications"][0]["args"]
    assert config["metrics_port"] == 9400
    monitors = [m["spec"] for m in rendered(name) if m["kind"] == "PodMonitor"]
    cluster = one(rendered(name), "RayService")["spec"]["rayClusterConfig"]
    for group in [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])]:
        offered = json.loads(json.loads(group["rayStartParams"].get("resources", '"{}"')))
        (container,) = group["template"]["spec"]["containers"]
        declared = {p["name"]: p["containerPort"] for p in container.get("ports", []) if "metrics-" in p["name"]}
        # A store node has the first, and each gateway and worker one of the others.
        needed = sum(offered.values()) + 1 if offered else 0
        assert declared == {f"metrics-{number}": 9400 + number for number in range(needed)}
        assert needed <= METRICS_PORTS
        component = group["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
        for monitor in monitors:
            (where,) = monitor["selector"]["matchExpressions"]
            if component in where["values"]:
                assert set(declared) <= {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]}
            else:
                assert set(offered) <= {"headrace_gateway"}
    assert len(monitors) == (name in ("values-multinode", "everything", "external", "laptop"))


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("http://collector:4317", 4317),
        ("https://collector.example/", 4317),
        ("http://collector:5555/x", 5555),
        ("http://[::1]:9", 9),
    ],
)
def test_traces_may_leave_to_their_collectors_port(endpoint: str, port: int):
    with_traces, without = (
        one(render(values), "NetworkPolicy", "-headrace-ray")["spec"]["egress"]
        for values in ({"settings": {"otlp_endpoint": endpoint}}, {})
    )
    assert [rule for rule in with_traces if rule not in without] == [{"ports": [{"port": port, "protocol": "TCP"}]}]


def test_plain_text_and_no_keys_are_for_networks_with_policies_only():
    """The setting follows from what is configured; nobody can leave it on when TLS and keys are there."""
    keys = {"tenants": EVERYTHING["tenants"], "settings": {"hash_algorithm": "sha256"}}
    tls = {"tls": {"authoritySecret": {"name": "authority"}}}
    events = {"settings": {"kv_events_endpoint": "tcp://*:5557"}}
    off = {"networkPolicies": {"enabled": False}}
    for values, insecure in (
        ({}, True),
        (keys, True),
        (tls, True),
        (merged(keys, tls), False),
        (merged(keys, tls, events), True),
    ):
        args = serve_config(render(values))["applications"][0]["args"]
        assert args.get("insecure_network", False) is insecure
        if insecure:
            with pytest.raises(HelmError, match=r"without networkPolicies\.enabled"):
                render(merged(values, off))
        else:
            assert render(merged(values, off))


def test_only_the_head_gets_a_token_and_only_for_the_autoscaler():
    with_token = {
        (name, component)
        for name in EVERY
        for component, pod in ray_pods(rendered(name)).items()
        if pod["spec"]["automountServiceAccountToken"]
    }
    assert with_token == {(name, "head") for name in ("values-cpu", "values-multinode", "everything", "external")}


def declared() -> tuple[set[str], tuple[str, ...]]:
    """Names of metrics as the code declares them, in whichever part, and what such names begin with that it makes."""
    sources = [path for folder in ("services", "cluster") for path in (ROOT / folder).rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    return set(re.findall(r'"(headrace_\w+)"', text)), tuple(re.findall(r'f"(headrace_\w+_)\{', text))


def bare(name: str) -> str:
    return re.sub(r"_(total|bucket|sum|count|created)$", "", name)


def test_alerts_and_dashboards_name_only_metrics_that_there_are():
    """Fails for a metric that was renamed, of whichever part: all are scraped by one of the monitors."""
    files = [path for path in (CHART / "files").rglob("*") if path.is_file()]
    named = {word for path in files for word in re.findall(r"\bheadrace_\w+", path.read_text(encoding="utf-8"))}
    assert len(named) >= 10
    names, prefixes = declared()
    left = {bare(name) for name in named} - {bare(name) for name in names}
    assert {name for name in left if not name.startswith(prefixes)} == set()


def test_every_file_of_rules_and_dashboards_is_in_the_render():
    """Fails for a file that the templates leave out."""
    groups = {group["name"] for group in one(rendered("everything"), "PrometheusRule")["spec"]["groups"]}
    files = (CHART / "files").rglob("*.yaml")
    assert groups == {group["name"] for path in files for group in yaml.safe_load(path.read_text("utf-8"))["groups"]}
    dashboards = one(rendered("everything"), "ConfigMap", "-dashboard")["data"]
    assert {name: json.loads(text) for name, text in dashboards.items()} == {
        path.name: json.loads(path.read_text(encoding="utf-8")) for path in (CHART / "files").rglob("*.json")
    }


def test_every_alert_is_explained_in_the_documentation():
    docs = CHART.parents[1] / "docs"
    pages = "".join(
        path.read_text("utf-8") for name in ("kubernetes", "operations") for path in docs.glob(f"{name}.md")
    )
    for path in (CHART / "files").rglob("*.yaml"):
        for rule in (r for group in yaml.safe_load(path.read_text("utf-8"))["groups"] for r in group["rules"]):
            assert re.search(rf"\b{rule['alert']}\b", pages), rule["alert"]


def test_thresholds_that_follow_from_values_do():
    """Fails when pins are refused far below the share that is watched, or a short certificate is always called late."""
    values = merged(EVERYTHING, {"settings": {"pin_share": 0.25}, "tls": {"days": 2}})
    found = {}
    for name, manifests in (("default", rendered("everything")), ("changed", render(values))):
        groups = one(manifests, "PrometheusRule")["spec"]["groups"]
        found[name] = {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}
    assert settings_table()["pin_share"][1].default == 0.5
    assert found["default"]["HeadracePinsNearTheirShare"].endswith("> 0.8 * 0.5")
    assert found["changed"]["HeadracePinsNearTheirShare"].endswith("> 0.8 * 0.25")
    assert found["default"]["HeadraceCertificateEnds"].endswith("< 0.5 * 30 * 86400")
    assert found["changed"]["HeadraceCertificateEnds"].endswith("< 0.5 * 2 * 86400")


def test_alerts_ask_for_their_own_release_only():
    """Fails when a placeholder is left, or an alert counts what another release or namespace does."""
    rule = one(rendered("everything"), "PrometheusRule")
    for alert in (alert for group in rule["spec"]["groups"] for alert in group["rules"]):
        assert 'namespace="inference"' in alert["expr"], alert["alert"]
        assert set(re.findall(r'service="([^"]*)"', alert["expr"])) <= {"demo-headrace-gateway"}
        assert set(re.findall(r'instance="([^"]*)"', alert["expr"])) <= {"demo"}
        # Each selector says which release: by the Service that was scraped, or by the label that the PodMonitor adds.
        named = parse(alert["expr"]).metrics.values()
        assert all(labels & {"service", "app_kubernetes_io_instance"} for labels in named)
        assert not re.search(r"SERVICE|NAMESPACE|RELEASE", alert["expr"])
    assert "app.kubernetes.io/instance" in one(rendered("everything"), "PodMonitor")["spec"]["podTargetLabels"]

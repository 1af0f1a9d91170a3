"""The chart, rendered by Helm's own engine, and ways to look into what came out."""

import copy
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from helm_python import Chart

ROOT = Path(__file__).parents[3]
CHART = ROOT / "helm" / "headrace"
GOLDEN = ROOT / "tests" / "golden" / "helm"
SIZES = ("values", "values-minimal", "values-cpu", "values-8gpu", "values-multinode")

Values = dict[str, Any]
Manifest = dict[str, Any]

# Everything that is off by default, on.
EVERYTHING: Values = {
    "ingress": {"enabled": True, "className": "nginx", "tlsSecret": "headrace-tls", "annotations": {"a/b": "c"}},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "outer"}], "hostnames": ["headrace.example"]},
    "grpcRoute": {"enabled": True, "parentRefs": [{"name": "outer"}], "hostnames": ["grpc.headrace.example"]},
    "monitoring": {
        "serviceMonitor": {"enabled": True},
        "podMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True},
        "grafanaDashboard": {"enabled": True},
    },
    "tenants": {"secretName": "headrace-tenants", "adminKeySecret": {"name": "headrace-admin"}},
    "tls": {"authoritySecret": {"name": "headrace-authority"}, "callersSecret": {"name": "headrace-callers"}},
    "settings": {
        "hash_algorithm": "sha256",
        "disk_gb": 10,
        "decode_workers_max": 4,
        "prefill_workers_max": 3,
        "otlp_endpoint": "http://collector.example:4317",
    },
    "model": {"claimName": "models", "hub": {"enabled": True, "tokenSecret": {"name": "hub"}}},
    "ray": {"tokenSecret": "headrace-ray"},
    "diskTier": {"type": "claim", "storageClassName": "fast"},
    "prefillPods": {"gpusPerPod": 1},
    "decodePods": {"gpusPerPod": 1},
    "networkPolicies": {
        "clients": [{"namespaceSelector": {"matchLabels": {"team": "chat"}}}],
        "prometheus": [{"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}],
        "operator": {"namespaceLabels": {"kubernetes.io/metadata.name": "kuberay"}},
        "apiServer": [{"ipBlock": {"cidr": "10.0.0.1/32"}}],
        "collector": [{"ipBlock": {"cidr": "10.0.0.3/32"}}],
    },
    "image": {"pullSecrets": ["registry"]},
}
EXTERNAL_REDIS: Values = {
    "redis": {
        "mode": "external",
        "external": {"host": "redis.example", "tls": True, "username": "headrace", "caSecret": {"name": "redis-ca"}},
    },
    "ray": {"redisUserSecret": "headrace-ray-redis"},
    "networkPolicies": {"redis": [{"ipBlock": {"cidr": "10.0.0.2/32"}}]},
}
# An external Redis of which nothing but where it is stands in the values.
REDIS_BY_SECRETS: Values = {
    "redis": {
        "mode": "external",
        "external": {
            "host": "redis.example",
            "usernameSecret": {"name": "redis-user"},
            "urlSecret": {"name": "redis-url"},
        },
    }
}
SENTINEL: Values = {
    "redis": {
        "mode": "external",
        "external": {"host": "sentinel.example", "port": 26379, "sentinel": {"primary": "cache"}},
    }
}
REDIS_CLUSTER: Values = {
    "redis": {"mode": "external", "external": {"host": "cluster.example", "cluster": True}},
    "ray": {"gcsFaultTolerance": False},
}
# Callers must show a certificate.
CALLERS_SHOW: Values = {"tls": {"callersAuthoritySecret": {"name": "headrace-clients"}}}
LAPTOP: Values = {"head": {"runsWork": True}, "settings": {"gateways": 1}, "decodePods": {"gpusPerPod": 1}}
TOGETHER: Values = {"workersTogether": True, "decodePods": {"gpusPerPod": 2}}


@cache
def loaded() -> Chart:
    """The chart, read once."""
    return Chart.load(CHART)


def size(name: str) -> Values:
    """The values of one of the chart's sizes."""
    return yaml.safe_load((CHART / f"{name}.yaml").read_text(encoding="utf-8"))


def merged(*layers: Values) -> Values:
    """Values over values, as Helm lays them over each other."""
    whole: Values = {}
    for layer in layers:
        for key, value in layer.items():
            inner = whole.get(key)
            whole[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return copy.deepcopy(whole)


def render_text(values: Values, name: str = "demo") -> dict[str, str]:
    """Template -> text, for a release of this name. Raises HelmError for values that schema or chart refuse."""
    return loaded().render(values, name=name, namespace="inference")


def render(values: Values, name: str = "demo") -> list[Manifest]:
    """All objects of a release."""
    texts = render_text(values, name)
    documents = [yaml.load_all(text, yaml.CSafeLoader) for name, text in sorted(texts.items()) if "NOTES" not in name]
    return [document for group in documents for document in group if document]


def one(manifests: list[Manifest], kind: str, name_end: str = "") -> Manifest:
    """The one object of this kind whose name ends so."""
    found = [m for m in manifests if m["kind"] == kind and m["metadata"]["name"].endswith(name_end)]
    assert len(found) == 1, [m["metadata"]["name"] for m in found]
    return found[0]


def ray_pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Component -> template of its pods, of Ray's pods."""
    cluster = one(manifests, "RayService")["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])]
    templates = [group["template"] for group in groups]
    return {template["metadata"]["labels"]["app.kubernetes.io/component"]: template for template in templates}


def serve_config(manifests: list[Manifest]) -> Values:
    """What Serve is told."""
    return yaml.safe_load(one(manifests, "RayService")["spec"]["serveConfigV2"])


@cache
def generator() -> ModuleType:
    """helm/generate_chart.py, which belongs to no package."""
    spec = importlib.util.spec_from_file_location("generate_chart", ROOT / "helm" / "generate_chart.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their own module
    spec.loader.exec_module(module)
    return module

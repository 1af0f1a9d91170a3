"""What an operator takes away with `null`, which Helm understands as: no such key."""

import json
from functools import cache
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python import HelmError
from rendered_chart import (
    CHART,
    EVERYTHING,
    EXTERNAL_REDIS,
    Values,
    generator,
    loaded,
    merged,
    one,
    ray_pods,
    render,
    render_text,
    size,
)

KUBERNETES_OWN = ("v1", "apps/v1", "batch/v1", "policy/v1", "networking.k8s.io/v1")
VALUES_TEXT = (CHART / "values.yaml").read_text(encoding="utf-8")
BASES: dict[str, Values] = {"defaults": {}, "everything": merged(EVERYTHING, EXTERNAL_REDIS)}


def mappings(path: str, values: Values) -> list[str]:
    """Paths of the mappings in values, those in others included."""
    inner = [(f"{path}.{key}".lstrip("."), value) for key, value in values.items() if isinstance(value, dict)]
    return [each for name, value in inner for each in (name, *mappings(name, value))]


PATHS = sorted({*mappings("", yaml.safe_load(VALUES_TEXT)), *(row.path for row in generator().value_rows(VALUES_TEXT))})


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("path", PATHS)
def test_null_takes_a_value_away_or_is_refused_by_name(path: str, base: str):
    """Fails when a template ends in its middle then, or writes what Kubernetes refuses or takes for something else."""
    override: Any = None
    for step in reversed(path.split(".")):
        override = {step: override}
    values = merged(BASES[base], override)
    try:
        loaded().validate_schema(loaded().merge_values(values))
        texts = render_text(values)
    except HelmError as refused:
        why = str(refused)
        if path.rpartition(".")[2] in why and "executing" not in why:
            return
        raise
    assert not any(none in text for text in texts.values() for none in ("<no value>", "<nil>", "%!"))
    for document in documents(texts) - documents(base_texts(base)):
        if any(f'"apiVersion": "{own}"' in document for own in KUBERNETES_OWN):
            kubernetes_validate.validate(json.loads(document), "1.33", strict=True)


def documents(texts: dict[str, str]) -> set[str]:
    """The objects of a render, each as JSON."""
    found = [
        each for name, text in texts.items() if "NOTES" not in name for each in yaml.load_all(text, yaml.CSafeLoader)
    ]
    return {json.dumps(each) for each in found if each}


@cache
def base_texts(base: str) -> dict[str, str]:
    return render_text(BASES[base])


def test_pods_without_resources_have_no_bounds_but_their_gpus():
    """Fails when limits that somebody took away are still there, or GPUs go with them."""
    bare = {"resources": None}
    gpus = {"resources": {"limits": None}, "gpusPerPod": 2}
    pods = ray_pods(render({"head": bare, "gatewayPods": bare, "prefillPods": bare, "decodePods": gpus}))
    resources = {name: pod["spec"]["containers"][0]["resources"] for name, pod in pods.items()}
    assert resources == {
        "head": {},
        "gateway": {},
        "prefill": {},
        "decode": {"requests": {"cpu": "2", "memory": "8Gi"}, "limits": {"nvidia.com/gpu": "2"}},
    }


def test_one_machine_with_gpus_runs_all_of_its_size_whatever_its_taint():
    """Fails when head, gateways or Redis wait for another machine, which there is not."""
    manifests = render(size("values-8gpu"))
    pods = [*ray_pods(manifests).values(), one(manifests, "StatefulSet")["spec"]["template"]]
    assert len(pods) == 4
    for pod in pods:
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["spec"]["tolerations"]

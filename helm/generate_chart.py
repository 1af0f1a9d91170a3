"""Writes into the chart what follows from elsewhere: values.schema.json and README.md, from values.yaml and settings.

Run it after a change of `helm/headrace/values.yaml` or of a setting: `python helm/generate_chart.py`. A test holds the
files equal to what it would write. Templates are written by hand. With `--golden` it also renders the chart into
`tests/golden/helm`; with `--release` it keeps that render under the chart's version, once for each release, for the
test that compares later charts with it.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from headrace.config import settings_table

CHART = Path(__file__).parent / "headrace"
GOLDEN = CHART.parents[1] / "tests" / "golden" / "helm"
GOLDEN_SIZES = ("values", "values-minimal")

# Settings that the chart sets itself, from where things lie in its pods; values may not name them.
CHART_SETTINGS = {
    "redis_url": "from `redis`, by the environment, since it holds the password",
    "http_host": "Serve's proxies listen, not a gateway",
    "http_port": "always 8000",
    "grpc_port": "always 9000",
    "store_host": "each pod's own address",
    "arena_dir": "always /dev/shm",
    "disk_dir": "the volume of `diskTier`",
    "node_id": "each pod's name",
    "metrics_port": "always 9400: a store node's; the parts beside it have the next ports",
    "tls_cert_file": "from `tls.authoritySecret`",
    "tls_key_file": "from `tls.authoritySecret`",
    "tls_ca_file": "from `tls.authoritySecret`",
    "tls_client_ca_file": "from `tls.callersAuthoritySecret`, as an option of Serve's proxies",
    "insecure_network": "true unless there are TLS between pods and keys; then the network policies must be on",
    "tenants_file": "from `tenants`",
    "model_cache_dir": "in the pod's home, a volume of `model.cacheSize`",
    "state_dir": "used by `headrace up` only",
}
CHOICES = {
    "image.pullPolicy": ["Always", "IfNotPresent", "Never"],
    "diskTier.type": ["emptyDir", "claim"],
    "redis.mode": ["bundled", "external"],
    "ray.upgradeStrategy": ["NewCluster", "None"],
    "service.type": ["ClusterIP", "NodePort", "LoadBalancer"],
    "topologySpread.whenUnsatisfiable": ["ScheduleAnyway", "DoNotSchedule"],
}
AT_LEAST_ONE = (
    "prefillPods.perPod",
    "decodePods.perPod",
    "settings.gateways",
    "settings.decode_workers",
    "settings.arena_mb",
    "tls.days",
    "tls.rayDays",
    "podSecurity.runAsUser",
    "topologySpread.maxSkew",
    "probes.startupSeconds",
    "probes.periodSeconds",
    "probes.timeoutSeconds",
    "probes.failureThreshold",
)
# Mappings whose keys are not ours.
OPEN_MAPPINGS = ("requests", "limits", "podLabels", "labels")
JSON_TYPES: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}


@dataclass(frozen=True, slots=True)
class ValueRow:
    """One value of the chart: its dotted path, its default, and the comment above it."""

    path: str
    default: Any
    comment: str


def generate_chart() -> dict[Path, str]:
    """The generated files of the chart and their text."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema_of("", values)}
    schema["properties"]["global"] = {"type": "object", "description": "Helm's own; not read."}
    return {
        CHART / "values.schema.json": json.dumps(schema, indent=2, ensure_ascii=False) + "\n",
        CHART / "README.md": readme(list(value_rows(text))),
    }


def schema_of(path: str, value: Any) -> dict[str, Any]:
    """The JSON schema of one value, by its default. A mapping takes its own keys only, unless open or empty."""
    name = path.rpartition(".")[2]
    if path == "settings":
        return settings_schema(value)
    if isinstance(value, dict) and (not value or name in OPEN_MAPPINGS):
        return {"type": "object"}
    if isinstance(value, dict):
        properties = {key: schema_of(f"{path}.{key}".lstrip("."), inner) for key, inner in value.items()}
        return {
            "type": "object",
            "additionalProperties": False,
            "required": [key for key, inner in value.items() if is_needed(key, inner)],
            "properties": properties,
        }
    if isinstance(value, list):
        return {"type": "array"}
    schema: dict[str, Any] = {"type": JSON_TYPES[type(value)]}
    if path in CHOICES:
        schema["enum"] = CHOICES[path]
    if schema["type"] in ("integer", "number"):
        schema["minimum"] = 1 if path in AT_LEAST_ONE else 0
    return schema


def is_needed(key: str, default: Any) -> bool:
    """Whether a value may not be taken away, as Helm does where somebody's values say `null`. What is empty by default
    may, and resources and labels, of which an operator may want none."""
    return isinstance(default, bool) or (bool(default) and key not in ("resources", "requests", "limits", "labels"))


def settings_schema(chosen: dict[str, Any]) -> dict[str, Any]:
    """The schema of `settings`: every setting but those of CHART_SETTINGS, with its type and its line of help. chosen:
    those that values.yaml names, by which templates go, too."""
    properties: dict[str, Any] = {}
    for name, (_, row) in settings_table().items():
        if name in CHART_SETTINGS:
            continue
        properties[name] = {"type": JSON_TYPES[type(row.default)], "description": row.metadata["help"]}
        if f"settings.{name}" in AT_LEAST_ONE:
            properties[name]["minimum"] = 1
    required = [key for key, inner in chosen.items() if is_needed(key, inner)]
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


def value_rows(text: str) -> Iterator[ValueRow]:
    """Each value of a values.yaml that is no mapping of further values, in order, with the comment above it."""
    values = yaml.safe_load(text)
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    open_indent: int | None = None  # inside a mapping whose keys are not ours
    for line in text.splitlines():
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        if open_indent is not None and stripped and indent > open_indent:
            continue
        open_indent = None
        if not stripped:
            comment = []
        elif stripped.startswith("#"):
            comment.append(stripped.lstrip("# "))
        else:
            key = stripped.partition(":")[0]
            path = [step for step in path if step[0] < indent] + [(indent, key)]
            value = values
            for _, step in path:
                value = value[step]
            whole = not isinstance(value, dict) or not value
            if key == "resources" or key in OPEN_MAPPINGS:
                whole, open_indent = True, indent
            if whole:
                yield ValueRow(".".join(step for _, step in path), value, " ".join(comment))
            comment = []


def readme(rows: list[ValueRow]) -> str:
    """README.md: how to install, and the table of values."""
    lines = [
        "# The Headrace chart",
        "",
        "A [KubeRay](https://docs.ray.io/en/latest/cluster/kubernetes/index.html) RayService with gateways, prefill",
        "and decode workers and their store nodes. `docs/kubernetes.md` in the repository tells how to install it,",
        "what its sizes are for, and what of it was checked. This file is generated: `python helm/generate_chart.py`.",
        "",
        "| size | for |",
        "|---|---|",
        "| `values-minimal.yaml` | a cluster on a laptop: one Ray pod |",
        "| `values.yaml` | the defaults: small pods, no GPUs |",
        "| `values-cpu.yaml` | a few machines without GPUs |",
        "| `values-8gpu.yaml` | one machine with 8 GPUs |",
        "| `values-multinode.yaml` | several machines with 8 GPUs each, an external Redis, tenants, monitoring |",
        "",
        "## Values",
        "",
        "`settings` takes every setting of `docs/configuration.md` under its YAML name, but those that the chart sets:",
        "",
        *(f"- `{name}`: {why}" for name, why in CHART_SETTINGS.items()),
        "",
        "Values that are not in this table or that one are refused.",
        "",
        "| value | default | what it does |",
        "|---|---|---|",
    ]
    lines += [f"| `{row.path}` | `{json.dumps(row.default)}` | {row.comment} |" for row in rows]
    return "\n".join(lines) + "\n"


def render_golden(size: str) -> str:
    """The manifests of one size, by Helm's own engine, for a release `demo` in the namespace `inference`."""
    from helm_python import Chart

    values = yaml.safe_load((CHART / f"{size}.yaml").read_text(encoding="utf-8"))
    with Chart.load(CHART) as chart:
        texts = chart.render(values, name="demo", namespace="inference")
    parts = [f"---\n# {name}\n{text.strip()}\n" for name, text in sorted(texts.items()) if name.endswith(".yaml")]
    return "".join(part for part in parts if "kind:" in part)


def write_renders(folder: Path) -> None:
    """The golden sizes, each into its file."""
    for size in GOLDEN_SIZES:
        (folder / f"{size}.yaml").write_text(render_golden(size), encoding="utf-8")


def keep_release(releases: Path) -> Path:
    """Keep the render under the chart's version; the folder. FileExistsError for a version that was released already:
    what people have installed does not change any more."""
    version = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))["version"]
    folder = releases / str(version)
    folder.mkdir(parents=True)
    write_renders(folder)
    return folder


def main() -> None:
    """Write the generated files, and the renders that the command line asks for."""
    for file, content in generate_chart().items():
        file.write_text(content, encoding="utf-8")
    if "--golden" in sys.argv:
        write_renders(GOLDEN)
    if "--release" in sys.argv:
        print(keep_release(GOLDEN / "releases"))


if __name__ == "__main__":
    main()

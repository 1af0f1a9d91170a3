"""What docs/kubernetes.md tells to type: its `helm` commands render, its values and secrets are the chart's."""

import json
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import yaml
from rendered_chart import CHART, EVERYTHING, ROOT, Manifest, Values, generator, merged, one, ray_pods, render

PAGE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")


def commands(program: str) -> list[list[str]]:
    blocks = re.findall(r"^```\w*\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith(f"{program} ")]


def values_of(words: list[str]) -> Values:
    """What `-f` and `--set` of a command give, one over the other."""
    values: Values = {}
    for option, argument in pairwise(words):
        if option == "-f":
            values = merged(values, yaml.safe_load((ROOT / argument).read_text(encoding="utf-8")))
        elif option == "--set":
            path, _, text = argument.partition("=")
            inner: Any = yaml.safe_load(text)
            for step in reversed(path.split(".")):
                inner = {step: inner}
            values = merged(values, inner)
    return values


def installs() -> list[list[str]]:
    return [words for words in commands("helm") if words[0] in ("install", "upgrade")]


def release_of(words: list[str]) -> str:
    return words[words.index("helm/headrace") - 1]


def test_each_helm_command_renders_the_chart_that_it_names():
    """Fails for a value that was renamed, and for values that the chart refuses together."""
    assert len(installs()) == 9
    for words in installs():
        assert render(values_of(words), release_of(words))


def test_the_group_that_the_page_patches_is_that_of_decode_workers():
    """Fails when the groups change their order, so that whoever wants more decode workers gets other pods."""
    (patch,) = (json.loads(words[-1]) for words in commands("kubectl") if "patch" in words)
    groups = one(render({"settings": {"decode_workers": 4}}), "RayService")["spec"]["rayClusterConfig"][
        "workerGroupSpecs"
    ]
    for step in patch:
        *_, number, field = step["path"].split("/")
        assert groups[int(number)]["groupName"] == "decode"
        assert groups[int(number)][field] == step["value"]


def selectors_of(manifests: list[Manifest]) -> list[dict[str, Any]]:
    """Labels by which objects of a release choose pods, or Services."""
    found = [m["spec"]["selector"] for m in manifests if m["kind"] in ("Service", "StatefulSet", "PodDisruptionBudget")]
    found += [m["spec"]["podSelector"] for m in manifests if m["kind"] == "NetworkPolicy"]
    found += [m["spec"]["selector"] for m in manifests if m["kind"] in ("ServiceMonitor", "PodMonitor")]
    return [selector.get("matchLabels", selector) for selector in found]


def test_two_models_in_one_namespace_have_nothing_in_common():
    """The page's two releases, and the same with all that is off by default: fails when they would write over each
    other's objects, or the Service, a policy, a budget or a monitor of the one means pods of the other as well."""
    chat, small = ((release_of(words), values_of(words)) for words in installs() if release_of(words) != "headrace")
    for extra in ({}, EVERYTHING):
        first, second = (render(merged(extra, values), name) for name, values in (chat, small))
        names = [{(m["kind"], m["metadata"]["name"]) for m in manifests} for manifests in (first, second)]
        assert names[0] & names[1] == set()
        for ours, theirs in ((first, second), (second, first)):
            pods = [pod["metadata"]["labels"] for pod in ray_pods(theirs).values()]
            pods += [m["spec"]["template"]["metadata"]["labels"] for m in theirs if m["kind"] == "StatefulSet"]
            pods += [m["metadata"]["labels"] for m in theirs if m["kind"] == "Service"]
            for selector in selectors_of(ours):
                assert not any(selector.items() <= labels.items() for labels in pods), selector
        # Where each keeps its index.
        urls = [one(m, "Service", "-redis")["metadata"]["name"] for m in (first, second)]
        assert len(set(urls)) == 2


def secrets_read(manifests: Any) -> Iterator[tuple[str, str]]:
    """Name and key of each secret that the manifests read."""
    if isinstance(manifests, list):
        for item in manifests:
            yield from secrets_read(item)
    elif isinstance(manifests, dict):
        if "secretKeyRef" in manifests:
            yield manifests["secretKeyRef"]["name"], manifests["secretKeyRef"]["key"]
        for item in manifests.values():
            yield from secrets_read(item)


def test_the_secrets_that_the_page_makes_have_the_keys_that_the_chart_reads():
    made = {}
    for words in commands("kubectl"):
        if "secret" in words:
            name = words[words.index("generic") + 1]
            made[name] = {re.split("[=/]", w.split("=", 1)[1])[0] for w in words if w.startswith("--from-")}
    read = set(secrets_read(render(EVERYTHING)))
    assert {("headrace-redis", "password"), ("headrace-admin", "api-key")} <= read
    for name, key in read:
        assert name not in made or key in made[name]
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    authority = values["tls"]["authoritySecret"]
    assert made["headrace-authority"] == {authority["certificate"], authority["privateKey"]}
    assert made["headrace-tenants"] == {values["tenants"]["key"]}
    assert made["headrace-callers-authority"] == {
        values["tls"]["callersAuthoritySecret"]["authority"],
        "tls.crt",
        "tls.key",
    }


def test_every_secret_that_a_value_names_is_in_the_pages_table():
    rows = generator().value_rows((CHART / "values.yaml").read_text(encoding="utf-8"))
    paths = [row.path for row in rows if re.search(r"secret", row.path, re.IGNORECASE)]
    named = {re.sub(r"\.(name|key|certificate|privateKey|authority)$", "", path) for path in paths}
    # Of an Ingress, its controller's matter.
    for value in named - {"ingress.tlsSecret"} - {"image.pullSecrets"}:
        if value != "tenants":
            assert f"`{value}`" in PAGE, value


def test_the_page_names_only_values_that_there_are():
    """In the tables and in the text, by their dotted paths."""
    rows = generator().value_rows((CHART / "values.yaml").read_text(encoding="utf-8"))
    known = {row.path for row in rows}
    known |= {".".join(path.split(".")[:length]) for path in known for length in range(1, path.count(".") + 1)}
    heads = {path.split(".")[0] for path in known}
    named = {name for name in re.findall(r"`([a-z]\w*(?:\.\w+)+)(?:: \w+)?`", PAGE) if name.split(".")[0] in heads}
    assert len(named) > 20
    settings = {f"settings.{name}" for name in generator().settings_schema({})["properties"]}
    # Keys of secrets look alike.
    assert named - known - settings - {"tls.crt", "tls.key"} == set()


def test_the_releases_that_the_page_tells_of_are_the_charts():
    version = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))["version"]
    assert f"| {version} |" in PAGE

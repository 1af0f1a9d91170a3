"""Alert rules and dashboards: whole PromQL, each alert with a page that says what to do, nothing that cannot fire."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from promql import parse

from headrace.telemetry.metrics import TTFT_BUCKETS_S

ROOT = Path(__file__).parents[3]
FILES = ROOT / "helm" / "headrace" / "files"
OPERATIONS = ROOT / "docs" / "operations.md"


def rules() -> list[dict[str, Any]]:
    groups = [group for path in FILES.glob("*.yaml") for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def dashboards() -> dict[str, dict[str, Any]]:
    return {path.name: json.loads(path.read_text()) for path in FILES.glob("*.json")}


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_compares_something_waits_a_while_and_says_what_it_means(rule):
    """Fails for an expression that Prometheus would refuse, one that fires at the first sample, or one without help."""
    named = parse(rule["expr"])
    assert named.has_comparison or rule["expr"].startswith("absent(")
    minutes = int(rule["for"][:-1]) * {"m": 1, "h": 60}[rule["for"][-1]]
    assert 1 <= minutes <= 60
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"summary", "action", "runbook"}


def test_a_latency_that_an_alert_compares_is_the_edge_of_a_bucket():
    """Between edges Prometheus guesses: a threshold there would fire, or not, by where in a bucket it lies."""
    quantiles = [rule["expr"] for rule in rules() if "histogram_quantile" in rule["expr"]]
    assert len(quantiles) == 1
    for expression in quantiles:
        assert "headrace_time_to_first_token_seconds_bucket" in expression
        assert float(expression.rpartition(">")[2]) in TTFT_BUCKETS_S


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_each_alert_has_its_place_in_the_runbook(rule):
    """Fails when an alert's link leads nowhere, or its part of the page leaves out meaning, causes or what to do."""
    page, anchor = OPERATIONS.read_text(encoding="utf-8"), rule["annotations"]["runbook"]
    assert anchor == f"docs/operations.md#{rule['alert'].lower()}"
    part = re.search(rf"^### {rule['alert']}\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL)
    assert part is not None, "no heading"
    for word in ("Means:", "Causes:", "Look:", "Do:"):
        assert f"**{word}**" in part[1]


def test_the_runbook_has_no_alert_that_is_gone():
    told = set(re.findall(r"^### (Headrace\w+)$", OPERATIONS.read_text(encoding="utf-8"), re.MULTILINE))
    assert told == {rule["alert"] for rule in rules()}


def test_alerts_are_named_once():
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", sorted(dashboards()))
def test_a_dashboard_asks_in_whole_promql_of_a_datasource_that_is_chosen(name):
    """Fails when a panel would show an error, two panels lie on each other, or a query is bound to one installation."""
    board = dashboards()[name]
    variables = {variable["name"] for variable in board["templating"]["list"]}
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(places) == len(set(places))
    assert len({panel["id"] for panel in board["panels"]}) == len(places)
    for panel in board["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            parse(target["expr"])
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables
    assert len({each["uid"] for each in dashboards().values()}) == len(dashboards())


@pytest.mark.parametrize(
    "wrong",
    [
        "sum(rate(headrace_requests_total[5m])",
        "rate(headrace_requests_total)",
        "sum by outcome (headrace_requests_total)",
        'headrace_requests_total{outcome="failed"',
        "headrace_requests_total{outcome=failed}",
        "headrace_requests_total > > 1",
        "unknown_function(headrace_requests_total)",
        "sum(a) sum(b)",
    ],
)
def test_what_is_not_promql_is_refused(wrong):
    """Fails when the reader of these tests would let a broken expression through."""
    with pytest.raises(ValueError, match=r".+"):
        parse(wrong)


def test_names_and_labels_of_an_expression_are_found():
    named = parse('sum by (le, call) (rate(a_bucket{call="x", service=~"y"}[5m] offset 1d)) / on (pod) max(b) > 0.5')
    assert named.metrics == {"a_bucket": {"call", "service"}, "b": set()}
    assert named.grouped_by == [({"le", "call"}, {"a_bucket"}), (set(), {"b"})]

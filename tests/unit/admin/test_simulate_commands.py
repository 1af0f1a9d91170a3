"""`headrace simulate` over requests that it makes up: rows, files and pictures; wrong combinations are refused."""

import json

import pytest
from click.testing import CliRunner

from headrace.admin.cli import main

ROW = {
    "policy", "load", "hit_share_of_ideal", "ttft_s_p50", "ttft_s_p90", "ttft_s_p99", "slo_share", "itl_ms_p90",
    "imbalance", "fetched_gb", "goodput_per_s",
}  # fmt: skip


def run(*args: str):
    return CliRunner().invoke(main, ["simulate", *args], catch_exceptions=False)


def test_routers_are_compared_on_made_up_requests_in_json_and_as_a_picture(tmp_path):
    shown = run(
        "--generate", "multi-turn", "--requests", "200", "--cluster", "h100-8b-pd-pool", "--policy", "headrace",
        "--policy", "mooncake", "--load", "0.5", "--load", "0.9", "--json", "--plot", str(tmp_path / "plot.png"),
    )  # fmt: skip
    assert shown.exit_code == 0
    rows = json.loads(shown.stdout)["rows"]
    assert [(row["policy"], row["load"]) for row in rows] == [
        ("headrace", 0.5), ("mooncake", 0.5), ("headrace", 0.9), ("mooncake", 0.9),
    ]  # fmt: skip
    assert set(rows[0]) >= ROW
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_all_means_every_router_and_no_variant_of_one():
    shown = run("--generate", "bursts", "--requests", "60", "--cluster", "h100-8b-mixed", "--json")
    names = [row["policy"] for row in json.loads(shown.stdout)["rows"]]
    assert len(names) == len(set(names)) == 12
    assert not any(name.startswith("headrace-") for name in names)


def test_what_was_made_up_can_be_written_and_replayed_with_the_same_figures(tmp_path):
    made = ("--generate", "agents", "--requests", "150", "--seed", "3", "--set", "turns=4")
    path = str(tmp_path / "agents.jsonl")
    told = run(*made, "--write", path, "--json")
    assert json.loads(told.stdout)["requests"] == 150
    compared = ("--cluster", "h100-8b-pd", "--policy", "headrace", "--tick-s", "0", "--json")
    direct, replayed = (json.loads(run(*source, *compared).stdout)["rows"] for source in (made, ("--trace", path)))
    assert direct[0]["hit_share_of_ideal"] == pytest.approx(replayed[0]["hit_share_of_ideal"], rel=0.02)


@pytest.mark.parametrize(
    ("code", "args", "said"),
    [
        (2, ("--cluster", "h100-8b-pd"), "say which requests"),
        (2, ("--generate", "agents"), "say what to do"),
        (2, ("--generate", "agents", "--eviction", "--cluster", "h100-8b-pd"), "say what to do"),
        (2, ("--generate", "agents", "--eviction", "--load", "0.5", "--plot", "x.png"), "--load, --plot: of --cluster"),
        (3, ("--generate", "agents", "--set", "colour=3", "--eviction"), "no workload setting 'colour'"),
        (3, ("--generate", "agents", "--cluster", "h100-8b-pd", "--policy", "nobody"), "no router 'nobody'"),
    ],
)
def test_a_wrong_combination_is_refused_in_words(code, args, said):
    """Fails when one is taken for another, or an option is dropped without a word."""
    shown = run(*args)
    assert shown.exit_code == code
    assert said in shown.stderr

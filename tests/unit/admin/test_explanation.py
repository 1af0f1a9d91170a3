"""`headrace explain`: the table, what would have had to differ, and predictions against measurements."""

import json

import pytest
from click.testing import CliRunner

from headrace.admin.cli import main
from headrace.wire.v1 import admin_pb2


def plan(decode, prefill="", **terms):
    parts = {"compute_s": 0.1, **terms}
    cost_s = max(parts.get("wait_s", 0), parts.get("fetch_s", 0))
    cost_s += sum(value for name, value in parts.items() if name.endswith("_s") and name not in ("wait_s", "fetch_s"))
    tokens = {"device_tokens": 16, "loaded_tokens": 32, "computed_tokens": 2}
    return admin_pb2.RoutePlan(
        decode_worker=decode, prefill_worker=prefill, ttft_s=cost_s, cost_s=cost_s, **tokens | parts
    )


@pytest.fixture
def explain(small_gateway, tmp_path, monkeypatch):
    """Run `headrace explain` about a decision between these plans."""
    monkeypatch.setenv("HEADRACE_ADDRESS", small_gateway.address)
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path))

    def run(chosen, *others, flags=(), **fields):
        small_gateway.route = admin_pb2.ExplainRouteReply(
            request_id="r1",
            model="echo-1",
            unix_ms=1_800_000_000_000,
            prompt_tokens=50,
            **{
                "reason": "sooner",
                "settled_by": "cost",
                "attempts": 1,
                "chosen": chosen,
                "others": others,
                "num_considered": 1 + len(others),
                "predicted_ttft_s": chosen.ttft_s,
            }
            | fields,
        )
        return CliRunner().invoke(main, ["explain", "r1", *flags], catch_exceptions=False)

    return run


def test_every_plan_is_shown_with_the_terms_that_any_of_them_has(explain):
    """Fails when a term is left out, shown in another column, or all-zero columns drown the others."""
    done = explain(plan("d0", "p0", hand_off_s=0.02), plan("d1", wait_s=0.5))
    assert done.exit_code == 0
    header, chosen, other = done.stdout.splitlines()[2:5]
    assert header.split() == "plan at hand loaded computed wait compute hand-off first token cost barred".split()
    assert chosen.split() == "* p0 > d0 16 32 2 0 100.0 ms 20.0 ms 120.0 ms 120.0 ms".split()
    assert other.split() == "d1 16 32 2 500.0 ms 100.0 ms 0 600.0 ms 600.0 ms".split()


def test_it_says_what_would_have_made_the_next_best_plan_win(explain):
    """Fails when the margin is wrong, or a term is named that could not have made the difference."""
    done = explain(plan("d0", compute_s=0.3), plan("d1", compute_s=0.1, wait_s=0.25, hand_off_s=0.04))
    assert "next best: d1, which costs 90.0 ms more. It would have won with" in done.stdout
    assert "  wait of 160.0 ms instead of 250.0 ms (here 0)" in done.stdout
    assert "  compute of 10.0 ms instead of 100.0 ms (here 300.0 ms)" in done.stdout
    assert "hand-off of" not in done.stdout


def test_a_shorter_wait_does_not_help_while_a_fetch_takes_as_long(explain):
    """Fails when wait and fetch, which pass at the same time, are treated as if they added up."""
    done = explain(plan("d0"), plan("d1", wait_s=0.25, fetch_s=0.2))
    assert "wait of" not in done.stdout
    assert "no single term" in done.stdout


def test_a_plan_that_was_barred_is_told_with_its_reason(explain):
    """Fails when a cheaper plan is shown and nobody is told why it was not taken."""
    done = explain(plan("d0", compute_s=0.3), plan("d1", barred="its memory is nearly full"))
    assert "d1 would cost 100.0 ms, but its memory is nearly full." in done.stdout
    assert "There was no other plan." in done.stdout


def test_predictions_stand_beside_what_was_measured_and_what_is_not_known_is_a_dash(explain):
    """Fails when a measurement is shown as the prediction, or an unknown one as 0."""
    outcome = {"ttft_s": 0.25, "decode_worker": "d0", "cached_grpc_tokens": 32}
    done = explain(plan("d0", fetch_s=0.03), outcome=outcome)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert "first token 130.0 ms 250.0 ms".split() in lines
    assert "fetch 30.0 ms -".split() in lines
    assert "cached tokens 48 32".split() in lines


def test_json_has_every_term(explain):
    """Fails when a script gets less than a person."""
    shown = json.loads(explain(plan("d0", "p0", hand_off_s=0.02), plan("d1"), flags=["--json"]).stdout)
    assert shown["chosen"]["hand_off_s"] == 0.02
    assert shown["others"][0]["decode_worker"] == "d1"
    assert shown["outcome"]["ttft_s"] is None


def test_an_unknown_request_is_an_error_of_the_callers(run_unknown):
    """Fails when nothing is told, or the exit code is that of a broken gateway."""
    assert run_unknown.exit_code == 3
    assert "not among the last" in run_unknown.stderr


@pytest.fixture
def run_unknown(small_gateway, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_ADDRESS", small_gateway.address)
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path))
    return CliRunner().invoke(main, ["explain", "nobody"])

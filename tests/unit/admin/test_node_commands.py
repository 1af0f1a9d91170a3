"""`nodes ls`, `nodes drain`, `tenants ls` and `tenants quota` against a real gRPC server."""

import json

import pytest
from click.testing import CliRunner

from headrace.admin.cli import main


@pytest.fixture
def run(small_gateway, tmp_path, monkeypatch):
    """Run `headrace ...` against the small gateway, away from this user's own settings."""
    monkeypatch.setenv("HEADRACE_ADDRESS", small_gateway.address)
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path))
    return lambda *args, **kwargs: CliRunner().invoke(main, list(args), catch_exceptions=False, **kwargs)


def step(**counts) -> dict[str, object]:
    return {"total_blocks": 10, "state": "draining", **counts}


def test_nodes_are_listed_with_their_room_their_pins_and_whether_they_drain(run, small_gateway):
    """Fails when a column is of another node or tier, or a drain does not show."""
    shown = run("nodes", "ls")
    assert shown.exit_code == 0
    assert "0 B of 100.0 KiB" in shown.stdout
    assert "serving" in shown.stdout
    small_gateway.draining = True
    assert "draining" in run("nodes", "ls").stdout
    node = json.loads(run("nodes", "ls", "--json").stdout)["nodes"][0]
    assert (node["node_id"], node["draining"], node["tiers"][0]["tier"]) == ("here", True, "host")


def test_a_node_that_lives_but_does_not_answer_is_listed_and_makes_it_incomplete(run, small_gateway):
    small_gateway.silent_holders = {"node:here"}
    done = run("nodes", "ls")
    assert done.exit_code == 9
    assert "here" in done.stdout
    assert "?" in done.stdout


def test_a_drain_tells_how_far_it_is_and_at_its_end_what_moved_and_what_stayed(run, small_gateway):
    """Fails when the last line is not of the last step, or blocks that are nowhere else look like success."""
    end = {"moved_blocks": 7, "present_blocks": 3, "moved_bytes": 7 << 20, "done": True, "state": "drained"}
    end |= {"moved_to": {"b": 3, "a": 4}}
    small_gateway.drain_steps = [step(moved_blocks=1), step(**end)]
    done = run("nodes", "drain", "here")
    assert done.exit_code == 0
    assert done.stdout == (
        "node:here is drained: 7 of 10 blocks moved (7.0 MiB) to node:a 4, node:b 3, 3 a peer had already, 0 stay here"
        " alone\n"
    )
    assert small_gateway.orders[0].holder == "node:here"
    small_gateway.drain_steps[-1] |= {"moved_blocks": 5, "refused_blocks": 2}
    done = run("nodes", "drain", "node:here", "--json")
    assert (done.exit_code, json.loads(done.stdout)["stayed_blocks"]) == (9, 2)
    assert "blocks that are on this node alone: 2" in done.stderr


def test_a_drain_that_fails_or_breaks_off_is_exit_code_9(run, small_gateway):
    small_gateway.drain_steps = [step(moved_blocks=10, done=True, error="no peer is left to move blocks to")]
    done = run("nodes", "drain", "here")
    assert done.exit_code == 9
    assert "no peer is left" in done.stderr
    small_gateway.drain_steps = [step(moved_blocks=1)]
    assert run("nodes", "drain", "here").exit_code == 9


def test_a_drain_is_undone_and_ordered_without_moving(run, small_gateway):
    """Fails when a flag is lost; and where nothing moves, nothing "stayed" either."""
    small_gateway.drain_steps = [{"done": True, "state": "serving"}]
    done = run("nodes", "drain", "here", "--undo")
    assert (done.exit_code, done.stdout) == (0, "node:here is serving\n")
    assert run("nodes", "drain", "here", "--without-moving").exit_code == 0
    undo, without = small_gateway.orders
    assert (undo.undo, undo.without_moving, without.undo, without.without_moving) == (True, False, False, True)
    assert run("nodes", "drain", "here", "--undo", "--without-moving").exit_code == 2


def test_tenants_are_listed_with_their_budgets_and_what_they_use(run, small_gateway):
    small_gateway.quota.bytes_max = 2 << 30
    shown = run("tenants", "ls").stdout
    for cell in ("acme", "acme-all", "2.0 GiB", "node:here", "3.0 KiB", "7", "600"):
        assert cell in shown, cell
    tenant = json.loads(run("tenants", "ls", "--json").stdout)["tenants"][0]
    assert (tenant["bytes_max"], tenant["nodes"][0]["refused_blocks"]) == (2 << 30, 7)
    assert (tenant["requests_per_minute"], tenant["tokens_per_minute"]) == (600, None)
    small_gateway.silent_holders = {"node:there"}
    assert run("tenants", "ls").exit_code == 9


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (["--max", "2GB", "--min", "500MB"], (2_000_000_000, 500_000_000, False)),
        (["--max", "2GiB"], (2 << 30, 64, False)),
        (["--min", "500"], (1024, 500, False)),
        (["--none"], (None, 0, False)),
        (["--none", "--min", "5"], (None, 5, False)),
        (["--reset"], (None, 0, True)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_quota_is_sent_whole_and_what_is_not_said_stays_as_it_is(run, small_gateway, given, sent):
    """Fails when setting one of the two bounds takes the other away."""
    small_gateway.quota.bytes_max, small_gateway.quota.bytes_min = 1024, 64
    done = run("tenants", "quota", "acme", *given, "--json")
    assert done.exit_code == 0
    order = small_gateway.orders[0]
    asked = (order.bytes_max if order.HasField("bytes_max") else None, order.bytes_min, order.reset)
    assert asked == sent
    tenant = json.loads(done.stdout)["tenant"]
    assert (tenant["bytes_max"], tenant["bytes_min"]) == sent[:2]


@pytest.mark.parametrize(
    "given", [[], ["--reset", "--max", "1GB"], ["--none", "--max", "1GB"], ["--max", "lots"], ["--max", "-1"]]
)
def test_a_quota_that_contradicts_itself_is_refused_before_it_is_sent(run, small_gateway, given):
    assert run("tenants", "quota", "acme", *given).exit_code == 2
    assert small_gateway.orders == []


def test_a_quota_for_nobody_is_an_invalid_request_and_a_node_that_was_not_told_is_named(run, small_gateway):
    assert run("tenants", "quota", "nobody", "--max", "1GB").exit_code == 3
    assert run("tenants", "quota", "nobody", "--none").exit_code == 3
    small_gateway.silent_holders = {"node:there"}
    done = run("tenants", "quota", "acme", "--none")
    assert done.exit_code == 9
    assert "incomplete: node:there" in done.stderr

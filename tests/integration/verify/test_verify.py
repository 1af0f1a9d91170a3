"""`headrace verify` as a user runs it, on a tiny model: a real index, store process and engine."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tiny_model import make_tiny_model

from headrace.admin.cli import main
from headrace.core.generation import CachedTokens
from headrace.engine.model_runner import SequenceStep
from headrace.verify.measure_kv_cache import KvCacheComparison
from headrace.verify.report import PATHS, PathRun, VerifyReport
from headrace.verify.verify_together import Together, _WatchedRunner

SETTINGS = ["--block-tokens=16", "--torch-threads=1"]


def make_run(**changed) -> PathRun:
    run = PathRun(
        prompt_tokens=20,
        generated_tokens=200,
        cached=CachedTokens(device=16),
        ttft_ms=5.0,
        token_equal=True,
        bit_equal=True,
        reused=True,
    )
    return replace(run, **changed)


def make_together(**changed) -> Together:
    found = Together(
        requests=6,
        token_equal=True,
        bit_equal=True,
        num_batched_steps=30,
        num_cut_pieces=6,
        num_preemptions=2,
        num_shared_blocks=4,
        num_drafted_tokens=40,
        num_accepted_tokens=30,
    )
    return replace(found, **changed)


def make_report(*, together: Together | None = None, **changed_grpc_run) -> VerifyReport:
    runs = {path: [make_run()] for path in PATHS} | {"grpc": [make_run(**changed_grpc_run)]}
    kv_cache = KvCacheComparison(
        prompt_tokens=256, with_cache_s=1.0, without_cache_s=6.0, token_equal=True, bit_equal=True, growth=()
    )
    return VerifyReport(
        "m",
        exact_claimed=True,
        generated_tokens=200,
        runs=runs,
        kv_cache=kv_cache,
        together=together or make_together(),
        plot="p.png",
    )


def test_verify_shows_equality_on_every_path_and_what_the_cache_saves(tmp_path: Path):
    """Would fail if any path computed other bits, did not reuse what it promises, or left something behind.
    `benchmarks/verify_families.py` runs the same on models of other kinds."""
    model = make_tiny_model(tmp_path / "tiny-llama", context_tokens_max=232)
    plot = tmp_path / "verify.png"
    done = CliRunner().invoke(
        main,
        ["verify", "--json", "--tokens=20", f"--model={model}", f"--plot={plot}", *SETTINGS],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["model"] == "tiny-llama"
    assert (found["bit_equal"], found["token_equal"], found["reused"]) == (True, True, True)
    assert found["generated_tokens"] == 20
    assert set(found["paths"]) == set(PATHS)
    for name, path in found["paths"].items():
        assert path["bit_equal"]
        assert path["ttft_ms"] > 0
        assert path["cached_tokens"] == (0 if name == "cold" else path["prompt_tokens"] // 16 * 16)
    assert found["kv_cache_speedup_at_200"] > 0
    assert found["together"]["as_meant"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert not list(Path("/dev/shm").glob("*verify-*"))


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({"bit_equal": False}, "the bits of logits"),
        ({"token_equal": False, "bit_equal": False}, "token ids differ"),
        ({"reused": False}, "NOT SHOWN"),
    ],
    ids=["bits", "tokens", "no reuse"],
)
def test_one_run_that_is_not_as_it_should_be_makes_the_whole_not_equal(changed, verdict):
    report = make_report(**changed)
    assert not report.equal
    assert verdict in report.verdict()


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({"bit_equal": False}, "the bits of logits"),
        ({"num_batched_steps": 0}, "NOT SHOWN"),
        ({"num_cut_pieces": 0}, "NOT SHOWN"),
        ({"num_preemptions": 0}, "NOT SHOWN"),
        ({"num_shared_blocks": 0}, "NOT SHOWN"),
        ({"num_accepted_tokens": 40}, "NOT SHOWN"),
    ],
    ids=["bits", "no batch", "no chunk", "nobody gave way", "nothing was shared", "no draft was wrong"],
)
def test_company_that_changes_an_answer_or_was_none_makes_the_whole_not_equal(changed, verdict):
    report = make_report(together=make_together(**changed))
    assert not report.equal
    assert verdict in report.verdict()


def test_pieces_of_what_is_computed_again_do_not_count_as_a_cut_prompt():
    """Fails when a preemption alone makes it seem that prompts were cut."""

    class NoRunner:
        def run_step(self, steps):
            return torch.zeros(0)

    def piece(start, stop, num_logits=0):
        return SequenceStep(tuple(range(start, stop)), start, (), num_logits)

    watched = _WatchedRunner(NoRunner())
    watched.let_go()
    for step in (piece(0, 100, num_logits=1), piece(0, 48), piece(48, 90), piece(90, 101, num_logits=1)):
        watched.run_step([step])
    assert watched.num_cut_pieces == 0
    watched.run_step([piece(80, 128)])
    assert watched.num_cut_pieces == 1


def test_a_report_whose_runs_are_all_equal_is_equal():
    assert make_report().equal
    assert make_report().as_json()["kv_cache_speedup_at_200"] == 6.0


def test_a_context_without_room_for_a_prompt_is_refused_with_the_remedy(tmp_path: Path):
    model = make_tiny_model(tmp_path / "tiny-llama")
    done = CliRunner().invoke(main, ["verify", f"--model={model}", "--context-tokens-max=100", "--torch-threads=1"])
    assert done.exit_code == 3
    assert "no room" in done.stderr

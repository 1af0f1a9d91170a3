"""The measurement of steps, small: every row is there, its figures are of the same work, and the report says them."""

import json
import os
import stat
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models

from headrace.bench.measure_engine import Extent, measure_engine
from headrace.bench.vllm_peer import running_vllm
from headrace.config import load_config
from headrace.core.errors import InvalidRequest
from tests.unit.engine_model.tiny_models import make_model

SMALL = Extent((64, 200, 4_096), (1, 3), (30, 150), steps=2, rounds=2, round_s_max=60.0)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny-llama")
    make_model("llama", dtype=torch.bfloat16).save_pretrained(path)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(path / "tokenizer.json"))
    flags = {"model": str(path), "model_cache_dir": str(path / "cache"), "torch_threads": 1, "block_tokens": 16}
    return load_config(flags, config_file=None)


def test_every_kind_of_work_is_measured_beside_transformers_and_without_a_cache(config):
    """Fails when a row is missing or a figure is in another unit; prompts that are too long are left out."""
    said = []

    report = measure_engine(config, report=said.append, extent=SMALL)

    found = json.loads(json.dumps(report.as_json()))
    places = [(row["what"], row["batch"], row["context"]) for row in found["rows"]]
    assert places == [
        ("prefill", 1, 64), ("prefill", 1, 200),
        ("decode", 1, 30), ("decode", 3, 30), ("decode", 1, 150), ("decode", 3, 150),
    ]  # fmt: skip
    for row in found["rows"]:
        prefill = row["what"] == "prefill"
        assert row["unit"] == ("tokens/s" if prefill else "ms/step")
        assert row["ours"] > 0
        assert row["transformers"] > 0
        faster = row["ours"] / row["transformers"]
        assert row["ratio"] == pytest.approx(faster if prefill else 1 / faster, rel=0.01)
        assert (row["no_cache"] is None) == prefill
        assert row["no_cache_is_extrapolated"] == (row["batch"] > 1)
        assert row["vllm"] is None
    alone = min(row["ours"] for row in found["rows"] if row["what"] == "decode" and row["batch"] == 1)
    assert found["decode_floor_ratio"] == pytest.approx(alone / found["decode_floor_ms"], rel=0.01)
    assert found["exact"]
    assert any("round 2 of 2" in line for line in said)
    assert all(len(cells) == len(columns) for _, columns, rows in report.tables() for cells in rows)


def test_a_peer_is_asked_for_the_same_work_and_one_that_fails_says_with_which_words(config, tmp_path):
    """Fails when a peer's figures land in other rows, or its failure passes for a measurement."""
    peer = tmp_path / "python"
    peer.write_text(
        '#!/bin/sh\necho \'"1.2"\'\nwhile read asked; do echo "$asked" >> ' + f"{tmp_path}/asked; echo 0.0045; done\n",
        encoding="utf-8",
    )
    peer.chmod(peer.stat().st_mode | stat.S_IXUSR)
    tiny = Extent((), (1,), (30,), steps=2, rounds=2, round_s_max=60.0)

    report = measure_engine(config, report=lambda _: None, extent=tiny, peer_python=str(peer))

    assert [row.vllm for row in report.rows] == [4.5]
    assert (tmp_path / "asked").read_text(encoding="utf-8").splitlines() == ['["decode", 1, 30]'] * 2
    assert report.vllm == "1.2"
    assert report.tables()[0][1][-2:] == ["vllm", "times"]
    with pytest.raises(InvalidRequest, match="did not run vLLM"):
        measure_engine(config, report=lambda _: None, extent=tiny, peer_python=os.devnull)
    peer.write_text("#!/bin/sh\necho no module named vllm >&2\nexit 1\n", encoding="utf-8")
    with pytest.raises(InvalidRequest, match="no module named vllm"):
        measure_engine(config, report=lambda _: None, extent=tiny, peer_python=str(peer))
    peer.write_text("#!/bin/sh\necho '\"1.2\"'\nread asked\necho out of memory >&2\n", encoding="utf-8")
    with pytest.raises(InvalidRequest, match="out of memory"):
        measure_engine(config, report=lambda _: None, extent=tiny, peer_python=str(peer))


# It shares memory, answers with its name, and notes when it ends by itself; or does not, as vLLM that hangs.
SHARING_PEER = """
import json, sys, time
from multiprocessing.shared_memory import SharedMemory
shared = SharedMemory(create=True, size=4_096)
print(json.dumps(shared.name), flush=True)
sys.stdin.read()
if sys.argv[1] == "hangs":
    time.sleep(600)
shared.close()
shared.unlink()
open(sys.argv[2], "w").close()
"""


@pytest.mark.parametrize(("end", "end_timeout_s"), [("ends", 120.0), ("hangs", 0.0)])
def test_a_peer_may_end_by_itself_and_leaves_no_shared_memory_either_way(tmp_path, end, end_timeout_s):
    """Fails when it is killed at once, or what it shared with its children stays in /dev/shm."""
    ended, peer, script = tmp_path / "ended", tmp_path / "python", tmp_path / "peer.py"
    script.write_text(SHARING_PEER, encoding="utf-8")
    peer.write_text(f"#!/bin/sh\nexec {sys.executable} {script} {end} {ended}\n", encoding="utf-8")
    peer.chmod(peer.stat().st_mode | stat.S_IXUSR)
    with running_vllm(
        str(peer), tmp_path, dtype="float32", threads=1, tokens_max=1, batch_max=1, end_timeout_s=end_timeout_s
    ) as running:
        shared = Path("/dev/shm") / running.version
        assert shared.exists()
    assert ended.exists() == (end == "ends")
    assert not shared.exists()

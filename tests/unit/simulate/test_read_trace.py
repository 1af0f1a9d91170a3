"""Trace files in the public shapes become prompts as chains; what is not one is refused with its place."""

import gzip
import json

import pytest

from headrace.core.errors import InvalidRequest
from headrace.simulate.read_trace import TracedRequest, read_trace, with_copies


def write(path, lines) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def read(path, **options):
    return read_trace(path, report=lambda line: None, **options)


def request(tokens: int, *ids: int) -> dict:
    return {"timestamp": 0, "input_length": tokens, "output_length": 1, "hash_ids": ids}


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_request_trace_is_read_plain_and_gzipped(tmp_path, name) -> None:
    write(tmp_path / name, [request(1_100, 7, 8, 9), request(1_024, 7, 8)])
    trace = read(tmp_path / name)
    assert (trace.block_tokens, trace.num_blocks) == (512, 3)
    assert trace.requests == (TracedRequest(1_100, (0, 1, 2)), TracedRequest(1_024, (0, 1)))


def test_the_block_size_is_found_whether_partial_blocks_are_listed_or_not(tmp_path) -> None:
    write(tmp_path / "full.jsonl", [request(40, 1, 2), request(16, 1)])
    assert read(tmp_path / "full.jsonl").block_tokens == 16
    write(tmp_path / "odd.jsonl", [request(100, 1), request(7, 1, 2, 3)])
    with pytest.raises(InvalidRequest, match="no usual block size"):
        read(tmp_path / "odd.jsonl")


def test_merged_blocks_end_where_a_group_is_full(tmp_path) -> None:
    write(tmp_path / "trace.jsonl", [request(80, 1, 2, 3, 4, 5), request(64, 1, 2, 3, 6)])
    trace = read(tmp_path / "trace.jsonl", merge_blocks=2)
    assert trace.block_tokens == 32
    assert [r.block_ids for r in trace.requests] == [(0, 1), (0, 2)]


def conversation(*requests, start: int = 1) -> dict:
    return {"block_size": 64, "requests": [{"t": t, "in": 64 * n, "hash_runs": [[start, n]]} for t, n in requests]}


def test_conversations_run_side_by_side_in_the_order_of_the_file(tmp_path) -> None:
    """Two users: the third conversation starts when one of the first two ends; gaps are cut at a minute."""
    lines = [conversation((0, 1), (10, 2)), conversation((0, 3), (5_000, 4)), conversation((0, 5))]
    write(tmp_path / "coding.jsonl", lines)
    trace = read(tmp_path / "coding.jsonl", users=2)
    assert [r.input_tokens // 64 for r in trace.requests] == [1, 3, 2, 5, 4]
    assert trace.num_blocks == 2 + 4 + 5, "ids of one conversation are not those of another"


def test_the_requests_of_a_subagent_come_at_their_time(tmp_path) -> None:
    line = conversation((0, 1), (30, 3))
    line["requests"].append({"t": 10, "type": "subagent", "requests": conversation((5, 2))["requests"]})
    write(tmp_path / "coding.jsonl", [line])
    assert [r.input_tokens // 64 for r in read(tmp_path / "coding.jsonl").requests] == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no requests"),
        ("not json\n", "not a trace of JSON lines"),
        ("[1]\n", "line 1 is not a JSON object"),
        ('{"prompt": "x"}\n', "neither hash_ids nor requests nor input"),
        ('{"input_length": 512, "hash_ids": [1]}\n{"input_length": 5}\n', "line 2 lacks"),
        (
            '{"input_length": 1024, "hash_ids": [1, 2]}\n{"input_length": 512, "hash_ids": [2]}\n',
            "request 2 has block 2",
        ),
        ('{"input_length": 1024, "hash_ids": [1, 1]}\n', "request 1 has block 1"),
    ],
)
def test_what_is_not_a_trace_is_refused_and_the_place_is_named(tmp_path, text, said) -> None:
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(InvalidRequest, match=said):
        read(tmp_path / "trace.jsonl")


def test_a_trace_of_texts_shares_what_its_texts_share(tmp_path) -> None:
    """64 characters are a block of 16 tokens; times are microseconds."""
    lines = [{"timestamp": 0, "input": "a" * 128 + "b" * 64, "output": "c" * 40}]
    lines += [{"timestamp": 2_500_000, "input": "a" * 128 + "c" * 70, "output": ""}]
    write(tmp_path / "agents.jsonl", lines)
    trace = read(tmp_path / "agents.jsonl")
    assert trace.block_tokens == 16
    assert trace.requests == (TracedRequest(48, (0, 1, 2), 0.0, 10), TracedRequest(49, (0, 1, 3), 2.5, 1))


def test_a_table_of_lengths_is_requests_that_share_nothing(tmp_path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:48.1805900,9,0\n"
    )
    (tmp_path / "azure.csv").write_text(text)
    trace = read(tmp_path / "azure.csv")
    assert [(r.input_tokens, r.block_ids, r.output_tokens) for r in trace.requests] == [(374, (), 44), (9, (), 1)]
    assert trace.requests[1].arrival_s == pytest.approx(1.5)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InvalidRequest, match="not a table"):
        read(tmp_path / "other.csv")


def test_copies_of_a_trace_share_no_block(tmp_path) -> None:
    write(tmp_path / "trace.jsonl", [request(1_100, 7, 8, 9), request(1_024, 7, 8)])
    trace = with_copies(read(tmp_path / "trace.jsonl"), 3)
    assert (len(trace.requests), trace.num_blocks) == (6, 9)
    assert [r.block_ids for r in trace.requests] == [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 1), (3, 4), (6, 7)]


def test_a_file_that_claims_to_be_gzipped_and_is_not_is_refused(tmp_path) -> None:
    (tmp_path / "trace.gz").write_text("plain")
    with pytest.raises(InvalidRequest, match="not a trace"):
        read(tmp_path / "trace.gz")

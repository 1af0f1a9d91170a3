"""The same load, live and simulated: the simulator gets what was sent and finds what a live store found."""

import json

import pytest
from tiny_gateway import BLOCK_TOKENS, make_worker_record, tiny_gateway, write_tokenizer

from headrace.bench.generate_load import LoadBounds
from headrace.bench.measure_serving import Workload
from headrace.bench.measure_simulator import ComparedFigure, LiveSystem, SimulatorReport, compare_with_live, trace_of
from headrace.bench.planned_requests import PlannedRequest
from headrace.bench.serving_tally import Slo
from headrace.core.errors import IndexUnavailable
from headrace.gateway.serve_grpc import serve_grpc
from headrace.simulate.cluster_model import read_cluster
from headrace.transfer.channels import Channels


def test_planned_prompts_share_in_the_trace_what_they_share_in_tokens():
    """Fails for blocks named by their own tokens alone, and for a partial block with a name."""
    ones, twos = (1,) * BLOCK_TOKENS, (2,) * BLOCK_TOKENS
    prompts = [ones + twos + (3,), ones + twos, twos + twos]
    trace = trace_of([PlannedRequest(0.0, prompt, 4) for prompt in prompts], block_tokens=BLOCK_TOKENS)
    first, second, third = (request.block_ids for request in trace.requests)
    assert first == second
    assert len(first) == 2
    assert not set(first) & set(third)
    assert trace.num_blocks == 4
    assert [request.input_tokens for request in trace.requests] == [2 * BLOCK_TOKENS + 1, *[2 * BLOCK_TOKENS] * 2]


def test_a_figure_that_no_answer_had_has_no_error():
    """Fails when what was not measured is reported as 0 that was simulated without an error."""
    figures = (ComparedFigure(1, "ITL p50, ms", None, 20.0), ComparedFigure(2, "ITL p50, ms", 10.0, 11.0))
    unknown = (ComparedFigure(1, "cached share", None, 0.5), ComparedFigure(2, "cached share", 0.0, 0.5))
    report = SimulatorReport("tiny", "any", figures + unknown, read_cluster("h100-8b-pd"), ())
    found = json.loads(json.dumps(report.as_json()))
    assert [row["live"] for row in found["rows"]] == [None, 10.0, None, 0.0]
    assert [row["error"] for row in found["rows"]] == [None, 0.1, None, None]
    assert found["error_p50"] == {"ITL p50, ms": 0.1, "cached share": None}
    (_, _, rows), (_, _, sizes) = report.tables()
    assert rows[0] == ["1", "ITL p50, ms", "-", "20", "-"]
    assert sizes == [["ITL p50, ms", "10%"], ["cached share", "-"]]


class BusyIndex:
    """A membership that answers every second time only, as on a machine that has other things to do."""

    def __init__(self, membership):
        self._membership = membership
        self._asked = 0

    async def workers(self):
        self._asked += 1
        if self._asked % 2:
            raise IndexUnavailable("no answer in 250 ms")
        return await self._membership.workers()


@pytest.mark.alone
async def test_a_live_load_is_simulated_with_the_same_requests(tmp_path):
    """Fails when the simulated requests are not those that were sent: the shares found would differ; and when a
    listing that does not come ends a measurement of minutes."""
    records = [make_worker_record(name, context_tokens_max=4_096) for name in ("d0", "d1")]
    async with tiny_gateway(*records, model_path=write_tokenizer(tmp_path)) as gateway:
        channels = Channels()
        server, port = await serve_grpc(gateway.service, address="127.0.0.1:0", channel_to=channels.to)
        try:
            report = await compare_with_live(
                LiveSystem(f"127.0.0.1:{port}", "", 2**30, prefill_chunk_tokens=256, local_prefill_tokens=256),
                BusyIndex(gateway.membership),
                Workload(rate=40.0, shape=("gap_s=0.2",), output_tokens_max=3),
                runs=2,
                bounds=LoadBounds(requests_max=30, duration_s=None, timeout_s=3_600),
                slo=Slo(ttft_ms=60_000, itl_ms=60_000),
                report=lambda line: None,
            )
        finally:
            await channels.close()
            await server.stop(grace=0)
    found = json.loads(json.dumps(report.as_json()))
    shares = [row for row in found["rows"] if row["figure"] == "cached share"]
    assert [row["run"] for row in shares] == [1, 2]
    for row in shares:
        # Live workers are instant here and simulated ones are not: a turn that comes within a prefill finds less.
        assert row["simulated"] == pytest.approx(row["live"], abs=0.1)
        assert row["live"] > 0.4
    assert found["cluster"]["mixed_workers"] == 2
    assert set(found["error_p50"]) == {row["figure"] for row in found["rows"]}
    assert any("cached share" in row for _, _, rows in report.tables() for row in rows)

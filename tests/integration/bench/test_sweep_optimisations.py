"""The sweep over real gateways, one after the other: each combination is what its name says, and the plot is drawn."""

import asyncio
import json
import os
import threading
from contextlib import contextmanager

import pytest
from tiny_gateway import make_worker_record, tiny_gateway, write_tokenizer

from headrace.bench.generate_load import LoadBounds
from headrace.bench.measure_serving import Workload
from headrace.bench.plot_sweep import plot_sweep
from headrace.bench.processor_time import cpu_seconds
from headrace.bench.serving_tally import Slo
from headrace.bench.sweep_optimisations import (
    COMBINATIONS,
    RunningSystem,
    SweepReport,
    SweepRow,
    sweep_optimisations,
)
from headrace.config import load_config
from headrace.gateway.serve_grpc import serve_grpc
from headrace.transfer.channels import Channels

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tiny-model"))


class GatewayThread:
    """A tiny gateway with an event loop of its own, as a system in other processes has one."""

    def __init__(self, model_path):
        self._model_path = model_path
        self._ready, self._loop, self._end = threading.Event(), asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))
        self.address = ""

    async def _serve(self):
        records = [make_worker_record(name, context_tokens_max=4_096) for name in ("d0", "d1")]
        async with tiny_gateway(*records, model_path=self._model_path) as gateway:
            channels = Channels()
            server, port = await serve_grpc(gateway.service, address="127.0.0.1:0", channel_to=channels.to)
            self.address = f"127.0.0.1:{port}"
            self._ready.set()
            await self._end.wait()
            await channels.close()
            await server.stop(grace=0)

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(3_600)  # or the test's own time is over
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(60)
        self._loop.close()


def make_row(combination, rate, value):
    return SweepRow(
        combination=combination,
        rate=rate,
        requests=10,
        failed=0,
        requests_per_s=rate,
        output_tokens_per_s=100 * value,
        ttft_ms_p50=50.0,
        ttft_ms_p90=900 / value,
        itl_ms_p50=10.0,
        good_share=1.0,
        cached_share=0.5,
        cpu_s_per_1000_tokens=30 / value,
        kept_arrivals=True,
    )


def test_each_combination_is_what_its_name_says(model_path):
    """Fails when a system is not started with its settings, requests of a row use the cache as another row's do, or
    the workload is not the one that was asked for."""
    started, said = [], []

    @contextmanager
    def start(settings):
        started.append(dict(settings))
        with GatewayThread(model_path) as gateway:
            yield RunningSystem(grpc_address=gateway.address, process_ids=lambda: [os.getpid()])

    report = sweep_optimisations(
        start,
        workload=Workload(output_tokens_max=3, shape=("gap_s=0.2",), context_tokens_max=600),
        rates=(20.0, 40.0),
        bounds=LoadBounds(requests_max=24, duration_s=None, timeout_s=3_600),
        slo=Slo(ttft_ms=3.6e6, itl_ms=3.6e6),  # however busy the machine is
        report=said.append,
        combinations=COMBINATIONS[:3],
    )

    assert sum("fits 600 tokens" in line for line in said) == 2 * 3
    assert started == [dict(combination.settings) for combination in COMBINATIONS[:3]]
    found = json.loads(json.dumps(report.as_json()))
    rows = {(row["combination"], row["rate"]): row for row in found["rows"]}
    assert list(rows) == [(c.name, rate) for c in COMBINATIONS[:3] for rate in (20.0, 40.0)]
    for row in rows.values():
        assert (row["requests"], row["failed"], row["good_share"]) == (24, 0, 1)
        assert row["cpu_s_per_1000_tokens"] > 0
    for rate in (20.0, 40.0):
        shares = [rows[c.name, rate]["cached_share"] for c in COMBINATIONS[:3]]
        assert 0 == shares[0] < shares[1] < shares[2]
    assert any("headrace verify --codec int8" in line for line in found["remarks"])
    ((_, columns, cells),) = report.tables()
    assert all(len(row) == len(columns) for row in cells)


def test_every_system_has_as_many_workers():
    """Fails when a row is better by more hardware."""
    assert {c.settings["prefill_workers"] + c.settings["decode_workers"] for c in COMBINATIONS} == {2}


def test_every_row_is_a_system_that_can_be_started():
    """Fails when a row names a setting that there is not, or a value that is refused."""
    configs = [load_config(dict(combination.settings), environ={}) for combination in COMBINATIONS]
    assert [config.engine.store_codec for config in configs] == ["raw"] * 5 + ["int8"]


@pytest.mark.parametrize("rates", [(1.0,), (1.0, 2.0, 4.0)])
def test_the_plot_is_drawn_for_one_rate_and_for_several(rates, tmp_path):
    rows = tuple(make_row(c.name, rate, n + rate) for n, c in enumerate(COMBINATIONS, start=1) for rate in rates)
    plot_sweep(SweepReport("tiny", rows), tmp_path / "new" / "sweep.png")
    assert (tmp_path / "new" / "sweep.png").read_bytes().startswith(PNG)


def test_processor_time_is_of_the_processes_named_and_forgives_those_that_ended():
    before_s = cpu_seconds([os.getpid()])
    sum(range(3_000_000))
    assert cpu_seconds([os.getpid(), 2**22 - 1]) > before_s

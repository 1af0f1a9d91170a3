"""Every admin call through Serve's proxies, and numbers that stay true under cancels, refusals and repeats."""

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from live_load import EIGHT, ask, make_token_ids, wait_until_at_rest
from local_system import BLOCK_TOKENS, LocalSystem, wait_until

from headrace.admin.cli import main
from headrace.client.admin_values import Selector
from headrace.client.values import Sampling
from headrace.core.errors import HeadraceError, InvalidRequest

FIVE = 5  # full blocks of every prompt here, of which a repeat can use all
LENGTH = FIVE * BLOCK_TOKENS + 1


@dataclass(frozen=True, slots=True)
class Stored:
    """A prompt of five blocks that the store node holds."""

    token_ids: tuple[int, ...]

    @property
    def whole(self) -> Selector:
        """Its first block and all that stand on it."""
        return Selector(prefix_token_ids=self.token_ids[:BLOCK_TOKENS])

    @property
    def tip(self) -> Selector:
        """Its last full block."""
        return Selector(prefix_token_ids=self.token_ids)


@pytest.fixture
def stored(system: LocalSystem, request: pytest.FixtureRequest) -> Stored:
    """Another prompt for each test."""
    prompt = Stored(tuple(make_token_ids(LENGTH, seed=160_000 + sum(request.node.name.encode()))))
    ask(system, list(prompt.token_ids))
    wait_until(lambda: on_node(system, prompt) == FIVE, what="the prompt's blocks are stored")
    return prompt


def on_node(system: LocalSystem, prompt: Stored) -> int:
    """How many of its blocks the store node holds."""
    listed = system.client.list_blocks(prompt.whole)
    assert not listed.errors
    return sum(block.holder.startswith("node:") for block in listed.blocks)


def is_indexed(system: LocalSystem, prompt: Stored) -> bool:
    """Whether the gateways know what the store node holds of it: asked four times, of which each has one or more."""
    for _ in range(4):
        runs = system.client.why_miss(prompt.token_ids).runs
        if not any(run.holder.startswith("node:") and run.indexed_blocks == FIVE for run in runs):
            return False
    return True


def cli(system: LocalSystem, *arguments: str):
    options = ["--address", system.state.grpc_target, "--json"]
    done = CliRunner().invoke(main, [*arguments, *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_blocks_are_listed_in_every_tier_with_what_holds_them(system: LocalSystem, stored: Stored):
    """Fails when the proxies lose a tier's listing on the way, or a worker's pool is not asked."""
    tiers = {block.tier: block.holder for block in system.client.list_blocks(stored.whole).blocks}
    assert tiers["host"].startswith("node:")
    assert tiers["device"].startswith("worker:")


def test_a_miss_is_explained_by_prompt_and_by_request_id(system: LocalSystem, stored: Stored):
    """Fails when WhyMiss or its fields do not pass the proxies."""
    token_ids = list(stored.token_ids)
    (node,) = system.client.status().store_nodes
    whole = system.client.why_miss(token_ids)
    assert {run.holder: run.held_blocks for run in whole.runs}[node.holder] == FIVE
    with system.client.stream(token_ids, sampling=EIGHT) as stream:
        request_id = next(iter(stream)).request_id
    assert not [report.error for report in system.client.evict(stored.whole, dry_run=False) if report.error]
    wait_until(lambda: on_node(system, stored) == 0, what="the prompt's blocks are gone")
    gone = system.client.why_miss(request_id=request_id)
    assert "evicted" in " ".join(reason.kind for reason in gone.reasons), gone.reasons


def test_a_prefix_travels_as_a_file_and_hits_when_it_is_back(system: LocalSystem, stored: Stored, tmp_path: Path):
    """Fails when ReadBlock or WriteBlock do not carry a block whole through the proxies."""
    file, spelled = str(tmp_path / "prefix.hrx"), ",".join(map(str, stored.token_ids))
    assert cli(system, "cache", "export", file, "--token-ids", spelled)["blocks"] == FIVE
    cold = ask(system, list(stored.token_ids))
    system.client.evict(stored.whole, dry_run=False)
    assert on_node(system, stored) == 0
    assert cli(system, "cache", "import", file)["blocks"] == {"stored": FIVE}
    wait_until(lambda: is_indexed(system, stored), what="every gateway has heard of the blocks")
    warm = ask(system, list(stored.token_ids))
    assert warm.token_ids == cold.token_ids
    assert warm.usage.cached.total == FIVE * BLOCK_TOKENS


def test_the_doctor_finds_the_system_well(system: LocalSystem, stored: Stored):
    """Fails when Doctor cannot reach a part through the proxies, or calls a healthy part ill."""
    findings = system.client.doctor()
    assert [finding for finding in findings if not finding.ok] == []
    assert {"index", "store node", "worker", "clock", "index entries", "namespace"} <= {f.check for f in findings}


def test_a_pin_outlasts_evicting_everything_until_it_is_taken_back(system: LocalSystem, stored: Stored):
    """Fails when Pin or Unpin do not reach the nodes, or an eviction takes what is pinned."""
    assert not [report.error for report in system.client.pin(stored.tip, for_s=60) if report.error]
    system.client.evict(Selector(), dry_run=False)
    assert on_node(system, stored) == FIVE
    assert not [report.error for report in system.client.unpin(stored.tip) if report.error]
    system.client.evict(stored.whole, dry_run=False)
    assert on_node(system, stored) == 0


def test_a_time_to_live_is_ordered_for_a_prefix_and_taken_back(system: LocalSystem, stored: Stored):
    """Fails when SetTtl does not reach the node that holds the prefix, or an order cannot be undone."""

    def orders() -> set[bool]:
        blocks = [b for b in system.client.list_blocks(stored.whole).blocks if b.holder.startswith("node:")]
        return {block.expires_unix_ms > 0 for block in blocks if block.position == 0}

    assert orders() == {False}
    assert not [report.error for report in system.client.set_ttl(stored.whole, ttl_s=600) if report.error]
    assert orders() == {True}
    assert not [report.error for report in system.client.set_ttl(stored.whole, ttl_s=None) if report.error]
    assert orders() == {False}
    assert on_node(system, stored) == FIVE


def test_a_quota_is_set_seen_and_taken_back(system: LocalSystem, stored: Stored):
    """Fails when ListTenants or SetQuota do not pass the proxies, or a node is not told."""
    (tenant,) = system.client.list_tenants().tenants
    assert sum(used.host_blocks for used in tenant.nodes) >= FIVE
    changed = system.client.set_quota(tenant.name, bytes_max=8 << 20)
    try:
        assert not changed.errors
        (limited,) = system.client.list_tenants().tenants
        assert (limited.bytes_max, limited.budget_from) == (8 << 20, "operator")
    finally:
        assert not system.client.set_quota(tenant.name, bytes_max=None).errors
    assert system.client.list_tenants().tenants[0].bytes_max is None


def test_the_only_node_cannot_be_drained(system: LocalSystem, stored: Stored):
    """Fails when blocks that nobody can take are given up, or the refusal does not reach the caller."""
    (node,) = system.client.status().store_nodes
    with pytest.raises(InvalidRequest):
        list(system.client.drain_node(node.holder))
    assert not system.client.status().store_nodes[0].draining
    assert on_node(system, stored) == FIVE


def test_whichever_gateway_is_asked_explains_what_either_of_them_served(system: LocalSystem):
    """Fails when only the gateway that served a request knows of it: each question goes to one or the other."""
    prompts = [make_token_ids(LENGTH, seed=165_000 + number) for number in range(6)]
    results = [ask(system, prompt) for prompt in prompts]
    for result in results * 2:
        told = system.client.explain_route(result.request_id)
        assert (told.request_id, told.outcome.decode_worker) == (result.request_id, result.decode_worker)
        assert system.client.why_miss(request_id=result.request_id).prompt_tokens == LENGTH
    finished = 'headrace_client_requests_total{outcome="finished"}'
    served = {process for (process, series), count in scrape(system).items() if series == finished and count > 0}
    assert served == {gateway.gateway_id for gateway in system.client.status().gateways}, "void: one served all"


def scrape(system: LocalSystem) -> dict[tuple[str, str], float]:
    """Every sample of every process: (process, series) -> value. Gauges are none below 0, or this fails."""
    status = system.client.status()
    ports = {worker.worker_id: worker.metrics_port for worker in status.workers}
    ports |= {node.node_id: node.metrics_port for node in status.store_nodes}
    ports |= {gateway.gateway_id: gateway.metrics_port for gateway in status.gateways}
    assert len(status.gateways) == 2
    urls = {name: f"http://127.0.0.1:{port}/metrics" for name, port in ports.items()}
    samples: dict[tuple[str, str], float] = {}
    for process, url in urls.items():
        for line in httpx.get(url, timeout=60).text.splitlines():
            if line and not line.startswith("#"):
                series, _, value = line.rpartition(" ")
                samples[(process, series)] = float(value)
    assert [sample for sample in samples.items() if sample[1] < 0] == []
    return samples


def is_counter(series: str) -> bool:
    return series.split("{")[0].endswith(("_total", "_count", "_sum", "_bucket"))


def test_counters_never_fall_and_labels_do_not_grow_whatever_callers_do(system: LocalSystem):
    """Fails when a cancelled, refused or repeated request takes back what was counted, drives a gauge below zero, or
    leaves a series of its own."""

    def misbehave(number: int) -> None:
        chosen = random.Random(number)
        prompt = make_token_ids(chosen.randint(1, 300), seed=170_000 + number)
        if number % 4 == 0:
            body = {"model": f"no such model {number}", "prompt": "x"}
            assert httpx.post(f"{system.state.http_url}/v1/completions", json=body, timeout=60).status_code == 404
            return
        if number % 4 == 1:
            body = {"model": "", "prompt": prompt, "max_tokens": 2, "user": f"user {number}"}
            headers = {"x-request-id": "the same one"}
            httpx.post(f"{system.state.http_url}/v1/completions", json=body, headers=headers, timeout=60)
            return
        stream = system.client.stream(prompt, sampling=Sampling(max_tokens=300, ignore_eos=True), timeout_s=60)
        leaving = threading.Timer(chosen.random() * 0.3, stream.close)
        leaving.start()
        try:
            for _ in stream:
                pass
        except HeadraceError:
            pass
        finally:
            leaving.cancel()

    def round_of(first: int) -> dict[tuple[str, str], float]:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(misbehave, range(first, first + 16)))
        wait_until_at_rest(system)
        return scrape(system)

    before, after = round_of(0), round_of(1_000)
    fallen = [key for key, value in before.items() if is_counter(key[1]) and after[key] < value]
    assert fallen == []
    assert set(after) - set(before) == set()
    assert sum(after[key] - before[key] for key in after if "headrace_requests_total" in key[1]) > 0


def test_admin_calls_progress_while_more_requests_run_than_workers_take_at_once(system: LocalSystem):
    """Fails when a call that needs a call of its own (to each worker, for its books) waits behind requests that are
    themselves waiting for workers."""

    def consume(stream) -> str:
        try:
            return f"ended after {stream.result().usage.completion_tokens}"
        except HeadraceError as error:
            return type(error).__name__

    with ThreadPoolExecutor(32) as pool:
        for attempt in range(5):  # until something still runs after the admin calls
            streams = [
                system.client.stream(
                    make_token_ids(20, seed=175_000 + 100 * attempt + number),
                    sampling=Sampling(max_tokens=80, ignore_eos=True),
                )
                for number in range(32)
            ]
            outcomes = [pool.submit(consume, stream) for stream in streams]
            for _ in range(3):
                assert not [holder.error for holder in system.client.stat() if holder.error]
                assert not system.client.list_blocks(limit=1).errors
            if not all(outcome.done() for outcome in outcomes):
                break
        else:
            raise AssertionError("void: nothing ran beside the admin calls")
        assert {outcome.result() for outcome in outcomes} <= {"ended after 80", "Overloaded"}
    wait_until_at_rest(system)

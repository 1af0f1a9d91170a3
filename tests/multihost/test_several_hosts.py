"""Prefixes go from host to host over gRPC, and nothing that happens to hosts or links changes an answer.

The tests share one cluster and are in the order of what they do to it.
"""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from typing import Any

import pytest
import redis
from click.testing import CliRunner
from fleet import BLOCK_TOKENS, TOKENS, Fleet, make_prompt
from fleet_load import go_on, load_on, long_stream
from hosts import Host, wait_until
from ray_hosts import GRPC_PORT, START_WITHIN_S

from headrace.admin.cli import main
from headrace.client.admin_values import StoreNodeStatus, SystemStatus, WorkerStatus
from headrace.client.values import CacheOptions, GenerateResult
from headrace.core.block import CacheSource
from headrace.core.generation import CachedTokens
from headrace.index.redis_keys import BLOCK_KEYS_PATTERN
from headrace_cluster.ask_every_path import SharedText, ask_every_path
from headrace_cluster.demo_report import TEXT_FILE

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1_500)]
BLOCKS = 24  # computing them takes far longer than fetching them
HIT = BLOCKS * BLOCK_TOKENS
LONG = 40 * BLOCK_TOKENS  # 5.2 MB
TEXT_SIGNS, TEXT_TOKENS = 1_000, 800  # of the demo's text; all of it would take this model minutes
OVER_GRPC, FROM_MEMORY = frozenset({CacheSource.GRPC}), frozenset({CacheSource.SHARED_MEMORY})
SEEDS = count(1)


def prompts() -> Iterator[list[int]]:
    """New ones without end."""
    return (make_prompt(HIT + 1, seed=seed) for seed in SEEDS)


def some(number: int) -> list[list[int]]:
    """So many of them."""
    return list(islice(prompts(), number))


def crosses(fleet: Fleet, prompt: list[int]) -> bool:
    """Whether what `a` computed came to `b` over gRPC; right it must be in any case."""
    expected = fleet.cold(prompt)
    first, there = fleet.ask(prompt, on=fleet.a), fleet.ask(prompt, on=fleet.b)
    assert first.token_ids == there.token_ids == expected
    assert first.usage.cached == CachedTokens()
    assert there.usage.cached.total == there.usage.cached.grpc, "by another way"
    return there.usage.cached.grpc == HIT


def wait_until_it_crosses(fleet: Fleet) -> list[int]:
    """The prompt that did. A gateway hears of new blocks a moment later than they can be read, so it may take some."""
    new = prompts()
    tried: list[list[int]] = []

    def crossed() -> bool:
        tried.append(next(new))
        return crosses(fleet, tried[-1])

    wait_until(crossed, within_s=120, what="a prefix of host a on host b")
    return tried[-1]


def test_a_prefix_of_another_host_comes_over_grpc_and_one_of_the_own_host_through_memory(fleet: Fleet):
    """Fails when a worker takes another host's memory for its own, reads its own node over the network, or counts a
    block that it did not get."""
    prompt = wait_until_it_crosses(fleet)
    again = fleet.ask(prompt, on=fleet.b)
    assert again.usage.cached == CachedTokens(device=HIT)
    at_home = fleet.ask(prompt, on=fleet.a, sources=FROM_MEMORY)
    assert at_home.usage.cached == CachedTokens(shared_memory=HIT)
    other = next(prompts())
    expected = fleet.ask(other, on=fleet.a)
    abroad = fleet.ask(other, on=fleet.b, sources=FROM_MEMORY)
    assert abroad.usage.cached == CachedTokens()
    assert abroad.token_ids == expected.token_ids


def test_a_prompt_that_one_host_prefills_is_decoded_on_another(fleet: Fleet):
    """Fails when the hand-off needs shared memory, or what another worker computed for this very request counts as
    cached."""
    prefill, decode = fleet.worker(fleet.a, "prefill"), fleet.worker(fleet.b)
    new = prompts()

    def handed_over() -> bool:
        """A prefill that is late is done without."""
        prompt = next(new)
        expected = fleet.cold(prompt)
        answer = fleet.ask(prompt, on=fleet.b, prefill_on=fleet.a)
        assert answer.token_ids == expected
        assert answer.usage.cached == CachedTokens()
        return (answer.prefill_worker, answer.decode_worker) == (prefill.worker_id, decode.worker_id)

    wait_until(handed_over, within_s=120, what="a prompt that one host prefilled and another decoded")


def test_each_host_has_its_own_store_node_which_its_workers_use(fleet: Fleet):
    """Fails when hosts share a node, or a worker publishes to another host's."""
    nodes = {node.node_id: node for node in fleet.client.status().store_nodes}
    assert set(nodes) == {"a", "b"}
    assert nodes["a"].host != nodes["b"].host
    assert nodes["b"].address.startswith(f"{fleet.b.address}:")
    assert len(fleet.workers(fleet.a)) == len(fleet.workers(fleet.b)) == len(fleet.workers(fleet.a, "prefill")) == 1


def test_cache_verify_asks_every_worker_for_what_every_host_has(fleet: Fleet):
    """Fails when the command leaves out a way by which blocks come, or what it says is not what came."""
    found: dict[str, Any] = {}

    def is_whole() -> bool:
        """Where a gateway is late with what it knows, or a prefill is late, a prompt is computed."""
        nonlocal found
        found = verify(fleet)
        return bool(found["whole"])

    wait_until(is_whole, within_s=120, what="an answer from every source")
    ways = {(check["store_node"], check["source"], check["computed_on"]) for check in found["checks"]}
    near = {(node, source, node) for node in "ab" for source in ("device", "shared_memory")}
    cold, handed = {(node, "cold", "") for node in "ab"}, {(node, "hand_off", "a") for node in "ab"}
    assert ways == near | cold | handed | {("a", "grpc", "b"), ("b", "grpc", "a")}


def verify(fleet: Fleet) -> dict[str, Any]:
    """What the command says, as far as it must hold whatever the machine does meanwhile."""
    address = f"{fleet.a.address}:{GRPC_PORT}"
    done = CliRunner().invoke(main, ["cache", "verify", "--address", address, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["equal"]
    assert found["same_bits"]
    return found


def test_the_table_of_the_demo_holds_over_hosts(fleet: Fleet):
    """Fails when a prefix does not come from where its path says, an answer differs from the cold one, or a part that
    is killed on one host loses what another one or its successor can read."""

    def kill(part: WorkerStatus | StoreNodeStatus) -> None:
        """Process ids are those of the part's host."""
        node = part.node_id if isinstance(part, StoreNodeStatus) else part.store_node
        fleet.ray.hosts[node].run("kill", "-KILL", str(part.pid))

    beginning = SharedText(TEXT_FILE.read_text(encoding="utf-8")[:TEXT_SIGNS], TEXT_TOKENS)
    found = ask_every_path(fleet.client, kill=kill, report=print, shared=beginning)
    print(*found.table()[2], sep="\n")
    assert found.equal
    sources = {row.path: {s for s, n in row.result.usage.cached.by_source().items() if n} for row in found.rows}
    assert sources.pop("after_worker_kill") <= OVER_GRPC | FROM_MEMORY  # where a prefill worker of its host had helped
    assert sources == {
        "cold": set(),
        "same_worker": {CacheSource.DEVICE},
        "shared_memory": {CacheSource.SHARED_MEMORY},
        "grpc": {CacheSource.GRPC},
        "after_store_restart": {CacheSource.SHARED_MEMORY},
    }
    assert {row.path: row.title for row in found.rows}["grpc"] == "other host, by gRPC"


def answers(fleet: Fleet, prompt: list[int], expected: GenerateResult) -> GenerateResult:
    """What host `b` says to a prompt that `a` has computed."""
    there = fleet.ask(prompt, on=fleet.b, sources=OVER_GRPC)
    assert there.token_ids == expected.token_ids
    return there


def test_a_link_that_is_cut_costs_hits_and_no_answer_and_heals(fleet: Fleet):
    """Fails when a load from a host that cannot be reached hangs, or a hand-off to one, or when the way is not tried
    again once it is whole."""
    before, during = next(prompts()), next(prompts())
    expected = fleet.ask(before, on=fleet.a)
    cold = fleet.cold(during)
    with fleet.a.cut_off_from(fleet.b):
        assert answers(fleet, before, expected).usage.cached == CachedTokens()
        # Where the gateway likes: it may choose workers that it cannot reach.
        through_b = fleet.clients["b"].generate(during, sampling=TOKENS, cache=CacheOptions(), timeout_s=120)
        assert through_b.token_ids == cold
    wait_until_it_crosses(fleet)


def test_a_link_that_is_cut_in_the_midst_of_a_load_ends_the_load_and_not_the_request(fleet: Fleet):
    """Fails when blocks that are under way are waited for without end, or half of a block is taken for a whole one."""
    prompt = make_prompt(LONG + 1, seed=next(SEEDS))
    expected = fleet.ask(prompt, on=fleet.a)
    with ThreadPoolExecutor(1) as beside, fleet.a.slow_to(fleet.b, kilobit_per_s=100, queue_packets=8):
        there = beside.submit(answers, fleet, prompt, expected)
        wait_until(lambda: fleet.a.sent_slowly()[0] > 4_000 or there.done(), within_s=60, what="bytes under way")
        with fleet.a.cut_off_from(fleet.b):
            assert there.result(timeout=120).usage.cached.total < LONG
    wait_until_it_crosses(fleet)


def test_over_a_slow_link_that_loses_packets_computing_overtakes_the_load(fleet: Fleet):
    """Fails when a worker waits for all of a prefix that it computes sooner. 5.2 MB take seven minutes here, and no
    load lasts for more than LOAD_PREFIX_TIMEOUT_MS."""
    for _ in range(5):  # a load that finds its connection still careful from the last one may lose nothing
        prompt = make_prompt(LONG + 1, seed=next(SEEDS))
        expected = fleet.ask(prompt, on=fleet.a)
        with fleet.a.slow_to(fleet.b, kilobit_per_s=100, queue_packets=2):
            there = answers(fleet, prompt, expected)
            _, lost = fleet.a.sent_slowly()
        assert there.usage.cached.total < LONG
        assert there.usage.cached.total == there.usage.cached.grpc
        wait_until_it_crosses(fleet)
        if lost:
            break
    assert lost, "void: the link lost nothing"
    print(f"{there.usage.cached.grpc} of {LONG} tokens came, {lost} packets were lost")


def ids_of(status: SystemStatus) -> set[str]:
    return {worker.worker_id for worker in status.workers} | {gateway.gateway_id for gateway in status.gateways}


def test_new_settings_replace_workers_and_gateways_under_load_and_no_request_is_lost(fleet: Fleet):
    """Fails when a request is sent to a replica that is going, or ends with it, or when what is cached goes, too."""
    old, nodes = ids_of(fleet.client.status()), fleet.client.status().store_nodes
    kept = next(prompts())
    fleet.ask(kept, on=fleet.a)
    with load_on(fleet, [fleet.a, fleet.b], some(4)) as outcome:
        go_on(outcome, what="before")
        fleet.deploy(load_patience_ms=5_001)
        wait_until(
            lambda: fleet.shows(lambda status: not old & ids_of(status)),
            within_s=START_WITHIN_S,
            what="the end of all old replicas",
        )
        fleet.ray.wait_until_running()
        wait_until(fleet.is_whole, within_s=START_WITHIN_S, what="all members")
        go_on(outcome, what="after")
    assert outcome.wrong == []
    wait_until(
        lambda: fleet.shows(lambda status: status.store_nodes == nodes), within_s=60, what="the same store nodes"
    )
    assert fleet.ask(kept, on=fleet.a, sources=FROM_MEMORY).usage.cached == CachedTokens(shared_memory=HIT)


def replace_process(fleet: Fleet, host: Host, deployment: str) -> None:
    """Kill the one replica of a deployment on a host, and wait for another one in its place."""
    before = ids_of(fleet.client.status())
    (pid,) = host.pids(f"ray::ServeReplica:headrace:{deployment}")
    os.kill(pid, signal.SIGKILL)
    wait_until(
        lambda: fleet.is_whole() and fleet.shows(lambda status: len(ids_of(status) & before) == len(before) - 1),
        within_s=START_WITHIN_S,
        what=f"another {deployment} on {host.name}",
    )


def test_without_redis_and_head_requests_go_on_and_with_both_again_hits_and_changes_do(fleet: Fleet):
    """Fails when an answer needs Ray's head or Redis, the first one of a new gateway, too; when without a head what is
    stored is not found by other hosts; when what is known is forgotten without Redis, or what was stored meanwhile is
    never found; when a head that comes back does not know what runs."""
    replace_process(fleet, fleet.b, "Gateway")
    members = ids_of(fleet.client.status())
    with load_on(fleet, [fleet.a], some(4)) as outcome:
        with long_stream(fleet, fleet.a, *some(1)) as stream:
            fleet.ray.head.kill_processes()
            stream.check_to_its_end()
        known, during = wait_until_it_crosses(fleet), next(prompts())
        expected = fleet.cold(known)
        go_on(outcome, what="without a head")
        fleet.ray.kill_redis()
        assert fleet.ask(known, on=fleet.b).token_ids == expected
        again = fleet.ask(known, on=fleet.a, sources=FROM_MEMORY)
        assert (again.token_ids, again.usage.cached) == (expected, CachedTokens(shared_memory=HIT))
        stored = fleet.ask(during, on=fleet.a)
        go_on(outcome, what="without Redis and head")
        fleet.ray.start_redis()
        fleet.ray.start_ray(fleet.ray.head, cpus=0)
        wait_until(
            lambda: answers(fleet, during, stored).usage.cached.grpc == HIT,
            within_s=120,
            what="hits on what was stored without Redis",
        )
        fleet.ray.wait_until_running()
        go_on(outcome, what="with both again")
    assert outcome.wrong == []
    wait_until(lambda: fleet.shows(lambda status: ids_of(status) == members), within_s=60, what="the same members")
    replace_process(fleet, fleet.b, "DecodeWorker")
    wait_until_it_crosses(fleet)


def holders_in_index(fleet: Fleet) -> set[bytes]:
    """Whoever has an entry of a block in Redis, dead or alive."""
    with redis.Redis.from_url(fleet.ray.redis_url) as connection:
        return {holder for key in connection.scan_iter(BLOCK_KEYS_PATTERN) for holder in connection.hkeys(key)}


def test_a_host_that_dies_takes_its_own_streams_and_entries_and_another_takes_its_place(fleet: Fleet):
    """Fails when streams of other hosts are touched, entries of a dead node stay in the index, requests are sent to it
    for ever, or a host that joins gets neither store node nor worker."""
    dead, prompt = fleet.b, next(prompts())
    held = fleet.ask(prompt, on=dead)
    wait_until(lambda: b"node:b" in holders_in_index(fleet), within_s=60, what="entries of b")
    with long_stream(fleet, fleet.a, *some(1)) as stream:
        dead.kill()
        fleet.clients.pop("b").close()
        stream.check_to_its_end()
    wait_until(
        lambda: fleet.shows(lambda status: {node.node_id for node in status.store_nodes} == {"a"}),
        within_s=120,
        what="a system without b",
    )
    assert fleet.client.generate(prompt, sampling=TOKENS, timeout_s=120).token_ids == held.token_ids
    new = fleet.ray.add_host("c", resources={"gateway": 1, "decode": 1})
    fleet.clients["c"] = fleet.ray.client(new)
    wait_until(
        lambda: fleet.is_whole() and fleet.shows(lambda status: "c" in {each.store_node for each in status.workers}),
        within_s=START_WITHIN_S,
        what="a worker on c",
    )
    assert {node.node_id for node in fleet.client.status().store_nodes} == {"a", "c"}
    wait_until(lambda: b"node:b" not in holders_in_index(fleet), within_s=120, what="no entry of b")

"""What every Membership does, in memory and in a real Valkey server or cluster."""

from dataclasses import replace

import pytest

from headrace.core.block import HashAlgorithm, KvLayout, Namespace
from headrace.core.generation import WorkerId
from headrace.core.members import GatewayRecord, StoreNodeRecord, WorkerRecord, WorkerRole

TTL_MS = 60_000


def make_node(node_id: str = "a", incarnation: int = 1) -> StoreNodeRecord:
    return StoreNodeRecord(
        node_id=node_id,
        incarnation=incarnation,
        host="host",
        address="127.0.0.1:50070",
        arena_path="/dev/shm/arena",
        pid=4_242,
        metrics_port=9_100,
    )


def make_worker(worker_id: str = "w", incarnation: int = 1) -> WorkerRecord:
    layout = KvLayout(dtype="bfloat16", num_layers=2, num_kv_heads=1, head_dim=8, block_tokens=16)
    namespace = Namespace(
        model_id="model",
        weights_digest="w",
        tokenizer_digest="t",
        adapter_digest="",
        layout=layout,
        position_digest="p",
        numerics_probe="n",
        hash_algorithm=HashAlgorithm.SHA256,
        trust_group="grüppe",
    )
    return WorkerRecord(
        worker_id=WorkerId(worker_id),
        incarnation=incarnation,
        role=WorkerRole.BOTH,
        host="host",
        store_node="a",
        model="model",
        namespace=namespace,
        context_tokens_max=2_048,
        pool_blocks=100,
        pid=7,
        running=3,
        free_blocks=99,
    )


def make_gateway(gateway_id: str = "g") -> GatewayRecord:
    return GatewayRecord(gateway_id=gateway_id, incarnation=1, host="host", address="127.0.0.1:50080", pid=8)


async def test_a_record_is_read_as_it_was_announced(under_test):
    node, worker, gateway = make_node(), make_worker(), make_gateway()
    for record in (node, worker, gateway):
        await under_test.membership.announce(record, ttl_ms=TTL_MS)
    assert await under_test.membership.store_nodes() == (node,)
    assert await under_test.membership.workers() == (worker,)
    assert await under_test.membership.gateways() == (gateway,)
    assert (await under_test.membership.workers())[0].namespace.id == worker.namespace.id


async def test_nobody_announced_means_nobody(under_test):
    assert await under_test.membership.store_nodes() == ()
    assert await under_test.membership.workers() == ()
    assert await under_test.membership.gateways() == ()


async def test_records_come_in_an_order_that_all_readers_share(under_test):
    for node_id in ("c", "a", "b"):
        await under_test.membership.announce(make_node(node_id), ttl_ms=TTL_MS)
    assert [node.node_id for node in await under_test.membership.store_nodes()] == ["a", "b", "c"]


async def test_a_refresh_replaces_the_record(under_test):
    await under_test.membership.announce(make_worker(), ttl_ms=TTL_MS)
    busier = replace(make_worker(), running=9)
    await under_test.membership.announce(busier, ttl_ms=TTL_MS)
    assert await under_test.membership.workers() == (busier,)


async def test_a_record_vanishes_when_it_is_not_refreshed(under_test):
    await under_test.membership.announce(make_node("quiet"), ttl_ms=2_000)
    await under_test.membership.announce(make_node("loud"), ttl_ms=2_000)
    for _ in range(2):
        await under_test.pass_time_ms(1_100)
        await under_test.membership.announce(make_node("loud"), ttl_ms=10_000)
    assert [node.node_id for node in await under_test.membership.store_nodes()] == ["loud"]


async def test_announcing_tells_whether_the_record_stood_before(under_test):
    # The owner registers everything again on True; a False too many would leave its blocks unfindable for ever.
    announce = under_test.membership.announce
    assert await announce(make_node(), ttl_ms=1_500) is True
    assert await announce(make_node(), ttl_ms=1_500) is False
    await under_test.pass_time_ms(1_600)
    assert await announce(make_node(), ttl_ms=TTL_MS) is True
    await under_test.membership.withdraw(make_node())
    assert await announce(make_node(), ttl_ms=TTL_MS) is True
    assert await announce(make_node(incarnation=2), ttl_ms=TTL_MS) is True


async def test_an_older_incarnation_does_not_push_out_a_newer_one(under_test):
    await under_test.membership.announce(make_node(incarnation=10), ttl_ms=TTL_MS)
    assert await under_test.membership.announce(make_node(incarnation=9), ttl_ms=TTL_MS) is False
    assert [node.incarnation for node in await under_test.membership.store_nodes()] == [10]


@pytest.mark.parametrize(("standing", "withdrawn", "left"), [(10, 9, 1), (10, 10, 0), (10, 11, 0)])
async def test_withdrawing_spares_only_a_newer_incarnation(under_test, standing, withdrawn, left):
    await under_test.membership.announce(make_node(incarnation=standing), ttl_ms=TTL_MS)
    await under_test.membership.withdraw(make_node(incarnation=withdrawn))
    assert len(await under_test.membership.store_nodes()) == left


async def test_withdrawing_what_is_not_there_is_harmless(under_test):
    await under_test.membership.announce(make_node("b"), ttl_ms=TTL_MS)
    await under_test.membership.withdraw(make_node("a"))
    assert [node.node_id for node in await under_test.membership.store_nodes()] == ["b"]


async def test_a_node_and_a_worker_of_one_name_are_two_members(under_test):
    await under_test.membership.announce(make_node("x"), ttl_ms=TTL_MS)
    await under_test.membership.announce(make_worker("x"), ttl_ms=TTL_MS)
    await under_test.membership.withdraw(make_node("x"))
    assert len(await under_test.membership.workers()) == 1

"""Why a prompt missed, over real store nodes: each cause is told by its own name and no other."""

import asyncio
import dataclasses
import threading

import grpc
import pytest
from admin_kit import admin_over, keep_on_device, store_text, token_ids_of
from store_kit import StoreKit
from tiny_gateway import NODE, CountingTokenizers, make_namespace, make_worker_record, tiny_gateway

from headrace.core.block import HolderId, Tier
from headrace.core.front_door_limits import HASHED_ON_LOOP_TOKENS_MAX
from headrace.core.tenants import EVERYBODY
from headrace.gateway.admin_scope import admin_scope
from headrace.gateway.answer_why_miss import answer_why_miss
from headrace.gateway.fleet import Fleet
from headrace.gateway.list_everywhere import list_everywhere
from headrace.gateway.prepare_request import hash_for
from headrace.gateway.recent_prompts import RecentPrompt, RecentPrompts
from headrace.gateway.route_request import ChoiceFinished
from headrace.wire.client_request import ClientRequest, SamplingOptions, TextPrompt
from headrace.wire.v1 import admin_pb2

TEXT = "sharedheadtail!!"  # 4 blocks of 4


async def ask(admin, **request):
    return await admin.stub.WhyMiss(admin_pb2.WhyMissRequest(**request))


async def register(admin, node="n0", text=TEXT):
    """Have the index say what the node holds."""
    await admin.gateway.service.index.register(
        holder=HolderId(f"node:{node}"),
        incarnation=1,
        tier=Tier.HOST,
        namespace=make_namespace().id,
        blocks=hash_for(make_namespace(), token_ids_of(text)).chain,
    )


def kinds(reply):
    return [reason.kind for reason in reply.reasons]


async def test_a_prompt_that_was_never_stored_is_told_as_that(model_path):
    """Fails when nothing is claimed to have been evicted, or the whole prompt is not counted."""
    async with admin_over(model_path, "n0") as admin:
        reply = await ask(admin, text=TEXT)
        assert (reply.prompt_tokens, reply.block_tokens, reply.num_blocks) == (16, 4, 4)
        assert kinds(reply) == ["never_stored"]
        assert (reply.reasons[0].first_block, reply.reasons[0].num_blocks) == (0, 4)


async def test_nodes_are_asked_at_the_same_time(model_path):
    """Fails when silent nodes are waited for one after the other: three would be longer than any caller waits."""
    async with admin_over(model_path, "n0", "n1", "n2") as admin:
        service, all_asked = admin.gateway.service, asyncio.Barrier(3)
        fleet = Fleet(service, channel_to=admin.channel_to)

        class Gated:
            def __init__(self, node):
                self.stub = fleet.node_stub(node)

            async def Explain(self, asked, *, timeout):
                await all_asked.wait()
                return await self.stub.Explain(asked, timeout=timeout)

        reply = await answer_why_miss(
            admin_pb2.WhyMissRequest(text=TEXT),
            service=service,
            scope=admin_scope(EVERYBODY, None),
            stub_of=Gated,
            list_everywhere=lambda selectors: list_everywhere(fleet, selectors, limit=9),
        )
        assert not reply.errors
        assert {run.holder for run in reply.runs} >= {"node:n0", "node:n1", "node:n2"}


async def test_what_is_there_is_told_as_a_hit(model_path):
    """Fails when a hit is explained away, or a worker's own pool is forgotten."""
    async with admin_over(model_path, "n0") as admin:
        store_text(admin.kits["n0"], TEXT)
        await register(admin)
        keep_on_device(admin.gateway.worker("d0"), TEXT[:8])
        reply = await ask(admin, text=TEXT)
        assert kinds(reply) == ["hit"]
        assert {run.holder: run.held_blocks for run in reply.runs} == {"node:n0": 4, "worker:d0": 2, "worker:d1": 0}


async def test_an_evicted_prefix_says_when_and_by_whom(model_path):
    """Fails when the removal is forgotten, is put down to another cause, or outlives the block's return."""
    async with admin_over(model_path, "n0") as admin:
        store_text(admin.kits["n0"], TEXT)
        await register(admin, text=TEXT[:8])
        await admin.evict(prefix_text=TEXT[:12])
        reply = await ask(admin, text=TEXT)
        assert kinds(reply) == ["evicted"]
        (reason,) = reply.reasons
        assert (reason.holder, reason.first_block, reason.num_blocks) == ("node:n0", 2, 2)
        assert "operator default" in reason.detail
        store_text(admin.kits["n0"], TEXT)
        await register(admin)
        assert kinds(await ask(admin, text=TEXT)) == ["hit"]


async def test_a_block_that_made_room_says_so(model_path):
    """Fails when pressure is put down to an operator."""
    async with admin_over(model_path, "n0") as admin:
        kit: StoreKit = admin.kits["n0"]
        store_text(kit, TEXT)
        for number in range(4):
            store_text(kit, f"{number}" * 16)
        reply = await ask(admin, text=TEXT)
        assert kinds(reply)[0] == "evicted"
        assert "make room" in reply.reasons[0].detail


async def test_other_namespaces_are_named_with_the_field_that_differs(model_path):
    """Fails when the same tokens elsewhere are not found, or the wrong field is blamed."""
    async with admin_over(model_path, "n0") as admin:
        store_text(admin.kits["n0"], TEXT, salt="mine")
        reply = await ask(admin, text=TEXT)
        assert kinds(reply) == ["other_namespace", "never_stored"]
        assert "trust_group differs: another tenant or cache_salt" in reply.reasons[0].detail
        salted = await ask(admin, text=TEXT, cache_salt="mine")
        assert kinds(salted)[0] == "hit"
        other = make_namespace(weights_digest="newer")
        admin.gateway.worker("d1").record = other_worker = dataclasses.replace(
            admin.gateway.worker("d1").record, namespace=other, incarnation=2, model_path=model_path, model="tuned"
        )
        await admin.gateway.membership.announce(other_worker, ttl_ms=60_000)
        tuned = await ask(admin, text=TEXT, model="tuned")
        assert any("no live worker" in r.detail or "weights_digest" in r.detail for r in tuned.reasons)


async def test_an_index_that_is_behind_a_node_is_told(model_path):
    """Fails when a block that is held but cannot be found counts as a plain hit."""
    async with admin_over(model_path, "n0") as admin:
        store_text(admin.kits["n0"], TEXT)
        reply = await ask(admin, text=TEXT)
        assert kinds(reply) == ["hit", "index_differs"]
        assert "the index says that it has 0 leading blocks, it has 4" in reply.reasons[1].detail


async def test_holders_that_are_gone_or_silent_are_named(model_path):
    """Fails when a dead holder leaves no trace, or a silent node is taken for an empty one."""
    async with admin_over(model_path, "n0", dead_nodes=["n9"]) as admin:
        await admin.gateway.membership.withdraw(admin.gateway.worker("d1").record)
        reply = await ask(admin, text=TEXT)
        assert [error.holder for error in reply.errors] == ["node:n9"]
        assert {reason.holder for reason in reply.reasons if reason.kind == "holder_gone"} == {"worker:d1"}


async def test_a_prompt_of_less_than_a_block_is_too_short(model_path):
    """Fails when a prompt that can never be kept is looked for."""
    async with admin_over(model_path, "n0") as admin:
        reply = await ask(admin, text="abc")
        assert (kinds(reply), "3 tokens are less than one block of 4" in reply.reasons[0].detail) == (
            ["too_short"],
            True,
        )


async def test_a_request_is_explained_by_its_id_as_it_was_looked_up(model_path):
    """Fails when the salt of the request is lost, or unknown ids are answered."""
    async with admin_over(model_path, "n0") as admin:
        request = ClientRequest(
            model="tiny", prompt=TextPrompt(TEXT), sampling=SamplingOptions(max_tokens=1), cache_salt="mine"
        )
        events = [event async for event in admin.gateway.service.generate(request, EVERYBODY)]
        assert isinstance(events[-1], ChoiceFinished)
        reply = await ask(admin, request_id=events[0].request_id)
        assert reply.namespace == make_namespace().narrowed("mine").id
        with pytest.raises(grpc.aio.AioRpcError, match="not among the last"):
            await ask(admin, request_id="unknown")
        with pytest.raises(grpc.aio.AioRpcError, match="give one of"):
            await ask(admin)


async def test_a_request_that_has_stored_what_it_missed_is_explained_as_it_came(model_path):
    """Fails when a request that missed is told that everything is there, and not why it was not when it came."""
    async with admin_over(model_path, "n0") as admin:
        store_text(admin.kits["n0"], TEXT)
        await admin.evict()
        request = ClientRequest(model="tiny", prompt=TextPrompt(TEXT), sampling=SamplingOptions(max_tokens=1))
        events = [event async for event in admin.gateway.service.generate(request, EVERYBODY)]
        store_text(admin.kits["n0"], TEXT)  # as the worker that computed it does
        reply = await ask(admin, request_id=events[0].request_id)
        assert kinds(reply)[:3] == ["as_served", "evicted", "hit"]
        served, evicted = reply.reasons[:2]
        assert f"0 of {len(TEXT)} tokens were cached" in served.detail
        assert (evicted.holder, evicted.first_block, evicted.num_blocks) == ("node:n0", 0, len(TEXT) // 4)
        assert "evicted by operator default" in evicted.detail
        assert "before it came; stored again since" in evicted.detail
        assert kinds(await ask(admin, text=TEXT))[0] == "hit"


async def test_a_long_prompt_is_hashed_off_the_loop(model_path):
    """Fails when an operator's question about a prompt of a million tokens stops all streams meanwhile."""
    tokenizers, token_ids = CountingTokenizers(), (5,) * (HASHED_ON_LOOP_TOKENS_MAX + 1)
    worker = make_worker_record("d0", context_tokens_max=10**6, pool_blocks=10**6)
    async with tiny_gateway(worker, model_path=model_path, tokenizers=tokenizers) as gateway:
        await gateway.membership.withdraw(NODE)
        reply = await answer_why_miss(
            admin_pb2.WhyMissRequest(token_ids=token_ids),
            service=gateway.service,
            scope=admin_scope(EVERYBODY, None),
            stub_of=no_stub,
            list_everywhere=nothing_listed,
        )
    assert reply.prompt_tokens == len(token_ids)
    assert len(tokenizers.threads) == 1
    assert threading.main_thread() not in tokenizers.threads


def no_stub(node):
    raise AssertionError("there is no node to ask")


async def nothing_listed(selectors):
    return admin_pb2.ListBlocksReply()


def test_remembered_prompts_are_bounded_by_number_and_by_tokens():
    """Fails when prompts of a busy gateway grow without end."""
    recent = RecentPrompts(prompts_max=2, tokens_max=10)
    for number in range(3):
        recent.add(str(number), make_recent(4))
    assert [recent.find(str(number)) is not None for number in range(3)] == [False, True, True]
    recent.add("large", make_recent(9))
    assert [recent.find(str(number)) is not None for number in range(3)] == [False, False, False]
    recent.add("too large", make_recent(11))
    assert (recent.find("large") is not None, recent.find("too large")) == (True, None)


def make_recent(num_tokens):
    return RecentPrompt("tiny", "", hash_for(make_namespace(), tuple(range(num_tokens))))

"""Admin calls over real store nodes and in-process workers: what is reported is what was done, holder by holder."""

import json
import threading
from dataclasses import replace

import grpc
import pytest
from admin_kit import admin_over, keep_on_device, store_text, token_ids_of
from tiny_gateway import BLOCK_TOKENS, CountingTokenizers, make_namespace, make_worker_record

from headrace.blocks.host_arena import UNIT_BYTES
from headrace.core.errors import IndexUnavailable, WorkerUnavailable
from headrace.core.front_door_limits import DECODED_BLOCKS_OF_JOB_MAX
from headrace.engine.block_pool import Selection
from headrace.gateway.fleet import Fleet
from headrace.gateway.list_everywhere import name_blocks
from headrace.wire.v1 import admin_pb2


async def test_an_eviction_by_prefix_text_takes_the_prefix_and_what_follows_it_on_every_node(model_path):
    """Fails when text is tokenised otherwise than prompts are, a node is left out, or strangers go too."""
    async with admin_over(model_path, "n0", "n1") as admin:
        for kit in admin.kits.values():
            assert store_text(kit, "sharedheadtail") == 3
            assert store_text(kit, "othertexthere") == 3
        dry = await admin.evict(prefix_text="sharedhead", dry_run=True)
        assert {holder: dry[holder].blocks for holder in ("node:n0", "node:n1")} == {"node:n0": 2, "node:n1": 2}
        assert [kit.node.stat().committed_blocks for kit in admin.kits.values()] == [6, 6]
        done = await admin.evict(prefix_text="sharedhead")
        assert (done["node:n0"].blocks, done["node:n0"].tokens, done["node:n0"].dry_run) == (2, 2 * BLOCK_TOKENS, False)
        assert [kit.node.stat().committed_blocks for kit in admin.kits.values()] == [4, 4]
        left = await admin.list_blocks(prefix_text="sharedhead")
        assert left.total_blocks == 0


async def test_an_eviction_reaches_every_workers_own_pool(model_path):
    """Fails when the device tier is forgotten, or dry runs evict there."""
    async with admin_over(model_path, "n0") as admin:
        reports = await admin.evict(model="tiny", dry_run=True)
        assert reports["worker:d0"].blocks == reports["worker:d1"].blocks == 2
        asked = {(worker, selector.namespace, dry) for worker, selector, dry in admin.gateway.calls.evicted}
        assert asked == {("d0", make_namespace().id, True), ("d1", make_namespace().id, True)}


async def test_blocks_under_a_salt_are_listed_and_evicted_with_their_model(model_path):
    """Fails when a model's blocks in narrowed namespaces are out of reach, or a prefix stops at one of them."""
    async with admin_over(model_path, "n1") as admin:
        kit = admin.kits["n1"]
        for salt in ("", "one", "two"):
            store_text(kit, "sharedheadtail", salt=salt)
        listing = await admin.list_blocks(model="tiny", with_text=True)
        assert len({block.namespace for block in listing.blocks}) == 3
        assert {(block.model, block.base_namespace) for block in listing.blocks} == {("tiny", make_namespace().id)}
        assert {block.text for block in listing.blocks} == {"shar", "edhe", "adta"}
        assert (await admin.evict(prefix_text="sharedheadta", model="tiny"))["node:n1"].blocks == 3
        salted = make_namespace().narrowed("one").id
        assert (await admin.evict(namespace=salted))["node:n1"].blocks == 2
        assert (await admin.evict(model="tiny"))["node:n1"].blocks == 4
        assert kit.node.stat().committed_blocks == 0


async def test_a_workers_own_pool_is_listed_beside_the_nodes(model_path):
    """Fails when the device tier is not shown, or a selector means other blocks there than on nodes."""
    async with admin_over(model_path, "n1") as admin:
        store_text(admin.kits["n1"], "sharedheadtail")
        keep_on_device(admin.gateway.worker("d0"), "sharedheadtail")
        keep_on_device(admin.gateway.worker("d1"), "sharedheadtail", salt="mine")
        listing = await admin.list_blocks(with_text=True)
        assert [(b.holder, b.tier, b.text) for b in listing.blocks] == [
            (holder, tier, text)
            for holder, tier in (("node:n1", "host"), ("worker:d0", "device"), ("worker:d1", "device"))
            for text in ("shar", "edhe", "adta")
        ]
        under = await admin.list_blocks(prefix_text="sharedhead", limit=3)
        assert ([b.holder for b in under.blocks], under.total_blocks) == (["node:n1", "node:n1", "worker:d0"], 6)
        admin.gateway.worker("d1").fails = WorkerUnavailable("d1", "died")
        assert [error.holder for error in (await admin.list_blocks()).errors] == ["worker:d1"]


async def test_a_workers_books_are_what_its_pool_counted(model_path):
    """Fails when a worker's lookups, hits or evictions are reported as zero or in blocks."""
    async with admin_over(model_path) as admin:
        pool = admin.gateway.worker("d0").pool
        keep_on_device(admin.gateway.worker("d0"), "sharedheadtail")
        pool.count_lookup(asked_blocks=5, hit_blocks=3)
        pool.evict(Selection(), dry_run=False)
        stats = {s.holder: s for s in (await admin.stub.Stat(admin_pb2.StatRequest())).holders}
        stat = stats["worker:d0"]
        assert (stat.lookups_tokens, stat.hits_tokens) == (5 * BLOCK_TOKENS, 3 * BLOCK_TOKENS)
        assert (stat.lookups, stat.read_bytes) == (1, 3 * stat.block_bytes)
        assert (stat.evicted_blocks, stat.total_blocks, stat.free_blocks, stat.committed_blocks) == (3, 1_000, 1_000, 0)


async def test_holders_that_do_not_answer_are_reported_and_the_others_still_do_their_part(model_path):
    """Fails when a silent holder makes the call fail, hang or claim success."""
    async with admin_over(model_path, "n1", dead_nodes=["n9"]) as admin:
        store_text(admin.kits["n1"], "sharedheadtail")
        admin.gateway.worker("d1").fails = WorkerUnavailable("d1", "died")
        reports = await admin.evict()
        assert reports["node:n1"].blocks == 3
        assert reports["node:n9"].error
        assert "died" in reports["worker:d1"].error
        assert not reports["worker:d0"].error
        listing = await admin.list_blocks()
        assert [error.holder for error in listing.errors] == ["node:n9", "worker:d1"]
        stats = {s.holder: s for s in (await admin.stub.Stat(admin_pb2.StatRequest())).holders}
        assert stats["node:n9"].error
        assert stats["node:n1"].total_blocks == 16
        assert (stats["worker:d0"].tier, stats["worker:d0"].free_blocks) == ("device", 1_000)


async def test_workers_of_another_ray_cluster_are_named_by_every_call_that_would_reach_them(model_path):
    """Fails when who evicts what a user sent, say, takes it for gone while the other cluster's workers keep it."""
    async with admin_over(model_path, "n1") as admin:
        store_text(admin.kits["n1"], "sharedhead")
        theirs = make_worker_record("theirs", ray_cluster="green")
        others = replace(theirs, worker_id="others", namespace=make_namespace(weights_digest="other"))
        for record in (theirs, others):
            await admin.gateway.membership.announce(record, ttl_ms=60_000)
        ttl = admin_pb2.SetTtlRequest(selector=admin_pb2.Selector(prefix_text="sharedhead"), ttl_s=60)
        stat = (await admin.stub.Stat(admin_pb2.StatRequest())).holders
        assert {each.holder for each in stat if each.error} == {"worker:theirs", "worker:others"}
        ordered = (await admin.stub.SetTtl(ttl)).reports
        listed = (await admin.list_blocks(model="tiny")).errors
        evicted = (await admin.evict(model="tiny")).values()
        for replies in (ordered, listed, evicted):
            errors = {each.holder: each.error for each in replies if each.error}
            assert set(errors) == {"worker:theirs"}
            assert "another Ray cluster" in errors["worker:theirs"]
        (named,) = (await admin.evict(holders=["worker:theirs"])).values()
        assert "another Ray cluster" in named.error


async def test_blocks_are_listed_with_model_and_text_up_to_the_limit(model_path):
    """Fails when the total hides what the limit cut off, or a block's text is not its tokens'."""
    async with admin_over(model_path, "n0", "n1") as admin:
        for kit in admin.kits.values():
            store_text(kit, "sharedheadtail")
        listing = await admin.list_blocks(model="tiny", with_text=True, limit=4)
        assert (len(listing.blocks), listing.total_blocks) == (4, 6)
        assert listing.blocks[0].model == "tiny"
        assert {block.text for block in listing.blocks} == {"shar", "edhe", "adta"}


async def test_an_eviction_by_holder_tier_or_age_leaves_everything_else(model_path):
    """Fails when one of the selectors is lost on its way, so that an eviction means more than was asked."""
    async with admin_over(model_path, "n1") as admin:
        store_text(admin.kits["n1"], "sharedheadtail")
        keep_on_device(admin.gateway.worker("d0"), "sharedheadtail")
        assert set(await admin.evict(holders=["worker:d0"], dry_run=True)) == {"worker:d0"}
        by_tier = await admin.evict(tier="device", dry_run=True)
        assert (by_tier["node:n1"].blocks, by_tier["worker:d0"].blocks) == (0, 2)
        assert (await admin.evict(tier="host", holders=["node:n1"], dry_run=True))["node:n1"].blocks == 3
        listed = await admin.list_blocks(tier="device", holders=["worker:d0", "node:n1"])
        assert {block.holder for block in listed.blocks} == {"worker:d0"}
        # The kit's headers say that they were made in 1970; the pool's blocks were made just now.
        assert (await admin.evict(older_than_s=3_600, holders=["node:n1"], dry_run=True))["node:n1"].blocks == 3
        assert (await admin.list_blocks(older_than_s=3_600, tier="device")).total_blocks == 0


async def test_freeing_a_size_takes_the_least_recently_used_and_no_more_than_needed(model_path):
    """Fails when the order is another, a block leaves before what stands on it, or several selectors each free all."""
    async with admin_over(model_path, "n1") as admin:
        kit = admin.kits["n1"]
        for text in ("oldoldold123", "newnewnew123"):
            kit.clock.seconds += 10
            store_text(kit, text)
        freed = await admin.evict(free_bytes=2 * UNIT_BYTES - 1, holders=["node:n1"])
        assert freed["node:n1"].blocks == 2
        left = await admin.list_blocks(with_text=True, tier="host")
        assert [block.text for block in left.blocks] == ["oldo", "newn", "ewne", "w123"]


async def test_the_price_counts_each_token_once_and_only_where_no_copy_stays(model_path):
    """Fails when copies are counted as losses, or a loss is hidden because a copy was there before."""
    async with admin_over(model_path, "n1") as admin:
        store_text(admin.kits["n1"], "sharedheadtail")
        keep_on_device(admin.gateway.worker("d0"), "sharedhead")

        async def price(**request):
            return await admin.stub.Evict(admin_pb2.EvictRequest(**request))

        on_node = await price(selector={"holders": ["node:n1"]}, dry_run=True)
        assert (on_node.lost_tokens, on_node.lost_tokens_at_most) == (BLOCK_TOKENS, False)
        assert (on_node.tokens_per_s, on_node.tokens_per_s_from) == (0.0, "")
        admin.gateway.service.prefill_rate.add(tokens=400, seconds=2)
        assert (await price(selector={}, dry_run=True)).tokens_per_s_from == "measured"
        done = await price(selector={"holders": ["node:n1"]}, tokens_per_s=8)
        assert (done.lost_tokens, done.tokens_per_s, done.tokens_per_s_from) == (BLOCK_TOKENS, 8.0, "configured")


async def test_an_eviction_leaves_one_audit_line_and_a_dry_run_none(model_path, caplog):
    """Fails when a change goes unrecorded, or the line shows what a prompt said."""
    caplog.set_level("INFO", "headrace.audit")
    async with admin_over(model_path, "n1") as admin:
        store_text(admin.kits["n1"], "sharedheadtail")
        await admin.evict(prefix_text="sharedhead", dry_run=True)
        assert not [r for r in caplog.records if r.name == "headrace.audit"]
        await admin.evict(prefix_text="sharedhead", holders=["node:n1"])
        (line,) = [json.loads(r.getMessage()) for r in caplog.records if r.name == "headrace.audit"]
        assert (line["who"], line["what"], line["asked"]["prefix_length"]) == ("default", "evict", 10)
        assert (line["effect"]["blocks"], line["effect"]["holders"]) == (2, {"node:n1": 2})
        assert "sharedhead" not in json.dumps(line)


@pytest.mark.parametrize(
    ("selector", "code", "words"),
    [
        ({"prefix_text": "abc"}, grpc.StatusCode.INVALID_ARGUMENT, "less than one block of 4"),
        ({"prefix_token_ids": [1, 2]}, grpc.StatusCode.INVALID_ARGUMENT, "less than one block of 4"),
        ({"prefix_text": "abcd", "prefix_token_ids": [1] * 4}, grpc.StatusCode.INVALID_ARGUMENT, "not both"),
        ({"prefix_text": "abcd", "block_hashes": [b"x" * 16]}, grpc.StatusCode.INVALID_ARGUMENT, "not both"),
        ({"model": "other"}, grpc.StatusCode.NOT_FOUND, "served: tiny"),
        ({"model": "tiny", "namespace": "ff" * 16}, grpc.StatusCode.INVALID_ARGUMENT, "no live worker"),
        ({"holders": ["node:nowhere"]}, grpc.StatusCode.INVALID_ARGUMENT, "live: node:n0, worker:d0"),
        ({"tier": "moon"}, grpc.StatusCode.INVALID_ARGUMENT, "device, host"),
        ({"older_than_s": -1.0}, grpc.StatusCode.INVALID_ARGUMENT, "at least 0"),
        ({"block_hashes": [b"x"]}, grpc.StatusCode.INVALID_ARGUMENT, "16 or 32 bytes"),
    ],
)
async def test_selectors_that_name_nothing_are_refused_and_evict_nothing(model_path, selector, code, words):
    """Fails when a mistake is taken for a wider selector."""
    async with admin_over(model_path, "n0") as admin:
        store_text(admin.kits["n0"], "sharedheadtail")
        with pytest.raises(grpc.aio.AioRpcError, match=words) as raised:
            await admin.evict(**selector)
        assert raised.value.code() is code
        assert admin.kits["n0"].node.stat().committed_blocks == 3
        assert not admin.gateway.calls.evicted


async def test_a_prefix_given_as_token_ids_means_the_same_as_its_text(model_path):
    """Fails when the two ways to name a prefix differ."""
    async with admin_over(model_path, "n0") as admin:
        store_text(admin.kits["n0"], "sharedheadtail")
        by_ids = await admin.evict(prefix_token_ids=token_ids_of("sharedhead"), dry_run=True)
        by_text = await admin.evict(prefix_text="sharedhead", dry_run=True)
        assert by_ids["node:n0"].blocks == by_text["node:n0"].blocks == 2


async def test_the_text_of_a_listing_is_decoded_off_the_loop(model_path):
    """Fails when an operator who reads ten thousand blocks stops all streams meanwhile."""
    tokenizers = CountingTokenizers()
    async with admin_over(model_path, "n0", tokenizers=tokenizers) as admin:
        store_text(admin.kits["n0"], "sharedheadtail")
        listing = await admin.list_blocks(with_text=True)
        assert sorted(block.text for block in listing.blocks) == ["adta", "edhe", "shar"]
        assert len(tokenizers.threads) == 1, "all of a model's blocks at once"
    assert threading.main_thread() not in tokenizers.threads


async def test_the_text_of_a_long_listing_is_decoded_in_pieces(model_path):
    """Fails when prompts wait in the tokenizer's threads until ten thousand blocks are decoded, or pieces are mixed."""
    tokenizers, texts = CountingTokenizers(), [f"{number:04}" for number in range(2 * DECODED_BLOCKS_OF_JOB_MAX + 1)]
    async with admin_over(model_path, tokenizers=tokenizers) as admin:
        listing = admin_pb2.ListBlocksReply()
        for text in texts:
            listing.blocks.add(base_namespace=make_namespace().id, token_ids=token_ids_of(text))
        fleet = Fleet(admin.gateway.service, channel_to=admin.channel_to)
        await name_blocks(fleet, listing, with_text=True)
    assert [block.text for block in listing.blocks] == texts
    assert len(tokenizers.threads) == 3


async def test_status_names_everybody(model_path):
    """Fails when a live member is missing."""
    async with admin_over(model_path, "n0", dead_nodes=["n9"]) as admin:
        status = await admin.stub.Status(admin_pb2.StatusRequest())
        assert [node.node_id for node in status.store_nodes] == ["n0", "n9"]
        assert [(w.worker_id, w.role, w.model) for w in status.workers] == [
            ("d0", "decode", "tiny"),
            ("d1", "decode", "tiny"),
        ]
        assert status.index_available


async def test_while_the_members_cannot_be_read_status_names_who_was_there_last(model_path):
    """Fails when hosts vanish from sight because Redis is away: their workers serve on."""

    async def away():
        raise IndexUnavailable("away")

    async with admin_over(model_path, "n0") as admin:
        before = await admin.stub.Status(admin_pb2.StatusRequest())
        for kind in ("store_nodes", "gateways", "workers"):
            setattr(admin.gateway.membership, kind, away)
        status = await admin.stub.Status(admin_pb2.StatusRequest())
        assert not status.index_available
        assert [node.node_id for node in status.store_nodes] == ["n0"]
        assert (list(status.store_nodes), list(status.workers)) == (list(before.store_nodes), list(before.workers))

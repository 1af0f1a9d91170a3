"""Orders about what is kept, over a real gateway and real store nodes: times to live, pins, whose blocks are whose."""

import json

import grpc
import httpx
import pytest
from admin_kit import admin_over, keep_on_device, prompt_of, store_text
from store_kit import HandClock

from headrace.core.generation import EvictSelector
from headrace.core.limits import (
    DEVICE_ORDER_TOKENS_MAX,
    DEVICE_ORDERS_MAX,
    DEVICE_ORDERS_PER_NAMESPACE_MAX,
)
from headrace.core.tenants import HashedKey, KeyRing, Tenant, TenantRole, new_key
from headrace.engine.block_pool import BlockPool
from headrace.gateway.openai_http import build_http_app
from headrace.transfer.device_expiry import DeviceExpiry
from headrace.wire.v1 import admin_pb2

TEXT = "sharedheadtail"  # three blocks, as "sharedhead" has two
GROUPS = {"one": "tenant:one", "two": "tenant:two", "three": "group:both"}
TENANTS = [Tenant(name, group) for name, group in GROUPS.items()]
TENANTS.append(Tenant("operator", "tenant:operator", TenantRole.ADMIN))
KEYS = {tenant.name: new_key() for tenant in TENANTS}
RING = KeyRing(tuple((HashedKey.of(KEYS[tenant.name]), tenant) for tenant in TENANTS))


def as_(tenant: str):
    return (("authorization", f"Bearer {KEYS[tenant]}"),)


async def set_ttl(admin, ttl_s=None, *, who="operator", **selector):
    """Reports by holder."""
    request = admin_pb2.SetTtlRequest(selector=selector, ttl_s=ttl_s)
    return {report.holder: report for report in (await admin.stub.SetTtl(request, metadata=as_(who))).reports}


async def order(admin, rpc, *, who="operator", for_s=None, **selector):
    """Reports by holder."""
    request = admin_pb2.PinRequest(selector=selector, for_s=for_s)
    reply = await getattr(admin.stub, rpc)(request, metadata=as_(who))
    return {report.holder: report for report in reply.reports}


def on_hand_clock(admin, worker_id, *, num_blocks=100):
    """The worker with an empty pool whose time a test moves."""
    worker, clock = admin.gateway.worker(worker_id), HandClock()
    worker.pool = BlockPool(num_blocks, clock=clock)
    worker.expiry = DeviceExpiry(worker.pool, worker.record, clock=clock)
    return worker, clock


def on_device(worker, text=TEXT, **identity):
    return worker.pool.resident_blocks(prompt_of(text, **identity))


async def test_an_order_reaches_workers_pools_and_what_they_load_until_its_moment(model_path):
    """Fails when a prefix still hits on the device after its time, or goes before it."""
    async with admin_over(model_path) as admin:
        (holds, clock), (loads, later) = on_hand_clock(admin, "d0"), on_hand_clock(admin, "d1")
        keep_on_device(holds, TEXT)
        reports = await set_ttl(admin, 60, prefix_text="sharedhead")
        assert {holder: (r.outcome, r.blocks, r.why) for holder, r in reports.items()} == {
            "worker:d0": ("done", 2, ""),
            "worker:d1": ("not held", 0, ""),
        }
        keep_on_device(loads, TEXT)
        for now in (clock, later):
            now.seconds += 59
        holds.expiry.step()
        loads.expiry.step()
        assert (on_device(holds), on_device(loads)) == (3, 3)
        for now in (clock, later):
            now.seconds += 1
        holds.expiry.step()
        loads.expiry.step()
        assert (on_device(holds), on_device(loads)) == (1, 1)


async def test_an_order_is_taken_back_on_workers_too(model_path):
    """Fails when a prefix goes after its order was undone."""
    async with admin_over(model_path) as admin:
        worker, clock = on_hand_clock(admin, "d0")
        keep_on_device(worker, TEXT)
        await set_ttl(admin, 60, prefix_text="sharedhead")
        assert (await set_ttl(admin, prefix_text="sharedhead"))["worker:d0"].outcome == "done"
        clock.seconds += 1_000
        worker.expiry.step()
        assert on_device(worker) == 3


def hears(worker, text, seconds, **identity):
    """A store node tells the worker of an order on a text's last full block, as with a lease."""
    prompt = prompt_of(text, **identity)
    worker.expiry.hear(prompt.namespace, [(prompt.chain[-1], seconds)])


@pytest.mark.parametrize("later_s", [None, 7 * 86_400], ids=["clear", "replace"])
@pytest.mark.parametrize("named_by", ["prefix", "hash"])
async def test_an_order_that_a_worker_heard_of_is_cleared_and_replaced_as_if_it_were_told(
    model_path, named_by, later_s
):
    """Fails when a worker drops its copy at a moment that the operator took back, under a salt too, or forgets what it
    heard of other prefixes, which it holds and does not lease again."""
    async with admin_over(model_path) as admin:
        worker, clock = on_hand_clock(admin, "d0")
        for salt in ("", "mine"):
            keep_on_device(worker, TEXT, salt=salt)
            hears(worker, "sharedhead", 600, salt=salt)
        keep_on_device(worker, "otherprompt!")
        hears(worker, "otherprompt!", 700)
        hashes = [prompt_of("sharedhead", salt=salt).chain[-1] for salt in ("", "mine")]
        named = {"prefix": {"prefix_text": "sharedhead"}, "hash": {"block_hashes": hashes}}[named_by]
        assert (await set_ttl(admin, later_s, **named))["worker:d0"].outcome == "done"
        clock.seconds += 650
        worker.expiry.step()
        assert [on_device(worker, salt=salt) for salt in ("", "mine")] == [3, 3]
        assert on_device(worker, "otherprompt!") == 3
        clock.seconds += 50
        worker.expiry.step()
        assert on_device(worker, "otherprompt!") == 2
        clock.seconds += 7 * 86_400 - 700
        worker.expiry.step()
        assert [on_device(worker, salt=salt) for salt in ("", "mine")] == [1 if later_s else 3] * 2


@pytest.mark.parametrize("is_held", [True, False])
async def test_what_a_worker_heard_for_one_tenant_is_not_another_ones_to_take_back(model_path, is_held):
    """Fails when a tenant's order on the same tokens touches what holds for another tenant's copy, or misses one of its
    own, under a salt or still to come."""
    async with admin_over(model_path, key_ring=RING) as admin:
        worker, clock = on_hand_clock(admin, "d0")
        own = [{"group": GROUPS["one"], "salt": salt} for salt in ("", "mine")]
        theirs = {"group": GROUPS["two"]}
        for whose in (*own, theirs):
            hears(worker, "sharedhead", 600, **whose)
        for whose in (*own, theirs) if is_held else (theirs,):
            keep_on_device(worker, TEXT, **whose)
        await set_ttl(admin, who="one", prefix_text="sharedhead")
        await set_ttl(admin, who="one", block_hashes=prompt_of("sharedhead", **theirs).chain)
        for whose in () if is_held else own:
            keep_on_device(worker, TEXT, **whose)
        clock.seconds += 601
        worker.expiry.step()
        assert [on_device(worker, **whose) for whose in (*own, theirs)] == [3, 3, 1]


async def test_a_prefix_too_long_to_be_hashed_for_each_namespace_takes_back_all_that_was_heard(model_path):
    """Fails when a long prefix holds a worker up: each namespace that it heard of takes as long again."""
    async with admin_over(model_path) as admin:
        worker, clock = on_hand_clock(admin, "d0")
        keep_on_device(worker, TEXT)
        hears(worker, TEXT, 600)
        worker.expiry.order(EvictSelector(prefix_token_ids=(1,) * (DEVICE_ORDER_TOKENS_MAX + 1)), ttl_s=None)
        clock.seconds += 601
        worker.expiry.step()
        assert on_device(worker) == 3


async def test_orders_that_a_worker_heard_of_are_bounded_and_take_no_room_from_operators(model_path):
    """Fails when heard orders pile up, the newest is lost for the oldest, or an operator is refused for them."""
    async with admin_over(model_path) as admin:
        worker, clock = on_hand_clock(admin, "d0", num_blocks=1_000)
        texts = [f"prompt {number:03}.." for number in range(DEVICE_ORDERS_PER_NAMESPACE_MAX + 1)]
        for text in texts:
            keep_on_device(worker, text)
            hears(worker, text, 600)
        keep_on_device(worker, TEXT)
        assert (await set_ttl(admin, 60, prefix_text="sharedhead"))["worker:d0"].outcome == "done"
        clock.seconds += 601
        worker.expiry.step()
        kept = [text for text in texts if on_device(worker, text) == len(prompt_of(text).chain)]
        assert kept == texts[:1]


async def test_orders_that_a_worker_heard_of_in_many_namespaces_are_bounded(model_path):
    """Fails when salts have a worker remember without end."""
    async with admin_over(model_path) as admin:
        worker, clock = on_hand_clock(admin, "d0")
        salts = [str(number) for number in range(DEVICE_ORDERS_MAX + 1)]
        for salt in salts:
            hears(worker, "sharedhead", 600, salt=salt)
        for salt in (salts[0], salts[1], salts[-1]):
            keep_on_device(worker, TEXT, salt=salt)
        clock.seconds += 601
        worker.expiry.step()
        assert [on_device(worker, salt=salt) for salt in (salts[0], salts[1], salts[-1])] == [3, 1, 1]


async def test_what_nobody_holds_cannot_be_ordered_about_and_nobody_remembers_the_order(model_path):
    """Fails when silence is taken for success, or a prefix that is warmed later goes by an order that was not taken."""
    async with admin_over(model_path) as admin:
        worker, clock = on_hand_clock(admin, "d0")
        reports = await set_ttl(admin, 60, prefix_text="sharedhead")
        assert {(report.outcome, report.why) for report in reports.values()} == {
            ("not held", "none of those asked holds it: warm it first")
        }
        keep_on_device(worker, TEXT)
        clock.seconds += 100
        worker.expiry.step()
        assert on_device(worker) == 3


async def test_named_holders_alone_are_asked(model_path):
    """Fails when an order for one holder reaches another."""
    async with admin_over(model_path) as admin:
        for worker_id in ("d0", "d1"):
            keep_on_device(admin.gateway.worker(worker_id), TEXT)
        assert set(await set_ttl(admin, 60, prefix_text="sharedhead", holders=["worker:d1"])) == {"worker:d1"}
        with pytest.raises(grpc.aio.AioRpcError, match="no live holder 'worker:d9'"):
            await set_ttl(admin, 60, prefix_text="sharedhead", holders=["worker:d9"])
        with pytest.raises(grpc.aio.AioRpcError, match="pins are kept by store nodes"):
            await order(admin, "Pin", prefix_text="sharedhead", holders=["worker:d1"])


@pytest.mark.parametrize(
    ("selector", "why"),
    [
        ({}, "names a prefix or blocks"),
        ({"model": "tiny"}, "names a prefix or blocks"),
        ({"prefix_text": "sharedhead", "idle_for_s": 5}, "idle_for_s is for evictions"),
        ({"prefix_text": "sharedhead", "older_than_s": 5}, "older_than_s is for evictions"),
        ({"prefix_text": "sharedhead", "free_bytes": 5}, "free_bytes is for evictions"),
        ({"prefix_text": "sharedhead", "tier": "disk"}, "leave tier out"),
        ({"prefix_text": "abc"}, "less than one block"),
        ({"block_hashes": [b"short"]}, "16 or 32 bytes"),
    ],
)
async def test_an_order_names_a_prefix_or_blocks_and_nothing_else(model_path, selector, why):
    """Fails when an order is taken for more than its sender can have meant."""
    async with admin_over(model_path) as admin:
        for attempt in (set_ttl(admin, 60, **selector), order(admin, "Pin", **selector)):
            with pytest.raises(grpc.aio.AioRpcError, match=why) as refused:
                await attempt
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("seconds", [0, 5, -1, float("nan"), 1e12])
async def test_times_out_of_range_are_refused(model_path, seconds):
    """Fails when a pin of no length or a moment in the past is taken."""
    async with admin_over(model_path, "n0") as admin:
        store_text(admin.kits["n0"], TEXT)
        with pytest.raises(grpc.aio.AioRpcError, match="for_s must lie in"):
            await order(admin, "Pin", prefix_text=TEXT, for_s=seconds)
        with pytest.raises(grpc.aio.AioRpcError, match="ttl_s must lie in"):
            await set_ttl(admin, seconds, prefix_text=TEXT)


async def test_a_tenant_can_neither_pin_nor_unpin(model_path):
    """Fails when a tenant can take room from others for good, or free what the operator keeps."""
    async with admin_over(model_path, "n0", key_ring=RING) as admin:
        store_text(admin.kits["n0"], TEXT, group="tenant:one")
        for rpc in ("Pin", "Unpin"):
            with pytest.raises(grpc.aio.AioRpcError, match="may not pin") as refused:
                await order(admin, rpc, who="one", prefix_text=TEXT)
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_tenant_orders_for_its_own_blocks_and_reaches_no_others(model_path):
    """Fails when a tenant can have another one's blocks dropped, by prefix or by hash."""
    async with admin_over(model_path, key_ring=RING) as admin:
        worker, clock = on_hand_clock(admin, "d0")
        for name in ("one", "two"):
            keep_on_device(worker, TEXT, group=GROUPS[name])
        theirs = prompt_of(TEXT, group=GROUPS["two"]).chain
        assert (await set_ttl(admin, 60, who="one", block_hashes=theirs))["worker:d0"].outcome == "not held"
        assert (await set_ttl(admin, 60, who="one", prefix_text="sharedhead"))["worker:d0"].blocks == 2
        clock.seconds += 60
        worker.expiry.step()
        assert on_device(worker, group=GROUPS["one"]) == 1
        assert on_device(worker, group=GROUPS["two"]) == 3


async def test_every_order_leaves_an_audit_line_without_the_prompt(model_path, caplog):
    """Fails when nobody can tell later who ordered what, or users' text lands in the log."""
    caplog.set_level("INFO", logger="headrace.audit")
    async with admin_over(model_path, key_ring=RING) as admin:
        keep_on_device(admin.gateway.worker("d0"), TEXT, group=GROUPS["one"])
        await set_ttl(admin, 60, who="one", prefix_text="sharedhead")
    (line,) = [json.loads(record.message) for record in caplog.records if record.name == "headrace.audit"]
    assert (line["who"], line["what"]) == ("one", "set ttl")
    assert line["asked"] == {"prefix_length": len("sharedhead"), "ttl_s": 60.0}
    assert line["effect"]["holders"] == {"worker:d0": "done", "worker:d1": "not held"}
    assert line["effect"]["blocks"] == 2


async def test_a_listing_names_the_account_of_each_block_under_a_salt_too(model_path):
    """Fails when an operator cannot tell whose blocks fill a node."""
    async with admin_over(model_path, "n1", key_ring=RING) as admin:
        node, worker = admin.kits["n1"], admin.gateway.worker("d0")
        store_text(node, TEXT, group="tenant:one")
        store_text(node, TEXT, group="group:both", salt="mine")
        store_text(node, "from before", group="tenant:left the file")
        keep_on_device(worker, TEXT, group="tenant:two", salt="mine")
        listing = await admin.stub.ListBlocks(admin_pb2.ListBlocksRequest(), metadata=as_("operator"))
        named = {(block.holder, block.tenant): 0 for block in listing.blocks}
        for block in listing.blocks:
            named[block.holder, block.tenant] += 1
        assert named == {
            ("node:n1", "tenant:one"): 3,
            ("node:n1", "group:both"): 3,
            ("node:n1", ""): 2,
            ("worker:d0", "tenant:two"): 3,
        }
        own = await admin.stub.ListBlocks(admin_pb2.ListBlocksRequest(), metadata=as_("two"))
        assert {block.tenant for block in own.blocks} == {"tenant:two"}


async def test_a_dry_run_says_whose_prompts_an_eviction_would_cut(model_path):
    """Fails when copies count twice, a branch is missed, or a prompt counts once for each of its blocks."""
    async with admin_over(model_path, "n0", "n1", key_ring=RING) as admin:
        for kit in admin.kits.values():  # two copies of everything
            store_text(kit, "sharedheadtail", group="tenant:one")
            store_text(kit, "sharedheadelse", group="tenant:one")
            store_text(kit, "sharedhead", group="tenant:two", salt="mine")
        request = admin_pb2.EvictRequest(selector={"prefix_text": "shar", "holders": ["node:n0", "node:n1"]})
        request.dry_run = True
        dry = await admin.stub.Evict(request, metadata=as_("operator"))
        assert [(hit.tenant, hit.blocks, hit.prefixes) for hit in dry.tenants] == [
            ("tenant:one", 4, 2),
            ("tenant:two", 2, 1),
        ]
        assert (dry.prefixes, dry.hits_at_least) == (3, False)
        own = await admin.stub.Evict(request, metadata=as_("two"))
        assert ([hit.tenant for hit in own.tenants], own.prefixes) == (["tenant:two"], 1)


def held(admin, node_id, text=TEXT, **identity):
    return admin.kits[node_id].held(prompt_of(text, **identity))


def passes(kit, seconds):
    """Time passes at a node, which looks for what is over."""
    kit.clock.seconds += seconds
    while kit.node.expire() or kit.node.has_due:
        continue


async def complete(http, **body):
    """Have the gateway serve a completion; returns the status, and the parameter that is refused, if one is."""
    body = {"model": "tiny", "prompt": TEXT, "max_tokens": 1} | body
    reply = await http.post("/v1/completions", json=body)
    return reply.status_code, reply.json().get("error", {}).get("param")


async def test_what_a_request_bounds_is_gone_from_the_node_when_the_clock_passes(model_path):
    """Fails when a request's field does not reach the store, or means another time there."""
    async with admin_over(model_path, "n0") as admin:
        kit = admin.kits["n0"]

        def publish(request):
            prompt, retention = request.prompt, request.cache.retention
            kit.store(prompt, range(kit.held(prompt), len(prompt.chain)), retention=retention)

        admin.gateway.calls.publish_to = publish
        app = build_http_app(admin.gateway.service, metrics_text=lambda: b"")
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            assert await complete(http, prompt_cache_retention="in_memory") == (200, None)
            assert await complete(http, prompt_cache_retention="24h", prompt="otherprompt!") == (200, None)
            marked = {"type": "ephemeral", "ttl": "5m"}
            assert await complete(http, cache_control=marked, prompt="andathirdone") == (200, None)
            assert await complete(http, prompt="withoutbound") == (200, None)
            assert await complete(http, prompt_cache_retention="1y") == (400, "prompt_cache_retention")
        texts = (TEXT, "otherprompt!", "andathirdone", "withoutbound")
        seen = []
        for seconds in (299, 2, 3_298, 2, 82_798, 2):  # around 5 minutes, an hour, a day
            passes(kit, seconds)
            seen.append([held(admin, "n0", text) for text in texts])
        assert seen == [[3, 3, 3, 3], [3, 3, 0, 3], [3, 3, 0, 3], [0, 3, 0, 3], [0, 3, 0, 3], [0, 0, 0, 3]]


async def test_a_pin_beyond_the_budget_is_refused_with_the_arithmetic_and_drops_nothing(model_path):
    """Fails when pins crowd out everybody, or a refusal is not told from success."""
    async with admin_over(model_path, "n0") as admin:  # 16 blocks, of which pins may take 8
        store_text(admin.kits["n0"], TEXT)
        store_text(admin.kits["n0"], "aratherlongprompt,thatis7...")
        pinned = (await order(admin, "Pin", prefix_text=TEXT, for_s=600))["node:n0"]
        block = admin.kits["n0"].node.stat().block_bytes
        assert (pinned.outcome, pinned.blocks, pinned.pinned_bytes) == ("done", 3, 3 * block)
        refused = (await order(admin, "Pin", prefix_text="aratherlongprompt,thatis7..."))["node:n0"]
        assert (refused.outcome, refused.pinned_bytes, refused.pin_bytes_max) == ("refused", 3 * block, 8 * block)
        assert all(str(figure) in refused.why for figure in (7 * block, 3 * block, 10 * block, 8 * block))
        assert (held(admin, "n0"), held(admin, "n0", "aratherlongprompt,thatis7...")) == (3, 7)


async def test_pinned_blocks_are_skipped_by_an_eviction_which_says_how_many(model_path):
    """Fails when an operator's eviction takes what is pinned, or hides that it did not."""
    async with admin_over(model_path, "n0", "n1") as admin:
        for kit in admin.kits.values():
            store_text(kit, TEXT)
        reports = await order(admin, "Pin", prefix_text="sharedhead", holders=["node:n0"])
        assert {holder: report.outcome for holder, report in reports.items()} == {"node:n0": "done"}
        for dry_run in (True, False):
            evicted = await admin.evict(model="tiny", dry_run=dry_run)
            assert {holder: (report.blocks, report.skipped_pinned_blocks) for holder, report in evicted.items()} == {
                "node:n0": (1, 2),
                "node:n1": (3, 0),
                "worker:d0": (2, 0),
                "worker:d1": (2, 0),
            }
        assert (held(admin, "n0"), held(admin, "n1")) == (2, 0)
        assert (await order(admin, "Unpin", prefix_text="sharedhead"))["node:n0"].outcome == "done"
        assert (await admin.evict(model="tiny"))["node:n0"].blocks == 2


async def test_a_tenants_own_books_count_what_is_pinned(model_path):
    """Fails when a tenant's share of a node seems to shrink by an operator's pin."""
    async with admin_over(model_path, "n0", key_ring=RING) as admin:
        store_text(admin.kits["n0"], TEXT, group="tenant:one")
        store_text(admin.kits["n0"], TEXT, group="tenant:two")
        await order(admin, "Pin", prefix_text="sharedhead", tenant="one")
        books = {}
        for who in ("one", "two"):
            reply = await admin.stub.Stat(admin_pb2.StatRequest(), metadata=as_(who))
            books[who] = next(holder for holder in reply.holders if holder.holder == "node:n0").committed_blocks
        assert books == {"one": 3, "two": 3}


async def test_a_prefix_that_no_node_holds_cannot_be_pinned_and_the_reply_says_the_remedy(model_path):
    """Fails when nothing is pinned and nobody notices, or one node that has it is not enough."""
    async with admin_over(model_path, "n0", "n1") as admin:
        keep_on_device(admin.gateway.worker("d0"), TEXT)  # a worker's pool does not keep pins
        reports = await order(admin, "Pin", prefix_text=TEXT)
        assert {(holder, r.outcome, r.why) for holder, r in reports.items()} == {
            (holder, "not held", "none of those asked holds it: warm it first") for holder in ("node:n0", "node:n1")
        }
        store_text(admin.kits["n1"], TEXT)
        reports = await order(admin, "Pin", prefix_text=TEXT)
        assert {holder: (r.outcome, r.why) for holder, r in reports.items()} == {
            "node:n0": ("not held", ""),
            "node:n1": ("done", ""),
        }
        unpinned = await order(admin, "Unpin", prefix_text="sharedhead")
        assert {report.outcome for report in unpinned.values()} == {"not held"}
        assert not any("warm" in report.why for report in unpinned.values())


async def test_a_node_that_does_not_answer_is_named_beside_those_that_did(model_path):
    """Fails when a pin looks complete though a node was not reached."""
    async with admin_over(model_path, "n0", dead_nodes=("n9",)) as admin:
        store_text(admin.kits["n0"], TEXT)
        reports = await order(admin, "Pin", prefix_text=TEXT)
        assert (reports["node:n0"].outcome, reports["node:n9"].outcome) == ("done", "")
        assert "n9" in reports["node:n9"].error or "unavailable" in reports["node:n9"].error


async def test_an_order_takes_a_prefix_from_nodes_and_workers_but_for_what_is_pinned(model_path):
    """Fails when a tier keeps a prefix past its moment, or an order drops what an operator pinned."""
    async with admin_over(model_path, "n0", "n1") as admin:
        worker, clock = on_hand_clock(admin, "d0")
        keep_on_device(worker, TEXT)
        for kit in admin.kits.values():
            store_text(kit, TEXT)
        await order(admin, "Pin", prefix_text="sharedhead", holders=["node:n1"])
        reports = await set_ttl(admin, 60, prefix_text="sharedhead")
        assert {holder: report.outcome for holder, report in reports.items()} == {
            "node:n0": "done",
            "node:n1": "done",
            "worker:d0": "done",
            "worker:d1": "not held",
        }
        for kit in admin.kits.values():
            passes(kit, 61)
        clock.seconds += 61
        worker.expiry.step()
        assert (held(admin, "n0"), held(admin, "n1"), on_device(worker)) == (1, 2, 1)
        assert [kit.node.stat().committed_blocks for kit in admin.kits.values()] == [1, 2]


async def test_an_order_over_grpc_shows_in_the_listing(model_path):
    """Fails when an operator cannot see until when a block stays."""
    async with admin_over(model_path, "n0") as admin:
        store_text(admin.kits["n0"], TEXT)
        await order(admin, "Pin", prefix_text="sharedhead", for_s=600)
        await set_ttl(admin, 60, prefix_text=TEXT)
        now = admin.kits["n0"].clock.unix_ms()
        blocks = (await admin.list_blocks()).blocks
        assert [block.pinned_until_unix_ms and block.pinned_until_unix_ms - now for block in blocks] == [0, 600_000, 0]
        assert [block.protected_by_pin for block in blocks] == [True, True, False]
        assert [block.expires_unix_ms and block.expires_unix_ms - now for block in blocks] == [0, 0, 60_000]

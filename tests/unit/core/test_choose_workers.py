"""Choosing workers: what must hold for any snapshot, and the cases that the first rule is about."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_gateway import BLOCK_TOKENS, make_namespace, make_worker_record

from headrace.core.block import CacheSource, HolderId, hash_prompt
from headrace.core.choose_workers import (
    NoWorker,
    Plan,
    PlanReason,
    RoutingRule,
    Snapshot,
    choose_workers,
    local_blocks,
    tokens_max,
)
from headrace.core.errors import InvalidRequest
from headrace.core.generation import CacheControl, GenerateRequest, RequestId, SamplingParams, WorkerId
from headrace.core.members import NO_MATCH, PrefixMatch, WorkerRole

RULE = RoutingRule(local_prefill_tokens=8, load_cap=4)


def make_request(num_tokens: int = 30, **changes) -> GenerateRequest:
    namespace = make_namespace()
    prompt = hash_prompt(namespace.id, range(num_tokens), block_tokens=BLOCK_TOKENS, algorithm=namespace.hash_algorithm)
    request = GenerateRequest(RequestId("r"), "tiny", prompt, SamplingParams(max_tokens=8))
    return replace(request, **changes)


def make_match(**num_blocks: int) -> PrefixMatch:
    """`worker_d0=3` is holder `worker:d0` with three blocks."""
    return PrefixMatch({HolderId(name.replace("_", ":")): n for name, n in num_blocks.items()})


def choose(request, snapshot, rule=RULE, tie_break=lambda worker_id: 0.0):
    return choose_workers(request, snapshot, rule, tie_break=tie_break)


def decoder(worker_id, node="n0", **changes):
    return make_worker_record(worker_id, store_node=node, **changes)


def prefiller(worker_id, node="n0", **changes):
    return make_worker_record(worker_id, WorkerRole.PREFILL, store_node=node, **changes)


worker_ids = st.sampled_from([f"w{i}" for i in range(6)])


@st.composite
def snapshots(draw):
    workers = [
        make_worker_record(
            worker_id,
            draw(st.sampled_from(list(WorkerRole))),
            store_node=draw(st.sampled_from(["n0", "n1"])),
            running=draw(st.integers(0, 12)),
            waiting=draw(st.integers(0, 3)),
            context_tokens_max=draw(st.sampled_from([16, 256])),
        )
        for worker_id in sorted(draw(st.sets(worker_ids)))
    ]
    holders = [*(f"worker:w{i}" for i in range(6)), "node:n0", "node:n1"]
    match = draw(st.dictionaries(st.sampled_from(holders), st.integers(1, 7)))
    return Snapshot(
        workers=workers,
        match=PrefixMatch(match),
        in_flight=draw(st.dictionaries(worker_ids, st.integers(0, 12))),
        failed=draw(st.frozensets(worker_ids)),
    )


@st.composite
def requests(draw):
    cache = CacheControl(
        sources=draw(st.frozensets(st.sampled_from(CacheSource))),
        publish=draw(st.booleans()),
        affinity_key=draw(st.sampled_from(["", "chat-7"])),
    )
    return make_request(draw(st.integers(1, 40)), cache=cache)


@given(requests(), snapshots(), st.dictionaries(worker_ids, st.floats(0, 1)))
def test_a_plan_names_only_workers_that_can_do_the_work(request_, snapshot, ties):
    """Fails when a failed, too small or wrong worker is chosen, or a worker over the load cap."""
    outcome = choose(request_, snapshot, tie_break=lambda worker_id: ties.get(worker_id, 0.5))
    tokens = len(request_.prompt.token_ids)
    able = [
        w
        for w in snapshot.workers
        if w.role.decodes and w.worker_id not in snapshot.failed and tokens + 8 <= tokens_max(w)
    ]
    assert isinstance(outcome, Plan) == bool(able)
    if not isinstance(outcome, Plan):
        return
    assert outcome.decode in able
    assert snapshot.load(outcome.decode) <= min(map(snapshot.load, able)) + RULE.load_cap
    assert 0 <= outcome.missing_tokens <= tokens
    if outcome.prefill is not None:
        assert outcome.prefill.role.prefills
        assert outcome.prefill is not outcome.decode
        assert outcome.prefill.worker_id not in snapshot.failed
        assert outcome.missing_tokens > RULE.local_prefill_tokens
        assert request_.cache.publish
        assert request_.cache.reads


@given(requests(), snapshots())
def test_no_worker_under_the_cap_has_a_longer_match_or_the_same_match_with_less_load(request_, snapshot):
    """Fails when the order of the rule is not match first, load second."""
    outcome = choose(request_, snapshot)
    if not isinstance(outcome, Plan):
        return
    tokens = len(request_.prompt.token_ids)
    able = [
        w
        for w in snapshot.workers
        if w.role.decodes and w.worker_id not in snapshot.failed and tokens + 8 <= tokens_max(w)
    ]
    least = min(map(snapshot.load, able))

    def rank(worker):
        return (-local_blocks(worker, request_, snapshot.match), snapshot.load(worker))

    assert rank(outcome.decode) == min(rank(w) for w in able if snapshot.load(w) <= least + RULE.load_cap)


@given(requests(), snapshots(), st.permutations(range(6)))
def test_the_choice_does_not_depend_on_the_order_of_the_table(request_, snapshot, order):
    """Fails when two gateways with the same facts decide differently."""
    ties = {f"w{i}": float(rank) for i, rank in enumerate(order)}
    turned = replace(snapshot, workers=list(reversed(snapshot.workers)))
    assert choose(request_, snapshot, tie_break=ties.__getitem__) == choose(
        request_, turned, tie_break=ties.__getitem__
    )


def test_the_longest_match_wins_over_less_load():
    """Fails when load outranks a match within the cap."""
    snapshot = Snapshot([decoder("a", "n0", running=4), decoder("b", "n1")], make_match(node_n0=5, node_n1=2))
    plan = choose(make_request(), snapshot)
    assert (plan.decode.worker_id, plan.reason) == ("a", PlanReason.MATCH)


def test_a_node_on_another_host_counts_as_none_of_the_workers_own():
    """Fails when a worker that publishes to a distant node is taken to read that node's blocks from shared memory."""
    far = decoder("d0", store_node_near=False)
    near = decoder("d1")
    match = make_match(node_n0=5)
    assert (local_blocks(far, make_request(), match), local_blocks(near, make_request(), match)) == (0, 5)
    plan = choose(make_request(), Snapshot((far, near), match, in_flight={near.worker_id: 2}))
    assert plan.decode == near
    memory_only = CacheControl(sources=frozenset({CacheSource.SHARED_MEMORY}))
    plan = choose(make_request(cache=memory_only), Snapshot((far, prefiller("p0")), NO_MATCH))
    assert plan.prefill is None


def test_a_match_does_not_outrank_the_load_cap():
    """Fails when a hot prefix piles all requests on one worker."""
    snapshot = Snapshot([decoder("a", "n0", running=5), decoder("b", "n1")], make_match(node_n0=5))
    plan = choose(make_request(), snapshot)
    assert (plan.decode.worker_id, plan.reason) == ("b", PlanReason.CAPPED)
    assert plan.missing_tokens == 30 - 5 * BLOCK_TOKENS  # still readable over gRPC


def test_unrelated_prompts_go_to_the_least_loaded_by_either_count():
    """Fails when only the record or only this gateway's own count is read."""
    workers = [decoder("a", running=3), decoder("b"), decoder("c", waiting=1)]
    snapshot = Snapshot(workers, NO_MATCH, in_flight={WorkerId("b"): 2})
    plan = choose(make_request(), snapshot)
    assert (plan.decode.worker_id, plan.reason) == ("c", PlanReason.LEAST_LOADED)


def test_between_equals_the_one_with_the_blocks_in_its_own_pool_wins():
    """Fails when turns of a conversation wander between workers of one host."""
    snapshot = Snapshot([decoder("a"), decoder("b")], make_match(node_n0=5, worker_b=5))
    assert choose(make_request(), snapshot, tie_break={"a": 0.0, "b": 1.0}.get).decode.worker_id == "b"


def test_ties_are_broken_by_the_callers_value():
    """Fails when equal workers are always asked in the same order."""
    snapshot = Snapshot([decoder("a"), decoder("b")], NO_MATCH)
    assert choose(make_request(), snapshot, tie_break={"a": 0.7, "b": 0.2}.get).decode.worker_id == "b"
    assert choose(make_request(), snapshot, tie_break={"a": 0.1, "b": 0.2}.get).decode.worker_id == "a"


def keyed(key, group="tenant:one", **changes):
    return make_request(cache=CacheControl(affinity_key=key), trust_group=group, **changes)


EQUALS = Snapshot([decoder(worker_id) for worker_id in "abcde"], NO_MATCH)
KEYS = [f"chat-{number}" for number in range(200)]


def test_requests_of_one_affinity_key_meet_and_different_keys_spread():
    """Fails when a key is ignored, or all keys go to one worker."""
    winners = [choose(keyed(key), EQUALS).decode.worker_id for key in KEYS]
    assert winners == [choose(keyed(key), EQUALS).decode.worker_id for key in KEYS]
    assert min(winners.count(worker_id) for worker_id in "abcde") >= 20
    ties = dict.fromkeys("abcde", 1.0) | {"c": 0.0}
    assert choose(keyed("chat-1"), EQUALS, tie_break=ties.get) == choose(keyed("chat-1"), EQUALS)


def test_a_worker_that_leaves_moves_only_the_keys_that_it_had():
    """Fails when keys are dealt out by number of workers: then most of them would lose their worker's cache."""
    fewer = Snapshot([decoder(worker_id) for worker_id in "abde"], NO_MATCH)
    for key in KEYS:
        before = choose(keyed(key), EQUALS).decode.worker_id
        assert before in ("c", choose(keyed(key), fewer).decode.worker_id)


def test_a_tenant_cannot_choose_or_tell_where_another_tenants_key_goes():
    """Fails when the trust group is not part of what is hashed, or can be imitated by a longer key."""
    mine = [choose(keyed(key), EQUALS).decode.worker_id for key in KEYS]
    theirs = [choose(keyed(key, group="tenant:two"), EQUALS).decode.worker_id for key in KEYS]
    imitated = [choose(keyed("one" + key, group="tenant:"), EQUALS).decode.worker_id for key in KEYS]
    for others in (theirs, imitated):
        assert sum(a == b for a, b in zip(mine, others, strict=True)) < 100  # by chance one in five


def test_an_affinity_key_outranks_neither_match_nor_load():
    """Fails when a popular key piles requests on one worker, or draws them away from their blocks."""
    favourite = choose(keyed("chat-1"), EQUALS).decode.worker_id
    busy = replace(EQUALS, in_flight={favourite: 1})
    assert choose(keyed("chat-1"), busy).decode.worker_id != favourite
    other = next(worker_id for worker_id in "abcde" if worker_id != favourite)
    matched = replace(EQUALS, match=make_match(**{f"worker_{other}": 2}))
    assert choose(keyed("chat-1"), matched).decode.worker_id == other


def test_an_affinity_key_settles_prefill_workers_too():
    """Fails when prompts of one key are computed on any prefill worker."""
    workers = [decoder("d"), *(prefiller(worker_id) for worker_id in "pqrs")]
    snapshot = Snapshot(workers, NO_MATCH)
    chosen = {choose(keyed(key), snapshot).prefill.worker_id for key in KEYS}
    assert chosen == set("pqrs")
    ties = {"d": 1.0, "p": 1.0, "q": 0.0, "r": 1.0, "s": 1.0}
    assert all(choose(keyed(key), snapshot) == choose(keyed(key), snapshot, tie_break=ties.get) for key in KEYS)


def test_other_workers_pools_cannot_be_read():
    """Fails when a device match of one worker is counted as reachable for another."""
    snapshot = Snapshot([decoder("a", running=9), decoder("b")], make_match(worker_a=7))
    assert choose(make_request(), snapshot).missing_tokens == 30


@pytest.mark.parametrize(("num_tokens", "prefills"), [(8, False), (9, True)])
def test_the_bound_of_local_prefill_is_exact(num_tokens, prefills):
    """Fails when the bound is off by one."""
    plan = choose(make_request(num_tokens), Snapshot([decoder("a"), prefiller("p")], NO_MATCH))
    assert (plan.prefill is not None) == prefills


def test_the_prefill_worker_is_chosen_by_its_own_match_then_nearness():
    """Fails when it ignores what its host holds, or when equals are not broken by the decode worker's host."""
    workers = [decoder("a", "n1"), prefiller("p", "n0"), prefiller("q", "n1")]
    assert choose(make_request(), Snapshot(workers, NO_MATCH)).prefill.worker_id == "q"
    far = make_match(node_n0=2)
    # The decode worker may read n0 over gRPC; 30 - 8 tokens are still missing.
    assert choose(make_request(), Snapshot(workers, far)).prefill.worker_id == "p"


def test_without_a_readable_hand_over_the_decode_worker_computes():
    """Fails when a prefill is ordered whose blocks the decode worker may not read."""
    workers = [decoder("a", "n0"), prefiller("p", "n1")]
    for cache in (
        CacheControl(sources=frozenset({CacheSource.SHARED_MEMORY})),
        CacheControl(sources=frozenset({CacheSource.DEVICE})),
        CacheControl(publish=False),
    ):
        assert choose(make_request(cache=cache), Snapshot(workers, NO_MATCH)).prefill is None
    shared = CacheControl(sources=frozenset({CacheSource.SHARED_MEMORY}))
    near = [decoder("a", "n0"), prefiller("p", "n0")]
    assert choose(make_request(cache=shared), Snapshot(near, NO_MATCH)).prefill is not None


def test_a_named_prefill_worker_is_used_however_little_is_missing():
    """Fails when the caller's wish is dropped for a short prompt."""
    request = make_request(8, prefill_worker=WorkerId("p"))
    assert choose(request, Snapshot([decoder("a"), prefiller("p")], NO_MATCH)).prefill.worker_id == "p"


def test_a_prompt_shorter_than_a_block_needs_no_prefill_worker():
    """Fails when a prefill is ordered that can publish nothing."""
    request = make_request(3, prefill_worker=WorkerId("p"))
    assert choose(request, Snapshot([decoder("a"), prefiller("p")], NO_MATCH)).prefill is None


def test_a_named_prefill_worker_and_a_bypass_contradict_each_other():
    """Fails when a wish that cannot be met is dropped silently."""
    request = make_request(prefill_worker=WorkerId("p"), cache=CacheControl(sources=frozenset()))
    with pytest.raises(InvalidRequest, match="bypass"):
        choose(request, Snapshot([decoder("a"), prefiller("p")], NO_MATCH))


def test_no_worker_says_why():
    """Fails when an operator cannot tell a missing worker from a failed or a small one."""
    empty = choose(make_request(), Snapshot([], NO_MATCH))
    failed = choose(make_request(), Snapshot([decoder("a")], NO_MATCH, failed=frozenset({WorkerId("a")})))
    small = choose(make_request(), Snapshot([decoder("a", context_tokens_max=8)], NO_MATCH))
    assert isinstance(empty, NoWorker)
    assert "no decode worker" in empty.why
    assert "failed in this request: a" in failed.why
    assert "room for 38 tokens" in small.why

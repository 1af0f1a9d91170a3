"""Choosing workers: what must hold for any snapshot, and the cases that the rule is about.

The costs are those of a small model on a CPU: 30 tokens take 120 ms, a running sequence makes a step 10 ms longer.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_gateway import BLOCK_TOKENS, make_namespace, make_worker_record

from headrace.core.block import CacheSource, HolderId, hash_prompt
from headrace.core.candidate_costs import CandidateCosts, Snapshot
from headrace.core.choose_placement import TIE_S
from headrace.core.choose_workers import NoWorker, Plan, RoutingRule, choose_workers
from headrace.core.decision import PlanReason, SettledBy
from headrace.core.errors import InvalidRequest
from headrace.core.generation import CacheControl, GenerateRequest, RequestId, SamplingParams, WorkerId
from headrace.core.limits import DECISION_PLANS_MAX
from headrace.core.members import (
    ASSUMED_COSTS,
    NO_MATCH,
    LearnedCosts,
    MeasuredLink,
    NumberedRuns,
    PrefixMatch,
    WorkerRole,
)
from headrace.core.overtaking import WaitingPrompts
from headrace.core.step_costs import DecodeCost, PrefillCost
from headrace.core.worker_columns import WorkerColumns, tokens_max

RULE = RoutingRule(local_prefill_tokens=8)
PREFILL = PrefillCost(base_s=0.02, tokens_per_s=300.0, attention_s=0.0)
DECODE = DecodeCost(base_s=0.02, sequence_s=0.01, kv_token_s=0.0)
COSTS = LearnedCosts.of(PREFILL, DECODE)
# What makes up `cost_s`, beside the longer one of wait and fetch.
COST_TERMS = ("compute_s", "hand_off_s", "price_s", "interference_s", "decode_s", "memory_s")


def make_request(num_tokens: int = 30, **changes) -> GenerateRequest:
    namespace = make_namespace()
    prompt = hash_prompt(namespace.id, range(num_tokens), block_tokens=BLOCK_TOKENS, algorithm=namespace.hash_algorithm)
    request = GenerateRequest(RequestId("r"), "tiny", prompt, SamplingParams(max_tokens=8))
    return replace(request, **changes)


def make_match(**num_blocks: int) -> PrefixMatch:
    """`worker_d0=3` is holder `worker:d0` with three blocks."""
    return PrefixMatch({HolderId(name.replace("_", ":")): n for name, n in num_blocks.items()})


def choose(request, snapshot, rule=RULE, tie_break=None):
    return choose_workers(request, snapshot, rule, tie_break=tie_break)


def seen(workers, match=NO_MATCH, **changes):
    return Snapshot(WorkerColumns(workers), match, **changes)


def decoder(worker_id, node="n0", **changes):
    return make_worker_record(worker_id, store_node=node, **{"costs": COSTS, "free_blocks": 900} | changes)


def prefiller(worker_id, node="n0", **changes):
    return make_worker_record(worker_id, WorkerRole.PREFILL, store_node=node, **{"costs": COSTS} | changes)


worker_ids = st.sampled_from([f"w{i}" for i in range(6)])
links = st.sampled_from(
    [
        (),
        (MeasuredLink("n0", CacheSource.GRPC, 1e9, 0.002), MeasuredLink("n0", CacheSource.SHARED_MEMORY, 5e9, 0.001)),
        (MeasuredLink("n1", CacheSource.GRPC, 0.0, 1.0),),
    ]
)
costs = st.sampled_from(
    [COSTS, LearnedCosts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0), LearnedCosts(0.1, 9.0, 1e-3, 1.0, 0.5, 0.1)]
)


@st.composite
def snapshots(draw):
    workers = [
        make_worker_record(
            worker_id,
            draw(st.sampled_from(list(WorkerRole))),
            store_node=draw(st.sampled_from(["n0", "n1", ""])),
            store_node_near=draw(st.booleans()),
            running=draw(st.integers(0, 12)),
            waiting=draw(st.integers(0, 3)),
            free_blocks=draw(st.integers(0, 1_000)),
            context_tokens_max=draw(st.sampled_from([16, 256])),
            queue_s=draw(st.sampled_from([0.0, 0.03, 9.0])),
            costs=draw(costs),
            links=draw(links),
        )
        for worker_id in sorted(draw(st.sets(worker_ids)))
    ]
    holders = [*(f"worker:w{i}" for i in range(6)), "node:n0", "node:n1", "node:elsewhere"]
    runs = st.dictionaries(st.sampled_from(holders), st.integers(1, 7))
    return seen(
        workers,
        PrefixMatch(draw(runs)),
        expected=PrefixMatch(draw(runs)),
        in_flight=draw(st.dictionaries(worker_ids, st.integers(0, 12))),
        failed=draw(st.frozensets(worker_ids)),
        usual_work_s=draw(st.floats(0, 1)),
    )


@st.composite
def requests(draw):
    cache = CacheControl(
        sources=draw(st.frozensets(st.sampled_from(CacheSource))),
        publish=draw(st.booleans()),
        affinity_key=draw(st.sampled_from(["", "chat-7"])),
    )
    return make_request(draw(st.integers(1, 40)), cache=cache)


def able_to_decode(request, snapshot):
    tokens = len(request.prompt.token_ids) + 8
    workers = [w for w in snapshot.workers.records if w.role.decodes and w.worker_id not in snapshot.failed]
    return [w for w in workers if tokens <= tokens_max(w)]


@given(requests(), snapshots(), st.dictionaries(worker_ids, st.floats(0, 1)))
def test_a_plan_names_only_workers_that_can_do_the_work(request_, snapshot, ties):
    """Fails when a failed, too small or wrong worker is chosen, or one whose blocks the other may not read."""
    outcome = choose(request_, snapshot, tie_break=lambda worker_id: ties.get(worker_id, 0.5))
    tokens, able = len(request_.prompt.token_ids), able_to_decode(request_, snapshot)
    assert isinstance(outcome, Plan) == bool(able)
    if not isinstance(outcome, Plan):
        return
    assert outcome.decode in able
    assert 0 <= outcome.missing_tokens <= tokens
    if outcome.prefill is not None:
        assert outcome.prefill.role.prefills
        assert outcome.prefill is not outcome.decode
        assert outcome.prefill.worker_id not in snapshot.failed
        assert request_.cache.publish
        assert request_.cache.reads
        shares = outcome.decode.store_node_near and outcome.decode.store_node == outcome.prefill.store_node != ""
        assert CacheSource.GRPC in request_.cache.sources or (
            shares and CacheSource.SHARED_MEMORY in request_.cache.sources
        )


@given(requests(), snapshots())
def test_no_other_plan_that_was_allowed_costs_less_by_more_than_a_tie(request_, snapshot):
    """Fails when the plan is not that of least cost, or when its terms do not make up its cost."""
    outcome = choose(request_, snapshot)
    if not isinstance(outcome, Plan):
        return
    decision = outcome.decision
    for terms in (decision.chosen, *decision.others):
        parts = sum(getattr(terms, name) for name in COST_TERMS)
        assert terms.cost_s == pytest.approx(max(terms.wait_s, terms.fetch_s) + parts)
        assert terms.device_tokens + terms.loaded_tokens + terms.computed_tokens == decision.prompt_tokens
        assert terms.computed_tokens >= 1
    alone = [terms for terms in decision.others if terms.prefill_worker is None and not terms.barred]
    assert all(decision.chosen.cost_s <= terms.cost_s + TIE_S for terms in alone)


@given(requests(), snapshots(), st.integers(0, 3), st.randoms())
def test_a_match_by_numbers_leads_to_the_same_plan_as_one_by_names(request_, snapshot, num_free, random):
    """Fails when a mirror's numbers are taken for other workers, or for those of a listing before."""
    named = snapshot.match.num_blocks_by_holder
    holders = [*named, "worker:w0", "node:n0", "node:nobody", *(None for _ in range(num_free))]
    random.shuffle(holders)  # who is in it twice is there under an older incarnation, with nothing
    depths = [named.get(each, 0) if each not in holders[:at] else 0 for at, each in enumerate(holders)]
    numbered = NumberedRuns(tuple(holders), np.array(depths, dtype=np.int32))
    assert (dict(numbered), len(numbered)) == (named, len(named))
    choose(request_, replace(snapshot, match=PrefixMatch(NumberedRuns(tuple(reversed(holders)), numbered.depths))))
    assert choose(request_, replace(snapshot, match=PrefixMatch(numbered))) == choose(request_, snapshot)


@given(requests(), snapshots())
def test_the_plans_beside_the_chosen_one_are_the_next_best_in_order(request_, snapshot):
    """Fails when an explanation shows a plan twice, out of order, or leaves out one that there was."""
    outcome = choose(request_, snapshot)
    if not isinstance(outcome, Plan):
        return
    decision = outcome.decision
    plans = [(terms.prefill_worker, terms.decode_worker) for terms in (decision.chosen, *decision.others)]
    assert len(set(plans)) == len(plans)
    assert len(plans) >= min(decision.num_considered, DECISION_PLANS_MAX) - 1  # one may hand over to itself only
    costs_s = [terms.cost_s for terms in decision.others]
    assert costs_s == sorted(costs_s)
    allowed = [decision.chosen, *(terms for terms in decision.others if not terms.barred)]
    assert decision.least_compute_s == min(terms.compute_s for terms in allowed)
    alone = {worker.worker_id for worker in able_to_decode(request_, snapshot)}
    assert alone <= {decode for prefill, decode in plans if prefill is None} or len(plans) > DECISION_PLANS_MAX


@given(requests(), snapshots(), st.permutations(range(6)))
def test_the_choice_does_not_depend_on_the_order_of_the_table(request_, snapshot, order):
    """Fails when two gateways with the same facts decide differently."""
    ties = {f"w{i}": float(rank) for i, rank in enumerate(order)}
    turned = replace(snapshot, workers=WorkerColumns(list(reversed(snapshot.workers.records))))
    one, other = (choose(request_, each, tie_break=ties.__getitem__) for each in (snapshot, turned))
    assert type(one) is type(other)
    if isinstance(one, Plan):
        assert (one.decode, one.prefill, one.hint_nodes) == (other.decode, other.prefill, other.hint_nodes)


def test_a_long_match_is_worth_waiting_for():
    """Fails when an idle worker outranks one that has most of the prompt at hand."""
    snapshot = seen([decoder("a", "n0", queue_s=0.02), decoder("b", "n1")], make_match(worker_a=5))
    plan = choose(make_request(), snapshot)
    assert (plan.decode.worker_id, plan.reason) == ("a", PlanReason.MATCH)
    assert plan.decision.settled_by is SettledBy.COST


def test_a_hot_prefix_spreads_when_waiting_for_it_costs_more_than_computing_it():
    """Fails when everybody waits for the worker that has the prefix."""
    snapshot = seen([decoder("a", "n0", queue_s=0.5), decoder("b", "n1")], make_match(worker_a=5))
    plan = choose(make_request(), snapshot)
    assert (plan.decode.worker_id, plan.reason) == ("b", PlanReason.SOONER)
    assert plan.decision.chosen.wait_s == 0


def test_a_worker_without_a_mapped_node_has_only_its_own_pool_at_hand():
    """Fails when a distant node's blocks count as shared memory."""
    match = make_match(node_n0=5)
    far, near = decoder("d0", store_node_near=False), decoder("d1")
    assert CandidateCosts(make_request(), seen([far, near], match)).indexed_blocks.tolist() == [0, 5]
    plan = choose(
        make_request(cache=CacheControl(sources=frozenset({CacheSource.SHARED_MEMORY}))), seen([far, near], match)
    )
    assert plan.decode == near


def test_blocks_on_another_host_are_fetched_when_the_way_is_fast_and_computed_when_it_is_slow():
    """Fails when a match is always fetched, or when a measured rate is not looked at."""
    match = make_match(node_n9=7)
    fast = decoder("a", links=(MeasuredLink("n9", CacheSource.GRPC, 1e9, 0.001),))
    slow = decoder("a", links=(MeasuredLink("n9", CacheSource.GRPC, 1e3, 0.001),))
    fetched, computed = (choose(make_request(), seen([worker], match)) for worker in (fast, slow))
    assert (fetched.hint_nodes, fetched.decision.chosen.loaded_tokens) == (("n9",), 28)
    assert (computed.hint_nodes, computed.decision.chosen.loaded_tokens) == ((), 0)
    assert fetched.missing_tokens == computed.missing_tokens == 2, "it is there to be read all the same"


def test_a_way_that_a_worker_has_not_used_is_as_fast_as_others_found_it():
    """Fails when a new worker is sent over a link that everybody else knows to be slow."""
    match = make_match(node_n9=7)
    known = decoder("a", links=(MeasuredLink("n9", CacheSource.GRPC, 1e3, 0.001),), queue_s=9.0)
    plan = choose(make_request(), seen([known, decoder("b")], match))
    assert (plan.decode.worker_id, plan.hint_nodes) == ("b", ())


def test_a_placement_of_a_moment_ago_counts_before_the_index_knows_of_it():
    """Fails when requests with one new prefix are sent to as many workers, each of which computes it."""
    workers = [decoder("a"), decoder("b")]
    snapshot = seen(workers, expected=make_match(worker_a=7))
    assert choose(make_request(), snapshot).decode.worker_id == "a"
    assert choose(make_request(), snapshot).missing_tokens == 30, "what is not there yet cannot be counted as read"


def test_a_slower_worker_is_chosen_by_its_own_speed():
    """Fails when all workers are taken to be as fast as one another."""
    slow = LearnedCosts.of(replace(PREFILL, tokens_per_s=100.0), DECODE)
    snapshot = seen([decoder("a", costs=slow), decoder("b", queue_s=0.1)])
    assert choose(make_request(), snapshot).decode.worker_id == "b"


def test_numbers_that_make_no_sense_spoil_only_their_own_workers_predictions():
    """Fails when one broken worker takes the router down, or draws all requests."""
    broken = decoder("a", costs=LearnedCosts(-1.0, 0.0, -1.0, -1.0, -1.0, -1.0), queue_s=-5.0)
    assert choose(make_request(), seen([broken, decoder("b")])).decode.worker_id == "b"


def test_a_worker_whose_pool_is_full_waits_for_room():
    """Fails when memory is not looked at."""
    full = decoder("a", running=2, free_blocks=1)
    plan = choose(make_request(), seen([full, decoder("b", running=3)]))
    assert plan.decode.worker_id == "b"
    assert next(terms for terms in plan.decision.others if terms.decode_worker == "a").memory_s > 0


def test_unrelated_prompts_go_to_the_least_loaded_by_either_count():
    """Fails when only the record or only this gateway's own count is read."""
    workers = [decoder("a", running=3), decoder("b"), decoder("c", waiting=1)]
    plan = choose(make_request(), seen(workers, in_flight={WorkerId("b"): 2}))
    assert (plan.decode.worker_id, plan.reason) == ("c", PlanReason.NO_MATCH)


def test_between_equals_the_one_with_the_blocks_in_its_own_pool_wins():
    """Fails when turns of a conversation wander between workers of one host."""
    snapshot = seen([decoder("a"), decoder("b")], make_match(node_n0=5, worker_b=5))
    assert choose(make_request(), snapshot, tie_break={"a": 0.0, "b": 1.0}.get).decode.worker_id == "b"


def test_ties_are_broken_by_the_callers_value():
    """Fails when equal workers are always asked in the same order."""
    snapshot = seen([decoder("a"), decoder("b")], NO_MATCH)
    assert choose(make_request(), snapshot, tie_break={"a": 0.7, "b": 0.2}.get).decode.worker_id == "b"
    assert choose(make_request(), snapshot, tie_break={"a": 0.1, "b": 0.2}.get).decode.worker_id == "a"


def keyed(key, group="tenant:one", **changes):
    return make_request(cache=CacheControl(affinity_key=key), trust_group=group, **changes)


EQUALS = seen([decoder(worker_id) for worker_id in "abcde"])
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
    fewer = seen([decoder(worker_id) for worker_id in "abde"], NO_MATCH)
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
    assert choose(keyed("chat-1"), busy).decision.settled_by is not SettledBy.COST
    assert choose(keyed("chat-1"), busy).decode.worker_id != favourite
    other = next(worker_id for worker_id in "abcde" if worker_id != favourite)
    matched = replace(EQUALS, match=make_match(**{f"worker_{other}": 2}))
    assert choose(keyed("chat-1"), matched).decode.worker_id == other


def test_an_affinity_key_settles_prefill_workers_too():
    """Fails when prompts of one key are computed on any prefill worker."""
    workers = [decoder("d"), *(prefiller(worker_id) for worker_id in "pqrs")]
    snapshot = seen(workers, NO_MATCH)
    chosen = {choose(keyed(key), snapshot).prefill.worker_id for key in KEYS}
    assert chosen == set("pqrs")
    ties = {"d": 1.0, "p": 1.0, "q": 0.0, "r": 1.0, "s": 1.0}
    assert all(choose(keyed(key), snapshot) == choose(keyed(key), snapshot, tie_break=ties.get) for key in KEYS)


def test_other_workers_pools_cannot_be_read():
    """Fails when a device match of one worker is counted as reachable for another."""
    snapshot = seen([decoder("a", running=9), decoder("b")], make_match(worker_a=7))
    assert choose(make_request(), snapshot).missing_tokens == 30


@pytest.mark.parametrize(("num_tokens", "prefills"), [(8, False), (9, True)])
def test_the_bound_of_local_prefill_is_exact(num_tokens, prefills):
    """Fails when the bound is off by one."""
    plan = choose(make_request(num_tokens), seen([decoder("a"), prefiller("p")], NO_MATCH))
    assert (plan.prefill is not None) == prefills


def over_link(bytes_per_s: float, **changes):
    """A decode worker that has measured its way to the prefill worker's node."""
    return decoder("a", links=(MeasuredLink("n1", CacheSource.GRPC, bytes_per_s, 0.001),), **changes)


def test_a_slow_way_from_the_prefill_worker_lifts_the_bound_of_local_prefill():
    """Fails when a decode worker waits for blocks over a link that it has measured, longer than it would compute."""
    block_bytes = make_worker_record("a").namespace.layout.block_bytes
    for rate, prefills in ((1e9, True), (block_bytes / 0.5, False)):  # half a second a block; computing takes 0.12 s
        plan = choose(make_request(), seen([over_link(rate), prefiller("p", "n1")]))
        assert (plan.prefill is not None) == prefills
        barred = [terms.barred for terms in plan.decision.others if terms.prefill_worker is None]
        assert barred == (["it lacks more than local_prefill_tokens"] if prefills else [])


def test_a_slow_way_is_weighed_against_computing_on_the_decode_worker():
    """Fails when the bound is lifted without asking what computing there costs."""
    block_bytes = make_worker_record("a").namespace.layout.block_bytes
    slow_to_compute = replace(COSTS, prefill_tokens_per_s=10.0)  # 3 s, and 0.7 s for the blocks
    workers = [over_link(block_bytes / 0.1, costs=slow_to_compute), prefiller("p", "n1")]
    assert choose(make_request(), seen(workers)).prefill is not None


def test_a_full_pool_bars_local_prefill_however_slow_the_way_is():
    block_bytes = make_worker_record("a").namespace.layout.block_bytes
    full = over_link(block_bytes / 0.5, running=5, free_blocks=1)
    assert choose(make_request(), seen([full, prefiller("p", "n1")])).prefill is not None


def test_a_busy_prefill_worker_does_not_lift_the_bound():
    """Fails when waiting for prefill workers is taken for a slow way: decode workers would compute for everybody."""
    plan = choose(make_request(), seen([over_link(1e9), prefiller("p", "n1", queue_s=5.0)]))
    assert plan.prefill is not None


def test_the_prefill_worker_is_chosen_by_its_own_match_then_nearness():
    """Fails when it ignores what its host holds, or when equals are not broken by the decode worker's host."""
    workers = [decoder("a", "n1"), prefiller("p", "n0"), prefiller("q", "n1")]
    assert choose(make_request(), seen(workers, NO_MATCH)).prefill.worker_id == "q"
    far = make_match(node_n0=2)
    # The decode worker may read n0 over gRPC; 30 - 8 tokens are still missing.
    assert choose(make_request(), seen(workers, far)).prefill.worker_id == "p"


def test_without_a_readable_hand_over_the_decode_worker_computes():
    """Fails when a prefill is ordered whose blocks the decode worker may not read."""
    workers = [decoder("a", "n0"), prefiller("p", "n1")]
    for cache in (
        CacheControl(sources=frozenset({CacheSource.SHARED_MEMORY})),
        CacheControl(sources=frozenset({CacheSource.DEVICE})),
        CacheControl(publish=False),
    ):
        assert choose(make_request(cache=cache), seen(workers, NO_MATCH)).prefill is None
    shared = CacheControl(sources=frozenset({CacheSource.SHARED_MEMORY}))
    near = [decoder("a", "n0"), prefiller("p", "n0")]
    assert choose(make_request(cache=shared), seen(near, NO_MATCH)).prefill is not None


def test_a_named_prefill_worker_is_used_however_little_is_missing():
    """Fails when the caller's wish is dropped for a short prompt."""
    request = make_request(8, prefill_worker=WorkerId("p"))
    assert choose(request, seen([decoder("a"), prefiller("p")], NO_MATCH)).prefill.worker_id == "p"


def test_a_prompt_shorter_than_a_block_needs_no_prefill_worker():
    """Fails when a prefill is ordered that can publish nothing."""
    request = make_request(3, prefill_worker=WorkerId("p"))
    assert choose(request, seen([decoder("a"), prefiller("p")], NO_MATCH)).prefill is None


def test_a_named_prefill_worker_and_a_bypass_contradict_each_other():
    """Fails when a wish that cannot be met is dropped silently."""
    request = make_request(prefill_worker=WorkerId("p"), cache=CacheControl(sources=frozenset()))
    with pytest.raises(InvalidRequest, match="bypass"):
        choose(request, seen([decoder("a"), prefiller("p")], NO_MATCH))


def test_no_worker_says_why():
    """Fails when an operator cannot tell a missing worker from a failed or a small one."""
    empty = choose(make_request(), seen([], NO_MATCH))
    failed = choose(make_request(), seen([decoder("a")], NO_MATCH, failed=frozenset({WorkerId("a")})))
    small = choose(make_request(), seen([decoder("a", context_tokens_max=8)], NO_MATCH))
    assert isinstance(empty, NoWorker)
    assert "no decode worker" in empty.why
    assert "failed in this request: a" in failed.why
    assert "room for 38 tokens" in small.why


def test_a_worker_that_has_measured_nothing_is_taken_to_be_like_the_others():
    """Fails when a new worker is judged by assumed costs: beside a fast old one it would never be asked, so never
    measure anything, and beside a slow one it would get every request."""
    for factor in (0.1, 10.0):
        old = [replace(COSTS, decode_base_s=each * factor * COSTS.decode_base_s) for each in (1.0, 2.0, 3.0)]
        workers = [decoder(f"old-{number}", costs=costs) for number, costs in enumerate(old)]
        columns = WorkerColumns([*workers, decoder("new", costs=ASSUMED_COSTS)])
        assert columns.records[-1].costs == replace(COSTS, decode_base_s=2 * factor * COSTS.decode_base_s)
        assert [record.costs for record in columns.records[:-1]] == old
    assert WorkerColumns([decoder("alone", costs=ASSUMED_COSTS)]).records[0].costs == ASSUMED_COSTS


@pytest.mark.parametrize(("passed", "chosen"), [(1, "p0"), (5, "p1")])
def test_a_prompt_goes_where_it_passes_longer_ones_unless_too_many_wait_for_it(passed: int, chosen: str):
    """On p0 0.3 s are before it and `passed` prompts of 2 s behind it, on p1 0.6 s before it. Its work is 0.12 s: one
    prompt that waits for it costs less than the 0.3 s between the two, five cost more."""
    workers = [decoder("d0"), prefiller("p0", queue_s=0.3 + 2.0 * passed), prefiller("p1", queue_s=0.6)]
    columns = WorkerColumns(workers)
    row = columns.row_of[WorkerId("p0")]
    waiting = WaitingPrompts(np.full(passed, row), np.full(passed, 2.0), np.zeros(passed))
    snapshot = Snapshot(columns, NO_MATCH, waiting=waiting)
    plan = choose(make_request(), snapshot, RoutingRule(local_prefill_tokens=0))
    assert isinstance(plan, Plan)
    assert plan.prefill is not None
    assert plan.prefill.worker_id == chosen


def test_decode_workers_that_compute_prompts_are_taken_to_have_all_of_their_queue_before_one():
    workers = [decoder("d0", queue_s=5.0), decoder("d1", queue_s=1.0)]
    columns = WorkerColumns(workers)
    waiting = WaitingPrompts(np.array([columns.row_of[WorkerId("d0")]]), np.array([5.0]), np.zeros(1))
    plan = choose(make_request(), Snapshot(columns, NO_MATCH, waiting=waiting))
    assert isinstance(plan, Plan)
    assert plan.decode.worker_id == "d1"
    assert plan.decision.chosen.wait_s == pytest.approx(1.0)

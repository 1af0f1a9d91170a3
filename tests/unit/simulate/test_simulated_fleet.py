"""The simulated cluster keeps its books, gives every request an end, and lasts as long as arithmetic says."""

from dataclasses import replace

import numpy as np
import pytest

from headrace.core.errors import InvalidRequest
from headrace.core.step_costs import DecodeCost, LinkCost, PrefillCost
from headrace.simulate.cluster_model import PROFILES, ClusterModel, read_cluster
from headrace.simulate.headrace_policy import HeadracePolicy
from headrace.simulate.read_trace import Trace, TracedRequest
from headrace.simulate.replay_routing import replay_routing, scale_to_load
from headrace.simulate.routing_policies import ROUTING_POLICIES
from headrace.simulate.simulated_fleet import QueueOrder, RoutePlan, SimulatedFleet, SimulatedRequest
from headrace.simulate.without_ingredient import WithoutPrice

BLOCK = 100
POLICIES = ROUTING_POLICIES

ONE_EACH = ClusterModel(
    name="one each",
    prefill_workers=1,
    decode_workers=1,
    mixed_workers=0,
    prefill=PrefillCost(base_s=0.0, tokens_per_s=1_000.0, attention_s=0.0),
    decode=DecodeCost(base_s=0.010, sequence_s=0.0, kv_token_s=0.0),
    network=LinkCost(bytes_per_s=1e9, round_trip_s=0.0),
    kv_token_bytes=1_000,
    device_tokens=10_000,
    host_tokens=0,
    ttft_slo_s=2.0,
    itl_slo_s=0.05,
)


def make_request(number: int, arrival_s: float, blocks: tuple[int, ...], output: int = 11) -> SimulatedRequest:
    return SimulatedRequest(number, arrival_s, len(blocks) * BLOCK + 50, output, blocks, ideal_tokens=0)


def make_trace(count: int = 300) -> Trace:
    """Conversations of a few turns: each prompt is the one before and two blocks more."""
    draw = np.random.default_rng(5)
    timed = []
    for number in range(count):
        talk, turn = int(draw.integers(0, count // 4)), int(draw.integers(1, 5))
        chain = (0, *(1_000 * (talk + 1) + step for step in range(2 * turn)))
        timed.append(TracedRequest(len(chain) * BLOCK + int(draw.integers(1, BLOCK)), chain, number * 0.3, 40))
    return Trace(tuple(timed), BLOCK, num_blocks=1_000 * count)


def test_one_request_takes_its_prefill_its_hand_over_and_its_steps():
    """350 tokens at 1,000 a second, one last block over the link, then 11 steps of 10 ms."""
    fleet = SimulatedFleet(ONE_EACH, block_tokens=BLOCK)
    (outcome,) = fleet.run([make_request(0, 1.0, (1, 2, 3))], lambda request: RoutePlan(0, 1, 0.35))
    hand_over_s = BLOCK * 1_000 / 1e9
    assert outcome.ttft_s == pytest.approx(0.350 + hand_over_s + 0.010)
    assert outcome.itl_s == pytest.approx(0.010, rel=0.01)


def test_what_was_computed_is_found_by_the_next():
    fleet = SimulatedFleet(ONE_EACH, block_tokens=BLOCK)
    requests = [make_request(0, 0.0, (1, 2, 3)), make_request(1, 5.0, (1, 2, 3, 4))]
    first, second = fleet.run(requests, lambda request: RoutePlan(0, 1, 0.35))
    assert (first.device_tokens, second.device_tokens) == (0, 300)
    assert second.ttft_s == pytest.approx(0.150 + 0.0001 + 0.010, rel=0.01)


@pytest.mark.parametrize(("near_tokens", "found"), [(10_000, 400), (500, 0)])
def test_a_prompt_that_came_before_is_found_up_to_its_last_block_if_the_window_before_that_is_here(
    near_tokens: int, found: int
):
    """The window is two blocks. The prompt between takes three of five near parts: those of 4 and 5 are left, and what
    is read before block 5 is 3 and 4. Fails if the last block is found, too, with a window of its own."""
    model = replace(ONE_EACH, window_tokens=2 * BLOCK + 1, near_tokens=near_tokens)
    fleet = SimulatedFleet(model, block_tokens=BLOCK)
    chains = ((1, 2, 3, 4, 5), (21, 22, 23), (1, 2, 3, 4, 5))
    requests = [SimulatedRequest(n, 5.0 * n, len(chain) * BLOCK, 11, chain, 0) for n, chain in enumerate(chains)]
    outcomes = fleet.run(requests, lambda request: RoutePlan(0, 1, 0.5))
    assert [outcome.device_tokens for outcome in outcomes] == [0, 0, found]


@pytest.mark.parametrize("near_tokens", [0, BLOCK - 1])
def test_a_cluster_whose_windows_have_no_room_is_refused_by_the_fields_name(near_tokens: int):
    model = replace(ONE_EACH, window_tokens=2 * BLOCK, near_tokens=near_tokens)
    with pytest.raises(InvalidRequest, match="near_tokens must be at least a block's 100"):
        SimulatedFleet(model, block_tokens=BLOCK)


def test_a_queue_is_served_one_at_a_time():
    fleet = SimulatedFleet(ONE_EACH, block_tokens=BLOCK)
    requests = [make_request(number, 0.0, (10 * number + 1,)) for number in range(3)]
    outcomes = fleet.run(requests, lambda request: RoutePlan(0, 1, 0.15))
    assert [outcome.ttft_s for outcome in outcomes] == pytest.approx([0.16, 0.31, 0.46], rel=0.02)


def test_a_batch_as_a_fluid_ends_as_if_it_were_stepped():
    """Sequences of different lengths that join at different times, against a plain loop over steps."""
    model = replace(
        ONE_EACH,
        prefill=PrefillCost(base_s=0.0, tokens_per_s=1e9, attention_s=0.0),
        decode=DecodeCost(base_s=0.005, sequence_s=0.002, kv_token_s=0.0),
    )
    fleet = SimulatedFleet(model, block_tokens=BLOCK)
    lengths, starts = [100, 40, 200, 10], [0.0, 0.2, 0.3, 0.9]
    requests = [make_request(n, starts[n], (n + 1,), lengths[n]) for n in range(4)]
    outcomes = {o.request.number: o for o in fleet.run(requests, lambda request: RoutePlan(0, 1, 0.0))}
    left, now_s, ends = dict(enumerate(lengths)), 0.0, {}
    while len(ends) < 4:
        running = [n for n in left if starts[n] <= now_s and n not in ends]
        now_s += 0.005 + 0.002 * len(running)
        for n in running:
            left[n] -= 1
            if not left[n]:
                ends[n] = now_s
    for n, outcome in outcomes.items():
        ended_s = starts[n] + outcome.ttft_s + outcome.itl_s * (lengths[n] - 1)
        assert ended_s == pytest.approx(ends[n], rel=0.05)


@pytest.mark.parametrize("profile", ["h100-8b-pd", "h100-8b-pd-pool", "h100-8b-mixed"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_ends_every_request_and_leaves_nothing_behind(profile: str, policy: str):
    model = replace(read_cluster(profile), device_tokens=6_000, host_tokens=9_000 if "pool" in profile else 0)
    requests = scale_to_load(make_trace(), model, load=0.8, tick_s=0.3, seed=1)
    made = POLICIES[policy]
    fleet = SimulatedFleet(
        model, block_tokens=BLOCK, order=made.order, keeps_chains_together=made.keeps_chains_together
    )
    outcomes = fleet.run(requests, made(fleet).route)
    assert sorted(outcome.request.number for outcome in outcomes) == list(range(len(requests)))
    for counts in (fleet.prefills, fleet.decodes, fleet.decode_tokens, fleet.pending_tokens):
        assert not counts.any()
    assert not any(fleet.memory_use(worker) for worker in range(model.num_workers))
    for outcome in outcomes:
        assert outcome.ttft_s > 0
        assert 0 <= outcome.device_tokens + outcome.host_tokens < outcome.request.input_tokens
    fleet.device.check_integrity()
    fleet.host.check_integrity()


def test_the_same_seed_gives_the_same_figures_and_another_seed_others():
    model = read_cluster("h100-8b-pd")
    runs = [
        replay_routing(
            scale_to_load(make_trace(), model, load=0.9, tick_s=0.3, seed=seed),
            model,
            HeadracePolicy,
            block_tokens=BLOCK,
            load=0.9,
        )
        for seed in (3, 3, 4)
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_load_one_means_that_cold_prefills_would_just_fill_the_workers():
    model = read_cluster("h100-8b-pd")
    for load in (0.5, 1.0):
        requests = scale_to_load(make_trace(), model, load=load, tick_s=0.0, seed=0)
        work_s = sum(float(model.prefill.seconds(0, request.input_tokens)) for request in requests)
        span_s = requests[-1].arrival_s
        assert work_s / span_s / len(model.prefillers) == pytest.approx(load, rel=0.01)


@pytest.mark.parametrize(("itl_slo_s", "good"), [(0.05, 2), (0.005, 0)])
def test_goodput_is_the_requests_in_time_over_the_seconds_until_the_last_token(itl_slo_s: float, good: int):
    """The second of two comes after 10 s, and ends 0.36 s and ten gaps of 10 ms later."""
    model = replace(ONE_EACH, itl_slo_s=itl_slo_s)
    requests = [make_request(0, 0.0, (1, 2, 3)), make_request(1, 10.0, (4, 5, 6))]
    result = replay_routing(requests, model, ROUTING_POLICIES["least-work"], block_tokens=BLOCK, load=0.0)
    assert result.goodput_per_s == pytest.approx(good / 10.46, rel=0.01)


def test_goodput_ends_with_the_last_token_however_late_an_end_was_foreseen():
    """Beside a prompt steps take 0.52 s, so that the first one's end is foreseen after 480 s; it comes after 10.4 s."""
    model = replace(ONE_EACH, prefill_workers=0, decode_workers=0, mixed_workers=1)
    requests = [make_request(0, 0.0, (1,), output=1_000), make_request(1, 1.0, (2, 3), output=1)]
    result = replay_routing(requests, model, ROUTING_POLICIES["least-work"], block_tokens=BLOCK, load=0.0)
    assert result.goodput_per_s == pytest.approx(2 / 10.4, rel=0.01)


def test_waiting_longer_outweighs_being_short():
    """Shortest remaining first must not starve: a long prompt's turn comes."""
    fleet = SimulatedFleet(ONE_EACH, block_tokens=BLOCK, order=HeadracePolicy.order)
    long = SimulatedRequest(0, 0.001, 2_000, 1, (1,), 0)
    short = [SimulatedRequest(n, 0.0 + 0.1 * (n - 1), 100, 1, (n + 1,), 0) for n in range(1, 200)]
    outcomes = fleet.run([long, *short], lambda request: RoutePlan(0, 1, request.input_tokens / 1_000))
    done = {outcome.request.number: outcome.ttft_s for outcome in outcomes}
    assert done[0] < 8.0, "the long prompt waited for nearly all of the short ones"


@pytest.mark.parametrize("name", PROFILES)
def test_the_profiles_can_be_read(name: str):
    assert read_cluster(name).name == name


def make_pool(**changes) -> SimulatedFleet:
    """Two prefill workers, of which worker 1's memory has a chain that worker 0 does not."""
    model = replace(ONE_EACH, prefill_workers=2, host_tokens=10_000, **changes)
    fleet = SimulatedFleet(model, block_tokens=BLOCK)
    fleet.hosts[1].add((1, 2, 3))
    return fleet


def fetching(source: int, tokens: int) -> RoutePlan:
    return RoutePlan(0, 2, 0.05, 0, tokens, source)


def test_a_fetch_takes_its_turn_on_the_link_from_the_moment_a_request_comes():
    """300 tokens of 1,000 bytes at 2 MB/s: 0.15 s, then 50 tokens to compute."""
    fleet = make_pool(network=LinkCost(bytes_per_s=2e6, round_trip_s=0.0))
    (outcome,) = fleet.run([make_request(0, 0.0, (1, 2, 3))], lambda request: fetching(1, 300))
    assert outcome.host_tokens == 300
    assert outcome.ttft_s == pytest.approx(0.150 + 0.050 + BLOCK * 1_000 / 2e6 + 0.010, rel=0.01)


def test_a_prompt_is_computed_when_its_fetch_would_come_later():
    """At 0.1 MB/s the fetch takes 3 s; 350 tokens take 0.35 s."""
    fleet = make_pool(network=LinkCost(bytes_per_s=1e5, round_trip_s=0.0), kv_token_bytes=1_000)
    (outcome,) = fleet.run([make_request(0, 0.0, (1, 2, 3))], lambda request: fetching(1, 300))
    assert outcome.host_tokens == 0
    assert fleet.busy_s[0] == pytest.approx(0.350)


def test_a_worker_computes_who_is_ready_while_another_waits_for_its_fetch():
    fleet = make_pool(network=LinkCost(bytes_per_s=1.5e6, round_trip_s=0.0))
    plans = [RoutePlan(0, 2, 0.15), fetching(1, 300), RoutePlan(0, 2, 0.15)]
    requests = [make_request(0, 0.0, (9,)), make_request(1, 0.001, (1, 2, 3)), make_request(2, 0.002, (8,))]
    outcomes = {o.request.number: o for o in fleet.run(requests, lambda request: plans[request.number])}
    assert outcomes[1].host_tokens == 300
    assert outcomes[2].ttft_s < outcomes[1].ttft_s, "the GPU stood still for a fetch"


def test_an_engine_gives_the_first_token_with_the_last_step_of_the_prompt_where_it_decodes():
    """350 tokens at 1,000 a second; then 10 more tokens of 10 ms. A published study counts a step more."""
    engine = replace(ONE_EACH, prefill_workers=0, decode_workers=0, mixed_workers=1, first_token_steps=0)
    for model, first_step_s in ((engine, 0.0), (replace(engine, first_token_steps=1), 0.010)):
        fleet = SimulatedFleet(model, block_tokens=BLOCK)
        (outcome,) = fleet.run([make_request(0, 1.0, (1, 2, 3))], lambda request: RoutePlan(0, 0, 0.35))
        assert outcome.ttft_s == pytest.approx(0.350 + first_step_s)
        assert outcome.itl_s == pytest.approx(0.010, rel=0.01)


def test_what_a_request_takes_beside_all_work_is_in_its_first_token():
    fleet = SimulatedFleet(replace(ONE_EACH, request_s=0.2), block_tokens=BLOCK)
    (outcome,) = fleet.run([make_request(0, 1.0, (1, 2, 3))], lambda request: RoutePlan(0, 1, 0.35))
    assert outcome.ttft_s == pytest.approx(0.2 + 0.350 + BLOCK * 1_000 / 1e9 + 0.010)


def test_a_prefill_takes_longer_by_its_share_for_each_sequence_that_decodes_beside_it():
    model = replace(ONE_EACH, prefill_workers=0, decode_workers=0, mixed_workers=1, interference=0.5)
    fleet = SimulatedFleet(model, block_tokens=BLOCK)
    requests = [make_request(0, 0.0, (1,), output=1_000), make_request(1, 1.0, (2, 3))]
    _, second = sorted(fleet.run(requests, lambda r: RoutePlan(0, 0, 0.1)), key=lambda o: o.request.number)
    assert second.ttft_s == pytest.approx(0.250 * 1.5 + 0.010, abs=0.001)


@pytest.mark.parametrize(("waiting", "chosen"), [(1, 0), (2, 1)])
def test_a_prompt_goes_where_it_is_sooner_unless_more_prompts_wait_longer_for_it(waiting: int, chosen: int):
    """Worker 0 is free 0.2 s sooner, but for prompts that a short one of 0.15 s overtakes: one of them waits 0.15 s
    more, two 0.3 s. Fails where all of a queue is waited for (never worker 0), or who is overtaken is nobody's cost."""
    model = replace(ONE_EACH, prefill_workers=2, prefill=PrefillCost(0.0, 1_000.0, 0.0), local_prefill_tokens=0)
    fleet = SimulatedFleet(model, block_tokens=BLOCK, order=QueueOrder.SHORTEST_REMAINING)
    policy, found = WithoutPrice(fleet), []
    before = [(0, 8), (1, 10), *[(0, 19)] * waiting]

    def route(request: SimulatedRequest) -> RoutePlan:
        if request.number < len(before):
            return RoutePlan(before[request.number][0], 2, request.input_tokens / 1_000)
        found.append(policy.route(request).prefill)
        return RoutePlan(1, 2, 0.15)

    lengths = [length for _, length in before] + [1]
    fleet.run([make_request(n, 0.0, tuple(range(100 * n, 100 * n + k))) for n, k in enumerate(lengths)], route)
    assert found == [chosen]


@pytest.mark.parametrize(("makes_way", "short_s", "long_s"), [(True, 0.174, 5.200), (False, 4.200, 5.050)])
def test_a_long_prompt_makes_way_for_a_short_one_between_two_steps(makes_way: bool, short_s: float, long_s: float):
    """5.05 s of work in steps of 0.512 s; a prompt of 0.15 s comes after one second and begins at 1.024 s."""
    model = replace(ONE_EACH, prefill_workers=0, decode_workers=0, mixed_workers=1, first_token_steps=0)
    model = replace(model, prefills_make_way=makes_way, interference=0.0)
    fleet = SimulatedFleet(model, block_tokens=BLOCK, order=QueueOrder.SHORTEST_REMAINING)
    requests = [make_request(0, 0.0, tuple(range(50)), output=1), make_request(1, 1.0, (99,), output=1)]
    queued_s: list[float] = []
    fleet.at(1.010, lambda: queued_s.append(fleet.queue_s()[0]))  # what is to make way counts as much as before
    outcomes = fleet.run(requests, lambda request: RoutePlan(0, 0, request.input_tokens / 1_000))
    assert queued_s == pytest.approx([5.05 - 1.01 + 0.15])
    found = {outcome.request.number: outcome.ttft_s for outcome in outcomes}
    assert found == {0: pytest.approx(long_s), 1: pytest.approx(short_s)}
    assert not fleet.pending_s.any()
    assert fleet.busy_s[0] == pytest.approx(5.2)


def test_prompts_that_make_way_again_and_again_all_end_and_nothing_is_left_behind():
    """Fails for work that is counted twice, begun twice or lost, and for an end that comes although it is void."""
    model = replace(read_cluster("h100-8b-pd"), prefills_make_way=True, first_token_steps=0)
    requests = scale_to_load(make_trace(), model, load=1.2, tick_s=0.3, seed=3)
    fleet = SimulatedFleet(model, block_tokens=BLOCK, order=QueueOrder.SHORTEST_REMAINING)
    policy = HeadracePolicy(fleet)
    outcomes = fleet.run(requests, policy.route)
    assert sorted(outcome.request.number for outcome in outcomes) == list(range(len(requests)))
    assert fleet.pending_s.tolist() == pytest.approx([0.0] * model.num_workers, abs=1e-9)
    assert not fleet.prefills.any()
    assert not fleet.pending_tokens.any()

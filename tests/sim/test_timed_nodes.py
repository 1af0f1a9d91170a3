"""A worker says how fast each store node delivered to it, by shared memory and over gRPC apart."""

import asyncio

from simulated_engine import LAYOUT
from simulated_nodes import FaultRates
from simulated_world import World, answer_of
from virtual_loop import run_virtual

from headrace.core.block import CacheSource
from headrace.core.limits import WORKER_LINKS_MAX
from headrace.core.members import WorkerRole
from headrace.core.overtake_limits import (
    OVERTAKE_ROUND_TRIP_MAX_MS,
    OVERTAKE_ROUND_TRIP_MIN_MS,
    ROUND_TRIPS_KEPT,
    ROUND_TRIPS_KNOWN,
)
from headrace.decode.decode_tokens import decode_tokens
from headrace.transfer.timed_nodes import LinkTimes

TOKENS = [7, 1, 4, 9, 2, 2, 8, 5, 3, 3, 1, 6, 9]  # three blocks and one token


def test_what_was_loaded_is_measured_per_node_and_way():
    """Fails when the two ways to one node are mixed up, or a load is not measured at all."""

    async def main(clock):
        world = World(clock, rates=FaultRates(delay_s=0.1))
        first = await world.add_worker("decode-a", WorkerRole.DECODE)
        beside = await world.add_worker("other-a", WorkerRole.DECODE)
        far = await world.add_worker("decode-b", WorkerRole.DECODE)
        works = []
        for worker, hints in ((first, ()), (beside, ()), (far, ("a",))):
            request = world.request(TOKENS)
            answer = await answer_of(decode_tokens(world.decode_call(worker, request, hint_nodes=hints), worker))
            await asyncio.sleep(1)
            works.append(answer.finished.work)
        assert all(work.load_s >= 0 and work.compute_s > 0 for work in works), "each answer says what its prompt took"
        assert works[2].load_s > 0.01, "the delays on the way are part of it"
        assert first.record().links == ()
        (near_link,) = beside.record().links
        (far_link,) = far.record().links
        assert (near_link.node_id, near_link.via) == ("a", CacheSource.SHARED_MEMORY)
        assert (far_link.node_id, far_link.via) == ("a", CacheSource.GRPC)
        seconds = far_link.round_trip_s + 3 * LAYOUT.block_bytes / far_link.bytes_per_s
        assert 0.01 < seconds < 1, "the delays on the way are what was measured"
        await world.stop()
        await asyncio.sleep(60)
        world.check_at_rest()

    run_virtual(main, seed=1)


def test_only_the_links_used_last_are_remembered():
    """Fails when a worker that has seen many nodes announces all of them, or forgets one that it uses."""
    times = LinkTimes()
    for number in range(2 * WORKER_LINKS_MAX):
        times.add("always", CacheSource.GRPC, num_bytes=1_000, seconds=0.1)
        times.add(f"node-{number}", CacheSource.GRPC, num_bytes=1_000, seconds=0.1)
    names = [link.node_id for link in times.links()]
    assert len(names) == WORKER_LINKS_MAX
    assert names[-2:] == ["always", f"node-{2 * WORKER_LINKS_MAX - 1}"]


FAR, NEAR = ("b", CacheSource.GRPC), ("a", CacheSource.SHARED_MEMORY)
LONGEST_S, LEAST_S = OVERTAKE_ROUND_TRIP_MAX_MS / 1000, OVERTAKE_ROUND_TRIP_MIN_MS / 1000


def test_a_way_is_known_after_some_round_trips_and_takes_as_long_as_any_of_the_last():
    """Fails when one quick answer makes the next one late, or when one that was late counts for ever."""
    times = LinkTimes()
    for _ in range(ROUND_TRIPS_KNOWN - 1):
        times.add_round_trip(FAR, 0.02)
    assert times.round_trip_s([FAR]) == LONGEST_S
    times.add_round_trip(FAR, 0.03)
    assert times.round_trip_s([FAR]) == 0.03
    assert times.round_trip_s([FAR, NEAR]) == LONGEST_S, "nothing is known of the other"
    for _ in range(ROUND_TRIPS_KEPT):
        times.add_round_trip(FAR, 0.0001)
    assert times.round_trip_s([FAR]) == LEAST_S
    assert times.round_trip_s([]) == LEAST_S


def test_a_node_that_had_nothing_so_far_is_as_far_away_as_its_answers_say():
    """Fails when empty answers make a far node's way known and short: its first blocks would be given up. And when
    those of the host's own node leave others more time than it takes, or count beside first blocks for ever."""
    times = LinkTimes()
    for _ in range(ROUND_TRIPS_KNOWN):
        times.add_nothing(FAR, 0.06)
        times.add_nothing(NEAR, 0.001)
    assert times.round_trip_s([NEAR]) == LEAST_S
    assert times.round_trip_s([FAR, NEAR]) == 2 * 0.06, "a lease, and a first block"
    for _ in range(ROUND_TRIPS_KNOWN - 1):
        times.add_round_trip(FAR, 0.1)
    assert times.round_trip_s([FAR]) == 2 * 0.06
    times.add_round_trip(FAR, 0.1)
    assert times.round_trip_s([FAR]) == 0.1
    times.add_nothing(NEAR, 0.2)
    assert times.round_trip_s([NEAR]) == 0.2
    for _ in range(ROUND_TRIPS_KEPT):
        times.add_nothing(NEAR, 0.001)
    assert times.round_trip_s([NEAR]) == LEAST_S


def test_a_wait_that_was_given_up_counts_until_a_block_comes():
    """Fails when clients that go away make a way look short, or silence makes it look long never, or for ever."""
    times = LinkTimes()
    for _ in range(ROUND_TRIPS_KNOWN):
        times.add_round_trip(FAR, 0.02)
    for _ in range(ROUND_TRIPS_KEPT):
        times.add_given_up(FAR, 0.001)
    assert times.round_trip_s([FAR]) == 0.02
    times.add_given_up(FAR, 0.05)
    assert 0.05 < times.round_trip_s([FAR]) < 0.06
    times.add_given_up(FAR, 10.0)
    assert times.round_trip_s([FAR]) == LONGEST_S
    times.add_round_trip(FAR, 0.03)
    assert times.round_trip_s([FAR]) == 0.03

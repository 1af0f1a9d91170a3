"""The worker table on a clock of its own: suspicion, empty listings, models and counts."""

import pytest
from hand_clock import HandClock
from tiny_gateway import make_namespace, make_worker_record

from headrace.core.errors import UnknownModel, WorkerUnavailable
from headrace.core.generation import WorkerId
from headrace.core.limits import WORKER_SUSPECT_MS, WORKER_TABLE_KEEP_MS
from headrace.core.members import WorkerRole
from headrace.gateway.worker_table import WorkerTable

D0 = make_worker_record("d0")
D1 = make_worker_record("d1")


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def table(clock) -> WorkerTable:
    table = WorkerTable(clock)
    table.replace([D0, D1])
    return table


def live_ids(table):
    return [record.worker_id for record in table.live()]


def test_a_suspect_comes_back_when_its_record_outlives_the_suspicion(table, clock):
    """Fails when one failed call shuts a living worker out for ever, or for no time."""
    table.suspect(WorkerId("d0"))
    table.replace([D0, D1])
    assert live_ids(table) == ["d1"]
    clock.seconds += WORKER_SUSPECT_MS / 1000
    assert live_ids(table) == ["d0", "d1"]


def test_a_restarted_worker_is_no_suspect(table):
    """Fails when the new process pays for the old one's death."""
    table.suspect(WorkerId("d0"))
    table.replace([make_worker_record("d0", incarnation=2), D1])
    assert live_ids(table) == ["d0", "d1"]


def test_a_worker_that_left_is_gone_at_once(table):
    """Fails when requests are sent to a worker that withdrew."""
    table.replace([D1])
    assert live_ids(table) == ["d1"]


def test_an_empty_listing_is_believed_only_after_a_while(table, clock):
    """Fails when a Redis that restarted empty stops the service, or when everybody's end is never noticed."""
    clock.seconds += 10 * WORKER_TABLE_KEEP_MS / 1000  # Redis was away: there was no listing at all
    table.replace([])
    assert live_ids(table) == ["d0", "d1"]
    clock.seconds += WORKER_TABLE_KEEP_MS / 1000
    table.replace([])
    assert live_ids(table) == []
    assert not table.can_decode()


def test_counts_are_released_however_a_call_ends(table):
    """Fails when an error or a cancel leaves a worker looking busy."""
    outer, inner = table.in_flight(WorkerId("d0")), table.in_flight(WorkerId("d0"))
    outer.__enter__()
    inner.__enter__()
    assert table.in_flight_counts() == {"d0": 2}
    inner.__exit__(None, None, None)
    with pytest.raises(RuntimeError):
        outer.gen.throw(RuntimeError())
    assert table.in_flight_counts() == {}
    table.check_integrity()


def test_an_empty_name_means_the_only_model(table):
    """Fails when callers of a server with one model must name it."""
    assert table.served("").name == "tiny"
    table.replace([D0, make_worker_record("e0", model="other")])
    with pytest.raises(UnknownModel, match="other, tiny"):
        table.served("")


def test_a_model_without_decode_workers_is_not_served(table):
    """Fails when a prefill worker alone makes a model appear."""
    table.replace([make_worker_record("p0", WorkerRole.PREFILL)])
    assert table.models() == ()
    assert not table.can_decode()
    with pytest.raises(WorkerUnavailable, match="no decode worker"):
        table.served("tiny")


def test_requests_stay_within_one_namespace_of_a_model(table):
    """Fails when workers whose blocks mean different things are offered together."""
    odd = make_namespace(numerics_probe="other cpu")
    table.replace([D0, D1, make_worker_record("d2", namespace=odd), make_worker_record("p", WorkerRole.PREFILL)])
    assert [w.worker_id for w in table.served("tiny").workers] == ["d0", "d1", "p"]
    assert [w.worker_id for w in table.served("tiny", WorkerId("d2")).workers] == ["d2"]


def test_the_room_of_a_model_is_the_roomiest_decode_workers(table):
    """Fails when a pool smaller than the context is overlooked, or one small worker limits all."""
    table.replace([make_worker_record("d0", context_tokens_max=40), make_worker_record("d1", context_tokens_max=80)])
    assert table.served("tiny").tokens_max == 80


def test_a_model_is_resolved_once_for_each_listing_but_for_who_is_suspect(table, clock):
    """Fails when a listing that changed, a suspicion or its end is not seen, or when each request pays for the lot."""
    served = table.served("tiny")
    assert table.served("tiny") is served
    table.suspect(WorkerId("d1"))
    assert table.served("tiny").suspects == {"d1"}
    clock.seconds += WORKER_SUSPECT_MS / 1000
    assert table.served("tiny") is served
    table.replace([D1])
    assert table.served("tiny").workers == (D1,)


def test_prompts_wait_from_their_plan_to_their_first_token(table, clock):
    """Fails for a prompt that the table forgets when a record may know of it, and for one that it never forgets."""
    columns = table.columns(table.served("tiny"))
    assert table.waiting(columns) is None
    table.plan_work("r1", WorkerId("d1"), 2.0)
    clock.seconds += 3.0
    table.replace([D0, D1])
    table.plan_work("r2", WorkerId("d0"), 0.5)
    table.plan_work("r3", WorkerId("gone"), 9.0)
    waiting = table.waiting(table.columns(table.served("tiny")))
    assert waiting.rows.tolist() == [1, 0]
    assert waiting.work_s.tolist() == [2.0, 0.5]
    assert waiting.waited_s.tolist() == pytest.approx([3.0, 0.0])
    table.end_work("r1")
    table.end_work("r2")
    assert table.waiting(columns) is None

"""A client's request as workers take it: what the caller left open is settled, and long work is off the loop."""

import threading
from contextlib import closing

import pytest
from tiny_gateway import CountingTokenizers, make_namespace, make_worker_record

from headrace.core.clock import Deadline, SystemClock
from headrace.core.errors import InvalidRequest
from headrace.core.front_door_limits import HASHED_ON_LOOP_TOKENS_MAX
from headrace.core.generation import CacheControl
from headrace.core.retention import Retention
from headrace.core.sequence_room import SequenceRoom
from headrace.core.tenants import EVERYBODY, Tenant
from headrace.gateway.prepare_request import (
    hash_for,
    prepare_request,
    settle_priority,
    settle_retention,
    settle_sampling,
)
from headrace.gateway.worker_table import ServedModel
from headrace.wire.client_request import ClientRequest, SamplingOptions, TextPrompt, TokenPrompt


@pytest.mark.parametrize(("num_tokens", "num_runs"), [(9, 0), (HASHED_ON_LOOP_TOKENS_MAX + 1, 1)])
async def test_a_long_prompt_is_hashed_off_the_loop(model_path, num_tokens, num_runs):
    """Fails when a prompt of a million tokens stops all streams while it is hashed."""
    workers = (make_worker_record("d0"),)
    served = ServedModel("tiny", make_namespace(), model_path, 10**6, workers, suspects=frozenset())
    request = ClientRequest("tiny", TokenPrompt((5,) * num_tokens), SamplingOptions(seed=7), choices=2)
    with closing(CountingTokenizers()) as tokenizers:
        one, two = await prepare_request(
            request, EVERYBODY, served, tokenizers=tokenizers, deadline=Deadline.after(120, SystemClock())
        )
    assert len(tokenizers.threads) == num_runs
    assert threading.main_thread() not in tokenizers.threads
    assert one.prompt == hash_for(make_namespace(), (5,) * num_tokens)
    assert (one.request_id, one.prompt) == (two.request_id, two.prompt)
    assert (one.sampling.seed, two.sampling.seed) == (7, 8)


async def test_who_may_not_have_a_priority_has_no_work_done_for_it(model_path):
    """Fails when a request that is refused whatever it says is tokenised first."""
    served = ServedModel("tiny", make_namespace(), model_path, 100, (make_worker_record("d0"),), suspects=frozenset())
    with closing(CountingTokenizers()) as tokenizers, pytest.raises(InvalidRequest, match="the highest for tenant a"):
        await prepare_request(
            ClientRequest("tiny", TextPrompt("hello"), priority=1),
            Tenant("a", "tenant:a"),
            served,
            tokenizers=tokenizers,
            deadline=Deadline.after(120, SystemClock()),
        )
    assert not tokenizers.threads


def test_salts_narrow_and_cannot_be_spelled_as_another_group():
    """Fails when a salt gives the namespace of a group that another deployment's callers share."""
    namespace, other = make_namespace(), make_namespace(trust_group="default:x")
    ids = {
        hash_for(ns, (1, 2, 3, 4), cache_salt=salt).namespace for ns in (namespace, other) for salt in ("", "x", "y")
    }
    assert len(ids) == 6
    assert hash_for(namespace, (1,)).namespace == namespace.id
    assert hash_for(namespace, (1,), cache_salt="7:default:x").namespace != other.id


@pytest.mark.parametrize(
    ("named", "default", "room", "expected"), [(None, 16, 5, 5), (None, 16, 50, 16), (3, 16, 5, 3)]
)
def test_the_outputs_bound_is_the_callers_or_what_fits(named, default, room, expected):
    """Fails when a default overrides a wish, or does not fit."""
    options = SamplingOptions(max_tokens=named, max_tokens_default=default)
    assert settle_sampling(options, prompt_tokens=10, room=SequenceRoom(10 + room, 16, 100)).max_tokens == expected


def test_unset_seeds_are_drawn_and_set_ones_are_kept():
    """Fails when two sampled answers are always the same, or a seed of 0 is taken for none."""
    drawn = {settle_sampling(SamplingOptions(), prompt_tokens=1, room=SequenceRoom(9, 16, 100)).seed for _ in range(3)}
    assert len(drawn) == 3
    assert settle_sampling(SamplingOptions(seed=0), prompt_tokens=1, room=SequenceRoom(9, 16, 100)).seed == 0


@pytest.mark.parametrize(
    ("named", "of_tenant", "settled"),
    [(None, None, None), (None, 300.0, 300.0), (60.0, 300.0, 60.0), (3_600.0, 300.0, 3_600.0), (60.0, None, 60.0)],
)
def test_a_tenants_time_to_live_is_that_of_requests_that_name_none(named, of_tenant, settled):
    """Fails when a request cannot ask for another one, or loses what else it asked for."""
    cache = CacheControl(publish=False, retention=Retention(ttl_s=named, on_disk=False))
    found = settle_retention(cache, Tenant("a", "tenant:a", ttl_s=of_tenant))
    assert found == CacheControl(publish=False, retention=Retention(ttl_s=settled, on_disk=False))


@pytest.mark.parametrize(
    ("named", "highest", "settled"), [(None, 0, 0), (None, 3, 0), (None, -2, -2), (0, 0, 0), (-4, 0, -4), (2, 3, 2)]
)
def test_a_request_has_the_priority_that_it_names_within_its_tenants(named, highest, settled):
    """Fails when a request that names none is raised, or one of a tenant in the background counts as normal."""
    assert settle_priority(named, Tenant("a", "tenant:a", priority_max=highest)) == settled


@pytest.mark.parametrize(("named", "highest"), [(1, 0), (0, -1), (4, 3)])
def test_nobody_outranks_others_by_asking(named, highest):
    """Fails when a tenant may name any priority."""
    with pytest.raises(InvalidRequest, match="the highest for tenant a") as refusal:
        settle_priority(named, Tenant("a", "tenant:a", priority_max=highest))
    assert refusal.value.param == "priority"

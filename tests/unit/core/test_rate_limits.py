"""Rates of tenants: what is let in over any stretch of time, that the time to come back is right, and that nothing
leaks."""

import pytest
from hand_clock import HandClock
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import ContextExceeded, RateLimited
from headrace.core.front_door_limits import RATE_ACCOUNTS_MAX
from headrace.core.rate_limits import UNLIMITED, RateAccounts, RateLimits, TokenBucket


@pytest.fixture
def clock():
    return HandClock()


def ask(accounts, limits, *, tokens=0, name="acme"):
    """One whole request; what it was refused for, or None."""
    try:
        accounts.begin(name, limits)
    except RateLimited as refused:
        return refused
    try:
        accounts.take_tokens(name, prompt_tokens=tokens, output_tokens_max=0)
    except RateLimited as refused:
        return refused
    finally:
        accounts.end(name, unused_tokens=0)
    return None


@given(
    st.integers(1, 500),
    st.lists(st.tuples(st.floats(0, 40), st.integers(1, 500)), max_size=40),
)
def test_no_stretch_of_time_lets_more_through_than_a_full_bucket_and_what_flowed_in(per_minute, steps):
    """Fails when a bucket fills too fast, or beyond its size."""
    bucket, now_s, taken = TokenBucket(per_minute, now_s=0.0), 0.0, [(0.0, 0)]
    for pause_s, amount in steps:
        now_s += pause_s
        amount = min(amount, per_minute)
        if bucket.wait_s(amount, now_s) == 0:
            bucket.take(amount, now_s)
            taken.append((now_s, amount))
        for since_s, _ in taken:
            passed = sum(amount for at_s, amount in taken if at_s >= since_s)
            assert passed <= per_minute * (1 + (now_s - since_s) / 60) + 1e-3


@given(st.integers(1, 500), st.lists(st.integers(1, 500), min_size=1, max_size=30))
def test_whoever_comes_back_when_told_is_let_in_and_a_moment_earlier_is_not(per_minute, amounts):
    """Fails when Retry-After is a guess."""
    clock = HandClock()
    accounts, limits = RateAccounts(clock), RateLimits(tokens_per_minute=per_minute)
    for amount in amounts:
        amount = min(amount, per_minute)
        refused = ask(accounts, limits, tokens=amount)
        if refused is None:
            continue
        assert refused.limit == "tokens_per_minute"
        clock.seconds += max(0.0, refused.retry_after_ms / 1000 - 0.01)
        assert refused.retry_after_ms <= 10 or ask(accounts, limits, tokens=amount) is not None
        clock.seconds += 0.01
        assert ask(accounts, limits, tokens=amount) is None
        accounts.check_integrity()


def test_a_refused_request_costs_its_tenant_nothing_and_others_are_not_touched(clock):
    """Fails when a client that keeps asking is kept out for ever, or tenants share a bucket."""
    accounts, limits = RateAccounts(clock), RateLimits(requests_per_minute=2)
    assert [ask(accounts, limits) is None for _ in range(5)] == [True, True, False, False, False]
    assert ask(accounts, limits, name="other") is None
    clock.seconds += 30.0
    assert [ask(accounts, limits) is None for _ in range(2)] == [True, False]


def test_as_many_as_may_be_are_under_way_at_once(clock):
    accounts, limits = RateAccounts(clock), RateLimits(concurrent_max=2)
    for _ in range(2):
        accounts.begin("acme", limits)
    with pytest.raises(RateLimited, match="2 requests of tenant acme are under way") as refusal:
        accounts.begin("acme", limits)
    assert (refusal.value.limit, refusal.value.retry_after_ms > 0) == ("concurrent_max", True)
    accounts.end("acme", unused_tokens=0)
    accounts.begin("acme", limits)


def test_what_did_not_come_out_of_a_request_is_given_back_once(clock):
    """Fails when a request that names a large max_tokens pays for all of it, or a bucket runs over."""
    accounts, limits = RateAccounts(clock), RateLimits(tokens_per_minute=1_000)
    accounts.begin("acme", limits)
    assert accounts.take_tokens("acme", prompt_tokens=100, output_tokens_max=900) == 1_000
    assert ask(accounts, limits, tokens=1).limit == "tokens_per_minute"
    accounts.end("acme", unused_tokens=890)
    assert ask(accounts, limits, tokens=890) is None
    assert ask(accounts, limits, tokens=1) is not None
    accounts.check_integrity()


def test_a_request_that_no_minute_has_room_for_is_refused_for_good(clock):
    """Fails when a caller is told to try again what can never succeed."""
    accounts, limits = RateAccounts(clock), RateLimits(tokens_per_minute=1_000)
    accounts.begin("acme", limits)
    with pytest.raises(ContextExceeded, match="101 prompt tokens and 900 of answers make 1001"):
        accounts.take_tokens("acme", prompt_tokens=101, output_tokens_max=900)
    accounts.end("acme", unused_tokens=0)


def test_bounds_that_change_hold_from_the_next_request_on(clock):
    """Fails when a bound that is raised, lowered or taken away counts only after a restart, or gives a fresh minute."""
    accounts = RateAccounts(clock)
    assert ask(accounts, RateLimits(requests_per_minute=1)) is None
    assert ask(accounts, RateLimits(requests_per_minute=1)) is not None
    assert ask(accounts, RateLimits(requests_per_minute=3)) is None
    assert ask(accounts, RateLimits(requests_per_minute=3)) is None
    assert ask(accounts, RateLimits(requests_per_minute=3)) is not None
    assert ask(accounts, RateLimits(requests_per_minute=2)) is not None
    assert ask(accounts, UNLIMITED) is None


def test_names_that_have_left_the_file_are_forgotten(clock):
    """Fails when a gateway's memory grows with every tenant that ever was."""
    accounts, limits = RateAccounts(clock), RateLimits(requests_per_minute=60)
    for number in range(2 * RATE_ACCOUNTS_MAX):
        ask(accounts, limits, name=f"t{number}")
        clock.seconds += 1.0
    assert len(accounts._name_to_account) <= RATE_ACCOUNTS_MAX

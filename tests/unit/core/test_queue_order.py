"""Whose prompt is next: the levels, the shares and the ageing, as properties of a worker that serves by them."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.limits import FAIR_ACCOUNTS_MAX, PRIORITY_MAX
from headrace.core.queue_order import (
    AGEING_PER_S,
    FAIR_QUANTUM_TOKENS,
    PRIORITY_LIFT_S,
    Claim,
    ServiceOrder,
    Waiting,
)

TOKENS_PER_S = 1_000.0
CHUNK = 256


class Server:
    """Serves prompts chunk by chunk in the order under test, on a clock of its own."""

    def __init__(self) -> None:
        self.order = ServiceOrder()
        self.now_s = 0.0
        self.left: dict[Claim, int] = {}
        self.had: Counter[str] = Counter()
        self.waited_s: dict[Claim, float] = {}
        self._serials: dict[Claim, int] = {}

    def arrive(self, account: str, tokens: int, *, priority: int = 0) -> Claim:
        claim = Claim(account, priority, self.now_s)
        self.left[claim] = tokens
        self._serials[claim] = len(self._serials)
        self.order.enter(claim, self.now_s)
        return claim

    def step(self) -> Claim:
        waiting = [Waiting(c, left / TOKENS_PER_S, self._serials[c]) for c, left in self.left.items()]
        claim = self.order.in_order(waiting, self.now_s)[0].claim
        tokens = min(CHUNK, self.left[claim])
        self.now_s += tokens / TOKENS_PER_S
        self.order.computed(claim, tokens, self.now_s)
        self.had[claim.account] += tokens
        self.left[claim] -= tokens
        if not self.left[claim]:
            del self.left[claim]
            self.waited_s[claim] = self.now_s - claim.queued_s
            self.order.leave(claim)
        self.order.check_integrity()
        return claim


def test_of_one_account_the_shortest_prompt_is_first() -> None:
    server = Server()
    long, short = server.arrive("a", 1_000), server.arrive("a", 100)
    assert [server.step() for _ in range(2)] == [short, long]


def test_a_long_prompt_is_not_passed_for_ever_by_short_ones() -> None:
    """Fails without ageing: a short prompt comes whenever the last one was served."""
    server = Server()
    long = server.arrive("a", 4_000)
    while long in server.left:
        server.arrive("a", CHUNK)
        server.step()
        assert server.now_s < 3 * 4_000 / TOKENS_PER_S / AGEING_PER_S


def test_a_high_priority_is_served_first_and_a_low_one_all_the_same() -> None:
    """Fails if priorities are ignored, or if they are absolute."""
    server = Server()
    low = server.arrive("a", 100, priority=-PRIORITY_MAX)
    for _ in range(20):
        high = server.arrive("b", CHUNK, priority=PRIORITY_MAX)
        assert server.step() is high
    while low in server.left:
        server.arrive("b", CHUNK, priority=PRIORITY_MAX)
        server.step()
        assert server.now_s <= (2 * PRIORITY_MAX + 1) * PRIORITY_LIFT_S


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(50, 6_000), min_size=1, max_size=6),
    st.lists(st.integers(50, 6_000), min_size=1, max_size=6),
    st.integers(0, 3),
)
def test_two_accounts_that_always_wait_get_equal_shares(a: list[int], b: list[int], more: int) -> None:
    """Whatever sizes they send, and however many more the one sends. Fails if the flood or the size decides."""
    server = Server()
    for turn in range(160):
        for account, sizes, number in (("a", a, 2 + 5 * more), ("b", b, 2)):
            while sum(claim.account == account for claim in server.left) < number:
                server.arrive(account, sizes[turn % len(sizes)])
        server.step()
        assert abs(server.had["a"] - server.had["b"]) <= FAIR_QUANTUM_TOKENS + 2 * CHUNK


def test_a_newcomer_does_not_wait_behind_another_accounts_flood() -> None:
    """Fails when a hundred prompts that came first are served first."""
    server = Server()
    for _ in range(100):
        server.arrive("flood", 1_000)
    for _ in range(40):
        server.step()
    newcomer, came_s = server.arrive("b", 1_000), server.now_s
    while newcomer in server.left:
        server.step()
        assert server.now_s - came_s <= (FAIR_QUANTUM_TOKENS + 2 * 1_000 + 2 * CHUNK) / TOKENS_PER_S


def test_a_pause_earns_nothing() -> None:
    """Fails when an account that was away may catch up on what it did not ask for."""
    server = Server()
    server.arrive("b", 100)
    for _ in range(400):
        server.arrive("a", CHUNK)
        server.step()
    for _ in range(60):
        server.arrive("b", CHUNK)
        server.arrive("a", CHUNK)
    before = Counter(server.had)
    for _ in range(80):
        server.step()
    assert server.had["b"] - before["b"] <= 40 * CHUNK + FAIR_QUANTUM_TOKENS


def test_generated_tokens_count_for_the_share() -> None:
    order = ServiceOrder()
    talker, reader = Claim("talker", 0, 0.0), Claim("reader", 0, 0.0)
    order.enter(talker, 0.0)
    order.enter(reader, 0.0)
    order.generated(talker, FAIR_QUANTUM_TOKENS)
    first, _ = order.in_order([Waiting(talker, 0.1, 0), Waiting(reader, 9.0, 1)], 1.0)
    assert first.claim is reader


def test_accounts_that_do_not_wait_are_forgotten_in_the_end() -> None:
    """Fails if the account grows with every tenant that ever came."""
    order = ServiceOrder()
    waiting = Claim("waits", 0, 0.0)
    order.enter(waiting, 0.0)
    for number in range(2 * FAIR_ACCOUNTS_MAX):
        claim = Claim(f"tenant {number}", 0, 0.0)
        order.enter(claim, 0.0)
        order.computed(claim, 10 + number, 0.0)
        order.leave(claim)
        order.leave(claim)
    order.check_integrity()
    assert order.used_tokens(f"tenant {2 * FAIR_ACCOUNTS_MAX - 1}") > 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(-PRIORITY_MAX, PRIORITY_MAX), st.integers(1, 3_000)),
        min_size=1,
        max_size=40,
    )
)
def test_everybody_is_served_in_the_end(arrivals: list[tuple[str, int, int]]) -> None:
    """Fails if a claim can be lost or passed over for ever; the server checks its books after every step."""
    server = Server()
    for account, priority, tokens in arrivals:
        server.arrive(account, tokens, priority=priority)
    for _ in range(sum(-(-tokens // CHUNK) for _, _, tokens in arrivals)):
        server.step()
    assert not server.left
    assert sum(server.had.values()) == sum(tokens for _, _, tokens in arrivals)


@pytest.mark.parametrize("account", ["a", "b"])
def test_the_order_does_not_depend_on_the_order_of_asking(account: str) -> None:
    order = ServiceOrder()
    waiting = [Waiting(Claim(account, 0, float(n)), work_s=1.0 + n % 3, serial=n) for n in range(9)]
    for each in waiting:
        order.enter(each.claim, each.claim.queued_s)
    assert order.in_order(waiting, 9.0) == order.in_order(waiting[::-1], 9.0)

"""Requests that go on while something is done to the fleet: a load whose answers are known, and streams that last."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
from fleet import Fleet
from hosts import Host, wait_until
from ray_hosts import HTTP_PORT

from headrace.client.values import COLD, CacheOptions, Event, Sampling, TokenDelta
from headrace.core.errors import HeadraceError

WAYS = ("by_grpc", "by_http")


@dataclass
class Outcome:
    """What came of a load so far: how many answers were right, by way, and what was said instead of others."""

    right: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WAYS, 0))
    wrong: list[str] = field(default_factory=list)


@contextmanager
def load_on(fleet: Fleet, hosts: Sequence[Host], asked: list[list[int]]) -> Iterator[Outcome]:
    """At each of these hosts' proxies one caller asks these prompts in turn by gRPC, and one by HTTP; neither asks
    again. What they get is compared with what is got at rest. The answers are short: what is asked is whether they
    come."""
    few = Sampling(max_tokens=4, ignore_eos=True)
    at_rest = [fleet.client.generate(prompt, sampling=few, cache=COLD, timeout_s=120) for prompt in asked]
    expected, model = [answer.text for answer in at_rest], at_rest[0].model
    outcome, ended, lock = Outcome(), threading.Event(), threading.Lock()

    def by_grpc(host: Host, prompt: list[int]) -> str:
        return fleet.clients[host.name].generate(prompt, sampling=few, timeout_s=120).text

    def by_http(host: Host, prompt: list[int]) -> str:
        body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        reply = connections.post(f"http://{host.address}:{HTTP_PORT}/v1/completions", json=body)
        return reply.raise_for_status().json()["choices"][0]["text"]

    def call(ask: Callable[[Host, list[int]], str], host: Host, number: int) -> None:
        while not ended.wait(0.2):
            number = (number + 1) % len(asked)
            try:
                text = ask(host, asked[number])
            except (HeadraceError, httpx.HTTPError) as error:
                said = f"{ask.__name__}: {type(error).__name__}: {error}"
            else:
                said = "" if text == expected[number] else f"{ask.__name__}: {text!r} instead of {expected[number]!r}"
            with lock:
                outcome.right[ask.__name__] += not said
                outcome.wrong += [said] if said else []

    with httpx.Client(timeout=120) as connections, ThreadPoolExecutor(2 * len(hosts)) as pool:
        calls = [pool.submit(call, *each) for host in hosts for each in ((by_grpc, host, 0), (by_http, host, 2))]
        try:
            yield outcome
        finally:
            ended.set()
            for each in calls:
                each.result()


def go_on(outcome: Outcome, *, what: str) -> None:
    """Until the load has got some more answers by either way."""
    before = dict(outcome.right)
    wait_until(
        lambda: all(outcome.right[way] > before[way] + 8 for way in WAYS),
        within_s=120,
        what=f"answers {what}",
    )


@dataclass
class LongStream:
    """A stream that has begun, and what it must come to."""

    events: Iterator[Event]
    begun: list[Event]
    expected: tuple[int, ...]

    def check_to_its_end(self) -> None:
        events = [*self.begun, *self.events]
        assert tuple(event.token_id for event in events if isinstance(event, TokenDelta)) == self.expected


@contextmanager
def long_stream(fleet: Fleet, host: Host, prompt: list[int]) -> Iterator[LongStream]:
    """A stream of the decode worker of a host through its proxy."""
    worker, client = fleet.worker(host), fleet.clients[host.name]
    long = Sampling(max_tokens=400, ignore_eos=True)
    cache = CacheOptions(decode_worker=worker.worker_id)
    expected = client.generate(prompt, sampling=long, cache=COLD, timeout_s=120).token_ids
    with client.stream(prompt, sampling=long, cache=cache, timeout_s=120) as stream:
        events = iter(stream)
        yield LongStream(events, [next(events), next(events)], expected)

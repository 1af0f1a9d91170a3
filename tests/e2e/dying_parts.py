"""Parts of a live system that are killed or paused while requests run, and what every such request's client sees."""

import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import httpx
import pytest
from local_system import PATIENCE_S, LocalSystem, metrics_page, wait_until

from headrace.client.errors import GatewayUnreachable
from headrace.client.values import COLD, Sampling, TokenDelta
from headrace.core.errors import HeadraceError
from headrace_cluster.local_instance import processes_of

LONG = 1_900  # tokens; a worker's pool takes 2,048
ATTEMPTS = 10  # to be in time for streams of that length


@dataclass(frozen=True)
class Ended:
    """How one stream ended: its tokens, and the error after them if there was one."""

    token_ids: tuple[int, ...]
    error: HeadraceError | None
    took_s: float


@dataclass(frozen=True)
class Streams:
    """Prompts with the answers of a quiet run, and how their streams ended while something happened."""

    expected: Sequence[tuple[int, ...]]
    ended: Sequence[Ended]

    @property
    def cut_off(self) -> list[Ended]:
        return [each for each in self.ended if each.error is not None]

    def check_every_token(self) -> None:
        """What was answered, whole or cut off, is what the quiet run answered: nothing lost, doubled or exchanged."""
        for quiet, each in zip(self.expected, self.ended, strict=True):
            assert each.token_ids == quiet[: len(each.token_ids)]
            assert each.error is not None or each.token_ids == quiet


def quiet_answers(system: LocalSystem, prompts: Sequence[list[int]], *, max_tokens: int) -> list[tuple[int, ...]]:
    """What the prompts' streams have to say."""
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)

    def quiet(prompt: list[int]) -> tuple[int, ...]:
        return system.client.generate(prompt, sampling=sampling, cache=COLD, timeout_s=120).token_ids

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(quiet, prompts))


def stream_while(
    system: LocalSystem,
    prompts: Sequence[list[int]],
    do: Callable[[], None],
    *,
    max_tokens: int,
    expected: Sequence[tuple[int, ...]] = (),
    timeout_s: float = PATIENCE_S,
) -> Streams:
    """Run all prompts' streams at once, and `do` when half of them have their first token. expected: their quiet
    answers, for who has asked before; else they are asked first."""
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    expected = expected or quiet_answers(system, prompts, max_tokens=max_tokens)
    begun = threading.Semaphore(0)

    def stream(prompt: list[int]) -> Ended:
        token_ids: list[int] = []
        began_s, error = time.monotonic(), None
        try:
            for event in system.client.stream(prompt, sampling=sampling, timeout_s=timeout_s):
                if isinstance(event, TokenDelta):
                    token_ids.append(event.token_id)
                    if len(token_ids) == 1:
                        begun.release()
        except HeadraceError as failed:
            error = failed
        return Ended(tuple(token_ids), error, time.monotonic() - began_s)

    with ThreadPoolExecutor(len(prompts)) as pool:
        streams = [pool.submit(stream, prompt) for prompt in prompts]
        for _ in range(len(prompts) // 2):
            assert begun.acquire(timeout=timeout_s), "half of the streams have not begun"
        do()
        return Streams(expected, [each.result() for each in streams])


def http_completions(system: LocalSystem, prompts: Sequence[list[int]], *, max_tokens: int) -> list[str]:
    """What became of requests over HTTP that run at once: the status, or how the connection ended."""
    model = system.client.list_models()[0].id

    def ask(prompt: list[int]) -> str:
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        url = f"{system.state.http_url}/v1/completions"
        try:
            return str(httpx.post(url, json=body, timeout=PATIENCE_S).status_code)
        except httpx.HTTPError as failed:
            return type(failed).__name__

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, prompts))


@contextmanager
def long_streams(system: LocalSystem, *, over_grpc: int = 4, over_http: int = 0) -> Iterator["LongStreams"]:
    """So many streams of LONG tokens, begun at once, each of which has begun, and none of which is near its end: where
    the machine was so fast, or this process so late, that one could be, others are begun. They end with the scope at
    last."""
    sampling = Sampling(max_tokens=LONG, ignore_eos=True)
    body = {"model": system.client.list_models()[0].id, "max_tokens": LONG, "ignore_eos": True, "stream": True}
    url = f"{system.state.http_url}/v1/completions"

    def begin(number: int, opened: ExitStack) -> Iterator[object]:
        prompt = [40 + number] * 20
        if number < over_grpc:
            stream = system.client.stream(prompt, sampling=sampling, cache=COLD)
            reader: Iterator[object] = iter(opened.enter_context(stream))
        else:
            asked = body | {"prompt": prompt}
            reply = opened.enter_context(httpx.stream("POST", url, json=asked, timeout=PATIENCE_S))
            assert reply.status_code == 200
            reader = reply.iter_lines()
        next(reader), next(reader)
        return reader

    count = over_grpc + over_http
    for _ in range(ATTEMPTS):
        with ExitStack() as opened:
            work = WorkForNobody(system)
            with ThreadPoolExecutor(count) as pool:
                readers = list(pool.map(begin, range(count), [opened] * count))
            if work.most_steps() < LONG / 2:
                yield LongStreams(work, readers[:over_grpc], readers[over_grpc:])
                return
    raise AssertionError(f"void: streams of {LONG} tokens were half over before anything could be done to them")


@dataclass(frozen=True)
class LongStreams:
    """Streams under way, and what the workers have done since they began."""

    work: "WorkForNobody"
    over_grpc: Sequence[Iterator[object]]
    over_http: Sequence[Iterator[object]]

    def lose(self, pids: Sequence[int]) -> None:
        """Kill all who stand between the workers and the clients: every client is told that its stream is cut off, and
        the workers give up what they did for them."""
        for pid in pids:
            kill(pid)
        for readers, error in ((self.over_grpc, GatewayUnreachable), (self.over_http, httpx.RemoteProtocolError)):
            for reader in readers:
                with pytest.raises(error):
                    deque(reader, maxlen=0)
        self.work.check_given_up()


class WorkForNobody:
    """Counts the workers' steps from now on. A stream of LONG tokens takes as many steps of its worker, others that are
    short take few beside it: what ends before that was given up, however fast or slow the machine is."""

    def __init__(self, system: LocalSystem) -> None:
        self.ports = metrics_ports(system)
        self._before = self._steps()

    def check_given_up(self) -> None:
        """Wait until no sequence is on any worker, and see that no stream of LONG tokens was computed to its end."""
        wait_until(lambda: sequences_on(self.ports) == 0, what="no worker busy")
        assert self.most_steps() < LONG, "a worker went on for nobody"

    def most_steps(self) -> int:
        """Of any worker."""
        return max(after - before for before, after in zip(self._before, self._steps(), strict=True))

    def _steps(self) -> list[int]:
        pages = [metrics_page(port) for port in self.ports]
        counts = [re.findall(r"^headrace_engine_steps_total{.*} (\S+)$", page, re.MULTILINE) for page in pages]
        return [int(float(count)) for (count,) in counts]


def sequences_on(ports: Sequence[int]) -> int:
    """Sequences on the workers of these metrics ports."""
    counts = [
        count
        for port in ports
        for count in re.findall(r"^headrace_engine_sequences{.*} (\S+)$", metrics_page(port), re.MULTILINE)
    ]
    assert len(counts) == 2 * len(ports)
    return int(sum(map(float, counts)))


def metrics_ports(system: LocalSystem) -> list[int]:
    return [worker.metrics_port for worker in system.client.status().workers]


def pids_of(system: LocalSystem, part: str) -> list[int]:
    """Processes of the system whose title begins with `ray::` and this, say `ServeController`."""
    return [pid for pid, title in processes_of(system.state.instance_id).items() if title.startswith(f"ray::{part}")]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@contextmanager
def paused(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def wait_until_replaced(system: LocalSystem, worker_id: str, *, role: str, of: int) -> None:
    """As many workers of the role as before, and this one is not among them."""

    def replaced() -> bool:
        now = system.worker_ids(role)
        return len(now) == of and worker_id not in now

    wait_until(replaced, what=f"{of} {role} workers again after {worker_id} was killed")

"""Send requests at their planned times, whatever becomes of the ones before: an open loop.

Owns when requests go out and when everything ends. Never waits for an answer to send the next request, so a system that
slows down is not spared; what could not be sent on time is counted (`LoadTally.lag`, `not_sent`), so that a generator
that is too slow itself is seen.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass

from headrace.bench.planned_requests import PlannedRequest
from headrace.bench.serving_tally import LoadTally
from headrace.bench.serving_targets import AnswerUsage, LoadTarget, TokenArrived, error_kind
from headrace.core.clock import Clock, Deadline
from headrace.core.errors import HeadraceError

Report = Callable[[str], None]

# Requests under way at once: each has a connection and a prompt in memory (8,000 token ids are 0.3 MB), and a process
# may usually open 1,024 files. A system that is behind by more than this answers none of the later ones in time.
IN_FLIGHT_MAX = 900

# Seconds between two lines of progress.
REPORT_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class LoadBounds:
    """Where a load ends. None: by the other one alone, or with the requests."""

    requests_max: int | None
    duration_s: float | None  # no request is sent later than this
    timeout_s: float  # of each request, from when it is sent


async def generate_load(
    requests: Iterable[PlannedRequest],
    target: LoadTarget,
    *,
    bounds: LoadBounds,
    tally: LoadTally,
    stop: asyncio.Event,
    clock: Clock,
    report: Report,
) -> None:
    """Send the requests, in order of arrival, and count what comes back. Returns when each one has ended.

    `stop`, when set, ends it at once: what is under way is cancelled and counted as interrupted.
    """
    tally.begin(clock.now_s())
    under_way: set[asyncio.Task[None]] = set()
    async with asyncio.TaskGroup() as group:
        progress = group.create_task(_report_progress(tally, report))
        stopping = group.create_task(stop.wait())
        for number, request in enumerate(requests):
            beyond = bounds.duration_s is not None and request.arrival_s > bounds.duration_s
            if beyond or number == bounds.requests_max:
                break
            planned_s = tally.start_s + request.arrival_s
            await _wait_until(planned_s, stopping, clock)
            if stop.is_set():
                break
            if len(under_way) >= IN_FLIGHT_MAX:
                tally.not_sent += 1
                continue
            asking = _ask(request, target, tally, planned_s=planned_s, timeout_s=bounds.timeout_s, clock=clock)
            task = group.create_task(asking)
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        if under_way and not stop.is_set():
            all_ended = group.create_task(asyncio.wait(set(under_way)))
            await asyncio.wait({all_ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
            all_ended.cancel()
        for task in under_way:
            task.cancel()
        progress.cancel()
        stopping.cancel()
    tally.check_integrity()
    assert tally.under_way == 0


async def _wait_until(moment_s: float, stopping: asyncio.Task[bool], clock: Clock) -> None:
    """Until the moment or the end. When it is past already the other tasks get a turn all the same."""
    left_s = moment_s - clock.now_s()
    if left_s > 0:
        await asyncio.wait({stopping}, timeout=left_s)
    else:
        await asyncio.sleep(0)


async def _ask(
    request: PlannedRequest,
    target: LoadTarget,
    tally: LoadTally,
    *,
    planned_s: float,
    timeout_s: float,
    clock: Clock,
) -> None:
    """Send one request and count its answer."""
    counts, ended = tally.send(planned_s=planned_s, now_s=clock.now_s()), False
    try:
        async with (
            Deadline.after(timeout_s, clock).scope("the whole answer"),
            aclosing(target.stream(request, timeout_s=timeout_s)) as answer,
        ):
            async for event in answer:
                match event:
                    case TokenArrived():
                        counts.token(clock.now_s())
                    case AnswerUsage():
                        counts.finish(event, clock.now_s())
                        ended = True
    except HeadraceError as error:
        if not ended:  # a connection that breaks behind the whole answer takes nothing from it
            counts.fail(error_kind(error), str(error), clock.now_s())
            ended = True
    finally:
        if not ended:
            counts.interrupt(clock.now_s())


async def _report_progress(tally: LoadTally, report: Report) -> None:
    while True:
        await asyncio.sleep(REPORT_EVERY_S)
        report(
            f"{tally.sent:,} sent, {tally.under_way:,} under way, {tally.finished:,} answered, {tally.failed:,} failed"
        )

"""A gateway of a simulated world: the real `route_request` over real workers that may be killed, stall or refuse.

Who is asked is drawn, not chosen by a rule: routing must be right whatever the plan is.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, contextmanager
from dataclasses import fields

from simulated_world import Answer, World

from headrace.core.choose_workers import Plan, PlanReason
from headrace.core.clock import Deadline
from headrace.core.errors import HeadraceError, WorkerUnavailable
from headrace.core.generation import DecodeCall, DecodeEvent, GenerateRequest, PrefillCall, PrefillResult, Usage
from headrace.core.members import PrefixMatch
from headrace.decode.decode_tokens import decode_tokens
from headrace.gateway.route_request import ChoiceFinished, ChoiceToken, route_request
from headrace.gateway.router import Router
from headrace.gateway.worker_table import WorkerTable
from headrace.prefill.prefill_prompt import prefill_prompt


class SimulatedCalls:
    """WorkerCalls to the world's workers; what goes wrong with a worker is set by its id."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.calls: list[PrefillCall | DecodeCall] = []
        self.refusing: dict[str, HeadraceError] = {}  # raised at once by calls to that worker
        self.stalled: set[str] = set()  # takes calls, and does nothing
        self.wrong_answers = False  # prefills answer another attempt
        self.prefill_ended_s = 0.0  # on the worker
        self.prefill_delay_s = 0.0  # prefill calls travel so much longer than decode calls
        self._running: dict[str, set[asyncio.Task]] = {}

    def kill(self, worker_id: str) -> None:
        """End what runs at a worker now; later calls find another process there."""
        for task in self._running.get(worker_id, ()):
            task.cancel("killed")

    async def prefill(self, call: PrefillCall) -> PrefillResult:
        self.calls.append(call)
        await asyncio.sleep(self.prefill_delay_s)
        await self._reach(call.worker_id)
        with self._killable(call.worker_id):
            result = await prefill_prompt(call, self.world.workers[call.worker_id])
        self.prefill_ended_s = self.world.clock.now_s()
        await self._travel()
        if self.wrong_answers:
            return PrefillResult("another", result.worker_id, 99, result.published_blocks, result.store_node)
        return result

    async def decode(self, call: DecodeCall) -> AsyncGenerator[DecodeEvent, None]:
        self.calls.append(call)
        await self._reach(call.worker_id)
        async with aclosing(decode_tokens(call, self.world.workers[call.worker_id])) as events:
            while True:
                with self._killable(call.worker_id):
                    event = await anext(events, None)
                if event is None:
                    return
                yield event

    async def _reach(self, worker_id: str) -> None:
        await self._travel()
        if worker_id in self.refusing:
            raise self.refusing[worker_id]
        if worker_id in self.stalled:
            await asyncio.sleep(3_600)

    async def _travel(self) -> None:
        await asyncio.sleep(self.world.rng.uniform(0, 0.002))

    @contextmanager
    def _killable(self, worker_id: str):
        task = asyncio.current_task()
        running = self._running.setdefault(worker_id, set())
        running.add(task)
        try:
            yield
        except asyncio.CancelledError as error:
            if error.args != ("killed",):
                raise
            task.uncancel()
            raise WorkerUnavailable(worker_id, "killed") from None
        finally:
            running.discard(task)


class DrawnPlans:
    """In place of `RoutePlanner`: workers as the test names them, or drawn; `missing_tokens` by the nodes' own word."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.decoders = ["decode-a"]
        self.prefillers: list[str | None] = [None]

    def plan(self, request: GenerateRequest, match: PrefixMatch, *, failed, instead_of: Plan | None = None) -> Plan:
        rng, workers = self.world.rng, self.world.workers
        decoders = [name for name in self.decoders if name not in failed]
        if not decoders:
            raise WorkerUnavailable("", "nobody is left")
        decode = rng.choice(decoders)
        prefill = rng.choice([name for name in self.prefillers if name != decode] or [None])
        held = min(match.num_blocks, len(request.prompt.chain))
        return Plan(
            decode=workers[decode].record(),
            prefill=workers[prefill].record() if prefill else None,
            missing_tokens=len(request.prompt.token_ids) - held * request.prompt.block_tokens,
            hint_nodes=tuple(
                holder.removeprefix("node:")
                for holder in sorted(match.num_blocks_by_holder, key=match.of, reverse=True)
            ),
            reason=next(iter(PlanReason)),
            **{field.name: None for field in fields(Plan) if field.name == "decision"},  # only people read it
        )


class NodesIndex:
    """BlockIndex that asks the nodes themselves."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def longest_prefix(self, namespace, chain) -> PrefixMatch:
        await asyncio.sleep(0.001)
        held = {
            f"node:{name}": node.node.lookup(namespace, chain) for name, node in self.world.nodes.items() if node.node
        }
        return PrefixMatch({holder: num_blocks for holder, num_blocks in held.items() if num_blocks})


class Observer:
    """A RouteObserver that remembers."""

    def __init__(self) -> None:
        self.recoveries: list[str] = []
        self.usages: list[Usage] = []

    def decided(self, reason: str) -> None:
        pass

    def recovered(self, kind: str) -> None:
        self.recoveries.append(kind)

    def first_token(self, seconds: float) -> None:
        pass

    def finished(self, usage: Usage, *, reads_cache: bool) -> None:
        self.usages.append(usage)


class SimulatedGateway:
    """One gateway over a world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.calls = SimulatedCalls(world)
        self.plans = DrawnPlans(world)
        self.observer = Observer()
        self.table = WorkerTable(world.clock)
        self.first_token_s = 0.0  # of the last request, from its start
        self._router = Router(
            index=NodesIndex(world), calls=self.calls, table=self.table, planner=self.plans, observer=self.observer
        )

    async def ask(self, request: GenerateRequest, *, timeout_s: float = 60.0) -> Answer:
        """The answer to a request with one choice. Raises what a client would be told."""
        started_s = self.world.clock.now_s()
        deadline = Deadline.after(timeout_s, self.world.clock)
        token_ids: list[int] = []
        async with aclosing(route_request([request], router=self._router, deadline=deadline)) as events:
            async for event in events:
                match event:
                    case ChoiceToken():
                        if not token_ids:
                            self.first_token_s = self.world.clock.now_s() - started_s
                        token_ids.append(event.delta.token_id)
                    case ChoiceFinished():
                        return Answer(token_ids, event.finished)
        raise AssertionError("a stream ended without a result")

    def decode_calls(self) -> list[DecodeCall]:
        return [call for call in self.calls.calls if isinstance(call, DecodeCall)]

    def check_at_rest(self) -> None:
        assert not self.table.in_flight_counts()
        assert len({call.attempt_id for call in self.calls.calls}) == len(self.calls.calls)

"""The service's own life: it follows the workers, through a membership that is away, and says when it cannot serve."""

import asyncio
import threading
from dataclasses import replace

import pytest
from tiny_gateway import TinyWorker, make_worker_record, tiny_gateway, until

from headrace.core.errors import IndexUnavailable, UnknownModel
from headrace.core.generation import WorkerId
from headrace.core.tenants import EVERYBODY
from headrace.gateway.tokenize_prompt import PromptTokenizer, Tokenizers, load_tokenizer
from headrace.wire.client_request import ClientRequest, SamplingOptions, TokenPrompt

D0 = make_worker_record("d0")


def make_request(**options) -> ClientRequest:
    return ClientRequest(prompt=TokenPrompt((5, 6, 7)), sampling=SamplingOptions(max_tokens=2), **options)


async def test_workers_that_come_and_go_are_noticed_without_a_restart(model_path):
    """Fails when the table is read once."""
    async with tiny_gateway(model_path=model_path) as gateway:
        assert not gateway.service.ready()
        assert gateway.service.models() == ()
        await gateway.membership.announce(D0, ttl_ms=60_000)
        await until(gateway.service.ready)
        assert [model.name for model in gateway.service.models()] == ["tiny"]
        await gateway.membership.announce(make_worker_record("d1", incarnation=9), ttl_ms=60_000)
        await gateway.membership.withdraw(D0)
        await until(lambda: [r.worker_id for r in gateway.service.table.live()] == ["d1"])


async def test_workers_of_another_ray_cluster_with_the_same_index_are_not_called(model_path):
    """Fails when a gateway plans with workers that it cannot reach, as there are for minutes while KubeRay upgrades."""
    ours, theirs = (replace(make_worker_record(name), ray_cluster=name) for name in ("ours", "theirs"))
    async with tiny_gateway(theirs, model_path=model_path, ray_cluster="ours") as gateway:
        assert await gateway.service.membership.workers()
        assert not gateway.service.table.records()
        gateway.calls.workers["ours"] = TinyWorker(replace(ours, model_path=model_path))
        await gateway.membership.announce(replace(ours, model_path=model_path), ttl_ms=60_000)
        await until(gateway.service.ready)
        for _ in range(4):
            events = [event async for event in gateway.service.generate(make_request(model="tiny"), EVERYBODY)]
            assert events[-1].finished.worker_id == "ours"


async def test_a_gateway_is_ready_once_its_tokenizers_are_loaded(model_path):
    """Fails when the first request after the start pays for the load, or a model without one blocks readiness."""
    release = threading.Event()

    def load(path: str) -> PromptTokenizer:
        release.wait(120)
        return load_tokenizer(path)

    async with tiny_gateway(D0, model_path=model_path, tokenizers=Tokenizers(load)) as gateway:
        assert gateway.service.table.can_decode()
        assert not gateway.service.ready()
        release.set()
        await until(gateway.service.ready)
    async with tiny_gateway(D0, model_path="/nowhere") as gateway:
        await until(gateway.service.ready)


async def test_a_membership_that_is_away_leaves_the_known_workers_in_service(model_path):
    """Fails when Redis being away stops requests, or when its return is not noticed."""
    async with tiny_gateway(D0, model_path=model_path) as gateway:
        there = gateway.membership.workers

        async def away():
            raise IndexUnavailable("away")

        gateway.membership.workers = away
        await gateway.service.refresh()
        await until(gateway.service.ready)
        assert not gateway.service.index_available
        gateway.membership.workers = there
        await until(lambda: gateway.service.index_available)


async def test_a_worker_that_another_gateway_knows_already_is_not_refused(model_path):
    """Fails when a client that saw a new worker through one gateway is refused by the other for a second."""
    async with tiny_gateway(D0, model_path=model_path) as gateway:
        late = replace(D0, worker_id=WorkerId("late"), model_path=model_path)
        gateway.calls.workers["late"] = TinyWorker(late)
        await gateway.membership.announce(late, ttl_ms=60_000)
        events = [
            event
            async for event in gateway.service.generate(
                make_request(model="tiny", decode_worker=WorkerId("late")), EVERYBODY
            )
        ]
        assert events[-1].finished.worker_id == "late"


async def test_requests_for_what_is_not_there_cost_few_readings_of_the_members(model_path):
    """Fails when each of them has the members read."""
    async with tiny_gateway(D0, model_path=model_path) as gateway:
        await gateway.service.stop()  # which reads them once a second, however long this takes
        there, readings = gateway.membership.workers, []

        async def counted():
            readings.append(1)
            return await there()

        gateway.membership.workers = counted

        async def ask() -> None:
            with pytest.raises(UnknownModel):
                [event async for event in gateway.service.generate(make_request(model="none"), EVERYBODY)]

        await asyncio.gather(*(ask() for _ in range(50)))
        assert len(readings) == 1


async def test_a_gateway_that_stopped_following_is_not_ready(model_path):
    """Fails when a broken refresh goes unseen while the table grows old."""
    async with tiny_gateway(D0, model_path=model_path) as gateway:

        async def broken():
            raise ZeroDivisionError

        await until(gateway.service.ready)
        assert gateway.service.healthy()
        gateway.membership.workers = broken
        await until(lambda: not gateway.service.ready())
        assert not gateway.service.healthy(), "only another process will follow again"
        gateway.membership.workers = gateway.membership.store_nodes


async def test_stopping_twice_is_harmless_and_ends_readiness(model_path):
    """Fails when a stopped gateway still claims to serve."""
    async with tiny_gateway(D0, model_path=model_path) as gateway:
        await gateway.service.stop()
        await gateway.service.stop()
        assert not gateway.service.ready()


async def test_work_beside_the_refresh_runs_again_and_again_until_the_stop(model_path):
    """Fails when it runs once, keeps the table from being refreshed, or outlives the service."""
    async with tiny_gateway(model_path=model_path) as gateway:
        service, steps, hang = gateway.service, [], asyncio.Event()
        await service.stop()

        async def count():
            steps.append(1)

        service.run_beside(count)
        service.run_beside(hang.wait)
        await service.start()
        await gateway.membership.announce(D0, ttl_ms=60_000)
        await until(lambda: len(steps) >= 2 and service.table.live())
        await service.stop()
        before = len(steps)
        await asyncio.sleep(0)
        assert len(steps) == before
        assert not [task for task in asyncio.all_tasks() if "count" in task.get_name()]

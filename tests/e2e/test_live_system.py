"""A whole local system, as its users meet it: HTTP, gRPC, reflection, health, and processes killed under it.

The tests share one system and run in this order; the last one ends it.
"""

import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from dying_parts import LONG, WorkForNobody
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from local_system import BLOCK_TOKENS, PATIENCE_S, LocalSystem, wait_until, wait_until_known, when_known
from tiny_model import TEXT

from headrace.client.values import COLD, CacheOptions, Sampling
from headrace.core.block import CacheSource
from headrace.core.errors import InvalidRequest, WorkerUnavailable
from headrace.core.limits import WORKER_ACCEPT_TIMEOUT_MS
from headrace_cluster.launch_local import down
from headrace_cluster.local_instance import processes_of

SHORT = Sampling(max_tokens=8, ignore_eos=True)


def make_prompt(topic: str) -> str:
    """About 150 tokens that no other test uses."""
    return f"{topic}. " + TEXT * 4


def test_both_apis_answer_with_the_same_text(system: LocalSystem):
    """Fails when HTTP and gRPC do not reach the same gateway, or one of the proxies does not stream to the end."""
    by_grpc = system.client.generate("Hello", sampling=SHORT, cache=COLD)
    body = {"model": by_grpc.model, "prompt": "Hello", "max_tokens": 8, "temperature": 0}
    by_http = httpx.post(f"{system.state.http_url}/v1/completions", json=body, timeout=60).json()
    assert by_http["usage"]["completion_tokens"] <= 8
    assert by_grpc.text.startswith(by_http["choices"][0]["text"])


def test_the_openai_package_streams_a_chat(system: LocalSystem):
    """Fails when the SSE stream, the usage chunk or the model list is not what the unchanged package expects."""
    with openai.OpenAI(base_url=f"{system.state.http_url}/v1", api_key="none", max_retries=0) as client:
        (model,) = client.models.list().data
        messages = [{"role": "user", "content": make_prompt("openai")}]
        chunks = list(
            client.chat.completions.create(
                model=model.id,
                messages=messages,
                max_tokens=5,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        again = client.chat.completions.create(model=model.id, messages=messages, max_tokens=5, temperature=0)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == again.choices[0].message.content
    assert chunks[-1].usage.prompt_tokens == again.usage.prompt_tokens > 4 * BLOCK_TOKENS
    assert again.usage.prompt_tokens_details.cached_tokens >= 4 * BLOCK_TOKENS


def test_choices_of_one_request_run_side_by_side(system: LocalSystem):
    """Fails when calls made for one client request share Serve's request id: they are swapped, and one never ends."""
    body = {"model": system.client.list_models()[0].id, "prompt": "Hello", "n": 6, "max_tokens": 4, "temperature": 1}
    reply = httpx.post(f"{system.state.http_url}/v1/completions", json=body, timeout=60).json()
    assert sorted(choice["index"] for choice in reply["choices"]) == list(range(6))


def test_a_client_made_from_reflection_alone_can_stream(system: LocalSystem):
    """Fails when the proxy does not list our services or cannot give their descriptors."""
    with grpc.insecure_channel(system.state.grpc_target) as channel:
        services, method = discover(channel, "headrace.v1.Inference", "Generate")
        assert {"headrace.v1.Inference", "headrace.v1.CacheAdmin", "grpc.health.v1.Health"} <= services
        request_type = message_factory.GetMessageClass(method.input_type)
        event_type = message_factory.GetMessageClass(method.output_type)
        call = channel.unary_stream(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=request_type.SerializeToString,
            response_deserializer=event_type.FromString,
        )
        request = request_type(text="Hello")
        request.sampling.max_tokens = 3
        events = [event.WhichOneof("event") for event in call(request, timeout=60)]
    assert events[0] == "accepted"
    assert events[-1] == "done"
    assert events.count("token") in (1, 2, 3)


def test_health_is_that_of_the_gateway(system: LocalSystem):
    with grpc.insecure_channel(system.state.grpc_target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="headrace.v1.Inference")
        assert health.Check(request, timeout=60).status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(request, timeout=60)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        with pytest.raises(grpc.RpcError) as refused:
            health.Check(health_pb2.HealthCheckRequest(service="nothing"), timeout=60)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert httpx.get(f"{system.state.http_url}/ready", timeout=60).status_code == 200


def test_errors_keep_their_class_on_the_way_through_the_proxies(system: LocalSystem):
    with pytest.raises(InvalidRequest):
        system.client.generate("Hello", model="no-such-model")
    body = {"model": "no-such-model", "prompt": "Hello"}
    refused = httpx.post(f"{system.state.http_url}/v1/completions", json=body, timeout=60)
    assert refused.status_code == 404
    assert refused.json()["error"]["param"] == "model"


def test_a_prefix_is_reused_from_every_place_and_changes_nothing(system: LocalSystem):
    """The point of it all. Fails when a call misses the worker that its plan names, or reuse changes a token."""
    prompt, (first, second) = make_prompt("reuse"), system.worker_ids("decode")
    cold = system.client.generate(prompt, sampling=SHORT, cache=COLD)
    assert cold.usage.cached.total == 0
    system.client.generate(prompt, sampling=SHORT, cache=CacheOptions(decode_worker=first))
    full = (cold.usage.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    for worker, source in (
        (first, CacheSource.DEVICE),
        (second, CacheSource.SHARED_MEMORY),
        (second, CacheSource.GRPC),
    ):
        cache = CacheOptions(sources=frozenset({source}), decode_worker=worker)
        warm = system.client.generate(prompt, sampling=SHORT, cache=cache)
        assert warm.token_ids == cold.token_ids
        assert warm.decode_worker == worker
        assert warm.usage.cached.by_source()[source] == warm.usage.cached.total
        assert full - BLOCK_TOKENS <= warm.usage.cached.total <= full


def test_clients_that_leave_end_the_work_on_the_workers(system: LocalSystem):
    """Fails when leaving is lost in the proxy or the gateway."""
    work = WorkForNobody(system)
    for num_events in range(1, 7):
        stream = system.client.stream("Hello", sampling=Sampling(max_tokens=LONG, ignore_eos=True))
        events = iter(stream)
        for _ in range(num_events):
            next(events)
        stream.close()
    work.check_given_up()


def test_a_stopped_worker_is_given_up_after_a_bounded_wait(system: LocalSystem):
    """Fails when a call waits for a worker that does not even accept it: to Serve, a paused process is a busy one."""
    worker = system.worker_ids("decode")[0]
    pid = system.worker_pid(worker)
    by_it = CacheOptions(decode_worker=worker)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(WorkerUnavailable):  # at its deadline it would be DeadlineExceeded
            system.client.generate("Hello", sampling=SHORT, cache=by_it, timeout_s=PATIENCE_S)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: worker in system.worker_ids("decode"), what="the worker announced again")
    again = when_known(lambda: system.client.generate("Hello", sampling=SHORT, cache=by_it))
    assert again.decode_worker == worker


def test_killing_a_decode_worker_costs_a_retry_and_no_more(system: LocalSystem):
    """Fails when a dead worker's calls wait for it, or Serve does not bring a new one."""
    wait_until_known(system, workers=2)
    prompt, before = make_prompt("worker kill"), system.worker_ids("decode")
    cold = system.client.generate(prompt, sampling=SHORT)
    os.kill(system.worker_pid(cold.decode_worker), signal.SIGKILL)
    began = time.monotonic()
    again = system.client.generate(prompt, sampling=SHORT, timeout_s=60)
    assert time.monotonic() - began < WORKER_ACCEPT_TIMEOUT_MS / 1000, "it was waited for"
    assert again.token_ids == cold.token_ids
    assert again.decode_worker != cold.decode_worker
    assert again.usage.cached.shared_memory >= 4 * BLOCK_TOKENS

    def replaced() -> bool:
        now = system.worker_ids("decode")
        return len(now) == 2 and cold.decode_worker not in now

    wait_until(replaced, what=f"two decode workers again after killing one of {before}")
    (new,) = set(system.worker_ids("decode")) - set(before)
    by_new = CacheOptions(decode_worker=new)
    warm = when_known(lambda: system.client.generate(prompt, sampling=SHORT, cache=by_new))
    assert warm.token_ids == cold.token_ids
    assert warm.usage.cached.shared_memory >= 4 * BLOCK_TOKENS


def test_killing_the_store_node_costs_hits_only_until_it_is_back(system: LocalSystem):
    """Fails when the actor is not restarted, or does not find the arena's blocks again."""
    wait_until_known(system, workers=2)
    prompt, (worker, _) = make_prompt("store kill"), system.worker_ids("decode")
    memory = CacheOptions(sources=frozenset({CacheSource.SHARED_MEMORY}), decode_worker=worker)
    cold = system.client.generate(prompt, sampling=SHORT)
    (node,) = system.client.status().store_nodes
    os.kill(node.pid, signal.SIGKILL)
    meanwhile = system.client.generate(prompt, sampling=SHORT, cache=memory, timeout_s=60)
    assert meanwhile.token_ids == cold.token_ids

    def is_back() -> bool:
        now = system.client.status().store_nodes
        return len(now) == 1 and now[0].incarnation > node.incarnation

    wait_until(is_back, what="the store node under a new incarnation")

    def hits_again() -> bool:
        warm = system.client.generate(prompt, sampling=SHORT, cache=memory)
        assert warm.token_ids == cold.token_ids
        return warm.usage.cached.shared_memory >= 4 * BLOCK_TOKENS

    wait_until(hits_again, what="hits from the re-attached arena")


def test_killing_the_index_costs_hits_only_until_it_is_filled_again(system: LocalSystem):
    """Fails when the supervisor does not start it again on its port, or its holders do not register anew."""
    prompt = make_prompt("index kill")
    wait_until_known(system, workers=2)
    cold = system.client.generate(prompt, sampling=SHORT)
    other = next(worker for worker in system.worker_ids("decode") if worker != cold.decode_worker)
    memory = CacheOptions(sources=frozenset({CacheSource.SHARED_MEMORY}), decode_worker=other)

    def hits(cache: CacheOptions) -> bool:
        warm = when_known(lambda: system.client.generate(prompt, sampling=SHORT, cache=cache))
        assert warm.token_ids == cold.token_ids
        return warm.usage.cached.shared_memory >= 4 * BLOCK_TOKENS

    wait_until(lambda: hits(memory), what="blocks in a store node that was killed in the test before")
    (valkey,) = [pid for pid, command in processes_of(system.state.instance_id).items() if "valkey-server" in command]
    os.kill(valkey, signal.SIGKILL)
    assert system.client.generate(prompt, sampling=SHORT, timeout_s=60).token_ids == cold.token_ids

    def all_known_again() -> bool:
        now = system.client.status()
        return now.index_available and len(now.workers) == 3 and len(now.store_nodes) == 1

    wait_until(all_known_again, what="every member registered again")
    # What a miss computes is not published: hits can only come from what the holders have registered anew.
    silent = replace(memory, publish=False)
    wait_until(lambda: hits(silent), what="hits by the index that is filled again, at either gateway")


def test_down_leaves_no_process_no_port_and_no_file(system: LocalSystem):
    """Fails for any process of the instance that outlives `down`, whoever started it."""
    state = system.state
    ours = processes_of(state.instance_id)
    assert any("valkey" in command for command in ours.values())
    assert sum("ray::" in command for command in ours.values()) >= 6
    assert Path(state.arena_path).exists()

    assert down(system.state_dir, report=print)

    assert not processes_of(state.instance_id)
    assert not [pid for pid in ours if Path(f"/proc/{pid}").exists()]
    assert not Path(state.arena_path).exists()
    assert not Path(state.ray_temp_dir).exists()
    assert not list(Path("/dev/shm").glob(f"*{state.instance_id}*"))
    for address in (state.http_url.removeprefix("http://"), state.grpc_target, state.redis_url[8:].split("/")[0]):
        host, _, port = address.partition(":")
        with socket.socket() as probe:
            assert probe.connect_ex((host, int(port))) != 0, f"something still listens on {address}"
    assert not down(system.state_dir, report=print)


def discover(channel: grpc.Channel, service: str, method: str) -> tuple[set[str], MethodDescriptor]:
    """Ask a server by reflection for its services and one method's descriptor, with a pool of our own."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=service),
    ]
    listing, files = stub.ServerReflectionInfo(iter(requests), timeout=60)
    pool = descriptor_pool.DescriptorPool()
    for packed in files.file_descriptor_response.file_descriptor_proto:
        pool.Add(FileDescriptorProto.FromString(packed))
    found = pool.FindServiceByName(service).FindMethodByName(method)
    return {entry.name for entry in listing.list_services_response.service}, found

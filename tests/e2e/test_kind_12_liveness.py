"""Who is quiet is not dead, and a client that keeps pinging is not cut off."""

import threading
import time

import grpc
from live_load import ask, make_token_ids
from local_system import BLOCK_TOKENS, LocalSystem

from headrace.core.limits import MEMBER_TTL_MS
from headrace.wire.v1 import inference_pb2, inference_pb2_grpc

FAST_PINGS = (
    ("grpc.keepalive_time_ms", 500),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


def test_longer_than_a_record_lives_without_traffic_changes_nothing(system: LocalSystem):
    """Fails when liveness is judged by traffic. Beside it a third party's client pings twice a second without calls:
    fails when it is not served after that (the proxy may tell it to slow down)."""
    prompt = make_token_ids(5 * BLOCK_TOKENS + 1, seed=120_000)
    cold = ask(system, prompt)
    before = system.client.status()
    with grpc.insecure_channel(system.state.grpc_target, options=FAST_PINGS) as channel:
        models = inference_pb2_grpc.InferenceStub(channel)
        models.ListModels(inference_pb2.ListModelsRequest(), timeout=60)
        threading.Event().wait(1.5 * MEMBER_TTL_MS / 1000)
        models.ListModels(inference_pb2.ListModelsRequest(), timeout=60, wait_for_ready=True)
    after = system.client.status()
    assert [(w.worker_id, w.pid) for w in after.workers] == [(w.worker_id, w.pid) for w in before.workers]
    assert [(n.node_id, n.incarnation) for n in after.store_nodes] == [
        (n.node_id, n.incarnation) for n in before.store_nodes
    ]
    began_s = time.monotonic()
    warm = ask(system, prompt)
    assert (warm.token_ids, warm.usage.cached.total) == (cold.token_ids, 5 * BLOCK_TOKENS)
    assert time.monotonic() - began_s < 30

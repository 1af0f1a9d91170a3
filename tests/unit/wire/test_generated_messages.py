"""Generated messages can be pickled, since Ray Serve's gRPC proxy hands them to the gateway that way."""

import pickle

import pytest

from headrace.wire.v1 import admin_pb2, block_store_pb2, inference_pb2


@pytest.mark.parametrize(
    "message",
    [
        inference_pb2.GenerateRequest(model="m", sampling=inference_pb2.Sampling(max_tokens=3)),
        admin_pb2.EvictRequest(dry_run=True),
        block_store_pb2.FetchRequest(lease_id="l"),
    ],
    ids=lambda m: type(m).__name__,
)
def test_a_message_survives_pickling(message):
    """Fails when the class names a module that does not exist: protoc derives it from the proto's path."""
    assert pickle.loads(pickle.dumps(message)) == message

"""Prefixes go from host to host over gRPC, and nothing that happens to hosts or links changes an answer.

The tests share one cluster and are in the order of what they do to it.
"""

import pytest
from fleet import BLOCK_TOKENS, Fleet, make_prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
BLOCKS = 6
HIT = BLOCKS * BLOCK_TOKENS


def test_a_prefix_of_another_host_comes_over_grpc_and_one_of_the_own_host_through_memory(fleet: Fleet):
    """Fails when a worker takes another host's memory for its own, reads its own node over the network, or counts a
    block that it did not get."""
    prompt = make_prompt(HIT + 1, seed=1)
    expected = fleet.cold(prompt)
    first = fleet.ask(prompt, on=fleet.a)
    assert first.usage.cached.total == 0
    there = fleet.ask(prompt, on=fleet.b)
    assert (there.usage.cached.grpc, there.usage.cached.total) == (HIT, HIT)
    again = fleet.ask(prompt, on=fleet.b)
    assert (again.usage.cached.device, again.usage.cached.total) == (HIT, HIT)
    assert first.token_ids == there.token_ids == again.token_ids == expected


def test_each_host_has_its_own_store_node_which_its_workers_use(fleet: Fleet):
    """Fails when hosts share a node, or a worker publishes to another host's."""
    nodes = {node.node_id: node for node in fleet.client.status().store_nodes}
    assert {"a", "b"} <= set(nodes)
    assert nodes["a"].host != nodes["b"].host
    assert nodes["b"].address.startswith(f"{fleet.b.address}:")
    assert len(fleet.workers(fleet.a)) == len(fleet.workers(fleet.b)) == len(fleet.workers(fleet.a, "prefill")) == 1

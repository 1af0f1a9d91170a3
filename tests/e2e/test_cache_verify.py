"""`headrace cache verify` on a live system: every worker, every source."""

import json

from click.testing import CliRunner
from local_system import LocalSystem

from headrace.admin.cli import main


def test_every_worker_is_asked_for_every_source_and_answers_alike(system: LocalSystem):
    """Fails when a worker or a source is left out, or the yardstick is not what is compared with."""
    done = CliRunner().invoke(main, ["cache", "verify", "--address", system.state.grpc_target, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["equal"]
    assert found["same_bits"]
    asked = {(check["worker"], check["source"]) for check in found["checks"]}
    sources = ["cold", "device", "shared_memory"] + ["hand_off"] * bool(system.worker_ids("prefill"))
    assert asked == {(worker, source) for worker in system.worker_ids("decode") for source in sources}
    assert {check["expected_tokens"] for check in found["checks"]} == {0, 96}
    assert all(check["reused_tokens"] in (0, 96) for check in found["checks"])

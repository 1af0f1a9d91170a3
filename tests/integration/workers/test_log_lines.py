"""What a whole system logs of requests: which one it was about, and nothing of what was in it."""

import io
import json
import logging

import pytest

from headrace.core.tenants import HashedKey, new_key
from headrace.telemetry.logs import set_up_logs

from .traced_system import composed_system

SECRET = "a secret that nobody may log: "
PROMPT = SECRET + "0123456789abcdef" * 8


@pytest.fixture
def written():
    root, ours = logging.getLogger(), logging.getLogger("headrace")
    before, level = list(root.handlers), ours.level
    stream = io.StringIO()
    set_up_logs("json", part="test", stream=stream)
    ours.setLevel(logging.DEBUG)
    yield stream
    root.handlers[:] = before
    ours.setLevel(level)


async def test_log_lines_name_the_request_and_never_its_text_or_key(tiny_models, empty_valkey_url, tmp_path, written):
    """Fails when a record has a prompt, an answer or an API key in it, or a fault's line does not say whose it is."""
    key, other = new_key(), new_key()
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(f"tenants: [{{name: one, role: user, keys: ['{HashedKey.of(key).spell()}']}}]")
    settings = {"tenants_file": str(tenants), "hash_algorithm": "sha256"}
    async with composed_system(tiny_models, empty_valkey_url, tmp_path, **settings) as system:
        bearer = {"authorization": f"Bearer {key}"}
        answered = await system.complete(PROMPT, max_tokens=24, **bearer)
        assert answered.status_code == 200, answered.text
        assert (await system.complete(PROMPT, authorization=f"Bearer {other}")).status_code == 401
        assert (await system.complete(PROMPT * 100, **bearer)).status_code == 400
        system.calls.fails = True
        assert (await system.complete(PROMPT, **bearer)).status_code >= 500
    text = written.getvalue()
    entries = [json.loads(line) for line in text.splitlines()]
    about = [entry for entry in entries if "attempt at decode-1 failed" in entry["message"]]
    assert about
    assert all(entry["request_id"] and entry["request_id"] in entry["message"] for entry in about)
    for unwanted in (SECRET, "0123456789abcdef", key, other, answered.json()["choices"][0]["text"]):
        assert unwanted not in text
        assert json.dumps(unwanted)[1:-1] not in text

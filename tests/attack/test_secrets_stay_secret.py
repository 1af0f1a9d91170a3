"""Secrets are planted wherever this system has any, everything is done with it that shows something, and then they are
looked for in all that was said, logged, answered and written."""

import asyncio
import json
import logging
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

import attacks
import grpc
import pytest
import yaml
from attacked_system import ATTACKER, OPERATOR, VICTIM, attacked_system
from click.testing import CliRunner
from restricted_redis import ask

from headrace.admin.cli import main
from headrace.core.errors import ConfigInvalid, HeadraceError
from headrace.index.redis_keys import acl_rules
from headrace.index.remove_own_keys import remove_own_keys
from headrace.wire.v1 import admin_pb2

# One for each place, so that a finding says which.
REDIS, HUB, SALT, PROMPT_SECRET = "canary-redis-4711", "hf_canary-hub-4712", "canary-salt-4713", "canary-prompt-4714"
WRONG_KEY = "hr-canary-wrong-key-4715-" + "x" * 20

# Every command that asks a running gateway, or reads settings.
COMMANDS = (
    ["config", "show"],
    ["config", "show", "--json"],
    ["status"],
    ["status", "--json"],
    ["doctor"],
    ["doctor", "--json"],
    ["doctor", "--fix"],
    ["models"],
    ["tenants", "ls"],
    ["tenants", "ls", "--json"],
    ["tenants", "quota", VICTIM, "--max", "1GB"],
    ["cache", "ls"],
    ["cache", "ls", "--json"],
    ["cache", "stat"],
    ["cache", "evict", "--all", "--yes"],
    ["nodes", "ls"],
    ["status", "--address", "127.0.0.1:9"],
)


def spelled(secret: str) -> tuple[str, ...]:
    """As it is, and as it stands in a URL or in hexadecimal."""
    return (secret, secret.replace("-", "%2D"), secret.encode().hex())


@pytest.fixture
def secret_url(valkey_url):
    """The run's server, for a user whose password is a secret."""
    assert ask(valkey_url, f"ACL SETUSER canary reset on >{REDIS} {acl_rules()}") == "+OK\r\n"
    server = urlsplit(valkey_url)
    return f"redis://canary:{REDIS}@{server.hostname}:{server.port}{server.path}"


async def test_no_secret_is_in_anything_that_is_said_logged_answered_or_written(
    model_path, tmp_path, secret_url, caplog, monkeypatch
):
    """Fails when a command, a log line, an error, an answer, a metric or a file holds what it should not."""
    caplog.set_level(logging.DEBUG)
    said: list[str] = []
    async with attacked_system(model_path, tmp_path) as system:
        secrets = [REDIS, HUB, SALT, PROMPT_SECRET, WRONG_KEY, *system.keys.values()]
        monkeypatch.setenv("HEADRACE_REDIS_URL", secret_url)
        monkeypatch.setenv("HEADRACE_TENANTS_FILE", str(tmp_path / "tenants.yaml"))
        monkeypatch.setenv("HEADRACE_HASH_ALGORITHM", "sha256")
        monkeypatch.setenv("HF_TOKEN", HUB)
        monkeypatch.setenv("HEADRACE_API_KEY", system.keys[OPERATOR])
        said += await served_and_refused(system)
        address = f"127.0.0.1:{system.grpc_port}"
        for command in COMMANDS:
            asked = [] if command[0] == "config" or "--address" in command else ["--address", address]
            done = await asyncio.to_thread(CliRunner().invoke, main, [*command, *asked])
            said += [done.output, repr(done.exception)]
        monkeypatch.setenv("HEADRACE_API_KEY", WRONG_KEY)
        done = await asyncio.to_thread(CliRunner().invoke, main, ["cache", "stat", "--address", address])
        said += [done.output, repr(done.exception)]
        said += [str(system.counts())]
    said += await node_process(tmp_path, secret_url)
    said += await refused_settings(tmp_path, secret_url)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name not in ("broken.yaml", "node.yaml")]
    said += [path.read_bytes().decode(errors="replace") for path in files]
    said += [record.getMessage() + str(record.exc_info) for record in caplog.records]
    # Everything was in fact done: without these the test would say nothing.
    assert any("no or unknown key" in text for text in said)
    assert any("redis://canary:***@" in text for text in said)
    found = {(secret, text[:200]) for text in said for secret in secrets for one in spelled(secret) if one in text}
    assert not found


async def served_and_refused(system) -> list[str]:
    """Answers and errors of both APIs, with keys that are right and wrong."""
    said = []
    body = {"model": "tiny", "prompt": PROMPT_SECRET, "max_tokens": 2, "cache_salt": SALT}
    async with system.http() as http:
        for headers in (system.as_(VICTIM), {"authorization": f"Bearer {WRONG_KEY}"}, {"authorization": WRONG_KEY}):
            for sent in (body, {**body, "model": "other"}, {**body, "max_tokens": 10**9}, {**body, "stream": True}):
                reply = await http.post("/v1/completions", json=sent, headers=headers)
                said.append(reply.text + str(reply.headers))
        for path in ("/metrics", "/ready", "/v1/models/other"):
            reply = await http.get(path, headers=system.as_(ATTACKER))
            said.append(reply.text)
    request = admin_pb2.EvictRequest(selector=admin_pb2.Selector(prefix_text=PROMPT_SECRET))
    for metadata in (attacks.metadata(system, OPERATOR), (("authorization", f"Bearer {WRONG_KEY}"),)):
        try:
            said.append(str(await system.admin.Evict(request, metadata=metadata)))
        except grpc.aio.AioRpcError as refused:
            said.append(f"{refused.details()} {refused.trailing_metadata()}")
    return said


async def node_process(directory: Path, redis_url: str) -> list[str]:
    """A store node as a process of its own: with its settings, and with a Redis that refuses its password."""
    said = []
    for url in (redis_url, redis_url.replace("canary:", "nobody:")):
        settings = directory / "node.yaml"
        settings.write_text(
            yaml.safe_dump({"redis_url": url, "node_id": "secret", "arena_mb": 1, "arena_dir": str(directory)})
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "headrace.store.service", "--config", str(settings), "--remove-arena-on-exit",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        async with asyncio.timeout(120):
            first = await process.stdout.readline()
            assert first, await process.stderr.read()
            assert json.loads(first)["node_id"] == "secret"
            process.terminate()
            out, err = await process.communicate()
        said += [first.decode(), out.decode(), err.decode()]
    return said


async def refused_settings(directory: Path, redis_url: str) -> list[str]:
    """What is said of settings that cannot be used."""
    said = []
    broken = directory / "broken.yaml"
    broken.write_text(f"redis_url: redis://u:{REDIS}@h\n  tenants_file: [\n")
    keys = directory / "keys.yaml"
    keys.write_text("tenants: [{name: a, keys: ['sha256:x']}]")
    odd = (f"redis://u:{REDIS}/x@h:1/0", f"http://u:{REDIS}@h", f"redis://h/0?password={REDIS}&x={REDIS}")
    for command in (["config", "show", "--config", str(broken)], ["config", "show", "--redis-url", redis_url]):
        done = await asyncio.to_thread(CliRunner().invoke, main, command)
        said += [done.output, repr(done.exception)]
    for url in odd:
        try:
            await remove_own_keys(url, deadline_s=0.1)
        except (ConfigInvalid, HeadraceError) as refused:
            said.append(str(refused))
    return said

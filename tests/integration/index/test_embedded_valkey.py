"""The embedded server comes up, stays on its port, and never outlives its owner."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from headrace.index.embedded_valkey import EmbeddedValkey, EmbeddedValkeyFailed

OWNER = """
import sys, time
from headrace.index.embedded_valkey import EmbeddedValkey
server = EmbeddedValkey()
server.start()
print(server.pid, flush=True)
time.sleep(60)
"""


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_false(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 60
    while condition():
        assert time.monotonic() < give_up_at, "still so after a minute"
        time.sleep(0.01)


def test_it_dies_with_its_owner_even_by_kill_nine():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    try:
        pid = int(owner.stdout.readline())
        assert is_running(pid)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    wait_until_false(lambda: is_running(pid))


def test_it_outlives_the_thread_that_started_it():
    # The kernel's parent-death signal goes by thread: fails when start() forks from the caller's own.
    server = EmbeddedValkey()
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    time.sleep(0.1)
    assert server.alive()
    server.stop()


def test_stop_ends_the_process_also_when_it_is_paused_and_may_be_repeated():
    server = EmbeddedValkey()
    server.start()
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    server.stop()
    server.stop()
    assert not is_running(pid)
    assert not server.alive()


def test_it_comes_back_on_the_same_port_after_a_crash():
    with EmbeddedValkey() as server:
        url = server.url
        os.kill(server.pid, signal.SIGKILL)
        wait_until_false(server.alive)
        assert server.start() == url
        assert server.alive()


def test_a_port_that_is_taken_is_named_in_the_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(EmbeddedValkeyFailed, match="in use"):
            EmbeddedValkey(port=taken.getsockname()[1]).start()


def test_two_servers_take_two_ports():
    with EmbeddedValkey() as one, EmbeddedValkey() as other:
        assert one.url != other.url

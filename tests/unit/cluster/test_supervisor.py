"""What the supervisor makes of ports and of remote tracebacks."""

import socket

import pytest

from headrace.config import GatewaySettings
from headrace.core.errors import ConfigInvalid
from headrace_cluster.hold_port import can_bind, hold_free_port, hold_port
from headrace_cluster.supervisor import last_error

REMOTE = """The deployment failed to start 1 times in a row. Error:
\x1b[36mray::ServeReplica:headrace:DecodeWorker.initialize_and_get_metadata()\x1b[39m (pid=1, ip=10.0.0.1)
  File "/x/load_model.py", line 3, in load_model
    raise ModelRefused("bad", "no such directory")
                       ^^^^^^^^^^^^^^^^^^^
headrace.core.errors.ModelRefused: model 'bad' is refused: no such directory"""


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (REMOTE, "ModelRefused: model 'bad' is refused: no such directory"),
        ("Traceback\n  File 1\nValueError: bad\nmore of it", "ValueError: bad"),
        ("no traceback at all", "no traceback at all"),
        ("", "it gave no reason"),
    ],
)
def test_of_a_remote_traceback_the_error_itself_is_shown(message: str, shown: str):
    assert last_error(message) == shown


def test_a_port_that_something_listens_on_cannot_be_bound():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not can_bind("127.0.0.1", port)
    assert can_bind("127.0.0.1", port)


def test_a_port_that_is_held_is_nobodys_but_a_proxys_which_shares_it():
    """Fails when others can be given the port before a proxy listens, or one cannot listen while it is held."""
    with hold_free_port("127.0.0.1") as held, socket.socket() as proxy:
        address = held.getsockname()
        assert not can_bind(*address)
        proxy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        proxy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        proxy.bind(address)
        proxy.listen()
        for _ in range(8):  # none of them comes to the one that does not listen
            with socket.create_connection(address, timeout=60):
                proxy.accept()[0].close()
    assert can_bind(*address)


def test_two_systems_that_start_at_the_same_moment_choose_different_ports():
    """Fails when a default port is looked at and not held: Serve's proxies of both would share its calls."""
    wanted = GatewaySettings().http_port
    with hold_port("http_port", "127.0.0.1", wanted) as one, hold_port("http_port", "127.0.0.1", wanted) as other:
        ports = {held.getsockname()[1] for held in (one, other)}
        assert len(ports) == 2
        assert min(ports) >= wanted
        for taken in ports - {wanted}:
            with pytest.raises(ConfigInvalid, match=f"port {taken} is taken"):
                hold_port("http_port", "127.0.0.1", taken)


def test_a_port_on_which_connections_of_an_earlier_proxy_end_can_be_held():
    """Fails when a system that is stopped and started again gets other ports than before, for a minute."""
    with hold_free_port("127.0.0.1") as held, socket.socket() as proxy:
        address = held.getsockname()
        proxy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        proxy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        proxy.bind(address)
        proxy.listen()
        with socket.create_connection(address, timeout=60) as caller:
            proxy.accept()[0].close()  # who closes first keeps the port
            assert caller.recv(1) == b""
    with pytest.raises(OSError, match="in use"), socket.socket() as careless:
        careless.bind(address)
    with hold_free_port(*address):
        assert not can_bind(*address)

"""A user of a real Valkey that may do what the index does and nothing else, and what that server refused."""

import socket
from urllib.parse import urlsplit

from headrace.index.redis_keys import acl_rules

USER, PASSWORD = "headrace", "correct-horse-battery"


def restricted(url: str) -> str:
    """The URL of the same server for a user with the documented rules; what was refused before is forgotten."""
    server = urlsplit(url)
    assert ask(url, f"ACL SETUSER {USER} reset on >{PASSWORD} {acl_rules()}") == "+OK\r\n"
    assert ask(url, "ACL LOG RESET") == "+OK\r\n"
    return f"redis://{USER}:{PASSWORD}@{server.hostname}:{server.port}{server.path}"


def refused(url: str) -> str:
    """The server's ACL log as it is spelled on the wire; `*0` when nothing was refused."""
    return ask(url, "ACL LOG 50").strip()


def ask(url: str, command: str) -> str:
    """One command as the default user, who may do everything; the start of its reply."""
    server = urlsplit(url)
    with socket.create_connection((server.hostname, server.port), timeout=30) as connection:
        connection.sendall(f"{command}\r\n".encode())
        return connection.recv(65_536).decode(errors="replace")

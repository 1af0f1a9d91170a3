"""A user of a real Valkey that may do what the index does and nothing else, and what that server refused. Of a cluster
each server has its own users."""

import socket
from urllib.parse import urlsplit

from valkey_cluster import servers_in

from headrace.index.redis_keys import acl_rules

USER, PASSWORD = "headrace", "correct-horse-battery"


def restricted(url: str) -> str:
    """The URL of the same Redis for a user with the documented rules; what was refused before is forgotten."""
    parts = urlsplit(url)
    rules = acl_rules(in_cluster="cluster" in parts.scheme)
    for told in ask_each(url, f"ACL SETUSER {USER} reset on >{PASSWORD} {rules}"), ask_each(url, "ACL LOG RESET"):
        assert set(told) == {"+OK\r\n"}
    return parts._replace(netloc=f"{USER}:{PASSWORD}@{parts.netloc}").geturl()


def refused(url: str) -> str:
    """The servers' ACL logs as they are spelled on the wire; `*0` when nothing was refused."""
    return "\n".join({told.strip() for told in ask_each(url, "ACL LOG 50")})


def empty(url: str) -> None:
    """Remove all keys."""
    assert set(ask_each(url, "FLUSHALL")) == {"+OK\r\n"}


def ask(url: str, command: str) -> str:
    """One command as the default user, who may do everything; the start of its reply."""
    [reply] = ask_each(url, command)
    return reply


def ask_each(url: str, command: str) -> list[str]:
    """As `ask`, of each server that the URL names."""
    replies = []
    for server in servers_in(url):
        with socket.create_connection(server, timeout=30) as connection:
            connection.sendall(f"{command}\r\n".encode())
            replies.append(connection.recv(65_536).decode(errors="replace"))
    return replies

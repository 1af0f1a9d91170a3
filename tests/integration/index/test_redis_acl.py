"""The ACL user of docs/security.md: it can do all that the index does, and nothing else; the conformance suite runs as
this user too."""

import ast
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from patient_redis import patient_connections
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError
from restricted_redis import PASSWORD, USER, ask, refused, restricted

from headrace.core.clock import SystemClock
from headrace.core.errors import IndexUnavailable
from headrace.index import redis_keys
from headrace.index.redis_keys import CLUSTER_COMMANDS, COMMANDS, acl_rules
from headrace.index.remove_own_keys import remove_own_keys

INDEX = Path(redis_keys.__file__).parent
DOCS = Path(__file__).parents[3] / "docs"


def test_the_commands_of_the_code_are_those_of_the_line():
    """Fails when the index asks for something that the documented user may not do, or the user may do more."""
    words = set()
    for source in INDEX.glob("*.py"):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Tuple) and node.elts and isinstance(node.elts[0], ast.Constant):
                first = node.elts[0].value
                if isinstance(first, str) and re.fullmatch(r"[A-Z]{3,}", first):
                    has_two = first in ("XINFO", "CLUSTER")
                    words.add(f"{first}|{node.elts[1].value}".lower() if has_two else first.lower())
    for script in (INDEX / "scripts").glob("*.lua"):
        text = script.read_text(encoding="utf-8")
        for command, after in re.findall(r"(?:redis\.p?call|replacing_junk)\(\s*'([A-Z]+)',\s*('[A-Z]+')?", text):
            words.add(f"{command}|{after.strip(chr(39))}".lower() if command == "XINFO" else command.lower())
    assert words - {"block"} == {*COMMANDS, *CLUSTER_COMMANDS}  # an argument of XREAD


@pytest.mark.parametrize("in_cluster", [False, True])
def test_the_documented_line_is_that_of_the_code(in_cluster):
    line = f"ACL SETUSER headrace on >PASSWORD {acl_rules(in_cluster=in_cluster)}\n"
    assert line in (DOCS / "security.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "command",
    [
        ("GET", "other"),
        ("SET", "hr2:x", "1"),
        ("DEL", "other"),
        ("KEYS", "*"),
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("CONFIG", "GET", "*"),
        ("ACL", "LIST"),
        ("CLIENT", "LIST"),
        ("SHUTDOWN",),
        ("PUBLISH", "c", "x"),
        ("SUBSCRIBE", "c"),
        ("MIGRATE", "h", "1", "hr1:x", "0", "1"),
        ("REPLICAOF", "h", "1"),
        ("MONITOR",),
        ("EVAL", "return redis.call('GET', KEYS[1])", 1, "other"),
        ("EVAL", "return redis.call('GET', 'other')", 0),
        ("EVAL", "return redis.call('FLUSHALL')", 0),
        ("SCRIPT", "FLUSH"),
        ("XINFO", "GROUPS", "hr1:x"),
    ],
    ids=lambda command: " ".join(map(str, command))[:40],
)
async def test_what_is_outside_the_line_is_refused(valkey_url, command):
    """Fails when somebody with the index's password can read or break what is not the index's."""
    connections = patient_connections(restricted(valkey_url), connections_max=1, clock=SystemClock())
    try:
        async with connections.call() as redis:
            [reply] = await redis.round_trip(command)
        assert isinstance(reply, ResponseError)
        assert isinstance(reply, NoPermissionError) or "permission" in str(reply).lower(), reply
        assert refused(valkey_url) != "*0"
    finally:
        await connections.close()


async def test_its_own_keys_can_be_removed_and_a_wrong_password_says_nothing_of_itself(valkey_url):
    """Fails when the end of a deployment needs more rights than its life, or the password is told in an error."""
    url = restricted(valkey_url)
    ask(valkey_url, "SET hr1:{members}:junk 1")
    ask(valkey_url, "SET other 1")
    assert await remove_own_keys(url, deadline_s=60) >= 1
    assert refused(valkey_url) == "*0"
    assert ask(valkey_url, "GET other") == "$1\r\n1\r\n"
    server = urlsplit(valkey_url)
    wrong = f"redis://{USER}:wrong-{PASSWORD}@{server.hostname}:{server.port}/0"
    with pytest.raises(IndexUnavailable) as told:
        await remove_own_keys(wrong, deadline_s=5)
    assert PASSWORD not in str(told.value)
    assert isinstance(told.value.__cause__, AuthenticationError) or "given up" in str(told.value)

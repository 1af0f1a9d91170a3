"""From a Redis URL to what makes connections: to one server, to the primary that Sentinels name, or to a cluster's.

Owns the spelling of URLs and how the Sentinels' primary is found; who holds connections, and for how long, is
`redis_server.py`, and where a cluster's keys lie `redis_cluster.py`.

    redis://[user:password@]host[:6379][/database]                  one server; rediss:// with TLS
    redis+sentinel://[user:password@]host[:26379][,host...]/name[/database]
                                                                    the primary called `name`; rediss+sentinel:// with
                                                                    TLS to the servers and to the Sentinels
    redis+cluster://[user:password@]host[:6379][,host...]           Redis Cluster, which any of these servers knows, and
                                                                    any other under the same user; rediss+cluster://
                                                                    with TLS to all of them

Options follow a `?`, such as ssl_ca_certs; `sentinel_username` and `sentinel_password` are for the Sentinels, which
otherwise are asked without.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit, urlunsplit

from redis.asyncio.connection import AbstractConnection, ConnectionPool, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from headrace.core.errors import ConfigInvalid

SERVER_PORT = 6_379
SENTINEL_PORT = 26_379
SENTINEL_SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
CLUSTER_SCHEMES = {"redis+cluster": "redis", "rediss+cluster": "rediss"}


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class ClusterFactory:
    """Makes connections to each server of a cluster; `seeds` are those that the URL names."""

    seeds: tuple[Address, ...]
    connection_class: type[AbstractConnection]
    options: Mapping[str, Any]

    def server(self, address: Address) -> ConnectionPool:
        """What makes connections to this one."""
        return ConnectionPool(self.connection_class, **self.options, host=address.host, port=address.port)


class _UrlRefused(ValueError):
    """What we have to say of a URL, without any of its secrets."""


def connection_factory(redis_url: str, *, timeout_ms: int) -> ConnectionPool | ClusterFactory:
    """What makes connections for this URL; nothing connects yet.

    RESP2 without client information: a new connection needs no round trip before its first command (with a password or
    a database number it needs one). timeout_ms: of a whole call; one Sentinel that is away takes a share of it only, so
    that the next can still be asked. Raises ConfigInvalid when the URL cannot be read.
    """
    try:
        parts = urlsplit(redis_url)
        if parts.scheme in SENTINEL_SCHEMES:
            return _primary_of_sentinels(parts, timeout_ms=timeout_ms)
        if parts.scheme in CLUSTER_SCHEMES:
            return _servers_of_cluster(parts)
        if "," in parts.netloc:
            raise _UrlRefused("several servers are a cluster's, redis+cluster://, or Sentinels, redis+sentinel://")
        pool = ConnectionPool.from_url(redis_url, **_connection_options())
        _check_options(pool, pool.connection_kwargs)
        return pool
    except _UrlRefused as refused:
        raise ConfigInvalid("redis_url", f"cannot be read: {refused}") from None
    except ValueError:
        # The parser's own message may quote the part of a password that it took for a port.
        why = "Port, scheme or an option is wrong; a password with / ? # @ or % in it must be percent-encoded"
        raise ConfigInvalid("redis_url", f"cannot be read: {why}") from None


def _check_options(pool: ConnectionPool, options: Mapping[str, Any]) -> None:
    """Its connections can be made with these: an option that there is not shows only then."""
    try:
        pool.connection_class(**options)
    except TypeError:
        raise _UrlRefused("an option behind its ? is not known") from None
    except RedisError:  # of TLS
        raise _UrlRefused("an option behind its ? has no such value") from None


def _connection_options() -> dict[str, Any]:
    return {
        "protocol": 2,
        "driver_info": None,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": None,
        "socket_connect_timeout": None,
    }


def _primary_of_sentinels(parts: SplitResult, *, timeout_ms: int) -> ConnectionPool:
    name, _, database = parts.path.strip("/").partition("/")
    if not name:
        raise _UrlRefused("the primary's name is missing, as in redis+sentinel://HOST:26379/NAME")
    addresses = _addresses(parts, port=SENTINEL_PORT)
    read, options = _read_as_one(parts, SENTINEL_SCHEMES[parts.scheme], database)
    with_tls = issubclass(read.connection_class, SSLConnection)
    asking = {key: value for key, value in options.items() if key.startswith("ssl_")} | {"ssl": with_tls}
    for key in ("username", "password"):
        asking[key] = options.pop(f"sentinel_{key}", None)
    each_s = timeout_ms / 1000 / (1 + len(addresses))
    asking |= {"protocol": 2, "driver_info": None, "retry": Retry(NoBackoff(), 0)}
    asking |= {"socket_timeout": each_s, "socket_connect_timeout": each_s}
    _check_options(read, options)  # those of Sentinels are among them
    sentinel = Sentinel(addresses, sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
    return SentinelConnectionPool(name, sentinel, ssl=with_tls, **options)  # type: ignore[no-untyped-call]


def _servers_of_cluster(parts: SplitResult) -> ClusterFactory:
    read, options = _read_as_one(parts, CLUSTER_SCHEMES[parts.scheme], "")
    if parts.path.strip("/") not in ("", "0") or options.pop("db", 0):
        raise _UrlRefused("of a cluster only database 0 is used")
    _check_options(read, options)
    return ClusterFactory(tuple(_addresses(parts, port=SERVER_PORT)), read.connection_class, options)


def _read_as_one(parts: SplitResult, scheme: str, database: str) -> tuple[ConnectionPool, dict[str, Any]]:
    """All that such a URL says but for its hosts, which is as in a plain one: what connects, and with which options."""
    credentials, at, _ = parts.netloc.rpartition("@")
    plain = (scheme, f"{credentials}{at}server", f"/{database}", parts.query, "")
    read = ConnectionPool.from_url(urlunsplit(plain), **_connection_options())
    return read, {key: value for key, value in read.connection_kwargs.items() if key not in ("host", "port")}


def _addresses(parts: SplitResult, *, port: int) -> list[Address]:
    """Those between commas; an IPv6 address stands in brackets."""
    found = []
    for host in parts.netloc.rpartition("@")[2].split(","):
        read = urlsplit(f"//{host}")
        if not read.hostname:
            raise _UrlRefused("a part between commas is no address of a server")
        found.append(Address(read.hostname, read.port or port))
    return found

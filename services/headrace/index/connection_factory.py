"""From a Redis URL to what makes connections: to one server, or to the primary that Sentinels name.

Owns the spelling of URLs and how the primary is found; who holds connections, and for how long, is
`redis_connections.py`.

    redis://[user:password@]host[:6379][/database]                  one server; rediss:// with TLS
    redis+sentinel://[user:password@]host[:26379][,host...]/name[/database]
                                                                    the primary called `name`; rediss+sentinel:// with
                                                                    TLS to the servers and to the Sentinels

Options follow a `?`, such as ssl_ca_certs; `sentinel_username` and `sentinel_password` are for the Sentinels, which
otherwise are asked without. Redis Cluster is not spoken: a lookup and the members lie in different slots, and one call
here is one connection.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from redis.asyncio.connection import ConnectionPool, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff

from headrace.core.errors import ConfigInvalid

SENTINEL_PORT = 26_379
SENTINEL_SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}


class _UrlRefused(ValueError):
    """What we have to say of a URL, without any of its secrets."""


def connection_factory(redis_url: str, *, timeout_ms: int) -> ConnectionPool:
    """What makes connections for this URL; nothing connects yet.

    RESP2 without client information: a new connection needs no round trip before its first command (with a password or
    a database number it needs one). timeout_ms: of a whole call; one Sentinel that is away takes a share of it only, so
    that the next can still be asked. Raises ConfigInvalid when the URL cannot be read.
    """
    try:
        parts = urlsplit(redis_url)
        if parts.scheme in SENTINEL_SCHEMES:
            return _primary_of_sentinels(redis_url, timeout_ms=timeout_ms)
        if "cluster" in parts.scheme or "," in parts.netloc:
            raise _UrlRefused("Redis Cluster is not spoken; name one server, or Sentinels by redis+sentinel://")
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


def _connection_options() -> dict[str, Any]:
    return {
        "protocol": 2,
        "driver_info": None,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": None,
        "socket_connect_timeout": None,
    }


def _primary_of_sentinels(redis_url: str, *, timeout_ms: int) -> ConnectionPool:
    parts = urlsplit(redis_url)
    credentials, at, hosts = parts.netloc.rpartition("@")
    name, _, database = parts.path.strip("/").partition("/")
    if not name:
        raise _UrlRefused("the primary's name is missing, as in redis+sentinel://HOST:26379/NAME")
    addresses = [_address(host) for host in hosts.split(",")]
    # All but the hosts is as in a plain URL, so it is read as one.
    plain = (SENTINEL_SCHEMES[parts.scheme], f"{credentials}{at}server", f"/{database}", parts.query, "")
    read = ConnectionPool.from_url(urlunsplit(plain), **_connection_options())
    options = {key: value for key, value in read.connection_kwargs.items() if key not in ("host", "port")}
    with_tls = issubclass(read.connection_class, SSLConnection)
    asking = {key: value for key, value in options.items() if key.startswith("ssl_")} | {"ssl": with_tls}
    for key in ("username", "password"):
        asking[key] = options.pop(f"sentinel_{key}", None)
    each_s = timeout_ms / 1000 / (1 + len(addresses))
    asking |= {"protocol": 2, "driver_info": None, "retry": Retry(NoBackoff(), 0)}
    asking |= {"socket_timeout": each_s, "socket_connect_timeout": each_s}
    _check_options(read, options)  # those of Sentinels are among them
    sentinel = Sentinel(addresses, sentinel_kwargs=asking)
    return SentinelConnectionPool(name, sentinel, ssl=with_tls, **options)


def _address(host: str) -> tuple[str, int]:
    """Host and port of one Sentinel; an IPv6 address stands in brackets."""
    read = urlsplit(f"//{host}")
    if not read.hostname:
        raise _UrlRefused("a part between commas is no address of a Sentinel")
    return read.hostname, read.port or SENTINEL_PORT

"""What both clients put into a call: the message with its deadline, who calls, and the options of their channels."""

from dataclasses import dataclass
from typing import TypedDict

from headrace.client import messages
from headrace.client.values import ANY_CACHE, ANY_SAMPLING, CacheOptions, Prompt, Sampling
from headrace.core.errors import InvalidRequest
from headrace.core.limits import CLIENT_DEADLINE_GRACE_MS, GRPC_MESSAGE_BYTES_MAX, REQUEST_TIMEOUT_MS_DEFAULT
from headrace.core.tenants import is_usable_key
from headrace.transfer.tls_files import Tls, tls_of_client
from headrace.wire.v1 import inference_pb2

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", GRPC_MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", GRPC_MESSAGE_BYTES_MAX),
    # A client that outlives a restart of the gateway must find it again within seconds, not after minutes of back-off.
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


class Access(TypedDict, total=False):
    """How a client gets to its gateway; every one of these may be left out.

    api_key:      who calls, where the deployment has tenants; goes with every call.
    application:  which of the applications behind a Ray Serve proxy is meant, by its name there, where there are
                  several; goes with every call, and a proxy refuses a name that it does not serve.
    tls_ca_file:  authorities (PEM) of which the gateway's certificate must be; this makes it TLS. The files are read
                  again as they change.
    tls_cert_file, tls_key_file:  what this side shows where the gateway wants a certificate (PEM).
    """

    api_key: str
    application: str
    tls_ca_file: str
    tls_cert_file: str
    tls_key_file: str


class RequestOptions(TypedDict, total=False):
    """What a request may say beside its prompt; every one of these may be left out.

    model:       needed where more than one is served.
    sampling:    how tokens are chosen, and how many.
    cache:       what may be reused, what is left behind, and where it runs.
    timeout_s:   its deadline; None: the server's usual one.
    cache_salt:  blocks are shared with requests of the same salt only.
    priority:    -4..4, higher ones are computed first; None: the tenant's usual one.
    """

    model: str
    sampling: Sampling
    cache: CacheOptions
    timeout_s: float | None
    cache_salt: str
    priority: int | None


@dataclass(frozen=True, slots=True)
class Target:
    """Who is called, by what TLS (None: plain text), and what goes with every call."""

    address: str
    tls: Tls | None = None
    metadata: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """One generate call: the message, and its deadline in seconds."""

    request: inference_pb2.GenerateRequest
    timeout_s: float


def prepare_call(
    prompt: Prompt,
    *,
    model: str = "",
    sampling: Sampling = ANY_SAMPLING,
    cache: CacheOptions = ANY_CACHE,
    timeout_s: float | None = None,
    cache_salt: str = "",
    priority: int | None = None,
) -> PreparedCall:
    """Encode a call with its `RequestOptions`. The server gets the caller's time; the transport a little more, so that
    the server's own typed answer at the deadline still arrives. Raises InvalidRequest for what cannot be sent."""
    timeout_ms = REQUEST_TIMEOUT_MS_DEFAULT if timeout_s is None else max(1, round(timeout_s * 1e3))
    request = messages.generate_request_message(
        prompt,
        model=model,
        sampling=sampling,
        cache=cache,
        timeout_ms=timeout_ms,
        cache_salt=cache_salt,
        priority=priority,
    )
    return PreparedCall(request=request, timeout_s=(timeout_ms + CLIENT_DEADLINE_GRACE_MS) / 1e3)


def target_of(
    address: str,
    *,
    api_key: str = "",
    application: str = "",
    tls_ca_file: str = "",
    tls_cert_file: str = "",
    tls_key_file: str = "",
) -> Target:
    """What a client's address and its `Access` mean. Raises InvalidRequest for what cannot be a key or a name,
    ConfigInvalid naming a file that cannot be used."""
    tls = tls_of_client(ca_file=tls_ca_file, cert_file=tls_cert_file, key_file=tls_key_file)
    return Target(address=address, tls=tls, metadata=call_metadata(api_key, application))


def call_metadata(api_key: str, application: str = "") -> tuple[tuple[str, str], ...]:
    """What goes with every call: the API key, as HTTP clients send it, and the name that Serve's proxies go by."""
    if api_key and not is_usable_key(api_key):
        raise InvalidRequest(
            "this is no API key: keys are 20 or more signs of printable ASCII, without spaces", param="api_key"
        )
    if application and not _is_metadata(application):
        raise InvalidRequest("the name of an application is sent in printable ASCII", param="application")
    key = (("authorization", f"Bearer {api_key}"),) if api_key else ()
    return (*key, ("application", application)) if application else key


def _is_metadata(value: str) -> bool:
    """Whether gRPC sends it as it is: it drops spaces around a value."""
    return value.isascii() and value.isprintable() and value == value.strip()

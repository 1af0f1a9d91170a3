"""What both clients put into a call: the message with its deadline, who calls, and the options of their channels."""

from dataclasses import dataclass

from headrace.client import messages
from headrace.client.values import CacheOptions, Prompt, Sampling
from headrace.core.errors import InvalidRequest
from headrace.core.limits import CLIENT_DEADLINE_GRACE_MS, GRPC_MESSAGE_BYTES_MAX, REQUEST_TIMEOUT_MS_DEFAULT
from headrace.core.tenants import is_usable_key
from headrace.transfer.tls_files import Tls, TlsFiles, tls_of_client
from headrace.wire.v1 import inference_pb2

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", GRPC_MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", GRPC_MESSAGE_BYTES_MAX),
    # A client that outlives a restart of the gateway must find it again within seconds, not after minutes of back-off.
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


@dataclass(frozen=True, slots=True)
class Target:
    """Who is called, and the files of TLS by which; for the words of errors."""

    address: str
    tls_files: TlsFiles | None = None


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """One generate call: the message, and its deadline in seconds."""

    request: inference_pb2.GenerateRequest
    timeout_s: float


def prepare_call(
    prompt: Prompt,
    *,
    model: str,
    sampling: Sampling,
    cache: CacheOptions,
    timeout_s: float | None,
    cache_salt: str,
    priority: int | None = None,
) -> PreparedCall:
    """Encode a call. The server gets the caller's time; the transport a little more, so that the server's own typed
    answer at the deadline still arrives."""
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


def tls_to_use(address: str, *, ca_file: str, cert_file: str, key_file: str) -> tuple[Target, Tls | None]:
    """Whom these arguments of a client mean, and what it speaks. Raises ConfigInvalid naming a file that is wrong."""
    tls = tls_of_client(ca_file=ca_file, cert_file=cert_file, key_file=key_file)
    return Target(address=address, tls_files=None if tls is None else tls.files), tls


def call_metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    """What goes with every call: the API key, as HTTP clients send it; nothing without one."""
    if api_key and not is_usable_key(api_key):
        raise InvalidRequest(
            "this is no API key: keys are 20 or more signs of printable ASCII, without spaces", param="api_key"
        )
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()

"""Whether a certificate would be accepted, found out before anybody else has to: its key, its dates, its authority, its
names. The check is a handshake in memory, by the same library rules that peers go by, so nothing is parsed here.
"""

import ipaddress
import ssl
from collections.abc import Sequence
from typing import Any

from headrace.core.errors import ConfigInvalid

# Both ends say all they have in three turns each; a handshake that needs more does not end.
_TURNS_MAX = 10


def check_certificate(cert_file: str, key_file: str, *, ca_file: str = "", names: Sequence[str] = ()) -> float:
    """When the certificate ends, in seconds since 1970. Raises ConfigInvalid naming the setting, file and reason.

    ca_file: the authorities that peers go by; without it only key and dates are checked. names: hosts and IP addresses
    under which others call this one.
    """
    server, client = _both_ends(cert_file, key_file, ca_file)
    try:
        shown = _shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        by = f" by {ca_file}" if ca_file else ""
        raise ConfigInvalid(
            "tls_cert_file", f"{cert_file} would not be accepted{by}: {error.verify_message}"
        ) from error
    except ssl.SSLError as error:
        raise ConfigInvalid("tls_cert_file", f"{cert_file} cannot be used: {error.reason or error}") from error
    named = [value for kind, value in shown.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
    for name in names:
        if not any(_covers(each, name) for each in named):
            listed = ", ".join(named) or "none"
            raise ConfigInvalid(
                "tls_cert_file",
                f"{cert_file} does not name {name}, under which this host is called; it names: {listed}. "
                "Make one with that name among its subject alternative names",
            )
    return ssl.cert_time_to_seconds(shown["notAfter"])


def names_of(cert_file: str, key_file: str) -> tuple[str, ...]:
    """DNS names and IP addresses that a certificate is for. Raises ConfigInvalid."""
    try:
        shown = _shake_hands(*_both_ends(cert_file, key_file, ""))
    except ssl.SSLError as error:
        raise ConfigInvalid("tls_cert_file", f"{cert_file} cannot be used: {error.reason or error}") from error
    return tuple(value for kind, value in shown.get("subjectAltName", ()) if kind in ("DNS", "IP Address"))


def covers(names: Sequence[str], host: str) -> bool:
    """Whether a certificate with these names is for that host."""
    return any(_covers(name, host) for name in names)


def _both_ends(cert_file: str, key_file: str, ca_file: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    trusted = ca_file or cert_file
    try:
        client.load_verify_locations(cafile=trusted)
        if ca_file:  # among our own parts each is a server to some and a client of others
            server.verify_mode = ssl.CERT_REQUIRED
            server.load_verify_locations(cafile=ca_file)
        else:
            client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
        for end in (server, client):
            end.load_cert_chain(cert_file, key_file, password=_no_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigInvalid(
                "tls_key_file", f"{key_file} is not the key of the certificate in {cert_file}"
            ) from error
        raise ConfigInvalid("tls_key_file", f"{key_file} holds no PEM key without a passphrase") from error
    except OSError as error:
        raise ConfigInvalid("tls_key_file", f"{error.filename or key_file} cannot be read: {error.strerror}") from error
    return server, client


def _no_passphrase() -> str:
    """Instead of a question on the terminal that nobody reads."""
    return ""


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    """What the client learns of the server's certificate. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    of_client = client.wrap_bio(to_client, to_server)
    ends = [of_client, server.wrap_bio(to_server, to_client, server_side=True)]
    for _ in range(_TURNS_MAX):
        for end in tuple(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                continue
    assert not ends, "the handshake does not end"
    return of_client.getpeercert() or {}


def _covers(named: str, host: str) -> bool:
    """A name covers itself, and `*.` one label in its place; an address only itself."""
    try:
        return ipaddress.ip_address(named.strip()) == ipaddress.ip_address(host)
    except ValueError:
        pass
    named, host = named.lower().rstrip("."), host.lower().rstrip(".")
    if named.startswith("*."):
        return "." in host and host.partition(".")[2] == named[2:]
    return named == host

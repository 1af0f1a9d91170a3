"""TLS of servers that speak HTTP: an `ssl.SSLContext` that follows its files and tells of connections that it refused.

Each connection is made under the newest good set of files; those that are open keep what they began with. Knows nothing
of HTTP: whoever listens passes it to its server.
"""

import ssl
from collections.abc import Callable
from typing import Any

from headrace.config import NetworkSettings
from headrace.transfer.tls_files import Tls, TlsFiles, TlsMaterial

Refused = Callable[[str], None]
Shown = Callable[[float], None]

# Why a handshake failed, by what OpenSSL calls it; all else is "other".
REASONS = {
    "HTTP_REQUEST": "plain_text",
    "HTTPS_PROXY_REQUEST": "plain_text",
    "WRONG_VERSION_NUMBER": "plain_text",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "no_certificate",
    "CERTIFICATE_VERIFY_FAILED": "bad_certificate",
    "UNSUPPORTED_PROTOCOL": "old_version",
    # The other side refused ours, and said so.
    "TLSV1_ALERT_UNKNOWN_CA": "refused_by_client",
    "SSLV3_ALERT_BAD_CERTIFICATE": "refused_by_client",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "refused_by_client",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "refused_by_client",
}

# Handshakes that wait for the other side; anything else that a handshake raises is its end.
_UNDER_WAY = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


def metrics_context(network: NetworkSettings) -> "HttpsContext | None":
    """What whoever scrapes metrics meets: the parts' certificate; None, plain text, where none is set. It is asked for
    no certificate of its own, since whoever has one of `tls_ca_file` is let in by store nodes, and Prometheus need not
    be."""
    if not network.tls_cert_file:
        return None
    return HttpsContext(Tls(TlsFiles(cert_file=network.tls_cert_file, key_file=network.tls_key_file)))


class HttpsContext(ssl.SSLContext):
    """The context that a server is given, once. Safe for use from several threads."""

    def __new__(cls, *_: Any, **__: Any) -> "HttpsContext":
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, tls: Tls, *, refused: Refused | None = None, shown: Shown | None = None) -> None:
        """refused: called with one of REASONS' values, or "other", when a handshake fails. shown: called at each
        connection with when the certificate ends that it is shown, in seconds since 1970."""
        super().__init__()
        self._tls = tls
        self._refused = refused
        self._shown = shown
        self._material: TlsMaterial | None = None
        self._newest = self._renewed()

    @property
    def ends_unix_s(self) -> float:
        """When the certificate in force ends, in seconds since 1970."""
        return self._tls.current().ends_unix_s

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        """As SSLContext.wrap_bio, under the newest files; asyncio asks for this at each connection."""
        return self._renewed().wrap_bio(*arguments, **named)

    def wrap_socket(self, *arguments: Any, **named: Any) -> ssl.SSLSocket:
        """As SSLContext.wrap_socket, under the newest files."""
        return self._renewed().wrap_socket(*arguments, **named)

    def _renewed(self) -> ssl.SSLContext:
        """Made anew from files that are whole, or the one before."""
        material = self._tls.current()
        while material is not self._material:
            files = self._tls.files
            newest = _Counted(ssl.PROTOCOL_TLS_SERVER)
            newest.minimum_version = ssl.TLSVersion.TLSv1_2
            newest.refused = self._refused
            newest.sslobject_class = _CountedObject
            newest.load_cert_chain(files.cert_file, files.key_file)
            if files.ca_file:
                newest.verify_mode = ssl.CERT_REQUIRED
                newest.load_verify_locations(cadata=material.ca.decode("ascii", errors="ignore"))
            if self._tls.current() is material:
                self._material, self._newest = material, newest
            material = self._tls.current()
        if self._shown is not None:
            self._shown(material.ends_unix_s)
        return self._newest


class _Counted(ssl.SSLContext):
    """A context whose handshakes are told of when they fail."""

    refused: Refused | None = None


class _CountedObject(ssl.SSLObject):
    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except _UNDER_WAY:
            raise
        except ssl.SSLError as error:
            context = self.context
            if isinstance(context, _Counted) and context.refused is not None:
                context.refused(REASONS.get(error.reason or "", "other"))
            raise

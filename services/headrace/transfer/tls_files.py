"""What a process shows to its peers and whom it trusts: certificate, key and authorities, read again when they change.

Owns the reading of the PEM files and the rule that a new set is taken only when it is whole: a key of another
certificate, a file that cannot be read or a certificate that nobody would accept leaves the last good set in force,
with a line in the log. Knows nothing of gRPC and HTTP, which make their credentials of it.
"""

import logging
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

from headrace.config import NetworkSettings
from headrace.core.errors import ConfigInvalid
from headrace.transfer.check_certificate import check_certificate

_log = logging.getLogger(__name__)

# Files that are replaced while they are read are read again; somebody who replaces them without end is not waited for.
_READS_MAX = 5

_Signature = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files, each with the setting that names it. A certificate never comes without its key."""

    cert_file: str = ""
    key_file: str = ""
    ca_file: str = ""
    ca_setting: str = "tls_ca_file"
    mutual: bool = False  # the certificate is to be of these authorities: peers go by the same file

    @property
    def named(self) -> tuple[tuple[str, str], ...]:
        """(setting, path) of the files that there are."""
        pairs = (("tls_cert_file", self.cert_file), ("tls_key_file", self.key_file), (self.ca_setting, self.ca_file))
        return tuple((setting, path) for setting, path in pairs if path)


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """The files' content at one moment; empty where there is no file."""

    cert: bytes
    key: bytes
    ca: bytes
    ends_unix_s: float = 0.0  # when the certificate does; 0 where there is none


class Tls:
    """The files of one process, watched. Safe for concurrent use by several threads."""

    def __init__(self, files: TlsFiles) -> None:
        """Reads and checks them now. Raises ConfigInvalid with the setting, the file and what is wrong with it."""
        self.files = files
        self._changing = threading.Lock()
        self._signature = _signature_of(files)
        self._material = read_material(files)

    def current(self) -> TlsMaterial:
        """The newest set that is good; the same object for as long as no file changes. Three `stat` calls."""
        with self._changing:
            try:
                signature = _signature_of(self.files)
                if signature == self._signature:
                    return self._material
                self._signature = signature  # a set that is refused is told of once
                self._material = read_material(self.files)
                _log.info("the TLS files changed; new connections use %s", self.files.cert_file or self.files.ca_file)
            except ConfigInvalid as refused:
                _log.warning("the TLS files changed and are not used: %s; the last good ones stay in force", refused)
            return self._material


def tls_of_parts(network: NetworkSettings) -> Tls | None:
    """What our own parts use among each other; None for plain text. Raises ConfigInvalid."""
    if not network.tls_ca_file or not network.tls_cert_file:
        return None
    return Tls(
        TlsFiles(
            cert_file=network.tls_cert_file, key_file=network.tls_key_file, ca_file=network.tls_ca_file, mutual=True
        )
    )


def tls_of_client(*, ca_file: str, cert_file: str, key_file: str) -> Tls | None:
    """What a caller trusts and shows; None, plain text, when no file is named. Raises ConfigInvalid."""
    files = TlsFiles(cert_file=cert_file, key_file=key_file, ca_file=ca_file)
    return Tls(files) if files.named else None


def read_material(files: TlsFiles) -> TlsMaterial:
    """One whole set: nothing was replaced while it was read. Raises ConfigInvalid."""
    for _ in range(_READS_MAX):
        before = _signature_of(files)
        check_pem(files)
        ends_unix_s = 0.0
        if files.cert_file:
            authority = files.ca_file if files.mutual else ""
            ends_unix_s = check_certificate(files.cert_file, files.key_file, ca_file=authority)
        paths = (files.cert_file, files.key_file, files.ca_file)
        cert, key, ca = (Path(path).read_bytes() if path else b"" for path in paths)
        if before == _signature_of(files):
            return TlsMaterial(cert, key, ca, ends_unix_s=ends_unix_s)
    raise ConfigInvalid("tls_cert_file", "the TLS files are replaced all the time")


def check_pem(files: TlsFiles) -> None:
    """Each file can be read and is what its setting says. Raises ConfigInvalid."""
    for setting, path in files.named:
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise ConfigInvalid(setting, f"{path} cannot be read: {error.strerror}") from error
        if setting == "tls_key_file":
            continue
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
        except ssl.SSLError as error:
            raise ConfigInvalid(setting, f"{path} holds no PEM certificate") from error
    if bool(files.cert_file) != bool(files.key_file):
        raise ConfigInvalid(
            "tls_key_file" if files.cert_file else "tls_cert_file", "a certificate and its key are set together"
        )


def _signature_of(files: TlsFiles) -> _Signature:
    """Changes when a file does, also when a link is turned to another one (as Kubernetes does)."""
    found = []
    for setting, path in files.named:
        try:
            stat = Path(path).stat()
        except OSError as error:
            raise ConfigInvalid(setting, f"{path} cannot be read: {error.strerror}") from error
        found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return tuple(found)

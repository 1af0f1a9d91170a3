"""Certificates for trying TLS: one authority and one certificate that names the hosts. For evaluation, not for fleets.

Owns what is in those files. Needs the package `cryptography`, which comes with the extra `cluster`.
"""

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

# Clocks of different hosts differ; a certificate is valid from a little earlier than it was made.
CLOCK_SKEW = timedelta(minutes=10)
CA_DAYS = 3_650
PRIVATE_MODE = 0o600


@dataclass(frozen=True, slots=True)
class CertificatePaths:
    """The files of a directory of certificates."""

    cert_file: str
    key_file: str
    ca_file: str
    ca_key_file: str


def create_certificates(directory: Path, *, hosts: Sequence[str], days: float) -> CertificatePaths:
    """Write `ca.pem`, `ca.key`, `cert.pem` and `key.pem`; an authority that is there already signs again.

    hosts: names and IP addresses that the certificate is for. days: how long it is valid; a negative number makes one
    that has expired. Each file is replaced in one step, so that a running system reads whole ones.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    paths = paths_in(directory)
    directory.mkdir(parents=True, exist_ok=True)
    ca_key, ca = _authority(paths)
    key = ec.generate_private_key(ec.SECP256R1())
    until = datetime.now(UTC) + timedelta(days=days)
    cert = (
        _builder(_name(hosts[0]), issuer=ca.subject, key=key.public_key(), until=until)
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            # Each part is a server to some and a client of others, with the same certificate.
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
            critical=False,
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()),
            critical=False,
        )
        .sign(ca_key, hashes.SHA256())
    )
    _write(paths.key_file, _private_pem(key), mode=PRIVATE_MODE)
    _write(paths.cert_file, _pem(cert))
    return paths


def paths_in(directory: Path) -> CertificatePaths:
    """What the files of a directory are called."""
    names = ("cert.pem", "key.pem", "ca.pem", "ca.key")
    return CertificatePaths(*(str(directory / name) for name in names))


def _authority(paths: CertificatePaths) -> tuple[Any, Any]:
    """The directory's authority, made now when there is none: (private key, certificate)."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    if Path(paths.ca_key_file).exists():
        key: Any = serialization.load_pem_private_key(Path(paths.ca_key_file).read_bytes(), password=None)
        return key, x509.load_pem_x509_certificate(Path(paths.ca_file).read_bytes())
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("Headrace evaluation authority")
    until = datetime.now(UTC) + timedelta(days=CA_DAYS)
    ca = (
        _builder(name, issuer=name, key=key.public_key(), until=until)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_signing_only(), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(paths.ca_key_file, _private_pem(key), mode=PRIVATE_MODE)
    _write(paths.ca_file, _pem(ca))
    return key, ca


def _builder(subject: Any, *, issuer: Any, key: Any, until: datetime) -> Any:
    from cryptography import x509

    begin = min(datetime.now(UTC), until) - CLOCK_SKEW
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(until)
    )


def _name(common_name: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _general_name(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _signing_only() -> Any:
    from cryptography import x509

    used_for = {"key_cert_sign": True, "crl_sign": True}
    others = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    return x509.KeyUsage(**used_for, **dict.fromkeys((*others, "encipher_only", "decipher_only"), False))


def _pem(cert: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return bytes(cert.public_bytes(Encoding.PEM))


def _private_pem(key: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _write(path: str, content: bytes, *, mode: int = 0o644) -> None:
    scratch = Path(path + ".new")
    with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(content)
    scratch.replace(path)

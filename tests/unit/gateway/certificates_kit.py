"""Certificates for tests: one that is right, and one for each way to be wrong."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from headrace.admin.create_certificates import CertificatePaths, create_certificates
from headrace.transfer.tls_files import Tls, TlsFiles, TlsMaterial

LOCAL = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class Pki:
    """`good`, `expired` and `elsewhere` are of one authority; `stranger` and `caller` of one of their own each."""

    good: CertificatePaths
    expired: CertificatePaths
    elsewhere: CertificatePaths  # names another host
    stranger: CertificatePaths
    caller: CertificatePaths

    def tls(self, shown: CertificatePaths | None, trusted: CertificatePaths | None = None) -> Tls:
        """What a process has that shows the one and trusts the authority of the other, by default of `good`."""
        return Tls(self._files(shown, trusted))

    def unchecked(self, shown: CertificatePaths) -> Tls:
        """As `tls`, of a process that is not ours, or whose certificate ran out while it ran."""
        return _Unchecked(self._files(shown, None))

    def _files(self, shown: CertificatePaths | None, trusted: CertificatePaths | None) -> TlsFiles:
        return TlsFiles(
            cert_file=shown.cert_file if shown else "",
            key_file=shown.key_file if shown else "",
            ca_file=(trusted or self.good).ca_file,
        )


class _Unchecked(Tls):
    def __init__(self, files: TlsFiles) -> None:
        self.files = files
        self._material = TlsMaterial(
            *(Path(path).read_bytes() for path in (files.cert_file, files.key_file, files.ca_file))
        )

    def current(self) -> TlsMaterial:
        return self._material


def make_pki(directory: Path) -> Pki:
    good = create_certificates(directory / "good", hosts=LOCAL, days=2)
    for name in ("expired", "elsewhere"):
        shutil.copytree(directory / "good", directory / name)
    return Pki(
        good=good,
        expired=create_certificates(directory / "expired", hosts=LOCAL, days=-1),
        elsewhere=create_certificates(directory / "elsewhere", hosts=("10.9.8.7",), days=2),
        stranger=create_certificates(directory / "stranger", hosts=LOCAL, days=2),
        caller=create_certificates(directory / "caller", hosts=("some-caller",), days=2),
    )

"""`headrace certs create`: files that TLS accepts, whose keys nobody else reads, and that can be renewed."""

import json
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.admin.cli import main
from headrace.transfer.check_certificate import check_certificate, names_of


def create(*words: object) -> dict[str, str]:
    done = CliRunner().invoke(main, ["certs", "create", *map(str, words), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_what_it_makes_names_the_hosts_and_is_accepted(tmp_path: Path):
    made = create(tmp_path / "new", "--host", "10.0.0.5", "--host", "gateway.example", "--host", "*.pods.example")
    check_certificate(
        made["tls_cert_file"],
        made["tls_key_file"],
        ca_file=made["tls_ca_file"],
        names=("10.0.0.5", "gateway.example", "a.pods.example"),
    )
    for key in (made["tls_key_file"], made["ca_key_file"]):
        assert stat.S_IMODE(Path(key).stat().st_mode) == 0o600


def test_given_again_it_renews_the_certificate_and_keeps_the_authority(tmp_path: Path):
    """Fails when peers that trust the authority would refuse the new certificate."""
    first = create(tmp_path)
    authority, certificate = Path(first["tls_ca_file"]).read_bytes(), Path(first["tls_cert_file"]).read_bytes()
    second = create(tmp_path, "--host", "10.0.0.6")
    assert second == first
    assert Path(second["tls_ca_file"]).read_bytes() == authority
    assert Path(second["tls_cert_file"]).read_bytes() != certificate
    assert names_of(second["tls_cert_file"], second["tls_key_file"]) == ("10.0.0.6",)
    check_certificate(second["tls_cert_file"], second["tls_key_file"], ca_file=second["tls_ca_file"])


@pytest.mark.parametrize("words", [["--host", "Zürich"], ["--days", "0"]])
def test_what_no_certificate_can_be_made_of_is_refused(tmp_path: Path, words: list[str]):
    done = CliRunner().invoke(main, ["certs", "create", str(tmp_path), *words])
    assert done.exit_code in (2, 3), done.output
    assert not (tmp_path / "cert.pem").exists()

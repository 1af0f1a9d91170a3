"""`headrace certs create`: certificates for trying TLS."""

import importlib.util
from pathlib import Path

import click

from headrace.admin.create_certificates import create_certificates
from headrace.admin.terminal import ExtraMissing, json_option, print_json, say
from headrace.core.errors import InvalidRequest

DAYS_DEFAULT = 90


@click.group(short_help="Make certificates for trying TLS.")
def certs() -> None:
    """Certificates for trying TLS (docs/tls.md). A fleet has an authority of its own."""


@certs.command("create", short_help="Make an authority and a certificate.")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="DNS name or IP address of a host; repeat it for each one. Default: localhost and 127.0.0.1.",
)
@click.option(
    "--days", type=click.IntRange(min=1), default=DAYS_DEFAULT, show_default=True, help="How long it is valid."
)
@json_option
def create(*, directory: Path, hosts: tuple[str, ...], days: int, as_json: bool) -> None:
    """Make an authority and a certificate that names these hosts.

    Given again, a new certificate of the same authority.

    \b
    Examples:
      headrace certs create certs --host 10.0.0.5 --host 10.0.0.6 --host localhost --host 127.0.0.1
      headrace up --tls-cert-file certs/cert.pem --tls-key-file certs/key.pem --tls-ca-file certs/ca.pem
    """
    if importlib.util.find_spec("cryptography") is None:
        raise ExtraMissing("certs create", "cluster", "cryptography")
    try:
        paths = create_certificates(directory, hosts=hosts or ("localhost", "127.0.0.1"), days=days)
    except ValueError as error:
        raise InvalidRequest(f"no certificate can be made: {error}", param="host") from error
    settings = {"tls_cert_file": paths.cert_file, "tls_key_file": paths.key_file, "tls_ca_file": paths.ca_file}
    if as_json:
        print_json({**settings, "ca_key_file": paths.ca_key_file})
        return
    for name, path in settings.items():
        click.echo(f"{name}: {path}")
    say(f"(keep {paths.ca_key_file} away from the hosts: whoever has it is let in everywhere)")

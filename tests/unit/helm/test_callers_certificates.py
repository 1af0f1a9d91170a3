"""What callers of a release are shown, and the certificates that they must show where the values ask for them."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import click
import pytest
from helm_python import HelmError
from rendered_chart import CALLERS_SHOW, EVERYTHING, ROOT, Manifest, merged, one, ray_pods, render, serve_config

from headrace.admin.cli import main
from headrace.admin.create_certificates import create_certificates
from headrace.transfer.https_context import HttpsContext
from headrace.transfer.tls_files import Tls, TlsFiles

FOLDER = "/etc/headrace/callers-authority"


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return render(merged(EVERYTHING, CALLERS_SHOW))


def test_callers_are_served_by_the_callers_certificate_and_asked_for_by_tls():
    plain = render(EVERYTHING)
    http = serve_config(plain)["http_options"]
    assert (http["ssl_certfile"], http["ssl_keyfile"]) == (
        "/etc/headrace/callers/tls.crt",
        "/etc/headrace/callers/tls.key",
    )
    assert "ssl_ca_certs" not in http
    pods = ray_pods(plain)
    for pod in pods.values():
        assert "/etc/headrace/callers" in [m["mountPath"] for m in pod["spec"]["containers"][0]["volumeMounts"]]
    assert pods["gateway"]["spec"]["containers"][0]["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    ports = one(plain, "Service", "-gateway")["spec"]["ports"]
    assert [port["appProtocol"] for port in ports] == ["https", "https"]


def test_who_must_show_a_certificate_and_who_of_the_chart_shows_one(manifests: list[Manifest]):
    """Fails when the proxies ask for none, or something of the chart's own is then refused by them."""
    assert serve_config(manifests)["http_options"]["ssl_ca_certs"] == f"{FOLDER}/ca.crt"
    for component, pod in ray_pods(manifests).items():
        (container,) = pod["spec"]["containers"]
        (mount,) = (m for m in container["volumeMounts"] if m["name"] == "callers-authority")
        assert (mount["mountPath"], mount["readOnly"], "subPath" in mount) == (FOLDER, True, False)
        (volume,) = (v for v in pod["spec"]["volumes"] if v["name"] == "callers-authority")
        assert volume["secret"] == {"secretName": "headrace-clients", "defaultMode": 0o440}
        if component in ("prefill", "decode"):
            drain = container["lifecycle"]["preStop"]["exec"]["command"][-1]
            assert f"--tls-cert-file {FOLDER}/tls.crt --tls-key-file {FOLDER}/tls.key" in drain
            assert set(re.findall(r"--[a-z-]+", drain)) <= options_of("nodes", "drain")


def options_of(group: str, name: str) -> set[str]:
    commands = main.commands[group]
    assert isinstance(commands, click.Group)
    return {option for parameter in commands.commands[name].params for option in parameter.opts}


def test_an_authority_of_callers_needs_a_certificate_to_show_them():
    with pytest.raises(HelmError, match=r"tls\.callersSecret\.name is needed"):
        render(CALLERS_SHOW)


@asynccontextmanager
async def gateway(folder: Path, answer: bytes) -> AsyncIterator[int]:
    """The port of an HTTPS server under the very context that Serve's proxies serve by, which always answers this."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    own = create_certificates(folder / "own", hosts=["gateway.inference.svc"], days=1)
    files = TlsFiles(own.cert_file, own.key_file, str(folder / "callers-authority" / "ca.crt"), "tls_client_ca_file")
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=HttpsContext(Tls(files)))
    async with server:
        yield server.sockets[0].getsockname()[1]


async def answers_well(words: list[str], *, tries: int) -> bool:
    for _ in range(tries):
        if await exit_code(words) == 0:
            return True
    return False


def make_secret(folder: Path) -> None:
    """As it is mounted."""
    made = create_certificates(folder, hosts=["probe"], days=1)
    for name, file in (("ca.crt", made.ca_file), ("tls.crt", made.cert_file), ("tls.key", made.key_file)):
        (folder / name).write_bytes(Path(file).read_bytes())


async def exit_code(words: list[str]) -> int:
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.DEVNULL)
    return await process.wait()


@pytest.mark.parametrize(("status", "ready"), [(b"200 OK", True), (b"503 Service Unavailable", False)])
async def test_a_gateways_readiness_is_asked_with_a_certificate(
    manifests: list[Manifest], tmp_path: Path, status: bytes, ready: bool
):
    """The probe's own command. Fails when it shows none, or takes any answer for a good one."""
    make_secret(tmp_path / "callers-authority")
    probe = ray_pods(manifests)["gateway"]["spec"]["containers"][0]["readinessProbe"]
    name, url, *shown = probe["exec"]["command"]
    assert name == "headrace-healthcheck"
    assert url.endswith(":8000/ready")
    async with gateway(tmp_path, b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\n\r\n") as port:
        asked = [sys.executable, str(ROOT / "docker" / "healthcheck.py"), url.replace(":8000", f":{port}")]
        with_certificate = [*asked, *(word.replace("/etc/headrace", str(tmp_path)) for word in shown)]
        # Each try has four seconds for it, which a busy machine may need.
        assert await answers_well(with_certificate, tries=5 if ready else 1) is ready
        assert await exit_code(asked) == 1

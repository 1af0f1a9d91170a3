"""The container that makes a pod's certificates, run as it stands, and the files that the pod then goes by."""

import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from rendered_chart import EVERYTHING, Manifest, one, ray_pods, render, serve_config

from headrace.admin.create_certificates import create_certificates
from headrace.config import load_config
from headrace.core.errors import ConfigInvalid
from headrace.transfer.channels import bind_server, build_server
from headrace.transfer.check_certificate import covers, names_of
from headrace.transfer.check_network import check_network
from headrace.transfer.tls_files import Tls, TlsFiles

POD_IP = "10.1.2.3"
# How long a step may take on a machine that is busy with other tests.
PATIENCE_S = 60.0
# In place of `sleep`: says for how long it was to sleep, and ends when the test says so.
SLEEP = '#!/bin/sh\necho "$1" >> "$FOLDER/sleeps"\nread line < "$FOLDER/wake"\n'


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return render(EVERYTHING)


def make_authority(folder: Path) -> None:
    """As the secret is mounted, and an empty volume."""
    made = create_certificates(folder / "made", hosts=["localhost"], days=1)
    (folder / "authority").mkdir()
    (folder / "authority" / "ca.crt").write_bytes(Path(made.ca_file).read_bytes())
    (folder / "authority" / "ca.key").write_bytes(Path(made.ca_key_file).read_bytes())
    (folder / "tls").mkdir()


@dataclass(frozen=True, slots=True)
class Maker:
    """The container at work, in a folder in place of /etc/headrace."""

    process: "subprocess.Popen[bytes]"
    folder: Path

    def sleeps(self) -> list[int]:
        """Seconds of each sleep so far."""
        file = self.folder / "sleeps"
        return [int(line) for line in file.read_text().splitlines()] if file.exists() else []

    def wait_for_sleep(self, number: int) -> None:
        wait_until(lambda: len(self.sleeps()) >= number or self.process.poll() is not None)
        assert self.process.poll() is None, (self.folder / "log").read_text()

    def wake(self) -> None:
        """The sleep is over; returns when the next one has begun."""
        number = len(self.sleeps())
        (self.folder / "wake").write_text("\n")
        self.wait_for_sleep(number + 1)


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


@contextmanager
def made_by(container: dict[str, Any], folder: Path) -> Iterator[Maker]:
    """The container's command, started as it stands; again in the same folder when the container starts again."""
    if not (folder / "bin").exists():
        (folder / "bin").mkdir()
        (folder / "bin" / "sleep").write_text(SLEEP)
        (folder / "bin" / "sleep").chmod(0o755)
        os.mkfifo(folder / "wake")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [word.replace("/etc/headrace", str(folder)) for word in container["command"]],
            cwd=container["workingDir"].replace("/etc/headrace", str(folder)),
            env={
                "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
                "POD_IP": POD_IP,
                "HOME": str(folder),
                "TMPDIR": str(folder / "there is none"),
                "FOLDER": str(folder),
            },
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield Maker(process, folder)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its sleep, too
        process.wait()


def maker_of(manifests: list[Manifest]) -> dict[str, Any]:
    (container,) = ray_pods(manifests)["decode"]["spec"]["initContainers"]
    return container


def args_here(manifests: list[Manifest], folder: Path) -> dict[str, Any]:
    """The settings in the Serve config, with the mounted files where they are here."""
    args = serve_config(manifests)["applications"][0]["args"]
    return yaml.safe_load(yaml.safe_dump(args).replace("/etc/headrace", str(folder)))


def files_of_parts(manifests: list[Manifest], folder: Path) -> TlsFiles:
    args = args_here(manifests, folder)
    return TlsFiles(args["tls_cert_file"], args["tls_key_file"], args["tls_ca_file"], mutual=True)


def test_a_pods_certificates_name_the_pod_and_are_accepted_by_what_its_settings_say(
    manifests: list[Manifest], tmp_path: Path
):
    """Fails when a certificate does not name the address by which others call the pod, or is of another authority, or
    when what waits for them could start before they are there."""
    make_authority(tmp_path)
    container = maker_of(manifests)
    with made_by(container, tmp_path) as maker:
        maker.wait_for_sleep(1)
        args = args_here(manifests, tmp_path) | {"tenants_file": ""}
        speaks = {v["name"]: v.get("value", "") for v in ray_pods(manifests)["decode"]["spec"]["containers"][0]["env"]}
        ray_files = [
            speaks[f"RAY_TLS_{name}"].replace("/etc/headrace", str(tmp_path)) for name in ("SERVER_CERT", "SERVER_KEY")
        ]
        service = "raycluster-abcde-head-svc.inference.svc.cluster.local"
        for names in (names_of(args["tls_cert_file"], args["tls_key_file"]), names_of(*ray_files)):
            for name in (POD_IP, "localhost", "127.0.0.1", "demo-headrace-gateway.inference.svc", service):
                assert covers(names, name), name
            assert not covers(names, "10.1.2.4")
        check_network(load_config(args | {"store_host": POD_IP}, environ={}))
        with pytest.raises(ConfigInvalid, match="does not name"):
            check_network(load_config(args | {"store_host": "10.1.2.4"}, environ={}))
        waits_for = container["startupProbe"]["exec"]["command"][-1].replace("/etc/headrace", str(tmp_path))
        assert waits_for == args["tls_key_file"]
        for file in (waits_for, ray_files[1]):
            assert Path(file).stat().st_mode & 0o077 == 0
        # Both live as long as the container says, and the one that is renewed is so long before it ends.
        assert days_of(args["tls_cert_file"]) == 30
        assert days_of(ray_files[0]) == 365
        assert maker.sleeps() == [10 * 86_400]


def days_of(file: str) -> float:
    from cryptography import x509

    cert = x509.load_pem_x509_certificate(Path(file).read_bytes())
    return (cert.not_valid_after_utc - cert.not_valid_before_utc).days


async def test_a_running_part_shows_the_renewed_certificate_and_a_failed_renewal_leaves_the_old_one(
    manifests: list[Manifest], tmp_path: Path
):
    """A real server by the pod's settings. Fails when it has to be started again to show the new certificate, when
    Ray's files change, or when a secret that is broken takes away what there is."""
    make_authority(tmp_path)
    with made_by(maker_of(manifests), tmp_path) as maker:
        maker.wait_for_sleep(1)
        files = files_of_parts(manifests, tmp_path)
        server = build_server()
        port = bind_server(server, "127.0.0.1:0", tls=Tls(files))
        await server.start()
        try:
            first, of_ray = shown_at(port, files), (tmp_path / "tls" / "ray" / "cert.pem").read_bytes()
            maker.wake()
            second = shown_at(port, files)
            assert second != first

            key = tmp_path / "authority" / "ca.key"
            key.rename(tmp_path / "aside")
            maker.wake()
            assert shown_at(port, files) == second
            assert maker.sleeps()[-1] == 600
            assert "the one that there is stays" in (tmp_path / "log").read_text()
            (tmp_path / "aside").rename(key)
            maker.wake()
            assert shown_at(port, files) not in (first, second)
            assert maker.sleeps()[-1] == 10 * 86_400

            assert (tmp_path / "tls" / "ray" / "cert.pem").read_bytes() == of_ray
            assert len(list((tmp_path / "tls").glob("parts.*"))) == 2, "a set for each renewal would fill the volume"
        finally:
            await server.stop(0)
        # As the first process of a container it must take the signal itself, or the pod waits for its whole grace.
        maker.process.send_signal(signal.SIGTERM)
        assert maker.process.wait(PATIENCE_S) == 0


def test_a_container_that_starts_again_while_no_certificate_can_be_made_tries_every_10_minutes_and_says_so(
    manifests: list[Manifest], tmp_path: Path
):
    """Fails when it takes the set that is there for a new one: that expires while the container sleeps for a third of
    its days, though the secret was put right long ago."""
    make_authority(tmp_path)
    container, made = maker_of(manifests), tmp_path / "tls" / "parts" / "cert.pem"
    with made_by(container, tmp_path) as maker:
        maker.wait_for_sleep(1)
    first = made.read_bytes()
    key = tmp_path / "authority" / "ca.key"
    key.rename(tmp_path / "aside")
    with made_by(container, tmp_path) as maker:
        maker.wait_for_sleep(2)
        maker.wake()
        assert maker.sleeps() == [10 * 86_400, 600, 600]
        assert (tmp_path / "log").read_text().count("the one that there is stays") == 2
        assert made.read_bytes() == first
        (tmp_path / "aside").rename(key)
        maker.wake()
        assert maker.sleeps()[-1] == 10 * 86_400
        assert made.read_bytes() != first


def shown_at(port: int, files: TlsFiles) -> bytes | None:
    """The certificate that a new connection is shown."""
    context = ssl.create_default_context(cafile=files.ca_file)
    context.load_cert_chain(files.cert_file, files.key_file)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        return connection.getpeercert(binary_form=True)


def test_a_secret_without_the_private_key_stops_the_pod_before_it_starts(manifests: list[Manifest], tmp_path: Path):
    """Fails when the container makes an authority of its own instead, which nobody else knows."""
    make_authority(tmp_path)
    (tmp_path / "authority" / "ca.key").unlink()
    with made_by(maker_of(manifests), tmp_path) as maker:
        assert maker.process.wait(PATIENCE_S) == 1
    assert list((tmp_path / "tls").iterdir()) == []


def test_only_the_container_that_signs_sees_the_authoritys_key(manifests: list[Manifest]):
    for pod in ray_pods(manifests).values():
        for container in pod["spec"]["containers"]:
            mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
            assert "authority" not in mounts
            assert mounts["tls"]["readOnly"] is True
        (maker,) = pod["spec"]["initContainers"]
        assert maker["restartPolicy"] == "Always"
        assert {mount["name"] for mount in maker["volumeMounts"]} == {"authority", "tls"}
        assert not any("subPath" in mount for mount in maker["volumeMounts"]), "a new authority would not be seen"
        assert maker["securityContext"] == pod["spec"]["containers"][0]["securityContext"]
        (volume,) = (v for v in pod["spec"]["volumes"] if v["name"] == "tls")
        assert volume["emptyDir"]["medium"] == "Memory"
        keys = [v["secret"] for v in pod["spec"]["volumes"] if v["name"] in ("authority", "callers")]
        assert [secret["defaultMode"] for secret in keys] == [0o440, 0o440]


def test_rays_own_connections_go_by_a_certificate_of_the_same_authority_the_autoscalers_too(manifests: list[Manifest]):
    """Headrace refuses TLS between its parts while Ray, by which gateways call workers, speaks plain text."""
    cluster = one(manifests, "RayService")["spec"]["rayClusterConfig"]
    expected = {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": "/etc/headrace/tls/ray/cert.pem",
        "RAY_TLS_SERVER_KEY": "/etc/headrace/tls/ray/key.pem",
        "RAY_TLS_CA_CERT": "/etc/headrace/tls/ray/ca.pem",
    }
    speakers = [pod["spec"]["containers"][0] for pod in ray_pods(manifests).values()]
    for speaker in [*speakers, cluster["autoscalerOptions"]]:
        assert expected.items() <= {v["name"]: v.get("value") for v in speaker["env"]}.items()
        assert "/etc/headrace/tls" in [mount["mountPath"] for mount in speaker["volumeMounts"]]

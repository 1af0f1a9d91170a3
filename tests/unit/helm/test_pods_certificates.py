"""The init container that makes a pod's certificate, run as it stands, and the files that the pod then goes by."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rendered_chart import EVERYTHING, Manifest, one, ray_pods, render, serve_config

from headrace.admin.create_certificates import create_certificates
from headrace.config import load_config
from headrace.core.errors import ConfigInvalid
from headrace.transfer.check_certificate import covers, names_of
from headrace.transfer.check_network import check_network

POD_IP = "10.1.2.3"


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return render(EVERYTHING)


def make_authority(folder: Path) -> None:
    """As the secret is mounted."""
    made = create_certificates(folder / "made", hosts=["localhost"], days=1)
    (folder / "authority").mkdir()
    (folder / "authority" / "ca.crt").write_bytes(Path(made.ca_file).read_bytes())
    (folder / "authority" / "ca.key").write_bytes(Path(made.ca_key_file).read_bytes())
    (folder / "tls").mkdir()


def run_container(container: dict[str, Any], folder: Path) -> None:
    shell, dash_c, script = container["command"]
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "POD_IP": POD_IP,
        "HOME": str(folder),
        "TMPDIR": str(folder),
    }
    subprocess.run([shell, dash_c, script.replace("/etc/headrace", str(folder))], env=environment, check=True)


def args_here(manifests: list[Manifest], folder: Path) -> dict[str, Any]:
    """The settings in the Serve config, with the mounted files where they are here."""
    args = serve_config(manifests)["applications"][0]["args"]
    return yaml.safe_load(yaml.safe_dump(args).replace("/etc/headrace", str(folder)))


def test_a_pods_certificate_names_the_pod_and_is_accepted_by_what_its_settings_say(
    manifests: list[Manifest], tmp_path: Path
):
    """Fails when the certificate does not name the address by which others call the pod, or is of another authority."""
    make_authority(tmp_path)
    (container,) = ray_pods(manifests)["decode"]["spec"]["initContainers"]
    run_container(container, tmp_path)
    args = args_here(manifests, tmp_path) | {"tenants_file": ""}
    names = names_of(args["tls_cert_file"], args["tls_key_file"])
    service = "raycluster-abcde-head-svc.inference.svc.cluster.local"
    for name in (POD_IP, "localhost", "127.0.0.1", "demo-headrace-gateway.inference.svc", service):
        assert covers(names, name), name
    assert not covers(names, "10.1.2.4")
    config = load_config(args | {"store_host": POD_IP}, environ={})
    check_network(config)
    with pytest.raises(ConfigInvalid, match="does not name"):
        check_network(load_config(args | {"store_host": "10.1.2.4"}, environ={}))
    assert {path.name for path in (tmp_path / "tls").iterdir()} == {"ca.pem", "cert.pem", "key.pem"}
    assert (tmp_path / "tls" / "key.pem").stat().st_mode & 0o077 == 0


def test_a_secret_without_the_private_key_stops_the_pod_before_it_starts(manifests: list[Manifest], tmp_path: Path):
    make_authority(tmp_path)
    (tmp_path / "authority" / "ca.key").unlink()
    (container,) = ray_pods(manifests)["decode"]["spec"]["initContainers"]
    with pytest.raises(subprocess.CalledProcessError):
        run_container(container, tmp_path)
    assert list((tmp_path / "tls").iterdir()) == []


def test_only_the_init_container_sees_the_authoritys_key(manifests: list[Manifest]):
    for pod in ray_pods(manifests).values():
        for container in pod["spec"]["containers"]:
            mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
            assert "authority" not in mounts
            assert mounts["tls"]["readOnly"] is True
        (maker,) = pod["spec"]["initContainers"]
        assert {mount["name"] for mount in maker["volumeMounts"]} == {"authority", "tls", "tmp"}
        assert maker["securityContext"] == pod["spec"]["containers"][0]["securityContext"]
        (volume,) = (v for v in pod["spec"]["volumes"] if v["name"] == "tls")
        assert volume["emptyDir"]["medium"] == "Memory"
        keys = [v["secret"] for v in pod["spec"]["volumes"] if v["name"] in ("authority", "callers")]
        assert [secret["defaultMode"] for secret in keys] == [0o440, 0o440]


def test_rays_own_connections_go_by_the_same_certificate_the_autoscalers_too(manifests: list[Manifest]):
    """Headrace refuses TLS between its parts while Ray, by which gateways call workers, speaks plain text."""
    cluster = one(manifests, "RayService")["spec"]["rayClusterConfig"]
    args = serve_config(manifests)["applications"][0]["args"]
    expected = {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": args["tls_cert_file"],
        "RAY_TLS_SERVER_KEY": args["tls_key_file"],
        "RAY_TLS_CA_CERT": args["tls_ca_file"],
    }
    speakers = [pod["spec"]["containers"][0] for pod in ray_pods(manifests).values()]
    for speaker in [*speakers, cluster["autoscalerOptions"]]:
        assert expected.items() <= {v["name"]: v.get("value") for v in speaker["env"]}.items()
        assert "/etc/headrace/tls" in [mount["mountPath"] for mount in speaker["volumeMounts"]]


def test_callers_are_served_by_the_callers_certificate_and_asked_for_by_tls(manifests: list[Manifest]):
    http = serve_config(manifests)["http_options"]
    assert (http["ssl_certfile"], http["ssl_keyfile"]) == (
        "/etc/headrace/callers/tls.crt",
        "/etc/headrace/callers/tls.key",
    )
    pods = ray_pods(manifests)
    for pod in pods.values():
        assert "/etc/headrace/callers" in [m["mountPath"] for m in pod["spec"]["containers"][0]["volumeMounts"]]
    assert pods["gateway"]["spec"]["containers"][0]["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    ports = one(manifests, "Service", "-gateway")["spec"]["ports"]
    assert [port["appProtocol"] for port in ports] == ["https", "https"]
    (endpoint,) = one(manifests, "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"]["serverName"] == "demo-headrace-gateway.inference.svc"

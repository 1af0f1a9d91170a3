"""What may listen where, and the TLS files, told before anything starts: the setting, the file, reason and remedy."""

import shutil
import subprocess
from pathlib import Path

import pytest
from certificates_kit import Pki, make_pki

from headrace.config import load_config
from headrace.core.errors import ConfigInvalid
from headrace.transfer.check_certificate import check_certificate, covers
from headrace.transfer.check_network import check_network, check_own_calls, name_to_call


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return make_pki(tmp_path_factory.mktemp("pki"))


def check(front_door: str | None = "127.0.0.1", **settings: object) -> None:
    check_network(load_config(settings, environ={}), front_door=front_door)


def files(paths, **others: str) -> dict[str, str]:
    return {"tls_cert_file": paths.cert_file, "tls_key_file": paths.key_file, "tls_ca_file": paths.ca_file} | others


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_on_loopback_nothing_is_needed(host):
    check(host, store_host=host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.5", "gateway.example"])
def test_callers_beyond_loopback_need_keys_or_the_word_that_the_network_is_insecure(host, tmp_path: Path):
    """Fails when anybody who can connect may use the API although nobody said so."""
    with pytest.raises(ConfigInvalid, match=r"http_host.*tenants_file.*insecure_network: true"):
        check(host)
    check(host, insecure_network=True)
    check(host, tenants_file=str(tmp_path), hash_algorithm="sha256")
    check(None)  # a part that serves no callers


@pytest.mark.parametrize("host", ["0.0.0.0", "10.9.8.7"])
def test_parts_beyond_loopback_need_mutual_tls_or_the_word_that_the_network_is_insecure(host, pki: Pki):
    remedy = r"store_host.*tls_cert_file, tls_key_file and tls_ca_file.*insecure_network: true"
    with pytest.raises(ConfigInvalid, match=remedy):
        check(store_host=host)
    check(store_host=host, insecure_network=True)
    with pytest.raises(ConfigInvalid, match=remedy):  # a certificate alone is for callers
        check(store_host=host, **files(pki.elsewhere, tls_ca_file=""))


def test_parts_beyond_loopback_are_let_be_with_a_certificate_that_names_their_address(pki: Pki):
    check(store_host="10.9.8.7", **files(pki.elsewhere))


@pytest.mark.parametrize("key", ["kv_events_endpoint", "kv_events_replay_endpoint"])
def test_events_with_token_ids_do_not_leave_the_machine_unasked(key):
    settings = {"kv_events_endpoint": "tcp://127.0.0.1:5557"} | {key: "tcp://*:5558"}
    with pytest.raises(ConfigInvalid, match=rf"{key}.*insecure_network"):
        check(**settings)
    check(**settings, insecure_network=True)
    check(kv_events_endpoint="tcp://127.0.0.1:5557", kv_events_replay_endpoint="ipc:///run/replay")


@pytest.mark.parametrize(
    "endpoint", [">tcp://router:5557", ">tcp://10.0.0.5:5557", ">tcp://127.0.0.1:0;10.0.0.5:5557", "ws://*:5557"]
)
def test_nor_do_they_when_a_node_connects_to_whoever_listens(endpoint):
    """Fails when only addresses that are bound are looked at."""
    with pytest.raises(ConfigInvalid, match=r"kv_events_endpoint.*insecure_network"):
        check(kv_events_endpoint=endpoint)
    check(kv_events_endpoint=endpoint, insecure_network=True)
    check(kv_events_endpoint=">tcp://127.0.0.1:5557")


def test_files_that_are_right_are_accepted(pki: Pki):
    check(**files(pki.good))
    check(**files(pki.good, tls_ca_file=""))
    check(**files(pki.good, tls_client_ca_file=pki.caller.ca_file))


@pytest.mark.parametrize(
    ("change", "key", "told"),
    [
        (
            lambda pki: {"tls_cert_file": "/none/cert.pem"},
            "tls_cert_file",
            "/none/cert.pem cannot be read: No such file",
        ),
        (lambda pki: {"tls_key_file": "/none/key.pem"}, "tls_key_file", "/none/key.pem cannot be read: No such file"),
        (lambda pki: {"tls_ca_file": "/none/ca.pem"}, "tls_ca_file", "/none/ca.pem cannot be read: No such file"),
        (
            lambda pki: {"tls_client_ca_file": "/none/callers.pem"},
            "tls_client_ca_file",
            "/none/callers.pem cannot be read: No such file",
        ),
        (lambda pki: {"tls_cert_file": pki.good.key_file}, "tls_cert_file", "holds no PEM certificate"),
        (lambda pki: {"tls_key_file": pki.good.cert_file}, "tls_key_file", "holds no PEM key"),
        (lambda pki: {"tls_ca_file": pki.good.key_file}, "tls_ca_file", "holds no PEM certificate"),
        (lambda pki: {"tls_key_file": pki.stranger.key_file}, "tls_key_file", "is not the key of the certificate in"),
        (lambda pki: {"tls_ca_file": pki.stranger.ca_file}, "tls_cert_file", "unable to get local issuer certificate"),
        (lambda pki: files(pki.expired), "tls_cert_file", "certificate has expired"),
        (lambda pki: files(pki.expired, tls_ca_file=""), "tls_cert_file", "certificate has expired"),
        (lambda pki: files(pki.elsewhere), "tls_cert_file", r"does not name 127.0.0.1.*it names: 10.9.8.7"),
        (lambda pki: {"tls_key_file": ""}, "tls_key_file", "set together"),
        (lambda pki: {"tls_cert_file": ""}, "tls_cert_file", "set together"),
        (lambda pki: {"tls_cert_file": "", "tls_key_file": ""}, "tls_cert_file", "must be set with tls_ca_file"),
    ],
)
def test_files_that_are_wrong_are_named_with_the_reason(pki: Pki, change, key, told):
    """Fails when the mistake is found by the first connection only, or the message names the wrong file."""
    with pytest.raises(ConfigInvalid, match=told) as refused:
        check(**files(pki.good) | change(pki))
    assert refused.value.key == key


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(pki: Pki, tmp_path: Path):
    """Fails when OpenSSL asks on the terminal, where a service waits for ever."""
    from cryptography.hazmat.primitives import serialization as pem

    key = pem.load_pem_private_key(Path(pki.good.key_file).read_bytes(), password=None)
    locked = tmp_path / "key.pem"
    cipher = pem.BestAvailableEncryption(b"secret")
    locked.write_bytes(key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, cipher))
    with pytest.raises(ConfigInvalid, match="without a passphrase"):
        check(**files(pki.good, tls_key_file=str(locked)))


def test_this_machine_calls_its_gateway_by_a_name_that_the_certificate_has(pki: Pki):
    good, elsewhere = load_config(files(pki.good), environ={}), load_config(files(pki.elsewhere), environ={})
    assert name_to_call(good, "0.0.0.0") == name_to_call(good, "127.0.0.1") == "127.0.0.1"
    assert name_to_call(elsewhere, "10.9.8.7") == "10.9.8.7"
    with pytest.raises(ConfigInvalid, match=r"does not name 127.0.0.1 or localhost.*10.9.8.7"):
        name_to_call(elsewhere, "0.0.0.0")


def test_a_system_that_its_own_gateway_would_not_let_in_is_refused(pki: Pki, tmp_path: Path):
    """Fails when `up` waits for minutes for a gateway that refuses it."""
    check_own_calls(load_config(files(pki.good), environ={}))
    with pytest.raises(ConfigInvalid, match=r"tls_client_ca_file.*beside that of callers"):
        check_own_calls(load_config(files(pki.good, tls_client_ca_file=pki.caller.ca_file), environ={}))
    both = tmp_path / "both.pem"
    both.write_bytes(Path(pki.caller.ca_file).read_bytes() + Path(pki.good.ca_file).read_bytes())
    check_own_calls(load_config(files(pki.good, tls_client_ca_file=str(both)), environ={}))


def test_names_cover_hosts_as_peers_see_it():
    assert covers(["*.example.org"], "a.example.org")
    assert covers(["A.example.org."], "a.example.ORG")
    assert covers(["0:0:0:0:0:0:0:1"], "::1")
    assert not covers(["*.example.org"], "example.org")
    assert not covers(["*.example.org"], "a.b.example.org")
    assert not covers(["a.example.org"], "b.example.org")
    assert not covers([], "a")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the command openssl is not installed")
def test_a_certificate_that_may_not_be_shown_to_servers_is_refused_for_parts(tmp_path: Path):
    """Each part is a client, too. Fails when a certificate for servers only is found out by the first store node."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=tmp_path)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *curve, "-days", "2", "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem")
    openssl("req", *curve, "-subj", "/CN=h", "-keyout", "key.pem", "-out", "cert.csr")
    (tmp_path / "cert.ext").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth\n")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "cert.ext")
    openssl("x509", "-req", "-in", "cert.csr", *signed, "-out", "cert.pem")
    cert, key, ca = (str(tmp_path / name) for name in ("cert.pem", "key.pem", "ca.pem"))
    check_certificate(cert, key)
    with pytest.raises(ConfigInvalid, match=r"unsuitable certificate purpose|unsupported certificate purpose"):
        check_certificate(cert, key, ca_file=ca)

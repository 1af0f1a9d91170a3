"""Two hosts with everything under TLS: both APIs, the command line, Ray's own connections, and KV from host to host.

A cluster of its own, since certificates are there from the start. The certificate names the hosts by their addresses.
"""

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from fleet import DEPLOYMENTS, SETTINGS, TOKENS, make_model, make_prompt
from hosts import Host, Network, wait_until, why_no_hosts
from ray_hosts import BLOCK_TOKENS, GCS_PORT, GRPC_PORT, HTTP_PORT, START_WITHIN_S, RayHosts

from headrace.admin.cli import main
from headrace.admin.create_certificates import create_certificates
from headrace.client.client import HeadraceClient
from headrace.client.errors import TlsFailed
from headrace.client.values import COLD, CacheOptions, GenerateResult
from headrace.core.block import CacheSource
from headrace.core.generation import CachedTokens
from headrace.core.tenants import HashedKey, new_key

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_500)]
KEY = new_key()
HIT = 24 * BLOCK_TOKENS
OVER_GRPC = CacheOptions(sources=frozenset({CacheSource.GRPC}))


class SecureHosts:
    """Two hosts: `a` has the gateway and the prefill worker, `b` the decode worker."""

    def __init__(self, directory: Path) -> None:
        self.network = Network(directory)
        self.ray = RayHosts(self.network, directory)
        self._directory = directory

    def start(self) -> None:
        self.ray.start_redis()
        self.hosts = {name: self.network.add_host(name) for name in ("a", "b")}
        self.ray.hosts.update(self.hosts)
        names = [*(host.address for host in self.hosts.values()), "127.0.0.1", "localhost"]
        self.files = create_certificates(self._directory / "certs", hosts=names, days=2)
        self.ray.more_environment |= {
            "RAY_USE_TLS": "1",
            "RAY_TLS_SERVER_CERT": self.files.cert_file,
            "RAY_TLS_SERVER_KEY": self.files.key_file,
            "RAY_TLS_CA_CERT": self.files.ca_file,
        }
        self.ray.http_options |= {"ssl_certfile": self.files.cert_file, "ssl_keyfile": self.files.key_file}
        for host, resources in zip(self.hosts.values(), ({"gateway": 1, "prefill": 1}, {"decode": 1}), strict=True):
            self._start_ray(host, resources)
        wait_until(self.ray.dashboard, within_s=START_WITHIN_S, what="Ray's dashboard")
        tenants = self._directory / "tenants.yaml"
        tenants.write_text(f"tenants:\n- {{name: ops, role: admin, keys: ['{HashedKey.of(KEY).spell()}']}}\n")
        self.ray.deploy(
            settings=SETTINGS
            | {
                "model": str(make_model(self._directory / "tiny-llama")),
                "insecure_network": False,
                "gateways": 1,
                "decode_workers": 1,
                "tenants_file": str(tenants),
                "hash_algorithm": "sha256",
                "tls_cert_file": self.files.cert_file,
                "tls_key_file": self.files.key_file,
                "tls_ca_file": self.files.ca_file,
            },
            deployments=DEPLOYMENTS,
        )
        self.ray.wait_until_running()
        self.client = HeadraceClient(self.address, api_key=KEY, tls_ca_file=self.files.ca_file)
        wait_until(lambda: len(self.client.status().workers) == 2, within_s=START_WITHIN_S, what="both workers")

    def _start_ray(self, host: Host, resources: dict[str, float]) -> None:
        """`ray start` gives up after half a minute, which a busy machine may take; then it is given again."""
        starting = self.ray.start_ray(host, resources=resources)

        def runs() -> bool:
            nonlocal starting
            if starting.poll() is not None:
                host.kill_processes()
                starting = self.ray.start_ray(host, resources=resources)
            return "Ray runtime started" in (host.home / "ray.log").read_text(encoding="utf-8")

        wait_until(runs, within_s=START_WITHIN_S, what=f"Ray on {host.name}")

    @property
    def address(self) -> str:
        return f"{self.hosts['a'].address}:{GRPC_PORT}"


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureHosts]:
    if reason := why_no_hosts():
        pytest.skip(f"several hosts on one machine: {reason}")
    started = SecureHosts(tmp_path_factory.mktemp("secure"))
    try:
        started.start()
        yield started
        started.client.close()
    finally:
        started.network.close()


def test_a_prompt_that_one_host_prefills_is_decoded_on_another_and_its_blocks_cross_under_tls(secure: SecureHosts):
    """Fails when one of the paths between parts does not come about under mutual TLS: gateway to worker, worker to the
    other host's store node, node to index."""
    (prefill,) = [w.worker_id for w in secure.client.status().workers if w.role == "prefill"]
    assert {node.address.rpartition(":")[0] for node in secure.client.status().store_nodes} == {
        host.address for host in secure.hosts.values()
    }
    seeds = count(1)

    def ask(prompt: list[int], cache: CacheOptions) -> GenerateResult:
        return secure.client.generate(prompt, sampling=TOKENS, cache=cache, timeout_s=120)

    def handed_over() -> bool:
        """A prefill that is late is done without."""
        new = make_prompt(HIT + 1, seed=next(seeds))
        answer = ask(new, CacheOptions(sources=OVER_GRPC.sources, prefill_worker=prefill))
        assert answer.token_ids == ask(new, COLD).token_ids
        return answer.prefill_worker == prefill

    def crosses() -> bool:
        """The prefill worker computes it, a later request reads it from that host's node."""
        new = make_prompt(HIT + 1, seed=next(seeds))
        cold, first = ask(new, COLD), ask(new, CacheOptions(prefill_worker=prefill))
        again = ask(new, OVER_GRPC)
        assert first.token_ids == again.token_ids == cold.token_ids
        return again.usage.cached == CachedTokens(grpc=HIT)

    wait_until(handed_over, within_s=120, what="a prompt that one host prefilled and another decoded")
    wait_until(crosses, within_s=120, what="a prefix of host a on host b")


def test_both_apis_and_the_command_line_are_served_under_tls_with_keys(secure: SecureHosts):
    trusting = ssl.create_default_context(cafile=secure.files.ca_file)
    asked = urllib.request.Request(
        f"https://{secure.hosts['b'].address}:{HTTP_PORT}/v1/models", headers={"authorization": f"Bearer {KEY}"}
    )
    with urllib.request.urlopen(asked, context=trusting, timeout=60) as reply:
        assert len(json.load(reply)["data"]) == 1
    environment = {"HEADRACE_TLS_CA_FILE": secure.files.ca_file, "HEADRACE_API_KEY": KEY}
    done = CliRunner(env=environment).invoke(main, ["nodes", "ls", "--address", secure.address, "--json"])
    assert done.exit_code == 0, done.output


def test_nothing_of_it_answers_in_plain_text(secure: SecureHosts):
    """Fails when a port of the APIs, of a store node or of Ray's control store is served without TLS."""
    for host in secure.hosts.values():
        with pytest.raises(OSError):  # noqa: PT011 - how a connection ends that nobody answers differs
            urllib.request.urlopen(f"http://{host.address}:{HTTP_PORT}/v1/models", timeout=60)
        with HeadraceClient(f"{host.address}:{GRPC_PORT}") as client, pytest.raises(TlsFailed):
            client.list_models()
    head = secure.hosts["a"]
    ports = [node.address for node in secure.client.status().store_nodes] + [f"{head.address}:{GCS_PORT}"]
    for address in ports:
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary("/headrace.v1.BlockStore/Lookup")(b"", timeout=60)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE, address
        assert "failed to connect" in refused.value.details()

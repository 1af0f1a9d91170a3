"""Tenants in a whole local system: keys through Serve's two proxies, real engines, a real store node, the real CLI. All
of it under TLS, mutual between its parts, and with a secret wherever it has one."""

import json
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from click.testing import CliRunner
from local_system import BLOCK_TOKENS, make_config, wait_until
from restricted_redis import ask as ask_redis
from transformers import LlamaForCausalLM

from headrace.admin.cli import main
from headrace.admin.create_certificates import create_certificates
from headrace.client import HeadraceClient, Sampling, TlsFailed
from headrace.core.errors import PermissionDenied, Unauthenticated
from headrace.core.tenants import HashedKey, new_key
from headrace.index.embedded_valkey import EmbeddedValkey
from headrace.index.redis_keys import acl_rules
from headrace_cluster.launch_local import down, launch_local
from headrace_cluster.local_instance import InstanceState

KEYS = {name: new_key() for name in ("one", "two", "operator")}
PROMPT = list(range(40, 40 + 6 * BLOCK_TOKENS))  # six blocks, of which a repeat can use five
HIT = 5 * BLOCK_TOKENS
REDIS, HUB, SALT = "canary-redis-4721", "hf_canary-hub-4722", "canary-salt-4723"
PROMPT_TEXT, WRONG_KEY = "canary-prompt-4724", "hr-canary-wrong-key-4725-" + "x" * 20
Ask = Callable[[str], int]


@pytest.fixture(scope="module")
def guarded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InstanceState]:
    """A system of one worker that drafts tokens, with certificates and a tenants file: two users and an operator."""
    directory = tmp_path_factory.mktemp("guarded")
    files = create_certificates(directory / "certs", hosts=("127.0.0.1", "localhost"), days=2)
    entries = [
        f"- {{name: {name}, role: {'admin' if name == 'operator' else 'user'}, keys: ['{HashedKey.of(key).spell()}']}}"
        for name, key in KEYS.items()
    ]
    (directory / "tenants.yaml").write_text("\n".join(["tenants:", *entries]))
    settings = {
        "prefill_workers": 0,
        "decode_workers": 1,
        "tenants_file": str(directory / "tenants.yaml"),
        "hash_algorithm": "sha256",
        "tls_cert_file": files.cert_file,
        "tls_key_file": files.key_file,
        "tls_ca_file": files.ca_file,
        "speculation": "ngram",
    }
    with pytest.MonkeyPatch.context() as environment, EmbeddedValkey() as server:
        environment.setenv("HF_TOKEN", HUB)
        assert ask_redis(server.url, f"ACL SETUSER canary reset on >{REDIS} {acl_rules()}") == "+OK\r\n"
        redis = urlsplit(server.url)
        url = f"redis://canary:{REDIS}@{redis.hostname}:{redis.port}{redis.path}"
        yield launch_local(make_config(tiny_model, directory / "state", redis_url=url, **settings), report=print)
        down(directory / "state", report=print)


@pytest.fixture(params=["http", "grpc"])
def ask(request: pytest.FixtureRequest, guarded: InstanceState) -> Ask:
    """Cached tokens of a request by a tenant, through either front door, each with a prompt of its own."""
    prompt = [*PROMPT, *(b"http" if request.param == "http" else b"grpc")]
    prompt = prompt[4:] if request.param == "http" else [*prompt[8:], 41, 43, 47, 53]

    def by_grpc(tenant: str) -> int:
        with client_of(guarded, KEYS[tenant]) as client:
            return client.generate(prompt, sampling=Sampling(max_tokens=2, ignore_eos=True)).usage.cached.total

    def by_http(tenant: str) -> int:
        body = {"model": model_name, "prompt": prompt, "max_tokens": 2, "ignore_eos": True}
        reply = post(guarded, "/v1/completions", body, KEYS[tenant])
        return reply["usage"]["prompt_tokens_details"]["cached_tokens"]

    with client_of(guarded, KEYS["operator"]) as client:
        model_name = client.list_models()[0].id
    return by_http if request.param == "http" else by_grpc


def client_of(system: InstanceState, key: str) -> HeadraceClient:
    return HeadraceClient(system.grpc_target, api_key=key, **system.client_tls)


def post(system: InstanceState, path: str, body: dict, key: str) -> dict:
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    asked = urllib.request.Request(system.http_url + path, json.dumps(body).encode(), headers)
    trusting = ssl.create_default_context(cafile=system.tls_ca_file)
    with closing(urllib.request.urlopen(asked, timeout=60, context=trusting)) as reply:
        return json.load(reply)


def cli(system: InstanceState, tenant: str, *arguments: str) -> dict:
    environment = {
        "HEADRACE_ADDRESS": system.grpc_target,
        "HEADRACE_API_KEY": KEYS[tenant],
        "HEADRACE_TLS_CA_FILE": system.tls_ca_file,
    }
    done = CliRunner(env=environment).invoke(main, [*arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_one_tenants_blocks_are_hit_listed_and_evicted_by_itself_only(guarded: InstanceState, ask: Ask):
    """The paired test with real engines, then scoped eviction by the CLI. Fails when a tenant hits, counts or evicts
    what another sent; void when nobody hits."""
    assert [ask(tenant) for tenant in ("one", "one", "two", "two", "one")] == [0, HIT, 0, HIT, HIT]

    def blocks_of(tenant: str) -> int:
        return cli(guarded, tenant, "cache", "ls", "--blocks")["total_blocks"]

    wait_until(lambda: blocks_of("one") == blocks_of("two") > 0, what="both tenants' blocks are stored")
    cli(guarded, "one", "cache", "evict", "--all", "--yes")
    assert (blocks_of("one"), ask("two")) == (0, HIT)
    assert ask("one") == 0
    cli(guarded, "two", "cache", "evict", "--all", "--yes")
    assert (ask("one"), ask("two")) == (HIT, 0)
    assert blocks_of("operator") >= blocks_of("one") + blocks_of("two")
    cli(guarded, "operator", "cache", "evict", "--all", "--yes")
    assert (ask("one"), ask("two")) == (0, 0)


def test_answers_with_drafts_are_the_plain_librarys_and_their_blocks_count_as_ever(
    guarded: InstanceState, tiny_model: Path
):
    """Through Serve, with a model that repeats itself. Fails when a draft changes a token, or what an answer left is
    reused to one block more or less than was computed."""
    model = LlamaForCausalLM.from_pretrained(tiny_model).eval()
    sampling, drafted = Sampling(max_tokens=3 * BLOCK_TOKENS, ignore_eos=True), 0
    with client_of(guarded, KEYS["one"]) as client:
        for seed in range(3):
            prompt = [*range(60 + seed, 60 + seed + BLOCK_TOKENS)] * 4  # what follows a token has been said before
            ids = torch.tensor([prompt])
            with torch.no_grad():
                for _ in range(sampling.max_tokens):
                    ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
            first = client.generate(prompt, sampling=sampling, timeout_s=60)
            assert first.token_ids == tuple(ids[0, len(prompt) :].tolist())
            assert first.usage.cached.total == 0
            turn = [*prompt, *first.token_ids, 50, 51]
            again = client.generate(turn, sampling=sampling, timeout_s=60)
            assert again.usage.cached.total == (len(turn) - 3) // BLOCK_TOKENS * BLOCK_TOKENS
            drafted += first.usage.drafted_tokens + again.usage.drafted_tokens
    assert drafted > 0, "void: nothing was drafted"


def test_a_call_without_a_known_key_is_refused_with_the_same_error_by_both_proxies(guarded: InstanceState):
    """Fails when Serve's proxies drop the key or the refusal's fields on their way."""
    for key in ("", new_key()):
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(guarded, "/v1/completions", {"model": "m", "prompt": "x"}, key)
        assert (refused.value.code, refused.value.headers["www-authenticate"]) == (401, "Bearer")
        with client_of(guarded, key) as client:
            for call in (client.list_models, client.stat, lambda client=client: client.generate("x")):
                with pytest.raises(Unauthenticated):
                    call()
    with client_of(guarded, KEYS["one"]) as client, pytest.raises(PermissionDenied):
        client.status()


def test_plain_text_gets_no_answer_at_either_front_door(guarded: InstanceState):
    """Fails when Serve's proxies serve one of their ports without TLS, as its gRPC proxy does by itself."""
    plain = guarded.http_url.replace("https://", "http://")
    with pytest.raises(OSError):  # noqa: PT011 - how a connection ends that nobody answers differs
        urllib.request.urlopen(plain + "/v1/models", timeout=60)
    with (
        HeadraceClient(guarded.grpc_target, api_key=KEYS["one"]) as client,
        pytest.raises(TlsFailed, match="it may want TLS"),
    ):
        client.list_models()


def test_the_command_line_finds_the_system_and_its_certificate_by_its_state(guarded: InstanceState):
    """Fails when `up` does not write down by which files it is called."""
    state_dir = Path(guarded.tls_ca_file).parents[1] / "state"
    environment = {"HEADRACE_STATE_DIR": str(state_dir), "HEADRACE_API_KEY": KEYS["operator"]}
    done = CliRunner(env=environment).invoke(main, ["status", "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["workers"]) == 1


def test_a_new_certificate_is_shown_by_both_front_doors_without_a_restart(guarded: InstanceState):
    """Fails when a proxy keeps the certificate that it started with, as Serve's HTTP proxy does by itself."""
    https = guarded.http_url.removeprefix("https://")
    before = {shown_at(address, guarded) for address in (https, guarded.grpc_target)}
    assert len(before) == 1
    directory = Path(guarded.tls_ca_file).parent
    create_certificates(directory, hosts=("127.0.0.1", "localhost"), days=3)
    new = ssl.PEM_cert_to_DER_cert((directory / "cert.pem").read_text())
    assert [shown_at(address, guarded) for address in (https, guarded.grpc_target)] == [new, new]
    assert new not in before
    for port in metrics_ports(guarded):
        assert shown_at(f"127.0.0.1:{port}", guarded) == new
    with client_of(guarded, KEYS["one"]) as client:  # and the parts, whose certificates changed, talk to each other
        answer = client.generate(PROMPT, sampling=Sampling(max_tokens=2, ignore_eos=True), timeout_s=60)
    assert len(answer.token_ids) == 2


def test_metrics_of_every_part_are_read_by_https_without_a_key(guarded: InstanceState):
    """As Prometheus reads them. Fails for a part that serves them in plain text beside its other ports' TLS."""
    trusting = ssl.create_default_context(cafile=guarded.tls_ca_file)
    for port in metrics_ports(guarded):
        with closing(urllib.request.urlopen(f"https://127.0.0.1:{port}/metrics", timeout=60, context=trusting)) as page:
            assert b"headrace_" in page.read()
        with pytest.raises(OSError):  # noqa: PT011 - how a connection ends that nobody answers differs
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60)


def metrics_ports(system: InstanceState) -> list[int]:
    """Of the worker, the store node and the gateway."""
    with client_of(system, KEYS["operator"]) as client:
        found = client.status()
    ports = [part.metrics_port for part in (*found.workers, *found.store_nodes, *found.gateways)]
    assert len(ports) == 3
    assert all(ports)
    return ports


def test_no_secret_is_in_any_file_of_rays_session_or_in_the_systems_log_which_others_cannot_read(
    guarded: InstanceState,
):
    """After everything above, and requests that hold secrets. Fails when Ray, Serve or one of our processes writes a
    key, a password or a prompt into a log that Ray's dashboard shows to whoever reaches it."""
    body = {"model": "m", "prompt": PROMPT_TEXT, "max_tokens": 2, "cache_salt": SALT}
    with client_of(guarded, KEYS["operator"]) as client:
        body["model"] = client.list_models()[0].id
    for key, changed in (
        (KEYS["one"], {}),
        (KEYS["one"], {"stream": True, "prompt_cache_key": PROMPT_TEXT}),
        (KEYS["one"], {"max_tokens": 10**9}),
        (KEYS["one"], {"model": PROMPT_TEXT}),
        (KEYS["one"], {"temperature": PROMPT_TEXT}),
        (WRONG_KEY, {}),
    ):
        with suppress(urllib.error.HTTPError, json.JSONDecodeError):
            post(guarded, "/v1/completions", body | changed, key)
    private = [
        line for line in (Path(guarded.tls_ca_file).parent / "key.pem").read_text().splitlines() if "-----" not in line
    ]
    state_dir = Path(guarded.tls_ca_file).parents[1] / "state"
    secrets = [REDIS, HUB, SALT, PROMPT_TEXT, WRONG_KEY, *KEYS.values(), *private]
    own = [path for path in (*state_dir.rglob("*"), Path(guarded.arena_path)) if path.is_file()]
    assert {path for path in own if path.stat().st_mode & 0o077 and path.stat().st_size} == set(), (
        "readable for others on this host"
    )
    logs = [path for path in Path(guarded.ray_temp_dir).rglob("*") if path.is_file() and not path.is_symlink()]
    logs += list(state_dir.rglob("*.log"))
    said = {path: path.read_bytes().decode(errors="replace") for path in logs}
    for kind in ("Gateway", "DecodeWorker", "proxy", "controller"):
        assert any(kind in path.name and text for path, text in said.items()), f"void: no log of {kind} was found"
    assert {(path, secret) for path, text in said.items() for secret in secrets if secret in text} == set()


def shown_at(address: str, system: InstanceState) -> bytes:
    """The certificate that a new connection is shown."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cafile=system.tls_ca_file)
    context.set_alpn_protocols(["h2", "http/1.1"])
    with (
        socket.create_connection((host, int(port)), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        shown = connection.getpeercert(binary_form=True)
    assert shown is not None
    return shown

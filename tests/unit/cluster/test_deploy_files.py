"""The files of `deploy/` are what Ray and Headrace take, and fit each other. No cloud is at hand: nothing starts."""

import importlib.util
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import cli as ray_cli
from ray.serve.schema import ServeDeploySchema
from ray.serve.scripts import cli as serve_cli

from headrace.config import load_config, settings_table
from headrace_cluster.proxy_http import CALLBACK, CALLBACK_VARIABLE
from headrace_cluster.serve_app import GRPC_SERVICER_FUNCTIONS, WORKER_ENVIRONMENT, serve_app

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
CLUSTER = yaml.safe_load((DEPLOY / "ray-cluster.yaml").read_text(encoding="utf-8"))
SERVE_FILES = sorted(DEPLOY.glob("serve*.yaml"))
each_serve_file = pytest.mark.parametrize("path", SERVE_FILES, ids=lambda path: path.stem)


def serve_config(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def environment_file() -> dict[str, str]:
    lines = (DEPLOY / "headrace.env.example").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def test_the_cluster_file_is_valid_for_rays_launcher():
    """Its own schema and checks, after its own defaults: fails for a misspelled key or an impossible number."""
    assert len(SERVE_FILES) == 2
    validate_config(prepare_config(CLUSTER))
    types = CLUSTER["available_node_types"]
    assert CLUSTER["max_workers"] >= sum(t.get("max_workers", 0) for t in types.values())
    assert types[CLUSTER["head_node_type"]]["resources"] == {"CPU": 0}  # no part of ours beside Ray's control store


def test_what_the_cluster_file_copies_is_there():
    for source in CLUSTER["file_mounts"].values():
        assert (ROOT / source).exists() or (ROOT / f"{source}.example").exists(), source


def words_of(command: str) -> list[list[str]]:
    return [shlex.split(part) for part in command.split(";") if part.strip()]


def check_options(group: click.Command, words: list[str]) -> None:
    """The command and every option that the words name exist."""
    command = group
    while isinstance(command, click.Group):
        command, words = command.commands[words[0]], words[1:]
    known = {spelling for parameter in command.params for spelling in parameter.opts}
    for word in words:
        assert not word.startswith("-") or word.partition("=")[0] in known, word


def test_what_nodes_run_are_commands_with_options_that_exist():
    commands = [c for key in ("head_start_ray_commands", "worker_start_ray_commands") for c in CLUSTER[key]]
    for command in [*commands, *CLUSTER["setup_commands"]]:
        subprocess.run(["bash", "-n", "-c", command], check=True)
    ray = [words[1:] for c in commands for words in words_of(c) if words[0].endswith("/ray")]
    assert [words[0] for words in ray] == ["stop", "start", "stop", "start"]
    for words in ray:
        check_options(ray_cli, words)
    # The way in from outside is a tunnel, and the token is asked for besides.
    assert "--dashboard-host=127.0.0.1" in ray[1]
    for path in re.findall(r"~/headrace/(\S+)", " ".join(CLUSTER["setup_commands"])):
        assert (ROOT / path).exists(), path
    # As in the images, torch is pinned.
    assert re.search(r"torch==\S+", " ".join(CLUSTER["setup_commands"]))[0] in (ROOT / "pyproject.toml").read_text()


def test_the_commands_that_the_files_tell_to_type_exist():
    text = "\n".join(path.read_text(encoding="utf-8") for path in DEPLOY.glob("*.yaml"))
    told = [
        shlex.split(line[1:], comments=True) for line in text.splitlines() if re.match(r"#   (ray|serve|cp) ", line)
    ]
    assert len(told) == 6
    for program, *words in told:
        if program in ("ray", "serve"):
            check_options({"ray": ray_cli, "serve": serve_cli}[program], words)
        for word in (word for word in words if word.startswith("deploy/") and "." in Path(word).name):
            assert (ROOT / word).exists() or (ROOT / f"{word}.example").exists(), word


def test_the_commands_that_the_page_on_ray_tells_to_type_exist():
    """Fails when Ray renames an option, or a module that is to be run is gone."""
    page = (ROOT / "docs" / "ray.md").read_text(encoding="utf-8")
    lines = [
        line for block in re.findall(r"^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL) for line in block.splitlines()
    ]
    told = [shlex.split(line, comments=True) for line in lines if re.search(r"\b(ray start|serve|python -m) ", line)]
    assert len(told) == 8
    for words in told:
        if "python" in words:
            assert importlib.util.find_spec(words[-1]) is not None, words
        else:
            check_options({"ray": ray_cli, "serve": serve_cli}[words[0]], words[1:])
        for word in (word for word in words if word.startswith("cluster/")):
            assert (ROOT / word).exists(), word


def test_the_environment_is_what_headrace_and_serve_read():
    """Fails for a variable under another name than its reader's."""
    variables = environment_file()
    assert variables[CALLBACK_VARIABLE] == CALLBACK
    assert WORKER_ENVIRONMENT.items() <= variables.items()
    assert variables["RAY_AUTH_MODE"] == "token"
    assert variables["RAY_AUTH_TOKEN"] == variables["RAY_REDIS_PASSWORD"] == ""  # secrets are not in the repository
    known = {f"HEADRACE_{name.upper()}" for name in settings_table()}
    assert {name for name in variables if name.startswith("HEADRACE_")} <= known
    load_config({}, environ={name: value for name, value in variables.items() if name in known})


@each_serve_file
def test_serve_takes_the_file_and_headrace_its_arguments(path: Path, monkeypatch: pytest.MonkeyPatch):
    """Fails for a misspelled key of Serve's (it forbids unknown ones), an unknown setting, or a bad value."""
    config = ServeDeploySchema.model_validate(serve_config(path))
    assert config.grpc_options.grpc_servicer_functions == GRPC_SERVICER_FUNCTIONS
    monkeypatch.setenv("HEADRACE_REDIS_URL", environment_file()["HEADRACE_REDIS_URL"])
    for app in config.applications:
        assert app.import_path == "headrace_cluster.serve_app:serve_app"
        assert app.logging_config.enable_access_log is False, "a line for each request fills disks"
        assert set(app.args) <= set(settings_table())
        bound = serve_app(app.args)._bound_deployment
        assert bound.name in {deployment.name for deployment in app.deployments}


@each_serve_file
def test_every_replica_finds_a_node_of_its_kind(path: Path):
    """Fails when a deployment asks for a resource that no node has, for a GPU where there is none, or for more than the
    cluster may grow to."""
    types = CLUSTER["available_node_types"].values()
    taken: dict[str, str] = {}
    for app in serve_config(path)["applications"]:
        args = app["args"]
        counts = {"Gateway": "gateways", "PrefillWorker": "prefill_workers", "DecodeWorker": "decode_workers"}
        wanted = {name: max(args[key], args.get(f"{key}_max", 0)) for name, key in counts.items()}
        deployments = {deployment["name"]: deployment["ray_actor_options"] for deployment in app["deployments"]}
        assert {name for name, most in wanted.items() if most} == set(deployments)
        for name, options in deployments.items():
            ((resource, amount),) = options["resources"].items()
            (node,) = (t for t in types if resource in t["resources"])
            assert node["max_workers"] * node["resources"][resource] // amount >= wanted[name]
            assert options.get("num_gpus", 0) <= node["resources"].get("GPU", 0)
            assert (options.get("num_gpus", 0) > 0) == (args["device"] == "cuda" and name != "Gateway")
            # Models side by side share no pool: a node's store node is one application's.
            assert taken.setdefault(resource, app["name"]) == app["name"]


def test_prefill_and_decode_grow_apart_each_between_its_own_numbers():
    (app,) = serve_config(DEPLOY / "serve.yaml")["applications"]
    decode, prefill = serve_app({**app["args"], "redis_url": "redis://h"})._bound_deployment.init_args[1:]
    scaling = [part._bound_deployment._deployment_config.autoscaling_config for part in (prefill, decode)]
    assert [(s.min_replicas, s.max_replicas) for s in scaling] == [(1, 4), (2, 8)]


def test_two_models_have_routes_and_indices_of_their_own():
    apps = serve_config(DEPLOY / "serve-two-models.yaml")["applications"]
    for differing in (
        [app["route_prefix"] for app in apps],
        [app["name"] for app in apps],
        [app["args"]["redis_url"] for app in apps],
        [app["args"]["model"] for app in apps],
    ):
        assert len(set(differing)) == len(apps) == 2

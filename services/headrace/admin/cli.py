"""`headrace`: the command line. This file only joins the commands; each noun has a file of its own."""

import click

from headrace import __version__
from headrace.admin.bench_commands import bench
from headrace.admin.bench_engine_command import engine
from headrace.admin.bench_simulator_command import simulator
from headrace.admin.bench_speculation_command import speculation
from headrace.admin.cache_commands import cache
from headrace.admin.cache_details import show_block, why_miss
from headrace.admin.cache_verify_command import cache_verify
from headrace.admin.certs_commands import certs
from headrace.admin.chat import chat
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

# Every command, by what it is for, in the order of the help.
SECTIONS: dict[str, tuple[click.Command, ...]] = {
    "Run a system": (demo, up, down, status, top_system, store_node),
    "Ask it": (chat, generate, models),
    "See, explain and steer what it does": (cache, explain, nodes, tenants, doctor),
    "Check, measure, plan and learn": (verify, diagnose, bench, simulate, plan, learn),
    "Set up": (config, certs, completion),
}


class Headrace(ErrorGroup):
    """The root of all commands."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by section."""
        width = max(map(len, self.commands))
        for title, commands in SECTIONS.items():
            rows = [(f"{c.name:{width}}", c.get_short_help_str(formatter.width - width - 6)) for c in commands]
            with formatter.section(title):
                formatter.write_dl(rows)


@click.group(cls=Headrace, epilog=EXIT_CODE_HELP, context_settings=CONTEXT)
@click.version_option(__version__, package_name="headrace")
def main() -> None:
    """Headrace: a distributed prefix cache for LLM inference.

    \b
    Begin with:
      headrace demo                          start a system, kill parts of it, and see that no answer changes
      headrace chat                          ask it, and see what was cached after each turn
      headrace cache ls --text               see what is cached
    """


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
for command in (engine, simulator, speculation):
    bench.add_command(command)
for commands in SECTIONS.values():
    for command in commands:
        main.add_command(command)

if __name__ == "__main__":
    main()

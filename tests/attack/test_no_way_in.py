"""What must not be in the code at all: ways for bytes from a network to become code, a command or a file's name."""

import ast
from pathlib import Path

import pytest
from store_kit import make_header, make_prompt, payload_of

from headrace.blocks.block_codec import encode_header
from headrace.blocks.disk_tier import open_disk
from headrace.blocks.host_arena import UNIT_BYTES, open_arena

ROOT = Path(__file__).parents[2]
SOURCES = [p for folder in ("services", "cluster") for p in (ROOT / folder).rglob("*.py") if "/wire/v1/" not in str(p)]
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "telnetlib", "xml"}
FORBIDDEN_NAMES = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_CALLS = {
    "os.system",
    "os.popen",
    "yaml.load",
    "yaml.full_load",
    "yaml.unsafe_load",
    "torch.load",
    "numpy.load",
}
# Who starts processes: each with a list of words of its own or an operator's, never with a request's.
STARTS_PROCESSES = {
    "services/headrace/bench/measure_fetch.py",
    "services/headrace/bench/vllm_peer.py",
    "services/headrace/engine/convert_gguf.py",
    "services/headrace/index/embedded_valkey.py",
    "services/headrace/store/end_when_stalled.py",
    "services/headrace/verify/store_process.py",
    "cluster/headrace_cluster/launch_local.py",
}
# What serves strangers opens no file by a name that came with a call: these open what settings or members name.
SERVING = ("gateway", "store", "prefill", "decode", "transfer", "wire", "core", "index")
OPENS_FILES = {
    "services/headrace/gateway/read_tenants.py",
    "services/headrace/gateway/tokenize_prompt.py",
    "services/headrace/index/embedded_valkey.py",
    "services/headrace/index/redis_connections.py",
    "services/headrace/store/budgets_file.py",
    "services/headrace/store/node_drain.py",  # opens the door to waiting readers, and no file
    "services/headrace/transfer/tls_files.py",
    "services/headrace/wire/generate.py",
}
OPENING = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "unlink"}
NO_FILES = {"held.read_bytes"}  # a counter's


def calls_of(tree: ast.AST):
    """Every call's name, as far as it is spelled: `f`, `m.f`, `.f`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield node.func.id, node
            elif isinstance(node.func, ast.Attribute):
                owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                yield f"{owner}.{node.func.attr}", node


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_from_a_network_can_become_code_a_command_or_a_path(path):
    name, tree = str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))
    imported = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imported |= {(n.module or "").split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert not imported & FORBIDDEN_MODULES
    assert "subprocess" not in imported or name in STARTS_PROCESSES
    for called, node in calls_of(tree):
        assert called not in FORBIDDEN_NAMES | FORBIDDEN_CALLS, f"line {node.lineno}: {called}"
        assert not any(k.arg == "shell" for k in node.keywords), f"line {node.lineno}"
        trusting = [k for k in node.keywords if k.arg == "trust_remote_code"]
        assert all(isinstance(k.value, ast.Constant) and k.value.value is False for k in trusting)
        if called.rpartition(".")[2] in OPENING and called not in NO_FILES:
            serves = any(name.startswith(f"services/headrace/{folder}/") for folder in SERVING)
            assert not serves or name in OPENS_FILES, f"line {node.lineno}: {called}"


def test_arenas_and_disk_tiers_are_readable_for_their_user_alone(tmp_path):
    """Fails when keys and values, which tell prompts, can be read by whoever else is on the host."""
    open_arena(tmp_path / "arena", 32 * UNIT_BYTES).close()
    disk = open_disk(tmp_path / "disk", 1 << 20, segments=4)
    header = make_header(make_prompt(1, 1), 0)
    spelled, payload = encode_header(header), payload_of(header)
    disk.write(disk.place(len(spelled), len(payload)), spelled, payload)
    disk.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 3
    assert {path: oct(path.stat().st_mode & 0o077) for path in files} == dict.fromkeys(files, "0o0")

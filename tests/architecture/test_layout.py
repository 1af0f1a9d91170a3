"""The repository keeps its own rules: the map is true, verb files hold their verb, nothing is left lying about."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import headrace
from headrace.wire.generate import COMMITTED, generate

ROOT = Path(__file__).parents[2]
SERVICES = ROOT / "services" / "headrace"
SOURCES = sorted(
    p
    for folder in (SERVICES, ROOT / "cluster" / "headrace_cluster")
    for p in folder.rglob("*.py")
    if "v1" not in p.relative_to(folder).parts
)
MAP_LINE = re.compile(r"^    (\S+\.py):(\w+)\s", re.MULTILINE)
VERBS = frozenset(
    "build choose convert decode evict explain fetch generate launch load prefill probe publish recover register "
    "render route sample schedule serve tokenize verify".split()
)
# A stem of one word (`engine.py`, `explain.py`) is a thing even where the word is also a verb.
VERB_FILES = [p for p in SOURCES if "_" in p.stem and p.stem.split("_")[0] in VERBS]
NOT_EMPTY = [p for p in SOURCES if p.name != "__init__.py" or p.read_text(encoding="utf-8").strip()]
# A port's in-memory twin may be used by tests only; a package is referenced by what is in it.
REFERENCED = [p for p in SOURCES if p.name not in ("__init__.py", "__main__.py") and not p.stem.startswith("memory_")]
LIMITS = [
    SERVICES / "core" / name
    for name in (
        "limits.py",
        "index_limits.py",
        "store_limits.py",
        "draft_limits.py",
        "overtake_limits.py",
        "telemetry_limits.py",
        "front_door_limits.py",
    )
]
VAGUE = ("utils", "common", "helpers", "manager", "base", "misc")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def top_level_functions(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [f.name for f in functions]


def test_the_map_of_a_request_names_what_exists():
    """Fails when a step is renamed or moved and the map is not."""
    steps = MAP_LINE.findall(headrace.__doc__ or "")
    assert len(steps) >= 8
    for file, function in steps:
        assert function in top_level_functions(SERVICES / file), f"{file}:{function}"


@pytest.mark.parametrize("path", VERB_FILES, ids=name_of)
def test_a_verb_file_holds_the_function_of_its_name_first(path: Path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    public = [
        n.name
        for n in tree.body
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and not n.name.startswith("_")
    ]
    assert public, f"{path.name} has no public function"
    assert public[0] == path.stem


@pytest.mark.parametrize("path", NOT_EMPTY, ids=name_of)
def test_every_module_says_what_it_owns(path: Path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), "no module docstring"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_can_be_read_in_one_sitting(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 450


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_names_say_what_a_file_is(path: Path):
    assert not any(word in path.stem.split("_") for word in VAGUE)


@pytest.mark.parametrize("path", REFERENCED, ids=name_of)
def test_no_module_is_unreferenced(path: Path):
    """Fails for a file that nothing imports, runs or names."""
    assert any(path.stem in words for file, words in words_by_file().items() if file != path)


@cache
def words_by_file() -> dict[Path, frozenset[str]]:
    """The words of each file that may name a module."""
    yamls = [path for folder in ("cluster", "helm") for path in (ROOT / folder).rglob("*.yaml")]
    files = [*SOURCES, *yamls, ROOT / "pyproject.toml", ROOT / "Makefile"]
    return {file: frozenset(re.findall(r"\w+", file.read_text(encoding="utf-8"))) for file in files}


def test_no_exception_is_swallowed_bare():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{path}:{node.lineno}: bare except"


@pytest.mark.parametrize("path", LIMITS, ids=name_of)
def test_every_limit_has_its_reason_above_it(path: Path):
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        if re.match(r"^[A-Z][A-Z_]+ = ", line):
            above = lines[number - 1]
            grouped = re.match(r"^[A-Z][A-Z_]+ = ", above)
            assert above.startswith("#") or grouped, f"{line} has no reason above it"


def test_every_limit_is_said_once_and_has_a_reader():
    """Fails for a second definition too, which would silently win over the first."""
    text = "\n".join(p.read_text(encoding="utf-8") for p in SOURCES if p not in LIMITS)
    names = [n for p in LIMITS for n in re.findall(r"^([A-Z][A-Z_]+) = ", p.read_text(), re.MULTILINE)]
    assert len(names) == len(set(names)), f"said twice: {sorted({n for n in names if names.count(n) > 1})}"
    assert not [name for name in names if name not in text]


def test_redis_keys_are_spelled_in_one_file():
    spelled = [str(p.relative_to(ROOT)) for p in SOURCES if "hr1:" in p.read_text(encoding="utf-8")]
    assert spelled == ["services/headrace/index/redis_keys.py"]


def test_channels_and_ports_of_grpc_are_opened_in_one_file():
    """Fails when there is a way between processes that knows nothing of TLS."""
    opening = re.compile(r"\b(in)?secure_channel\(|\.add_(in)?secure_port\(")
    opened = [name_of(p) for p in SOURCES if opening.search(p.read_text(encoding="utf-8"))]
    assert opened == ["services/headrace/transfer/channels.py"]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_who_opens_channels_says_by_which_certificates(path: Path):
    """Fails for a part that would talk in plain text to others that do not."""
    for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Channels":
            assert call.args or "bench" in path.parts, f"{name_of(path)}:{call.lineno}: Channels() without tls"


def test_grpc_codes_appear_in_one_file_of_the_request_path():
    """Fails when a second mapping of errors to codes appears."""
    mapped = [
        str(p.relative_to(SERVICES))
        for p in SOURCES
        if p.is_relative_to(SERVICES) and re.search(r"StatusCode\.[A-Z_]+:", p.read_text(encoding="utf-8"))
    ]
    assert mapped in ([], ["wire/status.py"])


def test_generated_code_is_what_the_protos_say(tmp_path):
    """Fails when a .proto was changed and `make proto` was not run."""
    generate(tmp_path)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_text() for path in COMMITTED.glob("*_pb2*")}


def test_tests_that_run_alone_are_where_make_looks_for_them():
    """Fails for a test that none of the two commands of `make test` runs."""
    folders = re.search(r"^ALONE := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1].split()
    files = (ROOT / "tests").rglob("*.py")
    marked = [p for p in files if re.search(r"mark\.alone", p.read_text(encoding="utf-8"))]
    assert len(marked) >= len(folders)
    assert not [name_of(p) for p in marked if not any(p.is_relative_to(ROOT / folder) for folder in folders)]

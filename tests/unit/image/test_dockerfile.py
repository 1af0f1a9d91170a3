"""What the Dockerfile names exists, and what it installs runs as its user, from files that nobody may write.

No image can be built here. So the file is read as Docker reads it (stages, copies, users), and its steps that make and
install the wheel are run in a clean environment, with the dependencies of this one beside it.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from free_ports import free_ports
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "Dockerfile"
TARGETS = ("cpu", "cuda")
START_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Stage:
    """One stage: what it starts from and its instructions, in order."""

    name: str
    parent: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [text for name, text in self.steps if name == instruction]


def read_dockerfile() -> dict[str, Stage]:
    """Stages by name, with `ARG`s before the first one put in."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    stages: dict[str, Stage] = {}
    arguments: dict[str, str] = {}
    stage: Stage | None = None
    for line in filter(None, map(str.strip, text.splitlines())):
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            image, _, name = re.sub(r"\$\{(\w+)\}", lambda m: arguments[m[1]], rest).partition(" AS ")
            stage = stages[name] = Stage(name, image)
        elif stage is None:
            key, _, value = rest.partition("=")
            arguments[key] = value
        else:
            stage.steps.append((instruction, rest.strip()))
    return stages


STAGES = read_dockerfile()


def lineage(name: str) -> list[Stage]:
    """The stage and those that it builds upon, the first one first."""
    stage = STAGES[name]
    return [*(lineage(stage.parent) if stage.parent in STAGES else []), stage]


def last(name: str, instruction: str) -> str:
    return [text for stage in lineage(name) for text in stage.all(instruction)][-1]


def copies() -> list[tuple[str, list[str], str]]:
    """From where ("" for the checkout), sources and destination of each COPY."""
    found = []
    for text in (text for stage in STAGES.values() for text in stage.all("COPY")):
        words = shlex.split(text)
        options = dict(word[2:].split("=", 1) for word in words if word.startswith("--"))
        paths = [word for word in words if not word.startswith("--")]
        found.append((options.get("from", ""), paths[:-1], paths[-1]))
    return found


def ignored(path: str) -> bool:
    """What .dockerignore says of a path: the last line that fits it, or a folder that it is in, counts."""
    verdict = False
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.lstrip("!")
        if (
            line
            and not line.startswith("#")
            and any(fnmatch(str(part), pattern) for part in (Path(path), *Path(path).parents) if str(part) != ".")
        ):
            verdict = not line.startswith("!")
    return verdict


def test_what_is_copied_is_there_and_goes_to_the_builder():
    sources = [source for origin, paths, _ in copies() for source in paths if not origin]
    assert len(sources) >= 7
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not ignored(source), source
    assert ignored("tests")
    assert ignored(".git")


def test_stages_copy_from_stages_that_make_what_they_copy():
    for origin, paths, _ in copies():
        if origin:
            assert origin in STAGES
            made = " ".join(text for stage in lineage(origin) for text in stage.all("RUN"))
            assert all(path in made for path in paths), (origin, paths)


def test_the_base_image_and_every_package_are_pinned():
    """Fails for a tag that moves, a package without a version, or one that pyproject.toml asks for without a pin."""
    assert {stage.parent for stage in STAGES.values() if stage.parent not in STAGES} == {"python:3.11.14-slim-bookworm"}
    lines = [line for line in (ROOT / "docker" / "requirements.txt").read_text("utf-8").splitlines() if line[0] != "#"]
    pinned = dict(line.split("==") for line in lines)
    assert len(pinned) == len(lines) > 80
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(line for name in extras if name != "dev" for line in extras[name])]
    for requirement in (Requirement(line) for line in asked):
        if requirement.name == "torch":
            assert str(requirement.specifier) == f"=={re.search('TORCH_VERSION=(.*)', DOCKERFILE.read_text())[1]}"
        elif requirement.name != "headrace":
            name = re.sub(r"[-_.]+", "-", requirement.name).lower()
            assert requirement.specifier.contains(pinned[name]), name


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_as_the_charts_user_with_the_commands_that_its_pods_call(target: str):
    values = yaml.safe_load((ROOT / "helm" / "headrace" / "values.yaml").read_text(encoding="utf-8"))
    security = values["podSecurity"]
    assert last(target, "USER") == f"{security['runAsUser']}:{security['runAsGroup']}"
    assert f"useradd --uid {security['runAsUser']}" in " ".join(STAGES["runtime"].all("RUN"))
    environment = dict(
        pair.split("=", 1) for stage in lineage(target) for text in stage.all("ENV") for pair in shlex.split(text)
    )
    assert environment["HOME"] == "/home/headrace"  # where the chart mounts a volume
    assert environment["PATH"].startswith("/opt/headrace/bin:")
    assert {"/opt/headrace"} <= {destination for _, _, destination in copies()}
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert json.loads(last(target, "ENTRYPOINT"))[0] in scripts
    ports = {port for stage in lineage(target) for text in stage.all("EXPOSE") for port in text.split()}
    assert ports == {"8000", "9000"}


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_says_what_it_is_and_how_it_does(target: str):
    labels = dict(
        pair.split("=", 1) for stage in lineage(target) for text in stage.all("LABEL") for pair in shlex.split(text)
    )
    wanted = {"title", "description", "licenses", "version", "revision"}
    assert {f"org.opencontainers.image.{name}" for name in wanted} <= set(labels)
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert f"VERSION={version}" in STAGES["runtime"].all("ARG")
    options, _, command = last(target, "HEALTHCHECK").partition("CMD ")
    (program,) = json.loads(command)
    assert any(destination == f"/usr/local/bin/{program}" for _, _, destination in copies())
    assert float(re.search(r"--timeout=(\d+)s", options)[1]) > 4.0  # what the check allows itself


def test_no_secret_is_baked_in():
    text = DOCKERFILE.read_text(encoding="utf-8").upper()
    assert not re.search(r"(ARG|ENV)[^\n]*(TOKEN|PASSWORD|SECRET|API_KEY)=", text.replace("TORCH_INDEX", ""))


def not_root() -> list[str]:
    """Words before a command that make it run as nobody, who may read all and write nothing that is root's.

    Reading all is for the tests' own interpreter, which may lie in somebody's home. Nothing where we are not root.
    """
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return []
    capabilities = ["--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"]
    return ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs", *capabilities, "--"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of a clean environment into which the Dockerfile's wheel was installed, as root or whoever we are."""
    folder = tmp_path_factory.mktemp("image")
    folder.parent.chmod(0o755)
    source, wheels, environment = folder / "src", folder / "wheels", folder / "headrace"
    source.mkdir()
    for origin, paths, destination in copies():
        if origin or destination not in ("./", *paths):
            continue
        for path in paths:
            copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy
            copy(ROOT / path, source / path)
    _, build = STAGES["wheel"].all("RUN")
    # What builds it is not fetched but ours.
    words = [*shlex.split(build.replace("/wheels", str(wheels))), "--quiet"]
    subprocess.run([sys.executable, "-m", *words], cwd=source, check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(environment),
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
    ]
    subprocess.run([*install, *map(str, wheels.glob("*.whl"))], check=True)
    packages = next(environment.glob("lib/python3*/site-packages"))
    here = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    # Behind the clean one; and a path in a .pth file, so that the .pth file of this checkout there is not read.
    (packages / "zz_dependencies.pth").write_text(f"{here}\n", encoding="utf-8")
    return environment / "bin"


def run_as_nobody(words: list[str], folder: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    home = folder / "home"
    home.mkdir(exist_ok=True)
    home.chmod(0o777)
    variables = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    return subprocess.run([*not_root(), *words], cwd=home, env=variables, capture_output=True, text=True, timeout=120)


def test_the_installed_command_runs_as_somebody_who_may_not_write_it(installed: Path, tmp_path: Path):
    """From the wheel, not from this checkout; fails when a file of the package is left out of the wheel."""
    shown = run_as_nobody([str(installed / "headrace"), "--help"], tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "store-node" in shown.stdout
    program = "import os, headrace, headrace_cluster.serve_app as app"
    program += "; print(headrace.__path__[0], app.__file__, os.geteuid())"
    program += "; assert os.geteuid() == 0 or not os.access(headrace.__path__[0], os.W_OK)" if not_root() else ""
    where = run_as_nobody([str(installed / "python"), "-c", program], tmp_path)
    assert where.returncode == 0, where.stderr
    package, cluster, user = where.stdout.split()
    assert Path(package).is_relative_to(installed.parent)
    assert Path(cluster).is_relative_to(installed.parent)
    assert user == (str(os.geteuid()) if not not_root() else "65534")


def test_every_file_that_the_packages_read_is_in_the_wheel(installed: Path):
    """Fails for a script, a profile or a config that setuptools was not told of."""
    (packages,) = installed.parent.glob("lib/python3*/site-packages")
    source = installed.parents[1] / "src"
    for base, name in ((source / "services", "headrace"), (source / "cluster", "headrace_cluster")):
        read = {path.relative_to(base) for path in (base / name).rglob("*") if path.is_file()}
        read = {path for path in read if path.suffix not in (".pyc", ".proto") and "__pycache__" not in path.parts}
        assert {path for path in read if not (packages / path).exists()} == set()


@pytest.fixture
def store_node(installed: Path, tmp_path: Path) -> Iterator[str]:
    """gRPC address of a store node that was started from the wheel, as nobody. Its Redis is away, which it bears."""
    (port,) = free_ports(1)
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o777)
    tmp_path.chmod(0o755)
    words = [str(installed / "headrace"), "store-node", "--redis-url", "redis://127.0.0.1:1/0", "--arena-mb", "16"]
    words += ["--arena-dir", str(home), "--node-id", "image-test", "--store-port", str(port)]
    variables = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*not_root(), *words], cwd=home, env=variables, stdout=subprocess.PIPE, stderr=output
        )
    try:
        assert process.stdout is not None
        record = process.stdout.readline()  # the test's own timeout is the bound
        assert record, log.read_text()
        yield json.loads(record)["address"]
    finally:
        process.terminate()
        process.wait(START_TIMEOUT_S)


def health(installed: Path, tmp_path: Path, asked: str) -> "subprocess.CompletedProcess[str]":
    check = next(paths[0] for origin, paths, _ in copies() if not origin and paths[0].endswith("healthcheck.py"))
    return run_as_nobody([str(installed / "python"), str(ROOT / check)], tmp_path, HEADRACE_HEALTHCHECK=asked)


def test_the_health_check_tells_a_store_node_that_serves_from_none(installed: Path, store_node: str, tmp_path: Path):
    tries = (health(installed, tmp_path, f"grpc://{store_node}") for _ in range(10))  # each has four seconds for it
    well = next((done for done in tries if done.returncode == 0), None)
    assert well is not None
    assert well.stdout == "healthy\n"
    ill = health(installed, tmp_path, "grpc://127.0.0.1:1")
    assert (ill.returncode, ill.stdout) == (1, "127.0.0.1:1: UNAVAILABLE\n")
    assert health(installed, tmp_path, "http://127.0.0.1:1/ready").returncode == 1
    assert health(installed, tmp_path, "what").returncode == 1


def test_the_health_check_asks_by_default_what_the_chart_calls_alive(installed: Path):
    default = re.search(
        r'^DEFAULT = "http://127.0.0.1:(\d+)(.*)"', (ROOT / "docker" / "healthcheck.py").read_text(), re.M
    )
    template = (ROOT / "helm" / "headrace" / "templates" / "_pods.tpl").read_text(encoding="utf-8")
    alive = re.search(r"livenessProbe:\n  httpGet:\n    path: (\S+)\n    port: (\d+)", template)
    assert default.groups() == (alive[2], alive[1])


@pytest.mark.skipif("HEADRACE_IMAGE_CHECK" not in os.environ, reason="installs 2 GB, for minutes: make image-check")
@pytest.mark.timeout(1800)
def test_the_whole_installation_fits_together_and_its_command_runs(installed: Path, tmp_path: Path):
    """The steps of the CPU image in a clean environment, all fetched: fails for pins that contradict each other."""
    environment, torch = tmp_path / "headrace", re.search("TORCH_VERSION=(.*)", DOCKERFILE.read_text())[1]
    paths = {
        "/opt/headrace": str(environment),
        "/requirements.txt": str(ROOT / "docker" / "requirements.txt"),
        "/wheels": str(installed.parents[1] / "wheels"),
    }
    for step in (step for name in ("packages", "packages-cpu") for step in STAGES[name].all("RUN")):
        for path, here in paths.items():
            step = step.replace(path, here)
        subprocess.run(["/bin/sh", "-ec", step], env={**os.environ, "TORCH_VERSION": torch}, check=True)
    shown = run_as_nobody([str(environment / "bin" / "headrace"), "verify", "--help"], tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert run_as_nobody([str(environment / "bin" / "ray"), "--version"], tmp_path).stdout == "ray, version 2.60.0\n"

"""Prints docker/requirements.txt: the versions, in this environment, of all that an image needs but torch.

    python docker/pin_packages.py > docker/requirements.txt

Owns which extras an image has. torch is left out with what only torch needs: its builds differ, and so do their needs.
"""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
NOT_IN_IMAGES = {"dev"}
NOT_PINNED_HERE = {"torch", "headrace"}


def pin_packages() -> list[str]:
    """`name==version` for each package, in order of name. Raises PackageNotFoundError for one that is not installed."""
    found: dict[str, str] = {}
    waiting = image_requirements()
    while waiting:
        requirement = waiting.pop()
        name = canonical(requirement.name)
        if name in NOT_PINNED_HERE:
            continue
        installed = distribution(name)
        known = name in found
        found[name] = installed.version
        if known and not requirement.extras:
            continue
        for line in installed.requires or []:
            needed = Requirement(line)
            wanted = {"", *requirement.extras}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in wanted):
                waiting.append(needed)
    return [f"{name}=={version.partition('+')[0]}" for name, version in sorted(found.items())]


def image_requirements() -> list[Requirement]:
    """What pyproject.toml asks for, in all extras that an image has."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for name in extras if name not in NOT_IN_IMAGES for line in extras[name])]
    return [Requirement(line) for line in lines]


def canonical(name: str) -> str:
    """A package's name in the one spelling that pins have."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    try:
        print("# Made by docker/pin_packages.py; torch is pinned in the Dockerfile.")
        print("\n".join(pin_packages()))
    except PackageNotFoundError as missing:
        raise SystemExit(f"install it first: {missing.name}") from missing

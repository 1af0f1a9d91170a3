"""One cluster for all tests of several hosts; they are skipped, with the reason, where no hosts can be made."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet import Fleet, make_model, start_fleet
from hosts import Network, why_no_hosts


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    if reason := why_no_hosts():
        pytest.skip(f"several hosts on one machine: {reason}")
    directory: Path = tmp_path_factory.mktemp("hosts")
    network = Network(directory)
    try:
        with start_fleet(network, directory, make_model(directory / "tiny-llama")) as fleet:
            yield fleet
    finally:
        network.close()

"""Fuzzers find what they share beside them, and the system that attacks are made on."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "attack")]


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory):
    """One system for all fuzzers of a file."""
    from fuzzed_system import fuzzed_system
    from tiny_gateway import write_tokenizer

    with fuzzed_system(
        write_tokenizer(tmp_path_factory.mktemp("tiny-model")), tmp_path_factory.mktemp("fuzzed")
    ) as system:
        yield system

"""Certificates, made once for the run; a test that replaces files makes its own."""

from pathlib import Path

import pytest
from certificates_kit import Pki, make_pki
from tiny_gateway import write_tokenizer


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return make_pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokenizer(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture
def own_pki(tmp_path: Path) -> Pki:
    return make_pki(tmp_path)

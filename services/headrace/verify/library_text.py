"""Text that is always there: what this library's own files say. Code and prose, more than any check needs."""

import ast
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path

from tokenizers import Tokenizer

import headrace

PROSE_FOLDERS = ("core", "engine", "store", "transfer")


def code_tokens(tokenizer: Tokenizer) -> list[int]:
    """Token ids of the core's source."""
    return _encode(tokenizer, "\n".join(path.read_text(encoding="utf-8") for path in _files("core")))


def prose_tokens(tokenizer: Tokenizer) -> list[int]:
    """Token ids of the docstrings of some parts of the library: English sentences about one subject."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for folder in PROSE_FOLDERS for path in _files(folder))
    return _encode(tokenizer, "\n\n".join(docstring for tree in trees for docstring in _docstrings(tree)))


def _docstrings(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    docstring = ast.get_docstring(node)
    if docstring:
        yield docstring
    for inner in node.body:
        if isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(inner)


def cut(token_ids: Sequence[int], offset: int, num_tokens: int) -> list[int]:
    """So many tokens of a text from some token on; it begins again where it ends."""
    return list(islice(cycle(token_ids), offset, offset + num_tokens))


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _files(folder: str) -> list[Path]:
    """Of the library, without what is generated."""
    paths = (Path(headrace.__file__).parent / folder).rglob("*.py")
    return sorted(path for path in paths if path.parent.name != "v1")

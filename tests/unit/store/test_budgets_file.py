"""The file of a node's budgets: found again whole, in its old or its new state, or else ignored."""

import logging
from pathlib import Path

import pytest
from crash_points import Death, ProcessDied

from headrace.core.block import NamespaceId
from headrace.core.budgets import Budget
from headrace.store import budgets_file
from headrace.store.budgets_file import BudgetsFile


def test_a_table_is_read_back_as_it_was_written_and_leaves_with_its_arena(tmp_path: Path):
    file = BudgetsFile(tmp_path / "headrace-n1.arena")
    assert file.read() == ()
    table = (
        Budget("", set_by="x"),
        Budget("group:é", (NamespaceId("a" * 32), NamespaceId("b" * 32)), 2**60, 5, 1_700_000_000_000, "op"),
    )
    file.write(table)
    file.write(table)
    assert file.read() == table
    assert [path.name for path in tmp_path.iterdir()] == ["headrace-n1.arena.budgets"]
    file.remove()
    file.remove()
    assert file.read() == ()


def test_a_process_that_dies_while_it_writes_leaves_the_old_table_or_the_new_one(tmp_path: Path):
    """Fails when the file is written in place: then a death in the middle costs the whole table."""
    file, old, new = BudgetsFile(tmp_path / "headrace-n1.arena"), (Budget("old"),), (Budget("new"),)
    found = []
    for lines in range(1, 30):
        file.write(old)
        with pytest.raises(ProcessDied), Death(lines, [budgets_file]):
            file.write(new)
        found.append(file.read())
    assert set(found) == {old, new}
    assert found == sorted(found, key=[old, new].index)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b'{"version": 2, "budgets": []}',
        b'{"version": 1}',
        b'{"version": 1, "budgets": [{}]}',
        b'{"version": 1, "budgets": 3}',
        b'{"version": 1, "budgets": [{"account": 1, "namespaces": [], "bytes_max": null, "bytes_min": 0,'
        b' "set_unix_ms": 0, "set_by": ""}]}',
        b'{"version": 1, "budgets": [{"account": "a", "namespaces": [], "bytes_max": 1, "bytes_min": 2,'
        b' "set_unix_ms": 0, "set_by": ""}]}',
        b'{"version": 1, "budgets": [{"account": "a", "namespaces": [], "bytes_max": true, "bytes_min": 0,'
        b' "set_unix_ms": 0, "set_by": ""}]}',
        b"\xff\xfe",
    ],
)
def test_a_broken_file_is_logged_and_ignored(tmp_path: Path, caplog, text: bytes):
    file = BudgetsFile(tmp_path / "headrace-n1.arena")
    (tmp_path / "headrace-n1.arena.budgets").write_bytes(text)
    with caplog.at_level(logging.WARNING, logger=budgets_file.__name__):
        assert file.read() == ()
    assert "not in force" in caplog.text


def test_a_file_that_cannot_be_written_is_logged(tmp_path: Path, caplog):
    with caplog.at_level(logging.WARNING, logger=budgets_file.__name__):
        BudgetsFile(tmp_path / "nowhere" / "headrace-n1.arena").write((Budget("a"),))
    assert "would not outlive" in caplog.text

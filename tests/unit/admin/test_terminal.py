"""Tables as people and programs read them: columns that line up, nothing in pieces, nothing that steers a terminal."""

import os
import pty
import subprocess
import sys
import termios

import pytest

from headrace.admin.terminal import FOLDED_CHARS_MIN, table_lines

HASH = "5d0c5b1e0f9a4c0d8e7f6a5b4c3d2e1f"


def test_columns_are_as_wide_as_their_widest_cell_and_numbers_stand_under_each_other():
    """Fails when a heading is left out of the width, or a number is aligned as text is."""
    lines = table_lines(["holder ", "blocks"], [["node:a", "7"], ["b", "1,234,567"]])
    assert lines == ["holder      blocks", "node:a           7", "b        1,234,567"]


def test_a_sign_that_takes_two_columns_shifts_nothing_behind_it():
    lines = table_lines(["text ", "tokens"], [["日本", "4"], ["abcd", "5"]])
    assert [line[-1] for line in lines[1:]] == ["4", "5"]
    assert lines[1] == "日本        4"


@pytest.mark.parametrize("width", [20, 79, 80])
def test_in_a_narrow_terminal_a_hash_stays_in_one_piece(width):
    """Fails when what an operator wants to copy is folded into a column of a few signs."""
    lines = table_lines(["holder ", "prefix ", "tokens"], [["node:a", HASH, "12"]], width=width)
    assert len(lines) == 2
    assert HASH in lines[1]


def test_text_in_the_last_column_is_folded_where_there_is_room_for_words():
    """Fails when it is not, when lines are longer than the terminal, or when a word of it is lost."""
    meaning = "Share of the arena that pinned prefixes may take; a pin beyond it is refused."
    rows = [["pin_share", meaning]]
    lines = table_lines(["setting ", "meaning "], rows, width=12 + FOLDED_CHARS_MIN)
    assert max(map(len, lines)) <= 12 + FOLDED_CHARS_MIN
    assert " ".join(" ".join(lines[1:]).split()) == f"pin_share {meaning}"
    assert len(table_lines(["setting ", "meaning "], rows, width=11 + FOLDED_CHARS_MIN)) == 2


def test_what_users_sent_cannot_steer_the_terminal_of_who_looks_at_it():
    """Fails when an escape sequence in a prompt reaches an operator's terminal."""
    (_, line) = table_lines(["text "], [["a\x1b]0;title\x07b\x9b2Jc\nd"]])
    assert line == "a\\x1b]0;title\\x07b\\x9b2Jc d"


def test_a_table_without_rows_is_its_heading():
    assert table_lines(["gateway ", "pid"], []) == ["gateway   pid"]


def test_on_a_terminal_the_width_is_the_terminals_and_the_heading_is_bold():
    """Fails when a terminal is taken for a pipe."""
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (24, 60))
    bare = {name: value for name, value in os.environ.items() if name not in ("LINES", "COLUMNS")}
    command = [sys.executable, "-m", "headrace.admin.cli", "config", "show"]
    with subprocess.Popen(command, stdout=its, stderr=its, env=bare | {"TERM": "xterm"}) as process:
        os.close(its)
        shown = b"".join(iter(lambda: _read(ours), b"")).decode()
    os.close(ours)
    assert process.returncode == 0
    assert shown.startswith("\x1b[1msetting")
    assert "\r\nblock_tokens" in shown


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65_536)
    except OSError:  # the other end is closed
        return b""

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


@pytest.mark.parametrize("width", [72, 100])
@pytest.mark.parametrize(
    ("columns", "before"),
    [
        (["header ", " "], ["narrowed from"]),
        (["model ", "context", "block", "namespace "], ["SmolLM2-135M", "8,192 tokens", "16 tokens"]),
        (["hits", "tokens", "size", "age", "model ", "last block "], ["3", "3,120", "13.0 KiB", "30 s", "SmolLM2"]),
    ],
    ids=["cache show", "models", "cache top"],
)
@pytest.mark.parametrize("last", [HASH, HASH * 2, f"node:rack-4-slot-7 has {HASH} and node:rack-4-slot-8 has not"])
def test_folding_takes_no_word_to_pieces(columns, before, last, width):
    """Fails when a hash, or a name with hyphens, in the last column is cut where the terminal ends."""
    shown = " ".join(table_lines(columns, [[*before, last]], width=width)[1:])
    assert set(shown.split()) >= set(last.split())


def test_without_a_width_nothing_is_folded():
    """Fails when a view that cuts its lines itself, as `top` does, gets more lines than rows."""
    assert len(table_lines(["text "], [["word " * 200]])) == 2


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


@pytest.mark.parametrize("code", [*range(0x202A, 0x202F), *range(0x2066, 0x206A)], ids=hex)
def test_what_users_sent_cannot_turn_the_direction_of_what_is_read(code):
    """Fails when a prompt makes an operator read the cells behind it backwards."""
    (_, line) = table_lines(["text ", "tokens"], [[f"a{chr(code)}b", "12"]])
    assert line == f"a\\u{code:04x}b       12"


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
        try:
            shown = b"".join(iter(lambda: _read(ours), b"")).decode()
            assert process.wait(120) == 0
        finally:
            process.kill()  # what hangs would be waited for
            os.close(ours)
    assert shown.startswith("\x1b[1msetting")
    assert "\r\nblock_tokens" in shown


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65_536)
    except OSError:  # the other end is closed
        return b""

"""`cache top` against a real gRPC server: rates between looks, on a terminal, in a pipe and as JSON."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time

import pytest
from click.testing import CliRunner

from headrace.admin.cli import main
from headrace.admin.holder_rates import rate_holders
from headrace.client import HeadraceClient, HolderStat


@pytest.fixture
def run(small_gateway, tmp_path, monkeypatch):
    """Run `headrace ...` against the small gateway, away from this user's own settings."""
    monkeypatch.setenv("HEADRACE_ADDRESS", small_gateway.address)
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path))
    with HeadraceClient(small_gateway.address) as client:
        for _ in range(2):
            client.generate("aaaabbbbcccc.")
    return lambda *args, **kwargs: CliRunner().invoke(main, list(args), catch_exceptions=False, **kwargs)


def make_stat(holder: str = "node:a", tier: str = "host", error: str = "", **counts: int) -> HolderStat:
    names = "incarnation total_blocks free_blocks committed_blocks reserved_blocks leased_blocks block_bytes".split()
    zeros = dict.fromkeys([*names, "lookups_tokens", "hits_tokens", "evicted_blocks"], 0)
    return HolderStat(holder=holder, tier=tier, error=error, **{**zeros, **counts})


def test_rates_are_what_grew_in_the_time_between_of_the_same_tier():
    """Fails when a rate is of totals, of another tier, or not by the second."""
    before = [make_stat(lookups=10, lookups_tokens=100, hits_tokens=50, read_bytes=1_000, evicted_blocks=4)]
    grown = make_stat(
        lookups=30, lookups_tokens=180, hits_tokens=70, read_bytes=5_000, written_bytes=600, evicted_blocks=5
    )
    rates, disk = rate_holders(before, [grown, make_stat(tier="disk", lookups=9)], elapsed_s=2.0)
    assert (rates.lookups_per_s, rates.token_hit_rate, rates.read_bytes_per_s) == (10, 0.25, 2_000)
    assert (rates.written_bytes_per_s, rates.evicted_blocks_per_s) == (300, 0.5)
    assert disk.lookups_per_s is None


def test_there_is_no_rate_over_a_restart_or_a_silence():
    """Fails when a holder that counts from zero again shows negative or huge rates."""
    was = make_stat(lookups=10, read_bytes=5)
    for before, now in (
        (was, make_stat(lookups=3)),
        (was, make_stat(lookups=20, read_bytes=4)),
        (was, make_stat(error="gone")),
        (make_stat(error="gone"), make_stat(lookups=900)),
    ):
        (rates,) = rate_holders([before], [now], elapsed_s=1.0)
        assert (rates.lookups_per_s, rates.token_hit_rate) == (None, None)


def test_nothing_looked_up_is_no_hit_rate_of_zero():
    (rates,) = rate_holders([make_stat()], [make_stat()], elapsed_s=1.0)
    assert (rates.lookups_per_s, rates.token_hit_rate) == (0, None)


def test_once_shows_the_rates_of_one_interval_and_ends(run, small_gateway):
    """Fails when --once shows totals, or needs a terminal."""
    small_gateway.looked_up_between = 400
    found = json.loads(run("cache", "top", "--once", "--every", "0.5", "--json").stdout)
    node = next(holder for holder in found["holders"] if holder["holder"] == "node:here")
    assert found["interval_s"] >= 0.5
    assert node["lookups_per_s"] == pytest.approx(40 / found["interval_s"])
    assert node["token_hit_rate"] == 0.25
    assert [prefix["hits"] for prefix in found["prefixes"]] == [3]
    shown = run("cache", "top", "--once", "--every", "0.2")
    assert shown.exit_code == 0
    assert "\x1b" not in shown.stdout
    assert "look-ups" in shown.stdout


def test_prefixes_show_their_text_only_when_asked_for_and_are_left_out_with_0(run):
    assert "aaaa" not in run("cache", "top", "--once", "--every", "0.2").stdout
    assert "aaaa" in run("cache", "top", "--once", "--every", "0.2", "--text").stdout
    assert "last block" not in run("cache", "top", "--once", "--every", "0.2", "--prefixes", "0").stdout


def test_a_holder_that_does_not_answer_is_named_and_once_exits_9(run, small_gateway):
    small_gateway.silent_holders = {"worker:d0"}
    for prefixes in ("0", "3"):
        done = run("cache", "top", "--once", "--every", "0.2", "--prefixes", prefixes)
        assert done.exit_code == 9
        assert "incomplete: worker:d0: did not answer" in done.output


def test_a_holder_that_tells_its_blocks_and_not_its_books_is_named_too(run, small_gateway):
    """Fails when a listing that is whole hides that the rates are not."""
    small_gateway.bookless_holders = {"worker:d0"}
    assert run("cache", "top", "--once", "--every", "0.2", "--prefixes", "3").exit_code == 9


def start_top(small_gateway, *options: str, **streams) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "headrace.admin.cli", "cache", "top", "--address", small_gateway.address]
    return subprocess.Popen([*command, "--every", "0.2", *options], **streams)


def test_a_pipe_gets_one_json_document_a_line_and_ctrl_c_ends_it_cleanly(run, small_gateway):
    """Fails when output is held back until a buffer is full, or an interrupt ends in a traceback."""
    process = start_top(small_gateway, "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    lines = [process.stdout.readline() for _ in range(2)]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert all(json.loads(line)["holders"] for line in lines)
    assert (process.returncode, errors) == (0, b"")


def test_on_a_terminal_it_is_drawn_in_place_and_leaves_the_cursor_visible(run, small_gateway):
    """Fails when looks scroll by, or Ctrl-C leaves a terminal without its cursor."""
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (40, 110))
    # The size is the terminal's; a test runner may have said another.
    environment = {name: value for name, value in os.environ.items() if name not in ("LINES", "COLUMNS")}
    process = start_top(small_gateway, stdin=its, stdout=its, stderr=its, env=environment | {"TERM": "xterm"})
    os.close(its)
    seen, give_up_at = b"", time.monotonic() + 150
    while seen.count(b"look-ups") < 3 and time.monotonic() < give_up_at:
        seen += _read(ours)
    process.send_signal(signal.SIGINT)
    while process.poll() is None and time.monotonic() < give_up_at:
        seen += _read(ours)
    seen += _read(ours)
    os.close(ours)
    assert process.returncode == 0
    assert re.search(rb"\x1b\[\d*A", seen), "the second look was not drawn over the first"
    assert seen.rfind(b"\x1b[?25h") > seen.rfind(b"\x1b[?25l")
    assert b"Traceback" not in seen


@pytest.mark.parametrize("columns", [72, 100])
def test_on_a_terminal_no_row_is_folded(run, small_gateway, columns):
    """Fails when a long text takes more lines than one: what moves must stay in its place."""
    with HeadraceClient(small_gateway.address) as client:
        for _ in range(2):
            client.generate("several words " * 6)
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (40, columns))
    environment = {name: value for name, value in os.environ.items() if name not in ("LINES", "COLUMNS")}
    process = start_top(small_gateway, "--once", "--text", stdin=its, stdout=its, stderr=its, env=environment)
    os.close(its)
    seen, give_up_at = b"", time.monotonic() + 150
    while (more := _read(ours)) or (process.poll() is None and time.monotonic() < give_up_at):
        seen += more
    os.close(ours)
    assert process.returncode == 0
    assert b"several words " * 4 in seen


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65_536) if select.select([terminal], [], [], 0.1)[0] else b""
    except OSError:  # the other end is closed
        return b""

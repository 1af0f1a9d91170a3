"""When a process counts as one that stands still: by looks in a row, and by nothing else."""

import pytest

from headrace.store.kill_stalled import kill_stalled

BEAT, SILENCE, ENDED = b".", None, b""


@pytest.mark.parametrize(
    ("looks", "kills"),
    [
        ([SILENCE] * 29, 0),
        ([SILENCE] * 30, 1),
        ([SILENCE] * 32, 3),  # a process that waits for a disk may not end by the first
        ([*[SILENCE] * 29, BEAT, *[SILENCE] * 29], 0),
        ([BEAT] * 100, 0),
        ([*[BEAT] * 100, *[SILENCE] * 30], 1),
        ([], 0),
    ],
)
def test_a_process_is_killed_after_so_many_looks_in_a_row_without_a_beat(looks, kills: int) -> None:
    """Fails when a busy process is killed that beats late, or a stalled one is not."""
    heard, killed = iter([*looks, ENDED]), []
    kill_stalled(lambda: next(heard), lambda: killed.append(True), looks_max=30)
    assert len(killed) == kills
    assert list(heard) == []

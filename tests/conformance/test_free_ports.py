"""Ports that are named for servers: two pytest processes of one run never name the same."""

from free_ports import part_of


def test_no_port_is_of_two_workers():
    """Fails when two workers of pytest may start their servers on one port."""
    parts = [set(part_of(range(20_000, 29_000), worker=f"gw{number}", of=4)) for number in range(4)]
    assert [len(part) for part in parts] == [2_250] * 4
    assert set.union(*parts) == set(range(20_000, 29_000))
    assert part_of(range(20_000, 29_000), worker="gw0", of=1) == range(20_000, 29_000)

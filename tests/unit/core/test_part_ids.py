"""One number for a block of two parts: what is put together comes apart again, and tables keep their near parts where
they were put."""

import random

import pytest

from headrace.core.part_ids import PartIds


@pytest.mark.parametrize("num_wide", [1, 2, 7, 1_000])
def test_every_pair_of_parts_has_a_number_of_its_own(num_wide):
    parts = PartIds(num_wide)
    seen = {}
    for wide in range(min(num_wide, 20)):
        for near in (None, *range(20)):
            block_id = parts.join(wide, near)
            assert seen.setdefault(block_id, (wide, near)) == (wide, near)
            assert (parts.wide_of(block_id), parts.near_of(block_id)) == (wide, near)
    assert all(parts.join(wide, None) == wide for wide in range(num_wide)), "blocks of one part keep their ids"
    for near in range(20):
        alone = parts.near_alone(near)
        assert alone not in seen
        assert parts.near_of(alone) == near
        assert parts.split([alone]) == ([], [near])


@pytest.mark.parametrize("seed", range(20))
def test_tables_come_apart_as_they_were_put_together(seed):
    rng = random.Random(seed)
    parts = PartIds(64)
    wide = rng.sample(range(64), rng.randrange(1, 40))
    count = rng.randrange(0, len(wide) + 1)
    first = rng.randrange(0, len(wide) - count + 1)
    near = rng.sample(range(500), count)
    table = parts.place(wide, near, first=first)
    assert parts.split(table) == (wide, near)
    assert [parts.near_of(each) for each in table] == [None] * first + near + [None] * (len(wide) - first - count)
    moved = parts.place(table, near[: count // 2], first=0)
    assert parts.split(moved) == (wide, near[: count // 2])

"""Free space as extents: nothing is given twice, nothing is lost, neighbours merge."""

import random

import pytest

from headrace.blocks.extents import ExtentPool


@pytest.mark.parametrize("seed", range(20))
def test_any_mix_of_sizes_taken_and_given_back_leaves_one_free_extent(seed: int) -> None:
    rng, pool, held = random.Random(seed), ExtentPool(200), []
    owner = [None] * 200
    for step in range(400):
        if held and rng.random() < 0.5:
            start, units = held.pop(rng.randrange(len(held)))
            pool.release(start, units)
            owner[start : start + units] = [None] * units
        else:
            units = rng.choice([1, 2, 3, 7, 20])
            start = pool.allocate(units)
            if start is not None:
                assert owner[start : start + units] == [None] * units, "units were given twice"
                owner[start : start + units] = [step] * units
                held.append((start, units))
        pool.check_integrity()
        assert pool.free_units == owner.count(None)
    for start, units in held:
        pool.release(start, units)
    pool.check_integrity()
    assert pool.allocate(200) == 0


def test_the_smallest_extent_that_fits_is_taken() -> None:
    pool = ExtentPool(20)
    assert [pool.allocate(4) for _ in range(5)] == [0, 4, 8, 12, 16]
    pool.release(0, 4)
    pool.release(4, 4)
    pool.release(12, 4)
    assert pool.allocate(3) == 12
    assert pool.allocate(8) == 0


def test_equal_blocks_refill_exactly_what_they_left() -> None:
    pool = ExtentPool(30)
    starts = [pool.allocate(3) for _ in range(10)]
    assert pool.allocate(1) is None
    for start in (starts[4], starts[7]):
        pool.release(start, 3)
    assert pool.fits(3) == 2
    assert sorted([pool.allocate(3), pool.allocate(3)]) == [starts[4], starts[7]]


def test_exact_extents_are_taken_once_and_only_where_free() -> None:
    pool = ExtentPool(10)
    assert pool.take(3, 4)
    assert not pool.take(6, 2)
    assert not pool.take(8, 3)
    assert not pool.take(-1, 2)
    assert not pool.take(0, 0)
    assert pool.take(7, 3)
    pool.check_integrity()
    assert pool.free_units == 3

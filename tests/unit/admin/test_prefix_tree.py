"""Blocks grouped into runs: nothing lost, nothing twice, whatever branches and whoever holds what."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.admin.prefix_tree import build_prefix_runs
from headrace.client import BlockEntry


def make_block(name: int, parent: int, *, position: int, holder: str = "node:a") -> BlockEntry:
    return BlockEntry(
        namespace="n",
        base_namespace="n",
        model="m",
        block_hash=name.to_bytes(16, "big"),
        parent_hash=parent.to_bytes(16, "big"),
        position=position,
        token_ids=(name, name),
        bytes=10,
        holder=holder,
        tier="host",
        hits=1,
        age_s=1.0,
        idle_s=float(name),
        leases=0,
        text=f"[{name}]",
    )


def test_a_chain_without_branches_is_one_run():
    runs = build_prefix_runs([make_block(i, i - 1, position=i - 1) for i in range(1, 6)])
    assert [(r.num_blocks, r.num_tokens, r.text, r.idle_s) for r in runs] == [(5, 10, "[1][2][3][4][5]", 1.0)]


def test_a_run_ends_where_fewer_holders_have_the_next_block():
    blocks = [make_block(i, i - 1, position=i - 1) for i in (1, 2, 3)]
    blocks.append(make_block(1, 0, position=0, holder="node:b"))
    runs = build_prefix_runs(blocks)
    assert [(r.depth, r.num_blocks, r.holders) for r in runs] == [
        (0, 1, ("node:a", "node:b")),
        (1, 2, ("node:a",)),
    ]
    assert runs[0].bytes == 20


def test_a_block_whose_parent_is_not_listed_starts_a_tree_of_its_own():
    runs = build_prefix_runs([make_block(9, 8, position=3)])
    assert [(r.depth, r.first_position) for r in runs] == [(0, 3)]


@given(st.lists(st.integers(min_value=0, max_value=30), max_size=40), st.integers(min_value=1, max_value=3))
def test_every_block_is_in_exactly_one_run_and_parents_come_first(parents, holders):
    """Block i + 1 hangs under any earlier block (or the root, 0): every tree shape."""
    blocks = [
        make_block(i + 1, parent % (i + 1), position=0, holder=f"node:{copy}")
        for i, parent in enumerate(parents)
        for copy in range(1 + (i % holders))
    ]
    runs = build_prefix_runs(blocks)
    names = [name for run in runs for name in run.text.strip("[]").split("][") if name]
    assert sorted(map(int, names)) == list(range(1, len(parents) + 1))
    assert sum(run.bytes for run in runs) == 10 * len(blocks)
    place = {int(name): index for index, name in enumerate(names)}
    assert all(place[i + 1] > place[parent % (i + 1)] for i, parent in enumerate(parents) if parent % (i + 1))

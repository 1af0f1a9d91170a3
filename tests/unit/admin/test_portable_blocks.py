"""Which chain of blocks an export reads for each block that it writes."""

from headrace.admin.portable_blocks import chains_of
from headrace.client import BlockEntry


def make_chain(length: int, *, holder: str = "node:a", branch: bytes = b"", grown_from: int = 0) -> list[BlockEntry]:
    """Blocks 0 to `length` of a prompt; from block `grown_from` on they are a branch's own."""
    names = [(branch if position >= grown_from else b"") + position.to_bytes(4, "big") for position in range(length)]
    return [
        BlockEntry(
            namespace="n", base_namespace="n", model="m", block_hash=name, parent_hash=parent, position=position,
            token_ids=(1,), bytes=1, holder=holder, tier="host", hits=0, age_s=0, idle_s=0, leases=0, text="",
        )
        for position, (parent, name) in enumerate(zip([b"root", *names], names, strict=False))
    ]  # fmt: skip


def ends(chosen: list[BlockEntry], everything: list[BlockEntry]) -> list[tuple[bytes, list[int]]]:
    return [
        (found.chain[found.num_blocks - 1].block_hash, [block.position for block in found.chain[: found.num_blocks]])
        for found in chains_of(chosen, everything)
    ]


def test_each_block_and_all_before_it_has_its_chain_from_block_0_parents_first():
    """Fails when a block is missing, comes twice or before its parent, or has the chain of another branch."""
    trunk, branch = make_chain(3), make_chain(3, branch=b"b", grown_from=2)
    found = ends([trunk[2], branch[2]], trunk + branch)
    assert sorted(name for name, _ in found) == sorted({block.block_hash for block in trunk + branch})
    assert [positions for _, positions in found] == [[0], [0, 1], [0, 1, 2], [0, 1, 2]]


def test_a_chain_without_its_beginning_on_any_one_node_is_left_out():
    here, there = make_chain(4)[2:], make_chain(2, holder="node:b")
    assert ends(here, here + there) == []
    assert len(ends(here, here + make_chain(4, holder="worker:w"))) == 0
    assert len(ends(here, here + make_chain(4, holder="node:b"))) == 4


def test_a_prompt_of_thousands_of_blocks_is_one_chain_with_as_many_ends():
    """Fails when each end has a copy of its chain: of a long prompt those would be gigabytes."""
    blocks = make_chain(4_000)
    found = chains_of(blocks, blocks)
    assert [each.num_blocks for each in found] == list(range(1, 4_001))
    assert len({id(each.chain) for each in found}) == 1

"""Numbers of rows of attention's products: a row's bits are the same among each of them."""

import pytest
import torch

from headrace.engine.attention import TILE
from headrace.engine.pad_rows import HEAD_ROWS, pad_rows

KV_HEADS, HEAD_DIM, ROWS = 3, 64, 160


def test_rows_are_padded_to_few_numbers():
    assert [pad_rows(rows) for rows in (1, 4, 5, 32, 33, 48, 63, 64, 65, 384)] == [4, 4, 8, 32, 64, 64, 64, 64, 68, 384]


@pytest.mark.parametrize("tiles", [1, 5, 8, 16])
@torch.inference_mode()
def test_a_rows_bits_do_not_depend_on_how_many_are_multiplied_as_they_are_padded(tiles):
    """Where products of tiles sum in another order for some numbers of rows, fails if those are used."""
    torch.manual_seed(1)
    keys = torch.randn(KV_HEADS, tiles * TILE, HEAD_DIM).bfloat16()
    queries = torch.randn(KV_HEADS, ROWS, HEAD_DIM).bfloat16()
    few = [queries[:, first : first + HEAD_ROWS] for first in range(0, ROWS, HEAD_ROWS)]
    scores = torch.cat([torch.bmm(rows, keys.transpose(1, 2)) for rows in few], dim=1)
    weights = torch.softmax(scores, dim=-1)
    results = torch.cat([torch.bmm(rows, keys) for rows in weights.split(HEAD_ROWS, dim=1)], dim=1)
    for padded in sorted({pad_rows(rows) for rows in range(1, ROWS + 1)}):
        for first in range(0, ROWS - padded + 1, padded):
            some = slice(first, first + padded)
            assert torch.equal(torch.bmm(queries[:, some], keys.transpose(1, 2)), scores[:, some]), padded
            assert torch.equal(torch.bmm(weights[:, some], keys), results[:, some]), padded

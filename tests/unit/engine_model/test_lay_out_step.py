"""What one call of the model is given: every token once, in its place, whatever the order that suits attention."""

import numpy as np
import torch

from headrace.core.block import KvLayout
from headrace.engine.attention import TILE, Scratch, attend_gathered
from headrace.engine.lay_out_step import SequenceStep, lay_out_step
from headrace.engine.layered_kv import LayeredKV
from headrace.engine.paged_kv import PagedKV
from headrace.engine.send_numbers import send_numbers

LAYOUT = KvLayout("float32", 2, 1, 8, 16)


def lay_out(steps, kv, row_multiple=4):
    return lay_out_step(steps, kv, row_multiple=row_multiple, scratch=Scratch(), attention=attend_gathered)


def test_parts_arrive_in_order_as_views_of_one_buffer():
    """Fails if an empty part shifted the others, or an array were rounded."""
    sent = send_numbers([[3, 1], [], np.array([2**40, -1]), range(2)], torch.device("cpu"))
    assert [part.tolist() for part in sent] == [[3, 1], [], [2**40, -1], [0, 1]]
    assert all(part.dtype == torch.int64 for part in sent)
    assert len({part.untyped_storage().data_ptr() for part in sent}) == 1


def test_logits_come_in_the_order_of_the_steps_though_rows_do_not():
    """Fails if the rows that are kept followed the order of the batch."""
    prompt = SequenceStep((1, 2, 3, 4, 5), 0, [0], 2)
    newest = [SequenceStep((6,), TILE + 3, range(1, 10), 1), SequenceStep((7,), 5, [10], 1)]
    rows = lay_out([newest[0], prompt, newest[1]], PagedKV(LAYOUT, 12))
    assert rows.num_logits == 4
    assert rows.token_ids[0, rows.kept[:4]].tolist() == [6, 4, 5, 7]
    assert rows.positions[0, rows.kept[:4]].tolist() == [TILE + 3, 3, 4, 5]
    assert rows.token_ids.shape == rows.positions.shape == (1, 8)
    assert rows.token_ids[0, 7:].tolist() == rows.positions[0, 7:].tolist() == [0]


def test_each_row_goes_to_the_slot_of_its_position_and_tables_reach_the_end_of_the_tile():
    steps = [SequenceStep((1, 2, 3), 31, [7, 2, 5], 0), SequenceStep((4,), 40, [9, 3], 0, first_block=1)]
    context = lay_out(steps, PagedKV(LAYOUT, 12)).context
    by_start = {span.start: span for span in context.spans}
    assert [context.slots[by_start[31].row + row] for row in range(3)] == [2 * 16 + 15, 5 * 16, 5 * 16 + 1]
    assert context.slots[by_start[40].row] == 3 * 16 + 8
    assert by_start[31].pages == [7, 2, 5, 5, 5, 5, 5, 5]
    assert by_start[40].pages == [9, 9, 3, 3, 3, 3, 3, 3]
    assert by_start[40].first_key == 16
    assert all(span.block_table.tolist() == span.pages for span in context.spans)


def test_layers_with_a_window_have_the_same_rows_over_their_own_pool():
    kv = LayeredKV(KvLayout("float32", 2, 1, 8, 16, near_layers=1), 6, num_near=3, windows={0: None, 1: 20})
    table = [kv.parts.join(4, None), kv.parts.join(2, 0), kv.parts.join(5, 2)]
    context = lay_out([SequenceStep((1, 2), 36, table, 1)], kv).context
    assert context.near is not None
    assert context.slots.tolist() == [5 * 16 + 4, 5 * 16 + 5]
    assert context.near.slots.tolist() == [2 * 16 + 4, 2 * 16 + 5]
    assert list(context.near.spans[0].pages[:3]) == [kv.num_near, 0, 2]
    assert torch.equal(context.near.positions, context.positions)

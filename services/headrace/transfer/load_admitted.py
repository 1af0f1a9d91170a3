"""Loading an admitted prompt's prefix into its blocks, in the way that its model asks for.

Owns the choice: everything (`load_prefix.py`, or `follow_prefill.py` while it is computed elsewhere), a window of it
(`load_window.py`), or everything of some layers and a window of the others (`load_layered.py`).
"""

import functools
from collections.abc import Callable

from headrace.core.block import KvLayout
from headrace.core.clock import Deadline
from headrace.core.generation import HandOff
from headrace.core.ports import PrefixPool, StoreNodes
from headrace.core.transfer_budget import TransferBudget
from headrace.engine.engine import Admission, Engine
from headrace.transfer.follow_prefill import follow_prefill
from headrace.transfer.load_layered import NearTable, load_layered
from headrace.transfer.load_prefix import LoadedPrefix, LoadPlan, load_prefix
from headrace.transfer.load_window import WindowTable, load_window


async def load_admitted(
    admission: Admission,
    engine: Engine,
    *,
    plan: LoadPlan,
    budget: Callable[[range], TransferBudget | None],
    hand_off: HandOff | None,
    layout: KvLayout,
    nodes: StoreNodes,
    pool: PrefixPool,
    deadline: Deadline,
) -> LoadedPrefix:
    """Load what is read of blocks [plan.first_block, plan.end_block); the admission's table is moved where only a
    window is loaded. budget: what loading may cost that saves computing these blocks; plan's own is for all of them.
    Raises as `load_prefix`.
    """
    prompt = admission.prompt
    if engine.window.bounded:
        loaded, window = await load_window(
            prompt,
            WindowTable(tuple(admission.block_ids), admission.first_block, engine.window),
            plan=plan,
            budget=budget,
            hand_off=hand_off,
            layout=layout,
            nodes=nodes,
            pool=pool,
            deadline=deadline,
        )
        engine.move_table(admission, window.block_ids, first_block=window.first_block)
        return loaded
    if engine.near_window.bounded:
        near = NearTable(
            tuple(admission.block_ids),
            admission.first_near,
            admission.end_near,
            engine.pool.parts,
            engine.near_window,
        )
        loaded, near = await load_layered(
            prompt,
            near,
            plan=plan,
            budget=budget,
            hand_off=hand_off,
            layout=layout,
            nodes=nodes,
            pool=pool,
            deadline=deadline,
        )
        engine.move_near(admission, near.block_ids, first_near=near.first_near, end_near=near.end_near)
        return loaded
    load = load_prefix if hand_off is None else functools.partial(follow_prefill, hand_off=hand_off)
    return await load(prompt, admission.block_ids, plan=plan, layout=layout, nodes=nodes, pool=pool, deadline=deadline)

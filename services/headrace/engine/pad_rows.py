"""How many rows the matrices of attention's products have: their numbers are few, so that each can be tried at load."""

HEAD_ROWS = 4  # packed rows are a multiple of this

# From 33 to 63 packed rows there are 64. A processor that multiplies tiles (AMX) sums over the keys of 500 positions or
# more in another order for 36 to 48 rows than for others, on one thread and on two (torch 2.13, heads of 64 numbers).
FEW_ROWS_MAX = 32
MANY_ROWS_MIN = 64


def pad_rows(rows: int) -> int:
    """So many packed rows are multiplied where `rows` are wanted."""
    padded = -(-rows // HEAD_ROWS) * HEAD_ROWS
    return MANY_ROWS_MIN if FEW_ROWS_MAX < padded < MANY_ROWS_MIN else padded

"""Bounds of what a stranger can make a gateway do, with their reasons; those of requests are in `limits.py`."""

from headrace.core.limits import API_KEYS_MAX

# Tenants whose rates a gateway keeps, at some 300 bytes each: as many as there may be keys, and as many again of
# tenants that have left the file while their minute was not over.
RATE_ACCOUNTS_MAX = 2 * API_KEYS_MAX

# The highest rate that a tenants file may name: more is a mistake, and a level of it is still exact in a double.
RATE_PER_MINUTE_MAX = 1_000_000_000

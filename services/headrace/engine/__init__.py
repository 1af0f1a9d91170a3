"""The engine: model code from transformers; the KV pool, the attention over it, the step loop and sampling are ours.

Importing it sets how torch's OpenMP threads wait and what pages its tensors lie in, unless the environment says so
already. That must happen before torch is imported in the process: both are read once.
"""

import os

# Between two parallel regions threads spin this often, then sleep: about 0.15 ms, which bridges gaps inside a layer.
# Spinning for ever (the default) takes the core from whoever should be running when several processes share the cores;
# sleeping at once costs about 0.1 ms for each region.
SPIN_COUNT = 10_000

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
# Large tensors lie in huge pages where the kernel has any: see collapse_pages.py.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

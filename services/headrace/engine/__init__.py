"""The engine: model code from transformers; the KV pool, the attention over it, the step loop and sampling are ours.

Importing it sets how torch's OpenMP threads wait, unless the environment says so already. That must happen before
torch is imported in the process: the OpenMP runtime reads the environment once.
"""

import os

# Between two parallel regions threads spin this often, then sleep: about 30 us, which bridges the gaps inside a layer.
# Spinning for ever (the default) takes the core from whoever should be running when several processes share the cores;
# sleeping at once costs about 0.1 ms for each region.
SPIN_COUNT = 2_000

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))

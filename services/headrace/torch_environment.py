"""How torch's threads wait for each other, and in what pages its tensors lie: variables of the environment.

Torch reads them once, when it is loaded: a process that loads it first runs small steps on two threads as slowly as on
one. So every process that computes has them before its first import of torch: commands by `load_function`, workers by
their `runtime_env`, and others by importing `headrace.engine` first. What the environment says already stands.
"""

import os

# Between two parallel regions threads spin this often, then sleep: about 0.15 ms, which bridges gaps inside a layer.
# Spinning for ever (the default) takes the core from whoever should be running when several processes share the cores;
# sleeping at once costs about 0.1 ms for each region.
SPIN_COUNT = 10_000

TORCH_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": str(SPIN_COUNT),  # GNU's threads, which torch's own builds have
    "KMP_BLOCKTIME": "0",  # Intel's
    "THP_MEM_ALLOC_ENABLE": "1",  # large tensors in huge pages where the kernel has any: see collapse_pages.py
}

# Those that this process has of us and not of its user.
names_set_here: set[str] = set()


def set_torch_environment() -> None:
    """Before torch is imported; afterwards it changes nothing."""
    names_set_here.update(name for name in TORCH_ENVIRONMENT if name not in os.environ)
    for name, value in TORCH_ENVIRONMENT.items():
        os.environ.setdefault(name, value)

"""The golden vectors of block identity, computed. A change here needs a new FORMAT_VERSION in the same commit.

Write them anew with `python tests/unit/core/tests_golden.py > tests/golden/block_hashes.json`.
"""

import json

from headrace.core.block import HashAlgorithm, KvLayout, Namespace, hash_prompt


def vectors() -> dict[str, object]:
    """Namespace id and chains of one fixed prompt, by algorithm."""
    golden: dict[str, object] = {}
    for algorithm in HashAlgorithm:
        namespace = Namespace(
            model_id="golden/model",
            weights_digest="0" * 32,
            tokenizer_digest="1" * 32,
            adapter_digest="",
            layout=KvLayout(dtype="bfloat16", num_layers=30, num_kv_heads=3, head_dim=64, block_tokens=64),
            position_digest="2" * 32,
            numerics_probe="3" * 32,
            hash_algorithm=algorithm,
            trust_group="default",
        )
        prompt = hash_prompt(namespace.id, range(1_000, 1_200), block_tokens=64, algorithm=algorithm)
        golden[algorithm] = {"namespace": namespace.id, "chain": [block.hex() for block in prompt.chain]}
    return golden


if __name__ == "__main__":
    print(json.dumps(vectors(), indent=2))

"""Bounds of speculative decoding, each with its reason. Which file has which bounds: `limits.py`."""

# Tokens of a draft that a step computes behind a sequence's newest one, at most: 16 sequences of 32 are 512 rows of
# logits, 100 MB at a vocabulary of 49,152. Where one row in three is right already, the tenth is in one case of 59,049.
DRAFT_TOKENS_MAX = 32

# Tokens of each sequence of a full batch that a draft model's pool has room for: where prompts are longer, as many
# sequences as fit have drafts. 16 x 2,048 tokens of a model of 10 layers and 3 KV heads of 64 are 250 MB.
DRAFT_POOL_SEQUENCE_TOKENS = 2_048

# A sequence whose drafts do not pay is drafted for again after so many steps: one step in 64 that is a fifth longer
# costs 0.3 %, and a text that begins to repeat itself is noticed within a paragraph.
DRAFT_RETRY_STEPS = 64

# ... with so many tokens: with the newest one they fill a group of four rows, which is what rows are padded to on CPU.
DRAFT_RETRY_TOKENS = 3

# Tokens of one sequence in which its end is looked up for a draft: about 150 bytes each, so 16 sequences of 32,768 take
# 80 MB at most. And how many earlier places of its last two tokens are compared, and how many tokens of each: 32
# comparisons of 5 tokens take some 20 us.
NGRAM_INDEX_TOKENS_MAX = 32_768
NGRAM_PLACES_MAX = 32
NGRAM_TOKENS_MAX = 5

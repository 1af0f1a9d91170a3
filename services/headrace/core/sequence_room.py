"""How long one sequence may be on the roomiest worker, and what a caller is told whose sequence is longer. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SequenceRoom:
    """Prompt plus output of one sequence, and the pool that it must fit into."""

    tokens_max: int
    block_tokens: int
    pool_blocks: int

    def holds(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens can ever be computed."""
        return num_tokens <= self.tokens_max

    def why_not(self, num_tokens: int) -> str:
        """The arithmetic of a sequence that does not fit, and what would make it fit."""
        blocks, pool_tokens = -(-num_tokens // self.block_tokens), self.pool_blocks * self.block_tokens
        told = (
            f"{num_tokens} tokens are {blocks} KV blocks of {self.block_tokens}; the roomiest worker's pool has"
            f" {self.pool_blocks} blocks ({pool_tokens} tokens), and a sequence may have {self.tokens_max} tokens here"
        )
        if self.tokens_max < pool_tokens:
            return f"{told}, the model's context: shorten the prompt or the output"
        return f"{told}: shorten the prompt or the output, or give workers more pool_tokens"

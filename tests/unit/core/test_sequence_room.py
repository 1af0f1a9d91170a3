"""What is said of a sequence that can never fit: tokens, blocks needed, blocks there are, and what to change."""

from headrace.core.sequence_room import SequenceRoom


def test_a_sequence_that_the_pool_cannot_hold_is_told_to_be_shorter_or_to_have_a_larger_pool() -> None:
    room = SequenceRoom(tokens_max=640, block_tokens=64, pool_blocks=10)
    assert room.holds(640)
    assert not room.holds(641)
    assert room.why_not(700) == (
        "700 tokens are 11 KV blocks of 64; the roomiest worker's pool has 10 blocks (640 tokens), and a sequence may "
        "have 640 tokens here: shorten the prompt or the output, or give workers more pool_tokens"
    )


def test_where_the_models_context_is_the_bound_no_pool_helps() -> None:
    """Fails if somebody is told to enlarge a pool that is large enough."""
    told = SequenceRoom(tokens_max=500, block_tokens=64, pool_blocks=10).why_not(501)
    assert "501 tokens are 8 KV blocks of 64" in told
    assert told.endswith("500 tokens here, the model's context: shorten the prompt or the output")

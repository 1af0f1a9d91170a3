"""Replies in OpenAI's shape: usage that adds up, log-probabilities of the right token."""

from dataclasses import replace

from headrace.core.generation import CachedTokens, RequestId, TokenDelta, TokenLogprob, Usage
from headrace.wire.openai_reply import (
    ReplyHead,
    add_usage,
    join_usage,
    render_chunk,
    render_logprobs,
    render_usage,
)

ONE = Usage(prompt_tokens=10, completion_tokens=3, cached=CachedTokens(device=4, grpc=2))
TWO = Usage(prompt_tokens=10, completion_tokens=5, cached=CachedTokens(shared_memory=8))


def test_the_cached_figure_is_the_sum_of_its_sources():
    """Fails when the figure that users see and its split disagree."""
    usage = render_usage(ONE)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 6
    assert usage["headrace"]["cached_tokens"] == {"device": 4, "shared_memory": 0, "grpc": 2}
    assert usage["total_tokens"] == 13


def test_choices_count_their_prompt_once_and_prompts_each_count():
    """Fails when n choices multiply the prompt, or several prompts are taken for one."""
    assert join_usage([ONE, TWO]) == Usage(10, 8, ONE.cached)
    assert add_usage([ONE, TWO]) == Usage(20, 8, CachedTokens(device=4, shared_memory=8, grpc=2))


def test_drafts_are_told_as_predictions_and_only_where_there_were_any():
    """Fails when an answer without drafts has the field, or several choices' drafts do not add up."""
    drafted = replace(ONE, drafted_tokens=9, accepted_draft_tokens=4)
    assert "completion_tokens_details" not in render_usage(ONE)
    for join in (join_usage, add_usage):
        assert render_usage(join([drafted, TWO, drafted]))["completion_tokens_details"] == {
            "accepted_prediction_tokens": 8,
            "rejected_prediction_tokens": 10,
        }


def test_a_tokens_log_probability_names_the_token_itself():
    """Fails when text that became printable later is shown as the token's own."""
    delta = TokenDelta(7, "", logprob=-0.1, top_logprobs=(TokenLogprob(7, "é", -0.1), TokenLogprob(8, "x", -2.0)))
    (entry,) = render_logprobs([delta], chat=True)["content"]
    assert (entry["token"], entry["bytes"], entry["logprob"]) == ("é", list("é".encode()), -0.1)
    assert [top["token"] for top in entry["top_logprobs"]] == ["é", "x"]
    plain = render_logprobs([delta, delta], chat=False)
    assert plain["tokens"] == ["é", "é"]
    assert plain["text_offset"] == [0, 1]
    assert render_logprobs([delta, delta], chat=False, text_offset=5)["text_offset"] == [5, 6]
    assert render_logprobs([], chat=False)["text_offset"] == []
    assert plain["top_logprobs"][0] == {"é": -0.1, "x": -2.0}


def test_only_the_first_piece_of_a_chat_names_the_role():
    """Fails when clients see a role in the middle of a message, or none at all."""
    head = ReplyHead(RequestId("r"), "m", 1, chat=True)
    first = render_chunk(head, index=0, text="a", first=True)["choices"][0]["delta"]
    later = render_chunk(head, index=0, text="b")["choices"][0]["delta"]
    assert first == {"role": "assistant", "content": "a"}
    assert later == {"content": "b"}

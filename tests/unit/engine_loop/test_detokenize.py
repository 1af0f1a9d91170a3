"""Text as it comes: in sum the decoding of all tokens, cut before the first stop string, and never too early."""

from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from headrace.engine.detokenize import TextStream, detokenize, find_stop

from .conftest import make_byte_tokenizer

TOKENIZER = make_byte_tokenizer()
EOS = 0


def tokens_of(text: str) -> list[int]:
    """One token a byte."""
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def stream_out(token_ids: Sequence[int], *, stop: Sequence[str] = (), tokenizer: Tokenizer = TOKENIZER) -> list[str]:
    """Deltas until the first stop, then the rest."""
    stream = TextStream(tokenizer, stop=stop)
    texts = []
    for token_id in token_ids:
        delta = detokenize(stream, token_id)
        texts.append(delta.text)
        if delta.stopped:
            return texts
    return [*texts, stream.finish().text]


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """The oracle: read character by character until some stop string is complete."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


def test_a_character_of_several_bytes_comes_with_its_last_byte() -> None:
    assert stream_out(tokens_of("aé€😀b")) == ["a", "", "é", "", "", "€", "", "", "", "😀", "b", ""]


def test_a_broken_character_is_shown_as_such_only_when_it_cannot_be_completed() -> None:
    assert stream_out(tokens_of("€")[:2]) == ["", "", "\ufffd"]
    assert stream_out([*tokens_of("€")[:2], *tokens_of("a")]) == ["", "", "\ufffda", ""]


def test_text_that_may_begin_a_stop_string_is_held_back_until_it_does_not() -> None:
    assert stream_out(tokens_of("aEND"), stop=["END!"]) == ["a", "", "", "", "END"]
    assert stream_out(tokens_of("aENx"), stop=["END"]) == ["a", "", "", "ENx", ""]


def test_a_stop_string_and_what_follows_it_is_not_returned() -> None:
    assert stream_out(tokens_of("abENDcd"), stop=["END"]) == ["a", "b", "", "", ""]


def test_a_stop_string_may_lie_across_and_inside_tokens() -> None:
    words = Tokenizer(models.WordLevel({"hel": 0, "lo wor": 1, "ld": 2}, "?"))
    words.decoder = decoders.Fuse()
    assert stream_out([0, 1, 2], tokenizer=words) == ["hel", "lo wor", "ld", ""]
    assert "".join(stream_out([0, 1, 2], stop=["lo w"], tokenizer=words)) == "hel"
    assert "".join(stream_out([0, 1, 2], stop=["llo"], tokenizer=words)) == "he"
    assert "".join(stream_out([0, 1, 2], stop=["rld"], tokenizer=words)) == "hello wo"


def test_the_stop_string_that_is_complete_first_counts() -> None:
    assert find_stop("xabcd", ["abcd", "bc"]) == (2, 4)
    assert find_stop("xabc", ["bc", "abc"]) == (1, 4)
    assert find_stop("xyz", ["a"]) is None


def test_special_tokens_have_no_text() -> None:
    assert stream_out([*tokens_of("a"), EOS, *tokens_of("b")]) == ["a", "", "b", ""]


def test_after_a_stop_there_is_no_more_text() -> None:
    stream = TextStream(TOKENIZER, stop=["b"])
    assert [detokenize(stream, token_id).stopped for token_id in tokens_of("ab")] == [False, True]
    assert stream.finish().text == ""


def test_one_token_is_named_by_its_text_special_ones_too() -> None:
    stream = TextStream(TOKENIZER)
    assert stream.token_text(tokens_of("a")[0]) == "a"
    assert stream.token_text(EOS) == "<eos>"


@example(text="aaab", stops=["aab"], cut=0)
@example(text="ENENDx", stops=["END"], cut=0)
@example(text="€uro", stops=["o"], cut=1)
@given(
    text=st.text(alphabet="ab€é ", max_size=30),
    stops=st.lists(st.text(alphabet="ab€ ", min_size=1, max_size=4), max_size=3),
    cut=st.integers(0, 3),
)
def test_the_deltas_are_in_sum_the_full_text_cut_at_the_first_stop(text: str, stops: list[str], cut: int) -> None:
    """Tokens may also begin and end within characters: `cut` bytes are missing at both ends."""
    token_ids = tokens_of(text)
    token_ids = token_ids[cut : len(token_ids) - cut]
    full = TOKENIZER.decode(token_ids, skip_special_tokens=True)
    assert "".join(stream_out(token_ids, stop=stops)) == cut_at_stop(full, stops)


@given(st.lists(st.integers(0, 255), max_size=40))
def test_whatever_bytes_a_model_makes_the_deltas_are_the_full_decoding(token_ids: list[int]) -> None:
    assert "".join(stream_out(token_ids)) == TOKENIZER.decode(token_ids, skip_special_tokens=True)


def make_byte_fallback_tokenizer() -> Tokenizer:
    """One token per byte and one word; a run of bytes that is not valid as a whole is shown byte by byte."""
    tokenizer = Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)} | {"word": 256}, []))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


BYTE_TO_TOKEN = {
    byte: token for character in "€😀é߿" for byte, token in zip(character.encode(), tokens_of(character), strict=True)
}


@example(run=[0xE2, 0x82] * 100)
@example(run=[0x80] * 100 + [0xE2, 0x82, 0xAC] * 40)
@example(run=[0xF0, 0x9F] * 36 + [0x98, 0x80])
@example(run=[0xC3] * 200)
@given(run=st.lists(st.sampled_from(sorted(BYTE_TO_TOKEN)), min_size=100, max_size=300))
def test_bytes_without_end_that_are_no_characters_are_the_full_decoding(run: list[int]) -> None:
    """Fails if what is given out before the run ends is another text later, or is given twice."""
    fallback = make_byte_fallback_tokenizer()
    for token_ids, tokenizer in (([BYTE_TO_TOKEN[byte] for byte in run], TOKENIZER), ([0x80, *run, 256], fallback)):
        full = tokenizer.decode(token_ids, skip_special_tokens=True)
        assert "".join(stream_out(token_ids, tokenizer=tokenizer)) == full


class CountingTokenizer:
    """A tokenizer that counts what it is asked to decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_decoded = 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        self.num_decoded += len(token_ids)
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        return dict(self._tokenizer.get_added_tokens_decoder())


def test_a_token_costs_no_more_the_longer_a_run_of_broken_bytes_is() -> None:
    """Fails if all of a run is decoded again for each of its tokens: the step thread would stand still for it."""
    for tokenizer, token_id in ((TOKENIZER, BYTE_TO_TOKEN[0x80]), (make_byte_fallback_tokenizer(), 0x80)):
        counting = CountingTokenizer(tokenizer)
        texts = stream_out([token_id] * 4_000, tokenizer=counting)  # type: ignore[arg-type]
        assert "".join(texts) == "\ufffd" * 4_000
        assert counting.num_decoded < 4_000 * 200


def test_special_tokens_behind_half_a_character_cost_no_more_the_more_there_are() -> None:
    """Where no token ends the run, a broken character may be followed by any number of special ones."""
    tokenizer = make_byte_fallback_tokenizer()
    tokenizer.add_special_tokens(["<|pad|>"])
    counting = CountingTokenizer(tokenizer)
    run = [0xE2, 0x82, *[tokenizer.token_to_id("<|pad|>")] * 4_000, 0xAC]
    assert "".join(stream_out(run, tokenizer=counting)) == "€"  # type: ignore[arg-type]
    assert counting.num_decoded < 4_000 * 200


@given(text=st.text(alphabet="ab€é ", max_size=20), stop=st.text(alphabet="ab ", min_size=2, max_size=4))
def test_nothing_given_out_is_ever_taken_back_by_a_stop(text: str, stop: str) -> None:
    """After each token, what was given out so far is a beginning of what is given out in the end."""
    final = cut_at_stop(text, [stop])
    given_out = ""
    for delta in stream_out(tokens_of(text), stop=[stop]):
        given_out += delta
        assert final.startswith(given_out)


def make_word_tokenizer(*pieces: str) -> Tokenizer:
    """Word pieces in the manner of SentencePiece: the decoder strips the space of the first piece it sees."""
    tokenizer = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(pieces)}, "?"))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def test_a_tokenizer_that_drops_the_first_space_still_gives_the_others() -> None:
    tokenizer = make_word_tokenizer("\u2581to", "\u2581be", "\u2581or")
    assert stream_out([0, 1, 2, 0], tokenizer=tokenizer) == ["to", " be", " or", " to", ""]


def test_text_that_follows_a_prompt_begins_with_its_own_space() -> None:
    """Fails if the stream's first token is decoded as if nothing stood before it."""
    tokenizer = make_word_tokenizer("\u2581to", "\u2581be")
    stream = TextStream(tokenizer, after=[0])
    assert detokenize(stream, 1).text == " be"


def test_a_prompt_that_ends_within_a_character_does_not_swallow_what_completes_it() -> None:
    euro = tokens_of("€")
    stream = TextStream(TOKENIZER, after=[*tokens_of("a"), *euro[:2]])
    assert [detokenize(stream, token_id).text for token_id in (euro[2], *tokens_of("b"))] == ["", "\ufffdb"]

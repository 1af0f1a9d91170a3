"""Turning tokens into text as they come: whole characters only, and never a part of a stop string.

This file owns what is held back and when it is given out. It knows nothing of sampling or of why a stream ends
otherwise. Whatever the tokens, the texts given out are in sum the decoding of all tokens, cut before the first stop
string.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoders give for bytes that are no character (yet)

# Tokens before the stream that its first token's text is read after: more than one, since special ones have no text.
_CONTEXT_TOKENS = 8

# A character has at most four bytes, so of many tokens that end none only the last few can still become one. With more
# than so many, what is certain is given out: each token decodes the window, which must not grow with the stream.
_HELD_TOKENS_MAX = 64
_LAST_TOKENS = 8  # of those may still become a character; and so many before them are what they are read after


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that became certain with a token; `stopped` when a stop string was completed (nothing comes after it)."""

    text: str
    stopped: bool = False


def detokenize(stream: "TextStream", token_id: int) -> TextDelta:
    """Add one token to a stream and return the text that is certain now.

    Held back: bytes that are not a whole character yet, and text that could be the beginning of a stop string.
    """
    return stream._add(token_id)


def find_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """(start, end) of the stop string that is completed first when `text` is read from the left; None without any.

    Of several that end at the same place the longest counts. So the cut does not depend on how text falls into tokens.
    """
    found = [(start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0]
    if not found:
        return None
    end, start = min(found)
    return start, end


class TextStream:
    """The text of one sequence under way. Special tokens have no text."""

    def __init__(self, tokenizer: Tokenizer, *, after: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        """after: the tokens that stand before the stream; their text is not given out."""
        assert all(stop)
        self._tokenizer = tokenizer
        self._stops = tuple(stop)
        # A token's text can depend on the tokens before it (a first word loses its space), so it is the difference of
        # two decodings of a short window: _window[:_num_given] is what it starts from, the rest was not given out yet.
        self._window = list(after[-_CONTEXT_TOKENS:])
        if self._decode(self._window).endswith(_REPLACEMENT):
            self._window = []  # it ends within a character, which would be counted as given out when it is completed
        self._num_given = len(self._window)
        self._held = ""  # could be the beginning of a stop string
        self._stopped = False

    def finish(self) -> TextDelta:
        """End the stream: what was held back, bytes that never became a character as U+FFFD."""
        return self._give(self._window_text(), is_last=True)

    def token_text(self, token_id: int) -> str:
        """One token's text by itself, special tokens by name; for lists of alternatives."""
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def _add(self, token_id: int) -> TextDelta:
        assert not self._stopped
        self._window.append(token_id)
        new = self._window_text()
        if new.endswith(_REPLACEMENT):
            if len(self._window) - self._num_given <= _HELD_TOKENS_MAX:
                return TextDelta("")
            return self._give(self._shorten_window(new), is_last=False)
        del self._window[: self._num_given]
        self._num_given = len(self._window)
        return self._give(new, is_last=False)

    def _shorten_window(self, new: str) -> str:
        """Of the window's `new` text, what no later token can change; it counts as given out from here on.

        That is what the tokens before the last few stand for, if it is a beginning of `new` and not all of it. The
        window's first tokens stay, too: some decoders show each byte of a run by itself as soon as one is wrong.
        """
        if self._drop_special():
            return ""
        window, num_given = self._window, self._num_given
        certain = self._decode(window[:-_LAST_TOKENS])[len(self._decode(window[:num_given])) :]
        self._window = window[: 2 * _LAST_TOKENS] + window[-2 * _LAST_TOKENS :]
        self._num_given = 3 * _LAST_TOKENS
        if certain != new and certain + self._window_text() == new:
            return certain
        self._window, self._num_given = window, num_given
        return ""

    def _drop_special(self) -> bool:
        """Whether the window had special tokens, which are left out of it: no text depends on them."""
        added = self._tokenizer.get_added_tokens_decoder()
        has_text = [not (token_id in added and added[token_id].special) for token_id in self._window]
        self._num_given = sum(has_text[: self._num_given])
        self._window = [token_id for token_id, kept in zip(self._window, has_text, strict=True) if kept]
        return not all(has_text)

    def _window_text(self) -> str:
        """The window's text beyond what was given out."""
        given = self._decode(self._window[: self._num_given])
        return self._decode(self._window)[len(given) :]

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def _give(self, new: str, *, is_last: bool) -> TextDelta:
        if self._stopped:
            return TextDelta("", stopped=True)
        text = self._held + new
        cut = find_stop(text, self._stops)
        if cut is not None:
            self._held, self._stopped = "", True
            return TextDelta(text[: cut[0]], stopped=True)
        num_held = 0 if is_last else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return TextDelta(text[: len(text) - num_held])


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning, but not all, of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0

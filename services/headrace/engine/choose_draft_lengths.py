"""Deciding how many tokens of each sequence's draft are worth computing in the next step.

A draft's j-th token counts only when all before it were right: with a chance of p for each, it brings `p ** j` tokens.
A token is worth the time in which an ordinary step brings one: the step's length over the sequences in it. A row costs
what a row more makes a step longer, by measurement, and rows are padded to a multiple: those that fill the padding up
cost nothing. Whatever is worth less than it costs is left out, so where nothing pays all lengths are 0.

Pure. After "Leviathan, Kalman, Matias: Fast inference from transformers via speculative decoding", arXiv:2211.17192,
section 3, with costs per row instead of free ones, and for a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# A token less likely than this is never computed, even where its row is free: handling it takes time, too.
PROBABILITY_MIN = 0.05


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """One sequence's draft: how likely each of its tokens is right if those before were, and its tokens at most."""

    probability: float
    most: int


@dataclass(frozen=True, slots=True)
class DraftPrices:
    """Seconds, and how rows are padded, for one step."""

    token_s: float  # that a token more is worth
    row_s: float  # that a (padded) row more costs
    draft_token_s: float  # to propose a token
    row_multiple: int
    num_rows: int  # of the step without drafts


def choose_draft_lengths(candidates: Sequence[DraftCandidate], prices: DraftPrices) -> list[int]:
    """Tokens to compute of each candidate's draft, from 0 to its `most`."""
    tokens = [
        (candidate.probability**position, index)
        for index, candidate in enumerate(candidates)
        for position in range(1, candidate.most + 1)
        if candidate.probability**position >= PROBABILITY_MIN
    ]
    # Likeliest first. A draft's tokens come in their own order: none is likelier than the one before it.
    tokens.sort(key=lambda token: -token[0])
    lengths, first, room = [0] * len(candidates), 0, -prices.num_rows % prices.row_multiple
    group_s = 0.0  # what is free comes first, then one group of padded rows after another
    while first < len(tokens):
        group = tokens[first : first + room]
        gain_s = sum(chance * prices.token_s - prices.draft_token_s for chance, _ in group)
        if gain_s < group_s or (group and gain_s <= 0):
            break
        for _, index in group:
            lengths[index] += 1
        first, room, group_s = first + room, prices.row_multiple, prices.row_multiple * prices.row_s
    return lengths

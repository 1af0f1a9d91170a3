"""Drafts beside reuse: the same answers and the same hits, on the worker that drafts and on those that read from it."""

from collections.abc import Sequence

from headrace.core.generation import CachedTokens
from headrace.engine.drafter import Draft, DraftWish

B = 8
VOCAB = 256


class HalfRight:
    """Drafts what it was told would follow, with every fifth token wrong."""

    costs_steps = False

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def draft(self, wishes: Sequence[DraftWish]) -> list[Draft]:
        return [self._follow(list(wish.token_ids), wish.most) for wish in wishes]

    def token_s(self) -> float:
        return 0.0

    def leave(self, key: int) -> None:
        """Nothing is kept of a sequence."""

    def _follow(self, token_ids: list[int], most: int) -> Draft:
        num = len(token_ids)
        text = next((text for text in self.texts if text[:num] == token_ids), [])
        following = enumerate(text[num : num + most], start=num)
        return Draft(tuple((token + 1) % VOCAB if place % 5 == 0 else token for place, token in following))


async def test_drafts_change_no_answer_and_cost_no_hit(store_node, make_worker, prompts):
    """A conversation of four turns, each standing on the answer before. Fails when a bit differs, or when reuse is one
    token less than what was computed before, in the pool or through the store."""
    drafter = HalfRight()
    plain, drafting = await make_worker("plain", near=False), await make_worker("drafting", drafter=drafter)
    history, computed = prompts(3 * B + 2, salt=5), 0
    for turn in range(4):
        want = await plain.cold(history, max_tokens=2 * B + 3)
        drafter.texts = [[*history, *want.token_ids]]
        got = await drafting.decode(history, max_tokens=2 * B + 3)
        again = await drafting.decode(history, max_tokens=2 * B + 3)
        assert got.same_answer_as(want)
        assert again.same_answer_as(want)
        assert got.cached == CachedTokens(device=computed // B * B)
        assert again.cached == CachedTokens(device=(len(history) - 1) // B * B)
        computed = len(history) + len(want.token_ids) - 1  # all but the last token of an answer
        history = [*history, *want.token_ids, *prompts(4, salt=turn)]
    await drafting.published()
    elsewhere = await plain.decode(history, hint_nodes=("node-1",))
    assert elsewhere.cached == CachedTokens(grpc=computed // B * B), "what was published is whole"
    assert elsewhere.same_answer_as(await plain.cold(history)), "and right"
    stats = drafting.worker.engine.speculation()
    assert stats.accepted_tokens > 20, "without accepted drafts this test shows nothing"
    assert stats.drafted_tokens - stats.accepted_tokens > 5, "nor without rejected ones"

"""What a gateway remembers for explanations, in bounds: the prompts of its last requests, and holders it has seen."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

from headrace.core.block import HashedPrompt
from headrace.core.generation import RequestId
from headrace.core.limits import HOLDERS_REMEMBERED, RECENT_PROMPT_TOKENS_MAX, RECENT_PROMPTS_MAX


@dataclass(frozen=True, slots=True)
class RecentPrompt:
    """One request's prompt as it was looked up, and, once it was served, how much of it was cached then."""

    model: str
    trust_group: str
    prompt: HashedPrompt
    came_unix_ms: int = 0
    cached_tokens: int | None = None  # None: it was not served to its end yet


class RecentPrompts:
    """Requests by id, oldest out first, bounded by their number and by their tokens."""

    def __init__(self, *, prompts_max: int = RECENT_PROMPTS_MAX, tokens_max: int = RECENT_PROMPT_TOKENS_MAX) -> None:
        self._prompts_max = prompts_max
        self._tokens_max = tokens_max
        self._prompts: dict[RequestId, RecentPrompt] = {}
        self._num_tokens = 0

    def add(self, request_id: RequestId, recent: RecentPrompt) -> None:
        """Remember one request; a prompt larger than the whole bound is not kept."""
        if len(recent.prompt.token_ids) > self._tokens_max:
            return
        self._prompts[request_id] = recent
        self._num_tokens += len(recent.prompt.token_ids)
        while len(self._prompts) > self._prompts_max or self._num_tokens > self._tokens_max:
            oldest = next(iter(self._prompts))
            self._num_tokens -= len(self._prompts.pop(oldest).prompt.token_ids)

    def served(self, request_id: RequestId, *, cached_tokens: int) -> None:
        """A request was served to its end; nothing for one that is not remembered."""
        if request_id in self._prompts:
            self._prompts[request_id] = replace(self._prompts[request_id], cached_tokens=cached_tokens)

    def latest(self, prompts_max: int) -> list[RecentPrompt]:
        """The requests that came last, newest first."""
        return list(islice(reversed(self._prompts.values()), prompts_max))

    def find(self, request_id: str) -> RecentPrompt | None:
        """The request's prompt, if it is still remembered."""
        return self._prompts.get(RequestId(request_id))


class SeenHolders:
    """Holders by name with the time they were last there, longest unseen out first."""

    def __init__(self) -> None:
        self._seen_unix_ms: dict[str, int] = {}

    def saw(self, holders: Iterable[str], *, unix_ms: int) -> None:
        """These are there now."""
        for holder in holders:
            self._seen_unix_ms.pop(holder, None)
            self._seen_unix_ms[holder] = unix_ms
        while len(self._seen_unix_ms) > HOLDERS_REMEMBERED:
            del self._seen_unix_ms[next(iter(self._seen_unix_ms))]

    def gone(self, live: Iterable[str]) -> dict[str, int]:
        """Holders that were there and are not among the live ones, with the Unix time in ms of the last sight."""
        there = set(live)
        return {holder: unix_ms for holder, unix_ms in self._seen_unix_ms.items() if holder not in there}

"""The first thing that a client hears of its request."""

from dataclasses import dataclass

from headrace.core.generation import RequestId


@dataclass(frozen=True, slots=True)
class Accepted:
    """First event of every request: it is valid, fits, and has a name."""

    request_id: RequestId
    model: str
    prompt_tokens: int

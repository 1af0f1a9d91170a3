"""As much of PromQL as alert rules and dashboards here use: reads an expression whole, or raises ValueError.

Gives the metrics that it names, with the labels that each is asked for, and the labels that results are grouped by.
"""

import re
from dataclasses import dataclass, field

TOKEN = re.compile(
    r"""\s*(?:
    (?P<string>"(?:[^"\\]|\\.)*")
  | (?P<duration>\d+(?:ms|[smhdwy])(?![A-Za-z_0-9]))
  | (?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)
  | (?P<word>[A-Za-z_:][\w:]*)
  | (?P<sign>=~|!~|!=|==|>=|<=|[-+*/%^(){}\[\],=<>])
    )""",
    re.VERBOSE,
)
DURATION = re.compile(r"\d+(?:ms|[smhdwy])")
AGGREGATIONS = {"sum", "max", "min", "avg", "count"}
# name -> number of arguments; of which the range functions take a selector with a range.
FUNCTIONS = {"histogram_quantile": 2, "absent": 1, "label_values": 2}
RANGE_FUNCTIONS = {"rate", "increase", "changes", "resets"}
BINARY = [{"or"}, {"and", "unless"}, {"==", "!=", ">", "<", ">=", "<="}, {"+", "-"}, {"*", "/", "%"}, {"^"}]


@dataclass
class Named:
    """What an expression asks for."""

    metrics: dict[str, set[str]] = field(default_factory=dict)  # metric -> labels it is selected by
    grouped_by: list[tuple[set[str], set[str]]] = field(default_factory=list)  # (labels, metrics inside)
    has_comparison: bool = False


def parse(text: str) -> Named:
    """What the expression names. Raises ValueError where it is not PromQL as far as is known here."""
    reader = _Reader(text)
    reader.expression(0)
    if reader.token is not None:
        raise ValueError(f"{reader.token!r} follows the end of: {text}")
    return reader.named


class _Reader:
    def __init__(self, text: str) -> None:
        self.named = Named()
        self._tokens = _tokens(text)
        self._place = 0
        self._text = text

    @property
    def token(self) -> str | None:
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    def take(self, *wanted: str) -> str:
        token = self.token
        if token is None or (wanted and token not in wanted):
            raise ValueError(f"{token!r} instead of {wanted or 'more'} in: {self._text}")
        self._place += 1
        return token

    def expression(self, level: int) -> None:
        if level == len(BINARY):
            self.operand()
            return
        self.expression(level + 1)
        while self.token in BINARY[level]:
            self.named.has_comparison |= self.token in BINARY[2]
            self.take()
            if self.token in ("on", "ignoring"):
                self.take()
                self.labels()
            self.expression(level + 1)

    def operand(self) -> None:
        token = self.take()
        if token == "(":
            self.expression(0)
            self.take(")")
        elif token in AGGREGATIONS:
            self.aggregation()
        elif token in RANGE_FUNCTIONS:
            self.take("(")
            self.selector(self.take(), ranged=True)
            self.take(")")
        elif token in FUNCTIONS:
            self.arguments(FUNCTIONS[token])
        elif not re.fullmatch(r"\d.*", token):
            self.selector(token, ranged=False)

    def aggregation(self) -> None:
        before = set(self.named.metrics)
        labels: set[str] = set()
        if self.token == "by":
            self.take()
            labels = self.labels()
        self.arguments(1)
        self.named.grouped_by.append((labels, set(self.named.metrics) - before))

    def arguments(self, number: int) -> None:
        self.take("(")
        for place in range(number):
            if place:
                self.take(",")
            self.expression(0)
        self.take(")")

    def labels(self) -> set[str]:
        self.take("(")
        found = {self.take()}
        while self.take(",", ")") == ",":
            found.add(self.take())
        return found

    def selector(self, name: str, *, ranged: bool) -> None:
        if not re.fullmatch(r"[A-Za-z_:][\w:]*", name):
            raise ValueError(f"{name!r} is no metric in: {self._text}")
        labels = self.named.metrics.setdefault(name, set())
        if self.token == "{":
            self.take()
            while self.token != "}":
                labels.add(self.take())
                self.take("=", "=~", "!=", "!~")
                if not self.take().startswith('"'):
                    raise ValueError(f"a label's value is no string in: {self._text}")
                if self.token == ",":
                    self.take()
            self.take("}")
        if ranged:
            self.take("[")
            self.duration()
            self.take("]")
        if self.token == "offset":
            self.take()
            self.duration()

    def duration(self) -> None:
        token = self.take()
        if not DURATION.fullmatch(token):
            raise ValueError(f"{token!r} is no duration in: {self._text}")


def _tokens(text: str) -> list[str]:
    found, place, text = [], 0, text.strip()
    while place < len(text):
        match = TOKEN.match(text, place)
        if match is None:
            raise ValueError(f"cannot read {text[place:]!r}")
        found.append(match.group().strip())
        place = match.end()
    return found

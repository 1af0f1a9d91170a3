"""What the PromQL of alert rules and dashboards names, by a parser of the whole language.

Gives the metrics that an expression asks for, with the labels that each is asked for, and the labels that results are
grouped by.
"""

from dataclasses import dataclass, field

import promql_parser
from promql_parser import AggregateExpr, BinaryExpr, Expr, VectorSelector

COMPARISONS = {"==", "!=", ">", "<", ">=", "<="}


@dataclass
class Named:
    """What an expression asks for."""

    metrics: dict[str, set[str]] = field(default_factory=dict)  # metric -> labels it is selected by
    grouped_by: list[tuple[set[str], set[str]]] = field(default_factory=list)  # (labels, metrics inside)
    has_comparison: bool = False


def parse(text: str) -> Named:
    """What the expression names. Raises ValueError where it is not PromQL, types included."""
    named = Named()
    for node in _nodes(promql_parser.parse(text)):
        if isinstance(node, VectorSelector):
            labels = named.metrics.setdefault(node.name, set())
            labels |= {matcher.name for matcher in node.matchers.matchers}
        elif isinstance(node, AggregateExpr):
            by = set(node.modifier.labels) if node.modifier is not None else set()
            inside = {each.name for each in _nodes(node.expr) if isinstance(each, VectorSelector)}
            named.grouped_by.append((by, inside))
        elif isinstance(node, BinaryExpr):
            named.has_comparison |= str(node.op) in COMPARISONS
    return named


def _nodes(expression: Expr) -> list[Expr]:
    """The expression and all that is in it."""
    found: list[Expr] = []
    promql_parser.walk(expression, pre_visit=found.append)
    return found

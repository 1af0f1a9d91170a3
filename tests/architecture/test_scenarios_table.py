"""docs/scenarios.md says which test covers which scenario; it must stay true."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "scenarios.md").read_text(encoding="utf-8")
ROWS = [line for line in TABLE.splitlines() if re.match(r"\| O\d+ \|", line)]


def test_every_scenario_has_a_row_with_a_test_or_a_reason():
    assert [int(row.split("|")[1].strip()[1:]) for row in ROWS] == list(range(1, 90))
    for row in ROWS:
        _, _, _, covered, reason, _ = row.split("|")
        assert "::" in covered or reason.strip(), row


def test_every_test_that_the_table_names_exists():
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", "\n".join(ROWS))
    assert len(named) > 60
    files = [(file, test) for file, test in named if not (ROOT / "services" / "headrace" / file).exists()]
    missing = [
        f"{file}::{test}"
        for file, test in files
        if not (path := ROOT / "tests" / file).exists() or (test and f"def {test}(" not in path.read_text("utf-8"))
    ]
    assert missing == []

"""Tables of budgets: whose word wins, in whatever order it is heard of, and what the tenants file says."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from headrace.core.block import HashAlgorithm, KvLayout, Namespace, NamespaceId
from headrace.core.budgets import TENANTS_FILE, Budget, merge_budgets, rows_to_send, settle_budgets
from headrace.core.tenants import Tenant, file_budgets

NOW = 1_700_000_000_000
SPACES = [NamespaceId(f"{number:032x}") for number in range(3)]

ROWS = st.builds(
    lambda account, spaces, bytes_min, more, at, by: Budget(
        account,
        tuple(sorted(spaces)),
        None if more is None else bytes_min + more,
        bytes_min,
        set_unix_ms=at,
        set_by=by,
    ),
    st.sampled_from(["a", "b"]),
    st.sets(st.sampled_from(SPACES)),
    st.integers(0, 3),
    st.one_of(st.none(), st.integers(0, 3)),
    st.integers(0, 3),
    st.sampled_from([TENANTS_FILE, "op", "operator"]),
)
TABLES = st.lists(ROWS, max_size=3, unique_by=lambda row: row.account)


def filed(account: str = "a", bytes_max: int | None = None, bytes_min: int = 0, spaces=()) -> Budget:
    return Budget(account, tuple(sorted(spaces)), bytes_max, bytes_min, set_by=TENANTS_FILE)


def by_operator(account: str = "a", bytes_max: int | None = None, at: int = NOW) -> Budget:
    return Budget(account, (), bytes_max, set_unix_ms=at, set_by="operator")


@given(st.lists(TABLES, max_size=4), st.randoms())
def test_tables_merge_to_the_same_in_any_order_and_any_number_of_times(tables, random):
    """Fails when two gateways that hear of two operators in another order settle on different quotas."""
    merged = merge_budgets(tables)
    shuffled = [*tables, merged, *tables]
    random.shuffle(shuffled)
    assert merge_budgets(shuffled) == merged
    assert [row.account for row in merged] == sorted({row.account for table in tables for row in table})


def test_the_entry_set_last_wins_with_the_namespaces_that_anybody_knows():
    older = replace(by_operator(bytes_max=5), namespaces=(SPACES[0],))
    newer = replace(by_operator(bytes_max=3, at=NOW + 1), namespaces=(SPACES[1],))
    (row,) = merge_budgets([[newer], [older]])
    assert row == replace(newer, namespaces=(SPACES[0], SPACES[1]))


def test_the_file_speaks_for_accounts_that_nobody_has_set():
    assert settle_budgets([], [filed(bytes_max=5)]) == (filed(bytes_max=5),)


def test_an_operators_word_stands_against_the_file():
    known = by_operator(bytes_max=7)
    (row,) = settle_budgets([known], [filed(bytes_max=5, spaces=SPACES[:1])])
    assert row == replace(known, namespaces=(SPACES[0],))


def test_what_was_given_back_to_the_file_follows_the_file_ever_after():
    """Fails when a reset freezes what the file said at that time, or a change of the file loses against the reset."""
    reset = Budget("a", (), 5, set_unix_ms=NOW, set_by=TENANTS_FILE)
    (row,) = settle_budgets(merge_budgets([[by_operator(bytes_max=7, at=NOW - 9)], [reset]]), [filed(bytes_max=5)])
    assert row == reset
    (row,) = settle_budgets([row], [filed(bytes_max=4)])
    assert (row.bytes_max, row.set_by) == (4, TENANTS_FILE)
    assert merge_budgets([[row], [reset]]) == (row,)


def test_a_lower_bound_in_a_changed_file_wins_on_every_node():
    """Fails when two rows of the file tie, so that the larger one stays."""
    (first,) = settle_budgets([], [filed(bytes_max=5)])
    (second,) = settle_budgets([first], [filed(bytes_max=2)])
    assert merge_budgets([[first], [second]]) == (second,)
    assert second.bytes_max == 2


def test_a_changed_file_never_beats_an_operator_whose_word_one_node_alone_has():
    """The node with the operator's row was away while the file changed several times."""
    row = filed(bytes_max=5)
    for bytes_max in (4, 3, 2):
        (row,) = settle_budgets([row], [filed(bytes_max=bytes_max)])
    assert merge_budgets([[row], [by_operator(bytes_max=9)]]) == (by_operator(bytes_max=9),)


def test_an_account_that_left_the_file_has_no_bounds_unless_an_operator_set_them():
    left, kept = filed("a", 5, 2), by_operator("b", 5)
    rows = settle_budgets([left, kept], [])
    assert [(row.account, row.bytes_max, row.bytes_min) for row in rows] == [("a", None, 0), ("b", 5, 0)]
    assert settle_budgets(rows, []) == rows


@given(TABLES, TABLES)
def test_settling_is_done_once(known, file_rows):
    """Fails when a gateway raises a row at every round although nothing has changed."""
    file_rows = [replace(row, set_by=TENANTS_FILE, set_unix_ms=0) for row in file_rows]
    settled = settle_budgets(known, file_rows)
    assert settle_budgets(settled, file_rows) == settled
    assert merge_budgets([known, settled]) == settled


@given(TABLES, TABLES)
def test_a_node_that_was_sent_what_it_lacks_lacks_nothing(wanted, has):
    wanted = merge_budgets([wanted, has])
    sent = rows_to_send(wanted, has)
    assert rows_to_send(wanted, merge_budgets([has, sent])) == []
    assert [row.bytes_min for row in sent] == sorted(row.bytes_min for row in sent)


def test_the_file_has_one_row_for_each_trust_group_with_its_namespaces_of_every_model():
    layout = KvLayout("float32", 1, 1, 8, 4)
    models = [Namespace(m, "w", "t", "", layout, "p", "n", HashAlgorithm.SHA256, "") for m in ("one", "two")]
    tenants = [Tenant("a", "group:x", bytes_max=9), Tenant("b", "group:x", bytes_max=9), Tenant("c", "tenant:c")]
    rows = file_budgets(tenants, [*models, models[0]])
    assert [(row.account, row.bytes_max, row.set_by, len(row.namespaces)) for row in rows] == [
        ("group:x", 9, TENANTS_FILE, 2),
        ("tenant:c", None, TENANTS_FILE, 2),
    ]
    assert models[0].narrowed("", trust_group="group:x").id in rows[0].namespaces

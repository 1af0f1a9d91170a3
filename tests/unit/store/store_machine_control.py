"""The store machine under operators' orders: pins, moments, budgets of accounts, eviction ahead of need, drain.

A pinned prefix stays readable through everything but broken bytes and the end of its pin. Pins are all or nothing, by
exact bytes. Pins and minima together never take more than can be kept. Room for others never takes an account below its
minimum, and no account grows beyond its quota. Pins and moments stand in the arena's records; the table of budgets is
told to each new process, as the service does.
"""

from collections.abc import Iterable
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import rule
from known_blocks import ACCOUNT_TO_NAMESPACE, BLOCKS, CHAINS, Key, KnownBlock
from store_machine import ANY, step
from store_machine_claims import POSITION, RETENTION, ClaimsMachine
from store_model import ancestry

from headrace.blocks.host_arena import UNIT_BYTES
from headrace.core.budgets import Budget
from headrace.core.errors import InvalidRequest
from headrace.core.generation import ControlOutcome, ControlReport, EvictSelector
from headrace.core.limits import PROTECTED_SHARE_MAX
from headrace.core.retention import NO_END_UNIX_MS, Retention
from headrace.store.budgets_file import BudgetsFile

ACCOUNT = st.sampled_from(sorted(ACCOUNT_TO_NAMESPACE))
WAYS_TO_NAME = st.sampled_from([4, 5, 6, 7])  # of `ClaimsMachine.selector`
PIN_SHARE = 0.5


class ControlMachine(ClaimsMachine):
    """One node and its operators."""

    def __init__(self) -> None:
        super().__init__()
        self.budgets: dict[str, Budget] = {}
        self.table_before: dict[str, Budget] = {}  # the call in progress; what its file may still say after a death
        self.bytes_allowed: dict[str, int] = {}  # quota, or what an account had when that was lowered
        self.orders = 0

    # Pins and moments

    @rule(pick=ANY, position=POSITION, way=WAYS_TO_NAME, seconds=st.sampled_from([None, None, 5.0, 40.0]))
    @step
    def pin(self, pick: int, position: int, way: int, seconds: float | None) -> None:
        self.time_passed()
        selector = self.selector(*self.readable_place(pick, position), way)
        until = None if seconds is None else self.clock.unix_ms() + int(1_000 * seconds)
        roots, pinned = self.model.named(selector), self.model.kept_by_pins()
        beyond = {key for root in roots for key in ancestry(root.key)} - pinned
        refused = bool(beyond) and bytes_of(beyond | pinned) > int(PIN_SHARE * self.arena.data_bytes)
        refused = refused or self.grows_too_much(self.budgets, beyond | pinned)
        marks = {each.key: replace(each.terms, pinned_until_unix_ms=until or NO_END_UNIX_MS) for each in roots}
        with self.call(may_set={} if refused else marks):
            report = self.node.pin(selector, until_unix_ms=until)
        if not roots:
            assert report.outcome is ControlOutcome.NOT_HELD
        elif refused:
            assert report.outcome is ControlOutcome.REFUSED
            assert str(bytes_of(beyond)) in report.why
        else:
            self.model.set_terms(marks)
            self.check_report(report, {key for root in roots for key in ancestry(root.key)})
        assert report.pinned_bytes == self.model.pinned_bytes()

    @rule(pick=ANY, position=POSITION, way=WAYS_TO_NAME)
    @step
    def unpin(self, pick: int, position: int, way: int) -> None:
        self.time_passed()
        pinned = sorted(key[1] for key, block in self.model.blocks.items() if block.terms.pinned_until_unix_ms)
        selector = self.selector(*self.readable_place(pick, position), way)
        if pinned and position:
            selector = EvictSelector(block_hashes=(pinned[pick % len(pinned)],))
        roots = [root for root in self.model.named(selector) if root.terms.pinned_until_unix_ms]
        marks = {root.key: replace(root.terms, pinned_until_unix_ms=0) for root in roots}
        with self.call(may_set=marks):
            report = self.node.unpin(selector)
        freed = {key for root in roots for key in self.model.unpin(root)}
        if roots:
            self.check_report(report, freed)
        else:
            assert report.outcome is ControlOutcome.NOT_HELD
        assert report.pinned_bytes == self.model.pinned_bytes()

    @rule(pick=ANY, position=POSITION, way=WAYS_TO_NAME, seconds=st.sampled_from([None, 0.0, 7.0, 25.0]))
    @step
    def set_ttl(self, pick: int, position: int, way: int, seconds: float | None) -> None:
        self.time_passed()
        selector = self.selector(*self.readable_place(pick, position), way)
        moment = None if seconds is None else self.clock.unix_ms() + int(1_000 * seconds)
        roots = [root for root in self.model.named(selector) if moment is not None or root.terms.ordered_unix_ms]
        marks = {root.key: replace(root.terms, ordered_unix_ms=moment or 0) for root in roots}
        with self.call(may_set=marks):
            report = self.node.set_ttl(selector, expires_unix_ms=moment)
        self.model.set_terms(marks)
        for root in roots:
            root.order_waits = moment is not None
        assert report.outcome is (ControlOutcome.DONE if roots else ControlOutcome.NOT_HELD)
        if roots:
            self.check_order(report, {member.key for root in roots for member in self.model.family(root)})

    def check_report(self, report: ControlReport, concerned: set[Key]) -> None:
        """What was done, in blocks and exact bytes."""
        assert report.outcome is ControlOutcome.DONE
        assert (report.blocks, report.bytes) == (len(concerned), bytes_of(concerned))
        assert report.pin_bytes_max == int(PIN_SHARE * self.arena.data_bytes)

    def check_order(self, report: ControlReport, family: set[Key]) -> None:
        """What will go of a node whose only tier is the arena."""
        self.check_report(report, family & self.model.visible())

    @rule(lines=st.integers(1, 16), pick=ANY, what=st.integers(0, 8), position=POSITION, retention=RETENTION)
    def die_in(self, lines: int, pick: int, what: int, position: int, retention: Retention) -> None:
        """Killed in the middle of a call that changes what outlives the process."""
        self.died_after = lines
        if what == 0:
            self.pin(pick, position, 4, 40.0 if pick % 2 else None)
        elif what == 1:
            self.unpin(pick, position, 4)
        elif what == 2:
            self.set_ttl(pick, position, 4, 7.0 if pick % 2 else None)
        elif what == 3:
            self.evict(pick, position, pick % 8, 2, False)
        elif what == 4:
            self.lease(pick, 0, retention)
        elif what == 5:
            self.release(pick, 1)
        elif what < 8:
            self.died_after = 0
            self.reserve(pick % len(CHAINS), 0, 1 + position, retention)
            self.died_after = lines
            self.finish_write(0, "well")
        else:
            self.died_after = 4 * lines
            self.do_store(CHAINS[pick % len(CHAINS)], 1 + position, retention)

    # Budgets

    @rule(account=ACCOUNT, quota=st.none() | st.integers(0, 8), minimum=st.integers(0, 5))
    @step
    def set_budget(self, account: str, quota: int | None, minimum: int) -> None:
        """Units; a row is the last word on its account, and all rows together may protect a part of the arena only."""
        self.orders += 1
        if quota is not None:
            minimum = min(minimum, quota)
        row = Budget(
            account=account,
            namespaces=(ACCOUNT_TO_NAMESPACE[account],) if account else (),
            bytes_max=None if quota is None else quota * UNIT_BYTES,
            bytes_min=minimum * UNIT_BYTES,
            set_unix_ms=self.orders,
        )
        table = self.budgets | {account: row}
        protected = sum(each.bytes_min for each in table.values())
        refused = protected > int(PROTECTED_SHARE_MAX * self.arena.data_bytes)
        refused = refused or self.grows_too_much(table, self.model.kept_by_pins())
        try:
            assert self.node.room.set_budgets([row]) == tuple(table[name] for name in sorted(table))
            assert not refused, "more was protected than may be"
        except InvalidRequest:
            assert refused
            return
        before, self.budgets = self.budgets, table
        self.bytes_allowed = {name: self.account_bytes(name) for name in table}
        if self.arena.path is not None:
            self.table_before = before
            with self.call():
                BudgetsFile(self.arena.path).write(tuple(table.values()))
        self.table_before = table

    def took_over(self) -> None:
        """As the service does at its start. Without a file, gateways tell the new process."""
        if self.arena.path is not None:
            found = {row.account: row for row in BudgetsFile(self.arena.path).read()}
            assert found in (self.table_before, self.budgets), "a table was found that nobody set"
            self.budgets = self.table_before = found
        self.node.room.set_budgets(self.budgets.values())
        self.bytes_allowed = {name: self.account_bytes(name) for name in self.budgets}

    def kept(self, table: dict[str, Budget], pinned: set[Key]) -> int:
        """What a table protects and pins keep, in bytes; what is both counts once."""
        of_account: dict[str, int] = dict.fromkeys([*table, ""], 0)
        for key in pinned:
            account = BLOCKS[key].account
            of_account[account if account in table else ""] += BLOCKS[key].slot_bytes
        minima = {name: row.bytes_min for name, row in table.items()}
        return sum(max(num_bytes, minima.get(name, 0)) for name, num_bytes in of_account.items())

    def grows_too_much(self, table: dict[str, Budget], pinned: set[Key]) -> bool:
        """Whether these minima and pins are more than an arena can keep, and more than it keeps now."""
        kept = self.kept(table, pinned)
        return kept > self.kept_max and kept > self.kept(self.budgets, self.model.kept_by_pins())

    @property
    def kept_max(self) -> int:
        return int(PROTECTED_SHARE_MAX * self.arena.data_bytes)

    def account_of(self, key: Key) -> str:
        """The account whose row counts for a block: "" where its own has none."""
        return self.named_account(BLOCKS[key].account)

    def named_account(self, account: str) -> str:
        return account if account in self.budgets else ""

    def account_bytes(self, account: str) -> int:
        """What an account has in the arena."""
        return bytes_of(key for key in self.model.blocks if self.account_of(key) == account)

    def bounds(self, account: str) -> tuple[int | None, int]:
        """Quota and minimum in bytes."""
        row = self.budgets.get(account)
        return (None, 0) if row is None else (row.bytes_max, row.bytes_min)

    def can_spare(self, key: Key) -> bool:
        """Whether its account has its minimum without this block."""
        account = self.account_of(key)
        minimum = self.bounds(account)[1]
        return minimum == 0 or self.account_bytes(account) - BLOCKS[key].slot_bytes >= minimum

    def is_too_long(self, block: KnownBlock) -> bool:
        quota = self.bounds(self.account_of(block.key))[0]
        over = quota is not None and (block.header.position + 1) * block.slot_bytes > quota
        return over or super().is_too_long(block)

    def is_refused(self, block: KnownBlock) -> bool:
        return self.node.draining or super().is_refused(block)

    def is_short_of_quota(self, block: KnownBlock, gone: set[Key]) -> bool:
        account = self.account_of(block.key)
        quota = self.bounds(account)[0]
        own = bytes_of(key for key in gone if self.account_of(key) == account)
        return quota is not None and self.account_bytes(account) + own + block.slot_bytes > quota

    def may_make_room(self, block: KnownBlock) -> set[Key]:
        account = self.account_of(block.key)
        candidates = super().may_make_room(block)
        own = {key for key in candidates if self.account_of(key) == account}
        if self.is_short_of_quota(block, set()):
            return own
        return own | {key for key in candidates if self.can_spare(key)}

    def account_for_room(self, account: str) -> set[Key]:
        gone = super().account_for_room(account)
        for name in {self.account_of(key) for key in gone} - {self.named_account(account)}:
            assert self.account_bytes(name) >= self.bounds(name)[1], "others' room was made of a protected minimum"
        return gone

    @rule(share=st.sampled_from([0.1, 0.3, 0.6]))
    @step
    def evict_ahead(self, share: float) -> None:
        """In the background: quotas that were lowered, then room, and not a block more."""
        over = {name for name in self.budgets if self.exceeds_quota(name)}
        with self.call(may_lose=self.model.evictable_in_time()):
            left = self.node.room.evict_ahead(share)
        gone = self.account_for_room("")
        assert len(gone) == left
        wanted = share * self.arena.data_bytes
        if gone and not over:
            assert self.arena.free_bytes - max(BLOCKS[key].slot_bytes for key in gone) < wanted, "more than needed left"
        if self.arena.free_bytes < wanted:
            assert not any(self.can_spare(key) for key in self.model.evictable()), "a block could have gone"
        for name in over:
            own = {key for key in self.model.evictable() if self.account_of(key) == name}
            assert not self.exceeds_quota(name) or not own, "an account is still over its quota"

    def exceeds_quota(self, account: str) -> bool:
        """Whether an account has more than its quota."""
        quota = self.bounds(account)[0]
        return quota is not None and self.account_bytes(account) > quota

    @rule(on=st.sampled_from([False, False, False, True]))
    @step
    def drain(self, on: bool) -> None:
        """A node that drains takes no new blocks; everything else goes on."""
        self.node.draining = on

    # What must hold after every step

    def check_readable(self) -> None:
        super().check_readable()
        pinned = self.model.kept_by_pins()
        assert self.kept(self.budgets, pinned) <= self.kept_max, "more is to be kept than can be"
        usage = {each.account: each for each in self.node.room.usage()}
        for name in self.budgets.keys() | {""}:
            found, has = usage[name], self.account_bytes(name)
            assert found.host_bytes == has
            assert found.pinned_bytes == bytes_of(key for key in pinned if self.account_of(key) == name)
            quota = self.bounds(name)[0]
            assert quota is None or has <= max(quota, self.bytes_allowed[name]), "an account grew beyond its quota"
            self.bytes_allowed[name] = has
        infos = self.node.list_blocks(EvictSelector(tier="host"))[0]
        assert {(info.namespace, info.block_hash) for info in infos if info.protected_by_pin} == pinned

    def check_at_rest(self) -> None:
        self.died_after = 0
        self.time_passed()
        pinned = [block for block in self.model.blocks.values() if block.terms.pinned_until_unix_ms]
        for block in pinned:
            self.node.unpin(EvictSelector(block_hashes=(block.key[1],)))
            self.model.unpin(block)
        super().check_at_rest()


def bytes_of(keys: Iterable[Key]) -> int:
    """What blocks take of an arena."""
    return sum(BLOCKS[key].slot_bytes for key in keys)

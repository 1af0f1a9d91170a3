"""The store machine with a disk below the arena: blocks move down and up, writes fail, records rot, memory is lost.

The arena is predicted as before. Of the disk the machine knows after each step what may have come (who was evicted for
room, and must have unless too large) and what may have gone, by the call that was made. Both tiers together must be
closed under prefixes, and a death may lose what waited to be written, and nothing that was.
"""

import os
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from known_blocks import BLOCKS, CHAINS, Key, KnownBlock, KnownChain
from store_machine import ANY, IndexView, rules_of, step
from store_machine_control import ControlMachine
from store_model import Life, ancestry, closed, is_named

from headrace.blocks.block_codec import decode_header
from headrace.blocks.disk_tier import DiskRecord, DiskTier, open_disk, record_bytes
from headrace.blocks.host_arena import UNIT_BYTES, HostArena, SlotTerms
from headrace.core.block import Tier, payload_digest
from headrace.core.budgets import Budget
from headrace.core.errors import BlockCorrupt
from headrace.core.eviction import PolicyName
from headrace.core.generation import ControlReport, EvictReport, EvictSelector
from headrace.core.retention import KEEP, Retention
from headrace.store.recover_arena import recover_arena
from headrace.store.recover_disk import recover_disk
from headrace.store.store_node import StoreNode

SEGMENTS = 4
RECORD_BYTES = {key: record_bytes(len(block.header_bytes), len(block.payload)) for key, block in BLOCKS.items()}
LARGEST, SMALLEST = max(RECORD_BYTES.values()), min(RECORD_BYTES.values())


class DiskMachine(ControlMachine):
    """A few units of memory above a disk of four segments."""

    def __init__(self) -> None:
        super().__init__()
        self.tier: DiskTier | None = None
        self.on_disk: set[Key] = set()  # as the node's books had it when last looked at
        self.written: dict[Key, DiskRecord] = {}  # of those, where; what is not in here waits
        self.durable: dict[Key, DiskRecord] = {}  # what a death must not lose
        self.may_return: set[Key] = set()  # gone, and not marked on disk yet
        self.rotten: set[tuple[int, int]] = set()  # records (segment, offset) that a test broke
        self.moved_broken: set[Key] = set()  # broken in memory, which nobody saw before they were moved to the disk
        self.writing: DiskRecord | None = None
        self.budgets_seen: dict[str, Budget] = {}  # when quotas were last looked at
        self.disk_bytes_allowed: dict[str, int] = {}  # what each account had then

    @initialize(units=st.integers(3, 6), policy=st.sampled_from(PolicyName), segment=st.sampled_from([1, 2, 2, 3, 12]))
    def start(self, units: int, policy: PolicyName, segment: int) -> None:
        """Below 12, a segment does not take the largest block: then that is never kept."""
        self.rules = rules_of(policy)
        self.directory = Path(tempfile.mkdtemp(prefix="store-machine-", dir="/dev/shm"))
        self.bytes_max = SEGMENTS * segment * (SMALLEST + 32)
        self.arena = HostArena.in_memory((units + 2) * UNIT_BYTES)
        self.tier = open_disk(self.directory / "n1.disk", self.bytes_max, segments=SEGMENTS)
        self.open_node()
        self.fill_some()

    # Life and death

    def open_node(self) -> None:
        self.index = IndexView()
        disk = recover_disk(self.tier)
        self.node = StoreNode(
            self.arena,
            node_id="n1",
            clock=self.clock,
            changes=self.index,
            recovered=recover_arena(self.arena),
            disk=disk,
            rules=self.rules,
        )
        self.incarnations.append(self.node.incarnation)
        self.may_return |= {(header.namespace, header.block_hash) for _, header in disk.found}
        self.remember_disk()

    def reopen_storage(self) -> None:
        """The disk as the dead process left it: a record that it was writing may be there in part."""
        super().reopen_storage()
        self.tier.close()
        torn, self.writing = self.writing, None
        path = None if torn is None else self.path_of(torn)
        if path is not None and path.exists():
            cut = torn.offset + torn.total_bytes * (len(self.incarnations) % 8) // 7
            if torn.offset < cut < path.stat().st_size:
                os.truncate(path, cut)
        self.tier = open_disk(self.directory / "n1.disk", self.bytes_max, segments=SEGMENTS)

    @rule()
    @step
    def lose_memory(self) -> None:
        """The host is started anew: only the disk is left."""
        self.clock.seconds += 1
        with self.call(may_lose=self.model.visible() - set(self.written)):
            pass
        self.arena = HostArena.in_memory(self.arena.total_bytes)
        for block in self.model.blocks.values():
            block.payload = b"lost"
        self.recover_after_death()

    def what_must_survive(self) -> tuple[set[Key], set[Key]]:
        arena, blocks = self.model.visible(), self.model.blocks
        in_arena = {key for key in arena if not any(blocks[each].is_broken for each in ancestry(key))}
        whole = {key for key, record in self.durable.items() if (record.segment, record.offset) not in self.rotten}
        lost = self.may_lose_in_step | self.effects.may_lose
        least = {
            key
            for key in in_arena | whole
            if all(each in in_arena or each in whole for each in ancestry(key)) and not lost & set(ancestry(key))
        }
        hidden = {key for key in self.model.committed() if not blocks[key].is_broken}
        most = in_arena | hidden | self.on_disk | self.may_return | self.effects.may_add
        return least, most

    def remember_disk(self) -> None:
        """Look at the books of the disk."""
        self.on_disk = {block.key for block in self.node.disk}
        self.written = {block.key: block.record for block in self.node.disk if block.record is not None}
        rewritten = {key: record for key, record in self.durable.items() if key in self.on_disk}
        self.durable = rewritten | self.written  # one that is written anew is safe where it was until then

    # What comes to the disk and what leaves it

    def account_for_room(self, account: str) -> set[Key]:
        """Who made room is on disk now, unless it may not be there; and nobody else left or came."""
        was_visible, before = self.model.visible(), self.on_disk
        unbounded = {key for key in was_visible if may_go_to_disk(self.model.blocks[key].terms)}
        self.moved_broken |= {key for key in was_visible if self.model.blocks[key].is_broken}
        gone = super().account_for_room(account)
        self.remember_disk()
        lost = {key for key in gone & was_visible if key not in self.on_disk}
        for key in lost - {below for below in lost if lost & set(ancestry(below)[1:])}:  # the rest lost their prefix
            assert key not in unbounded or not self.has_place(key, before | gone), "a block that made room was not kept"
        assert self.on_disk - before <= gone & unbounded, "a block came to the disk that nobody moved there"
        assert not self.on_disk & (gone & was_visible - unbounded), "a block is on disk that may not be there"
        self.check_lost(before, allowed=lost)
        return gone

    def has_place(self, key: Key, at_most: set[Key]) -> bool:
        """Whether the disk could keep a block, and its account may have it there beside what else came or was there."""
        account = self.account_of(key)
        quota = self.bounds(account)[0]
        has = sum(RECORD_BYTES[each] for each in at_most if self.account_of(each) == account)
        return RECORD_BYTES[key] <= self.tier.segment_bytes and (quota is None or has <= quota)

    def retention_of(self, block: KnownBlock, retention: Retention) -> Retention:
        return KEEP if block.key in self.on_disk else retention

    def time_passed(self) -> None:
        """An order that is carried out takes what the disk has of a prefix along, also below what a pin keeps."""
        now_unix_ms = self.clock.unix_ms()
        over = {key for key, block in self.model.blocks.items() if 0 < block.terms.ordered_unix_ms <= now_unix_ms}
        super().time_passed()
        below = {key for key in self.on_disk if over & set(ancestry(key)[1:]) and not self.model.is_visible(key)}
        self.may_lose_in_step |= below

    def check_lost(self, before: set[Key], *, allowed: set[Key]) -> None:
        """Whatever left the disk was meant to, or lost its prefix."""
        lost = before - self.on_disk
        assert all(allowed & set(ancestry(key)) for key in lost), "a block left the disk that nobody meant"
        self.may_return |= lost

    def check_readable(self) -> None:
        """Either tier's blocks can be read, and the index was told of each once."""
        before = self.on_disk
        self.time_passed()
        host, disk = self.node.stats()  # ends what is over
        self.remember_disk()
        for row in (host, disk):
            assert row.free_blocks + row.committed_blocks + row.reserved_blocks == row.total_blocks
        assert disk.committed_blocks == len(self.written)
        self.check_disk_quotas()
        assert self.on_disk <= before, "a block came to the disk that nobody moved there"
        self.check_lost(before, allowed=self.may_lose_in_step)
        if self.node.disk.is_settled:
            self.may_return = set()
        readable, visible = set(self.node.inventory()), self.model.visible()
        assert readable == visible | self.on_disk
        assert readable == self.index.registered, "the index would say something else"
        assert closed(readable), "a block is readable without its prefix"
        for chain in CHAINS:
            leading = 0
            for key in ((chain.namespace, block_hash) for block_hash in chain.hashes):
                if key not in readable:
                    break
                leading += 1
            assert self.node.lookup(chain.namespace, chain.hashes) <= leading
        self.check_records()

    @rule(many=st.booleans(), lines=st.sampled_from([0, 0, 5, 12, 25]))
    @step
    def write(self, many: bool, lines: int) -> None:
        """The disk's work, all of it or one piece."""
        self.died_after = self.died_after or lines
        self.do_write()
        while many and not self.node.disk.is_settled:
            self.do_write()

    @rule(half=st.booleans())
    @step
    def fail_to_write(self, half: bool) -> None:
        """No space, or a broken disk; with or without bytes that were written before that was known."""
        self.do_write(well=False, half=half)

    def do_write(self, *, well: bool = True, half: bool = True) -> None:
        disk = self.node.disk
        full = self.tier.used_bytes + LARGEST > self.bytes_max
        waiting = {block.key for block in disk if block.record is None}
        with self.call(may_lose=set(self.on_disk) if full else waiting if not well else set()):
            for segment in disk.given_up:
                self.tier.remove_file(segment)
                disk.removed(segment)
            for record in disk.take_dead():
                self.tier.mark_dead(record)
            disk.marked(well=True)
            job = disk.next_write()
            if job is not None:
                self.writing = job.record
                self.rotten.discard((job.record.segment, job.record.offset))
                if job.payload != BLOCKS[job.block.key].payload:
                    assert job.block.key in self.moved_broken, "bytes were lost on the way to the disk"
                    self.rotten.add((job.record.segment, job.record.offset))
                if well or half:
                    self.tier.write(job.record, job.header_bytes, job.payload)
                if half and not well:  # as a write that fails leaves it
                    os.truncate(self.path_of(job.record), job.record.offset)
                disk.written(job, well=well)
        self.writing = None
        if full:
            self.durable = {}  # the oldest segment may have been given up

    @rule(pick=ANY, first=st.integers(0, 3), then_lease=st.booleans(), lines=st.sampled_from([0, 0, 0, 5, 15, 40]))
    @step
    def promote(self, pick: int, first: int, then_lease: bool, lines: int) -> None:
        """What a lease does first."""
        self.died_after = self.died_after or lines
        chain = self.readable_chain(pick)
        self.do_promote(chain, first)
        if then_lease:
            self.do_lease(chain)

    def do_promote(self, chain: KnownChain, first: int) -> None:
        plan = self.node.plan_promotion(chain.namespace, chain.hashes, first)
        leading = 0
        while leading < len(chain.blocks) and self.model.is_visible(chain.blocks[leading].key):
            leading += 1
        assert [block.key for block in plan] == [block.key for block in chain.blocks[leading : leading + len(plan)]]
        for block in plan:
            known = BLOCKS[block.key]
            if self.node.disk.get(block.key) is not block:
                break  # lost to the room that the blocks before it took
            if block.waiting is not None:
                header_bytes, payload = block.waiting.header_bytes, memoryview(block.waiting.payload)
            else:
                header_bytes, payload = self.tier.read(block.record)
            if not is_whole(header_bytes, payload):
                at = (block.record.segment, block.record.offset) if block.waiting is None else None
                assert at in self.rotten if at else block.key in self.moved_broken
                with self.call(may_lose={block.key}):
                    self.node.disk.drop_broken(block, block.record)
                break
            with self.call(may_add={block.key}, may_lose=self.model.evictable_in_time()):
                taken = self.node.promote(decode_header(header_bytes), header_bytes, payload)
            self.account_for_room(known.account)
            if not taken:
                refused = known.key in self.model.blocks or self.is_too_long(known)
                assert refused or not self.may_make_room(known), "not promoted though a block could have gone"
                break
            held = self.model.add(known, Life.COMMITTED)
            self.seen_namespaces.add(known.header.namespace)
            self.model.commit(held, {})

    @rule(pick=ANY, in_header=st.booleans())
    @step
    def rot(self, pick: int, in_header: bool) -> None:
        """A byte of a record on disk is not what was written there."""
        written = sorted(self.written.items())
        if not written:
            self.do_store(CHAINS[pick % len(CHAINS)], 3)
            return
        key, record = written[pick % len(written)]
        if self.node.disk.get(key).waiting is not None:
            return
        at = record.offset + record.total_bytes - 1 - (len(BLOCKS[key].payload) if in_header else 0)
        with self.path_of(record).open("r+b") as opened:
            opened.seek(at)
            byte = opened.read(1)[0]
            opened.seek(at)
            opened.write(bytes([byte ^ 1 << pick % 8]))
        self.rotten.add((record.segment, record.offset))

    # Operators

    def do_evict(self, selector: EvictSelector, *, dry: bool) -> None:
        named = {key for key in self.on_disk if selector.tier != Tier.HOST and is_named(BLOCKS[key], selector)}
        if not dry:
            with self.call(may_lose=named):
                pass
        super().do_evict(selector, dry=dry)
        if dry or selector.idle_for_s is not None or selector.free_bytes is not None:
            return
        left = {block.key for block in self.node.disk} & named
        if selector.tier is None:
            left -= self.model.visible()  # in use there, so the copy here stays as well
        assert not left, "a block that was meant is still on disk"

    def check_eviction(
        self, selector: EvictSelector, report: EvictReport, going: set[Key], skipped: set[Key], pinned: set[Key]
    ) -> None:
        if selector.free_bytes is None:
            assert report.skipped_leased_blocks == len(skipped)
            assert report.skipped_pinned_blocks == len(pinned)
            assert {BLOCKS[key].key[1] for key in going} <= set(report.block_hashes)
            assert report.blocks >= len(going)

    def check_order(self, report: ControlReport, family: set[Key]) -> None:
        assert report.blocks >= len(family & self.model.visible())

    def check_disk_quotas(self) -> None:
        """No account comes to have more on disk than its quota."""
        has = dict.fromkeys(self.budgets, 0)
        if self.budgets != self.budgets_seen:
            self.budgets_seen, self.disk_bytes_allowed = self.budgets, {}
        for block in self.node.disk:
            if (account := self.account_of(block.key)) in has:
                has[account] += block.total_bytes
        for account, num_bytes in has.items():
            quota, allowed = self.bounds(account)[0], self.disk_bytes_allowed.get(account, num_bytes)
            assert quota is None or num_bytes <= max(quota, allowed), "an account grew beyond its quota on disk"
        self.disk_bytes_allowed = has

    def took_over(self) -> None:
        super().took_over()
        self.disk_bytes_allowed = {}  # what was found is kept, whatever the quotas say now

    def path_of(self, record: DiskRecord) -> Path:
        return self.tier.directory / f"segment-{record.segment:016x}.blocks"

    def check_records(self) -> None:
        """What is on disk can be read there."""
        assert self.tier.used_bytes <= self.bytes_max
        for key, record in list(self.written.items())[:2]:
            if (record.segment, record.offset) not in self.rotten:
                header_bytes, payload = self.tier.read(record)
                assert (header_bytes, payload) == (BLOCKS[key].header_bytes, BLOCKS[key].payload)

    def teardown(self) -> None:
        """What an operator evicted from both tiers stays away."""
        if self.arena is None:
            return
        try:
            super().teardown()
        finally:
            self.tier.close()

    def check_at_rest(self) -> None:
        super().check_at_rest()
        while self.node.disk.has_work:
            self.do_write()
        assert len(self.node.disk) == 0
        self.may_return, self.on_disk, self.written, self.durable = set(), set(), {}, {}
        self.recover_after_death()
        assert self.node.inventory() == [], "an evicted block came back after a restart"


def is_whole(header_bytes: bytes, payload: memoryview) -> bool:
    """Whether a record's header and payload check out."""
    try:
        return payload_digest(payload) == decode_header(header_bytes).payload_xxh3
    except BlockCorrupt:
        return False


def may_go_to_disk(terms: SlotTerms) -> bool:
    """Whether a copy may be made there: a disk's records have no moments."""
    return not (terms.expires_unix_ms or terms.ordered_unix_ms or terms.not_on_disk)

"""The store node machine with a disk below the arena: blocks move down and up, writes fail, and crashes come between.

Adds to the rules of `test_store_node_machine.py` demotion (by itself, under pressure), the disk's work, promotion,
broken bytes on disk, failed writes, a crash that keeps the arena and one that loses it. After every step the books of
both tiers hold and what is registered is what can be read, closed under prefixes over both. Fails, for example, when an
eviction forgets the copy on disk, a reclaimed segment leaves tails behind, or an old copy comes back after a restart.
"""

import shutil
import tempfile
from pathlib import Path

from disk_kit import RECORD_BYTES, make_disk_kit
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from store_kit import payload_of
from test_store_node_machine import PROMPTS, StoreNodeMachine

from headrace.blocks.block_codec import decode_header
from headrace.core.generation import EvictSelector


class DiskMachine(StoreNodeMachine):
    """Five slots above a disk for eight records in four segments; nineteen different blocks."""

    @initialize()
    def start(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="disk-machine-"))
        self.kit = make_disk_kit(self.directory / "n1", blocks=5, segments=4, segment_blocks=2)
        self.open, self.leases, self.ended = [], [], []
        self.corrupted = set()
        self.incarnations = [self.kit.node.incarnation]

    @rule(prompt=st.sampled_from(PROMPTS), count=st.integers(1, 3), work=st.booleans())
    def store(self, prompt, count, work) -> None:
        """What a writer does when nothing goes wrong; the most frequent thing, or nothing would ever be demoted."""
        for header in self.kit.store(prompt, range(count)):
            self.corrupted.discard(header.block_hash)
        self.kit.clock.seconds += 1
        if work:
            self.kit.work()

    @rule(prompt=st.sampled_from(PROMPTS), count=st.integers(1, 3))
    def store_and_write(self, prompt, count) -> None:
        self.store(prompt, count, True)

    @rule(prompts=st.lists(st.sampled_from(PROMPTS), min_size=3, max_size=5))
    def store_many(self, prompts) -> None:
        for prompt in prompts:
            self.store(prompt, 3, True)

    @rule()
    def work(self) -> None:
        self.kit.work()

    @rule(prompt=st.sampled_from(PROMPTS), position=st.integers(0, 4), dry_run=st.booleans())
    def evict(self, prompt, position, dry_run) -> None:
        """By name only: an operator who clears everything at every turn leaves nothing to look at."""
        super().evict(dry_run, prompt, position, None)

    @rule(well=st.booleans())
    def write_one(self, well) -> None:
        disk = self.kit.node.disk
        job = disk.next_write()
        if job is not None:
            assert job.record is not None
            if well:
                self.kit.tier.write(job.record, job.header_bytes, job.payload)
            disk.written(job, well=well)

    @rule(prompt=st.sampled_from(PROMPTS), first=st.integers(0, 4))
    def promote(self, prompt, first) -> None:
        lookup = self.kit.held(prompt)
        promoted = self.kit.promote(prompt, first)
        assert promoted == 0 or lookup > first
        if promoted:
            run = self.kit.node.lease(prompt.namespace, prompt.chain, first_block=0)
            self.leases.append(run)
            for block, payload in zip(run.blocks, self.kit.node.leased_payloads(run.lease_id), strict=True):
                if block.header.block_hash not in self.corrupted:
                    assert bytes(payload) == payload_of(block.header)

    @rule(data=st.data())
    def break_a_record(self, data) -> None:
        """Bytes rot on disk: the payload is wrong when it is read."""
        written = [block for block in self.kit.node.disk if block.record is not None]
        if not written:
            return
        record = data.draw(st.sampled_from(sorted((b.record for b in written), key=lambda r: (r.segment, r.offset))))
        path = self.kit.tier._path(record.segment)
        with path.open("r+b") as opened:
            opened.seek(record.offset + record.total_bytes - 1)
            byte = opened.read(1)[0]
            opened.seek(record.offset + record.total_bytes - 1)
            opened.write(bytes([byte ^ 1]))

    @rule(lose_arena=st.booleans())
    def crash_and_recover(self, lose_arena) -> None:
        before = {key[1] for key in self.kit.node.inventory()}
        settled = self.kit.node.disk.is_settled
        waiting = any(block.waiting for block in self.kit.node.disk)
        self.kit.restart(lose_arena=lose_arena)
        after = {key[1] for key in self.kit.node.inventory()}
        assert after <= before or not settled, "a block that had gone came back"
        if not lose_arena and not waiting and not self.corrupted:
            assert before <= after, "a whole block was lost"
        self.incarnations.append(self.kit.node.incarnation)
        assert lose_arena or self.incarnations[-1] > self.incarnations[-2]
        self.ended += [reserved.reservation_id for reserved in self.open] + [run.lease_id for run in self.leases]
        self.open, self.leases = [], []
        if lose_arena:
            self.ended = []  # the clock that stands still here may give an incarnation out again; a real one does not

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data) -> None:
        run = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.kit.node.release(run.lease_id, range(len(run.blocks)))
        self.ended.append(run.lease_id)

    @invariant()
    def the_books_are_true(self) -> None:
        if not hasattr(self, "kit"):
            return
        node = self.kit.node
        node.check_integrity()
        assert set(node.inventory()) == self.kit.changes.registered, "the index would say something else"
        assert self.kit.tier.used_bytes <= 8 * RECORD_BYTES
        host, disk = node.stats()
        for row in (host, disk):
            assert row.free_blocks + row.committed_blocks + row.reserved_blocks == row.total_blocks
        infos, total = node.list_blocks(EvictSelector(), limit=100)
        visible = sum(1 for info in infos if info.tier == "host")
        assert len(infos) == total == visible + disk.committed_blocks + disk.reserved_blocks

    @invariant()
    def what_is_on_disk_can_be_read_there(self) -> None:
        if not hasattr(self, "kit"):
            return
        for block in self.kit.node.disk:
            if block.record is not None and not block.waiting:
                header, _ = self.kit.tier.read(block.record)
                assert decode_header(header).block_hash == block.header.block_hash

    def teardown(self) -> None:
        if not hasattr(self, "kit"):
            return
        self.kit.work()
        super().teardown()
        self.kit.work()
        self.kit.node.check_integrity()
        assert len(self.kit.node.disk) == 0
        self.kit.restart()
        assert self.kit.node.inventory() == [], "an evicted block came back after a restart"
        self.kit.tier.close()
        shutil.rmtree(self.directory)


DiskMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestDiskMachine = DiskMachine.TestCase

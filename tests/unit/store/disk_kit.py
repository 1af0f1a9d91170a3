"""A node with a small disk tier whose writes and promotions happen when a test says so, in the test's own thread."""

from dataclasses import dataclass, field
from pathlib import Path

from store_kit import LAYOUT, ChangeLog, HandClock, StoreKit, make_header, make_prompt

from headrace.blocks.block_codec import decode_header, encode_header
from headrace.blocks.disk_tier import DiskTier, open_disk, record_bytes
from headrace.blocks.host_arena import HostArena
from headrace.core.block import HashedPrompt, payload_digest
from headrace.core.errors import BlockCorrupt
from headrace.store.recover_arena import recover_arena
from headrace.store.recover_disk import recover_disk
from headrace.store.store_node import StoreNode

RECORD_BYTES = record_bytes(len(encode_header(make_header(make_prompt(1, 1), 0))), LAYOUT.block_bytes)


@dataclass
class DiskKit(StoreKit):
    """`StoreKit` with a disk below its arena."""

    path: Path = field(default_factory=Path)
    segments: int = 32
    tier: DiskTier = field(init=False)

    def work(self) -> int:
        """Do everything that waits: remove files, mark what is dead, write what was demoted. Returns how many blocks
        were written."""
        written, disk = 0, self.node.disk
        while disk.has_work:
            for segment in disk.given_up:
                self.tier.remove_file(segment)
                disk.removed(segment)
            for record in disk.take_dead():
                self.tier.mark_dead(record)
            disk.marked(well=True)
            job = disk.next_write()
            if job is not None:
                assert job.record is not None
                self.tier.write(job.record, job.header_bytes, job.payload)
                disk.written(job, well=True)
                written += 1
        return written

    def check(self) -> None:
        """The node's books balance, and the disk's are what its files hold."""
        self.node.check_integrity()
        self.node.disk.check_files()

    def promote(self, prompt: HashedPrompt, first_block: int = 0) -> int:
        """What a lease does first; returns how many blocks came into the arena."""
        done = 0
        for block in self.node.plan_promotion(prompt.namespace, prompt.chain, first_block):
            if block.waiting is not None:
                header_bytes, payload = block.waiting.header_bytes, memoryview(block.waiting.payload)
            else:
                assert block.record is not None
                header_bytes, payload = self.tier.read(block.record)
            try:
                header = decode_header(header_bytes)
                if payload_digest(payload) != header.payload_xxh3:
                    raise BlockCorrupt(header.block_hash, "payload")
            except BlockCorrupt:
                self.node.disk.drop_broken(block, block.record)
                break
            if not self.node.promote(header, header_bytes, payload):
                break
            done += 1
        return done

    def restart(self, *, lose_arena: bool = False) -> None:
        """Kill the process between two steps and start the next one on the same arena (or a new one) and disk."""
        self.tier.close()
        self.clock.seconds += 1
        self.changes = ChangeLog()
        self.arena = HostArena.in_memory(self.arena.total_bytes) if lose_arena else self.arena.reattached()
        self._start(self.tier.bytes_max)

    def _start(self, bytes_max: int) -> None:
        self.tier = open_disk(self.path, bytes_max, segments=self.segments)
        self.node = StoreNode(
            self.arena,
            node_id="n1",
            clock=self.clock,
            changes=self.changes,
            recovered=recover_arena(self.arena),
            disk=recover_disk(self.tier),
        )


def make_disk_kit(path: Path, *, blocks: int = 4, segments: int = 32, segment_blocks: int = 2) -> DiskKit:
    """An arena of `blocks` blocks above a disk of `segments` segments of `segment_blocks` blocks each."""
    clock, changes = HandClock(), ChangeLog()
    arena = HostArena.in_memory((blocks + 2) * 4_096)
    assert arena.num_units == blocks
    kit = DiskKit(clock, arena, changes, StoreNode(arena, node_id="n1", clock=clock), path=path)
    kit.segments = segments
    kit._start(segments * segment_blocks * RECORD_BYTES)
    return kit

"""The arena's file: one owner, never larger than allowed, found again, never changed under somebody who maps it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from crash_points import Death, ProcessDied

from headrace.blocks import host_arena
from headrace.blocks.host_arena import (
    ARENA_VERSION,
    HostArena,
    SlotTerms,
    arena_path,
    host_id,
    map_arena,
    open_arena,
    remove_arena,
)
from headrace.core.errors import ConfigInvalid, StoreUnavailable

MB = 1 << 20
GOLDEN = Path(__file__).parents[2] / "golden" / "arena_records.json"
TERMS = {"plain": SlotTerms(), "all terms": SlotTerms(1_700_000_000_123, 1_700_000_500_000, 2**63 - 1, True)}


def test_the_file_is_as_large_as_allowed_and_slots_fill_less_than_it(tmp_path: Path) -> None:
    arena = open_arena(arena_path(tmp_path, "n"), MB)
    taken = 0
    while arena.allocate(7) is not None:
        taken += 7
    arena.check_integrity()
    assert (tmp_path / "headrace-n.arena").stat().st_size == MB
    assert taken == arena.num_units // 7 * 7
    assert arena.data_bytes + arena.num_units * 32 + 4_096 <= MB
    arena.close()


def test_what_was_committed_is_found_again_and_what_was_not_is_not(tmp_path: Path) -> None:
    path = arena_path(tmp_path, "n")
    arena = open_arena(path, MB)
    committed, open_slot = arena.allocate(2), arena.allocate(2)
    arena.payload(committed, 5_000)[:] = b"k" * 5_000
    arena.payload(open_slot, 5_000)[:] = b"x" * 5_000
    arena.commit(committed, b"header")
    arena.close()
    again = open_arena(path, MB)
    (record,) = again.records()
    assert (record.slot, record.units, record.header) == (committed, 2, b"header")
    assert bytes(again.payload(committed, 5_000)) == b"k" * 5_000
    again.close()


def test_a_second_owner_is_refused_while_the_first_process_lives(tmp_path: Path) -> None:
    path = arena_path(tmp_path, "n")
    code = "import sys,headrace.blocks.host_arena as h; a=h.open_arena(h.Path(sys.argv[1]),1<<20); print(1,flush=True);"
    owner = subprocess.Popen([sys.executable, "-c", code + "input()", str(path)], stdin=-1, stdout=-1)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"1\n"
        with pytest.raises(ConfigInvalid, match="in use by another process"):
            open_arena(path, MB)
        with pytest.raises(ConfigInvalid, match="in use by another process"):
            remove_arena(tmp_path, "n")
    finally:
        owner.kill()
        owner.communicate()
    open_arena(path, MB).close()


def test_an_arena_that_another_user_laid_out_is_refused(tmp_path: Path) -> None:
    """Fails when whoever may write to the directory can have blocks put where they read them, or a file of the node's
    user opened for them by a link."""
    path, aside = arena_path(tmp_path, "n"), tmp_path / "aside"
    open_arena(path, MB).close()
    path.rename(aside)
    path.symlink_to(aside)
    for opening in (lambda: open_arena(path, MB), lambda: map_arena(path)):
        with pytest.raises((ConfigInvalid, StoreUnavailable), match="cannot open"):
            opening()
    path.unlink()
    path.symlink_to(tmp_path / "nothing")
    with pytest.raises(ConfigInvalid, match="cannot open"):
        open_arena(path, MB)
    assert not (tmp_path / "nothing").exists()
    path.unlink()
    aside.rename(path)
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, 12_345, -1)
    with pytest.raises(ConfigInvalid, match="belongs to another user"):
        open_arena(path, MB)
    assert path.stat().st_uid == 12_345


def test_a_new_size_makes_a_new_file_and_old_mappings_stay_readable(tmp_path: Path) -> None:
    path = arena_path(tmp_path, "n")
    old = open_arena(path, 2 * MB)
    slot = old.allocate(1)
    old.payload(slot, 4)[:] = b"data"
    reader = map_arena(path)
    old.close()
    new = open_arena(path, MB)
    assert bytes(reader.payload(slot, 4)) == b"data"
    assert new.arena_id != reader.arena_id
    assert map_arena(path).arena_id == new.arena_id
    assert not list(new.records())
    new.close()


def test_a_file_of_another_format_is_replaced_by_its_owner_and_refused_by_readers(tmp_path: Path) -> None:
    path = arena_path(tmp_path, "n")
    path.write_bytes(b"junk" * (MB // 4))
    with pytest.raises(StoreUnavailable, match="format"):
        map_arena(path)
    arena = open_arena(path, MB)
    assert arena.free_bytes == arena.data_bytes
    arena.close()


@pytest.mark.parametrize("content", [b"", b"x" * 100])
def test_a_cut_file_is_refused_by_readers(tmp_path: Path, content: bytes) -> None:
    arena_path(tmp_path, "n").write_bytes(content)
    with pytest.raises(StoreUnavailable):
        map_arena(arena_path(tmp_path, "n"))


def test_a_missing_file_is_a_missing_store(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="cannot open"):
        map_arena(arena_path(tmp_path, "n"))


def test_an_arena_that_does_not_fit_is_refused_at_start_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="arena_mb"):
        open_arena(arena_path(tmp_path, "n"), 1 << 60)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("node_id", ["", "../x", "a/b", "-x", "n" * 65, "a b"])
def test_a_node_id_that_is_no_file_name_is_refused(tmp_path: Path, node_id: str) -> None:
    with pytest.raises(ConfigInvalid):
        arena_path(tmp_path, node_id)


def test_removing_leaves_nothing(tmp_path: Path) -> None:
    open_arena(arena_path(tmp_path, "n"), MB).close()
    assert remove_arena(tmp_path, "n")
    assert not remove_arena(tmp_path, "n")
    assert list(tmp_path.iterdir()) == []


def test_closing_gives_up_the_file_also_while_a_payload_is_looked_at(tmp_path: Path) -> None:
    """Fails when a view that outlives its arena keeps the file from the next owner."""
    arena = open_arena(arena_path(tmp_path, "n"), MB)
    slot = arena.allocate(1)
    assert slot is not None
    payload = arena.payload(slot, 16)
    arena.close()
    open_arena(arena_path(tmp_path, "n"), MB).close()
    payload.release()


def test_incarnations_only_rise_whatever_the_wall_clock_says(tmp_path: Path) -> None:
    path = arena_path(tmp_path, "n")
    arena = open_arena(path, MB)
    assert arena.begin_incarnation(5_000) == 5_000
    arena.close()
    again = open_arena(path, MB)
    assert again.begin_incarnation(10) == 5_001
    again.close()
    resized = open_arena(path, 2 * MB)
    assert resized.begin_incarnation(10) == 5_002
    resized.close()


def test_a_payload_outside_of_the_arena_is_refused() -> None:
    arena = HostArena.in_memory(MB)
    for slot, size in ((-1, 10), (arena.num_units, 10), (arena.num_units - 1, 4_097), (0, 0)):
        with pytest.raises(ValueError, match="outside"):
            arena.payload(slot, size)


def test_processes_that_see_the_same_directory_share_a_host_id(tmp_path: Path) -> None:
    code = "import sys,headrace.blocks.host_arena as h; print(h.host_id(sys.argv[1]))"
    other = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == host_id(tmp_path)
    assert host_id("/proc") != host_id(tmp_path)


@pytest.mark.parametrize("name", sorted(TERMS))
def test_records_have_the_bytes_of_their_version(name: str) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="ascii"))
    assert golden["version"] == ARENA_VERSION
    arena = HostArena.in_memory(MB)
    slot = arena.allocate(2)
    arena.commit(slot, b"header", TERMS[name])
    assert bytes(arena._memory[4_096 + 32 * slot :][:32]).hex() == golden["records"][name]
    assert [record.terms for record in arena.records()] == [TERMS[name]]


def test_terms_change_in_place_and_are_found_by_the_next_owner(tmp_path: Path) -> None:
    """Fails when a change reaches the state, the lengths or another slot's record."""
    path = arena_path(tmp_path, "n")
    arena = open_arena(path, MB)
    slots = [arena.allocate(2), arena.allocate(3)]
    for slot in slots:
        arena.commit(slot, b"header")
    arena.set_terms(slots[1], TERMS["all terms"])
    arena.close()
    again = open_arena(path, MB)
    found = [(record.slot, record.units, record.header, record.terms) for record in again.records()]
    assert found == [(slots[0], 2, b"header", SlotTerms()), (slots[1], 3, b"header", TERMS["all terms"])]
    again.set_terms(slots[1], SlotTerms())
    assert [record.terms for record in again.records()] == [SlotTerms(), SlotTerms()]
    again.close()


def test_a_process_that_dies_in_a_commit_leaves_a_free_slot_or_one_with_all_its_terms() -> None:
    """Fails when a record says committed before the words of its terms are there."""
    found = []
    for lines in range(1, 20):
        arena = HostArena.in_memory(MB)
        slot = arena.allocate(1)
        with pytest.raises(ProcessDied), Death(lines, [host_arena]):
            arena.commit(slot, b"header", TERMS["all terms"])
        found.append([record.terms for record in arena.reattached().records()])
    whole = [TERMS["all terms"]]
    assert found == sorted(found, key=[[], whole].index)
    assert whole in found


def test_a_slot_that_is_used_anew_has_none_of_its_former_terms() -> None:
    arena = HostArena.in_memory(MB)
    slot = arena.allocate(1)
    arena.commit(slot, b"header", TERMS["all terms"])
    arena.free(slot)
    assert arena.allocate(1) == slot
    arena.commit(slot, b"header")
    assert [record.terms for record in arena.records()] == [SlotTerms()]


def test_an_arena_of_an_earlier_version_is_replaced_by_its_owner_and_refused_by_readers(tmp_path: Path) -> None:
    path = arena_path(tmp_path, "n")
    arena = open_arena(path, MB)
    slot = arena.allocate(1)
    arena.commit(slot, b"header")
    arena.close()
    with path.open("r+b") as file:
        file.seek(8)
        file.write((ARENA_VERSION - 1).to_bytes(4, "little"))
    with pytest.raises(StoreUnavailable, match="format"):
        map_arena(path)
    again = open_arena(path, MB)
    assert again.free_bytes == again.data_bytes
    assert not list(again.records())
    again.close()


def test_what_is_adopted_needs_no_look_at_its_pages_later(tmp_path: Path) -> None:
    """Fails when the first block that is stored after a restart pays for a pass over all of a large arena."""
    arena = open_arena(arena_path(tmp_path, "n"), MB)
    slots = [arena.allocate(7) for _ in range(20)]
    arena.close()
    again = open_arena(arena_path(tmp_path, "n"), MB)
    assert again._backed_units == 0
    assert again.adopt(slots[-1], 7)
    assert again._backed_units == slots[-1] + 7
    assert again.adopt(slots[0], 7)
    assert again._backed_units == slots[-1] + 7
    again.check_integrity()
    again.close()

"""Huge pages for what is in use: which mappings, and that the bytes in them stay."""

import torch

from headrace.engine.collapse_pages import HUGE_PAGE_BYTES, collapse_pages, dense_mappings


def mapping(start, stop, *, rights="rw-p", inode=0, name="", rss_kib):
    return [
        f"{start:x}-{stop:x} {rights} 00000000 00:00 {inode} {name}".rstrip(),
        f"Size: {(stop - start) // 1024} kB",
        f"Rss: {rss_kib} kB",
        "VmFlags: rd wr mr mw me ac",
    ]


def test_whole_huge_pages_of_dense_private_memory_are_taken_and_nothing_else():
    """Fails if a stack that was hardly touched, a file or shared memory were mapped whole."""
    page = HUGE_PAGE_BYTES
    used = 8 * page // 1024
    lines = [
        *mapping(10 * page + 4096, 18 * page + 4096, rss_kib=used),
        *mapping(20 * page, 28 * page, name="[heap]", rss_kib=used),
        *mapping(30 * page, 38 * page, name="[stack:12]", rss_kib=64),
        *mapping(40 * page, 48 * page, inode=77, name="/weights", rss_kib=used),
        *mapping(50 * page, 58 * page, rights="rw-s", rss_kib=used),
        *mapping(60 * page, 68 * page, rights="r--p", rss_kib=used),
        *mapping(70 * page + 4096, 71 * page + 4096, rss_kib=page // 1024),
    ]
    assert list(dense_mappings(lines)) == [(11 * page, 18 * page), (20 * page, 28 * page)]


def test_collapsing_changes_no_byte():
    numbers = torch.arange(4 * HUGE_PAGE_BYTES // 8)
    collapse_pages()
    assert torch.equal(numbers, torch.arange(4 * HUGE_PAGE_BYTES // 8))


def test_what_cannot_be_read_or_is_named_in_no_encoding_stops_nothing(tmp_path):
    """Fails when a model does not load since /proc is hidden, or a library lies under a name that is not UTF-8."""
    assert collapse_pages(tmp_path / "no such file") == 0
    assert collapse_pages(tmp_path) == 0, "a folder cannot be read as a file"
    named = b"10000-20000 r--p 00000000 00:00 77 /lib/\xff \xc2\x85 x\nRss: 64 kB\n"
    (tmp_path / "smaps").write_bytes(named)
    assert collapse_pages(tmp_path / "smaps") == 0

"""Whether LMDB may open a data file: its pages checked by pread, before anything is mapped.

LMDB has no checksums and trusts what it maps: a page number that points behind the end of the file
ends the process by SIGBUS at the first access. So the two meta pages and both trees are walked here
first: every branch, leaf and node must lie inside its page, every page must carry its own number,
and every run of pages of a large value must lie inside the file. What stands in the values is for
the envelope to judge.

The size of the file says nothing (a healthy one may be shorter than its meta page says), and LMDB
has no tool that checks this. Format: `lmdb.h` and `mdb.c` of LMDB 0.9, little endian, 64 bits.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.errors import CorruptStore

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.backends.base import U8, U64

MAGIC, VERSION = 0xBEEFC0DE, 1
BRANCH, LEAF = 1, 2
NO_PAGE = (1 << 64) - 1
PAGE_HEADER = 16
BATCH = 256
MOST_DEPTH = 32

_META = struct.Struct("<II16xI36xQ40xQQQ")
"""From 16 bytes into a meta page: magic, version, page size, roots, last page, transaction."""
_LARGE = 1
_Flat = npt.NDArray[np.int64]


class _Meta(NamedTuple):
    magic: int
    version: int
    page_size: int
    free_root: int
    main_root: int
    last_page: int
    transaction: int


def check_file(path: Path) -> None:
    """Raise CorruptStore for a file that LMDB must not open, OSError if it cannot be read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _Walk(path, descriptor).run()
    finally:
        os.close(descriptor)


class _Walk:
    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size
        self._page = 0
        self._pages = 0

    def run(self) -> None:
        meta = self._metas()
        self._pages = self._size // self._page
        for root in (meta.free_root, meta.main_root):
            level = np.array([root] if root != NO_PAGE else [], np.uint64)
            for _ in range(MOST_DEPTH):
                if not len(level):
                    break
                level = self._children(level)
            else:
                self._bad("its tree does not end")

    def _bad(self, what: str) -> None:
        hint = "run kvstore recover: it copies every block that is whole"
        raise CorruptStore(f"{self._path} is damaged: {what}", hint)

    def _metas(self) -> _Meta:
        """Return the newer meta page; LMDB needs both to be whole."""
        first = self._meta(0)
        self._page = first.page_size
        if not 512 <= self._page <= 65536 or self._page & (self._page - 1):
            self._bad(f"its page size is {self._page}")
        second = self._meta(self._page)
        if second.page_size != self._page:
            self._bad("its meta pages differ")
        return max(first, second, key=lambda meta: meta.transaction)

    def _meta(self, start: int) -> _Meta:
        raw = os.pread(self._descriptor, _META.size, start + PAGE_HEADER)
        if len(raw) < _META.size:
            self._bad(f"it has {self._size} bytes")
        meta = _Meta._make(_META.unpack(raw))
        if (meta.magic, meta.version) != (MAGIC, VERSION):
            self._bad(f"the meta page at {start} is none")
        return meta

    def _children(self, numbers: U64) -> U64:
        """Check the pages of one level of a tree; return those of the next."""
        if int(numbers.max()) >= self._pages:
            self._bad(f"page {numbers.max()} lies behind the end of the file")
        if len(numbers) > self._pages:
            self._bad("its tree has more pages than the file")
        found = [
            self._check(self._load(numbers[at : at + BATCH]), numbers[at : at + BATCH])
            for at in range(0, len(numbers), BATCH)
        ]
        return np.concatenate(found)

    def _load(self, numbers: U64) -> U8:
        pages = np.zeros((len(numbers), self._page), np.uint8)
        for page, number in zip(pages, numbers.tolist(), strict=True):
            if os.preadv(self._descriptor, [page.data], number * self._page) != self._page:
                self._bad(f"page {number} cannot be read")
        return pages

    def _check(self, pages: U8, numbers: U64) -> U64:
        flags = pages.view("<u2")[:, 5]
        if (pages.view("<u8")[:, 0] != numbers).any() or not np.isin(flags, (BRANCH, LEAF)).all():
            self._bad(f"a page of its tree is none, among {numbers[0]} to {numbers[-1]}")
        rows, starts = self._nodes(pages)
        low, high, mark, key = (
            pages.view("<u2")[rows, starts // 2 + field].astype(np.int64) for field in range(4)
        )
        branch, size = flags[rows] == BRANCH, low | high << 16
        large = ~branch & ((mark & _LARGE) != 0)
        inside = np.where(branch, 0, np.where(large, 8, size))
        if (starts + 8 + key + inside > self._page).any():
            self._bad(f"a node reaches beyond its page, among {numbers[0]} to {numbers[-1]}")
        self._check_runs(pages, rows[large], (starts + 8 + key)[large], size[large])
        children: U64 = (low | high << 16 | mark << 32)[branch].astype(np.uint64)
        return children

    def _nodes(self, pages: U8) -> tuple[_Flat, _Flat]:
        """Return row and offset of every node of these pages."""
        words = pages.view("<u2")
        counts = (words[:, 6].astype(np.int64) - PAGE_HEADER) // 2
        most = self._page // 2 - PAGE_HEADER // 2
        if (counts < 1).any() or (counts > most).any():
            self._bad("a page of its tree has no nodes")
        rows, columns = np.nonzero(np.arange(int(counts.max())) < counts[:, None])
        starts = words[rows, PAGE_HEADER // 2 + columns].astype(np.int64)
        if (starts % 2).any() or (starts < PAGE_HEADER).any() or (starts > self._page - 8).any():
            self._bad("a node lies outside its page")
        return rows, starts

    def _check_runs(self, pages: U8, rows: _Flat, starts: _Flat, sizes: _Flat) -> None:
        """Check that the pages of large values lie inside the file, by the sizes in their nodes."""
        raw = np.ascontiguousarray(pages[rows[:, None], starts[:, None] + np.arange(8)])
        first = raw.view("<u8")[:, 0]
        count = ((sizes + PAGE_HEADER + self._page - 1) // self._page).astype(np.uint64)
        end = np.uint64(self._pages)
        if (count > end).any() or (first > end - np.minimum(count, end)).any() or (first < 2).any():
            self._bad("a large value lies behind the end of the file")

"""The raw reader of the engine `lmdb`: envelopes anywhere in ``data.mdb``.

The value of a large node lies in one run of overflow pages behind the header of the first, that of
a small one inside of its page; neither is broken up, so neither meta pages nor trees are needed.
Pages that were given up keep what they held until they are used again: where a tree can be walked
from a meta page, what it does not name was deleted.
"""

from __future__ import annotations

import struct
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from kvstore.backends.keyvalue import HEADERS
from kvstore.backends.lmdbfile import BRANCH, LEAF, MAGIC, PAGE_HEADER
from kvstore.backends.raw import Names, StreamSalvage, ends_with_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_OVERFLOW = 4
PAGE_BYTES = 4096
"""Of nearly every machine; on others such a page is overlooked, as it would be without a look."""
_META = struct.Struct("<I")
_PAGE_SIZE, _ENTRIES, _ROOT, _TURN = 40, 120, 128, 144
"""Where a meta page has its page size (u32), of the main tree the number of its entries and its
root, and its own number (u64)."""
_PAGE = struct.Struct("<QHHH")
_NODE = struct.Struct("<HHHH")


class _Meta(NamedTuple):
    turn: int
    page_size: int
    entries: int
    root: int


class LmdbSalvage(StreamSalvage):
    def wanted(self, path: str) -> bool:
        return path == "lmdb/data.mdb"

    def is_key(self, before: bytes, number: int) -> bool:
        # A page header is 16 bytes: u64 number, u16 pad, u16 flags, u32 count of pages.
        flags, count = before[-6:-4], int.from_bytes(before[-4:], "little")
        overflow = flags == _OVERFLOW.to_bytes(2, "little") and 0 < count <= 1 << 10
        return overflow or ends_with_number(before, number)

    def behind(self, read: Callable[[int, int], bytes], start: int, length: int) -> int:
        """A run of pages that was given up keeps its first page when others of it are used again:
        these have a header of their own, with their own number, and are searched."""
        for at in range(start + -start % PAGE_BYTES, start + length, PAGE_BYTES):
            number, _, flags, _ = _PAGE.unpack(read(at, _PAGE.size).ljust(_PAGE.size, b"\0"))
            if number == at // PAGE_BYTES and flags in (BRANCH, LEAF, _OVERFLOW):
                return at
        return start + length

    @cached_property
    def names(self) -> Names:
        for file, path in enumerate(self.files.paths):
            if self.wanted(path):
                for meta in self._metas(file):
                    try:
                        return Names(self._keys(file, meta))
                    except (ValueError, struct.error):
                        continue
        return Names(())

    def _metas(self, file: int) -> list[_Meta]:
        """Return the meta pages that may be good, the newest first."""
        found = []
        starts = [0, *(1 << power for power in range(9, 17))]
        for start in starts:
            page = self.files.read(file, start, 256)
            if page[PAGE_HEADER : PAGE_HEADER + 4] == _META.pack(MAGIC):
                size = _META.unpack_from(page, _PAGE_SIZE)[0]
                turn, entries, root = (
                    int.from_bytes(page[at : at + 8], "little") for at in (_TURN, _ENTRIES, _ROOT)
                )
                if 512 <= size <= 65536:
                    found.append(_Meta(turn, size, entries, root))
        return sorted(found, reverse=True)

    def _keys(self, file: int, meta: _Meta) -> Iterator[bytes]:
        """Yield the names in a tree. Raises ValueError where it cannot be walked."""
        waiting, most = [meta.root], self.files.sizes[file] // meta.page_size
        left = meta.entries
        while waiting:
            number = waiting.pop()
            page = self.files.read(file, number * meta.page_size, meta.page_size)
            found, _, flags, lower = _PAGE.unpack_from(page)
            most -= 1
            if found != number or flags not in (BRANCH, LEAF) or most < 0:
                raise ValueError(number)
            for at in range(PAGE_HEADER, min(lower, len(page)), 2):
                start = int.from_bytes(page[at : at + 2], "little")
                low, high, mark, size = _NODE.unpack_from(page, start)
                key = page[start + _NODE.size : start + _NODE.size + size]
                if flags == BRANCH:
                    waiting.append(low | high << 16 | mark << 32)
                    continue
                left -= 1
                if key.startswith(HEADERS):
                    yield key[len(HEADERS) :]
        if left:
            raise ValueError(left)

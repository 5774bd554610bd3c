"""The raw reader of the engine `sqlite`: envelopes in the leaves of ``store.db`` and its log.

A value that is too long for its leaf goes on in a chain of overflow pages. How much of it lies in
the leaf follows from its length alone, and that from the envelope, so neither the first page nor
the inner pages of the trees are needed. Of a page that the log (WAL) holds, the last copy counts,
and the one in the file is looked at as well.

Format: https://sqlite.org/fileformat2.html, sections 1.6, 2 and 4; pages have 64 KiB.
"""

from __future__ import annotations

import struct
from functools import cached_property
from typing import TYPE_CHECKING

from kvstore.backends.keyvalue import HEADERS
from kvstore.backends.raw import (
    Extent,
    Names,
    Pieces,
    Search,
    TableSalvage,
    ends_with_number,
    piece_of,
)
from kvstore.backends.sqlite import FILE, PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.backends.raw import Extents, Hit, Raw, Remains

    _Pages = dict[int, Extent]

_DATABASE, _LOG = f"sqlite/{FILE}", f"sqlite/{FILE}-wal"
_LOG_HEADER, _SALTS, _FRAME = 32, 16, 24
"""Bytes of the log's header, where its salts stand in it, bytes before each page."""
_KINDS = (b"\x02", b"\x05", b"\x0a", b"\x0d", b"S")
"""What the pages of trees begin with; the first page begins with the name of the format."""
_INNER, _LEAF = b"\x02", b"\x0a"
_HEADERS_ROOT = 2
"""The table of headers is the first one made, so its tree begins on the first page that is free."""
_NEXT = struct.Struct(">I")
_NUMBER_BYTES = 4
_NAME_BYTES = 8 + 16 + 2 + 1
"""Of the name of a record, besides its key."""


class SqliteSalvage(TableSalvage):
    def find(self) -> Iterator[Raw | Remains]:
        pieces, pages = Pieces(), dict(self._in_file())
        frames = {number: page for number, page, _ in self._in_log()}
        self._collect(pages, list(pages.values()), pieces)
        self._collect({**pages, **frames}, list(frames.values()), pieces)
        yield from pieces.records()

    def _in_file(self) -> Iterator[tuple[int, Extent]]:
        for file, path in enumerate(self.files.paths):
            if path == _DATABASE:
                for number in range(-(-self.files.sizes[file] // PAGE_BYTES)):
                    yield number + 1, Extent(file, number * PAGE_BYTES, PAGE_BYTES)

    @cached_property
    def names(self) -> Names:
        pages, waiting = dict(self._in_file()), dict[int, Extent]()
        for number, page, commits in self._in_log():
            waiting[number] = page
            if commits:
                pages |= waiting
                waiting = {}
        try:
            return Names(self._keys(pages))
        except (IndexError, ValueError, struct.error):
            return Names(())

    def _keys(self, pages: _Pages) -> Iterator[bytes]:
        """Yield the names in the tree of headers. Raises ValueError where it cannot be walked."""
        waiting, most = [_HEADERS_ROOT], len(pages)
        while waiting:
            extent = pages.get(waiting.pop())
            page = self.files.read(*extent) if extent else b""
            most -= 1
            if page[:1] not in (_INNER, _LEAF) or most < 0:
                raise ValueError(page[:1])
            inner = page[:1] == _INNER
            count, start = int.from_bytes(page[3:5], "big"), 12 if inner else 8
            if inner:
                waiting.append(_NEXT.unpack_from(page, 8)[0])
            for at in range(start, start + 2 * count, 2):
                cell = int.from_bytes(page[at : at + 2], "big")
                if inner:
                    waiting.append(_NEXT.unpack_from(page, cell)[0])
                yield _key_of(page, cell + (_NEXT.size if inner else 0))[len(HEADERS) :]

    def _in_log(self) -> Iterator[tuple[int, Extent, bool]]:
        """Yield the pages in the log that belong to its newest round, in order, and whether each
        ends a transaction."""
        for file, path in enumerate(self.files.paths):
            if path == _LOG:
                salts = self.files.read(file, _SALTS, 2 * _NEXT.size)
                for start in range(_LOG_HEADER, self.files.sizes[file], _FRAME + PAGE_BYTES):
                    frame = self.files.read(file, start, _FRAME)
                    if len(frame) == _FRAME and frame[8:16] == salts:
                        number, commits = struct.unpack_from(">2I", frame)
                        yield number, Extent(file, start + _FRAME, PAGE_BYTES), bool(commits)

    def _collect(self, pages: _Pages, where: list[Extent], pieces: Pieces) -> None:
        """Collect the pieces that begin in some pages; ``pages`` are all, to follow chains.

        Leaves come first: pages that go on with what begins there are passed over then, for what
        looks like an envelope in them is payload.
        """
        used: set[tuple[int, int]] = set()
        rest = [page for page in where if not self._look(page, pages, pieces, used, leaf=True)]
        for page in rest:
            if (page.file, page.offset) not in used:
                self._look(page, pages, pieces, used, leaf=False)

    def _look(
        self, extent: Extent, pages: _Pages, pieces: Pieces, used: set[tuple[int, int]], leaf: bool
    ) -> bool:
        """Look at one page; with ``leaf``, only if it says that it is one of a tree."""
        page = self.files.read(*extent)
        if leaf and page[:1] not in _KINDS:
            return False
        self.seen(len(page))
        search = Search(lambda offset, size: page[offset : offset + size], len(page))
        for hit in search:
            pieces.know(hit.head)
            found = piece_of(hit)
            if found is not None:
                number, length = found
                extents = self._extents(hit, extent, length, pages)
                sure = ends_with_number(hit.before, number)
                pieces.add(hit.head, number, extents, sure=sure)
                if sure:
                    search.position = extents[0].offset + extents[0].length - extent.offset
                    used |= {(one.file, one.offset - _NEXT.size) for one in extents[1:]}
        return True

    def _extents(self, hit: Hit, page: Extent, length: int, pages: _Pages) -> Extents:
        """Return where a piece of ``length`` bytes lies, as far as its chain of pages holds."""
        before = len(hit.head) + _NUMBER_BYTES
        local = _local_bytes(before + length, len(hit.header.key)) - before
        local = max(0, min(local, length))
        start = page.offset + hit.at + before
        found = [Extent(page.file, start, local)]
        file, link, left = page.file, start + local, length - local
        while left > 0:
            number = self.files.read(file, link, _NEXT.size)
            following = pages.get(_NEXT.unpack(number)[0]) if len(number) == _NEXT.size else None
            if following is None:
                break
            file, link, _ = following
            part = min(left, PAGE_BYTES - _NEXT.size)
            found.append(Extent(file, link + _NEXT.size, part))
            left -= part
        return tuple(found)


def _key_of(page: bytes, at: int) -> bytes:
    """Return the key in a cell of the tree of headers: length, record header, then the key."""
    _, at = _varint(page, at)
    size, body = _varint(page, at)
    kind, _ = _varint(page, body)
    length = (kind - 12) // 2
    key = page[at + size : at + size + length]
    if not key.startswith(HEADERS) or len(key) != length:
        raise ValueError(kind)
    return key


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number of 7 bits a byte, high ones first, and what follows it."""
    value = 0
    while data[at] & 0x80:
        value, at = value << 7 | data[at] & 0x7F, at + 1
    return value << 7 | data[at], at + 1


def _local_bytes(value: int, key: int) -> int:
    """Return how many bytes of a value lie in the leaf, for a piece of a block whose key has
    ``key`` bytes: section 1.6, for leaves of tables."""
    name = 1 + _NAME_BYTES + key + 2
    before = 1 + _varint_bytes(12 + 2 * name) + _varint_bytes(12 + 2 * value) + name
    payload = before + value
    if payload <= PAGE_BYTES - 35:
        return value
    least = (PAGE_BYTES - 12) * 32 // 255 - 23
    part = least + (payload - least) % (PAGE_BYTES - 4)
    return (part if part <= PAGE_BYTES - 35 else least) - before


def _varint_bytes(value: int) -> int:
    return max(1, -(-value.bit_length() // 7))

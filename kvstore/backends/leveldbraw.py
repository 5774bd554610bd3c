"""The raw reader of the engine `leveldb`: envelopes anywhere in its table files and logs.

Tables are not compressed, so a value lies in one run of bytes, and neither CURRENT nor a manifest,
an index or a footer is needed. A log is cut into fragments of at most 32 KiB, each with a header of
7 bytes (sum u32, length u16, type: whole, first, middle, last); the stream behind them is searched.
The sums of LevelDB are not looked at: the envelope's say what is whole.

Format: ``doc/table_format.md``, ``doc/log_format.md`` and ``db/dbformat.h`` of LevelDB.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from functools import cached_property
from typing import TYPE_CHECKING

from kvstore.backends.keyvalue import HEADERS, name_of
from kvstore.backends.leveldbkeys import keys_of_batch, keys_of_table
from kvstore.backends.raw import Extent, Names, Search, StreamSalvage, ends_with_number

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.backends.raw import Extents, Pieces
    from kvstore.record import Header

_TABLES = (".ldb", ".sst")
_LOG = ".log"
_BLOCK = 32768
_FRAGMENT = struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_TRAILER = 8
"""Behind each key of a table: u64, sequence << 8 | 1 for a value, 0 for a deletion."""
_LENGTH_BYTES = 3
"""A value has less than 2 MiB, so its length in a log has at most so many bytes."""


class LeveldbSalvage(StreamSalvage):
    def wanted(self, path: str) -> bool:
        return path.startswith("leveldb/") and path.endswith((*_TABLES, _LOG))

    def is_key(self, before: bytes, number: int) -> bool:
        trailer = before[-_TRAILER:]
        if trailer[:1] == b"\x01" and ends_with_number(before[:-_TRAILER], number):
            return True
        return any(
            ends_with_number(before[:-size], number) and _is_varint(before[-size:])
            for size in range(1, _LENGTH_BYTES + 1)
        )

    @cached_property
    def names(self) -> Names:
        return Names(())  # one table of many lists a part of the names only: see buried

    def search(self, file: int, pieces: Pieces) -> None:
        if not self.files.paths[file].endswith(_LOG):
            super().search(file, pieces)
            return
        log = _Log([extent for extent, _ in self._fragments(file)])

        def read(offset: int, size: int) -> bytes:
            return b"".join(self.files.read(*extent) for extent in log.extents(offset, size))

        self.collect(Search(read, log.size), log.extents, pieces)

    def buried(self, header: Header) -> bool:
        return name_of(header) in self._deleted

    @cached_property
    def _deleted(self) -> frozenset[bytes]:
        """Names that a deletion names which can be read. No name is ever used twice."""
        found: set[bytes] = set()
        for file, path in enumerate(self.files.paths):
            if self.wanted(path):
                keys = self._log_keys(file) if path.endswith(_LOG) else self._table_keys(file)
                found.update(
                    key[len(HEADERS) :] for key, there in keys if not there and key[:1] == HEADERS
                )
        return frozenset(found)

    def _table_keys(self, file: int) -> Iterator[tuple[bytes, bool]]:
        def read(offset: int, size: int) -> bytes:
            return self.files.read(file, offset, size)

        return keys_of_table(read, self.files.sizes[file])

    def _log_keys(self, file: int) -> Iterator[tuple[bytes, bool]]:
        batch = bytearray()
        for extent, kind in self._fragments(file):
            if kind in (_WHOLE, _FIRST):
                yield from keys_of_batch(bytes(batch))
                batch.clear()
            batch += self.files.read(*extent)
        yield from keys_of_batch(bytes(batch))

    def _fragments(self, file: int) -> Iterator[tuple[Extent, int]]:
        """Yield what the fragments of a log hold, with their types, as far as that makes sense.

        Where the header of a block does not, the whole block is taken for the middle of a record,
        as most are.
        """
        for start in range(0, self.files.sizes[file], _BLOCK):
            block = self.files.read(file, start, _BLOCK)
            at = 0
            while at + _FRAGMENT.size <= len(block):
                _, length, kind = _FRAGMENT.unpack_from(block, at)
                at += _FRAGMENT.size
                if not (_WHOLE <= kind <= _LAST and at + length <= len(block)):
                    if at == _FRAGMENT.size:
                        yield Extent(file, start + at, len(block) - at), _MIDDLE
                    break
                yield Extent(file, start + at, length), kind
                at += length


class _Log:
    """The bytes of fragments, one behind the other."""

    def __init__(self, fragments: list[Extent]) -> None:
        self._fragments = fragments
        self._starts: list[int] = []
        self.size = 0
        for fragment in fragments:
            self._starts.append(self.size)
            self.size += fragment.length

    def extents(self, start: int, length: int) -> Extents:
        """Return where bytes of the stream lie; fewer at its end."""
        found: list[Extent] = []
        number = bisect_right(self._starts, start) - 1
        while length > 0 and 0 <= number < len(self._fragments):
            file, offset, size = self._fragments[number]
            skip = start - self._starts[number]
            part = min(size - skip, length)
            if part > 0:
                found.append(Extent(file, offset + skip, part))
            start, length, number = start + part, length - part, number + 1
        return tuple(found)


def _is_varint(data: bytes) -> bool:
    return all(byte & 0x80 for byte in data[:-1]) and 0 < data[-1] < 0x80

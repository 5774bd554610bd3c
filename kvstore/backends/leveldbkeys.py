"""The keys in LevelDB's tables and batches, with what was deleted: by pread, without the library.

What cannot be read is left out, so deletions may be missing. Nothing here judges values.

Format: ``doc/table_format.md`` and ``db/write_batch.cc`` of LevelDB.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Keys = Iterator[tuple[bytes, bool]]
    """Keys, each with whether it has a value: False for a deletion."""

_FOOTER, _MAGIC = 48, 0xDB4775248B80FB57
_TRAILER = 8
_BATCH_HEADER = 12
_MOST_BLOCK = 128 << 20


def keys_of_table(read: Callable[[int, int], bytes], size: int) -> Keys:
    """Yield the keys in a table file of ``size`` bytes."""
    footer = read(size - _FOOTER, _FOOTER) if size >= _FOOTER else b""
    if footer[-8:] != struct.pack("<Q", _MAGIC):
        return
    try:
        _, at = _handle(footer, 0)
        (offset, length), _ = _handle(footer, at)
        for _, handle in _entries(_block(read, offset, length)):
            (offset, length), _ = _handle(handle, 0)
            yield from _keys(_block(read, offset, length))
    except (IndexError, ValueError):
        return


def _keys(block: bytes) -> Keys:
    try:
        for key, _ in _entries(block):
            yield key[:-_TRAILER], key[-_TRAILER : -_TRAILER + 1] == b"\x01"
    except (IndexError, ValueError):
        return


def _block(read: Callable[[int, int], bytes], offset: int, length: int) -> bytes:
    if length > _MOST_BLOCK:
        raise ValueError(length)
    return read(offset, length)


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of a block. Raises IndexError, ValueError where it makes no sense."""
    restarts = int.from_bytes(block[-4:], "little")
    end, at, key = len(block) - 4 - 4 * restarts, 0, b""
    while at < end:
        shared, at = varint(block, at)
        more, at = varint(block, at)
        length, at = varint(block, at)
        if shared > len(key) or at + more + length > end:
            raise ValueError(at)
        key = key[:shared] + block[at : at + more]
        at += more + length
        yield key, block[at - length : at]


def _handle(data: bytes, at: int) -> tuple[tuple[int, int], int]:
    offset, at = varint(data, at)
    length, at = varint(data, at)
    return (offset, length), at


def keys_of_batch(batch: bytes) -> Keys:
    """Yield the keys in a record of the log, as far as it makes sense."""
    at = _BATCH_HEADER
    try:
        while at < len(batch):
            there, at = batch[at] == 1, at + 1
            length, at = varint(batch, at)
            key, at = batch[at : at + length], at + length
            if there:
                size, at = varint(batch, at)
                at += size
            yield key, there
    except (IndexError, ValueError):
        return


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number of 7 bits a byte, low ones first, and what follows it. Raises IndexError,
    ValueError."""
    value = shift = 0
    while data[at] & 0x80:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if shift > 63:
            raise ValueError(at)
    return value | data[at] << shift, at + 1

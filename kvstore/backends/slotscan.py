"""Reading the headers of records out of the slots of super-blocks."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, NamedTuple

from kvstore.backends.base import Finding
from kvstore.backends.ledger import UNKNOWN
from kvstore.backends.superfile import TOMBSTONE, blank_page, digest, name_of
from kvstore.errors import CorruptBlock
from kvstore.record import HEADER_PAGE, Header, decode, image_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvstore.backends.base import U64, Blocks
    from kvstore.backends.directio import Files
    from kvstore.backends.ledger import Ledger

SPAN_BYTES = 1 << 20
SPAN_SLOT = 32 << 10
"""Slots up to so many bytes are read whole, many at a time: that is quicker than page by page."""
SHARES = 4
_NOTHING = (TOMBSTONE, bytes(4))


class Share(NamedTuple):
    """Slots of one super-block, in the order of their offsets, and what the ledger says of them."""

    number: int
    places: list[int]
    versions: list[int]
    offsets: list[int]
    slot_bytes: int


class SlotReader:
    """Reads headers of one engine. Several threads may use it."""

    def __init__(
        self, files: Files, ledger: Ledger, descriptors: Mapping[int, int], store: bytes
    ) -> None:
        self._files = files
        self._ledger = ledger
        self._descriptors = descriptors
        self._store = store
        self.graves: Mapping[int, int] = {}
        """By digest of a block: up to which generation records not claimed do not count."""

    def holds(self, block: Blocks) -> bool:
        """Tell whether the record at the place of one block is that block. False if it cannot be
        read."""
        if not self._ledger.known(block.places)[0]:
            return False
        (number,), (offset,) = self._ledger.locate(block.places)
        page = memoryview(mmap.mmap(-1, HEADER_PAGE))
        try:
            header = decode(page[: self._read(number, page, offset)])
        except (OSError, CorruptBlock):
            return False
        wanted = (block.namespace, block.shard, block.keys[0].tobytes(), int(block.generations[0]))
        found = (header.namespace, header.shard, header.key, header.generation)
        return found == wanted and header.store == self._store

    def shares(self, number: int, places: U64, versions: U64, slot_bytes: int) -> list[Share]:
        """Divide slots among threads."""
        _, offsets = self._ledger.locate(places)
        size = -(-len(places) // SHARES) or 1
        return [
            Share(
                number,
                places[start : start + size].tolist(),
                versions[start : start + size].tolist(),
                offsets[start : start + size],
                slot_bytes,
            )
            for start in range(0, len(places), size)
        ]

    def read(self, share: Share) -> list[tuple[int, Header | Finding]]:
        """Return what lies in each slot, by place; those without a record are left out."""
        found: list[tuple[int, Header | Finding]] = []
        for at, page in self._pages(share):
            place, version = share.places[at], share.versions[at]
            path = f"super/{name_of(share.number)} slot {place & 0xFFFFFFFF}"
            item = self._judge(page, version, path, share.slot_bytes)
            if isinstance(item, Finding):
                # What was overwritten while we read is no fault.
                page = self._page(share.number, blank_page(), share.offsets[at])
                item = self._judge(page, version, path, share.slot_bytes)
            if isinstance(item, Finding) and self._ledger.version_at(place) != version:
                item = None
            if item is not None:
                found.append((place, item))
        return found

    def _judge(
        self, page: memoryview | OSError, version: int, path: str, slot_bytes: int
    ) -> Header | Finding | None:
        if isinstance(page, OSError):
            return Finding("unreadable", path, str(page.strerror))
        if page[:4] in _NOTHING:
            return None
        try:
            header = decode(page)
        except CorruptBlock as error:
            return Finding("bad-header", path, error.message)
        if header.store != self._store:
            return Finding("other-store", path, f"belongs to store {header.store.hex()}")
        if image_bytes(header.stored_length) > slot_bytes:
            return Finding("too-long", path, f"says it has {header.stored_length} bytes")
        if version not in (UNKNOWN, header.generation):
            return Finding("wrong-record", path, f"holds block {header.key.hex()}")
        if version == UNKNOWN and self.graves:
            block = digest(header.namespace, header.shard, header.key)
            return None if header.generation <= self.graves.get(block, 0) else header
        return header

    def _pages(self, share: Share) -> Iterator[tuple[int, memoryview | OSError]]:
        """Yield the header page of each slot, or why it cannot be read."""
        buffer = memoryview(mmap.mmap(-1, SPAN_BYTES))
        at, offsets, count = 0, share.offsets, len(share.offsets)
        while at < count:
            if share.slot_bytes > SPAN_SLOT:
                yield at, self._page(share.number, buffer, offsets[at])
                at += 1
                continue
            stop = at
            while stop < count and offsets[stop] + HEADER_PAGE <= offsets[at] + SPAN_BYTES:
                stop += 1
            yield from self._span(share, at, stop, buffer)
            at = stop

    def _span(
        self, share: Share, at: int, stop: int, buffer: memoryview
    ) -> Iterator[tuple[int, memoryview | OSError]]:
        first, offsets = share.offsets[at], share.offsets
        size = offsets[stop - 1] + HEADER_PAGE - first
        try:
            whole = self._read(share.number, buffer[:size], first) == size
        except OSError:
            whole = False
        for number in range(at, stop):
            start = offsets[number] - first
            if whole:
                yield number, buffer[start : start + HEADER_PAGE]
            else:
                # One bad sector must not hide the records around it.
                yield number, self._page(share.number, buffer[start:], offsets[number])

    def _page(self, number: int, buffer: memoryview, offset: int) -> memoryview | OSError:
        page = buffer[:HEADER_PAGE]
        try:
            return page[: self._read(number, page, offset)]
        except OSError as error:
            return error

    def _read(self, number: int, view: memoryview, offset: int) -> int:
        end = offset + len(view)
        return self._files.read(self._descriptors[number], view, end, offset)

"""The raw reader of the engine `superblock`: records where slots begin.

The length of the slots is what the header of the file says, in either copy; else what the record in
the first slot needs, which begins at the same place for all lengths; else what most records ask
for, by their bytes, that begin at multiples of 4 KiB. Nothing is looked for inside of slots: what
looks like a record there is somebody's payload.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from kvstore.backends.directio import Complaints
from kvstore.backends.graves import Graves
from kvstore.backends.ledger import Ledger
from kvstore.backends.raw import Extent, Raw, Remains, Salvage, spare_of
from kvstore.backends.superfile import (
    FOLDER,
    GRAVES,
    NEW,
    TOMBSTONE,
    Shape,
    digest,
    tombstone_page,
)
from kvstore.backends.superfile import (
    decode as decode_shape,
)
from kvstore.errors import CorruptBlock, CorruptStore, EngineError
from kvstore.parity import kept_bytes
from kvstore.record import HEADER_PAGE, Header, claimed_header_length, decode, image_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvstore.backends.base import EngineContext

_NAME = re.compile(rf"{FOLDER}/([0-9a-f]{{8}})\.sb")
_NOTHING = (TOMBSTONE, bytes(4))


def _may_be(size: int) -> bool:
    return size % HEADER_PAGE == 0 and 4 * HEADER_PAGE <= size <= 512 << 20


class SuperblockSalvage(Salvage):
    in_place: ClassVar[bool] = True

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        wanted, told = context.options.get("superblock_bytes"), self._told_bytes()
        believed = isinstance(wanted, int) and _may_be(wanted) and (not told or wanted in told)
        self._bytes = int(wanted) if believed else self._guess_bytes(told)  # type: ignore[call-overload]
        self._slots = Ledger(1, self._bytes - 2 * HEADER_PAGE)
        self._graves = self._read_graves()

    def options(self) -> Mapping[str, object]:
        return {"superblock_bytes": self._bytes}

    def agrees(self) -> bool:
        return not self._mine() or dict(self.context.options) == self.options()

    def _mine(self) -> list[int]:
        return [
            file
            for file, path in enumerate(self.files.paths)
            if path.startswith(f"{FOLDER}/")
            and not path.endswith(NEW)
            and path != f"{FOLDER}/{GRAVES}"
        ]

    def _told_bytes(self) -> Counter[int]:
        """Count the lengths of super-blocks that headers give."""
        shapes = (self._header_at(file, 0) for file in self._mine())
        return Counter(one.file_bytes for one in shapes if one and _may_be(one.file_bytes))

    def _guess_bytes(self, told: Counter[int]) -> int:
        """Return the length of super-blocks that most headers give, else most files have."""
        sizes = told or Counter(filter(_may_be, (self.files.sizes[file] for file in self._mine())))
        return sizes.most_common(1)[0][0] if sizes else 264 << 20

    def _read_graves(self) -> Mapping[int, int]:
        try:
            folder = os.open(self.files.root / FOLDER, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return {}
        try:
            return Graves(folder, Complaints()).read()
        except EngineError:
            return {}
        finally:
            os.close(folder)

    def buried(self, header: Header) -> bool:
        block = digest(header.namespace, header.shard, header.key)
        return header.generation <= self._graves.get(block, 0)

    # -- files ------------------------------------------------------------------------------------

    def find(self) -> Iterator[Raw | Remains]:
        for file in self._mine():
            shape = self._shape(file)
            slot_bytes = shape.slot_bytes if shape else self._guess_slot(file)
            if slot_bytes in self._slots.slot_bytes:
                found = self._slots_of(file, slot_bytes, self._number(file, shape))
                # Where slots begin is a guess: what is no record there may be inside of one.
                yield from found if shape else (one for one in found if isinstance(one, Raw))
            self.seen(self.files.sizes[file])

    def _header_at(self, file: int, offset: int) -> Shape | None:
        try:
            return decode_shape(memoryview(self.files.read(file, offset, HEADER_PAGE)))
        except CorruptStore:
            return None

    def _shape(self, file: int) -> Shape | None:
        copies = (self._header_at(file, at) for at in (0, self._bytes - HEADER_PAGE))
        good = [shape for shape in copies if shape and shape.file_bytes == self._bytes]
        return max(good, key=lambda shape: shape.edition, default=None)

    def _number(self, file: int, shape: Shape | None) -> int | None:
        """Return the number under which the engine finds this file, None if it does not."""
        found = _NAME.fullmatch(self.files.paths[file])
        if not found or not int(found[1], 16):
            return None
        number = int(found[1], 16)
        return number if shape is None or shape.number == number else None

    def _guess_slot(self, file: int) -> int:
        """Return the length of the slots in a file without a good header, 0 if nothing tells."""
        weights: Counter[int] = Counter()
        at = HEADER_PAGE
        while at < self.files.sizes[file]:
            header = self._decode(self.files.read(file, at, HEADER_PAGE))
            size = kept_bytes(header) if header else HEADER_PAGE
            slot_bytes = self._class_bytes(size) if header else 0
            if slot_bytes and at == HEADER_PAGE:
                return slot_bytes
            if slot_bytes and (at - HEADER_PAGE) % slot_bytes == 0:
                weights[slot_bytes] += size
            at += size
        return weights.most_common(1)[0][0] if weights else 0

    def _class_bytes(self, size: int) -> int:
        return next((slot for slot in self._slots.slot_bytes if slot >= size), 0)

    @staticmethod
    def _decode(page: bytes) -> Header | None:
        with contextlib.suppress(CorruptBlock):
            return decode(page)
        return None

    # -- slots ------------------------------------------------------------------------------------

    def _slots_of(self, file: int, slot_bytes: int, number: int | None) -> Iterator[Raw | Remains]:
        count = (self._bytes - 2 * HEADER_PAGE) // slot_bytes
        for slot in range(count):
            extent = Extent(file, HEADER_PAGE + slot * slot_bytes, slot_bytes)
            place = None if number is None else number << 32 | slot
            page = self.files.read(file, extent.offset, HEADER_PAGE)
            if not page:
                return
            if page[:4] not in _NOTHING:
                yield self._record(extent, page, place)

    def _record(self, extent: Extent, page: bytes, place: int | None) -> Raw | Remains:
        try:
            header = decode(page)
        except CorruptBlock as error:
            return Remains(extent, error.message, place=place)
        if image_bytes(header.stored_length) > extent.length:
            return Remains(extent, "its envelope gives more bytes than its slot has", place=place)
        payload = Extent(extent.file, extent.offset + HEADER_PAGE, header.stored_length)
        return Raw(
            header,
            page[: claimed_header_length(page)],
            (((payload,),),),
            extent,
            place,
            spare=spare_of(header, extent),
        )

    def remove(self, extent: Extent) -> None:
        path = self.files.root / self.files.paths[extent.file]
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, tombstone_page(), extent.offset)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

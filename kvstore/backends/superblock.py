"""The engine `superblock`: records in slots of large preallocated files, recycled in place.

::

    super/<number, 8 hex>.sb     a super-block: header page, slots of one length, header page
    super/<number, 8 hex>.sb.new one that is being made

The directory ``super`` is the mark that an engine was made here. A slot begins at a multiple of
4 KiB and holds one record image. Its place is the number of the super-block (from 1) << 32 | the
number of the slot. Which slots are taken is kept in memory only: the store says so after an opening
(:meth:`SuperblockEngine.claim`), or the headers of the records do (:meth:`SuperblockEngine.scan`).

Why a slot may be overwritten in place. Its old record is gone for the index before, and nobody
reads it any more. A write that is cut off leaves a mix of old and new in this slot only; the
checksums in the header refuse it, whichever header survives: each names the checksum of its own
payload. With O_DIRECT a killed process ends its transfer first. Through the page cache it may not:
there the old header goes first and the new one comes last, so that a kill leaves no header at all.

Deletion writes a tombstone over the header page, for otherwise a scan would bring the record back.
Eviction writes nothing. Around this file: ``superfile`` knows one file, ``ledger`` which slots are
taken, ``pagemap`` the page cache, ``directio`` moves the bytes.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import resource
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvstore.backends import base, superfile
from kvstore.backends.base import SCAN_BATCH, Finding, Status
from kvstore.backends.directio import DIRECTORY, Complaints, Files, read_status, write_status
from kvstore.backends.ledger import UNKNOWN, Ledger
from kvstore.backends.pagemap import PageMap
from kvstore.backends.slotscan import SlotReader
from kvstore.backends.superfile import Shape, name_of
from kvstore.errors import (
    ConfigError,
    CorruptBlock,
    CorruptStore,
    EngineError,
    KVStoreError,
    PermissionDenied,
    StoreExists,
    StoreNotFound,
)
from kvstore.killpoints import reach
from kvstore.record import HEADER_PAGE, decode, image_bytes, image_bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvstore.backends.base import U32, U64, Blocks

FOLDER = "super"
IO_CHOICES = ("auto", "direct", "buffered", "mmap")
LEAST_BYTES, MOST_BYTES = 4 << 20, 256 << 20
SHARE = 64
"""A super-block is about this part (1/n) of the capacity."""
GROWTH_PAUSE = 5.0
"""Seconds without another attempt to make a file after the disk was full."""
_NAME = re.compile(r"[0-9a-f]{8}\.sb")
_NOTHING = (superfile.TOMBSTONE, bytes(4))
_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_SPARE_DESCRIPTORS = 256


def superblock_bytes(capacity: int) -> int:
    """Return the length of super-blocks for a capacity: about a 64th, from 4 to 256 MiB, and a 32nd
    of that more, so that blocks of 128 KiB, 256 KiB, ... fill it with their header pages."""
    power = 1 << max(capacity // SHARE, 1).bit_length() - 1
    return min(max(power, LEAST_BYTES), MOST_BYTES) // 32 * 33


class SuperblockEngine(base.Engine):
    """Slots in super-blocks. Options: ``superblock_bytes`` (fixed at creation) and ``io``.

    ``io`` may change at each open: ``auto`` (O_DIRECT, or buffered where it is refused), ``direct``
    (where it is refused, ``open`` fails), ``buffered``, or ``mmap``: buffered, and what is not in
    the page cache is brought there by the mapping first.
    """

    name = "superblock"
    capabilities = base.Capabilities(
        preferred_threads=4, atomic_batch=False, durable_without_flush=False, alignment=4096,
        fixed_slots=True, space_factor=1.0, frees_space=False, contained=True,
    )  # fmt: skip
    recorded_options: ClassVar[Mapping[str, object]] = {"superblock_bytes": MOST_BYTES // 32 * 33}

    @classmethod
    def options_for(cls, capacity: int) -> Mapping[str, object]:
        return {"superblock_bytes": superblock_bytes(capacity)}

    def __init__(self, context: base.EngineContext) -> None:
        super().__init__(context)
        self._bytes, self._io = _check_options({**self.recorded_options, **context.options})
        self._reset()
        self._folder = -1

    def _reset(self) -> None:
        self._files = Files("buffered" if self._io == "mmap" else self._io)
        self._ledger = Ledger(0, self._bytes - 2 * HEADER_PAGE)
        self._complaints = Complaints()
        self._shapes: dict[int, Shape] = {}
        self._descriptors: dict[int, int] = {}
        self._maps: dict[int, PageMap | None] = {}
        self._broken: dict[int, str] = {}
        self._retired: list[int] = []
        self._limit = self.context.capacity or 1 << 62
        self._growing = threading.Lock()
        self._grow_again_at = 0.0
        self._sync_lock = threading.Lock()
        self._dirty: set[int] = set()
        self._failed = ""
        self._tombstone = superfile.tombstone_page()
        self._blank = superfile.blank_page()

    @property
    def largest_image(self) -> int:
        return self._bytes - 2 * HEADER_PAGE

    @property
    def failed(self) -> str:
        return self._failed

    # -- opening and closing ----------------------------------------------------------------------

    def create(self) -> None:
        where = self.context.directory
        try:
            if set(os.listdir(where)) - {"lost+found"}:
                raise StoreExists(f"{where} is not empty", "choose an empty directory")
            os.mkdir(where / FOLDER, 0o700)
            root = os.open(where, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(root)
            finally:
                os.close(root)
        except OSError as error:
            raise self._opening_failed(error) from error

    def open(self) -> None:
        self.close()
        self._reset()
        try:
            self._folder = os.open(self.context.directory / FOLDER, DIRECTORY)
            numbers = self._list()
            self._ledger = Ledger(self._most(numbers), self._bytes - 2 * HEADER_PAGE)
            _allow_descriptors(len(numbers))
            for number in numbers:
                self._open_file(number)
            if not self.context.read_only:
                self._probe()
        except OSError as error:
            self.close()
            raise self._opening_failed(error) from error
        except KVStoreError:
            self.close()
            raise
        self.is_open = True

    def _list(self) -> list[int]:
        """Return the numbers of the super-blocks; remove what an earlier process did not finish."""
        found = []
        for name in sorted(os.listdir(self._folder)):
            if _NAME.fullmatch(name) and int(name[:8], 16):
                found.append(int(name[:8], 16))
            elif name.endswith(superfile.NEW) and not self.context.read_only:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._folder)
        return found

    def _most(self, numbers: Sequence[int]) -> int:
        """Return how many super-blocks there may ever be until the next opening."""
        found = os.fstatvfs(self._folder)
        space = self.context.capacity or found.f_blocks * found.f_frsize
        return max([space // self._bytes, 1, *numbers])

    def _open_file(self, number: int) -> None:
        name = name_of(number)
        access = os.O_RDONLY if self.context.read_only else os.O_RDWR
        try:
            descriptor = self._files.open(name, _OPEN | access, self._folder)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            self._broken[number] = f"it cannot be opened: {error.strerror}"
            return
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            self._broken[number] = "it is no file"
            return
        self._descriptors[number] = descriptor
        if status.st_size < self._bytes:
            self._complaints.log("opening", name, OSError(errno.EIO, "the file was cut off"))
        self._learn_shape(number)

    def _learn_shape(self, number: int) -> None:
        """Find out the slot length of a file; mend a header of which one copy is bad."""
        descriptor = self._descriptors[number]
        try:
            shape, agreed = superfile.read_header(self._files, descriptor, self._bytes)
        except CorruptStore as error:
            guess = self._first_slot(descriptor)
            if not guess:
                self._broken[number] = error.message
                return
            shape, agreed = self._shape(number, guess), False
        right = (self.context.store_uuid, number, self._bytes)
        if (shape.store, shape.number, shape.file_bytes) != right:
            self._broken[number] = f"it is number {shape.number} of store {shape.store.hex()}"
        else:
            self._take_shape(shape, write=not agreed)

    def _take_shape(self, shape: Shape, *, write: bool) -> None:
        if shape.slot_bytes not in self._ledger.slot_bytes:
            self._broken[shape.number] = f"it has slots of {shape.slot_bytes} bytes"
            return
        self._broken.pop(shape.number, None)
        self._shapes[shape.number] = shape
        self._ledger.adopt(shape.number, self._ledger.slot_bytes.index(shape.slot_bytes))
        if write and not self.context.read_only:
            try:
                superfile.write_header(self._files, self._descriptors[shape.number], shape)
            except OSError as error:
                self._complaints.log("mending", name_of(shape.number), error)

    def _shape(self, number: int, slot_bytes: int) -> Shape:
        edition = self._shapes[number].edition + 1 if number in self._shapes else 1
        return Shape(self.context.store_uuid, number, slot_bytes, self._bytes, edition)

    def _first_slot(self, descriptor: int) -> int:
        """Return the slot length that the record in the first slot needs; 0 if there is none.

        The first slot begins at the same place for all lengths, so that what lies there was written
        as a header page.
        """
        page = superfile.blank_page()
        try:
            filled = self._files.read(descriptor, page, self._bytes, HEADER_PAGE)
            header = decode(page[:filled])
        except (OSError, CorruptBlock):
            return 0
        size = image_bytes(header.stored_length)
        if header.store != self.context.store_uuid or size > self.largest_image:
            return 0
        return self._ledger.slot_bytes[self._class_of(size)]

    def _class_of(self, size: int) -> int:
        return int(self._ledger.arena.classes_of(np.array([size]))[0])

    def _probe(self) -> None:
        """Write a page, so that it is known from the start whether O_DIRECT works here."""
        name = f"probe{superfile.NEW}"
        try:
            descriptor = self._files.open(name, os.O_RDWR | os.O_CREAT | _OPEN, self._folder)
            try:
                self._files.write(descriptor, superfile.blank_page())
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise EngineError(
                    f"the filesystem of {self.context.directory} refuses O_DIRECT",
                    "use io=auto or io=buffered",
                ) from error
            # A full or failing disk shows at the first put; what is stored can still be read.
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._folder)

    def close(self) -> None:
        self.is_open = False
        self._maps.clear()
        for descriptor in (*self._descriptors.values(), *self._retired, self._folder):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptors, self._retired, self._folder = {}, [], -1

    def _opening_failed(self, error: OSError) -> KVStoreError:
        where = self.context.directory
        if isinstance(error, FileNotFoundError):
            message = f"no superblock engine in {where}: {error.filename} is missing"
            return StoreNotFound(message, "look whether its disk is mounted")
        if isinstance(error, PermissionError):
            return PermissionDenied(f"{where} may not be opened", "run as the owner of the store")
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            return CorruptStore(f"{error.filename} in {where} is no directory", "move it away")
        return EngineError(f"{where} cannot be opened: {error.strerror}")

    # -- putting ----------------------------------------------------------------------------------

    def put_many(self, blocks: Blocks, images: Sequence[memoryview], *, sync: bool) -> base.Written:
        self.require_open(writing=True)
        base.check_images(blocks, images)
        if self._failed:
            statuses = np.full(len(blocks), Status.FAILED, np.uint8)
            return base.Written(np.zeros(len(blocks), np.uint64), statuses)
        places, statuses = self._find_places(blocks)
        which = np.flatnonzero(statuses == Status.OK)
        numbers, offsets = self._ledger.locate(places[which])
        for i, number, offset in zip(which.tolist(), numbers, offsets, strict=True):
            reach("put.begin")
            try:
                self._write(number, offset, images[i])
            except OSError as error:
                self._complaints.log("writing", name_of(number), error)
                statuses[i] = write_status(error)
                self._give_up(int(places[i]), number, offset)
        self._dirty.update(numbers)
        written = statuses == Status.OK
        if sync and written.any() and not self._sync(sorted(set(numbers))):
            statuses[written] = Status.FAILED
        self._ledger.commit(places[written])
        reach("put.end")
        return base.Written(np.where(statuses == Status.OK, places, 0), statuses)

    def _find_places(self, blocks: Blocks) -> tuple[U64, base.U8]:
        """Take a slot for each block, in new super-blocks if need be, as far as that goes."""
        statuses = np.full(len(blocks), Status.OK, np.uint8)
        sizes = image_bytes_of(blocks.lengths)
        fits = sizes <= self.largest_image
        statuses[~fits] = Status.FULL
        missing = np.flatnonzero(fits)
        places = np.zeros(len(blocks), np.uint64)
        while len(missing):
            found, got = self._ledger.take(sizes[missing], blocks.generations[missing])
            places[missing[got]] = found[got]
            missing = missing[~got]
            if not len(missing):
                break
            size_class = self._class_of(int(sizes[missing[0]]))
            status = self._grow(size_class)
            if status != Status.OK:
                same = self._ledger.arena.classes_of(sizes[missing]) == size_class
                statuses[missing[same]] = status
                missing = missing[~same]
        return places, statuses

    def _write(self, number: int, offset: int, image: memoryview) -> None:
        descriptor = self._descriptors[number]
        if self._files.io == "direct":
            self._files.write(descriptor, image, offset)
            return
        self._files.write(descriptor, self._blank, offset)
        reach("put.blanked")
        self._files.write(descriptor, image[HEADER_PAGE:], offset + HEADER_PAGE)
        reach("put.payload")
        self._files.write(descriptor, image[:HEADER_PAGE], offset)

    def _give_up(self, place: int, number: int, offset: int) -> None:
        """After a failed write: leave nothing behind that a scan could find."""
        try:
            self._files.write(self._descriptors[number], self._blank, offset)
        except OSError:
            # The slot stays taken until the next opening.
            return
        self._ledger.free(np.array([place], np.uint64))

    # -- super-blocks -----------------------------------------------------------------------------

    def _grow(self, size_class: int) -> Status:
        """Have a class get an empty super-block; if there is none, make one."""
        with self._growing:
            if self._ledger.free_of(size_class):
                return Status.OK
            slot_bytes = self._ledger.slot_bytes[size_class]
            number = self._ledger.take_empty()
            try:
                if number:
                    self._reshape(number, slot_bytes)
                else:
                    number = self._make(slot_bytes)
            except OSError as error:
                self._complaints.log("making", "a super-block", error)
                self._grow_again_at = time.monotonic() + GROWTH_PAUSE
                if number:
                    self._broken[number] = f"it cannot be used: {error.strerror}"
                number, failure = 0, write_status(error)
            else:
                failure = Status.FULL
            if number:
                self._ledger.give(number, size_class)
                return Status.OK
        return Status.NEED_ROOM if self._shapes else failure

    def _reshape(self, number: int, slot_bytes: int) -> None:
        if self._shapes[number].slot_bytes != slot_bytes:
            shape = self._shape(number, slot_bytes)
            superfile.reshape(self._files, self._descriptors[number], shape)
            self._shapes[number] = shape

    def _make(self, slot_bytes: int) -> int:
        """Make a file; return its number, 0 if there may be no more. Raises OSError."""
        used = {*self._descriptors, *self._broken}
        most = self._ledger.arena.num_chunks
        room = (len(used) + 1) * self._bytes <= self._limit
        number = next((n for n in range(1, most + 1) if n not in used), 0)
        if not (room and number) or time.monotonic() < self._grow_again_at:
            return 0
        _allow_descriptors(len(used) + 1)
        shape = self._shape(number, slot_bytes)
        self._descriptors[number] = superfile.make(self._files, self._folder, shape)
        self._shapes[number] = shape
        return number

    def allow(self, physical_bytes: int) -> None:
        with self._growing:
            self._limit = physical_bytes
            while self.is_open and self._excess() and (number := self._ledger.take_empty()):
                self._retire(number)

    def _excess(self) -> int:
        return max(0, len(self._descriptors) * self._bytes - self._limit)

    def _retire(self, number: int) -> None:
        """Give a file without records back to the filesystem.

        Its descriptor stays until the engine is closed: a late reader must not meet another file.
        """
        descriptor = self._descriptors.pop(number)
        del self._shapes[number]
        self._maps.pop(number, None)
        self._dirty.discard(number)
        self._retired.append(descriptor)
        try:
            os.unlink(name_of(number), dir_fd=self._folder)
            os.ftruncate(descriptor, 0)
        except OSError as error:
            self._complaints.log("removing", name_of(number), error)

    def room(self, length: int) -> base.Room:
        self.require_open()
        if image_bytes(length) > self.largest_image:
            return super().room(length)
        return base.Room(*self._ledger.groups(image_bytes(length)))

    def close_group(self, group: int) -> None:
        self._ledger.close(group)

    def reopen_group(self, group: int) -> None:
        self._ledger.reopen(group)

    # -- getting ----------------------------------------------------------------------------------

    def get_many_into(self, blocks: Blocks, images: Sequence[memoryview]) -> base.Read:
        self.require_open()
        base.check_images(blocks, images)
        # Setting single elements of numpy arrays would cost more than all other Python here.
        statuses, filled = bytearray([Status.MISSING]) * len(blocks), [0] * len(blocks)
        sure, maybe = self._ledger.holding(blocks.places, blocks.generations)
        which = np.flatnonzero(sure | maybe)
        numbers, offsets = self._ledger.locate(blocks.places[which])
        for i, number, offset in zip(which.tolist(), numbers, offsets, strict=True):
            image = images[i]
            try:
                filled[i] = got = self._load(number, offset, image)
            except OSError as error:
                statuses[i] = read_status(error)
                self._complaints.log("reading", name_of(number), error)
                continue
            if got < len(image):
                statuses[i] = Status.DAMAGED
            elif image[:4] != superfile.TOMBSTONE and (sure[i] or image[:4] not in _NOTHING):
                statuses[i] = Status.OK
        return base.Read(np.frombuffer(statuses, np.uint8), np.array(filled, np.uint32))

    def _load(self, number: int, offset: int, image: memoryview) -> int:
        if self._io == "mmap":
            self._prefetch(number, offset, len(image))
        return self._files.read(self._descriptors[number], image, self._bytes, offset)

    def _prefetch(self, number: int, offset: int, size: int) -> None:
        """Have the kernel read what is not in the page cache, in one go; raises OSError."""
        mapped = self._map(number)
        if mapped is not None and mapped.resident(offset, size) < size:
            # What the device cannot read the read that follows reports, up to the very page.
            mapped.prefetch(offset, size)

    def _map(self, number: int) -> PageMap | None:
        if number not in self._maps:
            try:
                self._maps[number] = PageMap(self._descriptors[number], self._bytes)
            except (OSError, ValueError):
                # A file that was cut off: its pages come by plain reads, as far as they are there.
                self._maps[number] = None
        return self._maps[number]

    def resident_bytes(self, blocks: Blocks) -> int:
        """Return how many bytes of these records are in the page cache."""
        self.require_open()
        known = blocks.take(self._ledger.known(blocks.places))
        numbers, offsets = self._ledger.locate(known.places)
        sizes = image_bytes_of(known.lengths).tolist()
        maps = [self._map(number) for number in numbers]
        return sum(
            mapped.resident(offset, size)
            for mapped, offset, size in zip(maps, offsets, sizes, strict=True)
            if mapped is not None
        )

    def contains_many(self, blocks: Blocks) -> base.Mask:
        self.require_open()
        sure, maybe = self._ledger.holding(blocks.places, blocks.generations)
        for i in np.flatnonzero(maybe & ~sure).tolist():
            sure[i] = self._reader().holds(blocks.take(slice(i, i + 1)))
        return sure

    def where(self, blocks: Blocks) -> list[str]:
        numbers = (blocks.places >> np.uint64(32)).tolist()
        slots = (blocks.places & np.uint64(0xFFFFFFFF)).tolist()
        return [
            f"{FOLDER}/{name_of(number)} slot {slot}"
            for number, slot in zip(numbers, slots, strict=True)
        ]

    # -- deleting ---------------------------------------------------------------------------------

    def delete_many(self, blocks: Blocks, *, evicted: bool = False) -> int:
        self.require_open(writing=True)
        if evicted:
            return self._ledger.evict(blocks.places, blocks.generations)
        sure = self._ledger.fence(blocks.places, blocks.generations)
        removed = self._bury(blocks.places[sure], blocks.generations[sure])
        rest = blocks.take(~sure)
        if len(rest) and self._ledger.has_unknown:
            removed += self._delete_unknown(rest)
        return removed

    def _delete_unknown(self, blocks: Blocks) -> int:
        """Delete records that the store has not claimed, found by their headers."""
        reader, places = self._reader(), blocks.places.copy()
        for i in np.flatnonzero(places == 0).tolist():
            places[i] = self._search(blocks.take(slice(i, i + 1)))
        there = self._ledger.fence(places, np.full(len(places), UNKNOWN, np.uint64))
        found = blocks.at(places)
        for i in np.flatnonzero(there).tolist():
            if not reader.holds(found.take(slice(i, i + 1))):
                self._ledger.unfence(int(places[i]), UNKNOWN)
                there[i] = False
        return self._bury(places[there], np.full(int(there.sum()), UNKNOWN, np.uint64))

    def _search(self, block: Blocks) -> int:
        """Return the place of a version, of which only that is known, among those not claimed."""
        slot_bytes = self._ledger.slot_bytes[self._class_of(image_bytes(int(block.lengths[0])))]
        reader = self._reader()
        for number in [n for n, shape in self._shapes.items() if shape.slot_bytes == slot_bytes]:
            places, versions, _ = self._ledger.occupied(number)
            for place in places[versions == UNKNOWN].tolist():
                if reader.holds(block.at(np.array([place], np.uint64))):
                    return int(place)
        return 0

    def _bury(self, places: U64, generations: U64) -> int:
        """Write a tombstone over the headers of records that are fenced, and free their slots."""
        failure = ""
        gone = np.ones(len(places), np.bool_)
        numbers, offsets = self._ledger.locate(places)
        for i, (number, offset) in enumerate(zip(numbers, offsets, strict=True)):
            try:
                reach("delete.begin")
                self._files.write(self._descriptors[number], self._tombstone, offset)
                reach("delete.end")
            except OSError as error:
                self._complaints.log("removing from", name_of(number), error)
                failure = failure or f"a record in {name_of(number)} cannot be removed: {error}"
                self._ledger.unfence(int(places[i]), int(generations[i]))
                gone[i] = False
        self._dirty.update(numbers)
        self._ledger.free(places[gone])
        if failure:
            raise EngineError(failure, "see to the filesystem, then delete again")
        return int(gone.sum())

    # -- scanning and claiming --------------------------------------------------------------------

    def _reader(self) -> SlotReader:
        return SlotReader(self._files, self._ledger, self._descriptors, self.context.store_uuid)

    def scan(self) -> Iterator[base.Scanned]:
        self.require_open()
        # One page at a time leaves a disk idle.
        threads = self.capabilities.preferred_threads
        reader = self._reader()
        with ThreadPoolExecutor(threads, "scan") as pool:
            for number in sorted(self._shapes):
                places, versions, slot_bytes = self._ledger.occupied(number)
                for start in range(0, len(places), SCAN_BATCH):
                    part = slice(start, start + SCAN_BATCH)
                    shares = reader.shares(number, places[part], versions[part], slot_bytes)
                    batch = base.ScanBatch()
                    for place, item in itertools.chain.from_iterable(pool.map(reader.read, shares)):
                        if isinstance(item, Finding):
                            batch.report(item)
                        else:
                            batch.add(item, place)
                    yield batch.take()

    def claim(self, places: U64, lengths: U32, generations: U64, *, complete: bool) -> None:
        self.require_open()
        sizes = image_bytes_of(lengths)
        for number in sorted(set(self._broken) & set(self._descriptors)):
            mine = (places >> np.uint64(32)) == number
            if mine.any() and (sizes[mine] <= self.largest_image).all():
                classes = np.unique(self._ledger.arena.classes_of(sizes[mine]))
                if len(classes) == 1:
                    slot_bytes = self._ledger.slot_bytes[int(classes[0])]
                    self._take_shape(self._shape(number, slot_bytes), write=True)
        self._ledger.claim(places, sizes, generations, complete=complete)

    # -- the rest ---------------------------------------------------------------------------------

    def flush(self) -> None:
        self.require_open()
        if not self.context.read_only:
            dirty = sorted(self._dirty)
            if not self._sync(dirty):
                raise EngineError(self._failed, "see to the disk, then open the store again")

    def _sync(self, numbers: Sequence[int]) -> bool:
        """Sync files; False if that failed, now or ever: the kernel tells a failure only once."""
        with self._sync_lock:
            for number in numbers:
                # Whatever is written from here on makes the file dirty again.
                self._dirty.discard(number)
                descriptor = self._descriptors.get(number)
                try:
                    if descriptor is not None and not self._failed:
                        os.fdatasync(descriptor)
                except OSError as error:
                    self._failed = f"a sync failed ({error.strerror}), so nothing more is written"
                    self._complaints.log("syncing", name_of(number), error)
            return not self._failed

    def stats(self) -> base.Stats:
        self.require_open()
        ends = sum(self._lost(shape) for shape in list(self._shapes.values()))
        # What is too little for one more super-block is of no use either.
        rest = self._limit % self._bytes if self.context.capacity else 0
        io = "mmap" if self._io == "mmap" else self._files.io
        broken = f"{len(self._broken)} super-blocks cannot be used; run kvstore fsck"
        notes = (self._files.note, self._failed, broken if self._broken else "")
        return base.Stats(
            overhead_bytes=ends + self._ledger.slack_bytes + rest,
            io=io,
            notes=tuple(note for note in notes if note),
            spare_bytes=self._ledger.free_bytes,
            excess_bytes=self._excess(),
        )

    def _lost(self, shape: Shape) -> int:
        """Return the bytes of a file that are in no slot."""
        usable = self._bytes - 2 * HEADER_PAGE
        return self._bytes - usable // shape.slot_bytes * shape.slot_bytes

    def check(self) -> list[Finding]:
        self.require_open()
        found = [
            Finding("bad-superblock", f"{FOLDER}/{name_of(number)}", reason)
            for number, reason in sorted(self._broken.items())
        ]
        for number, descriptor in sorted(self._descriptors.items()):
            if os.fstat(descriptor).st_size < self._bytes:
                found.append(Finding("short", f"{FOLDER}/{name_of(number)}", "it was cut off"))
        try:
            names = sorted(os.listdir(self._folder))
        except OSError as error:
            raise EngineError(f"{FOLDER} cannot be listed: {error.strerror}") from error
        ours = {name_of(number) for number in (*self._descriptors, *self._broken)}
        for name in names:
            if name not in ours and not name.endswith(superfile.NEW):
                found.append(Finding("foreign", f"{FOLDER}/{name}", "not a file of this engine"))
        return found


def _allow_descriptors(count: int) -> None:
    """Raise the soft limit of descriptors, as far as the hard one lets us, for so many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted * 2 if hard == resource.RLIM_INFINITY else min(wanted * 2, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _check_options(options: Mapping[str, object]) -> tuple[int, str]:
    """Return the length of super-blocks and io; raises ConfigError."""
    unknown = sorted(set(options) - {"superblock_bytes", "io"})
    if unknown:
        raise ConfigError(
            f"the superblock engine has no option {unknown[0]!r}",
            "its options are superblock_bytes and io",
        )
    size, io = options["superblock_bytes"], options.get("io", "auto")
    if type(size) is not int or size % HEADER_PAGE or not 4 * HEADER_PAGE <= size <= 512 << 20:
        raise ConfigError(f"superblock_bytes={size!r} is out of range", "use 4 to 256 MiB")
    if io not in IO_CHOICES:
        raise ConfigError(f"io={io!r} is not known", f"choose one of {', '.join(IO_CHOICES)}")
    return size, str(io)

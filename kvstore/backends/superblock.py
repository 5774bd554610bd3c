"""The engine `superblock`: records in slots of large preallocated files, recycled in place.

::

    super/<number, 8 hex>.sb     a super-block: header page, slots of one length, header page
    super/<number, 8 hex>.sb.new one that is being made
    super/deleted                which blocks were deleted

The directory ``super`` is the mark that an engine was made here. A slot begins at a multiple of
4 KiB and holds one record image. Its place is the number of the super-block (from 1) << 32 | the
number of the slot. Which slots are taken is kept in memory only: the store says so after an opening
(:meth:`SuperblockEngine.claim`), or the headers of the records do (:meth:`SuperblockEngine.scan`).

Why a slot may be overwritten in place. Its old record is gone for the index before, and nobody
reads it any more. A write that is cut off leaves a mix of old and new in this slot only; the
checksums in the header refuse it, whichever header survives: each names the checksum of its own
payload. With O_DIRECT a killed process ends its transfer first. Through the page cache it may not:
there the old header goes first and the new one comes last, so that a kill leaves no header at all.

Deletion writes a tombstone over the header page, for otherwise a scan would bring the record back,
and notes the block, for older versions of it that were evicted. Eviction writes nothing.

Around this file: ``shelf`` keeps the files, ``superfile`` knows one, ``ledger`` knows which slots
are taken, ``graves`` deletes, ``slotscan`` reads headers, ``pagemap`` steers the page cache,
``directio`` moves the bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvstore.backends import base, superfile
from kvstore.backends.base import SCAN_BATCH, Finding, Status
from kvstore.backends.directio import read_status, write_status
from kvstore.backends.graves import bury
from kvstore.backends.scanning import ScanBatch
from kvstore.backends.shelf import Shelf
from kvstore.backends.slotscan import SlotReader
from kvstore.backends.superfile import FOLDER, name_of
from kvstore.errors import (
    ConfigError,
    EngineError,
)
from kvstore.files import move_away, write_new
from kvstore.killpoints import reach
from kvstore.record import HEADER_PAGE, image_bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from kvstore.backends.base import U32, U64, Blocks
    from kvstore.backends.raw import Salvage

IO_CHOICES = ("auto", "direct", "buffered", "mmap")
LEAST_BYTES, MOST_BYTES = 4 << 20, 256 << 20
SHARE = 64
"""A super-block is about this part (1/n) of the capacity."""
RUN_BLOCKS, RUN_BYTES = 64, 1 << 20
"""So many small images that lie one behind the other are moved by one system call."""
_ZEROS = bytes(4)


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
    recorded_options: ClassVar[Mapping[str, object]] = {"superblock_bytes": 264 << 20}

    @classmethod
    def options_for(cls, capacity: int) -> Mapping[str, object]:
        return {"superblock_bytes": superblock_bytes(capacity)}

    @classmethod
    def salvage(cls, context: base.EngineContext) -> Salvage:
        from kvstore.backends.superblockraw import SuperblockSalvage

        return SuperblockSalvage(context)

    def __init__(self, context: base.EngineContext) -> None:
        super().__init__(context)
        self._bytes, self._io = _check_options({**self.recorded_options, **context.options})
        self._shelf: Shelf | None = None
        self._blank = superfile.blank_page()

    @property
    def largest_image(self) -> int:
        return self._bytes - 2 * HEADER_PAGE

    @property
    def failed(self) -> str:
        return self._shelf.failed if self._shelf is not None else ""

    # -- opening and closing ----------------------------------------------------------------------

    def suits(self, capacity: int) -> bool:
        return capacity <= self.context.capacity  # its tables have room for no more

    def create(self) -> None:
        self.make_folder(FOLDER)

    def open(self) -> None:
        self.close()
        try:
            self._shelf = Shelf(self.context, self._bytes, self._io)
        except OSError as error:
            raise self.opening_failed(error) from error
        self.is_open = True

    def close(self) -> None:
        self.is_open = False
        if self._shelf is not None:
            self._shelf.close()
            self._shelf = None

    def _open_shelf(self, *, writing: bool = False) -> Shelf:
        self.require_open(writing=writing)
        assert self._shelf is not None
        return self._shelf

    # -- putting ----------------------------------------------------------------------------------

    def put_many(self, blocks: Blocks, images: Sequence[memoryview], *, sync: bool) -> base.Written:
        shelf = self._open_shelf(writing=True)
        base.check_images(blocks, images)
        if shelf.failed:
            statuses = np.full(len(blocks), Status.FAILED, np.uint8)
            return base.Written(np.zeros(len(blocks), np.uint64), statuses)
        places, statuses = self._find_places(shelf, blocks)
        which = np.flatnonzero(statuses == Status.OK)
        chosen = [images[i] for i in which.tolist()]
        numbers, offsets = shelf.ledger.locate(places[which])
        kept = self.kept(chosen)
        for run in runs(numbers, offsets, chosen):
            # A parity chunk parts an image from the next one: then each is a run by itself.
            together = list(itertools.islice(kept, len(run)))
            for at, error in self._write(shelf, numbers[run.start], offsets, together, run):
                statuses[which[at]] = write_status(error)
                self._give_up(shelf, int(places[which[at]]), numbers[at], offsets[at])
        shelf.note_written(numbers)
        written = statuses == Status.OK
        if sync and written.any() and not shelf.sync(numbers):
            statuses[written] = Status.FAILED
        shelf.ledger.commit(places[written])
        reach("put.end")
        return base.Written(np.where(statuses == Status.OK, places, 0), statuses)

    def _find_places(self, shelf: Shelf, blocks: Blocks) -> tuple[U64, base.U8]:
        """Take a slot for each block, in new super-blocks if need be, as far as that goes."""
        statuses = np.full(len(blocks), Status.OK, np.uint8)
        sizes = self.record_bytes_of(blocks.lengths)
        fits = sizes <= self.largest_image
        statuses[~fits] = Status.FULL
        missing = np.flatnonzero(fits)
        places = np.zeros(len(blocks), np.uint64)
        while len(missing):
            found, got = shelf.ledger.take(sizes[missing], blocks.generations[missing])
            places[missing[got]] = found[got]
            missing = missing[~got]
            if not len(missing):
                break
            size_class = shelf.class_of(int(sizes[missing[0]]))
            status = shelf.grow(size_class)
            if status != Status.OK:
                same = shelf.ledger.arena.classes_of(sizes[missing]) == size_class
                statuses[missing[same]] = status
                missing = missing[~same]
        return places, statuses

    def _write(
        self,
        shelf: Shelf,
        number: int,
        offsets: list[int],
        images: list[memoryview],
        run: range,
    ) -> list[tuple[int, OSError]]:
        """Write the images of a run into one super-block; return which failed, and why."""
        descriptor, failed = shelf.descriptors[number], []
        reach("put.begin")
        if len(run) > 1 and shelf.files.io == "direct":
            with contextlib.suppress(OSError):
                size = sum(map(len, images))
                if os.pwritev(descriptor, images, offsets[run.start]) == size:
                    return []
        for at, image in zip(run, images, strict=True):
            try:
                self._write_one(shelf, descriptor, offsets[at], image)
            except OSError as error:
                shelf.complaints.log("writing", name_of(number), error)
                failed.append((at, error))
        return failed

    def _write_one(self, shelf: Shelf, descriptor: int, offset: int, image: memoryview) -> None:
        if shelf.files.io == "direct":
            shelf.files.write(descriptor, image, offset)
            return
        shelf.files.write(descriptor, self._blank, offset)
        reach("put.blanked")
        shelf.files.write(descriptor, image[HEADER_PAGE:], offset + HEADER_PAGE)
        reach("put.payload")
        shelf.files.write(descriptor, image[:HEADER_PAGE], offset)

    def _give_up(self, shelf: Shelf, place: int, number: int, offset: int) -> None:
        """After a failed write: leave nothing behind that a scan could find."""
        try:
            shelf.files.write(shelf.descriptors[number], self._blank, offset)
        except OSError:
            # The slot stays taken until the next opening.
            return
        shelf.ledger.free(np.array([place], np.uint64))

    def allow(self, physical_bytes: int) -> None:
        self._open_shelf().allow(physical_bytes)

    def room(self, length: int) -> base.Room:
        shelf = self._open_shelf()
        size = int(self.record_bytes_of(np.array([length], np.uint32))[0])
        if size > self.largest_image:
            return super().room(length)
        return base.Room(*shelf.ledger.groups(size))

    def close_group(self, group: int) -> bool:
        return self._open_shelf().ledger.close(group)

    def reopen_group(self, group: int) -> None:
        self._open_shelf().ledger.reopen(group)

    # -- getting ----------------------------------------------------------------------------------

    def get_many_into(self, blocks: Blocks, images: Sequence[memoryview]) -> base.Read:
        shelf = self._open_shelf()
        base.check_images(blocks, images)
        # Setting single elements of numpy arrays would cost more than all other Python here.
        statuses, filled = bytearray([Status.MISSING]) * len(blocks), [0] * len(blocks)
        sure, maybe = shelf.ledger.holding(blocks.places, blocks.generations)
        which = np.flatnonzero(sure | maybe).tolist()
        chosen = [images[i] for i in which]
        numbers, offsets = shelf.ledger.locate(blocks.places[which])
        for run in runs(numbers, offsets, chosen):
            for at, got in self._read(shelf, numbers[run.start], offsets, chosen, run):
                i, image = which[at], chosen[at]
                if isinstance(got, OSError):
                    statuses[i] = read_status(got)
                    continue
                filled[i] = got
                if got < len(image):
                    statuses[i] = Status.DAMAGED
                elif image[:4] != superfile.TOMBSTONE and (sure[i] or image[:4] != _ZEROS):
                    statuses[i] = Status.OK
        return base.Read(np.frombuffer(statuses, np.uint8), np.array(filled, np.uint32))

    def _read(
        self,
        shelf: Shelf,
        number: int,
        offsets: list[int],
        images: list[memoryview],
        run: range,
    ) -> Iterator[tuple[int, int | OSError]]:
        """Fill a run of images from one super-block; yield for each what was filled, or why not."""
        descriptor, size = shelf.descriptors[number], 0
        if len(run) > 1 or self._io == "mmap":
            size = offsets[run[-1]] + len(images[run[-1]]) - offsets[run.start]
        if self._io == "mmap":
            shelf.prefetch(number, offsets[run.start], size)
        if len(run) > 1:
            with contextlib.suppress(OSError):
                together = images[run.start : run.stop]
                if os.preadv(descriptor, together, offsets[run.start]) == size:
                    yield from ((at, len(images[at])) for at in run)
                    return
        for at in run:
            try:
                yield at, shelf.files.read(descriptor, images[at], self._bytes, offsets[at])
            except OSError as error:
                shelf.complaints.log("reading", name_of(number), error)
                yield at, error

    def reread(self, one: Blocks, record: memoryview) -> bool:
        shelf = self._open_shelf()
        sure, maybe = shelf.ledger.holding(one.places, one.generations)
        if not (sure | maybe)[0]:
            return False
        (number,), (offset,) = shelf.ledger.locate(one.places)
        return shelf.files.read_around(shelf.descriptors[number], record, self._bytes, offset)

    def resident_bytes(self, blocks: Blocks) -> int:
        """Return how many bytes of these records are in the page cache."""
        shelf = self._open_shelf()
        known = blocks.take(shelf.ledger.known(blocks.places))
        numbers, offsets = shelf.ledger.locate(known.places)
        sizes = image_bytes_of(known.lengths).tolist()
        maps = [shelf.map(number) for number in numbers]
        return sum(
            mapped.resident(offset, size)
            for mapped, offset, size in zip(maps, offsets, sizes, strict=True)
            if mapped is not None
        )

    def contains_many(self, blocks: Blocks) -> base.Mask:
        ledger, reader = self._open_shelf().ledger, self._reader()
        sure, maybe = ledger.holding(blocks.places, blocks.generations)
        for i in np.flatnonzero(maybe & ~sure).tolist():
            sure[i] = reader.holds(blocks.take(slice(i, i + 1)))
        return sure

    def where(self, blocks: Blocks) -> list[str]:
        numbers = (blocks.places >> np.uint64(32)).tolist()
        slots = (blocks.places & np.uint64(0xFFFFFFFF)).tolist()
        return [
            f"{FOLDER}/{name_of(number)} slot {slot}"
            for number, slot in zip(numbers, slots, strict=True)
        ]

    # -- deleting ---------------------------------------------------------------------------------

    def delete_many(self, blocks: Blocks, how: base.Leaving = base.Leaving.VERSION) -> int:
        shelf = self._open_shelf(writing=True)
        if how == base.Leaving.EVICTED:
            return shelf.ledger.evict(blocks.places, blocks.generations)
        if how == base.Leaving.BLOCK:
            shelf.graves.add(blocks)
        return bury(shelf, self._reader(), blocks)

    # -- scanning and claiming --------------------------------------------------------------------

    def _reader(self) -> SlotReader:
        shelf = self._open_shelf()
        return SlotReader(shelf.files, shelf.ledger, shelf.descriptors, self.context.store_uuid)

    def scan(self) -> Iterator[base.Scanned]:
        shelf, reader = self._open_shelf(), self._reader()
        reader.graves = shelf.graves.read()
        # One page at a time leaves a disk idle.
        with ThreadPoolExecutor(self.capabilities.preferred_threads, "scan") as pool:
            for number in sorted(shelf.shapes):
                places, versions, slot_bytes = shelf.ledger.occupied(number)
                for start in range(0, len(places), SCAN_BATCH):
                    part = slice(start, start + SCAN_BATCH)
                    shares = reader.shares(number, places[part], versions[part], slot_bytes)
                    batch = ScanBatch()
                    for place, item in itertools.chain.from_iterable(pool.map(reader.read, shares)):
                        if isinstance(item, Finding):
                            batch.report(item)
                        else:
                            batch.add(item, place)
                    yield batch.take()

    def claim(self, places: U64, lengths: U32, generations: U64, *, complete: bool) -> None:
        shelf, sizes = self._open_shelf(), self.record_bytes_of(lengths)
        shelf.mend(places, sizes)
        shelf.ledger.claim(places, sizes, generations, complete=complete)

    def put_right(self, finding: base.Finding, target: Path) -> str:
        """Copy a slot that holds no valid record, then write a tombstone there. What else is wrong
        with a file the opening has mended."""
        shelf = self._open_shelf(writing=True)
        if finding.kind in ("short", "bad-copy"):
            return "mended"
        if finding.kind in ("foreign", "bad-superblock"):
            moved = move_away(self.context.directory / finding.path, target)
            return "moved" if moved else ""
        name, _, slot = finding.path.removeprefix(f"{FOLDER}/").partition(" slot ")
        if not slot:
            return ""
        place = int(name[:8], 16) << 32 | int(slot)
        (number,), (offset,) = shelf.ledger.locate(np.array([place], np.uint64))
        image = memoryview(mmap.mmap(-1, shelf.shapes[number].slot_bytes))
        filled = shelf.files.read(shelf.descriptors[number], image, self._bytes, offset)
        write_new(target, [image[:filled]])
        shelf.files.write(shelf.descriptors[number], superfile.tombstone_page(), offset)
        shelf.note_written([number])
        return "moved"

    # -- the rest ---------------------------------------------------------------------------------

    def flush(self) -> None:
        shelf = self._open_shelf()
        if not self.context.read_only and not shelf.sync():
            raise EngineError(shelf.failed, "see to the disk, then open the store again")

    def stats(self) -> base.Stats:
        shelf = self._open_shelf()
        return base.Stats(
            overhead_bytes=shelf.lost_bytes,
            io="mmap" if self._io == "mmap" else shelf.files.io,
            notes=(shelf.files.note,) if shelf.files.note else (),
            file_bytes=shelf.file_bytes * len(shelf.descriptors),
            problems=tuple(shelf.problems()),
        )

    def check(self) -> list[Finding]:
        return self._open_shelf().check()


def runs(numbers: list[int], offsets: list[int], images: Sequence[memoryview]) -> Iterator[range]:
    """Yield positions of images that lie one behind the other and are moved together, because small
    transfers cost more than their bytes."""
    start, count = 0, len(images)
    while start < count:
        stop, end = start + 1, offsets[start] + len(images[start])
        most = min(count, start + RUN_BLOCKS)
        while (
            stop < most
            and offsets[stop] == end
            and numbers[stop] == numbers[start]
            and end + len(images[stop]) - offsets[start] <= RUN_BYTES
        ):
            end += len(images[stop])
            stop += 1
        yield range(start, stop)
        start = stop


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

"""The super-blocks of an open engine: found, made, given other slots, given back, synced.

Several threads use a shelf at once. One at a time makes files (:attr:`Shelf.growing`); descriptors
are never closed before the shelf is, so that a late reader cannot meet another file.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import resource
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvstore import parity
from kvstore.backends import superfile
from kvstore.backends.base import Finding, Status
from kvstore.backends.directio import DIRECTORY, NO_DESCRIPTOR, Complaints, Files, write_status
from kvstore.backends.graves import Graves
from kvstore.backends.ledger import Ledger
from kvstore.backends.pagemap import PageMap
from kvstore.backends.superfile import FOLDER, GRAVES, Shape, name_of
from kvstore.errors import CorruptBlock, CorruptStore, EngineError
from kvstore.record import HEADER_PAGE, decode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.backends.base import U64, EngineContext
    from kvstore.slots import I64

log = logging.getLogger(__name__)

OPENERS = 8
"""Threads that open files and read their headers: there may be thousands."""
GROWTH_PAUSE = 5.0
"""Seconds without another attempt to make a file after one failed."""
_NAME = re.compile(r"[0-9a-f]{8}\.sb")
_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_SPARE_DESCRIPTORS = 256


class Shelf:
    """All super-blocks, of ``file_bytes`` each. Raises OSError, StoreNotFound, EngineError."""

    def __init__(self, context: EngineContext, file_bytes: int, io: str) -> None:
        self.file_bytes = file_bytes
        self.slots_bytes = file_bytes - 2 * HEADER_PAGE
        self.io = io
        self.files = Files("buffered" if io == "mmap" else io)
        self.complaints = Complaints()
        self.shapes: dict[int, Shape] = {}
        self.descriptors: dict[int, int] = {}
        self.broken: dict[int, str] = {}
        """Why a file that is there cannot be used, by number."""
        self.doubtful: set[int] = set()
        """Files of which a copy of the header is not good."""
        self.failed = ""
        self.growing = threading.Lock()
        self._store = context.store_uuid
        self.record_bytes_of = partial(parity.record_bytes_of, parity=context.parity)
        self._read_only = context.read_only
        self._maps: dict[int, PageMap | None] = {}
        self._retired: list[int] = []
        self._limit = context.capacity or 1 << 62
        self._grow_again_at = 0.0
        self._sync_lock = threading.Lock()
        self._dirty: set[int] = set()
        self._folder = os.open(context.directory / FOLDER, DIRECTORY)
        self.graves = Graves(self._folder, self.complaints)
        try:
            numbers = self._list()
            found = os.fstatvfs(self._folder)
            space = context.capacity or found.f_blocks * found.f_frsize
            self.ledger = Ledger(max([space // file_bytes, 1, *numbers]), self.slots_bytes)
            _allow_descriptors(len(numbers))
            with ThreadPoolExecutor(OPENERS, "open") as pool:
                for shape, agreed in filter(None, pool.map(self._look_at, numbers)):
                    self._take_shape(shape, write=not agreed)
            for number, reason in sorted(self.broken.items()):
                log.warning("%s/%s is not used: %s", FOLDER, name_of(number), reason)
            if not self._read_only:
                self._probe()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._maps.clear()
        self.graves.close()
        for descriptor in (*self.descriptors.values(), *self._retired, self._folder):
            os.close(descriptor)

    # -- finding ----------------------------------------------------------------------------------

    def _list(self) -> list[int]:
        """Return the numbers of the super-blocks; remove what an earlier process did not finish."""
        found = []
        for name in sorted(os.listdir(self._folder)):
            if _NAME.fullmatch(name) and int(name[:8], 16):
                found.append(int(name[:8], 16))
            elif name.endswith(superfile.NEW) and not self._read_only:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._folder)
        return found

    def _look_at(self, number: int) -> tuple[Shape, bool] | None:
        """Open a file; return what its header says, and whether both copies do. Raises OSError if
        there are no descriptors left."""
        name, access = name_of(number), os.O_RDONLY if self._read_only else os.O_RDWR
        try:
            descriptor = self.files.open(name, _OPEN | access, self._folder)
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                raise
            self.broken[number] = f"it cannot be opened: {error.strerror}"
            return None
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            self.broken[number] = "it is no file"
            return None
        self.descriptors[number] = descriptor
        if status.st_size < self.file_bytes:
            self.complaints.log("opening", name, OSError(errno.EIO, "the file was cut off"))
            if not self._read_only:
                with contextlib.suppress(OSError):
                    superfile.reserve(descriptor, self.file_bytes)
        return self._learn_shape(number)

    def _learn_shape(self, number: int) -> tuple[Shape, bool] | None:
        descriptor = self.descriptors[number]
        try:
            shape, agreed = superfile.read_header(self.files, descriptor, self.file_bytes)
        except CorruptStore as error:
            guess = self._first_slot(descriptor)
            if not guess:
                self.broken[number] = error.message
                return None
            shape, agreed = self._shape(number, guess), False
        if (shape.store, shape.number, shape.file_bytes) != (self._store, number, self.file_bytes):
            self.broken[number] = f"it is number {shape.number} of store {shape.store.hex()}"
            return None
        return shape, agreed

    def _first_slot(self, descriptor: int) -> int:
        """Return the slot length that the record in the first slot needs; 0 if there is none.

        The first slot begins at the same place for all lengths, so that what lies there was written
        as a header page.
        """
        page = superfile.blank_page()
        try:
            filled = self.files.read(descriptor, page, self.file_bytes, HEADER_PAGE)
            header = decode(page[:filled])
        except (OSError, CorruptBlock):
            return 0
        size = parity.kept_bytes(header)
        if header.store != self._store or size > self.slots_bytes:
            return 0
        return self.class_bytes(size)

    def _take_shape(self, shape: Shape, *, write: bool) -> None:
        if shape.slot_bytes not in self.ledger.slot_bytes:
            self.broken[shape.number] = f"it has slots of {shape.slot_bytes} bytes"
            return
        self.broken.pop(shape.number, None)
        self.shapes[shape.number] = shape
        self.ledger.adopt(shape.number, self.ledger.slot_bytes.index(shape.slot_bytes))
        if write and self._read_only:
            self.doubtful.add(shape.number)
        elif write:
            try:
                superfile.write_header(self.files, self.descriptors[shape.number], shape)
            except OSError as error:
                self.complaints.log("mending", name_of(shape.number), error)
                self.doubtful.add(shape.number)

    def mend(self, places: U64, sizes: I64) -> None:
        """Find out the slot length of files without a good header by records known to be there."""
        for number in sorted(set(self.broken) & set(self.descriptors)):
            mine = sizes[(places >> np.uint64(32)) == number]
            if len(mine) and (mine <= self.slots_bytes).all():
                classes = np.unique(self.ledger.arena.classes_of(mine))
                if len(classes) == 1:
                    slot_bytes = self.ledger.slot_bytes[int(classes[0])]
                    self._take_shape(self._shape(number, slot_bytes), write=True)

    def _shape(self, number: int, slot_bytes: int) -> Shape:
        edition = self.shapes[number].edition + 1 if number in self.shapes else 1
        return Shape(self._store, number, slot_bytes, self.file_bytes, edition)

    def class_of(self, size: int) -> int:
        """Return the size class of an image (bytes)."""
        return int(self.ledger.arena.classes_of(np.array([size]))[0])

    def class_bytes(self, size: int) -> int:
        """Return the length of the slots that an image goes to."""
        return self.ledger.slot_bytes[self.class_of(size)]

    def _probe(self) -> None:
        """Write a page, so that it is known from the start whether O_DIRECT works here."""
        name = f"probe{superfile.NEW}"
        try:
            descriptor = self.files.open(name, os.O_RDWR | os.O_CREAT | _OPEN, self._folder)
            try:
                self.files.write(descriptor, superfile.blank_page())
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise EngineError(
                    "the filesystem refuses O_DIRECT", "use io=auto or io=buffered"
                ) from error
            # A full or failing disk shows at the first put; what is stored can still be read.
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._folder)

    # -- making and giving back -------------------------------------------------------------------

    def grow(self, size_class: int) -> Status:
        """Have a class get an empty super-block; if there is none, make one.

        Returns OK, NEED_ROOM where emptying one would help, FULL or FAILED where none is there.
        """
        with self.growing:
            if self.ledger.free_of(size_class):
                return Status.OK
            failure = Status.FULL
            number = self.ledger.take_empty()
            try:
                number = self._have(number, self.ledger.slot_bytes[size_class])
            except OSError as error:
                self.complaints.log("making", "a super-block", error)
                self._grow_again_at = time.monotonic() + GROWTH_PAUSE
                if number:
                    self.broken[number] = f"it cannot be written: {error.strerror}"
                number, failure = 0, write_status(error)
            if number:
                self.ledger.give(number, size_class)
                return Status.OK
        return Status.NEED_ROOM if self.shapes else failure

    def _have(self, number: int, slot_bytes: int) -> int:
        """Give an empty super-block slots of that length, or make one if ``number`` is 0; return
        its number, 0 if there may be no more. Raises OSError."""
        if not number:
            return self._make(slot_bytes)
        if self.shapes[number].slot_bytes != slot_bytes:
            shape = self._shape(number, slot_bytes)
            superfile.reshape(self.files, self.descriptors[number], shape)
            self.shapes[number] = shape
        return number

    def _make(self, slot_bytes: int) -> int:
        used = {*self.descriptors, *self.broken}
        most = self.ledger.arena.num_chunks
        number = next((each for each in range(1, most + 1) if each not in used), 0)
        within = (len(used) + 1) * self.file_bytes <= self._limit
        if not (number and within) or time.monotonic() < self._grow_again_at:
            return 0
        _allow_descriptors(len(used) + 1)
        shape = self._shape(number, slot_bytes)
        self.descriptors[number] = superfile.make(self.files, self._folder, shape)
        self.shapes[number] = shape
        return number

    def allow(self, limit: int) -> None:
        """Take no more than ``limit`` bytes; give files back that hold nothing."""
        with self.growing:
            self._limit = limit
            while self._excess and (number := self.ledger.take_empty()):
                self._retire(number)

    @property
    def _excess(self) -> bool:
        return len(self.descriptors) * self.file_bytes > self._limit

    def _retire(self, number: int) -> None:
        descriptor = self.descriptors.pop(number)
        del self.shapes[number]
        self._maps.pop(number, None)
        self._retired.append(descriptor)
        try:
            os.unlink(name_of(number), dir_fd=self._folder)
            os.ftruncate(descriptor, 0)
        except OSError as error:
            self.complaints.log("removing", name_of(number), error)

    # -- syncing ----------------------------------------------------------------------------------

    def note_written(self, numbers: Sequence[int]) -> None:
        self._dirty.update(numbers)

    def sync(self, numbers: Sequence[int] | None = None) -> bool:
        """Sync files, by default all that were written; False if that failed, now or ever before:
        the kernel tells a failure only once."""
        with self._sync_lock:
            if numbers is None:
                self._sync_graves()
            for number in sorted(self._dirty if numbers is None else set(numbers)):
                # Whatever is written from here on makes the file dirty again.
                self._dirty.discard(number)
                descriptor = self.descriptors.get(number)
                try:
                    if descriptor is not None and not self.failed:
                        os.fdatasync(descriptor)
                        if self._is_removed(number, descriptor):
                            raise OSError(errno.ENOENT, "the file was removed")
                except OSError as error:
                    self.failed = f"a sync failed ({error.strerror}), so nothing more is written"
                    self.complaints.log("syncing", name_of(number), error)
            return not self.failed

    def _sync_graves(self) -> None:
        try:
            self.graves.sync()
        except OSError as error:
            self.failed = f"a sync failed ({error.strerror}), so nothing more is written"
            self.complaints.log("syncing", GRAVES, error)

    # -- the page cache ---------------------------------------------------------------------------

    def prefetch(self, number: int, offset: int, size: int) -> None:
        """Have the kernel read what is not in the page cache, in one go."""
        mapped = self.map(number)
        if mapped is not None and mapped.resident(offset, size) < size:
            # What the device cannot read is reported by the read that follows, to the very page.
            mapped.prefetch(offset, size)

    def map(self, number: int) -> PageMap | None:
        """Return the mapping of a file; None for one that was cut off."""
        if number not in self._maps:
            try:
                self._maps[number] = PageMap(self.descriptors[number], self.file_bytes)
            except (OSError, ValueError):
                self._maps[number] = None
        return self._maps[number]

    # -- figures ----------------------------------------------------------------------------------

    @property
    def lost_bytes(self) -> int:
        """Bytes that no record can use: ends of files, ends of slots, and what of the limit is too
        little for one more file."""
        usable, shapes = self.slots_bytes, list(self.shapes.values())
        ends = sum(
            self.file_bytes - usable // shape.slot_bytes * shape.slot_bytes for shape in shapes
        )
        rest = self._limit % self.file_bytes if self._limit < 1 << 60 else 0
        return ends + rest + self.ledger.slack_bytes

    def _removed(self) -> list[int]:
        items = sorted(self.descriptors.copy().items())
        return [number for number, descriptor in items if self._is_removed(number, descriptor)]

    def _is_removed(self, number: int, descriptor: int) -> bool:
        """Tell whether somebody removed a file that is in use: what is in it goes with the process,
        synced or not. (We give up a file before we remove it.)"""
        return not os.fstat(descriptor).st_nlink and number in self.descriptors

    def problems(self) -> Iterator[str]:
        """Yield what somebody must see to, in words."""
        if self.broken:
            yield f"{len(self.broken)} super-blocks cannot be used; the log names them"
        for number in self._removed():
            yield (
                f"{FOLDER}/{name_of(number)} was removed: its blocks last until the daemon ends; "
                "copy it back from /proc/PID/fd, or restart"
            )

    def check(self) -> list[Finding]:
        """See :meth:`kvstore.backends.base.Engine.check`."""
        found = [
            Finding("bad-superblock", f"{FOLDER}/{name_of(number)}", reason)
            for number, reason in sorted(self.broken.items())
        ]
        found += [
            Finding("missing-superblock", f"{FOLDER}/{name_of(number)}", "it was removed")
            for number in self._removed()
        ]
        found += [
            Finding("bad-copy", f"{FOLDER}/{name_of(number)}", "a copy of its header is not good")
            for number in sorted(self.doubtful)
        ]
        for number, descriptor in sorted(self.descriptors.items()):
            if os.fstat(descriptor).st_size < self.file_bytes:
                found.append(Finding("short", f"{FOLDER}/{name_of(number)}", "it was cut off"))
        try:
            names = sorted(os.listdir(self._folder))
        except OSError as error:
            raise EngineError(f"{FOLDER} cannot be listed: {error.strerror}") from error
        ours = {GRAVES, *map(name_of, self.descriptors), *map(name_of, self.broken)}
        strange = [name for name in names if name not in ours and not name.endswith(superfile.NEW)]
        return found + [
            Finding("foreign", f"{FOLDER}/{name}", "not a file of this engine") for name in strange
        ]


def _allow_descriptors(count: int) -> None:
    """Raise the soft limit of descriptors, as far as the hard one lets us, for so many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted * 2 if hard == resource.RLIM_INFINITY else min(wanted * 2, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))

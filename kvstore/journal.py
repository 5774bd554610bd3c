"""The journal: every change of the index since the checkpoint, appended record by record.

Files ``journal.<sequence>`` and ``checkpoint.<sequence>`` (16 hex digits) lie in the blocks
directory; ``checkpoint.n`` and ``journal.n``, ``journal.n+1``, ... are the state. This module
writes the journal; :mod:`kvstore.events` has the form of a record, :mod:`kvstore.checkpoint` reads
it all back, :mod:`kvstore.settle` turns it into rows.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import threading
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from kvstore import files
from kvstore.errors import CorruptStore, EngineError, StoreExists, StoreFull
from kvstore.events import (
    NONE,
    RECORD,
    RECORD_BYTES,
    TOUCH_ROWS,
    Kind,
    Records,
    blank,
    intact,
    seal,
    touch_records,
)

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "NONE",
    "RECORD",
    "RECORD_BYTES",
    "TOUCH_ROWS",
    "FileHeader",
    "FileKind",
    "Journal",
    "Kind",
    "Records",
    "blank",
    "intact",
    "parse_name",
    "seal",
    "touch_records",
]

log = logging.getLogger(__name__)

VERSION = 1
HEADER_BYTES = RECORD_BYTES
"""The file header is as long as a record, so that no record straddles a 4 KiB page."""
HEADER = struct.Struct("<4sHHQ16sQQQ64x")
UNIT_STEP = 4096
MAX_SEQUENCE = 1 << 62
_SUM = struct.Struct("<Q")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MOVE_AWAY = "start again; if it stays, move that file away, and the blocks will be scanned instead"
_GROWING = (Kind.BEGIN, Kind.PUT, Kind.TOUCH, Kind.GHOST, Kind.PIN)
"""Records that may be refused on a full disk; the others need the reserve that these leave."""


class FileKind(Enum):
    """The value is the magic; the name in lower case begins the file's name."""

    JOURNAL = b"KVJ1"
    CHECKPOINT = b"KVC1"

    def path(self, directory: Path, sequence: int) -> Path:
        return directory / f"{self.name.lower()}.{sequence:016x}"


class FileHeader(NamedTuple):
    """First 128 bytes of a journal or checkpoint.

    ``size`` is the unit of growth in bytes (journal) or the number of records (checkpoint);
    ``sums`` the sum of all record checksums modulo 2^64 (checkpoint only).
    """

    kind: FileKind
    uuid: bytes
    epoch: int
    sequence: int
    size: int
    sums: int = 0
    version: int = VERSION

    def encode(self) -> bytes:
        fields = HEADER.pack(
            self.kind.value, self.version, RECORD_BYTES, self.epoch, self.uuid, self.sequence,
            self.size, self.sums,
        )  # fmt: skip
        return fields + _SUM.pack(xxh3_64_intdigest(fields))

    @classmethod
    def decode(cls, data: bytes) -> FileHeader:
        """Return the header of any version. Raises CorruptStore if it is damaged."""
        if len(data) < HEADER_BYTES:
            raise CorruptStore(f"the file header is cut off after {len(data)} bytes")
        fields, (found,) = data[: HEADER.size], _SUM.unpack_from(data, HEADER.size)
        if xxh3_64_intdigest(fields) != found:
            raise CorruptStore("the checksum of the file header does not match")
        magic, version, record_bytes, epoch, uuid, sequence, size, sums = HEADER.unpack(fields)
        if magic not in {kind.value for kind in FileKind} or record_bytes != RECORD_BYTES:
            raise CorruptStore("the file header is not one of a journal or checkpoint")
        return cls(FileKind(magic), uuid, epoch, sequence, size, sums, version)


def parse_name(name: str) -> tuple[FileKind, int] | None:
    """Return kind and sequence of a file name, or None if it is not one of ours."""
    for kind in FileKind:
        prefix, digits = kind.name.lower() + ".", name[-16:]
        if name[:-16] == prefix and len(digits) == 16 and not set(digits) - set("0123456789abcdef"):
            sequence = int(digits, 16)
            # Nothing of ours counts so far; such a name must not use up the numbers either.
            return (kind, sequence) if sequence <= MAX_SEQUENCE else None
    return None


class Journal:
    """The journal being written. Any thread may append and sync.

    After an append or sync that failed, ``failed`` holds the reason and nothing more is accepted:
    what the kernel still holds of this file cannot be known (after a failed fsync the next one may
    say success although the bytes are gone), so only a new file under a new checkpoint helps.
    """

    def __init__(self, directory: Path, header: FileHeader, descriptor: int, end: int) -> None:
        self.directory = directory
        self.failed = ""
        self._header = header
        self._descriptor = descriptor
        self._end = end
        self._synced = 0
        self._note_size()
        self._opened: Records = blank(0, Kind.OPEN)
        self._append_lock = threading.Lock()
        self._sync_lock = threading.Lock()

    @classmethod
    def create(cls, directory: Path, sequence: int, uuid: bytes, epoch: int, unit: int) -> Journal:
        """Make ``journal.<sequence>``, durably. ``unit`` bytes of room are kept ahead (see there).

        A file of that name which belongs to another store or epoch is replaced. Raises StoreExists
        if it is ours, StoreFull, PermissionDenied, ReadOnly, EngineError.
        """
        unit = max(-(-unit // UNIT_STEP) * UNIT_STEP, UNIT_STEP)
        header = FileHeader(FileKind.JOURNAL, uuid, epoch, sequence, unit)
        path = FileKind.JOURNAL.path(directory, sequence)
        try:
            _refuse_ours(path, header)
            descriptor = files.create_temporary(path)
            try:
                _extend(descriptor, 0, unit)
                os.pwrite(descriptor, header.encode(), 0)
                files.publish(path, descriptor)
            except BaseException:
                os.close(descriptor)
                files.discard_temporary(path)
                raise
        except OSError as error:
            raise files.translate(error, f"create {path}") from error
        return cls(directory, header, descriptor, HEADER_BYTES)

    @classmethod
    def resume(cls, directory: Path, sequence: int, uuid: bytes, epoch: int, end: int) -> Journal:
        """Go on with the file that ``load`` found whole, from its ``end``.

        Raises CorruptStore if the file is not the one that was loaded.
        """
        path = FileKind.JOURNAL.path(directory, sequence)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise files.translate(error, f"open {path}") from error
        try:
            header = FileHeader.decode(os.pread(descriptor, HEADER_BYTES, 0))
            found = (header.kind, header.uuid, header.epoch, header.sequence, header.version)
            if found != (FileKind.JOURNAL, uuid, epoch, sequence, VERSION):
                raise CorruptStore(f"{path} belongs to another store or epoch", _MOVE_AWAY)
            return cls(directory, header, descriptor, end)
        except BaseException:
            os.close(descriptor)
            raise

    # -- figures ----------------------------------------------------------------------------------

    @property
    def sequence(self) -> int:
        return self._header.sequence

    @property
    def unit(self) -> int:
        return self._header.size

    @property
    def end(self) -> int:
        """Offset in the file behind the last record."""
        return self._end

    @property
    def size(self) -> int:
        """Size of the file, reserve included."""
        return self._size

    @property
    def physical_bytes(self) -> int:
        """What the file takes on the device, as ``du`` counts it. Never waits for the disk."""
        return self._physical if self._descriptor >= 0 else 0

    def _note_size(self) -> None:
        try:
            found = os.fstat(self._descriptor)
        except OSError as error:
            path = FileKind.JOURNAL.path(self.directory, self.sequence)
            raise files.translate(error, f"look at {path}") from error
        self._size, self._physical = found.st_size, found.st_blocks * 512

    # -- writing ----------------------------------------------------------------------------------

    def append(self, records: Records) -> int:
        """Seal ``records`` in place and append them with one write; return the new end.

        CLOSE gets its own offset. When this returns the records survive the death of the process.
        Raises StoreFull if the disk is full and the room left is kept for FREE and its like: then
        nothing was written and the journal goes on. Raises EngineError if it failed, now or before.
        """
        if not len(records):
            return self._end
        seal(records)
        with self._append_lock:
            self._check()
            self._make_room(records)
            if (records["kind"] == Kind.CLOSE).any():
                offsets = self._end + RECORD_BYTES * np.arange(len(records), dtype=np.uint64)
                closes = records["kind"] == Kind.CLOSE
                records["place"][closes] = offsets[closes]
                seal(records)
            self._write(records)
            self._end += records.nbytes
            self._remember_open(records)
            return self._end

    def sync(self, upto: int | None = None) -> None:
        """Make everything up to offset ``upto`` (default: the end) survive power loss.

        Threads that wait share one fdatasync: whoever gets the lock covers all that was appended
        until then, and the others find their part done. Raises EngineError.
        """
        target = self._end if upto is None else upto
        with self._sync_lock:
            self._check()
            if self._synced >= target:
                return
            reached = self._end
            self._sync_file()
            self._synced = reached

    def rotate(self) -> None:
        """Sync this file and go on in ``journal.<sequence + 1>``, which repeats the last OPEN.

        A new file that cannot be made raises as :meth:`create` does, and the old one goes on.
        """
        fresh = Journal.create(
            self.directory, self.sequence + 1, self._header.uuid, self._header.epoch, self.unit
        )
        with self._sync_lock, self._append_lock:
            try:
                self._check()
                fresh.append(self._opened)
                # Records in the next file may rest on records in this one: they must not survive
                # a power loss without them.
                self._sync_file()
            except BaseException:
                fresh._discard()
                raise
            os.close(self._descriptor)
            self._header, self._descriptor = fresh._header, fresh._descriptor
            self._end, self._synced = fresh._end, 0
            self._size, self._physical = fresh._size, fresh._physical

    def close(self) -> None:
        """Let go of the file without syncing. May be called twice."""
        with self._sync_lock, self._append_lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    # -- inside -----------------------------------------------------------------------------------

    def _check(self) -> None:
        reason = self.failed or ("it is closed" if self._descriptor < 0 else "")
        if reason:
            raise EngineError(
                f"the journal in {self.directory} takes no more records: {reason}",
                "look at the log for the first failure and open the store again",
            )

    def _sync_file(self) -> None:
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise self._fail(error, "sync") from error

    def _discard(self) -> None:
        """Remove a file that nobody has begun to use."""
        self.close()
        FileKind.JOURNAL.path(self.directory, self.sequence).unlink(missing_ok=True)

    def _write(self, records: Records) -> None:
        """One write, at an offset: a kill leaves the records before it and a prefix of these."""
        data = np.ascontiguousarray(records).view(np.uint8).data
        try:
            written = os.pwrite(self._descriptor, data, self._end)
        except OSError as error:
            raise self._fail(error, "append to") from error
        if written != len(data):
            # Going on behind a piece that is not there would bury what follows.
            raise self._fail(OSError(errno.EIO, "short write"), "append to")

    def _make_room(self, records: Records) -> None:
        """Keep at least ``unit`` bytes of zeros behind the end, and always one empty record.

        Crash safety: the reserve is real zeros (or extents that read as zeros), allocated before
        any record is written there, so an append changes neither size nor allocation, needs no
        space, and a power loss can only lose the newest pages, which then read as zeros. The size
        is always a multiple of the unit; one that is not, a record that is neither intact nor
        zero, or anything behind the first empty record tells that the file was cut or torn. The
        empty record at the end makes a cut at a multiple of the unit visible too.
        """
        end = self._end + records.nbytes
        wanted = -(-(end + self.unit) // self.unit) * self.unit
        if wanted <= self._size:
            return
        try:
            _extend(self._descriptor, self._size, wanted)
        except OSError as error:
            self._use_reserve(records, end, error)
        else:
            self._note_size()

    def _use_reserve(self, records: Records, end: int, error: OSError) -> None:
        """Decide whether these records may use room that could not be replaced.

        Half of the reserve belongs to records that end a block's life, so that evicting works on a
        full disk; it is what makes room for everything else.
        """
        if error.errno not in _FULL:
            raise self._fail(error, "extend")
        room = self._size - end - RECORD_BYTES
        growing = np.isin(records["kind"], _GROWING).any()
        if growing and room < self.unit // 2:
            raise StoreFull(
                f"the journal in {self.directory} cannot grow: {error.strerror}",
                "free some space on the filesystem",
            )
        if room < 0:
            raise self._fail(error, "extend")
        log.debug("journal lives on its reserve, %d bytes left: %s", room, error)

    def _fail(self, error: OSError, doing: str) -> EngineError:
        path = FileKind.JOURNAL.path(self.directory, self.sequence)
        self.failed = f"cannot {doing} {path.name}: {error.strerror}"
        log.error("journal failed: %s", self.failed)
        return EngineError(
            f"cannot {doing} {path}: {error.strerror}", "look at the kernel log, then open again"
        )

    def _remember_open(self, records: Records) -> None:
        opens = records[records["kind"] == Kind.OPEN]
        if len(opens):
            self._opened = opens[-1:].copy()


def _refuse_ours(path: Path, header: FileHeader) -> None:
    """Raise StoreExists unless the name is free or taken by a file of another store or epoch."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    try:
        found = FileHeader.decode(os.pread(descriptor, HEADER_BYTES, 0))
        ours = (found.uuid, found.epoch) == (header.uuid, header.epoch)
    except CorruptStore:
        ours = True
    finally:
        os.close(descriptor)
    if ours:
        raise StoreExists(f"{path} is already there", _MOVE_AWAY)


def _extend(descriptor: int, size: int, wanted: int) -> None:
    """Grow the file by zeros that are allocated; leave it as it was if the disk is full."""
    try:
        try:
            os.posix_fallocate(descriptor, size, wanted - size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            _write_zeros(descriptor, size, wanted)
    except OSError:
        # A full disk may leave the file partly grown, which would look cut off.
        os.ftruncate(descriptor, size)
        raise


def _write_zeros(descriptor: int, size: int, wanted: int) -> None:
    zeros = bytes(min(wanted - size, 1 << 20))
    while size < wanted:
        size += os.pwrite(descriptor, zeros[: wanted - size], size)

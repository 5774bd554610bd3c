"""What was deleted: tombstones in the slots, and a list of the blocks.

A tombstone keeps its own record from coming back. Older versions of the block may lie in slots that
are free because they were evicted, and nobody knows where; so the list ``super/deleted`` says up to
which generation nothing of a block counts any more. Only a scan reads it. It keeps the last half
million deletions or more: by then old records have mostly been overwritten.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from typing import TYPE_CHECKING

import numpy as np

from kvstore.backends.base import Finding
from kvstore.backends.ledger import UNKNOWN
from kvstore.backends.superfile import FOLDER, GRAVES, NEW, digest, name_of, tombstone_page
from kvstore.errors import EngineError
from kvstore.killpoints import reach

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.backends.base import U64, Blocks
    from kvstore.backends.directio import Complaints
    from kvstore.backends.shelf import Shelf
    from kvstore.backends.slotscan import SlotReader
    from kvstore.record import Header

ENTRY = np.dtype([("digest", "<u8"), ("generation", "<u8"), ("check", "<u8")])
MOST = 1 << 20
"""Entries; then the older half goes."""
_CHECK = np.uint64(0x9E3779B97F4A7C15)
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Graves:
    """The list in the directory ``folder``. Made when it is needed."""

    def __init__(self, folder: int, complaints: Complaints) -> None:
        self._folder = folder
        self._complaints = complaints
        self._lock = threading.Lock()
        self._descriptor = -1

    def add(self, blocks: Blocks) -> None:
        """Note that nothing of these blocks counts up to their generations.

        A full disk keeps no block from being deleted: then the list lacks it.
        """
        added = np.zeros(len(blocks), ENTRY)
        keys = blocks.key_list()
        added["digest"] = [digest(blocks.namespace, blocks.shard, key) for key in keys]
        added["generation"] = blocks.generations
        added["check"] = _sums(added)
        with self._lock:
            try:
                descriptor = self._open()
                size = os.fstat(descriptor).st_size
                if size % ENTRY.itemsize:
                    os.ftruncate(descriptor, size // ENTRY.itemsize * ENTRY.itemsize)
                os.write(descriptor, added.tobytes())
                if size > MOST * ENTRY.itemsize:
                    self._shorten()
            except OSError as error:
                self._complaints.log("noting deletions in", f"{FOLDER}/{GRAVES}", error)

    def _open(self) -> int:
        if self._descriptor < 0:
            flags = _FLAGS | os.O_CREAT
            self._descriptor = _regular(os.open(GRAVES, flags, 0o600, dir_fd=self._folder))
            os.fsync(self._folder)
        return self._descriptor

    def _shorten(self) -> None:
        """Keep the newer half."""
        kept = self._entries()[-MOST // 2 :]
        new = os.open(GRAVES + NEW, _FLAGS | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=self._folder)
        try:
            os.write(new, kept.tobytes())
            os.fsync(new)
            os.rename(GRAVES + NEW, GRAVES, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError:
            os.close(new)
            raise
        os.close(self._descriptor)
        self._descriptor = new
        os.fsync(self._folder)

    def _entries(self) -> np.ndarray:
        """Return what is in the file and intact; raises OSError."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = _regular(os.open(GRAVES, flags, dir_fd=self._folder))
        with open(descriptor, "rb") as file:
            data = file.read()
        found = np.frombuffer(data, ENTRY, len(data) // ENTRY.itemsize)
        intact: np.ndarray = found[found["check"] == _sums(found)]
        return intact

    def read(self) -> dict[int, int]:
        """Return up to which generation nothing counts, by the digest of the block."""
        try:
            found = np.sort(self._entries(), order="generation")
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise EngineError(f"{FOLDER}/{GRAVES} cannot be read: {error.strerror}") from error
        return dict(zip(found["digest"].tolist(), found["generation"].tolist(), strict=True))

    def sync(self) -> None:
        """Make what was noted survive power loss; raises OSError."""
        with self._lock:
            if self._descriptor >= 0:
                os.fdatasync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _regular(descriptor: int) -> int:
    """Return the descriptor of a file; close any other and raise OSError."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.ENODEV, "it is no file")
    return descriptor


def _sums(entries: np.ndarray) -> U64:
    with np.errstate(over="ignore"):
        sums: U64 = (entries["digest"] ^ (entries["generation"] * _CHECK)) + _CHECK
    return sums


def bury(shelf: Shelf, reader: SlotReader, blocks: Blocks) -> int:
    """Write a tombstone over each record that is there, and free its slot; return how many were.

    Raises EngineError, after all were tried, if one cannot be written.
    """
    ledger = shelf.ledger
    sure = ledger.fence(blocks.places, blocks.generations)
    removed = _write_tombstones(shelf, blocks.places[sure], blocks.generations[sure])
    rest = blocks.take(~sure)
    if len(rest) and ledger.has_unknown:
        places = _fence_unknown(shelf, reader, rest)
        removed += _write_tombstones(shelf, places, np.full(len(places), UNKNOWN, np.uint64))
    return removed


def _fence_unknown(shelf: Shelf, reader: SlotReader, blocks: Blocks) -> U64:
    """Fence records that the store has not claimed, found by their headers; return their places.

    Only what has been seen to be one of them is fenced: what is fenced is a miss for its readers.
    """
    ledger, places = shelf.ledger, blocks.places.copy()
    lost = places == 0
    if lost.any():
        places[lost] = _search(shelf, reader, blocks.take(lost))
    found = blocks.at(places)
    _, there = ledger.holding(places, blocks.generations)
    for i in np.flatnonzero(there).tolist():
        there[i] = reader.holds(found.take(slice(i, i + 1)))
    places = places[there]
    mine: U64 = places[ledger.fence(places, np.full(len(places), UNKNOWN, np.uint64))]
    return mine


def _search(shelf: Shelf, reader: SlotReader, blocks: Blocks) -> U64:
    """Return the places of versions, 0 where there is none, among the slots not claimed."""
    places = np.zeros(len(blocks), np.uint64)
    wanted = {generation: i for i, generation in enumerate(blocks.generations.tolist())}
    sizes = np.minimum(shelf.record_bytes_of(blocks.lengths), shelf.slots_bytes)
    lengths = {shelf.class_bytes(size) for size in np.unique(sizes).tolist()}
    for number, shape in sorted(shelf.shapes.items()):
        if shape.slot_bytes in lengths:
            for place, header in _unclaimed(shelf, reader, number):
                if header.generation in wanted:
                    places[wanted[header.generation]] = place
    return places


def _unclaimed(shelf: Shelf, reader: SlotReader, number: int) -> Iterator[tuple[int, Header]]:
    """Read the headers in the slots of a super-block that are not claimed yet."""
    places, versions, slot_bytes = shelf.ledger.occupied(number)
    mine = versions == UNKNOWN
    for share in reader.shares(number, places[mine], versions[mine], slot_bytes):
        for place, item in reader.read(share):
            if not isinstance(item, Finding):
                yield place, item


def _write_tombstones(shelf: Shelf, places: U64, generations: U64) -> int:
    failure, page = "", tombstone_page()
    gone = np.ones(len(places), np.bool_)
    numbers, offsets = shelf.ledger.locate(places)
    for i, (number, offset) in enumerate(zip(numbers, offsets, strict=True)):
        try:
            reach("delete.begin")
            shelf.files.write(shelf.descriptors[number], page, offset)
            reach("delete.end")
        except OSError as error:
            shelf.complaints.log("removing from", name_of(number), error)
            failure = failure or f"a record in {name_of(number)} cannot be removed: {error}"
            shelf.ledger.unfence(int(places[i]), int(generations[i]))
            gone[i] = False
    shelf.note_written(numbers)
    shelf.ledger.free(places[gone])
    if failure:
        raise EngineError(failure, "see to the filesystem, then delete again")
    return int(gone.sum())

"""Checkpoints, and loading checkpoint plus journal back as one array of events.

A checkpoint holds one PUT or GHOST per row, LEFTOVER for versions that may be on disk without a
row, BEGIN too for those of them that have children, PINs and a SYNC. Its rows may be captured at
any moment after ``journal.<sequence>`` began: that journal is replayed over it, and replaying what
a row already shows changes nothing.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore import files
from kvstore.errors import CorruptStore
from kvstore.events import RECORD, RECORD_BYTES, Kind, Records, blank, intact, seal
from kvstore.journal import HEADER_BYTES, UNIT_STEP, VERSION, FileHeader, FileKind, parse_name
from kvstore.settle import Settled as Settled
from kvstore.settle import settle as settle

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)

_SUM_MASK = (1 << 64) - 1


class CheckpointWriter:
    """Writes ``checkpoint.<sequence>``, which counts only once :meth:`finish` has returned.

    Every method raises StoreFull, PermissionDenied, ReadOnly or EngineError; after that, or after
    :meth:`abandon`, nothing of the new checkpoint is left.
    """

    def __init__(self, directory: Path, sequence: int, uuid: bytes, epoch: int) -> None:
        self._path = FileKind.CHECKPOINT.path(directory, sequence)
        self._header = FileHeader(FileKind.CHECKPOINT, uuid, epoch, sequence, 0)
        self._descriptor = -1
        try:
            self._descriptor = files.create_temporary(self._path)
            files.write_all(self._descriptor, bytes(HEADER_BYTES))
        except OSError as error:
            raise self._failure(error) from error

    @property
    def bytes(self) -> int:
        """Size of the file so far."""
        return HEADER_BYTES + self._header.size * RECORD_BYTES

    def append(self, records: Records) -> None:
        """Seal ``records`` in place and write them."""
        seal(records)
        try:
            files.write_all(self._descriptor, np.ascontiguousarray(records).view(np.uint8).data)
        except OSError as error:
            raise self._failure(error) from error
        self._header = self._header._replace(
            size=self._header.size + len(records),
            sums=(self._header.sums + record_sum(records)) & _SUM_MASK,
        )

    def finish(self) -> None:
        """Write the header, sync, and give the file its name; durable when this returns."""
        try:
            os.pwrite(self._descriptor, self._header.encode(), 0)
            files.publish(self._path, self._descriptor)
        except OSError as error:
            raise self._failure(error) from error
        self._close()

    def abandon(self) -> None:
        """Remove what was written. May be called twice; does nothing after :meth:`finish`.

        Never raises: a disk that took no checkpoint may not give up a file either.
        """
        if self._descriptor >= 0:
            try:
                files.discard_temporary(self._path)
            except OSError as error:
                log.warning("cannot remove what was written of %s: %s", self._path, error)
            self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _failure(self, error: OSError) -> Exception:
        self.abandon()
        return files.translate(error, f"write {self._path}")


def record_sum(records: Records) -> int:
    """Return the sum of the checksums modulo 2^64: finds records lost for copies of others."""
    return int(records["checksum"].sum(dtype=np.uint64))


def remove_before(directory: Path, sequence: int) -> None:
    """Remove journals and checkpoints below ``sequence`` and half-written ones of any.

    Call it when ``checkpoint.<sequence>`` is durable. What stays is logged and does no harm.
    """
    for path in _before(directory, sequence):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot remove %s: %s", path, error)


def remove_leftovers(directory: Path, loaded: Loaded) -> None:
    """Remove what an end in the middle of a checkpoint left beside the files that count.

    Does nothing where those are torn or missing: then the others may still be of use. The names of
    those that count become durable first, for the end may have come before that.
    """
    if loaded.torn or loaded.missing or loaded.newer or not _before(directory, loaded.first):
        return
    try:
        files.sync_directory(directory)
    except OSError as error:
        log.warning("what was left in %s stays: %s", directory, error)
        return
    remove_before(directory, loaded.first)


def _before(directory: Path, sequence: int) -> list[Path]:
    found = []
    for path in directory.iterdir():
        known = parse_name(path.name.removesuffix(files.TEMPORARY))
        if known and (path.suffix == files.TEMPORARY or known[1] < sequence):
            found.append(path)
    return found


@dataclass(frozen=True, slots=True)
class Loaded:
    """What checkpoint and journal say.

    ``events`` come in order: rows of the checkpoint, then the journal. ``torn``: something of them
    is damaged or cut off. ``missing``: there is no checkpoint to begin with, or a journal of the
    chain is gone. ``newer``: a file of a later version was passed over. If torn or missing,
    ``events`` hold what could be read, good for links and the order of use but no longer complete,
    and the files must not be resumed: begin a new journal after ``sequence``, write a checkpoint.

    ``reason`` is for people, empty if all is well. ``sequence`` and ``end`` say where to resume; if
    torn or missing, ``sequence`` is the highest number in use (0 = none) and ``end`` is 0.
    ``clean``: the last record is the mark of a finished drain. ``boot_id`` is that of the last
    opening, None if unknown. ``earlier_journal_bytes`` counts the journals before the last one.
    ``first``: the number of the oldest file that counts, unless torn or missing.
    """

    events: Records
    torn: bool = False
    missing: bool = False
    newer: bool = False
    reason: str = ""
    sequence: int = 0
    end: int = 0
    clean: bool = False
    boot_id: bytes | None = None
    checkpoint_bytes: int = 0
    earlier_journal_bytes: int = 0
    first: int = 0


def load(directory: Path, uuid: bytes, epoch: int) -> Loaded:
    """Read the newest complete state, or else as much as can be read.

    Files of another store or epoch are ignored. Never raises, whatever lies in the directory.
    """
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        return Loaded(blank(0, Kind.EMPTY), missing=True, reason=_words(error))
    files_found = [_look(directory, *known) for known in map(parse_name, names) if known]
    highest = max((file.sequence for file in files_found), default=0)
    ours = [file for file in files_found if file.belongs_to(uuid, epoch)]
    size = sum(file.size for file in ours)
    try:
        reader = _Reader(size // RECORD_BYTES)
    except MemoryError:
        reason = f"no memory for {size} bytes of journal and checkpoint"
        return Loaded(blank(0, Kind.EMPTY), missing=True, reason=reason, sequence=highest)
    chain = _whole_chain(ours, reader)
    if chain is None:
        return _remains(ours, reader, highest)
    return _loaded(chain, ours, reader, highest)


@dataclass(slots=True)
class _File:
    """One file as found. ``damage`` says what is wrong with it; ``end`` is set by reading."""

    path: Path
    kind: FileKind
    sequence: int
    header: FileHeader | None = None
    size: int = 0
    damage: str = ""
    end: int = 0

    @property
    def newer(self) -> bool:
        return self.header is not None and self.header.version != VERSION

    @property
    def usable(self) -> bool:
        return self.header is not None and not self.newer

    def belongs_to(self, uuid: bytes, epoch: int) -> bool:
        """A file whose header is unreadable counts as ours: what it held is missing here."""
        return self.header is None or (self.header.uuid, self.header.epoch) == (uuid, epoch)


def _look(directory: Path, kind: FileKind, sequence: int) -> _File:
    file = _File(kind.path(directory, sequence), kind, sequence)
    try:
        with files.open_regular(file.path) as opened:
            file.size = os.fstat(opened.fileno()).st_size
            header = FileHeader.decode(os.pread(opened.fileno(), HEADER_BYTES, 0))
    except (OSError, CorruptStore) as error:
        file.damage = _words(error)
        return file
    if (header.kind, header.sequence) != (kind, sequence):
        file.damage = "the file has another name than its header says"
        return file
    file.header = header
    if file.newer:
        file.damage = f"version {header.version} is not supported"
    return file


def _words(error: OSError | CorruptStore) -> str:
    return error.message if isinstance(error, CorruptStore) else str(error.strerror)


class _Reader:
    """Reads the records of files one behind the other into one array, without a second copy."""

    def __init__(self, capacity: int) -> None:
        self._buffer = np.empty(capacity, RECORD)
        self.count = 0

    @property
    def events(self) -> Records:
        return self._buffer[: self.count]

    def read(self, file: _File) -> None:
        """Append the intact records of ``file`` and note what is wrong with it."""
        if not file.usable:
            return
        assert file.header is not None
        space = self._buffer[self.count :][: max(file.size - HEADER_BYTES, 0) // RECORD_BYTES]
        filled = self._fill(file, space.view(np.uint8).data) // RECORD_BYTES
        records = space[:filled]
        good = intact(records)
        check = _check_checkpoint if file.kind is FileKind.CHECKPOINT else _check_journal
        file.damage = file.damage or check(file, file.header, records, good)
        kept = int(np.count_nonzero(good))
        if not good[:kept].all():
            records[:kept] = records[good]
        self.count += kept

    @staticmethod
    def _fill(file: _File, view: memoryview) -> int:
        filled = 0
        try:
            with files.open_regular(file.path) as opened:
                while filled < len(view):
                    got = os.preadv(opened.fileno(), [view[filled:]], HEADER_BYTES + filled)
                    if not got:
                        break
                    filled += got
        except (OSError, CorruptStore) as error:
            file.damage = f"cannot read it behind byte {filled}: {_words(error)}"
        return filled


def _check_checkpoint(
    file: _File, header: FileHeader, records: Records, good: npt.NDArray[np.bool_]
) -> str:
    file.end = HEADER_BYTES + records.nbytes
    if file.size != HEADER_BYTES + header.size * RECORD_BYTES:
        return f"it has {file.size} bytes but should hold {header.size} records"
    if not good.all():
        return f"{np.count_nonzero(~good)} of {header.size} records are damaged"
    if record_sum(records) != header.sums:
        return "records are there twice or swapped with those of another file"
    return ""


def _check_journal(
    file: _File, header: FileHeader, records: Records, good: npt.NDArray[np.bool_]
) -> str:
    """Find the end: the first empty record, behind which all must be zero (see ``_make_room``)."""
    first_bad = int(np.argmin(good)) if not good.all() else len(good)
    file.end = HEADER_BYTES + first_bad * RECORD_BYTES
    if header.size < UNIT_STEP or header.size % UNIT_STEP or file.size % header.size:
        return f"it was cut off at {file.size} bytes"
    if first_bad == len(records):
        return f"it was cut off at {file.size} bytes, in the middle of its records"
    if records[first_bad:].view("<u8").any():
        return f"it is torn at byte {file.end}"
    return ""


def _whole_chain(ours: list[_File], reader: _Reader) -> list[_File] | None:
    """Read the newest checkpoint that verifies and all journals from there; None if none does.

    A damaged journal does not spoil the chain: it makes it torn. A journal is made before the
    checkpoint of its number, so the chain must reach the highest number of either.
    """
    highest = max((file.sequence for file in ours), default=0)
    for base in _bases(ours):
        reader.count = 0
        first = base.sequence if base else 1
        journals = [
            file for file in ours if file.kind is FileKind.JOURNAL and file.sequence >= first
        ]
        whole = journals and len(journals) == highest - first + 1
        if not whole or any(file.newer for file in journals):
            continue
        if base:
            reader.read(base)
            if base.damage:
                continue
        for file in journals:
            reader.read(file)
        return [base, *journals] if base else journals
    return None


def _bases(ours: list[_File]) -> list[_File | None]:
    """Return the checkpoints to begin with, newest first, then None: journal 1 alone."""
    checkpoints = [file for file in ours if file.kind is FileKind.CHECKPOINT and file.usable]
    return [*reversed(checkpoints), None]


def _loaded(chain: list[_File], ours: list[_File], reader: _Reader, highest: int) -> Loaded:
    events, last = reader.events, chain[-1]
    torn = any(file.damage for file in chain)
    return Loaded(
        events=events,
        torn=torn,
        newer=any(file.newer for file in ours),
        reason=_damages(ours),
        sequence=highest if torn else last.sequence,
        end=0 if torn else last.end,
        clean=not torn and _ends_clean(events, last.end),
        boot_id=_boot_id(events),
        checkpoint_bytes=sum(file.end for file in chain if file.kind is FileKind.CHECKPOINT),
        # With the room that they kept ahead, for they take it on the disk.
        earlier_journal_bytes=sum(
            file.size for file in chain[:-1] if file.kind is FileKind.JOURNAL
        ),
        first=chain[0].sequence,
    )


def _remains(ours: list[_File], reader: _Reader, highest: int) -> Loaded:
    """Read what is left when no chain is whole: newest usable checkpoint, journals from there."""
    bases = [file for file in _bases(ours) if file]
    first = bases[0].sequence if bases else 0
    reader.count = 0
    for file in bases[:1]:
        reader.read(file)
    for file in ours:
        if file.kind is FileKind.JOURNAL and file.sequence >= first:
            reader.read(file)
    missing = "no checkpoint with all journals that follow it" if ours else "no journal"
    return Loaded(
        events=reader.events,
        torn=any(file.damage for file in ours),
        missing=True,
        newer=any(file.newer for file in ours),
        reason="; ".join(filter(None, [missing, _damages(ours)])),
        sequence=highest,
        boot_id=_boot_id(reader.events),
    )


def _damages(ours: list[_File]) -> str:
    return "; ".join(f"{file.path.name}: {file.damage}" for file in ours if file.damage)


def _ends_clean(events: Records, end: int) -> bool:
    """Tell whether the last record is a CLOSE at its own place, ``end`` being behind it."""
    last = events[-1:]
    closes = (last["kind"] == Kind.CLOSE) & (last["place"] == end - RECORD_BYTES)
    return bool(closes.any())


def _boot_id(events: Records) -> bytes | None:
    opens = events[events["kind"] == Kind.OPEN]
    boot_id = opens["namespace"][-1].tobytes() if len(opens) else b""
    return boot_id if any(boot_id) else None

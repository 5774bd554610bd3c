"""What the engines over key/value libraries share: all of the contract but the library's calls.

A record is kept as small and large entries of one ordered table::

    h <name>                      the envelope header, alone: what a scan reads
    b <name> <piece, u16>         the header again, the number of the piece (u32), a part of the
                                  payload: 252 KiB, the last one what is left; the pieces that
                                  follow in number are those of the parity chunk, if it has one

    <name> = generation (u64), namespace (16), shard (u16), length of the key (u8), key

Numbers in names are big endian, so that the table is in the order of generations: what is written
together lies together, and what is evicted, mostly the oldest, leaves no holes everywhere. Numbers
in values are little endian. The header again in each piece lets a salvage find records when the
table's own pages are lost.

Payloads are cut into pieces for three reasons: a library that needs contiguous pages finds room for
64 of them also after much churn, one that returns ``bytes`` never makes a large one, and the copy
that puts header and payload side by side stays in the processor's cache. The entries of a batch are
written as one transaction.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from kvstore import parity
from kvstore.backends import base
from kvstore.backends.base import SCAN_BATCH, Finding, Leaving, Status
from kvstore.backends.scanning import ScanBatch
from kvstore.errors import (
    ConfigError,
    CorruptBlock,
    EngineError,
)
from kvstore.files import sync_directory, write_new
from kvstore.killpoints import reach
from kvstore.record import HEADER_PAGE, claimed_header_length, decode, image_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from typing_extensions import Buffer

    from kvstore.backends.base import Blocks
    from kvstore.record import Header

    Value = bytes | memoryview
    Get = Callable[[bytes], Value | None]
    Pair = tuple[bytes, Buffer]

log = logging.getLogger(__name__)

PIECE_BYTES = 63 * HEADER_PAGE
"""Payload in one piece: with header and number it fills 64 pages at most."""
HEADERS, PIECES = b"h", b"b"
_NUMBER = struct.Struct("<I")
_NOTHING = np.zeros(0, np.uint8)


class LibraryError(EngineError):
    """What a library reported, in our words: the status of the blocks that it concerns."""

    def __init__(
        self, message: str, status: Status = Status.FAILED, *, broken: bool = False
    ) -> None:
        super().__init__(message, "see to the disk, then open the store again")
        self.status = status
        self.broken = broken
        """What was written is in doubt: nothing more may be until the engine is opened again."""


class KeyValueEngine(base.Engine):
    """The contract over an ordered table of bytes. Subclasses keep the table in ``self.folder``.

    Their methods raise LibraryError, and nothing of their library.
    """

    io: ClassVar[str] = "buffered"
    """What ``stats`` says, and all that the setting ``io`` may be besides ``auto``."""

    @classmethod
    def record_sizes(cls, lengths: base.U32, *, parity: bool) -> npt.NDArray[np.int64]:
        # The header page stands for what a piece has besides payload; a parity chunk is one more.
        return super().record_sizes(lengths, parity=parity) + HEADER_PAGE * parity

    def __init__(self, context: base.EngineContext) -> None:
        super().__init__(context)
        if (io := context.options.get("io", "auto")) not in ("auto", self.io):
            raise ConfigError(f"the {self.name} engine has no io={io}", "use io=auto")
        self.folder = context.directory / self.name
        self._failed = ""
        self._logged: set[str] = set()

    # -- what an engine must bring ----------------------------------------------------------------

    @abstractmethod
    def make_table(self) -> None:
        """Make an empty table in the empty ``folder``, durably."""

    @abstractmethod
    def open_table(self) -> None:
        """Open what is there; raises OSError, KVStoreError. Never makes anything."""

    @abstractmethod
    def close_table(self) -> None:
        """Close it if it is open."""

    @abstractmethod
    def write(self, pairs: Iterable[Pair], *, sync: bool) -> None:
        """Write all pairs or none. Values are the writer's until the next pair is asked for."""

    def make_way(self) -> None:
        """Make what was removed lately usable, before a write without room is tried again."""

    @abstractmethod
    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove keys, all or none of them; an absent one is no error."""

    @abstractmethod
    def reading(self) -> contextlib.AbstractContextManager[Get]:
        """Give a function from key to value, None if absent. Values are valid inside only."""

    def reading_unverified(self) -> contextlib.AbstractContextManager[Get]:
        """Like :meth:`reading`, but damaged values are given as they are, as far as that can be."""
        return self.reading()

    @abstractmethod
    def after(self, key: bytes, stop: bytes, count: int) -> list[tuple[bytes, bytes]]:
        """Return the first ``count`` pairs in order with ``key`` < their key < ``stop``."""

    @abstractmethod
    def sync(self) -> None:
        """Make everything written survive power loss."""

    # -- opening and closing ----------------------------------------------------------------------

    @property
    def failed(self) -> str:
        return self._failed

    def create(self) -> None:
        self.make_folder(self.name)
        try:
            self.make_table()
            sync_directory(self.folder)
        except OSError as error:
            raise self.opening_failed(error) from error

    def open(self) -> None:
        self.close()
        self._failed = ""
        try:
            os.close(os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW))
            self.open_table()
        except OSError as error:
            raise self.opening_failed(error) from error
        self.is_open = True

    def close(self) -> None:
        self.is_open = False
        self.close_table()

    # -- the operations ---------------------------------------------------------------------------

    def put_many(self, blocks: Blocks, images: Sequence[memoryview], *, sync: bool) -> base.Written:
        self.require_open(writing=True)
        base.check_images(blocks, images)
        statuses = np.full(len(blocks), Status.FAILED, np.uint8)
        if len(blocks):
            self._put(blocks, images, statuses, sync=sync)
        return base.Written(np.zeros(len(blocks), np.uint64), statuses)

    def _put(
        self, blocks: Blocks, images: Sequence[memoryview], statuses: base.U8, *, sync: bool
    ) -> None:
        """Write a batch as one; if there is no room, block by block, as far as it goes."""
        statuses[:] = self._try(blocks, images, sync=sync)
        if statuses[0] != Status.FULL:
            return
        with contextlib.suppress(LibraryError):
            self.make_way()
        for i in range(len(blocks)):
            one = slice(i, i + 1)
            statuses[i] = self._try(blocks.take(one), images[one], sync=sync)

    def _try(self, blocks: Blocks, images: Sequence[memoryview], *, sync: bool) -> Status:
        if self._failed:
            return Status.FAILED
        try:
            reach("put.begin")
            self.write(_pairs(blocks, self.kept(images)), sync=sync)
            reach("put.end")
        except LibraryError as error:
            return self._note(error)
        return Status.OK

    def get_many_into(self, blocks: Blocks, images: Sequence[memoryview]) -> base.Read:
        self.require_open()
        base.check_images(blocks, images)
        statuses, filled = bytearray([Status.MISSING]) * len(blocks), [0] * len(blocks)
        columns = zip(_names(blocks), blocks.lengths.tolist(), images, strict=True)
        with self.reading() as get:
            for i, (name, length, image) in enumerate(columns):
                try:
                    got = _fill(image, length, name, get)
                except LibraryError as error:
                    statuses[i] = self._note(error)
                    continue
                if got is not None:
                    filled[i] = got
                    statuses[i] = Status.OK if got == len(image) else Status.DAMAGED
        return base.Read(np.frombuffer(statuses, np.uint8), np.array(filled, np.uint32))

    def reread(self, one: Blocks, record: memoryview) -> bool:
        self.require_open()
        (name,), length = _names(one), int(one.lengths[0])
        record[:] = bytes(len(record))
        payload, spare = record[HEADER_PAGE : HEADER_PAGE + length], record[image_bytes(length) :]
        known = False
        with self.reading_unverified() as get:
            for number, part in enumerate([*_cut(payload), *_cut(spare)]):
                with contextlib.suppress(LibraryError):
                    known |= _take_piece(get(_piece(name, number)), number, part, record)
        return known

    def contains_many(self, blocks: Blocks) -> base.Mask:
        self.require_open()
        found = [header is not None for header in self._headers(_names(blocks))]
        return np.array(found, np.bool_)

    def delete_many(self, blocks: Blocks, how: Leaving = Leaving.VERSION) -> int:
        self.require_open(writing=True)
        names, keys = _names(blocks), list[bytes]()
        headers = self._headers(names)
        for name, header, length in zip(names, headers, blocks.lengths.tolist(), strict=True):
            # The length that is asked for may be wrong, and so may a damaged header.
            spare = parity.chunk_bytes(length) if self.context.parity else 0
            count = max(piece_count(length) + piece_count(spare), _pieces_told(header))
            keys += [HEADERS + name, *(_piece(name, number) for number in range(count))]
        if keys:
            self._remove(keys)
        return sum(header is not None for header in headers)

    def _remove(self, keys: list[bytes]) -> None:
        if self._failed:
            raise EngineError(self._failed, "see to the disk, then open the store again")
        try:
            self.remove(keys)
        except LibraryError as error:
            self._note(error)
            raise

    def _headers(self, names: list[bytes]) -> list[bytes | None]:
        """Return copies of the small records; an empty one where it cannot be read."""
        found: list[bytes | None] = []
        with self.reading() as get:
            for name in names:
                try:
                    value = get(HEADERS + name)
                    found.append(None if value is None else bytes(value))
                except LibraryError as error:
                    self._note(error)
                    found.append(b"")
        return found

    def flush(self) -> None:
        self.require_open()
        if self.context.read_only:
            return
        if not self._failed:
            try:
                self.sync()
            except LibraryError as error:
                error.broken = True
                self._note(error)
        if self._failed:
            raise EngineError(self._failed, "see to the disk, then open the store again")

    def _note(self, error: LibraryError) -> Status:
        """Log an error, each once: a dead device must not fill the log as well."""
        if error.status != Status.FULL and error.message not in self._logged:
            self._logged.add(error.message)
            log.error("%s: %s (not logged again)", self.name, error.message)
        if error.broken and not self._failed:
            self._failed = f"{error.message}, so nothing more is written"
        return error.status

    # -- scanning and figures ---------------------------------------------------------------------

    def scan(self) -> Iterator[base.Scanned]:
        self.require_open()
        last, stop = HEADERS, bytes([HEADERS[0] + 1])
        while found := self.after(last, stop, SCAN_BATCH):
            batch = ScanBatch()
            for key, value in found:
                item = self._judge(key, value)
                if isinstance(item, Finding):
                    batch.report(item)
                else:
                    batch.add(item)
            yield batch.take()
            last = found[-1][0]
            self.require_open()

    def _judge(self, key: bytes, value: bytes) -> Header | Finding:
        path = f"{self.name} {key.hex()}"
        try:
            header = decode(value)
        except CorruptBlock as error:
            return Finding("bad-header", path, error.message)
        if header.store != self.context.store_uuid:
            return Finding("other-store", path, f"belongs to store {header.store.hex()}")
        if key != HEADERS + name_of(header):
            return Finding("wrong-name", path, f"holds block {header.key.hex()}")
        return header

    def where(self, blocks: Blocks) -> list[str]:
        return [f"{self.name} {(HEADERS + name).hex()}" for name in _names(blocks)]

    def put_right(self, finding: Finding, target: Path) -> str:
        """Move an entry that is no header of a record; the record may be whole all the same."""
        self.require_open(writing=True)
        _, _, name = finding.path.partition(" ")
        if not name:
            return ""
        key = bytes.fromhex(name)
        with self.reading() as get:
            value = get(key)
            if value is None:
                return ""
            write_new(target, [memoryview(value)])
        self._remove([key])
        return "moved"

    def notes(self) -> tuple[str, ...]:
        """Return sentences for ``status``."""
        return (self._failed,) if self._failed else ()


def name_of(header: Header) -> bytes:
    """Return the name under which a record is kept."""
    space = _space(header.namespace, header.shard, len(header.key))
    return header.generation.to_bytes(8, "big") + space + header.key


def _space(namespace: bytes, shard: int, key_length: int) -> bytes:
    return namespace + shard.to_bytes(2, "big") + bytes([key_length])


def _names(blocks: Blocks) -> list[bytes]:
    space = _space(blocks.namespace, blocks.shard, blocks.keys.shape[1])
    generations = blocks.generations.astype(">u8").tobytes()
    return [
        generations[at : at + 8] + space + key
        for key, at in zip(blocks.key_list(), range(0, 8 * len(blocks), 8), strict=True)
    ]


def _piece(name: bytes, number: int) -> bytes:
    return PIECES + name + number.to_bytes(2, "big")


def piece_count(length: int) -> int:
    """Return how many pieces so many bytes are cut into."""
    return -(-length // PIECE_BYTES)


def _pieces_told(header: bytes | None) -> int:
    """Return how many pieces an envelope tells of, those of its parity chunk included."""
    try:
        found = decode(header) if header else None
    except CorruptBlock:
        return 0
    if found is None:
        return 0
    return piece_count(found.stored_length) + piece_count(parity.spare_bytes_of(found))


def _pairs(blocks: Blocks, images: Iterable[memoryview]) -> Iterator[Pair]:
    """Yield what a batch is in the table. All large values share their memory."""
    room = memoryview(bytearray(HEADER_PAGE + _NUMBER.size + PIECE_BYTES))
    columns = zip(_names(blocks), blocks.lengths.tolist(), images, strict=True)
    for name, length, image in columns:
        header = image[: claimed_header_length(image)]
        start = len(header) + _NUMBER.size
        room[: len(header)] = header
        payload, spare = image[HEADER_PAGE : HEADER_PAGE + length], image[image_bytes(length) :]
        for number, part in enumerate([*_cut(payload), *_cut(spare)]):
            _NUMBER.pack_into(room, len(header), number)
            _copy(part, room[start : start + len(part)])
            yield _piece(name, number), room[: start + len(part)]
        yield HEADERS + name, header


def _cut(payload: memoryview) -> list[memoryview]:
    return [payload[at : at + PIECE_BYTES] for at in range(0, len(payload), PIECE_BYTES)]


def _fill(image: memoryview, length: int, name: bytes, get: Get) -> int | None:
    """Fill an image from the pieces of a record; return the bytes filled, None if none is there."""
    value = get(_piece(name, 0))
    if value is None:
        return None
    start = claimed_header_length(value)
    if not start:
        return 0
    target = np.frombuffer(image, np.uint8)
    target[:start] = np.frombuffer(value, np.uint8, start)
    target[start:HEADER_PAGE] = 0
    payload = target[HEADER_PAGE:]
    for number, at in enumerate(range(0, length, PIECE_BYTES)):
        if number:
            value = get(_piece(name, number))
        size = min(PIECE_BYTES, length - at)
        part = _part(value, number, start)[:size]
        if len(part) < size:
            return HEADER_PAGE + at
        # Unlike an assignment of slices of memory views this lets other threads run.
        np.copyto(payload[at : at + size], part)
    payload[length:] = 0
    return len(image)


def _take_piece(value: Value | None, number: int, part: memoryview, record: memoryview) -> bool:
    """Put what is in a piece where it belongs in a record; tell whether its envelope is good."""
    start = claimed_header_length(value) if value is not None else 0
    if value is None or not start:
        return False
    source = _part(value, number, start)[: len(part)]
    np.copyto(np.frombuffer(part, np.uint8)[: len(source)], source)
    try:
        decode(value)
    except CorruptBlock:
        return False
    record[:start] = value[:start]
    return True


def _part(value: Value | None, number: int, header_bytes: int) -> base.U8:
    """Return the payload in a piece, nothing of one that is not what it should be."""
    start = header_bytes + _NUMBER.size
    if value is None or len(value) < start:
        return _NOTHING
    same = _NUMBER.unpack_from(value, header_bytes)[0] == number
    return np.frombuffer(value, np.uint8, offset=start) if same else _NOTHING


def _copy(source: memoryview, target: memoryview) -> None:
    # Unlike an assignment of slices this lets other threads run.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))

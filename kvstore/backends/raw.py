"""Finding records in the files of an engine without its library, its metadata or a journal.

Every record carries its envelope, in key/value engines once in each piece. So a salvage looks for
envelopes: where slots begin, at the start of files, or by their magic anywhere in a stream of
bytes. What it says is believed only after its checksum, and a payload after its own. Reads are
pread alone: nothing is mapped, nothing is written, and a page that the device refuses reads as
zeros.

A payload may hold bytes that look like a record, put there by whoever wrote the block. So what
belongs to a record that was found is passed over.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import stat
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from kvstore.backends.keyvalue import PIECE_BYTES, name_of, piece_count
from kvstore.errors import CorruptBlock
from kvstore.parity import kept_bytes, repair, spare_bytes_of
from kvstore.record import HEADER_PAGE, MAGIC, Header, Verdict, decode, image_bytes, judge_as

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from kvstore.backends.base import EngineContext

PAGE = 4096
WINDOW = 4 << 20
BEFORE = 32
"""Bytes before an envelope that a reader may look at."""
MOST_CHOICES = 64
"""Of several copies of pieces, so many combinations are tried."""
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEIGHBOURS = ("journal.", "checkpoint.")
_NUMBER = struct.Struct("<I")

Identity = tuple[bytes, int, bytes]
"""Namespace id, shard, key."""


class Extent(NamedTuple):
    """A run of bytes: number of the file in :class:`RawFiles`, offset, length."""

    file: int
    offset: int
    length: int


Extents = tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class Raw:
    """A record by its envelope. ``pieces`` holds, for each piece of the payload, where copies of it
    lie; none where it was not found. ``whole`` is where it lies as an image, None in key/value
    engines; ``place`` where the engine looks for the record, if it lies there, else None. ``spare``
    is the parity chunk, as far as it was found."""

    header: Header
    head: bytes
    pieces: tuple[tuple[Extents, ...], ...]
    whole: Extent | None = None
    place: int | None = None
    spare: Extents = ()

    @property
    def identity(self) -> Identity:
        return self.header.namespace, self.header.shard, self.header.key

    @property
    def first(self) -> Extent | None:
        """Where it begins, or where the first of it that was found does."""
        pieces = (found[0][0] for found in self.pieces if found and found[0])
        return self.whole or next(pieces, None)


@dataclass(frozen=True, slots=True)
class Remains:
    """Bytes where a record should be and no envelope is good. ``length`` of them are worth keeping;
    identity and generation where a name tells them, the place where there is one."""

    extent: Extent
    reason: str
    identity: Identity | None = None
    generation: int = 0
    place: int | None = None


class RawFiles:
    """The regular files below a directory, by number, opened for reading and for nothing else.

    ``paths`` are relative to it. ``unlisted`` are directories that cannot be listed: what lies in
    them is not found.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.paths: list[str] = []
        self.sizes: list[int] = []
        self.unlisted: list[OSError] = []
        self.unreadable_pages = 0
        self._open = (-1, -1)
        for folder, folders, names in os.walk(root, onerror=self.unlisted.append):
            folders.sort()
            for name in sorted(names):
                path = os.path.relpath(os.path.join(folder, name), root)
                if not path.startswith(_NEIGHBOURS):
                    self._note(path)

    def _note(self, path: str) -> None:
        with contextlib.suppress(OSError):
            found = os.lstat(self.root / path)
            if stat.S_ISREG(found.st_mode):
                self.paths.append(path)
                self.sizes.append(found.st_size)

    def close(self) -> None:
        if self._open[1] >= 0:
            os.close(self._open[1])
        self._open = (-1, -1)

    def read(self, file: int, offset: int, size: int) -> bytes:
        """Return the bytes there, fewer at the end of the file."""
        buffer = bytearray(max(0, min(size, self.sizes[file] - offset)))
        return bytes(buffer[: self.read_into(file, offset, memoryview(buffer))])

    def read_into(self, file: int, offset: int, view: memoryview) -> int:
        """Fill ``view`` as far as the file goes; return how far. Never raises."""
        try:
            descriptor = self._descriptor(file)
        except OSError:
            return 0
        filled = 0
        while filled < len(view):
            try:
                got = os.preadv(descriptor, [view[filled:]], offset + filled)
            except OSError:
                got = self._read_page(descriptor, offset + filled, view[filled:])
            if not got:
                break
            filled += got
        return filled

    def _read_page(self, descriptor: int, offset: int, view: memoryview) -> int:
        """Read up to the next page; zeros stand for what the device refuses."""
        part = view[: PAGE - offset % PAGE]
        try:
            return os.preadv(descriptor, [part], offset)
        except OSError:
            self.unreadable_pages += 1
            part[:] = bytes(len(part))
            return len(part)

    def _descriptor(self, file: int) -> int:
        if self._open[0] != file:
            self.close()
            path = self.root / self.paths[file]
            try:
                descriptor = os.open(path, _FLAGS | os.O_NOATIME)
            except PermissionError:
                # Only the owner may leave the time of access alone.
                descriptor = os.open(path, _FLAGS)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                return self._nothing()
            self._open = (file, descriptor)
        return self._open[1]

    @staticmethod
    def _nothing() -> int:
        raise FileNotFoundError


class Salvage(ABC):
    """The raw reader of one engine. ``seen(bytes)`` is called as the search goes on.

    ``in_place``: records can stay where they lie, and a new index is all that is needed.
    ``forgets``: the files may hold records that were deleted or evicted long ago.
    """

    in_place: ClassVar[bool] = False
    forgets: ClassVar[bool] = True

    def __init__(self, context: EngineContext) -> None:
        self.context = context
        self.files = RawFiles(context.directory)
        self.seen: Callable[[int], object] = lambda _count: None

    @abstractmethod
    def find(self) -> Iterator[Raw | Remains]:
        """Yield every record whose envelope is good, damaged payloads and old versions among them,
        of any store; and what remains of others. Never raises, whatever the bytes are."""

    def options(self) -> Mapping[str, object]:
        """Return the recorded options of the engine as its files show them."""
        return {}

    def agrees(self) -> bool:
        """Tell whether the options of the context are such as the files show."""
        return self.context.options.keys() == self.options().keys()

    def buried(self, header: Header) -> bool:
        """Tell whether the files say that this version was deleted."""
        return False

    def remove(self, extent: Extent) -> None:
        """Take out of the engine what lies there; for readers with ``in_place``. Raises OSError."""
        raise NotImplementedError

    def rename(self, raws: list[Raw]) -> bool:
        """Put records where the engine finds them, if a name is all that they lack; else False.

        What has such a name goes, unless it is among them. Raises OSError.
        """
        return not raws

    def load(self, raw: Raw, image: memoryview) -> str:
        """Fill the image with the record; return why it is damaged, "" if it is whole.

        The image has ``record.image_bytes`` of the stored length. A lost chunk is brought back.
        """
        lacking = [number for number, found in enumerate(raw.pieces) if not found]
        reason = (
            f"piece {lacking[0]} of {len(raw.pieces)} is nowhere to be found" if lacking else ""
        )
        choices = itertools.product(*raw.pieces)  # none at all where a piece is lacking
        for choice in itertools.islice(choices, MOST_CHOICES):
            found = self._fill(raw, choice, image)
            if not found:
                return ""
            reason = reason or found
        return "" if raw.spare and self._bring_back(raw, image) else reason

    def _bring_back(self, raw: Raw, image: memoryview) -> bool:
        """Fill the image from the first copy of each piece and the parity chunk, if that helps."""
        header, size = raw.header, len(image)
        whole = memoryview(mmap.mmap(-1, kept_bytes(header)))
        step = PIECE_BYTES if raw.whole is None else header.stored_length
        whole[: len(raw.head)] = raw.head
        for number, copies in enumerate(raw.pieces):
            start = HEADER_PAGE + number * step
            room = whole[start : HEADER_PAGE + min((number + 1) * step, header.stored_length)]
            self._read_run(copies[0] if copies else (), room)
        self._read_run(raw.spare, whole[size:])
        if not repair(whole, header) or judge_as(header, whole, size)[0] != Verdict.OK:
            return False
        np.copyto(np.frombuffer(image, np.uint8), np.frombuffer(whole, np.uint8)[:size])
        return True

    def _read_run(self, extents: Extents, room: memoryview) -> int:
        """Fill ``room`` from extents one after the other as far as they go; return how far."""
        at = 0
        for extent in extents:
            part = room[at : at + extent.length]
            filled = self.files.read_into(extent.file, extent.offset, part)
            at += filled
            if filled < len(part):
                break
        return at

    def _fill(self, raw: Raw, choice: tuple[Extents, ...], image: memoryview) -> str:
        header = raw.header
        image[: len(raw.head)] = raw.head
        payload = image[HEADER_PAGE : HEADER_PAGE + header.stored_length]
        run = tuple(itertools.chain.from_iterable(choice))
        at = HEADER_PAGE + self._read_run(run, payload)
        verdict, _, reason = judge_as(header, image, at)
        rest = np.frombuffer(image, np.uint8)
        rest[len(raw.head) : HEADER_PAGE] = 0
        rest[HEADER_PAGE + header.stored_length :] = 0
        return "" if verdict == Verdict.OK else reason

    def close(self) -> None:
        self.files.close()


def spare_of(header: Header, whole: Extent) -> Extents:
    """Return where the parity chunk lies of a record that lies in one piece."""
    start, size = image_bytes(header.stored_length), spare_bytes_of(header)
    size = min(size, max(whole.length - start, 0))
    return (Extent(whole.file, whole.offset + start, size),) if size else ()


def new_image(length: int) -> memoryview:
    """Return memory for the image of a payload, aligned as O_DIRECT wants it."""
    return memoryview(mmap.mmap(-1, image_bytes(length)))


class Hit(NamedTuple):
    """An envelope in a stream: where it begins, what stands before and behind it."""

    at: int
    header: Header
    head: bytes
    before: bytes
    after: bytes


class Search:
    """Yields the envelopes in a stream of ``size`` bytes. Whoever takes them may raise
    ``position``, to pass over what belongs to the one just found."""

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        self.position = 0
        self.read = read
        self._size = size

    def __iter__(self) -> Iterator[Hit]:
        while self.position < self._size:
            begun, start = self.position, max(self.position - BEFORE, 0)
            window = self.read(start, WINDOW)
            last = start + len(window) >= self._size or len(window) < WINDOW
            end = len(window) if last else len(window) - HEADER_PAGE - _NUMBER.size
            yield from self._look(window, start, end)
            self.position = max(self.position, start + end)
            if self.position <= begun:
                return

    def _look(self, window: bytes, start: int, end: int) -> Iterator[Hit]:
        at = window.find(MAGIC, self.position - start)
        while 0 <= at < end:
            self.position = start + at + len(MAGIC)
            with contextlib.suppress(CorruptBlock):
                header = decode(memoryview(window)[at : at + HEADER_PAGE])
                size = int.from_bytes(window[at + 6 : at + 8], "little")
                head = window[at : at + size]
                before = window[max(0, at - BEFORE) : at]
                after = window[at + size : at + size + _NUMBER.size]
                self.position = start + at + size
                yield Hit(start + at, header, head, before, after)
            at = window.find(MAGIC, max(self.position - start, 0))


def piece_of(hit: Hit) -> tuple[int, int] | None:
    """Return number and bytes of the piece whose envelope this is, None if it can be no piece."""
    if len(hit.after) < _NUMBER.size:
        return None
    number, size = _NUMBER.unpack(hit.after)[0], hit.header.stored_length
    at = number
    if number >= piece_count(size):
        # Those of the parity chunk are counted on from those of the payload.
        at, size = number - piece_count(size), spare_bytes_of(hit.header)
    if at * PIECE_BYTES >= size:
        return None
    return number, min(PIECE_BYTES, size - at * PIECE_BYTES)


def ends_with_number(before: bytes, number: int) -> bool:
    """Tell whether the key of a piece stands right before its value."""
    return before.endswith(number.to_bytes(2, "big"))


class Pieces:
    """Puts records of key/value engines together from pieces that are found in any order."""

    def __init__(self) -> None:
        self._found: dict[bytes, dict[int, list[Extents]]] = {}

    def know(self, head: bytes) -> None:
        """Note that there is such a record."""
        self._found.setdefault(head, {})

    def add(self, head: bytes, number: int, extents: Extents, *, sure: bool) -> None:
        """Note a piece; those that are sure are tried before those that may be something else."""
        copies = self._found.setdefault(head, {}).setdefault(number, [])
        copies.insert(0 if sure else len(copies), extents)

    def records(self) -> Iterator[Raw]:
        while self._found:
            head, found = self._found.popitem()
            header = decode(head)
            count = piece_count(header.stored_length)
            total = count + piece_count(spare_bytes_of(header))
            pieces = tuple(tuple(found.get(n, ())) for n in range(total))
            spare = (
                tuple(run for copies in pieces[count:] for run in copies[0])
                if all(pieces[count:])
                else ()
            )
            yield Raw(header, head, pieces[:count], spare=spare)


class Names:
    """The names of records that a library's own table lists. None at all where it says nothing.

    A record up to the newest of them that is not among them was deleted; a newer one may have come
    in after that state of the table.
    """

    def __init__(self, names: Iterable[bytes]) -> None:
        self._names = frozenset(names)
        self._newest = max((name[:8] for name in self._names), default=b"")

    def lacks(self, header: Header) -> bool:
        name = name_of(header)
        return name[:8] <= self._newest and name not in self._names


class TableSalvage(Salvage):
    """For key/value engines: what their own table says of deletions is in ``names``."""

    @property
    @abstractmethod
    def names(self) -> Names:
        """What the table lists, as far as it can be read; looked at once."""

    def buried(self, header: Header) -> bool:
        return self.names.lacks(header)


class StreamSalvage(TableSalvage):
    """For files in which the value of a piece lies in one run of bytes."""

    @abstractmethod
    def wanted(self, path: str) -> bool:
        """Tell whether a file may hold records."""

    def is_key(self, before: bytes, number: int) -> bool:
        """Tell whether the bytes before a value end as those before a piece of that number do."""
        return ends_with_number(before, number)

    def behind(self, read: Callable[[int, int], bytes], start: int, length: int) -> int:
        """Return where the search goes on behind a piece whose payload begins at ``start``."""
        return start + length

    def find(self) -> Iterator[Raw | Remains]:
        pieces = Pieces()
        for file, path in enumerate(self.files.paths):
            if self.wanted(path):
                self.search(file, pieces)
        yield from pieces.records()

    def search(self, file: int, pieces: Pieces) -> None:
        """Collect the pieces in one file."""

        def read(offset: int, size: int) -> bytes:
            return self.files.read(file, offset, size)

        def extents(start: int, length: int) -> Extents:
            return (Extent(file, start, length),)

        self.collect(Search(read, self.files.sizes[file]), extents, pieces)

    def collect(
        self, search: Search, extents: Callable[[int, int], Extents], pieces: Pieces
    ) -> None:
        """Collect the pieces in a stream; ``extents`` says where its bytes lie in files."""
        told = 0
        for hit in search:
            pieces.know(hit.head)
            found = piece_of(hit)
            if found is not None:
                number, length = found
                start = hit.at + len(hit.head) + _NUMBER.size
                sure = self.is_key(hit.before, number)
                pieces.add(hit.head, number, extents(start, length), sure=sure)
                if sure:
                    search.position = self.behind(search.read, start, length)
            self.seen(search.position - told)
            told = search.position
        self.seen(max(0, search.position - told))

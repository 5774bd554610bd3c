"""The contract between the store and an engine.

An engine keeps records on one kind of storage and finds them again; it knows nothing of policies,
namespaces' meaning, leases or clients. It is synchronous, batch first, called from several worker
threads at once, and never sees a Python object per block other than the buffer it fills.

A *record image* is the form in which a record travels: one 4 KiB page that begins with the envelope
header, then the payload, padded with zeros to 4 KiB. Images lie in 4 KiB-aligned memory, so that a
file-like engine moves one with a single O_DIRECT call. Key/value engines take the header and the
unpadded payload out of it. Neither side keeps a reference to an image after the call.

An image that is passed for a block has exactly ``record.image_bytes(length)`` bytes, and there are
as many images as blocks; anything else is a mistake of the caller and raises ValueError before
anything is moved (:func:`check_images`).
"""

from __future__ import annotations

import errno
import mmap
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from kvstore.errors import (
    CorruptStore,
    EngineError,
    KVStoreError,
    PermissionDenied,
    ReadOnly,
    StoreExists,
    StoreNotFound,
)
from kvstore.files import sync_directory
from kvstore.parity import protect, record_bytes_of, spare_bytes
from kvstore.record import HEADER_PAGE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from kvstore.backends.raw import Salvage
    from kvstore.keys import KeyArray

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

SCAN_BATCH = 4096


class Status(IntEnum):
    """What became of one block of a batch. A miss is a value, never an error."""

    OK = 0
    MISSING = 1
    """No record is there."""
    DAMAGED = 2
    """Something is there, but no whole record could be read (short, unreadable, not a file)."""
    FULL = 3
    """No space on the device, or over a quota."""
    UNREADABLE = 5
    """The device refuses to read it, perhaps only for now."""
    FAILED = 4
    """The operating system or the library failed; the log has the details."""
    NEED_ROOM = 6
    """Not written: something must leave first, see :meth:`Engine.room`."""


class Leaving(IntEnum):
    """How a record leaves: what a rebuild of the index may find of its block afterwards."""

    VERSION = 0
    """Never this version; others of the block may count."""
    BLOCK = 1
    """Neither this version nor an older one: the block was deleted, or has a newer version."""
    EVICTED = 2
    """By policy: where removing costs nothing, nothing need be written, and it may come back."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of one namespace and one shard, as columns of equal length n.

    ``lengths`` are payload bytes as stored, ``generations`` the store-wide version numbers,
    ``places`` what ``put_many`` returned (0 for engines that find by key).
    """

    namespace: bytes
    shard: int
    keys: KeyArray
    lengths: U32
    generations: U64
    places: U64

    def __len__(self) -> int:
        return len(self.keys)

    def key_list(self) -> list[bytes]:
        """Return the keys one by one, for engines whose library wants them so."""
        size, blob = self.keys.shape[1], self.keys.tobytes()
        return [blob[at : at + size] for at in range(0, len(blob), size)]

    def take(self, which: npt.NDArray[np.intp] | Mask | slice) -> Blocks:
        """Return the chosen blocks, in that order."""
        return Blocks(
            self.namespace,
            self.shard,
            self.keys[which],
            self.lengths[which],
            self.generations[which],
            self.places[which],
        )

    def at(self, places: U64) -> Blocks:
        """Return the same blocks in other places."""
        return replace(self, places=places)


@dataclass(frozen=True, slots=True)
class Written:
    """Result of ``put_many``: a place (u64) and a :class:`Status` (u8) for each block."""

    places: U64
    statuses: U8


@dataclass(frozen=True, slots=True)
class Read:
    """Result of ``get_many_into``: a :class:`Status` and the bytes that were filled, per block.

    OK means that the whole image was filled, DAMAGED that the first ``filled`` bytes of it were;
    the rest of the image holds whatever it held before.
    """

    statuses: U8
    filled: U32


@dataclass(frozen=True, slots=True)
class Scanned:
    """At most 4,096 records found by ``scan``, as columns; payloads have not been read.

    ``keys`` and ``parents`` have 64 columns, of which the first ``key_lengths`` and
    ``parent_lengths`` count (parent length 0 = no parent). ``written_ns`` is nanoseconds since the
    epoch. Only records with a valid header are listed; the rest is in ``strange``.
    """

    namespaces: U8
    shards: npt.NDArray[np.uint16]
    key_lengths: U8
    keys: U8
    parent_lengths: U8
    parents: U8
    lengths: U32
    places: U64
    generations: U64
    written_ns: U64
    labelled: Mask
    strange: tuple[Finding, ...] = ()

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something in the engine's files that is not as it should be. ``kind`` is a stable id.

    ``identity`` is (namespace, shard, key, generation) where the name of a file tells it, although
    its content does not.
    """

    kind: str
    path: str
    detail: str
    identity: tuple[bytes, int, bytes, int] | None = None


@dataclass(frozen=True, slots=True)
class Stats:
    """``overhead_bytes``: what ``du`` counts besides records (directories, indexes), a lower bound
    until the engine has looked everywhere; with fixed slots, also what they lose to rounding, but
    not free slots. ``file_bytes``: what the files take in all, where they are made ahead of use,
    else 0. ``io``: one of ``memory``, ``direct``, ``buffered``, ``mmap``; ``notes`` are sentences
    for ``status``, ``problems`` those for which somebody must do something."""

    overhead_bytes: int
    io: str
    notes: tuple[str, ...] = ()
    file_bytes: int = 0
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Room:
    """How to make room for a record in an engine with fixed slots.

    A *group* is what shares the upper 32 bits of its places. Every record that leaves one of
    ``own`` makes room for one; one of ``others`` must lose all its records first (see
    :meth:`Engine.close_group`). ``free``: records for which there is room now. Closed groups count
    nowhere.
    """

    own: U32
    others: U32
    free: int


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the store must know about an engine; callers never test for a class."""

    preferred_threads: int
    atomic_batch: bool
    """A batch is written whole or not at all."""
    durable_without_flush: bool
    """What ``put_many`` wrote survives power loss without ``flush``."""
    alignment: int
    """Records start at multiples of this many bytes (1 = no matter)."""
    fixed_slots: bool
    """Records lie in slots that are reused in place."""
    space_factor: float
    """Physical bytes for one live byte in steady state."""
    frees_space: bool
    """Deleting gives space back to the filesystem."""
    contained: bool
    """Damage on disk cannot end the process."""
    persistent: bool = True
    """Records outlive the process."""


@dataclass(frozen=True, slots=True)
class EngineContext:
    """Where an engine lives: its directory, the uuid of the store, its own options.

    ``capacity``: bytes that the store may take, 0 = whatever the filesystem has. ``parity``:
    records have a parity chunk (:mod:`kvstore.parity`).
    """

    directory: Path
    store_uuid: bytes
    options: Mapping[str, object] = field(default_factory=dict)
    read_only: bool = False
    capacity: int = 0
    parity: bool = False


class Engine(ABC):
    """One way to keep records. Errors of the library are translated to ``kvstore.errors``.

    Rules, proved by :class:`kvstore.testing.EngineTests`: a put that returned OK is found; after a
    crash a record is whole or absent, and damage never spreads to another record; reads allocate no
    payload; ``close`` twice is fine; ``delete_many`` of an absent key is no error; ``scan``
    survives concurrent writes; opening something that is gone, short or newer never creates an
    empty one. While it is not open, every method but ``create``, ``open`` and ``close`` raises
    EngineError; in a read-only context those that write raise ReadOnly.
    """

    name: str
    capabilities: Capabilities
    recorded_options: ClassVar[Mapping[str, object]] = {}
    """Options that shape the files, with their defaults: ``create`` fixes them for good, so the
    store keeps them in STORE.json and passes them to every later ``open``."""

    @classmethod
    def options_for(cls, capacity: int) -> Mapping[str, object]:
        """Return what a new store of that capacity (bytes) records of the options."""
        return cls.recorded_options

    @classmethod
    def salvage(cls, context: EngineContext) -> Salvage:
        """Return a reader that finds records in the files without opening the engine.

        Optional: without it a store of this engine cannot be recovered. Raises EngineError.
        """
        where = context.directory
        raise EngineError(f"the {cls.name} engine in {where} has no raw reader", "use a copy")

    def __init__(self, context: EngineContext) -> None:
        self.context = context
        self.is_open = False

    def suits(self, capacity: int) -> bool:
        """Tell whether the engine keeps to another capacity (bytes) without being opened again."""
        return False

    def require_open(self, *, writing: bool = False) -> None:
        """Raise EngineError if the engine is closed, ReadOnly if it must not be written."""
        if not self.is_open:
            raise EngineError(f"the {self.name} engine in {self.context.directory} is closed")
        if writing and self.context.read_only:
            where = self.context.directory
            raise ReadOnly(f"the {self.name} engine in {where} was opened read-only")

    def make_folder(self, name: str) -> None:
        """Make a folder, the mark that an engine is here, in ``context.directory``, durably.

        Raises StoreExists where that is not empty, and what :meth:`opening_failed` makes of errors.
        """
        where = self.context.directory
        try:
            if set(os.listdir(where)) - {"lost+found"}:
                raise StoreExists(f"{where} is not empty", "choose an empty directory")
            os.mkdir(where / name, 0o700)
            sync_directory(where)
        except OSError as error:
            raise self.opening_failed(error) from error

    def opening_failed(self, error: OSError) -> KVStoreError:
        """Return what to raise when making or opening an engine failed."""
        where = self.context.directory
        if isinstance(error, FileNotFoundError):
            message = f"no {self.name} engine in {where}: {error.filename} is missing"
            return StoreNotFound(message, "look whether its disk is mounted")
        if isinstance(error, PermissionError):
            return PermissionDenied(f"{where} may not be opened", "run as the owner of the store")
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            return CorruptStore(f"{error.filename} in {where} is no directory", "move it away")
        return EngineError(f"{where} cannot be opened: {error.strerror}")

    @property
    def failed(self) -> str:
        """Why nothing more is written until the engine is opened again: a sync failed; else ""."""
        return ""

    @property
    def largest_image(self) -> int:
        """The largest record (bytes, with its parity chunk if it has one) that can be put."""
        return 1 << 62

    @classmethod
    def record_sizes(cls, lengths: U32, *, parity: bool) -> npt.NDArray[np.int64]:
        """Return the bytes that records of payloads of these lengths count as in a store, with or
        without a parity chunk."""
        return record_bytes_of(lengths, parity=parity)

    def record_bytes_of(self, lengths: U32) -> npt.NDArray[np.int64]:
        """Return the :meth:`record_sizes` of records in this engine."""
        return self.record_sizes(lengths, parity=self.context.parity)

    def kept(self, images: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yield images as ``put_many`` is to keep them: with a parity chunk behind where records
        have one. Each is valid until the next is asked for."""
        if not self.context.parity:
            yield from images
            return
        room = memoryview(b"")
        for image in images:
            size = len(image) + spare_bytes(len(image))
            if len(room) < size:
                room = memoryview(mmap.mmap(-1, size))
            yield protect(image, room)

    @abstractmethod
    def create(self) -> None:
        """Make an empty engine in ``context.directory``, durably. Raises StoreExists."""

    @abstractmethod
    def open(self) -> None:
        """Start using what ``create`` made. Raises StoreNotFound, CorruptStore, EngineError."""

    @abstractmethod
    def close(self) -> None:
        """Stop using it. May be called twice."""

    @abstractmethod
    def put_many(self, blocks: Blocks, images: Sequence[memoryview], *, sync: bool) -> Written:
        """Write records; with ``sync`` those with status OK survive power loss when this returns.

        Images are complete: header encoded, padding zeroed. A new generation of a key goes to
        another place than the old one and leaves it untouched. Blocks are written in the given
        order as far as that matters (a full device takes the first ones); those that fail leave
        nothing behind and do not disturb the others. Status FULL, or NEED_ROOM where :meth:`room`
        knows how to make some.
        """

    @abstractmethod
    def get_many_into(self, blocks: Blocks, images: Sequence[memoryview]) -> Read:
        """Fill each image with the record at (key, generation, place). Nothing is verified here,
        so the caller judges every image before it believes it."""

    def reread(self, one: Blocks, record: memoryview) -> bool:
        """Fill ``record`` with all that can be read of one record and its parity chunk; zeros stand
        for the rest. Returns whether anything is there; never raises.

        Optional: without it a record that lost a chunk is not brought back.
        """
        return False

    @abstractmethod
    def contains_many(self, blocks: Blocks) -> Mask:
        """Tell for each block whether a record of that key and generation is there."""

    @abstractmethod
    def delete_many(self, blocks: Blocks, how: Leaving = Leaving.VERSION) -> int:
        """Remove records of these keys and generations; return how many were there.

        Place 0 is unknown: a version that a kill left behind.

        Raises EngineError, after all were tried, if one is there and cannot be removed: a deletion
        must not be acknowledged while a rebuild could bring the record back.
        """

    def claim(  # noqa: B027
        self, places: U64, lengths: U32, generations: U64, *, complete: bool
    ) -> None:
        """Learn which records count, after an opening; ``complete``: these are all there are.

        For engines that keep no table of their own: what was there at the opening and is neither
        claimed nor written since counts as taken until a complete claim, and is free from then on.
        """

    def allow(self, physical_bytes: int) -> None:  # noqa: B027
        """Learn how many bytes the files may take on the device; called once a second.

        For engines that make files ahead of use: they make no more beyond it, and give back those
        that hold no record.
        """

    def room(self, length: int) -> Room:
        """Tell how to make room for a payload of that length, after a NEED_ROOM."""
        none = np.zeros(0, np.uint32)
        return Room(none, none, 0)

    def close_group(self, group: int) -> bool:
        """Put nothing more into a group; return whether it is empty: then whoever needs it has it.
        May be called again to ask."""
        return False

    def reopen_group(self, group: int) -> None:  # noqa: B027
        """Take :meth:`close_group` back, unless the group has become empty."""

    def forget(self, namespace: bytes) -> None:  # noqa: B027
        """Give up what is kept for a namespace that has no records left, such as directories.

        Optional: without it an engine works, but grows a little with every namespace it has seen.
        Safe while others put into that namespace.
        """

    @abstractmethod
    def scan(self) -> Iterator[Scanned]:
        """Find every record from its header alone, in batches of at most 4,096, in any order.

        A record that is put or deleted meanwhile may be listed or not; all others are. Raises
        EngineError when the engine's own structure cannot be read.
        """

    def where(self, blocks: Blocks) -> list[str]:
        """Return where each record lies, for people: a path below the engine's directory."""
        return [f"place {place}" for place in blocks.places.tolist()]

    def put_right(self, finding: Finding, target: Path) -> str:
        """Repair what ``scan`` or ``check`` found, without losing a byte; offline, nobody else has
        the engine open.

        What has no place in the engine moves to ``target``, a name in an existing directory, which
        has it durably before the engine lets go of it. Returns what was done: ``moved`` there,
        ``mended`` where it was, or "" for nothing. Raises OSError, EngineError.
        """
        return ""

    @abstractmethod
    def flush(self) -> None:
        """Make everything that ``put_many`` and ``delete_many`` returned survive power loss.

        Raises EngineError if that failed, and from then on at every call until the engine is opened
        again: what was written since the last good flush is never claimed durable by a later one.
        """

    @abstractmethod
    def stats(self) -> Stats:
        """Return figures for ``status``; cheap enough to be called once a second."""

    @abstractmethod
    def check(self) -> list[Finding]:
        """Look for structural faults, without reading records."""


def check_images(blocks: Blocks, images: Sequence[memoryview]) -> None:
    """Raise ValueError unless there is one image of the right size for each block."""
    pages = (blocks.lengths.astype(np.int64) + HEADER_PAGE - 1) // HEADER_PAGE + 1
    if [len(image) for image in images] != (pages * HEADER_PAGE).tolist():
        raise ValueError(f"{len(images)} images do not fit the lengths of {len(blocks)} blocks")

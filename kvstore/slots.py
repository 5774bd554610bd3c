"""Slots: space cut into chunks, chunks into slots of one size; which are free, and who reads them.

A *chunk* is given to a *size class* when that class lacks room, and cut into slots of that class. A
slot holds one record image: the header, then the payload in 4 KiB pages. Classes hold 1 to 8 pages
exactly, then eight per doubling, so at most an eighth of a slot is lost; the last class fills a
chunk. A chunk that is empty again may go to another class.

A slot is FREE, WRITING (allocated, its bytes are on their way) or COMMITTED. References count who
uses its bytes; a slot with references cannot be freed.

A *place* names a slot for others: a u64, chunk << 32 | number in the chunk. Its *id* (i64), chunk *
stride + number, is where the arrays have it; references are counted by id, for that is done most
often. Questions and answers are arrays, one call for a whole batch; there is no object per slot.
Nothing here knows what the space is: memory, or files. One thread owns an arena. Memory: 5 bytes
for each slot of the smallest class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.errors import Busy, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

Sizes = U32 | I64
Array = TypeVar("Array", bound=npt.NDArray[np.generic])

PAGE = 4096
FREE = 0
WRITING = 1
COMMITTED = 2
BLANK = -1
"""The class of a chunk that is given to none."""
MOST_REFERENCES = 0x3FFF
"""To one slot."""

_EXACT_CLASSES = 8
_MOST_SLOTS = 1 << 16
# Made once: a numpy scalar costs as much as a small operation.
_SHIFT, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
# A count is kept as the i16 _NONE + references, and as 0 for a free slot. A quarter of what an i16
# holds lies between these, above and below, so that no batch of _AT_ONCE leads from a free slot,
# from too few or too many references to a count that is in order: one look afterwards is enough.
_NONE = -0x8000
_FULL = _NONE + MOST_REFERENCES
_AT_ONCE = 0x3FFF
_ONE = np.int16(1)


class NoFreeSlots(Busy):
    """``lacking``: how many slots each class is short of, once all blank chunks are given."""

    def __init__(self, lacking: Mapping[int, int]) -> None:
        super().__init__(f"{sum(lacking.values())} slots are lacking", "try again later")
        self.lacking = dict(lacking)


class Slots(ABC):
    """What users of slots may rely on, whoever keeps them."""

    @abstractmethod
    def allocate(self, sizes: Sizes) -> U64:
        """Return a WRITING slot for each record image (bytes): all of them or none.

        Raises NoFreeSlots; UsageError for an image that fits no slot.
        """

    @abstractmethod
    def commit(self, places: U64) -> None:
        """Take slots from WRITING to COMMITTED. Raises ValueError for others."""

    @abstractmethod
    def free(self, places: U64) -> None:
        """Give slots back. Raises ValueError for one that is free, named twice or referenced."""

    @abstractmethod
    def ids(self, places: U64) -> I64:
        """Return the ids of slots. Raises ValueError for a place that is none."""

    @abstractmethod
    def incr(self, ids: I64) -> None:
        """Add a reference for each entry; a slot may occur often.

        Raises ValueError for a free slot or over MOST_REFERENCES, IndexError for an id that is
        none; nothing is changed then.
        """

    @abstractmethod
    def decr(self, ids: I64) -> None:
        """Give back a reference for each entry. Raises ValueError if a slot is free or has fewer,
        IndexError for an id that is none; nothing is changed then."""

    @abstractmethod
    def counts(self, ids: I64) -> U16:
        """Return the references of each slot, 0 for a free one."""

    @abstractmethod
    def offsets(self, places: U64) -> I64:
        """Return where each slot begins, in bytes from the start of the space."""


class Arena(Slots):
    """``total_bytes`` of space in chunks of ``chunk_bytes`` (a multiple of 4 KiB; what remains is
    not used). ``header`` is what a record image has before its payload, in bytes."""

    def __init__(self, total_bytes: int, chunk_bytes: int, header: int = PAGE) -> None:
        if total_bytes < 0 or header % PAGE or chunk_bytes % PAGE or chunk_bytes < header + PAGE:
            raise UsageError(
                f"{total_bytes} bytes cannot be cut into chunks of {chunk_bytes}",
                "use chunks of several times 4096 bytes",
            )
        self._chunk_bytes = chunk_bytes
        self._header = header
        self._chunks = chunks = total_bytes // chunk_bytes
        pages = _class_pages((chunk_bytes - header) // PAGE)
        self._class_of_pages = np.searchsorted(pages, np.arange(pages[-1] + 1))
        self._class_bytes = header + pages * PAGE
        self._class_slots = chunk_bytes // self._class_bytes
        self._stride = int(self._class_slots[0])
        self._wide_stride = np.uint64(self._stride)
        if self._stride > _MOST_SLOTS:
            raise UsageError(f"chunks of {chunk_bytes} bytes are too large", "use 256 MiB or less")
        # By slot id: chunk * stride + number in the chunk.
        self._room = chunks * self._stride
        self._states = np.zeros(self._room, np.uint8)
        self._counts = np.zeros(self._room, np.int16)
        # For one slot at a time a memoryview costs a third of an array.
        self._count = memoryview(self._counts.data)
        # Per chunk: the first free[chunk] entries of its row are its free slots, the next one last.
        self._stack = np.zeros((chunks, self._stride), np.uint16)
        self._free = np.zeros(chunks, np.int64)
        self._classes = np.full(chunks, BLANK, np.int16)

    # -- figures ----------------------------------------------------------------------------------

    @property
    def num_chunks(self) -> int:
        return self._chunks

    @property
    def chunk_bytes(self) -> int:
        return self._chunk_bytes

    @property
    def capacity(self) -> int:
        """Bytes in chunks."""
        return self._chunks * self._chunk_bytes

    @property
    def stride(self) -> int:
        """How far the slot ids of two chunks are apart."""
        return self._stride

    @property
    def num_classes(self) -> int:
        return len(self._class_bytes)

    @property
    def class_bytes(self) -> I64:
        """The slot length of each class in bytes; read-only."""
        return _read_only(self._class_bytes)

    @property
    def class_slots(self) -> I64:
        """The slots in a chunk of each class; read-only."""
        return _read_only(self._class_slots)

    @property
    def num_slots(self) -> int:
        """Slots of the chunks that belong to a class."""
        return int(self.chunk_slots().sum())

    @property
    def num_free(self) -> int:
        """Free ones of these."""
        return int(self._free.sum())

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that are not free."""
        given = np.flatnonzero(self._classes != BLANK)
        used = self.chunk_slots()[given] - self._free[given]
        return int((used * self._class_bytes[self._classes[given]]).sum())

    @property
    def state_bytes(self) -> int:
        """Memory of the arena itself, at most; what no slot ever used is not resident."""
        arrays = (self._states, self._counts, self._stack, self._free, self._classes)
        return sum(array.nbytes for array in arrays)

    @property
    def states(self) -> U8:
        """FREE, WRITING or COMMITTED by slot id (see :meth:`ids`); read-only."""
        return _read_only(self._states)

    @property
    def references(self) -> U16:
        """References by slot id: a copy, read-only."""
        return _read_only(_references(self._counts))

    @property
    def classes(self) -> npt.NDArray[np.int16]:
        """The class of each chunk or BLANK; read-only."""
        return _read_only(self._classes)

    @property
    def chunk_free(self) -> I64:
        """Free slots of each chunk, 0 for a blank one; read-only."""
        return _read_only(self._free)

    def chunk_slots(self) -> I64:
        """Return the slots of each chunk, 0 for a blank one."""
        slots: I64 = np.where(self._classes == BLANK, 0, self._class_slots[self._classes])
        return slots

    def slots_per_chunk(self, size_class: int) -> int:
        return int(self._class_slots[size_class])

    def empty_chunks(self) -> I64:
        """Return the chunks of a class of which all slots are free."""
        empty: I64 = np.flatnonzero((self._free > 0) & (self._free == self.chunk_slots()))
        return empty

    # -- sizes ------------------------------------------------------------------------------------

    def fits(self, sizes: Sizes) -> Bools:
        """Tell which record images (bytes) fit a slot at all."""
        fits: Bools = sizes <= (int(self._class_bytes[-1]) if self._chunks else 0)
        return fits

    def classes_of(self, sizes: Sizes) -> I64:
        """Return the class of each record image. Raises UsageError for one larger than a chunk."""
        if len(sizes) and not self.fits(sizes).all():
            raise UsageError(
                f"{int(sizes.max())} bytes do not fit a chunk of {self._chunk_bytes}",
                "ask fits() first",
            )
        pages = (sizes.astype(np.int64) + (PAGE - 1 - self._header)) // PAGE
        return self._class_of_pages.take(np.maximum(pages, 0))

    def chunks_needed(self, sizes: Sizes) -> int:
        """Return how many chunks these record images take in an arena that is empty."""
        counts = np.bincount(self.classes_of(sizes), minlength=self.num_classes)
        return int((-(-counts // self._class_slots)).sum())

    # -- places -----------------------------------------------------------------------------------

    def ids(self, places: U64) -> I64:
        chunks = places >> _SHIFT
        numbers = places & _LOW
        if len(places) and (chunks.max() >= self._chunks or numbers.max() >= self._stride):
            raise ValueError("a place names no slot")
        chunks *= self._wide_stride
        chunks += numbers
        return chunks.view(np.int64)

    def places(self, ids: I64) -> U64:
        """Return the places of slot ids."""
        chunk, number = np.divmod(ids, self._stride)
        places: U64 = chunk.astype(np.uint64) << _SHIFT
        places |= number.astype(np.uint64)
        return places

    def chunk_of(self, ids: I64) -> I64:
        """Return the chunks of slot ids."""
        return ids // self._stride

    def ids_in(self, chunks: I64) -> I64:
        """Return the ids of all slots of chunks, chunk by chunk."""
        slots = self.chunk_slots()[chunks]
        ends = np.cumsum(slots)
        ids: I64 = np.repeat(chunks * self._stride - (ends - slots), slots)
        ids += np.arange(len(ids))
        return ids

    def offsets(self, places: U64) -> I64:
        ids = self.ids(places)
        chunk, number = np.divmod(ids, self._stride)
        sizes = self._class_bytes[self._classes[chunk]]
        offsets: I64 = chunk * self._chunk_bytes + number * sizes
        return offsets

    # -- coming and going -------------------------------------------------------------------------

    def allocate(self, sizes: Sizes) -> U64:
        classes = self.classes_of(sizes)
        wanted = np.bincount(classes)
        needed = {each: int(wanted[each]) for each in np.flatnonzero(wanted).tolist()}
        self._give_blank_chunks(needed)
        ids = np.empty(len(sizes), np.int64)
        for size_class, count in needed.items():
            ids[classes == size_class] = self._take(size_class, count)
        self._enter(ids, WRITING)
        return self.places(ids)

    def _enter(self, ids: I64, state: int) -> None:
        """Take free slots into a state of use."""
        self._states[ids] = state
        self._counts[ids] = _NONE

    def _give_blank_chunks(self, needed: Mapping[int, int]) -> None:
        """Give chunks to the classes that need them; raises NoFreeSlots, giving none."""
        blank = np.flatnonzero(self._classes == BLANK)
        grants: list[tuple[int, I64]] = []
        lacking: dict[int, int] = {}
        for size_class, count in needed.items():
            short = count - int(self._free[self._classes == size_class].sum())
            if short > 0:
                each = self.slots_per_chunk(size_class)
                granted, blank = np.split(blank, [-(-short // each)])
                grants.append((size_class, granted))
                if len(granted) * each < short:
                    lacking[size_class] = short - len(granted) * each
        if lacking:
            raise NoFreeSlots(lacking)
        for size_class, chunks in grants:
            self._give(chunks, size_class)

    def _give(self, chunks: I64, size_class: int) -> None:
        slots = self.slots_per_chunk(size_class)
        self._classes[chunks] = size_class
        self._free[chunks] = slots
        self._stack[chunks, :slots] = np.arange(slots - 1, -1, -1, dtype=np.uint16)

    def give(self, chunk: int, size_class: int, *, taken: bool = False) -> None:
        """Give a blank chunk to a class; with ``taken`` all its slots are COMMITTED at once.

        Raises ValueError for a chunk that is not blank.
        """
        if self._classes[chunk] != BLANK:
            raise ValueError("only a blank chunk can be given to a class")
        chunks = np.array([chunk])
        self._give(chunks, size_class)
        if taken:
            self._free[chunk] = 0
            self._enter(self.ids_in(chunks), COMMITTED)

    def take_all(self, chunk: int) -> U64:
        """Return all free slots of a chunk, WRITING from now on, so that nobody else gets them."""
        free, self._free[chunk] = int(self._free[chunk]), 0
        ids: I64 = chunk * self._stride + self._stack[chunk, :free].astype(np.int64)
        self._enter(ids, WRITING)
        return self.places(ids)

    def _take(self, size_class: int, count: int) -> I64:
        """Take free slots, out of the fullest chunks first: so that others become empty."""
        chunks = np.flatnonzero((self._classes == size_class) & (self._free > 0))
        chunks = chunks[np.argsort(self._free[chunks], kind="stable")]
        ends = np.cumsum(self._free[chunks])
        used = int(np.searchsorted(ends, count)) + 1
        chunks, ends = chunks[:used], ends[:used]
        takes = self._free[chunks]
        starts = ends - takes
        takes[-1] -= ends[-1] - count
        chunk = np.repeat(chunks, takes)
        rank = np.arange(count) - np.repeat(starts, takes)
        number = self._stack[chunk, self._free[chunk] - 1 - rank]
        self._free[chunks] -= takes
        ids: I64 = chunk * self._stride + number
        return ids

    def commit(self, places: U64) -> None:
        ids = self.ids(places)
        if np.any(self._states[ids] != WRITING):
            raise ValueError("only slots that are being written can be committed")
        self._states[ids] = COMMITTED

    def free(self, places: U64) -> None:
        ids = np.sort(self.ids(places))
        if np.any(self._states[ids] == FREE) or np.any(ids[1:] == ids[:-1]):
            raise ValueError("a slot is free already")
        if np.any(self._counts[ids] != _NONE):
            raise ValueError("a slot with references cannot be freed")
        self._states[ids] = FREE
        self._counts[ids] = 0
        chunk, number = np.divmod(ids, self._stride)
        chunks, first, times = np.unique(chunk, return_index=True, return_counts=True)
        # The lowest number comes to lie on top.
        rank = np.repeat(first + times, times) - 1 - np.arange(len(ids))
        self._stack[chunk, self._free[chunk] + rank] = number
        self._free[chunks] += times

    def reassign(self, chunks: I64) -> None:
        """Take empty chunks (distinct) from their class: any may have them next.

        Raises ValueError if a slot is in use, or a chunk is blank.
        """
        if not np.isin(chunks, self.empty_chunks()).all():
            raise ValueError("only chunks without a slot in use can be reassigned")
        self._classes[chunks] = BLANK
        self._free[chunks] = 0

    # -- references -------------------------------------------------------------------------------

    def incr(self, ids: I64) -> None:
        if not self._change(np.add, np.subtract, ids):
            raise ValueError(f"a slot is free or would have over {MOST_REFERENCES} references")

    def decr(self, ids: I64) -> None:
        if not self._change(np.subtract, np.add, ids):
            raise ValueError("a slot is free or has fewer references than are given back")

    def _change(self, change: np.ufunc, undo: np.ufunc, ids: I64) -> bool:
        """Count each entry; return False, with nothing changed, if a count left its bounds."""
        if not len(ids):
            return True
        # An id that is too large is refused by numpy, before it counts any.
        if np.minimum.reduce(ids) < 0:
            raise IndexError("an id names no slot")
        if len(ids) > _AT_ONCE:
            return self._change_many(change, ids)
        # Unlike bincount this does not depend on how far apart the ids are: 2 ns each.
        change.at(self._counts, ids, _ONE)
        fine = bool(np.maximum.reduce(self._counts.take(ids)) <= _FULL)
        if not fine:
            undo.at(self._counts, ids, _ONE)
        return fine

    def _change_many(self, change: np.ufunc, ids: I64) -> bool:
        """So many entries could lead from one bound to the other."""
        unique, times = np.unique(ids, return_counts=True)
        before = self._counts[unique].astype(np.int64)
        after = change(before, times)
        fine = bool((before <= _FULL).all() and (after >= _NONE).all() and (after <= _FULL).all())
        if fine:
            self._counts[unique] = after
        return fine

    def counts(self, ids: I64) -> U16:
        return _references(self._counts.take(ids))

    def incr_one(self, slot: int) -> None:
        """:meth:`incr` for one id, without the price of an array; ValueError for a negative one."""
        counts = self._count
        count = counts[slot]
        if count >= _FULL or slot < 0:
            raise ValueError("a slot is free or would have too many references")
        counts[slot] = count + 1

    def decr_one(self, slot: int) -> None:
        """:meth:`decr` for one id; ValueError for a negative one."""
        counts = self._count
        count = counts[slot]
        if not _NONE < count <= _FULL or slot < 0:
            raise ValueError("a slot is free or has fewer references than are given back")
        counts[slot] = count - 1


def _references(counts: npt.NDArray[np.int16]) -> U16:
    """Return what counts mean, free slots having none."""
    return np.where(counts, counts - np.int16(_NONE), np.int16(0)).astype(np.uint16)


def _class_pages(most: int) -> I64:
    """Return the payload pages of each class; the last has ``most``."""
    pages, sizes = 1, []
    while pages < most:
        sizes.append(pages)
        pages += max(1, (1 << pages.bit_length()) // (2 * _EXACT_CLASSES))
    return np.array([*sizes, most], np.int64)


def _read_only(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view

"""The memory of the index: one array per property of a row, and the row ids that are free.

A *row* is a u32 id; what is known of it stands at that position in every column::

    identities  40          space and key length in one u32, then the key, padded to 8 bytes
    parents     4           row of the parent, NONE if it has none
    children    4           how many rows name this one as their parent
    sizes       4           payload bytes as stored
    places      8           where the engine put it
    generations 8           version number
    last_use    8           stamp: microseconds, unique, increasing
    lease_ends  4           deciseconds since the index's epoch, 0 = no lease
    references  2           reads in flight
    flags       1           the bits below
    depths      2           links up to the first ancestor (see kvstore.chains)
    policy      1           free for the eviction policy

That is 86 bytes for keys of 33 to 36 bytes. Memory is private and anonymous and grows by mremap:
pages move by their page-table entries, nothing is copied, and pages never touched cost nothing.
"""

from __future__ import annotations

import math
import mmap
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidKey
from kvstore.keys import MAX_KEY_BYTES, MAX_NAMESPACES, KeyArray

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]

NONE = 0xFFFFFFFF
"""The row id that means "no row"."""

MEM = 1
DIRTY = 2
WRITING = 4
DISK = 8
GHOST = 16
HIDDEN = 32
UNSYNCED = 64
DURABLE = 128
"""Synced one by one, before the next flush."""
READABLE = MEM | DISK

_PAGE = mmap.PAGESIZE
_FIRST_ROOM = 1 << 20
_SPACE_BITS = 26
_SPACE_MASK = (1 << _SPACE_BITS) - 1
assert MAX_NAMESPACES << 16 <= 1 << _SPACE_BITS
assert MAX_KEY_BYTES <= 1 << 32 - _SPACE_BITS

Shape = tuple[npt.DTypeLike, tuple[int, ...]]


class Arrays:
    """Named arrays that grow in place. A view held while they grow goes stale, but never dangles:
    memory that somebody still looks at is copied instead of moved."""

    def __init__(self, shapes: dict[str, Shape], rows: int) -> None:
        self._shapes = shapes
        self._memory = {
            name: _anonymous(rows * _row_bytes(shape)) for name, shape in shapes.items()
        }
        for name in shapes:
            self._bind(name)

    def _bind(self, name: str) -> None:
        dtype, trailing = shape = self._shapes[name]
        memory = self._memory[name]
        rows = len(memory) // _row_bytes(shape)
        array = np.frombuffer(memory, dtype, rows * math.prod(trailing))
        setattr(self, name, array.reshape(rows, *trailing))

    def reach(self, rows: int) -> None:
        """Make every array at least ``rows`` long, and then some. Raises MemoryError."""
        shortest = min(len(getattr(self, name)) for name in self._shapes)
        if rows > shortest:
            self._grow(max(rows, shortest * 5 // 4))

    def _grow(self, rows: int) -> None:
        """Make every array at least ``rows`` long; raises MemoryError, leaving all usable."""
        for name, shape in self._shapes.items():
            # The memory moves only when no array looks at it, so let go of ours first.
            setattr(self, name, None)
            try:
                self._memory[name] = _enlarged(self._memory[name], rows * _row_bytes(shape))
            finally:
                self._bind(name)


def _row_bytes(shape: Shape) -> int:
    dtype, trailing = shape
    return np.dtype(dtype).itemsize * math.prod(trailing)


def _in_pages(count: int) -> int:
    return max(1, -(-count // _PAGE)) * _PAGE


def _anonymous(size: int) -> mmap.mmap:
    rounded = _in_pages(size)
    try:
        return mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {rounded} bytes for the index: {error}") from error


def _enlarged(memory: mmap.mmap, size: int) -> mmap.mmap:
    if size <= len(memory):
        return memory
    try:
        memory.resize(_in_pages(size))
    except BufferError:
        larger = _anonymous(size)
        np.copyto(np.frombuffer(larger, np.uint8)[: len(memory)], np.frombuffer(memory, np.uint8))
        return larger
    except OSError as error:
        raise MemoryError(f"no {size} bytes for the index: {error}") from error
    return memory


class Columns(Arrays):
    """All columns, row ids in use up to ``used``, and the stack of ids freed since."""

    identities: U32
    parents: U32
    children: U32
    sizes: U32
    places: U64
    generations: U64
    last_use: U64
    lease_ends: U32
    references: U16
    flags: U8
    depths: U16
    policy: U8

    FIXED: ClassVar[dict[str, Shape]] = {
        "parents": (np.uint32, ()),
        "children": (np.uint32, ()),
        "sizes": (np.uint32, ()),
        "places": (np.uint64, ()),
        "generations": (np.uint64, ()),
        "last_use": (np.uint64, ()),
        "lease_ends": (np.uint32, ()),
        "references": (np.uint16, ()),
        "flags": (np.uint8, ()),
        "depths": (np.uint16, ()),
        "policy": (np.uint8, ()),
    }

    def __init__(self, max_rows: int, key_bytes: int) -> None:
        self.words = identity_words(key_bytes)
        self.room = _in_pages(min(max_rows, _FIRST_ROOM))
        shapes: dict[str, Shape] = {"identities": (np.uint32, (self.words,)), **self.FIXED}
        super().__init__(shapes, self.room)
        self.used = 0
        self._free = np.empty(0, np.uint32)
        self._free_count = 0

    @property
    def bytes(self) -> int:
        """Resident bytes: columns are touched only below ``used``, in whole pages."""
        row_bytes = [_row_bytes(shape) for shape in self._shapes.values()]
        touched = sum(_in_pages(self.used * each) for each in row_bytes)
        return touched + self._free.nbytes

    def allocate(self, count: int) -> U32:
        """Return ``count`` row ids, recycled ones first, with everything about them reset."""
        recycled = min(count, self._free_count)
        fresh = count - recycled
        self._reserve(self.used + fresh)
        rows = np.empty(count, np.uint32)
        self._free_count -= recycled
        rows[:recycled] = self._free[self._free_count : self._free_count + recycled][::-1]
        rows[recycled:] = np.arange(self.used, self.used + fresh, dtype=np.uint32)
        self.used += fresh
        self._reset(rows)
        return rows

    def allocate_exactly(self, rows: U32) -> None:
        """Take these row ids in an empty index; the ids between them become free."""
        self._reserve(int(rows.max()) + 1 if len(rows) else 0)
        self.used = int(rows.max()) + 1 if len(rows) else 0
        taken = np.zeros(self.used, np.bool_)
        taken[rows] = True
        self.free(np.flatnonzero(~taken)[::-1].astype(np.uint32))
        self._reset(rows)

    def free(self, rows: U32) -> None:
        """Give row ids back."""
        self.flags[rows] = 0
        self.parents[rows] = NONE
        needed = self._free_count + len(rows)
        if needed > len(self._free):
            larger = np.empty(max(needed, len(self._free) * 5 // 4), np.uint32)
            larger[: self._free_count] = self._free[: self._free_count]
            self._free = larger
        self._free[self._free_count : needed] = rows
        self._free_count = needed

    def _reset(self, rows: U32) -> None:
        self.parents[rows] = NONE
        for name in (
            "children",
            "lease_ends",
            "references",
            "depths",
            "policy",
            "places",
            "last_use",
        ):
            getattr(self, name)[rows] = 0

    def _reserve(self, rows: int) -> None:
        if rows > NONE:
            raise MemoryError("the index has no row ids left")
        if rows > self.room:
            larger = _in_pages(max(rows, self.room + self.room // 4))
            self._grow(larger)
            self.room = larger

    def widen(self, key_bytes: int) -> None:
        """Make room for longer keys. Copies the identities: about 50 ms for a million rows, once
        for each step of 8 bytes in the longest key that the store has seen."""
        words = identity_words(key_bytes)
        if words <= self.words:
            return
        memory = _anonymous(self.room * words * 4)
        wider = np.frombuffer(memory, np.uint32).reshape(-1, words)
        wider[: self.used, : self.words] = self.identities[: self.used]
        del wider
        self.words = words
        self._shapes["identities"] = (np.uint32, (words,))
        self._memory["identities"] = memory
        self._bind("identities")

    def identify(self, space: int, keys: KeyArray) -> U32:
        """Return the identity of each key, shape (n, words). Keys must fit the width."""
        made = np.zeros((len(keys), self.words), np.uint32)
        made[:, 0] = tagged_space(space, keys.shape[1])
        made.view(np.uint8)[:, 4 : 4 + keys.shape[1]] = keys
        return made

    def identify_each(self, spaces: U32, keys: KeyArray, key_lengths: U8) -> U32:
        """Return identities of keys of several lengths and spaces; ``keys`` is 64 bytes wide."""
        made = np.zeros((len(keys), self.words), np.uint32)
        for length in np.unique(key_lengths).tolist():
            chosen = np.flatnonzero(key_lengths == length)
            made.view(np.uint8)[chosen, 4 : 4 + length] = keys[chosen, :length]
            tagged_space(int(spaces[chosen].max()), length)
            made[chosen, 0] = spaces[chosen] | np.uint32(length - 1 << _SPACE_BITS)
        return made

    def fits(self, key_bytes: int) -> bool:
        return identity_words(key_bytes) <= self.words

    def space(self, rows: U32) -> U32:
        """Return the space number (namespace number << 16 | shard) of each row."""
        spaces: U32 = self.identities[rows, 0] & np.uint32(_SPACE_MASK)
        return spaces

    def key_length(self, rows: U32) -> U8:
        lengths: U8 = (self.identities[rows, 0] >> np.uint32(_SPACE_BITS)).astype(np.uint8)
        return lengths + np.uint8(1)

    def key_bytes(self, rows: U32) -> U8:
        """Return the keys of ``rows``, zero-padded to the width of the column."""
        return self.identities.take(rows, axis=0).view(np.uint8)[:, 4:]


def identity_words(key_bytes: int) -> int:
    """Return the u32 words that (space, key) takes: an even number, so that u64 reads work."""
    return -(-(4 + key_bytes) // 8) * 2


def tagged_space(space: int, key_bytes: int) -> int:
    """Return space number and key length in one u32. Keys of different length thereby never
    compare equal, and the whole identity is compared with one gather.

    Raises InvalidKey for a length outside 1..64 or a namespace number over 1,023.
    """
    if not 1 <= key_bytes <= MAX_KEY_BYTES:
        raise InvalidKey(
            f"a key of {key_bytes} bytes was given", f"a key has 1 to {MAX_KEY_BYTES} bytes"
        )
    if not 0 <= space <= _SPACE_MASK:
        raise InvalidKey(
            f"space number {space} is out of range",
            f"a store has at most {MAX_NAMESPACES} namespaces",
        )
    return space | key_bytes - 1 << _SPACE_BITS

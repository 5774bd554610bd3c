"""Blocks that are here no more, remembered by 10 bytes each: were they missed too early?

Two tables of buckets. Blocks that leave are filed in the young one; when that is full it becomes
the old one, and what was in the old one is forgotten. So those that left last are remembered, and
the number of them follows that of the blocks here without moving anything. A block is known by its
bucket and a print of 32 bits: one in 2^27 that was never here passes for one that was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from kvstore.columns import U16, U32, U64, Bools

    Some = list[tuple[U32, U16, float]]
    """Times and marks of entries, and how many each of them stands for."""

SLOTS = 16
_FILL = 12
"""Entries a bucket on average, when its table is full."""
_LEAST_BUCKETS = 64
_SAMPLED_BUCKETS = 1024
_PARTS = ("prints", "seen", "marks")


class Table:
    """Prints, times and marks in buckets of 16; a print of 0 is a free slot."""

    def __init__(self, entries: int) -> None:
        self.buckets = max(-(-entries // _FILL), _LEAST_BUCKETS)
        self.prints = np.zeros((self.buckets, SLOTS), np.uint32)
        self.seen = np.zeros((self.buckets, SLOTS), np.uint32)
        self.marks = np.zeros((self.buckets, SLOTS), np.uint16)
        self.count = 0

    @classmethod
    def of(cls, prints: U32, seen: U32, marks: U16) -> Table:
        """Return a table with this content. Raises ValueError if it cannot be one."""
        table = cls(len(prints) * _FILL)
        if prints.shape != table.prints.shape or len({prints.shape, seen.shape, marks.shape}) > 1:
            raise ValueError("a table of ghosts of another shape")
        table.prints[:], table.seen[:], table.marks[:] = prints, seen, marks
        table.count = int(np.count_nonzero(table.prints))
        return table

    @property
    def bytes(self) -> int:
        return self.prints.nbytes + self.seen.nbytes + self.marks.nbytes

    def _at(self, hashes: U64) -> tuple[npt.NDArray[np.int64], U32]:
        buckets = ((hashes >> np.uint64(32)) % np.uint64(self.buckets)).astype(np.int64)
        return buckets, np.maximum(hashes.astype(np.uint32), np.uint32(1))

    def take(self, hashes: U64) -> tuple[Bools, U32, U16]:
        """Take entries out: tell which were there, and their times and marks (0 where not)."""
        buckets, prints = self._at(hashes)
        same = self.prints[buckets] == prints[:, None]
        there, slots = same.any(axis=1), same.argmax(axis=1)
        seen = np.where(there, self.seen[buckets, slots], np.uint32(0))
        marks = np.where(there, self.marks[buckets, slots], np.uint16(0))
        found = buckets[there], slots[there]
        # Two of one print in one call would be the same entry.
        self.count -= int(np.count_nonzero(self.prints[found]))
        self.prints[found] = 0
        return there, seen, marks

    def file(self, hashes: U64, seen: U32, marks: U16) -> tuple[U32, U16]:
        """File blocks; return times and marks of those that had to go for them."""
        buckets, prints = self._at(hashes)
        lost_seen, lost_marks = [seen[:0]], [marks[:0]]
        left = np.arange(len(hashes))
        while len(left):
            # One of each bucket at a time, so that no two of them take the same slot.
            _, first = np.unique(buckets[left], return_index=True)
            now = left[first]
            at = buckets[now]
            free = self.prints[at] == 0
            slots = np.where(free.any(axis=1), free.argmax(axis=1), self.seen[at].argmin(axis=1))
            over = self.prints[at, slots] != 0
            lost_seen.append(self.seen[at, slots][over])
            lost_marks.append(self.marks[at, slots][over])
            self.prints[at, slots] = prints[now]
            self.seen[at, slots] = seen[now]
            self.marks[at, slots] = marks[now]
            self.count += int(np.count_nonzero(~over))
            left = np.delete(left, first)
        return np.concatenate(lost_seen), np.concatenate(lost_marks)

    def some(self) -> tuple[U32, U16, float]:
        """Return times and marks of all entries, or of an even share of a large table, and how many
        each of them stands for."""
        part = slice(None, None, max(self.buckets // _SAMPLED_BUCKETS, 1))
        there = self.prints[part] != 0
        return self.seen[part][there], self.marks[part][there], self.buckets / len(there)


class Ghosts:
    """At most four times as many as there are blocks, those that left last."""

    def __init__(self) -> None:
        self._young, self._old = Table(0), Table(0)
        self._limit = 0

    def __len__(self) -> int:
        return self._young.count + self._old.count

    @property
    def bytes(self) -> int:
        return self._young.bytes + self._old.bytes

    def take(self, hashes: U64) -> tuple[Bools, U32, U16]:
        """Forget blocks that are back; see :meth:`Table.take`."""
        there, seen, marks = self._young.take(hashes)
        if self._old.count:
            older = self._old.take(hashes)
            seen = np.where(there, seen, older[1])
            marks = np.where(there, marks, older[2])
            there = there | older[0]
        return there, seen, marks

    def is_full(self, more: int) -> bool:
        """Tell whether so many more want :meth:`turn_over` first."""
        return self._young.count + more > self._limit

    def turn_over(self, blocks: int) -> Some:
        """Begin a new table, for twice as many as there are blocks; return what is forgotten."""
        gone = [self._old.some()]
        self._limit = 2 * blocks
        self._old, self._young = self._young, Table(self._limit)
        return gone

    def file(self, hashes: U64, seen: U32, marks: U16) -> tuple[U32, U16]:
        """Remember blocks that left; return what had to be forgotten for them."""
        return self._young.file(hashes, seen, marks)

    def some(self) -> Some:
        """Return what is remembered, as far as it takes to know what is in it."""
        return [self._young.some(), self._old.some()]

    def capture(self) -> dict[str, Any]:
        """Return all that is needed to go on, by name."""
        named = {"young": self._young, "old": self._old}
        return {
            f"{name}_{part}": getattr(table, part)
            for name, table in named.items()
            for part in _PARTS
        } | {"ghost_limit": np.array(self._limit)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`capture` returned. Raises KeyError, ValueError."""
        tables = [Table.of(*(state[f"{n}_{p}"] for p in _PARTS)) for n in ("young", "old")]
        self._limit = int(state["ghost_limit"])
        self._young, self._old = tables

"""The memory tier: record images of blocks in slots of our own pages, by row.

A row is in memory from :meth:`Tier.keep` until it leaves: by :meth:`Tier.drop` or
:meth:`Tier.detach`, or because :meth:`Tier.reserve` needs its slot. Only *clean* rows leave for
that: MEM without DIRTY or WRITING in the index, and no reference. Within a size class the row goes
that was used longest ago. A class takes a whole chunk from another one if every row in there was
used before all of its own, or if its own do not suffice. Dirty rows whose turn it would be are told
to whoever writes them (:meth:`Tier.on_pressure`).

The flags belong to the store: it sets MEM and DIRTY after keep, and clears MEM when it is told that
rows leave. The tier has no dictionary: an array by row id holds slots (4 bytes a row, touched only
where rows were in memory), an array by slot holds rows. One thread owns a tier; workers only read
and fill the views that it gave them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore import record
from kvstore.columns import DIRTY, MEM, U32, U64, WRITING, Arrays, Bools
from kvstore.errors import Busy
from kvstore.pages import PAGE, Pages
from kvstore.slots import FREE, I64, Arena, NoFreeSlots, Sizes

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.index import Index

NO_SLOT = 0xFFFFFFFFFFFFFFFF
"""Where :meth:`Tier.find` finds nothing."""

_CHUNKS = 32
_LEAST_CHUNK, _MOST_CHUNK = 4 << 20, 64 << 20
_NEVER = 0xFFFFFFFFFFFFFFFF
_LEAST_SORTED = 1024
_SHARE_SORTED = 32
_WINDOW = 1024


class Tier:
    """``slab_bytes`` of memory for the rows of ``index``; with 0 nothing fits and nothing is found.

    ``chunk``: bytes of a chunk, by default :func:`chunk_bytes`. Sizes are those of record images
    (:func:`kvstore.record.image_bytes_of`). An image larger than a chunk (:attr:`largest`) is never
    kept: ask :meth:`fits` first.
    """

    def __init__(self, slab_bytes: int, index: Index, *, chunk: int | None = None) -> None:
        self._index = index
        self._arena = arena = Arena(slab_bytes, chunk or chunk_bytes(slab_bytes))
        self.pages = Pages(arena.capacity)
        self._where = _Where()
        # By slot id: the row plus one, 0 for a slot without a row.
        self._rows = np.zeros(len(arena.states), np.uint32)
        # Per chunk, a lower bound of the newest stamp in it.
        self._newest = np.zeros(arena.num_chunks, np.uint64)
        self._oldest: dict[int, _Oldest] = {}
        self._blocks = 0
        self._late_rows = np.zeros(0, np.uint32)
        self._late_slots = np.zeros(0, np.uint64)
        self._leave: Callable[[U32], None] = _ignore
        self._press: Callable[[U32], None] | None = None

    def on_leave(self, callback: Callable[[U32], None]) -> None:
        """Call back with the rows (distinct) that have left memory to make room."""
        self._leave = callback

    def on_pressure(self, callback: Callable[[U32], None]) -> None:
        """Call back with dirty rows (distinct) that are in the way of others, for they were not
        used for longer or nothing else is left. Those that are clean after that leave at once."""
        self._press = callback

    # -- figures ----------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Bytes of memory."""
        return self._arena.capacity

    @property
    def bytes(self) -> int:
        """Bytes of all slots in use, those being filled included."""
        return self._arena.used_bytes

    @property
    def blocks(self) -> int:
        """Rows in memory."""
        return self._blocks

    @property
    def largest(self) -> int:
        """Bytes of the largest image that is ever kept."""
        return self._arena.chunk_bytes if self._arena.num_chunks else 0

    @property
    def state_bytes(self) -> int:
        """Memory that the tier's own arrays take, at most."""
        kept = sum(oldest.rows.nbytes + oldest.stamps.nbytes for oldest in self._oldest.values())
        own = self._rows.nbytes + self._newest.nbytes + self._where.ids.nbytes
        return self._arena.state_bytes + own + kept

    @property
    def huge_bytes(self) -> int:
        """See :attr:`kvstore.pages.Pages.huge_bytes`."""
        return self.pages.huge_bytes

    # -- looking ----------------------------------------------------------------------------------

    def fits(self, sizes: Sizes) -> Bools:
        """Tell which images (bytes) can be kept at all."""
        return self._arena.fits(sizes)

    def find(self, rows: U32) -> U64:
        """Return the slot of each row, NO_SLOT where it is not in memory. Rows may repeat; any u32
        may be asked for."""
        ids = self._where.find(rows)
        there = ids.nonzero()[0]
        slots = np.full(len(rows), NO_SLOT, np.uint64)
        slots[there] = self._arena.places(ids[there] - 1)
        return slots

    def views(self, slots: U64, lengths: U32) -> list[memoryview]:
        """Return the image of each slot, for a payload of so many bytes: it begins at a multiple of
        4 KiB and has ``record.image_bytes(length)`` bytes.

        Good until the slot is given back or its row leaves: hold a reference on the row meanwhile.
        """
        starts = self._arena.offsets(slots)
        stops = starts + record.image_bytes_of(lengths)
        memory = self.pages.memory
        return [
            memory[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
        ]

    # -- coming -----------------------------------------------------------------------------------

    def reserve(self, sizes: Sizes) -> U64:
        """Return a slot for the image of each size (bytes), all or none; clean rows leave for them.

        Raises Busy if there is no room now (then no row has left, unless sizes of several classes
        were asked for) or if all of memory is too small for so many; UsageError for an image that
        does not fit (see :meth:`fits`).
        """
        self._free_late()
        while True:
            try:
                return self._arena.allocate(sizes)
            except NoFreeSlots as error:
                if self._arena.chunks_needed(sizes) > self._arena.num_chunks:
                    raise
                self._make_room(*next(iter(error.lacking.items())))

    def keep(self, rows: U32, slots: U64) -> None:
        """File rows with the slots, reserved before, that hold their images by now.

        Raises ValueError, with nothing changed, for a row that is in memory or a slot that is not
        being filled.
        """
        ids = self._arena.ids(slots)
        if np.any(self._where.find(rows)) or _repeats(rows) or _repeats(ids):
            raise ValueError("a row or slot is in use already")
        if len(rows) != len(slots) or np.any(self._rows[ids]):
            raise ValueError("each row needs a slot of its own")
        self._where.reach(int(rows.max(initial=0)) + 1)
        self._arena.commit(slots)
        self._where.ids[rows] = ids + 1
        self._rows[ids] = rows + 1
        self._blocks += len(rows)
        self._note_stamps(self._index.last_use[rows], self._arena.chunk_of(ids))

    def _note_stamps(self, stamps: U64, chunks: I64) -> None:
        np.maximum.at(self._newest, chunks, stamps)
        # Rows as old as what was sorted already are missing there.
        lowest = int(stamps.min(initial=_NEVER))
        self._oldest = {
            size_class: oldest
            for size_class, oldest in self._oldest.items()
            if oldest.limit < lowest
        }

    # -- leaving ----------------------------------------------------------------------------------

    def give_back(self, slots: U64) -> None:
        """Free slots that were reserved and not kept, or detached.

        Raises ValueError for the slot of a row, or one that is free.
        """
        if np.any(self._rows[self._arena.ids(slots)]):
            raise ValueError("a slot belongs to a row that is in memory")
        self._arena.free(slots)

    def drop(self, rows: U32) -> None:
        """Forget rows, in any state; others than those in memory are left out. Nobody is told.

        The slot of a row with references is used again only after the last of them.
        """
        rows, slots = self._take_out(rows)
        late = self._index.references[rows] > 0
        self._arena.free(slots[~late])
        self._late_rows = np.append(self._late_rows, rows[late])
        self._late_slots = np.append(self._late_slots, slots[late])

    def detach(self, rows: U32) -> U64:
        """Forget rows as :meth:`drop` does, but return their slots, which stay in use until they
        are given back; slots of the same rows that were dropped and are still read come along."""
        late = np.isin(self._late_rows, rows)
        mine = self._late_slots[late]
        self._late_rows, self._late_slots = self._late_rows[~late], self._late_slots[~late]
        return np.append(mine, self._take_out(rows)[1])

    def _free_late(self) -> None:
        if len(self._late_rows):
            late = self._index.references[self._late_rows] > 0
            self._arena.free(self._late_slots[~late])
            self._late_rows, self._late_slots = self._late_rows[late], self._late_slots[late]

    def _take_out(self, rows: U32) -> tuple[U32, U64]:
        """Forget rows; return those that were in memory, and their slots."""
        rows = np.unique(rows)
        ids = self._where.find(rows)
        rows, ids = rows[ids > 0], ids[ids > 0] - 1
        self._where.ids[rows] = 0
        self._rows[ids] = 0
        self._blocks -= len(rows)
        chunks = self._arena.chunk_of(ids)
        # The bound stands as long as the row that it came from does.
        bound = self._index.last_use[rows] >= self._newest[chunks]
        self._newest[chunks[bound]] = 0
        return rows, self._arena.places(ids)

    # -- making room ------------------------------------------------------------------------------

    def _make_room(self, size_class: int, short: int) -> None:
        """Free slots of a class, or chunks: all that it is short of, or one chunk at least.

        Raises Busy, with no row gone, if that cannot succeed.
        """
        arena = self._arena
        each = arena.slots_per_chunk(size_class)
        empty = arena.empty_chunks()
        empty = empty[arena.classes[empty] != size_class]
        if len(empty):
            arena.reassign(empty[: -(-short // each)])
            return
        if not self._free_clean(size_class, short):
            self._press_all()
            if self._press is None or not self._free_clean(size_class, short):
                why = "memory is full of blocks that are in use or not written yet"
                raise Busy(why, "try again")

    def _free_clean(self, size_class: int, short: int) -> bool:
        each = self._arena.slots_per_chunk(size_class)
        victims, first = self._victims(size_class, short)
        enough = len(victims) == short
        chunks = self._stale_chunks(size_class, first if enough else _NEVER)
        if len(victims) + len(chunks) * each < short:
            return False
        if len(chunks):
            missing = short if enough else short - len(victims)
            self._steal(chunks[: -(-missing // each)])
        else:
            self._evict(self._instead_of(victims, size_class))
        return True

    def _press_all(self) -> None:
        if self._press is not None:
            rows = self._rows[self._rows > 0] - 1
            self._press(rows[self._waiting(rows)])

    def _instead_of(self, victims: U32, size_class: int) -> U32:
        """Tell of dirty rows that would leave before these, as many; return who leaves now."""
        if self._press is None:
            return victims
        oldest = self._oldest[size_class]
        stop = np.searchsorted(oldest.stamps, self._index.last_use[victims[-1]])
        older, stamps = oldest.rows[:stop], oldest.stamps[:stop]
        older = older[(self._index.last_use[older] == stamps) & self._waiting(older)]
        if not len(older):
            return victims
        self._press(older[: len(victims)])
        return self._victims(size_class, len(victims))[0]

    def _steal(self, chunks: I64) -> None:
        rows = self._rows[self._arena.ids_in(chunks)]
        self._evict(rows[rows > 0] - 1)
        self._arena.reassign(chunks)

    def _evict(self, rows: U32) -> None:
        rows, slots = self._take_out(rows)
        self._arena.free(slots)
        self._leave(rows)

    def _victims(self, size_class: int, count: int) -> tuple[U32, int]:
        """Return up to ``count`` clean rows of a class, oldest first, and the first one's stamp."""
        oldest = self._oldest.get(size_class)
        found = self._clean_among(oldest, count) if oldest else self._rows[:0]
        if len(found) < count:
            rows = self._rows_of(size_class)
            stamps = self._index.last_use[rows]
            wanted = max(count, _LEAST_SORTED, len(rows) // _SHARE_SORTED)
            while len(found) < count:
                self._oldest[size_class] = oldest = _Oldest(rows, stamps, wanted)
                found = self._clean_among(oldest, count)
                if wanted >= len(rows):
                    break
                wanted *= 4
        return found, int(self._index.last_use[found[0]]) if len(found) else _NEVER

    def _rows_of(self, size_class: int) -> U32:
        arena = self._arena
        chunks = np.flatnonzero(arena.classes == size_class)
        by_chunk = self._rows.reshape(arena.num_chunks, arena.stride)
        # Far cheaper than slot ids: there may be a million.
        rows = by_chunk[:, : arena.slots_per_chunk(size_class)][chunks].ravel()
        return rows[rows > 0] - 1

    def _clean_among(self, oldest: _Oldest, count: int) -> U32:
        """Return the first clean ones of sorted rows; forget those that were used or left since."""
        parts: list[U32] = []
        valid: list[Bools] = []
        missing, at = count, 0
        while missing > 0 and at < len(oldest.rows):
            rows = oldest.rows[at : at + _WINDOW]
            stamps = oldest.stamps[at : at + _WINDOW]
            at += len(rows)
            valid.append((self._index.last_use[rows] == stamps) & (self._where.find(rows) > 0))
            parts.append(rows[valid[-1] & self._clean(rows)][:missing])
            missing -= len(parts[-1])
        if valid:
            oldest.forget(~np.concatenate(valid))
        return np.concatenate([oldest.rows[:0], *parts])

    def _clean(self, rows: U32) -> Bools:
        state = self._index.flags[rows] & np.uint8(MEM | DIRTY | WRITING)
        clean: Bools = (state == MEM) & (self._index.references[rows] == 0)
        return clean

    def _waiting(self, rows: U32) -> Bools:
        state = self._index.flags[rows] & np.uint8(MEM | DIRTY | WRITING)
        waiting: Bools = (state == MEM | DIRTY) & (self._index.references[rows] == 0)
        return waiting

    def _stale_chunks(self, size_class: int, before: int) -> I64:
        """Return chunks of other classes, clean throughout, of which every row was last used before
        that stamp; the one whose newest row is oldest comes first."""
        classes = self._arena.classes
        chunks = np.flatnonzero((classes >= 0) & (classes != size_class) & (self._newest < before))
        if not len(chunks):
            return chunks
        ids = self._arena.ids_in(chunks)
        slots = self._arena.chunk_slots()[chunks]
        starts = np.cumsum(slots) - slots
        rows = self._rows[ids]
        filed = rows > 0
        rows = np.where(filed, rows - 1, 0).astype(np.uint32)
        newest = np.maximum.reduceat(np.where(filed, self._index.last_use[rows], 0), starts)
        self._newest[chunks] = newest
        stuck = np.where(filed, ~self._clean(rows), self._arena.states[ids] != FREE)
        fine = (newest < before) & ~np.logical_or.reduceat(stuck, starts)
        return chunks[fine][np.argsort(newest[fine])]


class _Where(Arrays):
    """The slot id of each row, plus one; 0 where the row is not in memory."""

    ids: U32

    def __init__(self) -> None:
        super().__init__({"ids": (np.uint32, ())}, 1)

    def find(self, rows: U32) -> I64:
        found = self.ids.take(rows, mode="clip").astype(np.int64)
        found[rows >= len(self.ids)] = 0
        return found


class _Oldest:
    """The rows of a class that were used longest ago, sorted once and kept.

    A row counts as long as it has the stamp it was sorted with: whatever was used or came since has
    a higher one than ``limit``, so the order is always exact. Sorting anew takes 3 ms at 100,000
    rows in a class and 14 ms at a million, once for each 32nd of them that leaves.
    """

    def __init__(self, rows: U32, stamps: U64, wanted: int) -> None:
        if wanted < len(rows):
            lowest = np.argpartition(stamps, wanted)[:wanted]
            rows, stamps = rows[lowest], stamps[lowest]
        order = np.argsort(stamps)
        self.rows, self.stamps = rows[order], stamps[order]
        self.limit = int(self.stamps[-1]) if len(order) else 0

    def forget(self, gone: Bools) -> None:
        """Forget some of the first rows."""
        if gone.any():
            stays = np.append(~gone, np.ones(len(self.rows) - len(gone), np.bool_))
            self.rows, self.stamps = self.rows[stays], self.stamps[stays]


def chunk_bytes(total: int) -> int:
    """Return the size of chunks: about a 32nd of ``total``, from 4 to 64 MiB, and at least a 32nd
    of that more, so that blocks of 128 KiB, 256 KiB, ... fill it with their header pages."""
    power = 1 << max(total // _CHUNKS, 1).bit_length() - 1
    least = min(max(power, _LEAST_CHUNK), _MOST_CHUNK) // 32 * 33
    chunks = max(total // least, 1)
    return max(total // chunks // PAGE, 2) * PAGE


def _repeats(values: U32 | I64) -> bool:
    ordered = np.sort(values)
    return bool(np.any(ordered[1:] == ordered[:-1]))


def _ignore(rows: U32) -> None:
    """Nobody wants to know."""

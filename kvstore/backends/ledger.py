"""Which slot of which super-block holds which version, kept in memory only.

An arena (:mod:`kvstore.slots`) keeps size classes and free slots; beside it stand a generation for
each slot, because generations name versions, and the bytes that its record leaves unused. Several
threads use a ledger at once: a short lock guards it, never held during input or output.

A slot that is found on disk at an opening is UNKNOWN, and taken, until the store has said which
records count.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from kvstore.slots import BLANK, COMMITTED, PAGE, Arena

if TYPE_CHECKING:
    from kvstore.backends.base import U32, U64, Mask
    from kvstore.slots import I64

NOTHING = 0
UNKNOWN = (1 << 64) - 1
"""Stand for a generation: no record, a record perhaps. No version has one of these numbers."""
LEAVING = UNKNOWN - 1
"""A record that somebody is deleting."""
BASE = 1 << 32
"""Place of the first slot: super-blocks are counted from 1, for place 0 means unknown."""


class Ledger:
    """Up to ``chunks`` super-blocks with ``chunk_bytes`` of slots each. Places are those of the
    engine: number of the super-block << 32 | slot."""

    def __init__(self, chunks: int, chunk_bytes: int) -> None:
        self.arena = Arena(chunks * chunk_bytes, chunk_bytes)
        self.slot_bytes: list[int] = self.arena.class_bytes.tolist()
        self._lock = threading.Lock()
        room = chunks * self.arena.stride
        self._versions = np.zeros(room, np.uint64)
        # In pages: a slot of 64 MiB loses at most an eighth.
        self._slack = np.zeros(room, np.uint16)
        self._slack_pages = 0
        self._unknown = 0
        self._closed: dict[int, list[U64]] = {}
        self._spare: list[int] = []

    # -- figures ----------------------------------------------------------------------------------

    @property
    def slack_bytes(self) -> int:
        """Bytes that records leave unused in their slots."""
        return self._slack_pages * PAGE

    @property
    def has_unknown(self) -> bool:
        return self._unknown > 0

    # -- places -----------------------------------------------------------------------------------

    def known(self, places: U64) -> Mask:
        """Tell which places name a slot of a super-block that has slots."""
        arena = self.arena
        chunks = (places >> np.uint64(32)).astype(np.int64) - 1
        there: Mask = (chunks >= 0) & (chunks < arena.num_chunks)
        classes = arena.classes[np.where(there, chunks, 0)]
        numbers = (places & np.uint64(0xFFFFFFFF)).astype(np.int64)
        there &= (classes != BLANK) & (numbers < arena.class_slots[classes])
        return there

    def ids(self, places: U64) -> I64:
        """Return slot ids of places that are :meth:`known`."""
        return self.arena.ids(places - np.uint64(BASE))

    def places(self, ids: I64) -> U64:
        places: U64 = self.arena.places(ids) + np.uint64(BASE)
        return places

    def locate(self, places: U64) -> tuple[list[int], list[int]]:
        """Return the numbers of super-blocks and offsets in them, of places that are known."""
        arena, ids = self.arena, self.ids(places)
        chunks, numbers = np.divmod(ids, arena.stride)
        offsets = PAGE + numbers * arena.class_bytes[arena.classes[chunks]]
        return (chunks + 1).tolist(), offsets.tolist()

    def holding(self, places: U64, generations: U64) -> tuple[Mask, Mask]:
        """Tell which places hold these versions, and which may."""
        there = self.known(places)
        found = np.zeros(len(places), np.uint64)
        found[there] = self._versions[self.ids(places[there])]
        return there & (found == generations), there & (found == UNKNOWN)

    def version_at(self, place: int) -> int:
        """Return the generation in a place that is known, or what stands for one."""
        return int(self._versions[self.ids(np.array([place], np.uint64))[0]])

    # -- coming -----------------------------------------------------------------------------------

    def take(self, sizes: I64, generations: U64) -> tuple[U64, Mask]:
        """Take slots for images (bytes) and versions, the first ones first; return places and which
        of them got one."""
        with self._lock:
            arena = self.arena
            classes = arena.classes_of(sizes)
            got = np.ones(len(sizes), np.bool_)
            for size_class in np.unique(classes).tolist():
                mine = np.flatnonzero(classes == size_class)
                got[mine[self._free_of(size_class) :]] = False
            places = np.zeros(len(sizes), np.uint64)
            if got.any():
                taken = arena.allocate(sizes[got])
                ids = arena.ids(taken)
                self._versions[ids] = generations[got]
                self._note(ids, sizes[got])
                places[got] = taken + np.uint64(BASE)
            return places, got

    def _slots_of(self, ids: I64) -> I64:
        slots: I64 = self.arena.class_bytes[self.arena.classes[self.arena.chunk_of(ids)]]
        return slots

    def _note(self, ids: I64, sizes: I64) -> None:
        slack = ((self._slots_of(ids) - sizes) // PAGE).astype(np.uint16)
        self._slack[ids] = slack
        self._slack_pages += int(slack.sum())

    def commit(self, places: U64) -> None:
        """Note that records are whole: a scan reads them from now on."""
        with self._lock:
            self.arena.commit(places - np.uint64(BASE))

    def free_of(self, size_class: int) -> int:
        with self._lock:
            return self._free_of(size_class)

    def _free_of(self, size_class: int) -> int:
        arena = self.arena
        return int(arena.chunk_free[arena.classes == size_class].sum())

    # -- leaving ----------------------------------------------------------------------------------

    def fence(self, places: U64, generations: U64) -> Mask:
        """Mark records that somebody begins to delete; return which he may: those that are there
        and nobody else deletes. ``generations`` may be UNKNOWN."""
        with self._lock:
            mine, _ = self.holding(places, generations)
            ids = self.ids(places[mine])
            self._unknown -= int((self._versions[ids] == UNKNOWN).sum())
            self._versions[ids] = LEAVING
            return mine

    def unfence(self, place: int, generation: int) -> None:
        """Note that a record is there still."""
        with self._lock:
            self._versions[self.ids(np.array([place], np.uint64))] = generation
            self._unknown += generation == UNKNOWN

    def free(self, places: U64) -> None:
        """Give slots back, whatever they hold. Raises ValueError for one that is free."""
        with self._lock:
            self._free(self.ids(places))

    def evict(self, places: U64, generations: U64) -> int:
        """Give back the slots that hold these versions; return how many there were.

        An UNKNOWN one is believed to: nobody else got it since the opening.
        """
        with self._lock:
            sure, maybe = self.holding(places, generations)
            ids = np.unique(self.ids(places[sure | maybe]))
            self._unknown -= int((self._versions[ids] == UNKNOWN).sum())
            self._free(ids)
            return len(ids)

    def _free(self, ids: I64) -> None:
        self._versions[ids] = NOTHING
        self._slack_pages -= int(self._slack[ids].sum())
        self._slack[ids] = 0
        places, chunks = self.arena.places(ids), self.arena.chunk_of(ids)
        closed = np.isin(chunks, list(self._closed))
        self.arena.free(places[~closed])
        for chunk in np.unique(chunks[closed]).tolist():
            self._closed[chunk].append(places[chunks == chunk])
            self._end_if_empty(chunk)

    # -- super-blocks -----------------------------------------------------------------------------

    def give(self, number: int, size_class: int) -> None:
        """Let a class have a super-block that holds nothing."""
        with self._lock:
            self.arena.give(number - 1, size_class)

    def adopt(self, number: int, size_class: int) -> None:
        """Let a class have a super-block that was found on disk: all its slots are UNKNOWN."""
        with self._lock:
            self.arena.give(number - 1, size_class, taken=True)
            ids = self.arena.ids_in(np.array([number - 1]))
            self._versions[ids] = UNKNOWN
            self._unknown += len(ids)

    def claim(self, places: U64, sizes: I64, generations: U64, *, complete: bool) -> None:
        """See :meth:`kvstore.backends.base.Engine.claim`; ``sizes`` are those of images."""
        places, first = np.unique(places, return_index=True)
        sizes, generations = sizes[first], generations[first]
        with self._lock:
            there = self.known(places)
            there[there] = sizes[there] <= self._slots_of(self.ids(places[there]))
            ids, sizes, generations = self.ids(places[there]), sizes[there], generations[there]
            fresh = self._versions[ids] == UNKNOWN
            self._versions[ids[fresh]] = generations[fresh]
            self._note(ids[fresh], sizes[fresh])
            self._unknown -= int(fresh.sum())
            if complete and self._unknown:
                chunks = np.flatnonzero(self.arena.classes != BLANK)
                ids = self.arena.ids_in(chunks)
                self._free(ids[self._versions[ids] == UNKNOWN])
                self._unknown = 0

    def take_empty(self) -> int:
        """Take a super-block that holds nothing from whoever has it; 0 if there is none."""
        with self._lock:
            if self._spare:
                return self._spare.pop()
            empty = self.arena.empty_chunks()
            if not len(empty):
                return 0
            self.arena.reassign(empty[:1])
            return int(empty[0]) + 1

    def close(self, number: int) -> bool:
        """Put nothing more into a super-block; return whether it holds nothing."""
        with self._lock:
            chunk = number - 1
            if self.arena.classes[chunk] == BLANK:
                return True
            if chunk not in self._closed:
                self._closed[chunk] = [self.arena.take_all(chunk)]
                self._end_if_empty(chunk)
            return chunk not in self._closed

    def reopen(self, number: int) -> None:
        with self._lock:
            for places in self._closed.pop(number - 1, ()):
                self.arena.free(places)

    def _end_if_empty(self, chunk: int) -> None:
        parts = self._closed[chunk]
        if sum(len(part) for part in parts) == self.arena.chunk_slots()[chunk]:
            del self._closed[chunk]
            self.arena.free(np.concatenate(parts))
            self.arena.reassign(np.array([chunk]))
            self._spare.append(chunk + 1)

    def groups(self, size: int) -> tuple[U32, U32, int]:
        """Return the super-blocks of the class of an image, those of other classes, and the free
        slots of the class; without those that are closed."""
        with self._lock:
            arena = self.arena
            size_class = int(arena.classes_of(np.array([size]))[0])
            chunks = np.flatnonzero(arena.classes != BLANK)
            chunks = chunks[~np.isin(chunks, list(self._closed))]
            own = arena.classes[chunks] == size_class
            numbers = (chunks + 1).astype(np.uint32)
            return numbers[own], numbers[~own], self._free_of(size_class)

    # -- looking ----------------------------------------------------------------------------------

    def occupied(self, number: int) -> tuple[U64, U64, int]:
        """Return the places in a super-block that hold a record or may, their generations or
        UNKNOWN, and the bytes of a slot; those being written are left out."""
        with self._lock:
            arena, chunk = self.arena, number - 1
            size_class = int(arena.classes[chunk])
            if size_class == BLANK:
                return np.zeros(0, np.uint64), np.zeros(0, np.uint64), 0
            ids = arena.ids_in(np.array([chunk]))
            versions = self._versions[ids]
            held = (arena.states[ids] == COMMITTED) & (versions != NOTHING) & (versions != LEAVING)
            return self.places(ids[held]), versions[held], self.slot_bytes[size_class]

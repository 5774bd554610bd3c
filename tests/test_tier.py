"""The memory tier: who leaves for whom, compared with a model in plain Python, and right bytes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest

from kvstore import record
from kvstore.columns import DIRTY, DISK, HIDDEN, MEM, U32, U64, WRITING
from kvstore.errors import Busy, UsageError
from kvstore.index import Index
from kvstore.pages import HUGE_PAGE, PAGE
from kvstore.tier import NO_SLOT, Tier, chunk_bytes

CHUNK_PAGES = 10
SPACE = 1 << 16
MIB = 1 << 20


class Bench:
    """A tier of small chunks over an index, and what the store would do around it."""

    def __init__(self, chunks: int = 6) -> None:
        self.index = Index(seed=1)
        self.tier = Tier(chunks * CHUNK_PAGES * PAGE, self.index, chunk=CHUNK_PAGES * PAGE)
        self.left: list[int] = []
        self.tier.on_leave(self._leave)
        self._made = 0

    def _leave(self, rows: U32) -> None:
        # By now the books are in order.
        assert (self.tier.find(rows) == NO_SLOT).all()
        assert (self.index.flags[rows] & MEM).all()
        self.left += rows.tolist()
        self.index.clear_flags(rows, MEM)

    def rows(self, *pages: int) -> U32:
        """Make rows on disk for payloads of so many pages; the first is the newest."""
        numbers = np.arange(self._made, self._made + len(pages), dtype=np.uint64)
        self._made += len(pages)
        keys = numbers.view(np.uint8).reshape(-1, 8)
        lengths = np.array(pages, np.uint32) * np.uint32(PAGE)
        rows = self.index.insert(SPACE, keys, lengths, numbers, 0)
        self.index.clear_flags(rows, WRITING)
        self.index.set_flags(rows, DISK)
        return rows

    def reserve(self, *pages: int) -> U64:
        return self.tier.reserve(sizes_of(*pages))

    def keep(self, rows: U32, flags: int = MEM) -> U64:
        """Bring rows into memory."""
        slots = self.tier.reserve(record.image_bytes_of(self.index.sizes[rows]))
        self.tier.keep(rows, slots)
        self.index.set_flags(rows, flags)
        return slots

    def put(self, *pages: int, flags: int = MEM) -> U32:
        """Make rows and keep each: the first is the oldest."""
        made = [self.rows(each) for each in pages]
        for rows in made:
            self.keep(rows, flags)
        return np.concatenate(made)

    def touch(self, *rows: int) -> None:
        """Use rows: the last becomes the newest."""
        self.index.touch(np.array(rows[::-1], np.uint32), 0)

    def inside(self, rows: U32) -> list[bool]:
        found: list[bool] = (self.tier.find(rows) != NO_SLOT).tolist()
        return found


def sizes_of(*pages: int) -> U32:
    return (np.array(pages, np.uint32) + np.uint32(1)) * np.uint32(PAGE)


def address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


# -- coming and looking ---------------------------------------------------------------------------


def test_what_is_kept_is_found_with_its_bytes() -> None:
    bench = Bench()
    rows = bench.rows(1, 4, 9)
    slots = bench.reserve(1, 4, 9)
    lengths = np.array([1, 4 * PAGE, 9 * PAGE - 1], np.uint32)
    views = bench.tier.views(slots, lengths)
    assert [len(view) for view in views] == [2 * PAGE, 5 * PAGE, 10 * PAGE]
    assert all(address(view) % PAGE == 0 for view in views)
    assert min(map(address, views)) % HUGE_PAGE == 0
    for number, view in enumerate(views):
        np.frombuffer(view, np.uint8)[:] = number + 1
    assert bench.inside(rows) == [False] * 3
    bench.tier.keep(rows, slots)
    assert bench.tier.find(rows[[2, 0, 2]]).tolist() == slots[[2, 0, 2]].tolist()
    again = bench.tier.views(bench.tier.find(rows), lengths)
    assert [set(bytes(view)) for view in again] == [{1}, {2}, {3}]


def test_any_row_may_be_asked_for() -> None:
    bench = Bench()
    asked = np.array([0, 1, 5, 1 << 20, 0xFFFFFFFF], np.uint32)
    assert bench.tier.find(asked).tolist() == [NO_SLOT] * 5
    assert bench.tier.find(asked[:0]).tolist() == []
    rows = bench.rows(*[1] * 5000)
    slots = bench.keep(rows[[4999, 0]])
    assert bench.tier.find(rows[[0, 1, 4998, 4999]]).tolist() == [
        slots[1], NO_SLOT, NO_SLOT, slots[0],
    ]  # fmt: skip
    last = bench.tier._where.ids.size - 1
    assert bench.tier.find(np.array([last, last + 1], np.uint32)).tolist() == [NO_SLOT] * 2


def test_figures() -> None:
    bench = Bench()
    tier = bench.tier
    assert (tier.bytes, tier.blocks) == (0, 0)
    assert (tier.capacity, tier.largest) == (60 * PAGE, 10 * PAGE)
    rows = bench.put(1, 9)
    slots = bench.reserve(4)
    assert (tier.bytes, tier.blocks) == ((2 + 10 + 5) * PAGE, 2)
    tier.give_back(slots)
    tier.drop(rows[:1])
    assert (tier.bytes, tier.blocks) == (10 * PAGE, 1)
    assert 30 * 5 < tier.state_bytes < 30 * 9 + 6 * 40 + 2 * PAGE
    assert 0 <= tier.huge_bytes <= tier.capacity


def test_what_can_be_kept() -> None:
    bench = Bench()
    assert bench.tier.fits(sizes_of(0, 1, 9, 10, 500)).tolist() == [True] * 3 + [False] * 2
    with pytest.raises(UsageError):
        bench.reserve(1, 10)
    assert bench.tier.bytes == 0


def test_no_memory_no_tier() -> None:
    tier = Tier(0, Index())
    assert (tier.capacity, tier.bytes, tier.blocks, tier.largest) == (0, 0, 0, 0)
    assert tier.fits(sizes_of(1, 2)).tolist() == [False, False]
    assert tier.find(np.array([0, 7], np.uint32)).tolist() == [NO_SLOT] * 2
    nothing = tier.reserve(sizes_of())
    tier.keep(np.zeros(0, np.uint32), nothing)
    tier.give_back(nothing)
    tier.drop(np.array([3], np.uint32))
    assert tier.detach(np.array([3], np.uint32)).tolist() == []
    with pytest.raises(UsageError):
        tier.reserve(sizes_of(1))


@pytest.mark.parametrize("mib", [1, 3, 4, 8, 63, 64, 100, 1000, 1024, 16 << 10, 1 << 20])
def test_chunks_suit_the_memory(mib: int) -> None:
    total = mib * MIB
    chunk = chunk_bytes(total)
    chunks = total // chunk
    assert chunk % PAGE == 0
    assert total - chunks * chunk < chunks * PAGE
    if mib >= 64:
        assert 4 * MIB < chunk < 76 * MIB
        for size in (128 << 10, 1 * MIB, 2 * MIB):
            assert chunks * (chunk // (size + PAGE)) * size >= total * 0.93
    if mib >= 2048:
        assert chunk >= 64 * MIB + PAGE
    if mib <= 8:
        assert chunk == total // chunks


@pytest.mark.parametrize("total", [1, PAGE, 2 * PAGE - 1, 2 * PAGE, 5 * PAGE])
def test_hardly_any_memory(total: int) -> None:
    assert Tier(total, Index()).fits(sizes_of(1)).tolist() == [total >= 2 * PAGE]


def test_each_row_has_one_slot() -> None:
    bench = Bench()
    rows = bench.rows(1, 1, 1)
    slots = bench.reserve(1, 1, 1)
    bench.tier.keep(rows[:1], slots[:1])
    before = bench.tier.find(rows)
    for wrong_rows, wrong_slots in (
        ([0, 1], [1, 2]), ([1, 1], [1, 2]), ([1, 2], [1, 1]), ([1, 2], [0, 1]), ([1, 2], [1]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="slot"):
            bench.tier.keep(rows[wrong_rows], slots[wrong_slots])
        assert bench.tier.find(rows).tolist() == before.tolist()
    bench.tier.keep(rows[1:], slots[1:])
    assert bench.tier.blocks == 3


def test_only_what_nobody_has_is_given_back() -> None:
    bench = Bench()
    slots = bench.keep(bench.rows(1))
    with pytest.raises(ValueError, match="belongs to a row"):
        bench.tier.give_back(slots)
    reserved = bench.reserve(1)
    bench.tier.give_back(reserved)
    with pytest.raises(ValueError, match="free already"):
        bench.tier.give_back(reserved)
    with pytest.raises(ValueError, match="being written"):
        bench.tier.keep(bench.rows(1), reserved)
    assert bench.tier.blocks == 1


# -- who leaves -----------------------------------------------------------------------------------


def test_nobody_leaves_while_there_is_room() -> None:
    bench = Bench()
    bench.put(*[9] * 6)
    assert bench.left == []


def test_the_row_unused_for_longest_leaves() -> None:
    bench = Bench()
    rows = bench.put(*[9] * 6)
    bench.touch(int(rows[0]), int(rows[2]))
    bench.put(9, 9)
    assert bench.left == rows[[1, 3]].tolist()
    bench.touch(int(rows[4]))
    bench.put(9, 9)
    assert bench.left == rows[[1, 3, 5, 0]].tolist()


def test_a_batch_takes_no_more_than_it_needs() -> None:
    bench = Bench()
    rows = bench.put(*[9] * 5)
    bench.reserve(9, 9, 9)
    assert bench.left == rows[:2].tolist()


@pytest.mark.parametrize("flags", [MEM | DIRTY, MEM | WRITING, DISK, DIRTY, HIDDEN])
def test_rows_that_are_not_clean_stay(flags: int) -> None:
    bench = Bench(2)
    stays = bench.put(9, flags=flags)
    goes = bench.put(9)
    bench.reserve(9)
    assert bench.left == goes.tolist()
    with pytest.raises(Busy):
        bench.reserve(9)
    assert bench.inside(stays) == [True]


def test_dirty_rows_are_told_when_it_is_their_turn() -> None:
    bench, told = Bench(), list[list[int]]()
    bench.tier.on_pressure(lambda rows: told.append(rows.tolist()))
    dirty = bench.put(9, 9, flags=MEM | DIRTY)
    clean = bench.put(9, 9, 9)
    younger = bench.put(9, flags=MEM | DIRTY)
    bench.touch(int(dirty[1]))
    bench.reserve(9)
    assert bench.left == clean[:1].tolist()
    assert told == [dirty[:1].tolist()]
    bench.index.acquire(dirty[:1])
    bench.reserve(9, 9)
    assert bench.left == clean.tolist()
    assert told == [dirty[:1].tolist()]
    with pytest.raises(Busy):
        bench.reserve(9)
    assert sorted(told[-1]) == [dirty[1], younger[0]], "nothing else is left"


def test_dirty_rows_that_become_clean_when_they_are_told_leave() -> None:
    bench = Bench()
    bench.tier.on_pressure(lambda rows: bench.index.clear_flags(rows, DIRTY))
    dirty = bench.put(9, 9, 9, flags=MEM | DIRTY)
    clean = bench.put(9, 9, 9)
    bench.reserve(9, 9)
    assert bench.left == dirty[:2].tolist()
    bench.index.acquire(clean)
    bench.reserve(*[1] * 5)
    assert bench.left == dirty.tolist()


def test_rows_with_references_stay() -> None:
    bench = Bench(2)
    rows = bench.put(9, 9)
    bench.index.acquire(rows)
    with pytest.raises(Busy):
        bench.reserve(9)
    bench.index.release(rows[1:])
    bench.reserve(9)
    assert bench.left == rows[1:].tolist()


def test_nobody_leaves_in_vain() -> None:
    bench = Bench()
    bench.put(*[9] * 3, flags=MEM | DIRTY)
    bench.put(*[9] * 3)
    with pytest.raises(Busy):
        bench.reserve(*[9] * 4)
    with pytest.raises(Busy):
        bench.reserve(*[1] * 16)
    with pytest.raises(Busy):
        bench.reserve(*[9] * 7)
    assert bench.left == []
    bench.reserve(*[1] * 15)
    assert len(bench.left) == 3


def test_more_than_all_of_memory_is_refused_before_anyone_leaves() -> None:
    bench = Bench()
    bench.put(*[9] * 6)
    for pages in ([9] * 7, [9] * 4 + [1] * 11, [9] * 5 + [1, 2]):
        with pytest.raises(Busy):
            bench.reserve(*pages)
    assert bench.left == []
    bench.reserve(*[9] * 4, 1, 2)
    assert len(bench.left) == 6


def test_a_row_written_meanwhile_leaves_in_its_turn() -> None:
    bench = Bench(3)
    rows = bench.put(9, flags=MEM | DIRTY)
    rows = np.append(rows, bench.put(9, 9))
    bench.put(9)
    assert bench.left == [rows[1]]
    bench.index.clear_flags(rows[:1], DIRTY)
    bench.put(9)
    assert bench.left == [rows[1], rows[0]]


def test_an_old_row_that_comes_back_is_still_the_oldest() -> None:
    bench = Bench(3)
    old = bench.rows(9)
    bench.put(9, 9, 9, 9)
    bench.left.clear()
    bench.keep(old)
    bench.left.clear()
    bench.put(9)
    assert bench.left == old.tolist()


# -- chunks ---------------------------------------------------------------------------------------


def test_a_class_takes_the_chunk_whose_newest_row_is_oldest() -> None:
    bench = Bench(3)
    rows = bench.put(*[4] * 6)
    # Chunks hold rows 0 1, 2 3, 4 5; the oldest row of all lies in a chunk that was used last.
    bench.touch(*rows[[5, 2, 3, 1]].tolist())
    bench.put(9)
    assert sorted(bench.left) == rows[4:].tolist()
    bench.left.clear()
    bench.put(9)
    # Its own row was used after those of chunk 1, which is older than chunk 0.
    assert sorted(bench.left) == rows[2:4].tolist()


def test_a_class_keeps_to_itself_while_its_own_rows_are_older() -> None:
    bench = Bench(3)
    own = bench.put(9)
    rows = bench.put(*[4] * 4)
    new = bench.put(9)
    assert bench.left == own.tolist()
    bench.touch(int(rows[0]), int(rows[2]))
    bench.put(9)
    assert bench.left == [*own.tolist(), *new.tolist()]


def test_one_row_in_use_keeps_a_chunk() -> None:
    bench = Bench(3)
    rows = bench.put(*[4] * 6)
    bench.index.set_flags(rows[1:2], DIRTY)
    bench.index.acquire(rows[2:3])
    bench.put(9)
    assert bench.left == rows[4:].tolist()
    with pytest.raises(Busy):
        bench.reserve(9, 9)
    bench.index.clear_flags(rows[1:2], DIRTY)
    bench.reserve(9, 9)
    assert sorted(bench.left[2:]) == [*rows[:2].tolist(), 6]


def test_a_slot_being_filled_keeps_a_chunk() -> None:
    bench = Bench(2)
    rows = bench.put(4, 4, 4)
    slots = bench.reserve(4)
    bench.put(9)
    assert bench.left == rows[:2].tolist()
    with pytest.raises(Busy):
        bench.reserve(9, 9)
    bench.tier.give_back(slots)
    bench.reserve(9)
    assert bench.left == [*rows.tolist()]


def test_an_empty_chunk_goes_first() -> None:
    bench = Bench(3)
    rows = bench.put(4, 4, 4, 4, 9)
    bench.tier.drop(rows[2:4])
    bench.put(9)
    assert bench.left == []
    bench.put(9)
    assert bench.left == rows[:2].tolist()


def test_empty_chunks_are_taken_as_needed() -> None:
    bench = Bench(3)
    rows = bench.put(*[4] * 6)
    bench.tier.drop(rows)
    bench.reserve(9)
    bench.put(*[4] * 4)
    assert bench.left == []


def test_own_rows_and_chunks_of_others_together() -> None:
    bench = Bench(4)
    others = bench.put(*[1] * 10)
    own = bench.put(9, 9)
    bench.touch(*others.tolist())
    bench.reserve(9, 9, 9)
    assert sorted(bench.left) == sorted([*others[:5].tolist(), *own.tolist()])


def test_a_mixed_batch() -> None:
    bench = Bench(4)
    rows = bench.put(9, 9, 9, 4, 4)
    slots = bench.reserve(9, 1, 4, 1)
    assert len(set(slots.tolist())) == 4
    # A chunk of the oldest for the smallest, the next for the larger, its own for the largest.
    assert bench.left == rows[:3].tolist()
    assert bench.tier.bytes == (2 * 2 + 3 * 5 + 10) * PAGE
    views = bench.tier.views(slots, np.array([9, 1, 4, 1], np.uint32) * np.uint32(PAGE))
    starts = sorted((address(view), len(view)) for view in views)
    assert all(a + n <= b for (a, n), (b, _) in pairwise(starts))


# -- leaving by name ------------------------------------------------------------------------------


def test_dropped_rows_are_forgotten_without_a_word() -> None:
    bench = Bench(2)
    rows = bench.put(9, 9)
    bench.index.set_flags(rows[:1], DIRTY)
    stranger = bench.rows(1)
    bench.tier.drop(np.concatenate([rows[:1], stranger, rows[:1]]))
    bench.tier.drop(np.array([0xFFFFFFFF, 99999], np.uint32))
    assert bench.inside(rows) == [False, True]
    assert len(bench.reserve(9)) == 1
    assert bench.left == []


def test_the_slot_of_a_dropped_row_waits_for_its_readers() -> None:
    bench = Bench(2)
    rows = bench.put(9, 9)
    bench.index.acquire(rows[[0, 0]])
    (slot,) = bench.tier.find(rows[:1])
    bench.tier.drop(rows)
    assert bench.inside(rows) == [False, False]
    assert len(bench.reserve(9)) == 1
    bench.index.release(rows[:1])
    with pytest.raises(Busy):
        bench.reserve(9)
    bench.index.release(rows[:1])
    assert bench.reserve(9).tolist() == [slot]


def test_a_dropped_row_may_come_back_while_its_old_slot_is_read() -> None:
    bench = Bench(2)
    rows = bench.put(9)
    bench.index.acquire(rows)
    old = bench.tier.find(rows)
    bench.tier.drop(rows)
    new = bench.keep(rows)
    assert bench.tier.find(rows).tolist() == new.tolist() != old.tolist()
    both = bench.tier.detach(rows)
    assert sorted(both.tolist()) == sorted([*old.tolist(), *new.tolist()])
    with pytest.raises(Busy):
        bench.reserve(9)
    bench.index.release(rows)
    with pytest.raises(Busy):
        bench.reserve(9)
    bench.tier.give_back(both)
    assert len(bench.reserve(9, 9)) == 2


def test_dropped_rows_wait_each_for_its_own_readers() -> None:
    bench = Bench(3)
    rows = bench.put(9, 9, 9)
    slots = bench.tier.find(rows)
    bench.index.acquire(rows)
    bench.tier.drop(rows[:2])
    bench.tier.drop(rows[2:])
    assert bench.tier.detach(rows[1:2]).tolist() == slots[1:2].tolist()
    bench.index.release(rows[2:])
    assert bench.reserve(9).tolist() == slots[2:].tolist()
    bench.index.release(rows[1:2])
    with pytest.raises(Busy):
        bench.reserve(9)
    bench.index.release(rows[:1])
    assert bench.reserve(9).tolist() == slots[:1].tolist()


def test_detached_slots_stay_until_they_are_given_back() -> None:
    bench = Bench(2)
    rows = bench.put(9, 9)
    where = bench.tier.find(rows)
    slots = bench.tier.detach(rows[:1])
    assert slots.tolist() == where[:1].tolist()
    assert bench.tier.detach(rows[:1]).tolist() == []
    assert (bench.tier.blocks, bench.tier.bytes) == (1, 20 * PAGE)
    bench.reserve(9)
    assert bench.left == rows[1:].tolist()
    with pytest.raises(Busy):
        bench.reserve(9)
    bench.tier.give_back(slots)
    assert bench.reserve(9).tolist() == slots.tolist()


def test_a_row_id_used_again_is_another_row() -> None:
    bench = Bench(2)
    first = bench.put(9, 9)
    bench.put(9)
    gone = first[:1]
    bench.index.free(bench.index.remove(gone))
    again = bench.rows(4)
    assert again.tolist() == gone.tolist()
    assert bench.inside(again) == [False]
    bench.keep(again)
    assert bench.inside(again) == [True]


# -- against a model ------------------------------------------------------------------------------


@dataclass
class Model:
    """Who must leave, in plain Python: places of slots are learnt, decisions are not."""

    chunks: dict[int, int | None]
    used: dict[int, int | None] = field(default_factory=dict)
    stamps: dict[int, int] = field(default_factory=dict)
    blocked: set[int] = field(default_factory=set)

    def places(self, chunk: int) -> list[int]:
        return [place for place in self.used if place >> 32 == chunk]

    def of(self, pages: int | None) -> list[int]:
        return [chunk for chunk, each in self.chunks.items() if each == pages]

    def stale(self, chunk: int) -> float:
        """Return the newest stamp of a chunk, infinity if something in it may not leave."""
        rows = [self.used[place] for place in self.places(chunk)]
        if any(row is None or row in self.blocked for row in rows):
            return math.inf
        return max(self.stamps[row] for row in rows if row is not None)

    def forget(self, rows: list[int]) -> None:
        for place in [place for place, row in self.used.items() if row in rows]:
            del self.used[place]

    def make_room(self, needed: Counter[int]) -> tuple[list[int], bool]:
        """Return who leaves for so many blocks of each number of pages, and whether that helps."""
        left: list[int] = []
        whole = sum(-(-count // self.each(pages)) for pages, count in needed.items())
        while lacking := self.lacking(needed):
            gone = self.step(*lacking[0]) if whole <= len(self.chunks) else None
            if gone is None:
                return left, False
            left += gone
            self.forget(gone)
        return left, True

    def each(self, pages: int) -> int:
        return CHUNK_PAGES // (pages + 1)

    def lacking(self, needed: Counter[int]) -> list[tuple[int, int]]:
        """Return classes that lack slots, and how many."""
        blank, found = len(self.of(None)), []
        for pages, count in sorted(needed.items()):
            each = self.each(pages)
            count -= sum(each - len(self.places(chunk)) for chunk in self.of(pages))
            granted = min(max(-(-count // each), 0), blank)
            blank -= granted
            if count > granted * each:
                found.append((pages, count - granted * each))
        return found

    def step(self, pages: int, short: int) -> list[int] | None:
        """Return who leaves first for a class that is short of slots, None if nobody may."""
        each = self.each(pages)
        others = [chunk for chunk, one in self.chunks.items() if one not in (None, pages)]
        empty = [chunk for chunk in others if not self.places(chunk)]
        if empty:
            self.chunks.update(dict.fromkeys(empty[: -(-short // each)]))
            return []
        mine = [self.used[place] for chunk in self.of(pages) for place in self.places(chunk)]
        clean = [row for row in mine if row is not None and row not in self.blocked]
        own = sorted(clean, key=self.stamps.__getitem__)[:short]
        before = self.stamps[own[0]] if len(own) == short else math.inf
        steal = sorted((chunk for chunk in others if self.stale(chunk) < before), key=self.stale)
        if len(own) + len(steal) * each < short:
            return None
        if not steal:
            return own
        missing = short if len(own) == short else short - len(own)
        steal = steal[: -(-missing // each)]
        self.chunks.update(dict.fromkeys(steal))
        return [self.used[place] or 0 for chunk in steal for place in self.places(chunk)]


class Play:
    """A long random play: every step is compared with the model, every byte with what was put."""

    def __init__(self, seed: int, chunks: int, pages: list[int]) -> None:
        self.rng = np.random.default_rng(seed)
        self.bench = Bench(chunks)
        self.model = Model(dict.fromkeys(range(chunks)))
        self.pages = pages
        self.outside: list[int] = []
        self.detached: list[int] = []

    @property
    def inside(self) -> list[int]:
        return sorted(row for row in self.model.used.values() if row is not None)

    def some(self, rows: list[int]) -> U32:
        return np.array([row for row in rows if self.rng.random() < 0.3], np.uint32)

    def length(self, row: int) -> int:
        return int(self.bench.index.sizes[row])

    def step(self) -> None:
        acts = [self.bring, self.bring, self.again, self.use, self.block, self.drop, self.detach]
        acts[int(self.rng.integers(len(acts)))]()
        self.compare()

    def bring(self) -> None:
        kinds = self.pages if self.rng.random() < 0.4 else self.rng.choice(self.pages, 1)
        pages = self.rng.choice(kinds, self.rng.integers(1, 4)).tolist()
        self.fill(self.bench.rows(*pages), pages)

    def again(self) -> None:
        """Bring rows back that have left, some without using them."""
        if self.outside:
            row = int(self.rng.choice(self.outside))
            if self.rng.random() < 0.5:
                self.bench.touch(row)
            self.fill(np.array([row], np.uint32), [self.length(row) // PAGE])

    def fill(self, rows: U32, pages: list[int]) -> None:
        bench, model = self.bench, self.model
        for row in rows.tolist():
            model.stamps[row] = int(bench.index.last_use[row])
        bench.left.clear()
        expected, helps = model.make_room(Counter(pages))
        if not helps:
            with pytest.raises(Busy):
                bench.reserve(*pages)
            assert sorted(bench.left) == sorted(expected)
            assert not expected or len(set(pages)) > 1
            self.outside = sorted({*self.outside, *expected, *rows.tolist()})
            return
        slots = bench.reserve(*pages)
        assert sorted(bench.left) == sorted(expected)
        self.outside = sorted({*self.outside, *expected} - set(rows.tolist()))
        for slot, each in zip(slots.tolist(), pages, strict=True):
            assert slot not in model.used
            assert model.chunks[slot >> 32] in (None, each)
            model.chunks[slot >> 32] = each
            model.used[slot] = None
        if self.rng.random() < 0.1:
            bench.tier.give_back(slots)
            self.outside = sorted({*self.outside, *rows.tolist()})
            for slot in slots.tolist():
                del model.used[slot]
            return
        for row, view in zip(rows.tolist(), self.views(rows, slots), strict=True):
            np.frombuffer(view, np.uint8)[:] = row % 251
        bench.tier.keep(rows, slots)
        bench.index.set_flags(rows, MEM)
        model.used.update(zip(slots.tolist(), rows.tolist(), strict=True))

    def views(self, rows: U32, slots: U64) -> list[memoryview]:
        return self.bench.tier.views(slots, self.bench.index.sizes[rows])

    def use(self) -> None:
        rows = self.some(self.inside)
        self.rng.shuffle(rows)
        self.bench.index.touch(rows, 0)
        for row in rows.tolist():
            self.model.stamps[row] = int(self.bench.index.last_use[row])

    def block(self) -> None:
        """Make rows dirty or read, or clean again."""
        index, blocked = self.bench.index, self.model.blocked
        for row in self.some([row for row in self.inside if row not in blocked])[:3]:
            index.set_flags(np.array([row]), DIRTY)
            blocked.add(int(row))
        for row in self.some(sorted(blocked)):
            index.clear_flags(np.array([row]), DIRTY)
            blocked.discard(int(row))

    def drop(self) -> None:
        rows = self.some(self.inside)[:2]
        self.bench.tier.drop(rows)
        self.gone(rows)
        self.model.forget(rows.tolist())

    def detach(self) -> None:
        rows = self.some(self.inside)[:1]
        slots = self.bench.tier.detach(rows).tolist()
        assert sorted(slots) == sorted(s for s, row in self.model.used.items() if row in rows)
        self.gone(rows)
        self.model.used.update(dict.fromkeys(slots))
        self.detached += slots
        if len(self.detached) > 2:
            self.bench.tier.give_back(np.array(self.detached, np.uint64))
            for slot in self.detached:
                del self.model.used[slot]
            self.detached = []

    def gone(self, rows: U32) -> None:
        self.bench.index.clear_flags(rows, MEM | DIRTY)
        self.model.blocked -= set(rows.tolist())
        self.outside = sorted({*self.outside, *rows.tolist()})

    def compare(self) -> None:
        tier, model = self.bench.tier, self.model
        filed = {row: slot for slot, row in model.used.items() if row is not None}
        rows = np.array(sorted({*filed, *self.outside}), np.uint32)
        wanted = [filed.get(row, NO_SLOT) for row in rows.tolist()]
        assert tier.find(rows).tolist() == wanted
        assert tier.blocks == len(filed)
        sizes = [((model.chunks[slot >> 32] or 0) + 1) * PAGE for slot in model.used]
        assert tier.bytes == sum(sizes)
        rows = np.array(list(filed), np.uint32)
        for row, view in zip(filed, self.views(rows, tier.find(rows)), strict=True):
            found = np.frombuffer(view, np.uint8)
            assert found[0] == found[-1] == row % 251
            assert len(view) == PAGE + self.length(row)


@pytest.mark.parametrize("seed", range(12))
def test_a_tier_does_what_the_model_does(seed: int) -> None:
    play = Play(seed, chunks=2 + seed % 5, pages=[[9], [4, 9], [1, 2, 4, 9], [1, 3]][seed % 4])
    for _ in range(300):
        play.step()
    assert len(play.outside) > 20


def test_the_order_is_exact_beyond_what_is_sorted_at_a_time() -> None:
    bench = Bench(600)
    rows = bench.put(*[1] * 3000)
    rng = np.random.default_rng(5)
    bench.touch(*rng.permutation(rows).tolist())
    bench.index.set_flags(rows[bench.index.last_use[rows].argsort()[:1500]], DIRTY)
    wanted = rows[bench.index.last_use[rows].argsort()]
    bench.put(*[1] * 10)
    assert bench.left == wanted[1500:1510].tolist()
    bench.touch(*wanted[1510:1520].tolist())
    bench.index.clear_flags(rows, DIRTY)
    bench.reserve(*[1] * 2000)
    assert sorted(bench.left[10:]) == sorted([*wanted[:1500].tolist(), *wanted[1520:2020].tolist()])

"""Slots: size classes, all or nothing, states, references, and the same rules for two keepers."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from kvstore.errors import Busy, UsageError
from kvstore.slots import (
    BLANK,
    COMMITTED,
    FREE,
    I64,
    MOST_REFERENCES,
    PAGE,
    U16,
    U64,
    WRITING,
    Arena,
    NoFreeSlots,
    Sizes,
    Slots,
)

CHUNK = 40 * PAGE
CHUNKS = 6


def sizes_of(*payload_pages: int) -> Sizes:
    return (np.array(payload_pages, np.uint32) + np.uint32(1)) * np.uint32(PAGE)


def classes_by_hand(most: int) -> list[int]:
    """Payload pages of each class, as the description has it."""
    pages = list(range(1, 9))
    for doubling in itertools.count():
        pages += [(8 << doubling) + (step << doubling) for step in range(1, 9)]
        if pages[-1] >= most:
            return [each for each in pages if each < most] + [most]
    raise AssertionError


class DictSlots(Slots):
    """The same with dicts and loops: the model that Arena is compared with."""

    def __init__(self, total_bytes: int, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.classes: dict[int, int | None] = dict.fromkeys(range(total_bytes // chunk_bytes))
        self.pages = classes_by_hand(chunk_bytes // PAGE - 1)
        self.states: dict[int, int] = {}
        self.references: Counter[int] = Counter()

    def class_of(self, size: int) -> int:
        for number, pages in enumerate(self.pages):
            if size <= (pages + 1) * PAGE:
                return number
        raise UsageError("too large")

    def each(self, size_class: int) -> int:
        return self.chunk_bytes // ((self.pages[size_class] + 1) * PAGE)

    def free_in(self, chunk: int) -> list[int]:
        size_class = self.classes[chunk]
        assert size_class is not None
        places = [chunk << 32 | number for number in range(self.each(size_class))]
        return [place for place in places if place not in self.states]

    def chunks(self, size_class: int | None) -> list[int]:
        return [chunk for chunk, each in self.classes.items() if each == size_class]

    def allocate(self, sizes: Sizes) -> U64:
        needed = Counter(self.class_of(size) for size in sizes.tolist())
        blank, lacking = self.chunks(None), {}
        given: dict[int, int | None] = {}
        for size_class, count in sorted(needed.items()):
            count -= sum(len(self.free_in(chunk)) for chunk in self.chunks(size_class))
            while count > 0 and blank:
                given[blank.pop(0)] = size_class
                count -= self.each(size_class)
            if count > 0:
                lacking[size_class] = count
        if lacking:
            raise NoFreeSlots(lacking)
        self.classes.update(given)
        places = [self._take(self.class_of(size)) for size in sizes.tolist()]
        return np.array(places, np.uint64)

    def _take(self, size_class: int) -> int:
        for chunk in self.chunks(size_class):
            for place in self.free_in(chunk):
                self.states[place] = WRITING
                return place
        raise AssertionError

    def commit(self, places: U64) -> None:
        if any(self.states.get(place) != WRITING for place in places.tolist()):
            raise ValueError("a slot is in another state")
        self.states.update(dict.fromkeys(places.tolist(), COMMITTED))

    def free(self, places: U64) -> None:
        named = places.tolist()
        if len(set(named)) < len(named):
            raise ValueError("a slot is in another state")
        if any(place not in self.states or self.references[place] for place in named):
            raise ValueError("a slot is in another state")
        for place in named:
            del self.states[place]

    def ids(self, places: U64) -> I64:
        return places.view(np.int64)

    def incr(self, ids: I64) -> None:
        more = Counter(ids.tolist())
        if any(slot not in self.states for slot in more):
            raise ValueError("a slot is in another state")
        if any(self.references[slot] + n > MOST_REFERENCES for slot, n in more.items()):
            raise ValueError("a slot has too many references")
        self.references += more

    def decr(self, ids: I64) -> None:
        less = Counter(ids.tolist())
        if any(self.references[place] < n for place, n in less.items()):
            raise ValueError("a slot is in another state")
        self.references -= less

    def counts(self, ids: I64) -> U16:
        return np.array([self.references[slot] for slot in ids.tolist()], np.uint16)

    def offsets(self, places: U64) -> I64:
        found = []
        for place in places.tolist():
            size_class = self.classes[place >> 32]
            assert size_class is not None
            step = (self.pages[size_class] + 1) * PAGE
            found.append((place >> 32) * self.chunk_bytes + (place & 0xFFFFFFFF) * step)
        return np.array(found, np.int64)


@pytest.fixture(params=[Arena, DictSlots])
def slots(request: pytest.FixtureRequest) -> Slots:
    made: Slots = request.param(CHUNKS * CHUNK + PAGE, CHUNK)
    return made


# -- what any keeper of slots does ----------------------------------------------------------------


def test_slots_do_not_overlap_and_lie_inside(slots: Slots) -> None:
    pages = [1, 3, 3, 9, 20, 1, 39]
    starts = slots.offsets(slots.allocate(sizes_of(*pages))).tolist()
    used: set[int] = set()
    for start, count in zip(starts, pages, strict=True):
        mine = set(range(start // PAGE, start // PAGE + count + 1))
        assert start % PAGE == 0
        assert not used & mine
        assert max(mine) < CHUNKS * 40
        assert start // CHUNK == (start + count * PAGE) // CHUNK
        used |= mine


def test_all_or_nothing(slots: Slots) -> None:
    held = slots.allocate(sizes_of(*[39] * 4, *[1] * 20))
    with pytest.raises(Busy) as caught:
        slots.allocate(sizes_of(*[2] * 12, *[3] * 12, *[1] * 3, 39, 39))
    assert isinstance(caught.value, NoFreeSlots)
    assert sorted(caught.value.lacking.values()) == [2, 12, 12]
    assert len(slots.allocate(sizes_of(*[9] * 4))) == 4
    slots.free(held)


def test_what_lacks_is_told_exactly(slots: Slots) -> None:
    slots.allocate(sizes_of(*[39] * 5))
    with pytest.raises(NoFreeSlots) as caught:
        slots.allocate(sizes_of(*[1] * 23, 9, 9))
    assert caught.value.lacking == {0: 3, 8: 2}
    assert len(slots.allocate(sizes_of(*[1] * 20))) == 20
    with pytest.raises(NoFreeSlots) as caught:
        slots.allocate(sizes_of(1))
    assert caught.value.lacking == {0: 1}


def test_free_slots_are_used_again(slots: Slots) -> None:
    held = slots.allocate(sizes_of(*[9] * 24))
    slots.free(held[[3, 7, 20]])
    assert sorted(slots.allocate(sizes_of(9, 9, 9)).tolist()) == sorted(held[[3, 7, 20]].tolist())


def test_no_sizes_no_slots(slots: Slots) -> None:
    none = slots.allocate(sizes_of())
    assert none.tolist() == []
    for act in (slots.commit, slots.free):
        act(none)
    for change in (slots.incr, slots.decr):
        change(slots.ids(none))
    assert slots.offsets(none).tolist() == slots.counts(slots.ids(none)).tolist() == []


def test_what_is_larger_than_a_chunk_fits_nowhere(slots: Slots) -> None:
    assert len(slots.allocate(sizes_of(39))) == 1
    with pytest.raises(UsageError):
        slots.allocate(sizes_of(1, 40))


def test_only_slots_being_written_are_committed(slots: Slots) -> None:
    held = slots.allocate(sizes_of(1, 1, 1))
    slots.commit(held[:2])
    with pytest.raises(ValueError, match="slot"):
        slots.commit(held[1:])
    slots.commit(held[2:])
    slots.free(held)
    with pytest.raises(ValueError, match="slot"):
        slots.commit(held)


def test_freeing_twice_is_noticed_and_changes_nothing(slots: Slots) -> None:
    held = slots.allocate(sizes_of(1, 1, 9))
    slots.free(held[:1])
    for wrong in (held, held[[1, 1]], held[[2, 1, 2]]):
        with pytest.raises(ValueError, match="slot"):
            slots.free(wrong)
    slots.free(held[1:])


def test_references_count_repeats_and_keep_a_slot(slots: Slots) -> None:
    held = slots.allocate(sizes_of(1, 5, 9))
    ids = slots.ids(held)
    slots.incr(ids[[0, 1, 0, 0]])
    assert slots.counts(ids).tolist() == [3, 1, 0]
    with pytest.raises(ValueError, match="slot"):
        slots.free(held[[2, 1]])
    slots.decr(ids[[0, 1, 0]])
    assert slots.counts(ids).tolist() == [1, 0, 0]
    slots.free(held[1:])
    slots.decr(ids[:1])
    slots.free(held[:1])


def test_more_is_never_given_back_than_taken(slots: Slots) -> None:
    ids = slots.ids(slots.allocate(sizes_of(1, 1, 1)))
    slots.incr(ids[[0, 1, 1]])
    for wrong in ([0, 0], [0, 2], [1, 0, 1, 1], [2] * (MOST_REFERENCES + 1)):
        with pytest.raises(ValueError, match="slot"):
            slots.decr(ids[wrong])
        assert slots.counts(ids).tolist() == [1, 2, 0]


def test_free_slots_cannot_be_referenced(slots: Slots) -> None:
    held = slots.allocate(sizes_of(1, 1))
    ids = slots.ids(held)
    slots.free(held[1:])
    for wrong in (ids, np.repeat(ids, 1 << 15)):
        for change in (slots.incr, slots.decr):
            with pytest.raises(ValueError, match="slot"):
                change(wrong)
    assert slots.counts(ids).tolist() == [0, 0]


def test_too_many_references_are_refused(slots: Slots) -> None:
    ids = slots.ids(slots.allocate(sizes_of(1, 1)))
    slots.incr(np.repeat(ids[:1], MOST_REFERENCES - 1))
    slots.incr(ids)
    for wrong in (ids, np.repeat(ids[1:], MOST_REFERENCES), np.repeat(ids[1:], 1 << 16)):
        with pytest.raises(ValueError, match="slot"):
            slots.incr(wrong)
        assert slots.counts(ids).tolist() == [MOST_REFERENCES, 1]
    for change in (slots.decr, slots.incr):
        change(np.repeat(ids, [MOST_REFERENCES, 1]))
    assert slots.counts(ids).tolist() == [MOST_REFERENCES, 1]


@pytest.mark.parametrize("seed", range(8))
def test_an_arena_does_what_the_model_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    arena, model = Arena(CHUNKS * CHUNK, CHUNK), DictSlots(CHUNKS * CHUNK, CHUNK)
    names: dict[int, int] = {}
    for _ in range(400):
        held = np.array(list(names), np.uint64)
        some = held[rng.random(len(held)) < 0.2]
        picked = rng.choice(some, rng.integers(0, 6)) if len(some) else some
        act = rng.choice(
            ["allocate", "commit", "free", "incr", "decr"], p=[0.3, 0.1, 0.2, 0.2, 0.2]
        )
        if act == "allocate":
            sizes = sizes_of(*rng.choice([1, 2, 7, 9, 18, 19, 39], rng.integers(0, 5)))
            got = outcome(arena, act, sizes)
            wanted = outcome(model, act, sizes)
        else:
            theirs = np.array([names[place] for place in picked.tolist()], np.uint64)
            by_id = act in ("incr", "decr")
            got = outcome(arena, act, arena.ids(picked) if by_id else picked)
            wanted = outcome(model, act, model.ids(theirs) if by_id else theirs)
        if isinstance(got, list) and isinstance(wanted, list):
            names.update(zip(got, wanted, strict=True))
        else:
            assert got == wanted
            if act == "free" and got is None:
                for place in picked.tolist():
                    del names[place]
        compare(arena, model, names)


def outcome(keeper: Slots, act: str, argument: Any) -> Any:
    """Return the places that were given, None for nothing, or how it failed."""
    try:
        found = getattr(keeper, act)(argument)
    except NoFreeSlots as error:
        return error.lacking
    except ValueError as error:
        return type(error)
    return None if found is None else found.tolist()


def compare(arena: Arena, model: DictSlots, names: dict[int, int]) -> None:
    held = np.array(list(names), np.uint64)
    theirs = list(names.values())
    assert len(set(names.values())) == len(names) == len(model.states)
    states = arena.states[arena.ids(held)].tolist()
    assert states == [model.states[place] for place in theirs]
    assert int((arena.states != FREE).sum()) == len(names)
    assert arena.counts(arena.ids(held)).tolist() == [model.references[place] for place in theirs]
    assert int(arena.references.sum()) == model.references.total()
    given = sorted(each for each in model.classes.values() if each is not None)
    assert sorted(each for each in arena.classes.tolist() if each != BLANK) == given
    assert arena.num_slots == sum(map(model.each, given))
    assert arena.num_free == arena.num_slots - len(names)
    sizes = [(model.pages[model.classes[place >> 32] or 0] + 1) * PAGE for place in theirs]
    assert arena.used_bytes == sum(sizes)
    starts = arena.offsets(held)
    order = np.argsort(starts)
    assert np.all(starts[order][1:] >= (starts + np.array(sizes, np.int64))[order][:-1])


# -- the arena ------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_pages", [2, 9, 10, 40, 1024, 1056, 65536])
def test_classes_are_exact_up_to_eight_pages_then_eight_per_doubling(chunk_pages: int) -> None:
    arena = Arena(2 * chunk_pages * PAGE, chunk_pages * PAGE)
    wanted = classes_by_hand(chunk_pages - 1)
    assert arena.num_classes == len(wanted)
    for size_class, pages in enumerate(wanted):
        exact, more = sizes_of(pages), sizes_of(pages) + 1
        assert arena.classes_of(exact).tolist() == [size_class]
        assert arena.slots_per_chunk(size_class) == chunk_pages // (pages + 1)
        if size_class + 1 < len(wanted):
            assert arena.classes_of(more).tolist() == [size_class + 1]
        else:
            assert arena.fits(np.concatenate([exact, more])).tolist() == [True, False]
    assert arena.classes_of(np.array([0, 1, PAGE, PAGE + 1], np.uint32)).tolist() == [0] * 4


def test_no_image_loses_more_than_an_eighth_to_its_class() -> None:
    arena = Arena(256 << 20, 256 << 20)
    pages = np.arange(1, 65535)
    classes = np.array(classes_by_hand(65535))[arena.classes_of(sizes_of(*pages.tolist()))]
    assert (classes >= pages).all()
    assert ((classes - pages) * 8 <= pages).all()


def test_a_header_of_another_size() -> None:
    arena = Arena(32 * PAGE, 16 * PAGE, header=0)
    assert arena.slots_per_chunk(0) == 16
    places = arena.allocate(np.array([1, PAGE, 2 * PAGE, 16 * PAGE - 1], np.uint32)[:3])
    assert arena.offsets(places).tolist() == [0, PAGE, 16 * PAGE]


@pytest.mark.parametrize(
    ("total", "chunk", "header"),
    [(-1, CHUNK, PAGE), (CHUNK, PAGE, PAGE), (CHUNK, CHUNK + 1, PAGE), (CHUNK, CHUNK, 100),
     (1 << 30, 512 << 20, 0)],
)  # fmt: skip
def test_space_that_cannot_be_cut_is_refused(total: int, chunk: int, header: int) -> None:
    with pytest.raises(UsageError):
        Arena(total, chunk, header)


def test_the_largest_chunk_has_as_many_slots_as_a_u16_counts() -> None:
    arena = Arena(256 << 20, 256 << 20, header=0)
    places = arena.allocate(np.full(1 << 16, PAGE, np.uint32))
    assert places.tolist() == list(range(1 << 16))
    arena.free(places[-1:])
    assert arena.allocate(np.array([1], np.uint32)).tolist() == [0xFFFF]


@pytest.mark.parametrize("total", [0, CHUNK - 1])
def test_an_arena_without_space_holds_nothing(total: int) -> None:
    arena = Arena(total, CHUNK)
    assert (arena.capacity, arena.num_chunks, arena.num_slots, arena.used_bytes) == (0, 0, 0, 0)
    assert arena.fits(sizes_of(1)).tolist() == [False]
    assert arena.allocate(sizes_of()).tolist() == []
    with pytest.raises(UsageError):
        arena.allocate(sizes_of(1))


def test_blocks_of_a_batch_lie_side_by_side() -> None:
    arena = Arena(CHUNKS * CHUNK, CHUNK)
    assert np.diff(arena.offsets(arena.allocate(sizes_of(*[3] * 10)))).tolist() == [4 * PAGE] * 9


def test_the_fullest_chunk_is_filled_first() -> None:
    arena = Arena(CHUNKS * CHUNK, CHUNK)
    held = arena.allocate(sizes_of(*[9] * 12))
    arena.free(held[[0, 1, 2, 4, 5, 8]])
    places = arena.allocate(sizes_of(9, 9))
    assert (places >> np.uint64(32)).tolist() == [2, 1]
    arena.free(held[3:4])
    assert arena.empty_chunks().tolist() == [0]
    assert arena.chunk_free.tolist() == [4, 1, 0, 0, 0, 0]


def test_the_lowest_free_slot_goes_first() -> None:
    arena = Arena(CHUNKS * CHUNK, CHUNK)
    held = arena.allocate(sizes_of(*[3] * 10))
    arena.free(held[[8, 2, 5]])
    assert arena.allocate(sizes_of(3, 3, 3)).tolist() == held[[2, 5, 8]].tolist()


def test_only_empty_chunks_go_to_another_class() -> None:
    arena = Arena(2 * CHUNK, CHUNK)
    held = arena.allocate(sizes_of(*[9] * 5))
    with pytest.raises(NoFreeSlots):
        arena.allocate(sizes_of(39))
    for wrong in ([0], [1], [0, 1]):
        with pytest.raises(ValueError, match="without a slot in use"):
            arena.reassign(np.array(wrong))
    arena.free(held[4:])
    arena.reassign(np.array([1]))
    assert arena.classes.tolist() == [8, BLANK]
    assert (arena.num_slots, arena.num_free) == (4, 0)
    with pytest.raises(ValueError, match="without a slot in use"):
        arena.reassign(np.array([1]))
    assert arena.offsets(arena.allocate(sizes_of(39))).tolist() == [CHUNK]


def test_chunks_needed_counts_whole_chunks() -> None:
    arena = Arena(CHUNKS * CHUNK, CHUNK)
    assert arena.chunks_needed(sizes_of()) == 0
    assert arena.chunks_needed(sizes_of(*[1] * 20)) == 1
    assert arena.chunks_needed(sizes_of(*[1] * 21, 9, 39, 39)) == 5


def test_places_are_numbers_that_anyone_can_read() -> None:
    arena = Arena(CHUNKS * CHUNK, CHUNK)
    places = arena.allocate(sizes_of(*[1] * 22))
    assert places[[0, 19, 20, 21]].tolist() == [0, 19, 1 << 32, 1 << 32 | 1]
    assert arena.places(arena.ids(places)).tolist() == places.tolist()
    assert arena.ids(places[::2]).tolist() == arena.ids(places)[::2].tolist()
    assert arena.chunk_of(arena.ids(places))[[19, 20]].tolist() == [0, 1]
    assert arena.ids_in(np.array([1, 0])).tolist() == [
        *range(arena.stride, arena.stride + 20),
        *range(20),
    ]


@pytest.mark.parametrize("place", [20, 1 << 32 | 20, CHUNKS << 32, 0xFFFFFFFFFFFFFFFF])
def test_other_numbers_are_no_places(place: int) -> None:
    arena = Arena(CHUNKS * CHUNK, CHUNK)
    arena.allocate(sizes_of(*[1] * 120))
    wrong = np.array([0, place], np.uint64)
    for act in (arena.ids, arena.commit, arena.free, arena.offsets):
        with pytest.raises(ValueError, match="names no slot"):
            act(wrong)


@pytest.mark.parametrize("slot", [-(1 << 63), -120, -1, 120, 1 << 40])
def test_other_numbers_are_no_ids(slot: int) -> None:
    arena = Arena(CHUNKS * CHUNK, CHUNK)
    arena.incr(arena.ids(arena.allocate(sizes_of(*[1] * 120))))
    for change in (arena.incr, arena.decr):
        for wrong in (np.array([0, slot]), np.array([0, slot] * 20_000)):
            with pytest.raises(IndexError):
                change(wrong)
    for change_one in (arena.incr_one, arena.decr_one):
        with pytest.raises((IndexError, ValueError)):
            change_one(slot)
    assert (arena.references == 1).all()


def test_one_reference_at_a_time() -> None:
    arena = Arena(CHUNKS * CHUNK, CHUNK)
    held = arena.allocate(sizes_of(*[1] * 21))
    ids = arena.ids(held)
    last = int(ids[-1])
    arena.incr_one(last)
    arena.incr_one(last)
    assert arena.counts(ids[-2:]).tolist() == [0, 2]
    arena.decr_one(last)
    arena.decr_one(last)
    with pytest.raises(ValueError, match="fewer references"):
        arena.decr_one(last)
    arena.incr(np.repeat(ids[-1:], MOST_REFERENCES))
    with pytest.raises(ValueError, match="too many references"):
        arena.incr_one(last)
    assert arena.counts(ids[-1:]).tolist() == [MOST_REFERENCES]
    arena.decr(np.repeat(ids[-1:], MOST_REFERENCES))
    arena.free(held[-1:])
    for change_one in (arena.incr_one, arena.decr_one):
        with pytest.raises(ValueError, match="free"):
            change_one(last)
    assert not arena.references.any()


def test_nobody_can_change_what_is_shown() -> None:
    arena = Arena(CHUNKS * CHUNK, CHUNK)
    arena.allocate(sizes_of(1))
    for name in ("states", "references", "classes", "chunk_free"):
        shown = getattr(arena, name)
        with pytest.raises(ValueError, match="read-only"):
            shown[0] = 1
    for name in ("num_slots", "num_free", "num_chunks", "chunk_bytes", "capacity", "states"):
        with pytest.raises(AttributeError):
            setattr(arena, name, 1)
    assert arena.state_bytes < 6 * arena.stride * CHUNKS + 100


def test_a_chunk_given_with_all_its_slots_taken() -> None:
    arena = Arena(CHUNKS * CHUNK, CHUNK)
    arena.give(2, 0, taken=True)
    ids = arena.ids_in(np.array([2]))
    assert (arena.states[ids] == COMMITTED).all()
    assert arena.num_free == 0
    arena.incr(ids)
    arena.decr(ids)
    arena.free(arena.places(ids[1:3]))
    assert arena.num_free == 2
    assert sorted(arena.ids(arena.allocate(sizes_of(1, 1))).tolist()) == ids[1:3].tolist()
    with pytest.raises(ValueError, match="blank"):
        arena.give(2, 1)


def test_all_free_slots_of_a_chunk() -> None:
    arena = Arena(CHUNKS * CHUNK, CHUNK)
    held = arena.allocate(sizes_of(1, 1, 1))
    chunk = int(held[0] >> np.uint64(32))
    rest = arena.take_all(chunk)
    assert len(rest) == arena.slots_per_chunk(0) - 3
    assert not np.isin(rest, held).any()
    assert arena.num_free == 0
    arena.free(np.append(rest, held))
    assert arena.empty_chunks().tolist() == [chunk]

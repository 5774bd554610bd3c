"""What is required of slots and of those who use them: R1 to R11, by tests of that number.

The other rules of slots are in test_slots, those of the memory tier in test_tier.
"""

from __future__ import annotations

import contextlib
import inspect
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.answers import BlockStatus
from kvstore.core import REMOVED
from kvstore.errors import Busy, EngineError
from kvstore.keys import KeyArray, key_array
from kvstore.slots import COMMITTED, FREE, PAGE, U32, WRITING, Arena, NoFreeSlots, Slots
from tests.stores import CAPACITY, MIB, Local, block, key

CHUNK = 40 * PAGE


def images(count: int, pages: int = 2) -> U32:
    return np.full(count, pages * PAGE, np.uint32)


@pytest.fixture
def arena() -> Arena:
    return Arena(6 * CHUNK, CHUNK)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    opened = Local(tmp_path / "store", memory_bytes=8 * MIB)
    yield opened
    opened.kill()


def fill(local: Local, first: int = 0, count: int = 70) -> None:
    for number in range(first, first + count):
        assert local.put([key(number)], [block(number, MIB)]) == [BlockStatus.OK]


def test_r1_ids_are_contiguous_and_lead_to_chunk_and_offset_by_divmod(arena: Arena) -> None:
    places = arena.allocate(images(45))
    ids = arena.ids(places)
    assert ids.tolist() == list(range(45))
    assert arena.places(ids).tolist() == places.tolist()
    chunk, number = np.divmod(ids, arena.stride)
    offsets = arena.offsets(places)
    assert offsets.tolist() == (chunk * arena.chunk_bytes + number * 2 * PAGE).tolist()
    assert not (offsets % PAGE).any()


def test_r2_counts_lie_in_one_array_and_go_up_and_down_in_batches(arena: Arena) -> None:
    ids = arena.ids(arena.allocate(images(20)))
    arena.incr(np.tile(ids, 3))
    assert arena.references.dtype == np.uint16
    assert arena.references[ids].tolist() == [3] * 20
    arena.decr(np.tile(ids, 3))
    for wrong in (ids[:1], ids):
        with pytest.raises(ValueError, match="fewer references"):
            arena.decr(wrong)
    assert not arena.references.any()


def test_r3_what_is_shown_cannot_be_changed(arena: Arena) -> None:
    for name in ("num_slots", "num_free", "chunk_bytes", "states", "references"):
        with pytest.raises(AttributeError):
            setattr(arena, name, 0)
    for name in ("states", "references", "classes", "chunk_free"):
        assert not getattr(arena, name).flags.writeable


def test_r4_the_interface_stands_apart() -> None:
    assert inspect.isabstract(Slots)
    assert {"allocate", "commit", "free", "ids", "incr", "decr"} <= Slots.__abstractmethods__
    assert issubclass(Arena, Slots)


def test_r5_all_or_nothing_and_never_silently(arena: Arena) -> None:
    arena.allocate(images(119))
    with pytest.raises(NoFreeSlots) as caught:
        arena.allocate(images(3))
    assert isinstance(caught.value, Busy)
    assert caught.value.lacking == {0: 2}
    assert arena.num_free == 1


def test_r6_states_are_explicit_and_a_slot_in_use_stays(arena: Arena) -> None:
    places = arena.allocate(images(2))
    ids = arena.ids(places)
    assert arena.states[:3].tolist() == [WRITING, WRITING, FREE]
    arena.commit(places[:1])
    assert arena.states[:3].tolist() == [COMMITTED, WRITING, FREE]
    arena.incr(ids[:1])
    with pytest.raises(ValueError, match="references"):
        arena.free(places)
    arena.decr(ids[:1])
    arena.free(places)
    assert not arena.states.any()


@pytest.mark.parametrize("method", ["put_many", "get_many_into"])
def test_r6_what_fails_gives_back_slots_and_references(
    local: Local, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    fill(local, count=12)

    def fail(*arguments: object, **more: object) -> None:
        raise EngineError("on order")

    with monkeypatch.context() as patched:
        patched.setattr(local.core.engine, method, fail)
        job = local.store.get(local.namespace, 0, key_array([key(0)]), MIB)
        with contextlib.suppress(EngineError):
            local.store.run(job)
        job.close()
        local.put([key(99)], [block(99, MIB)])
    local.store.run_chores()
    assert not local.core.index.references.any()
    assert local.core.bounce.free_bytes == local.core.bounce.capacity
    assert WRITING not in local.core.tier._arena.states
    assert local.get([key(0)]) == [block(0, MIB)]
    fill(local, first=200, count=12)


def test_r7_the_least_recently_used_go_first_and_a_chain_from_its_end(local: Local) -> None:
    chain = [key(1000 + n) for n in range(10)]
    local.put(chain, [block(n, MIB) for n in range(10)], chain=True)
    fill(local, count=40)
    local.get([key(n) for n in range(20)])
    fill(local, first=40, count=24)
    there = local.contains(chain)
    assert there == sorted(there, reverse=True)
    assert not all(there)
    assert all(local.contains([key(n) for n in range(20)]))


def test_r7_a_slot_never_committed_is_the_first_to_be_used_again(arena: Arena) -> None:
    places = arena.allocate(images(60))
    arena.commit(places[:-1])
    arena.free(places[-1:])
    assert arena.allocate(images(1)).tolist() == places[-1:].tolist()


def test_r8_restored_blocks_can_be_evicted(local: Local) -> None:
    fill(local)
    local.kill()
    again = Local(local.path)
    restored = again.contains([key(n) for n in range(70)])
    fill(again, first=100)
    assert sum(restored) > 50
    assert not any(again.contains([key(n) for n in range(70)]))
    again.kill()


def test_r9_less_capacity_than_content_evicts_the_oldest(tmp_path: Path) -> None:
    local = Local(tmp_path / "large", capacity=2 * CAPACITY)
    fill(local, count=110)
    local.kill()
    again = Local(tmp_path / "large", capacity=CAPACITY)
    there = again.contains([key(n) for n in range(110)])
    assert there == sorted(there)
    assert 40 < sum(there) < 64
    again.kill()


def test_r10_every_eviction_is_told(local: Local) -> None:
    told: list[bytes] = []

    def watch(first: int, kinds: np.ndarray, keys: KeyArray) -> None:
        told.extend(one.tobytes() for one in keys[kinds == REMOVED])

    local.store.subscribe(local.namespace, watch)
    fill(local, count=90)
    there = local.contains([key(n) for n in range(90)])
    assert sorted(told) == sorted(key(n) for n in range(90) if not there[n])
    assert len(told) > 20


def test_r11_no_object_for_each_slot() -> None:
    arena = Arena(20_000 * 2 * PAGE, 400 * PAGE)
    tracemalloc.start()
    try:
        places = arena.allocate(images(20_000))
        ids = arena.ids(places)
        for act in (arena.incr, arena.decr):
            act(ids)
        arena.commit(places)
        arena.free(places[::2])
        objects = sum(one.count for one in tracemalloc.take_snapshot().statistics("filename"))
    finally:
        tracemalloc.stop()
    assert objects < 1000

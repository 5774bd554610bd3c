"""The memory tier and deferred writes, as the store uses them, in one thread."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvstore import service
from kvstore.answers import Ack, BlockStatus
from kvstore.backends.base import Status
from kvstore.columns import DIRTY, DISK, MEM
from kvstore.errors import EngineError
from kvstore.keys import key_array
from kvstore.record import payload_checksum
from kvstore.store import Store
from kvstore.testing import Fault, FaultyEngine
from kvstore.wire import Gone
from kvstore.writer import LateError
from tests.stores import MIB, Local, block, key

OK = BlockStatus.OK


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    opened = Local(tmp_path / "store", capacity=256 * MIB, memory_bytes=64 * MIB)
    yield opened
    opened.kill()


def flags(local: Local, number: int) -> int:
    rows = local.core.index.find(0, key_array([key(number)]))
    return int(local.core.index.flags[rows[0]])


def accept(local: Local, numbers: list[int], size: int = 5000) -> None:
    """Put without letting the writer work."""
    job = local.begin_put(
        [key(n) for n in numbers], [block(n, size) for n in numbers], level=Ack.ACCEPTED
    )
    job.perform()
    local.store.finish(job)
    assert job.statuses.tolist() == [OK] * len(numbers)


def hits_without_disk(local: Local) -> int:
    return local.core.counters.memory_hits


def test_an_accepted_block_is_read_before_it_is_written(local: Local) -> None:
    accept(local, [1, 2])
    assert flags(local, 1) == MEM | DIRTY
    assert local.files() == []
    job = local.store.get(local.namespace, 0, key_array([key(1)]), MIB)
    job.perform()
    local.store.finish(job)
    assert bytes(job.payload(0)) == block(1, 5000)
    job.close()
    assert local.store.status()["dirty_blocks"] == 2
    local.store.run_chores()
    assert flags(local, 1) == MEM | DISK
    assert len(local.files()) == 2
    assert local.store.status()["dirty_blocks"] == 0


def test_a_burst_of_puts_is_written_after_a_pause_in_one_go(local: Local) -> None:
    calls: list[Callable[[], None]] = []
    local.core.timer = lambda _, act: calls.append(act)
    for number in range(4):
        accept(local, [number])
    local.store.run_chores()
    assert (local.files(), len(calls)) == ([], 1)
    calls.pop()()
    assert len(local.core.chores) == 1
    local.store.run_chores()
    assert len(local.files()) == 4
    accept(local, [5])
    assert len(calls) == 1


def test_whoever_waits_for_a_write_ends_the_pause(local: Local) -> None:
    local.core.timer = lambda _, act: None
    accept(local, [1])
    local.flush()
    assert len(local.files()) == 1
    accept(local, [2])
    assert local.put([key(3)], [block(3)]) == [OK]
    assert len(local.files()) == 3


def test_blocks_are_hits_in_memory_after_a_put_and_after_a_read(local: Local) -> None:
    local.put([key(1)], [block(1)])
    assert local.get([key(1)]) == [block(1)]
    assert hits_without_disk(local) == 1
    local.stop()
    again = Local(local.path, memory_bytes=64 * MIB)
    assert again.get([key(1)]) == [block(1)]
    assert hits_without_disk(again) == 0
    assert again.get([key(1), key(1)]) == [block(1)] * 2
    assert hits_without_disk(again) == 2
    again.kill()


def test_batches_larger_than_the_tier_work(local: Local) -> None:
    """Fault 6 of the source system: a get of more than fits memory ended in an exception."""
    names, blocks = [key(n) for n in range(100)], [block(n, MIB) for n in range(100)]
    for start in range(0, 100, 10):
        assert local.put(names[start : start + 10], blocks[start : start + 10]) == [OK] * 10
    assert local.get(names) == blocks
    assert local.get(names[::-1]) == blocks[::-1]
    assert local.store.status()["memory_bytes"] <= 64 * MIB  # type: ignore[operator]


def test_what_memory_gives_up_is_read_off_the_disk(local: Local) -> None:
    for n in range(120):
        local.put([key(n)], [block(n, MIB)])
    assert flags(local, 0) == DISK
    assert flags(local, 119) == MEM | DISK
    assert local.get([key(0)]) == [block(0, MIB)]
    assert flags(local, 0) == MEM | DISK


def test_leaving_memory_is_no_eviction(local: Local) -> None:
    for n in range(120):
        local.put([key(n)], [block(n, MIB)])
    assert local.core.counters.evictions == 0
    assert local.contains([key(n) for n in range(120)]) == [True] * 120


def test_a_put_waits_for_the_level_it_asks_for(local: Local) -> None:
    accept(local, [1])
    for level in (Ack.WRITTEN, Ack.DURABLE):
        job = local.begin_put([key(1)], [block(1, 5000)], level=level)
        answered: list[Ack] = []
        job.when_answered(partial(answered.append, level))
        job.perform()
        local.store.finish(job)
        if level is Ack.WRITTEN:
            assert not answered
        local.store.run_chores()
        assert answered == [level]
        assert job.statuses.tolist() == [BlockStatus.ALREADY_PRESENT]
    assert len(local.files()) == 1


def test_a_durable_put_of_a_written_block_syncs(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.put([key(1)], [block(1)])
    flushed: list[bool] = []

    def flush() -> None:
        flushed.append(True)

    monkeypatch.setattr(local.core.engine, "flush", flush)
    assert local.put([key(1)], [block(1)], durable=True) == [BlockStatus.ALREADY_PRESENT]
    assert flushed


def test_two_puts_of_one_key_write_it_once(local: Local) -> None:
    first = local.begin_put([key(1)], [block(1)])
    second = local.begin_put([key(1), key(2)], [block(1), block(2)])
    for job in (second, first):
        job.perform()
        local.store.finish(job)
    local.store.run_chores()
    assert first.statuses.tolist() == [OK]
    assert second.statuses.tolist() == [BlockStatus.ALREADY_PRESENT, OK]
    assert len(local.files()) == 2
    assert local.core.counters.stored == 2


def test_a_put_that_joined_a_failed_one_writes_its_own_copy(local: Local) -> None:
    first = local.begin_put(
        [key(1)], [block(1)], checksums=np.array([1234], np.uint64), level=Ack.ACCEPTED
    )
    second = local.begin_put([key(1)], [block(1)])
    for job in (first, second):
        job.perform()
        local.store.finish(job)
    local.store.run_chores()
    assert first.statuses.tolist() == [BlockStatus.MISMATCH]
    assert second.statuses.tolist() == [OK]
    assert local.get([key(1)]) == [block(1)]


def test_a_payload_that_is_not_what_was_announced_is_refused(local: Local) -> None:
    sums = np.array([payload_checksum(block(1)), 5, payload_checksum(block(3))], np.uint64)
    job = local.begin_put(
        [key(n) for n in (1, 2, 3)], [block(n) for n in (1, 2, 3)], checksums=sums
    )
    local.store.run(job)
    assert job.statuses.tolist() == [OK, BlockStatus.MISMATCH, OK]
    assert local.contains([key(2)]) == [False]
    assert local.get([key(1), key(3)]) == [block(1), block(3)]
    assert local.put([key(2)], [block(2)]) == [OK]


def test_a_deleted_dirty_block_is_not_written(local: Local) -> None:
    accept(local, [1, 2])
    assert local.delete([key(1)]) == 1
    local.store.run_chores()
    assert local.contains([key(1), key(2)]) == [False, True]
    assert len(local.files()) == 1
    local.kill()
    again = Local(local.path)
    assert again.contains([key(1), key(2)]) == [False, True]
    again.kill()


def test_a_block_deleted_while_it_is_written_does_not_stay(local: Local) -> None:
    accept(local, [1, 2])
    write = local.store.chores.popleft()
    write.perform()
    statuses, removals = local.store.delete(local.namespace, 0, key_array([key(1)]))
    assert statuses.tolist() == [OK]
    local.store.run(removals[0])
    local.store.finish(write)
    local.store.run_chores()
    assert removals[1].done
    assert local.contains([key(1), key(2)]) == [False, True]
    assert len(local.files()) == 1


def test_late_errors_are_kept_for_the_next_who_asks_if_the_first_has_gone(local: Local) -> None:
    errors = [LateError("00" * 16, 0, "ab", "the disk failed")]
    local.core.writer.errors = errors

    class Asked:
        """A flush whose client has gone by the time of the answer."""

        connection = SimpleNamespace(may_hear_of=lambda _: True)

        def __init__(self) -> None:
            self.server = self

        async def store(self) -> Store:
            return local.store

        def dispatch(self) -> None:
            local.store.run_chores()

        async def answer(self, _: bytes) -> None:
            assert not local.core.writer.errors
            raise Gone

    with pytest.raises(Gone):
        asyncio.run(service.flush(Asked()))  # type: ignore[arg-type]
    assert local.store.take_errors() == errors


def test_late_errors_name_the_keys(local: Local) -> None:
    accept(local, [1])
    local.store.run_chores()
    engine = local.core.engine
    local.core.engine = FaultyEngine(engine, [Fault("put_many", status=Status.FAILED)])
    local.core.engine.is_open = True
    accept(local, [2, 3])
    local.store.run_chores()
    errors = local.flush()
    assert [error.key for error in errors] == [key(2).hex(), key(3).hex()]
    assert local.flush() == []
    assert local.get([key(2)]) == [block(2, 5000)], "memory still has it"
    assert local.store.status()["dirty_blocks"] == 0


def test_a_drain_says_what_was_lost(local: Local) -> None:
    engine = local.core.engine
    local.core.engine = FaultyEngine(engine, [Fault("put_many", status=Status.FAILED, times=9)])
    local.core.engine.is_open = True
    accept(local, [2])
    with pytest.raises(EngineError, match=key(2).hex()):
        local.store.drain()


def test_dirty_blocks_are_bounded_and_the_rest_waits_for_the_disk(local: Local) -> None:
    numbers = list(range(20))
    job = local.begin_put(
        [key(n) for n in numbers],
        [block(n, MIB) for n in numbers[:15]] + [block(0, MIB)] * 5,
        level=Ack.ACCEPTED,
    )
    answered: list[bool] = []
    job.when_answered(lambda: answered.append(True))
    job.perform()
    local.store.finish(job)
    assert local.store.status()["dirty_bytes"] <= 16 * MIB  # type: ignore[operator]
    assert not answered, "what had no room in memory is answered when it is written"
    local.store.run_chores()
    assert answered
    assert job.statuses.tolist() == [OK] * 20


def test_an_overwrite_replaces_the_block(local: Local) -> None:
    local.put([key(1)], [block(1)], chain=True)
    local.put([key(2)], [block(2)], parent=key(1))
    job = local.begin_put([key(1)], [block(7, 9000)], overwrite=True)
    local.store.run(job)
    assert job.statuses.tolist() == [OK]
    assert local.get([key(1), key(2)]) == [block(7, 9000), block(2)]
    assert len(local.files()) == 2
    local.kill()
    again = Local(local.path)
    assert again.get([key(1), key(2)]) == [block(7, 9000), block(2)]
    assert len(again.files()) == 2
    again.kill()


def test_a_reader_keeps_the_version_that_it_found(local: Local) -> None:
    local.put([key(1)], [block(1)])
    reading = local.store.get(local.namespace, 0, key_array([key(1)]), MIB)
    job = local.begin_put([key(1)], [block(7, 9000)], overwrite=True)
    local.store.run(job)
    local.store.run(reading)
    assert bytes(reading.payload(0)) == block(1)
    reading.close()
    local.store.run_chores()
    assert local.get([key(1)]) == [block(7, 9000)]
    assert len(local.files()) == 1


def test_targets_are_filled(local: Local) -> None:
    local.put([key(n) for n in range(3)], [block(n) for n in range(3)])
    memory = bytearray(3 * 8192)
    views = [memoryview(memory)[n * 8192 : n * 8192 + (4096 if n else 100)] for n in range(3)]
    job = local.store.get(local.namespace, 0, key_array([key(n) for n in range(3)]), MIB, views)
    local.store.run(job)
    job.close()
    assert job.statuses.tolist() == [BlockStatus.TOO_LARGE, OK, OK]
    assert job.lengths.tolist() == [4096] * 3
    assert memory[8192 : 8192 + 4096] == block(1)
    assert not any(memory[100:8192])
    assert job.checksums[1] == payload_checksum(block(1))


def test_a_large_get_is_shared_between_workers(local: Local) -> None:
    numbers = [number for number in range(40) if number % 3]
    local.put([key(n) for n in numbers], [block(n, MIB) for n in numbers])
    for path in local.files()[:2]:
        path.write_bytes(path.read_bytes()[: 600 << 10])
    local.core.tier.drop(rows := local.rows()[::2])
    local.core.index.clear_flags(rows, MEM)
    targets = [memoryview(bytearray(MIB)) for _ in range(40)]
    names = key_array([key(n) for n in range(40)])
    job = local.store.get(local.namespace, 0, names, 64 * MIB, targets)
    assert len(job.acts()) > 1
    local.store.run(job)
    assert job.count == 40
    right = [bytes(targets[n]) == block(n, MIB) for n in range(40)]
    assert right == (job.statuses == OK).tolist()
    assert len(numbers) - 2 <= sum(right) < len(numbers)
    job.close()


def test_warming_leaves_workers_to_others(local: Local) -> None:
    numbers = range(20)
    local.put([key(n) for n in numbers], [block(n, MIB) for n in numbers])
    names = key_array([key(n) for n in numbers])
    job = local.store.warm(local.namespace, 0, names, 16 * MIB)
    assert len(job.acts()) == 1
    local.store.run(job)
    assert job.in_memory.all()
    job.close()


def test_a_lease_keeps_a_block(local: Local) -> None:
    local.put([key(0)], [block(0, MIB)])
    local.store.contains(local.namespace, 0, key_array([key(0)]), 30.0)
    for n in range(1, 300):
        local.put([key(n)], [block(n % 7, MIB)])
    assert local.contains([key(0), key(1)]) == [True, False]


def test_events_are_numbered(local: Local) -> None:
    seen: list[tuple[int, list[int], list[bytes]]] = []
    local.put([key(9)], [block(9)])
    watch = local.store.subscribe(
        local.namespace,
        lambda first, kinds, keys: seen.append(
            (first, kinds.tolist(), [bytes(one) for one in keys])
        ),
    )
    assert watch.next_sequence == 2
    local.put([key(1), key(2)], [block(1), block(2)])
    local.delete([key(1)])
    watch.close()
    local.put([key(3)], [block(3)])
    assert seen == [(2, [1, 1], [key(1), key(2)]), (4, [2], [key(1)])]
    assert local.store.subscribe(local.namespace, print).next_sequence == 6


def test_pins_survive_a_kill(local: Local) -> None:
    local.put([key(0), key(1)], [block(0, MIB), block(1, MIB)])
    keys = key_array([key(0), key(1), key(5)])
    statuses = local.store.pin(local.namespace, 0, keys, 1000.0)
    assert statuses.tolist() == [OK, OK, BlockStatus.MISS]
    assert local.store.unpin(local.namespace, 0, keys[1:]).tolist() == [OK, BlockStatus.MISS]
    local.store.run_chores()
    local.kill()
    again = Local(local.path, capacity=256 * MIB)
    assert len(again.core.index.pins) == 1
    for n in range(10, 300):
        again.put([key(n)], [block(n % 7, MIB)])
    assert again.contains([key(0), key(1)]) == [True, False]
    again.kill()


def test_a_flip_in_memory_is_a_miss_and_the_disk_helps(local: Local) -> None:
    local.put([key(1)], [block(1)])
    rows = local.core.index.find(0, key_array([key(1)]))
    slots = local.core.tier.find(rows)
    local.core.tier.views(slots, np.array([4096], np.uint32))[0][5000] ^= 1
    assert local.get([key(1)]) == [None]
    assert local.core.counters.memory_errors == 1
    assert local.get([key(1)]) == [block(1)]
    assert local.core.counters.corrupt_blocks == 0


def test_nothing_is_held_after_all_of_it(local: Local) -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        numbers = rng.integers(0, 80, 4).tolist()
        local.put(
            [key(n) for n in numbers],
            [block(n, int(1 + n * 9001 % MIB)) for n in numbers],
            durable=bool(rng.integers(2)),
        )
        local.get([key(n) for n in rng.integers(0, 80, 4).tolist()])
        if rng.integers(3) == 0:
            local.delete([key(int(rng.integers(80)))])
    core = local.core
    assert not core.index.references.any()
    assert core.bounce.free_bytes == core.bounce.capacity
    assert (core.coming, core.going, core.writing, core.active) == (0, 0, {}, set())
    assert core.writer.dirty_bytes == core.writer.dirty_blocks == 0
    in_memory = int(((core.index.flags[local.rows()] & MEM) != 0).sum())
    assert core.tier.blocks == in_memory
    assert len(local.files()) == core.index.blocks


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_block_that_the_disk_refused_can_be_put_again(local: Local, overwrite: bool) -> None:
    engine = local.core.engine
    local.core.engine = FaultyEngine(engine, [Fault("put_many", status=Status.FAILED)])
    local.core.engine.is_open = True
    accept(local, [2])
    local.store.run_chores()
    assert flags(local, 2) == MEM
    reading = local.store.get(local.namespace, 0, key_array([key(2)]), MIB)
    waiting = local.begin_put([key(2)], [block(2, 5000)], overwrite=overwrite)
    local.store.run(waiting)
    assert waiting.statuses.tolist() == [BlockStatus.BUSY], "somebody reads it"
    local.store.run(reading)
    reading.close()
    again = local.begin_put([key(2)], [block(2, 5000)], overwrite=overwrite)
    local.store.run(again)
    assert again.statuses.tolist() == [OK]
    assert flags(local, 2) == MEM | DISK
    assert local.get([key(2)]) == [block(2, 5000)]


def test_who_waits_for_a_block_is_not_told_about_another_in_its_row(local: Local) -> None:
    accept(local, [1])
    waiting = local.begin_put([key(1)], [block(1, 5000)])
    answered: list[bool] = []
    waiting.when_answered(partial(answered.append, True))
    waiting.perform()
    local.store.finish(waiting)
    assert not answered
    local.store.run_chores()
    assert answered
    assert waiting.statuses.tolist() == [BlockStatus.ALREADY_PRESENT]


def test_a_block_that_the_disk_refused_and_memory_gave_up_is_gone(local: Local) -> None:
    """Its row stayed behind, and the key could never be put again."""
    told: list[tuple[int, bytes]] = []
    local.store.subscribe(
        local.namespace,
        lambda _first, kinds, keys: told.extend(
            zip(kinds.tolist(), [bytes(one) for one in keys], strict=True)
        ),
    )
    engine = local.core.engine
    local.core.engine = FaultyEngine(engine, [Fault("put_many", status=Status.FAILED)])
    local.core.engine.is_open = True
    accept(local, [1], MIB)
    local.store.run_chores()
    for n in range(100, 170):
        local.put([key(n)], [block(n % 7, MIB)])
    assert local.get([key(1)]) == [None]
    assert told[0] == (1, key(1))
    assert (2, key(1)) in told
    assert len(local.core.index.rows_of(None)) == 70
    assert local.put([key(1)], [block(1)]) == [OK]
    assert local.get([key(1)]) == [block(1)]


def test_a_parent_that_was_written_before_its_child_survives_a_kill(local: Local) -> None:
    """The child came when its parent was unknown, and was written after it."""
    child = local.begin_put([key(2)], [block(2)], parent=key(1), level=Ack.ACCEPTED)
    assert local.put([key(1)], [block(1)]) == [OK]
    local.store.run(child)
    assert local.flush() == []
    local.kill()
    again = Local(local.path)
    assert again.contains([key(1), key(2)]) == [True, True]
    again.kill()


def test_a_put_is_gone_when_it_is_answered(tmp_path: Path) -> None:
    """Not when the collector of garbage comes by: it holds views of memory of its client."""
    local = Local(tmp_path / "store", memory_bytes=16 * MIB)
    gc.disable()
    try:
        for overwrite in (False, True):
            for level in Ack:
                job = local.begin_put([key(1)], [block(1)], level=level, overwrite=overwrite)
                left = weakref.ref(job)
                local.store.run(job)
                del job
                assert left() is None, (level, overwrite)
    finally:
        gc.enable()
    local.kill()

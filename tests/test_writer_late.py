"""``write = late``: what waits in memory, what makes it go, what may be refused, what a kill takes.

Blocks are of 1 MiB where memory is to be filled: then a tier of 64 MiB has room for about 60, and
16 of them may be dirty.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.answers import Ack, BlockStatus
from kvstore.columns import DIRTY, DISK, GHOST, MEM, NONE, U32, Bools
from kvstore.errors import Busy
from kvstore.keys import key_array
from kvstore.protocol import Op
from tests.command import run_command
from tests.stores import MIB, Local, block, key
from tests.talk import Talker, bare

OK, AGAIN = BlockStatus.OK, BlockStatus.ALREADY_PRESENT
AGE = 100.0


def opened(path: Path, **changes: Any) -> Local:
    values = {"capacity": 256 * MIB, "memory_bytes": 64 * MIB, "max_dirty_age": AGE}
    return Local(path, **{**values, "write": "late", **changes})


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    made = opened(tmp_path / "store")
    yield made
    made.kill()


def accept(local: Local, *numbers: int, size: int = 5000, **more: Any) -> None:
    """Put blocks and let everything happen that happens by itself."""
    names, blocks = [key(n) for n in numbers], [block(n, size) for n in numbers]
    job = local.begin_put(names, blocks, level=Ack.ACCEPTED, **more)
    local.store.run(job)
    assert job.statuses.tolist() == [OK] * len(numbers)


def rows_of(local: Local, *numbers: int) -> U32:
    return local.core.index.find(0, key_array([key(n) for n in numbers]))


def flags(local: Local, *numbers: int) -> list[int]:
    """Return the flags of blocks, without those about syncs; 0 where there is no row."""
    rows, known = rows_of(local, *numbers), local.core.index.flags
    return [int(known[row]) & (MEM | DIRTY | DISK | GHOST) if row != NONE else 0 for row in rows]


def refuse_all(rows: U32) -> Bools:
    return np.zeros(len(rows), np.bool_)


def fill(local: Local, first: int, count: int) -> None:
    """Bring blocks to memory that are on disk: they are written, leave, and are read."""
    for n in range(first, first + count):
        local.put([key(n)], [block(n % 7, MIB)])


def tick(local: Local, now: float) -> None:
    local.store._upkeep.tick(now)
    local.store.run_chores()


def figures(local: Local) -> tuple[int, int]:
    return local.core.writer.dirty_blocks, local.core.writer.dirty_bytes


# -- waiting --------------------------------------------------------------------------------------


def test_the_engine_sees_an_accepted_block_at_its_age(local: Local) -> None:
    accept(local, 1, 2)
    for now in (0.0, 50.0, AGE - 1):
        tick(local, now)
    assert flags(local, 1, 2) == [MEM | DIRTY] * 2
    assert local.files() == []
    assert local.get([key(1), key(2)]) == [block(1, 5000), block(2, 5000)]
    assert local.store.status()["write"] == "late"
    assert figures(local) == (2, 2 * 12288)
    tick(local, AGE)
    assert flags(local, 1, 2) == [MEM | DISK] * 2
    assert len(local.files()) == 2
    assert figures(local) == (0, 0)


def test_each_put_has_its_own_age(local: Local) -> None:
    accept(local, 1)
    tick(local, 0.0)
    accept(local, 2)
    tick(local, AGE / 2)
    tick(local, AGE)
    assert flags(local, 1, 2) == [MEM | DISK, MEM | DIRTY]
    tick(local, AGE * 1.5)
    assert flags(local, 2) == [MEM | DISK]


def test_through_writes_at_once(tmp_path: Path) -> None:
    local = opened(tmp_path / "store", write="through")
    accept(local, 1)
    assert flags(local, 1) == [MEM | DISK]
    assert local.store.status()["write"] == "through"
    local.kill()


def test_without_memory_nothing_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    local = opened(tmp_path / "store", memory_bytes=0)
    assert "write = late changes nothing" in caplog.text
    accept(local, 1)
    assert flags(local, 1) == [DISK]
    local.kill()


def test_a_flush_writes_what_waits_and_makes_it_durable(local: Local) -> None:
    accept(local, 1, 2)
    local.core.late.admission = refuse_all
    assert local.flush() == []
    assert flags(local, 1, 2) == [MEM | DISK] * 2
    generations = local.core.index.generations[rows_of(local, 1, 2)]
    assert (generations <= local.core.synced_generation).all()


def test_a_sync_does_not_vouch_for_what_waits(local: Local) -> None:
    accept(local, 1)
    barrier = local.store.flush()
    accept(local, 2)
    local.put([key(3)], [block(3)])
    local.store.run_chores()
    assert barrier.failure is None
    later = local.store.flush()
    assert local.core.index.generations[rows_of(local, 2)][0] > local.core.synced_generation
    local.store.run_chores()
    assert later.failure is None
    assert local.core.index.generations[rows_of(local, 3)][0] <= local.core.synced_generation


def test_a_stop_writes_what_waits(tmp_path: Path) -> None:
    local = opened(tmp_path / "store")
    accept(local, *range(20))
    local.core.late.admission = refuse_all
    local.stop()
    again = opened(tmp_path / "store")
    assert again.get([key(n) for n in range(20)]) == [block(n, 5000) for n in range(20)]
    again.kill()


@pytest.mark.parametrize("level", [Ack.WRITTEN, Ack.DURABLE])
def test_a_put_that_asks_for_more_writes_that_block_only(local: Local, level: Ack) -> None:
    accept(local, 1, 2, 3)
    local.core.late.admission = refuse_all
    job = local.begin_put([key(2)], [block(2, 5000)], level=level)
    local.store.run(job)
    assert job.statuses.tolist() == [AGAIN]
    assert flags(local, 1, 2, 3) == [MEM | DIRTY, MEM | DISK, MEM | DIRTY]
    assert figures(local) == (2, 2 * 12288)
    assert local.flush() == []
    assert local.get([key(n) for n in (1, 2, 3)]) == [block(n, 5000) for n in (1, 2, 3)]
    assert len(local.files()) == 3


def test_a_new_block_for_which_somebody_waits_is_not_late(local: Local) -> None:
    local.core.late.admission = refuse_all
    assert local.put([key(1)], [block(1)]) == [OK]
    assert local.put([key(2)], [block(2)], durable=True) == [OK]
    assert flags(local, 1, 2) == [MEM | DISK] * 2


def test_a_waiting_block_can_be_overwritten(local: Local) -> None:
    accept(local, 1)
    job = local.begin_put([key(1)], [block(7, 9000)], overwrite=True)
    local.store.run(job)
    assert job.statuses.tolist() == [OK]
    assert local.get([key(1)]) == [block(7, 9000)]
    assert len(local.files()) == 1


def test_a_waiting_block_that_is_deleted_is_not_written(local: Local) -> None:
    accept(local, 1, 2)
    assert local.delete([key(1)]) == 1
    assert figures(local) == (1, 12288)
    accept(local, 3)  # perhaps in the row of the first
    assert local.flush() == []
    assert local.get([key(1), key(2), key(3)]) == [None, block(2, 5000), block(3, 5000)]
    assert len(local.files()) == 2
    assert figures(local) == (0, 0)


def test_what_is_over_the_bound_is_written_before_the_answer(local: Local) -> None:
    for n in range(30):
        accept(local, n, size=MIB)
    limit = local.core.tier.capacity // 4
    assert limit - 2 * MIB < local.core.writer.dirty_bytes <= limit
    assert flags(local, 0, 29) == [MEM | DIRTY, DISK]


# -- memory ---------------------------------------------------------------------------------------


def test_a_block_whose_turn_it_is_to_leave_memory_is_written(local: Local) -> None:
    accept(local, 1, size=MIB)
    accept(local, 2, size=MIB)
    fill(local, 100, 55)
    assert flags(local, 1) == [MEM | DIRTY], "memory is not full"
    local.get([key(2)])
    fill(local, 200, 8)
    assert flags(local, 1, 2) == [DISK, MEM | DIRTY], "the second was used since"
    assert flags(local, 100) == [DISK]
    assert local.core.counters.refused_admission == 0
    assert local.get([key(1)]) == [block(1, MIB)]


def test_a_block_written_on_leaving_memory_counts_as_used_then(local: Local) -> None:
    accept(local, 1, size=MIB)
    fill(local, 100, 70)
    assert flags(local, 1) == [DISK]
    stamps = local.core.index.last_use[rows_of(local, 1, 100, 155)]
    assert stamps[0] > stamps[1]
    tick(local, 0.0)
    local.kill()
    again = opened(local.path)
    stamps = again.core.index.last_use[rows_of(again, 1, 100, 155)]
    assert stamps[0] > stamps[1]


def test_a_block_that_is_used_while_it_is_written_stays_in_memory(local: Local) -> None:
    accept(local, 1, size=MIB)
    local.core.late.press(rows_of(local, 1))
    local.store.chores.popleft().mark_done()
    local.core.writer.pump()
    write = local.store.chores.popleft()
    write.perform()
    reading = local.store.get(local.namespace, 0, key_array([key(1)]), 2 * MIB)
    reading.perform()
    local.store.finish(reading)
    reading.close()
    local.store.finish(write)
    assert flags(local, 1) == [MEM | DISK]


def test_memory_with_nothing_but_waiting_blocks_makes_room(local: Local) -> None:
    """Every chunk has a dirty block of a size of its own, and a block of another size comes."""
    tier = local.core.tier
    sizes = [tier.largest // n // 4096 * 4096 - 4096 for n in range(2, 18)]
    for number, size in enumerate(sizes):
        accept(local, number, size=size)
    assert local.core.writer.dirty_blocks == len(sizes)
    with pytest.raises(Busy):
        tier.reserve(np.array([tier.largest], np.uint32))
    local.store.run_chores()
    assert figures(local) == (0, 0)
    tier.give_back(tier.reserve(np.array([tier.largest], np.uint32)))
    blocks = [block(number, size) for number, size in enumerate(sizes)]
    assert local.get([key(number) for number in range(len(sizes))]) == blocks


def test_a_put_that_meets_only_waiting_blocks_comes_through(local: Local) -> None:
    """As above, with all of them refused: there is room without any write."""
    tier = local.core.tier
    local.core.late.admission = refuse_all
    for number, n in enumerate(range(2, 18)):
        accept(local, number, size=tier.largest // n // 4096 * 4096 - 4096)
    accept(local, 99, size=tier.largest - 4096)
    assert flags(local, 99) == [MEM | DIRTY]
    assert local.core.counters.refused_admission == 16
    assert local.files() == []


def test_refused_blocks_make_room_at_once(local: Local) -> None:
    local.core.late.admission = refuse_all
    for n in range(10):
        accept(local, n, size=MIB)
    fill(local, 100, 55)
    left = local.contains([key(n) for n in range(10)])
    assert left == sorted(left), "the oldest go first"
    assert local.core.counters.refused_admission == left.count(False) > 0
    assert local.core.writer.dirty_blocks == left.count(True) > 0
    assert local.contains([key(100 + n) for n in range(55)]) == [True] * 55


# -- admission ------------------------------------------------------------------------------------


def test_a_refused_block_is_counted_and_no_error(local: Local) -> None:
    local.core.late.admission = lambda rows: rows == rows_of(local, 2)[0]
    accept(local, 1, 2, 3)
    local.later(AGE)
    assert flags(local, 1, 2, 3) == [MEM, MEM | DISK, MEM]
    assert local.store.status()["refused_admission"] == 2
    assert figures(local) == (0, 0)
    assert local.get([key(1), key(3)]) == [block(1, 5000), block(3, 5000)]
    assert local.flush() == []
    assert len(local.files()) == 1


def test_a_refused_block_that_left_memory_is_a_miss_and_can_be_put_again(local: Local) -> None:
    told: list[tuple[int, bytes]] = []

    def watch(_first: int, kinds: np.ndarray, keys: np.ndarray) -> None:
        told.extend(zip(kinds.tolist(), [bytes(one) for one in keys], strict=True))

    local.core.late.admission = refuse_all
    accept(local, 1, size=MIB)
    local.later(AGE)
    local.store.subscribe(local.namespace, watch)
    rows = len(local.core.index.rows_of(None))
    fill(local, 100, 62)
    assert local.get([key(1)]) == [None]
    assert (2, key(1)) in told
    assert rows_of(local, 1).tolist() == [NONE]
    assert len(local.core.index.rows_of(None)) == rows - 1 + 62
    assert local.put([key(1)], [block(1)]) == [OK]
    assert local.get([key(1)]) == [block(1)]


def test_a_parent_of_a_written_block_is_never_refused(local: Local) -> None:
    accept(local, 1, 2, 3, 4, chain=True)
    accept(local, 10, 11, chain=True)
    local.put([key(5)], [block(5)], parent=key(3))
    local.core.late.admission = refuse_all
    local.later(AGE)
    assert flags(local, 1, 2, 3) == [MEM | DISK] * 3
    assert flags(local, 4, 10, 11) == [MEM] * 3


def test_a_parent_of_an_admitted_block_is_not_refused(local: Local) -> None:
    accept(local, 1, 2, 3, 4, chain=True)
    local.core.late.admission = lambda rows: rows == rows_of(local, 3)[0]
    local.later(AGE)
    assert flags(local, 1, 2, 3, 4) == [MEM | DISK, MEM | DISK, MEM | DISK, MEM]


def test_what_somebody_holds_is_not_refused(local: Local) -> None:
    accept(local, 1, 2, 3)
    local.core.late.admission = refuse_all
    local.store.contains(local.namespace, 0, key_array([key(1)]), 30.0)
    local.store.pin(local.namespace, 0, key_array([key(2)]), 1000.0)
    local.later(AGE)
    assert flags(local, 1, 2, 3) == [MEM | DISK, MEM | DISK, MEM]


# -- kills ----------------------------------------------------------------------------------------


def test_a_kill_takes_what_was_accepted_and_nothing_else(local: Local) -> None:
    accept(local, 1, 2)
    local.put([key(3)], [block(3)])
    local.kill()
    again = opened(local.path)
    assert again.get([key(1), key(2), key(3)]) == [None, None, block(3)]
    accept(again, 1)
    assert again.flush() == []
    assert again.get([key(1)]) == [block(1, 5000)]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_link_to_a_parent_that_a_kill_took_stays(local: Local, checkpoint: bool) -> None:
    accept(local, 1, 2, chain=True)
    local.put([key(3)], [block(3)], parent=key(2))
    if checkpoint:
        local.store.checkpoint()
        local.store.run_chores()
    local.kill()
    again = opened(local.path)
    assert again.contains([key(1), key(2), key(3)]) == [False, False, True]
    assert flags(again, 2) == [GHOST]
    # Row ids of what is gone are given to others: those must not pass for ancestors.
    accept(again, 21, 22, 23)
    assert again.flush() == []
    again.kill()
    third = opened(local.path)
    (last,) = rows_of(third, 3).tolist()
    assert third.core.index.ancestors(last).tolist() == rows_of(third, 2).tolist()
    accept(third, 1, 2, chain=True)
    assert third.core.index.ancestors(last).tolist() == rows_of(third, 2, 1).tolist()
    third.kill()


def test_a_parent_that_was_written_while_its_child_waited_survives(local: Local) -> None:
    accept(local, 2, parent=key(1))
    assert local.put([key(1)], [block(1)]) == [OK]
    assert local.flush() == []
    local.kill()
    again = opened(local.path)
    assert again.contains([key(1), key(2)]) == [True, True]


def test_a_pin_on_a_waiting_block_survives(local: Local) -> None:
    accept(local, 1)
    local.store.pin(local.namespace, 0, key_array([key(1)]), 1000.0)
    local.store.run_chores()
    assert local.flush() == []
    local.kill()
    again = opened(local.path)
    assert list(again.core.index.pins) == rows_of(again, 1).tolist()


def test_uses_while_a_block_waits_are_in_its_order_of_use(local: Local) -> None:
    accept(local, 1)
    accept(local, 2)
    local.get([key(1)])
    tick(local, 0.0)
    assert local.flush() == []
    local.kill()
    again = opened(local.path)
    first, second = again.core.index.last_use[rows_of(again, 1, 2)]
    assert first > second


# -- all together ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_random_use_never_gives_wrong_bytes_and_holds_nothing(tmp_path: Path, seed: int) -> None:
    """Puts in chains, reads, deletes, pressure, refusals, ages and kills against a plain dict."""
    rng, now = np.random.default_rng(seed), 0.0
    local = opened(tmp_path / "store", memory_bytes=16 * MIB, max_dirty_age=5.0)
    written: set[int] = set()

    def chance(rows: U32) -> Bools:
        return rng.random(len(rows)) < 0.5

    for _ in range(250):
        local.core.late.admission = chance
        first, kind = int(rng.integers(60)), rng.integers(10)
        numbers = list(range(first, min(first + int(rng.integers(1, 5)), 60)))
        names = [key(n) for n in numbers]
        blocks = [block(n, 1 + n * 9001 % (600 << 10)) for n in numbers]
        if kind < 5:
            level = Ack.ACCEPTED if kind < 4 else Ack.WRITTEN
            parent = key(first - 1) if first and rng.integers(2) else b""
            try:
                job = local.begin_put(names, blocks, level=level, chain=True, parent=parent)
            except Busy:
                local.store.run_chores()
                continue
            local.store.run(job)
            assert set(job.statuses.tolist()) <= {OK, AGAIN}
            if level is Ack.WRITTEN:
                written.update(numbers)
        elif kind < 8:
            for found, wanted in zip(local.get(names), blocks, strict=True):
                assert found in (None, wanted)
        elif kind < 9:
            local.delete(names)
            written.difference_update(numbers)
        elif rng.integers(3):
            now += 2.0
            tick(local, now)
        else:
            local.kill()
            local = opened(tmp_path / "store", memory_bytes=16 * MIB, max_dirty_age=5.0)
        assert all(local.contains([key(n) for n in sorted(written)]))
        dirty = (local.core.index.flags & DIRTY) != 0
        assert local.core.writer.dirty_blocks == dirty.sum() == len(local.core.late._by_row)
    assert local.flush() == []
    core = local.core
    assert not core.index.references.any()
    assert core.bounce.free_bytes == core.bounce.capacity
    assert (core.coming, core.going, core.writing, core.active) == (0, 0, {}, set())
    assert figures(local) == (0, 0)
    rows = core.index.rows_of(None)
    assert core.tier.blocks == int(((core.index.flags[rows] & MEM) != 0).sum())
    assert len(local.files()) == core.index.blocks
    kept = [n for n in range(60) if flags(local, n)[0] & DISK]
    local.stop()
    again = opened(tmp_path / "store")
    assert again.get([key(n) for n in kept]) == [block(n, 1 + n * 9001 % (600 << 10)) for n in kept]
    again.kill()


# -- the daemon -----------------------------------------------------------------------------------


def test_a_daemon_writes_late(tmp_path: Path) -> None:
    names, blocks = [key(n) for n in range(8)], [block(n, 5000) for n in range(8)]

    def files() -> int:
        return len(list((tmp_path / "store" / "blocks").rglob("*.kvb")))

    with bare(tmp_path, write="late", max_dirty_age=300.0) as daemon:
        with Talker(daemon.socket) as talker:
            assert talker.put(names[:4], blocks[:4], ack=Ack.ACCEPTED).meta == bytes(4)
            time.sleep(1.2)
            assert files() == 0
            assert daemon.status()["dirty_blocks"] == 4
            assert talker.ask(Op.FLUSH).json == {"errors": []}
            assert files() == 4
            assert talker.put(names[4:], blocks[4:], ack=Ack.ACCEPTED).meta == bytes(4)
            assert daemon.status()["dirty_blocks"] == 4
        assert daemon.stop(signal.SIGTERM) == 0
        assert files() == 8
        daemon.settings = {"write": "late", "max_dirty_age": 1.0}
        daemon.start()
        with Talker(daemon.socket) as talker:
            assert talker.get(names) == blocks
            late = [key(n) for n in range(20, 24)]
            talker.put(late, blocks[:4], ack=Ack.ACCEPTED)
            assert files() == 8
            limit = time.monotonic() + 10
            while files() < 12:
                assert time.monotonic() < limit
                time.sleep(0.05)
        daemon.stop(signal.SIGKILL)
        daemon.start()
        with Talker(daemon.socket) as talker:
            assert talker.get(names + late) == blocks + blocks[:4]


def test_settings_of_the_command() -> None:
    fine = ["serve", "--check-only", "--write", "late", "--max-dirty-age", "10min"]
    assert run_command(*fine).code == 0
    for wrong in (["--write", "never"], ["--max-dirty-age", "0"]):
        ran = run_command("serve", "--check-only", *wrong)
        assert ran.code == 13
        assert wrong[0].strip("-").replace("-", "_") in ran.stderr

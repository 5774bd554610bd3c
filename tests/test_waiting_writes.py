"""Blocks that wait for the writer while they are deleted by name: their row may be another's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvstore.answers import Ack, BlockStatus
from kvstore.batch import PutRequest
from kvstore.errors import Busy
from kvstore.keys import key_array
from kvstore.removal import discard
from tests.stores import MIB, Local, block, key

NAMES = key_array([key(1)])


def waiting_overwrite(local: Local) -> None:
    """Overwrite key 1; the write stays in the queue, as it does behind two others."""
    local.put([key(1)], [block(1)])
    local.core.writer._writing += 2
    request = PutRequest(
        local.namespace, 0, NAMES, np.array([4096], np.uint32), level=Ack.ACCEPTED, overwrite=True
    )
    job = local.store.put(request, [memoryview(block(2))])
    job.perform()
    local.store.finish(job)


def go_on(local: Local) -> None:
    local.core.writer._writing -= 2
    local.core.writer.pump()


@pytest.mark.parametrize("memory", [0, 16 * MIB])
def test_delete_meets_a_waiting_overwrite(tmp_path: Path, memory: int) -> None:
    local = Local(tmp_path / "store", memory_bytes=memory)
    waiting_overwrite(local)
    _, removals = local.store.delete(local.namespace, 0, NAMES)
    go_on(local)
    removals[0].perform()
    local.store.finish(removals[0])
    local.store.run_chores()
    assert local.get([key(1)]) == [None]
    assert local.files() == []
    local.kill()


@pytest.mark.parametrize("memory", [0, 16 * MIB])
def test_another_key_takes_the_row_of_a_waiting_overwrite(tmp_path: Path, memory: int) -> None:
    local = Local(tmp_path / "store", memory_bytes=memory)
    waiting_overwrite(local)
    _, removals = local.store.delete(local.namespace, 0, NAMES)
    removals[0].perform()
    local.store.finish(removals[0])
    local.store.run_chores()
    queued = list(local.core.writer._queue)
    local.core.writer._queue.clear()
    local.core.writer._writing -= 2
    local.put([key(3)], [block(3)])
    local.core.writer._queue.extend(queued)
    local.core.writer.pump()
    local.store.run_chores()
    assert local.get([key(1), key(3)]) == [None, block(3)]
    assert local.core.counters.stale_blocks == 0
    local.kill()


def test_a_block_deleted_while_it_waits_is_not_written(tmp_path: Path) -> None:
    """Its row was free again, and still seemed to hold the version."""
    local = Local(tmp_path / "store", memory_bytes=16 * MIB)
    local.core.writer._writing += 2
    job = local.begin_put([key(1)], [block(1)], level=Ack.ACCEPTED)
    job.perform()
    local.store.finish(job)
    assert local.delete([key(1)]) == 1
    go_on(local)
    local.store.run_chores()
    assert local.get([key(1)]) == [None]
    assert local.files() == []
    local.kill()


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("memory", [0, 16 * MIB])
def test_an_overwrite_whose_old_version_goes_is_to_be_repeated(
    tmp_path: Path, memory: int, damaged: bool
) -> None:
    """Deleted by name, or found damaged by a reader: nothing is stored, and nothing said to be."""
    local = Local(tmp_path / "store", memory_bytes=memory)
    local.put([key(1)], [block(1)])
    job = local.begin_put([key(1)], [block(2)], overwrite=True)
    if damaged:
        rows = local.rows()
        discard(local.core, rows, local.core.index.generations[rows], "damaged")
        local.store.run_chores()
    else:
        assert local.delete([key(1)]) == 1
    local.store.run(job)
    assert job.statuses.tolist() == [BlockStatus.BUSY]
    assert local.get([key(1)]) == [None]
    assert local.put([key(1)], [block(2)]) == [BlockStatus.OK]
    assert local.get([key(1)]) == [block(2)]
    local.kill()


def test_delete_of_what_cannot_be_read_yet_is_a_miss(tmp_path: Path) -> None:
    local = Local(tmp_path / "store", memory_bytes=0)
    job = local.begin_put([key(1)], [block(1)])
    assert local.delete([key(1)]) == 0
    local.store.run(job)
    assert job.statuses.tolist() == [BlockStatus.OK]
    assert local.get([key(1)]) == [block(1)]
    local.kill()


def test_a_pin_on_a_block_that_waits_survives(tmp_path: Path) -> None:
    """The journal heard of the pin before it knew the block."""
    local = Local(tmp_path / "store", memory_bytes=16 * MIB)
    local.core.writer._writing += 2
    job = local.begin_put([key(1)], [block(1)], level=Ack.ACCEPTED)
    job.perform()
    local.store.finish(job)
    local.store.pin(local.namespace, 0, NAMES, 1000.0)
    local.store.run_chores()
    go_on(local)
    local.store.run_chores()
    local.kill()
    again = Local(tmp_path / "store")
    assert len(again.core.index.pins) == 1
    again.kill()


def test_a_put_waits_for_the_one_that_has_a_row_now(tmp_path: Path) -> None:
    """A block is deleted while it waits to be written, and its row becomes another block's. When
    the old write ends, a put of the new key must still find the put that brings it, and go on when
    that comes to nothing."""
    local = Local(tmp_path / "store", memory_bytes=16 * MIB)
    local.core.writer._writing += 2
    first = local.begin_put([key(1)], [block(1)], level=Ack.ACCEPTED)
    first.perform()
    local.store.finish(first)
    assert local.delete([key(1)]) == 1
    wrong = np.array([1], np.uint64)
    bringing = local.begin_put([key(2)], [block(2)], checksums=wrong)
    assert list(local.core.writing) == local.core.index.rows_of(None).tolist()
    go_on(local)
    local.store.run_chores()
    joined = local.begin_put([key(2)], [block(2)])
    for job in (joined, bringing):
        job.perform()
        local.store.finish(job)
    local.store.run_chores()
    answered: list[bool] = []
    joined.when_answered(lambda: answered.append(True))
    assert bringing.statuses.tolist() == [BlockStatus.MISMATCH]
    assert answered
    assert joined.statuses.tolist() == [BlockStatus.OK]
    assert local.get([key(2)]) == [block(2)]
    local.kill()


def test_a_put_that_found_no_memory_waits_for_nobody(tmp_path: Path) -> None:
    local = Local(tmp_path / "store", memory_bytes=16 * MIB)
    writer = local.core.writer
    writer._writing += 2
    known = local.begin_put([key(1)], [block(1)], level=Ack.ACCEPTED)
    known.perform()
    local.store.finish(known)
    writer._rate = 1.0  # nothing more may become dirty, so that what comes goes around the tier ...
    taken = local.core.bounce.allocate([local.core.bounce.capacity])  # ... where there is no room
    for _ in range(3):
        with pytest.raises(Busy):
            local.begin_put([key(1), key(2)], [block(1), block(2)], level=Ack.WRITTEN)
    assert not writer._watches
    local.core.bounce.release(taken)
    go_on(local)
    local.store.run_chores()
    assert local.put([key(1), key(2)], [block(1), block(2)]) == [
        BlockStatus.ALREADY_PRESENT,
        BlockStatus.OK,
    ]
    local.kill()

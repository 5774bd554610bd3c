"""The faults of the system that this one follows: what broke there must not break here.

Its fault 1 (a lookup of everything left nothing to evict) is in test_store; fault 6 needs a tier in
memory, which is not there yet.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import record
from kvstore.answers import BlockStatus
from kvstore.backends.base import Status
from kvstore.errors import EngineError
from kvstore.keys import key_array
from kvstore.testing.faulty import Fault, FaultyEngine
from tests.damage import (
    OK,
    OTHER,
    PAGE,
    ROOT,
    VICTIM,
    assert_nothing_is_held,
    failures,
    file_of,
    flip,
    put_family,
)
from tests.stores import MIB, Local, block, key


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    opened = Local(tmp_path / "store")
    yield opened
    assert_nothing_is_held(opened)
    opened.kill()


def test_fault_2_a_full_store_evicts_after_a_restart_in_the_order_of_before(tmp_path: Path) -> None:
    local = Local(tmp_path / "store")
    names = [key(n) for n in range(15)]
    for number, name in enumerate(names):
        assert local.put([name], [block(number, 4 * MIB)]) == [OK]
    local.get(names[:3])
    local.tick()
    left = local.contains(names).index(True)
    assert left == 0, "the last put must have evicted none of those read"
    local.kill()
    local = Local(tmp_path / "store")
    held = local.contains(names)
    gone = []
    for number in range(100, 106):
        assert local.put([key(number)], [block(number, 4 * MIB)]) == [OK]
        there = local.contains(names)
        gone += [n for n in range(15) if held[n] and not there[n]]
        held = there
    assert gone == [n for n in range(3, 15)][: len(gone)]
    assert len(gone) >= 5
    local.kill()


def test_fault_3_a_restart_with_half_the_capacity_keeps_the_newest(tmp_path: Path) -> None:
    local = Local(tmp_path / "store", capacity=128 * MIB)
    names = [key(n) for n in range(8)]
    for number, name in enumerate(names):
        assert local.put([name], [block(number, 14 * MIB)]) == [OK]
    local.kill()
    local = Local(tmp_path / "store", capacity=64 * MIB)
    assert local.contains(names) == [False] * 4 + [True] * 4
    assert local.get(names[4:]) == [block(n, 14 * MIB) for n in range(4, 8)]
    assert len(local.files()) == 4
    local.kill()


def test_fault_4_truncated_and_flipped_files_are_dropped_and_their_space_is_free(
    local: Local,
) -> None:
    put_family(local, 300_000)
    os.truncate(file_of(local, VICTIM), 100_000)
    flip(file_of(local, OTHER), PAGE + 200_000)
    local.kill()
    again = Local(local.path)
    assert again.get([ROOT, VICTIM, OTHER]) == [block(0, 300_000), None, None]
    assert failures(again) == {"corrupt_blocks": 2}
    assert len(again.files()) == 1
    assert again.core.index.live_bytes == record.image_bytes(300_000)
    again.kill()


def test_fault_5_a_file_that_was_removed_is_a_miss_and_holds_nothing(local: Local) -> None:
    put_family(local, 5000)
    file_of(local, VICTIM).unlink()
    assert local.get([VICTIM, OTHER, VICTIM]) == [None, block(2, 5000), None]
    assert failures(local) == {"missing_blocks": 1}
    assert local.contains([VICTIM]) == [False]
    assert_nothing_is_held(local)
    assert local.put([VICTIM], [block(1, 5000)]) == [OK]
    assert local.get([VICTIM]) == [block(1, 5000)]


@pytest.mark.parametrize(
    "fault",
    [
        Fault("put_many", error=EngineError("on order")),
        Fault("put_many", error=ZeroDivisionError("on order")),
        Fault("put_many", error=EngineError("on order"), afterwards=True),
        Fault("put_many", status=Status.FAILED),
        Fault("put_many", status=Status.FULL),
    ],
    ids=["error", "bug", "late error", "failed", "full"],
)
def test_fault_5_a_put_that_failed_locks_nothing(local: Local, fault: Fault) -> None:
    put_family(local, 5000)
    local.core.engine = FaultyEngine(local.core.engine, [fault])
    local.core.engine.is_open = True
    statuses = local.put([key(3), key(4)], [block(3), block(4)], chain=True, parent=VICTIM)
    assert OK not in statuses
    assert local.contains([key(3), key(4), VICTIM]) == [False, False, True]
    assert_nothing_is_held(local)
    # Where the engine said that the disk is full, blocks are only recycled until it was measured.
    local.tick()
    assert local.put([key(3), key(4)], [block(5), block(6)], chain=True) == [OK, OK]
    assert local.get([key(3), key(4), VICTIM]) == [block(5), block(6), block(1, 5000)]


@pytest.mark.parametrize(
    "fault",
    [
        Fault("get_many_into", error=EngineError("on order")),
        Fault("get_many_into", status=Status.FAILED),
    ],
    ids=["error", "failed"],
)
def test_fault_5_a_read_that_failed_loses_nothing(local: Local, fault: Fault) -> None:
    put_family(local, 5000)
    local.core.engine = FaultyEngine(local.core.engine, [fault])
    local.core.engine.is_open = True
    job = local.store.get(local.namespace, 0, key_array([VICTIM]), MIB)
    job.perform()
    local.store.finish(job)
    assert job.statuses.tolist() == [BlockStatus.MISS]
    job.close()
    assert_nothing_is_held(local)
    assert failures(local) == {"read_errors": 1}
    assert local.get([VICTIM]) == [block(1, 5000)]


def test_fault_7_the_order_of_use_is_our_own_and_not_that_of_the_files(tmp_path: Path) -> None:
    """Access times are set against the order of use, and a filesystem may not keep any."""
    local = Local(tmp_path / "store")
    names = [key(n) for n in range(15)]
    for number, name in enumerate(names[:14]):
        local.put([name], [block(number, 4 * MIB)])
    for _ in range(3):
        local.get(names[:4])
    local.tick()
    for number, name in enumerate(names[:4]):
        os.utime(file_of(local, name), (1000 + number, 1000 + number))
    local.kill()
    local = Local(tmp_path / "store")
    for number in range(100, 106):
        assert local.put([key(number)], [block(number, 4 * MIB)]) == [OK]
    there = local.contains(names[:14])
    assert there[:4] == [True] * 4
    assert there[4:9] == [False] * 5
    local.kill()

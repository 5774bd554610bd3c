"""Every engine against the contract, the table of engines, and the engine that fails on order."""

from __future__ import annotations

import time
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

from kvstore.backends import engine_class, engine_names
from kvstore.backends.base import Engine, EngineContext, Leaving, Read, Status, Written
from kvstore.backends.filesystem import FilesystemEngine
from kvstore.backends.leveldb import LeveldbEngine
from kvstore.backends.lmdb import LmdbEngine
from kvstore.backends.memory import MemoryEngine
from kvstore.backends.rocksdb import RocksdbEngine
from kvstore.backends.sqlite import SqliteEngine
from kvstore.errors import ConfigError, EngineError
from kvstore.testing import EngineTests, Fault, FaultyEngine
from kvstore.testing.machine import run_machine
from kvstore.testing.records import (
    STORE,
    assert_absent,
    assert_stored,
    blank_images,
    full_images,
    identities,
    key_of,
    make_blocks,
    payload_of,
    put,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.backends.base import Blocks, Mask
    from kvstore.testing.records import Identity


def spoil(engine: Engine, block: Blocks) -> None:
    """Overwrite the payload of a record wherever the files of the engine hold it."""
    (key,), (generation,), (length,) = block.key_list(), block.generations, block.lengths
    wanted = payload_of(key, int(generation), int(length))[5000:5064]
    for path in engine.context.directory.rglob("*"):
        if path.is_file() and (at := path.read_bytes().find(wanted)) >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(b"not what was stored here")


class TestMemory(EngineTests):
    def make(self, context: EngineContext) -> Engine:
        return MemoryEngine(context)


class TestFilesystem(EngineTests):
    def make(self, context: EngineContext) -> Engine:
        return FilesystemEngine(context)

    def damage(self, engine: Engine, block: Blocks) -> None:
        (path,) = engine.context.directory.rglob(f"*-{block.key_list()[0].hex()}.*.kvb")
        with path.open("r+b") as file:
            file.seek(10_000)
            file.write(b"not what was stored here")


class TestLmdb(EngineTests):
    def make(self, context: EngineContext) -> Engine:
        return LmdbEngine(context)

    def damage(self, engine: Engine, block: Blocks) -> None:
        spoil(engine, block)


class TestLeveldb(EngineTests):
    # With less, buffers of the least size and what waits to be merged would take most of it.
    capacity = 32 << 20

    def make(self, context: EngineContext) -> Engine:
        return LeveldbEngine(replace(context, capacity=64 << 20))


class TestSqlite(EngineTests):
    def make(self, context: EngineContext) -> Engine:
        return SqliteEngine(replace(context, capacity=128 << 20))

    def damage(self, engine: Engine, block: Blocks) -> None:
        spoil(engine, block)


class TestRocksdb(EngineTests):
    capacity = 32 << 20

    def make(self, context: EngineContext) -> Engine:
        return RocksdbEngine(replace(context, capacity=48 << 20))


class TestFaultyWithoutFaults(EngineTests):
    def make(self, context: EngineContext) -> Engine:
        return FaultyEngine(MemoryEngine(context))


# The table


def test_built_in_engines_have_the_names_they_are_found_by() -> None:
    for name in ("memory", "filesystem", "lmdb", "leveldb", "sqlite", "rocksdb"):
        assert name in engine_names()
        assert engine_class(name).name == name


def test_an_unknown_engine_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"no engine 'paper'.*filesystem, .*memory") as caught:
        engine_class("paper")
    assert caught.value.exit_code == 13


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Pretend that another package offers an engine."""

    def install(name: str, value: str) -> None:
        points = EntryPoints([EntryPoint(name, value, "kvstore.backends")])
        monkeypatch.setattr(
            "kvstore.backends.entry_points", lambda **wanted: points.select(**wanted)
        )

    return install


def test_another_package_brings_an_engine(offer: Callable[[str, str], None]) -> None:
    offer("paper", "kvstore.backends.memory:MemoryEngine")
    assert "paper" in engine_names()
    assert engine_class("paper") is MemoryEngine


def test_a_built_in_name_cannot_be_taken_over(offer: Callable[[str, str], None]) -> None:
    offer("filesystem", "kvstore.backends.memory:MemoryEngine")
    assert engine_class("filesystem") is FilesystemEngine


@pytest.mark.parametrize(
    "value",
    [
        "kvstore.nowhere:Engine",
        "kvstore.backends.memory:Nothing",
        "kvstore.record:Header",
        "kvstore:__version__",
    ],
)
def test_what_is_no_engine_is_refused(offer: Callable[[str, str], None], value: str) -> None:
    offer("paper", value)
    with pytest.raises(EngineError, match="'paper'"):
        engine_class("paper")


# Failing on order


@pytest.fixture
def faulty(tmp_path: Path) -> FaultyEngine:
    engine = FaultyEngine(MemoryEngine(EngineContext(tmp_path, STORE)))
    engine.create()
    engine.open()
    return engine


def put_statuses(engine: Engine, blocks: Blocks) -> list[int]:
    written: Written = engine.put_many(blocks, full_images(blocks), sync=False)
    statuses: list[int] = written.statuses.tolist()
    return statuses


def test_the_nth_put_fails_for_chosen_blocks(faulty: FaultyEngine) -> None:
    faulty.faults.append(Fault("put_many", at=2, status=Status.FULL, blocks=(0, 2)))
    first, second, third = (
        make_blocks([key_of(10 * n + i) for i in range(3)]) for n in range(1, 4)
    )
    assert put_statuses(faulty, first) == [0, 0, 0]
    assert put_statuses(faulty, second) == [Status.FULL, Status.OK, Status.FULL]
    assert put_statuses(faulty, third) == [0, 0, 0]
    assert faulty.contains_many(second).tolist() == [False, True, False]
    assert_stored(faulty, second.take(slice(1, 2)))
    assert faulty.calls["put_many"] == 3


def test_reads_fail_with_a_status(faulty: FaultyEngine) -> None:
    blocks = put(faulty, make_blocks([key_of(1), key_of(2)]))
    faulty.faults.append(Fault("get_many_into", status=Status.DAMAGED, times=2))
    for expected in ([2, 2], [2, 2], [0, 0]):
        assert faulty.get_many_into(blocks, blank_images(blocks)).statuses.tolist() == expected


@pytest.mark.parametrize("afterwards", [False, True])
def test_an_exception_comes_before_or_after_the_work(
    faulty: FaultyEngine, afterwards: bool
) -> None:
    error = EngineError("on order")
    faulty.faults.append(Fault("put_many", error=error, afterwards=afterwards))
    blocks = make_blocks([key_of(1)])
    with pytest.raises(EngineError, match="on order"):
        put(faulty, blocks)
    (assert_stored if afterwards else assert_absent)(faulty, blocks)


@pytest.mark.parametrize("method", ["flush", "delete_many", "scan", "stats", "check", "open"])
def test_every_method_can_fail(faulty: FaultyEngine, method: str) -> None:
    faulty.faults.append(Fault(method, at=faulty.calls[method] + 1, error=EngineError("on order")))
    uses: dict[str, Callable[[], object]] = {
        "flush": faulty.flush,
        "delete_many": lambda: faulty.delete_many(make_blocks([key_of(1)])),
        "scan": lambda: list(faulty.scan()),
        "stats": faulty.stats,
        "check": faulty.check,
        "open": faulty.open,
    }
    with pytest.raises(EngineError, match="on order"):
        uses[method]()
    uses[method]()


def test_a_delay(faulty: FaultyEngine) -> None:
    faulty.faults.append(Fault("flush", delay=0.2))
    start = time.monotonic()
    faulty.flush()
    assert time.monotonic() - start >= 0.2


# That the suite notices


class Forgetful(MemoryEngine):
    """Loses the last block of every batch."""

    def put_many(self, blocks: Blocks, images: Sequence[memoryview], *, sync: bool) -> Written:
        written = super().put_many(blocks, images, sync=sync)
        self.delete_many(blocks.take(slice(-1, None)))
        return written


class Careless(MemoryEngine):
    """Takes any generation of a key for the one that is asked for."""

    def put_many(self, blocks: Blocks, images: Sequence[memoryview], *, sync: bool) -> Written:
        blocks.generations[:] = 0
        return super().put_many(blocks, images, sync=sync)


class Lingering(FilesystemEngine):
    """Deletes nothing, and says so only until it is opened again."""

    def open(self) -> None:
        super().open()
        self.gone: set[Identity] = set()

    def contains_many(self, blocks: Blocks) -> Mask:
        return super().contains_many(blocks) & self._there(blocks)

    def get_many_into(self, blocks: Blocks, images: Sequence[memoryview]) -> Read:
        read = super().get_many_into(blocks, images)
        return Read(np.where(self._there(blocks), read.statuses, Status.MISSING), read.filled)

    def delete_many(self, blocks: Blocks, how: Leaving = Leaving.VERSION) -> int:
        there = int(self.contains_many(blocks).sum())
        self.gone.update(identities(blocks))
        return there

    def _there(self, blocks: Blocks) -> Mask:
        return np.array([name not in self.gone for name in identities(blocks)], np.bool_)


class Parochial(MemoryEngine):
    """Shows its records to all who open its directory in the same process, to no other."""

    capabilities = replace(MemoryEngine.capabilities, persistent=True)
    shared: ClassVar[dict[Path, Any]] = {}

    def open(self) -> None:
        super().open()
        self._records = self.shared.setdefault(self.context.directory, {})


class Eager(Parochial):
    """Makes what it does not find."""

    def open(self) -> None:
        self._mark.touch()
        super().open()


class Late(FilesystemEngine):
    """Writes a batch when the next one comes."""

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self.waiting: Blocks | None = None

    def put_many(self, blocks: Blocks, images: Sequence[memoryview], *, sync: bool) -> Written:
        if self.waiting is not None:
            super().put_many(self.waiting, full_images(self.waiting), sync=sync)
        self.waiting = blocks
        return Written(np.zeros(len(blocks), np.uint64), np.zeros(len(blocks), np.uint8))


class Suite(EngineTests):
    def __init__(self, broken: type[Engine]) -> None:
        self.make = broken  # type: ignore[method-assign]


@pytest.mark.parametrize("broken", [Forgetful, Careless])
def test_the_suite_fails_for_a_broken_engine(broken: type[Engine], tmp_path: Path) -> None:
    suite = Suite(broken)
    with pytest.raises(AssertionError):
        suite.test_generations_of_a_key_coexist(suite.start(tmp_path))


@pytest.mark.parametrize("broken", [Forgetful, Careless, Lingering, Parochial])
def test_the_machine_fails_for_a_broken_engine(
    broken: type[Engine], tmp_path_factory: pytest.TempPathFactory
) -> None:
    suite = Suite(broken)
    with pytest.raises((AssertionError, ExceptionGroup)):
        run_machine(
            lambda: suite.start(tmp_path_factory.mktemp("broken")), examples=200, shrink=False
        )


def test_the_suite_notices_what_a_kill_reveals(tmp_path: Path) -> None:
    suite = Suite(Late)
    with pytest.raises(AssertionError):
        suite.test_a_killed_writer_leaves_whole_records(suite.start(tmp_path))


def test_the_suite_notices_space_that_is_not_given_back(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        Suite(Lingering).test_ten_times_the_capacity_passes_through(tmp_path)


def test_the_suite_notices_an_empty_engine_made_by_opening(tmp_path: Path) -> None:
    directory = tmp_path / "blocks"
    directory.mkdir()
    suite = Suite(Eager)
    with pytest.raises(AssertionError):
        suite.test_a_missing_or_short_piece_never_makes_an_empty_engine(
            suite.start(directory), tmp_path
        )

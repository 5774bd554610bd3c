"""Much at once and much in a row: threads, churn, and random operations beside a model."""

from __future__ import annotations

import itertools
import random
import threading
import time
from typing import TYPE_CHECKING

from kvstore.record import Verdict
from kvstore.testing.case import EngineCase
from kvstore.testing.machine import run_machine
from kvstore.testing.records import (
    Identity,
    assert_absent,
    assert_stored,
    delete,
    identities,
    key_of,
    make_blocks,
    occupied,
    put,
    scanned,
    verdicts,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    import pytest

    from kvstore.backends.base import Blocks, Engine

CHURN_SIZES = (65_536, 147_456, 294_912, 458_752, 589_824, 1_310_720, 2_097_152)


class LoadTests(EngineCase):
    """Part of :class:`kvstore.testing.EngineTests`."""

    def test_a_scan_survives_writes_and_deletions(self, engine: Engine) -> None:
        stable = put(engine, make_blocks([key_of(i) for i in range(300)], 100))
        flood = [make_blocks([key_of(i) for i in range(n, n + 20)], 100) for n in (1000, 2000)]

        def churn() -> None:
            for blocks in flood:
                delete(engine, put(engine, blocks))

        def look() -> None:
            assert set(identities(stable)) <= set(scanned(engine))

        _in_parallel([churn, look], seconds=0.7)

    def test_readers_writers_and_a_scanner(self, engine: Engine) -> None:
        """No wrong byte, no error, no lost put: also for those who read what is being deleted."""
        stable = put(engine, make_blocks([key_of(i) for i in range(40)], 20_000))
        writers = [_Writer(engine, first) for first in (1000, 2000)]

        def read() -> None:
            assert_stored(engine, stable)

        def race() -> None:
            for writer in writers:
                writer.race()

        def scan() -> None:
            assert set(identities(stable)) <= set(scanned(engine))

        tasks = [read, read, race, race, *(writer.write for writer in writers), scan]
        _in_parallel(tasks, seconds=1.0)
        for writer in writers:
            for blocks in writer.kept:
                assert_stored(engine, blocks)
        everything = itertools.chain([stable], *(writer.kept for writer in writers))
        assert set(scanned(engine)) == set(_names(everything))

    def test_ten_times_the_capacity_passes_through(self, tmp_path: Path) -> None:
        """No put fails, nothing is lost, and the space that is taken does not grow."""
        engine, rng = self.start(tmp_path), random.Random(6)
        most = self.capacity * engine.capabilities.space_factor
        held: list[Blocks] = []
        live = passed = 0
        for generation in itertools.count(1):
            size = rng.choice(CHURN_SIZES)
            coming = make_blocks([key_of(generation % 100)], size, generation)
            taken = int(engine.record_bytes_of(coming.lengths)[0])
            while live + taken > self.capacity * 85 // 100:
                victim = held.pop(rng.randrange(len(held)))
                assert delete(engine, victim) == 1
                live -= int(engine.record_bytes_of(victim.lengths)[0])
            held.append(put(engine, coming))
            live += taken
            passed += taken
            if generation % 100 == 0:
                assert occupied(tmp_path) <= most
            if passed > 10 * self.capacity:
                break
        for blocks in held:
            assert_stored(engine, blocks)
        assert set(scanned(engine)) == set(_names(held))
        assert occupied(tmp_path) <= most
        engine.close()

    def test_it_agrees_with_the_memory_engine(
        self, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        run_machine(lambda: self.start(tmp_path_factory.mktemp("machine")))


class _Writer:
    """Puts ten records at a time, each time a new version, and deletes all but one."""

    def __init__(self, engine: Engine, first: int) -> None:
        self._engine = engine
        self._keys = [key_of(number) for number in range(first, first + 10)]
        # No version of any block shares its number with another one of the store.
        self._generations = itertools.count(first << 20)
        self._latest: Blocks | None = None
        self.kept: list[Blocks] = []

    def write(self) -> None:
        blocks = make_blocks(self._keys, 20_000, next(self._generations))
        self._latest = blocks = put(self._engine, blocks)
        assert_stored(self._engine, blocks)
        kept, rest = blocks.take(slice(0, 1)), blocks.take(slice(1, None))
        assert delete(self._engine, rest) == len(rest)
        assert_absent(self._engine, rest)
        self.kept.append(kept)

    def race(self) -> None:
        """Read what the writer may be deleting: it is whole, or a miss."""
        if self._latest is not None:
            found = verdicts(self._engine, self._latest)
            assert found[0] == Verdict.OK
            # The store keeps slots that are being read from being used again, which is not so here.
            if not self._engine.capabilities.fixed_slots:
                assert set(found) <= {Verdict.OK, None}


def _names(many: Iterable[Blocks]) -> list[Identity]:
    return [name for blocks in many for name in identities(blocks)]


def _in_parallel(tasks: list[Callable[[], None]], *, seconds: float) -> None:
    """Run each task again and again in a thread of its own; raise what the first one raised."""
    end = time.monotonic() + seconds
    failures: list[BaseException] = []

    def repeat(task: Callable[[], None]) -> None:
        try:
            while time.monotonic() < end and not failures:
                task()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=repeat, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]

"""The rules of the engine contract as tests; see :class:`EngineTests`."""

from __future__ import annotations

import multiprocessing
import threading
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.backends.base import SCAN_BATCH, Blocks, Engine, EngineContext
from kvstore.errors import EngineError, ReadOnly, StoreExists, StoreNotFound
from kvstore.keys import MAX_BLOCK_BYTES
from kvstore.record import Verdict
from kvstore.testing.machine import run_machine
from kvstore.testing.records import (
    NAMESPACE,
    OTHER_NAMESPACE,
    STORE,
    WRITTEN_NS,
    assert_absent,
    assert_stored,
    blank_images,
    full_images,
    identities,
    key_of,
    make_blocks,
    put,
    scanned,
    verdicts,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

SIZES = [1, 511, 4095, 4096, 4097, 65536, 300_001, 2 << 20, MAX_BLOCK_BYTES]


class EngineTests:
    """Subclass it, name the subclass ``Test...`` and give it ``make``; pytest does the rest.

    An engine whose records do not outlive the process (``Capabilities.persistent``) skips what
    needs that. Give ``damage`` as well if a record of the engine can be spoilt from outside.
    """

    def make(self, context: EngineContext) -> Engine:
        """Return an engine that was neither created nor opened."""
        raise NotImplementedError

    def damage(self, engine: Engine, block: Blocks) -> None:
        """Spoil the payload of one record on disk, behind the back of the open engine."""
        pytest.skip("this engine does not say how to damage a record")

    @pytest.fixture
    def context(self, tmp_path: Path) -> EngineContext:
        directory = tmp_path / "blocks"
        directory.mkdir()
        return EngineContext(directory, STORE)

    @pytest.fixture
    def engine(self, context: EngineContext) -> Iterator[Engine]:
        engine = self.make(context)
        engine.create()
        engine.open()
        yield engine
        engine.close()

    @pytest.fixture
    def persistent(self, engine: Engine) -> Engine:
        if not engine.capabilities.persistent:
            pytest.skip("records of this engine do not outlive the process")
        return engine

    # Putting and getting

    @pytest.mark.parametrize("size", SIZES)
    def test_a_put_is_found(self, engine: Engine, size: int) -> None:
        count = 3 if size <= 2 << 20 else 1
        blocks = put(engine, make_blocks([key_of(i) for i in range(count)], size))
        assert_stored(engine, blocks)

    @pytest.mark.parametrize("length", [1, 2, 31, 32, 36, 63, 64])
    def test_keys_of_all_lengths_and_values(self, engine: Engine, length: int) -> None:
        keys = [bytes(length), b"\xff" * length, b"/" * length, key_of(1, length)]
        blocks = put(engine, make_blocks(keys))
        assert_stored(engine, blocks)
        assert set(scanned(engine)) == set(identities(blocks))

    def test_a_key_is_no_prefix_of_another(self, engine: Engine) -> None:
        short, long = make_blocks([b"abcd"]), make_blocks([b"abcd\0"])
        put(engine, short)
        assert_absent(engine, long)
        long = put(engine, long)
        engine.delete_many(short)
        assert_stored(engine, long)

    def test_a_batch_of_many_sizes_keeps_its_order(self, engine: Engine) -> None:
        sizes = [9000, 1, 70_000, 4096, 20_000]
        blocks = put(engine, make_blocks([key_of(i) for i in range(5)], sizes, range(1, 6)))
        backwards = blocks.take(slice(None, None, -1))
        assert_stored(engine, backwards)
        some = make_blocks([key_of(90), key_of(2), key_of(91)], [500, 70_000, 500], 3)
        some.places[1] = blocks.places[2]
        assert verdicts(engine, some) == [None, Verdict.OK, None]
        assert engine.contains_many(some).tolist() == [False, True, False]

    def test_namespaces_and_shards_are_apart(self, engine: Engine) -> None:
        keys = [key_of(1), key_of(2)]
        spaces = [(NAMESPACE, 0), (NAMESPACE, 65535), (OTHER_NAMESPACE, 0)]
        stored = [make_blocks(keys, namespace=name, shard=shard) for name, shard in spaces]
        stored = [put(engine, blocks) for blocks in stored]
        assert engine.delete_many(stored[0]) == 2
        assert_absent(engine, stored[0])
        for blocks in stored[1:]:
            assert_stored(engine, blocks)

    def test_generations_of_a_key_coexist(self, engine: Engine) -> None:
        old = put(engine, make_blocks([key_of(1)], 5000, 1))
        new = put(engine, make_blocks([key_of(1)], 70_000, (1 << 63) + 5))
        assert_stored(engine, old)
        assert_stored(engine, new)
        assert engine.delete_many(old) == 1
        assert_absent(engine, old)
        assert_stored(engine, new)

    def test_the_caller_may_use_its_image_again(self, engine: Engine) -> None:
        blocks = make_blocks([key_of(1)])
        images = full_images(blocks)
        written = engine.put_many(blocks, images, sync=False)
        np.frombuffer(images[0], np.uint8)[:] = 0
        assert_stored(engine, replace(blocks, places=written.places))

    def test_a_record_of_another_length_is_never_right(self, engine: Engine) -> None:
        blocks = put(engine, make_blocks([key_of(1), key_of(2)], 20_000))
        wrong = replace(blocks, lengths=np.array([30_000, 100], np.uint32))
        assert Verdict.OK not in verdicts(engine, wrong)
        assert_stored(engine, blocks)

    def test_what_is_not_there_is_a_value(self, engine: Engine) -> None:
        assert_absent(engine, make_blocks([key_of(i) for i in range(5)]))
        put(engine, make_blocks([key_of(1)]))
        assert_absent(engine, make_blocks([key_of(1)], generations=2))
        assert_absent(engine, make_blocks([key_of(1)], shard=1))

    def test_deleting(self, engine: Engine) -> None:
        blocks = put(engine, make_blocks([key_of(i) for i in range(4)]))
        assert engine.delete_many(make_blocks([key_of(9)])) == 0
        assert engine.delete_many(blocks.take(slice(1, 3))) == 2
        assert engine.delete_many(blocks) == 2
        assert engine.delete_many(blocks) == 0
        assert_absent(engine, blocks)
        assert scanned(engine) == {}
        assert_stored(engine, put(engine, blocks))

    def test_an_empty_batch_is_nothing(self, engine: Engine) -> None:
        nothing = make_blocks([])
        assert len(engine.put_many(nothing, [], sync=True).places) == 0
        assert len(engine.get_many_into(nothing, []).statuses) == 0
        assert len(engine.contains_many(nothing)) == 0
        assert engine.delete_many(nothing) == 0

    def test_images_that_do_not_fit_are_a_mistake(self, engine: Engine) -> None:
        blocks = make_blocks([key_of(1), key_of(2)], 5000)
        for images in (full_images(blocks)[:1], full_images(make_blocks(blocks.key_list(), 100))):
            with pytest.raises(ValueError, match="images"):
                engine.put_many(blocks, images, sync=False)
            with pytest.raises(ValueError, match="images"):
                engine.get_many_into(blocks, images)
        assert scanned(engine) == {}

    def test_reading_allocates_no_payload(self, engine: Engine) -> None:
        blocks = put(engine, make_blocks([key_of(i) for i in range(4)], 4 << 20))
        images = blank_images(blocks)
        tracemalloc.start()
        read = engine.get_many_into(blocks, images)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert read.filled.tolist() == [len(image) for image in images]
        assert peak < 1 << 20

    def test_a_synced_put_and_a_flush(self, engine: Engine) -> None:
        few = put(engine, make_blocks([key_of(1), key_of(2)]), sync=True)
        many = put(engine, make_blocks([key_of(i) for i in range(3, 43)]), sync=True)
        later = put(engine, make_blocks([key_of(50)]))
        engine.flush()
        for blocks in (few, many, later):
            assert_stored(engine, blocks)

    def test_giving_up_a_namespace(self, engine: Engine) -> None:
        engine.forget(NAMESPACE)
        kept = put(engine, make_blocks([key_of(1)]))
        gone = put(engine, make_blocks([key_of(1)], namespace=OTHER_NAMESPACE))
        engine.delete_many(gone)
        engine.forget(OTHER_NAMESPACE)
        engine.forget(NAMESPACE)
        assert_stored(engine, kept)
        assert_stored(engine, put(engine, gone))

    # Scanning

    def test_a_scan_tells_all_of_every_record(self, engine: Engine) -> None:
        blocks = make_blocks([key_of(7, 36)], 12_345, 77, shard=3)
        blocks = put(engine, blocks, parent=key_of(6, 36), label="a label")
        (batch,) = engine.scan()
        assert batch.namespaces.tobytes() == NAMESPACE
        assert batch.shards.tolist() == [3]
        assert batch.key_lengths.tolist() == batch.parent_lengths.tolist() == [36]
        assert batch.keys.tobytes() == key_of(7, 36).ljust(64, b"\0")
        assert batch.parents.tobytes() == key_of(6, 36).ljust(64, b"\0")
        assert batch.lengths.tolist() == [12_345]
        assert batch.places.tolist() == blocks.places.tolist()
        assert batch.generations.tolist() == [77]
        assert batch.written_ns.tolist() == [WRITTEN_NS + 77]
        assert batch.labelled.tolist() == [True]
        put(engine, make_blocks([key_of(8)]))
        plain = [row for batch in engine.scan() for row in batch.labelled[batch.shards == 0]]
        assert plain == [False]

    def test_a_scan_is_complete_and_comes_in_batches(self, engine: Engine) -> None:
        blocks = put(engine, make_blocks([key_of(i) for i in range(SCAN_BATCH + 10)], 1))
        other = put(engine, make_blocks([key_of(1, 8)], namespace=OTHER_NAMESPACE, shard=9))
        found = scanned(engine)
        for some in (blocks, other):
            places = [found.pop(identity) for identity in identities(some)]
            assert places == some.places.tolist()
        assert found == {}

    def test_a_scan_reads_no_payload(self, engine: Engine) -> None:
        if not Path("/proc/self/io").exists():
            pytest.skip("needs /proc/self/io")
        put(engine, make_blocks([key_of(i) for i in range(8)], 4 << 20))
        before = _bytes_read()
        assert len(scanned(engine)) == 8
        assert _bytes_read() - before < 4 << 20

    def test_a_scan_survives_writes_and_deletions(self, engine: Engine) -> None:
        stable = put(engine, make_blocks([key_of(i) for i in range(300)], 100))
        flood = [make_blocks([key_of(i) for i in range(n, n + 20)], 100) for n in (1000, 2000)]

        def churn() -> None:
            for blocks in flood:
                engine.delete_many(put(engine, blocks))

        def look() -> None:
            assert set(identities(stable)) <= set(scanned(engine))

        _in_parallel([churn, look], seconds=0.7)

    # Opening and closing

    def test_closing_twice_and_opening_again(self, persistent: Engine) -> None:
        blocks = put(persistent, make_blocks([key_of(1), key_of(2)]))
        persistent.close()
        persistent.close()
        persistent.open()
        assert_stored(persistent, blocks)
        again = self.make(persistent.context)
        persistent.close()
        again.open()
        assert_stored(again, blocks)
        assert len(scanned(again)) == 2
        again.close()

    def test_another_process_finds_the_records(self, persistent: Engine) -> None:
        blocks = put(persistent, make_blocks([key_of(i) for i in range(5)], 100_000))
        persistent.close()
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            arguments = (type(persistent), persistent.context, blocks)
            assert pool.apply(_verdicts_elsewhere, arguments) == [Verdict.OK] * 5
            pool.close()
            pool.join()

    def test_a_killed_writer_leaves_whole_records(self, persistent: Engine) -> None:
        persistent.close()
        acknowledged = _killed_writer(persistent)
        persistent.open()
        found = scanned(persistent)
        for generation in range(1, acknowledged + 1):
            block = make_blocks([key_of(generation % 50)], 200_000, generation)
            block.places[0] = found[identities(block)[0]]
            assert_stored(persistent, block)
        assert len(found) - acknowledged in (0, 1)
        for (_, _, key, generation), place in found.items():
            block = make_blocks([key], 200_000, generation)
            block.places[0] = place
            assert verdicts(persistent, block) == [Verdict.OK]

    def test_opening_makes_nothing(self, context: EngineContext) -> None:
        missing = replace(context, directory=context.directory / "missing")
        for place in (context, missing):
            engine = self.make(place)
            with pytest.raises(StoreNotFound):
                engine.open()
            engine.close()
        assert list(context.directory.iterdir()) == []

    def test_creating_where_something_is(self, engine: Engine) -> None:
        blocks = put(engine, make_blocks([key_of(1)]))
        with pytest.raises(StoreExists):
            self.make(engine.context).create()
        assert_stored(engine, blocks)

    def test_a_closed_engine_says_so(self, engine: Engine) -> None:
        blocks = make_blocks([key_of(1)])
        engine.close()
        uses: list[Callable[[], object]] = [
            lambda: engine.put_many(blocks, full_images(blocks), sync=False),
            lambda: engine.get_many_into(blocks, blank_images(blocks)),
            lambda: engine.contains_many(blocks),
            lambda: engine.delete_many(blocks),
            lambda: list(engine.scan()),
            engine.flush,
        ]
        for use in uses:
            with pytest.raises(EngineError):
                use()

    def test_a_reader_writes_nothing(self, persistent: Engine) -> None:
        blocks = put(persistent, make_blocks([key_of(1)]))
        persistent.close()
        reader = self.make(replace(persistent.context, read_only=True))
        reader.open()
        assert_stored(reader, blocks)
        assert len(scanned(reader)) == 1
        with pytest.raises(ReadOnly):
            reader.put_many(blocks, full_images(blocks), sync=False)
        with pytest.raises(ReadOnly):
            reader.delete_many(blocks)
        assert_stored(reader, blocks)
        reader.close()

    # The rest

    def test_readers_writers_and_a_scanner(self, engine: Engine) -> None:
        stable = put(engine, make_blocks([key_of(i) for i in range(40)], 20_000))

        def read() -> None:
            assert_stored(engine, stable)

        def writer(first: int) -> Callable[[], None]:
            def write() -> None:
                keys = [key_of(i) for i in range(first, first + 10)]
                blocks = put(engine, make_blocks(keys, 20_000))
                assert_stored(engine, blocks)
                assert engine.delete_many(blocks) == 10
                assert_absent(engine, blocks)

            return write

        def scan() -> None:
            assert set(identities(stable)) <= set(scanned(engine))

        _in_parallel([read, read, read, read, writer(1000), writer(2000), scan], seconds=1.0)
        assert set(scanned(engine)) == set(identities(stable))

    def test_damage_stays_where_it_is(self, engine: Engine) -> None:
        blocks = put(engine, make_blocks([key_of(i) for i in range(9)], 20_000))
        engine.flush()
        self.damage(engine, blocks.take(slice(4, 5)))
        found = verdicts(engine, blocks)
        assert found[4] != Verdict.OK
        assert found[:4] + found[5:] == [Verdict.OK] * 8
        fresh = put(engine, make_blocks([key_of(4)], 20_000, 2))
        assert_stored(engine, fresh)

    def test_figures_and_check(self, engine: Engine) -> None:
        put(engine, make_blocks([key_of(1)]))
        stats = engine.stats()
        assert stats.io in ("memory", "direct", "buffered")
        assert stats.overhead_bytes >= 0
        assert not engine.failed
        assert engine.check() == []
        assert engine.capabilities.preferred_threads >= 1
        assert engine.capabilities.space_factor >= 1.0
        assert engine.name

    def test_it_agrees_with_a_dictionary(
        self, context: EngineContext, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        def make() -> Engine:
            directory = tmp_path_factory.mktemp("machine")
            engine = self.make(replace(context, directory=directory))
            engine.create()
            engine.open()
            return engine

        run_machine(make)


def _bytes_read() -> int:
    """Return the bytes that this process has got from read calls so far (proc_pid_io(5))."""
    line = Path("/proc/self/io").read_text().splitlines()[0]
    return int(line.removeprefix("rchar: "))


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


def _verdicts_elsewhere(
    engine_class: type[Engine], context: EngineContext, blocks: Blocks
) -> list[Verdict | None]:
    engine = engine_class(context)
    engine.open()
    try:
        return verdicts(engine, blocks)
    finally:
        engine.close()


def _killed_writer(engine: Engine) -> int:
    """Let a process put generations 1, 2, ... and kill it; return the last acknowledged one."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_put_for_ever, args=(type(engine), engine.context, there))
    process.start()
    there.close()
    for _ in range(60):
        acknowledged: int = here.recv()
    process.kill()
    process.join()
    try:
        while True:
            acknowledged = here.recv()
    except EOFError:
        here.close()
        return acknowledged


def _put_for_ever(
    engine_class: type[Engine], context: EngineContext, acknowledged: Connection
) -> None:
    engine = engine_class(context)
    engine.open()
    for generation in range(1, 1 << 20):
        put(engine, make_blocks([key_of(generation % 50)], 200_000, generation))
        acknowledged.send(generation)

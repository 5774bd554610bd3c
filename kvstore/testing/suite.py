"""The rules of the engine contract as tests; see :class:`EngineTests`."""

from __future__ import annotations

import contextlib
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.backends.base import SCAN_BATCH
from kvstore.errors import KVStoreError
from kvstore.keys import MAX_BLOCK_BYTES
from kvstore.record import HEADER_PAGE, Verdict
from kvstore.testing.load import LoadTests
from kvstore.testing.records import (
    NAMESPACE,
    OTHER_NAMESPACE,
    WRITTEN_NS,
    assert_absent,
    assert_stored,
    blank_images,
    delete,
    full_images,
    identities,
    key_of,
    make_blocks,
    put,
    scanned,
    verdicts,
)
from kvstore.testing.reopening import OpeningTests

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.backends.base import Engine

SIZES = [1, 511, 4095, 4096, 4097, 65536, 300_001, 2 << 20, MAX_BLOCK_BYTES]
CLASS_PAGES = (2, 7, 8, 9, 10, 15, 16, 18, 20, 32, 36, 64, 72, 128, 144, 512, 576)
"""Payloads that just fill a slot of one class of :mod:`kvstore.slots`, or of a plainer division."""


class EngineTests(OpeningTests, LoadTests):
    """Subclass it, name the subclass ``Test...`` and give it ``make``; pytest does the rest.

    An engine whose records do not outlive the process (``Capabilities.persistent``) skips what
    needs that. Give ``damage`` as well if a record of the engine can be spoilt from outside, and a
    larger ``capacity`` if it takes space by the hundredweight.
    """

    # Putting and getting

    @pytest.mark.parametrize("size", SIZES)
    def test_a_put_is_found(self, engine: Engine, size: int) -> None:
        count = 3 if size <= 2 << 20 else 1
        blocks = put(engine, make_blocks([key_of(i) for i in range(count)], size))
        assert_stored(engine, blocks)

    def test_sizes_around_the_limits_of_slot_classes(self, engine: Engine) -> None:
        sizes = [pages * HEADER_PAGE + more for pages in CLASS_PAGES for more in (-1, 0, 1)]
        blocks = put(engine, make_blocks([key_of(i) for i in range(len(sizes))], sizes))
        assert_stored(engine, blocks)
        assert delete(engine, blocks.take(slice(None, None, 2))) == (len(sizes) + 1) // 2
        assert_stored(engine, blocks.take(slice(1, None, 2)))

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
        delete(engine, short)
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
        assert delete(engine, stored[0]) == 2
        assert_absent(engine, stored[0])
        for blocks in stored[1:]:
            assert_stored(engine, blocks)

    def test_generations_of_a_key_coexist(self, engine: Engine) -> None:
        old = put(engine, make_blocks([key_of(1)], 5000, 1))
        new = put(engine, make_blocks([key_of(1)], 70_000, (1 << 63) + 5))
        assert_stored(engine, old)
        assert_stored(engine, new)
        assert delete(engine, old) == 1
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
        assert delete(engine, make_blocks([key_of(9)])) == 0
        assert delete(engine, blocks.take(slice(1, 3))) == 2
        assert delete(engine, blocks) == 2
        assert delete(engine, blocks) == 0
        assert_absent(engine, blocks)
        assert scanned(engine) == {}
        assert_stored(engine, put(engine, blocks))

    def test_an_empty_batch_is_nothing(self, engine: Engine) -> None:
        nothing = make_blocks([])
        assert len(engine.put_many(nothing, [], sync=True).places) == 0
        assert len(engine.get_many_into(nothing, []).statuses) == 0
        assert len(engine.contains_many(nothing)) == 0
        assert delete(engine, nothing) == 0

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
        delete(engine, gone)
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

    # Damage, figures

    def test_damage_stays_where_it_is(self, engine: Engine) -> None:
        blocks = put(engine, make_blocks([key_of(i) for i in range(9)], 20_000))
        engine.flush()
        self.damage(engine, blocks.take(slice(4, 5)))
        found = verdicts(engine, blocks)
        assert found[4] != Verdict.OK
        assert found[:4] + found[5:] == [Verdict.OK] * 8
        fresh = put(engine, make_blocks([key_of(4)], 20_000, 2))
        assert_stored(engine, fresh)

    def test_a_directory_that_vanishes_is_no_crash(self, engine: Engine) -> None:
        blocks = put(engine, make_blocks([key_of(1), key_of(2)]))
        shutil.rmtree(engine.context.directory)
        new = make_blocks([key_of(3)])
        uses: list[Callable[[], object]] = [
            lambda: verdicts(engine, blocks),
            lambda: engine.contains_many(blocks),
            lambda: engine.put_many(new, full_images(new), sync=True),
            lambda: list(engine.scan()),
            lambda: delete(engine, blocks),
            engine.flush,
            engine.check,
            engine.stats,
        ]
        for use in uses:
            with contextlib.suppress(KVStoreError):
                use()

    def test_figures_and_check(self, engine: Engine) -> None:
        put(engine, make_blocks([key_of(1)]))
        stats = engine.stats()
        assert stats.io in ("memory", "direct", "buffered", "mmap")
        assert stats.overhead_bytes >= 0
        assert not engine.failed
        assert engine.check() == []
        assert engine.capabilities.preferred_threads >= 1
        assert engine.capabilities.space_factor >= 1.0
        assert engine.name


def _bytes_read() -> int:
    """Return the bytes that this process has got from read calls so far (proc_pid_io(5))."""
    line = Path("/proc/self/io").read_text().splitlines()[0]
    return int(line.removeprefix("rchar: "))

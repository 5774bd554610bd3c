"""Opening and closing: in this process, in others, after a kill, and with a piece missing."""

from __future__ import annotations

import itertools
import os
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import EngineError, KVStoreError, ReadOnly, StoreExists, StoreNotFound
from kvstore.testing.case import EngineCase
from kvstore.testing.processes import killed_writer, visit_elsewhere, writes, written
from kvstore.testing.records import (
    assert_stored,
    blank_images,
    delete,
    full_images,
    identities,
    key_of,
    make_blocks,
    put,
    rebuild,
    reopen,
    scanned,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstore.backends.base import Engine, EngineContext


class OpeningTests(EngineCase):
    """Part of :class:`kvstore.testing.EngineTests`."""

    def test_closing_twice_and_opening_again(self, persistent: Engine) -> None:
        blocks = put(persistent, make_blocks([key_of(1), key_of(2)]))
        persistent.close()
        persistent.close()
        reopen(persistent, blocks)
        again = self.make(persistent.context)
        persistent.close()
        reopen(again, blocks)
        assert len(scanned(again)) == 2
        again.close()

    def test_another_process_finds_the_records_and_adds_some(self, persistent: Engine) -> None:
        blocks = put(persistent, make_blocks([key_of(i) for i in range(5)], 100_000))
        persistent.close()
        fresh = make_blocks([key_of(i) for i in range(5, 8)], 100_000)
        visit = visit_elsewhere(persistent, [blocks], fresh)
        assert set(visit.found) == {*identities(blocks), *identities(fresh)}
        reopen(persistent, blocks, visit.put)
        assert scanned(persistent) == visit.found

    def test_what_was_deleted_stays_away(self, persistent: Engine) -> None:
        blocks = put(persistent, make_blocks([key_of(i) for i in range(9)], 20_000))
        again = put(persistent, make_blocks([key_of(0)], 20_000, 2))
        assert delete(persistent, blocks.take(slice(0, 5))) == 5
        persistent.close()
        stays = blocks.take(slice(5, 9))
        assert set(rebuild(persistent)) == {*identities(stays), *identities(again)}
        assert delete(persistent, again) == 1
        fresh = put(persistent, make_blocks([key_of(i) for i in range(5)], 20_000, 3))
        assert delete(persistent, fresh) == 5
        persistent.close()
        assert set(rebuild(persistent)) == set(identities(stays))

    def test_a_killed_writer_leaves_whole_records(self, persistent: Engine) -> None:
        persistent.close()
        acknowledged = killed_writer(persistent)
        found = rebuild(persistent)
        *steps, unsure = itertools.islice(writes(), acknowledged + 1)
        gone = {-step for step in steps if step < 0}
        stored = {step for step in steps if step > 0} - gone
        assert {generation for *_, generation in found} ^ stored <= {abs(unsure)}
        for (*_, generation), place in found.items():
            block = written(generation)
            block.places[0] = place
            assert_stored(persistent, block)

    def test_opening_makes_nothing(self, context: EngineContext) -> None:
        missing = replace(context, directory=context.directory / "missing")
        for place in (context, missing):
            engine = self.make(place)
            with pytest.raises(StoreNotFound):
                engine.open()
            engine.close()
        assert list(context.directory.iterdir()) == []

    def test_a_missing_or_short_piece_never_makes_an_empty_engine(
        self, persistent: Engine, tmp_path: Path
    ) -> None:
        made = persistent.context.directory
        pieces = [path.relative_to(made) for path in made.rglob("*")]
        blocks = put(persistent, make_blocks([key_of(1)]))
        persistent.close()
        for number, (piece, spoil) in enumerate(itertools.product(pieces, (_remove, _halve))):
            copy = tmp_path / f"copy-{number}"
            shutil.copytree(made, copy)
            if not (copy / piece).exists():
                continue
            spoil(copy / piece)
            engine = self.make(replace(persistent.context, directory=copy))
            try:
                reopen(engine, blocks)
            except KVStoreError:
                pass  # Refusing is right. Opening is, too, but only with everything there.
            finally:
                engine.close()

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
            lambda: delete(engine, blocks),
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
        reopen(reader, blocks)
        assert len(scanned(reader)) == 1
        with pytest.raises(ReadOnly):
            reader.put_many(blocks, full_images(blocks), sync=False)
        with pytest.raises(ReadOnly):
            delete(reader, blocks)
        assert_stored(reader, blocks)
        reader.close()


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _halve(path: Path) -> None:
    if path.is_file():
        os.truncate(path, path.stat().st_size // 2)

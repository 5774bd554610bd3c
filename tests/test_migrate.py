"""Changing the engine of a store: everything comes along, nothing is lost on the way."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore import former, layout
from kvstore.errors import (
    ConfigError,
    CorruptStore,
    KVStoreError,
    NotFound,
    StoreExists,
    StoreFull,
    StoreLocked,
)
from kvstore.migrate import Migration, Outcome
from kvstore.order import parents_first
from tests.migrating import ENGINES, Local, block, fill, holding, key, left

MIB = 1 << 20
LONG = os.environ.get("PROMISES") == "long"
COUNT = 1000 if LONG else 40
CAPACITY = 1024 * MIB if LONG else 256 * MIB
PAIRS = list(itertools.permutations(ENGINES, 2))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], Path]:
    """Return a function that gives a copy of a store of an engine; each is filled once."""
    stores: dict[str, Path] = {}

    def copy(engine: str, to: Path) -> Path:
        if engine not in stores:
            stores[engine] = tmp_path_factory.mktemp("made") / engine
            fill(stores[engine], engine, COUNT, capacity=CAPACITY)
        shutil.copytree(stores[engine], to)
        return to

    return copy


def change(path: Path, engine: str, **how: int) -> Outcome:
    with Migration(path, engine, min_free=0) as migration:
        return migration.run(lambda _blocks, _bytes: None, **how)


# -- what comes along -----------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=[f"{a}-{b}" for a, b in PAIRS])
def test_everything_comes_along(
    made: Callable[[str, Path], Path], tmp_path: Path, source: str, target: str
) -> None:
    path = made(source, tmp_path / "store")
    before = holding(path)
    outcome = change(path, target)
    assert outcome.switched
    assert outcome.left == []
    assert layout.read(path).engine == target
    assert holding(path) == before
    local = Local(path, capacity=None)
    assert local.store.status()["state"] == "ready"
    assert local.get([key(1), key(3)]) == [block(1, 700), None]
    assert local.put([key(90_000)], [block(1)]) == [0]
    local.stop()


def test_a_store_without_blocks(tmp_path: Path) -> None:
    Local(tmp_path / "store").stop()
    assert change(tmp_path / "store", "sqlite").switched
    assert holding(tmp_path / "store") == ({}, [])


def test_an_engine_that_forgets_has_nothing_to_copy(tmp_path: Path) -> None:
    local = Local(tmp_path / "store", engine="memory")
    local.put([key(1)], [block(1)])
    local.stop()
    assert change(tmp_path / "store", "sqlite").copied == 0
    assert holding(tmp_path / "store") == ({}, [])


def test_a_journal_that_is_torn_is_mended_first(tmp_path: Path) -> None:
    path = tmp_path / "store"
    fill(path, "filesystem", 8, capacity=CAPACITY)
    for journal in (path / "blocks").glob("journal.*"):
        journal.write_bytes(b"")
    assert change(path, "sqlite").copied == 12
    local = Local(path, capacity=None)
    assert local.get([key(1), key(3)]) == [block(1, 700), None]
    local.stop()


def test_a_store_that_was_killed_is_brought_to_rest_first(tmp_path: Path) -> None:
    path = tmp_path / "store"
    fill(path, "filesystem", 24, clean=False, capacity=CAPACITY)
    before = holding(path)
    assert change(path, "lmdb").switched
    assert holding(path) == before


def test_blocks_above_a_batch_come_along(tmp_path: Path) -> None:
    path = tmp_path / "store"
    local = Local(path, capacity=256 * MIB, bounce_bytes=64 * MIB)
    local.put([key(1)], [block(1, 20 * MIB)])
    local.stop()
    before = holding(path)
    with pytest.raises(StoreFull, match=r"records of \d+ bytes at most"):
        change(path, "superblock")
    assert change(path, "lmdb").copied == 1
    assert holding(path) == before


def test_each_block_comes_behind_its_parent() -> None:
    assert parents_first([0, 1, 2, 3, 4], [3, -1, 0, 4, -1]) == [4, 3, 0, 1, 2]


# -- what stays behind ----------------------------------------------------------------------------


def test_damaged_blocks_stay_behind_and_are_named(tmp_path: Path) -> None:
    path = tmp_path / "store"
    local = Local(path, capacity=CAPACITY)
    keys = [key(n) for n in range(6)]
    local.put(keys, [block(n) for n in range(6)], chain=True)
    local.stop()
    files = {path.name.split("-")[1].split(".")[0]: path for path in local.files()}
    damaged = files[keys[2].hex()]
    data = bytearray(damaged.read_bytes())
    data[5000] ^= 1
    damaged.write_bytes(data)
    files[keys[5].hex()].unlink()
    before, order = holding_without(path, keys[2], keys[5])
    outcome = change(path, "lmdb")
    assert [(one.key, one.reason.split()[0]) for one in outcome.left] == [
        (keys[2].hex(), "the"),
        (keys[5].hex(), "its"),
    ]
    assert outcome.switched
    assert damaged.read_bytes() == bytes(data)
    local = Local(path, capacity=None)
    assert local.contains(keys) == [True, True, False, True, True, False]
    assert local.get(keys[3:5]) == [block(3), block(4)]
    assert local.core.index.ghost_count == 1
    local.stop()
    assert len(before) == 4 == len(order)


def holding_without(path: Path, *gone: bytes) -> tuple[list[bytes], list[bytes]]:
    local = Local(path, capacity=None)
    index = local.core.index
    names = [bytes(one) for one in index.keys_of(local.rows())]
    local.kill()
    left = [name for name in names if name not in gone]
    return left, left


def test_a_source_of_which_nothing_can_be_read_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "store"
    local = Local(path, capacity=CAPACITY)
    local.put([key(1)], [block(1)])
    local.stop()
    local.files()[0].unlink()
    with pytest.raises(KVStoreError, match="none of 1 blocks can be read"):
        change(path, "sqlite")
    assert layout.read(path).engine == "filesystem"


# -- refusals -------------------------------------------------------------------------------------


def test_what_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    local = Local(path, capacity=64 * MIB)
    with pytest.raises(StoreLocked), Migration(path, "lmdb"):
        pass
    for n in range(40):
        local.put([key(n)], [block(n, MIB)])
    local.stop()
    with pytest.raises(ConfigError, match="forgets"):
        Migration(path, "memory")
    with pytest.raises(ConfigError, match="no engine"):
        Migration(path, "lmbd")
    with Migration(path, "filesystem") as migration:
        assert migration.already
    with pytest.raises(StoreFull, match=r"room for \d+ of the 67108864 bytes.*--capacity"):
        change(path, "lmdb")
    with (
        Migration(path, "lmdb", capacity=128 * MIB, min_free=1 << 50) as migration,
        pytest.raises(StoreFull, match="min_free"),
    ):
        migration.plan()
    assert left(path) == ["blocks"]
    with Migration(path, "lmdb", capacity=128 * MIB, min_free=0) as migration:
        assert migration.run(lambda _blocks, _bytes: None).copied == 40
    assert layout.read(path).capacity_bytes == 128 * MIB


# -- afterwards -----------------------------------------------------------------------------------


@pytest.fixture
def changed(made: Callable[[str, Path], Path], tmp_path: Path) -> Path:
    path = made("filesystem", tmp_path / "store")
    change(path, "sqlite")
    return path


def test_what_is_kept_counts_until_it_is_deleted(changed: Path) -> None:
    kept = layout.read(changed).previous
    assert kept is not None
    local = Local(changed, capacity=None)
    status = local.store.status()
    assert status["kept_bytes"] == kept.bytes
    real = layout.directory_bytes(changed)
    assert abs(int(str(status["used_bytes"])) - real) < real // 4
    assert any("former blocks (filesystem)" in str(note) for note in status["notes"])  # type: ignore[attr-defined]
    local.stop()
    assert former.delete(changed) == kept.bytes
    assert not (changed / "blocks").exists()
    assert former.delete(changed) == 0
    assert layout.read(changed).previous is None
    assert change(changed, "filesystem").switched
    assert layout.read(changed).blocks == "blocks-filesystem"


def test_going_back(changed: Path) -> None:
    before = holding(changed)
    with pytest.raises(StoreExists, match="still has the blocks"), Migration(changed, "lmdb"):
        pass
    Local(changed, capacity=None).stop()
    opens = layout.read(changed).opens
    assert former.go_back(changed).engine == "filesystem"
    found = layout.read(changed)
    assert (found.blocks, found.previous, found.opens) == ("blocks", None, opens)
    assert not (changed / "blocks-sqlite").exists()
    assert holding(changed) == before
    with pytest.raises(NotFound):
        former.go_back(changed)
    # The same engine once more: nothing of the first copy is believed.
    assert change(changed, "sqlite").present == 0
    assert holding(changed) == before


def test_no_way_back_behind_new_blocks_or_deletions(changed: Path) -> None:
    local = Local(changed, capacity=None)
    local.put([key(50_000)], [block(1)])
    local.delete([key(0)])
    local.stop()
    with pytest.raises(KVStoreError, match="1 blocks have come in and 1 have left"):
        former.go_back(changed)
    assert layout.read(changed).engine == "sqlite"


def test_no_way_back_where_it_is_not_known_what_came_in(changed: Path) -> None:
    for path in (changed / "blocks-sqlite").glob("journal.*"):
        path.write_bytes(b"")
    with pytest.raises(CorruptStore, match="not known"):
        former.go_back(changed)


def test_a_directory_of_before_that_is_gone(changed: Path) -> None:
    shutil.rmtree(changed / "blocks")
    with pytest.raises(NotFound, match="is gone"):
        former.go_back(changed)
    assert former.delete(changed) == 0
    assert layout.read(changed).previous is None


# -- a copy that is not finished ------------------------------------------------------------------


def begin(path: Path, engine: str, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a run end, as by Ctrl-C, once so many blocks are copied."""
    monkeypatch.setattr("kvstore.migrate.BATCH_BLOCKS", 4)
    seen = 0

    def told(number: int, _bytes: int) -> None:
        nonlocal seen
        seen += number
        if seen >= blocks > seen - number:
            raise KeyboardInterrupt

    with Migration(path, engine, min_free=0) as migration:
        assert migration.run(told, jobs=1).interrupted


def test_an_unfinished_copy_goes_on(
    made: Callable[[str, Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made("filesystem", tmp_path / "store")
    before = holding(path)
    begin(path, "superblock", 12, monkeypatch)
    assert layout.read(path).engine == "filesystem"
    with pytest.raises(StoreExists, match="was begun"), Migration(path, "lmdb"):
        pass
    with Migration(path, "superblock", min_free=0) as migration:
        plan = migration.plan()
        assert 12 <= plan.present < plan.blocks
    outcome = change(path, "superblock")
    assert (outcome.present, outcome.copied) == (plan.present, plan.blocks - plan.present)
    assert holding(path) == before
    assert not (path / former.MIGRATING).exists()


def test_an_unfinished_copy_is_given_up(
    made: Callable[[str, Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made("filesystem", tmp_path / "store")
    begin(path, "lmdb", 12, monkeypatch)
    local = Local(path, capacity=None)
    assert any("unfinished copy" in str(note) for note in local.store.status()["notes"])  # type: ignore[attr-defined]
    local.stop()
    back = former.go_back(path)
    assert (back.engine, back.given_up) == ("filesystem", "lmdb")
    assert left(path) == ["blocks"]


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "filesystem"])
def test_the_source_may_be_used_between_two_runs(
    made: Callable[[str, Path], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
) -> None:
    path = made("filesystem", tmp_path / "store")
    begin(path, engine, 16, monkeypatch)
    local = Local(path, capacity=None)
    local.delete([key(0), key(1)])
    local.put([key(70_000), key(1)], [block(70_000), block(1, 700)])
    local.stop()
    before = holding(path)
    change(path, engine)
    assert holding(path) == before
    local = Local(path, capacity=None)
    found = sum(len(batch) for batch in local.core.engine.scan())
    assert found == len(local.rows())
    local.stop()


def test_a_copy_whose_journal_is_torn_is_begun_anew(
    made: Callable[[str, Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made("filesystem", tmp_path / "store")
    before = holding(path)
    begin(path, "lmdb", 12, monkeypatch)
    (journal,) = (path / "blocks-lmdb").glob("journal.*")
    data = bytearray(journal.read_bytes())
    data[300] ^= 1
    journal.write_bytes(data)
    assert change(path, "lmdb").present == 0
    assert holding(path) == before

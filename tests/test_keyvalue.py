"""The engines over key/value libraries: kills, flips, full disks, failed syncs, and in a store.

With ``PROMISES=long``, as ``make promises`` sets it, twice the capacity is put before each kill.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.backends import engine_class
from kvstore.backends.base import Engine, EngineContext, Leaving, Status
from kvstore.backends.keyvalue import PIECE_BYTES, KeyValueEngine, LibraryError
from kvstore.errors import ConfigError, CorruptStore, EngineError, KVStoreError, StoreNotFound
from kvstore.record import HEADER_PAGE, Verdict
from kvstore.testing.records import (
    STORE,
    assert_absent,
    assert_stored,
    blank_images,
    full_images,
    identities,
    key_of,
    make_blocks,
    occupied,
    payload_of,
    put,
    scanned,
    verdicts,
)
from tests.mounts import mounted
from tests.stores import CAPACITY, Local, block, key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from kvstore.backends.base import Blocks

MIB = 1 << 20
NAMES = ("lmdb", "leveldb", "sqlite", "rocksdb")
UNCONTAINED = ("lmdb", "leveldb")
LONG = os.environ.get("PROMISES") == "long"
KILLS = 10
PUTS = 32 if LONG else 4
"""Of 4 MiB, before each kill: in the long form twice the capacity."""
FLIPS = 200 if LONG else 60
_FRESH = multiprocessing.get_context("forkserver")


def made(name: str, directory: Path, capacity: int = CAPACITY) -> KeyValueEngine:
    engine = engine_class(name)(EngineContext(directory, STORE, capacity=capacity))
    assert isinstance(engine, KeyValueEngine)
    return engine


@pytest.fixture(params=NAMES)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KeyValueEngine]:
    directory = tmp_path / "blocks"
    directory.mkdir()
    engine = made(request.param, directory)
    engine.create()
    engine.open()
    yield engine
    engine.close()


def many(count: int, size: int, first: int = 0) -> Blocks:
    numbers = range(first, first + count)
    return make_blocks([key_of(n) for n in numbers], size, [n + 1 for n in numbers])


# -- the form of a record ------------------------------------------------------------------------


def test_sizes_around_the_pieces(engine: KeyValueEngine) -> None:
    sizes = [times * PIECE_BYTES + more for times in (1, 2, 5) for more in (-1, 0, 1)]
    blocks = put(engine, make_blocks([key_of(n) for n in range(len(sizes))], sizes))
    assert_stored(engine, blocks)
    assert engine.delete_many(blocks) == len(sizes)
    with engine.reading() as get:
        for name in (b"b", b"h"):
            assert engine.after(name, name + b"\xff", 100) == []
            assert get(name) is None


def test_a_missing_piece_is_damage_and_no_more(engine: KeyValueEngine) -> None:
    blocks = put(engine, many(3, 3 * PIECE_BYTES))
    name = bytes.fromhex(engine.where(blocks)[1].split()[1])[1:]
    engine.remove([b"b" + name + b"\0\1"])
    read = engine.get_many_into(blocks, blank_images(blocks))
    assert read.statuses.tolist() == [Status.OK, Status.DAMAGED, Status.OK]
    assert read.filled[1] == HEADER_PAGE + PIECE_BYTES
    assert engine.delete_many(blocks) == 3
    assert_absent(engine, blocks)


def test_deleting_by_a_wrong_length_leaves_no_piece(engine: KeyValueEngine) -> None:
    blocks = put(engine, many(1, 4 * PIECE_BYTES))
    assert engine.delete_many(replace(blocks, lengths=np.array([1], np.uint32))) == 1
    assert_absent(engine, blocks)


def test_a_spoilt_small_record_is_reported(engine: KeyValueEngine) -> None:
    blocks = put(engine, many(3, 5000))
    name = bytes.fromhex(engine.where(blocks)[1].split()[1])
    other = bytes.fromhex(engine.where(blocks)[2].split()[1])
    with engine.reading() as get:
        value, third = bytes(get(name) or b""), bytes(get(other) or b"")
    for wrong, kind in ((value[:-1] + b"?", "bad-header"), (third, "wrong-name")):
        engine.write([(name, wrong)], sync=False)
        (batch,) = engine.scan()
        assert [finding.kind for finding in batch.strange] == [kind]
        assert batch.generations.tolist() == [1, 3]
        assert_stored(engine, blocks)
    assert engine.delete_many(blocks) == 3
    assert_absent(engine, blocks)


@pytest.mark.parametrize("name", NAMES)
def test_an_io_that_it_has_not(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="io=direct"):
        engine_class(name)(EngineContext(tmp_path, STORE, {"io": "direct"}))


@pytest.mark.parametrize(("name", "library"), [("leveldb", "plyvel"), ("rocksdb", "rocksdict")])
def test_a_missing_library_says_how_to_get_it(
    name: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"kvstore.backends.{name}", raising=False)
    with pytest.raises(EngineError, match=rf"pip install 'kvstore\[{name}\]'"):
        engine_class(name)


# -- room ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lmdb", "sqlite"])
def test_a_full_engine_takes_the_first_and_uses_room_again(name: str, tmp_path: Path) -> None:
    engine = made(name, tmp_path, 16 * MIB)
    engine.create()
    engine.open()
    blocks = many(24, MIB)
    written = engine.put_many(blocks, full_images(blocks), sync=False)
    there = written.statuses == Status.OK
    assert 8 <= there.sum() < 16
    assert set(written.statuses[~there].tolist()) == {Status.FULL}
    kept = blocks.take(there)
    assert_stored(engine, kept)
    assert_absent(engine, blocks.take(~there))
    assert engine.delete_many(kept.take(slice(0, 4)), Leaving.EVICTED) == 4
    for number in range(3):
        assert_stored(engine, put(engine, many(1, MIB, first=100 + number)))
    assert not engine.failed
    assert occupied(tmp_path) <= 16 * MIB + 2 * MIB
    engine.close()


@pytest.mark.parametrize("name", ["lmdb", "sqlite"])
@pytest.mark.parametrize("size", [100, 3000, 60_000])
def test_deleting_works_in_a_full_engine(name: str, size: int, tmp_path: Path) -> None:
    engine = made(name, tmp_path, 4 * MIB)
    engine.create()
    engine.open()
    held: list[Blocks] = []
    for first in range(0, 100_000, 50):
        blocks = many(50, size, first)
        written = engine.put_many(blocks, full_images(blocks), sync=False)
        held.append(blocks.take(written.statuses == Status.OK))
        if Status.FULL in written.statuses:
            break
    for blocks in held:
        assert engine.delete_many(blocks) == len(blocks)
    assert scanned(engine) == {}
    assert_stored(engine, put(engine, many(30, size)))
    engine.close()


@pytest.mark.root
@pytest.mark.parametrize("name", NAMES)
def test_a_full_disk_is_no_failure(name: str, tmp_path: Path) -> None:
    with mounted(tmp_path, "tmpfs", "size=24m") as point:
        engine = made(name, point / "blocks", 64 * MIB)
        engine.context.directory.mkdir()
        (point / "others").write_bytes(bytes(2 * MIB))
        engine.create()
        engine.open()
        held = []
        for number in range(40):
            one = many(1, MIB, first=number)
            status = engine.put_many(one, full_images(one), sync=True).statuses[0]
            assert status in (Status.OK, Status.FULL)
            if status == Status.OK:
                held.append(one)
        assert 4 <= len(held) < 24
        (point / "others").unlink()
        engine.close()
        engine.open()
        for one in held:
            assert_stored(engine, one)
        engine.close()


# -- failed syncs --------------------------------------------------------------------------------


def test_after_a_failed_sync_nothing_is_written(
    engine: KeyValueEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = put(engine, many(2, 5000))

    def fail() -> None:
        raise LibraryError("syncing failed: on order")

    with monkeypatch.context() as patched:
        patched.setattr(engine, "sync", fail)
        with pytest.raises(EngineError, match="on order"):
            engine.flush()
    assert "nothing more is written" in engine.failed
    with pytest.raises(EngineError, match="on order"):
        engine.flush()
    new = many(1, 5000, first=9)
    assert engine.put_many(new, full_images(new), sync=False).statuses == Status.FAILED
    with pytest.raises(EngineError, match="on order"):
        engine.delete_many(blocks)
    assert engine.stats().notes == (engine.failed,)
    assert_stored(engine, blocks)
    engine.close()
    engine.open()
    engine.flush()
    assert_stored(engine, put(engine, new))


# -- kills ---------------------------------------------------------------------------------------


def _write(name: str, directory: Path, first: int, held: list[int], told: Connection) -> None:
    """Put four at a time and delete the oldest, so that half of the capacity is held."""
    engine = made(name, directory)
    engine.open()
    for number in itertools.count(first, 4):
        while len(held) > CAPACITY // 2 // MIB:
            assert engine.delete_many(many(1, MIB, held[0])) == 1
            told.send(("deleted", held.pop(0)))
        told.send(("begun", number))
        put(engine, many(4, MIB, number), sync=number % 3 == 0)
        held += range(number, number + 4)
        told.send(("put", number))


def _killed(name: str, directory: Path, first: int, held: set[int]) -> tuple[int, set[int]]:
    """Let a process write more and kill it; return what it began last and what it holds."""
    here, there = _FRESH.Pipe(duplex=False)
    process = _FRESH.Process(target=_write, args=(name, directory, first, sorted(held), there))
    process.start()
    there.close()
    begun, puts = first, 0
    try:
        while True:
            what, number = here.recv()
            if what == "begun":
                begun = number
            elif what == "put":
                held |= set(range(number, number + 4))
                puts += 1
                if puts == PUTS:
                    process.kill()
            else:
                held.discard(number)
    except EOFError:
        process.join()
        return begun, held


def test_kills_in_the_middle_of_puts(engine: KeyValueEngine) -> None:
    """Twice the capacity is written in all; what was acknowledged and not deleted is there."""
    engine.close()
    held: set[int] = set()
    first = 0
    for _ in range(KILLS):
        begun, held = _killed(engine.name, engine.context.directory, first, held)
        engine.open()
        found = {generation - 1 for *_, generation in scanned(engine)}
        doubtful = set(range(begun, begun + 4)) | {min(held)}
        assert found ^ held <= doubtful
        for number in found:
            assert_stored(engine, many(1, MIB, number))
        held, first = found, begun + 4
        assert engine.check() == []
        engine.close()
    assert first * MIB >= 2 * CAPACITY


# -- flips ---------------------------------------------------------------------------------------


def _outcomes(name: str, source: Path, work: Path, first: int, told: Connection) -> None:
    for number in range(first, FLIPS):
        told.send(("begun", number))
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(source, work)
        _flip(work, random.Random(number))
        told.send((_outcome(name, work), number))
    told.send(("end", FLIPS))


def _flip(directory: Path, rng: random.Random) -> None:
    """Flip one bit of one byte, each byte of all files alike."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    (path,) = rng.choices(files, [file.stat().st_size for file in files])
    with path.open("r+b") as file:
        at = rng.randrange(path.stat().st_size)
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1 << rng.randrange(8)]), at)


def _outcome(name: str, directory: Path) -> str:
    engine = made(name, directory)
    try:
        engine.open()
        return _look(engine)
    except KVStoreError:
        return "refused"
    finally:
        engine.close()


def _look(engine: Engine) -> str:
    blocks, images = _flipped(), blank_images(_flipped())
    read = engine.get_many_into(blocks, images)
    found = verdicts(engine, blocks)
    for key_bytes, length, verdict, image in zip(
        blocks.key_list(), blocks.lengths.tolist(), found, images, strict=True
    ):
        right = payload_of(key_bytes, 1, length)
        if verdict == Verdict.OK and image[HEADER_PAGE : HEADER_PAGE + length] != right:
            return "wrong"
    for batch in engine.scan():
        assert len(batch) <= len(blocks)
    engine.put_many(new := many(2, 5000, 900), full_images(new), sync=False)
    engine.delete_many(blocks)
    lost = sum(verdict != Verdict.OK for verdict in found)
    assert len(read.statuses) == len(found)
    return "whole" if not lost else "lost 1" if lost == 1 else "lost more"


def _flipped() -> Blocks:
    sizes = [(1000, 5000, 70_000, 300_000)[n % 4] for n in range(40)]
    return make_blocks([key_of(n) for n in range(40)], sizes)


def test_flips(engine: KeyValueEngine, tmp_path: Path) -> None:
    """No wrong bytes, and the process lives on, but for engines that say that it may not."""
    put(engine, _flipped())
    engine.close()
    counts: Counter[str] = Counter()
    first = 0
    while first < FLIPS:
        here, there = _FRESH.Pipe(duplex=False)
        arguments = (engine.name, engine.context.directory, tmp_path / "work", first, there)
        process = _FRESH.Process(target=_outcomes, args=arguments)
        process.start()
        there.close()
        try:
            while first < FLIPS:
                what, number = here.recv()
                if what not in ("begun", "end"):
                    counts[what] += 1
                first = number if what == "begun" else number + 1
        except EOFError:
            counts["died"] += 1
            first += 1
        process.join()
    print(engine.name, dict(counts))
    assert sum(counts.values()) == FLIPS
    assert not counts["wrong"]
    assert not counts["died"] or engine.name in UNCONTAINED
    assert counts["whole"] + counts["lost 1"] >= FLIPS * 8 // 10


# -- what is gone or short -----------------------------------------------------------------------


@pytest.fixture
def lmdb_file(tmp_path: Path) -> Path:
    engine = made("lmdb", tmp_path)
    engine.create()
    engine.open()
    put(engine, make_blocks([key_of(n) for n in range(40)], 100_000))
    engine.close()
    return tmp_path / "lmdb" / "data.mdb"


@pytest.mark.parametrize("size", [1, 4096, 8192, 10_000, 0.5, 0.9])
def test_lmdb_never_maps_what_was_cut_off(lmdb_file: Path, size: float) -> None:
    os.truncate(lmdb_file, int(size * lmdb_file.stat().st_size) if size < 1 else int(size))
    with pytest.raises(CorruptStore, match="is damaged"):
        made("lmdb", lmdb_file.parent.parent).open()


def test_lmdb_makes_no_empty_store(lmdb_file: Path) -> None:
    os.truncate(lmdb_file, 0)
    with pytest.raises(CorruptStore, match="it has 0 bytes"):
        made("lmdb", lmdb_file.parent.parent).open()
    lmdb_file.unlink()
    with pytest.raises(StoreNotFound, match=r"data\.mdb is missing"):
        made("lmdb", lmdb_file.parent.parent).open()
    assert not lmdb_file.exists()


def test_lmdb_refuses_every_spoilt_page_of_its_trees(lmdb_file: Path) -> None:
    """Meta, branch and leaf pages overwritten one by one: refused, or the page was in no tree."""
    good = lmdb_file.read_bytes()
    refused = 0
    for start in range(0, len(good), 4096):
        words = np.frombuffer(good[start : start + 16], np.uint16)
        if start >= 8192 and words[5] not in (1, 2):
            continue
        lmdb_file.write_bytes(good[:start] + b"\xee" * 4096 + good[start + 4096 :])
        engine = made("lmdb", lmdb_file.parent.parent)
        try:
            engine.open()
            assert set(verdicts(engine, make_blocks([key_of(n) for n in range(40)], 100_000))) <= {
                Verdict.OK,
                None,
            }
        except CorruptStore:
            refused += 1
        finally:
            engine.close()
    assert refused >= 4


@pytest.mark.parametrize("name", ["leveldb", "rocksdb"])
def test_what_was_cut_off_after_a_clean_stop_is_noticed(name: str, tmp_path: Path) -> None:
    engine = made(name, tmp_path)
    engine.create()
    engine.open()
    put(engine, make_blocks([key_of(n) for n in range(9)], 100_000))
    engine.close()
    note = tmp_path / name / "sizes.json"
    assert any(name.startswith("MANIFEST") for name in json.loads(note.read_text()))
    for path in (tmp_path / name).iterdir():
        if path != note and not path.name.startswith("LOG") and path.stat().st_size:
            good = path.read_bytes()
            os.truncate(path, len(good) - 1)
            with pytest.raises(CorruptStore, match="shorter"):
                engine.open()
            path.write_bytes(good)
    engine.open()
    assert not note.exists()
    engine.close()


# -- in a store ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_store_on_it_holds_its_capacity_and_survives_a_kill(name: str, tmp_path: Path) -> None:
    local = Local(tmp_path / "store", engine=name)
    names = [key(n) for n in range(200)]
    for n in range(0, 200, 10):
        assert not any(local.put(names[n : n + 10], [block(n + i, MIB) for i in range(10)]))
        local.tick()
        assert occupied(local.path) <= CAPACITY * 125 // 100
    there = local.contains(names)
    factor = local.core.engine.capabilities.space_factor
    assert sum(there) * MIB >= CAPACITY / factor * 0.8
    assert all(there[-20:])
    local.kill()
    local = Local(tmp_path / "store")
    assert local.contains(names) == there
    for n in np.flatnonzero(there).tolist():
        assert local.get([names[n]]) == [block(n, MIB)]
    local.flush()
    assert local.delete(names[-5:]) == 5
    local.stop()
    local = Local(tmp_path / "store")
    assert local.contains(names[-6:]) == [True] + 5 * [False]
    local.stop()


@pytest.mark.parametrize("name", NAMES)
def test_a_store_without_its_journal_is_rebuilt(name: str, tmp_path: Path) -> None:
    local = Local(tmp_path / "store", engine=name)
    names = [key(n) for n in range(30)]
    assert not any(local.put(names, [block(n, 50_000) for n in range(30)]))
    assert local.delete(names[:3]) == 3
    local.kill()
    for pattern in ("journal.*", "checkpoint.*"):
        for path in (tmp_path / "store" / "blocks").glob(pattern):
            path.unlink()
    local = Local(tmp_path / "store")
    assert local.contains(names) == 3 * [False] + 27 * [True]
    assert local.get(names[3:]) == [block(n, 50_000) for n in range(3, 30)]
    local.stop()


def test_another_engine_than_the_store_has(tmp_path: Path) -> None:
    Local(tmp_path / "store", engine="lmdb").stop()
    with pytest.raises(ConfigError, match="lmdb"):
        Local(tmp_path / "store", engine="sqlite")


def test_the_identities_of_a_scan(engine: KeyValueEngine) -> None:
    blocks = put(engine, many(5, 100))
    assert list(scanned(engine)) == identities(blocks)

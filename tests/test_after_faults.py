"""What the fault laboratory has found, one test for each mechanism; none needs root."""

from __future__ import annotations

import inspect
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import files, layout
from kvstore.answers import BlockStatus
from kvstore.backends import publish
from kvstore.backends.base import Engine, Scanned
from kvstore.backends.filesystem import FilesystemEngine
from kvstore.backends.leveldb import LeveldbEngine
from kvstore.checkpoint import CheckpointWriter
from kvstore.errors import EngineError
from kvstore.events import Kind, blank
from kvstore.reconcile import Reconcile
from kvstore.room import Emptying
from tests.ruins import lose_journal, recover
from tests.soak import disk_bytes
from tests.stores import MIB, Local, block, key


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    local = Local(tmp_path / "store")
    yield local
    local.kill()


def overwrite(local: Local, number: int) -> None:
    job = local.begin_put([key(number)], [block(number + 500)], overwrite=True)
    local.store.run(job)
    assert list(job.statuses) == [0]


class Syncs:
    """Notes for each batch that an engine gets whether it is to be synced."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[bool] = []
        put_many = engine.put_many

        def noted(*arguments: object, sync: bool) -> object:
            self.seen.append(sync)
            return put_many(*arguments, sync=sync)  # type: ignore[arg-type]

        monkeypatch.setattr(engine, "put_many", noted)


# -- a new version of a durable block -------------------------------------------------------------


def test_a_new_version_of_a_durable_block_is_synced_before_the_old_one_goes(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.put([key(1)], [block(1)], durable=True)
    local.put([key(2)], [block(2)])
    syncs = Syncs(local.core.engine, monkeypatch)
    overwrite(local, 1)
    overwrite(local, 2)
    assert syncs.seen == [True, False]
    local.flush()
    overwrite(local, 2)
    assert syncs.seen == [True, False, True]


def test_what_an_earlier_opening_wrote_may_be_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = Local(tmp_path / "store")
    local.put([key(1)], [block(1)], durable=True)
    local.kill()
    local = Local(tmp_path / "store")
    syncs = Syncs(local.core.engine, monkeypatch)
    overwrite(local, 1)
    assert syncs.seen == [True]
    local.kill()


def test_durable_blocks_that_are_moved_stay_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"engine": "superblock", "capacity": 128 * MIB, "bounce_bytes": 64 * MIB}
    local = Local(tmp_path / "store", **options)
    names = [key(n) for n in range(20)]
    local.put(names, [block(n, 400_000) for n in range(20)], durable=True)
    local.delete(names[10:])
    (first,) = set((local.core.index.places[local.rows()] >> np.uint64(32)).tolist())
    syncs = Syncs(local.core.engine, monkeypatch)
    Emptying(local.core, first, lambda: None, lambda: None)
    local.store.run_chores()
    assert set((local.core.index.places[local.rows()] >> np.uint64(32)).tolist()) != {first}
    assert syncs.seen
    assert all(syncs.seen)
    local.kill()


# -- what an end in the middle of a checkpoint leaves ---------------------------------------------


def test_journals_that_no_longer_count_go_at_the_next_opening(tmp_path: Path) -> None:
    local = Local(tmp_path / "store")
    local.put([key(1)], [block(1)])
    blocks = tmp_path / "store" / "blocks"
    (before,) = blocks.glob("journal.*")
    data = before.read_bytes()
    local.store.checkpoint()
    local.store.run_chores()
    local.kill()
    # As if killed between the new checkpoint and the end of what was before it.
    before.write_bytes(data)
    (blocks / "checkpoint.0000000000000007.new").write_bytes(bytes(1 << 20))
    local = Local(tmp_path / "store")
    assert not before.exists()
    assert not list(blocks.glob("*.new"))
    used = local.store.status()["used_bytes"]
    assert used == pytest.approx(disk_bytes(tmp_path / "store"), abs=64 << 10)
    assert local.get([key(1)]) == [block(1)]
    local.kill()


def test_the_room_that_an_earlier_journal_keeps_is_counted(tmp_path: Path) -> None:
    local = Local(tmp_path / "store")
    local.put([key(1)], [block(1)])
    local.core.journal.rotate()
    local.kill()
    local = Local(tmp_path / "store")
    used = local.store.status()["used_bytes"]
    assert used == pytest.approx(disk_bytes(tmp_path / "store"), abs=64 << 10)
    local.kill()


# -- a disk that fails ----------------------------------------------------------------------------


def test_a_checkpoint_that_cannot_even_be_removed_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    writer = CheckpointWriter(tmp_path, 2, bytes(16), 0)
    monkeypatch.setattr(files, "discard_temporary", refuse)
    monkeypatch.setattr(files, "write_all", refuse)
    with pytest.raises(EngineError, match="Input/output error"):
        writer.append(blank(1, Kind.SYNC))
    writer.abandon()


def test_a_journal_that_cannot_be_looked_at_is_an_error_of_ours(local: Local) -> None:
    kept = local.core.journal._descriptor
    local.core.journal._descriptor = 1 << 20
    with pytest.raises(EngineError, match="Bad file descriptor"):
        local.core.journal._note_size()
    local.core.journal._descriptor = kept


# -- scans ----------------------------------------------------------------------------------------


def lose_power(path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a block whose name alone reaches the disk before the power goes; return its file."""
    (journal,) = (path / "blocks").glob("journal.*")
    before = journal.read_bytes()
    local = Local(path)
    local.put([key(number)], [block(number)])
    (file,) = [one for one in local.files() if key(number).hex() in one.name]
    local.kill()
    journal.write_bytes(before)
    os.truncate(file, 0)
    monkeypatch.setattr(layout, "boot_id", lambda: b"another boot....")
    return file


def test_a_file_whose_content_was_lost_with_the_power_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store"
    local = Local(path)
    local.put([key(1)], [block(1)], durable=True)
    local.kill()
    file = lose_power(path, 2, monkeypatch)
    local = Local(path)
    assert not file.exists()
    assert local.store.status()["problems"] == []
    assert local.get([key(1), key(2)]) == [block(1), None]
    local.kill()


def test_an_empty_file_that_no_power_loss_explains_stays_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store"
    Local(path).kill()
    file = lose_power(path, 2, monkeypatch)
    monkeypatch.undo()
    local = Local(path, scan=True)
    assert file.exists()
    assert "no valid records: 1" in str(local.store.status()["problems"])
    local.kill()


def test_a_scan_that_is_given_up_is_ended_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended by the collector of garbage, it may wait for a lock that its own thread holds."""
    local = Local(tmp_path / "store")
    local.put([key(1)], [block(1)])
    local.kill()
    for path in (tmp_path / "store" / "blocks").glob("journal.*"):
        path.unlink()
    scans: list[Generator[Scanned, None, None]] = []
    real = FilesystemEngine.scan

    def scan(engine: FilesystemEngine) -> Iterator[Scanned]:
        scans.append(real(engine))  # type: ignore[arg-type]
        return scans[-1]

    def refuse(*_: object) -> None:
        raise EngineError("the disk fails", "see to it")

    monkeypatch.setattr(FilesystemEngine, "scan", scan)
    monkeypatch.setattr(Reconcile, "_save", refuse)
    local = Local(tmp_path / "store")
    assert "the scan of the store failed" in local.core.read_only
    assert [inspect.getgeneratorstate(one) for one in scans] == [inspect.GEN_CLOSED]
    local.kill()


# -- libraries that are opened --------------------------------------------------------------------


def test_a_kill_while_leveldb_opens_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes and removes files as soon as it opens them: the note of their sizes goes first."""
    Local(tmp_path / "store", engine="leveldb").stop()
    note = tmp_path / "store/blocks/leveldb/sizes.json"
    assert note.exists()
    real = LeveldbEngine._database

    def die(*_: object, **__: object) -> None:
        assert not note.exists()
        raise EngineError("as if killed", "open it again")

    monkeypatch.setattr(LeveldbEngine, "_database", die)
    with pytest.raises(EngineError, match="as if killed"):
        Local(tmp_path / "store")
    assert note.exists(), "what did not open is compared the next time"
    monkeypatch.setattr(LeveldbEngine, "_database", real)
    Local(tmp_path / "store").kill()


def test_what_a_library_tells_of_itself_may_be_lost_with_the_power(tmp_path: Path) -> None:
    local = Local(tmp_path / "store", engine="leveldb")
    local.put([key(1)], [block(1)])
    local.stop()
    os.truncate(tmp_path / "store/blocks/leveldb/LOG", 0)
    local = Local(tmp_path / "store")
    assert local.get([key(1)]) == [block(1)]
    local.kill()


def test_a_salvage_looks_into_pages_that_lmdb_has_used_again(tmp_path: Path) -> None:
    """The first page of a run that was given up says that the run goes on; others are in use."""
    path = tmp_path / "store"
    local = Local(path, engine="lmdb")
    local.put([key(100)], [block(100, 200_000)])
    local.put([key(n) for n in range(20)], [block(n, 700) for n in range(20)])
    local.kill()
    lose_journal(path)
    file = path / "blocks/lmdb/data.mdb"
    data = bytearray(file.read_bytes())
    begins = data.index(block(100, 200_000)[:1000]) // 4096
    leaf = min(data.index(block(n, 700)) // 4096 for n in range(20))
    # As LMDB would do once the large block is deleted: a page of its run becomes the leaf.
    page = data[leaf * 4096 : leaf * 4096 + 4096]
    page[:8] = (begins + 20).to_bytes(8, "little")
    data[(begins + 20) * 4096 : (begins + 21) * 4096] = page
    data[leaf * 4096 : leaf * 4096 + 4096] = bytes(4096)
    data[: 2 * 4096] = bytes(2 * 4096)
    file.write_bytes(data)
    recover(path)
    local = Local(path)
    assert local.get([key(n) for n in range(20)]) == [block(n, 700) for n in range(20)]
    assert local.get([key(100)]) == [None]
    local.kill()


def test_what_the_journal_holds_the_engine_holds_too_when_its_sync_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = Local(tmp_path / "store")
    with monkeypatch.context() as failing:
        failing.setattr(os, "fdatasync", _refuse)
        assert local.put([key(1)], [block(1)], durable=True) == [BlockStatus.FAILED]
    local.kill()
    local = Local(tmp_path / "store")
    assert local.contains([key(1)]) == [local.get([key(1)]) == [block(1)]]
    assert local.core.counters.missing_blocks == 0
    local.kill()


def _refuse(_: int) -> None:
    raise OSError(5, "Input/output error")


def test_a_failed_sync_does_not_cost_what_an_earlier_opening_made_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = Local(tmp_path / "store")
    local.put([key(1)], [block(1)], durable=True)
    local.kill()
    local = Local(tmp_path / "store")
    local.put([key(2)], [block(2)])
    monkeypatch.setattr(publish, "syncfs", _refuse)
    with pytest.raises(EngineError, match="a sync failed"):
        local.flush()
    assert local.contains([key(1), key(2)]) == [True, False]
    local.kill()
    local = Local(tmp_path / "store")
    assert local.get([key(1)]) == [block(1)]
    local.kill()


def test_a_lost_file_whose_row_meets_a_newer_version_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal has the older one, of which only the name is there; the newer one is whole."""
    path = tmp_path / "store"
    local = Local(path)
    local.put([key(1)], [block(1)])
    (older,) = local.files()
    (journal,) = (path / "blocks").glob("journal.*")
    before = journal.read_bytes()
    overwrite(local, 1)
    local.kill()
    journal.write_bytes(before)
    older.write_bytes(b"")
    monkeypatch.setattr(layout, "boot_id", lambda: b"another boot....")
    local = Local(path)
    assert local.get([key(1)]) == [block(501)]
    assert local.store.status()["problems"] == []
    assert not older.exists()
    local.kill()


def test_a_short_write_of_the_journal_costs_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the new version, and no more: the old one goes at the next opening."""
    local = Local(tmp_path / "store")
    local.put([key(1)], [block(1)])
    real, writes = os.pwrite, 0

    def short(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal writes
        writes += descriptor == local.core.journal._descriptor
        if writes == 2:  # the first one is BEGIN
            real(descriptor, data, offset)
            return len(data) // 2
        return real(descriptor, data, offset)

    with monkeypatch.context() as failing:
        failing.setattr(os, "pwrite", short)
        job = local.begin_put([key(1)], [block(501)], overwrite=True)
        local.store.run_chores()
        job.perform()
        local.store.finish(job)
        local.store.run_chores()
    assert local.core.read_only
    local.kill()
    local = Local(tmp_path / "store")
    assert local.get([key(1)]) == [block(501)]
    local.kill()


def test_of_two_versions_that_nobody_knows_the_older_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store"
    local = Local(path)
    local.put([key(1)], [block(1)])
    monkeypatch.setattr(local.core.engine, "delete_many", lambda *_, **__: 0)
    overwrite(local, 1)
    assert len(local.files()) == 2
    local.kill()
    lose_journal(path)
    local = Local(path)
    assert local.get([key(1)]) == [block(501)]
    assert len(local.files()) == 1
    local.kill()

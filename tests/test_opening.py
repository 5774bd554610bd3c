"""Opening: checkpoint plus journal, and what happens when they cannot be trusted."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from kvstore import layout
from kvstore.answers import BlockStatus
from kvstore.backends.filesystem import FilesystemEngine
from kvstore.checkpoint import CheckpointWriter
from kvstore.errors import (
    ConfigError,
    EngineError,
    FormatUnsupported,
    InvalidKey,
    ReadOnly,
    StoreExists,
    StoreFull,
    StoreLocked,
    StoreNotFound,
)
from kvstore.index import UNSYNCED
from kvstore.keys import key_array
from kvstore.opening import Opening, open_store
from tests.stores import CAPACITY, MIB, Local, block, key, options

NUMBERS = range(40)
KEYS = [key(n) for n in NUMBERS]
BLOCKS = [block(n, 10_000 + n) for n in NUMBERS]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with 40 blocks in chains of ten, killed."""
    local = Local(tmp_path / "store")
    for start in range(0, 40, 10):
        local.put(KEYS[start : start + 10], BLOCKS[start : start + 10], chain=True)
    local.tick()
    local.kill()
    return local.path


def order_of_use(local: Local) -> list[str]:
    rows = local.rows()
    rows = rows[np.argsort(local.core.index.last_use[rows])]
    return [bytes(one).hex() for one in local.core.index.keys_of(rows)]


def journals(path: Path) -> list[Path]:
    return sorted((path / "blocks").glob("journal.*"))


@pytest.fixture
def no_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise AssertionError("the store was scanned")

    monkeypatch.setattr(FilesystemEngine, "scan", refuse)


@pytest.mark.usefixtures("no_scan")
def test_after_a_kill_everything_is_there_without_a_scan(path: Path) -> None:
    local = Local(path)
    assert local.get(KEYS) == BLOCKS
    index = local.core.index
    rows = index.find(0, np.array([list(k) for k in KEYS], np.uint8))
    assert index.parents[rows[1:10]].tolist() == rows[:9].tolist()
    local.kill()


@pytest.mark.usefixtures("no_scan")
def test_the_order_of_use_survives_a_kill(path: Path) -> None:
    local = Local(path)
    local.get(KEYS[20:30])
    local.get(KEYS[0:5])
    local.tick()
    before = order_of_use(local)
    local.kill()
    local = Local(path)
    assert order_of_use(local) == before
    assert before[-1] == KEYS[0].hex()
    local.kill()


@pytest.mark.usefixtures("no_scan")
def test_after_a_clean_stop_too(path: Path) -> None:
    local = Local(path)
    local.get(KEYS[7:9])
    before = order_of_use(local)
    local.stop()
    local = Local(path)
    assert order_of_use(local) == before
    assert local.get(KEYS) == BLOCKS
    local.kill()


@pytest.mark.usefixtures("no_scan")
def test_deleted_and_evicted_blocks_stay_away(path: Path) -> None:
    local = Local(path)
    local.delete([KEYS[0], KEYS[19]])
    local.store.run(local.store.evict(50_000))
    there = local.contains(KEYS)
    local.kill()
    local = Local(path)
    assert local.contains(KEYS) == there
    assert len(local.files()) == there.count(True)
    local.kill()


@pytest.mark.usefixtures("no_scan")
def test_a_checkpoint_replaces_the_journals_before_it(path: Path) -> None:
    local = Local(path)
    local.store.checkpoint()
    local.store.run_chores()
    assert [p.name for p in journals(path)] == ["journal.0000000000000002"]
    local.delete([KEYS[3]])
    local.put([key(77)], [block(77)])
    before = order_of_use(local)
    local.kill()
    local = Local(path)
    assert order_of_use(local) == before
    assert local.get([key(77), KEYS[3], KEYS[4]]) == [block(77), None, BLOCKS[4]]
    local.kill()


@pytest.mark.usefixtures("no_scan")
def test_a_checkpoint_is_written_when_the_journal_has_grown(tmp_path: Path) -> None:
    local = Local(tmp_path / "store")
    for start in range(0, 6000, 200):
        numbers = range(start, start + 200)
        local.put([key(n) for n in numbers], [b"%d" % n for n in numbers])
        local.tick()
    assert list((local.path / "blocks").glob("checkpoint.*"))
    assert sum(p.stat().st_size for p in journals(local.path)) < 3 * MIB
    local.kill()
    local = Local(local.path)
    assert local.get([key(n) for n in range(6000)]) == [b"%d" % n for n in range(6000)]
    local.kill()


def test_a_put_during_a_checkpoint_is_kept(path: Path) -> None:
    """Its record may lie in the old journal while the row is not committed yet."""
    local = Local(path)
    job = local.begin_put([key(88)], [b"late"])
    job.perform()
    local.store.checkpoint()
    local.store.run_chores()
    assert len(journals(path)) == 2, "the old journal must stay until the put is finished"
    local.store.finish(job)
    local.store.run_chores()
    assert len(journals(path)) == 1
    local.kill()
    local = Local(path)
    assert local.get([key(88)]) == [b"late"]
    local.kill()


def _cut(path: Path) -> None:
    os.truncate(journals(path)[-1], journals(path)[-1].stat().st_size - 100)


def _flip(path: Path) -> None:
    data = bytearray(journals(path)[-1].read_bytes())
    data[128 * 20 + 40] ^= 1
    journals(path)[-1].write_bytes(data)


def _remove(path: Path) -> None:
    for journal in journals(path):
        journal.unlink()


def _overwrite(path: Path) -> None:
    journals(path)[-1].write_bytes(b"\xee" * journals(path)[-1].stat().st_size)


def _empty(path: Path) -> None:
    os.truncate(journals(path)[-1], 0)


@pytest.mark.parametrize("damage", [_cut, _flip, _remove, _overwrite, _empty])
def test_a_torn_or_missing_journal_is_made_good_by_a_scan(path: Path, damage: object) -> None:
    assert callable(damage)
    damage(path)
    local = Local(path)
    assert local.get(KEYS) == BLOCKS
    index = local.core.index
    rows = index.find(0, np.array([list(k) for k in KEYS], np.uint8))
    assert index.parents[rows[1:10]].tolist() == rows[:9].tolist()
    assert local.store.status()["state"] == "ready"
    local.kill()


@pytest.mark.parametrize("damage", [_cut, _remove])
def test_the_scan_is_needed_once(
    path: Path, damage: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(damage)
    damage(path)
    Local(path).kill()

    def refuse(_: object) -> None:
        raise AssertionError("the store was scanned again")

    monkeypatch.setattr(FilesystemEngine, "scan", refuse)
    local = Local(path)
    assert local.get(KEYS) == BLOCKS
    local.kill()


def test_without_a_journal_the_oldest_written_go_first(path: Path) -> None:
    local = Local(path)
    local.put([key(500)], [block(500)])
    local.kill()
    _remove(path)
    local = Local(path)
    assert order_of_use(local)[-1] == key(500).hex()
    local.kill()


def test_a_deleted_block_does_not_come_back_with_a_scan(path: Path) -> None:
    local = Local(path)
    local.delete([KEYS[5], KEYS[39]])
    local.kill()
    _remove(path)
    local = Local(path)
    assert local.contains([KEYS[5], KEYS[39], KEYS[38]]) == [False, False, True]
    local.kill()


@pytest.fixture
def rebooted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine was booted since the store at ``path`` was killed."""
    assert path.exists()
    monkeypatch.setattr(layout, "boot_id", lambda: b"another boot....")


@pytest.mark.usefixtures("rebooted")
def test_after_a_power_loss_missing_files_are_misses_and_unknown_ones_are_adopted(
    path: Path,
) -> None:
    files = sorted((path / "blocks").rglob("*.kvb"))
    lost = next(p for p in files if KEYS[9].hex() in p.name)
    lost.unlink()
    torn = next(p for p in files if KEYS[19].hex() in p.name)
    os.truncate(torn, 100)
    local = Local(path)
    assert local.contains([KEYS[9]]) == [False]
    assert local.get([KEYS[19]]) == [None]
    assert local.get(KEYS[:9]) == BLOCKS[:9]
    counters = local.core.counters
    assert (counters.corrupt_blocks, counters.unsynced_blocks) == (0, 2)
    assert local.store.status()["state"] == "ready"
    local.kill()


def test_damage_to_what_was_flushed_before_a_power_loss_is_an_alarm(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = Local(path)
    local.flush()
    local.kill()
    monkeypatch.setattr(layout, "boot_id", lambda: b"another boot....")
    local = Local(path)
    os.truncate(next(p for p in local.files() if KEYS[19].hex() in p.name), 100)
    assert local.get([KEYS[19]]) == [None]
    assert local.core.counters.corrupt_blocks == 1
    local.kill()


@pytest.mark.usefixtures("rebooted", "no_scan")
def test_a_clean_stop_needs_no_scan_after_a_reboot(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as allowed:
        allowed.setattr(FilesystemEngine, "scan", lambda _self: iter(()))
        local = Local(path)
        local.stop()
    del local
    local = Local(path)
    local.kill()


def test_a_boot_that_cannot_be_read_counts_as_another(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(layout, "boot_id", lambda: b"")
    Local(path).kill()
    assert "scanning" in caplog.text


def test_a_checkpoint_of_an_unknown_version_is_made_good_by_a_scan(path: Path) -> None:
    local = Local(path)
    local.store.checkpoint()
    local.store.run_chores()
    local.kill()
    checkpoint = next((path / "blocks").glob("checkpoint.*"))
    data = bytearray(checkpoint.read_bytes())
    from kvstore.journal import FileHeader

    header = FileHeader.decode(bytes(data[:128]))
    data[:128] = header._replace(version=99).encode()
    checkpoint.write_bytes(data)
    local = Local(path)
    assert local.get(KEYS) == BLOCKS
    local.kill()


def test_a_smaller_capacity_keeps_the_most_recently_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local = Local(tmp_path / "store", capacity=2 * CAPACITY)
    for number in range(110):
        local.put([key(number)], [block(number, MIB)])
    used = [key(n) for n in range(0, 40, 2)]
    local.get(used)
    local.tick()
    local.kill()
    local = Local(tmp_path / "store", capacity=CAPACITY)
    assert "will evict" in caplog.text
    assert local.contains(used) == [True] * 20
    status = local.store.status()
    assert status["used_bytes"] <= CAPACITY  # type: ignore[operator]
    assert status["capacity_bytes"] == CAPACITY
    assert len(local.files()) == status["blocks"]
    assert local.put([key(1000)], [block(1000, 8 * MIB)]) == [BlockStatus.OK]
    local.kill()
    assert layout.read(tmp_path / "store").capacity_bytes == CAPACITY


def test_recovered_blocks_can_be_evicted(path: Path) -> None:
    """Fault 2 of the source system: a full restored cache accepted nothing."""
    local = Local(path)
    for number in range(100, 170):
        assert local.put([key(number)], [block(number, MIB)]) == [BlockStatus.OK]
    assert local.contains(KEYS) == [False] * 40
    local.kill()


def test_leftovers_of_a_kill_are_deleted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the engine's commit and the journal's record: no byte stays unaccounted."""
    local = Local(path)
    monkeypatch.setattr(local.core.engine, "delete_many", lambda _blocks: 0)
    appended = local.core.journal.append

    def die(records: np.ndarray) -> int:
        if (records["kind"] == 2).any():
            local.kill()
        return appended(records)

    monkeypatch.setattr(local.core.journal, "append", die)
    assert local.put([key(200)], [block(200)]) == [BlockStatus.FAILED]
    assert len(local.files()) == 41
    temporary = next(path.glob("blocks/tmp"))
    (temporary / "leftover").write_bytes(b"x" * 9000)
    local = Local(path)
    assert local.contains([key(200)]) == [False]
    assert len(local.files()) == 40
    assert list(temporary.iterdir()) == []
    local.kill()


def test_leftovers_that_cannot_be_deleted_go_into_the_checkpoint(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = Local(path)

    def die(_: object) -> int:
        raise OSError("killed before the unlink")

    with monkeypatch.context() as broken:
        broken.setattr(FilesystemEngine, "delete_many", die)
        with pytest.raises(EngineError):
            local.delete(KEYS[:10])
        local.kill()
        local = Local(path)
        local.store.checkpoint()
        local.store.run_chores()
        local.kill()
    assert len(local.files()) == 40
    local = Local(path)
    assert local.contains(KEYS) == [False] * 10 + [True] * 30
    assert len(local.files()) == 30
    local.kill()


@pytest.mark.parametrize("power_lost", [False, True])
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_scan_that_was_interrupted_is_done_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, end: str, power_lost: bool
) -> None:
    if power_lost:
        monkeypatch.setattr(layout, "boot_id", lambda: b"another boot....")
        next(p for p in (path / "blocks").rglob("*.kvb") if KEYS[9].hex() in p.name).unlink()
    else:
        for journal in journals(path):
            journal.unlink()
    opening = Opening(path, options())
    opening.lock()
    if power_lost:
        store = opening.open()
        assert store is not None
        if end == "stop":
            store.drain()
        store.close()
    else:
        opening.cancel()
        assert opening.open() is None
        opening.unlock()
    local = Local(path)
    expected = [None if power_lost and n == 9 else data for n, data in enumerate(BLOCKS)]
    assert local.contains(KEYS) == [data is not None for data in expected]
    assert local.get(KEYS) == expected
    local.kill()


def test_a_store_on_a_full_disk_takes_writes_when_there_is_room(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StoreFull("no space left")

    with monkeypatch.context() as broken:
        broken.setattr(layout, "write", full)
        local = Local(path)
        assert local.get(KEYS) == BLOCKS
        assert local.store.status()["state"] == "degraded"
        with pytest.raises(ReadOnly, match="full"):
            local.put([key(100)], [block(100)])
        local.later(10)
    local.later(100)
    assert local.put([key(100)], [block(100)]) == [BlockStatus.OK]
    assert local.store.status()["state"] == "ready"
    local.kill()
    local = Local(path)
    assert local.get([key(100), KEYS[0]]) == [block(100), BLOCKS[0]]
    local.kill()


def test_a_failed_checkpoint_is_tried_again_with_the_same_journal(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StoreFull("no space left")

    local = Local(path)
    with monkeypatch.context() as broken:
        broken.setattr(CheckpointWriter, "finish", fail)
        for _ in range(3):
            local.store.checkpoint()
            local.store.run_chores()
    assert len(journals(path)) == 2
    local.core.take(local.core.measure())
    used = local.store.status()["used_bytes"]
    assert used == pytest.approx(layout.directory_bytes(path), rel=0.05)
    local.store.checkpoint()
    local.store.run_chores()
    assert len(journals(path)) == 1
    local.kill()
    local = Local(path)
    assert local.get(KEYS) == BLOCKS
    local.kill()


def test_a_lost_namespace_file_does_not_let_other_key_lengths_in(path: Path) -> None:
    for file in (path / "namespaces").iterdir():
        file.unlink()
    local = Local(path)
    with pytest.raises(InvalidKey, match="32"):
        local.put([b"k" * 16], [block(1)])
    assert local.get(KEYS) == BLOCKS
    local.kill()


def test_doubt_about_a_block_ends_when_it_was_read_whole(path: Path) -> None:
    local = Local(path)
    local.core.doubt = UNSYNCED
    rows = local.core.index.find(0, key_array(KEYS[:2]))
    local.core.index.set_flags(rows, UNSYNCED)
    local.get(KEYS[:1])
    for n in range(2):
        os.truncate(next(p for p in local.files() if KEYS[n].hex() in p.name), 5000)
    local.get(KEYS[:2])
    assert (local.core.counters.corrupt_blocks, local.core.counters.unsynced_blocks) == (1, 1)
    local.kill()


def test_generations_never_repeat(path: Path) -> None:
    local = Local(path)
    local.core.generation += 5 << 32
    local.put([key(100)], [block(100)])
    last = local.core.generation
    local.kill()
    local = Local(path)
    assert int(local.core.new_generations(1)[0]) > last
    local.kill()
    for journal in journals(path):
        journal.unlink()
    local = Local(path)
    assert int(local.core.new_generations(1)[0]) > last, "the scan tells what a lost journal gave"
    local.kill()


def test_a_store_in_use_is_locked(path: Path) -> None:
    local = Local(path)
    with pytest.raises(StoreLocked, match=str(os.getpid())):
        open_store(path, options())
    local.kill()


def test_a_missing_store_is_not_made_with_create_never(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound, match=str(tmp_path / "store")):
        open_store(tmp_path / "store", options(create="never"))
    assert not (tmp_path / "store").exists()


def test_a_directory_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(StoreExists, match=str(tmp_path)):
        open_store(tmp_path, options())
    assert [p.name for p in tmp_path.iterdir()] == ["precious"]


def test_another_engine_is_refused_by_name(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"filesystem, not memory.*kvstore migrate --to memory"):
        Opening(path, options(engine="memory")).lock()


def test_a_newer_store_is_refused_untouched(path: Path) -> None:
    text = (path / "STORE.json").read_text().replace('"format": 1', '"format": 2')
    (path / "STORE.json").write_text(text)
    with pytest.raises(FormatUnsupported):
        open_store(path, options())
    assert (path / "STORE.json").read_text() == text


def test_a_lost_namespace_file_keeps_its_blocks_until_somebody_opens_it(path: Path) -> None:
    from kvstore.keys import named, namespace_id

    local = Local(path)
    local.namespace = local.core.namespaces.open(named("model"), create=True)
    local.put([key(1)], [block(1)])
    local.kill()
    (path / "namespaces" / f"{namespace_id(named('model')).hex()}.json").unlink()
    local = Local(path)
    local.namespace = local.core.namespaces.open(named("model"), create=True)
    assert local.get([key(1)]) == [block(1)]
    local.kill()


def test_a_store_that_was_copied_opens(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "copy")
    local = Local(tmp_path / "copy")
    assert local.get(KEYS) == BLOCKS
    local.kill()


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_an_engine_that_forgets_is_opened_empty(tmp_path: Path) -> None:
    local = Local(tmp_path / "store", engine="memory")
    local.put(KEYS[:3], BLOCKS[:3])
    assert local.get(KEYS[:3]) == BLOCKS[:3]
    local.stop()
    local = Local(tmp_path / "store")
    assert local.contains(KEYS[:3]) == [False] * 3
    assert local.put(KEYS[:3], BLOCKS[:3]) == [BlockStatus.OK] * 3
    local.kill()

"""The journal: what an append leaves on disk, room ahead, the next file, threads."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import CorruptStore, EngineError, StoreExists, StoreFull
from kvstore.events import (
    RECORD_BYTES,
    Kind,
    Records,
    blank,
)
from kvstore.journal import Journal
from tests.journal_samples import (
    BOOT_ID,
    EPOCH,
    UNIT,
    UUID,
    event,
    joined,
    load_here,
    opening,
    touch,
    write_checkpoint,
)
from tests.mounts import mounted

GOLDEN = Path(__file__).parent / "golden"
FREE = event(Kind.FREE, 3, generation=9)
PUT = event(Kind.PUT, 3, key=b"k", generation=9, length=1)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.create(tmp_path, 1, UUID, EPOCH, UNIT)


def times(record: Records, count: int) -> Records:
    return np.repeat(record, count)


def fail_with(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def append_until_refused(journal: Journal, record: Records, error: type[Exception]) -> int:
    """Append one record after the other; return how many went in."""
    for count in range(100_000):
        try:
            journal.append(record.copy())
        except error:
            return count
    raise AssertionError("nothing was refused")


def full_disk(monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOSPC) -> None:
    def refuse(descriptor: int, offset: int, length: int) -> None:
        os.ftruncate(descriptor, offset + length // 2)
        raise fail_with(number)

    monkeypatch.setattr(os, "posix_fallocate", refuse)


# -- appending ------------------------------------------------------------------------------------


def test_what_was_appended_is_read_back_in_order(journal: Journal, tmp_path: Path) -> None:
    assert journal.end == RECORD_BYTES
    assert journal.append(times(PUT, 3)) == journal.end == 4 * RECORD_BYTES
    assert journal.append(blank(0, Kind.PUT)) == 4 * RECORD_BYTES
    journal.append(touch([1, 2], 50))
    loaded = load_here(tmp_path)
    assert loaded.events["kind"].tolist() == [Kind.PUT] * 3 + [Kind.TOUCH]
    assert (loaded.sequence, loaded.end) == (1, journal.end)
    assert not loaded.clean
    assert loaded.reason == ""


def test_files_are_private_and_named_by_sequence(tmp_path: Path) -> None:
    Journal.create(tmp_path, 0x2B, UUID, EPOCH, UNIT)
    (path,) = tmp_path.iterdir()
    assert path.name == "journal.000000000000002b"
    assert path.stat().st_mode & 0o777 == 0o600


def test_close_is_clean_only_as_the_last_record(journal: Journal, tmp_path: Path) -> None:
    journal.append(joined(PUT, event(Kind.CLOSE)))
    assert load_here(tmp_path).clean
    journal.append(opening())
    assert not load_here(tmp_path).clean
    journal.append(event(Kind.CLOSE))
    assert load_here(tmp_path).clean


def test_a_copied_close_is_not_believed(journal: Journal, tmp_path: Path) -> None:
    close = event(Kind.CLOSE)
    journal.append(close)
    journal.append(PUT)
    os.pwrite(journal._descriptor, close.tobytes(), journal.end)
    loaded = load_here(tmp_path)
    assert loaded.events["kind"].tolist() == [Kind.CLOSE, Kind.PUT, Kind.CLOSE]
    assert not loaded.clean
    assert not loaded.torn


def test_resuming_goes_on_behind_the_end(journal: Journal, tmp_path: Path) -> None:
    journal.append(times(PUT, 2))
    journal.close()
    loaded = load_here(tmp_path)
    again = Journal.resume(tmp_path, loaded.sequence, UUID, EPOCH, loaded.end)
    again.append(FREE)
    again.sync()
    assert load_here(tmp_path).events["kind"].tolist() == [Kind.PUT, Kind.PUT, Kind.FREE]
    assert again.unit == UNIT


def test_resuming_what_belongs_to_another_store_is_refused(
    journal: Journal, tmp_path: Path
) -> None:
    for uuid, epoch in ((bytes(16), EPOCH), (UUID, EPOCH + 1)):
        with pytest.raises(CorruptStore, match="another store or epoch"):
            Journal.resume(tmp_path, 1, uuid, epoch, journal.end)
    with pytest.raises(EngineError, match="No such file"):
        Journal.resume(tmp_path, 2, UUID, EPOCH, journal.end)


def test_creating_over_our_own_file_is_refused(journal: Journal, tmp_path: Path) -> None:
    journal.append(PUT)
    with pytest.raises(StoreExists):
        Journal.create(tmp_path, 1, UUID, EPOCH, UNIT)
    assert len(load_here(tmp_path).events) == 1
    (tmp_path / "journal.0000000000000002").write_bytes(b"damaged")
    with pytest.raises(StoreExists):
        Journal.create(tmp_path, 2, UUID, EPOCH, UNIT)


def test_creating_over_a_file_of_an_earlier_epoch_replaces_it(
    journal: Journal, tmp_path: Path
) -> None:
    journal.append(PUT)
    Journal.create(tmp_path, 1, UUID, EPOCH + 1, UNIT)
    assert load_here(tmp_path).missing
    assert [path.name for path in tmp_path.iterdir()] == ["journal.0000000000000001"]


# -- room ahead -----------------------------------------------------------------------------------


def test_room_is_kept_ahead_in_whole_units(journal: Journal) -> None:
    for count in (1, 20, 40, 1, 200, 31, 32, 33):
        journal.append(times(PUT, count))
        assert journal.size % UNIT == 0
        assert UNIT <= journal.size - journal.end <= 2 * UNIT
        assert os.fstat(journal._descriptor).st_size == journal.size
        assert journal.physical_bytes >= journal.size


def test_the_unit_is_rounded_up_to_pages(tmp_path: Path) -> None:
    assert Journal.create(tmp_path, 1, UUID, EPOCH, 70_000).unit == 73_728
    assert Journal.create(tmp_path, 2, UUID, EPOCH, 1).unit == 4096


def test_appending_neither_grows_nor_allocates_until_the_reserve_is_touched(
    tmp_path: Path,
) -> None:
    journal = Journal.create(tmp_path, 1, UUID, EPOCH, 1 << 20)
    journal.append(PUT)
    before = os.fstat(journal._descriptor)
    journal.append(times(PUT, 1000))
    after = os.fstat(journal._descriptor)
    assert (before.st_size, before.st_blocks) == (after.st_size, after.st_blocks)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_without_fallocate_zeros_are_written(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise fail_with(number)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    journal = Journal.create(tmp_path, 1, UUID, EPOCH, 3 << 20)
    journal.append(PUT)
    assert journal.size == 6 << 20
    assert journal.physical_bytes >= journal.size
    assert load_here(tmp_path).end == journal.end


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_on_a_full_disk_half_of_the_reserve_is_for_freeing(
    number: int, journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.append(PUT)
    size = journal.size
    full_disk(monkeypatch, number)
    puts = append_until_refused(journal, PUT, StoreFull)
    left = journal.size - journal.end
    assert UNIT // 2 <= left <= UNIT // 2 + 2 * RECORD_BYTES
    assert puts > 0
    assert journal.failed == ""
    with pytest.raises(StoreFull, match="cannot grow"):
        journal.append(touch([1], 1))
    frees = append_until_refused(journal, FREE, EngineError)
    assert frees >= UNIT // 2 // RECORD_BYTES - 1
    # All but the empty record that marks the end.
    assert journal.size - journal.end == RECORD_BYTES
    assert "extend" in journal.failed
    assert os.fstat(journal._descriptor).st_size == journal.size == size
    loaded = load_here(tmp_path)
    assert not loaded.torn
    assert loaded.events["kind"].tolist() == [Kind.PUT] * (puts + 1) + [Kind.FREE] * frees


def test_when_there_is_room_again_the_journal_grows_again(journal: Journal, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        full_disk(patch)
        append_until_refused(journal, PUT, StoreFull)
        journal.append(FREE)
    journal.append(times(PUT, 100))
    assert journal.size - journal.end >= UNIT
    assert not load_here(tmp_path).torn


def test_another_error_while_growing_fails_the_journal(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch, errno.EIO)
    with pytest.raises(EngineError, match="extend"):
        journal.append(times(FREE, 40))
    assert "Input/output error" in journal.failed


def fill_up(path: Path) -> None:
    with path.open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(bytes(4096)):
            pass


@pytest.mark.root
def test_freeing_works_on_a_filesystem_that_is_really_full(tmp_path: Path) -> None:
    with mounted(tmp_path, "tmpfs", "size=256k") as point:
        journal = Journal.create(point, 1, UUID, EPOCH, 64 << 10)
        fill_up(point / "filler")
        append_until_refused(journal, PUT, StoreFull)
        for _ in range(200):
            journal.append(FREE.copy())
        journal.sync()
        loaded = load_here(point)
        assert not loaded.torn
        assert (loaded.events["kind"] == Kind.FREE).sum() == 200
        (point / "filler").unlink()
        journal.append(times(PUT, 300))
        journal.close()


# -- rotating -------------------------------------------------------------------------------------


def test_rotating_goes_on_in_the_next_file_with_the_opening(
    journal: Journal, tmp_path: Path
) -> None:
    journal.append(joined(opening(bytes(16)), opening()))
    journal.append(PUT)
    journal.rotate()
    assert journal.sequence == 2
    assert journal.end == 2 * RECORD_BYTES
    journal.append(joined(FREE, event(Kind.CLOSE)))
    loaded = load_here(tmp_path)
    assert loaded.events["kind"].tolist() == [
        Kind.OPEN, Kind.OPEN, Kind.PUT, Kind.OPEN, Kind.FREE, Kind.CLOSE
    ]  # fmt: skip
    assert (loaded.sequence, loaded.end, loaded.clean) == (2, journal.end, True)
    assert loaded.earlier_journal_bytes == (tmp_path / "journal.0000000000000001").stat().st_size
    # With a checkpoint the first file goes, and with it the only other note of the boot id.
    write_checkpoint(tmp_path, 2, blank(0, Kind.PUT))
    assert load_here(tmp_path).boot_id == BOOT_ID


def test_rotating_syncs_the_file_that_is_left(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.append(PUT)
    left, synced, sync = journal._descriptor, [], os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: synced.append(descriptor))
    journal.rotate()
    assert synced == [left]
    monkeypatch.setattr(os, "fdatasync", sync)
    journal.append(FREE)
    journal.sync()


def test_a_rotation_that_fails_leaves_the_old_file_in_use(journal: Journal, tmp_path: Path) -> None:
    journal.append(PUT)
    with pytest.MonkeyPatch.context() as patch:
        full_disk(patch)
        with pytest.raises(StoreFull):
            journal.rotate()
    assert [path.name for path in tmp_path.iterdir()] == ["journal.0000000000000001"]
    journal.append(FREE)
    journal.rotate()
    assert load_here(tmp_path).events["kind"].tolist() == [Kind.PUT, Kind.FREE]


def test_a_rotation_whose_sync_fails_leaves_no_new_file(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: int) -> None:
        raise fail_with(errno.EIO)

    monkeypatch.setattr(os, "fdatasync", broken)
    with pytest.raises(EngineError, match="sync"):
        journal.rotate()
    assert journal.failed
    assert [path.name for path in tmp_path.iterdir()] == ["journal.0000000000000001"]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    before = open_descriptors()
    journal = Journal.create(tmp_path, 1, UUID, EPOCH, UNIT)
    assert open_descriptors() == before + 1
    journal.rotate()
    assert open_descriptors() == before + 1
    with pytest.raises(StoreExists):
        Journal.create(tmp_path, 2, UUID, EPOCH, UNIT)
    with pytest.raises(CorruptStore):
        Journal.resume(tmp_path, 2, bytes(16), EPOCH, RECORD_BYTES)
    with pytest.MonkeyPatch.context() as patch:
        full_disk(patch)
        with pytest.raises(StoreFull):
            journal.rotate()
    journal.close()
    assert open_descriptors() == before
    assert journal.physical_bytes == 0
    with pytest.raises(EngineError, match="closed"):
        journal.rotate()
    assert open_descriptors() == before


# -- threads --------------------------------------------------------------------------------------


def test_threads_append_without_overlap(journal: Journal, tmp_path: Path) -> None:
    ends: list[int] = []

    def work(number: int) -> None:
        ends.extend(
            journal.append(times(event(Kind.FREE, number, generation=count), count))
            for count in range(1, 40)
        )

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loaded = load_here(tmp_path)
    assert not loaded.torn
    assert len(set(ends)) == len(ends)
    assert len(loaded.events) == 6 * sum(range(1, 40))
    for number in range(6):
        mine = loaded.events["generation"][loaded.events["row"] == number]
        assert mine.tolist() == [count for count in range(1, 40) for _ in range(count)]


def test_threads_share_a_sync(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go, calls = threading.Event(), threading.Event(), []

    def slow(descriptor: int) -> None:
        calls.append(journal.end)
        entered.set()
        assert go.wait(30)

    monkeypatch.setattr(os, "fdatasync", slow)
    first = threading.Thread(target=lambda: journal.sync(journal.append(PUT.copy())))
    first.start()
    assert entered.wait(30)
    ends = [journal.append(PUT.copy()) for _ in range(8)]
    others = [threading.Thread(target=journal.sync, args=(end,)) for end in ends]
    for thread in others:
        thread.start()
    go.set()
    for thread in (first, *others):
        thread.join()
    # One for the first, one for all the others, whatever their order.
    assert calls == [2 * RECORD_BYTES, journal.end]
    journal.sync()
    journal.sync(journal.end)
    assert len(calls) == 2


def test_what_came_during_a_sync_is_not_called_synced(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def append_meanwhile(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            journal.append(FREE.copy())

    monkeypatch.setattr(os, "fdatasync", append_meanwhile)
    journal.append(PUT)
    journal.sync()
    journal.sync()
    assert len(calls) == 2

"""Loading checkpoint and journal: the newest whole state, and what is said of every damage."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore import files
from kvstore.checkpoint import CheckpointWriter, load, remove_before
from kvstore.errors import EngineError, StoreFull
from kvstore.events import RECORD_BYTES, Kind, Records
from kvstore.journal import FileHeader, FileKind, Journal
from tests.journal_samples import (
    BOOT_ID,
    EPOCH,
    UNIT,
    UUID,
    event,
    joined,
    load_here,
    opening,
    write_checkpoint,
    write_journal,
)

HEADER = RECORD_BYTES
ROWS = [
    event(Kind.PUT, row, key=bytes([row]) * 36, generation=row, length=10) for row in range(1, 6)
]


def frees(first: int, count: int) -> Records:
    return joined(*(event(Kind.FREE, 1, generation=first + number) for number in range(count)))


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """Two checkpoints, and all journals from the first one on."""
    write_checkpoint(tmp_path, 2, joined(*ROWS[:2]))
    write_journal(tmp_path, 2, joined(opening(), frees(20, 2)))
    write_journal(tmp_path, 3, frees(30, 3))
    write_checkpoint(tmp_path, 4, joined(*ROWS))
    write_journal(tmp_path, 4, joined(opening(), frees(40, 4), event(Kind.CLOSE)))
    return tmp_path


NEWEST = [1, 2, 3, 4, 5, 7 << 32, 40, 41, 42, 43, 0]
OLDER = [1, 2, 7 << 32, 20, 21, 30, 31, 32, 7 << 32, 40, 41, 42, 43, 0]


def generations(directory: Path) -> list[int]:
    found: list[int] = load_here(directory).events["generation"].tolist()
    return found


def journal_path(directory: Path, sequence: int) -> Path:
    return FileKind.JOURNAL.path(directory, sequence)


def checkpoint_path(directory: Path, sequence: int) -> Path:
    return FileKind.CHECKPOINT.path(directory, sequence)


def flip(path: Path, position: int, bits: int = 0x10) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= bits
    path.write_bytes(data)


def rewrite_header(path: Path, **changes: object) -> None:
    data = path.read_bytes()
    header = FileHeader.decode(data[:HEADER])._replace(**changes)  # type: ignore[arg-type]
    path.write_bytes(header.encode() + data[HEADER:])


# -- what is whole --------------------------------------------------------------------------------


def test_the_newest_checkpoint_and_its_journals_are_loaded(chain: Path) -> None:
    loaded = load_here(chain)
    assert generations(chain) == NEWEST
    assert (loaded.torn, loaded.missing, loaded.newer, loaded.reason) == (False, False, False, "")
    assert (loaded.sequence, loaded.end) == (4, HEADER + 6 * RECORD_BYTES)
    assert loaded.clean
    assert loaded.boot_id == BOOT_ID
    assert loaded.checkpoint_bytes == HEADER + 5 * RECORD_BYTES
    assert loaded.earlier_journal_bytes == 0


def test_without_a_checkpoint_the_journals_from_1_are_the_state(tmp_path: Path) -> None:
    write_journal(tmp_path, 1, frees(1, 2))
    write_journal(tmp_path, 2, frees(3, 1))
    loaded = load_here(tmp_path)
    assert generations(tmp_path) == [1, 2, 3]
    assert (loaded.missing, loaded.torn, loaded.sequence) == (False, False, 2)
    first = tmp_path / "journal.0000000000000001"
    assert loaded.earlier_journal_bytes == first.stat().st_size
    assert loaded.boot_id is None


def test_an_empty_checkpoint_is_a_checkpoint(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 7, UUID, EPOCH)
    writer.finish()
    write_journal(tmp_path, 7, frees(1, 1))
    assert generations(tmp_path) == [1]
    assert not load_here(tmp_path).missing


def test_a_boot_id_of_zeros_is_unknown(tmp_path: Path) -> None:
    write_journal(tmp_path, 1, joined(opening(), opening(bytes(16))))
    assert load_here(tmp_path).boot_id is None


def test_files_that_are_none_of_ours_are_ignored(chain: Path) -> None:
    (chain / "journal.0000000000000009.new").write_bytes(b"half")
    (chain / "journal.9").write_bytes(b"x")
    (chain / "blocks.kvb").write_bytes(b"x")
    write_foreign(chain, bytes(16), EPOCH)
    write_foreign(chain, UUID, EPOCH - 1)
    loaded = load_here(chain)
    assert generations(chain) == NEWEST
    assert (loaded.reason, loaded.sequence) == ("", 4)
    # Seen from the other epoch, only its own file counts.
    assert load(chain, UUID, EPOCH - 1).events["generation"].tolist() == [99]


def write_foreign(directory: Path, uuid: bytes, epoch: int) -> None:
    sequence = 1 if epoch != EPOCH else 9
    journal = Journal.create(directory, sequence, uuid, epoch, UNIT)
    journal.append(frees(99, 1))
    journal.close()


# -- an older state -------------------------------------------------------------------------------


def make_pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def truncate(length: int) -> Callable[[Path], object]:
    return lambda path: os.truncate(path, length)


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda path: flip(path, 0), "checksum"),
        (lambda path: flip(path, HEADER - 1), "checksum"),
        (lambda path: flip(path, HEADER + 2 * RECORD_BYTES + 70), "1 of 5 records are damaged"),
        (truncate(HEADER + 4 * RECORD_BYTES), "should hold 5"),
        (truncate(HEADER + 5 * RECORD_BYTES - 1), "should hold 5"),
        (truncate(HEADER), "should hold 5"),
        (truncate(HEADER - 1), "cut off"),
        (truncate(0), "cut off after 0"),
        (lambda path: path.write_bytes(path.read_bytes() + bytes(RECORD_BYTES)), "should hold 5"),
        (lambda path: rewrite_header(path, version=2), "version 2 is not supported"),
        (lambda path: rewrite_header(path, size=4), "should hold 4"),
        (lambda path: rewrite_header(path, size=2**64 - 1), "should hold"),
        (lambda path: rewrite_header(path, sums=1), "twice or swapped"),
        (lambda path: rewrite_header(path, sequence=5), "another name"),
        (lambda path: rewrite_header(path, kind=FileKind.JOURNAL), "another name"),
        (lambda path: (path.unlink(), path.mkdir()), "not a regular file"),
        (lambda path: (path.unlink(), make_pipe(path)), "not a regular file"),
        (lambda path: (path.rename(path.with_name("x")), path.symlink_to("x")), "symbolic"),
    ],
)
def test_a_damaged_checkpoint_gives_way_to_the_older_one(
    damage: Callable[[Path], object], word: str, chain: Path
) -> None:
    damage(checkpoint_path(chain, 4))
    loaded = load_here(chain)
    assert generations(chain) == OLDER
    assert (loaded.torn, loaded.missing) == (False, False)
    assert loaded.sequence == 4
    assert word in loaded.reason
    assert "checkpoint.0000000000000004" in loaded.reason
    assert loaded.newer == ("version" in word)


def test_records_swapped_for_copies_of_others_are_noticed(chain: Path) -> None:
    path = checkpoint_path(chain, 4)
    data = bytearray(path.read_bytes())
    data[HEADER : HEADER + RECORD_BYTES] = data[HEADER + RECORD_BYTES : HEADER + 2 * RECORD_BYTES]
    path.write_bytes(data)
    assert generations(chain) == OLDER


# -- what is missing ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gone", "left"),
    [
        ([], NEWEST),
        ([("journal", 4)], [1, 2, 3, 4, 5]),
        ([("checkpoint", 4), ("journal", 3)], [1, 2, 7 << 32, 20, 21, *NEWEST[5:]]),
        ([("checkpoint", 4), ("checkpoint", 2)], OLDER[2:]),
        ([("checkpoint", 4), ("journal", 2)], [1, 2, 30, 31, 32, *NEWEST[5:]]),
        ([("checkpoint", 4), ("journal", 4)], OLDER[:8]),
    ],
)
def test_a_gap_is_missing_unless_nothing_that_counts_is_gone(
    gone: list[tuple[str, int]], left: list[int], chain: Path
) -> None:
    for name, sequence in gone:
        (chain / f"{name}.{sequence:016x}").unlink()
    loaded = load_here(chain)
    assert generations(chain) == left
    # Checkpoint 4 says that a journal 4 existed; without both nobody can know.
    hidden = gone == [("checkpoint", 4), ("journal", 4)]
    assert loaded.missing == bool(gone and not hidden)
    if loaded.missing:
        assert "no checkpoint with all journals" in loaded.reason
        assert (loaded.sequence, loaded.end, loaded.clean) == (4, 0, False)


def test_an_empty_or_absent_directory_has_no_journal(tmp_path: Path) -> None:
    loaded = load_here(tmp_path)
    assert (loaded.missing, loaded.reason, loaded.sequence) == (True, "no journal", 0)
    assert len(loaded.events) == 0
    absent = load_here(tmp_path / "absent")
    assert absent.missing
    assert "No such file" in absent.reason


def test_what_remains_of_a_damaged_checkpoint_is_still_given(tmp_path: Path) -> None:
    flip(write_checkpoint(tmp_path, 2, joined(*ROWS)), HEADER + RECORD_BYTES + 8)
    write_journal(tmp_path, 2, frees(20, 1))
    loaded = load_here(tmp_path)
    assert (loaded.missing, loaded.torn) == (True, True)
    assert generations(tmp_path) == [1, 3, 4, 5, 20]


def test_a_journal_of_a_later_version_is_passed_over(chain: Path) -> None:
    rewrite_header(journal_path(chain, 4), version=2)
    loaded = load_here(chain)
    assert (loaded.missing, loaded.newer) == (True, True)
    assert "version 2" in loaded.reason
    assert generations(chain) == [1, 2, 3, 4, 5]


def test_a_damaged_journal_before_the_checkpoint_does_not_count(chain: Path) -> None:
    flip(journal_path(chain, 3), 5)
    loaded = load_here(chain)
    assert (loaded.torn, loaded.missing) == (False, False)
    assert generations(chain) == NEWEST


# -- what is torn ---------------------------------------------------------------------------------

LAST = 4
PUT_AT = HEADER + 2 * RECORD_BYTES


@pytest.mark.parametrize(
    ("damage", "word", "left"),
    [
        (lambda path: flip(path, 3), "checksum of the file header", []),
        (lambda path: flip(path, HEADER - 1), "checksum of the file header", []),
        (lambda path: flip(path, 60), "checksum of the file header", []),
        (truncate(HEADER - 1), "cut off", []),
        (lambda path: flip(path, PUT_AT + 33), "torn at byte 384", [40, 42, 43, 0]),
        (lambda path: flip(path, HEADER + 6 * RECORD_BYTES - 1), "torn", [40, 41, 42, 43]),
        (lambda path: flip(path, HEADER + 6 * RECORD_BYTES), "torn", [40, 41, 42, 43, 0]),
        (lambda path: flip(path, 2 * UNIT - 1), "torn", [40, 41, 42, 43, 0]),
        (truncate(HEADER + 3 * RECORD_BYTES), "cut off at 512", [40, 41]),
        (truncate(HEADER + 3 * RECORD_BYTES - 1), "cut off at 511", [40]),
        (truncate(2 * UNIT - RECORD_BYTES), "cut off", [40, 41, 42, 43, 0]),
        (truncate(HEADER), "cut off", []),
        (lambda path: rewrite_header(path, size=100), "cut off", [40, 41, 42, 43, 0]),
        (lambda path: rewrite_header(path, size=0), "cut off", [40, 41, 42, 43, 0]),
    ],
)
def test_a_damaged_journal_is_torn(
    damage: Callable[[Path], object], word: str, left: list[int], chain: Path
) -> None:
    damage(journal_path(chain, LAST))
    loaded = load_here(chain)
    assert (loaded.torn, loaded.missing) == (True, False)
    assert word in loaded.reason
    assert "journal.0000000000000004" in loaded.reason
    assert (loaded.sequence, loaded.end, loaded.clean) == (4, 0, False)
    found = [number for number in generations(chain) if number < 7 << 32]
    assert found == [1, 2, 3, 4, 5, *left]


def test_a_cut_at_a_unit_amid_the_records_is_torn(tmp_path: Path) -> None:
    path = write_journal(tmp_path, 1, frees(1, 100))
    os.truncate(path, 2 * UNIT)
    loaded = load_here(tmp_path)
    assert loaded.torn
    assert "in the middle of its records" in loaded.reason
    assert generations(tmp_path) == list(range(1, 64))


def test_a_cut_of_nothing_but_reserve_loses_nothing(tmp_path: Path) -> None:
    path = write_journal(tmp_path, 1, frees(1, 40))
    assert path.stat().st_size == 3 * UNIT
    os.truncate(path, 2 * UNIT)
    loaded = load_here(tmp_path)
    assert (loaded.torn, len(loaded.events)) == (False, 40)
    journal = Journal.resume(tmp_path, 1, UUID, EPOCH, loaded.end)
    journal.append(frees(41, 40))
    assert generations(tmp_path) == list(range(1, 81))


def test_a_page_that_never_reached_the_disk_is_torn(tmp_path: Path) -> None:
    path = write_journal(tmp_path, 1, frees(1, 100))
    with path.open("r+b") as opened:
        opened.seek(UNIT)
        opened.write(bytes(UNIT))
    loaded = load_here(tmp_path)
    assert loaded.torn
    assert generations(tmp_path) == [*range(1, 32), *range(64, 101)]


def test_no_single_flip_anywhere_changes_what_a_whole_load_says(chain: Path) -> None:
    """Whatever byte is hit: the same events, the older state, or torn or missing. Never a lie."""
    chance = random.Random(20_261_130)
    for path in sorted(chain.iterdir()):
        used = path.stat().st_size if "checkpoint" in path.name else HEADER + 7 * RECORD_BYTES
        reserve = [chance.randrange(path.stat().st_size) for _ in range(20)]
        for position in [*range(chance.randrange(7), used, 7), *reserve]:
            bits = 1 << chance.randrange(8)
            flip(path, position, bits)
            loaded = load_here(chain)
            found = loaded.events["generation"].tolist()
            assert found in (NEWEST, OLDER) or loaded.torn or loaded.missing
            flip(path, position, bits)


def test_garbage_never_raises(chain: Path) -> None:
    chance = random.Random(20_261_130)
    paths = sorted(chain.iterdir())
    for _ in range(300):
        path = chance.choice(paths)
        data = bytearray(chance.randbytes(chance.choice([0, 1, 127, 128, 129, 4096, 8192])))
        if chance.random() < 0.5 and len(data) >= HEADER:
            header = FileHeader(
                chance.choice([*FileKind]), UUID, EPOCH, chance.randrange(6),
                chance.choice([0, 1, 4096, 8192, 2**64 - 1]), chance.choice([0, 2**64 - 1]),
                chance.choice([0, 1, 2]),
            )  # fmt: skip
            data[:HEADER] = header.encode()
        path.write_bytes(data)
        loaded = load_here(chain)
        assert loaded.sequence <= 4


def test_an_unreadable_file_is_damage(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.preadv

    def broken(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if offset >= PUT_AT:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(descriptor, [buffers[0][: PUT_AT - offset]], offset)

    monkeypatch.setattr(os, "preadv", broken)
    (chain / "checkpoint.0000000000000004").unlink()
    (chain / "checkpoint.0000000000000002").unlink()
    for sequence in (2, 3, 4):
        journal_path(chain, sequence).rename(journal_path(chain, sequence - 1))
        rewrite_header(journal_path(chain, sequence - 1), sequence=sequence - 1)
    loaded = load_here(chain)
    assert loaded.torn
    assert "cannot read it behind byte 256: Input/output error" in loaded.reason


def test_a_file_too_big_for_memory_is_missing(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "empty", refuse)
    loaded = load_here(chain)
    assert loaded.missing
    assert "no memory" in loaded.reason
    assert loaded.sequence == 4


# -- writing checkpoints --------------------------------------------------------------------------


def test_a_checkpoint_counts_only_when_finished(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 1, UUID, EPOCH)
    writer.append(joined(*ROWS[:2]))
    writer.append(joined(*ROWS[2:]))
    assert writer.bytes == HEADER + 5 * RECORD_BYTES
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.0000000000000001.new"]
    writer.finish()
    (path,) = tmp_path.iterdir()
    assert path.name == "checkpoint.0000000000000001"
    assert path.stat().st_size == writer.bytes
    assert path.stat().st_mode & 0o777 == 0o600
    writer.abandon()
    assert path.exists()


def test_an_abandoned_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 1, UUID, EPOCH)
    writer.append(joined(*ROWS))
    writer.abandon()
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_durable_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, rename, write = os.fsync, os.rename, os.pwrite

    def note_fsync(descriptor: int) -> None:
        steps.append("fsync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def note_rename(source: Path, target: Path) -> None:
        steps.append("rename")
        rename(source, target)

    def note_write(descriptor: int, data: bytes, offset: int) -> int:
        steps.append("header")
        return write(descriptor, data, offset)

    writer = CheckpointWriter(tmp_path, 1, UUID, EPOCH)
    writer.append(joined(*ROWS))
    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    monkeypatch.setattr(os, "pwrite", note_write)
    writer.finish()
    assert steps == [
        "header", "fsync checkpoint.0000000000000001.new", "rename", f"fsync {tmp_path.name}"
    ]  # fmt: skip


@pytest.mark.parametrize("call", ["write", "pwrite", "fsync", "rename"])
@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, StoreFull), (errno.EIO, EngineError)])
def test_a_checkpoint_that_cannot_be_written_leaves_nothing(
    call: str, number: int, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = CheckpointWriter(tmp_path, 1, UUID, EPOCH)

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(error, match="checkpoint"):  # noqa: PT012 - either may be the first to fail
        writer.append(joined(*ROWS))
        writer.finish()
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_in_a_directory_that_refuses(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="No such file"):
        CheckpointWriter(tmp_path / "absent", 1, UUID, EPOCH)


def test_what_a_checkpoint_replaces_is_removed(chain: Path) -> None:
    keep = {"journal.0000000000000004", "checkpoint.0000000000000004", "other", "x.new"}
    for name in ("other", "x.new", "journal.0000000000000007.new", "checkpoint.0000000000000001"):
        (chain / name).write_bytes(b"")
    remove_before(chain, 4)
    assert {path.name for path in chain.iterdir()} == keep
    assert generations(chain) == NEWEST


def test_a_temporary_file_of_a_crash_is_in_nobodys_way(tmp_path: Path) -> None:
    temporary = tmp_path / ("checkpoint.0000000000000001" + files.TEMPORARY)
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    temporary.symlink_to(outside)
    write_checkpoint(tmp_path, 1, joined(*ROWS))
    assert outside.read_bytes() == b"precious"
    assert not checkpoint_path(tmp_path, 1).is_symlink()

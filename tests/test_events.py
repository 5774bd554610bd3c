"""Records of journal and checkpoint, and the names and headers of their files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import CorruptStore
from kvstore.events import (
    NONE,
    RECORD_BYTES,
    Kind,
    blank,
    checksums,
    intact,
    seal,
    touch_records,
    touched_rows,
)
from kvstore.journal import FileHeader, FileKind, parse_name
from tests.journal_samples import (
    BOOT_ID,
    UUID,
    checkpoint_rows,
    joined,
    load_here,
    one_of_each,
    write_checkpoint,
    write_journal,
)
from tests.test_journal import PUT, times

GOLDEN = Path(__file__).parent / "golden"


def test_golden_journal_and_checkpoint_are_written_again_byte_for_byte(tmp_path: Path) -> None:
    written = [
        write_journal(tmp_path, 1, one_of_each()),
        write_checkpoint(tmp_path, 1, checkpoint_rows()),
    ]
    for path in written:
        assert path.read_bytes() == (GOLDEN / path.name).read_bytes()
    assert {*one_of_each()["kind"], *checkpoint_rows()["kind"]} == {*Kind} - {Kind.EMPTY}


def test_golden_journal_and_checkpoint_say_what_was_written() -> None:
    loaded = load_here(GOLDEN)
    assert (loaded.torn, loaded.missing, loaded.reason) == (False, False, "")
    assert loaded.clean
    assert loaded.boot_id == BOOT_ID
    written = joined(checkpoint_rows(), one_of_each())
    # A CLOSE learns its offset when it is appended.
    written["place"][written["kind"] == Kind.CLOSE] = loaded.end - RECORD_BYTES
    assert loaded.events.tobytes() == seal(written).tobytes()


def test_few_and_many_records_get_the_same_checksums() -> None:
    noise = np.random.default_rng(1).bytes(5000 * RECORD_BYTES)
    records = np.frombuffer(noise, PUT.dtype)
    single = np.concatenate([checksums(records[number : number + 1]) for number in range(5000)])
    assert (checksums(records) == single).all()
    assert int(checksums(np.zeros(1, PUT.dtype))[0]) == _by_hand([0] * 15)
    assert int(single[0]) == _by_hand(np.frombuffer(noise[:RECORD_BYTES], "<u8")[1:].tolist())


def _by_hand(words: list[int]) -> int:
    mixed = 0x9E3779B97F4A7C15
    for word in words:
        mixed = (mixed ^ word) * 0xD6E8FEB86659FD93 % 2**64
        mixed ^= mixed >> 32
    return mixed


@pytest.mark.parametrize("count", [1, 40])
def test_every_flipped_bit_of_a_record_is_noticed(count: int) -> None:
    records = seal(times(PUT, count))
    assert intact(records).all()
    flat = records.view(np.uint8)
    for position in range(RECORD_BYTES):
        for bit in range(8):
            flat[position] ^= 1 << bit
            assert intact(records).tolist() == [False] + [True] * (count - 1)
            flat[position] ^= 1 << bit


def test_an_empty_record_is_not_intact() -> None:
    for count in (1, 100):
        assert not intact(np.zeros(count, PUT.dtype)).any()


def test_blank_records_have_no_row_and_no_parent() -> None:
    records = blank(2, Kind.SYNC)
    assert records["kind"].tolist() == [Kind.SYNC] * 2
    assert records["row"].tolist() == records["parent"].tolist() == [NONE] * 2


def test_touches_give_every_row_its_stamp() -> None:
    stamps = np.array([5, 6, 7, 20, *range(100, 145), 200], np.uint64)
    rows = np.arange(1000, 1000 + len(stamps), dtype=np.uint32)
    records = touch_records(rows, stamps)
    assert records["length"].tolist() == [3, 1, 20, 20, 5, 1]
    assert records["last_use"].tolist() == [5, 20, 100, 120, 140, 200]
    found = {
        int(row): int(first) + number
        for first, length, all_rows in zip(
            records["last_use"], records["length"], touched_rows(records), strict=True
        )
        for number, row in enumerate(all_rows[:length])
    }
    assert found == dict(zip(rows.tolist(), stamps.tolist(), strict=True))
    assert len(touch_records(rows[:0], stamps[:0])) == 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("journal.0000000000000001", (FileKind.JOURNAL, 1)),
        ("checkpoint.00000000000000ff", (FileKind.CHECKPOINT, 255)),
        ("journal.00000000000000FF", None),
        ("journal.1", None),
        ("journal.0000000000000001.new", None),
        ("xjournal.0000000000000001", None),
        ("journal.+000000000000001", None),
        ("journal.ffffffffffffffff", None),
        ("", None),
    ],
)
def test_names_of_files(name: str, expected: tuple[FileKind, int] | None) -> None:
    assert parse_name(name) == expected


def test_a_file_header_survives_its_round_trip() -> None:
    header = FileHeader(FileKind.CHECKPOINT, UUID, 2**64 - 1, 5, 6, 2**64 - 1)
    assert FileHeader.decode(header.encode()) == header
    data = bytearray(header.encode())
    for position in range(len(data)):
        data[position] ^= 0x10
        with pytest.raises(CorruptStore):
            FileHeader.decode(bytes(data))
        data[position] ^= 0x10
    with pytest.raises(CorruptStore, match="cut off"):
        FileHeader.decode(header.encode()[:-1])

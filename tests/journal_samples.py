"""Events for the tests of journal, checkpoint and replay."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvstore.checkpoint import CheckpointWriter, Loaded, load
from kvstore.events import NONE, Kind, Records, blank, touch_records
from kvstore.journal import FileKind, Journal

UUID = bytes(range(0x10, 0x20))
EPOCH = 3
UNIT = 4096
NAMESPACE = bytes(range(0xE0, 0xF0))
OTHER_NAMESPACE = bytes(range(0xD0, 0xE0))
BOOT_ID = bytes(range(0xB0, 0xC0))


def event(
    kind: Kind,
    row: int = NONE,
    *,
    generation: int = 0,
    key: bytes = b"",
    parent: int = NONE,
    length: int = 0,
    place: int = 0,
    last_use: int = 0,
    shard: int = 0,
    namespace: bytes = NAMESPACE,
) -> Records:
    """Return one event. Key and namespace are filled in only where ``key`` is given."""
    made = blank(1, kind)
    made["row"], made["generation"], made["parent"] = row, generation, parent
    made["length"], made["place"], made["last_use"] = length, place, last_use
    if key:
        made["key_length"], made["shard"] = len(key), shard
        made["namespace"][0] = np.frombuffer(namespace, np.uint8)
        made["key"][0, : len(key)] = np.frombuffer(key, np.uint8)
    return made


def opening(boot_id: bytes = BOOT_ID, generation: int = 7 << 32) -> Records:
    made = event(Kind.OPEN, generation=generation)
    made["namespace"][0] = np.frombuffer(boot_id, np.uint8)
    return made


def touch(rows: list[int], first_stamp: int) -> Records:
    stamps = np.arange(first_stamp, first_stamp + len(rows), dtype=np.uint64)
    return touch_records(np.array(rows, np.uint32), stamps)


def joined(*parts: Records) -> Records:
    return np.concatenate([blank(0, Kind.EMPTY), *parts])


def one_of_each() -> Records:
    """Return a journal's worth of events, each kind at least once; the close comes last."""
    return joined(
        opening(),
        event(Kind.GHOST, 0, key=b"\x01" * 36, last_use=1000),
        event(Kind.BEGIN, 1, key=b"\x02" * 36, generation=(7 << 32) + 1, parent=0, length=70_000),
        event(
            Kind.PUT,
            1,
            key=b"\x02" * 36,
            generation=(7 << 32) + 1,
            parent=0,
            length=70_000,
            place=0x0102_0304_0506_0708,
            last_use=1001,
            shard=2,
        ),
        touch([1, 0, 5], 2000),
        event(Kind.PIN, 1, last_use=1_800_000_000_000_000),
        event(Kind.FREE, 9, generation=(6 << 32) + 5),
        event(Kind.SYNC, generation=(7 << 32) + 1),
        event(Kind.CLOSE),
    )


def checkpoint_rows() -> Records:
    return joined(
        event(Kind.PUT, 5, key=b"five", generation=5, length=4096, place=77, last_use=500),
        event(Kind.GHOST, 6, key=b"six", last_use=501),
        event(Kind.PUT, 7, key=b"\xff" * 64, generation=6, parent=6, length=1, last_use=502),
        event(Kind.LEFTOVER, 9, key=b"nine", generation=4, length=3, place=78),
        event(Kind.PIN, 5, last_use=1_900_000_000_000_000),
        event(Kind.SYNC, generation=5),
    )


def write_journal(directory: Path, sequence: int, events: Records) -> Path:
    journal = Journal.create(directory, sequence, UUID, EPOCH, UNIT)
    journal.append(events)
    journal.close()
    return FileKind.JOURNAL.path(directory, sequence)


def write_checkpoint(directory: Path, sequence: int, events: Records) -> Path:
    writer = CheckpointWriter(directory, sequence, UUID, EPOCH)
    writer.append(events)
    writer.finish()
    return FileKind.CHECKPOINT.path(directory, sequence)


def load_here(directory: Path) -> Loaded:
    return load(directory, UUID, EPOCH)

"""Where the bytes of a block file lie, how to spoil them, and what the store made of it.

Offsets are those of docs/formats.md, written down here again: a test that took them from the code
would not notice if a field moved.
"""

from __future__ import annotations

import json
from pathlib import Path

from kvstore import record
from kvstore.answers import BlockStatus
from tests.stores import Local, block, key

OK = BlockStatus.OK
PAGE = 4096
SIZES = (1, 4096, 5000, 300_000)
ROOT, VICTIM, OTHER = key(0), key(1), key(2)
LABEL = "système prompt"

FIELDS = {
    "magic": 0,
    "version": 4,
    "header length": 6,
    "flags": 8,
    "shard": 12,
    "key length": 14,
    "parent length": 15,
    "store": 16,
    "namespace": 32,
    "generation": 48,
    "written": 56,
    "logical length": 64,
    "stored length": 68,
    "payload checksum": 72,
    "transform": 80,
    "TLV bytes": 82,
    "first reserve": 84,
    "second reserve": 88,
    "key": 96,
    "parent": 128,
    "TLV type": 160,
    "TLV reserve": 161,
    "TLV length": 162,
    "label": 164,
    "fill up to 8": 179,
    "header checksum": 184,
}
"""Where the fields of a header with a key and a parent of 32 bytes and the label above begin."""
HEADER_BYTES = 192


def regions(size: int) -> dict[str, int]:
    """Return an offset in every region whose bytes matter, of a file with so large a payload."""
    payload = {"payload, first": 0, "payload, middle": size // 2, "payload, last": size - 1}
    return FIELDS | {name: PAGE + offset for name, offset in payload.items()}


def paddings(size: int) -> dict[str, int]:
    """Return an offset in every region whose bytes carry nothing."""
    found = {"page, first": HEADER_BYTES, "page, last": PAGE - 1}
    if size % PAGE:
        found |= {"padding, first": PAGE + size, "padding, last": record.image_bytes(size) - 1}
    return found


def flip(path: Path, offset: int) -> bytes:
    """Flip one bit of a byte; return what the file now holds."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << offset % 8
    path.write_bytes(data)
    return bytes(data)


def file_of(local: Local, name: bytes) -> Path:
    (path,) = (path for path in local.files() if f"-{name.hex()}." in path.name)
    return path


def manifest(store: Path) -> list[dict[str, object]]:
    path = store / "quarantine" / "manifest.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def copies(store: Path) -> list[Path]:
    return sorted((store / "quarantine").glob("*.kvb"))


def failures(local: Local) -> dict[str, int]:
    """Return the counters of verification that are not 0."""
    names = ("corrupt_blocks", "stale_blocks", "missing_blocks", "unsynced_blocks", "read_errors")
    counts = {name: getattr(local.core.counters, name) for name in names}
    return {name: count for name, count in counts.items() if count}


def assert_nothing_is_held(local: Local) -> None:
    """No buffer, reference, reservation or put under way stays behind."""
    core = local.core
    assert core.bounce.free_bytes == core.bounce.capacity
    assert not core.index.references.any()
    assert (core.coming, core.going, core.writing, core.active) == (0, 0, {}, set())


def put_family(local: Local, size: int) -> None:
    """Put the victim, its parent, and a neighbour."""
    assert local.put([ROOT], [block(0, size)]) == [OK]
    assert local.put([VICTIM], [block(1, size)], parent=ROOT, label=LABEL) == [OK]
    assert local.put([OTHER], [block(2, size)]) == [OK]

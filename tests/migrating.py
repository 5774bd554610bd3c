"""Stores with mixed blocks, and what they hold, for tests of ``kvstore migrate``."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore import checkpoint, events, former, layout, record, versions
from kvstore.backends import engine_class, engine_names
from kvstore.backends.base import EngineContext, Status
from kvstore.events import Kind
from kvstore.settle import settle
from tests.stores import Local, block, key, options

ENGINES = [name for name in engine_names() if engine_class(name).capabilities.persistent]
SIZES = (1, 700, 4096, 5000, 65536, 100_000, 262_144)


def fill(path: Path, engine: str, count: int, *, clean: bool = True, capacity: int = 0) -> None:
    """Make a store of mixed blocks: chains and branches, labels, ghosts, pins, a second namespace,
    new versions, an order of use of its own."""
    more = {"capacity": capacity} if capacity else {}
    local = Local(path, engine=engine, **more)
    numbers = range(count)
    blocks = [block(n, SIZES[n % len(SIZES)]) for n in numbers]
    for start in range(0, count, 8):
        part = numbers[start : start + 8]
        keys = [key(n) for n in part]
        parent = key(start // 2) if start else b""
        how = {"chain": True, "parent": parent, "shard": start // 8 % 2 if start > 16 else 0}
        local.put(keys, [blocks[n] for n in part], label=f"part {start}", **how)  # type: ignore[arg-type]
    other = local.core.namespaces.open({"name": "other", "layers": 4}, create=True)
    first, local.namespace = local.namespace, other
    local.put([b"short %d" % n for n in range(5)], [block(n + 9000) for n in range(5)], chain=True)
    local.namespace = first
    local.delete([key(3)])
    for n in (5, 1):
        local.store.touch(first, 0, np.frombuffer(key(n), np.uint8)[None])
    local.store.pin(first, 0, np.frombuffer(key(2) + key(6), np.uint8).reshape(2, 32), 3600)
    local.store.pin(first, 0, np.frombuffer(key(7), np.uint8)[None], 7200, firm=True)
    local.store.run_chores()
    local.tick()
    if clean:
        local.stop()
    else:
        local.kill()


@dataclass(frozen=True)
class Held:
    """What a store says of one block, and its header and payload as they are on disk."""

    kind: int
    parent: tuple[bytes, int, bytes] | None
    pin: tuple[int, bool] | None
    generation: int
    written_ns: int
    label: str
    payload: bytes


def holding(path: Path) -> tuple[dict[tuple[bytes, int, bytes], Held], list[bytes]]:
    """Return all rows of a store by (namespace, shard, key), and the keys in the order of use."""
    found = layout.read(path)
    settled = settle(checkpoint.load(path / found.blocks, found.uuid, found.epoch).events)
    context = EngineContext(path / found.blocks, found.uuid, found.engine_options, read_only=True)
    engine = engine_class(found.engine)(context)
    engine.open()
    rows = settled.rows
    names = {int(row["row"]): _name(row) for row in rows}
    held = {}
    for row in rows:
        number = int(row["row"])
        header, payload = _read(engine, found.uuid, row) if row["kind"] == Kind.PUT else (None, b"")
        pin = settled.pins.get(number)
        held[names[number]] = Held(
            kind=int(row["kind"]),
            parent=names.get(int(row["parent"])),
            pin=None if pin is None else (pin, number in settled.firm),
            generation=int(row["generation"]),
            written_ns=header.written_ns if header else 0,
            label=header.label if header else "",
            payload=payload,
        )
    engine.close()
    order = np.argsort(rows["last_use"], kind="stable")
    return held, [row["key"].tobytes() for row in rows[order] if row["kind"] == Kind.PUT]


def left(path: Path) -> list[str]:
    """Return the names in a store that have to do with blocks and their way to another engine."""
    names = os.listdir(path)
    return sorted(name for name in names if name.startswith(("blocks", former.MIGRATING)))


def _name(row: np.void) -> tuple[bytes, int, bytes]:
    return row["namespace"].tobytes(), int(row["shard"]), row["key"][: row["key_length"]].tobytes()


def _read(engine: object, store: bytes, row: np.void) -> tuple[record.Header, bytes]:
    (blocks,) = versions.blocks_of(np.array([row], events.RECORD))
    length = int(row["length"])
    image = memoryview(mmap.mmap(-1, record.image_bytes(length)))
    read = engine.get_many_into(blocks, [image])  # type: ignore[attr-defined]
    assert read.statuses[0] == Status.OK
    header = record.decode(image[: record.HEADER_PAGE])
    assert record.payload_checksum(image[4096 : 4096 + length]) == header.checksum
    return header, bytes(image[4096 : 4096 + length])


__all__ = ["ENGINES", "Held", "Local", "block", "fill", "holding", "key", "left", "options"]

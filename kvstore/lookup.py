"""One block, told to a person: found by its key or an abbreviation, its envelope decoded.

A store at rest (:class:`AtRest`) is read under a shared lock from STORE.json, namespaces, journal
and checkpoint; nothing is written, so a read-only mount will do. The daemon tells the same of its
own rows.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from kvstore import checkpoint, layout, plan, record
from kvstore.backends import engine_class
from kvstore.backends.base import Blocks, EngineContext, Status
from kvstore.backends.judging import judge_all
from kvstore.errors import CorruptBlock, NotFound, UsageError
from kvstore.events import Kind
from kvstore.namespaces import Namespaces
from kvstore.record import Verdict
from kvstore.settle import settle

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType

    from kvstore.backends.base import U8, U32, Engine, Mask
    from kvstore.events import Records
    from kvstore.keys import KeyArray
    from kvstore.layout import StoreRecord

LEAST_DIGITS = 8
"""Hex digits of an abbreviation."""
MOST_NAMED = 8
"""Blocks that an ambiguous abbreviation is answered with."""

Document = dict[str, object]


def matching(keys: KeyArray, lengths: U8, digits: str) -> Mask:
    """Tell which keys (shape (n, 64), of so many bytes each) begin with these hex digits."""
    whole = np.frombuffer(bytes.fromhex(digits[: len(digits) // 2 * 2]), np.uint8)
    found: Mask = lengths.astype(np.int64) * 2 >= len(digits)
    found &= (keys[:, : len(whole)] == whole).all(axis=1)
    if len(digits) % 2:
        found &= keys[:, len(whole)] >> 4 == int(digits[-1], 16)
    return found


def check_digits(digits: str) -> str:
    """Return an abbreviation or key in lower case. Raises UsageError."""
    if not digits or len(digits) > 128 or digits.lower().strip("0123456789abcdef"):
        raise UsageError(
            f"{digits[:16]!r} is no key", "write a key, or the first 8 or more of its hex digits"
        )
    return digits.lower()


def only(found: Sequence[tuple[str, int, str]], digits: str) -> int:
    """Return which of the blocks (namespace id, shard, key; hex) that begin with ``digits`` is
    meant. Raises NotFound, UsageError if it may be several."""
    exact = [number for number, one in enumerate(found) if one[2] == digits]
    chosen = exact or (range(len(found)) if len(digits) >= LEAST_DIGITS else [])
    if len(chosen) == 1:
        return chosen[0]
    if not chosen:
        raise NotFound(
            f"no block has the key {digits}",
            f"write all of it, or its first {LEAST_DIGITS} or more hex digits",
        )
    named = ", ".join(" ".join(map(str, found[number])) for number in chosen[:MOST_NAMED])
    raise UsageError(
        f"{digits} may be {len(chosen)} blocks: {named}",
        "write more digits, or name --namespace and --shard",
    )


def read_record(engine: Engine, block: Blocks) -> Document:
    """Read the record of one block and return ``verdict`` (ok, repaired, stale, damaged, missing or
    unreadable), ``reason``, ``path`` and the decoded ``envelope``."""
    length, told = int(block.lengths[0]), Document(path=engine.where(block)[0])
    image = memoryview(mmap.mmap(-1, record.image_bytes(length)))
    (found,) = judge_all(engine, block, [image])
    if found.status not in (Status.OK, Status.DAMAGED):
        verdict = "missing" if found.status == Status.MISSING else "unreadable"
        return told | {"verdict": verdict, "reason": "see the log", "envelope": None}
    verdict = {Verdict.OK: "ok", Verdict.STALE: "stale"}.get(found.verdict, "damaged")
    reason = found.reason
    if found.repaired:
        verdict, reason = "repaired", "a chunk of the payload is damaged, its parity chunk has it"
    return told | {"verdict": verdict, "reason": reason, "envelope": _envelope(image)}


def _envelope(image: memoryview) -> Document | None:
    try:
        header = record.decode(image[: record.HEADER_PAGE])
    except CorruptBlock:
        return None
    return {
        "store": header.store.hex(),
        "namespace": header.namespace.hex(),
        "shard": header.shard,
        "key": header.key.hex(),
        "parent": header.parent.hex() or None,
        "generation": header.generation,
        "written_ns": header.written_ns,
        "logical_length": header.logical_length,
        "stored_length": header.stored_length,
        "checksum": f"{header.checksum:016x}",
        "transform": header.transform,
        "flags": header.flags,
        "label": header.label,
        "extra": header.extra.hex(),
    }


class AtRest:
    """A store that no daemon writes to, as a context manager.

    Raises StoreNotFound, StoreLocked, FormatUnsupported, CorruptStore, PermissionDenied.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record: StoreRecord = layout.read(path)
        self._lock = layout.Lock(path)

    def __enter__(self) -> AtRest:
        self._lock.acquire(exclusive=False)
        try:
            self._load()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._lock.release()

    def _load(self) -> None:
        self.namespaces = Namespaces(self.path / layout.NAMESPACES, read_only=True)
        self.namespaces.load()
        blocks = self.path / self.record.blocks
        loaded = checkpoint.load(blocks, self.record.uuid, self.record.epoch)
        settled = settle(loaded.events)
        self._rows: Records = settled.rows
        self._pins = settled.pins
        where = {row: number for number, row in enumerate(self._rows["row"].tolist())}
        parents = self._rows["parent"].tolist()
        self._up = np.array([where.get(row, -1) for row in parents], np.int64)

    def find(self, digits: str, namespace: bytes | None, shard: int | None) -> int:
        """Return the position of the block meant. Raises NotFound, UsageError."""
        rows = self._rows
        mask = matching(rows["key"], rows["key_length"], digits) & (rows["kind"] == Kind.PUT)
        if namespace is not None:
            mask &= (rows["namespace"] == np.frombuffer(namespace, np.uint8)).all(axis=1)
        if shard is not None:
            mask &= rows["shard"] == shard
        found = np.flatnonzero(mask)
        return int(found[only([self._name(number) for number in found.tolist()], digits)])

    def _name(self, number: int) -> tuple[str, int, str]:
        row = self._rows[number]
        return row["namespace"].tobytes().hex(), int(row["shard"]), self._key(number)

    def _key(self, number: int) -> str:
        row = self._rows[number]
        key: str = row["key"][: row["key_length"]].tobytes().hex()
        return key

    def tell(self, number: int) -> Document:
        """Return what is known of a block, its record read and judged."""
        row, up = self._rows[number], int(self._up[number])
        namespace, shard, key = self._name(number)
        pinned = self._pins.get(int(row["row"]))
        block = Blocks(
            bytes.fromhex(namespace),
            shard,
            np.frombuffer(bytes.fromhex(key), np.uint8).reshape(1, -1),
            row["length"].reshape(1),
            row["generation"].reshape(1),
            row["place"].reshape(1),
        )
        told: Document = {
            "namespace": namespace,
            "shard": shard,
            "key": key,
            "parent": self._key(up) if up >= 0 else None,
            "children": int((self._up == number).sum()),
            "bytes": int(row["length"]),
            "record_bytes": int(self._record_bytes(row["length"].reshape(1))[0]),
            "generation": int(row["generation"]),
            "place": int(row["place"]),
            "last_use": int(row["last_use"]) / 1e6,
            "memory": False,
            "disk": True,
            "dirty": False,
            "references": 0,
            "pinned_until": None if pinned is None else pinned / 1e6,
        }
        engine = engine_class(self.record.engine)(self._context())
        engine.open()
        try:
            return told | read_record(engine, block)
        finally:
            engine.close()

    def _record_bytes(self, lengths: U32) -> np.ndarray:
        return engine_class(self.record.engine).record_sizes(lengths, parity=self.record.parity)

    def _context(self) -> EngineContext:
        found, folder = self.record, self.path / self.record.blocks
        return EngineContext(
            folder, found.uuid, found.engine_options, read_only=True, parity=found.parity
        )

    def tree(self, number: int, limit: int) -> Document:
        """Return the chain of a block: ancestors, itself, descendants."""
        told, more = plan.family(self._up, number, limit)
        blocks = [
            {
                "key": self._key(position),
                "depth": depth,
                "bytes": int(self._rows["length"][position]),
                "there": bool(self._rows["kind"][position] == Kind.PUT),
                "chosen": position == number,
            }
            for position, depth in told
        ]
        namespace, shard, _ = self._name(number)
        return {"namespace": namespace, "shard": shard, "blocks": blocks, "more": more}

"""Payloads verified a share at a time: in the order in which they lie, on from where one ended."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from kvstore import compare, files, record
from kvstore.errors import CorruptStore
from kvstore.survey import CURSOR
from kvstore.verify import Kind as Verdict
from kvstore.versions import blocks_of

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.backends.base import Engine
    from kvstore.compare import Index
    from kvstore.events import Records
    from kvstore.findings import Found
    from kvstore.isolate import Inspection

CHUNK_BYTES, CHUNK_ROWS = 256 << 20, 4096
"""Verified in one go: between two of them a check may stop."""
_IDS = {
    Verdict.MISSING: "missing",
    Verdict.UNREADABLE: "unreadable",
    Verdict.HEADER: "header-damaged",
    Verdict.PAYLOAD: "payload-damaged",
    Verdict.TRUNCATED: "truncated",
    Verdict.STALE: "wrong-record",
    Verdict.PADDING: "padding",
    Verdict.CHUNK: "payload-repairable",
    Verdict.PARITY: "parity-damaged",
}
_NOT_LOST = (Verdict.UNREADABLE, Verdict.PADDING, Verdict.CHUNK, Verdict.PARITY)


class Payloads:
    """Verifies rows of an index by an inspection of their engine; ``blocks`` is its directory."""

    def __init__(self, inspection: Inspection, engine: Engine, index: Index, blocks: str) -> None:
        self._inspection = inspection
        self._engine = engine
        self._index = index
        self._blocks = blocks

    def verify(self, order: np.ndarray, most: int) -> tuple[int, int, list[tuple[int, Found]]]:
        """Verify rows from the first of ``order`` on, about ``most`` bytes at most.

        Returns how many, their bytes as records, and what is wrong with which row.
        """
        rows = self._index.rows
        sizes = np.cumsum(record.image_bytes_of(rows["length"][order].astype(np.uint32)))
        count = int(np.searchsorted(sizes, min(most, CHUNK_BYTES))) + 1
        order, bad = order[:count], []
        at = dict(zip(rows["generation"][order].tolist(), order.tolist(), strict=True))
        for blocks in blocks_of(rows[order]):
            first = 0
            for verdicts in self._inspection.verify(blocks):
                for number in np.flatnonzero(verdicts.kinds).tolist():
                    row = at[int(blocks.generations[first + number])]
                    verdict = Verdict(int(verdicts.kinds[number]))
                    bad.append((row, self._found(row, verdict, verdicts.reasons[str(number)])))
                first += len(verdicts.kinds)
        return len(order), int(sizes[len(order) - 1]), bad

    def _found(self, row: int, verdict: Verdict, why: str) -> Found:
        index, name = self._index, _IDS[verdict]
        lost = int(index.rows["generation"][row]) > index.synced
        if lost and verdict not in _NOT_LOST:
            name = "unsynced"
        path = self._engine.where(compare.blocks_at(index.rows, row))[0]
        return compare.found_row(index.rows, row, name, f"{self._blocks}/{path}", why)


def start(store: Path, uuid: bytes, rows: Records) -> int:
    """Return the position of the first row to verify: behind those of the last check."""
    try:
        noted = json.loads(files.read_regular(store / CURSOR, 4096))
        if noted["uuid"] != uuid.hex():
            return 0
        place, generation = int(noted["place"]), int(noted["generation"])
    except (OSError, CorruptStore, ValueError, TypeError, KeyError):
        return 0
    behind = rows["place"] > place
    behind |= (rows["place"] == place) & (rows["generation"] >= generation)
    return int(behind.argmax()) if behind.any() else 0


def keep(store: Path, uuid: bytes, row: np.void) -> None:
    """Note the first row that was not verified. On a read-only mount the next check begins anew."""
    noted = {
        "uuid": uuid.hex(),
        "place": int(row["place"]),
        "generation": int(row["generation"]),
    }
    try:
        files.replace(store / CURSOR, json.dumps(noted).encode() + b"\n")
    except OSError:
        return

"""What the index says beside what a scan of the engine found: arrays against arrays.

Versions are joined by their generation, which no two versions of a store share, and then compared:
same block, same place, same length. Whatever is left over on either side is a finding.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import numpy as np

from kvstore import record
from kvstore.backends.base import Blocks, Finding, Scanned
from kvstore.backends.scanning import ScanBatch
from kvstore.findings import Found, id_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.backends.base import U64, Engine, Mask
    from kvstore.events import Records

_FACTORS = np.arange(1, 12, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)


@dataclass(frozen=True, slots=True)
class Index:
    """The blocks that count, as replay left them, and what the engine's scan may be told by it.

    ``rows`` are PUTs. ``left``: generations that a kill left behind. ``whole``: journal and
    checkpoint tell everything. Rows of a generation above ``synced`` may have been lost with the
    power (2^64 - 1: there was no power loss).
    """

    rows: Records
    left: U64
    whole: bool
    synced: int


@dataclass
class Comparison:
    """``seen``: which rows have a record, ``elsewhere``: not in their place; ``bad``: which must be
    dropped. ``records``: how many records there are; ``unknown`` of them are not in the index,
    ``free`` in slots that no block is in. ``strange``: what the engine found, without what lies in
    free slots."""

    seen: Mask
    bad: Mask
    elsewhere: Mask
    records: int = 0
    unknown: int = 0
    free: int = 0
    found: list[Found] = field(default_factory=list)
    strange: list[Finding] = field(default_factory=list)


def gather(scan: Iterable[Scanned]) -> Scanned:
    """Return all batches as one, findings included."""
    batches = [*scan, ScanBatch().take()]
    names = [one.name for one in fields(Scanned)][:-1]
    columns = {name: np.concatenate([getattr(b, name) for b in batches]) for name in names}
    return Scanned(**columns, strange=tuple(one for b in batches for one in b.strange))


def nothing(index: Index) -> Comparison:
    """Return a comparison that tells nothing."""
    seen, bad, elsewhere = np.zeros((3, len(index.rows)), np.bool_)
    return Comparison(seen, bad, elsewhere)


def compare(index: Index, scanned: Scanned | None, engine: Engine, blocks: str) -> Comparison:
    """Return the differences. ``engine`` need not be open: it tells where records lie; ``blocks``
    is its directory's name, for paths. ``scanned`` is None where nothing could be scanned."""
    result = nothing(index)
    work = _Work(index, engine, blocks, result)
    work.shared_places()
    strange: dict[str, Finding] = {}
    if scanned is not None:
        result.records = len(scanned)
        work.join(scanned)
        strange = {one.path: one for one in scanned.strange}
        work.unseen(strange)
    work.strange(strange)
    return result


class _Work:
    def __init__(self, index: Index, engine: Engine, blocks: str, result: Comparison) -> None:
        self._index = index
        self._engine = engine
        self._blocks = blocks
        self._result = result

    def shared_places(self) -> None:
        rows = self._index.rows
        if not self._engine.capabilities.fixed_slots:
            return
        _, where, counts = np.unique(rows["place"], return_inverse=True, return_counts=True)
        for at in np.flatnonzero(counts[where] > 1).tolist():
            self._row(at, "shared-place", "another block has this place, too")

    def join(self, scanned: Scanned) -> None:
        rows, result = self._index.rows, self._result
        order = np.argsort(rows["generation"])
        known = rows["generation"][order]
        at = np.searchsorted(known, scanned.generations)
        at[at == len(known)] = 0
        hit = known[at] == scanned.generations if len(known) else np.zeros(len(at), np.bool_)
        row = order[at] if len(known) else at
        hit[hit] = self._same(scanned, hit, row)
        placed = hit.copy()
        placed[hit] = scanned.places[hit] == rows["place"][row[hit]]
        right = np.zeros(len(rows), np.bool_)
        right[row[placed]] = True
        result.seen[row[hit]] = True
        again = hit & ~placed
        # One copy more in a free slot is no fault: the slot will be used again.
        again[again] = ~right[row[again]]
        result.free += int((hit & ~placed & ~again).sum())
        result.elsewhere[row[again]] = True
        for number in np.flatnonzero(again).tolist():
            detail = f"the record lies at place {int(scanned.places[number]):#x}"
            self._row(int(row[number]), "wrong-place", detail)
        wrong = np.zeros(len(hit), np.bool_)
        wrong[hit] = scanned.lengths[hit] != rows["length"][row[hit]]
        for number in np.flatnonzero(wrong).tolist():
            detail = f"it has {int(scanned.lengths[number])} bytes"
            self._row(int(row[number]), "wrong-length", detail, bad=True)
        self._unknown(scanned, np.flatnonzero(~hit))

    def _same(self, scanned: Scanned, hit: Mask, row: np.ndarray) -> Mask:
        """Tell which records with the generation of a row are that row's block."""
        rows = self._index.rows[row[hit]]
        same: Mask = (scanned.namespaces[hit] == rows["namespace"]).all(axis=1)
        same &= (scanned.keys[hit] == rows["key"]).all(axis=1)
        same &= scanned.shards[hit] == rows["shard"]
        same &= scanned.key_lengths[hit] == rows["key_length"]
        return same

    def _unknown(self, scanned: Scanned, which: np.ndarray) -> None:
        """Sort records that are no block of the index: expected, old, or new to it."""
        index, result = self._index, self._result
        left = np.isin(scanned.generations[which], index.left)
        for number in which[left].tolist():
            self._record(scanned, number, "unfinished", "a kill left it")
        which = which[~left]
        if self._engine.capabilities.fixed_slots and index.whole:
            # Eviction writes nothing: a slot keeps its old record until it is used again.
            result.free += len(which)
            return
        result.unknown = len(which)
        theirs = _digests(scanned.namespaces, scanned.shards, scanned.key_lengths, scanned.keys)
        rows = index.rows
        ours = _digests(rows["namespace"], rows["shard"], rows["key_length"], rows["key"])
        order = np.argsort(ours)
        ordered = ours[order]
        for number in which.tolist():
            at = int(np.searchsorted(ordered, theirs[number]))
            there = at < len(ours) and ordered[at] == theirs[number]
            newer = not there or scanned.generations[number] > rows["generation"][order[at]]
            if newer and not index.whole:
                continue  # told by what is wrong with the journal
            name = "orphan" if newer else "superseded"
            detail = "the index has another version" if there else "the index does not know it"
            self._record(scanned, number, name, detail)

    def unseen(self, strange: dict[str, Finding]) -> None:
        """Tell what became of the rows without a record: damaged in its place, or gone."""
        rows = self._index.rows
        for at in np.flatnonzero(~self._result.seen).tolist():
            found = strange.pop(self.path(at), None)
            if found is not None:
                self._result.strange.append(found)
                name = id_of(found.kind)
                self._row(at, name, found.detail, bad=name != "unreadable")
            else:
                lost = int(rows["generation"][at]) > self._index.synced
                self._row(at, "unsynced" if lost else "missing", "no record is there", bad=True)

    def strange(self, strange: dict[str, Finding]) -> None:
        """Tell of what is no block's: findings that no row answers to."""
        slots = self._engine.capabilities.fixed_slots and self._index.whole
        free = 0
        for found in strange.values():
            if slots and " slot " in found.path:
                free += 1
                continue
            path = f"{self._blocks}/{found.path}"
            self._result.found.append(Found(id_of(found.kind), path, found.detail))
            self._result.strange.append(found)
        if free:
            self._result.found.append(Found("free-slot", self._blocks, f"{free} slots"))

    def path(self, at: int) -> str:
        return self._engine.where(blocks_at(self._index.rows, at))[0]

    def _row(self, at: int, name: str, detail: str, *, bad: bool = False) -> None:
        self._result.bad[at] |= bad
        path = f"{self._blocks}/{self.path(at)}"
        self._result.found.append(found_row(self._index.rows, at, name, path, detail))

    def _record(self, scanned: Scanned, number: int, name: str, detail: str) -> None:
        one = slice(number, number + 1)
        size = int(scanned.key_lengths[number])
        block = Blocks(
            scanned.namespaces[number].tobytes(),
            int(scanned.shards[number]),
            scanned.keys[one, :size],
            scanned.lengths[one],
            scanned.generations[one],
            scanned.places[one],
        )
        self._result.found.append(
            Found(
                name,
                f"{self._blocks}/{self._engine.where(block)[0]}",
                detail,
                block.namespace.hex(),
                block.shard,
                block.keys.tobytes().hex(),
                int(block.generations[0]),
                record.image_bytes(int(block.lengths[0])),
            )
        )


def blocks_at(rows: Records, at: int) -> Blocks:
    """Return one row as the engine wants it."""
    one = rows[at : at + 1]
    return Blocks(
        one["namespace"].tobytes(),
        int(one["shard"][0]),
        one["key"][:, : int(one["key_length"][0])],
        one["length"].astype(np.uint32),
        one["generation"].astype(np.uint64),
        one["place"].astype(np.uint64),
    )


def found_row(rows: Records, at: int, name: str, path: str, detail: str) -> Found:
    """Return a finding about a row."""
    row = rows[at]
    return Found(
        name,
        path,
        detail,
        row["namespace"].tobytes().hex(),
        int(row["shard"]),
        row["key"][: row["key_length"]].tobytes().hex(),
        int(row["generation"]),
        record.image_bytes(int(row["length"])),
    )


def _digests(
    namespaces: np.ndarray, shards: np.ndarray, lengths: np.ndarray, keys: np.ndarray
) -> U64:
    """Return a number for each identity; equal ones have equal numbers, and hardly any others."""
    spaces = np.ascontiguousarray(namespaces).view(np.uint64).reshape(-1, 2)
    words = np.ascontiguousarray(keys).view(np.uint64).reshape(-1, 8)
    small = shards.astype(np.uint64) << np.uint64(8) | lengths.astype(np.uint64)
    digests: U64 = spaces @ _FACTORS[:2] + small * _FACTORS[2] + words @ _FACTORS[3:]
    return digests

"""Where the copy of a change of engine grows: an engine with its journal, soon the store's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore import checkpoint, events, record, versions
from kvstore.checkpoint import CheckpointWriter
from kvstore.errors import EngineError
from kvstore.events import Kind
from kvstore.journal import Journal
from kvstore.killpoints import reach
from kvstore.settle import settle

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from kvstore.backends.base import Engine, Scanned
    from kvstore.checkpoint import Loaded
    from kvstore.events import Records
    from kvstore.layout import StoreRecord
    from kvstore.settle import Settled

SYNC_BYTES = 128 << 20
"""So much is copied between two syncs: what a kill costs at most."""


class Copy:
    """The copy: an engine and its journal, which become the store's."""

    def __init__(
        self,
        path: Path,
        coming: StoreRecord,
        earlier: tuple[Loaded, Settled] | None,
        engine: Engine,
    ) -> None:
        self.engine = engine
        self._directory = path / coming.blocks
        self._uuid, self._epoch = coming.uuid, coming.epoch
        loaded = earlier[0] if earlier else None
        self._resume = (loaded.sequence, loaded.end) if loaded else (1, events.RECORD_BYTES)
        self._settled = earlier[1] if earlier else None
        self._copied = events.blank(0, Kind.PUT)
        self._new: list[Records] = []
        self._bytes = 0

    def __enter__(self) -> Copy:
        sequence, end = self._resume
        self._journal = Journal.resume(self._directory, sequence, self._uuid, self._epoch, end)
        try:
            self.engine.open()
        except BaseException:
            self._journal.close()
            raise
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._journal.close()
        self.engine.close()

    def adopt(self, rows: Records) -> np.ndarray:
        """Take over what an earlier run copied; return which of the rows that are.

        What has left the source since is given up in the journal before it is deleted: its place
        may soon be another block's.
        """
        there = self._settled.rows if self._settled else events.blank(0, Kind.PUT)
        there = there[there["kind"] == Kind.PUT]
        self.engine.claim(there["place"], there["length"], there["generation"], complete=True)
        live = rows["kind"] == Kind.PUT
        wanted = np.isin(there["generation"], rows["generation"][live])
        strange = there[~wanted]
        if len(strange):
            strange["kind"] = Kind.FREE
            self._journal.append(strange)
            self._journal.sync()
            for blocks in versions.blocks_of(strange):
                self.engine.delete_many(blocks)
        self._copied = there[wanted]
        done: np.ndarray = live & np.isin(rows["generation"], self._copied["generation"])
        return done

    def add(self, rows: Records) -> None:
        """Note rows whose records are in the engine, at their ``place``."""
        self._new.append(rows)
        self._bytes += int(record.image_bytes_of(rows["length"]).sum())
        if self._bytes >= SYNC_BYTES:
            self.save()

    def save(self) -> None:
        """Make durable what was added: first the records, then the journal that names them."""
        if not self._new:
            return
        self.engine.flush()
        reach("migrate.flushed")
        rows = np.concatenate(self._new)
        rows["kind"] = Kind.PUT
        self._journal.append(rows)
        self._journal.sync()
        reach("migrate.saved")
        self._copied = np.concatenate([self._copied, rows])
        self._new, self._bytes = [], 0

    def check(self) -> None:
        """See that a scan finds every block, and remove what else it finds. Raises EngineError."""
        wanted, seen = np.sort(self._copied["generation"]), [np.zeros(0, np.uint64)]
        for found in self.engine.scan():
            seen.append(found.generations)
            strange = as_records(found)[~_among(wanted, found.generations)[0]]
            for blocks in versions.blocks_of(strange):
                self.engine.delete_many(blocks)
        missing = len(np.setdiff1d(wanted, np.concatenate(seen)))
        if missing:
            raise EngineError(
                f"{missing} of {len(wanted)} copies in {self._directory} are not found again",
                "the store is as it was; give the copy up with --rollback and see to the disk",
            )
        self.engine.flush()

    def finish(self, rows: Records, settled: Settled) -> int:
        """Make it a store that was stopped cleanly, with the rows of the source; return how many
        have a block. Rows that did not come along stay as ghosts where others descend from them."""
        rows = rows.copy()
        there = self._copied[np.argsort(self._copied["generation"])]
        copied, at = _among(there["generation"], rows["generation"])
        copied &= rows["kind"] == Kind.PUT
        rows["place"][copied] = there["place"][at[copied]]
        rows["kind"] = np.where(copied, Kind.PUT, Kind.GHOST)
        self._journal.rotate()
        writer = CheckpointWriter(self._directory, self._journal.sequence, self._uuid, self._epoch)
        kept = settle(rows).rows
        writer.append(kept)
        writer.append(_pins(kept, settled))
        synced = events.blank(1, Kind.SYNC)
        synced["generation"] = settled.max_generation
        writer.append(synced)
        writer.finish()
        reach("migrate.checkpoint")
        checkpoint.remove_before(self._directory, self._journal.sequence)
        self._journal.append(events.blank(1, Kind.CLOSE))
        self._journal.sync()
        # Closed now, not behind the switch: some engines write their last files then.
        self.engine.close()
        return int(copied.sum())


def _among(known: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tell which values are among known ones, which ascend, and where these are."""
    if not len(known):
        return np.zeros(len(values), np.bool_), np.zeros(len(values), np.int64)
    at = np.minimum(np.searchsorted(known, values), len(known) - 1)
    return known[at] == values, at


def _pins(rows: Records, settled: Settled) -> Records:
    live = set(rows["row"][rows["kind"] == Kind.PUT].tolist())
    pinned = [row for row in settled.pins if row in live]
    out = events.blank(len(pinned), Kind.PIN)
    out["row"] = pinned
    out["last_use"] = [settled.pins[row] for row in pinned]
    out["length"] = [row in settled.firm for row in pinned]
    return out


def as_records(found: Scanned) -> Records:
    """Return what a scan found in the form of journal records."""
    out = events.blank(len(found), Kind.LEFTOVER)
    out["namespace"], out["shard"] = found.namespaces, found.shards
    out["key_length"], out["key"] = found.key_lengths, found.keys
    out["length"], out["place"] = found.lengths, found.places
    out["generation"] = found.generations
    return out

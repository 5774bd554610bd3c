"""What an open store does by itself: saves the order of use, writes checkpoints, frees space."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from kvstore import events, versions
from kvstore.checkpoint import CheckpointWriter, remove_before
from kvstore.index import DISK, DURABLE, GHOST
from kvstore.job import Job
from kvstore.removal import choose_victims, evict, retire

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.core import Core
    from kvstore.errors import KVStoreError
    from kvstore.removal import Removal

log = logging.getLogger(__name__)

SLICE_ROWS = 8192
"""Rows described for a checkpoint at a time: about 2 ms of the owner thread."""
MIN_JOURNAL_BYTES = 1 << 20
FLOOR_BATCH_BYTES = 256 << 20
RETRY_SECONDS = 30.0


class SaveUse(Job):
    """Appends the order in which rows were used since the last time to the journal."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self._journal = core.journal
        rows = np.unique(np.concatenate(core.touched))
        core.touched.clear()
        rows = rows[(core.index.flags[rows] & DISK) != 0]
        stamps = core.index.last_use[rows]
        order = np.argsort(stamps)
        self._records = events.touch_records(rows[order], stamps[order])

    def run(self) -> None:
        self._journal.append(self._records)

    def finish(self) -> None:
        """Nothing was taken."""


class Flush(Job):
    """Makes everything written so far survive power loss, and notes in the journal that it does."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self._core = core
        self._covered = core.covered_generation()

    def run(self) -> None:
        core = self._core
        core.engine.flush()
        mark = events.blank(1, events.Kind.SYNC)
        mark["generation"] = self._covered
        # The mark may reach the disk only after what it vouches for; it follows the engine's sync
        # and goes down with the journal records of the same rows.
        core.journal.sync(core.journal.append(mark))

    def finish(self) -> None:
        if self.failure is None:
            self._core.synced_generation = max(self._core.synced_generation, self._covered)
        else:
            lose_unsynced(self._core, self.failure)


def lose_unsynced(core: Core, failure: KVStoreError) -> None:
    """Turn everything written since the last good sync into misses; take no more writes.

    After a failed sync the kernel may call the next one good although the bytes are gone, so
    neither the rows nor the engine can be trusted until the store is opened again.
    """
    index = core.index
    rows = index.rows_of(None)
    flags = index.flags[rows]
    doubtful = ((flags & DISK) != 0) & ((flags & DURABLE) == 0)
    doubtful &= index.generations[rows] > core.synced_generation
    lost = rows[doubtful]
    log.error(
        "a sync failed (%s): %d blocks written since the last one are lost", failure, len(lost)
    )
    core.queue(retire(core, lost)[0])
    core.stop_writes(f"a sync failed: {failure.message}")


class Step(Job):
    """One step of a longer work: ``act`` in a worker, then ``after`` on the owner thread."""

    def __init__(self, act: Callable[[], None], after: Callable[[Step], None]) -> None:
        super().__init__()
        self._act, self._after = act, after

    def run(self) -> None:
        self._act()

    def finish(self) -> None:
        self._after(self)


class Checkpoint:
    """Rewrites the index as one file while the store serves.

    First the journal goes on in a new file. Then everybody who was under way at that moment is
    awaited: their records may lie in the old file while the index does not show them yet. Then the
    rows are described in slices, each whenever its turn comes: whatever changed since is in the new
    journal, and replaying it over later rows changes nothing. Only when the checkpoint is durable
    do the files before it go.
    """

    def __init__(self, core: Core, done: Callable[[bool], None]) -> None:
        self._core = core
        self._done = done
        self._next_row = 0
        self._waiting = 0
        self._writer: CheckpointWriter | None = None
        self._queue(self._rotate, self._rotated)

    def _queue(self, act: Callable[[], None], after: Callable[[], None]) -> None:
        def finished(step: Step) -> None:
            if step.failure is None:
                after()
            else:
                self._give_up()

        self._core.queue(Step(act, finished))

    def _give_up(self) -> None:
        if self._writer is not None:
            self._writer.abandon()
        self._done(False)

    def _rotate(self) -> None:
        core = self._core
        core.journal.rotate()
        self._writer = CheckpointWriter(
            core.journal.directory, core.journal.sequence, core.uuid, core.record.epoch
        )

    def _rotated(self) -> None:
        under_way = [job for job in self._core.active if not isinstance(job, Step)]
        self._waiting = len(under_way) + 1
        for job in under_way:
            job.when_done(self._one_less)
        self._one_less()

    def _one_less(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            self._slice()

    def _slice(self) -> None:
        core, start = self._core, self._next_row
        if start >= core.index.row_limit:
            self._last_slice()
            return
        self._next_row = start + SLICE_ROWS
        rows = core.index.rows_between(start, self._next_row)
        records = versions.records(core.index, core.namespaces, rows, events.Kind.PUT)
        flags = core.index.flags[rows]
        ghost, there = (flags & GHOST) != 0, (flags & DISK) != 0
        records["kind"][~there] = events.Kind.LEFTOVER
        records["kind"][ghost] = events.Kind.GHOST
        self._write(records, self._slice)

    def _last_slice(self) -> None:
        """Versions that wait for their readers are named too, or a kill would leave them behind."""
        waiting = [removal.frees for removal in self._core.waiting_removals]
        records = np.concatenate([events.blank(0, events.Kind.LEFTOVER), *waiting])
        records["kind"] = events.Kind.LEFTOVER
        pins = events.blank(len(self._core.index.pins), events.Kind.PIN)
        pins["row"] = list(self._core.index.pins)
        pins["last_use"] = [int(until * 1e6) for until in self._core.index.pins.values()]
        mark = events.blank(1, events.Kind.SYNC)
        mark["generation"] = self._core.synced_generation
        self._write(np.concatenate([records, pins, mark]), self._complete)

    def _write(self, records: events.Records, after: Callable[[], None]) -> None:
        writer = self._writer
        assert writer is not None
        self._queue(lambda: writer.append(records), after)

    def _complete(self) -> None:
        writer, core = self._writer, self._core
        assert writer is not None

        def end() -> None:
            # The rows may speak of records that are only in the kernel; so may the journal that
            # this checkpoint replaces, hence nothing is lost by not syncing the engine here.
            writer.finish()
            remove_before(core.journal.directory, core.journal.sequence)

        def ended() -> None:
            core.checkpoint_bytes = writer.bytes
            core.journal_bytes_before = 0
            self._done(True)

        self._queue(end, ended)


class Upkeep:
    """Decides once a second what is due, and queues it as chores."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._checkpoint: Checkpoint | None = None
        self._retry_at = 0.0
        self._giving: Removal | None = None
        self._free_before = 0

    def tick(self, now: float) -> None:
        """Queue what is due. ``now`` is in seconds of any steady clock."""
        core = self._core
        usage = core.usage()
        if core.read_only:
            return
        if core.touched:
            core.queue(SaveUse(core))
        if self._checkpoint_due() and now >= self._retry_at:
            self._retry_at = now + RETRY_SECONDS
            self._checkpoint = Checkpoint(core, self._checkpointed)
        surplus = core.space.floor_surplus(usage)
        if surplus and self._giving is None:
            self._give_back(surplus, usage.free)

    def _checkpoint_due(self) -> bool:
        core = self._core
        written = core.journal.end + core.journal_bytes_before
        return self._checkpoint is None and written > max(
            MIN_JOURNAL_BYTES, core.checkpoint_bytes // 2
        )

    def checkpoint_now(self) -> None:
        """Write a checkpoint whether due or not, unless one is under way."""
        if self._checkpoint is None:
            self._checkpoint = Checkpoint(self._core, self._checkpointed)

    def _checkpointed(self, good: bool) -> None:
        self._checkpoint = None
        if good:
            self._retry_at = 0.0

    def _give_back(self, surplus: int, free: int) -> None:
        """Evict one batch because the filesystem has less free than it should."""
        victims = choose_victims(self._core, min(surplus, FLOOR_BATCH_BYTES))
        if not len(victims):
            self._core.space.gave_nothing()
            return
        self._giving = evict(self._core, victims)
        self._core.space.gave(self._giving.bytes)
        self._free_before = free
        self._giving.when_done(self._gave)
        self._core.queue(self._giving)
        log.warning("free space is below the floor: evicting %d blocks", self._giving.count)

    def _gave(self) -> None:
        self._giving = None
        if self._core.usage().free <= self._free_before:
            self._core.space.gave_nothing()

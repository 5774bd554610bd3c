"""What an open store does by itself: saves the order of use, writes checkpoints, frees space."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from kvstore import events, memo, quota, versions
from kvstore.checkpoint import CheckpointWriter, remove_before
from kvstore.index import DISK, GHOST
from kvstore.job import Job, Step
from kvstore.removal import choose_victims, evict

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.core import Core, Measured
    from kvstore.errors import KVStoreError
    from kvstore.removal import Removal

log = logging.getLogger(__name__)

SLICE_ROWS = 8192
"""Rows described for a checkpoint at a time: about 2 ms of the owner thread."""
MIN_JOURNAL_BYTES = 1 << 20
EVICT_BATCH_BYTES = 256 << 20
EVICT_BATCH_BLOCKS = 1024
RETRY_SECONDS = 5.0
CHECKPOINT_RETRY_SECONDS = 30.0


class SaveUse(Job):
    """Appends the order in which rows were used since the last time to the journal."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self.done = False
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
        self.done = True


class Flush:
    """A barrier: when it is answered without failure, all that was put before survives power loss,
    but what :meth:`Writer.take_errors` returns."""

    def __init__(self, core: Core) -> None:
        self.failure: KVStoreError | None = None
        self._core = core
        self._done = False
        self._answered: list[Callable[[], None]] = []
        core.writer.when_clean(self._sync)

    def when_answered(self, callback: Callable[[], None]) -> None:
        """Call back on the owner thread when it is over; at once if it is."""
        if self._done:
            callback()
        else:
            self._answered.append(callback)

    def _sync(self) -> None:
        job = Sync(self._core)
        job.when_done(lambda: self._end(job))
        self._core.queue(job)

    def _end(self, job: Sync) -> None:
        self.failure = job.failure
        self._done = True
        for callback in self._answered:
            callback()


class Sync(Job):
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


class DeleteLeftovers(Job):
    """Deletes the versions that a kill left between journal and engine."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        assert core.leftovers is not None
        self._core = core
        self._leftovers = core.leftovers

    def run(self) -> None:
        engine = self._core.engine
        found = sum(engine.delete_many(one) for one in versions.blocks_of(self._leftovers))
        if found:
            log.info("deleted %d versions left over by a kill", found)

    def finish(self) -> None:
        """Forget them; those that could not be deleted go into the next checkpoint instead."""
        if self.failure is None:
            self._core.leftovers = None


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
        self._steps: set[Step] = set()
        self._queue(self._rotate, self._rotated)

    def _queue(self, act: Callable[[], None], after: Callable[[], None]) -> None:
        def finished(step: Step) -> None:
            self._steps.discard(step)
            if step.failure is not None:
                self._give_up()
                return
            try:
                after()
            except Exception:
                # The outermost frame of this task: the next attempt comes later.
                log.exception("a checkpoint failed")
                self._give_up()

        step = Step(act, finished)
        self._steps.add(step)
        self._core.queue(step)

    def _give_up(self) -> None:
        if self._writer is not None:
            self._writer.abandon()
        self._done(False)

    def _rotate(self) -> None:
        core = self._core
        if not core.rotated:
            # After a checkpoint that failed, the journal it began still serves.
            before = core.journal.physical_bytes
            core.journal.rotate()
            core.rotated = True
            core.journal_bytes_before += before
        self._writer = CheckpointWriter(
            core.journal.directory, core.journal.sequence, core.uuid, core.record.epoch
        )

    def _rotated(self) -> None:
        under_way = self._core.active - self._steps
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
        waiting = rows[~there & ~ghost & (core.index.children[rows] > 0)]
        more = versions.stand_ins(core.index, core.namespaces, waiting)
        self._write(np.concatenate([records, more]), self._slice)

    def _last_slice(self) -> None:
        """Versions that wait for their readers are named too, or a kill would leave them behind."""
        core = self._core
        owed = [removal.frees for removal in (*core.waiting_removals, *core.stuck)]
        if core.leftovers is not None:
            owed.append(core.leftovers)
        records = np.concatenate([events.blank(0, events.Kind.LEFTOVER), *owed])
        records["kind"] = events.Kind.LEFTOVER
        pins = versions.pins(core.index, np.array(list(core.index.pins), np.uint32))
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
        learned, memo_bytes = memo.capture(core), []

        def end() -> None:
            # The checkpoint drops the FREE records of blocks that were deleted: first their
            # deletion itself must survive power loss, or a scan would bring them back.
            core.engine.flush()
            writer.finish()
            remove_before(core.journal.directory, core.journal.sequence)
            memo_bytes.append(memo.save(core.path, learned))

        def ended() -> None:
            core.checkpoint_bytes = writer.bytes + sum(memo_bytes)
            core.journal_bytes_before = 0
            core.rotated = False
            self._done(True)

        self._queue(end, ended)


class Upkeep:
    """Decides once a second what is due, and queues it as chores."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._checkpoint: Checkpoint | None = None
        self._checkpoint_at = 0.0
        self._retry_at: float | None = None
        self._measuring = False
        self._saving: SaveUse | None = None
        self._evicting: Removal | None = None

    def tick(self, now: float) -> None:
        """Queue what is due. ``now`` is in seconds of any steady clock."""
        core = self._core
        self._measure()
        if self._retry_at is None or now >= self._retry_at:
            if self._retry_at is not None:
                self._try_again()
            self._retry_at = now + RETRY_SECONDS
        if core.read_only:
            core.touched.clear()
            return
        core.late.tick(now)
        if core.touched and (self._saving is None or self._saving.done):
            # One at a time: with a disk that hangs they would take all workers.
            self._saving = SaveUse(core)
            core.queue(self._saving)
        if self._checkpoint_due() and now >= self._checkpoint_at:
            self._checkpoint_at = now + CHECKPOINT_RETRY_SECONDS
            self.checkpoint_now()
        self.make_room()
        quota.trim(core)
        if core.excess:
            core.rooms.shrink()

    # -- figures ----------------------------------------------------------------------------------

    def _measure(self) -> None:
        """Have a worker ask for figures: a disk that hangs must not hang the owner thread."""
        if self._measuring:
            return
        found: list[Measured] = []

        def act() -> None:
            found.append(self._core.measure())

        def after(step: Step) -> None:
            self._measuring = False
            self._core.trouble = step.failure.message if step.failure is not None else ""
            if found:
                self._core.take(found[0])

        self._measuring = True
        self._core.queue(Step(act, after))

    # -- what did not work the first time ---------------------------------------------------------

    def _try_again(self) -> None:
        core = self._core
        if core.retry is not None:
            core.retry()
        if core.read_only:
            return
        stuck, core.stuck = core.stuck, []
        for removal in stuck:
            core.queue(removal)
        if core.leftovers is not None:
            core.queue(DeleteLeftovers(core))

    # -- checkpoints ------------------------------------------------------------------------------

    def _checkpoint_due(self) -> bool:
        core = self._core
        written = core.journal.end + core.journal_bytes_before
        return core.checkpoint_due or written > max(MIN_JOURNAL_BYTES, core.checkpoint_bytes // 2)

    def checkpoint_now(self) -> None:
        """Write a checkpoint whether due or not, unless one is under way."""
        if self._checkpoint is None:
            self._checkpoint = Checkpoint(self._core, self._checkpointed)

    def _checkpointed(self, good: bool) -> None:
        self._checkpoint = None
        if good:
            self._core.checkpoint_due = False
            self._checkpoint_at = 0.0

    # -- room -------------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Evict a batch, and the next when it is done, down to the low watermark or for the floor.

        Puts evict only what they need themselves, so that none of them waits for more.
        """
        core = self._core
        if self._evicting is not None or not core.may_evict:
            return
        usage = core.usage()
        floor = core.space.floor_surplus(usage)
        surplus = core.space.above_low(usage) if core.trim_due else 0
        victims = choose_victims(core, min(max(floor, surplus), EVICT_BATCH_BYTES))
        victims = victims[:EVICT_BATCH_BLOCKS]
        if not len(victims):
            core.trim_due = False
            if floor:
                core.space.gave_nothing()
            return
        removal = evict(core, victims)
        if floor:
            core.space.gave(removal.bytes)
            log.warning("free space is below the floor: evicting %d blocks", removal.count)
        self._evicting = removal
        removal.when_done(self._evicted)
        core.queue(removal)

    def _evicted(self) -> None:
        failed, self._evicting = bool(self._core.stuck), None
        if not failed:
            self.make_room()


def fit(core: Core) -> None:
    """Announce what a smaller capacity leaves no room for; it leaves in the background."""
    usage = core.usage()
    if core.read_only or not core.may_evict or usage.live <= core.space.high(usage.overhead):
        return
    victims = choose_victims(core, core.space.above_low(usage))
    size = int(core.index.record_bytes(core.index.sizes[victims]).sum())
    log.warning("will evict %d blocks, %d bytes, to fit the capacity", len(victims), size)
    core.trim_due = True

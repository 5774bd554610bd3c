"""Deferred writes: from the memory of a put to engine and journal.

Entries wait in a bounded queue, in the order in which they came; a few batches are written at a
time, each at once while the disk keeps up. With ``write = late`` blocks that are accepted do not
enter the queue before they must (:mod:`kvstore.late`).

Order of writes, and why. Parents that the engine does not have are named first, or a kill would cut
the links to them. The victims' FREE records follow, then their bytes leave the disk, so the disk
never holds more than it may. A BEGIN record in the journal precedes each record's bytes: a
kill in between leaves a version that the next opening can name and remove without a scan. The PUT
record follows the engine's commit, so the journal never promises bytes that are not there; the
answer follows the PUT record, so what was acknowledged as written is found again. A sync, where
asked for, covers the data first and then the journal.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore import events, versions
from kvstore.answers import BlockStatus
from kvstore.backends.base import Status
from kvstore.errors import KVStoreError, StoreFull
from kvstore.index import DIRTY, DISK, MEM
from kvstore.job import Job, Step
from kvstore.removal import forget, make_room, supersede

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.backends.base import U32, U64
    from kvstore.core import Core
    from kvstore.entry import Entry, Waiter
    from kvstore.events import Records
    from kvstore.removal import Removal

log = logging.getLogger(__name__)

BATCH_BYTES = 32 << 20
BATCHES = 2
"""Batches being written at a time: one fills the disk while the other is hashed and journaled."""
CAPACITY_PARTS = 32
"""What is being written at a time is at most this part (1/n) of the capacity."""
DIRTY_SHARE = 4
"""Dirty blocks take at most this part (1/n) of the memory tier."""
DIRTY_SECONDS = 10.0
"""... and at most what the disk takes in so many seconds, as measured."""
PAUSE_SECONDS = 0.05
"""What was accepted waits so long before it is written: a burst of puts has the processor first."""
MAX_ERRORS = 4096
_RATE_WEIGHT = 0.2

_ANSWER = np.full(256, BlockStatus.FAILED, np.uint8)
_ANSWER[Status.OK] = BlockStatus.OK
_ANSWER[Status.FULL] = BlockStatus.FULL


@dataclass(frozen=True, slots=True)
class LateError:
    """A block that was accepted and could not be written. ``namespace`` and ``key`` in hex."""

    namespace: str
    shard: int
    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Watch:
    waiter: Waiter
    position: int
    durable: bool
    again: bool


class Writer:
    """The queue of one store. Owner thread only."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._queue: deque[Entry] = deque()
        self._under_way: set[Entry] = set()
        self._writing = 0
        self._writing_bytes = 0
        self._watches: dict[tuple[int, int], list[_Watch]] = {}
        self._barriers: list[tuple[set[Entry], Callable[[], None]]] = []
        self._rate = 0.0
        self._pauses = False
        self.dirty_bytes = 0
        self.dirty_blocks = 0
        self.errors: list[LateError] = []
        self.errors_lost = 0

    @property
    def dirty_limit(self) -> int:
        """Bytes that may be in memory only: a share of it, and no more than the disk takes soon."""
        share: int = self._core.tier.capacity // DIRTY_SHARE
        return min(share, int(self._rate * DIRTY_SECONDS)) if self._rate else share

    @property
    def queued_blocks(self) -> int:
        return sum(len(entry.rows) for entry in self._under_way)

    @property
    def oldest_generation(self) -> int:
        """The lowest generation that is still on its way; beyond all others if there is none."""
        oldest = [int(entry.begins["generation"].min()) for entry in self._under_way]
        return min(oldest, default=1 << 63)

    def has_room(self, sizes: np.ndarray) -> np.ndarray:
        """Tell for each block, in order, whether it may become dirty now (image bytes)."""
        room: np.ndarray = np.cumsum(sizes) + self.dirty_bytes <= self.dirty_limit
        return room

    def hold(self, rows: U32, old: U64) -> np.ndarray:
        """Hold rows that are to be renewed until they are: nobody else gets their ids meanwhile.

        Returns which do not have their ``old`` version any more, deleted or found damaged.
        """
        there = self._core.index.holds(rows, old)
        self._core.index.acquire(rows[there])
        return ~there

    def add(self, entry: Entry) -> None:
        """Take an entry; it is written as soon as a batch is free, or late if it may be."""
        if entry.dirty:
            self.dirty_bytes += entry.bytes
            self.dirty_blocks += len(entry.rows)
        if self._core.late.on and entry.dirty and entry.waiter is None:
            self._core.late.add(entry)
        else:
            self._under_way.add(entry)
            self._queue.append(entry)
            timer = self._core.timer
            if timer is None or not entry.dirty or entry.waiter is not None:
                self.pump()
            elif not self._pauses:
                self._pauses = True
                timer(PAUSE_SECONDS, self._end_pause)

    def _end_pause(self) -> None:
        self._pauses = False
        self.pump()

    def go_on(self, entries: list[Entry]) -> None:
        """Queue entries that have waited. Their writing begins a little later: whoever calls may be
        in the middle of a put or of making room, when nothing else may be evicted."""
        if entries:
            self._under_way.update(entries)
            self._queue.extend(entries)
            self._core.queue(Step(lambda: None, lambda _: self.pump()))

    def postpone(self, entry: Entry, part: Entry) -> None:
        """Have whoever waits for an entry wait for a part of it, too, that comes later."""
        self._under_way.add(part)
        for waited, _ in self._barriers:
            if entry in waited:
                waited.add(part)

    def note_not_dirty(self, entry: Entry) -> None:
        """Note that the blocks of an entry are not dirty any more."""
        self.dirty_bytes -= entry.bytes
        self.dirty_blocks -= len(entry.rows)

    def pump(self) -> None:
        """Begin batches. Their victims leave before they come, so all that are under way at a time
        are a small part of the capacity, or a single entry."""
        share = min(BATCH_BYTES, self._core.space.capacity // CAPACITY_PARTS)
        while self._queue and self._writing < BATCHES:
            if self._writing and self._writing_bytes + self._queue[0].bytes > share:
                return
            batch = [self._queue.popleft()]
            size = batch[0].bytes
            while self._queue and self._writing_bytes + size + self._queue[0].bytes <= share:
                size += self._queue[0].bytes
                batch.append(self._queue.popleft())
            self._writing += 1
            self._writing_bytes += size
            self._core.queue(Write(self._core, batch))

    def watch(
        self, row: int, waiter: Waiter, position: int, *, durable: bool, again: bool = False
    ) -> None:
        """Have ``waiter`` told when the row, which is on its way, has been written."""
        # The version too: when it has left, the row may come to hold another block.
        self._core.late.hasten(np.array([row], np.uint32))
        version = row, int(self._core.index.generations[row])
        self._watches.setdefault(version, []).append(_Watch(waiter, position, durable, again))

    def when_clean(self, callback: Callable[[], None]) -> None:
        """Call back when all that was added so far is written or given up; at once if it is."""
        self._core.late.hasten_all()
        self.pump()
        if self._under_way:
            self._barriers.append((set(self._under_way), callback))
        else:
            callback()

    def take_errors(self, may_hear: Callable[[str], bool] = lambda _: True) -> list[LateError]:
        """Return what failed since the last call, of the namespaces (ids in hex) that ``may_hear``
        names; the rest stays."""
        told = [error for error in self.errors if may_hear(error.namespace)]
        self.errors = [error for error in self.errors if not may_hear(error.namespace)]
        return told

    # -- called by Write --------------------------------------------------------------------------

    def wants_sync(self, entry: Entry) -> bool:
        """Tell whether the entry, or somebody who watches one of its rows, asks for durability.

        A new version of what is durable must be so too before the old one goes, or a power loss
        would take both. So it is when blocks are moved.
        """
        if entry.renews and self._core.perhaps_durable(entry.rows, entry.old).any():
            return True
        return entry.durable or any(
            watch.durable for one in entry.watched for watch in self._watches.get(one, ())
        )

    def written(self, entries: list[Entry], size: int, seconds: float) -> None:
        """Bring entries of ``size`` bytes home: answer those who wait, go on with the queue."""
        self._writing -= 1
        self._writing_bytes -= size
        rate = size / max(seconds, 1e-6)
        self._rate += _RATE_WEIGHT * (rate - self._rate) if self._rate else rate
        for entry in entries:
            self._under_way.discard(entry)
            if entry.dirty:
                self.note_not_dirty(entry)
            self._answer(entry)
        self._lift_barriers(entries)
        self.pump()

    def _answer(self, entry: Entry) -> None:
        found = _ANSWER[entry.statuses]
        if len(entry.gone):
            found[entry.gone] = BlockStatus.BUSY
        answers = found.tolist()
        if entry.waiter is not None:
            for position, status in zip(entry.positions, answers, strict=True):
                entry.waiter.settle_row(position, status, again=False)
        else:
            self._note_errors(entry)
        for version, status in zip(entry.watched, answers, strict=True):
            there = BlockStatus.ALREADY_PRESENT if status == BlockStatus.OK else status
            for watch in self._watches.pop(version, ()):
                watch.waiter.settle_row(watch.position, there, again=watch.again)

    def _note_errors(self, entry: Entry) -> None:
        blocks = entry.blocks
        for number in np.flatnonzero(entry.statuses != Status.OK).tolist():
            if len(self.errors) >= MAX_ERRORS:
                # The oldest goes: its owner may never ask, and must not keep others from hearing.
                self.errors.pop(0)
                self.errors_lost += 1
            reason = entry.reason or Status(entry.statuses[number]).name.lower()
            key = blocks.keys[number].tobytes().hex()
            self.errors.append(LateError(blocks.namespace.hex(), blocks.shard, key, reason))

    def _lift_barriers(self, entries: list[Entry]) -> None:
        lifted = []
        for barrier in self._barriers:
            barrier[0].difference_update(entries)
            if not barrier[0]:
                lifted.append(barrier)
        for barrier in lifted:
            self._barriers.remove(barrier)
            barrier[1]()


class Write(Job):
    """Writes a batch of entries to engine and journal."""

    def __init__(self, core: Core, entries: list[Entry]) -> None:
        super().__init__()
        self._core = core
        self._entries = entries
        self._bytes = sum(entry.bytes for entry in entries)
        self._seconds = 0.0
        self._removals: list[Removal] = []
        self._coming = 0
        self._skip: list[np.ndarray] = []
        for entry in entries:
            self._begin(entry)
        rows = np.concatenate([entry.rows for entry in entries])[~np.concatenate(self._skip)]
        self._parents = versions.parents(core.index, core.namespaces, rows)
        self._refused = not self._make_room()
        self._synced = [core.writer.wants_sync(entry) for entry in entries]

    def _begin(self, entry: Entry) -> None:
        """Leave out blocks that were deleted while they waited; hold the others in their place."""
        index = self._core.index
        if entry.renews:  # held already
            there = np.ones(len(entry.rows), np.bool_)
        else:
            there = index.holds(entry.rows, entry.begins["generation"])
            index.acquire(entry.rows[there])
            # They may have been used while they waited.
            entry.begins["last_use"][there] = index.last_use[entry.rows[there]]
        self._skip.append(~there)
        entry.statuses = np.where(there, Status.FAILED, Status.OK).astype(np.uint8)
        entry.written = np.zeros(len(entry.rows), np.uint64)

    def _make_room(self) -> bool:
        """Reserve space, choosing victims if need be; False when there is none to be had."""
        core = self._core
        need = sum(self._need(entry) for entry in self._entries)
        try:
            removals = None if core.read_only else make_room(core, need)
        except KVStoreError as error:
            log.warning("no room could be made: %s", error)
            return False
        if removals is None:
            return not need
        self._removals, self._coming = removals, need
        core.coming += need
        return True

    def _need(self, entry: Entry) -> int:
        lengths = entry.blocks.lengths[entry.statuses != Status.OK]
        return 0 if entry.moves else int(self._core.engine.record_bytes_of(lengths).sum())

    # -- run: in a worker -------------------------------------------------------------------------

    def run(self) -> None:
        started = time.monotonic()
        core = self._core
        if self._refused:
            for entry, skip in zip(self._entries, self._skip, strict=True):
                entry.statuses[~skip] = Status.FULL
            return
        # Before anything slow: a ghost that is put meanwhile must not be called a ghost after that.
        # On a full disk there may be room for it only when the victims have gone.
        parents = self._parents
        with contextlib.suppress(StoreFull):
            core.journal.append(parents)
            parents = parents[:0]
        for removal in self._removals:
            removal.run()
        for entry in self._entries:
            self._save_key_length(entry)
        begins = [
            entry.begins[~skip] for entry, skip in zip(self._entries, self._skip, strict=True)
        ]
        core.journal.append(np.concatenate([parents, *begins]))
        puts = [self._write(number) for number in range(len(self._entries))]
        self._promise(np.concatenate(puts))
        self._seconds = time.monotonic() - started

    def _save_key_length(self, entry: Entry) -> None:
        """Keep the length beside the record of the namespace, before its first block."""
        namespace, length = entry.namespace, entry.blocks.keys.shape[1]
        if namespace.key_length not in (None, length):
            self._core.namespaces.forget(namespace)
        self._core.namespaces.set_key_length(namespace, length)

    def _write(self, number: int) -> Records:
        """Hand one entry to the engine; return its PUT records."""
        entry, wanted = self._entries[number], ~self._skip[number]
        images = [image for image, want in zip(entry.images, wanted, strict=True) if want]
        blocks = entry.blocks if wanted.all() else entry.blocks.take(wanted)
        written = self._core.engine.put_many(blocks, images, sync=self._synced[number])
        entry.statuses[wanted] = written.statuses
        entry.written[wanted] = written.places
        ok = wanted & (entry.statuses == Status.OK)
        puts: Records = entry.begins[ok].copy()
        puts["kind"] = events.Kind.PUT
        puts["place"] = entry.written[ok]
        return puts

    def _promise(self, puts: Records) -> None:
        core = self._core
        try:
            end = core.journal.append(puts)
        except StoreFull:
            # Nothing was written, and the journal goes on: take the bytes back, so that memory,
            # journal and disk agree that these writes failed.
            for entry, skip in zip(self._entries, self._skip, strict=True):
                ok = ~skip & (entry.statuses == Status.OK)
                core.engine.delete_many(entry.blocks.at(entry.written).take(ok))
                entry.statuses[~skip] = Status.FAILED
            raise
        # Where the journal fails otherwise it may hold some of them, and what it holds the engine
        # must hold. They have failed for who waits; the next opening finds them, or deletes what
        # was begun and not promised.
        if any(self._synced):
            core.journal.sync(end)

    # -- finish: on the owner thread --------------------------------------------------------------

    def finish(self) -> None:
        core = self._core
        core.coming -= self._coming
        for number, entry in enumerate(self._entries):
            if self.failure is not None:
                entry.statuses[~self._skip[number]] = Status.FAILED
                entry.reason = self.failure.message
            skip = core.rooms.split(entry, self._skip[number])
            self._finish(entry, skip, synced=self._synced[number])
        for removal in self._removals:
            removal.finish()
        if any((entry.statuses == Status.FULL).any() for entry in self._entries):
            core.note_full()
        core.writer.written(self._entries, self._bytes, self._seconds)
        core.rooms.make()

    def _finish(self, entry: Entry, skip: np.ndarray, *, synced: bool) -> None:
        core, index = self._core, self._core.index
        generations = entry.begins["generation"]
        held, ok = ~skip, ~skip & (entry.statuses == Status.OK)
        bad = held & ~ok
        core.end_writing(entry.rows, entry.waiter)
        if entry.renews:
            self._renew(entry, ok)
        else:
            core.release(entry.rows[held], generations[held])
            index.commit(entry.rows[ok], generations[ok], entry.written[ok])
            if index.pins:
                # The journal did not know these rows when they were pinned.
                core.save_pins(entry.rows[ok & np.isin(entry.rows, list(index.pins))])
            if entry.dirty:
                # What the disk refused can be read as long as memory keeps it.
                still = bad & index.holds(entry.rows, generations)
                index.clear_flags(entry.rows[still], DIRTY)
            else:
                index.abort(entry.rows[bad])
                core.publish_stored(entry.rows[ok])
        if synced:
            kept = ok & index.holds(entry.rows, generations)
            core.note_durable(entry.rows[kept])
        if entry.leaves:
            self._leave_memory(entry, ok & index.holds(entry.rows, generations))
        core.counters.written_bytes += int(entry.blocks.lengths[ok].sum())
        core.bounce.release(entry.extents)

    def _leave_memory(self, entry: Entry, written: np.ndarray) -> None:
        """Give up the copies in memory, unless they were used meanwhile; this counts as a use."""
        core, rows = self._core, entry.rows
        rows = rows[written & (core.index.last_use[rows] == entry.begins["last_use"])]
        core.tier.drop(rows)
        core.index.clear_flags(rows, MEM)
        core.touch(rows[np.argsort(core.index.last_use[rows])[::-1]], asked=False)

    def _renew(self, entry: Entry, ok: np.ndarray) -> None:
        """Let rows hold the versions just written; the old ones go when their readers have gone."""
        core, rows, index = self._core, entry.rows, self._core.index
        old = entry.old
        there = ok & index.holds(rows, old) & ((index.flags[rows] & DISK) != 0)
        core.release(rows, old)
        new = entry.begins[there]
        supersede(core, rows[there], new, entry.written[there], moved=entry.moves)
        entry.gone = ok & ~there
        if entry.gone.any():
            # Deleted or found damaged meanwhile: what was written must not come back with the
            # journal. Whoever put it may do so again, to a row of its own.
            gone = entry.gone
            forget(core, entry.begins[gone], entry.blocks.at(entry.written).take(gone))

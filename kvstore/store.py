"""The front door of an open store: put, get, contains, delete, evict, flush, list, status.

One thread owns a Store. Questions of the index are answered at once; everything that needs the disk
comes back as a :class:`~kvstore.job.Job`, begun, for the caller to have performed by a worker and
to hand to :meth:`Store.finish` afterwards. :meth:`Store.run` does all of that in place. Whoever
drives the store also takes the jobs out of :attr:`Store.chores` and performs them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from kvstore import events, memo, node, parity, versions
from kvstore.answers import BlockStatus
from kvstore.errors import EngineError
from kvstore.get import Get, Warm
from kvstore.incoming import Incoming
from kvstore.keys import space_number
from kvstore.put import Put
from kvstore.removal import Removal, choose_victims, evict, heed_failures, retire
from kvstore.scrub import Scrub
from kvstore.upkeep import Flush, SaveUse, Upkeep
from kvstore.writer import MAX_ERRORS

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Sequence

    from kvstore.backends.base import U8, U32
    from kvstore.batch import PutRequest
    from kvstore.core import Core, Watcher
    from kvstore.job import Job
    from kvstore.keys import KeyArray
    from kvstore.layout import Lock
    from kvstore.namespaces import Namespace
    from kvstore.slab import Extent
    from kvstore.writer import LateError


class Subscription:
    """Somebody's interest in a namespace; ``next_sequence`` is the number of the next event."""

    def __init__(self, core: Core, number: int, watcher: Watcher) -> None:
        self._core, self._number, self._watcher = core, number, watcher
        self.next_sequence = core.sequences.get(number, 1)
        core.watchers.setdefault(number, []).append(watcher)

    def close(self) -> None:
        """End it. May be called twice."""
        watchers = self._core.watchers.get(self._number, [])
        if self._watcher in watchers:
            watchers.remove(self._watcher)
        if not watchers:
            self._core.watchers.pop(self._number, None)


LEASE_SHARE = 4
"""Leases keep at most this part (1/n) of the capacity from eviction."""
PIN_SHARE = 4
"""Pins keep at most this part (1/n) of the capacity from eviction."""


class Store:
    """An open store. Made by :func:`kvstore.opening.open_store`."""

    def __init__(self, core: Core, lock: Lock) -> None:
        self.core = core
        self._lock = lock
        self._upkeep = Upkeep(core)
        self.scrub = Scrub(core, core.scrub_rate)
        self.incoming = Incoming(core)
        self._opened = time.monotonic()
        self._disk_checksums = node.checksums_data(core.path / core.record.blocks)

    # -- jobs -------------------------------------------------------------------------------------

    @property
    def chores(self) -> deque[Job]:
        """Begun jobs that nobody waits for and somebody must perform."""
        return self.core.chores

    def finish(self, job: Job) -> None:
        """Bring a performed job home."""
        self.core.finish(job)
        heed_failures(self.core)

    def run(self, job: Job) -> None:
        """Perform a job in place, and the chores that are there or follow from it.

        Raises the failure of the job.
        """
        job.perform()
        self.finish(job)
        self.run_chores()
        if job.failure is not None:
            raise job.failure

    def run_chores(self) -> None:
        while self.chores:
            job = self.chores.popleft()
            job.perform()
            self.finish(job)

    def tick(self) -> None:
        """Queue what is due; call it once a second."""
        now = time.monotonic()
        self._upkeep.tick(now)
        self.scrub.tick(now)
        self.incoming.tick(now)

    def checkpoint(self) -> None:
        """Queue the writing of a checkpoint, due or not."""
        self._upkeep.checkpoint_now()

    def make_room(self) -> None:
        """Queue what eviction is due, in batches, until the low watermark is reached."""
        self._upkeep.make_room()

    # -- blocks -----------------------------------------------------------------------------------

    def put(
        self,
        request: PutRequest,
        sources: Sequence[memoryview],
        received: list[Extent | None] | None = None,
    ) -> Put:
        """Begin a put; see :class:`~kvstore.put.Put`. Raises InvalidKey, ReadOnly, Busy."""
        job = Put(self.core, request, sources, received)
        self.core.begin(job)
        return job

    def get(
        self,
        namespace: Namespace,
        shard: int,
        keys: KeyArray,
        budget: int,
        targets: Sequence[memoryview] | None = None,
    ) -> Get:
        """Begin a get; see :class:`~kvstore.get.Get`. Raises Busy."""
        job = Get(self.core, namespace, shard, keys, budget, targets)
        self.core.begin(job)
        return job

    def warm(self, namespace: Namespace, shard: int, keys: KeyArray, budget: int) -> Warm:
        """Begin to bring blocks into memory; see :class:`~kvstore.get.Warm`. Raises Busy."""
        job = Warm(self.core, namespace, shard, keys, budget)
        self.core.begin(job)
        return job

    def contains(
        self, namespace: Namespace, shard: int, keys: KeyArray, lease_seconds: float = 0.0
    ) -> np.ndarray:
        """Return a mask: which of the keys a get would find; keep those for a while if asked."""
        rows = self.core.index.find(space_number(namespace.number, shard), keys)
        there: np.ndarray = self.core.index.readable(rows)
        self._lease(rows[there], lease_seconds)
        return there

    def prefix(
        self, namespace: Namespace, shard: int, keys: KeyArray, lease_seconds: float = 0.0
    ) -> int:
        """Return how many of the keys a get would find, up to the first that it would not."""
        rows = self.core.index.find(space_number(namespace.number, shard), keys)
        there = self.core.index.readable(rows)
        length = len(there) if there.all() else int(there.argmin())
        self._lease(rows[:length], lease_seconds)
        return length

    def _lease(self, rows: U32, seconds: float) -> None:
        """Keep rows from eviction for a while, as far as leases may take of the capacity."""
        core, now = self.core, self.core.clock.seconds()
        if seconds <= 0 or not len(rows):
            return
        room = core.space.capacity // LEASE_SHARE - core.index.leased_bytes(now)
        sizes = np.cumsum(core.index.record_bytes(core.index.sizes[rows]))
        core.index.lease(rows[sizes <= room], now + seconds)

    def touch(self, namespace: Namespace, shard: int, keys: KeyArray) -> None:
        """Note that blocks are in use, wherever their bytes are used."""
        rows = self.core.index.find(space_number(namespace.number, shard), keys)
        self.core.touch(rows[self.core.index.readable(rows)])

    def pin(
        self,
        namespace: Namespace,
        shard: int,
        keys: KeyArray,
        seconds: float,
        *,
        firm: bool = False,
    ) -> U8:
        """Keep blocks from eviction for a time; a status per key: OK, MISS, FULL past the cap.

        A ``firm`` pin is lifted and shortened by firm calls only.
        """
        core, now = self.core, self.core.clock.seconds()
        rows = core.index.find(space_number(namespace.number, shard), keys)
        statuses = np.full(len(keys), BlockStatus.MISS, np.uint8)
        room = core.space.capacity // PIN_SHARE - core.index.pinned_bytes(now)
        there = core.index.readable(rows)
        sizes = core.index.record_bytes(core.index.sizes[np.where(there, rows, 0)])
        for position in np.flatnonzero(there).tolist():
            row, size = int(rows[position]), int(sizes[position])
            if size > room and row not in core.index.pins:
                statuses[position] = BlockStatus.FULL
                continue
            room -= size if row not in core.index.pins else 0
            core.index.pin(row, now + seconds, firm=firm)
            statuses[position] = BlockStatus.OK
        core.save_pins(rows[statuses == BlockStatus.OK])
        return statuses

    def unpin(self, namespace: Namespace, shard: int, keys: KeyArray, *, firm: bool = False) -> U8:
        """Take pins back; a status per key: OK or MISS (not pinned, or firmly)."""
        index = self.core.index
        rows = index.find(space_number(namespace.number, shard), keys)
        mine = [row in index.pins and (firm or row not in index.firm_pins) for row in rows.tolist()]
        for row in rows[mine].tolist():
            index.unpin(row)
        self.core.save_pins(rows[mine])
        return np.where(mine, BlockStatus.OK, BlockStatus.MISS).astype(np.uint8)

    def subscribe(self, namespace: Namespace, watcher: Watcher) -> Subscription:
        """Have ``watcher(first sequence number, kinds, keys)`` called, on the owner thread, for
        every batch of blocks that is stored or removed."""
        return Subscription(self.core, namespace.number, watcher)

    def delete(self, namespace: Namespace, shard: int, keys: KeyArray) -> tuple[U8, list[Removal]]:
        """Begin to remove blocks by name.

        Returns a status per key (OK or MISS) and the removals that must be done before the answer;
        only the first is the caller's to perform.
        """
        rows = self.core.index.find(space_number(namespace.number, shard), keys)
        there = self.core.index.readable(rows)
        statuses = np.where(there, BlockStatus.OK, BlockStatus.MISS).astype(np.uint8)
        removals = retire(self.core, np.unique(rows[there]))
        for removal in removals:
            self.core.begin(removal)
        self.core.counters.deleted += int(there.sum())
        return statuses, removals

    def evict(self, byte_count: int) -> Removal:
        """Begin to evict blocks that take at least so many bytes, if so many may go."""
        return self.evict_rows(choose_victims(self.core, byte_count))

    def evict_rows(self, rows: U32) -> Removal:
        """Begin to evict these rows; see :func:`kvstore.plan.still` for which may go."""
        removal = evict(self.core, rows)
        self.core.begin(removal)
        return removal

    def flush(self) -> Flush:
        """Begin a barrier; see :class:`~kvstore.upkeep.Flush`. It needs chores to be performed."""
        return Flush(self.core)

    def take_errors(self, may_hear: Callable[[str], bool] = lambda _: True) -> list[LateError]:
        """Return blocks that were accepted and could not be written; each is told once. Call it
        after a flush; see :meth:`~kvstore.writer.Writer.take_errors`."""
        return self.core.writer.take_errors(may_hear)

    def keep_errors(self, errors: list[LateError]) -> None:
        """Keep what :meth:`take_errors` returned for the next who asks: nobody has heard of it."""
        writer = self.core.writer
        writer.errors = [*errors, *writer.errors][-MAX_ERRORS:]

    def list_rows(
        self, namespace: Namespace | None, start: int, limit: int
    ) -> tuple[list[tuple[str, int, str]], int | None]:
        """Return up to ``limit`` blocks as (namespace id, shard, key), hex, and where to go on.

        Blocks come in the order of their rows: none is left out that stays while a list is read.
        """
        index = self.core.index
        found: list[tuple[str, int, str]] = []
        while start < index.row_limit and len(found) < limit:
            stop = min(index.row_limit, start + limit - len(found))
            rows = index.rows_between(start, stop)
            rows = rows[index.readable(rows)]
            if namespace is not None:
                rows = rows[index.spaces[rows] >> 16 == namespace.number]
            found += [name for _, name in self.names(rows)]
            start = stop
        return found, start if start < index.row_limit else None

    def names(self, rows: U32) -> list[tuple[int, tuple[str, int, str]]]:
        """Return each row with its (namespace id, shard, key), hex; in any order."""
        return [
            (row, (blocks.namespace.hex(), blocks.shard, key.hex()))
            for part, blocks in versions.groups(self.core.index, self.core.namespaces, rows)
            for row, key in zip(part.tolist(), blocks.key_list(), strict=True)
        ]

    # -- state ------------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Return what makes the store degraded, in words; empty when it is healthy."""
        core = self.core
        found = [*core.problems, *core.stats.problems]
        if core.read_only:
            found.append(f"read-only: {core.read_only}")
        if core.trouble:
            found.append(f"the store cannot be looked at: {core.trouble}")
        if core.stuck:
            found.append(f"{sum(one.count for one in core.stuck)} blocks cannot be deleted")
        if core.suspects:
            found.append(f"{len(core.suspects)} blocks could not be read lately")
        if core.space.at_floor:
            found.append("free space of the filesystem is below the floor (min_free)")
        if core.quarantine.unacknowledged:
            found.append(
                f"{core.quarantine.unacknowledged} damaged blocks found; see quarantine/, then run "
                "kvstore scrub ack"
            )
        return found

    def status(self) -> dict[str, object]:
        """Return the figures of ``kvstore status`` that the store knows; bytes and counts."""
        core = self.core
        usage, problems = core.usage(), self.problems()
        counters = {name: getattr(core.counters, name) for name in core.counters.__slots__}
        return {
            "state": "degraded" if problems else "ready",
            "engine": core.record.engine,
            "parity": parity.KINDS[core.record.parity],
            "disk_checksums": self._disk_checksums,
            "io": core.stats.io,
            "write": "late" if core.late.on else "through",
            "store": str(core.path),
            "uuid": core.record.uuid.hex(),
            "format": core.record.format,
            "created": core.record.created,
            "opens": core.record.opens,
            "capacity_bytes": core.space.capacity,
            "used_bytes": core.physical,
            "live_bytes": usage.live,
            "min_free_bytes": core.space.floor,
            "free_bytes": usage.free,
            "blocks": core.index.blocks,
            "ghosts": core.index.ghost_count,
            "memory_capacity_bytes": core.tier.capacity,
            "memory_bytes": core.tier.bytes,
            "memory_blocks": core.tier.blocks,
            "dirty_blocks": core.writer.dirty_blocks,
            "dirty_bytes": core.writer.dirty_bytes,
            "queued_blocks": core.writer.queued_blocks,
            "quarantine_bytes": core.quarantine.bytes,
            "kept_bytes": core.kept_bytes,
            "journal_bytes": core.journal.physical_bytes
            + core.journal_bytes_before
            + core.checkpoint_bytes,
            "index_bytes_per_block": round(core.index.index_bytes_per_block, 1),
            "namespaces": len(core.namespaces),
            "pinned_blocks": len(core.index.pins),
            "pinned_bytes": core.index.pinned_bytes(core.clock.seconds()),
            **counters,
            "scrub": self.scrub.status(),
            "incoming": self.incoming.status(),
            "notes": [
                *core.stats.notes,
                *core.namespaces.problems,
                *core.namespaces.unlasting(),
                *self._kept(),
                *self.incoming.notes(),
            ],
            "problems": problems,
            "uptime_seconds": round(time.monotonic() - self._opened, 1),
        }

    def _kept(self) -> list[str]:
        """Return a note about what a change of the engine left, if it takes room."""
        kept, previous = self.core.kept_bytes, self.core.record.previous
        if not kept:
            return []
        what = f"the former blocks ({previous.engine})" if previous else "an unfinished copy"
        return [f"{what} takes {kept} bytes beside the blocks; see kvstore migrate --help"]

    # -- end --------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Save the order of use, sync everything and mark the journal as complete.

        Call it when no job is under way. A failure leaves no mark: the next opening then treats the
        store as one that was killed.
        """
        core = self.core
        self.stop_scan()
        self.run_chores()
        flush = self.flush()
        self.run_chores()
        if flush.failure is not None:
            raise flush.failure
        if errors := self.take_errors():
            raise EngineError(
                f"{len(errors) + core.writer.errors_lost} accepted blocks could not be "
                f"written, the first is {errors[0].key} ({errors[0].reason})",
                "see the log",
            )
        if core.read_only:
            return
        if core.touched:
            job: Job = SaveUse(core)
            core.begin(job)
            self.run(job)
        memo.save(core.path, memo.capture(core))
        if not core.scan_due and core.leftovers is None and not core.stuck:
            core.journal.append(events.blank(1, events.Kind.CLOSE))
            core.journal.sync()

    def stop_scan(self) -> None:
        """Give up the scan that is under way, if any; the next opening begins it anew, and goes on
        with a scrub."""
        self.scrub.hold()
        self.incoming.hold()
        if self.core.scan is not None:
            self.core.scan.cancel()

    def close(self) -> None:
        """Let go of everything. Without :meth:`drain` before, this is as if killed."""
        self.core.journal.close()
        self.core.engine.close()
        self._lock.release()

"""What an open store consists of, and the accounts that its operations share.

Owned by one thread (see :mod:`kvstore.job`); the methods marked *worker* may be called by any.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore import node, versions
from kvstore.errors import InvalidKey
from kvstore.index import DIRTY, DISK, DURABLE, GHOST, MEM, Index
from kvstore.job import Step
from kvstore.layout import INCOMING, NAMESPACES, directory_bytes
from kvstore.metrics import Counters
from kvstore.space import Space, Usage

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstore.backends.base import U8, U32, U64, Engine, Stats
    from kvstore.check import Quarantine
    from kvstore.events import Records
    from kvstore.eviction import Policy
    from kvstore.job import Job
    from kvstore.journal import Journal
    from kvstore.keys import KeyArray
    from kvstore.late import Late
    from kvstore.layout import StoreRecord
    from kvstore.namespaces import Namespace, Namespaces
    from kvstore.put import Put
    from kvstore.reconcile import Reconcile
    from kvstore.removal import Removal
    from kvstore.room import Rooms
    from kvstore.slab import Slab
    from kvstore.tier import Tier
    from kvstore.writer import Writer

    Watcher = Callable[[int, U8, KeyArray], None]
    """Called with the sequence number of the first event, kinds (STORED, REMOVED) and keys."""

log = logging.getLogger(__name__)

STORED = 1
REMOVED = 2
"""Kinds of events, as on the wire."""
SCRUB_RATE = 64 << 20
"""Bytes a second that a scrub reads, unless somebody says otherwise."""
SUSPICION_SECONDS = 10.0
MAX_SUSPECTS = 65_536
MAX_ANCESTORS = 4096
"""Ancestors that one use touches at most: a bound on the owner thread's time."""


class Clock:
    """Wall-clock time, in one place so that tests can turn it."""

    def seconds(self) -> float:
        return time.time()

    def micros(self) -> int:
        return time.time_ns() // 1000

    def nanos(self) -> int:
        return time.time_ns()


@dataclass(frozen=True, slots=True)
class Measured:
    """What the engine says of itself; bytes that the filesystem has left for us, that the store
    takes besides records, that records took at that moment, and that files made ahead take above
    what they may."""

    stats: Stats
    free: int
    overhead: int
    records: int = 0
    excess: int = 0


@dataclass(slots=True)
class _Held:
    """A version that left its row while somebody was reading it."""

    references: int
    removal: Removal


@dataclass(eq=False)
class Core:
    """The rooms of one open store and the figures between them.

    ``coming`` and ``going`` are bytes of records being written and being deleted. ``writing`` tells
    which put writes a row. ``chores`` are jobs that somebody must run soon: the daemon hands them
    to its workers, an offline command runs them in place. ``read_only`` is the reason why no writes
    are taken, empty if they are. ``leftovers`` are versions that a kill left behind and nobody has
    deleted yet; ``stuck`` are removals whose bytes could not be deleted. Both are tried again.
    """

    path: Path
    record: StoreRecord
    engine: Engine
    index: Index
    journal: Journal
    policy: Policy
    space: Space
    namespaces: Namespaces
    quarantine: Quarantine
    bounce: Slab
    """Memory for blocks that pass by the memory tier."""
    tier: Tier
    clock: Clock = field(default_factory=Clock)
    counters: Counters = field(default_factory=Counters)
    coming: int = 0
    going: int = 0
    read_only: str = ""
    synced_generation: int = 0
    problems: list[str] = field(default_factory=list)
    checkpoint_bytes: int = 0
    journal_bytes_before: int = 0
    """Bytes of earlier journal files that the next checkpoint will replace."""
    kept_bytes: int = 0
    """What a change of the engine left beside the blocks, see :func:`layout.kept_bytes`."""
    doubt: int = 0
    """Flags of rows whose records a power loss may have torn."""
    trouble: str = ""
    """Why engine and filesystem could not be asked for figures the last time."""
    scan: Reconcile | None = None
    """The comparison of index and engine that is under way."""
    suspects: dict[tuple[int, int], float] = field(default_factory=dict)
    """Versions (row, generation) that could not be read, and since when."""
    scan_due: bool = False
    """Index and engine have not been compared to the end although they should be."""
    leftovers: Records | None = None
    rotated: bool = False
    """The journal goes on in a new file whose checkpoint has not been written yet."""
    checkpoint_due: bool = False
    """Write one whatever the size of the journal: what is there is not complete."""
    retry: Callable[[], None] | None = None
    """Queues another attempt at what keeps the store read-only, while there is hope."""
    trim_due: bool = False
    """The high watermark was reached: make room down to the low one."""
    stuck: list[Removal] = field(default_factory=list)
    key_lengths: dict[int, int] = field(default_factory=dict)
    """Length of the keys by number of the namespace: what its rows have, or its first put gave."""
    watchers: dict[int, list[Watcher]] = field(default_factory=dict)
    """Who wants to hear of stored and removed blocks, by number of the namespace."""
    sequences: dict[int, int] = field(default_factory=dict)
    """The next event's number, by number of the namespace."""
    writing: dict[int, Put] = field(default_factory=dict)
    """The put that is bringing a row's version, until memory or the engine has it."""
    chores: deque[Job] = field(default_factory=deque)
    timer: Callable[[float, Callable[[], None]], object] | None = None
    """Calls back on the owner thread in so many seconds, where somebody is there to do it."""
    active: set[Job] = field(default_factory=set)
    touched: list[U32] = field(default_factory=list)
    listeners: list[Callable[[U32, int], None]] = field(default_factory=list)
    """Told each chain that is used, and how many of it an earlier part of the request named."""
    _held: dict[tuple[int, int], _Held] = field(default_factory=dict)
    may_evict: bool = True
    """Whether blocks leave when there is no room; else puts are answered FULL."""
    namespace_quota: int | None = None
    """Record bytes of each namespace that has no quota of its own; None: no limit."""
    scrub_rate: int = SCRUB_RATE
    writer: Writer = field(init=False)
    rooms: Rooms = field(init=False)
    late: Late = field(init=False)
    generation: int = 0
    """The highest given to any version so far."""
    _measured: Measured | None = None

    @property
    def uuid(self) -> bytes:
        return self.record.uuid

    # -- jobs -------------------------------------------------------------------------------------

    def begin(self, job: Job) -> None:
        self.active.add(job)

    def queue(self, job: Job) -> None:
        """Begin a job that nobody waits for."""
        self.begin(job)
        self.chores.append(job)

    def finish(self, job: Job) -> None:
        """Bring a performed job home; whatever it took is released even if it failed."""
        try:
            if job.failure is not None:
                self.counters.failed_jobs += 1
                log.warning("%s: %s", type(job).__name__.lower(), job.failure)
            job.finish()
        finally:
            self.active.discard(job)
            job.mark_done()

    def stop_writes(self, reason: str) -> None:
        """Take no more writes until the store is opened again; reads go on."""
        log.error("%s: read-only from now on: %s", self.path, reason)
        self.read_only = reason

    # -- generations ------------------------------------------------------------------------------

    def new_generations(self, count: int) -> U64:
        """Return ``count`` numbers that no version of any block of this store ever had."""
        first = self.generation + 1
        self.generation += count
        return np.arange(first, first + count, dtype=np.uint64)

    def end_writing(self, rows: U32, put: object) -> None:
        """Note that ``put`` brings these rows no longer.

        A row id that was freed meanwhile and given out again is another put's to bring: whoever
        waits for that one must still find it here.
        """
        for row in rows.tolist():
            if row in self.writing and self.writing[row] is put:
                del self.writing[row]

    def covered_generation(self) -> int:
        """Return the generation up to which every version has been written or given up."""
        oldest = min(self.writer.oldest_generation, self.late.oldest_generation)
        if self.writing:
            rows = np.fromiter(self.writing, np.uint32, len(self.writing))
            oldest = min(oldest, int(self.index.generations[rows].min()))
        return min(self.generation, oldest - 1)

    def note_durable(self, rows: U32) -> None:
        """Remember that these rows have been synced one by one."""
        self.index.set_flags(rows, DURABLE)

    def perhaps_durable(self, rows: U32, generations: U64) -> npt.NDArray[np.bool_]:
        """Tell which versions of rows somebody may have been told are durable.

        All of an earlier opening are among them: whoever was told so may have been told by a
        process that was killed before it wrote that down.
        """
        index = self.index
        told: npt.NDArray[np.bool_] = (index.flags[rows] & DURABLE) != 0
        told |= generations <= max(self.synced_generation, self.record.opens << 32)
        told &= index.holds(rows, generations)
        return told

    def sync_everything(self) -> None:
        """Make all that was written survive power loss: data first, then the journal (*worker*).

        In this order, because a journal that survives must not speak of bytes that did not.
        """
        self.engine.flush()
        self.journal.sync()

    # -- use --------------------------------------------------------------------------------------

    def touch(self, rows: U32, *, asked: bool = True, put: bool = False) -> None:
        """Note that these rows were used now; the first one (nearest to the root) is the newest.

        Whoever uses a block uses the prefix before it, even where its bytes came from elsewhere:
        the ancestors of the first row count as used too, or chains would grow old from the root.
        If somebody ``asked``, the policy counts each block once a request: not those before a later
        part of it, nor, when what was missing is ``put``, those that were found before.
        """
        if not len(rows):
            return
        before = self.index.ancestors(int(rows[0]), MAX_ANCESTORS)
        line = np.concatenate([before[::-1], rows])
        if asked:
            heard = len(line) if put else len(before)
            self.policy.used(self.index, line, self.clock.seconds(), heard=heard)
            for listener in self.listeners:
                listener(line, heard)
        self.index.touch(line, self.clock.micros())
        if not self.read_only:
            self.touched.append(line)

    def leave_memory(self, rows: U32) -> None:
        """Note that the memory tier gave up its copies (called by the tier).

        Blocks that the disk or admission refused are nowhere else: they are gone.
        """
        index = self.index
        lost = (index.flags[rows] & (DISK | DIRTY)) == 0
        if lost.any():
            self.publish_removed(rows[lost])
            index.free(index.remove(rows[lost]))
        index.clear_flags(rows[~lost], MEM)

    def forget_stranded(self, rows: U32) -> bool:
        """Drop blocks that are in memory only because the disk refused them: they may be put anew.

        Those that somebody is reading stay. Returns whether there was one to drop.
        """
        stranded = (self.index.flags[rows] & (MEM | DISK | DIRTY)) == MEM
        if not stranded.any():
            return False
        rows = np.unique(rows[stranded & (self.index.references[rows] == 0)])
        if not len(rows):
            return False
        self.publish_removed(rows)
        self.tier.drop(rows)
        self.index.free(self.index.remove(rows))
        return True

    def forget_copies(self, rows: U32, generations: U64) -> None:
        """Drop damaged copies in memory of blocks that are on disk too."""
        rows = np.unique(rows[self.index.holds(rows, generations)])
        if not len(rows):
            return
        log.error("%d blocks were damaged in memory; their copies on disk are kept", len(rows))
        self.counters.memory_errors += len(rows)
        self.tier.drop(rows)
        self.index.clear_flags(rows, MEM)

    # -- pins -------------------------------------------------------------------------------------

    def save_pins(self, rows: U32) -> None:
        """Have the journal remember until when rows are pinned; only of rows it knows it does."""
        if not len(rows) or self.read_only:
            return
        pins = versions.pins(self.index, rows)

        def act() -> None:
            self.journal.append(pins)

        self.queue(Step(act, lambda _step: None))

    # -- events -----------------------------------------------------------------------------------

    def publish_stored(self, rows: U32) -> None:
        """Tell watchers that blocks can be read."""
        self._publish(rows, stored=True)

    def publish_removed(self, rows: U32) -> None:
        """Tell watchers that blocks can be read no more."""
        self._publish(rows[self.index.readable(rows)], stored=False)

    def _publish(self, rows: U32, *, stored: bool) -> None:
        """Number the events of each namespace, whether somebody watches or not: a client that comes
        back sees by the number whether it missed some."""
        numbers = self.index.spaces[rows] >> 16
        for number in set(numbers.tolist()):
            mine = rows[numbers == number]
            first = self.sequences.get(number, 1)
            self.sequences[number] = first + len(mine)
            watchers = list(self.watchers.get(number, ()))
            if watchers:
                keys = self.index.keys_of(mine)
                kinds = np.full(len(mine), STORED if stored else REMOVED, np.uint8)
                for watcher in watchers:
                    watcher(first, kinds, keys)

    def release(self, rows: U32, generations: U64) -> None:
        """Give references back, to the row or to the version that has left it since."""
        if self._held:
            keep = np.ones(len(rows), np.bool_)
            for number, version in enumerate(zip(rows.tolist(), generations.tolist(), strict=True)):
                if version in self._held:
                    keep[number] = False
                    self._release_held(version)
            rows = rows[keep]
        self.index.release(rows)

    def hold(self, row: int, references: int, removal: Removal) -> None:
        """Put off a removal until the readers of its version have gone."""
        self._held[row, removal.generation] = _Held(references, removal)

    def _release_held(self, version: tuple[int, int]) -> None:
        held = self._held[version]
        held.references -= 1
        if not held.references:
            del self._held[version]
            self.queue(held.removal)

    @property
    def waiting_removals(self) -> list[Removal]:
        return [held.removal for held in self._held.values()]

    def suspect(self, rows: U32, generations: U64) -> npt.NDArray[np.bool_]:
        """Note rows that could not be read; return which of them could not be read before either.

        A device that fails for a moment must not cost the blocks on it; one that goes on failing
        must not keep their keys from being put again.
        """
        now = time.monotonic()
        again = np.zeros(len(rows), np.bool_)
        for number, version in enumerate(zip(rows.tolist(), generations.tolist(), strict=True)):
            first = self.suspects.get(version)
            if first is None and len(self.suspects) < MAX_SUSPECTS:
                self.suspects[version] = now
            again[number] = first is not None and now - first >= SUSPICION_SECONDS
        return again

    def clear(self, rows: U32, generations: U64) -> None:
        """Note that rows could be read."""
        for version in zip(rows.tolist(), generations.tolist(), strict=True):
            self.suspects.pop(version, None)

    # -- space ------------------------------------------------------------------------------------

    def usage(self) -> Usage:
        """Return what is on the disk now, as far as it was measured and counted since."""
        measured = self._figures()
        written = self.index.live_bytes + self.coming + self.going - measured.records
        if self.engine.capabilities.fixed_slots:
            written = 0  # it goes into files that are there
        stuck = sum(removal.bytes for removal in self.stuck)
        usage = Usage(
            live=self.index.live_bytes,
            coming=self.coming,
            going=self.going - stuck,
            overhead=measured.overhead,
            free=measured.free - max(0, written),
            stuck=stuck,
        )
        self.space.observe(usage)
        return usage

    @property
    def stats(self) -> Stats:
        return self._figures().stats

    @property
    def physical(self) -> int:
        """Bytes that the store takes on the device, free slots of files made ahead included."""
        found = self._figures()
        if self.engine.capabilities.fixed_slots:
            return found.stats.file_bytes + found.overhead - found.stats.overhead_bytes
        return self.usage().physical

    @property
    def excess(self) -> int:
        """Bytes that files made ahead take above what they may."""
        return self._figures().excess

    def _figures(self) -> Measured:
        if self._measured is None:
            self.take(self.measure())
        assert self._measured is not None
        return self._measured

    def measure(self) -> Measured:
        """Ask engine and filesystem for figures that cost system calls (*worker*)."""
        free = node.free_bytes(self.path)
        other = (
            self.journal.physical_bytes
            + self.journal_bytes_before
            + self.checkpoint_bytes
            + self.quarantine.bytes
            + self.kept_bytes
            + directory_bytes(self.path / NAMESPACES)
            + directory_bytes(self.path / INCOMING)
        )
        stats, excess = self.engine.stats(), 0
        if self.engine.capabilities.fixed_slots:
            limit = self.space.for_files(other, free, stats.file_bytes)
            self.engine.allow(limit)
            stats = self.engine.stats()
            excess = max(0, stats.file_bytes - limit)
        return Measured(stats, free, stats.overhead_bytes + other, excess=excess)

    def take(self, measured: Measured) -> None:
        """Take over what :meth:`measure` found."""
        records = self.index.live_bytes + self.coming + self.going
        self._measured = replace(measured, records=records)

    def note_full(self) -> None:
        """Note that the disk had no room: until it is measured again, blocks are only recycled."""
        self._measured = replace(self._figures(), free=0)

    # -- namespaces -------------------------------------------------------------------------------

    def check_key_length(self, namespace: Namespace, key: bytes) -> None:
        """Refuse a key of another length than the namespace's blocks have. Raises InvalidKey."""
        known = self.key_lengths.setdefault(namespace.number, len(key))
        if known == len(key):
            return
        if not self.holds_any(namespace):
            self.key_lengths[namespace.number] = len(key)
            return
        raise InvalidKey(
            f"key {key.hex()} has {len(key)} bytes, those of namespace {namespace.id.hex()} have "
            f"{known}",
            "use another namespace, or empty this one first",
        )

    def holds_any(self, namespace: Namespace) -> bool:
        rows = self.index.rows_of(None)
        mine = (self.index.spaces[rows] >> 16) == namespace.number
        return bool(np.any(mine & ((self.index.flags[rows] & GHOST) == 0)))

"""Changing the engine of a store: all blocks are copied to another one, then STORE.json is changed.

The copy lies beside the blocks in a directory of its own, with a journal of its own, under the
epoch that the store will have. A record is copied as it is (see :mod:`kvstore.copying`), so that it
stays the same version of the same block; what the index knows (links, order of use, pins) becomes
the first checkpoint of the copy. Nothing of the source is changed.

Crash safety, step by step:

1. ``migrating.json`` says which copy is begun. A directory without it, or without a whole journal,
   is thrown away and begun anew.
2. Records are written and read back, the engine is synced, then the journal gets their PUTs and is
   synced. So the journal never names a record that a power loss could take, and the next run begins
   where it ends. A record that it does not name yet is written once more, as the same version.
3. In the end a scan of the copy must find every block, and finds what has no right to be there:
   blocks that left the source between two runs. Then the checkpoint is written, and the mark of a
   clean end behind it. The copy is now a whole store but for STORE.json.
4. One rename of STORE.json makes it the store. Before it the old blocks count, after it the new.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from kvstore import checkpoint, events, files, former, layout, record
from kvstore.backends import engine_class, plain_name
from kvstore.backends.base import EngineContext
from kvstore.copying import Left, Workers
from kvstore.errors import ConfigError, EngineError, ReadOnly, StoreExists, StoreFull
from kvstore.events import Kind
from kvstore.journal import Journal
from kvstore.killpoints import reach
from kvstore.opening import Options, open_store
from kvstore.order import batches
from kvstore.settle import settle
from kvstore.space import RESERVE_SHARE, Space, check_capacity, default_floor, journal_reserve
from kvstore.target import Copy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import TracebackType

    from kvstore.backends.base import Engine
    from kvstore.checkpoint import Loaded
    from kvstore.copying import Copied
    from kvstore.events import Records
    from kvstore.layout import StoreRecord
    from kvstore.settle import Settled

Positions = np.ndarray

BATCH_BYTES = 16 << 20
BATCH_BLOCKS = 512
ROW_BYTES = 3 * events.RECORD_BYTES
"""What journal and checkpoint take for a block while both are there."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done: blocks and bytes as records, how many of them an earlier run copied, and
    what the copy of the others takes at most on the device."""

    source: str
    target: str
    blocks: int
    bytes: int
    present: int
    needed_bytes: int


@dataclass
class Outcome:
    """What was done. ``switched``: the store has its new engine; else what is there is kept for the
    next run."""

    copied: int = 0
    bytes: int = 0
    present: int = 0
    left: list[Left] = field(default_factory=list)
    interrupted: bool = False
    switched: bool = False


class Migration:
    """One change of engine, as a context manager that holds the lock of the store.

    ``capacity`` is what the store may take from now on, ``min_free`` what stays free on its
    filesystem; in bytes, None = as it is. Raises StoreNotFound, StoreLocked, FormatUnsupported,
    CorruptStore, ReadOnly; ConfigError for an engine that there is not, StoreExists if another
    change was not brought to an end.
    """

    def __init__(
        self, path: Path, engine: str, *, capacity: int | None = None, min_free: int | None = None
    ) -> None:
        self.path = path
        self.engine = plain_name(engine)
        self._class = engine_class(engine)
        if not self._class.capabilities.persistent:
            raise ConfigError(f"the engine {engine} forgets its blocks", "choose another one")
        self._capacity = capacity and check_capacity(capacity)
        self._min_free = min_free
        self._lock = layout.Lock(path)

    def __enter__(self) -> Migration:
        layout.read(self.path)
        self._lock.acquire(exclusive=True)
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
        """Read what the store has, and what an earlier run left."""
        self._record = found = layout.read(self.path)
        if found.read_only_reason:
            raise ReadOnly(f"the store at {self.path} takes no writes: {found.read_only_reason}")
        self._loaded = checkpoint.load(self.path / found.blocks, found.uuid, found.epoch)
        lasting = engine_class(found.engine).capabilities.persistent
        self._settled = settle(self._loaded.events if lasting else self._loaded.events[:0])
        self._rows = self._settled.rows
        self._live: np.ndarray = self._rows["kind"] == Kind.PUT
        coming = former.read_coming(self.path, found)
        self._coming = coming or self._new_record()
        self._earlier = self._whole(coming) if coming is not None else None
        self._check()

    @property
    def already(self) -> bool:
        """Whether the store has that engine."""
        return self._record.engine == self.engine

    def _new_record(self) -> StoreRecord:
        return replace(
            self._record,
            engine=self.engine,
            engine_options=self._class.options_for(self._new_capacity),
            blocks=f"{layout.BLOCKS}-{self.engine}",
            epoch=self._record.epoch + 1,
            previous=None,
        )

    def _whole(self, coming: StoreRecord) -> tuple[Loaded, Settled] | None:
        """Return what an earlier run copied, None if it must be begun anew."""
        loaded = checkpoint.load(self.path / coming.blocks, coming.uuid, coming.epoch)
        return None if loaded.torn or loaded.missing else (loaded, settle(loaded.events))

    def _check(self) -> None:
        if self.already:
            return
        if self._coming.engine != self.engine:
            raise StoreExists(
                f"a copy for the engine {self._coming.engine} was begun in {self.path}",
                f"finish it with --to {self._coming.engine}, or give it up with --rollback",
            )
        if self._record.previous is not None:
            raise StoreExists(
                f"{self.path} still has the blocks of the engine {self._record.previous.engine}",
                "remove them with --delete-source, or go back to them with --rollback",
            )

    # -- the plan ---------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Return what :meth:`run` will do. Raises StoreFull if there is no room for it."""
        done = self._done()
        sizes = self._class.record_sizes(self._rows["length"], parity=self._record.parity)
        coming = int(sizes[self._live & ~done].sum())
        factor = self._class.capabilities.space_factor
        plan = Plan(
            source=self._record.engine,
            target=self.engine,
            blocks=int(self._live.sum()),
            bytes=int(sizes[self._live].sum()),
            present=int(done.sum()),
            needed_bytes=int(coming * factor) + len(self._rows) * ROW_BYTES,
        )
        self._check_largest(int(sizes[self._live].max(initial=0)))
        self._check_room(plan)
        return plan

    def _done(self) -> np.ndarray:
        """Tell which rows an earlier run copied: versions have numbers of their own."""
        none: np.ndarray = np.zeros(len(self._rows), np.bool_)
        if self._earlier is None:
            return none
        there = self._earlier[1].rows
        there = there["generation"][there["kind"] == Kind.PUT]
        done: np.ndarray = self._live & np.isin(self._rows["generation"], there)
        return done

    def _check_largest(self, size: int) -> None:
        most = self._engine(self._coming).largest_image
        if size > most:
            raise StoreFull(
                f"the engine {self.engine} takes records of {most} bytes at most in a store of "
                f"this capacity, and {self.path} has one of {size}",
                "raise --capacity, or choose another engine",
            )

    def _check_room(self, plan: Plan) -> None:
        """Refuse what the daemon would have to evict, or what the filesystem cannot hold."""
        going = [self.path / self._coming.blocks, *layout.leftovers(self.path, self._record)]
        going_bytes = sum(map(layout.directory_bytes, dict.fromkeys(going)))
        found, floor = os.statvfs(self.path), self._min_free
        if floor is None:
            floor = default_floor(found.f_blocks * found.f_frsize)
        room = self._room(layout.directory_bytes(self.path) - going_bytes)
        if plan.bytes > room:
            raise StoreFull(
                f"the blocks take {plan.bytes} bytes, and beside the former ones {self.path} has "
                f"room for {room} of the {self._new_capacity} bytes that it may take",
                "raise that with --capacity SIZE; once the former blocks are deleted, serve "
                "--capacity lowers it again",
            )
        stale = 0 if self._earlier else going_bytes
        free = found.f_bavail * found.f_frsize + stale
        if free - plan.needed_bytes < floor:
            raise StoreFull(
                f"the copy needs {plan.needed_bytes} bytes, the filesystem of {self.path} has "
                f"{free} free, of which {floor} stay free (min_free)",
                "free some space, or have blocks leave first with kvstore evict",
            )

    def _room(self, other: int) -> int:
        """Return the live bytes at which eviction begins, beside so many other bytes."""
        abilities = self._class.capabilities
        space = Space(
            self._new_capacity,
            abilities.space_factor,
            0,
            frees_space=abilities.frees_space,
            fixed_slots=abilities.fixed_slots,
        )
        return max(0, space.high(other))

    @property
    def _new_capacity(self) -> int:
        return self._capacity or self._record.capacity_bytes

    # -- the run ----------------------------------------------------------------------------------

    def run(
        self, told: Callable[[int, int], None], *, jobs: int = 2, rate: int | None = None
    ) -> Outcome:
        """Copy what is not copied yet and switch; ``told`` hears of each batch: blocks, bytes.

        ``jobs`` batches are under way at a time, ``rate`` bytes a second are read at most. Ctrl-C
        ends it between two batches. Raises StoreFull, EngineError, CorruptStore, ...; what is
        copied by then is kept.
        """
        self._make_clean()
        former.sweep(self.path)
        self.plan()
        source = self._engine(self._record, read_only=True)
        source.open()
        try:
            with Copy(self.path, self._coming, self._begin(), self._engine(self._coming)) as copy:
                return self._fill(copy, source, _Pace(told, rate), jobs)
        finally:
            source.close()

    def _make_clean(self) -> None:
        """Let a store that was killed do what its next opening would: no row may be missing."""
        if self._loaded.clean or self._is_new():
            return
        self._lock.release()
        resting = Options(create="never", min_free=0, when_full="read-only", bounce_bytes=16 << 20)
        store = open_store(self.path, resting)
        try:
            store.drain()
        finally:
            store.close()
        self._lock.acquire(exclusive=True)
        self._load()
        if not self._loaded.clean:
            raise EngineError(f"the store at {self.path} has work left", "see the log, then retry")

    def _is_new(self) -> bool:
        loaded = self._loaded
        return not (len(loaded.events) or loaded.torn or loaded.missing)

    def _engine(self, of: StoreRecord, *, read_only: bool = False) -> Engine:
        return engine_class(of.engine)(
            EngineContext(
                directory=self.path / of.blocks,
                store_uuid=of.uuid,
                options=of.engine_options,
                read_only=read_only,
                capacity=self._new_capacity,
                parity=of.parity,
            )
        )

    def _begin(self) -> tuple[Loaded, Settled] | None:
        """Make an empty copy unless there is one to go on with, which is returned."""
        if self._earlier is not None:
            return self._earlier
        directory = self.path / self._coming.blocks
        former.discard(directory)
        former.write_coming(self.path, self._coming)
        reach("migrate.begun")
        try:
            directory.mkdir(files.DIRECTORY_MODE)
            files.sync_directory(self.path)
        except OSError as error:
            raise files.translate(error, f"make {directory}") from error
        self._engine(self._coming).create()
        reach("migrate.made")
        unit = journal_reserve(self._new_capacity)
        Journal.create(directory, 1, self._coming.uuid, self._coming.epoch, unit).close()
        return None

    def _fill(self, copy: Copy, source: Engine, pace: _Pace, jobs: int) -> Outcome:
        outcome = Outcome()
        self._bound(copy.engine)
        copied = copy.adopt(self._rows)
        outcome.present = int(copied.sum())
        pace.tell(outcome.present, 0)
        largest = int(record.image_bytes_of(self._rows["length"]).max(initial=0))
        workers = Workers(source, copy.engine, max(largest, BATCH_BYTES), jobs)
        try:
            with workers:
                wanted = self._live & ~copied
                for positions in batches(self._rows, wanted, BATCH_BYTES, BATCH_BLOCKS):
                    pace.wait(self._rows[positions])
                    workers.submit(positions, self._rows[positions])
                    self._take(workers.results(), copy, pace, outcome)
                self._take(workers.rest(), copy, pace, outcome)
        except KeyboardInterrupt:
            self._take(workers.rest(), copy, pace, outcome)
            outcome.interrupted = True
        copy.save()
        if not outcome.interrupted:
            self._switch(copy, outcome)
        return outcome

    def _bound(self, target: Engine) -> None:
        """Keep files that are made ahead of use within the capacity, the former blocks included."""
        capacity = self._new_capacity
        own = layout.directory_bytes(self.path / self._coming.blocks)
        other = layout.directory_bytes(self.path) - own
        target.allow(capacity - max(other, capacity // RESERVE_SHARE))

    def _take(
        self,
        results: Iterator[tuple[Positions, Copied]],
        copy: Copy,
        pace: _Pace,
        outcome: Outcome,
    ) -> None:
        for positions, copied in results:
            rows = self._rows[positions]
            for row, reason in zip(rows, copied.reasons, strict=True):
                if reason:
                    outcome.left.append(Left(*_name(row), reason))
            rows["place"] = copied.places
            copy.add(rows[copied.good])
            size = int(record.image_bytes_of(rows["length"][copied.good]).sum())
            outcome.copied += int(copied.good.sum())
            outcome.bytes += size
            pace.tell(len(rows), size)

    # -- the switch -------------------------------------------------------------------------------

    def _switch(self, copy: Copy, outcome: Outcome) -> None:
        if outcome.left and not outcome.copied + outcome.present:
            raise EngineError(
                f"none of {len(outcome.left)} blocks can be read, the first because "
                f"{outcome.left[0].reason}",
                "the store is as it was; see to its disk",
            )
        copy.check()
        reach("migrate.checked")
        copied = copy.finish(self._rows, self._settled)
        reach("migrate.finished")
        old = self._record
        previous = layout.Previous(
            engine=old.engine,
            engine_options=old.engine_options,
            blocks=old.blocks,
            epoch=old.epoch,
            copied=copied,
            generation=self._settled.max_generation,
            bytes=layout.directory_bytes(self.path / old.blocks),
        )
        coming = self._coming
        layout.write(
            self.path,
            replace(
                old,
                engine=coming.engine,
                engine_options=coming.engine_options,
                blocks=coming.blocks,
                epoch=coming.epoch,
                capacity_bytes=self._new_capacity,
                previous=previous,
            ),
        )
        outcome.switched = True
        reach("migrate.switched")
        former.forget_coming(self.path)


class _Pace:
    """Tells how far the copy is, and keeps it to a rate."""

    def __init__(self, told: Callable[[int, int], None], rate: int | None) -> None:
        self.tell = told
        self._rate = rate
        self._began = time.monotonic()
        self._bytes = 0

    def wait(self, rows: Records) -> None:
        if self._rate is not None:
            ahead = self._bytes / self._rate - (time.monotonic() - self._began)
            time.sleep(max(0.0, ahead))
        self._bytes += int(record.image_bytes_of(rows["length"]).sum())


def _name(row: np.void) -> tuple[str, int, str]:
    key = row["key"][: row["key_length"]].tobytes().hex()
    return row["namespace"].tobytes().hex(), int(row["shard"]), key

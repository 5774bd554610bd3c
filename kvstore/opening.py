"""Opening a store: from a directory to rows that can be served.

Normally that is checkpoint plus journal and nothing else, also after a kill. A scan of the engine
follows in the background when the machine has been booted since without a clean stop: power may
have been lost, and files may be missing or unknown. It comes before anything is served when the
journal is torn or gone, because a block that the index has not heard of yet would be a false miss.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from kvstore import checkpoint, events, eviction, layout, settle, versions
from kvstore.backends import engine_class
from kvstore.backends.base import EngineContext
from kvstore.check import Quarantine
from kvstore.core import Core
from kvstore.errors import ConfigError, StoreFull, StoreNotFound
from kvstore.index import UNSYNCED, Index, Rows
from kvstore.journal import Journal
from kvstore.keys import DEFAULT_NAMESPACE, named
from kvstore.namespaces import Namespaces
from kvstore.reconcile import Reconcile
from kvstore.removal import choose_victims, evict
from kvstore.slab import Slab
from kvstore.space import Space, check_capacity, default_floor, quarantine_limit
from kvstore.store import Store
from kvstore.upkeep import Step

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.backends.base import Engine
    from kvstore.checkpoint import Loaded
    from kvstore.layout import StoreRecord
    from kvstore.settle import Settled

log = logging.getLogger(__name__)

BOUNCE_BYTES = 128 << 20
CAPACITY_SHARE = 0.5
MIN_RESERVE = 64 << 10
MAX_RESERVE = 4 << 20
_ENGINE_ALIASES = {"mmap": "superblock"}


@dataclass(frozen=True, slots=True)
class Options:
    """How to open a store; None = what STORE.json says, or the default of a new store.

    ``capacity`` and ``min_free`` in bytes. ``bounce_bytes`` is the memory for blocks in flight.
    """

    engine: str | None = None
    capacity: int | None = None
    min_free: int | None = None
    create: Literal["auto", "never"] = "auto"
    io: str = "auto"
    bounce_bytes: int = BOUNCE_BYTES


def create_store(path: Path, options: Options) -> StoreRecord:
    """Make a new store. Raises StoreExists, StoreNotFound (no parent), ConfigError, ...

    STORE.json comes last: a directory without it is not a store, whatever a kill leaves behind. A
    failure leaves nothing, so that the next attempt does not find a directory that is not ours.
    """
    made = layout.create_directories(path)
    try:
        return _fill_store(path, options)
    except BaseException:
        layout.unmake(path, made)
        raise


def _fill_store(path: Path, options: Options) -> StoreRecord:
    capacity = options.capacity
    if capacity is None:
        found = os.statvfs(path)
        capacity = int(found.f_blocks * found.f_frsize * CAPACITY_SHARE)
    record = layout.new_record(
        engine=_engine_name(options.engine) or "filesystem", capacity=check_capacity(capacity)
    )
    engine = _engine(path, record, options)
    engine.create()
    Journal.create(
        path / record.blocks, 1, record.uuid, record.epoch, _reserve(record.capacity_bytes)
    ).close()
    Namespaces(path / layout.NAMESPACES).open(named(DEFAULT_NAMESPACE), create=True)
    layout.write(path, record)
    return record


def _engine_name(name: str | None) -> str | None:
    return _ENGINE_ALIASES.get(name, name) if name else None


def _reserve(capacity: int) -> int:
    return min(max(capacity // 100, MIN_RESERVE), MAX_RESERVE)


def _engine(path: Path, record: StoreRecord, options: Options) -> Engine:
    return engine_class(record.engine)(
        EngineContext(
            directory=path / record.blocks,
            store_uuid=record.uuid,
            options={**record.engine_options, "io": options.io},
        ),
    )


@dataclass
class Opening:
    """One opening, in two steps: :meth:`lock` is quick and fails early, :meth:`open` may take long.

    ``phase`` and ``scanned`` tell how far :meth:`open` is; another thread may read them.
    """

    path: Path
    options: Options = field(default_factory=Options)
    phase: str = "waiting"
    _record: StoreRecord | None = None
    _lock: layout.Lock | None = None
    _cancelled: bool = False
    _reconcile: Reconcile | None = None

    # -- first step -------------------------------------------------------------------------------

    def lock(self) -> None:
        """Find or make the store, and lock it for this process."""
        try:
            record = layout.read(self.path)
        except StoreNotFound:
            if self.options.create == "never":
                raise
            record = create_store(self.path, self.options)
            layout.warn_created(self.path, record)
        wanted = _engine_name(self.options.engine)
        if wanted and wanted != record.engine:
            raise ConfigError(
                f"the store at {self.path} uses the engine {record.engine}, not {wanted}",
                f"drop the setting, or run kvstore migrate --to {wanted}",
            )
        if self.options.capacity is not None:
            check_capacity(self.options.capacity)
        lock = layout.Lock(self.path)
        lock.acquire(exclusive=True)
        self._lock = lock
        # Only now is STORE.json ours alone.
        self._record = layout.read(self.path)

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def cancel(self) -> None:
        """Ask :meth:`open` to stop at its next step."""
        self._cancelled = True

    def status(self) -> dict[str, object]:
        """Return what ``kvstore status`` shows meanwhile."""
        return {
            "state": "recovering",
            "phase": self.phase,
            "scanned": self._reconcile.scanned if self._reconcile else 0,
            "store": str(self.path),
            "engine": self._record.engine if self._record else None,
            "problems": [],
        }

    # -- second step ------------------------------------------------------------------------------

    def open(self) -> Store | None:
        """Return the open store, or None after :meth:`cancel`."""
        assert self._record is not None
        assert self._lock is not None
        self.phase = "raising the generation"
        record, trouble = self._raise_opens(self._record)
        self.phase = "opening the engine"
        namespaces = Namespaces(self.path / layout.NAMESPACES)
        namespaces.load()
        engine = _engine(self.path, record, self.options)
        engine.open()
        self.phase = "reading the journal"
        loaded = checkpoint.load(self.path / record.blocks, record.uuid, record.epoch)
        settled = settle.settle(loaded.events)
        core = self._assemble(record, namespaces, engine, loaded, settled)
        core.read_only = trouble
        self._adopt_rows(core, settled)
        self._recover(core, loaded, settled)
        if self._cancelled:
            return None
        self._fit(core)
        self.phase = "ready"
        store = Store(core, self._lock)
        if loaded.torn or loaded.missing:
            store.checkpoint()
        return store

    def _raise_opens(self, record: StoreRecord) -> tuple[StoreRecord, str]:
        """Raise ``opens`` durably before anything is served, so that generations never repeat.

        If the disk has no room even for that, the store opens for reading only.
        """
        capacity = self.options.capacity or record.capacity_bytes
        raised = replace(record, opens=record.opens + 1, capacity_bytes=capacity)
        try:
            layout.write(self.path, raised)
        except StoreFull as error:
            return record, f"the disk is full ({error.message})"
        return raised, ""

    def _assemble(
        self,
        record: StoreRecord,
        namespaces: Namespaces,
        engine: Engine,
        loaded: Loaded,
        settled: Settled,
    ) -> Core:
        floor = self.options.min_free
        if floor is None:
            found = os.statvfs(self.path)
            floor = default_floor(found.f_blocks * found.f_frsize)
        capabilities = engine.capabilities
        policy = eviction.make("lru")
        return Core(
            path=self.path,
            record=record,
            engine=engine,
            index=Index(epoch=time.time(), policy=policy),
            journal=self._journal(record, loaded),
            policy=policy,
            space=Space(
                record.capacity_bytes,
                capabilities.space_factor,
                floor,
                frees_space=capabilities.frees_space,
            ),
            namespaces=namespaces,
            quarantine=Quarantine(
                self.path / layout.QUARANTINE, quarantine_limit(record.capacity_bytes)
            ),
            slab=Slab(self.options.bounce_bytes),
            synced_generation=settled.synced,
            checkpoint_bytes=loaded.checkpoint_bytes,
            journal_bytes_before=loaded.earlier_journal_bytes,
        )

    def _journal(self, record: StoreRecord, loaded: Loaded) -> Journal:
        """Go on with the journal, or begin a new one where the old one cannot be trusted."""
        directory = self.path / record.blocks
        if loaded.end and not loaded.torn and not loaded.missing:
            return Journal.resume(directory, loaded.sequence, record.uuid, record.epoch, loaded.end)
        return Journal.create(
            directory,
            loaded.sequence + 1,
            record.uuid,
            record.epoch,
            _reserve(record.capacity_bytes),
        )

    def _adopt_rows(self, core: Core, settled: Settled) -> None:
        """Fill the index with what the journal says."""
        rows = settled.rows
        spaces = versions.spaces(core.namespaces, rows)
        core.index.load(
            Rows(
                rows=rows["row"],
                spaces=spaces,
                keys=rows["key"],
                key_lengths=rows["key_length"],
                parents=rows["parent"],
                sizes=rows["length"],
                places=rows["place"],
                generations=rows["generation"],
                stamps=rows["last_use"],
                ghost=rows["kind"] == events.Kind.GHOST,
                unsynced=np.zeros(len(rows), np.bool_),
            )
        )
        now = time.time()
        for row, until in settled.pins.items():
            if until / 1e6 > now:
                core.index.pin(row, until / 1e6)

    def _recover(self, core: Core, loaded: Loaded, settled: Settled) -> None:
        """Note this opening in the journal, delete leftovers, and scan if need be."""
        boot = layout.boot_id()
        stopped = loaded.clean or not len(loaded.events)
        lost_power = not stopped and (not boot or boot != loaded.boot_id)
        untrusted = loaded.torn or loaded.missing
        if lost_power:
            core.doubt = UNSYNCED
            rows = core.index.rows_of(None)
            doubtful = core.index.generations[rows] > settled.synced
            core.index.set_flags(rows[doubtful], UNSYNCED)
        if core.read_only:
            return
        mark = events.blank(1, events.Kind.OPEN)
        mark["namespace"][0] = np.frombuffer(boot.ljust(16, b"\0"), np.uint8)
        mark["generation"] = core.record.opens << 32
        core.journal.append(mark)
        given_up = _given_up(settled.leftovers, untrusted=untrusted)
        self._delete(core, given_up)
        if untrusted or lost_power:
            reason = loaded.reason or "the machine was booted without a clean stop before"
            log.warning("%s: scanning the store: %s", self.path, reason)
            self._reconcile = Reconcile(core, given_up["generation"], lambda: None)
        if untrusted:
            self.phase = "scanning"
            self._run_chores(core)

    def _delete(self, core: Core, leftovers: events.Records) -> None:
        """Queue the deletion of versions that a kill left between journal and engine."""
        groups = versions.blocks_of(leftovers)
        if not groups:
            return

        def delete() -> None:
            found = sum(core.engine.delete_many(blocks) for blocks in groups)
            if found:
                log.info("deleted %d versions left over by a kill", found)

        core.queue(Step(delete, lambda _step: None))

    def _run_chores(self, core: Core) -> None:
        while core.chores and not self._cancelled:
            job = core.chores.popleft()
            job.perform()
            core.finish(job)

    def _fit(self, core: Core) -> None:
        """Evict what a smaller capacity, or a full disk, leaves no room for."""
        if core.read_only:
            return
        wanted = core.space.to_evict(core.usage(), 0)
        if wanted <= 0:
            return
        self.phase = "evicting to capacity"
        removal = evict(core, choose_victims(core, wanted))
        log.warning("will evict %d blocks, %d bytes", removal.count, removal.bytes)
        core.begin(removal)
        removal.perform()
        core.finish(removal)
        if removal.failure is not None:
            raise removal.failure


def _given_up(leftovers: events.Records, *, untrusted: bool) -> events.Records:
    """Return the versions that must go. Where records are missing from the journal, a version that
    was begun may also have been finished and acknowledged: then only those that ended for sure."""
    if not untrusted:
        return leftovers
    return leftovers[np.isin(leftovers["kind"], (events.Kind.FREE, events.Kind.PUT))]


def open_store(path: Path, options: Options | None = None) -> Store:
    """Open a store in this thread, for offline use and tests."""
    opening = Opening(path, options or Options())
    opening.lock()
    try:
        store = opening.open()
    except BaseException:
        opening.unlock()
        raise
    assert store is not None
    store.run_chores()
    return store

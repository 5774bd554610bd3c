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
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from kvstore import checkpoint, events, eviction, layout, memo, parity, settle, versions
from kvstore.backends import ALIASES, engine_class, plain_name
from kvstore.backends.base import EngineContext
from kvstore.boot import Boot
from kvstore.check import Quarantine
from kvstore.core import SCRUB_RATE, Core
from kvstore.errors import (
    ConfigError,
    CorruptStore,
    EngineHung,
    KVStoreError,
    StoreFull,
    StoreLocked,
    StoreNotFound,
)
from kvstore.index import Index, Rows
from kvstore.isolate import Child, Inspection
from kvstore.job import Step
from kvstore.journal import Journal
from kvstore.keys import DEFAULT_NAMESPACE, named
from kvstore.late import Late
from kvstore.namespaces import Namespaces
from kvstore.room import Rooms
from kvstore.slab import Slab
from kvstore.space import Space, check_capacity, default_floor, journal_reserve, quarantine_limit
from kvstore.store import Store
from kvstore.tier import Tier
from kvstore.upkeep import fit
from kvstore.writer import Writer

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.backends.base import Engine
    from kvstore.checkpoint import Loaded
    from kvstore.layout import StoreRecord
    from kvstore.reconcile import Reconcile
    from kvstore.settle import Settled

log = logging.getLogger(__name__)

BOUNCE_BYTES = 128 << 20
CAPACITY_SHARE = 0.5
POPULATE_BYTES = 16 << 20
UNLIMITED = 1 << 62
LOCK_SECONDS = 0.5
"""How often a store in use by somebody else is tried again."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to open a store; None = what STORE.json says, or the default of a new store.

    ``parity``: ``off`` or ``xor``, like the engine fixed when the store is made. ``capacity`` and
    ``min_free`` in bytes. ``memory_bytes`` is the memory tier, ``bounce_bytes``
    the memory for blocks in flight that pass by it. With ``write`` = ``late`` accepted blocks are
    written when they leave memory, or after ``max_dirty_age`` seconds. ``policy`` says which
    blocks leave first (:mod:`kvstore.eviction`); with ``when_full`` = ``read-only`` nothing is
    evicted: puts are answered FULL when there is no room. ``scrub_rate`` is bytes a second, 0 = as
    fast as a worker can. ``namespace_quota`` is what a namespace may take that has no quota of its
    own. With ``scan`` all headers are compared with the index first, whatever the journal says.
    ``quarantine``: where damaged records are copied, without a limit, instead of the store's own
    share.
    """

    engine: str | None = None
    capacity: int | None = None
    min_free: int | None = None
    create: Literal["auto", "never"] = "auto"
    io: str = "auto"
    memory_bytes: int = 0
    bounce_bytes: int = BOUNCE_BYTES
    write: Literal["through", "late"] = "through"
    max_dirty_age: float = 300.0
    policy: str = "lru"
    when_full: Literal["evict", "read-only"] = "evict"
    scrub_rate: int = SCRUB_RATE
    namespace_quota: int | None = None
    scan: bool = False
    quarantine: Path | None = None
    parity: str | None = None


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
    name = _engine_name(options.engine) or "filesystem"
    record = layout.new_record(
        engine=name,
        capacity=check_capacity(capacity),
        engine_options=engine_class(name).options_for(capacity),
    )
    if options.parity == "xor":
        record = record.with_parity()
    engine = _engine(path, record, options)
    engine.create()
    Journal.create(
        path / record.blocks, 1, record.uuid, record.epoch, journal_reserve(record.capacity_bytes)
    ).close()
    Namespaces(path / layout.NAMESPACES).open(named(DEFAULT_NAMESPACE), create=True)
    layout.write(path, record)
    return record


def _engine_name(name: str | None) -> str | None:
    return plain_name(name) if name else None


def _engine(path: Path, record: StoreRecord, options: Options) -> Engine:
    io = options.engine if options.engine in ALIASES else options.io
    return engine_class(record.engine)(
        EngineContext(
            directory=path / record.blocks,
            store_uuid=record.uuid,
            options={**record.engine_options, "io": io},
            capacity=record.capacity_bytes,
            parity=record.parity,
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

    def lock(self, *, wait: bool = False) -> None:
        """Find or make the store, and lock it for this process.

        With ``wait`` a store in use by somebody else is no error: :meth:`open` waits for it.
        """
        try:
            self._take()
        except StoreLocked as error:
            if not wait:
                raise
            if error.message != self.phase:
                log.warning("waiting: %s", error.message)
            self.phase = error.message

    def _take(self) -> None:
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
                f"drop the setting, or change the engine with kvstore migrate --to {wanted}",
            )
        kept = parity.KINDS[record.parity]
        if self.options.parity not in (None, kept):
            raise ConfigError(
                f"the store at {self.path} was made with parity {kept}",
                "drop the setting, or make another store and merge this one into it: "
                f"kvstore migrate {self.path} OTHER",
            )
        if self.options.capacity is not None:
            check_capacity(self.options.capacity)
        lock = layout.Lock(self.path)
        lock.acquire(exclusive=True)
        self._lock = lock
        # Only now is STORE.json ours alone.
        record = layout.read(self.path)
        self._record = replace(
            record, capacity_bytes=self.options.capacity or record.capacity_bytes
        )

    def _wait_for_lock(self) -> None:
        while self._lock is None and not self._cancelled:
            time.sleep(LOCK_SECONDS)
            self.lock(wait=True)

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
        self._wait_for_lock()
        if self._lock is None:
            return None
        assert self._record is not None
        self.phase = "reading the journal"
        namespaces = Namespaces(self.path / layout.NAMESPACES)
        namespaces.load()
        loaded = checkpoint.load(
            self.path / self._record.blocks, self._record.uuid, self._record.epoch
        )
        checkpoint.remove_leftovers(self.path / self._record.blocks, loaded)
        self.phase = "opening the engine"
        engine = _engine(self.path, self._record, self.options)
        if not (loaded.clean or engine.capabilities.contained):
            _look_apart(engine)
        engine.open()
        if not engine.capabilities.persistent:
            log.warning("the engine %s forgets its blocks at the end", self._record.engine)
            loaded = replace(loaded, events=loaded.events[:0])
        settled = settle.settle(loaded.events)
        core = self._assemble(self._record, namespaces, engine, loaded, settled)
        self._adopt_rows(core, settled)
        memo.restore(core)
        boot = Boot(core, loaded, settled, scan=self.options.scan)
        boot.doubt_rows()
        store = Store(core, self._lock)
        _populate(core)
        self._begin_writing(core, boot)
        if self._cancelled:
            return None
        fit(core)
        if core.checkpoint_due:
            store.checkpoint()
        store.make_room()
        self.phase = "ready"
        return store

    def _begin_writing(self, core: Core, boot: Boot) -> None:
        """Take the store into use for writing.

        If the disk has no room even for a new STORE.json, the store serves reads only, and this is
        tried again until it succeeds.
        """
        try:
            core.record = self._raise_opens(core.record)
        except StoreFull as error:
            core.stop_writes(f"the disk is full ({error.message})")
            core.retry = lambda: self._try_again(core, boot)
            return
        core.generation = max(core.generation, core.record.opens << 32)
        if boot.begin():
            self._reconcile = core.scan
            self.phase = "scanning"
            self._run_chores(core)

    def _try_again(self, core: Core, boot: Boot) -> None:
        """Queue another attempt to raise ``opens`` on a disk that was full."""

        def act() -> None:
            core.record = self._raise_opens(core.record)

        def after(step: Step) -> None:
            if step.failure is None:
                core.retry = None
                core.generation = max(core.generation, core.record.opens << 32)
                core.read_only = ""
                boot.begin()

        core.queue(Step(act, after))

    def _raise_opens(self, record: StoreRecord) -> StoreRecord:
        """Raise ``opens`` durably before anything is written, so that generations never repeat."""
        raised = replace(record, opens=record.opens + 1)
        layout.write(self.path, raised)
        return raised

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
        policy = eviction.make(self.options.policy)
        index = Index(epoch=time.time(), policy=policy, record_bytes=engine.record_bytes_of)
        tier = Tier(self.options.memory_bytes, index)
        core = Core(
            path=self.path,
            record=record,
            engine=engine,
            index=index,
            journal=self._journal(record, loaded),
            policy=policy,
            space=Space(
                record.capacity_bytes,
                capabilities.space_factor,
                floor,
                frees_space=capabilities.frees_space,
                fixed_slots=capabilities.fixed_slots,
            ),
            namespaces=namespaces,
            quarantine=self._quarantine(record),
            bounce=Slab(self.options.bounce_bytes),
            tier=tier,
            synced_generation=settled.synced,
            generation=max(record.opens << 32, settled.max_generation),
            checkpoint_bytes=loaded.checkpoint_bytes,
            journal_bytes_before=loaded.earlier_journal_bytes,
            kept_bytes=layout.kept_bytes(self.path, record),
            may_evict=self.options.when_full == "evict",
            scrub_rate=self.options.scrub_rate,
            namespace_quota=self.options.namespace_quota,
        )
        core.writer = Writer(core)
        core.rooms = Rooms(core)
        tier.on_leave(core.leave_memory)
        self._choose_when_to_write(core)
        return core

    def _quarantine(self, record: StoreRecord) -> Quarantine:
        if self.options.quarantine is not None:
            return Quarantine(self.options.quarantine, UNLIMITED)
        limit = quarantine_limit(record.capacity_bytes)
        return Quarantine(self.path / layout.QUARANTINE, limit)

    def _choose_when_to_write(self, core: Core) -> None:
        late = self.options.write == "late"
        core.late = Late(core, self.options.max_dirty_age if late else None)
        if late:
            core.tier.on_pressure(core.late.press)
        if late and not core.tier.capacity:
            log.warning("write = late changes nothing: no memory tier is there to wait in")

    def _journal(self, record: StoreRecord, loaded: Loaded) -> Journal:
        """Go on with the journal, or begin a new one where the old one cannot be trusted."""
        directory = self.path / record.blocks
        if loaded.end and not loaded.torn and not loaded.missing:
            return Journal.resume(directory, loaded.sequence, record.uuid, record.epoch, loaded.end)
        # Never number 1 again: alone, without a checkpoint, it would pass for a whole store.
        return Journal.create(
            directory,
            max(loaded.sequence + 1, 2),
            record.uuid,
            record.epoch,
            journal_reserve(record.capacity_bytes),
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
        live = rows[rows["kind"] == events.Kind.PUT]
        for namespace in {number >> 16 for number in np.unique(spaces).tolist()}:
            mine = live[spaces[rows["kind"] == events.Kind.PUT] >> 16 == namespace]
            if len(mine):
                core.key_lengths[namespace] = int(mine["key_length"][0])
        now = time.time()
        for row, until in settled.pins.items():
            if until / 1e6 > now:
                core.index.pin(row, until / 1e6, firm=row in settled.firm)

    def _run_chores(self, core: Core) -> None:
        while core.chores and not self._cancelled:
            job = core.chores.popleft()
            job.perform()
            core.finish(job)


def _look_apart(engine: Engine) -> None:
    """Have a child open the engine before we do, for its damage may end whoever does.

    Raises CorruptStore that names ``kvstore recover``, EngineHung. What else is wrong shows when we
    open it ourselves.
    """
    context = replace(engine.context, read_only=True)
    with Child(f"the {engine.name} engine in {context.directory}") as child:
        try:
            Inspection(child, engine.name, context).check()
        except (CorruptStore, EngineHung):
            raise
        except KVStoreError as error:
            log.warning("the engine could not be looked at apart: %s", error.message)


def _populate(core: Core) -> None:
    """Have all memory touched, piece by piece: no request pays for it or waits behind it."""
    pieces = [
        partial(pages.populate, start, start + POPULATE_BYTES)
        for pages in (core.bounce.pages, core.tier.pages)
        for start in range(0, pages.capacity, POPULATE_BYTES)
    ]

    def go_on(_: Step | None = None) -> None:
        if pieces:
            core.queue(Step(pieces.pop(0), go_on))

    go_on()


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

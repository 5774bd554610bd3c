"""Bringing the blocks of another store, or of another system's directory, into a store.

They are put like those of a client, so they get new versions; chains, labels, pins and the order of
use come along where the source has them. What is there already is skipped, so a run that was cut
short is repeated, and a second one does nothing. Nothing leaves the store to make room.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvstore import layout, record, versions
from kvstore.answers import Ack, BlockStatus
from kvstore.batch import PutRequest
from kvstore.copying import Left
from kvstore.errors import StoreExists, StoreFull, UsageError
from kvstore.events import Kind
from kvstore.importers.base import Space
from kvstore.index import GHOST, NONE
from kvstore.job import Step
from kvstore.keys import key_array, space_number
from kvstore.opening import Options, create_store, open_store
from kvstore.pages import Pages
from kvstore.space import default_floor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvstore.backends.base import U32, Finding
    from kvstore.importers.base import Entry, Listing, Pin, Taken
    from kvstore.keys import NamespaceRecord
    from kvstore.namespaces import Namespace
    from kvstore.store import Store

BATCH_BYTES = 8 << 20
BATCH_BLOCKS = 256
STATUSES = {
    BlockStatus.CONFLICT: "a block of another length has this key",
    BlockStatus.BUSY: "no memory was free for it",
}


class Source(Protocol):
    """Where blocks come from; see :class:`kvstore.importers.base.Importer`."""

    def listing(self) -> Listing: ...

    def read(self, entries: Sequence[Entry], targets: Sequence[memoryview]) -> list[Taken]: ...

    def close(self) -> None: ...


@dataclass
class Merged:
    """What became of the blocks of a source."""

    blocks: int = 0
    bytes: int = 0
    copied: int = 0
    present: int = 0
    left: list[Left] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    interrupted: bool = False


def make(path: Path, engine: str | None, capacity: int | None, *, merge: bool) -> bool:
    """See that there is a store to bring blocks into; return whether one was made.

    With ``merge`` it may be there. Raises StoreExists, StoreNotFound, ConfigError, ...
    """
    if not (path / layout.STORE_FILE).exists():
        create_store(path, Options(engine=engine, capacity=capacity))
        return True
    if not merge:
        raise StoreExists(
            f"there is a store at {path}", "--merge adds what it lacks, or choose another place"
        )
    return False


def renamed(listing: Listing, namespace: NamespaceRecord) -> None:
    """Have all blocks of a listing in one namespace. Raises UsageError if they are of several."""
    found = {one.space.id for one in listing.entries}
    if len(found) > 1:
        raise UsageError(
            f"the source has {len(found)} namespaces, which must not become one",
            "leave out --namespace, or import them one by one",
        )
    space = Space(namespace)
    listing.entries = [replace(one, space=space) for one in listing.entries]


class Merge:
    """One run: a source into a store that nobody else has.

    ``engine`` and ``capacity`` are for opening it, ``min_free`` stays free on its filesystem.
    """

    def __init__(
        self,
        source: Source,
        listing: Listing,
        path: Path,
        *,
        engine: str | None = None,
        min_free: int | None = None,
    ) -> None:
        self._source = source
        self._listing = listing
        self._path = path
        self._options = Options(
            engine=engine,
            min_free=min_free,
            create="never",
            when_full="read-only",
            bounce_bytes=2 * max(BATCH_BYTES, self._largest()),
        )
        self._min_free = min_free
        self._added: list[Entry] = []
        self.merged = Merged(
            blocks=len(listing.entries),
            bytes=sum(one.length for one in listing.entries),
            findings=listing.findings,
        )

    def _largest(self) -> int:
        lengths = [one.length for one in self._listing.entries]
        return record.image_bytes(max(lengths, default=1))

    def run(self, told: Callable[[int], None], *, rate: int | None = None) -> Merged:
        """Bring in what is missing; ``told`` hears how many blocks each step settled.

        Raises StoreFull, StoreLocked, EngineError, ...: what is there by then stays.
        """
        store = open_store(self._path, self._options)
        try:
            wanted = self._missing(store)
            told(self.merged.blocks - len(wanted))
            self._check_room(store, wanted)
            try:
                self._bring(store, wanted, told, rate)
            except KeyboardInterrupt:
                self.merged.interrupted = True
            self._keep_links(store)
            self._keep_order(store)
            self._keep_pins(store, self._listing.pins)
            store.drain()
        finally:
            store.close()
        return self.merged

    # -- what is missing --------------------------------------------------------------------------

    def _missing(self, store: Store) -> list[Entry]:
        missing: list[Entry] = []
        for batch in batches(self._listing.entries, 1 << 40, 4096):
            namespace = store.core.namespaces.by_id(batch[0].space.id)
            if namespace is None:
                missing += batch
                continue
            rows = self._rows(store, namespace, batch)
            there = store.core.index.readable(rows)
            sizes = store.core.index.sizes[np.where(there, rows, 0)]
            for one, known, size in zip(batch, there.tolist(), sizes.tolist(), strict=True):
                if not known:
                    missing.append(one)
                elif size == one.length:
                    self.merged.present += 1
                else:
                    self._leave(one, STATUSES[BlockStatus.CONFLICT])
        return missing

    def _rows(self, store: Store, namespace: Namespace, batch: Sequence[Entry]) -> U32:
        space = space_number(namespace.number, batch[0].shard)
        return store.core.index.find(space, key_array([one.key for one in batch]))

    def _leave(self, one: Entry, reason: str) -> None:
        self.merged.left.append(Left(one.space.id.hex(), one.shard, one.key.hex(), reason))

    def _check_room(self, store: Store, wanted: Sequence[Entry]) -> None:
        core = store.core
        lengths = np.array([one.length for one in wanted], np.uint32)
        needed = int(core.engine.record_bytes_of(lengths).sum())
        usage = core.usage()
        room = core.space.high(usage.overhead) - usage.taken
        if needed > room:
            raise StoreFull(
                f"the blocks take {needed} bytes, the store at {self._path} has room for {room}",
                "raise its capacity",
            )
        found = os.statvfs(self._path)
        floor = self._min_free
        if floor is None:
            floor = default_floor(found.f_blocks * found.f_frsize)
        if usage.free - needed * core.engine.capabilities.space_factor < floor:
            raise StoreFull(
                f"the blocks take {needed} bytes, the filesystem of {self._path} has {usage.free} "
                f"free, of which {floor} stay free (min_free)",
                "free some space",
            )

    # -- bringing ---------------------------------------------------------------------------------

    def _bring(
        self,
        store: Store,
        wanted: Sequence[Entry],
        told: Callable[[int], None],
        rate: int | None,
    ) -> None:
        memory = Pages(max(BATCH_BYTES, self._largest())).memory
        began, done = time.monotonic(), 0
        for batch in batches(wanted, BATCH_BYTES, BATCH_BLOCKS):
            if rate is not None:
                time.sleep(max(0.0, done / rate - (time.monotonic() - began)))
            ends = np.cumsum([one.length for one in batch]).tolist()
            views = [memory[end - one.length : end] for end, one in zip(ends, batch, strict=True)]
            self._put(store, batch, views, self._source.read(batch, views))
            done += ends[-1]
            told(len(batch))

    def _put(
        self,
        store: Store,
        batch: Sequence[Entry],
        views: Sequence[memoryview],
        taken: Sequence[Taken],
    ) -> None:
        """Put what was read; a put has one label, so neighbours with the same go together."""
        good = []
        for one, view, outcome in zip(batch, views, taken, strict=True):
            if outcome.reason:
                self._leave(one, outcome.reason)
            else:
                good.append((one, view, outcome.label))
        for label, run in groupby(good, key=lambda item: item[2]):
            entries, sources, _ = zip(*run, strict=True)
            self._put_run(store, entries, sources, label)

    def _put_run(
        self, store: Store, batch: Sequence[Entry], views: Sequence[memoryview], label: str
    ) -> None:
        space = batch[0].space
        try:
            namespace = store.core.namespaces.open(space.record, create=True, owner=space.owner)
            job = store.put(
                PutRequest(
                    namespace,
                    batch[0].shard,
                    key_array([one.key for one in batch]),
                    np.array([one.length for one in batch], np.uint32),
                    level=Ack.WRITTEN,
                    label=label,
                    parents=tuple(one.parent for one in batch),
                ),
                views,
            )
        except UsageError as error:
            for one in batch:
                self._leave(one, error.message)
            return
        store.run(job)
        self._count(batch, job.statuses.tolist())

    def _count(self, batch: Sequence[Entry], statuses: Sequence[int]) -> None:
        for one, status in zip(batch, statuses, strict=True):
            if status == BlockStatus.OK:
                self.merged.copied += 1
                self._added.append(one)
            elif status == BlockStatus.ALREADY_PRESENT:
                self.merged.present += 1
            elif status == BlockStatus.FULL:
                raise StoreFull(
                    f"the store at {self._path} has no room for block {one.key.hex()}",
                    "raise its capacity, then repeat the command with --merge",
                )
            else:
                known = STATUSES.get(BlockStatus(status), "it cannot be written, see the log")
                self._leave(one, known)

    # -- what comes along -------------------------------------------------------------------------

    def _keep_links(self, store: Store) -> None:
        """Let what is only a ghost here too follow whom it follows in the source: a chain that has
        lost a block must not lose all that is above it."""
        core, linked = store.core, list[int]()
        for one in self._listing.ghosts:
            namespace = core.namespaces.by_id(one.space.id)
            if namespace is None:
                continue
            row = self._rows(store, namespace, [one])
            if row[0] != NONE and core.index.flags[row[0]] & GHOST:
                space = space_number(namespace.number, one.shard)
                above = core.index.ghosts(space, key_array([one.parent]))
                core.index.link(row, above)
                linked += [int(row[0]), int(above[0])]
        rows = np.unique(np.array(linked, np.uint32))
        rows = rows[(core.index.flags[rows] & GHOST) != 0]
        ghosts = versions.records(core.index, core.namespaces, rows, Kind.GHOST)

        def act() -> None:
            core.journal.append(ghosts)

        if len(rows):
            core.queue(Step(act, lambda _step: None))

    def _keep_order(self, store: Store) -> None:
        """Let the new blocks be used in the order of the source, all of them now."""
        core, found = store.core, list[tuple[float, int]]()
        for batch in batches(self._added, 1 << 40, 4096):
            namespace = core.namespaces.by_id(batch[0].space.id)
            assert namespace is not None
            rows = self._rows(store, namespace, batch).tolist()
            found += zip([one.used for one in batch], rows, strict=True)
        found.sort(reverse=True)
        rows = np.array([row for _, row in found], np.uint32)
        if len(rows):
            core.index.touch(rows, core.clock.micros())
            core.touched.append(rows)

    def _keep_pins(self, store: Store, pins: Sequence[Pin]) -> None:
        new = {(one.group, one.key) for one in self._added}
        for pin in pins:
            namespace = store.core.namespaces.by_id(pin.entry.space.id)
            left = pin.until - time.time()
            if namespace and left > 0 and (pin.entry.group, pin.entry.key) in new:
                keys = key_array([pin.entry.key])
                store.pin(namespace, pin.entry.shard, keys, left, firm=pin.firm)


def batches(
    entries: Sequence[Entry], most_bytes: int, most_blocks: int
) -> Iterator[Sequence[Entry]]:
    """Yield neighbours of one namespace, shard and length of key, at most so many at a time."""
    start, taken = 0, 0
    for at, one in enumerate(entries):
        size = record.image_bytes(one.length)
        full = taken + size > most_bytes or at - start == most_blocks
        if at > start and (full or one.group != entries[start].group):
            yield entries[start:at]
            start, taken = at, 0
        taken += size
    if entries:
        yield entries[start:]

"""Checking a store that no daemon has: stage by stage, each a method, every fault told as found.

::

    directory   what belongs there, modes and owners, records of namespaces       (survey)
    index       journal and checkpoint, replayed
    engine      opened and looked at, in a child                                   (isolate)
    records     every header, compared with the index; not with ``quick``          (compare)
    payloads    read and verified, all or a share, going on where the last ended   (verify)
    room        bytes against capacity and the share of quarantine

Nothing is written but the place where a share of the payloads ended. A repair (:mod:`kvstore.mend`)
acts on what a check found, and another check tells whether that was enough.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from kvstore import checkpoint, compare, files, layout, payloads, record, salvage
from kvstore.backends import engine_class
from kvstore.backends.base import EngineContext
from kvstore.compare import Comparison, Index
from kvstore.errors import (
    CorruptStore,
    EngineDied,
    EngineError,
    EngineHung,
    KVStoreError,
    PermissionDenied,
    StoreNotFound,
)
from kvstore.events import Kind
from kvstore.findings import CLASSES, Found, Severity, id_of
from kvstore.isolate import LIMIT_SECONDS, Child, Inspection
from kvstore.journal import HEADER_BYTES, FileHeader, parse_name
from kvstore.namespaces import Namespaces
from kvstore.settle import settle
from kvstore.space import quarantine_limit
from kvstore.survey import Survey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstore.backends.base import Engine, Finding
    from kvstore.checkpoint import Loaded
    from kvstore.layout import StoreRecord
    from kvstore.settle import Settled

QUICK, HEADERS, PAYLOADS = range(3)
"""How deep a check goes."""
_NEVER = (1 << 64) - 1
BEYOND_REPAIR = ("engine-unopenable", "engine-died", "bad-tree", "bad-superblock")
"""What only making the store anew out of the raw files helps against."""


@dataclass(frozen=True, slots=True)
class Options:
    """``share``: part of the payload bytes to verify; ``most_bytes``: how many at most; both go on
    where the last check ended. ``max_seconds``: then the check stops at a safe point."""

    depth: int = HEADERS
    share: float = 1.0
    most_bytes: int | None = None
    max_seconds: float | None = None
    engine_seconds: float = LIMIT_SECONDS

    @property
    def partly(self) -> bool:
        return self.share < 1 or self.most_bytes is not None or self.max_seconds is not None

    def after(self, report: Report) -> Options:
        """Return how to check once more after a repair: payloads only where that check could not
        know all records."""
        whole = self.depth == PAYLOADS and report.untrusted and not self.partly
        return self if whole else replace(self, depth=HEADERS)


@dataclass
class Report:
    """What a check found. ``bytes``: of payloads verified, as records take them; ``checked``: how
    many blocks; ``ok`` of them are whole as far as this check looked."""

    store: Path
    found: list[Found] = field(default_factory=list)
    blocks: int = 0
    records: int = 0
    checked: int = 0
    bytes: int = 0
    used_bytes: int = 0
    finished: bool = True
    bad: np.ndarray = field(default_factory=lambda: np.zeros(0, np.bool_))
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.void))
    strange: list[Finding] = field(default_factory=list)
    folder: str = layout.BLOCKS
    """The engine's directory."""
    untrusted: bool = False
    """The journal does not tell everything."""

    @property
    def counts(self) -> Counter[str]:
        return Counter(one.id for one in self.found)

    @property
    def faults(self) -> list[Found]:
        """What makes the store not clean."""
        return [one for one in self.found if one.severity != Severity.NOTE]

    @property
    def beyond_repair(self) -> bool:
        """Whether the engine must be made anew."""
        return any(one.id in BEYOND_REPAIR for one in self.found)

    @property
    def to_do(self) -> dict[str, int]:
        """How many findings there are of each kind that a repair acts on."""
        return {
            name: count
            for name, count in self.counts.items()
            if not CLASSES[name].repair.startswith("nothing")
        }


class Check:
    """One check of a store; the caller holds its lock. ``tell(found)`` is called for each finding,
    ``seen(bytes, of bytes)`` as payloads are read."""

    def __init__(
        self,
        path: Path,
        options: Options,
        tell: Callable[[Found], object] = lambda _: None,
        seen: Callable[[int, int], object] = lambda _done, _total: None,
    ) -> None:
        self.report = Report(path)
        self._path = path
        self._options = options
        self._tell = tell
        self._seen = seen
        self._begun = time.monotonic()

    def run(self) -> Report:
        """Go through all stages. Raises StoreNotFound, FormatUnsupported, PermissionDenied,
        EngineHung and what else keeps a store from being looked at."""
        try:
            found = layout.read(self._path)
        except (CorruptStore, StoreNotFound) as error:
            if isinstance(error, StoreNotFound) and not (self._path / layout.BLOCKS).is_dir():
                raise
            self._note(Found("store-file", layout.STORE_FILE, error.message))
            return self.report
        except PermissionDenied as error:
            return self._without_record(error)
        if doubt := _doubt(self._path, found):
            self._note(Found("store-file", layout.STORE_FILE, doubt))
            return self.report
        self.report.folder = found.blocks
        self._directory(found.blocks, found.previous.blocks if found.previous else "")
        self._engine(found, self._index(found))
        self._room(found)
        return self.report

    def _without_record(self, error: PermissionDenied) -> Report:
        """Tell of the mode that keeps STORE.json from being read, if that is why."""
        self._directory(layout.BLOCKS)
        if not any(one.path == layout.STORE_FILE for one in self.report.found):
            raise error
        return self.report

    def _note(self, found: Found) -> None:
        self.report.found.append(found)
        self._tell(found)

    def _notes(self, found: list[Found]) -> None:
        for one in found:
            self._note(one)

    # -- directory and index ----------------------------------------------------------------------

    def _directory(self, blocks: str, former: str = "") -> None:
        survey = Survey(self._path, blocks, former)
        try:
            for found in survey.look():
                self._note(found)
        except OSError as error:
            raise files.translate(error, f"list {self._path}") from error
        self.report.used_bytes = survey.bytes
        self._quarantine_bytes = survey.quarantine_bytes

    def _index(self, found: StoreRecord) -> Index:
        """Replay the journal."""
        folder = self._path / found.blocks
        loaded = checkpoint.load(folder, found.uuid, found.epoch)
        self.report.untrusted = loaded.torn or loaded.missing
        if self.report.untrusted:
            name = "journal-missing" if loaded.missing else "journal-torn"
            self._note(Found(name, found.blocks, loaded.reason))
        settled = settle(loaded.events)
        rows = settled.rows[settled.rows["kind"] == Kind.PUT]
        if not engine_class(found.engine).capabilities.persistent:
            rows = rows[:0]
        self.report.blocks = len(rows)
        self.report.rows, self.report.bad = rows, np.zeros(len(rows), np.bool_)
        self._nameless(rows)
        return Index(
            rows, _left(loaded, settled), not self.report.untrusted, _synced(loaded, settled)
        )

    def _nameless(self, rows: np.ndarray) -> None:
        spaces = Namespaces(self._path / layout.NAMESPACES, read_only=True)
        try:
            spaces.load()
        except KVStoreError:
            return  # the survey has told
        for identity in np.unique(rows["namespace"], axis=0):
            if spaces.by_id(identity.tobytes()) is None:
                name = identity.tobytes().hex()
                count = int((rows["namespace"] == identity).all(axis=1).sum())
                path = f"{layout.NAMESPACES}/{name}.json"
                self._note(Found("namespace-unknown", path, f"{count} blocks", namespace=name))

    # -- engine, records, payloads ----------------------------------------------------------------

    def _engine(self, found: StoreRecord, index: Index) -> None:
        folder = self._path / found.blocks
        context = EngineContext(
            folder,
            found.uuid,
            found.engine_options,
            read_only=True,
            capacity=found.capacity_bytes,
            parity=found.parity,
        )
        engine = engine_class(found.engine)(context)
        subject = f"the {found.engine} engine in {folder}"
        try:
            with Child(subject, limit=self._options.engine_seconds) as child:
                inspection = Inspection(child, found.engine, context)
                self._structure(inspection, found.blocks)
                if self._options.depth >= HEADERS:
                    result = self._records(inspection, index, engine, found.blocks)
                    if self._options.depth >= PAYLOADS:
                        self._payloads(inspection, index, engine, found, result)
        except EngineDied as error:
            self._note(Found("engine-died", found.blocks, error.message))
        except (CorruptStore, StoreNotFound) as error:
            self._note(Found("engine-unopenable", found.blocks, error.message))
        except PermissionDenied:
            if not self.report.counts["mode"]:
                raise
        except EngineHung:
            raise
        except EngineError as error:
            self._note(Found("engine-unopenable", found.blocks, error.message))

    def _structure(self, inspection: Inspection, blocks: str) -> None:
        known = {one.path for one in self.report.found}
        for one in inspection.check():
            name = "cut-file" if one.kind == "short" else id_of(one.kind)
            path = f"{blocks}/{one.path}"
            if path not in known:
                self.report.strange.append(one)
                self._note(Found(name, path, one.detail))

    def _records(
        self, inspection: Inspection, index: Index, engine: Engine, blocks: str
    ) -> Comparison:
        report = self.report
        scanned = compare.gather(inspection.scan())
        if not len(scanned) and {one.kind for one in scanned.strange} == {"other-store"}:
            detail = "all records are of another store than it says"
            self._note(Found("store-file", layout.STORE_FILE, detail))
            return compare.nothing(index)
        told = {one.path for one in report.strange}
        strange = tuple(one for one in scanned.strange if one.path not in told)
        result = compare.compare(index, replace(scanned, strange=strange), engine, blocks)
        report.strange += result.strange
        report.records, report.bad = result.records, result.bad
        report.checked = len(index.rows)
        for found in result.found:
            self._note(found)
        return result

    def _payloads(
        self,
        inspection: Inspection,
        index: Index,
        engine: Engine,
        found: StoreRecord,
        result: Comparison,
    ) -> None:
        """Verify payloads in the order in which they lie, from where the last check ended."""
        options, report, rows = self._options, self.report, index.rows
        order = np.lexsort((rows["generation"], rows["place"]))
        order = order[(result.seen & ~result.bad & ~result.elsewhere)[order]]
        total = int(record.image_bytes_of(rows["length"][order].astype(np.uint32)).sum())
        if options.partly:
            order = np.roll(order, -payloads.start(self._path, found.uuid, rows[order]))
        budget = min(int(total * options.share), options.most_bytes or total)
        reader = payloads.Payloads(inspection, engine, index, found.blocks)
        report.checked = report.bytes = 0
        while report.checked < len(order) and report.bytes < budget and not self._late():
            rest = order[report.checked : report.checked + payloads.CHUNK_ROWS]
            count, size, bad = reader.verify(rest, budget - report.bytes)
            for row, one in bad:
                report.bad[row] |= one.id not in ("unreadable", "padding")
                self._note(one)
            report.checked, report.bytes = report.checked + count, report.bytes + size
            self._seen(report.bytes, budget)
        report.finished = report.checked == len(order)
        if options.partly and len(order):
            payloads.keep(self._path, found.uuid, rows[order[report.checked % len(order)]])

    def _late(self) -> bool:
        limit = self._options.max_seconds
        return limit is not None and time.monotonic() - self._begun > limit

    # -- room -------------------------------------------------------------------------------------

    def _room(self, found: StoreRecord) -> None:
        used, most = self.report.used_bytes, found.capacity_bytes
        if used > most:
            self._note(Found("over-capacity", "", f"it takes {used} bytes of {most}"))
        limit = quarantine_limit(most)
        if self._quarantine_bytes > limit:
            detail = f"it takes {self._quarantine_bytes} bytes of {limit}"
            self._note(Found("quarantine-full", layout.QUARANTINE, detail))


def _doubt(path: Path, found: StoreRecord) -> str:
    """Say why STORE.json, which has no checksum, is not believed; empty if it is."""
    try:
        if not salvage.believable(path, found):
            return f"it says {found.engine} in {found.blocks}, which is not there"
        uuids = set(_uuids(path / found.blocks))
    except OSError:
        return ""  # the survey tells what may not be looked at
    if uuids and found.uuid not in uuids:
        return f"journal and checkpoint are of store {min(uuids).hex()}"
    return ""


def _uuids(folder: Path) -> Iterator[bytes]:
    """Yield of which stores journals and checkpoints are, as far as they can be read."""
    for name in os.listdir(folder):
        if parse_name(name):
            with suppress(OSError, CorruptStore), files.open_regular(folder / name) as opened:
                yield FileHeader.decode(opened.read(HEADER_BYTES)).uuid


def _left(loaded: Loaded, settled: Settled) -> np.ndarray:
    left = settled.leftovers
    if loaded.torn or loaded.missing:
        left = left[np.isin(left["kind"], (Kind.FREE, Kind.PUT))]
    generations: np.ndarray = left["generation"].astype(np.uint64)
    return generations


def _synced(loaded: Loaded, settled: Settled) -> int:
    """Return up to which generation nothing can be missing for want of a sync."""
    boot = layout.boot_id()
    lost_power = not loaded.clean and len(loaded.events) and (not boot or boot != loaded.boot_id)
    return settled.synced if lost_power else _NEVER

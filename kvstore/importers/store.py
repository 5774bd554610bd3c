"""A store of our own as a source: read under a shared lock, every record judged."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from kvstore import checkpoint, copying, layout, record, versions
from kvstore.backends import engine_class, plain_name
from kvstore.backends.base import EngineContext, Finding
from kvstore.backends.judging import judge_all
from kvstore.errors import ConfigError, CorruptStore
from kvstore.events import Kind
from kvstore.importers.base import Entry, Listing, Pin, Space, Taken
from kvstore.namespaces import Namespaces
from kvstore.order import chain_order
from kvstore.settle import settle

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from kvstore.backends.base import Engine


class StoreSource:
    """The blocks of a store with their chains, labels and pins. ``listing`` raises what
    ``layout.read`` and ``Lock.acquire`` do."""

    def __init__(
        self, root: Path, fields: Mapping[str, str | int] | None = None, engine: str | None = None
    ) -> None:
        self.root = root
        self.fields = dict(fields or {})
        self._wanted = engine and plain_name(engine)
        self._lock = layout.Lock(root)
        self._engine: Engine | None = None

    def listing(self) -> Listing:
        self._record = found = layout.read(self.root)
        if self._wanted not in (None, found.engine):
            raise ConfigError(
                f"the store at {self.root} uses the engine {found.engine}, not {self._wanted}",
                f"write {found.engine}:{self.root}, or the path alone",
            )
        self._lock.acquire(exclusive=False)
        loaded = checkpoint.load(self.root / found.blocks, found.uuid, found.epoch)
        if loaded.torn or loaded.missing:
            raise CorruptStore(
                f"what the store at {self.root} holds is not known: {loaded.reason}",
                "start its daemon once: it looks at all records",
            )
        settled = settle(loaded.events)
        self._rows = settled.rows
        listing = Listing(findings=self._spaces())
        every = list(self._entries(listing))
        places = {one.number: one for one in every if one.length}
        at = {int(row): number for number, row in enumerate(self._rows["row"])}
        listing.entries = list(places.values())
        listing.ghosts = [one for one in reversed(every) if not one.length and one.parent]
        listing.pins = [
            Pin(places[at[row]], until / 1e6, row in settled.firm)
            for row, until in settled.pins.items()
            if at[row] in places
        ]
        return listing

    def _spaces(self) -> list[Finding]:
        """Read the namespaces; return a finding for each file that makes no sense."""
        namespaces = Namespaces(self.root / layout.NAMESPACES, read_only=True)
        namespaces.load()
        self._known = {
            one.id: Space({**one.record, **self.fields}, one.owner)
            for one in namespaces
            if one.record is not None
        }
        return [Finding("namespace", layout.NAMESPACES, text) for text in namespaces.problems]

    def _entries(self, listing: Listing) -> Iterator[Entry]:
        """Yield all rows whose namespace is known; a ghost has no length."""
        rows, lost = self._rows, 0
        at = {int(row): number for number, row in enumerate(rows["row"])}
        for number in chain_order(rows).tolist():
            row = rows[number]
            there = bool(row["kind"] == Kind.PUT)
            space = self._known.get(row["namespace"].tobytes())
            if space is None:
                lost += there
                continue
            above = at.get(int(row["parent"]))
            parent = b"" if above is None else _key(rows[above])
            used = int(row["last_use"]) / 1e6
            yield Entry(
                *(space, int(row["shard"]), _key(row), int(row["length"]) * there, used, self.root),
                parent=parent,
                number=number,
            )
        if lost:
            detail = f"{lost} blocks whose namespace is not known are left"
            listing.findings.append(Finding("namespace", layout.NAMESPACES, detail))

    def read(self, entries: Sequence[Entry], targets: Sequence[memoryview]) -> list[Taken]:
        rows = self._rows[[entry.number for entry in entries]]
        (blocks,) = versions.blocks_of(rows)
        size = int(record.image_bytes_of(blocks.lengths).sum())
        images = copying.cut(memoryview(mmap.mmap(-1, size)), blocks)
        taken = []
        reasons = copying.faults(judge_all(self._open(), blocks, images))
        for image, target, reason in zip(images, targets, reasons, strict=True):
            if reason:
                taken.append(Taken(reason=reason))
                continue
            start = record.HEADER_PAGE
            np.copyto(np.frombuffer(target, np.uint8), image[start : start + len(target)])
            taken.append(Taken(record.decode(image[:start]).label))
        return taken

    def _open(self) -> Engine:
        if self._engine is None:
            found = self._record
            context = EngineContext(
                self.root / found.blocks,
                found.uuid,
                found.engine_options,
                read_only=True,
                parity=found.parity,
            )
            self._engine = engine_class(found.engine)(context)
            self._engine.open()
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        self._lock.release()


def _key(row: np.void) -> bytes:
    key: bytes = row["key"][: row["key_length"]].tobytes()
    return key

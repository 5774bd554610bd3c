"""What a store holds, told without opening it: nothing is written, no engine is started.

STORE.json, namespaces, journal and checkpoint are read under a shared lock; block files are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore import checkpoint, layout, node, parity
from kvstore.backends import engine_class
from kvstore.events import Kind
from kvstore.namespaces import Namespaces
from kvstore.settle import settle

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kvstore.events import Records
    from kvstore.keys import NamespaceRecord
    from kvstore.layout import StoreRecord


@dataclass(frozen=True)
class NamespaceShare:
    """What one namespace has in the store; ``record`` is None if its file is damaged or gone."""

    id: str
    record: NamespaceRecord | None
    key_length: int | None
    blocks: int
    live_bytes: int
    quota_bytes: int | None


@dataclass(frozen=True)
class Summary:
    """Figures of a store at rest; bytes and counts.

    ``clean``: the last daemon finished its drain. ``damage`` says in words what is wrong with
    journal, checkpoint or namespaces; the next opening then scans the block files.
    """

    store: Path
    record: layout.StoreRecord
    namespaces: tuple[NamespaceShare, ...]
    blocks: int
    ghosts: int
    live_bytes: int
    used_bytes: int
    journal_bytes: int
    quarantine_bytes: int
    kept_bytes: int
    clean: bool
    damage: tuple[str, ...]

    def document(self) -> Mapping[str, object]:
        """Return the summary for JSON."""
        return {
            "store": self.store,
            "uuid": self.record.uuid,
            "format": self.record.format,
            "engine": self.record.engine,
            "parity": parity.KINDS[self.record.parity],
            "disk_checksums": node.checksums_data(self.store / self.record.blocks),
            "capacity_bytes": self.record.capacity_bytes,
            "created": self.record.created,
            "opens": self.record.opens,
            "clean": self.clean,
            "blocks": self.blocks,
            "ghosts": self.ghosts,
            "live_bytes": self.live_bytes,
            "used_bytes": self.used_bytes,
            "journal_bytes": self.journal_bytes,
            "quarantine_bytes": self.quarantine_bytes,
            "kept_bytes": self.kept_bytes,
            "namespaces": [
                {
                    "id": share.id,
                    "record": share.record,
                    "key_length": share.key_length,
                    "blocks": share.blocks,
                    "live_bytes": share.live_bytes,
                    "quota_bytes": share.quota_bytes,
                }
                for share in self.namespaces
            ],
            "damage": list(self.damage),
        }


def summarize(path: Path) -> Summary:
    """Return the summary of the store at ``path``.

    Raises StoreNotFound, StoreLocked (a daemon or another command writes to it), FormatUnsupported,
    CorruptStore (STORE.json), PermissionDenied.
    """
    found = layout.read(path)
    lock = layout.Lock(path)
    lock.acquire(exclusive=False)
    try:
        return _read(path, found)
    finally:
        lock.release()


def _read(path: Path, found: layout.StoreRecord) -> Summary:
    blocks = path / found.blocks
    namespaces = Namespaces(path / layout.NAMESPACES, read_only=True)
    namespaces.load()
    loaded = checkpoint.load(blocks, found.uuid, found.epoch)
    rows = settle(loaded.events).rows
    live = rows[rows["kind"] == Kind.PUT]
    spoiled = loaded.torn or loaded.missing
    return Summary(
        store=path,
        record=found,
        namespaces=_shares(namespaces, live, found),
        blocks=len(live),
        ghosts=len(rows) - len(live),
        live_bytes=_live_bytes(live, found),
        used_bytes=layout.directory_bytes(path),
        journal_bytes=_journal_bytes(blocks),
        quarantine_bytes=layout.directory_bytes(path / layout.QUARANTINE),
        kept_bytes=layout.kept_bytes(path, found),
        clean=loaded.clean,
        damage=(*((loaded.reason,) if spoiled else ()), *namespaces.problems),
    )


def _shares(
    namespaces: Namespaces, live: Records, found: StoreRecord
) -> tuple[NamespaceShare, ...]:
    identities, which = np.unique(live["namespace"], axis=0, return_inverse=True)
    parts = {
        identity.tobytes(): live[which.ravel() == number]
        for number, identity in enumerate(identities)
    }
    # Those without a block are known by their files only, those without a file by their blocks.
    known = {namespace.id: namespace for namespace in namespaces}
    shares = []
    for identity in sorted({*parts, *known}):
        part = parts.get(identity, live[:0])
        space = known.get(identity)
        shares.append(
            NamespaceShare(
                id=identity.hex(),
                record=space.record if space else None,
                key_length=int(part["key_length"][0]) if len(part) else None,
                blocks=len(part),
                live_bytes=_live_bytes(part, found),
                quota_bytes=space.quota if space else None,
            )
        )
    return tuple(shares)


def _live_bytes(live: Records, found: StoreRecord) -> int:
    lengths = live["length"].astype(np.uint32)
    return int(engine_class(found.engine).record_sizes(lengths, parity=found.parity).sum())


def _journal_bytes(blocks: Path) -> int:
    return sum(
        layout.directory_bytes(blocks / name.name)
        for name in blocks.iterdir()
        if name.name.startswith(("journal.", "checkpoint."))
    )

"""A new checkpoint and journal for blocks whose records were found without them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore import events, layout
from kvstore.checkpoint import CheckpointWriter
from kvstore.journal import Journal, parse_name
from kvstore.salvage import unique_stamps
from kvstore.space import journal_reserve

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.backends.raw import Identity, Raw
    from kvstore.events import Records
    from kvstore.layout import StoreRecord
    from kvstore.salvage import History, Kept


@dataclass(frozen=True, slots=True)
class Entry:
    """A block of the new index: its record, its stamp, and where the engine has it."""

    kept: Kept
    place: int


def write_index(folder: Path, found: StoreRecord, entries: list[Entry], history: History) -> None:
    """Write a checkpoint with these blocks, oldest use first, and a journal that ended cleanly.

    They count once STORE.json has the epoch of ``found``. Raises StoreFull, EngineError, ...
    """
    # Never number 1: alone, without a checkpoint, it would pass for a whole store.
    taken = [known[1] for name in os.listdir(folder) if (known := parse_name(name))]
    sequence = max([1, *taken]) + 1
    journal = Journal.create(
        folder, sequence, found.uuid, found.epoch, journal_reserve(found.capacity_bytes)
    )
    try:
        journal.append(_marks(found))
        journal.sync()
    finally:
        journal.close()
    writer = CheckpointWriter(folder, sequence, found.uuid, found.epoch)
    try:
        for records in (*_rows(entries, history), _synced(entries)):
            writer.append(records)
        writer.finish()
    finally:
        writer.abandon()


def _marks(found: StoreRecord) -> Records:
    marks = events.blank(2, events.Kind.OPEN)
    marks["kind"][1] = events.Kind.CLOSE
    marks["namespace"][0] = np.frombuffer(layout.boot_id().ljust(16, b"\0"), np.uint8)
    marks["generation"][0] = found.opens << 32
    return marks


def _synced(entries: list[Entry]) -> Records:
    mark = events.blank(1, events.Kind.SYNC)
    mark["generation"] = max((one.kept.raw.header.generation for one in entries), default=0)
    return mark


def _rows(entries: list[Entry], history: History) -> tuple[Records, Records, Records]:
    """Return rows of blocks, of ghosts that tie them together, and their pins."""
    headers = [one.kept.raw.header for one in entries]
    numbers = {one.kept.raw.identity: number for number, one in enumerate(entries)}
    parents: dict[Identity, Identity | None] = {
        one.kept.raw.identity: _parent(one.kept.raw) for one in entries
    }
    for identity in filter(None, list(parents.values())):
        _add_ghosts(identity, parents, numbers, history)
    rows = _named(list(numbers), events.Kind.PUT)
    rows["row"] = np.arange(len(rows))
    links = [parents[identity] for identity in numbers]
    rows["parent"] = [events.NONE if link is None else numbers[link] for link in links]
    blocks, ghosts = rows[: len(entries)], rows[len(entries) :]
    blocks["length"] = [header.stored_length for header in headers]
    blocks["generation"] = [header.generation for header in headers]
    blocks["place"] = [one.place for one in entries]
    blocks["last_use"] = unique_stamps([one.kept for one in entries])
    ghosts["kind"] = events.Kind.GHOST
    return blocks, ghosts, _pins(numbers, history)


def _parent(raw: Raw) -> Identity | None:
    header = raw.header
    # A link to a key of another length is none, as in a scan.
    if not header.parent or len(header.parent) != len(header.key):
        return None
    return header.namespace, header.shard, header.parent


def _add_ghosts(
    identity: Identity,
    parents: dict[Identity, Identity | None],
    numbers: dict[Identity, int],
    history: History,
) -> None:
    """Give a row to a block that is not there but that others follow, and to those before it."""
    following: Identity | None = identity
    while following is not None and following not in numbers:
        numbers[following] = len(numbers)
        parents[following] = before = history.parent(following)
        following = before


def _named(identities: list[Identity], kind: events.Kind) -> Records:
    rows = events.blank(len(identities), kind)
    keys = b"".join(key.ljust(64, b"\0") for _, _, key in identities)
    names = b"".join(namespace for namespace, _, _ in identities)
    rows["key"] = np.frombuffer(keys, np.uint8).reshape(-1, 64)
    rows["namespace"] = np.frombuffer(names, np.uint8).reshape(-1, 16)
    rows["key_length"] = [len(key) for _, _, key in identities]
    rows["shard"] = [shard for _, shard, _ in identities]
    return rows


def _pins(numbers: dict[Identity, int], history: History) -> Records:
    known = [
        (numbers[name], until, firm) for name, until, firm in history.pins() if name in numbers
    ]
    pins = events.blank(len(known), events.Kind.PIN)
    pins["row"] = [row for row, _, _ in known]
    pins["last_use"] = [until for _, until, _ in known]
    pins["length"] = [firm for _, _, firm in known]
    return pins

"""What can be had of a store whose engine or metadata is damaged: found, chosen, verified.

The raw reader of the engine finds records by their envelopes. Journal and checkpoint, as far as
they can be read, say which of them count: of a journal that is whole they are all that count, of
any other they tell what was given up, and the order of use. Of several versions of a block the
highest generation counts. Nothing is written here.
"""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore import checkpoint, events, files, layout, record, settle
from kvstore.backends import engine_class, engine_names
from kvstore.backends.base import EngineContext
from kvstore.backends.raw import Raw, Remains, new_image
from kvstore.errors import ConfigError, CorruptStore, StoreNotFound
from kvstore.journal import HEADER_BYTES, FileHeader, parse_name
from kvstore.parity import kept_bytes
from kvstore.space import MIN_CAPACITY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from kvstore.backends.raw import Extent, Identity, Salvage
    from kvstore.events import Records
    from kvstore.layout import StoreRecord

    Seen = Callable[[int], object]

MARKS = {"tmp": "filesystem", "super": "superblock"} | {n: n for n in ("lmdb", "leveldb", "sqlite")}
"""Directories by which an engine is known."""
NO_UUID = bytes(16)


@dataclass(frozen=True, slots=True)
class Kept:
    """A record that is whole, and its stamp: microseconds, the order of use."""

    raw: Raw
    stamp: int

    @property
    def bytes(self) -> int:
        return kept_bytes(self.raw.header)


@dataclass(frozen=True, slots=True)
class Damaged:
    """A record that is not: where it lies, and what it is as far as that is known."""

    found: Raw | Remains
    reason: str
    identity: Identity | None
    generation: int

    @property
    def extent(self) -> Extent | None:
        """Where it begins; None where nothing of its payload was found."""
        return self.found.first if isinstance(self.found, Raw) else self.found.extent

    @property
    def bytes(self) -> int:
        if isinstance(self.found, Remains):
            return self.found.extent.length
        return kept_bytes(self.found.header)


@dataclass
class Survey:
    """All of it. ``known``: STORE.json was good; else ``record`` is what the files show.

    ``kept`` oldest use first. ``lost``: blocks that the journal names and no file has. ``stale``:
    records that do not count: old versions, copies, what was deleted. ``others``: records of other
    stores. ``problems`` says in words what else is wrong.
    """

    path: Path
    record: StoreRecord
    known: bool
    salvage: Salvage
    history: History
    kept: list[Kept] = field(default_factory=list)
    damaged: list[Damaged] = field(default_factory=list)
    lost: list[Identity] = field(default_factory=list)
    stale: list[Raw] = field(default_factory=list)
    others: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def blocks(self) -> Path:
        return self.path / self.record.blocks

    @property
    def kept_bytes(self) -> int:
        return sum(one.bytes for one in self.kept)

    def path_of(self, extent: Extent) -> str:
        """Return the path of a file in the engine's directory."""
        return self.salvage.files.paths[extent.file]


# -- journal and checkpoint -----------------------------------------------------------------------


class History:
    """What journal and checkpoint say. ``complete``: of every block that counts."""

    def __init__(self, blocks: Path, uuid: bytes, epoch: int, opens: int | None) -> None:
        loaded = checkpoint.load(blocks, uuid, epoch)
        self.settled = settle.settle(loaded.events)
        self.reason = loaded.reason
        rows = self.settled.rows
        self.at = {_identity(row): number for number, row in enumerate(rows)}
        self._positions = {int(row): number for number, row in enumerate(rows["row"])}
        live = rows["kind"] == events.Kind.PUT
        self._live = live
        self.places = dict(zip(rows["place"][live].tolist(), np.flatnonzero(live), strict=True))
        broken = loaded.torn or loaded.missing or not len(loaded.events)
        boot = layout.boot_id()
        kept_power = loaded.clean or (bool(boot) and boot == loaded.boot_id)
        self.complete = not broken and kept_power and opens in (None, _opens(loaded.events))
        self.given_up = self._given_up()

    def _given_up(self) -> frozenset[int]:
        """Return the generations that must not come back, as an opening has it."""
        left = self.settled.leftovers
        if not self.complete:
            ended = np.isin(left["kind"], (events.Kind.FREE, events.Kind.PUT))
            left = left[ended]
        return frozenset(left["generation"].tolist())

    def live(self, identity: Identity) -> int | None:
        """Return the generation of a block that counts."""
        number = self.at.get(identity)
        if number is None or not self._live[number]:
            return None
        return int(self.settled.rows["generation"][number])

    def stamp(self, identity: Identity) -> int:
        """Return when a block was used last, 0 if that is not known."""
        number = self.at.get(identity)
        return 0 if number is None else int(self.settled.rows["last_use"][number])

    def parent(self, identity: Identity) -> Identity | None:
        """Return which block comes before one in its chain."""
        number = self.at.get(identity)
        parent = events.NONE if number is None else int(self.settled.rows["parent"][number])
        position = self._positions.get(parent)
        return None if position is None else _identity(self.settled.rows[position])

    def pins(self) -> Iterator[tuple[Identity, int, bool]]:
        """Yield pinned blocks, until when (microseconds), and whether an administrator did it."""
        for row, until in self.settled.pins.items():
            position = self._positions[row]
            yield _identity(self.settled.rows[position]), until, row in self.settled.firm

    def rows(self) -> Records:
        """Return the rows of blocks that count."""
        rows: Records = self.settled.rows[self._live]
        return rows


def _opens(found: Records) -> int:
    opened = found[found["kind"] == events.Kind.OPEN]
    return int(opened["generation"][-1]) >> 32 if len(opened) else -1


def _identity(row: Any) -> Identity:  # noqa: ANN401
    key = row["key"].tobytes()[: int(row["key_length"])]
    return row["namespace"].tobytes(), int(row["shard"]), key


# -- which store it is ----------------------------------------------------------------------------


def read_record(path: Path) -> StoreRecord | None:
    """Return STORE.json, None if it is damaged or gone. Raises StoreNotFound where there is no
    directory, FormatUnsupported, PermissionDenied."""
    try:
        return layout.read(path)
    except CorruptStore:
        return None
    except StoreNotFound:
        if not path.is_dir():
            raise
        return None


def find_engines(path: Path) -> list[tuple[str, str]]:
    """Return directories of a store that look like those of engines, each with the engine."""
    return [
        (folder.name, name)
        for folder in sorted(path.glob(f"{layout.BLOCKS}*"))
        for mark, name in MARKS.items()
        if (folder / mark).is_dir() and not folder.is_symlink()
    ]


def find_engine(path: Path, engine: str | None) -> tuple[str, str]:
    """Return directory and name of the engine of a store without STORE.json.

    Raises StoreNotFound, and ConfigError where ``engine`` must help out.
    """
    found = find_engines(path)
    if engine is not None and (path / layout.BLOCKS).is_dir() and not found:
        return layout.BLOCKS, engine
    found = [one for one in found if engine in (None, one[1])] or found
    if not found:
        raise StoreNotFound(
            f"{path} has no {layout.STORE_FILE} and no directory of an engine",
            "give the directory of a store",
        )
    if len({name for _, name in found}) > 1 and engine is None:
        raise ConfigError(
            f"{path} has files of {' and '.join(sorted({name for _, name in found}))}",
            "say which with --engine",
        )
    return max(found, key=lambda one: (_has_journal(path / one[0]), one[0]))


def believable(path: Path, found: StoreRecord) -> bool:
    """Tell whether the directory looks as STORE.json says, which has no checksum."""
    if found.engine not in engine_names():
        return False
    there = find_engines(path)
    return not there or found.engine not in MARKS.values() or (found.blocks, found.engine) in there


def _has_journal(folder: Path) -> bool:
    return any(parse_name(name) for name in os.listdir(folder))


def _guess_record(
    path: Path,
    salvage: Salvage,
    folder: str,
    engine: str,
    raws: list[Raw],
    partly: StoreRecord | None,
) -> StoreRecord:
    """Return a record for a store that has none, or a wrong one, from what its files say."""
    found = os.statvfs(path)
    wanted = max(layout.directory_bytes(path) * 2, found.f_blocks * found.f_frsize // 2)
    base = partly or layout.new_record(engine=engine, capacity=max(wanted, MIN_CAPACITY))
    if any(raw.header.parity for raw in raws):
        base = base.with_parity()
    counted = Counter(raw.header.store for raw in raws)
    uuid = counted.most_common(1)[0][0] if counted else base.uuid
    return replace(
        base,
        uuid=uuid,
        engine=engine,
        engine_options=salvage.options(),
        blocks=folder,
        epoch=max(base.epoch, _epoch(path / folder, uuid)),
    )


def _corrected(found: StoreRecord, raws: list[Raw]) -> StoreRecord:
    """Return it with ``opens`` as high as the records say, so that no number comes twice, and a
    capacity with which a store opens."""
    mine = (raw.header.generation >> 32 for raw in raws if raw.header.store == found.uuid)
    return replace(
        found,
        opens=max((found.opens, *(number for number in mine if number < layout.MAX_OPENS))),
        capacity_bytes=max(found.capacity_bytes, MIN_CAPACITY),
    )


def _epoch(folder: Path, uuid: bytes) -> int:
    """Return the newest epoch that a journal or checkpoint of the store has."""
    found = [0]
    for name in os.listdir(folder):
        if parse_name(name):
            with suppress(OSError, CorruptStore), files.open_regular(folder / name) as opened:
                header = FileHeader.decode(opened.read(HEADER_BYTES))
                found.append(header.epoch if header.uuid == uuid else 0)
    return max(found)


# -- the survey -----------------------------------------------------------------------------------


@contextmanager
def survey(path: Path, *, engine: str | None = None, seen: Seen | None = None) -> Iterator[Survey]:
    """Look for all blocks of the store at ``path``, whose lock the caller holds.

    ``engine`` counts where STORE.json is gone and the directory does not tell. ``seen(bytes)`` is
    called as the search goes on. Raises StoreNotFound, ConfigError, FormatUnsupported,
    PermissionDenied, EngineError.
    """
    read = read_record(path)
    known = read if read is not None and believable(path, read) else None
    folder, name = (known.blocks, known.engine) if known else find_engine(path, engine)
    salvage = _reader(path / folder, name, known)
    try:
        if known is not None and not salvage.agrees():
            salvage.close()
            known, salvage = None, _reader(path / folder, name, None)
        salvage.seen = seen or salvage.seen
        _check_listed(salvage)
        raws, remains = _find(salvage)
        if known is not None and raws and all(raw.header.store != known.uuid for raw in raws):
            known = None
        found = known or _guess_record(path, salvage, folder, name, raws, read)
        history = History(path / folder, found.uuid, found.epoch, known.opens if known else None)
        found = _corrected(found, raws)
        result = Survey(path, found, known is not None, salvage, history)
        _judge(result, raws, remains)
        yield result
    finally:
        salvage.close()


def _reader(folder: Path, engine: str, known: StoreRecord | None) -> Salvage:
    uuid, options = (known.uuid, known.engine_options) if known else (NO_UUID, {})
    return engine_class(engine).salvage(EngineContext(folder, uuid, options, read_only=True))


def _check_listed(salvage: Salvage) -> None:
    for error in salvage.files.unlisted:
        if error.errno in (errno.EACCES, errno.EPERM):
            raise files.translate(error, f"list {error.filename}")


def _find(salvage: Salvage) -> tuple[list[Raw], list[Remains]]:
    raws, remains = list[Raw](), list[Remains]()
    for item in salvage.find():
        if isinstance(item, Raw):
            raws.append(item)
        else:
            remains.append(item)
    return raws, remains


def _judge(result: Survey, raws: list[Raw], remains: list[Remains]) -> None:
    ours = [raw for raw in raws if raw.header.store == result.record.uuid]
    result.others = len(raws) - len(ours)
    groups: dict[Identity, list[Raw]] = {}
    for raw in ours:
        if raw.header.generation >> 32 < layout.MAX_OPENS:
            groups.setdefault(raw.identity, []).append(raw)
    chosen = [
        one for identity, group in groups.items() if (one := _choose(result, identity, group))
    ]
    _verify(result, chosen)
    _note_remains(result, remains)
    _note_lost(result)
    result.kept.sort(key=lambda kept: kept.stamp)
    result.problems += [
        f"{error.filename} cannot be listed" for error in result.salvage.files.unlisted
    ]
    if result.salvage.files.unreadable_pages:
        result.problems.append(
            f"pages that the device refuses: {result.salvage.files.unreadable_pages}"
        )


def _choose(result: Survey, identity: Identity, group: list[Raw]) -> list[Raw]:
    """Return the copies of the version that counts, [] if none does."""
    history, salvage = result.history, result.salvage
    live = history.live(identity)
    if history.complete and (live is not None or salvage.forgets):
        chosen = [raw for raw in group if raw.header.generation == live]
        result.stale += [raw for raw in group if raw.header.generation != live]
        return chosen
    alive = [
        raw
        for raw in group
        if raw.header.generation == live
        or not (raw.header.generation in history.given_up or salvage.buried(raw.header))
    ]
    newest = max((raw.header.generation for raw in alive), default=-1)
    if live is not None and newest < live:
        newest = live
    result.stale += [raw for raw in group if raw.header.generation != newest]
    return [raw for raw in group if raw.header.generation == newest]


def _verify(result: Survey, chosen: Iterable[list[Raw]]) -> None:
    """Read the payloads, in the order in which they lie, and divide whole from damaged."""
    image = new_image(1)
    for group in sorted(chosen, key=lambda group: group[0].first or (-1, 0, 0)):
        reason = whole = None
        for raw in sorted(group, key=lambda raw: raw.place is None):
            size = record.image_bytes(raw.header.stored_length)
            if whole is not None:
                result.stale.append(raw)
                continue
            if len(image) < size:
                image = new_image(raw.header.stored_length)
            reason = result.salvage.load(raw, image[:size])
            result.salvage.seen(size)
            whole = None if reason else raw
        if whole is not None:
            result.kept.append(Kept(whole, _stamp(result.history, whole)))
        else:
            _note_damaged(result, group, reason or "")


def _stamp(history: History, raw: Raw) -> int:
    return history.stamp(raw.identity) or raw.header.written_ns // 1000


def _note_damaged(result: Survey, group: list[Raw], reason: str) -> None:
    history = result.history
    identity = group[0].identity
    if result.salvage.forgets and history.at and history.live(identity) is None:
        # Pieces of what left long ago, mostly: a journal that names others does not name it.
        result.stale += group
        return
    result.damaged += [Damaged(raw, reason, identity, raw.header.generation) for raw in group]


def _note_remains(result: Survey, remains: list[Remains]) -> None:
    history = result.history
    rows = history.settled.rows
    for found in remains:
        identity, generation = found.identity, found.generation
        number = history.places.get(found.place) if found.place else None
        if identity is None and number is not None:
            identity, generation = _identity(rows[number]), int(rows["generation"][number])
        if history.complete and identity is None and result.salvage.forgets:
            continue
        result.damaged.append(Damaged(found, found.reason, identity, generation))


def _note_lost(result: Survey) -> None:
    found = {one.raw.identity for one in result.kept}
    found |= {one.identity for one in result.damaged if one.identity is not None}
    result.lost = [one for one in map(_identity, result.history.rows()) if one not in found]


def unique_stamps(kept: list[Kept]) -> np.ndarray:
    """Return the stamps made unique and increasing; ``kept`` is in their order."""
    steps = np.arange(len(kept), dtype=np.int64)
    stamps = np.fromiter((one.stamp for one in kept), np.int64, len(kept))
    now = int(time.time() * 1e6)
    unique: np.ndarray = np.maximum.accumulate(np.minimum(stamps, now) - steps) + steps
    return unique


def spaces(kept: list[Kept]) -> Iterator[tuple[tuple[bytes, int, int], list[Kept]]]:
    """Yield runs of blocks of one namespace, shard and length of key."""

    def space(one: Kept) -> tuple[bytes, int, int]:
        header = one.raw.header
        return header.namespace, header.shard, len(header.key)

    for name, run in itertools.groupby(kept, space):
        yield name, list(run)

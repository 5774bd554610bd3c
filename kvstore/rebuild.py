"""Making a store that opens out of what a survey found: in place, or as a new one.

In place, engines whose records can stay where they lie get a new checkpoint and journal beside
them; for the others the records are copied into a new directory of the engine. STORE.json then
changes epoch and directory in one rename: before it the store is what it was, after it the new one.
What is damaged is copied to quarantine before that and leaves the engine afterwards; an old
directory moves there as a whole. So a run that was killed anywhere can simply be repeated.

A new store is one from the moment when its STORE.json is there; until then a file ``unfinished``
says that what lies in the directory is ours. Nothing is written to the source.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvstore import files, former, layout, record
from kvstore.backends import engine_class
from kvstore.backends.base import Blocks, EngineContext, Status
from kvstore.backends.raw import new_image
from kvstore.errors import CorruptStore, ReadOnly, StoreFull
from kvstore.keeping import Keeping
from kvstore.keys import DEFAULT_NAMESPACE, key_array, named
from kvstore.namespaces import Namespaces, decode
from kvstore.reindex import Entry, write_index
from kvstore.salvage import MARKS, spaces
from kvstore.space import HIGH_WATERMARK, MIN_CAPACITY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstore.backends.base import Engine
    from kvstore.backends.raw import Salvage
    from kvstore.layout import StoreRecord
    from kvstore.salvage import Kept, Survey

    Seen = Callable[[int], object]

UNFINISHED = "unfinished"
BATCH_BYTES, BATCH_BLOCKS = 16 << 20, 256
SLACK_BYTES = 32 << 20
"""Room that a new engine directory needs at most besides its blocks: an eighth of a small store."""
_BLOCKS = re.compile(rf"{layout.BLOCKS}(-\w+)?")


# -- records into an engine -----------------------------------------------------------------------


def copy_records(salvage: Salvage, kept: list[Kept], engine: Engine, seen: Seen) -> Iterator[Entry]:
    """Put records into an open engine, verified once more, and yield them with their places.

    Those that are no longer whole are left out. Raises StoreFull, EngineError.
    """
    for (namespace, shard, _), run in spaces(kept):
        for batch in _batches(run):
            images = _load(salvage, batch, engine.context.store_uuid)
            whole = [one for one, image in zip(batch, images, strict=True) if image is not None]
            there = [image for image in images if image is not None]
            headers = [one.raw.header for one in whole]
            blocks = Blocks(
                namespace,
                shard,
                key_array([header.key for header in headers]),
                np.array([header.stored_length for header in headers], np.uint32),
                np.array([header.generation for header in headers], np.uint64),
                np.zeros(len(whole), np.uint64),
            )
            written = engine.put_many(blocks, there, sync=False)
            _check_written(engine, written.statuses.tolist())
            seen(sum(one.bytes for one in batch))
            yield from map(Entry, whole, written.places.tolist())


def _batches(run: list[Kept]) -> Iterator[list[Kept]]:
    batch: list[Kept] = []
    size = 0
    for one in run:
        if batch and (size + one.bytes > BATCH_BYTES or len(batch) == BATCH_BLOCKS):
            yield batch
            batch, size = [], 0
        batch.append(one)
        size += one.bytes
    yield batch


def _load(salvage: Salvage, batch: list[Kept], store: bytes) -> list[memoryview | None]:
    """Return images of records, as the store of that uuid has them; None for damaged ones."""
    images: list[memoryview | None] = []
    for one in batch:
        header = one.raw.header
        image = new_image(header.stored_length)
        if salvage.load(one.raw, image):
            images.append(None)
            continue
        if header.store != store:
            record.encode_into(replace(header, store=store), image[: record.HEADER_PAGE])
        images.append(image)
    return images


def _check_written(engine: Engine, statuses: list[int]) -> None:
    bad = [Status(status) for status in statuses if status != Status.OK]
    if not bad:
        return
    where = engine.context.directory
    if bad[0] in (Status.FULL, Status.NEED_ROOM):
        raise StoreFull(f"{where} has no room for all blocks", "use --to with a larger disk")
    raise files.translate(OSError(errno.EIO, "I/O error"), f"write to {where}")


# -- in place -------------------------------------------------------------------------------------


def needed_bytes(survey: Survey, engine: str | None = None) -> int:
    """Return what a new directory of the engine takes for the blocks that are kept, about."""
    capabilities = engine_class(engine or survey.record.engine).capabilities
    # Slots are up to an eighth too long, and each length has a super-block that is not full.
    factor = 1.2 if capabilities.fixed_slots else capabilities.space_factor
    return int(survey.kept_bytes * factor) + min(SLACK_BYTES, survey.record.capacity_bytes // 8)


def in_place(survey: Survey, quarantine: Path | None = None, seen: Seen | None = None) -> None:
    """Make the store open again, with all that is kept; the caller holds its lock for writing.

    ``quarantine``: where damaged parts go instead of the store's own directory. ``seen(bytes)`` is
    called for records that are copied. Raises StoreFull before anything is changed where there is
    no room, PermissionDenied, ReadOnly, EngineError.
    """
    place = quarantine or survey.path / layout.QUARANTINE
    seen = seen or (lambda _bytes: None)
    if survey.record.read_only_reason:
        raise ReadOnly(
            f"{survey.path} takes no writes: {survey.record.read_only_reason}", "use --to"
        )
    try:
        for folder in (place, survey.path / layout.NAMESPACES, survey.path / layout.INCOMING):
            folder.mkdir(files.DIRECTORY_MODE, exist_ok=True)
        if not stat.S_ISREG(_mode(survey.path / layout.STORE_FILE)):
            files.move_away(survey.path / layout.STORE_FILE, place / layout.STORE_FILE)
        if survey.salvage.in_place:
            _reindex(survey, Keeping(place, survey), seen)
        else:
            _refill(survey, Keeping(place, survey), place, seen)
    except OSError as error:
        raise files.translate(error, f"recover {survey.path}") from error


def _mode(path: Path) -> int:
    """Return the mode of what is there, that of a file if nothing is."""
    with suppress(FileNotFoundError):
        return path.lstat().st_mode
    return stat.S_IFREG


def _next(survey: Survey, **changes: str) -> StoreRecord:
    return replace(survey.record, epoch=survey.record.epoch + 1, **changes)  # type: ignore[arg-type]


def _reindex(survey: Survey, keeping: Keeping, seen: Seen) -> None:
    """Write a new index for records that stay where they are; move the others there."""
    found = _next(survey)
    for damaged in survey.damaged:
        keeping.keep(damaged, copy=True)
    keeping.finish()
    for damaged in survey.damaged:
        if damaged.extent is not None:
            survey.salvage.remove(damaged.extent)
    entries = _settle(survey, found, seen)
    write_index(survey.blocks, found, entries, survey.history)
    layout.write(survey.path, found)
    _remove_stale(survey)


def _settle(survey: Survey, found: StoreRecord, seen: Seen) -> list[Entry]:
    """Have every record where the engine looks for it."""
    mark = next(name for name, engine in MARKS.items() if engine == found.engine)
    (survey.blocks / mark).mkdir(files.DIRECTORY_MODE, parents=True, exist_ok=True)
    engine = _engine(survey.blocks, found)
    engine.open()
    try:
        stay = [Entry(one, one.raw.place) for one in survey.kept if one.raw.place is not None]
        headers = [one.kept.raw.header for one in stay]
        engine.claim(
            np.array([one.place for one in stay], np.uint64),
            np.array([header.stored_length for header in headers], np.uint32),
            np.array([header.generation for header in headers], np.uint64),
            complete=True,
        )
        moving = [one for one in survey.kept if one.raw.place is None]
        if survey.salvage.rename([one.raw for one in moving]):
            moved = [Entry(one, 0) for one in moving]
        else:
            moved = list(copy_records(survey.salvage, moving, engine, seen))
        engine.flush()
    finally:
        engine.close()
    return sorted([*stay, *moved], key=lambda one: one.kept.stamp)


def _remove_stale(survey: Survey) -> None:
    """Remove what is there once more, or was superseded or deleted, where a scan would find it."""
    salvage, kept = survey.salvage, {one.raw.identity: one.raw for one in survey.kept}
    if salvage.forgets:
        return
    used = {salvage.files.paths[raw.whole.file] for raw in kept.values() if raw.whole}
    for raw in survey.stale:
        ended = raw.header.generation in survey.history.given_up or raw.identity in kept
        if ended and raw.whole and salvage.files.paths[raw.whole.file] not in used:
            salvage.remove(raw.whole)


def _engine(folder: Path, found: StoreRecord) -> Engine:
    context = EngineContext(
        folder,
        found.uuid,
        found.engine_options,
        capacity=found.capacity_bytes,
        parity=found.parity,
    )
    return engine_class(found.engine)(context)


def _refill(survey: Survey, keeping: Keeping, place: Path, seen: Seen) -> None:
    """Copy all that is kept into a new directory of the engine, and let it take over."""
    name = f"{layout.BLOCKS}-{survey.record.epoch + 1}"
    _clear(survey, name, place)
    check_room(survey, place)
    found = _next(survey, blocks=name)
    folder = survey.path / name
    try:
        _fill(survey, folder, found, seen)
        files.sync_directory(survey.path)
        for damaged in survey.damaged:
            keeping.keep(damaged, copy=False)
        keeping.finish()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    layout.write(survey.path, found)
    _move(survey.blocks, place / f"{survey.record.blocks}.{survey.record.epoch}")


def _clear(survey: Survey, new: str, place: Path) -> None:
    """Remove what an earlier run had not finished, and move away what it replaced: directories of
    blocks that nothing names. A change of engine (:mod:`kvstore.former`) has two of its own."""
    coming = former.read_coming(survey.path, survey.record)
    named = {one.blocks for one in (survey.record, survey.record.previous, coming) if one}
    for folder in sorted(survey.path.iterdir()):
        if not _BLOCKS.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
            continue
        if folder.name == new:
            shutil.rmtree(folder)
        elif folder.name not in named and survey.known:
            _move(folder, place / f"{folder.name}.{survey.record.epoch - 1}")


def check_room(survey: Survey, place: Path) -> None:
    """Raise StoreFull unless old and new fit on the disk and into the capacity, where ``place`` is
    the quarantine of a recovery in place."""
    if survey.salvage.in_place:
        return
    need, found = needed_bytes(survey), os.statvfs(survey.path)
    free = found.f_bavail * found.f_frsize
    if need > free:
        raise StoreFull(
            f"copying the blocks in {survey.path} takes {need} bytes, {free} are free",
            "use --to on a larger disk",
        )
    inside = place.resolve().is_relative_to(survey.path.resolve())
    left = layout.directory_bytes(survey.path)
    left -= 0 if inside else layout.directory_bytes(survey.blocks)
    limit = int(survey.record.capacity_bytes * HIGH_WATERMARK)
    if left + need > limit:
        raise StoreFull(
            f"old and new blocks in {survey.path} take {left + need} bytes of {limit}",
            "use --quarantine DIR elsewhere on that disk, or --to",
        )


def check_room_at(survey: Survey, new: Path, engine: str) -> int:
    """Return the bytes that a new store takes. Raises StoreFull where there is less."""
    need, found = needed_bytes(survey, engine), os.statvfs(new if new.exists() else new.parent)
    free = found.f_bavail * found.f_frsize
    if need > free:
        raise StoreFull(
            f"the blocks take {need} bytes, {free} are free for {new}", "choose a larger disk"
        )
    return need


def _fill(survey: Survey, folder: Path, found: StoreRecord, seen: Seen) -> None:
    """Make an engine with its index in a directory that is not there yet, durably."""
    folder.mkdir(files.DIRECTORY_MODE)
    engine = _engine(folder, found)
    engine.create()
    engine.open()
    try:
        entries = list(copy_records(survey.salvage, survey.kept, engine, seen))
        engine.flush()
    finally:
        engine.close()
    write_index(folder, found, entries, survey.history)


def _move(folder: Path, target: Path) -> None:
    """Give a directory another name, on another filesystem if need be. Raises OSError."""
    while target.exists():
        target = target.with_name(target.name + "+")
    try:
        os.rename(folder, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        new = target.with_name(target.name + files.TEMPORARY)
        shutil.rmtree(new, ignore_errors=True)
        shutil.copytree(folder, new, symlinks=True)
        os.sync()
        os.rename(new, target)
        shutil.rmtree(folder)
    files.sync_directory(target.parent)
    files.sync_directory(folder.parent)


# -- a new store ----------------------------------------------------------------------------------


def into(
    survey: Survey,
    new: Path,
    *,
    engine: str | None = None,
    quarantine: Path | None = None,
    seen: Seen | None = None,
) -> StoreRecord:
    """Make a store at ``new``, missing or empty, of all that is kept; return its record.

    ``engine``: of the new store, by default that of the old one. Raises StoreExists, StoreNotFound
    (no parent), StoreFull, PermissionDenied, ReadOnly, EngineError.
    """
    try:
        lock = _begin(new)
    except OSError as error:
        raise files.translate(error, f"create a store at {new}") from error
    try:
        return _make(survey, new, engine or survey.record.engine, quarantine, seen)
    except OSError as error:
        raise files.translate(error, f"create a store at {new}") from error
    finally:
        lock.release()


def _begin(new: Path) -> layout.Lock:
    """Take a directory for a new store, locked and marked as ours."""
    mark = new / UNFINISHED
    mine = {UNFINISHED, UNFINISHED + files.TEMPORARY, layout.LOCK}
    ours = mark.is_file() and not mark.is_symlink()
    if not ours and not (new.is_dir() and set(os.listdir(new)) <= mine):
        layout.make_root(new, [])
    lock = layout.Lock(new)
    lock.acquire(exclusive=True)
    files.replace(mark, b"a store is being recovered to this place\n")
    files.sync_directory(new.parent)
    return lock


def _make(
    survey: Survey, new: Path, engine: str, quarantine: Path | None, seen: Seen | None
) -> StoreRecord:
    with suppress(CorruptStore):
        if (new / layout.STORE_FILE).exists():
            # An earlier run was killed at its very end.
            found = layout.read(new)
            (new / UNFINISHED).unlink()
            return found
    for name in (layout.BLOCKS, layout.NAMESPACES, layout.INCOMING, layout.QUARANTINE):
        shutil.rmtree(new / name, ignore_errors=True)
    found = _new_record(survey, new, engine)
    for name in (layout.NAMESPACES, layout.INCOMING, layout.QUARANTINE):
        (new / name).mkdir(files.DIRECTORY_MODE)
    _copy_namespaces(survey.path / layout.NAMESPACES, new / layout.NAMESPACES)
    _fill(survey, new / layout.BLOCKS, found, seen or (lambda _bytes: None))
    place = quarantine or new / layout.QUARANTINE
    place.mkdir(files.DIRECTORY_MODE, exist_ok=True)
    keeping = Keeping(place, survey)
    for damaged in survey.damaged:
        keeping.keep(damaged, copy=True)
    keeping.finish()
    files.sync_directory(new)
    layout.write(new, found)
    (new / UNFINISHED).unlink()
    return found


def _new_record(survey: Survey, new: Path, engine: str) -> StoreRecord:
    old, need, found = survey.record, check_room_at(survey, new, engine), os.statvfs(new)
    half = found.f_blocks * found.f_frsize // 2
    wanted = old.capacity_bytes if survey.known else min(old.capacity_bytes, half)
    capacity = max(wanted, int(need / HIGH_WATERMARK) + SLACK_BYTES, MIN_CAPACITY)
    same = engine == old.engine
    options = old.engine_options if same else engine_class(engine).options_for(capacity)
    made = layout.new_record(engine=engine, capacity=capacity, engine_options=options)
    return replace(made, opens=old.opens, features=old.features)


def _copy_namespaces(source: Path, target: Path) -> None:
    """Copy the files that are good; blocks of the others keep their namespace's id."""
    for path in sorted(source.glob("*.json")):
        with suppress(OSError, CorruptStore, ValueError):
            data = files.read_regular(path, 1 << 20)
            decode(data, bytes.fromhex(path.stem))
            files.replace(target / path.name, data)
    spaces_known = Namespaces(target)
    spaces_known.load()
    spaces_known.open(named(DEFAULT_NAMESPACE), create=True)

"""What a change of the engine leaves in a store: the former blocks, or a copy that is not finished.

::

    STORE/migrating.json     the STORE.json that counts once the copy is complete
    STORE/blocks-<engine>/   the copy, later the blocks; the former ones keep their directory
    STORE/<name>.gone/       a directory that is being removed

STORE.json decides: what it does not name as ``blocks`` or ``previous`` may go. A directory is
renamed before it is removed, so that one which is half gone never passes for blocks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvstore import checkpoint, files, layout
from kvstore.errors import CorruptStore, KVStoreError, NotFound
from kvstore.events import Kind
from kvstore.killpoints import reach
from kvstore.settle import settle

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.layout import Previous, StoreRecord

MIGRATING = "migrating.json"
GONE = ".gone"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[StoreRecord]:
    """Hold the lock of a store and give its record. Raises what :meth:`Lock.acquire` does."""
    layout.read(path)
    lock = layout.Lock(path)
    lock.acquire(exclusive=True)
    try:
        yield layout.read(path)
    finally:
        lock.release()


# -- a copy that is not finished ------------------------------------------------------------------


def read_coming(path: Path, record: StoreRecord) -> StoreRecord | None:
    """Return what the store will be when the copy that was begun is complete; None if there is
    none, or the store is not the one any more that it was begun for."""
    try:
        data = files.read_regular(path / MIGRATING, layout.MAX_STORE_FILE_BYTES)
        coming = layout.decode(data, path)
    except (OSError, KVStoreError):
        return None
    fits = (coming.uuid, coming.epoch) == (record.uuid, record.epoch + 1)
    return coming if fits and coming.blocks != record.blocks else None


def write_coming(path: Path, coming: StoreRecord) -> None:
    """Note, durably, that a copy is begun. Raises StoreFull, PermissionDenied, ReadOnly, ..."""
    try:
        files.replace(path / MIGRATING, layout.encode(coming))
    except OSError as error:
        raise files.translate(error, f"write {path / MIGRATING}") from error


def forget_coming(path: Path) -> None:
    """Note that no copy is under way."""
    try:
        (path / MIGRATING).unlink(missing_ok=True)
        files.sync_directory(path)
    except OSError as error:
        raise files.translate(error, f"remove {path / MIGRATING}") from error


# -- removing directories -------------------------------------------------------------------------


def discard(directory: Path) -> int:
    """Remove a directory of blocks that does not count; return the bytes that it took."""
    gone = directory.with_name(directory.name + GONE)
    try:
        if os.path.lexists(directory):
            shutil.rmtree(gone, ignore_errors=True)
            os.rename(directory, gone)
            files.sync_directory(directory.parent)
    except OSError as error:
        raise files.translate(error, f"rename {directory}") from error
    reach("former.renamed")
    return _remove(gone)


def sweep(path: Path) -> int:
    """Remove directories whose removal was interrupted; return the bytes that they took."""
    names = [name for name in os.listdir(path) if name.endswith(GONE)]
    return sum(_remove(path / name) for name in names)


def _remove(directory: Path) -> int:
    size = layout.directory_bytes(directory)
    try:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(directory)
        files.sync_directory(directory.parent)
    except OSError as error:
        raise files.translate(error, f"remove {directory}") from error
    return size


# -- going back, and deleting ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Back:
    """What :func:`go_back` did: ``given_up`` names the engine of a copy that was not finished, else
    the store has its former engine again. ``freed`` bytes are free."""

    engine: str
    given_up: str
    freed: int


def go_back(path: Path) -> Back:
    """Take a change of engine back: give up the copy, or use the former blocks again.

    Raises NotFound if there was none, KVStoreError if blocks have come or gone since, so that the
    former ones are not the same any more.
    """
    with locked(path) as record:
        coming = read_coming(path, record)
        if coming is not None:
            freed = discard(path / coming.blocks) + sweep(path)
            forget_coming(path)
            return Back(record.engine, coming.engine, freed)
        former = _former(path, record)
        _check_unchanged(path, record, former)
        # A kill may have left it behind the change: it must not pass for a copy to go on with.
        forget_coming(path)
        # ``opens`` stays: numbers of versions are never given twice, whatever engine has them.
        layout.write(
            path,
            replace(
                record,
                engine=former.engine,
                engine_options=former.engine_options,
                blocks=former.blocks,
                epoch=former.epoch,
                previous=None,
            ),
        )
        reach("former.back")
        return Back(former.engine, "", discard(path / record.blocks) + sweep(path))


def _former(path: Path, record: StoreRecord) -> Previous:
    former = record.previous
    if former is None:
        raise NotFound(
            f"the engine of the store at {path} was not changed, or what it left was deleted",
            "kvstore migrate --to ENGINE changes it",
        )
    if not (path / former.blocks).is_dir():
        raise NotFound(f"{path / former.blocks} is gone", "kvstore migrate --delete-source forgets")
    return former


def _check_unchanged(path: Path, record: StoreRecord, former: Previous) -> None:
    loaded = checkpoint.load(path / record.blocks, record.uuid, record.epoch)
    if loaded.torn or loaded.missing:
        raise CorruptStore(
            f"what came in since the engine was changed is not known: {loaded.reason}",
            "start the daemon once: it looks at all records",
        )
    rows = settle(loaded.events).rows
    generations = rows["generation"][rows["kind"] == Kind.PUT]
    new = int(np.count_nonzero(generations > former.generation))
    gone = former.copied - (len(generations) - new)
    if new or gone:
        raise KVStoreError(
            f"the store at {path} is not what it was: since its engine was changed {new} blocks "
            f"have come in and {gone} have left, which would be lost and come back",
            f"kvstore migrate --to {former.engine} changes back, after --delete-source",
        )


def kept(path: Path) -> tuple[str, int]:
    """Return what :func:`delete` would remove: a name for people, and bytes."""
    record = layout.read(path)
    former = record.previous
    name = f"the blocks of the engine {former.engine}" if former else "nothing"
    return name, layout.directory_bytes(path / former.blocks) if former else 0


def delete(path: Path) -> int:
    """Delete the former blocks for good; return the bytes that they took, 0 if there are none."""
    with locked(path) as record:
        former = record.previous
        if former is None:
            return sweep(path)
        directory = path / former.blocks
        gone = directory.with_name(directory.name + GONE)
        try:
            # First, so that nobody goes back to blocks that are half gone.
            if directory.is_dir():
                os.rename(directory, gone)
                files.sync_directory(path)
        except OSError as error:
            raise files.translate(error, f"rename {directory}") from error
        reach("former.renamed")
        layout.write(path, replace(record, previous=None))
        reach("former.forgotten")
        return sweep(path)

"""Repairing what a check found: first what lies wrong, then the index by the daemon's own means.

1. Modes, missing directories, leftovers, foreign files: by the names that the check told.
2. What the engine has no place for moves to quarantine, or gets its own name.
3. The store is opened with a scan of all headers: records are adopted, rows without one dropped.
4. Damaged blocks are copied to quarantine and dropped; a checkpoint; a clean end.

An engine that does not open, and an index that says the wrong places, are made anew out of the raw
files (:mod:`kvstore.rebuild`). Nothing that cannot be read is deleted before it has been copied,
and each step may be repeated: whoever was killed in the middle repairs once more.

From 2 on all is done in a child that runs this module, for it touches the engine.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvstore import files, layout, rebuild, record, salvage, survey, versions
from kvstore.backends.base import Blocks, EngineContext, Finding, Status
from kvstore.backends.judging import judge_all
from kvstore.backends.raw import new_image
from kvstore.check import MANIFEST, examine
from kvstore.errors import EngineError, StoreFull
from kvstore.events import RECORD
from kvstore.isolate import Child, describe, make, serve
from kvstore.keys import space_number
from kvstore.opening import Options, open_store
from kvstore.removal import discard
from kvstore.rewrite import rewrite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore.backends.base import Engine
    from kvstore.fsck import Report
    from kvstore.isolate import Array, Document
    from kvstore.store import Store

    Answers = Iterator[tuple[Document, Sequence[Array]]]

MODULE = "kvstore.mend"
MOST_ROUNDS = 4
_ANEW = ("wrong-place", "shared-place")
"""What the index must be made anew for."""
_ROW_COLUMNS = ("namespace", "shard", "key_length", "key", "length", "generation", "place")
_BATCH = 64


class Done:
    """What a repair did: ``repaired`` and ``quarantined`` findings, ``dropped`` blocks."""

    def __init__(self) -> None:
        self.repaired = self.quarantined = self.dropped = 0

    def add(self, document: Document) -> None:
        self.repaired += document.get("repaired", 0)
        self.quarantined += document.get("quarantined", 0)
        self.dropped += document.get("dropped", 0)


def new_folder(path: Path, quarantine: Path | None) -> Path:
    """Return a directory of this repair's own in quarantine, not made yet."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    base = (quarantine or path / layout.QUARANTINE) / f"fsck-{stamp}"
    number, folder = 1, base
    while folder.exists():
        number += 1
        folder = base.with_name(f"{base.name}.{number}")
    return folder


def until_done(
    report: Report, again: Callable[[], Report], folder: Path, limit: float, done: Done
) -> Report:
    """Repair what a check found, check ``again``, and so on until nothing changes; return the last
    check. One repair may bring to light what lay below another. Raises what :func:`repair` does."""
    left, anew = report, True
    for _ in range(MOST_ROUNDS):
        anew = repair(left, folder, limit, done, anew=anew)
        before, left = left, again()
        if not left.to_do or left.counts == before.counts:
            break
    with suppress(OSError):
        folder.rmdir()  # nothing had to go there
    return left


def repair(report: Report, folder: Path, limit: float, done: Done, *, anew: bool = True) -> bool:
    """Act on what a check found; nobody holds the lock of the store, and nobody may open it.

    ``folder``: where damaged data goes. ``anew``: the store may be made anew out of the raw files;
    returns whether it still may, for doing that twice is no better. Raises StoreLocked, StoreFull,
    EngineDied, EngineHung, and what opening a store raises.
    """
    path = report.store
    lock = layout.Lock(path)
    lock.acquire(exclusive=True)
    try:
        folder.parent.mkdir(files.DIRECTORY_MODE, exist_ok=True)
        folder.mkdir(files.DIRECTORY_MODE, exist_ok=True)
        theirs = {f"{report.folder}/{one.path}" for one in report.strange}
        for found in report.found:
            if found.path not in theirs and survey.put_right(path, found, folder):
                done.repaired += 1
                done.quarantined += found.id in ("foreign", "namespace-file")
                if found.id in ("foreign", "namespace-file"):
                    _note(folder, found.path, found.detail)
    except OSError as error:
        raise files.translate(error, f"repair {path}") from error
    finally:
        lock.release()
    if any(one.id == "store-file" for one in report.found):
        return anew
    return _repair_engine(report, folder, limit, done, anew=anew)


def _repair_engine(report: Report, folder: Path, limit: float, done: Done, *, anew: bool) -> bool:
    path = report.store
    wanted = report.beyond_repair or any(one.id in _ANEW for one in report.found)
    if not wanted and not _needs_opening(report):
        return anew
    with Child(f"the store at {path}", module=MODULE, limit=limit) as child:
        request = {"store": str(path.absolute()), "quarantine": str(folder.absolute())}
        if wanted and anew:
            for answer in child.ask("rebuild", request):
                done.add(answer.document)
            return False
        rows = report.rows[report.bad]
        strange = [[one.kind, one.path, one.detail] for one in report.strange]
        columns = [np.ascontiguousarray(rows[name]) for name in _ROW_COLUMNS]
        for answer in child.ask("mend", {**request, "strange": strange}, columns):
            done.add(answer.document)
    return anew


def _needs_opening(report: Report) -> bool:
    """Tell whether there is more to do than what lay in the directory."""
    outside = ("mode", "owner", "missing-directory", "namespace-file", "namespace-unknown")
    notes = ("hard-link", "unknown-file", "over-capacity", "quarantine-full")
    silent = ("padding", "free-slot")
    return any(one.id not in (*outside, *notes, *silent) for one in report.found)


# -- the child's side -----------------------------------------------------------------------------


def _rebuild(document: Document, _: list[Array]) -> Answers:
    path, folder = Path(document["store"]), Path(document["quarantine"])
    lock = layout.Lock(path)
    lock.acquire(exclusive=True)
    try:
        with salvage.survey(path) as found:
            rebuild.in_place(found, folder)
            lost = len({one.identity for one in found.damaged if one.identity})
            yield {"repaired": 1, "dropped": len(found.lost) + lost}, []
            yield {"quarantined": len(found.damaged)}, []
    finally:
        lock.release()


def _mend(document: Document, arrays: list[Array]) -> Answers:
    path, folder = Path(document["store"]), Path(document["quarantine"])
    strange = [Finding(*one) for one in document["strange"]]
    bad = _rows(arrays)
    lock = layout.Lock(path)
    lock.acquire(exclusive=True)
    try:
        _check_room(path, folder, bad)
        yield _put_right(path, folder, strange), []
    finally:
        lock.release()
    options = Options(
        create="never", min_free=0, when_full="read-only", scan=True, quarantine=folder
    )
    store = open_store(path, options)
    try:
        _check_writable(store)
        yield {"repaired": _rewrite(store.core.engine, bad)}, []
        yield _drop(store, bad), []
        store.checkpoint()
        store.run_chores()
        _check_writable(store)
        store.drain()
    finally:
        store.close()


def _rows(arrays: list[Array]) -> np.ndarray:
    rows = np.zeros(len(arrays[0]), RECORD)
    for name, column in zip(_ROW_COLUMNS, arrays, strict=True):
        rows[name] = column
    return rows


def _check_room(path: Path, folder: Path, bad: np.ndarray) -> None:
    """Raise StoreFull unless copies of all damaged records fit on the disk."""
    need = int(record.image_bytes_of(bad["length"].astype(np.uint32)).sum())
    found = os.statvfs(folder)
    if need + (1 << 20) > found.f_bavail * found.f_frsize:
        raise StoreFull(
            f"copies of the damaged records of {path} take {need} bytes",
            "free some space, or use --quarantine DIR on another disk",
        )


def _put_right(path: Path, folder: Path, strange: list[Finding]) -> Document:
    """Have the engine repair what it found, apart from the index."""
    done = {"repaired": 0, "quarantined": 0}
    if not strange:
        return done
    found = layout.read(path)
    engine = make(describe(found.engine, _context(path, found)))
    engine.open()
    try:
        for one in strange:
            name = one.path.replace("/", "_").replace(" ", "_")
            try:
                what = engine.put_right(one, files.unused(folder / name))
            except FileNotFoundError:
                continue
            except OSError as error:
                raise files.translate(error, f"move {one.path} to {folder}") from error
            done["repaired"] += what == "mended"
            done["quarantined"] += what == "moved"
            if what == "moved":
                _note(folder, one.path, f"{one.kind}: {one.detail}")
        engine.flush()
    finally:
        engine.close()
    return done


def _context(path: Path, found: layout.StoreRecord) -> EngineContext:
    return EngineContext(
        path / found.blocks,
        found.uuid,
        found.engine_options,
        capacity=found.capacity_bytes,
        parity=found.parity,
    )


def _check_writable(store: Store) -> None:
    if store.core.read_only:
        raise EngineError(f"{store.core.path} takes no writes: {store.core.read_only}", "see to it")


def _rewrite(engine: Engine, bad: np.ndarray) -> int:
    """Write records once more that are whole but not to be found by their headers."""
    if engine.capabilities.fixed_slots or not len(bad):
        return 0
    done = 0
    for blocks in versions.blocks_of(bad):
        there = engine.contains_many(blocks)
        for at in np.flatnonzero(~there).tolist():
            one = blocks.take(slice(at, at + 1))
            done += _rewrite_one(engine, one)
    return done


def _rewrite_one(engine: Engine, one: Blocks) -> bool:
    image = new_image(int(one.lengths[0]))
    (found,) = judge_all(engine, one, [image])
    if not found.good:
        return False
    return bool(engine.put_many(one, [image], sync=True).statuses[0] == Status.OK)


def _drop(store: Store, bad: np.ndarray) -> Document:
    """Copy damaged blocks to quarantine and drop them, as a read that met one would; write again
    what could be brought back."""
    core, done = store.core, {"dropped": 0, "repaired": 0}
    for blocks in versions.blocks_of(bad):
        namespace = core.namespaces.known(blocks.namespace)
        space = space_number(namespace.number, blocks.shard)
        rows = core.index.find(space, blocks.keys)
        for start in range(0, len(rows), _BATCH):
            some = slice(start, start + _BATCH)
            there = core.index.readable(rows[some])
            kinds = np.array(
                [
                    examine(core.engine, blocks.take(slice(n, n + 1)))
                    for n in range(start, min(start + _BATCH, len(rows)))
                ]
            )
            for kind in ("missing", "damaged"):
                chosen = there & (kinds == kind)
                discard(core, rows[some][chosen], blocks.generations[some][chosen], kind)
                done["dropped"] += int(chosen.sum())
            again = there & (kinds == "repaired")
            rewrite(core, rows[some][again])
            done["repaired"] += int(again.sum())
            store.run_chores()
    return done


def _note(folder: Path, path: str, reason: str) -> None:
    """Add a line to the manifest of this repair."""
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "reason": reason,
        "path": path,
        "file": path.replace("/", "_").replace(" ", "_"),
    }
    descriptor = files.open_to_write(folder / MANIFEST, os.O_APPEND)
    try:
        files.write_all(descriptor, json.dumps(line).encode() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


TASKS = {"rebuild": _rebuild, "mend": _mend}


if __name__ == "__main__":
    serve(TASKS)

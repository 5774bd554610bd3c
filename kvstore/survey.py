"""The directory of a store, entry by entry: what belongs there, who may do what with it, its bytes.

Only names and inodes are looked at, nothing is followed and nothing opened but the records of
namespaces. What lies in the engine's own directories is for the engine to judge.
"""

from __future__ import annotations

import os
import re
import stat
from typing import TYPE_CHECKING

from kvstore import files, layout, namespaces
from kvstore.errors import CorruptStore
from kvstore.findings import Found
from kvstore.keys import NAMESPACE_ID_BYTES
from kvstore.memo import FILE as MEMO

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CURSOR = "fsck.json"
"""Where the last verification ended; see :mod:`kvstore.fsck`."""
_PARTS = (layout.NAMESPACES, layout.INCOMING, layout.QUARANTINE)
_OURS = {layout.STORE_FILE, layout.LOCK, CURSOR, "scrub.json", MEMO, *_PARTS, "lost+found"}
_JOURNAL = re.compile(r"(journal|checkpoint)\.[0-9a-f]{16}")
_NAMESPACE = re.compile(rf"[0-9a-f]{{{2 * NAMESPACE_ID_BYTES}}}\.json")
_OF_A_CHANGE = re.compile(r"migrating\.json|blocks(-\w+)?|.*\.gone")
"""What a change of the engine leaves, see :mod:`kvstore.former`."""
_OWNER_BITS = {True: 0o700, False: 0o600}
_OTHERS = 0o022
"""Rights to write that nobody but the owner may have."""


class Survey:
    """``bytes``: what all takes on the device, as ``du`` counts it; ``quarantine_bytes`` of it.

    ``blocks`` is the engine's directory, ``former`` that of an earlier one: it only counts.
    """

    def __init__(self, store: Path, blocks: str, former: str = "") -> None:
        self.bytes = self.quarantine_bytes = 0
        self._store = store
        self._blocks = blocks
        self._former = former
        self._owner = store.stat().st_uid
        self._seen: set[tuple[int, int]] = set()

    def look(self) -> Iterator[Found]:
        """Yield what is wrong. Raises OSError if the directory itself cannot be read."""
        for part in (*_PARTS, self._blocks):
            if not (self._store / part).is_dir() and not (self._store / part).is_symlink():
                yield Found("missing-directory", part, "it is gone")
        self._count(self._store.lstat(), "")
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            try:
                entries = list(os.scandir(self._store / folder))
            except OSError as error:
                if not folder:
                    raise
                yield Found("unreadable", folder, f"cannot be listed: {error.strerror}")
                continue
            for entry in sorted(entries, key=lambda one: one.name):
                path = f"{folder}/{entry.name}" if folder else entry.name
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                self._count(found, path)
                yield from self._judge(path, found)
                if stat.S_ISDIR(found.st_mode):
                    waiting.append(path)

    def _count(self, found: os.stat_result, path: str) -> None:
        inode = (found.st_dev, found.st_ino)
        if found.st_nlink > 1 and not stat.S_ISDIR(found.st_mode):
            if inode in self._seen:
                return
            self._seen.add(inode)
        self.bytes += found.st_blocks * 512
        if path.partition("/")[0] == layout.QUARANTINE:
            self.quarantine_bytes += found.st_blocks * 512

    def _judge(self, path: str, found: os.stat_result) -> Iterator[Found]:
        top, _, below = path.partition("/")
        if top in ("lost+found", self._former):
            return
        folder = stat.S_ISDIR(found.st_mode)
        plain = folder or stat.S_ISREG(found.st_mode)
        if found.st_uid != self._owner:
            detail = f"it belongs to user {found.st_uid}, the store to {self._owner}"
            yield Found("owner", path, detail)
        elif plain and (wrong := _wrong_mode(found.st_mode, folder=folder)):
            yield Found("mode", path, wrong)
        if stat.S_ISREG(found.st_mode) and found.st_nlink > 1 and top == self._blocks:
            yield Found("hard-link", path, f"it has {found.st_nlink} names")
        if not below:
            yield from self._at_top(path, plain=plain)
        elif top == layout.NAMESPACES:
            yield from self._namespace(path, below, found)
        elif top == self._blocks and "/" not in below:
            yield from self._in_blocks(path, below, found)
        elif top == self._blocks and below.startswith("super/") and below.endswith(".new"):
            yield Found("leftover", path, "it was not finished")
        elif top == self._blocks and (not plain or (folder and "." in path.rpartition("/")[2])):
            # A library may wait for ever at a pipe, or fail at a directory, that has a file's name.
            yield Found("foreign", path, "it is no file")

    def _at_top(self, path: str, *, plain: bool) -> Iterator[Found]:
        if path.endswith(files.TEMPORARY) and plain:
            yield Found("leftover", path, "it was not finished")
        elif path not in {*_OURS, self._blocks} and not _OF_A_CHANGE.fullmatch(path):
            yield Found("unknown-file", path, "it is not the store's")
        elif not plain:
            yield Found("foreign", path, "it is no file and no directory")

    def _namespace(self, path: str, name: str, found: os.stat_result) -> Iterator[Found]:
        if name.endswith(files.TEMPORARY) and stat.S_ISREG(found.st_mode):
            yield Found("leftover", path, "it was not finished")
        elif not _NAMESPACE.fullmatch(name) or not stat.S_ISREG(found.st_mode):
            yield Found("foreign", path, "it is no record of a namespace")
        elif problem := namespace_problem(self._store / path):
            yield Found("namespace-file", path, problem, namespace=name.removesuffix(".json"))

    def _in_blocks(self, path: str, name: str, found: os.stat_result) -> Iterator[Found]:
        """Judge what lies beside the engine's directories: journals and checkpoints."""
        if stat.S_ISDIR(found.st_mode):
            return
        if name.endswith(files.TEMPORARY) and stat.S_ISREG(found.st_mode):
            yield Found("leftover", path, "it was not finished")
        elif not _JOURNAL.fullmatch(name) or not stat.S_ISREG(found.st_mode):
            yield Found("foreign", path, "it is no journal and no checkpoint")


def _wrong_mode(mode: int, *, folder: bool) -> str:
    lacking = _OWNER_BITS[folder] & ~mode
    if lacking or mode & _OTHERS:
        return f"its mode is {stat.S_IMODE(mode):04o}"
    return ""


def right_mode(mode: int, *, folder: bool) -> int:
    """Return the mode that a file or directory of the store should have, near to what it has."""
    return (stat.S_IMODE(mode) | _OWNER_BITS[folder]) & ~_OTHERS


def put_right(store: Path, found: Found, quarantine: Path) -> bool:
    """Repair what the survey found; tell whether anything was done. Raises OSError."""
    path = store / found.path
    if found.id == "mode":
        mode = path.lstat().st_mode
        path.chmod(right_mode(mode, folder=stat.S_ISDIR(mode)))
    elif found.id == "missing-directory":
        path.mkdir(files.DIRECTORY_MODE, exist_ok=True)
        files.sync_directory(store)
    elif found.id == "leftover":
        path.unlink(missing_ok=True)
    elif found.id in ("foreign", "namespace-file"):
        return files.move_away(path, quarantine / found.path.replace("/", "_"))
    else:
        return False
    return True


def namespace_problem(path: Path) -> str:
    """Return why a file is no record of the namespace that its name says; empty if it is."""
    try:
        namespaces.decode(
            files.read_regular(path, namespaces.MAX_FILE_BYTES), bytes.fromhex(path.stem)
        )
    except OSError as error:
        return str(error.strerror)
    except CorruptStore as error:
        return error.message
    return ""

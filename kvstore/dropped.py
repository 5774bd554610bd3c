"""Files that somebody drops for us, read and verified: nothing here touches the store.

Nobody is trusted who writes there: links are not followed, files that others own, may write or have
another name for are left alone, and what counts is the copy in memory that was verified.
"""

from __future__ import annotations

import mmap
import os
import stat
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore import files, namespaces, record
from kvstore.errors import KVStoreError
from kvstore.keys import MAX_BLOCK_BYTES, NAMESPACE_ID_BYTES
from kvstore.record import Header, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from kvstore.namespaces import Namespaces

RECORD, NAMESPACE = ".kvb", ".json"
REST_SECONDS = 1.0
"""A file that was written to less long ago may not be whole yet."""
MOST_NAMES = 4096
"""Names looked at in one go, in no order; more are left for when these have gone."""
BATCH_FILES = 64
BATCH_BYTES = 8 << 20
"""Read in one go, or a single file."""
MOST_REFUSED = 1024
"""With so many files that cannot be taken nothing more is, until somebody removes some."""

Identity = tuple[int, int, int, int]
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OTHERS = 0o022


@dataclass
class File:
    """A file that was dropped. ``refusal`` says why it cannot be taken; else a record has its
    ``header`` and ``payload``, and a namespace is ``done``."""

    name: str
    identity: Identity
    refusal: str = ""
    header: Header | None = None
    payload: memoryview = field(default_factory=lambda: memoryview(b""))
    done: bool = False


@dataclass
class Look:
    """What one look found: ``files`` to deal with, whether there are ``more``, whether some are too
    ``young``, the ``folder`` (device and inode), and the names that are there; or the ``problem``
    for which nothing was looked at."""

    files: list[File] = field(default_factory=list)
    more: bool = False
    young: bool = False
    folder: tuple[int, int] = (0, 0)
    names: set[str] = field(default_factory=set)
    problem: str = ""


def look(known: Namespaces, path: Path, refused: Mapping[str, Identity]) -> Look:
    """Read and verify some files of ``path``, which is made if it is missing (*worker*).

    ``refused`` are left out as long as they do not change. Raises KVStoreError.
    """
    try:
        folder = _open(path)
    except OSError as error:
        raise files.translate(error, f"look into {path}") from error
    try:
        found = os.fstat(folder)
        if not _is_ours(found):
            raise KVStoreError(
                f"nothing is taken from {path}: others own it or may write there",
                "give it to the daemon's user, with mode 0700",
            )
        outcome = Look(folder=(found.st_dev, found.st_ino))
        _read_some(known, folder, refused, outcome)
        return outcome
    finally:
        os.close(folder)


def _open(path: Path) -> int:
    try:
        return os.open(path, _FOLDER)
    except FileNotFoundError:
        path.mkdir(files.DIRECTORY_MODE)
        files.sync_directory(path.parent)
        return os.open(path, _FOLDER)


def _is_ours(found: os.stat_result) -> bool:
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & _OTHERS


def _read_some(
    known: Namespaces, folder: int, refused: Mapping[str, Identity], outcome: Look
) -> None:
    taken = 0
    for name in _names(folder, outcome):
        try:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            continue
        identity = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        if refused.get(name) == identity:
            continue
        if 0 <= time.time() - found.st_mtime < REST_SECONDS:
            outcome.young = True
            continue
        full = len(outcome.files) == BATCH_FILES or (taken and taken + found.st_size > BATCH_BYTES)
        if full or len(refused) >= MOST_REFUSED:
            outcome.more = bool(full)
            return
        file = File(name, identity, _unfit(name, found))
        outcome.files.append(file)
        if not file.refusal:
            taken += found.st_size
            _read(known, folder, file)


def _names(folder: int, outcome: Look) -> Iterator[str]:
    """Return the names of files to look at, those of namespaces first; hidden ones and ``*.new``
    are somebody's who is not done with them."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if len(outcome.names) == MOST_NAMES:
                outcome.more = True
                break
            if not entry.name.startswith(".") and not entry.name.endswith(files.TEMPORARY):
                outcome.names.add(entry.name)
    return iter(sorted(outcome.names, key=lambda name: (not name.endswith(NAMESPACE), name)))


def _unfit(name: str, found: os.stat_result) -> str:
    """Return why a file is not even opened; empty if it may be."""
    if not stat.S_ISREG(found.st_mode):
        return "it is no regular file"
    if found.st_nlink != 1:
        return f"it has {found.st_nlink} names"
    if not _is_ours(found):
        return "others own it or may write it"
    if name.endswith(RECORD):
        longest = record.image_bytes(MAX_BLOCK_BYTES)
        return f"it has more than {longest} bytes" if found.st_size > longest else ""
    if name.endswith(NAMESPACE):
        return ""
    return f"it is neither a record (*{RECORD}) nor one of a namespace (*{NAMESPACE})"


def _read(known: Namespaces, folder: int, file: File) -> None:
    """Read a file of ours and verify it; what is wrong becomes its refusal."""
    try:
        descriptor = os.open(file.name, _FILE, dir_fd=folder)
        try:
            found = os.fstat(descriptor)
            if (found.st_dev, found.st_ino) != file.identity[:2]:
                file.refusal = "it was replaced while it was looked at"
            elif file.name.endswith(NAMESPACE):
                _read_namespace(known, descriptor, file)
            else:
                _read_record(known, descriptor, file)
        finally:
            os.close(descriptor)
    except OSError as error:
        file.refusal = f"it cannot be read: {error.strerror}"
    except KVStoreError as error:
        file.refusal = error.message


def _read_namespace(known: Namespaces, descriptor: int, file: File) -> None:
    """Make the namespace that a file describes, durably. Raises KVStoreError, OSError."""
    stem = file.name.removesuffix(NAMESPACE)
    identity = bytes.fromhex(stem) if set(stem) <= set("0123456789abcdef") else b""
    if len(identity) != NAMESPACE_ID_BYTES:
        raise KVStoreError("its name is no id of a namespace")
    data = os.read(descriptor, namespaces.MAX_FILE_BYTES + 1)
    described, _ = namespaces.decode(data, identity)
    known.open(described, create=True, owner=namespaces.number_in(data, "owner"))
    file.done = True


def _read_record(known: Namespaces, descriptor: int, file: File) -> None:
    """Read a record image and verify all of it. Raises CorruptBlock, OSError."""
    page = os.pread(descriptor, record.HEADER_PAGE, 0)
    header = record.decode(page)
    if known.by_id(header.namespace) is None:
        raise KVStoreError(unknown(header.namespace))
    if header.extra:
        raise KVStoreError("its header has fields that would be lost")
    length = header.stored_length
    image = memoryview(mmap.mmap(-1, record.image_bytes(length)))
    filled = files.read_into(descriptor, image)
    verdict, _, reason = record.judge_as(header, image, filled)
    if verdict is not Verdict.OK:
        raise KVStoreError(reason)
    file.header = header
    file.payload = image[record.HEADER_PAGE : record.HEADER_PAGE + length]


def unknown(namespace: bytes) -> str:
    return f"its namespace {namespace.hex()} is not known; drop {namespace.hex()}{NAMESPACE} too"


def remove(path: Path, done: list[File]) -> None:
    """Remove files whose blocks are durable (*worker*); one that cannot be gets a refusal.

    A file that came under the same name since then stays. Between looking and removing there is a
    moment in which that would be missed; whoever drops files uses a name once.
    """
    folder = os.open(path, _FOLDER)
    try:
        for file in done:
            try:
                found = os.stat(file.name, dir_fd=folder, follow_symlinks=False)
                if (found.st_dev, found.st_ino) == file.identity[:2]:
                    os.unlink(file.name, dir_fd=folder)
            except FileNotFoundError:
                continue
            except OSError as error:
                file.refusal = f"its block is here, but it cannot be removed: {error.strerror}"
    finally:
        os.close(folder)

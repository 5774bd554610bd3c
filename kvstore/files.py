"""Small files that must be there whole or not at all, and errors of the operating system."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

from kvstore.errors import (
    ConfigError,
    CorruptStore,
    EngineError,
    KVStoreError,
    PermissionDenied,
    ReadOnly,
    StoreFull,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from io import BufferedReader
    from pathlib import Path

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
TEMPORARY = ".new"
"""Ending of a file that is not published yet; whoever finds one after a crash may delete it."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM)


def translate(error: OSError, doing: str) -> KVStoreError:
    """Return our error for one of the operating system; ``doing`` names action and path."""
    message = f"cannot {doing}: {os.strerror(error.errno) if error.errno else error}"
    if error.errno in _REFUSED:
        return PermissionDenied(message, "run as the store's owner, or give this user access")
    if error.errno == errno.EROFS:
        return ReadOnly(message, "the filesystem is mounted read-only; remount it read-write")
    if error.errno in _FULL:
        return StoreFull(message, "free some space on the filesystem")
    return EngineError(message, "look at the kernel log for errors of the device")


def check_private(descriptor: int, path: Path) -> None:
    """Refuse a directory to write in, and directories in it, in which others may plant or exchange
    files: those of other users, root apart, and those that group or world may write.

    Raises ConfigError, OSError. Links are not looked behind: nobody follows them.
    """
    _check_private(os.fstat(descriptor), path)
    for name in os.listdir(descriptor):
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                _check_private(found, path / name)


def _check_private(found: os.stat_result, path: Path) -> None:
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{path} belongs to user {found.st_uid}, who could put links in our way",
            "run as that user, or give the store to the one that runs",
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"others may write in {path} (mode {stat.S_IMODE(found.st_mode):04o}): blocks would "
            "be theirs to read or exchange",
            f"run chmod go-w {path}",
        )


def sync_directory(directory: Path) -> None:
    """Make names created, renamed or removed in ``directory`` survive power loss."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading; never follow a link, never wait for a pipe.

    Raises OSError, or CorruptStore if it is something else.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CorruptStore("it is not a regular file")
    return open(descriptor, "rb")


def read_regular(path: Path, limit: int) -> bytes:
    """Return the content of a regular file. Raises OSError, or CorruptStore beyond ``limit``."""
    with open_regular(path) as opened:
        data = opened.read(limit + 1)
    if len(data) > limit:
        raise CorruptStore(f"it has more than {limit} bytes")
    return data


def open_to_write(path: Path, flags: int) -> int:
    """Open a regular file for writing, made if need be; raises OSError for anything else there.

    Nothing is followed, and a pipe of that name cannot make us wait.
    """
    flags |= os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, FILE_MODE)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write everything at the current position; a full disk raises instead of cutting short."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def read_into(descriptor: int, target: memoryview) -> int:
    """Fill ``target`` with the beginning of a file as far as that goes; return how far it does."""
    filled = 0
    while filled < len(target) and (got := os.preadv(descriptor, [target[filled:]], filled)):
        filled += got
    return filled


def create_temporary(path: Path) -> int:
    """Return a descriptor of an empty file beside ``path``, readable by its owner only.

    Whatever an earlier crash left under that name goes first; a link is removed, never followed.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    temporary.unlink(missing_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    return os.open(temporary, flags, FILE_MODE)


def discard_temporary(path: Path) -> None:
    """Remove what :func:`create_temporary` made, if it is still there."""
    path.with_name(path.name + TEMPORARY).unlink(missing_ok=True)


def publish(path: Path, descriptor: int) -> None:
    """Give a file made by :func:`create_temporary` its name: fsync, rename, fsync the directory."""
    os.fsync(descriptor)
    os.rename(path.with_name(path.name + TEMPORARY), path)
    sync_directory(path.parent)


def replace(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` so that a crash leaves the old content or the new, never a mix.

    Raises OSError, and then leaves no temporary file behind.
    """
    descriptor = create_temporary(path)
    try:
        write_all(descriptor, data)
        publish(path, descriptor)
    except BaseException:
        discard_temporary(path)
        raise
    finally:
        os.close(descriptor)


def move_away(path: Path, target: Path) -> bool:
    """Move a file or directory to a new name, perhaps on another filesystem, durably; nothing is
    followed. Tell whether it is there now: what is no file cannot be copied. Raises OSError.

    The target's folder must be there; a name that is taken gets a number.
    """
    target = unused(target)
    try:
        os.rename(path, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        if not stat.S_ISREG(path.lstat().st_mode):
            return False
        with open_regular(path) as source:
            write_new(target, iter(lambda: source.read(1 << 20), b""))
        path.unlink()
    sync_directory(target.parent)
    sync_directory(path.parent)
    return True


def unused(target: Path) -> Path:
    """Return a name near to this one that is not taken, of a length that every filesystem takes."""
    number, name = 1, target.name[:200]
    target = target.with_name(name)
    while target.is_symlink() or target.exists():
        number += 1
        target = target.with_name(f"{name}.{number}")
    return target


def write_new(target: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file that is not there yet, durably. Raises OSError, and then leaves nothing."""
    descriptor = open_to_write(target, os.O_EXCL)
    try:
        for piece in pieces:
            write_all(descriptor, piece)
        os.fsync(descriptor)
    except OSError:
        target.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    sync_directory(target.parent)

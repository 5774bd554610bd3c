"""Files moved straight between the device and our own memory, for engines that keep files.

O_DIRECT wants memory, offset and length in multiples of the device's block; 4 KiB fits all. Some
filesystems refuse it, at open or only at the first transfer: then all later files are opened
buffered, which is slower and fills the page cache, but right.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import re
import stat

import numpy as np

from kvstore.backends.base import Status
from kvstore.errors import ConfigError

log = logging.getLogger(__name__)

ALIGNMENT = 4096
IO_CHOICES = ("auto", "direct", "buffered")

READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Never follows a link; O_NONBLOCK because opening a fifo would wait for its other end."""
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
STRANGE = frozenset({errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.ENODEV})
"""What opening a link, a directory, a socket or a dead device gives where a file should be."""
BROKEN = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG})
NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})

_libc = ctypes.CDLL(None, use_errno=True)


class Files:
    """Opens files and moves images. ``io`` is one of IO_CHOICES: ``direct`` never falls back."""

    def __init__(self, io: object) -> None:
        if io not in IO_CHOICES:
            raise ConfigError(f"io={io!r} is not known", f"choose one of {', '.join(IO_CHOICES)}")
        self._may_fall_back = io == "auto"
        self._direct = 0 if io == "buffered" else os.O_DIRECT
        self.note = ""

    @property
    def io(self) -> str:
        return "direct" if self._direct else "buffered"

    def open(self, name: str, flags: int, directory: int) -> int:
        """Open ``name`` in ``directory``, with O_DIRECT while that works; raises OSError."""
        try:
            return os.open(name, flags | self._direct, 0o600, dir_fd=directory)
        except OSError as error:
            if error.errno != errno.EINVAL or not (self._direct and self._may_fall_back):
                raise
        if flags & os.O_CREAT:
            # The file was made before its filesystem was asked about O_DIRECT.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory)
        descriptor = os.open(name, flags, 0o600, dir_fd=directory)
        # A fifo or a directory refuses O_DIRECT too, which says nothing about the files.
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            self._fall_back("opening a file")
        return descriptor

    def load(self, name: str, folder: int, image: memoryview) -> tuple[int, int]:
        """Fill ``image`` from the start of a file; return the bytes filled and the file's size.

        Fewer are filled than asked for when the file is shorter or cannot be read further, none
        when it is no regular file (size -1). Raises OSError if not one byte can be read.
        """
        descriptor = self.open(name, READ, folder)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return 0, -1
            return self.read(descriptor, image, status.st_size), status.st_size
        finally:
            os.close(descriptor)

    def load_around(self, name: str, folder: int, view: memoryview) -> bool:
        """Fill ``view`` from the start of a file by :meth:`read_around`. Raises OSError."""
        descriptor = self.open(name, READ, folder)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return False
            return self.read_around(descriptor, view, status.st_size)
        finally:
            os.close(descriptor)

    def read(self, descriptor: int, image: memoryview, end: int, start: int = 0) -> int:
        """Fill ``image`` with what lies at ``start`` of a file that ends at ``end``.

        Returns the bytes filled. Raises OSError if not one byte can be read.
        """
        try:
            filled = os.preadv(descriptor, [image], start)
        except OSError as error:
            filled = self._read_buffered(descriptor, image, start, error)
        if filled < len(image):
            filled = _read_on(descriptor, image, filled, start, end)
        return filled

    def read_around(self, descriptor: int, view: memoryview, end: int, start: int = 0) -> bool:
        """Fill ``view`` like :meth:`read`, page by page where the device refuses some, which then
        are zeros. Returns whether anything could be read."""
        filled = 0
        with contextlib.suppress(OSError):
            filled = self.read(descriptor, view, end, start)
        found = filled > 0
        for at in range(filled // ALIGNMENT * ALIGNMENT, len(view), ALIGNMENT):
            page, got = view[at : at + ALIGNMENT], 0
            with contextlib.suppress(OSError):
                got = self.read(descriptor, page, end, start + at)
            page[got:] = bytes(len(page) - got)
            found |= got > 0
        return found

    def write(self, descriptor: int, image: memoryview, start: int = 0) -> None:
        """Write the whole of ``image`` at ``start`` of a file; raises OSError."""
        done, refused_at = 0, -1
        while done < len(image):
            try:
                moved = os.pwritev(descriptor, [image[done:] if done else image], start + done)
            except OSError as error:
                if refused_at >= 0 or not self._refused(error):
                    raise
                refused_at = done
                _make_buffered(descriptor)
                continue
            if not moved:
                raise OSError(errno.EIO, "the file took no more bytes")
            done += moved
        # Behind a short write the rest may be unaligned, which is nobody's fault.
        if refused_at == 0:
            self._blame(image)

    def _read_buffered(self, descriptor: int, image: memoryview, start: int, error: OSError) -> int:
        """Try once more without O_DIRECT if that was why a read failed."""
        if not self._refused(error):
            raise error
        _make_buffered(descriptor)
        filled = os.preadv(descriptor, [image], start)
        self._blame(image)
        return filled

    def _refused(self, error: OSError) -> bool:
        return error.errno == errno.EINVAL and self._may_fall_back

    def _blame(self, image: memoryview) -> None:
        """Find out whose fault it was that only the buffered way worked."""
        address = np.frombuffer(image, np.uint8).ctypes.data
        if (address | len(image)) % ALIGNMENT:
            log.warning("an image of %d bytes at %#x is not aligned", len(image), address)
        elif self._direct:
            self._fall_back("moving a file")

    def _fall_back(self, doing: str) -> None:
        self._direct = 0
        self.note = f"the filesystem refused O_DIRECT when {doing}; files are buffered"
        log.warning("%s", self.note)


class Complaints:
    """Logs each kind of failure once: a dead device must not fill the log as well."""

    def __init__(self) -> None:
        self._known: set[tuple[str, int | None]] = set()

    def log(self, doing: str, what: str, error: OSError) -> None:
        kind = (doing, error.errno)
        if kind not in self._known:
            self._known.add(kind)
            log.error("%s %s failed: %s (further ones are not logged)", doing, what, error.strerror)


def read_status(error: OSError) -> Status:
    """Return what a failed open or read says about the record."""
    if error.errno == errno.ENOENT:
        return Status.MISSING
    if error.errno in BROKEN:
        return Status.UNREADABLE
    return Status.DAMAGED if error.errno in STRANGE else Status.FAILED


def write_status(error: OSError) -> Status:
    return Status.FULL if error.errno in FULL else Status.FAILED


def syncfs(descriptor: int) -> None:
    """Sync the whole filesystem that holds ``descriptor``; raises OSError.

    Not in Python's os; see syncfs(2). The kernel tells a failed write once for each descriptor.
    """
    if _libc.syncfs(descriptor) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def syncfs_reports_errors() -> bool:
    """Whether syncfs fails after a failed write: Linux 5.8 and later (syncfs(2), VERSIONS)."""
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return found is not None and (int(found[1]), int(found[2])) >= (5, 8)


def _make_buffered(descriptor: int) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)


def _read_on(descriptor: int, image: memoryview, filled: int, start: int, end: int) -> int:
    """Go on after a short read as far as the file and its device allow."""
    while 0 < filled < min(len(image), end - start):
        try:
            more = os.preadv(descriptor, [image[filled:]], start + filled)
        except OSError:
            break
        if not more:
            break
        filled += more
    return filled

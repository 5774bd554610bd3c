"""One super-block: a preallocated file with a header page at either end, and slots between.

The header says whose the file is and how long its slots are; the table is in docs/formats.md. It is
there twice, in the first and the last page, because without it the scan would not find the slots:
of two good copies the one of the higher edition counts. It is written last when a file is made or
gets another slot length, and before that every place where the scan will look for a record has
been zeroed: so a scan never takes old payload, which anybody may have written, for a record.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from kvstore.backends.directio import CREATE
from kvstore.errors import CorruptStore
from kvstore.killpoints import reach
from kvstore.slots import PAGE

if TYPE_CHECKING:
    from kvstore.backends.directio import Files

MAGIC = b"KVSB"
VERSION = 1
HEADER = struct.Struct("<4sHH16sIIQQ")
SUM = struct.Struct("<Q")
FOLDER = "super"
GRAVES = "deleted"
SUFFIX = ".sb"
NEW = ".new"
"""Suffix of a file that is being made."""
TOMBSTONE = b"KVBT"
"""Begins the page of a slot whose record was deleted, otherwise zeros."""

_ZERO_RANGE, _KEEP_SIZE = 0x10, 0x01
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_FILL_BYTES = 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a header says. ``slot_bytes`` and ``file_bytes`` in bytes, ``number`` from 1.

    ``edition`` goes up with every new header of the file.
    """

    store: bytes
    number: int
    slot_bytes: int
    file_bytes: int
    edition: int = 1

    def encode(self) -> bytes:
        fixed = HEADER.pack(
            MAGIC, VERSION, 0, self.store, self.number, self.slot_bytes, self.file_bytes,
            self.edition,
        )  # fmt: skip
        return fixed + SUM.pack(xxh3_64_intdigest(fixed))


def decode(page: memoryview) -> Shape:
    """Return what a header page says. Raises CorruptStore, whatever the bytes are."""
    fixed = bytes(page[: HEADER.size])
    if len(page) < HEADER.size + SUM.size or not fixed.startswith(MAGIC):
        raise CorruptStore("it has no header")
    if xxh3_64_intdigest(fixed) != SUM.unpack_from(page, HEADER.size)[0]:
        raise CorruptStore("the checksum of its header does not match")
    _, version, _, store, number, slot_bytes, file_bytes, edition = HEADER.unpack(fixed)
    if version != VERSION:
        raise CorruptStore(f"version {version} of its header is not supported")
    return Shape(store, number, slot_bytes, file_bytes, edition)


def name_of(number: int) -> str:
    return f"{number:08x}{SUFFIX}"


def digest(namespace: bytes, shard: int, key: bytes) -> int:
    """Return the number that stands for a block in the list.

    Two blocks may share one: then a rebuild forgets a block, which is a miss.
    """
    return xxh3_64_intdigest(namespace + shard.to_bytes(2, "little") + key)


def blank_page() -> memoryview:
    """Return a page of zeros that O_DIRECT can move."""
    return memoryview(mmap.mmap(-1, PAGE))


def tombstone_page() -> memoryview:
    page = blank_page()
    page[: len(TOMBSTONE)] = TOMBSTONE
    return page


def make(files: Files, folder: int, shape: Shape) -> int:
    """Make a super-block in the directory ``folder``, durably; return its descriptor.

    Raises OSError and then leaves nothing: a full disk grows no half of a file.
    """
    name = name_of(shape.number)
    new = name + NEW
    descriptor = files.open(new, CREATE & ~os.O_WRONLY | os.O_RDWR, folder)
    try:
        reach("make.opened")
        reserve(descriptor, shape.file_bytes)
        reach("make.reserved")
        write_header(files, descriptor, shape)
        os.fsync(descriptor)
        reach("make.headed")
        os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
        reach("make.renamed")
        os.fsync(folder)
    except BaseException:
        os.close(descriptor)
        for left in (new, name):
            with contextlib.suppress(OSError):
                os.unlink(left, dir_fd=folder)
        raise
    return descriptor


def reserve(descriptor: int, size: int) -> None:
    """Take the space on the device now, so that later writes into the file never lack it.

    What is there stays. Raises OSError, and may then leave the file half grown.
    """
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        end = os.fstat(descriptor).st_size // PAGE * PAGE
        os.ftruncate(descriptor, size)
        zeros = memoryview(mmap.mmap(-1, _FILL_BYTES))
        for start in range(end, size, _FILL_BYTES):
            os.pwritev(descriptor, [zeros[: min(_FILL_BYTES, size - start)]], start)


def write_header(files: Files, descriptor: int, shape: Shape) -> None:
    """Write both copies of the header; raises OSError."""
    page = blank_page()
    encoded = shape.encode()
    page[: len(encoded)] = encoded
    files.write(descriptor, page, shape.file_bytes - PAGE)
    reach("header.half")
    files.write(descriptor, page)


def reshape(files: Files, descriptor: int, shape: Shape) -> None:
    """Give a file without records slots of another length; raises OSError.

    In this order, each step on the device before the next: nothing that lies where the new slots
    begin may look like a record once the header says that they begin there.
    """
    _blank(files, descriptor, shape)
    reach("reshape.blanked")
    os.fdatasync(descriptor)
    write_header(files, descriptor, shape)
    os.fdatasync(descriptor)
    reach("reshape.headed")


def _blank(files: Files, descriptor: int, shape: Shape) -> None:
    """Have the pages read as zeros where slots of the new length begin, or all of them."""
    if _zero_range(descriptor, PAGE, shape.file_bytes - 2 * PAGE):
        return
    page = blank_page()
    for start in range(PAGE, shape.file_bytes - PAGE - shape.slot_bytes + 1, shape.slot_bytes):
        files.write(descriptor, page, start)


def _zero_range(descriptor: int, start: int, size: int) -> bool:
    """Zero a range without writing it (fallocate(2)); False where the filesystem cannot."""
    mode = ctypes.c_int(_ZERO_RANGE | _KEEP_SIZE)
    if not _libc.fallocate(descriptor, mode, ctypes.c_int64(start), ctypes.c_int64(size)):
        return True
    number = ctypes.get_errno()
    if number not in _UNSUPPORTED:
        raise OSError(number, os.strerror(number))
    return False


def read_header(files: Files, descriptor: int, file_bytes: int) -> tuple[Shape, bool]:
    """Return what the better header of a file says, and whether both copies say so.

    Raises CorruptStore if neither is good.
    """
    found: list[Shape] = []
    problem: CorruptStore | None = None
    for start in (0, file_bytes - PAGE):
        page = blank_page()
        try:
            filled = files.read(descriptor, page, file_bytes, start)
            found.append(decode(page[:filled]))
        except CorruptStore as error:
            problem = error
        except OSError as error:
            problem = CorruptStore(f"its header cannot be read: {error.strerror}")
    if not found:
        assert problem is not None
        raise problem
    best = max(found, key=lambda shape: shape.edition)
    return best, found == [best, best]

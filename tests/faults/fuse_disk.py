"""A disk that logs what is written to it: ``python -m tests.faults.fuse_disk IMAGE LOG MOUNT``.

One file ``disk`` in a FUSE filesystem, for a loop device to lie on. The log has, in the order in
which they came, each write (``W``, offset u64, length u32, data) and each flush (``F`` and zeros);
it is never buffered, so whoever looks at its size knows what has been written. While the file
``IMAGE.broken`` is there, writes fail with EIO and are not done.

A process of its own, with one thread: a flush that is stuck must not stop whoever waits for it, and
the order of the log must be the true one.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import sys
from typing import Any

import mfusepy

RECORD = struct.Struct("<cQI")
NAME = "disk"


class LoggedDisk(mfusepy.Operations):  # type: ignore[misc]
    """The filesystem."""

    use_ns = True

    def __init__(self, image: str, log: str) -> None:
        self._image = os.open(image, os.O_RDWR)
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._broken = f"{image}.broken"

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
        if path != f"/{NAME}":
            raise OSError(errno.ENOENT, path)
        size = os.fstat(self._image).st_size
        return {"st_mode": stat.S_IFREG | 0o600, "st_nlink": 1, "st_size": size}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", NAME]

    def open(self, path: str, flags: int) -> int:
        return 0

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(self._image, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        if os.path.exists(self._broken):
            raise OSError(errno.EIO, path)
        os.writev(self._log, [RECORD.pack(b"W", offset, len(data)), data])
        return os.pwrite(self._image, data, offset)

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        if os.path.exists(self._broken):
            raise OSError(errno.EIO, path)
        os.write(self._log, RECORD.pack(b"F", 0, 0))
        return 0

    def flush(self, path: str, fh: int) -> int:
        return 0


def main() -> None:
    image, log, mount = sys.argv[1:]
    mfusepy.FUSE(LoggedDisk(image, log), mount, foreground=True, nothreads=True, allow_other=True)


if __name__ == "__main__":
    main()

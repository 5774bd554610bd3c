"""Files mapped only to steer the page cache: nothing here loads from a mapping or stores to it.

A load from a mapped page that the disk cannot read, or that somebody cut off, ends the process with
SIGBUS (facts in docs/design.md). madvise(2) and mincore(2) return an error instead. The calls go by
ctypes, which lets go of the interpreter lock while the kernel reads; mmap.madvise does not.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from kvstore.slots import PAGE

_POPULATE_READ = 22
"""MADV_POPULATE_READ, Linux 5.14 and later; not among Python's constants."""
_libc = ctypes.CDLL(None, use_errno=True)


class PageMap:
    """A mapping of a file. Raises OSError or ValueError where it cannot be mapped as long as said.

    ``start`` and ``size`` of ranges in bytes; ``start`` is a multiple of 4 KiB.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)
        self._size = size
        self._address = np.frombuffer(self._memory, np.uint8).ctypes.data

    def prefetch(self, start: int, size: int) -> int:
        """Bring a range into the page cache; return 0 or the number of the error (errno)."""
        size = min(size, self._size - start)
        return self._call(_libc.madvise, start, size, ctypes.c_int(_POPULATE_READ))

    def resident(self, start: int, size: int) -> int:
        """Return how many bytes of a range are in the page cache, in whole pages."""
        size = min(size, self._size - start)
        vector = np.zeros(-(-size // PAGE), np.uint8)
        error = self._call(_libc.mincore, start, size, ctypes.c_void_p(vector.ctypes.data))
        return 0 if error else int((vector & 1).sum()) * PAGE

    def _call(self, function: ctypes._NamedFuncPointer, start: int, size: int, last: object) -> int:
        address = ctypes.c_void_p(self._address + start)
        if function(address, ctypes.c_size_t(size), last) == 0:
            return 0
        return ctypes.get_errno()

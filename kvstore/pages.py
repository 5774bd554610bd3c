"""Anonymous memory in huge pages, for the payloads of blocks.

O_DIRECT moves 2 MiB out of huge pages in one request, but out of scattered 4 KiB pages in several,
which halves the speed of a read. Pages that nobody touches cost nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

PAGE = 4096
HUGE_PAGE = 2 << 20
_MADV_POPULATE_WRITE = 23


class Pages:
    """``capacity`` bytes (rounded up to 4 KiB), beginning at a huge page: ``memory`` is a view.

    Raises ConfigError if the machine cannot map so much.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = round_up(capacity, PAGE)
        self._map = _map(self.capacity)
        address = np.frombuffer(self._map, np.uint8).ctypes.data
        start = -address % HUGE_PAGE
        self._address = address + start
        self.memory = memoryview(self._map)[start : start + self.capacity]

    def populate(self, start: int, stop: int) -> None:
        """Have the kernel give these bytes their pages, leaving what is in them (*any thread*).

        The first touch of a page costs more than copying into it; better before somebody waits.
        Does nothing where the kernel cannot (before Linux 5.14).
        """
        # Through ctypes, which lets go of the interpreter lock; mmap.madvise keeps it.
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        advise(self._address + start, min(stop, self.capacity) - start, _MADV_POPULATE_WRITE)

    @property
    def huge_bytes(self) -> int:
        """How much is touched and lies in huge pages, after ``/proc/self/smaps``.

        0 where smaps cannot be read. A neighbouring mapping that the kernel merged with this one
        may count, up to the capacity.
        """
        with contextlib.suppress(OSError), open("/proc/self/smaps", encoding="ascii") as lines:
            return min(_huge_bytes_at(self._address, lines), self.capacity)
        return 0


def round_up(size: int, unit: int) -> int:
    return (size + unit - 1) // unit * unit


def _map(capacity: int) -> mmap.mmap:
    """Map enough to begin at a huge page; advice must come before the first touch."""
    size = round_up(capacity, HUGE_PAGE) + HUGE_PAGE
    try:
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        message = f"{size} bytes of memory cannot be mapped: {error}"
        raise ConfigError(message, "give the store less memory") from error
    # Kernels may lack either. Blocks hold prompts, which have no place in a core dump.
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTDUMP):
        with contextlib.suppress(OSError):
            mapping.madvise(advice)
    return mapping


def _huge_bytes_at(address: int, lines: Iterable[str]) -> int:
    """Return ``AnonHugePages`` of the mapping that holds ``address``, in bytes."""
    inside = False
    for line in lines:
        first, _, rest = line.partition(" ")
        if first.endswith(":"):
            if inside and first == "AnonHugePages:":
                return int(rest.split()[0]) << 10
        else:
            low, _, high = first.partition("-")
            inside = int(low, 16) <= address < int(high, 16)
    return 0

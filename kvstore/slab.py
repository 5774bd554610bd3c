"""Memory for blocks: one anonymous mapping in huge pages, handed out in 4 KiB-aligned extents.

O_DIRECT moves 2 MiB out of huge pages in one request, but out of scattered 4 KiB pages in several,
which halves the speed of a read. The lowest free extent is taken first, so that the same pages are
used again and again: the first touch of a page costs more than copying into it.

One thread owns a slab; others only read and fill the views of extents that it gave them.
"""

from __future__ import annotations

import contextlib
import mmap
from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore.errors import Busy, ConfigError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PAGE = 4096
HUGE_PAGE = 2 << 20


class Extent(NamedTuple):
    """A part of a slab: ``view`` begins at a multiple of 4 KiB and has ``length`` bytes.

    What it holds at first is what its last user left there. The view must not be used after the
    extent was released, though nothing prevents it.
    """

    offset: int
    length: int
    view: memoryview


class Slab:
    """``capacity`` bytes (rounded up to 4 KiB) of aligned memory, allocated first fit."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise UsageError(f"a slab of {capacity} bytes was asked for", "give at least 4096")
        self.capacity = _round_up(capacity, PAGE)
        self._map = _map(self.capacity)
        address = np.frombuffer(self._map, np.uint8).ctypes.data
        self._start = -address % HUGE_PAGE
        self._address = address + self._start
        self._memory = memoryview(self._map)[self._start : self._start + self.capacity]
        # Free extents by offset, never two that touch.
        self._offsets = [0]
        self._lengths = [self.capacity]

    @property
    def free_bytes(self) -> int:
        """Free memory in all, which may lie in pieces."""
        return sum(self._lengths)

    @property
    def huge_bytes(self) -> int:
        """How much of the slab is touched and lies in huge pages, after ``/proc/self/smaps``.

        0 where smaps cannot be read. A neighbouring mapping that the kernel merged with this one
        may count, up to the capacity.
        """
        with contextlib.suppress(OSError), open("/proc/self/smaps", encoding="ascii") as lines:
            return min(_huge_bytes_at(self._address, lines), self.capacity)
        return 0

    def allocate(self, sizes: Sequence[int]) -> list[Extent]:
        """Return an extent for each size (bytes, rounded up to 4 KiB): all of them or none.

        Raises Busy when there is no room now, UsageError when there never will be.
        """
        lengths = [_round_up(size, PAGE) for size in sizes]
        if lengths and min(lengths) < PAGE:
            raise UsageError("an extent of no bytes was asked for", "ask for at least one byte")
        if sum(lengths) > self.capacity:
            raise UsageError(
                f"{sum(lengths)} bytes at once were asked of a slab of {self.capacity}",
                "ask for fewer blocks at a time",
            )
        extents: list[Extent] = []
        for length in lengths:
            offset = self._take(length)
            if offset is None:
                self.release(extents)
                raise Busy(
                    f"no buffer of {length} bytes is free, {self.free_bytes} bytes are in all",
                    "try again later",
                )
            extents.append(Extent(offset, length, self._memory[offset : offset + length]))
        return extents

    def release(self, extents: Iterable[Extent]) -> None:
        """Give extents back. Raises ValueError for one that is free already."""
        for extent in extents:
            self._give(extent.offset, extent.length)

    # A walk over the holes is quick: filling the lowest first keeps them few.
    def _take(self, length: int) -> int | None:
        for at, free in enumerate(self._lengths):
            if free >= length:
                offset = self._offsets[at]
                if free == length:
                    del self._offsets[at], self._lengths[at]
                else:
                    self._offsets[at] += length
                    self._lengths[at] -= length
                return offset
        return None

    def _give(self, offset: int, length: int) -> None:
        at = bisect_left(self._offsets, offset)
        after = self._offsets[at] if at < len(self._offsets) else self.capacity
        before = self._offsets[at - 1] + self._lengths[at - 1] if at else 0
        if before > offset or offset + length > after:
            raise ValueError(f"{length} bytes at {offset} of the slab are free already")
        self._offsets.insert(at, offset)
        self._lengths.insert(at, length)
        self._join(at)
        if at:
            self._join(at - 1)

    def _join(self, at: int) -> None:
        """Make one extent of number ``at`` and the next if they touch."""
        end = self._offsets[at] + self._lengths[at]
        if at + 1 < len(self._offsets) and self._offsets[at + 1] == end:
            self._lengths[at] += self._lengths[at + 1]
            del self._offsets[at + 1], self._lengths[at + 1]


def _round_up(size: int, unit: int) -> int:
    return (size + unit - 1) // unit * unit


def _map(capacity: int) -> mmap.mmap:
    """Map enough to begin at a huge page; advice must come before the first touch."""
    size = _round_up(capacity, HUGE_PAGE) + HUGE_PAGE
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

"""The bounce slab: memory for blocks in flight, handed out in 4 KiB-aligned extents.

The lowest free extent is taken first, so that the same pages are used again and again: the first
touch of a page costs more than copying into it.

One thread owns a slab; others only read and fill the views of extents that it gave them.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

from kvstore.errors import Busy, UsageError
from kvstore.pages import PAGE, Pages, round_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


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
        self.pages = Pages(capacity)
        self.capacity = self.pages.capacity
        # Free extents by offset, never two that touch.
        self._offsets = [0]
        self._lengths = [self.capacity]

    @property
    def free_bytes(self) -> int:
        """Free memory in all, which may lie in pieces."""
        return sum(self._lengths)

    @property
    def huge_bytes(self) -> int:
        """See :attr:`kvstore.pages.Pages.huge_bytes`."""
        return self.pages.huge_bytes

    def allocate(self, sizes: Sequence[int]) -> list[Extent]:
        """Return an extent for each size (bytes, rounded up to 4 KiB): all of them or none.

        Raises Busy when there is no room now, UsageError when there never will be.
        """
        lengths = [round_up(size, PAGE) for size in sizes]
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
            extents.append(Extent(offset, length, self.pages.memory[offset : offset + length]))
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

"""Least recently used, exactly.

The index stamps every use with a number that only grows, and stamps the end of a chain lower than
its start, so the lowest stamps are leaves. Sorting a million stamps for a few victims would cost
15 us each; instead the lowest thirtieth or so is cut out by a threshold taken from a sample, sorted
once and kept. A kept row counts as long as it still has the stamp it was kept with: everything used
since has a higher one, and so has every new row, so the answer is always exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.columns import DISK, GHOST, HIDDEN, U8, U32, U64, WRITING, Bools

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.rows import RowView

_SAMPLE = 4096
_SHARE = 32
_LEAST_KEPT = 4096
_LEAST_LOOK = 256


class Lru:
    """Offers the rows that were used longest ago, of those that have the flag ``where``."""

    name = "lru"

    def __init__(self, where: int = DISK) -> None:
        self._where = np.uint8(where)
        self._rows = np.empty(0, np.uint32)
        self._stamps = np.empty(0, np.uint64)
        self._start = 0

    @property
    def state_bytes(self) -> int:
        return self._rows.nbytes + self._stamps.nbytes

    @property
    def ghosts(self) -> int:
        return 0

    def used(self, rows: RowView, line: U32, now: float, *, heard: int = 0) -> None:
        """The stamps of the index say it all."""

    def gone(self, rows: RowView, gone: U32) -> None:
        """Nothing is remembered of them."""

    def capture(self, rows: RowView) -> dict[str, Any]:
        return {}

    def restore(self, rows: RowView, state: Mapping[str, Any]) -> None:
        """The journal keeps the order of use."""

    def candidates(self, rows: RowView, count: int, now: float) -> U32:
        """Return up to ``count`` rows that the engine has, longest unused first."""
        return self.oldest(rows.last_use, rows.flags, count)

    def oldest(self, last_use: U64, flags: U8, count: int) -> U32:
        """Return up to ``count`` rows, longest unused first: 0.1 to 0.5 us each when asked for a
        thousand or more of a million."""
        found = self._kept(last_use, flags, count)
        if len(found) < count:
            self._refill(last_use, flags, count)
            found = self._kept(last_use, flags, count)
        return found

    def _kept(self, last_use: U64, flags: U8, count: int) -> U32:
        """Return what is still valid of the rows kept, and forget invalid ones at the start."""
        parts: list[U32] = [self._rows[:0]]
        at, missing = self._start, count
        while missing > 0 and at < len(self._rows):
            # Look a little further than asked: some have been used or removed since.
            stop = at + max(missing + missing // 4, _LEAST_LOOK)
            rows, stamps = self._rows[at:stop], self._stamps[at:stop]
            valid = np.flatnonzero((last_use[rows] == stamps) & self._there(flags[rows]))[:missing]
            if missing == count:
                self._start = at + int(valid[0]) if len(valid) else min(stop, len(self._rows))
            parts.append(rows[valid])
            at, missing = stop, missing - len(valid)
        return np.concatenate(parts)

    def _refill(self, last_use: U64, flags: U8, count: int) -> None:
        wanted = max(count, _LEAST_KEPT, len(flags) // _SHARE)
        there = np.flatnonzero(self._there(flags)).astype(np.uint32)
        self._rows = _sorted(there, last_use, wanted)
        self._stamps, self._start = last_use[self._rows], 0

    def _there(self, flags: U8) -> Bools:
        return _is_there(flags, self._where)


class Among:
    """Offers some rows only, longest unused first. For one choice: nothing is kept for the next."""

    def __init__(self, some: U32) -> None:
        self._some = some

    def candidates(self, rows: RowView, count: int, now: float) -> U32:
        there = self._some[_is_there(rows.flags[self._some], np.uint8(DISK))]
        return _sorted(there, rows.last_use, count)


def _is_there(flags: U8, where: np.uint8) -> Bools:
    there: Bools = flags & (where | np.uint8(WRITING | GHOST | HIDDEN)) == where
    return there


def _sorted(rows: U32, last_use: U64, wanted: int) -> U32:
    oldest = _oldest(rows, last_use, wanted)
    return oldest[np.argsort(last_use[oldest])]


def _oldest(rows: U32, last_use: U64, wanted: int) -> U32:
    """Return all rows with a stamp up to some threshold: at least ``wanted``, or all there are."""
    if len(rows) <= 2 * wanted:
        return rows
    stamps = last_use[rows]
    step = len(rows) // _SAMPLE
    sample = np.sort(stamps[::step])
    while True:
        # Half again as many as wanted, or the error of the sample would often leave too few.
        rank = wanted * 3 // 2 // step
        if rank >= len(sample):
            return rows
        chosen: U32 = rows[stamps <= sample[rank]]
        if len(chosen) >= wanted:
            return chosen
        wanted *= 2

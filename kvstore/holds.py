"""What keeps a row from being evicted: references, leases and pins.

A *reference* is a read in flight: a count, taken and given back in batches. A *lease* is a time
until which a row stays, tied to nobody. A *pin* is an order not to evict, with a deadline; one that
an administrator gave is *firm*: nobody else lifts or shortens it. Time is an argument: seconds of
the clock whose ``epoch`` was given at construction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from kvstore.columns import U16, U32, Bools, Columns

Bytes = npt.NDArray[np.int64]
RecordBytes = Callable[[U32], Bytes]

_MOST_REFERENCES = 0xFFFF
_LAST_LEASE = 0xFFFFFFFF
_FEW = 256
_TICKS = 10
"""Leases count deciseconds: u32 then lasts 13 years."""


class Holds:
    """References, leases and pins of the rows of ``columns``; ``record_bytes`` tells from payload
    sizes how many bytes a lease or pin keeps."""

    def __init__(self, columns: Columns, epoch: float, record_bytes: RecordBytes) -> None:
        self._columns = columns
        self._epoch = epoch
        self._record_bytes = record_bytes
        self._pins: dict[int, float] = {}
        self._firm: set[int] = set()
        self._first_unpin = math.inf
        # Leased bytes by the tick at which they end: the sum is cheap and old ones drop out.
        self._leased: dict[int, int] = {}

    # -- references -------------------------------------------------------------------------------

    def acquire(self, rows: U32) -> None:
        """Add a reference for each entry of ``rows``; a row may occur often.

        Raises OverflowError over 65,535 references on one row, with nothing changed.
        """
        rows, times = _count(rows)
        counts = self._columns.references[rows] + times
        if counts.max(initial=0) > _MOST_REFERENCES:
            row = int(rows[counts.argmax()])
            raise OverflowError(f"row {row} would have over {_MOST_REFERENCES} references")
        self._columns.references[rows] = counts

    def release(self, rows: U32) -> U32:
        """Give a reference back for each entry of ``rows``; return the rows that have none left.

        Raises ValueError if a row has fewer than that, with nothing changed.
        """
        rows, times = _count(rows)
        counts = self._columns.references[rows] - times
        if counts.min(initial=0) < 0:
            row = int(rows[counts.argmin()])
            raise ValueError(f"row {row} has fewer references than are given back")
        self._columns.references[rows] = counts
        none_left: U32 = rows[counts == 0]
        return none_left

    def take_references(self, rows: U32) -> U16:
        """Return the references of each row and set them to 0: whoever holds them now answers to
        the caller."""
        counts: U16 = self._columns.references[rows]
        self._columns.references[rows] = 0
        return counts

    # -- leases -----------------------------------------------------------------------------------

    def lease(self, rows: U32, until: float) -> None:
        """Keep rows until then; a longer lease that a row has stays. Rounded up to 0.1 s."""
        tick = min(math.ceil((until - self._epoch) * _TICKS), _LAST_LEASE)
        rows = np.unique(rows)
        rows = rows[self._columns.lease_ends[rows] < max(tick, 0)]
        self._note(rows, -1)
        self._columns.lease_ends[rows] = max(tick, 0)
        self._note(rows, 1)

    def leased_bytes(self, now: float) -> int:
        """Return the bytes of all records under a live lease."""
        tick = self._tick(now)
        for ended in [end for end in self._leased if end <= tick]:
            del self._leased[ended]
        return sum(self._leased.values())

    def _tick(self, now: float) -> int:
        return max(0, math.floor((now - self._epoch) * _TICKS))

    def _note(self, rows: U32, sign: int) -> None:
        """Add the bytes of rows to, or take them from, the ticks at which their leases end."""
        ends = self._columns.lease_ends[rows]
        for end in np.unique(ends).tolist():
            if sign > 0 or end in self._leased:
                kept = int(self._record_bytes(self._columns.sizes[rows[ends == end]]).sum())
                self._leased[end] = self._leased.get(end, 0) + sign * kept

    def resize(self, rows: U32, sizes: U32) -> None:
        """Set the payload sizes of rows, keeping their leases in account."""
        leased = rows[self._columns.lease_ends[rows] > 0]
        self._note(leased, -1)
        self._columns.sizes[rows] = sizes
        self._note(leased, 1)

    # -- pins -------------------------------------------------------------------------------------

    @property
    def pins(self) -> Mapping[int, float]:
        """Pinned rows and their deadlines, expired ones included until someone looks."""
        return MappingProxyType(self._pins)

    @property
    def firm_pins(self) -> Set[int]:
        """Rows pinned by an administrator."""
        return self._firm

    def pin(self, row: int, until: float, *, firm: bool = False) -> None:
        """Never evict ``row`` before ``until``; the last call counts, but over a firm pin one that
        is not firm only if it lasts longer."""
        if firm:
            self._firm.add(row)
        elif row in self._firm:
            until = max(until, self._pins[row])
        self._pins[row] = until
        self._first_unpin = min(self._first_unpin, until)

    def unpin(self, row: int) -> None:
        """Lift a pin, firm or not; no pin is no error."""
        self._pins.pop(row, None)
        self._firm.discard(row)

    def pinned_bytes(self, now: float) -> int:
        """Return the bytes of all records under a live pin."""
        return int(self._record_bytes(self._columns.sizes[self._pinned(now)]).sum())

    def _pinned(self, now: float) -> U32:
        if now >= self._first_unpin:
            self._pins = {row: until for row, until in self._pins.items() if until > now}
            self._firm &= self._pins.keys()
            self._first_unpin = min(self._pins.values(), default=math.inf)
        return np.fromiter(self._pins, np.uint32, len(self._pins))

    # -- all --------------------------------------------------------------------------------------

    def free(self, rows: U32, now: float) -> Bools:
        """Tell which rows nothing holds at ``now``."""
        columns = self._columns
        free: Bools = columns.references[rows] == 0
        free &= columns.lease_ends[rows] <= self._tick(now)
        if self._pins:
            free &= ~np.isin(rows, self._pinned(now))
        return free

    def lift(self, rows: U32) -> None:
        """End leases and pins of rows that leave."""
        leased = rows[self._columns.lease_ends[rows] > 0]
        self._note(leased, -1)
        self._columns.lease_ends[leased] = 0
        if self._pins:
            for row in rows.tolist():
                self.unpin(row)


def _count(rows: U32) -> tuple[U32, Bytes]:
    """Return the distinct ones of rows, and how often each occurs."""
    # Few rows are seldom asked for twice, and a set tells so far sooner than sorting does.
    if len(rows) <= _FEW and len(set(rows.tolist())) == len(rows):
        return rows, np.ones(len(rows), np.int64)
    return np.unique(rows, return_counts=True)

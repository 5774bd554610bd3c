"""Blocks that wait in memory before they are queued for writing, where ``write = late``.

They wait until memory needs their room or until they have waited for ``max_age`` seconds; then
admission decides whether they are written at all. A flush, and a put that asks for more than
``accepted``, do not ask it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from kvstore.chains import positions_of, spread_up
from kvstore.columns import DIRTY, DISK, GHOST, NONE, U32, WRITING, Bools

if TYPE_CHECKING:
    from kvstore.core import Core
    from kvstore.entry import Entry

Admission = Callable[[U32], Bools]
"""Told rows that are only in memory, returns which of them are worth a write."""


def admit_all(rows: U32) -> Bools:
    """Write every block."""
    return np.ones(len(rows), np.bool_)


class Late:
    """Entries that wait, in the order in which they came; see :class:`kvstore.entry.Entry`.

    ``max_age`` in seconds, which may be changed; None = nothing waits (``write = through``). Owner
    thread only.
    """

    def __init__(self, core: Core, max_age: float | None, admission: Admission = admit_all) -> None:
        self._core = core
        self.max_age = max_age
        self.admission = admission
        # When each came, in the order of coming; None until the first tick after that.
        self._came: dict[Entry, float | None] = {}
        self._by_row: dict[int, Entry] = {}

    @property
    def on(self) -> bool:
        """Whether blocks may wait here."""
        return self.max_age is not None

    @property
    def oldest_generation(self) -> int:
        """The lowest generation that waits; beyond all others if there is none."""
        return min((int(entry.begins["generation"].min()) for entry in self._came), default=1 << 63)

    # -- coming and going -------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """Take an entry whose blocks can be read and for which nobody waits."""
        self._came[entry] = None
        self._by_row.update(dict.fromkeys(entry.rows.tolist(), entry))

    def tick(self, now: float) -> None:
        """Let go of what has waited long enough. ``now`` in seconds of any steady clock; a block's
        time begins with the first tick after it came."""
        for entry in reversed(self._came):
            if self._came[entry] is not None:
                break
            self._came[entry] = now
        due = list(takewhile(lambda entry: self._is_due(entry, now), self._came))
        for entry in due:
            del self._came[entry]
            for row in entry.rows.tolist():
                del self._by_row[row]
        self._admit(due)

    def _is_due(self, entry: Entry, now: float) -> bool:
        came, age = self._came[entry], self.max_age
        return came is not None and age is not None and now - came >= age

    def press(self, rows: U32) -> None:
        """Let go of those of ``rows`` that wait: memory needs their room (called by the tier).

        Those that are refused are clean when this returns.
        """
        entries = self._take(rows)
        for entry in entries:
            entry.leaves = True
        self._admit(entries)

    def hasten(self, rows: U32) -> None:
        """Have those of ``rows`` that wait written soon, whatever admission would say."""
        self._core.writer.go_on(self._take(rows))

    def hasten_all(self) -> None:
        """Have all that waits written soon, whatever admission would say."""
        entries = list(self._came)
        self._came.clear()
        self._by_row.clear()
        self._core.writer.go_on(entries)

    def forget(self, rows: U32) -> None:
        """Leave out those of ``rows`` that wait: their version is being removed."""
        for entry in self._take(rows):
            self._core.writer.note_not_dirty(entry)

    def _take(self, rows: U32) -> list[Entry]:
        """Take out those of ``rows`` that wait, as entries of their own."""
        chosen: dict[Entry, None] = {}
        for row in rows.tolist() if self._by_row else ():
            entry = self._by_row.pop(row, None)
            if entry is not None:
                chosen[entry] = None
        return [self._part(entry, np.isin(entry.rows, rows)) for entry in chosen]

    def _part(self, entry: Entry, mine: Bools) -> Entry:
        if mine.all():
            del self._came[entry]
            return entry
        return entry.split(mine)

    # -- admission --------------------------------------------------------------------------------

    def _admit(self, entries: list[Entry]) -> None:
        """Queue what is worth a write; the rest stays in memory until its room is needed."""
        if not entries:
            return
        rows = np.concatenate([entry.rows for entry in entries])
        admitted = self._admitted(rows)
        self._refuse(rows[~admitted])
        ends = np.cumsum([len(entry.rows) for entry in entries])
        writer, kept = self._core.writer, []
        for entry, good in zip(entries, np.split(admitted, ends[:-1]), strict=True):
            if good.any():
                kept.append(entry)
            if not good.all():
                writer.note_not_dirty(entry.split(~good) if good.any() else entry)
        writer.go_on(kept)

    def _refuse(self, rows: U32) -> None:
        self._core.counters.refused_admission += len(rows)
        self._core.index.clear_flags(rows, DIRTY)

    def _admitted(self, rows: U32) -> Bools:
        """Tell which rows, taken out before, are to be written.

        Never refused is what somebody holds, and what has a child that is written or will be: a
        block without its parent is of no use to anybody.
        """
        index, now = self._core.index, self._core.clock.seconds()
        admitted = self.admission(rows)
        if admitted.all():
            return admitted
        admitted = admitted | index.held(rows, now)
        if index.children[rows[~admitted]].any():
            admitted |= np.isin(rows, self._parents_of_written(rows))
            up = positions_of(index.parents[rows], rows)
            admitted = spread_up(up, admitted.astype(np.int64)) > 0
        return admitted

    def _parents_of_written(self, asked: U32) -> U32:
        """Return the parents of all rows that the engine has or will have. Looks at every row."""
        index = self._core.index
        written = (index.flags & np.uint8(DISK | WRITING | DIRTY | GHOST)) != 0
        written[asked] = False
        written[list(self._by_row)] = False
        parents = index.parents[written]
        found: U32 = parents[parents != NONE]
        return found

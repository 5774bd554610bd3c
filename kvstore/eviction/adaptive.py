"""What is least likely to come back soon leaves first, as learned from what came back so far.

Each use gives a block a mark (how often, in which turn, at the end or not) and a time; those that
left are remembered for a while (:mod:`kvstore.eviction.ghosts`). From what comes back, and when, a
table says what a block of some class and age is worth (:mod:`kvstore.eviction.reuse`). Hardly
anything can be gained where hardly anything comes back too late: there, and until something was
learned, the order of use decides, so ample room costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.columns import DISK, GHOST, HIDDEN, WRITING, Arrays
from kvstore.eviction import reuse
from kvstore.eviction.ghosts import Ghosts
from kvstore.eviction.lru import Lru

if TYPE_CHECKING:
    from kvstore.columns import U16, U32
    from kvstore.rows import RowView

_TICKS = 16
"""Ticks a second: ages are told apart from half a second on."""
_LEARN_EVERY, _LEARN_SELDOM, _EARLY = 200, 500, 2000
_WORTH_A_TRY = 0.08
"""Share of the blocks known that came back too late, from which on the table decides."""


class _Known(Arrays):
    """By row: when it was used last, and its mark, 0 for a row that is not known."""

    seen: U32
    marks: U16

    def __init__(self) -> None:
        super().__init__({"seen": (np.uint32, ()), "marks": (np.uint16, ())}, 1024)

    def reach(self, rows: int) -> None:
        if rows > len(self.seen):  # the shorter one: both fill whole pages
            self._grow(max(rows, len(self.seen) * 5 // 4))


class Adaptive:
    """Offers the rows that are worth least."""

    def __init__(self) -> None:
        self._known = _Known()
        self._ghosts = Ghosts()
        self._reuse = reuse.Reuse()
        self._lru = Lru()
        self._start: float | None = None
        self._requests = 0
        self._found = self._late = 0.0

    @property
    def state_bytes(self) -> int:
        known = self._known
        return known.seen.nbytes + known.marks.nbytes + self._ghosts.bytes + self._lru.state_bytes

    @property
    def ghosts(self) -> int:
        return len(self._ghosts)

    # -- hearing ----------------------------------------------------------------------------------

    def used(self, rows: RowView, line: U32, now: float, *, again: bool = False) -> None:
        self._known.reach(rows.row_limit)
        known, tick = self._known, self._tick(now)
        marks, seen = known.marks[line], known.seen[line]
        new = np.flatnonzero(marks == 0)
        if len(new):
            back, seen[new], marks[new] = self._ghosts.take(rows.digest(line[new]))
            self._note_late(int(np.count_nonzero(back)), len(line) - len(new))
        else:
            self._note_late(0, len(line))
        chosen = new if again else np.arange(len(line))
        met = chosen[marks[chosen] != 0]
        self._reuse.returned += reuse.tally(_cells(marks[met], seen[met], tick))
        turn = _turn(marks, again=again)
        ends = np.zeros(len(line), np.bool_)
        ends[-1] = True
        counts = reuse.counts_of(marks[chosen]) + 1
        known.marks[line[chosen]] = reuse.mark(counts, turn, ends[chosen])
        known.seen[line[chosen]] = tick
        self._requests += 1
        if self._requests % (_LEARN_EVERY if self._requests <= _EARLY else _LEARN_SELDOM) == 0:
            self._learn(rows, tick)

    def gone(self, rows: RowView, gone: U32, now: float) -> None:
        known = self._known
        known.reach(rows.row_limit)
        gone = gone[known.marks[gone] != 0]
        if not len(gone):
            return
        if self._ghosts.is_full(len(gone)):
            here = int(np.count_nonzero(rows.flags & np.uint8(DISK)))
            self._forget(*self._ghosts.turn_over(max(here, len(gone))), now)
        lost = self._ghosts.file(rows.digest(gone), known.seen[gone], known.marks[gone])
        self._forget(*lost, now)
        known.marks[gone] = 0

    def _forget(self, seen: U32, marks: U16, now: float) -> None:
        if len(marks):
            self._reuse.forgotten += reuse.tally(_cells(marks, seen, self._tick(now)))

    def _note_late(self, late: int, found: int) -> None:
        self._late += late
        self._found += found
        if self._late + self._found > 2 * self._window():
            self._late, self._found = self._late / 2, self._found / 2

    def _window(self) -> int:
        return 8192

    def _tick(self, now: float) -> int:
        if self._start is None:
            self._start = now
        return max(int((now - self._start) * _TICKS), 0)

    # -- learning ---------------------------------------------------------------------------------

    def _learn(self, rows: RowView, tick: int) -> None:
        known = self._known
        here = np.flatnonzero(known.marks)
        waiting = reuse.tally(_cells(known.marks[here], known.seen[here], tick))
        seen, marks = self._ghosts.all()
        waiting += reuse.tally(_cells(marks, seen, tick))
        self._reuse.learn(waiting)

    # -- choosing ---------------------------------------------------------------------------------

    def candidates(self, rows: RowView, count: int, now: float, among: U32 | None = None) -> U32:
        if self._late < _WORTH_A_TRY * (self._late + self._found):
            return self._lru.candidates(rows, count, now, among)
        known, tick = self._known, self._tick(now)
        known.reach(rows.row_limit)
        here = rows.flags & np.uint8(DISK | WRITING | GHOST | HIDDEN) == DISK
        there = np.flatnonzero(here).astype(np.uint32) if among is None else among[here[among]]
        worth = self._reuse.worth_of(_cells(known.marks[there], known.seen[there], tick))
        if count < len(there):
            least = np.partition(worth, count)[count]
            there, worth = there[worth <= least], worth[worth <= least]
        return there[np.lexsort((rows.last_use[there], worth))]


def _cells(marks: U16, seen: U32, tick: int) -> reuse.Ints:
    """Return the cells of blocks in the tables of :mod:`kvstore.eviction.reuse`."""
    return reuse.cells_of(marks, (tick - seen.astype(np.int64)) / _TICKS)


def _turn(marks: U16, *, again: bool) -> int:
    """Return the turn that a request is: one more than that of the deepest block that was known, if
    that is the end of a good part of it."""
    new = np.flatnonzero(marks == 0)
    known = int(new[0]) if len(new) else len(marks)
    if known < 2 or known * 4 < len(marks):
        return 1
    turn = reuse.turn_of(int(marks[known - 1]))
    return min(turn if again else turn + 1, reuse.MOST_TURN)

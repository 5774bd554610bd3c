"""What is least likely to come back soon leaves first, as learned from what came back so far.

Each use gives a block a mark (how often, in which turn, at the end or not) and a time; those that
left are remembered for a while (:mod:`kvstore.eviction.ghosts`). From what comes back, and when, a
table says what a block of some class and age is worth (:mod:`kvstore.eviction.reuse`). Hardly
anything can be gained where hardly anything comes back too late: there, and until something was
learned, the order of use decides, so ample room costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.columns import DISK, GHOST, HIDDEN, NONE, WRITING, Arrays
from kvstore.eviction import reuse
from kvstore.eviction.ghosts import Ghosts
from kvstore.eviction.lru import Lru

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.columns import U16, U32
    from kvstore.rows import RowView

_TICKS = 16
"""Ticks a second: ages are told apart from half a second on."""
_LEARN_EVERY, _LEARN_SELDOM, _EARLY = 200, 500, 2000
"""Requests between two lessons, at first and after so many."""
_WORTH_A_TRY = 0.08
"""Share of the known blocks asked for that came back too late, from which on the table decides."""
_WINDOW = 16_384
"""Blocks over which that share is taken, about."""
_EXACT = 32_768
"""Up to so many rows all of them are looked at, else a sample: the owner thread has no time."""
_SAMPLE, _EACH = 8192, 8
"""Rows of a sample, and for each victim of a large batch."""


class _Known(Arrays):
    """By row: when it was used last, and its mark, 0 for a row that is not known."""

    seen: U32
    marks: U16

    def __init__(self) -> None:
        super().__init__({"seen": (np.uint32, ()), "marks": (np.uint16, ())}, 1024)


class Adaptive:
    """Offers the rows that are worth least."""

    name = "adaptive"

    def __init__(self) -> None:
        self._known = _Known()
        self._ghosts = Ghosts()
        self._reuse = reuse.Reuse()
        self._lru = Lru()
        self._start: float | None = None
        self._tick = 0
        self._requests = 0
        self._samples = 0
        self._found = self._late = 0.0

    @property
    def state_bytes(self) -> int:
        known = self._known
        return known.seen.nbytes + known.marks.nbytes + self._ghosts.bytes + self._lru.state_bytes

    @property
    def ghosts(self) -> int:
        return len(self._ghosts)

    # -- hearing ----------------------------------------------------------------------------------

    def used(self, rows: RowView, line: U32, now: float, *, heard: int = 0) -> None:
        known, tick = self._known, self._set_clock(now)
        known.reach(rows.row_limit)
        marks, seen = known.marks[line], known.seen[line]
        new = np.flatnonzero(marks == 0)
        back, seen[new], marks[new] = self._ghosts.take(rows.digest(line[new]))
        asked = marks != 0
        asked[:heard] = False
        asked[new] = back
        self._note_late(int(np.count_nonzero(back)), int(np.count_nonzero(asked)))
        self._reuse.returned += reuse.tally(_cells(marks[asked], seen[asked], tick))
        turn = _turn(marks, heard)
        asked[new] = True
        ends = np.zeros(len(line), np.bool_)
        ends[-1:] = True
        counts = reuse.counts_of(marks[asked]) + 1
        known.marks[line[asked]] = reuse.mark(counts, turn, ends[asked])
        known.seen[line[asked]] = tick
        self._requests += 1
        if self._requests % (_LEARN_EVERY if self._requests <= _EARLY else _LEARN_SELDOM) == 0:
            self._learn(rows.row_limit)

    def gone(self, rows: RowView, gone: U32) -> None:
        known = self._known
        known.reach(rows.row_limit)
        gone = gone[known.marks[gone] != 0]
        if not len(gone):
            return
        if self._ghosts.is_full(len(gone)):
            here = int(np.count_nonzero(rows.flags & np.uint8(DISK)))
            for lost in self._ghosts.turn_over(max(here, len(gone))):
                self._forget(*lost)
        self._forget(*self._ghosts.file(rows.digest(gone), known.seen[gone], known.marks[gone]))
        known.marks[gone] = 0

    def _forget(self, seen: U32, marks: U16, weight: float = 1.0) -> None:
        """Blocks that are forgotten count as never coming back: without them all that is known
        would be what came back soon."""
        if len(marks):
            self._reuse.forgotten += weight * reuse.tally(_cells(marks, seen, self._tick))

    def _note_late(self, late: int, asked: int) -> None:
        self._late += late
        self._found += asked - late
        if self._late + self._found > 2 * _WINDOW:
            self._late, self._found = self._late / 2, self._found / 2

    def _set_clock(self, now: float) -> int:
        """Count ticks from the first time that was heard of; never back."""
        if self._start is None:
            self._start = now
        self._tick = max(int((now - self._start) * _TICKS), self._tick)
        return self._tick

    def _learn(self, limit: int) -> None:
        """Make the table anew from what is known of row ids below ``limit``, and of ghosts."""
        known, some = self._known, self._spread(limit, _SAMPLE)
        some = some[known.marks[some] != 0]
        weight = max(limit / _SAMPLE, 1.0) if limit > _EXACT else 1.0
        waiting = weight * reuse.tally(_cells(known.marks[some], known.seen[some], self._tick))
        for seen, marks, weight in self._ghosts.some():
            waiting += weight * reuse.tally(_cells(marks, seen, self._tick))
        self._reuse.learn(waiting)

    def _spread(self, limit: int, count: int) -> U32:
        """Return about ``count`` row ids below ``limit``, evenly spread and others each time, or
        all if these are few."""
        if limit <= max(_EXACT, 2 * count):
            return np.arange(limit, dtype=np.uint32)
        self._samples += 1
        start = self._samples * 0.6180339887498949 % 1.0
        places: U32 = ((np.arange(count) + start) * (limit / count)).astype(np.uint32)
        return places

    # -- choosing ---------------------------------------------------------------------------------

    def candidates(self, rows: RowView, count: int, now: float) -> U32:
        self._set_clock(now)
        self._known.reach(rows.row_limit)
        if self._late < _WORTH_A_TRY * (self._late + self._found):
            return self._lru.candidates(rows, count, now)
        looked = max(_SAMPLE, _EACH * count)
        while True:
            some = self._spread(rows.row_limit, looked)
            if len(some) == rows.row_limit:
                return self._least(rows, some, count)
            found = self._least(rows, self._with_chains(rows, some, count), count)
            if len(found) >= count:
                return found
            looked *= 4

    def _least(self, rows: RowView, among: U32, count: int) -> U32:
        """Return those that the engine has, worth least first, equal ones in the order of use;
        at least ``count`` if there are so many."""
        there = _there(rows, among)
        worth = self._reuse.worth_of(
            _cells(self._known.marks[there], self._known.seen[there], self._tick)
        )
        if count < len(there):
            low = worth <= np.partition(worth, count)[count]
            there, worth = there[low], worth[low]
        found: U32 = there[np.lexsort((rows.last_use[there], worth))]
        return found

    def _with_chains(self, rows: RowView, some: U32, count: int) -> U32:
        """Return the leaves among some rows that are worth least, with the chain above each as far
        as it would become a leaf in turn."""
        leaves = _there(rows, some)
        leaves = leaves[rows.children[leaves] == 0]
        leaves = self._least(rows, leaves, len(leaves))[: max(len(leaves) // 8, count // 4)]
        parts, at, total = [leaves], leaves, len(leaves)
        while len(at) and total < 2 * count:
            at = rows.parents[at]
            at = _there(rows, at[at != NONE])
            at = at[rows.children[at] == 1]
            parts.append(at)
            total += len(at)
        return np.concatenate(parts)

    # -- restarts ---------------------------------------------------------------------------------

    def capture(self, rows: RowView) -> dict[str, Any]:
        known, limit, learned = self._known, rows.row_limit, self._reuse
        known.reach(limit)
        return {
            "generations": rows.generations[:limit],
            "seen": known.seen[:limit],
            "marks": known.marks[:limit],
            "returned": learned.returned,
            "forgotten": learned.forgotten,
            "worth": learned.worth,
            "clock": np.array([self._start or 0.0, self._tick]),
            "figures": np.array([self._requests, self._samples, self._found, self._late]),
            **self._ghosts.capture(),
        }

    def restore(self, rows: RowView, state: Mapping[str, Any]) -> None:
        self._known.reach(rows.row_limit)
        generations, marks = state["generations"], state["marks"]
        same = np.flatnonzero(generations[: rows.row_limit] == rows.generations[: len(generations)])
        self._known.seen[same] = state["seen"][same]
        self._known.marks[same] = marks[same] & reuse.MARK_BITS
        self._reuse.restore(state["returned"], state["forgotten"], state["worth"])
        start, tick = state["clock"].tolist()
        requests, samples, self._found, self._late = state["figures"].tolist()
        self._start, self._tick = float(start), int(tick)
        self._requests, self._samples = int(requests), int(samples)
        self._ghosts.restore(state)


def _there(rows: RowView, among: U32) -> U32:
    flags = rows.flags[among] & np.uint8(DISK | WRITING | GHOST | HIDDEN)
    there: U32 = among[flags == DISK]
    return there


def _cells(marks: U16, seen: U32, tick: int) -> reuse.Ints:
    """Return the cells of blocks in the tables of :mod:`kvstore.eviction.reuse`."""
    return reuse.cells_of(marks, (tick - seen.astype(np.int64)) / _TICKS)


def _turn(marks: U16, heard: int) -> int:
    """Return the turn that a request is: one more than that of the deepest block that was known, if
    that is the end of a good part of it. What follows a part that was ``heard`` is the same turn.
    """
    new = np.flatnonzero(marks == 0)
    known = int(new[0]) if len(new) else len(marks)
    if known < 2 or known * 4 < len(marks):
        return 1
    turn = reuse.turn_of(int(marks[known - 1]))
    return min(turn if heard else turn + 1, reuse.MOST_TURN)

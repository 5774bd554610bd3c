"""Who follows whom: parent links of rows, their depth, and what may leave without breaking a chain.

A row names its parent; parents count their children. Two rules keep the links a forest: a row gets
a parent only once, and a link that would close a cycle is dropped. A row without children cannot be
anybody's ancestor, so only a row that already has children (mostly a ghost that turned real) needs
a walk up from its new parent.

``depths`` is exact while parents are linked before children, as clients do. When a row that has
children gets a parent, its descendants keep their old depth; ``_slack`` says by how much any depth
may be too small since, and depths are counted anew when a link might pass the limit because of that
(about 0.2 s for a million rows, at most once a call).

Questions about many rows at once are answered by pointer doubling: after k rounds each row has
looked 2^k links up, so a chain of 4,096 takes twelve rounds of numpy calls, not 4,096 steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.columns import GHOST, HIDDEN, NONE, U32, Bools, Columns

Positions = npt.NDArray[np.int64]

MAX_DEPTH = 65_535
_MAX_STEPS = 1 << 20
"""Links walked in one call, about 50 ms; who wants more gets no link."""


@dataclass(frozen=True, slots=True)
class Climbed:
    """Where the way up ends: position of the last ancestor, number of links to it, and the
    positions from which it never ends."""

    top: Positions
    above: Positions
    circular: Positions


class Chains:
    """The parent links among the rows of ``columns``."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._slack = 0
        # No depth is over this plus the slack; after rows have left it may be too high.
        self._deepest = 0
        self._left = False
        self._steps = 0
        self._counted = False

    # -- linking ----------------------------------------------------------------------------------

    def link(self, rows: U32, parents: U32) -> int:
        """Give each row its parent; return how many links were dropped.

        Dropped are: a second, different parent, a row as its own parent, a parent in another space,
        a cycle, and a depth over 65,535. Rows without children come first, then the others, each in
        the order given; ``parents`` may hold NONE. In a store with chains of more than 32,767 a
        chain that arrives end first may lose a link although it would fit.
        """
        self._steps, self._counted = 0, False
        asked = (rows != NONE) & (parents != NONE)
        rows, parents = rows[asked], parents[asked]
        allowed = self._may_follow(rows, parents)
        rows, parents = rows[allowed], parents[allowed]
        known = self._columns.parents[rows]
        new, other = known == NONE, (known != NONE) & (known != parents)
        dropped = int(np.count_nonzero(~allowed) + np.count_nonzero(other))
        return dropped + self._link_new(rows[new], parents[new])

    def _may_follow(self, rows: U32, parents: U32) -> Bools:
        columns, flags = self._columns, self._columns.flags
        allowed: Bools = (flags[rows] != 0) & (flags[parents] != 0)
        allowed &= ((flags[rows] | flags[parents]) & HIDDEN) == 0
        allowed &= rows != parents
        allowed &= columns.space(rows) == columns.space(parents)
        return allowed

    def _link_new(self, rows: U32, parents: U32) -> int:
        bare = self._columns.children[rows] == 0
        dropped = 0
        if not self._link_bare(rows[bare], parents[bare]):
            dropped = self._link_each(rows[bare], parents[bare])
        return dropped + self._link_each(rows[~bare], parents[~bare])

    def _link_bare(self, rows: U32, parents: U32) -> bool:
        """Link rows without children at once; do nothing and return False if a link among them must
        be dropped. A cycle can only consist of them."""
        if not len(rows):
            return True
        columns = self._columns
        climbed = climb(positions_of(parents, rows))
        if len(climbed.circular) or len(np.unique(rows)) != len(rows):
            return False
        depths = columns.depths[parents].astype(np.int64)[climbed.top] + 1 + climbed.above
        deepest = int(depths.max())
        if deepest + self._slack > MAX_DEPTH:
            return False
        columns.parents[rows] = parents
        columns.depths[rows] = depths
        self._count_children(parents, 1)
        self._deepest = max(self._deepest, deepest)
        return True

    def _count_children(self, parents: U32, change: int) -> None:
        unique, times = np.unique(parents, return_counts=True)
        counts = self._columns.children[unique].astype(np.int64) + change * times
        self._columns.children[unique] = counts

    def _link_each(self, rows: U32, parents: U32) -> int:
        pairs = zip(rows.tolist(), parents.tolist(), strict=True)
        return sum(not self._link_one(row, parent) for row, parent in pairs)

    def _link_one(self, row: int, parent: int) -> bool:
        columns = self._columns
        if columns.parents[row] != NONE:
            return bool(columns.parents[row] == parent)
        late = bool(columns.children[row])
        depth = self._walk(parent, row) if late else self._depth_under(parent)
        if depth is None or not self._within_limit(depth, late):
            return False
        columns.parents[row] = parent
        columns.children[parent] += 1
        columns.depths[row] = depth
        self._deepest = max(self._deepest, depth)
        self._slack += depth if late else 0
        return True

    def _walk(self, parent: int, row: int) -> int | None:
        """Return the exact depth of a child of ``parent``, None if ``row`` is above ``parent``."""
        parents, at, depth = _scalars(self._columns.parents), parent, 0
        while at not in (NONE, row) and self._steps < _MAX_STEPS:
            at, depth = parents[at], depth + 1
            self._steps += 1
        return depth if at == NONE else None

    def _depth_under(self, parent: int) -> int:
        depth = int(self._columns.depths[parent]) + 1
        if depth + self._slack > MAX_DEPTH and self._count_once():
            depth = int(self._columns.depths[parent]) + 1
        return depth

    def _within_limit(self, depth: int, late: bool) -> bool:
        """Tell whether a row at ``depth``, and what hangs on it, stay within the limit."""

        def within() -> bool:
            return depth + self._slack + (self._deepest if late else 0) <= MAX_DEPTH

        return within() or (self._count_once() and within())

    def _count_once(self) -> bool:
        """Count depths anew if that can help and has not been done in this call."""
        if self._counted or not (self._slack or self._left):
            return False
        self.count_depths()
        self._counted = True
        return True

    def count_depths(self) -> Climbed:
        """Count the depths of all rows anew."""
        columns = self._columns
        climbed = climb(_links(columns.parents[: columns.used]))
        columns.depths[: columns.used] = np.minimum(climbed.above, MAX_DEPTH)
        self._deepest = int(climbed.above.max(initial=0))
        self._slack, self._left = 0, False
        return climbed

    def adopt(self, rows: U32) -> int:
        """Make a forest of the parents that came from disk for all ``rows``; return links dropped.

        Dropped are links to rows that are not there or in another space, all links from which the
        way up never ends, and each that lies at a multiple of 65,536 links.
        """
        columns = self._columns
        linked = rows[columns.parents[rows] != NONE]
        there = columns.parents[linked] < columns.used
        there[there] &= self._may_follow(linked[there], columns.parents[linked[there]])
        columns.parents[linked[~there]] = NONE
        dropped = int(np.count_nonzero(~there))
        climbed = self.count_depths()
        long = np.flatnonzero((climbed.above > 0) & (climbed.above % (MAX_DEPTH + 1) == 0))
        broken = np.union1d(climbed.circular, long)
        if len(broken):
            columns.parents[broken] = NONE
            self.count_depths()
        kept = columns.parents[rows]
        children = np.bincount(kept[kept != NONE], minlength=columns.used)
        columns.children[: columns.used] = children
        return dropped + len(broken)

    # -- leaving ----------------------------------------------------------------------------------

    def may_leave(self, rows: U32) -> Bools:
        """Tell which of these distinct rows leave no child behind if all that may leave do."""
        up = positions_of(self._columns.parents[rows], rows)
        stuck = _children_inside(up) < self._columns.children[rows]
        may: Bools = spread_up(up, stuck.astype(np.int64)) == 0
        return may

    def unlink(self, rows: U32) -> U32:
        """Take rows out of their chains; return the ghosts that lost their last child by it."""
        columns = self._columns
        parents = columns.parents[rows]
        parents = parents[parents != NONE]
        columns.parents[rows] = NONE
        self._left = True
        self._count_children(parents, -1)
        return self.take_bare_ghosts(parents)

    def take_bare_ghosts(self, rows: U32) -> U32:
        """Unlink those of ``rows`` that are ghosts without children and references, then their
        ancestors that become so; return them all. The caller frees them."""
        columns, taken = self._columns, []
        ghosts: U32 = rows[columns.flags[rows] == GHOST]
        if not len(ghosts):
            return ghosts
        for start in np.unique(ghosts).tolist():
            row = start
            while row != NONE and self._is_bare_ghost(row):
                taken.append(row)
                parent = int(columns.parents[row])
                columns.parents[row] = NONE
                # Its flags still say ghost: marked hidden, it is not taken a second time.
                columns.flags[row] |= HIDDEN
                if parent != NONE:
                    columns.children[parent] -= 1
                row = parent
        return np.array(taken, np.uint32)

    def _is_bare_ghost(self, row: int) -> bool:
        columns = self._columns
        return bool(
            columns.flags[row] == GHOST
            and not columns.children[row]
            and not columns.references[row]
        )

    # -- looking ----------------------------------------------------------------------------------

    def ancestors(self, row: int, limit: int) -> U32:
        """Return up to ``limit`` ancestors of ``row``, parent first."""
        parents = _scalars(self._columns.parents)
        found: list[int] = []
        at = parents[row]
        while at != NONE and len(found) < limit:
            found.append(at)
            at = parents[at]
        return np.array(found, np.uint32)

    def descendants(self, row: int) -> U32:
        """Return all rows below ``row``, deepest first. Looks at every row, 0.2 s a million."""
        columns = self._columns
        up = _links(columns.parents[: columns.used])
        inside = np.zeros(columns.used, np.int64)
        inside[row] = 1
        found = np.flatnonzero(spread_down(up, inside))
        below: U32 = found[found != row].astype(np.uint32)
        above = climb(positions_of(columns.parents[below], below)).above
        order = np.argsort(-above, kind="stable")
        return below.take(order)


def smallest_closed(
    up: Positions, stuck: Bools, weights: npt.NDArray[np.int64], need: int
) -> Positions:
    """Return the victims among candidates, which are listed lowest score first.

    ``up`` is the position of each one's parent or -1, ``stuck`` tells which must stay or have a
    child that is no candidate, ``weights`` are the bytes each would free. A candidate may go when
    all its children go. Its *effective* position is the highest among itself and its descendants;
    victims are taken in that order, child before parent, until they weigh ``need``: the smallest
    such set, or all that may go if that is not enough.
    """
    count = len(up)
    effective = spread_up(up, np.where(stuck, count, np.arange(count)))
    depth = climb(up).above
    order = np.lexsort((-depth, effective))
    order = order[: np.count_nonzero(effective < count)]
    reached = np.cumsum(weights[order])
    return order[: np.searchsorted(reached, need) + 1]


def positions_of(wanted: U32, among: U32) -> Positions:
    """Return where in ``among`` (distinct) each wanted row stands, -1 if nowhere."""
    found = np.full(len(wanted), -1, np.int64)
    asked = np.flatnonzero(wanted != NONE)
    if not len(asked) or not len(among):
        return found
    order = np.argsort(among)
    at = np.searchsorted(among, wanted[asked], sorter=order)
    place = order[np.minimum(at, len(among) - 1)]
    same = among[place] == wanted[asked]
    found[asked[same]] = place[same]
    return found


def renamed(rows: U32, old: U32, new: U32) -> U32:
    """Return ``rows`` with each of ``old`` replaced by the one of ``new`` beside it."""
    at = positions_of(rows, old)
    found: U32 = np.where(at >= 0, new[at], rows) if len(old) else rows
    return found


def climb(up: Positions) -> Climbed:
    """Follow all links to their end. ``up`` holds positions, -1 where the way ends."""
    jump, above = up.copy(), (up >= 0).astype(np.int64)
    top = np.where(up >= 0, up, np.arange(len(up)))
    on = np.flatnonzero(jump >= 0)
    for _ in range(len(up).bit_length() + 1):
        if not len(on):
            break
        over = jump[on]
        above[on] += above[over]
        top[on] = top[over]
        jump[on] = jump[over]
        on = on[jump[on] >= 0]
    return Climbed(top, above, on)


def spread_up(up: Positions, values: Positions) -> Positions:
    """Return for each position the highest value among it and everything below it."""
    jump, highest = up.copy(), values.copy()
    on = np.flatnonzero(jump >= 0)
    while len(on):
        over = jump[on]
        np.maximum.at(highest, over, highest[on])
        jump[on] = jump[over]
        on = on[jump[on] >= 0]
    return highest


def spread_down(up: Positions, values: Positions) -> Positions:
    """Return for each position the highest value among it and everything above it."""
    jump, highest = up.copy(), values.copy()
    on = np.flatnonzero(jump >= 0)
    while len(on):
        over = jump[on]
        highest[on] = np.maximum(highest[on], highest[over])
        jump[on] = jump[over]
        on = on[jump[on] >= 0]
    return highest


def _children_inside(up: Positions) -> Positions:
    return np.bincount(up[up >= 0], minlength=len(up))


def stuck_among(up: Positions, children: U32, allowed: Bools) -> Bools:
    """Tell which candidates must stay: not allowed to go, or with a child that is no candidate."""
    stuck: Bools = ~allowed | (_children_inside(up) < children)
    return stuck


def _scalars(parents: U32) -> memoryview[int]:
    """Return a view that reads one number at a time three times faster than numpy does."""
    return memoryview(parents)  # type: ignore[arg-type]


def _links(parents: U32) -> Positions:
    up = parents.astype(np.int64)
    up[parents == NONE] = -1
    return up

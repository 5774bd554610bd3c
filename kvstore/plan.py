"""Questions about all rows at once: what an eviction would take, what was used last, families.

They take up to a second for a million rows, so nobody answers them on the owner's thread. It copies
what they need, a few rows at a time (:func:`snapshot`), a worker answers, and what is then done is
done batch by batch, each looked at again (:func:`still`): a block that was used, pinned or followed
by another one since stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore.chains import Positions, positions_of, smallest_closed, spread_down, stuck_among
from kvstore.columns import DISK, GHOST, HIDDEN, U32, U64, Bools

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.holds import Bytes
    from kvstore.index import Index

SLICE_ROWS = 16_384
"""Rows copied at a time: a few milliseconds of the owner's thread."""
BATCH_BLOCKS = 1024
BATCH_BYTES = 256 << 20


class Snapshot(NamedTuple):
    """Rows as they were when they were copied, as columns of equal length, by ascending row id."""

    rows: U32
    parents: U32
    children: U32
    spaces: U32
    sizes: U32
    stamps: U64
    generations: U64
    ghost: Bools
    there: Bools
    """The engine has the block."""
    free: Bools
    """Nothing holds it."""
    taken: Bytes
    """What its record takes, if it has one."""
    pinned: Bools

    def up(self) -> Positions:
        """Return the position of each row's parent, -1 where there is none."""
        where = np.full(int(self.rows.max(initial=0)) + 1, -1, np.int64)
        where[self.rows] = np.arange(len(self.rows))
        up = np.full(len(self.rows), -1, np.int64)
        linked = self.parents < len(where)  # NONE is not; nor is what came since
        up[linked] = where[self.parents[linked]]
        return up

    def weights(self) -> Bytes:
        """Return the bytes that each record takes, 0 where there is none."""
        return np.where(self.there, self.taken, 0)


def snapshot(index: Index, now: float, start: int = 0, stop: int | None = None) -> Snapshot:
    """Copy what the questions of this module need of rows with ids in [start, stop), or of all;
    ``now`` in seconds."""
    rows = index.rows_between(start, index.row_limit if stop is None else stop)
    rows = rows[(index.flags[rows] & HIDDEN) == 0]
    flags = index.flags[rows]
    return Snapshot(
        rows=rows,
        parents=index.parents[rows],
        children=index.children[rows],
        spaces=index.spaces[rows],
        sizes=index.sizes[rows],
        stamps=index.last_use[rows],
        generations=index.generations[rows],
        ghost=(flags & GHOST) != 0,
        there=(flags & DISK) != 0,
        free=index.evictable(rows, now),
        taken=index.record_bytes(index.sizes[rows]),
        pinned=np.isin(rows, np.array([r for r, t in index.pins.items() if t > now], np.uint32)),
    )


def joined(parts: list[Snapshot]) -> Snapshot:
    """Return snapshots of rows that follow each other as one."""
    return Snapshot(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to leave; every condition that is given must hold.

    ``bytes``: those unused longest, until their records took so many. ``before``: last used before
    this stamp. ``namespace``: its number. ``rows``: only these. ``below``: this row and all that
    descend from it.
    """

    bytes: int | None = None
    before: int | None = None
    namespace: int | None = None
    rows: U32 | None = None
    below: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows that may leave, children before their parents, and why others that were asked for stay.

    Ghosts among them leave by themselves. ``pinned``, ``used`` (leased, read or being written) and
    ``needed`` (others that stay descend from them) count blocks that stay.
    """

    rows: U32
    generations: U64
    ghost: Bools
    weights: Bytes
    pinned: int = 0
    used: int = 0
    needed: int = 0

    def parts(self) -> Iterator[Plan]:
        """Yield it in batches of at most 1,024 blocks and about 256 MiB."""
        ends, start = np.cumsum(self.weights), 0
        while start < len(self.rows):
            base = int(ends[start - 1]) if start else 0
            stop = int(np.searchsorted(ends, base + BATCH_BYTES, "right"))
            stop = min(max(stop, start + 1), start + BATCH_BLOCKS)
            part = slice(start, stop)
            yield Plan(
                self.rows[part], self.generations[part], self.ghost[part], self.weights[part]
            )
            start = stop


def choose(found: Snapshot, wanted: Wanted) -> Plan:
    """Return what may leave of what is wanted: nothing that is held, no block without its children.

    With ``bytes`` it is the smallest such set, in the order of use, that is large enough.
    """
    asked = found.there & _matching(found, wanted)
    weights = found.weights()
    need = int(weights.sum()) + 1 if wanted.bytes is None else wanted.bytes
    picked = _closed(found, asked, weights, need)
    stays = asked.copy()
    stays[picked] = False
    if wanted.bytes is not None and int(weights[picked].sum()) >= need:
        stays[:] = False  # enough: what else was asked for was not wanted any more
    pinned, used = stays & found.pinned, stays & ~found.free & ~found.pinned
    return Plan(
        found.rows[picked],
        found.generations[picked],
        found.ghost[picked],
        weights[picked],
        pinned=int(pinned.sum()),
        used=int(used.sum()),
        needed=int((stays & ~pinned & ~used).sum()),
    )


def _matching(found: Snapshot, wanted: Wanted) -> Bools:
    matching = np.ones(len(found.rows), np.bool_)
    if wanted.before is not None:
        matching &= found.stamps < wanted.before
    if wanted.namespace is not None:
        matching &= found.spaces >> 16 == wanted.namespace
    if wanted.rows is not None:
        matching &= np.isin(found.rows, wanted.rows)
    if wanted.below is not None:
        inside = (found.rows == wanted.below).astype(np.int64)
        matching &= spread_down(found.up(), inside) > 0
    return matching


def _closed(found: Snapshot, asked: Bools, weights: Bytes, need: int) -> Positions:
    """Return positions of what may leave, in order. Ghosts are in no one's way: they are taken as
    unused for ever, and leave with their last child."""
    candidates = np.flatnonzero(asked | found.ghost)
    if need <= 0 or not len(candidates):
        return candidates[:0]
    stamps = np.where(found.ghost, 0, found.stamps)[candidates]
    candidates = candidates[np.argsort(stamps, kind="stable")]
    rows = found.rows[candidates]
    up = positions_of(found.parents[candidates], rows)
    allowed = (found.free | found.ghost)[candidates]
    stuck = stuck_among(up, found.children[candidates], allowed)
    picked: Positions = candidates[smallest_closed(up, stuck, weights[candidates], need)]
    return picked


def still(index: Index, part: Plan, now: float) -> U32:
    """Return the rows of a batch that may leave now, when the batches before it have left."""
    flags = index.flags[part.rows]
    held = index.holds(part.rows, part.generations) | (part.ghost & (flags == GHOST))
    rows = part.rows[held]
    up = positions_of(index.parents[rows], rows)
    ghost = index.flags[rows] == GHOST
    stuck = stuck_among(up, index.children[rows], index.evictable(rows, now) | ghost)
    picked = smallest_closed(up, stuck, np.ones(len(rows), np.int64), len(rows) + 1)
    leaving: U32 = rows[picked][~ghost[picked]]
    return leaving


def recent(found: Snapshot, byte_count: int, namespace: int | None) -> tuple[U32, U64]:
    """Return rows and generations of the blocks that were used last, as far as their records take
    ``byte_count``; the one used longest ago comes first."""
    asked = np.flatnonzero(found.there & _matching(found, Wanted(namespace=namespace)))
    asked = asked[np.argsort(found.stamps[asked])[::-1]]
    fitting = int(np.searchsorted(np.cumsum(found.weights()[asked]), byte_count, "right"))
    chosen = asked[:fitting][::-1]
    return found.rows[chosen], found.generations[chosen]


def family(up: Positions, start: int, limit: int) -> tuple[list[tuple[int, int]], bool]:
    """Return positions and depths of a row's ancestors, itself, and all below it, in the order of
    a table of contents; at most ``limit``, and whether there are more.

    ``up`` holds the position of each one's parent, or -1.
    """
    line = [start]
    while up[line[-1]] >= 0:
        line.append(int(up[line[-1]]))
    line.reverse()
    told = [(position, depth) for depth, position in enumerate(line)]
    below = np.flatnonzero(spread_down(up, (np.arange(len(up)) == start).astype(np.int64)))
    below = below[below != start]
    below = below[np.argsort(up[below], kind="stable")]
    above = up[below]
    stack = [(start, len(line) - 1)]
    while stack and len(told) <= limit:
        position, depth = stack.pop()
        if position != start:
            told.append((position, depth))
        first, last = np.searchsorted(above, [position, position + 1])
        stack += [(child, depth + 1) for child in below[first:last][::-1].tolist()]
    return told[:limit], len(told) > limit or bool(stack)

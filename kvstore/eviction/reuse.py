"""How soon blocks come back, learned from those that did: a table of what a block is worth.

Blocks are told apart by their *class*: how often they were used, in which turn of a conversation
they came last, and whether they were the end of it. Per class and age, :class:`Reuse` counts how
many came back at that age, and how many are that old by now and have not; from both follows the
*hazard*, the share that comes back while it is that old (Kaplan and Meier, Nonparametric estimation
from incomplete observations, JASA 53, 1958). Thin classes lean on all classes together.

Room is best given to the block with the highest Gittins index: the best ratio, over all times that
one might wait, of the chance that it comes back by then to the time it is expected to take room
until then (J. C. Gittins, Bandit processes and dynamic allocation indices, JRSS B 41(2), 1979).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvstore.columns import U16

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BINS = 48
"""Ages are told apart by factors of the root of two, from half a second to two months."""
_WIDTHS: Floats = np.diff(0.5 * np.sqrt(2.0) ** np.arange(BINS), prepend=0.0)
_PRIOR = 20.0
_MOST_HAZARD = 0.98

MOST_COUNT, MOST_TURN = 13, 30
_TURN_SHIFT, _END_BIT = 4, 9
MARK_BITS = np.uint16((1 << _END_BIT + 1) - 1)
CLASSES = 40


def _class_of_each() -> npt.NDArray[np.uint8]:
    marks = np.arange(1 << _END_BIT + 1)
    counts = np.searchsorted([1, 2, 4, 12], marks & 15)
    turns = np.searchsorted([1, 2, 5], marks >> _TURN_SHIFT & 31)
    return ((counts * 4 + turns) * 2 + (marks >> _END_BIT)).astype(np.uint8)


_CLASS_OF = _class_of_each()


def mark(counts: Ints, turn: int, ends: npt.NDArray[np.bool_]) -> U16:
    """Return what is remembered of blocks in 16 bits; never 0, which means "not known"."""
    marks = np.minimum(counts, MOST_COUNT) | turn << _TURN_SHIFT | ends.astype(int) << _END_BIT
    return marks.astype(np.uint16)


def counts_of(marks: U16) -> Ints:
    return marks.astype(np.int64) & 15


def turn_of(mark_of_block: int) -> int:
    return mark_of_block >> _TURN_SHIFT & 31


def cells_of(marks: U16, ages: Floats) -> Ints:
    """Return where each block stands in a table by class and age bin, laid out flat."""
    # The edges are powers of the root of two, and no logarithm of nothing is wanted.
    bins = (2 * np.log2(np.maximum(ages, 0.25)) + 3).astype(np.intp)
    cells: Ints = _CLASS_OF[marks].astype(np.intp) * BINS + np.clip(bins, 0, BINS - 1)
    return cells


class Reuse:
    """Counts by class and age bin, and the worth that follows from them."""

    def __init__(self) -> None:
        self.returned = np.zeros((CLASSES, BINS))
        """Blocks that came back, by the class and age that they had."""
        self.forgotten = np.zeros((CLASSES, BINS))
        """Blocks that nobody remembers any more, by what they were when last seen."""
        self.worth: Floats = np.tile(1.0 / np.arange(1.0, BINS + 1), (CLASSES, 1))
        """By class and age bin; until something was learned, the younger the better."""

    def restore(self, returned: Floats, forgotten: Floats, worth: Floats) -> None:
        """Take what was learned before. Raises ValueError for tables that are none."""
        tables = [np.asarray(one, np.float64) for one in (returned, forgotten, worth)]
        if any(one.shape != (CLASSES, BINS) or not np.all(one >= 0) for one in tables):
            raise ValueError("a table of another shape, or with numbers that cannot be")
        self.returned, self.forgotten, self.worth = tables

    def worth_of(self, cells: Ints) -> Floats:
        worth: Floats = self.worth.reshape(-1)[cells]
        return worth

    def learn(self, waiting: Floats) -> None:
        """Make the table anew; ``waiting`` counts blocks that are remembered and not back yet."""
        self.worth = _gittins(_hazards(self.returned, waiting + self.forgotten))


def tally(cells: Ints) -> Floats:
    """Count blocks by class and age bin."""
    flat = np.bincount(cells, minlength=CLASSES * BINS)
    return flat.reshape(CLASSES, BINS).astype(np.float64)


def _hazards(returned: Floats, stayed_away: Floats) -> Floats:
    at_risk = np.cumsum((returned + stayed_away)[:, ::-1], axis=1)[:, ::-1]
    pooled = (returned.sum(axis=0) + 0.01) / (at_risk.sum(axis=0) + 0.1)
    hazards: Floats = np.minimum((returned + _PRIOR * pooled) / (at_risk + _PRIOR), _MOST_HAZARD)
    return hazards


def _gittins(hazards: Floats) -> Floats:
    """Return the index of each class at each age: all starting ages are followed at once."""
    best = np.zeros_like(hazards)
    waiting = np.ones_like(hazards)
    back, spent = np.zeros_like(hazards), np.zeros_like(hazards)
    for ahead in range(BINS):
        ages = slice(0, BINS - ahead)
        found = waiting[:, ages] * hazards[:, ahead:]
        back[:, ages] += found
        spent[:, ages] += _WIDTHS[ahead:] * (waiting[:, ages] - found / 2)
        waiting[:, ages] -= found
        np.maximum(best[:, ages], back[:, ages] / spent[:, ages], out=best[:, ages])
    return best

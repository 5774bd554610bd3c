"""What can be asked of rows by their ids: the read-only face of the index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from kvstore.columns import GHOST, U8, U16, U32, U64, UNSYNCED, Bools, Columns
from kvstore.keys import MAX_KEY_BYTES, KeyArray

_FACTORS = np.random.default_rng(1).integers(0, 2**64, 1 + MAX_KEY_BYTES // 4 + 1, np.uint64)

Array = TypeVar("Array", bound=npt.NDArray[Any])


@dataclass(frozen=True, slots=True)
class Rows:
    """What is known of n rows, as columns: the form in which checkpoints hold them.

    ``keys`` has 64 columns of which the first ``key_lengths`` count; ``parents`` are row ids or
    NONE; ``stamps`` are last uses. A ghost has size, place and generation 0.
    """

    rows: U32
    spaces: U32
    keys: KeyArray
    key_lengths: U8
    parents: U32
    sizes: U32
    places: U64
    generations: U64
    stamps: U64
    ghost: Bools
    unsynced: Bools

    def __len__(self) -> int:
        return len(self.rows)


class Spaces:
    """Space numbers, computed for the rows that are asked for: ``spaces[rows]``."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    def __getitem__(self, rows: U32) -> U32:
        return self._columns.space(rows)


class KeyLengths:
    """Lengths of keys in bytes, computed for the rows that are asked for: ``key_lengths[rows]``."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    def __getitem__(self, rows: U32) -> U8:
        return self._columns.key_length(rows)


class RowView:
    """Columns as read-only arrays over all row ids, lists of rows, and their keys.

    The arrays are views of what is there now: read them again after an insert, which adds ids and
    may move the memory. Position 0 can always be read, even while no row has been given out.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self.spaces = Spaces(columns)
        self.key_lengths = KeyLengths(columns)

    # -- columns ----------------------------------------------------------------------------------

    def _seen(self, array: Array) -> Array:
        """Return a view of the ids given out (of one at least) through which nothing changes."""
        view = array[: max(self._columns.used, 1)]
        view.flags.writeable = False
        return cast("Array", view)

    @property
    def flags(self) -> U8:
        return self._seen(self._columns.flags)

    @property
    def sizes(self) -> U32:
        """Payload bytes as stored."""
        return self._seen(self._columns.sizes)

    @property
    def places(self) -> U64:
        return self._seen(self._columns.places)

    @property
    def generations(self) -> U64:
        return self._seen(self._columns.generations)

    @property
    def last_use(self) -> U64:
        """Stamps: microseconds, made unique, a later use always higher."""
        return self._seen(self._columns.last_use)

    @property
    def parents(self) -> U32:
        return self._seen(self._columns.parents)

    @property
    def children(self) -> U32:
        """How many rows, ghosts included, have this one as their parent."""
        return self._seen(self._columns.children)

    @property
    def depths(self) -> U16:
        """Links to the first ancestor; see :mod:`kvstore.chains` for when it may be less."""
        return self._seen(self._columns.depths)

    @property
    def references(self) -> U16:
        return self._seen(self._columns.references)

    @property
    def policy(self) -> U8:
        """One byte per row that belongs to the eviction policy; may be written."""
        return self._columns.policy[: self._columns.used]

    @property
    def row_limit(self) -> int:
        """All row ids ever given out are below this."""
        return self._columns.used

    # -- listing ----------------------------------------------------------------------------------

    def rows_of(self, space: int | None) -> U32:
        """Return all rows of a space, or of all, hidden ones included, in ascending order."""
        rows = self.rows_between(0, self.row_limit)
        return rows if space is None else rows[self.spaces[rows] == space]

    def rows_between(self, start: int, stop: int) -> U32:
        """Return the rows with ids in [start, stop), hidden ones included, in ascending order."""
        flags = self._columns.flags[start : min(stop, self.row_limit)]
        return (np.flatnonzero(flags) + start).astype(np.uint32)

    def keys_of(self, rows: U32) -> KeyArray:
        """Return the keys of rows that have keys of one length. Raises ValueError otherwise."""
        lengths = self._columns.key_length(rows)
        if len(rows) and np.any(lengths != lengths[0]):
            raise ValueError("these rows have keys of several lengths")
        return self._columns.key_bytes(rows)[:, : lengths[0] if len(rows) else 1]

    def digest(self, rows: U32) -> U64:
        """Return a hash of each row's identity, the same in every process."""
        words = self._columns.identities.take(rows, axis=0).astype(np.uint64)
        hashes: U64 = words @ _FACTORS[: words.shape[1]]
        hashes ^= hashes >> np.uint64(32)
        hashes *= np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(29)
        return hashes

    def children_of(self, row: int) -> U32:
        """Return the rows whose parent is ``row``. Looks at every row."""
        found = np.flatnonzero(self._columns.parents[: self.row_limit] == row)
        found = found[self._columns.flags[found] != 0]
        children: U32 = found.astype(np.uint32)
        return children

    def describe(self, rows: U32) -> Rows:
        """Return what is known of rows in any state, as columns."""
        columns, flags = self._columns, self._columns.flags[rows]
        keys = np.zeros((len(rows), MAX_KEY_BYTES), np.uint8)
        stored = columns.key_bytes(rows)[:, :MAX_KEY_BYTES]
        keys[:, : stored.shape[1]] = stored
        ghost = (flags & GHOST) != 0
        return Rows(
            rows=rows,
            spaces=columns.space(rows),
            keys=keys,
            key_lengths=columns.key_length(rows),
            parents=columns.parents[rows],
            sizes=np.where(ghost, 0, columns.sizes[rows]).astype(np.uint32),
            places=np.where(ghost, 0, columns.places[rows]).astype(np.uint64),
            generations=np.where(ghost, 0, columns.generations[rows]).astype(np.uint64),
            stamps=columns.last_use[rows],
            ghost=ghost,
            unsynced=(flags & UNSYNCED) != 0,
        )

"""The order in which blocks are copied: by namespace, each behind its parent, in batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.record import image_bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.events import Records

Positions = np.ndarray


def batches(
    rows: Records, wanted: np.ndarray, most_bytes: int, most_blocks: int
) -> Iterator[Positions]:
    """Yield positions of the wanted rows in chain order: batches of one namespace and shard, of at
    most so many bytes (as images) unless one block alone has more."""
    spaces = _spaces(rows)
    order = chain_order(rows)
    order = order[wanted[order]]
    sizes = image_bytes_of(rows["length"][order])
    start, taken = 0, 0
    for at, size in enumerate(sizes.tolist()):
        full = taken + size > most_bytes or at - start == most_blocks
        if at > start and (full or spaces[order[at]] != spaces[order[start]]):
            yield order[start:at]
            start, taken = at, 0
        taken += size
    if start < len(order):
        yield order[start:]


def _spaces(rows: Records) -> np.ndarray:
    """Return a number for each row that those of its namespace, shard and length of key have."""
    ids = np.ascontiguousarray(rows["namespace"]).view("<u8").reshape(-1, 2)
    numbers, left = np.zeros(len(rows), np.int64), np.arange(len(rows))
    for number in range(len(rows)):
        if not len(left):
            break
        # A pass for each namespace: they are few, and sorting the ids takes a minute a million.
        mine = (ids[left] == ids[left[0]]).all(axis=1)
        numbers[left[mine]] = number
        left = left[~mine]
    spaces: np.ndarray = numbers << 24 | rows["shard"].astype(np.int64) << 8 | rows["key_length"]
    return spaces


def chain_order(rows: Records) -> Positions:
    """Return all positions by space, the oldest version first, but each behind its parent.

    Row ids ascend, as ``settle`` returns them.
    """
    ids = rows["row"]
    if not len(ids):
        return np.zeros(0, np.int64)
    above = np.minimum(np.searchsorted(ids, rows["parent"]), len(ids) - 1)
    parents = np.where(ids[above] == rows["parent"], above, -1)
    by_age = np.lexsort((rows["generation"], _spaces(rows)))
    return np.array(parents_first(by_age.tolist(), parents.tolist()), np.int64)


def parents_first(order: list[int], parents: list[int]) -> list[int]:
    """Return ``order`` with each behind its parent (-1 = none); links close no cycle."""
    placed, result = bytearray(len(parents)), list[int]()
    for position in order:
        line = []
        while position >= 0 and not placed[position]:
            placed[position] = 1
            line.append(position)
            position = parents[position]
        result += reversed(line)
    return result

"""Rows of the index, described as an engine and as the journal want them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore import events
from kvstore.backends.base import U32, Blocks
from kvstore.columns import DISK, GHOST, NONE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.index import Index
    from kvstore.namespaces import Namespaces


def groups(index: Index, namespaces: Namespaces, rows: U32) -> list[tuple[U32, Blocks]]:
    """Return the rows as engine batches, one for each (namespace, shard, key length)."""
    label = index.spaces[rows].astype(np.uint64) << np.uint64(8) | index.key_lengths[rows]
    result = []
    for value in np.unique(label).tolist():
        part = rows[label == value]
        namespace = namespaces.by_number(value >> 24)
        result.append(
            (
                part,
                Blocks(
                    namespace.id,
                    value >> 8 & 0xFFFF,
                    index.keys_of(part),
                    index.sizes[part],
                    index.generations[part],
                    index.places[part],
                ),
            )
        )
    return result


def records(index: Index, namespaces: Namespaces, rows: U32, kind: events.Kind) -> events.Records:
    """Return one journal record of ``kind`` per row, filled from the index."""
    out = events.blank(len(rows), kind)
    if not len(rows):
        return out
    out["row"] = rows
    out["parent"] = index.parents[rows]
    out["length"] = index.sizes[rows]
    out["place"] = index.places[rows]
    out["generation"] = index.generations[rows]
    out["last_use"] = index.last_use[rows]
    out["shard"] = index.spaces[rows] & 0xFFFF
    numbers = (index.spaces[rows] >> 16) << 8 | index.key_lengths[rows]
    for number in set(numbers.tolist()):
        chosen = np.flatnonzero(numbers == number)
        keys = index.keys_of(rows[chosen])
        out["namespace"][chosen] = np.frombuffer(namespaces.by_number(number >> 8).id, np.uint8)
        out["key_length"][chosen] = keys.shape[1]
        out["key"][chosen[:, None], np.arange(keys.shape[1])] = keys
    return out


def parents(index: Index, namespaces: Namespaces, rows: U32) -> events.Records:
    """Return records that keep the links of ``rows`` to parents that the engine does not have.

    A ghost is told as what it is. A block that is only in memory is told as a version about to be
    written: wherever the record of its own PUT stands, before this one or after it, that counts.
    """
    above = index.parents[rows]
    above = above[above != NONE]
    above = np.setdiff1d(above[(index.flags[above] & DISK) == 0], rows)
    if not len(above):
        return events.blank(0, events.Kind.GHOST)
    ghost = (index.flags[above] & GHOST) != 0
    ghosts = records(index, namespaces, above[ghost], events.Kind.GHOST)
    return np.concatenate([ghosts, stand_ins(index, namespaces, above[~ghost])])


def stand_ins(index: Index, namespaces: Namespaces, rows: U32) -> events.Records:
    """Return records for rows that are not in the engine but have children there.

    A parent that is not in the engine either is left out: it may never get there, and its row id
    become another block's.
    """
    found = records(index, namespaces, rows, events.Kind.BEGIN)
    above = found["parent"].copy()
    there = (index.flags[np.where(above == NONE, 0, above)] & DISK) != 0
    found["parent"] = np.where(there, above, NONE)
    return found


def pins(index: Index, rows: U32) -> events.Records:
    """Return a PIN for each row: its deadline, 0 for one that is not pinned (any more)."""
    out = events.blank(len(rows), events.Kind.PIN)
    out["row"] = rows
    out["last_use"] = [int(index.pins.get(row, 0.0) * 1e6) for row in rows.tolist()]
    out["length"] = [row in index.firm_pins for row in rows.tolist()]
    return out


def spaces(namespaces: Namespaces, found: events.Records) -> U32:
    """Return the space (namespace number, shard) of each record; unknown ids get a number too."""
    result = found["shard"].astype(np.uint32)
    for identity, chosen in _by_namespace(found):
        result[chosen] |= np.uint32(namespaces.known(identity).number << 16)
    return result


def blocks_of(found: events.Records) -> list[Blocks]:
    """Return records as engine batches, one for each (namespace, shard, key length)."""
    result = []
    for identity, chosen in _by_namespace(found):
        part = found[chosen]
        label = part["shard"].astype(np.uint32) << 8 | part["key_length"]
        for value in np.unique(label):
            one = part[label == value]
            result.append(
                Blocks(
                    identity,
                    int(value) >> 8,
                    one["key"][:, : int(value) & 0xFF],
                    one["length"],
                    one["generation"],
                    one["place"],
                )
            )
    return result


def _by_namespace(found: events.Records) -> Iterator[tuple[bytes, np.ndarray]]:
    """Yield each namespace id with the positions of its records; a pass per id, no sorting."""
    ids = np.ascontiguousarray(found["namespace"]).view(np.dtype((np.void, 16))).ravel()
    left = np.arange(len(found))
    while len(left):
        identity = ids[left[0]].tobytes()
        mine = ids[left] == ids[left[0]]
        yield identity, left[mine]
        left = left[~mine]

"""What an administrative request asks for: its fields, the block it names, a copy of the rows."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvstore import lookup, plan, protocol
from kvstore.errors import NotFound, UnknownNamespace, UsageError
from kvstore.keys import check_shard
from kvstore.protocol import Flag

if TYPE_CHECKING:
    from kvstore.backends.base import U32
    from kvstore.namespaces import Namespace
    from kvstore.plan import Snapshot
    from kvstore.store import Store
    from kvstore.underway import Request

Asked = dict[str, Any]
Document = dict[str, object]

LOOK_ROWS = 16_384
"""Rows that an abbreviation is compared with at a time, about 2 ms."""
MAX_NUMBER = 1 << 62


async def send_part(request: Request, document: Document) -> None:
    await request.answer(protocol.dump(document), flags=Flag.MORE)


def amount(asked: Asked, name: str, kind: type[int] | type[float] = int) -> Any:  # noqa: ANN401
    """Return a number that is not negative, None if there is none. Raises UsageError."""
    value = asked.get(name)
    fitting = type(value) is int or (kind is float and type(value) is float)
    if value is not None and not (fitting and 0 <= value < MAX_NUMBER):
        raise UsageError(f"{name} is {value!r}", "send a number, or leave it out")
    return value


def named_space(store: Store, asked: Asked) -> Namespace | None:
    """Return the namespace of an id in hex, None if none is named. Raises UnknownNamespace."""
    identity = asked.get("namespace")
    if identity is None:
        return None
    for namespace in store.core.namespaces.all():
        if namespace.id.hex() == identity:
            return namespace
    raise UnknownNamespace(
        f"namespace {str(identity)[:40]} does not exist", "see kvstore inspect --namespaces"
    )


def named_shard(asked: Asked) -> int | None:
    shard: int | None = amount(asked, "shard")
    return shard if shard is None else check_shard(shard)


def _key(asked: Asked) -> str:
    key = asked.get("key")
    if not isinstance(key, str):
        raise UsageError("a block is named by its key", "send it in hex")
    return lookup.check_digits(key)


async def snapshot(store: Store) -> Snapshot:
    """Copy the rows, a few at a time: others have the event loop in between."""
    index, now = store.core.index, store.core.clock.seconds()
    parts = []
    for start in range(0, max(index.row_limit, 1), plan.SLICE_ROWS):
        parts.append(plan.snapshot(index, now, start, start + plan.SLICE_ROWS))
        await asyncio.sleep(0)
    return plan.joined(parts)


class Found(NamedTuple):
    """A block as it was when it was looked up."""

    row: int
    generation: int

    @classmethod
    def at(cls, store: Store, row: int) -> Found:
        return cls(row, int(store.core.index.generations[row]))

    def check(self, store: Store) -> None:
        """Raises NotFound if the row is another block's by now."""
        row, generation = np.array([self.row], np.uint32), np.array([self.generation], np.uint64)
        if not store.core.index.holds(row, generation)[0]:
            raise NotFound("the block has left just now", "ask again")

    def position(self, found: Snapshot) -> int:
        """Return where it is in a snapshot made since. Raises NotFound if it has gone."""
        at = int(np.searchsorted(found.rows, self.row))
        here = at < len(found.rows) and found.rows[at] == self.row
        if not here or found.generations[at] != self.generation:
            raise NotFound("the block has left just now", "ask again")
        return at


async def find_block(store: Store, asked: Asked) -> Found:
    """Return the block that ``key``, or an abbreviation of it, ``namespace`` and ``shard`` name.

    Raises NotFound, UsageError if several may be meant.
    """
    index, digits = store.core.index, _key(asked)
    namespace, shard = named_space(store, asked), named_shard(asked)
    found: list[tuple[Found, tuple[str, int, str]]] = []
    for start in range(0, index.row_limit, LOOK_ROWS):
        rows = index.rows_between(start, start + LOOK_ROWS)
        rows = rows[index.readable(rows)]
        if namespace is not None:
            rows = rows[index.spaces[rows] >> 16 == namespace.number]
        if shard is not None:
            rows = rows[index.spaces[rows] & 0xFFFF == shard]
        rows = _beginning(store, rows, digits)[: 2 * lookup.MOST_NAMED]
        found += [(Found.at(store, row), name) for row, name in store.names(rows)]
        await asyncio.sleep(0)
    chosen = found[lookup.only([name for _, name in found], digits)][0]
    chosen.check(store)
    return chosen


def _beginning(store: Store, rows: U32, digits: str) -> U32:
    """Return the rows whose keys begin with these digits, the shortest keys first."""
    known = store.core.index.describe(rows)
    hits = np.flatnonzero(lookup.matching(known.keys, known.key_lengths, digits))
    return rows[hits[np.argsort(known.key_lengths[hits], kind="stable")]]

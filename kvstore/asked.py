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
    raise UnknownNamespace(f"namespace {str(identity)[:40]} does not exist", "see list")


def named_shard(asked: Asked) -> int | None:
    shard: int | None = amount(asked, "shard")
    return shard if shard is None else check_shard(shard)


def _key(asked: Asked) -> str:
    key = asked.get("key")
    if not isinstance(key, str):
        raise UsageError("a block is named by its key", "send it in hex")
    return lookup.check_digits(key)


async def row_of(request: Request, store: Store, asked: Asked) -> int:
    """Return the row of the block that ``key``, or an abbreviation, ``namespace`` and ``shard``
    name. Raises NotFound, UsageError."""
    index, digits = store.core.index, _key(asked)
    namespace, shard = named_space(store, asked), named_shard(asked)
    found: list[tuple[int, tuple[str, int, str]]] = []
    for start in range(0, index.row_limit, LOOK_ROWS):
        rows = index.rows_between(start, start + LOOK_ROWS)
        rows = rows[index.readable(rows)]
        if namespace is not None:
            rows = rows[index.spaces[rows] >> 16 == namespace.number]
        if shard is not None:
            rows = rows[index.spaces[rows] & 0xFFFF == shard]
        known = index.describe(rows)
        rows = rows[lookup.matching(known.keys, known.key_lengths, digits)]
        found += store.names(rows[: 2 * lookup.MOST_NAMED])
        await asyncio.sleep(0)
    return found[lookup.only([name for _, name in found], digits)][0]


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

    def position(self, found: Snapshot) -> int:
        """Return where it is in a snapshot made since. Raises NotFound if it has gone."""
        at = int(np.searchsorted(found.rows, self.row))
        here = at < len(found.rows) and found.rows[at] == self.row
        if not here or found.generations[at] != self.generation:
            raise NotFound("the block has left just now", "ask again")
        return at


async def find_block(request: Request, store: Store, asked: Asked) -> Found:
    row = await row_of(request, store, asked)
    return Found(row, int(store.core.index.generations[row]))

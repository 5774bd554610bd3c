"""What administrators ask for, in JSON: one coroutine for each, which answers its request.

Answers that may be long come in parts (flag MORE), so that neither side holds a million blocks as
JSON. What looks at all rows looks at a copy, in a worker (:mod:`kvstore.plan`).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvstore import lookup, plan, protocol, record, versions
from kvstore.answers import BlockStatus
from kvstore.errors import InvalidKey, KVStoreError, ReadOnly, UnknownNamespace, UsageError
from kvstore.events import RECORD_BYTES
from kvstore.index import DIRTY, DISK, MEM, NONE
from kvstore.keys import key_array, parse_hex, space_number
from kvstore.protocol import Flag

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from kvstore.backends.base import U32, Blocks
    from kvstore.keys import KeyArray
    from kvstore.namespaces import Namespace
    from kvstore.plan import Plan, Snapshot
    from kvstore.store import Store
    from kvstore.underway import Request

Asked = dict[str, Any]
Document = dict[str, object]

LIST_LIMIT = 4096
PART_BLOCKS = 1024
PART_BYTES = 1 << 20
"""About the most that a part of an answer has of what may be large."""
LOOK_ROWS = 65_536
"""Rows that an abbreviation is compared with at a time, about 5 ms."""
WARM_BUDGET = 4 << 20
"""Bytes that are warmed in one go: a worker is back in a few milliseconds."""
WARM_BYTES = 64 << 20
WARM_KEYS = 256
MAX_TREE = 100_000


async def administer(request: Request) -> None:
    asked = request.meta.json()
    action = asked.get("op")
    request.connection.peer.check_action(action if isinstance(action, str) else None)
    if not isinstance(action, str):
        raise UsageError("administration is asked for by a name", 'send {"op": "status"}')
    if action not in ACTIONS:
        raise UsageError(f"administration knows no operation {action[:40]!r}", "upgrade kvstore")
    await request.answer(protocol.dump(await ACTIONS[action](request, asked)))


async def _part(request: Request, document: Document) -> None:
    await request.answer(protocol.dump(document), flags=Flag.MORE)


# -- what was asked for ---------------------------------------------------------------------------


def _number(asked: Asked, name: str, kind: type[int] | type[float] = int) -> Any:  # noqa: ANN401
    """Return a number that is not negative, None if there is none. Raises UsageError."""
    value = asked.get(name)
    fitting = type(value) is int or (kind is float and type(value) is float)
    if value is not None and not (fitting and value >= 0):
        raise UsageError(f"{name} is {value!r}", "send a number, or leave it out")
    return value


def _namespace(store: Store, asked: Asked) -> Namespace | None:
    """Return the namespace of an id in hex, None if none is named. Raises UnknownNamespace."""
    identity = asked.get("namespace")
    if identity is None:
        return None
    for namespace in store.core.namespaces.all():
        if namespace.id.hex() == identity:
            return namespace
    raise UnknownNamespace(f"namespace {str(identity)[:40]} does not exist", "see list")


def _key(asked: Asked) -> str:
    key = asked.get("key")
    if not isinstance(key, str):
        raise UsageError("a block is named by its key", "send it in hex")
    return lookup.check_digits(key)


async def _row(request: Request, store: Store, asked: Asked) -> int:
    """Return the row of the block that ``key``, or an abbreviation, ``namespace`` and ``shard``
    name. Raises NotFound, UsageError."""
    index, digits = store.core.index, _key(asked)
    namespace, shard = _namespace(store, asked), _number(asked, "shard")
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


def _snapshot(store: Store) -> Snapshot:
    return plan.snapshot(store.core.index, store.core.clock.seconds())


# -- looking --------------------------------------------------------------------------------------


async def status(request: Request, _: Asked) -> Document:
    answer = request.server.status()
    if not request.connection.peer.administrator:
        # Notes name files, and those of namespaces say which there are.
        answer.pop("notes", None)
    return answer


async def list_blocks(request: Request, asked: Asked) -> Document:
    store, start, handle = await request.store(), _number(asked, "start") or 0, asked.get("handle")
    if not isinstance(handle, (int, type(None))):
        raise UsageError("a list is asked for by a handle", "send an integer, or none")
    namespace = None if handle is None else request.connection.namespace(store, handle)
    blocks, following = store.list_rows(namespace, start, LIST_LIMIT)
    return {"blocks": blocks, "next": following}


async def namespaces(request: Request, _: Asked) -> Document:
    """What each namespace holds."""
    store = await request.store()
    known = store.core.namespaces.all()
    found = _snapshot(store)
    shares = await request.server.in_worker(partial(_shares, found, len(known)))
    part: list[Document] = []
    size = 0
    for namespace, (blocks, live) in zip(known, shares, strict=True):
        share: Document = {
            "id": namespace.id.hex(),
            "record": namespace.record,
            "key_length": store.core.key_lengths.get(namespace.number, namespace.key_length),
            "blocks": blocks,
            "live_bytes": live,
        }
        part.append(share)
        size += len(protocol.dump(share))
        if size > PART_BYTES:
            await _part(request, {"namespaces": part})
            part, size = [], 0
    return {"namespaces": part}


def _shares(found: Snapshot, count: int) -> list[tuple[int, int]]:
    numbers, weights = found.spaces[found.there] >> 16, found.weights()[found.there]
    blocks = np.bincount(numbers, minlength=count)[:count]
    live = np.bincount(numbers, weights, minlength=count)[:count]
    return [(int(one), int(size)) for one, size in zip(blocks, live, strict=True)]


async def inspect(request: Request, asked: Asked) -> Document:
    """One block, with the envelope of its record."""
    store = await request.store()
    row = await _row(request, store, asked)
    core, index, one = store.core, store.core.index, np.array([row], np.uint32)
    ((_, (namespace, shard, key)),) = store.names(one)
    parent, flags, length = int(index.parents[row]), int(index.flags[row]), int(index.sizes[row])
    told: Document = {
        "namespace": namespace,
        "shard": shard,
        "key": key,
        "parent": None if parent == NONE else store.names(one * 0 + parent)[0][1][2],
        "children": int(index.children[row]),
        "bytes": length,
        "record_bytes": record.image_bytes(length),
        "generation": int(index.generations[row]),
        "place": int(index.places[row]),
        "last_use": int(index.last_use[row]) / 1e6,
        "memory": bool(flags & MEM),
        "disk": bool(flags & DISK),
        "dirty": bool(flags & DIRTY),
        "references": int(index.references[row]),
        "pinned_until": index.pins.get(row),
    }
    if not flags & DISK:
        unread = {"path": None, "verdict": "not written yet", "reason": "", "envelope": None}
        return told | unread
    block = _block(store, row)
    index.acquire(one)
    try:
        read = partial(lookup.read_record, core.engine, core.uuid, block)
        return told | await request.server.in_worker(read)
    finally:
        core.release(one, block.generations)


def _block(store: Store, row: int) -> Blocks:
    one = np.array([row], np.uint32)
    ((_, block),) = versions.groups(store.core.index, store.core.namespaces, one)
    return block


async def tree(request: Request, asked: Asked) -> Document:
    """The chain of a block: its ancestors, itself, its descendants."""
    store = await request.store()
    row, limit = await _row(request, store, asked), _number(asked, "limit") or MAX_TREE
    found = _snapshot(store)
    start = found.position(row)
    told, more = await request.server.in_worker(
        lambda: plan.family(found.up(), start, min(limit, MAX_TREE))
    )
    # Those that have gone since are left out: their row may be another block's by now.
    index, line = store.core.index, [(int(found.rows[at]), at, depth) for at, depth in told]
    same = [
        (row, at, depth)
        for row, at, depth in line
        if index.generations[row] == found.generations[at] and index.flags[row]
    ]
    keys = dict(store.names(np.array([row for row, _, _ in same], np.uint32)))
    blocks = [
        {
            "key": keys[row][2],
            "depth": depth,
            "bytes": 0 if found.ghost[at] else int(found.sizes[at]),
            "there": not found.ghost[at],
            "chosen": at == start,
        }
        for row, at, depth in same
    ]
    namespace, shard, _ = store.names(np.array([row], np.uint32))[0][1]
    return {"namespace": namespace, "shard": shard, "blocks": blocks, "more": more}


async def recent(request: Request, asked: Asked) -> Document:
    """The blocks that were used last, the one used longest ago first."""
    store = await request.store()
    namespace, most = _namespace(store, asked), _number(asked, "bytes")
    found = _snapshot(store)
    number = None if namespace is None else namespace.number
    most = store.core.tier.capacity if most is None else most
    choose = partial(plan.recent, found, most, number)
    rows, generations = await request.server.in_worker(choose)
    for start in range(0, len(rows), PART_BLOCKS):
        part = slice(start, start + PART_BLOCKS)
        there = rows[part][store.core.index.holds(rows[part], generations[part])]
        await _part(request, {"blocks": [name for _, name in store.names(there)]})
    return {"blocks": []}


async def pins(request: Request, asked: Asked) -> Document:
    """Which blocks are pinned, and for how long."""
    store = await request.store()
    core, namespace = store.core, _namespace(store, asked)
    index, now = core.index, core.clock.seconds()
    rows = np.array(sorted(row for row, end in index.pins.items() if end > now), np.uint32)
    if namespace is not None:
        rows = rows[index.spaces[rows] >> 16 == namespace.number]
    generations = index.generations[rows]
    for start in range(0, len(rows), PART_BLOCKS):
        part = slice(start, start + PART_BLOCKS)
        there = rows[part][index.holds(rows[part], generations[part])]
        await _part(request, {"pins": list(_pins(store, there, now))})
    return {"pins": []}


def _pins(store: Store, rows: U32, now: float) -> Iterator[Document]:
    index = store.core.index
    for row, (namespace, shard, key) in store.names(rows):
        until = index.pins.get(row)
        if until is not None:
            yield {
                "namespace": namespace,
                "shard": shard,
                "key": key,
                "bytes": int(index.sizes[row]),
                "seconds": round(until - now, 1),
                "administrator": row in index.firm_pins,
            }


# -- evicting -------------------------------------------------------------------------------------


class _Goal(NamedTuple):
    """``size``: bytes that the whole store may take afterwards, None if that is not the question;
    ``expected``: what it takes now, and what writing the eviction down may add."""

    size: int | None
    expected: int


async def evict(request: Request, asked: Asked) -> Document:
    """Evict what is asked for, in batches that are told one by one; only tell them if asked so."""
    store, dry = await request.store(), asked.get("dry_run") is True
    core, server = store.core, request.server
    if core.read_only and not dry:
        raise ReadOnly(f"nothing can be evicted: {core.read_only}", "see kvstore status")
    if not core.read_only:
        # What waits to be written could not go; and its late errors are for others to hear.
        await server.flush(store, lambda _: False)
    await _measure(request, store)
    wanted, goal = await _wanted(request, store, asked)
    found = _snapshot(store)
    chosen = await server.in_worker(partial(plan.choose, found, wanted))
    blocks = size = failed = 0
    for part in chosen.parts():
        told, freed, lost = await (_tell(store, part) if dry else _evict(request, store, part))
        blocks, size, failed = blocks + len(told), size + freed, failed + lost
        await _part(request, {"blocks": told, "bytes": freed, "planned": len(chosen.rows)})
    await _measure(request, store)
    kept = {"pinned": chosen.pinned, "in_use": chosen.used, "needed_by_others": chosen.needed}
    used = goal.expected - size if dry else core.usage().physical
    reached = used <= goal.size if goal.size is not None else not sum(kept.values())
    return {
        "dry_run": dry,
        "count": blocks,
        "bytes": size,
        "failed": failed,
        "kept": kept,
        "used_bytes": used,
        "reached": reached and not failed,
    }


async def _measure(request: Request, store: Store) -> None:
    store.core.take(await request.server.in_worker(store.core.measure))


async def _tell(store: Store, part: Plan) -> tuple[list[tuple[str, int, str]], int, int]:
    """Return the blocks of a batch and what they take, without touching them."""
    rows = part.rows[store.core.index.holds(part.rows, part.generations)]
    size = int(record.image_bytes_of(store.core.index.sizes[rows]).sum())
    await asyncio.sleep(0)
    return [name for _, name in store.names(rows)], size, 0


async def _evict(
    request: Request, store: Store, part: Plan
) -> tuple[list[tuple[str, int, str]], int, int]:
    """Evict a batch; return its blocks, the bytes freed, and how many could not be deleted."""
    rows = plan.still(store.core.index, part, store.core.clock.seconds())
    told = [name for _, name in store.names(rows)]
    if not len(rows):
        return told, 0, 0
    removal = store.evict_rows(rows)
    await request.server.settled([request.server.start(removal)])
    if removal.failure is not None:
        return [], 0, len(rows)
    return told, removal.bytes, 0


async def _wanted(request: Request, store: Store, asked: Asked) -> tuple[plan.Wanted, _Goal]:
    core = store.core
    namespace, size = _namespace(store, asked), _number(asked, "to_size")
    age = _number(asked, "older_than", float)
    chain, subtree = asked.get("chain") is True, asked.get("subtree") is True
    if not (chain or subtree or asked.get("all") is True) and (size, age, namespace) == (None,) * 3:
        raise UsageError("nothing is named to be evicted", "name it, or send all")
    row = await _row(request, store, asked) if chain or subtree else None
    usage = core.usage()
    expected = usage.physical - usage.going + _growth(store)
    wanted = plan.Wanted(
        bytes=None if size is None else expected - size if usage.physical > size else 0,
        before=None if age is None else core.clock.micros() - int(age * 1e6),
        namespace=None if namespace is None else namespace.number,
        rows=_line(store, row) if row is not None and chain else None,
        below=row if subtree else None,
    )
    return wanted, _Goal(size, expected)


def _growth(store: Store) -> int:
    """Return the bytes by which the journal may grow when all blocks are evicted."""
    journal = store.core.journal
    ahead = journal.end + RECORD_BYTES * store.core.index.blocks + journal.unit
    return max(0, -(-ahead // journal.unit) * journal.unit - journal.size)


def _line(store: Store, row: int) -> U32:
    """Return a block and its ancestors, up to the first that has another child."""
    index = store.core.index
    if index.children[row]:
        key = store.names(np.array([row], np.uint32))[0][1][2]
        raise UsageError(f"other blocks follow block {key}", "evict them too with --subtree")
    line = [row]
    for above in index.ancestors(row).tolist():
        if index.children[above] > 1:
            break
        line.append(above)
    return np.array(line, np.uint32)


# -- warming --------------------------------------------------------------------------------------


async def warm(request: Request, asked: Asked) -> Document:
    """Bring blocks into memory: the first of those asked for, whose records take some bytes."""
    store = await request.store()
    core = store.core
    if not core.tier.capacity:
        raise KVStoreError("the daemon keeps no blocks in memory", "start it with --memory SIZE")
    namespace, shard = _namespace(store, asked), _number(asked, "shard") or 0
    keys = _keys(asked)
    most = min(_number(asked, "bytes") or WARM_BYTES, core.tier.capacity)
    if namespace is None:
        namespace = request.server.default_namespace(store)
    rows = core.index.find(space_number(namespace.number, shard), keys)
    there = core.index.readable(rows)
    known = np.where(there, rows, 0)
    images = np.where(there, record.image_bytes_of(core.index.sizes[known]), 0)
    count = min(len(keys), max(1, int(np.searchsorted(np.cumsum(images), most, "right"))))
    there, images, known = there[:count], images[:count], known[:count]
    inside = there & ((core.index.flags[known] & MEM) != 0)
    cold = np.flatnonzero(there & ~inside & core.tier.fits(images))
    loaded, failed = await _load(request, store, (namespace, shard), keys[cold])
    found = core.index.find(space_number(namespace.number, shard), keys[:count])
    now = core.index.readable(found) & ((core.index.flags[np.where(there, found, 0)] & MEM) != 0)
    return {
        "done": count,
        "loaded": loaded,
        "present": int(inside.sum()),
        "absent": int((~there).sum()),
        "failed": failed,
        "skipped": int((there & ~inside).sum()) - loaded - failed,
        "bytes": int(images[now].sum()),
        "memory_capacity_bytes": core.tier.capacity,
    }


def _keys(asked: Asked) -> KeyArray:
    keys = asked.get("keys")
    if not isinstance(keys, list) or not keys or not all(isinstance(key, str) for key in keys):
        raise InvalidKey("blocks are warmed by their keys", "send a list of them in hex")
    return key_array([parse_hex(key) for key in keys])


async def _load(
    request: Request, store: Store, where: tuple[Namespace, int], keys: KeyArray
) -> tuple[int, int]:
    """Read blocks into memory, a few at a time and one job at a time in the whole daemon; return
    how many are there now, and how many could not be read."""
    server, start, loaded, failed = request.server, 0, 0, 0
    while start < len(keys):
        part = keys[start : start + WARM_KEYS]
        async with server.warming:
            begin = partial(store.warm, *where, part, WARM_BUDGET)
            job = await server.with_room(begin, request.limit)
            try:
                await server.settled([server.start(job)])
                if job.failure is not None:
                    raise job.failure
                start += job.count
                loaded += int(job.in_memory.sum())
                failed += int((job.statuses != BlockStatus.OK).sum())
            finally:
                job.close()
                server.memory_changed()
    return loaded, failed


ACTIONS: dict[str, Callable[[Request, Asked], Awaitable[Document]]] = {
    "status": status,
    "list": list_blocks,
    "namespaces": namespaces,
    "inspect": inspect,
    "tree": tree,
    "recent": recent,
    "pins": pins,
    "evict": evict,
    "warm": warm,
}

"""What administrators ask for, in JSON: one coroutine for each, which answers its request.

Answers that may be long come in parts (flag MORE), so that neither side holds a million blocks as
JSON. What looks at all rows looks at a copy, in a worker (:mod:`kvstore.plan`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvstore import lookup, plan, protocol, quota, recording, versions
from kvstore.asked import (
    Asked,
    Document,
    amount,
    find_block,
    named_space,
    send_part,
    snapshot,
)
from kvstore.errors import UsageError
from kvstore.index import DIRTY, DISK, MEM, NONE
from kvstore.moving import evict, warm

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from kvstore.backends.base import U32, Blocks
    from kvstore.plan import Snapshot
    from kvstore.store import Store
    from kvstore.underway import Request

LIST_LIMIT = 4096
PART_BLOCKS = 1024
PART_BYTES = 1 << 20
"""About the most that a part of an answer has of what may be large."""
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


# -- looking --------------------------------------------------------------------------------------


async def status(request: Request, _: Asked) -> Document:
    answer = request.server.status()
    if not request.connection.peer.administrator:
        # Notes name files, and those of namespaces say which there are.
        answer.pop("notes", None)
    return answer


async def list_blocks(request: Request, asked: Asked) -> Document:
    store, start, handle = await request.store(), amount(asked, "start") or 0, asked.get("handle")
    if not isinstance(handle, (int, type(None))):
        raise UsageError("a list is asked for by a handle", "send an integer, or none")
    namespace = None if handle is None else request.connection.namespace(store, handle)
    blocks, following = store.list_rows(namespace, start, LIST_LIMIT)
    return {"blocks": blocks, "next": following}


async def namespaces(request: Request, _: Asked) -> Document:
    """What each namespace holds."""
    store = await request.store()
    known = store.core.namespaces.all()
    found = await snapshot(store)
    shares = await request.server.in_worker(partial(_shares, found, len(known)))
    part: list[Document] = []
    size = 0
    for namespace, (blocks, live) in zip(known, shares, strict=True):
        share: Document = {
            "id": namespace.id.hex(),
            "record": namespace.record,
            "key_length": store.core.key_lengths.get(namespace.number) if blocks else None,
            "blocks": blocks,
            "live_bytes": live,
            "quota_bytes": namespace.quota,
        }
        part.append(share)
        size += len(protocol.dump(share))
        if size > PART_BYTES:
            await send_part(request, {"namespaces": part})
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
    row = (await find_block(store, asked)).row
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
        "record_bytes": int(index.record_bytes(index.sizes[one])[0]),
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
        read = partial(lookup.read_record, core.engine, block)
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
    block, limit = await find_block(store, asked), amount(asked, "limit") or MAX_TREE
    found = await snapshot(store)
    start = block.position(found)
    namespace, shard, _ = store.names(found.rows[start : start + 1])[0][1]
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
    return {"namespace": namespace, "shard": shard, "blocks": blocks, "more": more}


async def recent(request: Request, asked: Asked) -> Document:
    """The blocks that were used last, the one used longest ago first."""
    store = await request.store()
    namespace, most = named_space(store, asked), amount(asked, "bytes")
    found = await snapshot(store)
    number = None if namespace is None else namespace.number
    most = store.core.tier.capacity if most is None else most
    choose = partial(plan.recent, found, most, number)
    rows, generations = await request.server.in_worker(choose)
    for start in range(0, len(rows), PART_BLOCKS):
        part = slice(start, start + PART_BLOCKS)
        there = rows[part][store.core.index.holds(rows[part], generations[part])]
        await send_part(request, {"blocks": [name for _, name in store.names(there)]})
    return {"blocks": []}


async def limit(request: Request, asked: Asked) -> Document:
    """Set, lift (null) or only tell the quota of a namespace."""
    store = await request.store()
    core, namespace = store.core, named_space(store, asked)
    if namespace is None:
        raise UsageError("a quota is one of a namespace", "send its id")
    if "bytes" in asked:
        quota_bytes = amount(asked, "bytes")
        await request.server.in_worker(lambda: core.namespaces.set_quota(namespace, quota_bytes))
        quota.trim(core)
        request.server.dispatch()
    return {
        "namespace": namespace.id.hex(),
        "quota_bytes": namespace.quota,
        "limit_bytes": quota.limit_of(core, namespace),
        "taken_bytes": core.index.shares.of(namespace.number),
    }


async def pins(request: Request, asked: Asked) -> Document:
    """Which blocks are pinned, and for how long."""
    store = await request.store()
    core, namespace = store.core, named_space(store, asked)
    index, now = core.index, core.clock.seconds()
    rows = np.array(sorted(row for row, end in index.pins.items() if end > now), np.uint32)
    if namespace is not None:
        rows = rows[index.spaces[rows] >> 16 == namespace.number]
    generations = index.generations[rows]
    for start in range(0, len(rows), PART_BLOCKS):
        part = slice(start, start + PART_BLOCKS)
        there = rows[part][index.holds(rows[part], generations[part])]
        await send_part(request, {"pins": list(_pins(store, there, now))})
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


# -- verifying ------------------------------------------------------------------------------------


async def scrub(request: Request, asked: Asked) -> Document:
    """Start, pause or stop the verification of what is on disk, acknowledge what it found, look at
    the engine's structure, or only tell how far it is; with what it found since the finding
    numbered ``since``."""
    store, action = await request.store(), asked.get("action", "status")
    done: object = None
    if action == "start":
        done = store.scrub.start(amount(asked, "rate"))
        request.server.dispatch()
    elif action == "pause":
        done = store.scrub.pause()
    elif action == "stop":
        done = store.scrub.stop()
    elif action == "ack":
        done = await request.server.in_worker(store.core.quarantine.acknowledge)
    elif action == "check":
        found = await request.server.in_worker(store.core.engine.check)
        return {"structure": [[one.kind, one.path, one.detail] for one in found]}
    elif action != "status":
        raise UsageError(f"scrub knows no action {str(action)[:40]!r}", "upgrade kvstore")
    since = amount(asked, "since") or 0
    new = [one for one in store.scrub.findings if int(str(one["number"])) > since]
    return {**store.scrub.status(), "done": done, "findings": new}


ACTIONS: dict[str, Callable[[Request, Asked], Awaitable[Document]]] = {
    "status": status,
    "list": list_blocks,
    "namespaces": namespaces,
    "inspect": inspect,
    "tree": tree,
    "recent": recent,
    "pins": pins,
    "quota": limit,
    "record": recording.record,
    "scrub": scrub,
    "evict": evict,
    "warm": warm,
}

"""What administrators move: blocks out of the store, and into memory ahead of their use."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore import awaited, plan, record
from kvstore.answers import BlockStatus
from kvstore.asked import (
    Asked,
    Document,
    Found,
    amount,
    find_block,
    named_shard,
    named_space,
    send_part,
    snapshot,
)
from kvstore.errors import InvalidKey, KVStoreError, ReadOnly, UsageError
from kvstore.events import RECORD_BYTES
from kvstore.index import MEM
from kvstore.keys import key_array, parse_hex, space_number

if TYPE_CHECKING:
    from kvstore.backends.base import U32
    from kvstore.keys import KeyArray
    from kvstore.namespaces import Namespace
    from kvstore.plan import Plan
    from kvstore.store import Store
    from kvstore.underway import Request

WARM_BUDGET = 4 << 20
"""Bytes that are warmed in one go: a worker is back in a few milliseconds."""
WARM_BYTES = 64 << 20
WARM_KEYS = 256


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
        await awaited.flush(server, store, lambda _: False)
    await _measure(request, store)
    block = await find_block(store, asked) if _names_block(asked) else None
    wanted, goal = _wanted(store, asked, block)
    found = await snapshot(store)
    if block is not None:
        block.position(found)
    chosen = await server.in_worker(partial(plan.choose, found, wanted))
    blocks = size = failed = stayed = 0
    for part in chosen.parts():
        told, freed, lost = await (_tell(store, part) if dry else _evict(request, store, part))
        blocks, size, failed = blocks + len(told), size + freed, failed + lost
        stayed += int((~part.ghost).sum()) - len(told) - lost
        await send_part(request, {"blocks": told, "bytes": freed, "planned": len(chosen.rows)})
    await _measure(request, store)
    kept = {
        "pinned": chosen.pinned,
        "in_use": chosen.used + stayed,
        "needed_by_others": chosen.needed,
    }
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
    size = int(store.core.index.record_bytes(store.core.index.sizes[rows]).sum())
    told = [name for _, name in store.names(rows)]
    await asyncio.sleep(0)
    return told, size, 0


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


def _names_block(asked: Asked) -> bool:
    return asked.get("chain") is True or asked.get("subtree") is True


def _wanted(store: Store, asked: Asked, block: Found | None) -> tuple[plan.Wanted, _Goal]:
    core = store.core
    namespace, size = named_space(store, asked), amount(asked, "to_size")
    age = amount(asked, "older_than", float)
    if asked.get("all") is not True and (size, age, namespace, block) == (None,) * 4:
        raise UsageError("nothing is named to be evicted", "name it, or send all")
    chain = asked.get("chain") is True
    usage = core.usage()
    expected = usage.physical - usage.going + _growth(store)
    wanted = plan.Wanted(
        bytes=None if size is None else expected - size if usage.physical > size else 0,
        before=None if age is None else max(0, core.clock.micros() - int(age * 1e6)),
        namespace=None if namespace is None else namespace.number,
        rows=_line(store, block.row) if block is not None and chain else None,
        below=block.row if block is not None and not chain else None,
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
    namespace, shard = named_space(store, asked), named_shard(asked) or 0
    keys = _keys(asked)
    size = amount(asked, "bytes")
    most = min(WARM_BYTES if size is None else size, core.tier.capacity)
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
    loaded, failed, gone = await _load(request, store, (namespace, shard), keys[cold])
    found = core.index.find(space_number(namespace.number, shard), keys[:count])
    now = core.index.readable(found)
    now &= (core.index.flags[np.where(now, found, 0)] & MEM) != 0
    return {
        "done": count,
        "loaded": loaded,
        "present": int(inside.sum()),
        "absent": int((~there).sum()) + gone,
        "failed": failed,
        "skipped": int((there & ~inside).sum()) - loaded - failed - gone,
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
) -> tuple[int, int, int]:
    """Read blocks into memory, a few at a time and one job at a time in the whole daemon; return
    how many are there now, how many could not be read, and how many had left the store."""
    server, start, loaded, failed, gone = request.server, 0, 0, 0, 0
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
                failed += int((job.statuses[job.hits] != BlockStatus.OK).sum())
                gone += job.count - len(job.hits)
            finally:
                job.close()
                server.memory_changed()
    return loaded, failed, gone

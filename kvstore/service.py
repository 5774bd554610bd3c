"""What each operation of the protocol does: one coroutine for each, which answers its request.

Administration has a room of its own, :mod:`kvstore.administration`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore import __version__, awaited, protocol
from kvstore.administration import administer
from kvstore.answers import Ack, BlockStatus
from kvstore.batch import PutRequest
from kvstore.errors import Busy, PermissionDenied, UnknownNamespace, UsageError
from kvstore.feed import FEEDS, Feed
from kvstore.keys import MAX_BLOCK_BYTES, namespace_id
from kvstore.mapped import MAX_REGIONS, map_region
from kvstore.namespaces import owner_of
from kvstore.protocol import INLINE, Flag, Op
from kvstore.reading import SLICE_KEYS, Reading, Targets
from kvstore.underway import put_fields

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from kvstore.backends.base import U8
    from kvstore.get import Get
    from kvstore.keys import KeyArray
    from kvstore.namespaces import Namespace
    from kvstore.store import Store
    from kvstore.underway import Request

MAX_LEASE_MS = 600_000
MAX_PIN_SECONDS = 3600
"""Of an ordinary peer; administrators may pin for as long as the field can say."""
CHECKSUM = "xxh3-64"


# -- connection -----------------------------------------------------------------------------------


async def hello(request: Request) -> None:
    if request.frame.meta_bytes:
        request.meta.json()
    server, connection = request.server, request.connection
    answer = {
        "version": protocol.VERSION,
        "daemon": __version__,
        "pid": server.pid,
        "checksum": CHECKSUM,
        "limits": limits(request),
    }
    descriptors = (server.pidfd,) if connection.local and server.pidfd is not None else ()
    await request.answer(protocol.dump(answer), descriptors=descriptors)


def limits(request: Request) -> dict[str, int]:
    """Return what a client must keep to; docs/protocol.md says what each means."""
    settings, local = request.server.settings, request.connection.local
    return {
        "requests": settings.max_requests,
        "request_bytes": settings.max_client_bytes,
        "keys": protocol.MAX_KEYS,
        "meta_bytes": protocol.MAX_META_BYTES,
        "json_bytes": protocol.MAX_ADMIN_BYTES,
        "payload_bytes": protocol.MAX_PAYLOAD_BYTES,
        "block_bytes": MAX_BLOCK_BYTES,
        "put_bytes": _put_bytes(settings.options.memory_bytes),
        "region_bytes": protocol.MAX_REGION_BYTES if local else 0,
        "regions_bytes": settings.max_client_regions if local else 0,
        "regions": MAX_REGIONS if local else 0,
        "subscriptions": FEEDS,
        "lease_ms": MAX_LEASE_MS,
        "pin_seconds": _pin_limit(request),
        "patience_ms": int(settings.request_timeout * 1000),
    }


def _put_bytes(memory: int) -> int:
    """Return how much one put should bring through a region: more at a time costs less, if it is
    sure to find room."""
    return min(max(memory // 8, protocol.PUT_BYTES), protocol.MOST_PUT_BYTES)


def _pin_limit(request: Request) -> int:
    return 0xFFFFFFFF if request.connection.peer.administrator else MAX_PIN_SECONDS


async def open_namespace(request: Request) -> None:
    asked = request.meta.json()
    wanted = asked.get("record")
    if not isinstance(wanted, dict):
        raise UsageError("a namespace is opened by its record", "send a JSON object")
    store = await request.store()
    namespace = await _find(request, store, wanted, create=bool(asked.get("create")))
    answer = {
        "handle": request.connection.open(namespace),
        "id": namespace.id.hex(),
        "key_length": namespace.key_length,
    }
    await request.answer(protocol.dump(answer))


async def _find(
    request: Request, store: Store, wanted: dict[str, Any], *, create: bool
) -> Namespace:
    namespaces, peer = store.core.namespaces, request.connection.peer
    record = peer.own(wanted, create=create)
    # As it was sent comes second: older stores keep owners beside the record.
    for one in (record, wanted):
        namespace = namespaces.by_id(namespace_id(one))
        if namespace is not None and peer.may_open(namespace):
            return namespace
    if not create or not peer.may_own(record):
        raise _unknown(wanted)
    owner = owner_of(record)
    return await request.server.in_worker(lambda: namespaces.open(record, create=True, owner=owner))


def _unknown(wanted: dict[str, Any]) -> UnknownNamespace:
    identity, name = namespace_id(wanted).hex(), wanted.get("name")
    spoken = f"{name[:80]!r} ({identity})" if isinstance(name, str) else identity
    return UnknownNamespace(
        f"namespace {spoken} does not exist", "check its record, or put with --create-namespace"
    )


async def register(request: Request) -> None:
    size = request.meta.json().get("bytes")
    if type(size) is not int:
        raise UsageError("a region is registered by its size", 'send {"bytes": N}')
    if not request.connection.local:
        raise PermissionDenied("regions need a Unix socket", "send blocks in the payload")
    if len(request.descriptors) != 1:
        raise UsageError(
            "a region comes with exactly one descriptor", "attach its memfd to the first byte"
        )
    regions, descriptor = request.connection.regions, request.descriptors[0]
    regions.reserve(size)
    try:
        # One at a time: entering the pages of a large region takes long, and workers are few.
        async with request.server.mapping:
            memory = await request.server.in_worker(lambda: map_region(descriptor, size))
    except BaseException:
        regions.give_back(size)
        raise
    region = regions.add(memory)
    try:
        await request.answer(protocol.dump({"region": region.number}))
    finally:
        if not request.answered:
            await regions.remove(region.number)


async def unregister(request: Request) -> None:
    await request.connection.regions.remove(request.frame.region)
    await request.answer(b"")


async def cancel(request: Request) -> None:
    await request.connection.cancel(int(request.meta.u64(1)[0]))
    await request.answer(b"")


async def subscribe(request: Request) -> None:
    connection, number = request.connection, request.frame.request
    if len(connection.feeds) >= FEEDS:
        raise Busy(f"this connection has {FEEDS} subscriptions", "cancel one first")
    store = await request.store()
    feed = Feed(connection, request.frame, store, request.namespace(store))
    connection.feeds[number] = feed
    try:
        await request.answer(feed.next_sequence.to_bytes(8, "little"))
        feed.start()
    finally:
        if not request.answered:
            connection.feeds.pop(number, None)
            await feed.close()


# -- blocks ---------------------------------------------------------------------------------------


async def put(request: Request) -> None:
    fields = request.received or put_fields(request)
    store, frame = await request.store(), request.frame
    sources, received = request.sources, request.extents or None
    if fields.offsets is not None:
        sources = request.region().rows(fields.offsets, fields.lengths)
    wanted = PutRequest(
        request.namespace(store),
        frame.shard,
        fields.keys,
        fields.lengths,
        level=_level(frame.ack),
        chain=bool(frame.flags & Flag.CHAIN),
        parent=fields.parent,
        label=fields.label,
        overwrite=bool(frame.flags & Flag.OVERWRITE),
        checksums=fields.checksums,
    )
    statuses = await awaited.put(request.server, store, wanted, sources, received, request.limit)
    request.give_back()
    await request.answer(statuses.tobytes(), count=len(statuses))


def _level(ack: int) -> Ack:
    try:
        return Ack(ack)
    except ValueError:
        raise UsageError(f"acknowledgement level {ack} is unknown", "send 0, 1 or 2") from None


async def get(request: Request) -> None:
    keys, frame = request.keys(), request.frame
    targets = None
    if frame.region != INLINE:
        offsets, capacities = request.meta.u64(frame.count), request.meta.u32(frame.count)
        targets = Targets(request.region(), offsets, capacities)
    store = await request.store()
    where = request.namespace(store), frame.shard
    at_once = targets is not None and frame.op == Op.GET
    reading = Reading(request.server, store, where, keys, targets, stream=not at_once)
    request.reading = reading
    try:
        if at_once:
            await _answer_at_the_end(request, reading)
        else:
            await _answer_in_parts(request, reading)
    finally:
        await reading.close()


async def _answer_in_parts(request: Request, reading: Reading) -> None:
    if not reading.more:
        await request.answer(b"")
    while reading.more:
        job = await reading.next(request.limit)
        try:
            payloads = []
            if request.frame.region == INLINE:
                hits = np.flatnonzero(job.statuses == BlockStatus.OK).tolist()
                payloads = [job.payload(position) for position in hits]
            flags = Flag.MORE if reading.more else 0
            await request.answer(_outcome([job]), payloads, count=job.count, flags=flags)
        finally:
            reading.used(job)


async def _answer_at_the_end(request: Request, reading: Reading) -> None:
    jobs = []
    while reading.more:
        job = await reading.next(request.limit)
        reading.used(job)
        jobs.append(job)
    await request.answer(_outcome(jobs), count=request.frame.count)


def _outcome(jobs: list[Get]) -> bytes:
    return b"".join(
        [
            *(job.statuses.tobytes() for job in jobs),
            *(job.lengths.tobytes() for job in jobs),
            *(job.checksums.tobytes() for job in jobs),
        ]
    )


def _slices(keys: KeyArray) -> Iterator[KeyArray]:
    for start in range(0, len(keys), SLICE_KEYS):
        yield keys[start : start + SLICE_KEYS]


async def contains(request: Request) -> None:
    keys, lease = request.keys(), min(int(request.meta.u32(1)[0]), MAX_LEASE_MS) / 1000
    store, shard, count = await request.store(), request.frame.shard, request.frame.count
    namespace = request.namespace(store)
    if request.frame.flags & Flag.PREFIX:
        length = await _prefix(store, namespace, shard, keys, lease)
        await request.answer(length.to_bytes(4, "little"), count=count)
        return
    masks = []
    for part in _slices(keys):
        mask = store.contains(namespace, shard, part, lease)
        masks.append(mask.astype(np.uint8).tobytes())
        # Let others have the event loop between two slices of a long question.
        await asyncio.sleep(0)
    await request.answer(b"".join(masks), count=count)


async def _prefix(
    store: Store, namespace: Namespace, shard: int, keys: KeyArray, lease: float
) -> int:
    length = 0
    for part in _slices(keys):
        found = store.prefix(namespace, shard, part, lease)
        length += found
        if found < len(part):
            break
        await asyncio.sleep(0)
    return length


async def touch(request: Request) -> None:
    keys, store = request.keys(), await request.store()
    namespace = request.namespace(store)
    for part in _slices(keys):
        store.touch(namespace, request.frame.shard, part)
        await asyncio.sleep(0)
    await request.answer(b"")


async def delete(request: Request) -> None:
    keys, store = request.keys(), await request.store()
    namespace, shard = request.namespace(store), request.frame.shard
    statuses = [
        await awaited.delete(request.server, store, namespace, shard, part)
        for part in _slices(keys)
    ]
    await _answer_statuses(request, statuses)


async def pin(request: Request) -> None:
    keys, seconds = request.keys(), min(int(request.meta.u32(1)[0]), _pin_limit(request))
    store = await request.store()
    namespace, shard = request.namespace(store), request.frame.shard
    firm = request.connection.peer.administrator
    statuses = [store.pin(namespace, shard, part, seconds, firm=firm) for part in _slices(keys)]
    request.server.dispatch()
    await _answer_statuses(request, statuses)


async def unpin(request: Request) -> None:
    keys, store = request.keys(), await request.store()
    namespace, shard = request.namespace(store), request.frame.shard
    firm = request.connection.peer.administrator
    statuses = [store.unpin(namespace, shard, part, firm=firm) for part in _slices(keys)]
    request.server.dispatch()
    await _answer_statuses(request, statuses)


async def _answer_statuses(request: Request, statuses: list[U8]) -> None:
    meta = b"".join(part.astype(np.uint8).tobytes() for part in statuses)
    await request.answer(meta, count=request.frame.count)


async def flush(request: Request) -> None:
    store = await request.store()
    errors = await awaited.flush(request.server, store, request.connection.may_hear_of)
    told = [
        {
            "namespace": error.namespace,
            "shard": error.shard,
            "key": error.key,
            "reason": error.reason,
        }
        for error in errors
    ]
    try:
        await request.answer(protocol.dump({"errors": told}))
    except BaseException:
        store.keep_errors(errors)
        raise


OPERATIONS: dict[int, Callable[[Request], Awaitable[None]]] = {
    Op.HELLO: hello,
    Op.NAMESPACE: open_namespace,
    Op.REGISTER: register,
    Op.UNREGISTER: unregister,
    Op.PUT: put,
    Op.GET: get,
    Op.STREAM_GET: get,
    Op.CONTAINS: contains,
    Op.TOUCH: touch,
    Op.DELETE: delete,
    Op.PIN: pin,
    Op.UNPIN: unpin,
    Op.FLUSH: flush,
    Op.CANCEL: cancel,
    Op.SUBSCRIBE: subscribe,
    Op.ADMIN: administer,
}

"""Operations of the store with an answer that somebody waits for, and answers that come later."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from kvstore.answers import BlockStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.backends.base import U8
    from kvstore.batch import PutRequest
    from kvstore.keys import KeyArray
    from kvstore.namespaces import Namespace
    from kvstore.server import Server
    from kvstore.slab import Extent
    from kvstore.store import Store
    from kvstore.writer import LateError


async def put(
    server: Server,
    store: Store,
    request: PutRequest,
    sources: Sequence[memoryview],
    received: list[Extent | None] | None,
    limit: float,
) -> U8:
    """Put blocks and wait for the answer: nobody reads the sources any more."""
    answered = asyncio.get_running_loop().create_future()
    job = await server.with_room(lambda: store.put(request, sources, received), limit)
    task = server.start(job)
    job.when_answered(partial(_mark, answered))
    # A fault in bringing it home would leave it without an answer for ever.
    task.add_done_callback(lambda task: _mark(answered) if task.exception() else None)
    await server.settled([task, answered])
    task.result()
    if job.failure is not None:
        raise job.failure
    return job.statuses


async def delete(
    server: Server, store: Store, namespace: Namespace, shard: int, wanted: KeyArray
) -> U8:
    """Delete blocks; answered when no record is left that a rebuild could bring back."""
    loop = asyncio.get_running_loop()
    statuses, removals = store.delete(namespace, shard, wanted)
    done = [loop.create_future() for _ in removals]
    for removal, future in zip(removals, done, strict=True):
        removal.when_done(partial(_mark, future))
    await server.settled([server.start(removals[0]), *done])
    if any(removal.failure is not None for removal in removals):
        statuses[statuses == BlockStatus.OK] = BlockStatus.FAILED
    return statuses


async def flush(server: Server, store: Store, may_hear: Callable[[str], bool]) -> list[LateError]:
    """Make everything durable; return what failed since the last flush, of the namespaces (ids
    in hex) that the client may hear of. The rest waits for those who may."""
    barrier, answered = store.flush(), asyncio.get_running_loop().create_future()
    barrier.when_answered(partial(_mark, answered))
    server.dispatch()
    await answered
    if barrier.failure is not None:
        raise barrier.failure
    return store.take_errors(may_hear)


def _mark(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

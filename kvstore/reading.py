"""The gets that answer one request, in the order of its keys.

A request may name more than fits in memory at once, so it becomes several gets; while the caller
sends one, the next is read. Only the first waits for memory: whoever holds some never waits for
more.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvstore.errors import Busy

if TYPE_CHECKING:
    import asyncio

    from kvstore.get import Get
    from kvstore.keys import KeyArray
    from kvstore.mapped import Region
    from kvstore.namespaces import Namespace
    from kvstore.protocol import U32, U64
    from kvstore.server import Server
    from kvstore.store import Store

GET_BUDGET = 16 << 20
"""Bytes of memory that one get may take; see :class:`~kvstore.get.Get`."""
FIRST_BUDGET = 1 << 20
"""The same for the first get of a stream, whose blocks are wanted as soon as they are there ..."""
STREAM_BUDGET = 8 << 20
"""... and for the later ones, each of which may take more than the one before: few cost less."""
_GROWTH = 4
DEPTH = 2
"""Gets under way at a time."""
FIRST_KEYS = 256
SLICE_KEYS = 4096
"""Keys that are looked up at a time, so that nobody waits for a long question of another."""


class Targets:
    """Where the blocks of a get go: rows of a region, offset and capacity for each key."""

    def __init__(self, region: Region, offsets: U64, capacities: U32) -> None:
        self._region = region
        self._offsets = offsets
        self._capacities = capacities

    def rows(self, part: slice) -> list[memoryview]:
        return self._region.rows(self._offsets[part], self._capacities[part])


class Reading:
    """Reads ``keys``, into ``targets`` if given; ``stream``: a few at first, then more."""

    def __init__(
        self,
        server: Server,
        store: Store,
        where: tuple[Namespace, int],
        keys: KeyArray,
        targets: Targets | None,
        *,
        stream: bool,
    ) -> None:
        self._server = server
        self._store = store
        self._namespace, self._shard = where
        self._keys = keys
        self._budget = FIRST_BUDGET if stream else GET_BUDGET
        self._most = STREAM_BUDGET if stream else GET_BUDGET
        self._targets = targets
        self._start = 0
        self._ahead = FIRST_KEYS
        self._under_way: deque[tuple[Get, asyncio.Task[None]]] = deque()
        self._cancelled = False

    @property
    def more(self) -> bool:
        """Whether keys are left after what :meth:`next` returned last."""
        return bool(self._under_way) or self._start < len(self._keys)

    async def next(self, limit: float) -> Get:
        """Return the next get, done; hand it to :meth:`used` afterwards.

        Waits for memory until ``limit``, a time of the event loop. Raises Busy and the failure of
        the get.
        """
        if not self._under_way:
            self._under_way.append(await self._server.with_room(self._begin, limit))
        while len(self._under_way) < DEPTH and self._start < len(self._keys):
            try:
                self._under_way.append(self._begin())
            except Busy:
                break
        job, task = self._under_way[0]
        await self._server.settled([task])
        task.result()
        if job.failure is not None:
            raise job.failure
        self._under_way.popleft()
        return job

    def _begin(self) -> tuple[Get, asyncio.Task[None]]:
        part = slice(self._start, self._start + self._ahead)
        targets = None if self._targets is None else self._targets.rows(part)
        job = self._store.get(self._namespace, self._shard, self._keys[part], self._budget, targets)
        self._start += job.count
        self._budget = min(_GROWTH * self._budget, self._most)
        # What fits the memory once will do so again: look up no more than that ahead.
        self._ahead = min(SLICE_KEYS, max(FIRST_KEYS, 2 * job.count))
        return job, self._server.start(job)

    def used(self, job: Get) -> None:
        """Give the memory of a get back."""
        job.close()
        self._server.memory_changed()

    def cancel(self) -> None:
        """Have the gets under way skip what they have not begun."""
        for job, _ in self._under_way:
            job.cancel()

    async def close(self) -> None:
        """Wait for the last access of what is still under way, and give its memory back."""
        self.cancel()
        try:
            await self._server.settled([task for _, task in self._under_way])
        finally:
            for job, _ in self._under_way:
                self.used(job)
            self._under_way.clear()

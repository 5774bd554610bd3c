"""The gets that answer one request, in the order of its keys.

A request may name more than fits in memory at once, so it becomes several gets; while the caller
sends one, the next is read. Only the first waits for memory: whoever holds some never waits for
more.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

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
"""Bytes of memory that one get may take."""
STREAM_BUDGET = 4 << 20
"""The same where the client wants each block as soon as possible."""
DEPTH = 2
"""Gets under way at a time."""
FIRST_KEYS = 256
SLICE_KEYS = 4096
"""Keys that are looked up at a time, so that nobody waits for a long question of another."""
_PAGES = 8192
"""What a block takes besides its payload, at most: its header page and padding."""


class Targets:
    """Where the blocks of a get go: rows of a region, offset and capacity for each key."""

    def __init__(self, region: Region, offsets: U64, capacities: U32) -> None:
        self._region = region
        self._offsets = offsets
        self._capacities = capacities
        self._ends = np.cumsum(capacities.astype(np.int64) + _PAGES)

    def fitting(self, start: int, budget: int) -> int:
        """Return how many rows from ``start`` on hold at most ``budget`` bytes, at least one."""
        before = int(self._ends[start - 1]) if start else 0
        stop = int(np.searchsorted(self._ends, before + budget, "right"))
        return max(1, stop - start)

    def rows(self, part: slice) -> list[memoryview]:
        return self._region.rows(self._offsets[part], self._capacities[part])


class Reading:
    """Reads ``keys`` in gets of at most ``budget`` bytes of memory, into ``targets`` if given."""

    def __init__(
        self,
        server: Server,
        store: Store,
        where: tuple[Namespace, int],
        keys: KeyArray,
        budget: int,
        targets: Targets | None,
    ) -> None:
        self._server = server
        self._store = store
        self._namespace, self._shard = where
        self._keys = keys
        self._budget = budget
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
        part = self._next_part()
        targets = None if self._targets is None else self._targets.rows(part)
        job = self._store.get(self._namespace, self._shard, self._keys[part], self._budget, targets)
        self._start += job.count
        # What fits the memory once will do so again: look up no more than that ahead.
        self._ahead = min(SLICE_KEYS, max(FIRST_KEYS, 2 * job.count))
        return job, self._server.start(job)

    def _next_part(self) -> slice:
        count = self._ahead
        if self._targets is not None:
            count = min(SLICE_KEYS, self._targets.fitting(self._start, self._budget))
        return slice(self._start, self._start + count)

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

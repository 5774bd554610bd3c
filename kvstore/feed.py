"""What a client subscribed to: stored and removed keys of one namespace, sent as they happen.

The store calls back on its own thread and waits for nobody, so a client that reads slowly loses
events: at most ``MAX_KEYS`` keys wait for it, later ones are dropped, and the first frame after a
loss says so by the flag GAP (the sequence numbers tell how many).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from kvstore.protocol import MAX_KEYS, Flag, Op
from kvstore.wire import Gone

if TYPE_CHECKING:
    from kvstore.connection import Connection
    from kvstore.keys import KeyArray
    from kvstore.namespaces import Namespace
    from kvstore.protocol import U8, Frame
    from kvstore.store import Store

FEEDS = 64
"""Subscriptions of one connection."""


class _Batch(NamedTuple):
    first: int
    kinds: U8
    keys: KeyArray
    flags: int


class Feed:
    """One subscription of a connection, made by the request ``frame``."""

    def __init__(
        self, connection: Connection, frame: Frame, store: Store, namespace: Namespace
    ) -> None:
        self._connection = connection
        self._frame = frame
        self._waiting: deque[_Batch] = deque()
        self._keys_waiting = 0
        self._lost = False
        self._there = asyncio.Event()
        self._subscription = store.subscribe(namespace, self._take)
        self._task: asyncio.Task[None] | None = None

    @property
    def next_sequence(self) -> int:
        return self._subscription.next_sequence

    def _take(self, first: int, kinds: U8, keys: KeyArray) -> None:
        """Keep events to be sent (called by the store, on the thread of the event loop)."""
        for start in range(0, len(kinds), MAX_KEYS):
            part = slice(start, start + MAX_KEYS)
            self._keep(first + start, kinds[part], keys[part])

    def _keep(self, first: int, kinds: U8, keys: KeyArray) -> None:
        if self._waiting and self._keys_waiting + len(kinds) > MAX_KEYS:
            self._lost = True
            return
        flags = Flag.GAP if self._lost else 0
        self._lost = False
        self._waiting.append(_Batch(first, kinds, keys, flags))
        self._keys_waiting += len(kinds)
        self._there.set()

    def start(self) -> None:
        """Send from now on; the request itself has been answered."""
        self._task = asyncio.get_running_loop().create_task(self._send())

    async def _send(self) -> None:
        try:
            while True:
                await self._there.wait()
                batch = self._waiting.popleft()
                self._keys_waiting -= len(batch.kinds)
                if not self._waiting:
                    self._there.clear()
                await self._connection.send(
                    self._frame,
                    batch.first.to_bytes(8, "little")
                    + batch.kinds.tobytes()
                    + batch.keys.tobytes(),
                    op=Op.EVENT,
                    count=len(batch.kinds),
                    key_length=batch.keys.shape[1],
                    flags=batch.flags,
                )
        except Gone:
            self._subscription.close()

    async def close(self) -> None:
        """End the subscription; no event is sent afterwards."""
        self._subscription.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

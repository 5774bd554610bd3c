"""The asyncio client: the operations of :mod:`kvstore.operations`, awaited.

::

    async with AsyncClient("/run/kvstore/kvstore.sock") as client:
        await client.put(key, block)
        block = await client.get(key)

Of one event loop at a time. Standard library and numpy only: model servers import this module.
"""

from __future__ import annotations

import asyncio
import select
import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.operations import Operations, Sizes, Staging
from kvstore.regions import DEFAULT_TOTAL_BYTES

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from kvstore.credentials import Credentials
    from kvstore.exchange import Connection, Pending
    from kvstore.tls import Encrypted
    from kvstore.waiting import Address, Lock

__all__ = ["AsyncClient", "Sizes", "Staging"]

T = TypeVar("T")

LONG_BYTES = 1 << 20
"""Copying more than this is left to a thread, so that the event loop goes on."""


class AsyncClient(Operations):
    """Talks to the daemon at ``address``, as :class:`~kvstore.client.Client` does.

    ``timeout`` is in seconds, for every call that names none.
    """

    def __init__(
        self,
        address: str,
        timeout: float = 30.0,
        *,
        staging_bytes: int = DEFAULT_TOTAL_BYTES,
        check: bool | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        super().__init__(
            address,
            timeout,
            Loop,
            staging_bytes=staging_bytes,
            check=check,
            credentials=credentials,
        )

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Loop:
    """The :class:`~kvstore.waiting.Port` of the asyncio client."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def connect(self, address: Address, limit: float) -> socket.socket:
        sock, where = address.socket()
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            if address.port:
                await _within(limit, asyncio.ensure_future(loop.sock_connect(sock, where)))
            else:
                sock.connect(where)  # at once or not at all: asyncio takes a full queue for success
        except BaseException:
            sock.close()
            raise
        return sock

    async def handshake(self, sock: Encrypted, limit: float) -> None:
        loop, number = asyncio.get_running_loop(), sock.fileno()
        while events := sock.advance():
            ready: asyncio.Future[None] = loop.create_future()
            reading = bool(events & select.POLLIN)
            (loop.add_reader if reading else loop.add_writer)(number, _settle, ready)
            try:
                await _within(limit, ready)
            finally:
                (loop.remove_reader if reading else loop.remove_writer)(number)

    def serves(self, connection: Connection) -> bool:
        if self._loop is asyncio.get_running_loop():
            return True
        self._locks.clear()
        return False

    def attach(self, connection: Connection) -> None:
        loop, number = asyncio.get_running_loop(), connection.fileno()
        self._loop = loop
        loop.add_reader(number, connection.service)

        def leave() -> None:
            if not loop.is_closed():
                loop.remove_reader(number)
                loop.remove_writer(number)

        connection.on_break = leave

    async def wait(self, connection: Connection, pending: Pending, limit: float) -> None:
        loop = asyncio.get_running_loop()
        self._send(loop, connection)
        while not pending.ready and time.monotonic() < limit:
            changed: asyncio.Future[None] = loop.create_future()

            wake = partial(_settle, changed)
            pending.notify = wake
            timer = loop.call_later(min(limit - time.monotonic(), 3600), wake)
            try:
                await changed
            finally:
                pending.notify = None
                timer.cancel()

    @staticmethod
    def _send(loop: asyncio.AbstractEventLoop, connection: Connection) -> None:
        """Have the rest sent when the socket takes it."""
        if connection.broken is not None or not connection.unsent():
            return

        def ready() -> None:
            connection.service()
            if connection.broken is None and not connection.unsent():
                loop.remove_writer(connection.fileno())

        loop.add_writer(connection.fileno(), ready)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def work(self, nbytes: int, act: Callable[[], T]) -> T:
        if nbytes < LONG_BYTES:
            return act()
        task = asyncio.get_running_loop().run_in_executor(None, act)
        # Whoever is cancelled meanwhile learns of it afterwards: the thread still uses the memory.
        cancelled = False
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError
        return task.result()

    async def lock(self, name: str, limit: float) -> Lock:
        lock = self._locks.setdefault(name, asyncio.Lock())
        step = asyncio.ensure_future(lock.acquire())
        try:
            await _within(limit, step)
        except BaseException:
            if step.done() and not step.cancelled():
                lock.release()
            raise
        return lock


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _within(limit: float, step: asyncio.Future[Any]) -> None:
    """Await a step until ``limit``, then give it up. Raises TimeoutError."""
    try:
        await asyncio.wait({step}, timeout=max(limit - time.monotonic(), 0.001))
        if not step.done():
            raise TimeoutError
        step.result()
    finally:
        step.cancel()

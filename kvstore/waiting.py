"""How a client waits for its connection: by blocking a thread, or as its event loop says.

The operations of a client are coroutines (operations.py) that wait through a :class:`Port`. With
:class:`Threads` they block and never give way, so that one step runs them to their end; one of the
waiting threads watches the socket for all of them. The asyncio client has a port of its own.

Standard library and numpy only: model servers import this module.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

from kvstore import errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.exchange import Connection, Pending
    from kvstore.tls import Encrypted

T = TypeVar("T")


class Address(NamedTuple):
    """Where the daemon listens: the path of a Unix socket, or host and port."""

    path: str
    port: int = 0
    tls: bool = False

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``/path/to/socket``, ``tls://HOST:PORT`` or, unencrypted, ``tcp://HOST:PORT``.

        Raises UsageError.
        """
        scheme, found, place = text.partition("://")
        if scheme not in ("tcp", "tls") or not found:
            return cls(text.removeprefix("unix://"))
        host, _, port = place.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise errors.UsageError(
                f"address {text} is not understood", f"write {scheme}://HOST:PORT"
            )
        return cls(host.strip("[]"), int(port), scheme == "tls")

    def socket(self) -> tuple[socket.socket, str | tuple[str, int]]:
        """Return a new socket and what to connect it to."""
        if not self.port:
            return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), self.path
        family = socket.AF_INET6 if ":" in self.path else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock, (self.path, self.port)


class Lock(Protocol):
    """What :meth:`Port.lock` returns."""

    def release(self) -> None: ...


class Port(Protocol):
    """How a client waits: by blocking its thread, or by giving way to an event loop.

    ``limit`` is a time of time.monotonic().
    """

    async def connect(self, address: Address, limit: float) -> socket.socket:
        """Return a connected socket. Raises OSError: BlockingIOError when the queue is full."""

    async def handshake(self, sock: Encrypted, limit: float) -> None:
        """Agree on keys. Raises OSError."""

    def attach(self, connection: Connection) -> None:
        """Take care of a new connection."""

    def serves(self, connection: Connection) -> bool:
        """Tell whether a connection can be waited for here and now."""

    async def wait(self, connection: Connection, pending: Pending, limit: float) -> None:
        """Return when the request is ready or the time has passed."""

    async def sleep(self, seconds: float) -> None: ...

    async def work(self, nbytes: int, act: Callable[[], T]) -> T:
        """Do something that takes as long as copying so many bytes."""

    async def lock(self, name: str, limit: float) -> Lock:
        """Acquire a lock of this client. Raises TimeoutError."""


class Turns:
    """Whose turn it is to watch the socket: one waiting thread does it, the others sleep."""

    def __init__(self) -> None:
        self._led = False
        self._followers: dict[Pending, threading.Event] = {}
        self._lock = threading.Lock()

    def take(self, pending: Pending) -> threading.Event | None:
        """Take the turn and return None, or return what to sleep on."""
        with self._lock:
            if not self._led:
                self._led = True
                return None
            event = self._followers[pending] = threading.Event()
            pending.notify = event.set
            return event

    def pass_on(self) -> None:
        """End one's turn."""
        with self._lock:
            self._led = False
            self._wake()

    def leave(self, pending: Pending) -> None:
        """Stop sleeping, for whatever reason; a turn that was offered is offered to the next."""
        with self._lock:
            del self._followers[pending]
            pending.notify = None
            if not self._led:
                self._wake()

    def _wake(self) -> None:
        for event in self._followers.values():
            event.set()
            return


class Threads:
    """The :class:`Port` of the blocking client: its coroutines never give way."""

    def __init__(self) -> None:
        self._locks: dict[str, threading.Lock] = {}
        self._turns: WeakKeyDictionary[Connection, Turns] = WeakKeyDictionary()

    async def connect(self, address: Address, limit: float) -> socket.socket:
        sock, where = address.socket()
        try:
            sock.settimeout(max(limit - time.monotonic(), 0.001))
            sock.connect(where)
        except BaseException:
            sock.close()
            raise
        return sock

    async def handshake(self, sock: Encrypted, limit: float) -> None:
        sock.settimeout(max(limit - time.monotonic(), 0.001))
        sock.do_handshake()

    def attach(self, connection: Connection) -> None:
        self._turns[connection] = Turns()

    def serves(self, connection: Connection) -> bool:
        return True

    async def wait(self, connection: Connection, pending: Pending, limit: float) -> None:
        while not pending.ready:
            turns = self._turns[connection]
            left = limit - time.monotonic()
            if left <= 0:
                return
            if connection.unsent(pending):
                connection.watch(select.POLLIN | select.POLLOUT, left)
                continue
            event = turns.take(pending)
            if event is None:
                try:
                    self._lead(connection, pending, limit)
                finally:
                    turns.pass_on()
                continue
            try:
                # The reply may have come before the event was there to tell it.
                if not pending.ready:
                    event.wait(left)
            finally:
                turns.leave(pending)

    @staticmethod
    def _lead(connection: Connection, pending: Pending, limit: float) -> None:
        while not pending.ready and (left := limit - time.monotonic()) > 0:
            # Requests that nobody waits for yet go on being sent too.
            more = select.POLLOUT if connection.unsent() else 0
            connection.watch(select.POLLIN | more, left)

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def work(self, nbytes: int, act: Callable[[], T]) -> T:
        return act()

    async def lock(self, name: str, limit: float) -> Lock:
        lock = self._locks.setdefault(name, threading.Lock())
        if not lock.acquire(timeout=max(limit - time.monotonic(), 0)):
            raise TimeoutError
        return lock

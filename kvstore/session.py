"""One client's dealings with the daemon: connect, register memory, ask, give up, begin anew.

A session belongs to the process that made it; after a fork the child's first call begins its own.

Standard library and numpy only: model servers import this module.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kvstore import errors, protocol, requests
from kvstore.credentials import Credentials, is_loopback, read_token
from kvstore.exchange import Connection, Pending, Reply
from kvstore.protocol import DEFAULT_HANDLE, Flag, Frame, Op
from kvstore.regions import Extent, Region, Regions
from kvstore.requests import CAN_CHECK, CHECKSUM, Request
from kvstore.waiting import Address

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncGenerator, Callable, Mapping

    from kvstore.waiting import Lock, Port

WORD_SECONDS = 0.2
"""Time that the daemon has, after the deadline, to say itself that it was missed."""
GRACE_SECONDS = 0.5
"""Time that it has to confirm a cancel before the request counts as unconfirmed."""
RETRY_SECONDS = 0.05
_MAX_DEADLINE_MS = 0xFFFFFFFF

_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


class Asked(NamedTuple):
    """A request that was sent and is to be answered by ``limit``."""

    request: Request
    limit: float
    connection: Connection
    pending: Pending


class Session:
    """The dealings with the daemon at ``address``; ``new_port`` makes what waits for it."""

    def __init__(
        self,
        address: str,
        new_port: Callable[[], Port],
        region_bytes: int,
        total_bytes: int,
        check: bool | None,
        credentials: Credentials | None = None,
    ) -> None:
        self.address = Address.parse(address)
        self._credentials = credentials or Credentials.of(os.environ)
        self._name = address
        self._new_port = new_port
        self._new_regions = partial(Regions, region_bytes, total_bytes)
        self._check = CAN_CHECK if check is None else check and CAN_CHECK
        self._records: dict[int, Mapping[str, object]] = {}
        self._begin()
        _sessions.add(self)

    def _begin(self) -> None:
        self.port = self._new_port()
        self.regions = self._new_regions()
        self._connection: Connection | None = None
        self._inline_only = False

    def after_fork(self) -> None:
        """In the child: leave the parent's connection and memory alone."""
        if self._connection is not None:
            self._connection.forget()
        self._begin()

    def close(self) -> None:
        """End the connection and let go of the memory that nobody uses."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self.regions.drop_idle()
        self.regions.dropped()

    @property
    def checks(self) -> bool:
        """Checksums are sent and compared on the present connection."""
        return self._connection is not None and self._connection.checksums

    def lost(self) -> bool:
        """Tell whether the daemon holds so much unconfirmed memory that all is a miss."""
        if self._connection is not None and self.regions.abandoned:
            self._connection.service()
        return self.regions.exhausted()

    # -- connecting -------------------------------------------------------------------------------

    async def connection(self, limit: float) -> Connection:
        """Return the connection, made anew if need be. Raises DaemonUnavailable."""
        current = self._usable()
        if current is not None:
            return current
        lock = await self._locked("connection", limit)
        try:
            current = self._usable()
            if current is None:
                current = self._connection = await self._connect(limit)
            return current
        finally:
            lock.release()

    def _usable(self) -> Connection | None:
        current = self._connection
        if current is not None:
            if not self.port.serves(current):
                current.close()
            current.service()  # the daemon may have closed it meanwhile
            if current.broken is None:
                return current
        return None

    async def _locked(self, name: str, limit: float) -> Lock:
        try:
            return await self.port.lock(name, limit)
        except TimeoutError:
            raise self._late() from None

    async def _connect(self, limit: float) -> Connection:
        told = {"version": protocol.VERSION, "pid": os.getpid(), **self._token()}
        sock = await self._socket(limit)
        connection = Connection(sock, self._name, encrypted=self.address.tls)
        self.port.attach(connection)
        try:
            reply = await self._one(connection, requests.spoken(Op.HELLO, told), limit)
            connection.greeted()
            answer = reply.meta.json()
            connection.checksums = self._check and answer.get("checksum") == CHECKSUM
            limits = answer.get("limits")
            if isinstance(limits, dict):
                connection.put_bytes = limits.get("put_bytes", protocol.PUT_BYTES)
        except BaseException:
            connection.close()
            raise
        return connection

    def _token(self) -> dict[str, str]:
        """Return what HELLO says besides, where the daemon may ask for it. Raises ConfigError."""
        if not self.address.port or self._credentials.token_file is None:
            return {}
        if not self.address.tls and not is_loopback(self.address.path):
            raise errors.ConfigError(
                f"the token would go to {self._name} unencrypted",
                "use tls://HOST:PORT, or no token",
            )
        return {"token": read_token(self._credentials.token_file)}

    async def _encrypted(self, sock: socket.socket, limit: float) -> socket.socket:
        """Return the encrypted form of a connection, the daemon having shown its certificate."""
        from kvstore import tls  # most clients do without

        try:
            sock = encrypted = tls.encrypt(sock, self._credentials, self.address.path)
            await self.port.handshake(encrypted, limit)
        except tls.NotTrusted as error:
            sock.close()
            raise errors.PermissionDenied(
                f"the daemon on {self._name} is not trusted: {error.verify_message}",
                "call it by a name in its certificate, and see KVSTORE_CA_FILE",
            ) from None
        except BaseException:
            sock.close()
            raise
        return encrypted

    async def _socket(self, limit: float) -> socket.socket:
        while True:
            try:
                sock = await self.port.connect(self.address, limit)
                return await self._encrypted(sock, limit) if self.address.tls else sock
            except OSError as error:
                # So many connect at the same time that the daemon's queue is full.
                full = isinstance(error, BlockingIOError)
                if not full or time.monotonic() + RETRY_SECONDS > limit:
                    raise self._unreachable(error) from error
            await self.port.sleep(RETRY_SECONDS)

    def _unreachable(self, error: OSError) -> errors.KVStoreError:
        if isinstance(error, PermissionError):
            return errors.PermissionDenied(
                f"no permission to connect to {self._name}",
                "run as the daemon's user or a member of its socket_group, or use another --socket",
            )
        reason = error.strerror or str(error)
        return errors.DaemonUnavailable(
            f"no daemon answers on {self._name} ({reason})",
            "start one with kvstore serve, or use --socket",
        )

    def _late(self) -> errors.DeadlineExceeded:
        return errors.DeadlineExceeded(
            f"the daemon on {self._name} did not answer in time",
            "see kvstore status, or give it more time",
        )

    # -- asking -----------------------------------------------------------------------------------

    async def ask(self, request: Request, limit: float) -> Reply:
        """Return the one reply to a request. Raises what the daemon answered, DeadlineExceeded."""
        return await self.answer(await self.send(request, limit))

    async def answer(self, asked: Asked) -> Reply:
        """Return the one reply to what was sent."""
        async with aclosing(self.replies(asked)) as replies:
            async for reply in replies:
                return reply
        raise errors.ProtocolError("a request ended without an answer", "upgrade kvstore")

    async def send(self, request: Request, limit: float, begin: float | None = None) -> Asked:
        """Send a request, for :meth:`replies` or :meth:`drop`.

        ``begin`` is the limit for what has to come before the request, if another one.
        """
        connection, ready = await self._ready(request, limit if begin is None else begin)
        return self._submit(connection, ready, limit)

    async def replies(self, asked: Asked, idle: float = math.inf) -> AsyncGenerator[Reply, None]:
        """Yield the replies to a request; Busy is repeated until its limit.

        Closing the iterator cancels the request. ``idle`` seconds at most pass between replies.
        """
        while True:
            answered = False
            try:
                async with aclosing(self._replies(asked, idle)) as replies:
                    async for reply in replies:
                        answered = True
                        yield reply
                return
            except errors.Busy:
                if answered or time.monotonic() + RETRY_SECONDS > asked.limit:
                    raise
                await self.port.sleep(RETRY_SECONDS)
            asked = await self.send(asked.request, asked.limit)

    async def drop(self, asked: Asked) -> None:
        """Let go of a request; without the daemon's word for it, its region is lost.

        Does nothing to one that was answered or let go of.
        """
        pending, extent = asked.pending, asked.request.extent
        if pending.done or pending.given_up:
            return
        try:
            await self._let_go(asked.connection, pending)
        finally:
            if extent is not None and not pending.done:
                self.regions.abandon(extent.region)

    async def _ready(self, request: Request, limit: float) -> tuple[Connection, Request]:
        """Add what belongs to the connection: the daemon's numbers of namespace and region."""
        connection = await self.connection(limit)
        handle = await self.handle(connection, request.scope.namespace, limit)
        region = protocol.INLINE
        if request.extent is not None:
            region = await self._number(connection, request.extent.region, limit)
        return connection, replace(
            request, frame=replace(request.frame, handle=handle, region=region)
        )

    def _submit(self, connection: Connection, request: Request, limit: float) -> Asked:
        frame = replace(request.frame, deadline_ms=_milliseconds(limit - time.monotonic()))
        pending = connection.submit(
            frame,
            request.meta,
            request.payload,
            extent=request.extent,
            descriptor=request.descriptor,
        )
        return Asked(request, limit, connection, pending)

    async def _one(self, connection: Connection, request: Request, limit: float) -> Reply:
        asked = self._submit(connection, request, limit)
        async with aclosing(self._replies(asked, math.inf)) as replies:
            return await anext(replies)

    async def _replies(self, asked: Asked, idle: float) -> AsyncGenerator[Reply, None]:
        connection, pending = asked.connection, asked.pending
        try:
            while not pending.done or pending.replies:
                until = min(asked.limit + WORD_SECONDS, time.monotonic() + idle)
                yield await self._next(connection, pending, until)
        except errors.ProtocolError as error:
            connection.close(error)
            raise
        finally:
            await self.drop(asked)

    async def _next(self, connection: Connection, pending: Pending, until: float) -> Reply:
        await self.port.wait(connection, pending, until)
        if pending.replies:
            reply = pending.replies.popleft()
            if reply.frame.flags & Flag.ERROR:
                raise protocol.error_from(reply.meta.json())
            return reply
        if pending.failure is not None:
            raise errors.again(pending.failure)
        raise self._late()

    async def _let_go(self, connection: Connection, pending: Pending) -> None:
        """Cancel a request and wait a little for the daemon to confirm."""
        if connection.broken is not None or connection.withdraw(pending):
            return
        with suppress(errors.KVStoreError):
            cancel = connection.cancel(pending)
            await self.port.wait(connection, cancel, time.monotonic() + GRACE_SECONDS)
            if not cancel.done:
                connection.withdraw(cancel)

    # -- namespaces -------------------------------------------------------------------------------

    async def open(self, record: Mapping[str, object], create: bool, limit: float) -> int:
        """Open a namespace; return the client's number of it."""
        connection = await self.connection(limit)
        handle = await self._open(connection, record, create, limit)
        number = len(self._records) + 1
        self._records[number] = dict(record)
        connection.handles[number] = handle
        return number

    async def handle(self, connection: Connection, namespace: int, limit: float) -> int:
        """Return the daemon's handle; on a new connection the namespace is opened again."""
        if namespace == DEFAULT_HANDLE:
            return DEFAULT_HANDLE
        if namespace not in connection.handles:
            record = self._records.get(namespace)
            if record is None:
                raise errors.UsageError(f"namespace {namespace} was never opened", "open it first")
            handle = await self._open(connection, record, False, limit)
            connection.handles[namespace] = handle
        return connection.handles[namespace]

    async def _open(
        self, connection: Connection, record: Mapping[str, object], create: bool, limit: float
    ) -> int:
        request = requests.spoken(Op.NAMESPACE, {"record": dict(record), "create": create})
        reply = await self._one(connection, request, limit)
        return _number_in(reply, "handle")

    # -- shared memory ----------------------------------------------------------------------------

    async def lease(self, nbytes: int, limit: float) -> Extent | None:
        """Lease memory that the daemon knows, or return None where blocks must travel inline.

        Raises Busy when too much memory is lost to a daemon that does not answer.
        """
        connection = await self.connection(limit)
        if not connection.shares_memory or self._inline_only or nbytes > protocol.MAX_REGION_BYTES:
            return None
        try:
            extent = self.regions.lease(nbytes)
        except (OSError, AttributeError):
            self._inline_only = True  # no memfd here, or no memory for it
            return None
        if extent is None:
            self._unregister(connection)
            return None
        try:
            self._unregister(connection)
            await self._number(connection, extent.region, limit)
        except BaseException as error:
            self.regions.release(extent)
            gone = isinstance(error, (errors.DaemonUnavailable, errors.DeadlineExceeded))
            if gone or not isinstance(error, errors.KVStoreError):
                raise
            connection.shares_memory = False  # the daemon wants no more of it
            return None
        return extent

    async def _number(self, connection: Connection, region: Region, limit: float) -> int:
        """Return the daemon's number of a region, which is registered if it is not yet."""
        if region.abandoned:
            raise errors.Busy("this memory is lost to a request that got no answer", "lease other")
        lock = await self._locked(f"region {region.fd}", limit)
        try:
            known = region.registered
            if known is None or known[0] is not connection:
                request = requests.spoken(Op.REGISTER, {"bytes": region.nbytes}, region.fd)
                # Unanswered, it may have been mapped all the same: then it is lost like others.
                request = replace(request, extent=Extent(region, 0, 0))
                reply = await self._one(connection, request, limit)
                known = region.registered = connection, _number_in(reply, "region")
                region.witness = connection.witness
            return known[1]
        finally:
            lock.release()

    def _unregister(self, connection: Connection) -> None:
        for region in self.regions.dropped():
            if region.registered is not None and region.registered[0] is connection:
                connection.submit(Frame(Op.UNREGISTER, region=region.registered[1]), b"")


def _milliseconds(seconds: float) -> int:
    if seconds == math.inf:
        return 0
    return max(1, min(int(seconds * 1000), _MAX_DEADLINE_MS))


def _number_in(reply: Reply, name: str) -> int:
    value = reply.meta.json().get(name)
    if not isinstance(value, int):
        raise errors.ProtocolError(f"the daemon's answer lacks {name!r}", "upgrade kvstore")
    return value


def _after_fork() -> None:
    for session in list(_sessions):
        session.after_fork()


os.register_at_fork(after_in_child=_after_fork)

"""One client of the daemon: frames in, requests under way, answers out.

A connection is one coroutine that reads frames, a task for each request, and a wire that takes one
frame at a time. Blocks that travel in the payload are received before the next frame is read. Not
reading is how a client is held back: no further frame is taken while it has ``max_requests`` under
way or ``max_client_bytes`` in them. Only what cancels a request is taken at any time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import replace
from socket import AF_UNIX
from typing import TYPE_CHECKING

from kvstore import protocol
from kvstore.errors import (
    Cancelled,
    KVStoreError,
    PermissionDenied,
    ProtocolError,
    UnknownNamespace,
)
from kvstore.guard import STRANGER_SECONDS
from kvstore.mapped import Regions
from kvstore.protocol import Flag, Frame, Op
from kvstore.service import OPERATIONS
from kvstore.underway import Request, weight
from kvstore.wire import Gone, Wire, close_all

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from kvstore.feed import Feed
    from kvstore.guard import Guard
    from kvstore.namespaces import Namespace
    from kvstore.peers import Peer
    from kvstore.server import Server
    from kvstore.store import Store

log = logging.getLogger(__name__)


class Connection:
    """Serves the client behind ``sock``, a non-blocking stream socket, until it goes.

    ``regions``, ``feeds`` (by request id) and namespace handles belong to the connection.
    ``guard``: what the client must do first; until then it is a :attr:`stranger`.
    """

    def __init__(
        self, server: Server, sock: socket.socket, peer: Peer, guard: Guard | None = None
    ) -> None:
        settings = server.settings
        self.server = server
        self.peer = peer
        self.local = sock.family == AF_UNIX
        self.guard = guard
        self.stranger = guard is not None
        self.regions = Regions(settings.max_client_regions, server.allowance)
        self.feeds: dict[int, Feed] = {}
        self._wire = Wire(sock, settings.request_timeout)
        self._handles: dict[int, Namespace] = {}
        self._under_way: dict[int, Request] = {}
        self._cancels: set[Request] = set()
        self._bytes = 0
        self._finished = asyncio.Event()

    # -- life -------------------------------------------------------------------------------------

    async def serve(self) -> None:
        try:
            if self.guard is not None:
                await self._meet(self.guard)
            await self._read_frames()
            await self._let_finish()
        except ProtocolError as error:
            log.warning("closing a client's connection: %s", error)
            with suppress(Gone):
                await self.send(Frame(Op.ADMIN), protocol.error_meta(error), flags=Flag.ERROR)
        except Gone as error:
            log.debug("client gone: %s", error)
        except Exception:
            # The outermost frame of a connection: the others go on.
            log.exception("a connection failed")
            self.server.count_failed_request()
        finally:
            await self._end()

    async def _meet(self, guard: Guard) -> None:
        """Let a stranger become a client. Raises Gone, ProtocolError."""
        try:
            async with asyncio.timeout(STRANGER_SECONDS):
                await self._wire.encrypt()
                if guard.token is not None:
                    await self._take_token(guard)
        except TimeoutError:
            raise Gone("it did not show who it is in time") from None
        self.stranger = False

    async def _take_token(self, guard: Guard) -> None:
        header = bytearray(protocol.HEADER_BYTES)
        if await self._wire.begin(header) is None:
            raise Gone("it said nothing")
        frame = protocol.unpack(header)
        try:
            guard.check_size(frame)
            request = await self._receive(frame, [])
            guard.check_token(request.meta.json())
        except PermissionDenied as error:
            log.warning("refusing the client at %s: %s", self.peer.address, error.message)
            await self.send(frame, protocol.error_meta(error), flags=Flag.ERROR)
            raise Gone(error.message) from None
        self._start(request)

    async def _read_frames(self) -> None:
        header = bytearray(protocol.HEADER_BYTES)
        while (descriptors := await self._wire.begin(header)) is not None:
            try:
                await self._take(protocol.unpack(header), descriptors)
            finally:
                close_all(descriptors)

    async def _take(self, frame: Frame, descriptors: list[int]) -> None:
        """Receive the rest of a frame and start what it asks for."""
        if frame.request in self._under_way or frame.request in self.feeds:
            raise ProtocolError(f"request {frame.request} is under way twice", "use new numbers")
        if frame.op == Op.CANCEL:
            await self._admit_cancel()
        else:
            await self._admit(frame)
        self._start(await self._receive(frame, descriptors))

    async def _receive(self, frame: Frame, descriptors: list[int]) -> Request:
        request = Request(self, frame)
        try:
            await request.receive(self._wire, descriptors)
        except BaseException:
            request.release()
            raise
        return request

    def _start(self, request: Request) -> None:
        frame = request.frame
        request.task = asyncio.get_running_loop().create_task(self._see_through(request))
        if frame.op == Op.CANCEL:
            self._cancels.add(request)
        else:
            self._bytes += weight(frame)
            self._under_way[frame.request] = request

    async def _admit(self, frame: Frame) -> None:
        """Hold the client back while too much of it is under way."""
        settings = self.server.settings
        while len(self._under_way) >= settings.max_requests or (
            self._under_way and self._bytes + weight(frame) > settings.max_client_bytes
        ):
            await self._any_finished()

    async def _admit_cancel(self) -> None:
        while len(self._cancels) >= self.server.settings.max_requests:
            await self._any_finished()

    async def _any_finished(self) -> None:
        self._finished.clear()
        await self._finished.wait()

    def _forget(self, request: Request) -> None:
        if request.frame.op == Op.CANCEL:
            self._cancels.discard(request)
        else:
            del self._under_way[request.frame.request]
            self._bytes -= weight(request.frame)
        self._finished.set()

    async def _let_finish(self) -> None:
        """Answer what is under way to a client that only stopped sending, or while we drain."""
        while (self._under_way or self._cancels) and not self._wire.hung_up():
            with suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await self._any_finished()

    async def _end(self) -> None:
        """Let go of everything, regions after the last access of the last request."""
        for request in self._under_way.values():
            request.cancel()
        self._wire.hang_up()
        tasks = {request.task for request in (*self._under_way.values(), *self._cancels)}
        if tasks:
            await asyncio.wait([task for task in tasks if task is not None])
        for feed in list(self.feeds.values()):
            await feed.close()
        self.feeds.clear()
        self.regions.close()
        self._wire.close()

    def drain(self) -> None:
        """Take no further request; end when those under way are answered."""
        self._wire.stop_reading()
        if self.stranger:
            self._wire.hang_up()

    # -- requests ---------------------------------------------------------------------------------

    async def _see_through(self, request: Request) -> None:
        """The outermost frame of a request: whatever happens in it, the client gets one answer."""
        error: KVStoreError | None = None
        began = time.perf_counter()
        try:
            request.begin()
            await OPERATIONS[request.frame.op](request)
            self._note_duration(request.frame.op, time.perf_counter() - began)
        except asyncio.CancelledError:
            error = Cancelled("the request was cancelled", "ask again if it is still wanted")
        except KVStoreError as raised:
            error = raised
        except Gone as gone:
            log.debug("client gone: %s", gone)
        except Exception as raised:
            log.exception("a request failed")
            self.server.count_failed_request()
            error = KVStoreError(f"the daemon failed: {raised!r}", "see its log")
        if error is not None:
            # Its traceback holds frames, they hold views of memory and the error: garbage for long.
            error.__traceback__ = None
        request.release()
        if error is not None and not request.answered:
            with suppress(Gone):
                await self.answer(request, protocol.error_meta(error), flags=Flag.ERROR)
        self._forget(request)

    def _note_duration(self, op: int, seconds: float) -> None:
        if op == Op.PUT:
            self.server.put_durations.note(seconds)
        elif op in (Op.GET, Op.STREAM_GET):
            self.server.get_durations.note(seconds)

    async def cancel(self, number: int) -> None:
        """Stop a request as early as possible; return after its answer and its last access."""
        if number in self._under_way:
            request = self._under_way[number]
            request.cancel()
            assert request.task is not None
            await asyncio.wait([request.task])
        if number in self.feeds:  # a SUBSCRIBE that was answered before
            await self.feeds.pop(number).close()

    def may_hear_of(self, identity: str) -> bool:
        """Tell whether this client may know what is in a namespace: it has opened it, or may."""
        return self.peer.administrator or any(
            known is not None and known.id.hex() == identity
            for known in (*self._handles.values(), self.server.default)
        )

    def open(self, namespace: Namespace) -> int:
        """Return the handle of a namespace on this connection."""
        for handle, known in self._handles.items():
            if known is namespace:
                return handle
        handle = len(self._handles) + 1
        self._handles[handle] = namespace
        return handle

    def namespace(self, store: Store, handle: int) -> Namespace:
        """Return the namespace of a handle. Raises UnknownNamespace."""
        if handle == protocol.DEFAULT_HANDLE:
            return self.server.default_namespace(store)
        if handle not in self._handles:
            raise UnknownNamespace(f"namespace handle {handle} is not open", "open it first")
        return self._handles[handle]

    # -- answers ----------------------------------------------------------------------------------

    async def answer(
        self,
        request: Request,
        meta: bytes,
        payloads: Sequence[memoryview] = (),
        *,
        count: int = 0,
        flags: int = 0,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Send a reply; without the flag MORE it is the last of its request."""
        async with self._wire.turn:
            request.answered = not flags & Flag.MORE
            await self._send(
                replace(request.frame, flags=flags, count=count), meta, payloads, descriptors
            )

    async def send(self, frame: Frame, meta: bytes, **changes: int) -> None:
        """Send a frame that is the answer to no request."""
        async with self._wire.turn:
            await self._send(replace(frame, **changes), meta)

    async def _send(
        self,
        frame: Frame,
        meta: bytes,
        payloads: Sequence[memoryview] = (),
        descriptors: Sequence[int] = (),
    ) -> None:
        header = replace(frame, meta_bytes=len(meta), payload_bytes=sum(map(len, payloads))).pack()
        await self._wire.send([memoryview(header + meta), *payloads], descriptors)

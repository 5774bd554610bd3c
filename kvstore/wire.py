"""The bytes of one connection: whole frames in, whole frames out.

One reader at a time; whoever writes takes :attr:`Wire.turn` first, so that the frames of two
replies never mix. A frame that was begun is written to its end even if the request that it answers
is cancelled meanwhile: half a frame would make the rest of the connection unreadable.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import select
import socket
from typing import TYPE_CHECKING

from kvstore.tls import Encrypted

if TYPE_CHECKING:
    from collections.abc import Sequence

_SCRATCH = 256 << 10
_PIECE = 64 << 10
_SEND_BUFFERS = 256
_TURN_BYTES = 1 << 20
"""What is taken or sent at most while others wait for the event loop: a fast client may never make
us wait, and to decrypt 64 MiB takes long."""
_DESCRIPTOR_BYTES = array.array("i").itemsize
_DESCRIPTOR_ROOM = socket.CMSG_SPACE(2 * _DESCRIPTOR_BYTES)
"""Room for two: one is right, the second tells that there were too many. The kernel closes more."""


class Gone(Exception):
    """The connection is of no more use: closed by the client, broken, or too slow."""


class Wire:
    """A non-blocking stream socket; ``patience``: seconds that one frame may take either way."""

    def __init__(self, sock: socket.socket, patience: float) -> None:
        self.turn = asyncio.Lock()
        self._sock = sock
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._between: asyncio.Future[None] | None = None
        self._ended = False
        self._turn_bytes = 0

    def _turn_is_over(self, count: int) -> bool:
        self._turn_bytes += count
        if self._turn_bytes < _TURN_BYTES:
            return False
        self._turn_bytes = 0
        return True

    async def encrypt(self) -> None:
        """Agree on keys with the client, where the socket is encrypted. Raises Gone."""
        if not isinstance(self._sock, Encrypted):
            return
        limit = self._loop.time() + self._patience
        try:
            while events := self._sock.advance():
                await (self._readable if events & select.POLLIN else self._writable)(limit)
        except OSError as error:
            raise Gone(f"no encryption was agreed on: {error}") from error

    # -- in ---------------------------------------------------------------------------------------

    async def begin(self, header: bytearray) -> list[int] | None:
        """Wait for the next frame, as long as it takes, and fill ``header``.

        Returns the descriptors that came with its first bytes, the caller's to close; None when the
        client will send no more or :meth:`stop_reading` was called.
        """
        descriptors: list[int] = []
        view = memoryview(header)
        limit: float | None = None
        try:
            while view:
                if limit is None and self._ended:
                    return None
                got = self._receive_with(view, descriptors)
                if got is None:
                    await self._readable(limit)
                    continue
                if not got and limit is None:
                    return None
                view = view[self._some(got) :]
                limit = limit or self._loop.time() + self._patience
        except BaseException:
            close_all(descriptors)
            raise
        return descriptors

    def _receive_with(self, view: memoryview, descriptors: list[int]) -> int | None:
        """Receive what is there, descriptors too; None if nothing is."""
        try:
            got, ancillary, _, _ = self._sock.recvmsg_into(
                [view], _DESCRIPTOR_ROOM, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            raise Gone(str(error)) from error
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(data) - len(data) % _DESCRIPTOR_BYTES
                descriptors += array.array("i", data[:whole])
        return got

    async def receive(self, view: memoryview) -> None:
        """Fill ``view`` with what comes next in the frame. Raises Gone."""
        limit = self._loop.time() + self._patience
        while view:
            view = view[await self._receive_some(view, limit) :]

    async def take(self, length: int) -> bytearray:
        """Return the next ``length`` bytes of the frame. Raises Gone.

        Memory grows with what has arrived: a header alone, which may announce MiBs, takes none.
        """
        limit = self._loop.time() + self._patience
        data, at = bytearray(min(length, _PIECE)), 0
        while at < length:
            if at == len(data):
                data.extend(bytes(min(at, length - at)))
            with memoryview(data) as whole, whole[at:] as rest:
                at += await self._receive_some(rest, limit)
        return data

    async def skip(self, length: int) -> None:
        """Read ``length`` bytes that nobody wants. Raises Gone."""
        limit = self._loop.time() + self._patience
        scratch = memoryview(bytearray(min(_SCRATCH, length)))
        while length:
            length -= await self._receive_some(scratch[: min(len(scratch), length)], limit)

    async def _receive_some(self, view: memoryview, limit: float) -> int:
        while True:
            try:
                got = self._some(self._sock.recv_into(view))
                if self._turn_is_over(got):
                    await asyncio.sleep(0)
                return got
            except (BlockingIOError, InterruptedError):
                await self._readable(limit)
            except OSError as error:
                raise Gone(str(error)) from error

    @staticmethod
    def _some(got: int) -> int:
        if not got:
            raise Gone("the client went in the middle of a frame")
        return got

    async def _readable(self, limit: float | None) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        self._between = ready if limit is None else None
        self._loop.add_reader(self._sock, _settle, ready)
        try:
            await self._in_time(ready, limit)
        finally:
            self._between = None
            self._loop.remove_reader(self._sock)

    async def _in_time(self, ready: asyncio.Future[None], limit: float | None) -> None:
        if limit is None:
            await ready
            return
        timer = self._loop.call_at(limit, _settle, ready, Gone("the client is too slow"))
        try:
            await ready
        finally:
            timer.cancel()

    def stop_reading(self) -> None:
        """Begin no further frame; one that has begun is read to its end."""
        self._ended = True
        if self._between is not None:
            _settle(self._between)

    def hung_up(self) -> bool:
        """Tell whether the client has closed its end, not only stopped sending."""
        poll = select.poll()
        poll.register(self._sock, 0)
        return any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))

    # -- out --------------------------------------------------------------------------------------

    async def send(self, views: list[memoryview], descriptors: Sequence[int] = ()) -> None:
        """Write one frame to its end; the caller holds :attr:`turn`. Raises Gone.

        A cancellation is raised after the last byte.
        """
        limit = self._loop.time() + self._patience
        at, cancelled = 0, False
        while at < len(views):
            sent = self._send_some(views[at : at + _SEND_BUFFERS], descriptors)
            if sent is None or self._turn_is_over(sent):
                try:
                    await (self._writable(limit) if sent is None else asyncio.sleep(0))
                except asyncio.CancelledError:
                    cancelled = True
            if sent is None:
                continue
            descriptors = ()
            while at < len(views) and sent >= len(views[at]):
                sent -= len(views[at])
                at += 1
            if sent:
                views[at] = views[at][sent:]
        if cancelled:
            raise asyncio.CancelledError

    def _send_some(self, views: list[memoryview], descriptors: Sequence[int]) -> int | None:
        """Write what the socket takes now; None if that is nothing."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        try:
            return self._sock.sendmsg(views, rights if descriptors else [])
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            raise Gone(str(error)) from error

    async def _writable(self, limit: float) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_writer(self._sock, _settle, ready)
        try:
            await self._in_time(ready, limit)
        except Gone:
            self.hang_up()
            raise
        finally:
            self._loop.remove_writer(self._sock)

    def hang_up(self) -> None:
        """Tell both sides that it is over; the reader wakes up."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


def _settle(future: asyncio.Future[None], error: Exception | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def close_all(descriptors: list[int]) -> None:
    """Close descriptors that a client sent, and forget them."""
    while descriptors:
        os.close(descriptors.pop())

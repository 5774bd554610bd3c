"""A client's connection: many requests under way on it, replies matched by their request ids.

A :class:`Connection` never blocks: it sends and receives what the socket takes and gives. How to
wait for more is decided in waiting.py.

Standard library and numpy only: model servers import this module.
"""

from __future__ import annotations

import itertools
import math
import os
import select
import socket
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore import errors, protocol
from kvstore.protocol import Flag, Frame, Op
from kvstore.regions import Witness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore.regions import Extent

MAX_PENDING = 4096
MAX_EVENTS = 1024
"""Frames of events that wait for a slow reader; those after them are lost, and said to be."""
_SEND_BUFFERS = 256
_BUFFER_BYTES = 64 << 10
_TURNS = 64
_SOCKET_BYTES = 4 << 20


class Reply(NamedTuple):
    """One frame of an answer."""

    frame: Frame
    meta: protocol.Meta
    payload: memoryview


class Pending:
    """A request under way. ``extent``, if any, is the daemon's until ``done``."""

    def __init__(self, frame: Frame, extent: Extent | None, cancels: Pending | None) -> None:
        self.frame = frame
        self.extent = extent
        self.cancels = cancels
        self.replies: deque[Reply] = deque()
        self.done = False
        """The daemon has answered finally or confirmed a cancel: it touches nothing any more."""
        self.failure: errors.KVStoreError | None = None
        self.given_up = False
        self.lost_events = False
        self.notify: Callable[[], None] | None = None

    @property
    def ready(self) -> bool:
        """There is something to look at: a reply, the end, or a failure."""
        return bool(self.replies) or self.done or self.failure is not None

    def changed(self) -> None:
        notify = self.notify  # whoever waits may leave meanwhile, in another thread
        if notify is not None:
            notify()


@dataclass
class _Outgoing:
    """A frame that has not been sent wholly, and the descriptor that goes with its first byte."""

    pending: Pending
    parts: list[memoryview]
    descriptor: int | None
    begun: bool = False


class Connection:
    """One stream to the daemon. Thread-safe; ``peer`` is how messages call the daemon.
    ``encrypted``: the socket is a :class:`~kvstore.tls.Encrypted`.

    Once ``broken`` is set the connection is of no use, and requests that were under way on it are
    never ``done``.
    """

    def __init__(self, sock: socket.socket, peer: str, *, encrypted: bool = False) -> None:
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
        self.peer = peer
        self.shares_memory = sock.family == socket.AF_UNIX
        self.checksums = False
        self.put_bytes = protocol.PUT_BYTES
        self.witness = Witness()
        self.handles: dict[int, int] = {}
        """The client's numbers of namespaces -> the daemon's handles on this connection."""
        self.broken: errors.KVStoreError | None = None
        self.on_break: Callable[[], None] | None = None
        self._sock = sock
        self._encrypted = encrypted
        self._fds: list[int] = []
        self._greeted = False
        self._ids = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self._out: deque[_Outgoing] = deque()
        self._lock = threading.RLock()
        self._watchers = 0
        self._buffer = bytearray(_BUFFER_BYTES)
        self._parser: Iterator[memoryview] = self._parse()
        self._want = next(self._parser)

    # -- requests ---------------------------------------------------------------------------------

    def submit(
        self,
        frame: Frame,
        meta: bytes,
        payload: Sequence[memoryview] = (),
        *,
        extent: Extent | None = None,
        descriptor: int | None = None,
        cancels: Pending | None = None,
    ) -> Pending:
        """Queue a request and send what the socket takes. Raises what broke the connection."""
        with self._lock:
            if self.broken is not None:
                raise errors.again(self.broken)
            if len(self._pending) >= MAX_PENDING:
                raise errors.Busy(f"{MAX_PENDING} requests wait for an answer", "wait for some")
            frame = replace(
                frame,
                request=next(self._ids),
                meta_bytes=len(meta),
                payload_bytes=sum(map(len, payload)),
            )
            pending = Pending(frame, extent, cancels)
            self._pending[frame.request] = pending
            if extent is not None:
                extent.begin()
            parts = [memoryview(frame.pack() + meta), *payload]
            self._out.append(_Outgoing(pending, parts, descriptor))
        self.service(read=False)
        return pending

    def cancel(self, pending: Pending) -> Pending:
        """Ask the daemon to let go of a request; its late replies are dropped from now on."""
        with self._lock:
            pending.given_up = True
            pending.replies.clear()
            meta = pending.frame.request.to_bytes(8, "little")
            return self.submit(Frame(Op.CANCEL), meta, cancels=pending)

    def withdraw(self, pending: Pending) -> bool:
        """Take a request back that has not been sent; return whether that was so.

        One that was sent in part breaks the connection: its buffers are the caller's again.
        """
        with self._lock:
            for outgoing in self._out:
                if outgoing.pending is pending:
                    if outgoing.begun:
                        self._break(self._gone("was closed in the middle of a request"))
                        return False
                    self._out.remove(outgoing)
                    self._finish(pending)
                    return True
            return False

    def unsent(self, pending: Pending | None = None) -> bool:
        """Tell whether this request, or any, waits to be sent."""
        with self._lock:
            return any(pending in (None, outgoing.pending) for outgoing in self._out)

    @property
    def under_way(self) -> int:
        return len(self._pending)

    # -- the socket -------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._sock.fileno()

    def service(self, *, read: bool = True) -> None:
        """Send and receive what is possible now; errors break the connection, and are kept."""
        with self._lock:
            if self.broken is not None:
                return
            try:
                self._write()
                if read:
                    self._read()
            except errors.KVStoreError as error:
                self._break(error)
            except OSError as error:
                self._break(self._gone(f"broke ({error.strerror or error})"))
            except BaseException:
                # Interrupted between two bytes: where the next frame begins is no longer known.
                self._break(self._gone("was interrupted"))
                raise

    def watch(self, events: int, seconds: float) -> None:
        """Wait until the socket is ready for ``events`` (of select.poll), then service it."""
        poll = select.poll()
        with self._lock:
            if self.broken is not None:
                return
            poll.register(self._sock, events)
            self._watchers += 1
        try:
            poll.poll(math.ceil(min(max(seconds, 0), 3600) * 1000))
        finally:
            with self._lock:
                self._watchers -= 1
                self._dispose()
        self.service()

    def close(self, error: errors.KVStoreError | None = None) -> None:
        """End the connection; whoever waits on it is told of ``error``."""
        with self._lock:
            self._break(error or self._gone("was closed here"))

    def forget(self) -> None:
        """Drop a connection that belongs to the parent of this process, without ending it.

        Without the lock: the thread that held it during the fork is not in this process.
        """
        self.broken = self._gone("belongs to another process")
        self._sock.close()
        for pending in self._pending.values():
            pending.failure = self.broken

    def _gone(self, what: str) -> errors.DaemonUnavailable:
        return errors.DaemonUnavailable(
            f"the connection to the daemon on {self.peer} {what}",
            "see kvstore status and the daemon's log",
        )

    def _break(self, error: errors.KVStoreError) -> None:
        if self.broken is not None:
            return
        self.broken = error
        if self.on_break is not None:
            self.on_break()
        # Whoever watches the socket wakes up; closing it under them would let its number be reused.
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._dispose()
        self._out.clear()
        self._parser = iter(())  # it refers to us
        pendings = list(self._pending.values())
        self._pending.clear()
        for pending in pendings:
            pending.failure = error
            pending.changed()

    def _dispose(self) -> None:
        """Close what a broken connection no longer needs."""
        if self.broken is None or self._watchers:
            return
        self._sock.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def _write(self) -> None:
        while self._out:
            outgoing = self._out[0]
            # What was encrypted must be sent, even if the socket took nothing of it yet.
            outgoing.begun = outgoing.begun or self._encrypted
            try:
                sent = self._send(outgoing)
            except BlockingIOError:
                return
            outgoing.begun = True
            parts = outgoing.parts
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]
            else:
                self._out.popleft()

    def _send(self, outgoing: _Outgoing) -> int:
        parts = outgoing.parts[:_SEND_BUFFERS]
        if outgoing.descriptor is None or outgoing.begun:
            return self._sock.sendmsg(parts)
        rights = np.array([outgoing.descriptor], np.int32).tobytes()
        return self._sock.sendmsg(parts, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])

    def _read(self) -> None:
        for _ in range(_TURNS):
            direct = len(self._want) >= _BUFFER_BYTES
            target = self._want if direct else memoryview(self._buffer)
            try:
                got = self._receive(target)
            except BlockingIOError:
                return
            if not got:
                raise self._gone("was closed by the daemon")
            if direct:
                self._advance(got)
                continue
            data = target[:got]
            while data:
                size = min(len(data), len(self._want))
                self._want[:size] = data[:size]
                data = data[size:]
                self._advance(size)
            if got < len(target) and not self._encrypted:  # else a record of it ends here
                return

    def _receive(self, target: memoryview) -> int:
        if self._greeted or not self.shares_memory:
            return self._sock.recv_into(target)
        space = socket.CMSG_SPACE(4 * 4)
        got, rights, _, _ = self._sock.recvmsg_into([target], space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._fds += np.frombuffer(data[: len(data) // 4 * 4], np.int32).tolist()
        return got

    def greeted(self) -> None:
        """The daemon has said hello: what descriptor came along is its pidfd; no more will come."""
        with self._lock:
            if self._fds:
                self.witness = Witness(self._fds.pop(0))
            while self._fds:
                os.close(self._fds.pop())
            self._greeted = True

    # -- replies ----------------------------------------------------------------------------------

    def _advance(self, size: int) -> None:
        self._want = self._want[size:]
        if not self._want:
            self._want = next(self._parser)

    def _parse(self) -> Iterator[memoryview]:
        """Yield the memory that the next bytes belong in, again and again."""
        while True:
            header = bytearray(protocol.HEADER_BYTES)
            yield memoryview(header)
            frame = protocol.unpack(header, reply=True)
            pending = self._pending_of(frame)
            extra = frame.header_bytes - protocol.HEADER_BYTES
            rest = memoryview(bytearray(extra + frame.meta_bytes))
            if rest:
                yield rest
            payload = memoryview(b"")
            if frame.payload_bytes:
                payload = np.empty(frame.payload_bytes, np.uint8).data
                yield payload
            self._deliver(pending, Reply(frame, protocol.Meta(rest[extra:]), payload))

    def _pending_of(self, frame: Frame) -> Pending:
        pending = self._pending.get(frame.request)
        if pending is None:
            raise errors.ProtocolError(
                f"the daemon on {self.peer} answered a request that was never made",
                "upgrade kvstore",
            )
        is_event = frame.op == Op.EVENT and pending.frame.op == Op.SUBSCRIBE
        if frame.op != pending.frame.op and not is_event:
            raise errors.ProtocolError(
                f"the daemon on {self.peer} answered operation {pending.frame.op} by {frame.op}",
                "upgrade kvstore",
            )
        return pending

    def _deliver(self, pending: Pending, reply: Reply) -> None:
        flags = reply.frame.flags
        goes_on = flags & Flag.MORE or pending.frame.op == Op.SUBSCRIBE
        if flags & Flag.ERROR or not goes_on:
            self._finish(pending)
            if pending.cancels is not None and not flags & Flag.ERROR:
                self._finish(pending.cancels)
        if not pending.given_up:
            self._keep(pending, reply)
        pending.changed()

    @staticmethod
    def _keep(pending: Pending, reply: Reply) -> None:
        if reply.frame.op == Op.EVENT:
            if len(pending.replies) >= MAX_EVENTS:
                pending.lost_events = True
                return
            if pending.lost_events:
                frame = replace(reply.frame, flags=reply.frame.flags | Flag.GAP)
                reply = reply._replace(frame=frame)
                pending.lost_events = False
        pending.replies.append(reply)

    def _finish(self, pending: Pending) -> None:
        """Note that the daemon will neither answer this request nor touch its memory again."""
        if self._pending.pop(pending.frame.request, None) is None:
            return
        pending.done = True
        if pending.extent is not None:
            pending.extent.end()
        pending.changed()

"""A client's connection, and one request with its replies on it.

Standard library and numpy only: model servers import this module.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from kvstore import errors, protocol
from kvstore.protocol import Flag, Frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_GRACE_SECONDS = 1.0
"""Time that a daemon has, after the deadline, to say itself that it was missed."""
_SEND_BUFFERS = 256


class Channel:
    """The connection to the daemon behind ``path``, made when needed; ``timeout`` in seconds.

    Made anew after a failure, after the daemon closed it, and after a fork. ``lock`` is held during
    an exchange; ``count`` tells one connection from the next.
    """

    def __init__(self, path: str, timeout: float) -> None:
        self.path = path
        self.timeout = timeout
        self.lock = threading.RLock()
        self.count = 0
        self._sock: socket.socket | None = None
        self._pid = 0

    def connect(self) -> socket.socket:
        """Return the connection. Raises DaemonUnavailable, PermissionDenied."""
        if self._sock is not None and self._pid == os.getpid() and not _ended(self._sock):
            return self._sock
        self.close()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(self.timeout)
        try:
            sock.connect(self.path)
        except OSError as error:
            sock.close()
            if isinstance(error, PermissionError):
                raise errors.PermissionDenied(
                    f"no permission to connect to {self.path}",
                    "run as the daemon's user, or use --socket with another path",
                ) from error
            reason = error.strerror or str(error)
            raise errors.DaemonUnavailable(
                f"no daemon answers on {self.path} ({reason})",
                "start one with kvstore serve, or use --socket",
            ) from error
        self._sock, self._pid = sock, os.getpid()
        self.count += 1
        return sock

    def close(self) -> None:
        with self.lock:
            if self._sock is not None:
                self._sock.close()
            self._sock = None


def _ended(sock: socket.socket) -> bool:
    """Tell whether an idle connection was closed by the daemon, for example by its restart."""
    sock.settimeout(0)
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


class Exchange:
    """One request and its replies; the connection is locked from ``with`` to its end.

    A connection left in the middle of an exchange is closed: what comes next on it is unknown.
    """

    def __init__(self, channel: Channel, frame: Frame, parts: list[memoryview]) -> None:
        self._channel = channel
        self._frame = frame
        self._parts = parts
        self._expected = 0
        self._last = False

    def __enter__(self) -> Exchange:
        self._channel.lock.acquire()
        try:
            self._limit = time.monotonic() + self._channel.timeout + _GRACE_SECONDS
            self._sock = self._channel.connect()
            self._send()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if not self._last or self._expected:
            self._channel.close()
        self._channel.lock.release()

    def replies(self) -> Iterator[Frame]:
        """Yield the headers of the replies; the caller takes metadata and payload of each."""
        while not self._last:
            header = bytearray(protocol.HEADER_BYTES)
            self._fill(memoryview(header))
            reply = protocol.unpack(header, reply=True)
            self._expected = reply.meta_bytes + reply.payload_bytes
            self._last = not reply.flags & Flag.MORE
            if reply.flags & Flag.ERROR:
                raise protocol.error_from(protocol.Meta(self.meta(reply)).json())
            if reply.request != self._frame.request:
                self._last = False
                raise errors.ProtocolError("an answer to another request came", "upgrade kvstore")
            yield reply

    def meta(self, reply: Frame) -> bytearray:
        data = bytearray(reply.meta_bytes)
        self.receive(memoryview(data))
        return data

    def receive(self, view: memoryview) -> None:
        """Fill ``view`` with what comes next in this reply."""
        if len(view) > self._expected:
            raise errors.ProtocolError("a reply is shorter than it says", "upgrade kvstore")
        self._fill(view)
        self._expected -= len(view)

    def _fill(self, view: memoryview) -> None:
        while view:
            got = self._guarded(self._sock.recv_into, view)
            if not got:
                raise errors.DaemonUnavailable(
                    f"the daemon on {self._channel.path} closed the connection",
                    "see kvstore status and the daemon's log",
                )
            view = view[got:]

    def _send(self) -> None:
        parts, at = self._parts, 0
        while at < len(parts):
            sent = self._guarded(self._sock.sendmsg, parts[at : at + _SEND_BUFFERS])
            while at < len(parts) and sent >= len(parts[at]):
                sent -= len(parts[at])
                at += 1
            if sent:
                parts[at] = parts[at][sent:]

    def _guarded(self, call: Callable[[Any], int], argument: object) -> int:
        """Make one socket call within the deadline, its errors translated."""
        path, left = self._channel.path, self._limit - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            self._sock.settimeout(left)
            return call(argument)
        except TimeoutError:
            raise errors.DeadlineExceeded(
                f"the daemon on {path} did not answer within {self._channel.timeout:g} s",
                "see kvstore status, or give it more time",
            ) from None
        except OSError as error:
            raise errors.DaemonUnavailable(
                f"the connection to the daemon on {path} broke ({error.strerror or error})",
                "see kvstore status and the daemon's log",
            ) from error

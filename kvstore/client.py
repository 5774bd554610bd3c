"""The blocking client: one connection, safe to share between threads.

::

    with Client("/run/kvstore/kvstore.sock") as client:
        client.put(key, block)
        block = client.get(key)

Every call has a deadline (``timeout``). A connection that broke is made anew by the next call; a
call that failed is not repeated by itself, since a put may have arrived. Standard library and numpy
only: model servers import this module.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvstore import errors, protocol
from kvstore.answers import Ack, BlockStatus
from kvstore.keys import (
    MAX_BLOCK_BYTES,
    KeyArray,
    check_block_length,
    check_shard,
    key_array,
)
from kvstore.protocol import DEFAULT_HANDLE, Flag, Frame, Op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Data = bytes | bytearray | memoryview

MAX_FRAME_BYTES = 32 << 20
"""Payload bytes that one put frame carries; a larger batch is sent as several, in order."""
_RETRY_SECONDS = 0.05
_GRACE_SECONDS = 1.0
"""Time that a daemon has, after the deadline, to say itself that it was missed."""
_SEND_BUFFERS = 256


class Client:
    """Talks to the daemon behind the Unix socket at ``path``; ``timeout`` is in seconds.

    Raises DaemonUnavailable when nobody listens, DeadlineExceeded when no answer came in time, and
    whatever the daemon answered.
    """

    def __init__(self, path: str, timeout: float = 30.0) -> None:
        self.path = str(path)
        self.timeout = timeout
        self._lock = threading.RLock()
        self._sock: socket.socket | None = None
        self._pid = 0
        self._requests = itertools.count(1)
        self._records: dict[int, Mapping[str, object]] = {}
        self._handles: dict[int, int] = {}

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. May be called twice; the next call opens it again."""
        with self._lock:
            if self._sock is not None:
                self._sock.close()
            self._sock = None
            self._handles.clear()

    # -- namespaces -------------------------------------------------------------------------------

    def namespace(self, record: Mapping[str, object], *, create: bool = False) -> int:
        """Open a namespace by its record; return a handle for this client.

        Raises UnknownNamespace when it does not exist and ``create`` is false.
        """
        with self._lock:
            answer = self._admin({"op": "namespace", "record": dict(record), "create": create})
            handle = len(self._records) + 1
            self._records[handle] = dict(record)
            self._handles[handle] = _number(answer, "handle")
            return handle

    def _wire_handle(self, handle: int) -> int:
        """Return the daemon's handle; after a reconnect the namespace is opened again."""
        if handle == DEFAULT_HANDLE:
            return DEFAULT_HANDLE
        self._connect()
        if handle not in self._handles:
            answer = self._admin({"op": "namespace", "record": self._records[handle]})
            self._handles[handle] = _number(answer, "handle")
        return self._handles[handle]

    # -- blocks -----------------------------------------------------------------------------------

    def put(
        self,
        key: bytes,
        data: Data,
        *,
        namespace: int = DEFAULT_HANDLE,
        shard: int = 0,
        ack: str = "accepted",
        parent: bytes | None = None,
        label: str = "",
    ) -> str:
        """Store one block; return ``stored`` or ``already_present``.

        ``ack`` is ``accepted``, ``written`` or ``durable``. Raises StoreFull, KeyConflict,
        EngineError and whatever the daemon refuses.
        """
        statuses = self.put_many(
            [key],
            [data],
            namespace=namespace,
            shard=shard,
            ack=ack,
            parent=parent,
            label=label,
        )
        raise_for(key, int(statuses[0]))
        return "stored" if statuses[0] == BlockStatus.OK else "already_present"

    def put_many(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[Data],
        *,
        namespace: int = DEFAULT_HANDLE,
        shard: int = 0,
        ack: str = "accepted",
        chain: bool = False,
        parent: bytes | None = None,
        label: str = "",
    ) -> npt.NDArray[np.uint8]:
        """Store blocks under keys of one length; return a :class:`BlockStatus` for each.

        With ``chain`` each block is the parent of the next, ``parent`` that of the first.
        """
        names = key_array(keys)
        views = [memoryview(block).cast("B") for block in blocks]
        if len(views) != len(names):
            raise errors.UsageError(f"{len(names)} keys for {len(views)} blocks", "send as many")
        for key, view in zip(keys, views, strict=True):
            check_block_length(len(view), key)
        answers: list[npt.NDArray[np.uint8]] = []
        for part in _parts([len(view) for view in views]):
            start = part.start
            before = keys[start - 1] if chain and start else (parent or b"")
            frame = Frame(
                Op.PUT,
                flags=Flag.CHAIN if chain else 0,
                shard=check_shard(shard),
                ack=_level(ack),
            )
            tail = protocol.short(before if chain or not start else b"")
            answers.append(
                self._put_part(
                    frame,
                    namespace,
                    names[part],
                    views[part],
                    tail + protocol.short(label.encode()),
                )
            )
        return np.concatenate(answers) if answers else np.zeros(0, np.uint8)

    def _put_part(
        self,
        frame: Frame,
        namespace: int,
        keys: KeyArray,
        views: Sequence[memoryview],
        tail: bytes,
    ) -> npt.NDArray[np.uint8]:
        lengths = np.fromiter(map(len, views), protocol.U32_LE, len(views))
        meta = keys.tobytes() + lengths.tobytes() + tail
        frame = replace(frame, key_length=keys.shape[1], count=len(keys))
        answer = self._call(frame, namespace, meta, views)
        return protocol.Meta(answer).u8(len(keys))

    def get(self, key: bytes, *, namespace: int = DEFAULT_HANDLE, shard: int = 0) -> bytes | None:
        """Return the block's bytes, or None if it is not there."""
        block = self.get_many([key], namespace=namespace, shard=shard)[0]
        return None if block is None else bytes(block)

    def get_many(
        self, keys: Sequence[bytes], *, namespace: int = DEFAULT_HANDLE, shard: int = 0
    ) -> list[memoryview | None]:
        """Return each block's bytes, None for those that are not there."""
        names = key_array(keys)
        found: list[memoryview | None] = []
        for start in range(0, len(names), protocol.MAX_KEYS):
            part = names[start : start + protocol.MAX_KEYS]
            frame = Frame(
                Op.GET, shard=check_shard(shard), key_length=part.shape[1], count=len(part)
            )
            with self._exchange(frame, namespace, part.tobytes()) as exchange:
                for reply in exchange.replies():
                    found += self._blocks_of(exchange, reply)
        return found

    @staticmethod
    def _blocks_of(exchange: _Exchange, reply: Frame) -> list[memoryview | None]:
        meta = protocol.Meta(exchange.meta(reply))
        statuses, lengths = meta.u8(reply.count), meta.u32(reply.count).tolist()
        blocks: list[memoryview | None] = []
        for status, length in zip(statuses, lengths, strict=True):
            if status != BlockStatus.OK:
                blocks.append(None)
                continue
            if length > MAX_BLOCK_BYTES:
                raise errors.ProtocolError(f"a block of {length} bytes was announced", "upgrade")
            view = np.empty(length, np.uint8).data
            exchange.receive(view)
            blocks.append(view)
        return blocks

    def contains(
        self, keys: Sequence[bytes], *, namespace: int = DEFAULT_HANDLE, shard: int = 0
    ) -> npt.NDArray[np.bool_]:
        """Return a mask: which of the keys a get would find."""
        names = key_array(keys)
        masks = [
            protocol.Meta(self._question(Op.CONTAINS, 0, part, namespace, shard)).u8(len(part))
            for part in _batches(names)
        ]
        return np.concatenate(masks).astype(bool) if masks else np.zeros(0, np.bool_)

    def prefix(
        self, keys: Sequence[bytes], *, namespace: int = DEFAULT_HANDLE, shard: int = 0
    ) -> int:
        """Return how many of the keys a get would find, up to the first that it would not."""
        total = 0
        for part in _batches(key_array(keys)):
            answer = self._question(Op.CONTAINS, Flag.PREFIX, part, namespace, shard)
            found = int(protocol.Meta(answer).u32(1)[0])
            total += found
            if found < len(part):
                break
        return total

    def delete(
        self, keys: Sequence[bytes], *, namespace: int = DEFAULT_HANDLE, shard: int = 0
    ) -> int:
        """Remove blocks by name; return how many were there."""
        removed = 0
        for part in _batches(key_array(keys)):
            answer = self._question(Op.DELETE, 0, part, namespace, shard)
            statuses = protocol.Meta(answer).u8(len(part))
            if (statuses == BlockStatus.FAILED).any():
                raise errors.EngineError("not all blocks could be deleted", "see the daemon's log")
            removed += int((statuses == BlockStatus.OK).sum())
        return removed

    def _question(
        self, op: Op, flags: int, part: KeyArray, namespace: int, shard: int
    ) -> bytearray:
        frame = Frame(
            op, flags=flags, shard=check_shard(shard), key_length=part.shape[1], count=len(part)
        )
        return self._call(frame, namespace, part.tobytes())

    # -- administration ---------------------------------------------------------------------------

    def list(
        self, namespace: int | None = None, limit: int | None = None
    ) -> Iterator[tuple[str, int, str]]:
        """Yield (namespace id, shard, key) of the blocks that are there, ids and keys in hex."""
        start: object = 0
        left = limit if limit is not None else 1 << 62
        while start is not None and left > 0:
            with self._lock:
                handle = None if namespace is None else self._wire_handle(namespace)
                answer = self._admin({"op": "list", "handle": handle, "start": start})
            blocks = answer.get("blocks")
            for identity, shard, key in (blocks if isinstance(blocks, list) else [])[:left]:
                yield str(identity), int(shard), str(key)
                left -= 1
            start = answer.get("next")

    def status(self) -> dict[str, object]:
        """Return the daemon's figures, as in ``kvstore status --json``."""
        return self._admin({"op": "status"})

    def flush(self) -> None:
        """Return when everything that was written before survives power loss."""
        self._admin({"op": "flush"})

    def _admin(self, request: Mapping[str, object]) -> dict[str, object]:
        answer = self._call(Frame(Op.ADMIN), DEFAULT_HANDLE, protocol.dump(request))
        return protocol.Meta(answer).json()

    # -- frames -----------------------------------------------------------------------------------

    def _call(
        self, frame: Frame, namespace: int, meta: bytes, payload: Sequence[memoryview] = ()
    ) -> bytearray:
        """Send a request with one reply and return the reply's metadata; Busy is repeated."""
        limit = time.monotonic() + self.timeout
        while True:
            try:
                with self._exchange(frame, namespace, meta, payload) as exchange:
                    return exchange.meta(next(exchange.replies()))
            except errors.Busy:
                if time.monotonic() + _RETRY_SECONDS > limit:
                    raise
                time.sleep(_RETRY_SECONDS)

    def _exchange(
        self, frame: Frame, namespace: int, meta: bytes, payload: Sequence[memoryview] = ()
    ) -> _Exchange:
        with self._lock:
            frame = replace(
                frame,
                handle=self._wire_handle(namespace),
                request=next(self._requests) & 0xFFFFFFFF,
                deadline_ms=int(self.timeout * 1000),
                meta_bytes=len(meta),
                payload_bytes=sum(map(len, payload)),
            )
            return _Exchange(self, frame, [memoryview(frame.pack() + meta), *payload])

    def _connect(self) -> socket.socket:
        """Return the connection, made anew after a failure and after a fork."""
        if self._sock is not None and self._pid == os.getpid() and not _ended(self._sock):
            return self._sock
        self.close()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(self.timeout)
        try:
            sock.connect(self.path)
        except OSError as error:
            sock.close()
            reason = error.strerror or str(error)
            raise errors.DaemonUnavailable(
                f"no daemon answers on {self.path} ({reason})",
                "start one with kvstore serve, or use --socket",
            ) from error
        self._sock, self._pid = sock, os.getpid()
        return sock


class _Exchange:
    """One request and its replies; the connection is locked from ``with`` to its end.

    A connection left in the middle of an exchange is closed: what comes next on it is unknown.
    """

    def __init__(self, client: Client, frame: Frame, parts: list[memoryview]) -> None:
        self._client = client
        self._frame = frame
        self._parts = parts
        self._expected = 0
        self._last = False

    def __enter__(self) -> _Exchange:
        self._client._lock.acquire()
        try:
            self._limit = time.monotonic() + self._client.timeout + _GRACE_SECONDS
            self._sock = self._client._connect()
            self._send()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if not self._last or self._expected:
            self._client.close()
        self._client._lock.release()

    def replies(self) -> Iterator[Frame]:
        """Yield the headers of the replies; the caller takes metadata and payload of each."""
        while not self._last:
            header = bytearray(protocol.HEADER_BYTES)
            self._fill(memoryview(header))
            reply = protocol.unpack(header)
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
                    f"the daemon on {self._client.path} closed the connection",
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
        path, left = self._client.path, self._limit - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            self._sock.settimeout(left)
            return call(argument)
        except TimeoutError:
            raise errors.DeadlineExceeded(
                f"the daemon on {path} did not answer within {self._client.timeout:g} s",
                "see kvstore status, or give it more time",
            ) from None
        except OSError as error:
            raise errors.DaemonUnavailable(
                f"the connection to the daemon on {path} broke ({error.strerror or error})",
                "see kvstore status and the daemon's log",
            ) from error


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


def raise_for(key: bytes, status: int) -> None:
    """Raise what a status other than OK and ALREADY_PRESENT means for a put."""
    name = key.hex()
    if status == BlockStatus.FULL:
        raise errors.StoreFull(
            f"no room for block {name}", "raise capacity, free the disk, or unpin blocks"
        )
    if status == BlockStatus.CONFLICT:
        raise errors.KeyConflict(
            f"block {name} is there with another length; the old one is kept",
            "delete it first, or check how keys are made",
        )
    if status == BlockStatus.FAILED:
        raise errors.EngineError(f"block {name} could not be written", "see the daemon's log")


def _level(ack: str) -> Ack:
    try:
        return Ack[ack.upper()]
    except KeyError:
        raise errors.UsageError(
            f"acknowledgement level {ack!r} is unknown", "use accepted, written or durable"
        ) from None


def _batches(names: KeyArray) -> Iterator[KeyArray]:
    for start in range(0, len(names), protocol.MAX_KEYS):
        yield names[start : start + protocol.MAX_KEYS]


def _parts(lengths: Sequence[int]) -> Iterator[slice]:
    """Cut a batch into runs that fit a frame each; one block always fits."""
    start = total = 0
    for number, length in enumerate(lengths):
        full = total + length > MAX_FRAME_BYTES or number - start >= protocol.MAX_KEYS
        if number > start and full:
            yield slice(start, number)
            start, total = number, 0
        total += length
    if lengths:
        yield slice(start, len(lengths))


def _number(answer: Mapping[str, object], name: str) -> int:
    value = answer.get(name)
    if not isinstance(value, int):
        raise errors.ProtocolError(f"the daemon's answer lacks {name!r}", "upgrade kvstore")
    return value

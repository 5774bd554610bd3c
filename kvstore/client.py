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
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore import errors, protocol
from kvstore.answers import Ack, BlockStatus
from kvstore.exchange import Channel, Exchange
from kvstore.keys import (
    MAX_BLOCK_BYTES,
    KeyArray,
    check_block_length,
    check_shard,
    key_array,
)
from kvstore.protocol import DEFAULT_HANDLE, Flag, Frame, Op

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Data = bytes | bytearray | memoryview

MAX_FRAME_BYTES = 32 << 20
"""What the blocks of one put may take in the daemon's memory; larger batches become several."""
_PAGE = 4096
_RETRY_SECONDS = 0.05


class Client:
    """Talks to the daemon behind the Unix socket at ``path``; ``timeout`` is in seconds.

    Raises DaemonUnavailable when nobody listens, PermissionDenied when this user may not connect,
    DeadlineExceeded when no answer came in time, and whatever the daemon answered.
    """

    def __init__(self, path: str, timeout: float = 30.0) -> None:
        self.timeout = timeout
        self._channel = Channel(str(path), timeout)
        self._requests = itertools.count(1)
        self._records: dict[int, Mapping[str, object]] = {}
        self._handles: dict[int, int] = {}
        self._opened_on = 0

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. May be called twice; the next call opens it again."""
        self._channel.close()

    # -- namespaces -------------------------------------------------------------------------------

    def namespace(self, record: Mapping[str, object], *, create: bool = False) -> int:
        """Open a namespace by its record; return a handle for this client.

        Raises UnknownNamespace when it does not exist and ``create`` is false.
        """
        with self._channel.lock:
            self._forget_old_handles()
            answer = self._admin({"op": "namespace", "record": dict(record), "create": create})
            handle = len(self._records) + 1
            self._records[handle] = dict(record)
            self._handles[handle] = _number(answer, "handle")
            return handle

    def _wire_handle(self, handle: int) -> int:
        """Return the daemon's handle; after a reconnect the namespace is opened again."""
        if handle == DEFAULT_HANDLE:
            return DEFAULT_HANDLE
        self._forget_old_handles()
        if handle not in self._handles:
            answer = self._admin({"op": "namespace", "record": self._records[handle]})
            self._handles[handle] = _number(answer, "handle")
        return self._handles[handle]

    def _forget_old_handles(self) -> None:
        """Handles belong to a connection; a new one knows none of them."""
        self._channel.connect()
        if self._opened_on != self._channel.count:
            self._handles.clear()
            self._opened_on = self._channel.count

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
            if chain and answers and (answers[-1] > BlockStatus.ALREADY_PRESENT).any():
                # What follows a block that is not there could never be reached: it would only push
                # out the beginning of its own chain.
                answers.append(np.full(len(views[part]), answers[-1].max(), np.uint8))
                continue
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
    def _blocks_of(exchange: Exchange, reply: Frame) -> list[memoryview | None]:
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
            with self._channel.lock:
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
    ) -> Exchange:
        with self._channel.lock:
            frame = replace(
                frame,
                handle=self._wire_handle(namespace),
                request=next(self._requests) & 0xFFFFFFFF,
                deadline_ms=int(self.timeout * 1000),
                meta_bytes=len(meta),
                payload_bytes=sum(map(len, payload)),
            )
            return Exchange(self._channel, frame, [memoryview(frame.pack() + meta), *payload])


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
        # What a block takes in the daemon's memory: whole pages, and one for its header.
        size = length + 2 * _PAGE
        full = total + size > MAX_FRAME_BYTES or number - start >= protocol.MAX_KEYS
        if number > start and full:
            yield slice(start, number)
            start, total = number, 0
        total += size
    if lengths:
        yield slice(start, len(lengths))


def _number(answer: Mapping[str, object], name: str) -> int:
    value = answer.get(name)
    if not isinstance(value, int):
        raise errors.ProtocolError(f"the daemon's answer lacks {name!r}", "upgrade kvstore")
    return value

"""One client of the daemon: frames in, answers out.

A connection is one coroutine that reads a frame, answers it and reads the next, so its requests are
answered in order. Payloads go straight between the socket and slab extents.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore import protocol, record
from kvstore.answers import Ack, BlockStatus
from kvstore.errors import (
    KVStoreError,
    ProtocolError,
    UnknownNamespace,
    UsageError,
)
from kvstore.keys import check_block_length, namespace_id
from kvstore.protocol import Flag, Frame, Op
from kvstore.put import PutRequest

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Sequence

    from kvstore.namespaces import Namespace
    from kvstore.server import Server
    from kvstore.slab import Extent
    from kvstore.store import Store

log = logging.getLogger(__name__)

GET_BUDGET = 32 << 20
"""Image bytes that one reply frame of a get may take in the slab."""
SLICE_KEYS = 4096
"""Keys that are looked up at a time, so that nobody waits for a long question of another."""
LIST_LIMIT = 4096
_SCRATCH = 256 << 10
_SEND_BUFFERS = 256


class Connection:
    """Serves the client behind ``sock``, a non-blocking stream socket, until it goes."""

    def __init__(self, server: Server, sock: socket.socket) -> None:
        self._server = server
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._handles: dict[int, Namespace] = {}
        self._unread = 0
        self.idle = True
        """Between two requests; may be dropped without breaking one."""

    async def serve(self) -> None:
        header = bytearray(protocol.HEADER_BYTES)
        try:
            while not self._server.stopping and await self._receive_start(header):
                self.idle = False
                await self._one_request(protocol.unpack(header))
                self.idle = True
        except ProtocolError as error:
            log.warning("closing a client's connection: %s", error)
            with suppress(OSError, TimeoutError):
                await self._fail(Frame(Op.ADMIN), error)
        except (ConnectionError, TimeoutError, EOFError) as error:
            log.debug("client gone: %r", error)
        finally:
            self._sock.close()

    async def _one_request(self, frame: Frame) -> None:
        self._unread = frame.payload_bytes
        meta = bytearray(frame.meta_bytes)
        async with self._patience():
            await self._receive(memoryview(meta))
        try:
            await self._answer(frame, meta)
        except ProtocolError:
            raise
        except KVStoreError as error:
            await self._skip_payload()
            await self._fail(frame, error)
        except (ConnectionError, TimeoutError, EOFError):
            raise
        except Exception as error:
            # The outermost frame of a request: the daemon goes on, the client is told.
            log.exception("a request failed")
            self._server.count_failed_request()
            await self._skip_payload()
            await self._fail(frame, KVStoreError(f"the daemon failed: {error!r}", "see its log"))

    async def _answer(self, frame: Frame, meta: bytearray) -> None:
        if frame.op == Op.ADMIN:
            await self._admin(frame, protocol.Meta(meta).json())
            return
        store = await self._server.ready(frame.deadline_ms)
        namespace = self._namespace(store, frame.handle)
        fields = protocol.Meta(meta)
        if frame.op == Op.PUT:
            await self._put(store, namespace, frame, fields)
            return
        if frame.payload_bytes:
            raise ProtocolError("a payload where none belongs", "check the client")
        keys = fields.keys(frame.count, frame.key_length)
        if frame.op == Op.GET:
            await self._get(store, namespace, frame, keys)
        elif frame.op == Op.CONTAINS:
            await self._contains(store, namespace, frame, keys)
        else:
            await self._delete(store, namespace, frame, keys)

    def _namespace(self, store: Store, handle: int) -> Namespace:
        if handle == protocol.DEFAULT_HANDLE:
            return self._server.default_namespace(store)
        if handle not in self._handles:
            raise UnknownNamespace(f"namespace handle {handle} is not open", "open it first")
        return self._handles[handle]

    # -- data -------------------------------------------------------------------------------------

    async def _put(
        self, store: Store, namespace: Namespace, frame: Frame, fields: protocol.Meta
    ) -> None:
        request = self._put_request(namespace, frame, fields)
        sizes = record.image_bytes_of(request.lengths).tolist()
        if len(sizes) > 1 and sum(sizes) > store.core.slab.capacity // 2:
            raise UsageError(
                f"{len(sizes)} blocks take {sum(sizes)} bytes of memory at once",
                f"send batches of at most {store.core.slab.capacity // 2}, 8 KiB for a small block",
            )
        extents = await self._server.extents(store, sizes, frame.deadline_ms)
        try:
            await self._receive_payload(request.lengths.tolist(), extents)
            statuses = await self._server.put(store, request, [extent.view for extent in extents])
        finally:
            self._server.give_back(store, extents)
        await self._reply(frame, statuses.tobytes(), count=len(statuses))

    def _put_request(self, namespace: Namespace, frame: Frame, fields: protocol.Meta) -> PutRequest:
        if not frame.count:
            raise UsageError("a put of no blocks", "send at least one")
        keys = fields.keys(frame.count, frame.key_length)
        lengths = fields.u32(frame.count).astype(np.uint32)
        parent = fields.short()
        label = _text(fields.short())
        if int(lengths.sum(dtype=np.uint64)) != frame.payload_bytes:
            raise ProtocolError(
                f"lengths of {int(lengths.sum(dtype=np.uint64))} bytes announced with a payload of"
                f" {frame.payload_bytes}",
                "check the client",
            )
        shortest = int(lengths.argmin())
        check_block_length(int(lengths[shortest]), keys[shortest].tobytes())
        return PutRequest(
            namespace,
            frame.shard,
            keys,
            lengths,
            durable=frame.ack == Ack.DURABLE,
            chain=bool(frame.flags & Flag.CHAIN),
            parent=parent,
            label=label,
        )

    async def _get(
        self, store: Store, namespace: Namespace, frame: Frame, keys: np.ndarray
    ) -> None:
        if not len(keys):
            await self._reply(frame, b"")
        start = 0
        while start < len(keys):
            job = await self._server.get(
                store,
                namespace,
                frame.shard,
                keys[start : start + SLICE_KEYS],
                GET_BUDGET,
                frame.deadline_ms,
            )
            try:
                start += job.count
                hits = np.flatnonzero(job.statuses == BlockStatus.OK).tolist()
                payloads = [job.payload(position) for position in hits]
                meta = job.statuses.tobytes() + job.lengths.tobytes() + job.checksums.tobytes()
                flags = Flag.MORE if start < len(keys) else 0
                await self._reply(frame, meta, payloads, count=job.count, flags=flags)
            finally:
                job.close()
                self._server.slab_changed()

    async def _contains(
        self, store: Store, namespace: Namespace, frame: Frame, keys: np.ndarray
    ) -> None:
        masks = []
        for start in range(0, len(keys), SLICE_KEYS):
            masks.append(store.contains(namespace, frame.shard, keys[start : start + SLICE_KEYS]))
            if frame.flags & Flag.PREFIX and not masks[-1].all():
                break
            # Let others have the event loop between two slices of a long question.
            await asyncio.sleep(0)
        mask = np.concatenate([np.zeros(0, np.bool_), *masks])
        if frame.flags & Flag.PREFIX:
            length = len(mask) if mask.all() else int(mask.argmin())
            await self._reply(frame, length.to_bytes(4, "little"), count=frame.count)
        else:
            await self._reply(frame, mask.astype(np.uint8).tobytes(), count=frame.count)

    async def _delete(
        self, store: Store, namespace: Namespace, frame: Frame, keys: np.ndarray
    ) -> None:
        statuses = await self._server.delete(store, namespace, frame.shard, keys)
        await self._reply(frame, statuses.tobytes(), count=frame.count)

    # -- administration ---------------------------------------------------------------------------

    async def _admin(self, frame: Frame, request: dict[str, Any]) -> None:
        action = request.get("op")
        if action == "status":
            answer = self._server.status()
        else:
            store = await self._server.ready(frame.deadline_ms)
            if action == "namespace":
                answer = await self._open_namespace(store, request)
            elif action == "list":
                answer = self._list(store, request)
            elif action == "flush":
                await self._server.flush(store)
                answer = {}
            else:
                raise UsageError(f"administration knows no operation {action!r}", "upgrade kvstore")
        await self._reply(frame, protocol.dump(answer))

    async def _open_namespace(self, store: Store, request: dict[str, Any]) -> dict[str, object]:
        wanted = request.get("record")
        if not isinstance(wanted, dict):
            raise UsageError("a namespace is opened by its record", "send a JSON object")
        namespace = store.core.namespaces.by_id(namespace_id(wanted))
        if namespace is None:
            if not request.get("create"):
                raise UnknownNamespace(
                    f"namespace {_spoken(wanted)} does not exist",
                    "check its record, or put with --create-namespace",
                )
            namespace = await self._server.in_worker(
                lambda: store.core.namespaces.open(wanted, create=True)
            )
        handle = namespace.number + 1
        self._handles[handle] = namespace
        return {"handle": handle, "id": namespace.id.hex(), "key_length": namespace.key_length}

    def _list(self, store: Store, request: dict[str, Any]) -> dict[str, object]:
        handle, start = request.get("handle"), request.get("start", 0)
        if not isinstance(start, int) or not isinstance(handle, (int, type(None))):
            raise UsageError("a list is asked for by numbers", "send integers, or no handle")
        namespace = None if handle is None else self._namespace(store, handle)
        blocks, following = store.list_rows(namespace, max(start, 0), LIST_LIMIT)
        return {"blocks": blocks, "next": following}

    # -- bytes ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _patience(self) -> AsyncIterator[None]:
        """Bound the time for which a client may stall us in the middle of something."""
        async with asyncio.timeout(self._server.patience):
            yield

    async def _receive_start(self, header: bytearray) -> bool:
        """Wait for a header, as long as it takes; False if the client has gone."""
        got = await self._loop.sock_recv_into(self._sock, header)
        if not got:
            return False
        async with self._patience():
            await self._receive(memoryview(header)[got:])
        return True

    async def _receive(self, view: memoryview) -> None:
        while view:
            got = await self._loop.sock_recv_into(self._sock, view)
            if not got:
                raise EOFError("the client went in the middle of a frame")
            view = view[got:]

    async def _receive_payload(self, lengths: Sequence[int], extents: Sequence[Extent]) -> None:
        start = record.HEADER_PAGE
        async with self._patience():
            for length, extent in zip(lengths, extents, strict=True):
                await self._receive(extent.view[start : start + length])
                self._unread -= length

    async def _skip_payload(self) -> None:
        scratch = memoryview(bytearray(min(_SCRATCH, self._unread)))
        async with self._patience():
            while self._unread:
                part = scratch[: min(len(scratch), self._unread)]
                got = await self._loop.sock_recv_into(self._sock, part)
                if not got:
                    raise EOFError("the client went in the middle of a frame")
                self._unread -= got

    async def _fail(self, frame: Frame, error: KVStoreError) -> None:
        await self._reply(frame, protocol.error_meta(error), flags=Flag.ERROR)

    async def _reply(
        self,
        frame: Frame,
        meta: bytes,
        payloads: Sequence[memoryview] = (),
        *,
        count: int = 0,
        flags: int = 0,
    ) -> None:
        header = replace(
            frame,
            flags=flags,
            count=count,
            meta_bytes=len(meta),
            payload_bytes=sum(map(len, payloads)),
        )
        async with self._patience():
            await self._send([memoryview(header.pack() + meta), *payloads])

    async def _send(self, views: list[memoryview]) -> None:
        at = 0
        while at < len(views):
            try:
                sent = self._sock.sendmsg(views[at : at + _SEND_BUFFERS])
            except BlockingIOError:
                await self._writable()
                continue
            while at < len(views) and sent >= len(views[at]):
                sent -= len(views[at])
                at += 1
            if sent:
                views[at] = views[at][sent:]

    async def _writable(self) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_writer(self._sock, ready.set_result, None)
        ready.add_done_callback(lambda _: self._loop.remove_writer(self._sock))
        try:
            await ready
        finally:
            self._loop.remove_writer(self._sock)


def _spoken(wanted: dict[str, object]) -> str:
    """Return how a person knows a namespace: its name, if the record has one, and its id."""
    identity, name = namespace_id(wanted).hex(), wanted.get("name")
    return f"{name[:80]!r} ({identity})" if isinstance(name, str) else identity


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise UsageError("a label that is not UTF-8", "send UTF-8 text") from None

"""One request of a client: read from its frame, under way, over.

From its arrival to its answer the rows of a region that it names are ours, and not a moment longer:
:meth:`Request.release` gives up everything that the request holds. What each operation does is in
:mod:`kvstore.service`.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore import protocol
from kvstore.errors import KVStoreError, ProtocolError, UsageError
from kvstore.keys import check_block_length
from kvstore.protocol import INLINE, Flag, Op
from kvstore.reading import DEPTH, GET_BUDGET
from kvstore.record import HEADER_PAGE, image_bytes_of
from kvstore.wire import close_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.connection import Connection
    from kvstore.keys import KeyArray
    from kvstore.mapped import Region
    from kvstore.namespaces import Namespace
    from kvstore.protocol import U32, U64, Frame
    from kvstore.reading import Reading
    from kvstore.slab import Extent
    from kvstore.store import Store
    from kvstore.wire import Wire

REQUESTS = frozenset(Op) - {Op.EVENT}
"""What clients may send."""
_BLOCK_BYTES = 2 << 20
"""What a block to be read is thought to take: before it is looked up nobody knows."""


class PutFields(NamedTuple):
    """The metadata of a PUT; ``offsets`` where a region is named."""

    keys: KeyArray
    lengths: U32
    offsets: U64 | None
    checksums: U64 | None
    parent: bytes
    label: str


class Request:
    """A request on ``connection``. ``answered``: its last reply is on its way or there."""

    def __init__(self, connection: Connection, frame: Frame) -> None:
        self.connection = connection
        self.frame = frame
        self.server = connection.server
        self.meta = protocol.Meta(b"")
        self.answered = False
        self.task: asyncio.Task[None] | None = None
        self.descriptors: list[int] = []
        self.reading: Reading | None = None
        self.received: PutFields | None = None
        self.sources: list[memoryview] = []
        self._limit = self.server.limit(frame.deadline_ms)
        self.extents: list[Extent | None] = []
        self._store: Store | None = None
        self._region: Region | None = None
        self._refusal: KVStoreError | None = None
        self._cancelled = self._begun = False

    @property
    def limit(self) -> float:
        """The time of the event loop up to which the next wait may last."""
        return self._limit if self.frame.deadline_ms else self.server.limit(0)

    # -- arriving ---------------------------------------------------------------------------------

    async def receive(self, wire: Wire, descriptors: list[int]) -> None:
        """Read the rest of the frame; what is wrong with it is kept for :meth:`check`.

        Takes the descriptors over. Raises Gone.
        """
        self.descriptors, descriptors[:] = descriptors.copy(), []
        await wire.skip(self.frame.header_bytes - protocol.HEADER_BYTES)
        self.meta = protocol.Meta(await wire.take(self.frame.meta_bytes))
        unread = self.frame.payload_bytes
        try:
            self._check_header()
            if unread:
                await self._make_room()
        except KVStoreError as refusal:
            self._refusal = refusal
            await wire.skip(unread)
        for view in self.sources:
            await wire.receive(view)

    def _check_header(self) -> None:
        frame = self.frame
        if frame.op not in REQUESTS:
            raise ProtocolError(f"operation {frame.op} is unknown", "use a matching version")
        self.connection.peer.check(frame.op)
        inline = frame.op == Op.PUT and frame.region == INLINE
        if frame.payload_bytes and not inline:
            raise ProtocolError("a payload where none belongs", "check the client")
        if self.descriptors and frame.op != Op.REGISTER:
            raise ProtocolError("a descriptor where none belongs", "check the client")

    async def _make_room(self) -> None:
        """Take memory for the blocks in the payload, when the store is there."""
        fields = put_fields(self)
        store = await self.store()
        self.namespace(store)
        bounce = store.core.bounce
        # Each with room for its header, so that they can be written from where they are.
        sizes = image_bytes_of(fields.lengths).tolist()
        total = sum(sizes)
        if len(sizes) > 1 and total > bounce.capacity // 2:
            raise UsageError(
                f"{len(sizes)} blocks take {total} bytes of memory at once",
                f"send at most {bounce.capacity // 2}, a header page for each block included",
            )
        extents = await self.server.with_room(lambda: bounce.allocate(sizes), self.limit)
        self.extents = list(extents)
        self._store = store
        self.received = fields
        self.sources = [
            extent.view[HEADER_PAGE : HEADER_PAGE + length]
            for extent, length in zip(extents, fields.lengths.tolist(), strict=True)
        ]

    # -- under way --------------------------------------------------------------------------------

    def begin(self) -> None:
        """Let the request be cancelled from now on by cancelling its task.

        Raises CancelledError if it was cancelled before, and what is wrong with the frame.
        """
        self._begun = True
        if self._cancelled:
            raise asyncio.CancelledError
        if self._refusal is not None:
            raise self._refusal

    async def store(self) -> Store:
        """Return the store when it is there. Raises DaemonUnavailable."""
        return await self.server.ready(self.limit)

    def namespace(self, store: Store) -> Namespace:
        return self.connection.namespace(store, self.frame.handle)

    def keys(self) -> KeyArray:
        """Take the keys from the metadata: they come first."""
        return self.meta.keys(self.frame.count, self.frame.key_length)

    def region(self) -> Region:
        """Return the region that the frame names; in use until :meth:`release`."""
        if self._region is None:
            self._region = self.connection.regions.enter(self.frame.region)
        return self._region

    async def answer(
        self,
        meta: bytes,
        payloads: Sequence[memoryview] = (),
        *,
        count: int = 0,
        flags: int = 0,
        descriptors: Sequence[int] = (),
    ) -> None:
        await self.connection.answer(
            self, meta, payloads, count=count, flags=flags, descriptors=descriptors
        )

    # -- over -------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Stop as early as can be; the outcome is in how the task ends."""
        if self._cancelled or self.task is None:
            return
        self._cancelled = True
        if self.reading is not None:
            self.reading.cancel()
        # A task that is cancelled before its first step never runs: it would release nothing, and
        # nobody would be answered.
        if self._begun:
            self.task.cancel()

    def release(self) -> None:
        """Give up all that the request holds: nothing of it is used from now on.

        A cancellation comes too late for it.
        """
        self._cancelled = True
        self.give_back()
        if self._region is not None:
            self._region.leave()
        self._region = self.reading = None
        close_all(self.descriptors)

    def give_back(self) -> None:
        """Give back the memory into which the payload was received."""
        extents, self.extents, self.sources = self.extents, [], []
        if extents:
            assert self._store is not None
            self._store.core.bounce.release([one for one in extents if one is not None])
            self.server.memory_changed()


def put_fields(request: Request) -> PutFields:
    """Read the metadata of a PUT. Raises UsageError, InvalidKey, ProtocolError."""
    frame, meta = request.frame, request.meta
    if not frame.count:
        raise UsageError("a put of no blocks", "send at least one")
    keys = request.keys()
    lengths = meta.u32(frame.count).astype(np.uint32)
    offsets = meta.u64(frame.count) if frame.region != INLINE else None
    checksums = meta.u64(frame.count) if frame.flags & Flag.CHECKSUM else None
    parent, label, hints = meta.short(), _text(meta.short()), meta.short()
    if hints:
        _check_text(protocol.Meta(hints).json())
    for position in (int(lengths.argmin()), int(lengths.argmax())):
        check_block_length(int(lengths[position]), keys[position].tobytes())
    total = int(lengths.sum(dtype=np.uint64))
    if offsets is None and total != frame.payload_bytes:
        raise ProtocolError(
            f"lengths of {total} bytes announced with a payload of {frame.payload_bytes}",
            "check the client",
        )
    return PutFields(keys, lengths, offsets, checksums, parent, label)


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise UsageError("a label that is not UTF-8", "send UTF-8 text") from None


def _check_text(hints: dict[str, object]) -> None:
    """Refuse halves of characters, which JSON can spell and nobody can write again."""
    try:
        json.dumps(hints, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UsageError("hints with text that is not Unicode", "send valid strings") from None


def weight(frame: Frame) -> int:
    """Return the bytes of memory that a request takes while it is under way, about."""
    taken = frame.meta_bytes + frame.payload_bytes
    if frame.op in (Op.GET, Op.STREAM_GET) and frame.region == INLINE:
        taken += min(DEPTH * GET_BUDGET, frame.count * _BLOCK_BYTES)
    return taken

"""What a client can do, once for both kinds of client: coroutines that wait through a port.

:class:`~kvstore.aclient.AsyncClient` offers them as they are, :class:`~kvstore.client.Client` as
calls that block. Requests and replies are coded in requests.py, sent and received in session.py.

Standard library and numpy only: model servers import this module.
"""

from __future__ import annotations

from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore import errors, requests
from kvstore.answers import BlockStatus
from kvstore.keys import MAX_BLOCK_BYTES, KeyArray, key_array
from kvstore.protocol import DEFAULT_HANDLE, Op
from kvstore.questions import Call, Questions, Where
from kvstore.regions import DEFAULT_TOTAL_BYTES, Extent
from kvstore.requests import U8, U32, Found, PutOptions, Rows, Scope
from kvstore.transfer import SMALL_BYTES, Lookup, Upload, overlapping, put_all, refuse_if_lost

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

    from typing_extensions import Unpack

    from kvstore.credentials import Credentials
    from kvstore.requests import Data
    from kvstore.waiting import Port

    Place = Callable[[int, int], memoryview | None]
    Block = tuple[int, BlockStatus, memoryview | None]

GUESSED_BYTES = 2 << 20
"""Room for a block of unknown length; a longer one is asked for again."""


class PutArguments(Where, total=False):
    """How to put."""

    ack: str
    """``accepted``, ``written`` or ``durable``."""
    chain: bool
    """Each block is the parent of the next one."""
    parent: bytes | None
    """Key of the block before the first one."""
    label: str
    overwrite: bool
    """A known key gets a new version."""
    session: str
    end_of_session: bool
    priority: int
    """Hints: which conversation the blocks belong to, whether it ends, how much it matters."""


class Sizes(NamedTuple):
    """Answers to a get into memory of the caller's."""

    statuses: U8
    lengths: U32


class Staging:
    """Memory shared with the daemon, leased to the caller, who fills and reads it himself.

    Blocks lie in slots, each on a page of 4096 bytes. During a put or get the slots belong to the
    daemon. One that got no answer loses them, and the next one raises Busy.
    """

    def __init__(self, extent: Extent) -> None:
        self._extent = extent
        self._lent: list[memoryview] = []
        self._rows = Rows.lay(extent, np.zeros(0, np.uint32))

    @property
    def nbytes(self) -> int:
        return self._extent.nbytes

    @property
    def view(self) -> memoryview:
        """All of it, writable; invalid when the lease ends."""
        return self._lend([self._extent.view[:]])[0]

    def slots(self, lengths: Iterable[int]) -> list[memoryview]:
        """Lay out slots of these lengths; return them, writable, invalid when the lease ends.

        What is put or got next is about these slots. Raises UsageError if they do not fit.
        """
        sizes = np.array(list(lengths), np.uint32)
        self._rows = Rows.lay(self._extent, sizes)
        return self._lend(self._rows.views())

    def rows(self, count: int) -> Rows:
        """Return where the slots lie. Raises UsageError unless there are ``count`` of them."""
        if self._extent.released:
            raise errors.UsageError("this staging memory was given back", "lease it again")
        if len(self._rows.lengths) != count:
            raise errors.UsageError(
                f"{count} keys for {len(self._rows.lengths)} slots", "lay out as many with slots()"
            )
        return self._rows

    def _lend(self, views: list[memoryview]) -> list[memoryview]:
        self._lent += views
        return views

    def end(self) -> None:
        """Make what was lent useless where it can be: arrays made from it stay readable."""
        for view in self._lent:
            with suppress(BufferError):
                view.release()
        self._lent.clear()


class Operations(Questions):
    """All that a client can do."""

    def __init__(
        self,
        address: str,
        timeout: float,
        new_port: Callable[[], Port],
        *,
        staging_bytes: int = DEFAULT_TOTAL_BYTES,
        check: bool | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        super().__init__(
            address,
            timeout,
            new_port,
            staging_bytes=staging_bytes,
            check=check,
            credentials=credentials,
        )
        self._lengths: dict[Scope, int] = {}
        """About the longest block of the last batches, by scope."""

    def _put_call(
        self,
        namespace: int = DEFAULT_HANDLE,
        shard: int = 0,
        timeout: float | None = None,
        **options: object,
    ) -> tuple[Call, PutOptions]:
        return self._call(namespace, shard, timeout), PutOptions(**options)  # type: ignore[arg-type]

    # -- put --------------------------------------------------------------------------------------

    async def put(self, key: bytes, data: Data, **how: Unpack[PutArguments]) -> str:
        """Store one block; return ``stored`` or ``already_present``.

        Raises StoreFull, KeyConflict, EngineError, Busy and whatever the daemon refuses.
        """
        status = int((await self.put_many([key], [data], **how))[0])
        raise_for(key, status)
        return "stored" if status == BlockStatus.OK else "already_present"

    async def put_many(
        self, keys: Sequence[bytes], blocks: Sequence[Data], **how: Unpack[PutArguments]
    ) -> U8:
        """Store blocks under keys of one length; return a :class:`BlockStatus` for each."""
        call, options = self._put_call(**how)
        names = key_array(keys)
        views = requests.payloads(names, blocks)

        begin = partial(Upload.copy, self._session, call, names, options, views)
        parts = requests.put_parts([len(view) for view in views])
        return await put_all(len(views), parts, options, begin)

    put_from = put_many
    """The same; the counterpart of :meth:`get_into`."""

    async def put_staged(
        self, keys: Sequence[bytes], staging: Staging, **how: Unpack[PutArguments]
    ) -> U8:
        """Store the blocks that lie in the slots of ``staging``; return a status for each."""
        call, options = self._put_call(**how)
        names = key_array(keys)
        refuse_if_lost(self._session)
        rows = staging.rows(len(names))
        requests.payloads(names, rows.views())

        async def begin(part: slice, _: bool) -> Upload:
            mine = rows.take(part)
            return await Upload(self._session, call, names, options, part, mine).begin()

        most = (await self._session.connection(call.limit)).put_bytes
        parts = requests.put_parts(rows.lengths.tolist(), most)
        return await put_all(len(names), parts, options, begin)

    # -- get --------------------------------------------------------------------------------------

    async def get(self, key: bytes, **where: Unpack[Where]) -> bytes | None:
        """Return the block's bytes, or None if it is not there."""
        block = (await self.get_many([key], **where))[0]
        return None if block is None else bytes(block)

    async def get_many(
        self, keys: Sequence[bytes], **where: Unpack[Where]
    ) -> list[memoryview | None]:
        """Return each block's bytes, None for those that are not there."""
        call, names = self._call(**where), key_array(keys)
        blocks: list[memoryview | None] = [None] * len(names)

        def place(position: int, length: int) -> memoryview:
            block = blocks[position] = np.empty(length, np.uint8).data
            return block

        statuses = await self._fill(call, names, self._capacities(call, len(names)), place)
        long = np.flatnonzero(statuses == BlockStatus.TOO_LARGE)
        if len(long):
            again = partial(_placed, place, long.tolist())
            statuses[long] = await self._fill(call, names[long], None, again)
        for position in np.flatnonzero(statuses != BlockStatus.OK).tolist():
            blocks[position] = None
        return blocks

    async def get_into(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[Data],
        **where: Unpack[Where],
    ) -> U8:
        """Copy blocks into writable buffers, one a key; return a :class:`BlockStatus` for each.

        A block longer than its buffer is TOO_LARGE. A buffer whose status is not OK may hold
        anything.
        """
        call, names = self._call(**where), key_array(keys)
        targets = requests.buffers(names, buffers)
        if any(target.readonly for target in targets):
            raise errors.UsageError("a buffer is read-only", "give writable buffers")

        def place(position: int, length: int) -> memoryview | None:
            target = targets[position]
            return target[:length] if length <= len(target) else None

        limits = [min(len(target), MAX_BLOCK_BYTES) for target in targets]
        capacities = np.array(limits, np.uint32)
        return await self._fill(call, names, capacities, place)

    async def get_staged(
        self, keys: Sequence[bytes], staging: Staging, **where: Unpack[Where]
    ) -> Sizes:
        """Have the blocks put into the slots of ``staging``; return statuses and lengths."""
        call, names = self._call(**where), key_array(keys)
        rows = staging.rows(len(names))
        if self._session.lost():
            missing = Found.none(0, len(names))
            return Sizes(missing.statuses, missing.lengths)
        reply = await self._session.ask(requests.get(Op.GET, call.scope, names, rows), call.limit)
        found = Found.read(reply, 0, len(names), rows)
        if len(found) != len(names):
            raise errors.ProtocolError("an answer for some of the keys only", "upgrade kvstore")
        if self._session.checks:
            await self._session.port.work(int(found.lengths.sum()), found.verify_all)
        return Sizes(found.statuses, found.lengths)

    async def stream_get(
        self, keys: Sequence[bytes], *, size: int | None = None, **where: Unpack[Where]
    ) -> AsyncGenerator[Block, None]:
        """Yield (position, status, bytes or None) in the order of the keys, as blocks arrive.

        The bytes are valid until the next step. Closing the iterator cancels the rest. ``size``:
        what most of the blocks have at most, if it is known.
        """
        call, names = self._call(**where), key_array(keys)
        capacities = self._capacities(call, len(names))
        if size is not None:
            capacities = np.full(len(names), size, np.uint32)
        async with aclosing(self._find(call, Op.STREAM_GET, names, capacities)) as answers:
            async for found in answers:
                for offset, view in enumerate(found.views):
                    position, block = found.start + offset, view
                    if (
                        block is not None
                        and self._session.checks
                        and not found.verify(offset, block)
                    ):
                        block = None
                    status = BlockStatus(int(found.statuses[offset]))
                    if status == BlockStatus.TOO_LARGE:
                        name = names[position : position + 1]
                        status, block = await self._get_long(call, name)
                    yield position, status, block

    async def _get_long(self, call: Call, name: KeyArray) -> tuple[BlockStatus, memoryview | None]:
        """Get one block of a stream that was longer than its room."""
        found: list[memoryview] = []

        def place(_: int, length: int) -> memoryview:
            found.append(np.empty(length, np.uint8).data)
            return found[0]

        statuses = await self._fill(call, name, None, place)
        status = BlockStatus(int(statuses[0]))
        return status, found[0] if status == BlockStatus.OK else None

    def _capacities(self, call: Call, count: int) -> U32 | None:
        """Return the room to give to blocks of unknown lengths; None: let them come inline."""
        known = self._lengths.get(call.scope)
        if known is None and count == 1:
            return None
        return np.full(count, known or GUESSED_BYTES, np.uint32)

    async def _fill(
        self,
        call: Call,
        names: KeyArray,
        capacities: U32 | None,
        place: Place,
    ) -> U8:
        """Copy the hits to where ``place(position, length)`` says; return all statuses."""
        statuses = np.zeros(len(names), np.uint8)
        # A stream, so that what has come is copied while the daemon works on the rest.
        async with aclosing(self._find(call, Op.STREAM_GET, names, capacities)) as answers:
            async for found in answers:
                act = partial(found.copy_out, place, self._session.checks)
                await self._session.port.work(int(found.lengths.sum()), act)
                statuses[found.start : found.start + len(found)] = found.statuses
        return statuses

    async def _find(
        self, call: Call, op: Op, names: KeyArray, capacities: U32 | None
    ) -> AsyncGenerator[Found, None]:
        """Yield what is found, in the order of the keys; its bytes are valid until the next step.

        ``capacities``: most bytes of each block, which then come through shared memory; with None
        they come inline.
        """
        room = self._session.regions.room
        if capacities is not None and int(capacities.max(initial=0)) > room:
            capacities = None  # one block at a time would come inline instead
        parts = requests.batches(len(names))
        if capacities is not None:
            # Two parts are under way at a time; what is smaller comes inline anyway.
            parts = requests.get_parts(capacities.tolist(), max(room // 2, SMALL_BYTES))
        begin = partial(Lookup.begin, self._session, call, op, names, capacities)
        async with aclosing(overlapping(parts, begin)) as lookups:
            async for lookup in lookups:
                async with aclosing(lookup.found()) as answers:
                    async for found in answers:
                        self._learn(call, found)
                        yield found

    def _learn(self, call: Call, found: Found) -> None:
        longest = int(found.lengths.max(initial=0))
        if longest:
            before = self._lengths.get(call.scope, 0)
            self._lengths[call.scope] = min(max(longest, before // 2), MAX_BLOCK_BYTES)

    @asynccontextmanager
    async def staging(
        self, nbytes: int, *, timeout: float | None = None
    ) -> AsyncGenerator[Staging, None]:
        """Lease ``nbytes`` of memory shared with the daemon, at most 256 MiB.

        Raises Busy when there is no room for it, UsageError where memory cannot be shared.
        """
        if nbytes < 1:
            raise errors.UsageError(f"{nbytes} bytes cannot be leased", "lease one at least")
        limit = self._call(timeout=timeout).limit
        connection = await self._session.connection(limit)
        extent = await self._session.lease(nbytes, limit)
        if extent is None and not connection.shares_memory:
            raise errors.UsageError(
                "no memory is shared with this daemon", "use put_from, get_into"
            )
        if extent is None:
            raise errors.Busy(f"no {nbytes} bytes of shared memory are free", "lease less")
        staging = Staging(extent)
        try:
            yield staging
        finally:
            staging.end()
            self._session.regions.release(extent)


def _placed(place: Place, positions: list[int], position: int, length: int) -> memoryview | None:
    return place(positions[position], length)


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
    if status == BlockStatus.BUSY:
        raise errors.Busy(f"the daemon had no memory for block {name} in time", "try again")
    if status in (BlockStatus.FAILED, BlockStatus.MISMATCH):
        raise errors.EngineError(f"block {name} could not be written", "see the daemon's log")

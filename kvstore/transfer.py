"""Blocks on their way between a client and the daemon: large batches in parts, two at a time.

While the daemon works on one part, the next one is already made here and sent, so that neither side
waits for the other. A part goes through shared memory where there is some; one that has to travel
inline begins when no other is under way.

Standard library and numpy only: model servers import this module.
"""

from __future__ import annotations

from collections import deque
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from kvstore import errors, requests
from kvstore.answers import BlockStatus
from kvstore.requests import U8, U32, U64, Found, PutOptions, Rows
from kvstore.session import RETRY_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable

    from kvstore.keys import KeyArray
    from kvstore.protocol import Op
    from kvstore.questions import Call
    from kvstore.regions import Extent
    from kvstore.session import Asked, Session

UNDER_WAY = 2
SMALL_BYTES = 256 << 10
"""Below this blocks travel inline: setting up rows would take longer than the copy they save."""


class Part:
    """A part of a batch that is under way; its blocks are in ``extent``, or travel inline."""

    def __init__(self, session: Session, part: slice, extent: Extent | None) -> None:
        self.part = part
        self._session = session
        self._extent = extent
        self._asked: Asked | None = None

    async def close(self) -> None:
        """Let go of it and of its memory, answered or not."""
        try:
            if self._asked is not None:
                await self._session.drop(self._asked)
        finally:
            # Whoever waits for the daemon's word may be cancelled: it is given back all the same.
            if self._extent is not None:
                self._session.regions.release(self._extent)


P = TypeVar("P", bound=Part)


async def overlapping(
    parts: Iterable[slice], begin: Callable[[slice, bool], Awaitable[P | None]]
) -> AsyncGenerator[P, None]:
    """Yield what ``begin`` makes of each part, in order, and close it after the step.

    The part after that has then begun already, unless ``begin``, told that it is not alone, makes
    nothing of it yet.
    """
    waiting, under_way = deque(parts), deque[P]()
    try:
        while waiting or under_way:
            while waiting and len(under_way) < UNDER_WAY:
                part = await begin(waiting[0], not under_way)
                if part is None:
                    break
                waiting.popleft()
                under_way.append(part)
            yield under_way[0]
            await under_way.popleft().close()
    finally:
        async with AsyncExitStack() as rest:
            for part in under_way:
                rest.push_async_callback(part.close)


async def lease(session: Session, call: Call, lengths: U32) -> Extent | None:
    """Lease room for blocks of these lengths; None for those that travel inline."""
    total = int(requests.room(lengths).sum())
    return None if total < SMALL_BYTES else await session.lease(total, call.limit)


class Lookup(Part):
    """Keys that are looked up."""

    def __init__(self, session: Session, part: slice, extent: Extent | None) -> None:
        super().__init__(session, part, extent)
        self._rows: Rows | None = None

    @classmethod
    async def begin(
        cls,
        session: Session,
        call: Call,
        op: Op,
        names: KeyArray,
        capacities: U32 | None,
        part: slice,
        alone: bool,
    ) -> Lookup | None:
        """Ask for ``names[part]``; most bytes of each in ``capacities``, None to have them inline.

        None if it is not alone and has to travel inline.
        """
        if session.lost():
            return cls(session, part, None)
        extent = None if capacities is None else await lease(session, call, capacities[part])
        if extent is None and not alone:
            return None
        self = cls(session, part, extent)
        try:
            if extent is not None and capacities is not None:
                self._rows = Rows.lay(extent, capacities[part])
            request = requests.get(op, call.scope, names[part], self._rows)
            self._asked = await session.send(request, call.limit)
        except BaseException:
            await self.close()
            raise
        return self

    async def found(self) -> AsyncGenerator[Found, None]:
        """Yield what is found; its bytes are valid until the lookup is closed."""
        start, count = self.part.start, self.part.stop - self.part.start
        if self._asked is None:
            yield Found.none(start, count)
            return
        done = 0
        async with aclosing(self._session.replies(self._asked)) as replies:
            async for reply in replies:
                found = Found.read(reply, done, count, self._rows)
                done += len(found)
                found.start += start
                yield found
        if done < count:
            raise errors.ProtocolError("an answer for some of the keys only", "upgrade kvstore")


class Upload(Part):
    """Blocks that are put: rows of memory that is shared, or views that travel inline.

    ``extent`` is None too where the rows are the caller's to give back.
    """

    def __init__(
        self,
        session: Session,
        call: Call,
        names: KeyArray,
        options: PutOptions,
        part: slice,
        blocks: list[memoryview] | Rows,
        extent: Extent | None = None,
    ) -> None:
        super().__init__(session, part, extent)
        self._call = call
        self._names = names
        self._options = options
        self._blocks = blocks
        self._sums: U64 | None = None

    @classmethod
    async def copy(
        cls,
        session: Session,
        call: Call,
        names: KeyArray,
        options: PutOptions,
        views: list[memoryview],
        part: slice,
        alone: bool,
    ) -> Upload | None:
        """Put ``views[part]``, copied to shared memory if there is some.

        None if it is not alone and has to travel inline. Raises Busy when too much memory is lost.
        """
        mine = views[part]
        lengths = np.fromiter(map(len, mine), np.uint32, len(mine))
        extent = await lease(session, call, lengths)
        if extent is None:
            refuse_if_lost(session)
            if not alone:
                return None
            return await cls(session, call, names, options, part, mine).begin()
        self = cls(session, call, names, options, part, Rows.lay(extent, lengths), extent)
        return await self.begin(mine)

    async def begin(self, sources: list[memoryview] | None = None) -> Upload:
        """Make the blocks ready, copied from ``sources`` where they are not in their rows yet, and
        send them; those of a chain wait for their turn."""
        work = self._session.port.work
        try:
            await self._session.connection(self._call.limit)
            blocks = self._blocks
            views = blocks.views() if isinstance(blocks, Rows) else blocks
            nbytes = sum(map(len, views))
            if sources is not None:
                await work(nbytes, partial(requests.copy_all, views, sources))
            if self._session.checks:
                self._sums = await work(nbytes, partial(requests.checksums_of, views))
            if not self._options.chain:
                self._asked = await self._send(slice(0, len(views)))
        except BaseException:
            await self.close()
            raise
        return self

    async def _send(self, run: slice) -> Asked:
        names_of = slice(self.part.start + run.start, self.part.start + run.stop)
        blocks, sums = self._blocks, None if self._sums is None else self._sums[run]
        some = blocks.take(run) if isinstance(blocks, Rows) else blocks[run]
        request = requests.put(self._call.scope, self._names, names_of, some, self._options, sums)
        return await self._session.send(request, self._call.limit)

    async def answers(self) -> U8:
        """Return the statuses; blocks without room are put again until the time is over."""
        count = self.part.stop - self.part.start
        if self._asked is None:
            self._asked = await self._send(slice(0, count))
        answers = requests.statuses(await self._session.answer(self._asked), count)
        while (answers == BlockStatus.BUSY).any() and not self._call.over:
            await self._session.port.sleep(RETRY_SECONDS)
            for run in requests.runs(np.flatnonzero(answers == BlockStatus.BUSY).tolist()):
                reply = await self._session.answer(await self._send(run))
                answers[run] = requests.statuses(reply, run.stop - run.start)
        return answers


async def put_all(
    count: int,
    parts: Iterable[slice],
    options: PutOptions,
    begin: Callable[[slice, bool], Awaitable[Upload | None]],
) -> U8:
    """Put a batch of ``count`` blocks part by part; return all answers.

    What follows a block of a chain that is not there could never be reached: it would only push out
    the beginning of its own chain. So behind the part with the gap no other one is sent.
    """
    answers = np.zeros(count, np.uint8)
    reached = 0
    async with aclosing(overlapping(parts, begin)) as uploads:
        async for upload in uploads:
            answers[upload.part] = await upload.answers()
            reached = upload.part.stop
            gap = answers[:reached] > BlockStatus.ALREADY_PRESENT
            if options.chain and gap.any():
                break
    answers[reached:] = answers[:reached].max(initial=0)
    return answers


def refuse_if_lost(session: Session) -> None:
    if session.lost():
        raise errors.Busy(
            "too much memory is lost to a daemon that does not answer", "see kvstore status"
        )

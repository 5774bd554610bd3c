"""What a client can ask about blocks without moving their bytes, and its administration.

The rest of what a client can do, and how these coroutines are used, is in operations.py.

Standard library and numpy only: model servers import this module.
"""

from __future__ import annotations

import math
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from kvstore import errors, protocol, requests
from kvstore.answers import BlockStatus
from kvstore.keys import KeyArray, key_array
from kvstore.protocol import DEFAULT_HANDLE, Flag, Frame, Op
from kvstore.regions import DEFAULT_REGION_BYTES, DEFAULT_TOTAL_BYTES, pages
from kvstore.requests import U8, Events, LateError, Request, Scope
from kvstore.session import RETRY_SECONDS, Session

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence

    from typing_extensions import Unpack

    from kvstore.credentials import Credentials
    from kvstore.exchange import Reply
    from kvstore.waiting import Port

DEFAULT_LEASE = protocol.DEFAULT_LEASE_MS / 1000
PART_SECONDS = 600.0


class Where(TypedDict, total=False):
    """Which keys a call is about, and how long it may take."""

    namespace: int
    """What ``namespace()`` returned; the namespace ``default`` without."""
    shard: int
    timeout: float | None
    """Seconds for the whole call; the client's without."""


class Call(NamedTuple):
    """The scope of a call and the time by which it ends."""

    scope: Scope
    limit: float

    @property
    def over(self) -> bool:
        return time.monotonic() + RETRY_SECONDS > self.limit


class Questions:
    """The questions. ``address`` is the path of a Unix socket, ``tls://`` or ``tcp://HOST:PORT``.

    Every call raises DaemonUnavailable when nobody listens, PermissionDenied when this user may not
    connect, DeadlineExceeded when no answer came in time, and whatever the daemon answered. After
    four regions of shared memory were lost to a daemon that does not answer, gets miss and puts
    raise Busy until it does or has ended.

    ``timeout``: seconds for a call that names none. ``staging_bytes``: most bytes of shared memory
    that batches may take. ``check``: send and compare checksums; None means where xxhash is there.
    ``credentials``: files for TCP; None means those that the environment names.
    """

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
        self.timeout = timeout
        region_bytes = min(DEFAULT_REGION_BYTES, pages(staging_bytes))
        self._session = Session(
            str(address), new_port, region_bytes, staging_bytes, check, credentials
        )

    def _call(
        self, namespace: int = DEFAULT_HANDLE, shard: int = 0, timeout: float | None = None
    ) -> Call:
        seconds = self.timeout if timeout is None else timeout
        return Call(Scope(namespace, shard), time.monotonic() + seconds)

    def close(self) -> None:
        """Close the connection. May be called twice; the next call opens it again."""
        self._session.close()

    async def namespace(
        self,
        record: Mapping[str, object],
        *,
        create: bool = False,
        timeout: float | None = None,
    ) -> int:
        """Open a namespace by its record; return this client's number of it.

        Raises UnknownNamespace when it does not exist and ``create`` is false.
        """
        return await self._session.open(record, create, self._call(timeout=timeout).limit)

    # -- questions about keys ---------------------------------------------------------------------

    async def contains(
        self, keys: Sequence[bytes], *, lease: float = DEFAULT_LEASE, **where: Unpack[Where]
    ) -> npt.NDArray[np.bool_]:
        """Return a mask: which of the keys a get would find.

        Those will be found for ``lease`` seconds, as far as leases are granted.
        """
        call, names = self._call(**where), key_array(keys)
        mask = np.zeros(len(names), np.bool_)
        if self._session.lost():
            return mask
        number = int(lease * 1000)
        async for part, reply in self._ask_about(call, Op.CONTAINS, names, number):
            mask[part] = requests.statuses(reply, part.stop - part.start)
        return mask

    async def prefix(
        self, keys: Sequence[bytes], *, lease: float = DEFAULT_LEASE, **where: Unpack[Where]
    ) -> int:
        """Return how many of the keys a get would find, up to the first that it would not."""
        call, names = self._call(**where), key_array(keys)
        total = 0
        if self._session.lost():
            return total
        number = int(lease * 1000)
        async for part, reply in self._ask_about(call, Op.CONTAINS, names, number, Flag.PREFIX):
            total += int(reply.meta.u32(1)[0])
            if total < part.stop:
                break
        return total

    async def touch(self, keys: Sequence[bytes], **where: Unpack[Where]) -> None:
        """Count the blocks as used just now."""
        async for _ in self._ask_about(self._call(**where), Op.TOUCH, key_array(keys)):
            pass

    async def delete(self, keys: Sequence[bytes], **where: Unpack[Where]) -> int:
        """Remove blocks by name; return how many were there."""
        statuses = await self._statuses(self._call(**where), Op.DELETE, keys)
        if (statuses == BlockStatus.FAILED).any():
            raise errors.EngineError("not all blocks could be deleted", "see the daemon's log")
        return int((statuses == BlockStatus.OK).sum())

    async def pin(self, keys: Sequence[bytes], seconds: int, **where: Unpack[Where]) -> U8:
        """Keep blocks from being evicted for a time; return OK, MISS or FULL for each."""
        return await self._statuses(self._call(**where), Op.PIN, keys, int(seconds))

    async def unpin(self, keys: Sequence[bytes], **where: Unpack[Where]) -> U8:
        """End the pins of blocks; return OK or MISS for each."""
        return await self._statuses(self._call(**where), Op.UNPIN, keys)

    async def _statuses(
        self, call: Call, op: Op, keys: Sequence[bytes], number: int | None = None
    ) -> U8:
        names = key_array(keys)
        statuses = np.zeros(len(names), np.uint8)
        async for part, reply in self._ask_about(call, op, names, number):
            statuses[part] = requests.statuses(reply, part.stop - part.start)
        return statuses

    async def _ask_about(
        self, call: Call, op: Op, names: KeyArray, number: int | None = None, flags: int = 0
    ) -> AsyncIterator[tuple[slice, Reply]]:
        for part in requests.batches(len(names)):
            request = requests.question(op, call.scope, names[part], number, flags=flags)
            yield part, await self._session.ask(request, call.limit)

    async def subscribe(
        self, namespace: int = DEFAULT_HANDLE, *, timeout: float | None = None
    ) -> AsyncGenerator[Events, None]:
        """Yield what is stored and removed in a namespace, from now on.

        The first item has no keys: it says that the subscription stands, and the number that the
        first event will have. Ends after ``timeout`` seconds without an event; without one it
        waits for ever. Closing the iterator ends the subscription.
        """
        request = Request(Frame(Op.SUBSCRIBE), scope=Scope(namespace))
        idle = math.inf if timeout is None else timeout
        start = self._call().limit
        asked = await self._session.send(request, math.inf, start)
        async with aclosing(self._session.replies(asked, idle)) as replies:
            try:
                async for reply in replies:
                    yield Events.read(reply)
            except errors.DeadlineExceeded:
                return

    # -- administration ---------------------------------------------------------------------------

    async def flush(self, *, timeout: float | None = None) -> list[LateError]:
        """Return when everything that was written before survives power loss.

        Blocks that were accepted and could not be written are listed, each of them once, to the
        first who asks and may hear of it.
        """
        reply = await self._session.ask(Request(Frame(Op.FLUSH)), self._call(timeout=timeout).limit)
        return LateError.read(reply)

    async def status(self, *, timeout: float | None = None) -> dict[str, object]:
        """Return the daemon's figures, as in ``kvstore status --json``."""
        return await self.admin({"op": "status"}, timeout=timeout)

    async def list(
        self, namespace: int | None = None, limit: int | None = None
    ) -> AsyncGenerator[tuple[str, int, str], None]:
        """Yield (namespace id, shard, key) of the blocks that are there, ids and keys in hex."""
        start: object = 0
        left = limit if limit is not None else 1 << 62
        while start is not None and left > 0:
            until = self._call().limit
            handle = None
            if namespace is not None:
                connection = await self._session.connection(until)
                handle = await self._session.handle(connection, namespace, until)
            answer = await self.admin({"op": "list", "handle": handle, "start": start})
            blocks = answer.get("blocks")
            for identity, shard, key in (blocks if isinstance(blocks, list) else [])[:left]:
                yield str(identity), int(shard), str(key)
                left -= 1
            start = answer.get("next")

    async def follow(
        self, request: Mapping[str, object], *, idle: float = PART_SECONDS
    ) -> AsyncGenerator[dict[str, object], None]:
        """Send an administrative request that is answered in parts; yield them as they come.

        ``idle``: seconds until the next part must be there. Closing the iterator ends the request.
        """
        sent = requests.spoken(Op.ADMIN, request)
        asked = await self._session.send(sent, math.inf, self._call().limit)
        async with aclosing(self._session.replies(asked, idle)) as replies:
            async for reply in replies:
                yield reply.meta.json()

    async def admin(
        self, request: Mapping[str, object], *, timeout: float | None = None
    ) -> dict[str, object]:
        """Send an administrative request; docs/protocol.md lists them."""
        until = self._call(timeout=timeout).limit
        reply = await self._session.ask(requests.spoken(Op.ADMIN, request), until)
        return reply.meta.json()

"""What clients ask and what they are answered: requests encoded, replies decoded, nothing sent.

Standard library and numpy only: model servers import this module. Checksums are computed where
xxhash happens to be installed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore import errors, protocol
from kvstore.answers import Ack, BlockStatus
from kvstore.keys import KeyArray, check_block_length, check_shard
from kvstore.protocol import DEFAULT_HANDLE, INLINE, U32_LE, U64_LE, Event, Flag, Frame, Op
from kvstore.regions import pages

try:
    import xxhash
except ImportError:
    xxhash = None  # type: ignore[assignment, unused-ignore]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvstore.exchange import Reply
    from kvstore.regions import Extent

    Data = bytes | bytearray | memoryview | npt.NDArray[Any]

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

CAN_CHECK = xxhash is not None
CHECKSUM = "xxh3-64"
"""The name under which a daemon says that it checks what we compute."""
GET_BYTES = 128 << 20
"""What the blocks of one get may take in memory that is shared."""
_PAGE = 4096


class Scope(NamedTuple):
    """Where keys live: the client's number of a namespace, and a shard."""

    namespace: int = DEFAULT_HANDLE
    shard: int = 0


NOWHERE = Scope()


@dataclass(frozen=True)
class Request:
    """A request that is ready but for what its connection adds."""

    frame: Frame
    meta: bytes = b""
    scope: Scope = NOWHERE
    payload: Sequence[memoryview] = ()
    extent: Extent | None = None
    """Holds the blocks, instead of ``payload``."""
    descriptor: int | None = None


class Rows(NamedTuple):
    """Where blocks lie in an extent: offsets in its region, and the bytes each may take."""

    extent: Extent
    offsets: U64
    lengths: U32

    @classmethod
    def lay(cls, extent: Extent, lengths: U32) -> Rows:
        """Lay blocks of these lengths one after another, each on a page of its own."""
        ends = np.cumsum(room(lengths))
        if len(ends) and int(ends[-1]) > extent.nbytes:
            raise errors.UsageError(
                f"blocks of {int(ends[-1])} bytes do not fit into {extent.nbytes}",
                "lease more; every block begins on a page of 4096 bytes",
            )
        starts = np.concatenate([np.zeros(1, np.uint64), ends[:-1]])[: len(ends)]
        return cls(extent, starts + np.uint64(extent.offset), lengths)

    def views(self, lengths: U32 | None = None) -> list[memoryview]:
        """Return the memory of each block, as long as its row or as ``lengths`` say."""
        sizes = self.lengths if lengths is None else np.minimum(lengths, self.lengths)
        whole, first = self.extent.view, self.extent.offset
        pairs = zip((self.offsets - np.uint64(first)).tolist(), sizes.tolist(), strict=True)
        return [whole[start : start + size] for start, size in pairs]

    def take(self, run: slice) -> Rows:
        return Rows(self.extent, self.offsets[run], self.lengths[run])


def room(lengths: U32) -> U64:
    """Return the bytes that blocks take when each begins on a page."""
    sizes: U64 = (lengths.astype(np.uint64) + np.uint64(_PAGE - 1)) & ~np.uint64(_PAGE - 1)
    return sizes


@dataclass(frozen=True)
class PutOptions:
    """Everything about a put but its blocks."""

    ack: str = "accepted"
    chain: bool = False
    parent: bytes | None = None
    label: str = ""
    overwrite: bool = False
    session: str = ""
    end_of_session: bool = False
    priority: int = 0
    _label: bytes = field(default=b"", init=False)
    _hints: bytes = field(default=b"", init=False)

    def __post_init__(self) -> None:
        level(self.ack)
        try:
            label = self.label.encode()
        except UnicodeEncodeError:
            raise errors.UsageError("a label cannot be written as UTF-8", "use Unicode") from None
        object.__setattr__(self, "_label", label)
        hints: dict[str, object] = {}
        if self.session:
            hints["session"] = self.session
        if self.end_of_session:
            hints["end_of_session"] = True
        if self.priority:
            hints["priority"] = self.priority
        object.__setattr__(self, "_hints", protocol.dump(hints) if hints else b"")

    @property
    def flags(self) -> int:
        return (Flag.CHAIN if self.chain else 0) | (Flag.OVERWRITE if self.overwrite else 0)

    def tail(self, keys: KeyArray, start: int) -> bytes:
        """Return the fields that end a put of the blocks from ``start`` on."""
        before = self.parent or b""
        if start:
            before = keys[start - 1].tobytes() if self.chain else b""
        fields = (before, self._label, self._hints)
        return b"".join(map(protocol.short, fields))


def put(
    scope: Scope,
    keys: KeyArray,
    part: slice,
    blocks: Sequence[memoryview] | Rows,
    options: PutOptions,
    checksums: U64 | None,
) -> Request:
    """Ask to store ``blocks``, those of ``keys[part]``."""
    names = keys[part]
    rows = blocks if isinstance(blocks, Rows) else None
    if isinstance(blocks, Rows):
        lengths = blocks.lengths
    else:
        lengths = np.fromiter(map(len, blocks), U32_LE, len(names))
    fields = [names.tobytes(), lengths.astype(U32_LE).tobytes()]
    if rows:
        fields.append(rows.offsets.astype(U64_LE).tobytes())
    if checksums is not None:
        fields.append(checksums.astype(U64_LE).tobytes())
    fields.append(options.tail(keys, part.start))
    flags = options.flags | (0 if checksums is None else Flag.CHECKSUM)
    frame = _frame(Op.PUT, scope, names, flags=flags, ack=level(options.ack))
    if rows:
        return Request(frame, b"".join(fields), scope, extent=rows.extent)
    assert not isinstance(blocks, Rows)
    return Request(frame, b"".join(fields), scope, blocks)


def get(op: Op, scope: Scope, names: KeyArray, rows: Rows | None) -> Request:
    """Ask for blocks, into ``rows`` or along with the reply."""
    frame = _frame(op, scope, names)
    if rows is None:
        return Request(frame, names.tobytes(), scope)
    offsets, lengths = rows.offsets.astype(U64_LE), rows.lengths.astype(U32_LE)
    meta = names.tobytes() + offsets.tobytes() + lengths.tobytes()
    return Request(frame, meta, scope, extent=rows.extent)


def question(
    op: Op, scope: Scope, names: KeyArray, number: int | None = None, *, flags: int = 0
) -> Request:
    """Ask something about keys; ``number`` is the u32 that some operations want."""
    if number is not None and not 0 <= number <= 0xFFFFFFFF:
        raise errors.UsageError(f"a time of {number} cannot be sent", "use 0 to 4294967295")
    meta = names.tobytes() + (b"" if number is None else number.to_bytes(4, "little"))
    return Request(_frame(op, scope, names, flags=flags), meta, scope)


def spoken(op: Op, content: Mapping[str, object], descriptor: int | None = None) -> Request:
    """Ask something in JSON."""
    return Request(Frame(op), protocol.dump(content), descriptor=descriptor)


def _frame(op: Op, scope: Scope, names: KeyArray, *, flags: int = 0, ack: int = 0) -> Frame:
    return Frame(
        op,
        flags=flags,
        shard=check_shard(scope.shard),
        key_length=names.shape[1],
        ack=ack,
        region=INLINE,
        count=len(names),
    )


@dataclass
class Found:
    """Answers for keys from ``start`` on: status, length and checksum each, bytes for the hits."""

    start: int
    statuses: U8
    lengths: U32
    checksums: U64
    views: list[memoryview | None]

    def __len__(self) -> int:
        return len(self.statuses)

    @classmethod
    def none(cls, start: int, count: int) -> Found:
        statuses = np.full(count, BlockStatus.MISS, np.uint8)
        zeros = np.zeros(count, np.uint32)
        return cls(start, statuses, zeros, zeros.astype(np.uint64), [None] * count)

    @classmethod
    def read(cls, reply: Reply, start: int, asked: int, rows: Rows | None) -> Found:
        """Decode a reply to a get of ``asked`` keys, of which ``start`` have been answered.

        Raises ProtocolError when lengths make no sense.
        """
        count, meta = reply.frame.count, reply.meta
        if not 0 < count <= asked - start:
            raise errors.ProtocolError(f"{count} answers for {asked - start} keys", "upgrade")
        found = cls(start, meta.u8(count).copy(), meta.u32(count), meta.u64(count), [None] * count)
        hits = np.flatnonzero(found.statuses == BlockStatus.OK)
        lengths = found.lengths[hits]
        if rows is None:
            views = _cut(reply.payload, lengths.tolist())
        else:
            mine = Rows(rows.extent, rows.offsets[start:][hits], rows.lengths[start:][hits])
            if (lengths > mine.lengths).any():
                raise errors.ProtocolError("a block longer than its room was said", "upgrade")
            views = mine.views(lengths)
        for position, view in zip(hits.tolist(), views, strict=True):
            found.views[position] = view
        return found

    def verify(self, position: int, copy: memoryview) -> bool:
        """Compare a block with its checksum; one that differs becomes a MISMATCH."""
        good = checksum(copy) == int(self.checksums[position])
        if not good:
            self.statuses[position] = BlockStatus.MISMATCH
        return good

    def verify_all(self) -> None:
        for position, view in enumerate(self.views):
            if view is not None:
                self.verify(position, view)

    def copy_out(self, place: Callable[[int, int], memoryview | None], check: bool) -> None:
        """Copy each hit to ``place(position, length)``; without a place it is TOO_LARGE."""
        for offset, view in enumerate(self.views):
            if view is None:
                continue
            target = place(self.start + offset, len(view))
            if target is None:
                self.statuses[offset] = BlockStatus.TOO_LARGE
                continue
            copy(target, view)
            if check:
                self.verify(offset, target)


def _cut(payload: memoryview, lengths: Sequence[int]) -> list[memoryview]:
    ends = list(itertools.accumulate(lengths, initial=0))
    if ends[-1] != len(payload):
        raise errors.ProtocolError("a payload that is not as long as its blocks", "upgrade")
    return [payload[start:end] for start, end in itertools.pairwise(ends)]


def statuses(reply: Reply, count: int) -> U8:
    """Decode a reply of one byte a key."""
    answers: U8 = reply.meta.u8(count).copy()
    return answers


class Events(NamedTuple):
    """Some changes of a namespace, in order."""

    sequence: int
    """Number of the first one."""
    kinds: U8
    """:class:`~kvstore.protocol.Event`, one each."""
    keys: KeyArray
    gap: bool
    """Changes before the first one were lost."""

    @property
    def stored(self) -> list[bytes]:
        return [key.tobytes() for key in self.keys[self.kinds == Event.STORED]]

    @property
    def removed(self) -> list[bytes]:
        return [key.tobytes() for key in self.keys[self.kinds == Event.REMOVED]]

    @classmethod
    def read(cls, reply: Reply) -> Events:
        frame, meta = reply.frame, reply.meta
        first = int(meta.u64(1)[0])
        kinds = meta.u8(frame.count)
        return cls(
            first, kinds, meta.keys(frame.count, frame.key_length), bool(frame.flags & Flag.GAP)
        )


class LateError(NamedTuple):
    """A block that was accepted and could not be kept."""

    namespace: str
    shard: int
    key: str
    reason: str

    @classmethod
    def read(cls, reply: Reply) -> list[LateError]:
        listed = reply.meta.json().get("errors")
        return [
            cls(str(one["namespace"]), int(one["shard"]), str(one["key"]), str(one["reason"]))
            for one in (listed if isinstance(listed, list) else [])
        ]


def checksum(data: memoryview) -> int:
    """Return xxh3-64 of ``data``. Only where xxhash is installed."""
    return xxhash.xxh3_64_intdigest(data)


def checksums_of(views: Sequence[memoryview]) -> U64:
    return np.fromiter(map(checksum, views), np.uint64, len(views))


def level(ack: str) -> Ack:
    try:
        return Ack[ack.upper()]
    except KeyError:
        raise errors.UsageError(
            f"acknowledgement level {ack!r} is unknown", "use accepted, written or durable"
        ) from None


def payloads(names: KeyArray, blocks: Sequence[Data]) -> list[memoryview]:
    """Return blocks as views of bytes, each of them of a length that is allowed."""
    views = buffers(names, blocks)
    for name, view in zip(names, views, strict=True):
        check_block_length(len(view), name.tobytes())
    return views


def buffers(names: KeyArray, blocks: Sequence[Data]) -> list[memoryview]:
    """Return one view of bytes a key. Raises UsageError where there are more or fewer."""
    views = [memoryview(block).cast("B") for block in blocks]  # type: ignore[arg-type, unused-ignore]
    if len(views) != len(names):
        raise errors.UsageError(f"{len(names)} keys for {len(views)} blocks", "send as many")
    return views


def batches(count: int) -> Iterator[slice]:
    """Cut a batch into runs that may be asked for at once."""
    for start in range(0, count, protocol.MAX_KEYS):
        yield slice(start, min(start + protocol.MAX_KEYS, count))


def put_parts(lengths: Sequence[int], most: int = protocol.PUT_BYTES) -> Iterator[slice]:
    """Cut a batch into runs that one put carries, of ``most`` bytes; one block always fits.

    The first run has no more than PUT_BYTES, so that the daemon begins early.
    """
    # What a block takes in the daemon's memory: whole pages, and one for its header.
    return _parts(
        [pages(length) + _PAGE for length in lengths], most, min(most, protocol.PUT_BYTES)
    )


def get_parts(capacities: Sequence[int], limit: int) -> Iterator[slice]:
    """Cut a batch into runs that one get asks for, into ``limit`` bytes; one block always fits."""
    most = min(limit, GET_BYTES)
    return _parts([pages(capacity) for capacity in capacities], most, most)


def _parts(sizes: list[int], most: int, first: int) -> Iterator[slice]:
    start = total = 0
    for number, size in enumerate(sizes):
        limit = most if start else first
        full = total + size > limit or number - start >= protocol.MAX_KEYS
        if number > start and full:
            yield slice(start, number)
            start, total = number, 0
        total += size
    if sizes:
        yield slice(start, len(sizes))


def runs(positions: Sequence[int]) -> Iterator[slice]:
    """Yield the runs of neighbours in ascending positions."""
    start = None
    for position in positions:
        if start is None:
            start = end = position
        elif position == end + 1:
            end = position
        else:
            yield slice(start, end + 1)
            start = end = position
    if start is not None:
        yield slice(start, end + 1)


def copy(target: memoryview, source: memoryview) -> None:
    """Copy without holding the interpreter lock, as slices would."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def copy_all(targets: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
    for target, source in zip(targets, sources, strict=True):
        copy(target, source)

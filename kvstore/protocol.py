"""Frames between a client and the daemon: their bytes, the same for both sides.

docs/protocol.md describes them for writers of clients in other languages. In short: a frame is a
40-byte little-endian header, then ``meta_bytes`` of metadata, then ``payload_bytes`` of block
payloads, back to back and unpadded.

====== ==== ======================================================================
offset type header field
====== ==== ======================================================================
0      4s   magic ``KVF1``
4      u8   operation (:class:`Op`); a reply repeats it
5      u8   flags (:class:`Flag`)
6      u16  header length, at least 40; what comes after the 40th byte is skipped
8      u64  request id, chosen by the client, unique on its connection; replies repeat it
16     u16  namespace handle of this connection; 0 = the namespace ``default``
18     u16  shard
20     u8   key length, bytes
21     u8   PUT: acknowledgement level (:class:`~kvstore.answers.Ack`)
22     u16  region of this connection that holds the blocks; 0 = they travel in the payload
24     u32  count of blocks in this frame
28     u32  deadline in milliseconds from now; 0 = the daemon's own limit
32     u32  meta_bytes, at most 16 MiB
36     u32  payload_bytes, at most 64 MiB
====== ==== ======================================================================

Metadata, in this order (n = count, k = key length, short = u8 length + bytes):

========== ================================================================================
HELLO      JSON both ways; the reply on a Unix socket carries a pidfd of the daemon
NAMESPACE  JSON ``{"record", "create"}``; reply ``{"handle", "id", "key_length"}``
REGISTER   JSON ``{"bytes"}``, one memfd attached; reply ``{"region"}``
UNREGISTER nothing (region in the header)
PUT        keys n*k, lengths u32*n, offsets u64*n if a region is named, checksums u64*n with the
           flag CHECKSUM, first parent short, label short, hints short (empty or JSON
           ``{"session", "end_of_session", "priority"}``, all optional).
           Reply: status u8*n
GET        keys n*k; with a region offsets u64*n and capacities u32*n. Replies: each for the next
           ``count`` keys, all but the last with MORE: status u8*count, lengths u32*count,
           checksums u64*count. One reply, after the last block, when a region is named
STREAM_GET as GET, but a reply as soon as the next blocks in order are there, with a region too
CONTAINS   keys n*k, lease u32 ms (0 = none). Reply: u8*n; with the flag PREFIX one u32
TOUCH      keys n*k. Reply: nothing
DELETE     keys n*k. Reply: status u8*n
PIN        keys n*k, seconds u32. Reply: status u8*n.  UNPIN: keys n*k. Reply: status u8*n
FLUSH      nothing. Reply: JSON ``{"errors": [{"namespace", "shard", "key", "reason"}]}``
CANCEL     request id u64. Reply: nothing, after the daemon's last access for that request, which
           is answered before with ERROR Cancelled unless it had been answered. Ends a SUBSCRIBE too
SUBSCRIBE  nothing (namespace in the header). Reply: u64 next sequence number
EVENT      from the daemon, request id of the SUBSCRIBE: first sequence number u64, kinds u8*n
           (:class:`Event`), keys n*k; with the flag GAP some were lost before the first one
ADMIN      JSON both ways
========== ================================================================================

A failed request is answered by the flag ERROR and JSON ``{"error", "message", "hint", "code"}``.

Standard library and numpy only: model servers import this module.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag

import numpy as np
import numpy.typing as npt

from kvstore import errors
from kvstore.answers import Ack
from kvstore.keys import MAX_BLOCK_BYTES, MAX_KEY_BYTES, KeyArray

VERSION = 1
MAGIC = b"KVF1"
HEADER = struct.Struct("<4sBBHQHHBBHIIII")
HEADER_BYTES = HEADER.size
MAX_HEADER_BYTES = 1024
MAX_META_BYTES = 16 << 20
MAX_ADMIN_BYTES = 128 << 10
"""JSON in requests is parsed by the thread that serves everybody. Replies may be longer."""
MAX_PAYLOAD_BYTES = MAX_BLOCK_BYTES
"""At most this many payload bytes in one frame; a client splits larger batches."""
MAX_KEYS = 65_536
PUT_BYTES, MOST_PUT_BYTES = 32 << 20, 96 << 20
"""What the blocks of one put should take in the daemon's memory, header pages included: so much if
it says nothing else, and the most that it ever asks for."""
MAX_REGION_BYTES = 256 << 20
DEFAULT_HANDLE = 0
INLINE = 0
"""The region number that means: blocks travel in the payload."""
DEFAULT_LEASE_MS = 5000

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
U32_LE = np.dtype("<u4")
U64_LE = np.dtype("<u8")


class Op(IntEnum):
    HELLO = 1
    NAMESPACE = 2
    REGISTER = 3
    UNREGISTER = 4
    PUT = 5
    GET = 6
    STREAM_GET = 7
    CONTAINS = 8
    TOUCH = 9
    DELETE = 10
    PIN = 11
    UNPIN = 12
    FLUSH = 13
    CANCEL = 14
    SUBSCRIBE = 15
    EVENT = 16
    ADMIN = 17


JSON_OPS = frozenset({Op.HELLO, Op.NAMESPACE, Op.REGISTER, Op.ADMIN})
"""Operations whose requests carry JSON."""


class Flag(IntFlag):
    MORE = 1
    ERROR = 2
    CHAIN = 4
    """PUT: each block is the parent of the next one in the batch."""
    PREFIX = 8
    """CONTAINS: answer with the length of the longest unbroken run from the first key."""
    OVERWRITE = 16
    """PUT: a known key gets a new version."""
    CHECKSUM = 32
    """PUT: xxh3-64 of each payload follows; the daemon refuses a block that does not match."""
    GAP = 64
    """EVENT: events before the first one of this frame were lost."""


class Event(IntEnum):
    STORED = 1
    REMOVED = 2


_FIELDS = (
    *("request", "handle", "shard", "key_length", "ack", "region"),
    *("count", "deadline_ms", "meta_bytes", "payload_bytes"),
)


@dataclass(frozen=True)
class Frame:
    """The header of a frame, decoded."""

    op: int
    flags: int = 0
    request: int = 0
    handle: int = DEFAULT_HANDLE
    shard: int = 0
    key_length: int = 0
    ack: int = Ack.ACCEPTED
    region: int = INLINE
    count: int = 0
    deadline_ms: int = 0
    meta_bytes: int = 0
    payload_bytes: int = 0
    header_bytes: int = HEADER_BYTES

    def pack(self) -> bytes:
        return HEADER.pack(
            MAGIC,
            self.op,
            self.flags,
            HEADER_BYTES,
            self.request,
            self.handle,
            self.shard,
            self.key_length,
            self.ack,
            self.region,
            self.count,
            self.deadline_ms,
            self.meta_bytes,
            self.payload_bytes,
        )


def unpack(buffer: bytes | bytearray | memoryview, *, reply: bool = False) -> Frame:
    """Decode and bound the first 40 bytes of a header; a client reads a ``reply``.

    Raises ProtocolError before anything is allocated for the frame. Whether the operation is known
    is for the caller to say, who can then still skip the frame.
    """
    magic, op, flags, size, *fields = HEADER.unpack(buffer)
    values = dict(zip(_FIELDS, fields, strict=True))
    if magic != MAGIC:
        raise errors.ProtocolError("these bytes are no frame", "speak the protocol of kvstore")
    if not HEADER_BYTES <= size <= MAX_HEADER_BYTES:
        raise errors.ProtocolError(f"a header of {size} bytes", f"send {HEADER_BYTES}")
    frame = Frame(op, flags, header_bytes=size, **values)
    limit = MAX_ADMIN_BYTES if op in JSON_OPS and not reply else MAX_META_BYTES
    meta, payload = frame.meta_bytes, frame.payload_bytes
    if meta > limit or payload > MAX_PAYLOAD_BYTES or frame.count > MAX_KEYS:
        raise errors.ProtocolError(
            f"a frame of {frame.count} keys, {meta} bytes of metadata and {payload} of payload",
            f"send at most {MAX_KEYS} keys, {limit} and {MAX_PAYLOAD_BYTES} bytes",
        )
    return frame


class Meta:
    """Reads the metadata of a frame from front to back; short metadata is a ProtocolError."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = memoryview(data)
        self._at = 0

    def take(self, length: int) -> memoryview:
        end = self._at + length
        if end > len(self._data):
            raise errors.ProtocolError("the metadata of a frame is too short", "check the client")
        part = self._data[self._at : end]
        self._at = end
        return part

    def keys(self, count: int, length: int) -> KeyArray:
        if count and not 1 <= length <= MAX_KEY_BYTES:
            raise errors.InvalidKey(
                f"a key of {length} bytes was sent", f"a key has 1 to {MAX_KEY_BYTES} bytes"
            )
        return np.frombuffer(self.take(count * length), np.uint8).reshape(count, length)

    def u8(self, count: int) -> U8:
        return np.frombuffer(self.take(count), np.uint8)

    def u32(self, count: int) -> U32:
        return np.frombuffer(self.take(4 * count), U32_LE)

    def u64(self, count: int) -> U64:
        return np.frombuffer(self.take(8 * count), U64_LE)

    def short(self) -> bytes:
        """Take a field of at most 255 bytes that carries its length in one byte."""
        return bytes(self.take(self.take(1)[0]))

    def json(self) -> dict[str, object]:
        try:
            # Decoded here: of bytes json.loads would take UTF-16 and halves of characters too.
            value = json.loads(str(self._data[self._at :], "utf-8"))
        except (ValueError, RecursionError):
            raise errors.ProtocolError("a frame holds no valid JSON", "check the client") from None
        if not isinstance(value, dict):
            raise errors.ProtocolError("a frame holds JSON that is no object", "check the client")
        return value


def short(value: bytes) -> bytes:
    """Encode a field of at most 255 bytes behind its length in one byte."""
    if len(value) > 255:
        raise errors.InvalidKey(f"a field of {len(value)} bytes", "give at most 255 bytes")
    return bytes((len(value),)) + value


def dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def error_meta(error: errors.KVStoreError) -> bytes:
    """Encode an error for the wire."""
    return dump(
        {
            "error": type(error).__name__,
            "message": error.message,
            "hint": error.hint,
            "code": error.exit_code,
        }
    )


def error_from(meta: dict[str, object]) -> errors.KVStoreError:
    """Turn an encoded error back into an exception of the same class."""
    kind = getattr(errors, str(meta.get("error")), None)
    message, hint = str(meta.get("message", "")), str(meta.get("hint", ""))
    if isinstance(kind, type) and issubclass(kind, errors.KVStoreError):
        return kind(message, hint)
    return errors.KVStoreError(message, hint)

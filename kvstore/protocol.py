"""Frames on the socket between a client and the daemon.

Every frame is a 32-byte little-endian header, then ``meta_bytes`` of metadata, then
``payload_bytes`` of block payloads, back to back and unpadded:

====== ==== =====================================================================
offset type meaning
====== ==== =====================================================================
0      u32  meta_bytes, at most 16 MiB
4      u8   operation (:class:`Op`); a reply repeats it
5      u8   flags (:class:`Flag`)
6      u16  namespace handle of this connection; 0 = the namespace ``default``
8      u32  request id, chosen by the client; a reply repeats it
12     u16  shard
14     u8   key length, bytes
15     u8   acknowledgement level asked for (:class:`Ack`)
16     u32  count of blocks in this frame
20     u32  deadline, milliseconds from now; 0 = none
24     u64  payload_bytes
====== ==== =====================================================================

Metadata by operation (n = count, k = key length):

* PUT request: keys n*k, lengths u32*n, first parent (u8 length + bytes), label (u8 length +
  UTF-8). Payload: the blocks. Reply: status u8*n.
* GET request: keys n*k. Replies, in order, each for the next ``count`` keys, all but the last with
  the flag MORE: status u8*count, lengths u32*count (0 unless OK), checksums u64*count. Payload: the
  blocks that are OK.
* CONTAINS request: keys n*k. Reply: u8*n; with the flag PREFIX, one u32.
* DELETE request: keys n*k. Reply: status u8*n.
* ADMIN: JSON in both directions.

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

HEADER = struct.Struct("<IBBHIHBBIIQ")
HEADER_BYTES = HEADER.size
MAX_META_BYTES = 16 << 20
MAX_ADMIN_BYTES = 128 << 10
"""JSON is parsed by the thread that serves everybody."""
MAX_PAYLOAD_BYTES = MAX_BLOCK_BYTES
"""At most this many payload bytes in one frame; a client splits larger batches."""
MAX_KEYS = 65_536
DEFAULT_HANDLE = 0

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
U32_LE = np.dtype("<u4")
U64_LE = np.dtype("<u8")


class Op(IntEnum):
    PUT = 1
    GET = 2
    CONTAINS = 3
    DELETE = 4
    ADMIN = 5


class Flag(IntFlag):
    MORE = 1
    ERROR = 2
    CHAIN = 4
    """PUT: each block is the parent of the next one in the batch."""
    PREFIX = 8
    """CONTAINS: answer with the length of the longest unbroken run from the first key."""


@dataclass(frozen=True)
class Frame:
    """The header of a frame, decoded."""

    op: int
    flags: int = 0
    handle: int = DEFAULT_HANDLE
    request: int = 0
    shard: int = 0
    key_length: int = 0
    ack: int = Ack.ACCEPTED
    count: int = 0
    deadline_ms: int = 0
    meta_bytes: int = 0
    payload_bytes: int = 0

    def pack(self) -> bytes:
        return HEADER.pack(
            self.meta_bytes,
            self.op,
            self.flags,
            self.handle,
            self.request,
            self.shard,
            self.key_length,
            self.ack,
            self.count,
            self.deadline_ms,
            self.payload_bytes,
        )


def unpack(buffer: bytes | bytearray | memoryview, *, reply: bool = False) -> Frame:
    """Decode and bound a header. Raises ProtocolError before anything is allocated for it."""
    meta, op, flags, handle, request, shard, key_length, ack, count, deadline, payload = (
        HEADER.unpack(buffer)
    )
    if meta > MAX_META_BYTES or payload > MAX_PAYLOAD_BYTES or count > MAX_KEYS:
        raise errors.ProtocolError(
            f"a frame of {count} keys, {meta} bytes of metadata and {payload} of payload",
            f"send at most {MAX_KEYS} keys, {MAX_META_BYTES} and {MAX_PAYLOAD_BYTES} bytes",
        )
    if op == Op.ADMIN and meta > MAX_ADMIN_BYTES and not reply:
        raise errors.ProtocolError(
            f"an administrative request of {meta} bytes", f"send at most {MAX_ADMIN_BYTES}"
        )
    if op not in Op._value2member_map_:
        raise errors.ProtocolError(f"operation {op} is unknown", "use the matching client version")
    return Frame(op, flags, handle, request, shard, key_length, ack, count, deadline, meta, payload)


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
            value = json.loads(bytes(self._data[self._at :]))
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

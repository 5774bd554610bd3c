"""The envelope: what a record looks like in bytes. The only code that knows it.

A *record image* is one 4 KiB header page followed by the payload, padded with zeros to 4 KiB. The
header describes itself (store, namespace, shard, key, parent, generation, lengths, checksum of the
payload, optional TLVs) and ends with a checksum over all of it; the byte table is in
docs/formats.md. A read is believed only after :func:`judge` compared it with what was asked for.

Checksums are xxh3-64 of the `xxhash` library, seed 0.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvstore.errors import CorruptBlock, UsageError
from kvstore.keys import (
    MAX_BLOCK_BYTES,
    MAX_KEY_BYTES,
    NAMESPACE_ID_BYTES,
    check_block_length,
    check_shard,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = b"KVB1"
VERSION = 1
HEADER_PAGE = 4096
STORE_UUID_BYTES = 16
MAX_LABEL_BYTES = 255
INCOMPAT_FLAGS = 0xFFFF
"""Flags that a reader must know to understand the record; the upper half may be ignored."""

TLV_LABEL = 1
TLV_NONCE, TLV_TAG, TLV_KEY_ID = 2, 3, 4
"""Reserved: kept as they are, interpreted by nobody yet."""
TLV_PARITY, TLV_CHUNK_SUMS = 5, 6
PARITY_XOR = 1

FIXED = struct.Struct("<4sHHIHBB16s16sQQIIQHHIQ")
_TLV = struct.Struct("<BBH")
_SUM = struct.Struct("<Q")
_PARITY = struct.Struct("<B3sI")
_LENGTH, _LENGTH_AT = struct.Struct("<H"), 6
_ZEROS = memoryview(bytes(HEADER_PAGE))


class Parity(NamedTuple):
    """What the envelope says of a parity chunk behind the payload (:mod:`kvstore.parity`).

    ``sums`` holds the lower 32 bits of xxh3-64 of each chunk of the payload, then of the parity
    chunk, little endian.
    """

    chunk_bytes: int
    sums: bytes


@dataclass(frozen=True, slots=True)
class Header:
    """What the envelope says. Lengths in bytes; ``checksum`` is xxh3-64 of the logical payload.

    ``store`` and ``namespace`` have 16 bytes, ``key`` 1 to 64, ``parent`` 0 (none) to 64;
    ``written_ns`` counts nanoseconds since 1970. ``extra`` holds TLVs of types that this program
    does not know, as raw bytes, so that copying a record loses nothing. ``parity`` tells how the
    record is kept, and makes it no other version of the block: equal headers may differ in it.
    """

    store: bytes
    namespace: bytes
    shard: int
    key: bytes
    parent: bytes
    generation: int
    written_ns: int
    logical_length: int
    stored_length: int
    checksum: int
    transform: int = 0
    label: str = ""
    flags: int = 0
    extra: bytes = b""
    parity: Parity | None = field(default=None, compare=False)


class Verdict(IntEnum):
    """What :func:`judge` thinks of an image."""

    OK = 0
    STALE = 1
    """A valid record, but of another identity or generation: nothing is broken, it is a miss."""
    DAMAGED = 2


class _Parsed(NamedTuple):
    """The fixed part in the order of ``FIXED``, then the three variable fields."""

    magic: bytes
    version: int
    header_length: int
    flags: int
    shard: int
    key_length: int
    parent_length: int
    store: bytes
    namespace: bytes
    generation: int
    written_ns: int
    logical_length: int
    stored_length: int
    checksum: int
    transform: int
    tlv_length: int
    reserved_a: int
    reserved_b: int


def image_bytes(length: int) -> int:
    """Return the size of the image of a record whose stored payload has ``length`` bytes."""
    return HEADER_PAGE + (length + HEADER_PAGE - 1) // HEADER_PAGE * HEADER_PAGE


def image_bytes_of(lengths: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    """Return :func:`image_bytes` for an array of lengths."""
    pages = (lengths.astype(np.int64) + (HEADER_PAGE - 1)) // HEADER_PAGE
    return HEADER_PAGE + pages * HEADER_PAGE


def payload_checksum(view: Buffer) -> int:
    """Return xxh3-64 of a contiguous buffer, without copying it.

    One call for the whole block: above 64 KiB it runs without the interpreter lock, and lets go of
    it once. Hashing in pieces of 256 KiB right behind the copy gained at most 4 % here and had to
    win the lock back for every piece, up to a switch interval each time.
    """
    return xxh3_64_intdigest(view)


def encode(header: Header) -> bytes:
    """Return the header in bytes, a multiple of 8, at most 4,096.

    Raises InvalidKey or UsageError for a field out of bounds.
    """
    _check(header)
    tlvs = _label_tlv(header.label) + _parity_tlvs(header.parity) + header.extra
    body = header.key + header.parent + tlvs
    length = _header_length(len(body))
    if length > HEADER_PAGE:
        raise UsageError(f"the header of block {header.key.hex()} has {length} bytes", "use fewer")
    fixed = FIXED.pack(
        MAGIC, VERSION, length, header.flags, header.shard, len(header.key), len(header.parent),
        header.store, header.namespace, header.generation, header.written_ns,
        header.logical_length, header.stored_length, header.checksum, header.transform, len(tlvs),
        0, 0,
    )  # fmt: skip
    summed = (fixed + body).ljust(length - _SUM.size, b"\0")
    return summed + _SUM.pack(xxh3_64_intdigest(summed))


def encode_into(header: Header, page: memoryview) -> int:
    """Write the header into a page of 4,096 bytes, zero the rest; return the header's length."""
    encoded = encode(header)
    page[: len(encoded)] = encoded
    page[len(encoded) : HEADER_PAGE] = _ZEROS[len(encoded) :]
    return len(encoded)


def decode(buffer: Buffer) -> Header:
    """Return the header at the start of ``buffer`` (the page alone is enough).

    Raises CorruptBlock, and nothing else whatever the bytes are. Copies only the variable fields,
    so it never allocates more than the input holds.
    """
    view = _flat(buffer)
    parsed = _parse(view)
    key_end = FIXED.size + parsed.key_length
    parent_end = key_end + parsed.parent_length
    label, parity, extra = _split_tlvs(view[parent_end : parent_end + parsed.tlv_length])
    return Header(
        store=parsed.store,
        namespace=parsed.namespace,
        shard=parsed.shard,
        key=bytes(view[FIXED.size : key_end]),
        parent=bytes(view[key_end:parent_end]),
        generation=parsed.generation,
        written_ns=parsed.written_ns,
        logical_length=parsed.logical_length,
        stored_length=parsed.stored_length,
        checksum=parsed.checksum,
        transform=parsed.transform,
        label=label,
        flags=parsed.flags,
        extra=extra,
        parity=parity,
    )


def claimed_header_length(buffer: Buffer) -> int:
    """Return how many bytes the header at the start of ``buffer`` says it has, 0 where none can be.

    Nothing is verified: for engines that keep header and payload together without the page.
    """
    view = _flat(buffer)
    if len(view) < FIXED.size or view[: len(MAGIC)] != MAGIC:
        return 0
    length: int = _LENGTH.unpack_from(view, _LENGTH_AT)[0]
    return length if FIXED.size < length <= min(HEADER_PAGE, len(view)) else 0


def judge(
    image: memoryview,
    filled: int,
    *,
    store: bytes,
    namespace: bytes,
    shard: int,
    key: bytes,
    generation: int,
    length: int,
) -> tuple[Verdict, int, str]:
    """Tell whether ``image``, of which ``filled`` bytes were read, is the record asked for.

    ``length`` is the stored payload in bytes. Returns the verdict, the payload's checksum (0 unless
    OK) and a reason (empty if OK). Never raises. Bytes of the header page behind the header and
    padding behind the payload do not matter: they carry nothing.
    """
    try:
        view = _flat(image)[: max(filled, 0)]
        parsed = _parse(view[:HEADER_PAGE])
        _split_tlvs(_tlv_area(view, parsed))
    except CorruptBlock as error:
        return Verdict.DAMAGED, 0, error.message
    found_key = view[FIXED.size : FIXED.size + parsed.key_length]
    reason = _other_identity(parsed, found_key, store, namespace, shard, key, generation)
    if reason:
        return Verdict.STALE, 0, reason
    reason = _wrong_payload(view, parsed, length)
    if reason:
        return Verdict.DAMAGED, 0, reason
    return Verdict.OK, parsed.checksum, ""


def judge_as(header: Header, image: memoryview, filled: int) -> tuple[Verdict, int, str]:
    """Tell by :func:`judge` whether an image is the whole record that an envelope speaks of."""
    return judge(
        image,
        filled,
        store=header.store,
        namespace=header.namespace,
        shard=header.shard,
        key=header.key,
        generation=header.generation,
        length=header.stored_length,
    )


def _other_identity(
    parsed: _Parsed,
    found_key: memoryview,
    store: bytes,
    namespace: bytes,
    shard: int,
    key: bytes,
    generation: int,
) -> str:
    if parsed.store != store:
        return f"the record belongs to store {parsed.store.hex()}"
    if parsed.namespace != namespace:
        return f"the record belongs to namespace {parsed.namespace.hex()}"
    if parsed.shard != shard:
        return f"the record belongs to shard {parsed.shard}"
    if found_key != key:
        return f"the record has key {found_key.hex()}"
    if parsed.generation != generation:
        return f"the record has generation {parsed.generation}, not {generation}"
    return ""


def _wrong_payload(view: memoryview, parsed: _Parsed, length: int) -> str:
    if parsed.stored_length != length:
        return f"the record has {parsed.stored_length} bytes of payload, not {length}"
    if parsed.transform:
        return f"the payload is stored with transform {parsed.transform}, which is not supported"
    payload = view[HEADER_PAGE : HEADER_PAGE + length]
    if len(payload) < length:
        return f"only {len(payload)} of {length} bytes of payload are there"
    found = xxh3_64_intdigest(payload)
    if found != parsed.checksum:
        return f"the payload has checksum {found:016x}, not {parsed.checksum:016x}"
    return ""


def _flat(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    # numpy's empty arrays cannot be cast, and hold no header anyway.
    return view.cast("B") if view.nbytes else memoryview(b"")


def _parse(view: memoryview) -> _Parsed:
    """Return the fixed part after all checks that need no TLV; raises CorruptBlock."""
    if len(view) < FIXED.size:
        raise CorruptBlock(f"the header is cut off after {len(view)} bytes")
    parsed = _Parsed._make(FIXED.unpack_from(view))
    if parsed.magic != MAGIC:
        raise CorruptBlock("the header does not begin with KVB1")
    length = parsed.header_length
    if not FIXED.size + _SUM.size <= length <= min(HEADER_PAGE, len(view)) or length % 8:
        raise CorruptBlock(f"the header says it has {length} bytes")
    if xxh3_64_intdigest(view[: length - 8]) != _SUM.unpack_from(view, length - 8)[0]:
        raise CorruptBlock("the checksum of the header does not match")
    problem = _unusable(parsed)
    if problem:
        raise CorruptBlock(problem)
    return parsed


def _unusable(parsed: _Parsed) -> str:
    """Say what is wrong in a header whose checksum matches: a newer or a broken writer."""
    if parsed.version != VERSION:
        return f"version {parsed.version} of the header is not supported"
    if parsed.flags & INCOMPAT_FLAGS:
        return f"flags {parsed.flags & INCOMPAT_FLAGS:#06x} of the header are not supported"
    if not 1 <= parsed.key_length <= MAX_KEY_BYTES or parsed.parent_length > MAX_KEY_BYTES:
        return f"the header has a key of {parsed.key_length}, a parent of {parsed.parent_length} B"
    body = parsed.key_length + parsed.parent_length + parsed.tlv_length
    if _header_length(body) != parsed.header_length:
        return f"the header has {parsed.header_length} bytes but its fields do not fill them"
    if not 1 <= parsed.logical_length <= MAX_BLOCK_BYTES:
        return f"the header says the block has {parsed.logical_length} bytes"
    if not 1 <= parsed.stored_length <= MAX_BLOCK_BYTES:
        return f"the header says {parsed.stored_length} bytes are stored"
    if not parsed.transform and parsed.stored_length != parsed.logical_length:
        return "the header gives two lengths for a payload stored as it is"
    return ""


def _header_length(body: int) -> int:
    return (FIXED.size + body + 7) // 8 * 8 + _SUM.size


def _tlv_area(view: memoryview, parsed: _Parsed) -> memoryview:
    start = FIXED.size + parsed.key_length + parsed.parent_length
    return view[start : start + parsed.tlv_length]


def _split_tlvs(area: memoryview) -> tuple[str, Parity | None, bytes]:
    """Return label, parity and the raw bytes of all other TLVs; raises CorruptBlock."""
    label: str | None = None
    others = []
    how = sums = None
    at = 0
    while at < len(area):
        end = _tlv_end(area, at)
        if area[at] == TLV_PARITY:
            how = area[at + _TLV.size : end]
        elif area[at] == TLV_CHUNK_SUMS:
            sums = area[at + _TLV.size : end]
        elif area[at] != TLV_LABEL:
            others.append(area[at:end])
        elif label is None:
            label = _read_label(area[at + _TLV.size : end])
        else:
            raise CorruptBlock("the header has two labels")
        at = end
    return label or "", _read_parity(how, sums), b"".join(others)


def _read_parity(how: memoryview | None, sums: memoryview | None) -> Parity | None:
    """Return what two TLVs say, None where they say nothing that we understand."""
    if how is None or sums is None or len(how) != _PARITY.size:
        return None
    kind, _, chunk_bytes = _PARITY.unpack(how)
    return Parity(chunk_bytes, bytes(sums)) if kind == PARITY_XOR else None


def _parity_tlvs(parity: Parity | None) -> bytes:
    if parity is None:
        return b""
    how = _PARITY.pack(PARITY_XOR, b"", parity.chunk_bytes)
    return (
        _TLV.pack(TLV_PARITY, 0, len(how))
        + how
        + _TLV.pack(TLV_CHUNK_SUMS, 0, len(parity.sums))
        + parity.sums
    )


def _tlv_end(area: memoryview, at: int) -> int:
    if len(area) - at < _TLV.size:
        raise CorruptBlock("a TLV of the header is cut off")
    end: int = at + _TLV.size + _TLV.unpack_from(area, at)[2]
    if end > len(area):
        raise CorruptBlock(f"TLV {area[at]} of the header is longer than the TLV area")
    return end


def _read_label(value: memoryview) -> str:
    if not 1 <= len(value) <= MAX_LABEL_BYTES:
        raise CorruptBlock(f"the label has {len(value)} bytes")
    try:
        return str(value, "utf-8")
    except UnicodeDecodeError:
        raise CorruptBlock("the label is not UTF-8") from None


def _label_tlv(label: str) -> bytes:
    if not label:
        return b""
    try:
        value = label.encode()
    except UnicodeEncodeError:
        raise UsageError("the label cannot be written as UTF-8", "use plain text") from None
    if len(value) > MAX_LABEL_BYTES:
        raise UsageError(f"the label has {len(value)} bytes", f"use at most {MAX_LABEL_BYTES}")
    return _TLV.pack(TLV_LABEL, 0, len(value)) + value


def _check(header: Header) -> None:
    """Refuse what ``struct`` would cut or pad in silence, and what no reader would accept."""
    check_shard(header.shard)
    check_block_length(header.logical_length, header.key)
    check_block_length(header.stored_length, header.key)
    sizes = (
        ("key", header.key, 1, MAX_KEY_BYTES),
        ("parent", header.parent, 0, MAX_KEY_BYTES),
        ("store uuid", header.store, STORE_UUID_BYTES, STORE_UUID_BYTES),
        ("namespace id", header.namespace, NAMESPACE_ID_BYTES, NAMESPACE_ID_BYTES),
    )
    for name, value, least, most in sizes:
        if not least <= len(value) <= most:
            raise UsageError(f"the {name} has {len(value)} bytes", f"use {least} to {most}")

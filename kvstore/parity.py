"""Parity: one lost chunk of a payload, told by its sum and brought back from the others.

A payload is cut into at most 256 chunks of 64 KiB, of a 256th of it (rounded up to 4 KiB) where it
is larger, of its whole length (rounded up too) where it is shorter. The *parity chunk* behind the
payload and its padding is the exclusive or of all chunks, the last one continued with zeros. The
envelope has a sum of each chunk, so that a damaged one is known at once and none is guessed. What
comes back counts only if the payload then has its checksum.

The parity chunk is written with a record, and read when the payload turned out damaged: a read of a
whole record costs no more than without. The layout is in docs/formats.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvstore import record
from kvstore.errors import UsageError
from kvstore.keys import MAX_BLOCK_BYTES
from kvstore.record import HEADER_PAGE, Parity

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvstore.record import Header

CHUNK_BYTES = 64 << 10
MOST_CHUNKS = 256
KINDS = ("off", "xor")
"""Names by whether there is parity."""
MOST_BYTES = HEADER_PAGE + MAX_BLOCK_BYTES + MAX_BLOCK_BYTES // MOST_CHUNKS
"""What a record takes at most."""


def chunk_bytes_of(lengths: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    """Return the bytes of a chunk, and of the parity chunk, for payloads of these lengths."""
    whole = _up(lengths.astype(np.int64))
    return np.minimum(whole, np.maximum(CHUNK_BYTES, _up(-(-whole // MOST_CHUNKS))))


def chunk_bytes(length: int) -> int:
    return int(chunk_bytes_of(np.array([length], np.uint32))[0])


def spare_bytes(size: int) -> int:
    """Return the bytes of the parity chunk of an image of ``size`` bytes."""
    return chunk_bytes(size - HEADER_PAGE)


def record_bytes_of(lengths: npt.NDArray[np.uint32], *, parity: bool) -> npt.NDArray[np.int64]:
    """Return what records of payloads of these lengths take, with or without a parity chunk."""
    images = record.image_bytes_of(lengths)
    return images + chunk_bytes_of(lengths) if parity else images


def kept_bytes(header: Header) -> int:
    """Return what the record of an envelope takes, with its parity chunk if it has one."""
    return record.image_bytes(header.stored_length) + spare_bytes_of(header)


def protect(image: memoryview, room: memoryview) -> memoryview:
    """Copy a complete image into ``room`` with a parity chunk behind it; return what was filled.

    Returns the image itself if its envelope has no room for the sums: more TLVs than we ever write.
    """
    header = record.decode(image[:HEADER_PAGE])
    length, size = header.stored_length, chunk_bytes(header.stored_length)
    whole = room[: len(image) + size]
    source, target = np.frombuffer(image, np.uint8), np.frombuffer(whole, np.uint8)
    spare = target[len(image) :]
    spare[:] = 0
    sums = []
    for at in range(0, length, size):
        # Copied, hashed and folded one by one, while a chunk is in the processor's cache.
        part = slice(HEADER_PAGE + at, HEADER_PAGE + min(at + size, length))
        np.copyto(target[part], source[part])
        sums.append(_sum(target[part]))
        folded = spare[: part.stop - part.start]
        np.bitwise_xor(folded, target[part], out=folded)
    np.copyto(target[HEADER_PAGE + length : len(image)], source[HEADER_PAGE + length :])
    table = np.array([*sums, _sum(spare)], "<u4").tobytes()
    try:
        record.encode_into(replace(header, parity=Parity(size, table)), whole[:HEADER_PAGE])
    except UsageError:
        return image
    return whole


def repair(whole: memoryview, header: Header) -> bool:
    """Bring the one damaged chunk of a payload back, in place; tell whether that could be done.

    ``whole`` is a record with its parity chunk, ``header`` its envelope.
    """
    found = split(whole, header)
    if found is None:
        return False
    chunks, spare, sums = found
    bad = [number for number, chunk in enumerate(chunks) if _sum(chunk) != sums[number]]
    if len(bad) != 1 or _sum(spare) != sums[-1]:
        return False
    lost, rest = chunks.pop(bad[0]), spare.copy()
    for chunk in chunks:
        np.bitwise_xor(rest[: len(chunk)], chunk, out=rest[: len(chunk)])
    np.copyto(lost, rest[: len(lost)])
    return True


def split(
    whole: memoryview, header: Header
) -> tuple[list[npt.NDArray[np.uint8]], npt.NDArray[np.uint8], list[int]] | None:
    """Return the chunks of a payload, the parity chunk, and the sums of all these.

    None where the envelope tells of no parity chunk such as we write.
    """
    length, size = header.stored_length, chunk_bytes(header.stored_length)
    image = record.image_bytes(length)
    count = -(-length // size)
    if header.parity is None or header.parity.chunk_bytes != size or len(whole) < image + size:
        return None
    if len(header.parity.sums) != 4 * (count + 1):
        return None
    every = np.frombuffer(whole, np.uint8)
    payload, spare = every[HEADER_PAGE : HEADER_PAGE + length], every[image : image + size]
    chunks = [payload[at : at + size] for at in range(0, length, size)]
    return chunks, spare, np.frombuffer(header.parity.sums, "<u4").tolist()


def spare_is_whole(whole: memoryview, header: Header) -> bool:
    """Tell whether a record has its parity chunk, and that its sum."""
    found = split(whole, header)
    return found is not None and _sum(found[1]) == found[2][-1]


def spare_bytes_of(header: Header) -> int:
    """Return the bytes of the parity chunk that an envelope tells of."""
    return chunk_bytes(header.stored_length) if header.parity is not None else 0


def _sum(chunk: npt.NDArray[np.uint8]) -> int:
    return record.payload_checksum(chunk.data) & 0xFFFFFFFF


def _up(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return -(-sizes // HEADER_PAGE) * HEADER_PAGE

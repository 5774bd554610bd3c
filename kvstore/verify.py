"""Reading whole records from an engine and judging them, for fsck: what is bad, and how.

Several threads read and judge a batch each; verdicts come back in order.
"""

from __future__ import annotations

import itertools
import mmap
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore import record
from kvstore.backends.base import Status
from kvstore.backends.judging import judge_whole
from kvstore.errors import CorruptBlock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.backends.base import U8, Blocks, Engine
    from kvstore.backends.judging import Judged

BATCH_BYTES = 4 << 20
"""Of images read in one go by a thread: a block of 64 MiB is one of its own."""
ANSWER_BATCHES = 8
"""Batches whose verdicts come back together."""


class Kind(IntEnum):
    """What a record turned out to be."""

    OK = 0
    MISSING = 1
    UNREADABLE = 2
    """The device or the library refuses to read it; it may be whole."""
    HEADER = 3
    """It has no valid header."""
    PAYLOAD = 4
    """The payload is not what the header says."""
    TRUNCATED = 5
    STALE = 6
    """A valid record of another block or version."""
    PADDING = 7
    """The right bytes; what carries nothing is not zero."""
    CHUNK = 8
    """A chunk of the payload is damaged and can be brought back."""
    PARITY = 9
    """The payload is whole, its parity chunk is not."""


class Verdicts(NamedTuple):
    """A :class:`Kind` for each record (u8), and in words why it is not OK, by position."""

    kinds: U8
    reasons: dict[str, str]


def run(engine: Engine, blocks: Blocks) -> Iterator[Verdicts]:
    """Read and judge records; yield verdicts of some at a time, in order. Raises EngineError."""
    threads = engine.capabilities.preferred_threads
    # Each thread keeps its memory: new pages for every batch would cost as much as reading.
    with ThreadPoolExecutor(threads, "verify") as pool:
        rooms = [_Room() for _ in range(threads)]

        def judge(part: Blocks) -> list[tuple[Kind, str]]:
            room = rooms.pop()
            try:
                return _judge(engine, part, room)
            finally:
                rooms.append(room)

        parts = _parts(blocks)
        while some := list(itertools.islice(parts, threads * ANSWER_BATCHES)):
            found = list(itertools.chain.from_iterable(pool.map(judge, some)))
            kinds = np.array([kind for kind, _ in found], np.uint8)
            yield Verdicts(kinds, {str(at): why for at, (_, why) in enumerate(found) if why})


def _parts(blocks: Blocks) -> Iterator[Blocks]:
    sizes = record.image_bytes_of(blocks.lengths)
    start, total = 0, 0
    for at, size in enumerate(sizes.tolist()):
        if at > start and total + size > BATCH_BYTES:
            yield blocks.take(slice(start, at))
            start, total = at, 0
        total += size
    if len(blocks):
        yield blocks.take(slice(start, len(blocks)))


class _Room:
    """Memory for images, page by page aligned, as large as was needed so far."""

    def __init__(self) -> None:
        self._memory = memoryview(mmap.mmap(-1, BATCH_BYTES))

    def images(self, blocks: Blocks) -> list[memoryview]:
        ends = np.cumsum(record.image_bytes_of(blocks.lengths)).tolist()
        if ends[-1] > len(self._memory):
            self._memory = memoryview(mmap.mmap(-1, ends[-1]))
        return [self._memory[a:b] for a, b in itertools.pairwise([0, *ends])]


def _judge(engine: Engine, blocks: Blocks, room: _Room) -> list[tuple[Kind, str]]:
    images = room.images(blocks)
    columns = zip(
        *(images, blocks.lengths.tolist(), judge_whole(engine, blocks, images)), strict=True
    )
    found = []
    for image, length, judged in columns:
        if judged.status == Status.MISSING:
            found.append((Kind.MISSING, "no record is there"))
        elif judged.status not in (Status.OK, Status.DAMAGED):
            found.append((Kind.UNREADABLE, "it cannot be read"))
        elif judged.repaired:
            found.append((Kind.CHUNK, "a chunk of the payload, which can be brought back"))
        elif judged.bare:
            found.append((Kind.PARITY, "its parity chunk does not have its sum"))
        else:
            kind, why = _kind(judged, image), judged.reason
            if kind == Kind.OK and _padded(image, length):
                kind, why = Kind.PADDING, "bytes beside header or payload are not zero"
            found.append((kind, why))
    return found


def _padded(image: memoryview, length: int) -> bool:
    """Tell whether bytes of a whole image that carry nothing are not zero."""
    header = np.frombuffer(image, np.uint8, record.HEADER_PAGE)[
        record.claimed_header_length(image) :
    ]
    return bool(header.any() or np.frombuffer(image, np.uint8)[record.HEADER_PAGE + length :].any())


def _kind(judged: Judged, image: memoryview) -> Kind:
    if judged.verdict == record.Verdict.OK:
        return Kind.OK
    if judged.verdict == record.Verdict.STALE:
        return Kind.STALE
    try:
        record.decode(image[: min(judged.filled, record.HEADER_PAGE)])
    except CorruptBlock:
        return Kind.HEADER
    return Kind.PAYLOAD if judged.filled == len(image) else Kind.TRUNCATED

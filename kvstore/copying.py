"""Copying records from one engine to another, each verified before and read back after.

An envelope is copied as it is, with store, generation and time of writing, so the copy is the same
version of the block. Nothing here knows of journals: whoever calls notes what is copied.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore import record, versions
from kvstore.backends.base import Status
from kvstore.backends.judging import judge_all
from kvstore.errors import EngineError, StoreFull
from kvstore.pages import Pages
from kvstore.record import HEADER_PAGE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from kvstore.backends.base import U64, Blocks, Engine, Mask
    from kvstore.backends.judging import Judged
    from kvstore.events import Records

Positions = np.ndarray

REASONS = {
    Status.MISSING: "its record is missing",
    Status.UNREADABLE: "the device does not read it",
    Status.FAILED: "it cannot be read, see the log",
}


class Left(NamedTuple):
    """A block that did not come along: namespace id, shard, key in hex, and why."""

    namespace: str
    shard: int
    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Copied:
    """What became of the blocks of a batch. ``reasons`` say why one was left, "" for the others;
    ``places`` are those of the copies, 0 for a block that was left."""

    reasons: list[str]
    places: U64

    @property
    def good(self) -> Mask:
        return np.array([not reason for reason in self.reasons], np.bool_)


def copy(source: Engine, target: Engine, blocks: Blocks, memory: Sequence[memoryview]) -> Copied:
    """Copy blocks; ``memory`` are two pieces of aligned memory, each with room for all images.

    A record that cannot be believed is left. Raises StoreFull where the target has no room,
    EngineError where it does not take a record or gives it back changed.
    """
    images = cut(memory[0], blocks)
    reasons = faults(judge_all(source, blocks, images))
    chosen = np.flatnonzero([not reason for reason in reasons])
    places = np.zeros(len(blocks), np.uint64)
    if len(chosen):
        kept, images = blocks.take(chosen), [images[position] for position in chosen]
        for image, length in zip(images, kept.lengths.tolist(), strict=True):
            wipe(image, length)
        places[chosen] = _write(target, kept, images)
        _compare(target, kept.at(places[chosen]), images, memory[1])
    return Copied(reasons, places)


def cut(memory: memoryview, blocks: Blocks) -> list[memoryview]:
    """Return a piece of memory for the image of each block."""
    ends = np.cumsum(record.image_bytes_of(blocks.lengths)).tolist()
    return [memory[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def faults(found: list[Judged]) -> list[str]:
    """Return for each block why what was read is not its record, "" where it is."""
    return [REASONS.get(Status(one.status), one.reason) for one in found]


def wipe(image: memoryview, length: int) -> None:
    """Zero what carries nothing in the image of a good record: nobody vouches for these bytes."""
    every = np.frombuffer(image, np.uint8)
    every[record.claimed_header_length(image[:HEADER_PAGE]) : HEADER_PAGE] = 0
    every[HEADER_PAGE + length :] = 0


def _write(target: Engine, blocks: Blocks, images: Sequence[memoryview]) -> U64:
    written = target.put_many(blocks, images, sync=False)
    bad = np.flatnonzero(written.statuses != Status.OK)
    if not len(bad):
        return written.places
    key = blocks.keys[bad[0]].tobytes().hex()
    if written.statuses[bad[0]] in (Status.FULL, Status.NEED_ROOM):
        raise StoreFull(
            f"the engine {target.name} has no room for block {key}",
            "free some space or raise --capacity, then repeat the command: it goes on from here",
        )
    raise EngineError(f"the engine {target.name} does not take block {key}", "see the log")


def _compare(
    target: Engine, blocks: Blocks, images: Sequence[memoryview], memory: memoryview
) -> None:
    copies = cut(memory, blocks)
    found = judge_all(target, blocks, copies)
    columns = zip(images, copies, blocks.lengths.tolist(), faults(found), strict=True)
    for position, (image, again, length, reason) in enumerate(columns):
        if reason or found[position].repaired or not _same(image, again, length):
            key = blocks.keys[position].tobytes().hex()
            raise EngineError(
                f"the copy of block {key} in the engine {target.name} reads back differently: "
                f"{reason or 'other bytes'}",
                "the source is untouched; see to disk and memory of this machine",
            )


def _same(image: memoryview, again: memoryview, length: int) -> bool:
    """Tell whether two images have the same header, but for parity, and payload."""
    one, other = np.frombuffer(image, np.uint8), np.frombuffer(again, np.uint8)
    payload = slice(HEADER_PAGE, HEADER_PAGE + length)
    same = record.decode(image[:HEADER_PAGE]) == record.decode(again[:HEADER_PAGE])
    return same and np.array_equal(one[payload], other[payload])


class Workers:
    """Threads that copy batches, each with its own memory; results come in the order of batches."""

    def __init__(self, source: Engine, target: Engine, batch_bytes: int, jobs: int) -> None:
        self._engines = source, target
        self._bytes = batch_bytes
        self._jobs = jobs
        self._pool = ThreadPoolExecutor(jobs, "migrate")
        self._waiting: deque[tuple[Positions, Future[Copied]]] = deque()
        self._own = threading.local()

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True)

    def submit(self, positions: Positions, rows: Records) -> None:
        self._waiting.append((positions, self._pool.submit(self._copy, rows)))

    def results(self) -> Iterator[tuple[Positions, Copied]]:
        """Yield what must be taken before more is submitted."""
        while len(self._waiting) > self._jobs:
            yield self._next()

    def rest(self) -> Iterator[tuple[Positions, Copied]]:
        while self._waiting:
            yield self._next()

    def _next(self) -> tuple[Positions, Copied]:
        positions, future = self._waiting[0]
        copied = future.result()
        self._waiting.popleft()
        return positions, copied

    def _copy(self, rows: Records) -> Copied:
        if not hasattr(self._own, "pages"):
            self._own.pages = [Pages(self._bytes), Pages(self._bytes)]
        memory = [pages.memory for pages in self._own.pages]
        (blocks,) = versions.blocks_of(rows)
        return copy(*self._engines, blocks, memory)

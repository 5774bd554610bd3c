"""A get: from keys to verified blocks, out of the memory tier or off the disk.

The index answers which blocks we hold; references keep them in place while a worker copies and
reads. Each image is verified against the identity that the index expects, memory hits too: a
flipped bit, another block's record or an older version is a miss. What came off the disk stays in
memory where there is room.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvstore import record
from kvstore.answers import BlockStatus
from kvstore.backends.base import Blocks, Status
from kvstore.backends.judging import compare, judge
from kvstore.errors import Busy
from kvstore.index import DISK, MEM, UNSYNCED
from kvstore.job import Job, shares
from kvstore.keys import KeyArray, space_number
from kvstore.record import Verdict
from kvstore.rewrite import drop_bad, rewrite

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.backends.base import U8, U32, U64
    from kvstore.core import Core
    from kvstore.namespaces import Namespace
    from kvstore.slab import Extent

_COPY_SHARE = 4
# Members of an enum are slow to look up, and these are asked for each block.
_GOOD = int(Verdict.OK)
_PIECE_BYTES = 4 << 20
"""Read, verify and copy in pieces of about this size, while they are in the processor's cache."""


class Get(Job):
    """Reads the first ``count`` of ``keys``, at least one: images of ``budget`` bytes, or four
    times as many that are in memory.

    With ``targets``, one for each key, every verified payload is also copied there. After
    ``finish``: ``statuses`` u8 (OK, MISS or TOO_LARGE), ``lengths`` u32 and ``checksums`` u64 (0
    for misses), and :meth:`payload`. The caller calls :meth:`close` when it is done with the
    payloads. Raises Busy when memory has no room now.
    """

    def __init__(
        self,
        core: Core,
        namespace: Namespace,
        shard: int,
        keys: KeyArray,
        budget: int,
        targets: Sequence[memoryview] | None = None,
    ) -> None:
        super().__init__()
        self._core = core
        self._targets = targets
        self._cancelled = False
        space = space_number(namespace.number, shard)
        rows = core.index.find(space, keys)
        readable = core.index.readable(rows)
        known = np.where(readable, rows, 0)
        sizes = np.where(readable, core.index.sizes[known], 0)
        in_memory = (core.index.flags[known] & MEM) != 0
        self.count = _fitting(sizes, readable, in_memory, budget)
        self.hits = np.flatnonzero(readable[: self.count])
        self._rows: U32 = rows[self.hits]
        self._sizes: U32 = sizes[self.hits].astype(np.uint32)
        self._generations: U64 = core.index.generations[self._rows]
        self._blocks = Blocks(
            namespace.id,
            shard,
            keys[self.hits],
            self._sizes,
            self._generations,
            core.index.places[self._rows],
        )
        self._in_memory = in_memory[self.hits]
        self._filled = record.image_bytes_of(self._sizes)
        self._images: list[memoryview] = [memoryview(b"")] * len(self.hits)
        self._slots: U64 = np.zeros(0, np.uint64)
        self._extents: list[Extent] = []
        self._take_memory()
        core.index.acquire(self._rows)
        self._verdicts: U8 = np.full(len(self.hits), Verdict.DAMAGED, np.uint8)
        self._reads: U8 = np.full(len(self.hits), Status.FAILED, np.uint8)
        self._sums: U64 = np.zeros(len(self.hits), np.uint64)
        self._small = np.zeros(len(self.hits), np.bool_)
        self._repaired = np.zeros(len(self.hits), np.bool_)

    def _take_memory(self) -> None:
        """Find images in memory; take room for the others, in the tier if there is any."""
        core, inside = self._core, self._in_memory
        if inside.all():
            self._promoted = np.flatnonzero(~inside)
            self._place(np.arange(len(inside)), core.tier.find(self._rows))
            return
        # A hold on what is in memory comes before room is made, or it might leave for that.
        core.index.acquire(self._rows[inside])
        try:
            self._place(np.flatnonzero(inside), core.tier.find(self._rows[inside]))
            outside = np.flatnonzero(~inside)
            sizes = record.image_bytes_of(self._sizes[outside])
            kept = core.tier.fits(sizes)
            try:
                self._slots = core.tier.reserve(sizes[kept])
            except Busy:
                kept[:] = False
            self._promoted = outside[kept]
            self._place(self._promoted, self._slots)
            passing = outside[~kept]
            try:
                self._extents = core.bounce.allocate(sizes[~kept].tolist())
            except BaseException:
                core.tier.give_back(self._slots)
                raise
            for number, extent in zip(passing.tolist(), self._extents, strict=True):
                self._images[number] = extent.view
        finally:
            core.index.release(self._rows[inside])

    def _place(self, numbers: np.ndarray, slots: U64) -> None:
        views = self._core.tier.views(slots, self._sizes[numbers])
        for number, view in zip(numbers.tolist(), views, strict=True):
            self._images[number] = view

    def cancel(self) -> None:
        """Do no more than the piece under way; what was not reached is a miss."""
        self._cancelled = True

    # -- run: in workers --------------------------------------------------------------------------

    def acts(self) -> list[Callable[[], None]]:
        nbytes = int(self._filled.sum())
        return [partial(self._bring, share) for share in shares(len(self.hits), nbytes)]

    def _bring(self, share: range) -> None:
        """Read, verify and copy some of the blocks, piece by piece."""
        ends = np.cumsum(self._filled[share.start : share.stop])
        start = base = 0
        while start < len(ends) and not self._cancelled:
            stop = max(start + 1, int(np.searchsorted(ends, base + _PIECE_BYTES, "right")))
            piece = np.arange(share.start + start, share.start + stop)
            self._fetch(piece)
            for number in piece.tolist():
                self._verify(number)
            start, base = stop, int(ends[stop - 1])

    def _fetch(self, numbers: np.ndarray) -> None:
        """Read what is not in memory already."""
        self._reads[numbers[self._in_memory[numbers]]] = Status.OK
        absent = numbers[~self._in_memory[numbers]]
        if not len(absent):
            return
        images = [self._images[number] for number in absent.tolist()]
        result = self._core.engine.get_many_into(self._blocks.take(absent), images)
        self._reads[absent] = result.statuses
        self._filled[absent] = result.filled

    def _verify(self, number: int) -> None:
        """Judge one image; copy its payload where it is wanted."""
        image, length = self._images[number], int(self._sizes[number])
        verdict, checksum = self._judge(number, image)
        self._verdicts[number], self._sums[number] = verdict, checksum
        if verdict == _GOOD and self._targets is not None:
            target = self._targets[int(self.hits[number])]
            if len(target) < length:
                self._small[number] = True
                return
            payload = np.frombuffer(image, np.uint8, length, record.HEADER_PAGE)
            np.copyto(np.frombuffer(target, np.uint8, length), payload)

    def _judge(self, number: int, image: memoryview) -> tuple[Verdict, int]:
        """Judge one image; one that came off the disk may lack a chunk, and be brought back."""
        core, filled = self._core, int(self._filled[number])
        if self._in_memory[number]:
            return compare(core.uuid, self._blocks, number, image, filled)[:2]
        status = int(self._reads[number])
        found = judge(core.engine, self._blocks, number, image, status, filled)
        self._reads[number], self._repaired[number] = found.status, found.repaired
        return found.verdict, found.checksum

    # -- finish: on the owner thread --------------------------------------------------------------

    def finish(self) -> None:
        core = self._core
        good = (self._reads == Status.OK) & (self._verdicts == _GOOD)
        same = core.index.holds(self._rows, self._generations)
        core.touch(self._rows[good & same])
        if core.doubt:
            core.index.clear_flags(self._rows[good & same], UNSYNCED)
        self._promote(good & same)
        core.counters.repaired_blocks += int((good & self._repaired).sum())
        rewrite(core, self._rows[good & same & self._repaired])
        self.statuses: U8 = np.full(self.count, BlockStatus.MISS, np.uint8)
        self.lengths: U32 = np.zeros(self.count, np.uint32)
        self.checksums: U64 = np.zeros(self.count, np.uint64)
        kept = self.hits[good]
        self.statuses[kept] = BlockStatus.OK
        self.statuses[self.hits[good & self._small]] = BlockStatus.TOO_LARGE
        self.lengths[kept] = self._sizes[good]
        self.checksums[kept] = self._sums[good]
        self._count_use(good)
        if not self._cancelled:
            failed = (self._reads == Status.FAILED) | (self._reads == Status.UNREADABLE)
            core.counters.read_errors += int(failed.sum())
            if core.suspects:
                core.clear(self._rows[good], self._generations[good])
            if self.failure is None:
                self._discard(~good)

    def _count_use(self, good: np.ndarray) -> None:
        counters, hits = self._core.counters, int(good.sum())
        counters.hits += hits
        counters.memory_hits += int((good & self._in_memory).sum())
        counters.misses += self.count - hits
        counters.read_bytes += int(self._sizes[good].sum())

    def _promote(self, good: np.ndarray) -> None:
        """Keep in memory what was read off the disk, unless somebody else did meanwhile."""
        core, numbers = self._core, self._promoted
        if not len(numbers):
            return
        rows = self._rows[numbers]
        flags = core.index.flags[rows]
        keep = good[numbers] & ((flags & MEM) == 0) & ((flags & DISK) != 0)
        _, first = np.unique(rows, return_index=True)
        once = np.zeros(len(rows), np.bool_)
        once[first] = True
        keep &= once
        core.tier.keep(rows[keep], self._slots[keep])
        core.index.set_flags(rows[keep], MEM)
        self._slots = self._slots[~keep]

    def _discard(self, bad: np.ndarray) -> None:
        """Drop what is not there or not whole; a failed read drops nothing."""
        if not bad.any():
            return
        core, rows, generations = self._core, self._rows, self._generations
        # Bits that flipped in memory say nothing about the disk: only the copy goes.
        flipped = bad & self._in_memory & ((core.index.flags[rows] & DISK) != 0)
        core.forget_copies(rows[flipped], generations[flipped])
        rest = bad & ~flipped
        drop_bad(core, rows[rest], generations[rest], self._reads[rest], self._verdicts[rest])

    def payload(self, position: int) -> memoryview:
        """Return the payload of the block at ``position``, which must be OK; no copy."""
        number = int(np.searchsorted(self.hits, position))
        length = int(self._sizes[number])
        return self._images[number][record.HEADER_PAGE : record.HEADER_PAGE + length]

    def close(self) -> None:
        """Give references and memory back. May be called twice."""
        core = self._core
        rows, self._rows = self._rows, self._rows[:0]
        if len(rows):
            core.release(rows, self._generations)
        if len(self._slots):
            core.tier.give_back(self._slots)
        core.bounce.release(self._extents)
        self._slots, self._extents = self._slots[:0], []


class Warm(Get):
    """A get for nobody: it brings blocks into the memory tier, ahead of their use.

    Nobody asked for them yet, so hits and misses are not counted, and one worker is enough.
    """

    def acts(self) -> list[Callable[[], None]]:
        return [partial(self._bring, range(len(self.hits)))]

    def _count_use(self, good: np.ndarray) -> None:
        self._core.counters.warmed += int(good.sum())

    @property
    def in_memory(self) -> np.ndarray:
        """After ``finish``: which of the first ``count`` keys are in memory now."""
        there = np.zeros(self.count, np.bool_)
        there[self.hits] = (self._core.index.flags[self._rows] & MEM) != 0
        return there


def _fitting(sizes: np.ndarray, readable: np.ndarray, in_memory: np.ndarray, budget: int) -> int:
    images = np.where(readable, record.image_bytes_of(sizes), 0)
    # Those in memory take none, but others wait while they are copied.
    images[in_memory] = sizes[in_memory] // _COPY_SHARE
    fitting = int(np.searchsorted(np.cumsum(images, dtype=np.int64), budget, "right"))
    return min(len(sizes), max(1, fitting))

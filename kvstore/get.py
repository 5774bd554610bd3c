"""A get: from keys to verified record images in the slab.

The index answers which blocks we hold; references keep them in place while a worker reads. Each
image is verified right after it was read, while it is still in the processor's cache, against the
identity that the index expects: a flipped bit, another block's record or an older version is a
miss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore import record
from kvstore.answers import BlockStatus
from kvstore.backends.base import U8, U32, U64, Blocks, Status
from kvstore.index import DISK, UNSYNCED
from kvstore.job import Job
from kvstore.keys import KeyArray, space_number
from kvstore.record import Verdict
from kvstore.removal import discard

if TYPE_CHECKING:
    from kvstore.core import Core
    from kvstore.namespaces import Namespace

_PIECE_BYTES = 4 << 20
"""Read and verify in pieces of about this size, so that what was read is verified from cache."""


class Get(Job):
    """Reads the first ``count`` of ``keys``: what fits ``budget`` bytes of images, at least one.

    After ``finish``: ``statuses`` u8 (OK or MISS), ``lengths`` u32 and ``checksums`` u64 (0 for
    misses), and :meth:`payload`. The caller calls :meth:`close` when it has used the payloads.
    Raises Busy when the slab has no room now.
    """

    def __init__(
        self, core: Core, namespace: Namespace, shard: int, keys: KeyArray, budget: int
    ) -> None:
        super().__init__()
        self._core = core
        self._namespace, self._shard = namespace, shard
        space = space_number(namespace.number, shard)
        rows = core.index.find(space, keys)
        readable = core.index.readable(rows)
        sizes = np.where(readable, core.index.sizes[np.where(readable, rows, 0)], 0)
        self.count = _fitting(sizes, readable, budget)
        self.hits = np.flatnonzero(readable[: self.count])
        self._rows: U32 = rows[self.hits]
        self._sizes: U32 = sizes[self.hits].astype(np.uint32)
        self._extents = core.slab.allocate(record.image_bytes_of(self._sizes).tolist())
        core.index.acquire(self._rows)
        self._blocks = Blocks(
            namespace.id,
            shard,
            keys[self.hits],
            self._sizes,
            core.index.generations[self._rows],
            core.index.places[self._rows],
        )
        self._verdicts: U8 = np.full(len(self.hits), Verdict.DAMAGED, np.uint8)
        self._reads: U8 = np.full(len(self.hits), Status.FAILED, np.uint8)
        self._sums: U64 = np.zeros(len(self.hits), np.uint64)

    def run(self) -> None:
        ends = np.cumsum(record.image_bytes_of(self._sizes), dtype=np.int64)
        start = 0
        while start < len(ends):
            base = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, base + _PIECE_BYTES, "right")))
            self._read(slice(start, stop))
            start = stop

    def _read(self, part: slice) -> None:
        images = [extent.view for extent in self._extents[part]]
        blocks = self._blocks.take(part)
        result = self._core.engine.get_many_into(blocks, images)
        self._reads[part] = result.statuses
        generations, lengths = blocks.generations.tolist(), blocks.lengths.tolist()
        for number, image in enumerate(images):
            if result.statuses[number] in (Status.OK, Status.DAMAGED):
                verdict, checksum, _ = record.judge(
                    image,
                    int(result.filled[number]),
                    store=self._core.uuid,
                    namespace=blocks.namespace,
                    shard=blocks.shard,
                    key=blocks.keys[number].tobytes(),
                    generation=generations[number],
                    length=lengths[number],
                )
                self._verdicts[part.start + number] = verdict
                self._sums[part.start + number] = checksum

    def finish(self) -> None:
        core = self._core
        good = (self._reads == Status.OK) & (self._verdicts == Verdict.OK)
        core.touch(self._rows[good])
        if core.doubt:
            core.index.clear_flags(self._rows[good & self._still_there()], UNSYNCED)
        core.release(self._rows, self._blocks.generations)
        self.statuses: U8 = np.full(self.count, BlockStatus.MISS, np.uint8)
        self.lengths: U32 = np.zeros(self.count, np.uint32)
        self.checksums: U64 = np.zeros(self.count, np.uint64)
        kept = self.hits[good]
        self.statuses[kept] = BlockStatus.OK
        self.lengths[kept] = self._sizes[good]
        self.checksums[kept] = self._sums[good]
        core.counters.hits += len(kept)
        core.counters.misses += self.count - len(kept)
        core.counters.read_bytes += int(self._sizes[good].sum())
        self._discard(~good)

    def _still_there(self) -> np.ndarray:
        """Tell which rows still hold the version that was read."""
        index = self._core.index
        same: np.ndarray = index.generations[self._rows] == self._blocks.generations
        same &= (index.flags[self._rows] & DISK) != 0
        return same

    def _discard(self, bad: np.ndarray) -> None:
        """Drop what is not there or not whole; a failed read drops nothing."""
        core = self._core
        failed = (self._reads == Status.FAILED) | (self._reads == Status.UNREADABLE)
        core.counters.read_errors += int(failed.sum())
        if core.suspects:
            core.clear(self._rows[~bad], self._blocks.generations[~bad])
        rows, generations = self._rows, self._blocks.generations
        missing = bad & (self._reads == Status.MISSING)
        read = bad & ((self._reads == Status.OK) | (self._reads == Status.DAMAGED))
        unreadable = self._reads == Status.UNREADABLE
        again = unreadable.copy()
        again[unreadable] = core.suspect(rows[unreadable], generations[unreadable])
        read |= again
        stale = read & (self._verdicts == Verdict.STALE)
        discard(core, rows[missing], generations[missing], "missing")
        discard(core, rows[stale], generations[stale], "stale")
        discard(core, rows[read & ~stale], generations[read & ~stale], "damaged")

    def payload(self, position: int) -> memoryview:
        """Return the payload of the block at ``position``, which must be OK; no copy."""
        number = int(np.searchsorted(self.hits, position))
        length = int(self._sizes[number])
        return self._extents[number].view[record.HEADER_PAGE : record.HEADER_PAGE + length]

    def close(self) -> None:
        """Give the slab its room back. May be called twice."""
        extents, self._extents = self._extents, []
        self._core.slab.release(extents)


def _fitting(sizes: np.ndarray, readable: np.ndarray, budget: int) -> int:
    images = np.where(readable, record.image_bytes_of(sizes), 0)
    fitting = int(np.searchsorted(np.cumsum(images, dtype=np.int64), budget, "right"))
    return min(len(sizes), max(1, fitting))

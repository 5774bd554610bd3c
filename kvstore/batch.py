"""Blocks of one put on their way in: rows, memory, images.

A put has up to three batches: blocks that go through the memory tier, blocks that go around it, and
new versions of known blocks. Each takes its memory and rows on the owner thread, is filled by
workers, and goes to the writer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvstore import events, record, versions
from kvstore.answers import Ack, BlockStatus
from kvstore.backends.base import Blocks
from kvstore.entry import Entry
from kvstore.index import NONE
from kvstore.job import shares
from kvstore.keys import KeyArray, key_array, space_number

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.backends.base import U32, U64
    from kvstore.core import Core
    from kvstore.namespaces import Namespace
    from kvstore.put import Put
    from kvstore.slab import Extent

Positions = np.ndarray


@dataclass(frozen=True, slots=True)
class PutRequest:
    """Blocks of one namespace and shard: keys (n, key length), payload bytes u32 (n,).

    ``level`` is what the answer waits for. With ``chain`` each block is the parent of the next;
    ``parent`` is that of the first block, empty if it has none. With ``overwrite`` a known key gets
    a new version. ``checksums`` are xxh3-64 of the payloads as the client saw them.
    """

    namespace: Namespace
    shard: int
    keys: KeyArray
    lengths: U32
    level: Ack = Ack.ACCEPTED
    chain: bool = False
    parent: bytes = b""
    label: str = ""
    overwrite: bool = False
    checksums: U64 | None = None
    parents: tuple[bytes, ...] = ()
    """The parent of each block, empty for none; used instead of ``chain`` and ``parent``."""

    def parent_of(self, position: int) -> bytes:
        """Return the key of the parent of one block, empty if it has none."""
        if self.parents:
            return self.parents[position]
        if position and self.chain:
            return bytes(self.keys[position - 1])
        return self.parent if not position else b""

    def take(self, positions: list[int]) -> PutRequest:
        """Return the request for some of the blocks."""
        return replace(
            self,
            keys=self.keys[positions],
            lengths=self.lengths[positions],
            checksums=None if self.checksums is None else self.checksums[positions],
            parents=tuple(self.parent_of(position) for position in positions),
        )


class Batch:
    """Blocks of one put that go the same way: through memory (``dirty``) or around it.

    ``renews`` are the rows of known blocks that get a new version; else rows are made. Where
    payloads were ``received`` into our own memory, and go around the tier, their images are made in
    place; whoever received them gives the extents back that are still in the list.
    """

    def __init__(
        self,
        core: Core,
        request: PutRequest,
        positions: Positions,
        *,
        dirty: bool,
        renews: U32 | None = None,
        received: list[Extent | None] | None = None,
    ) -> None:
        self._core = core
        self._received = None if dirty else received
        self._request = request
        self.positions = positions
        self._dirty = dirty
        self._renews = renews is not None
        self.rows: U32 = np.zeros(0, np.uint32) if renews is None else renews
        self._old: U64 = core.index.generations[self.rows]
        self._slots: U64 = np.zeros(0, np.uint64)
        self._extents: list[Extent] = []
        self._good = np.zeros(len(positions), np.bool_)

    def begin(self, put: Put) -> None:
        """Take memory, rows and generations. Raises Busy, MemoryError."""
        core, request = self._core, self._request
        lengths = request.lengths[self.positions]
        sizes = record.image_bytes_of(lengths)
        if self._dirty:
            self._slots = core.tier.reserve(sizes)
            self._images = core.tier.views(self._slots, lengths)
        else:
            self._extents = self._take_received() or core.bounce.allocate(sizes.tolist())
            self._images = [extent.view for extent in self._extents]
        self._generations = core.new_generations(len(lengths))
        if not self._renews:
            self._make_rows(request.keys[self.positions], lengths)
            self._link()
        core.writing.update(dict.fromkeys(self.rows.tolist(), put))

    def _take_received(self) -> list[Extent]:
        """Take the payloads over where they lie, so that nobody waits for memory who holds some."""
        taken = []
        if self._received is not None:
            for position in self.positions.tolist():
                extent, self._received[position] = self._received[position], None
                assert extent is not None
                taken.append(extent)
        return taken

    def _release(self, gone: list[tuple[int, Extent]]) -> None:
        """Give extents of positions back to where they came from."""
        if self._received is None:
            self._core.bounce.release([extent for _, extent in gone])
        else:
            for position, extent in gone:
                self._received[position] = extent

    def _make_rows(self, keys: KeyArray, lengths: U32) -> None:
        core, index = self._core, self._core.index
        space = space_number(self._request.namespace.number, self._request.shard)
        known = index.find(space, keys)
        new, now = known == NONE, core.clock.micros()
        rows = known.copy()
        rows[new] = index.insert(space, keys[new], lengths[new], self._generations[new], now)
        self.rows = rows
        index.realize(rows[~new], lengths[~new], self._generations[~new], now)

    def _link(self) -> None:
        """Tie the new rows to their parents, making ghosts of unknown ones."""
        index, request = self._core.index, self._request
        space = space_number(request.namespace.number, request.shard)
        parents = [request.parent_of(position) for position in self.positions.tolist()]
        with_parent = [number for number, parent in enumerate(parents) if parent]
        if with_parent:
            keys = key_array([parents[number] for number in with_parent])
            index.link(self.rows[with_parent], index.ghosts(space, keys))

    def describe(self) -> None:
        """Describe the versions for engine and journal, once links and stamps are what they are."""
        core, request = self._core, self._request
        kind = events.Kind.BEGIN
        self.begins = versions.records(core.index, core.namespaces, self.rows, kind)
        self.begins["generation"] = self._generations
        self.begins["length"] = request.lengths[self.positions]
        self._blocks = Blocks(
            request.namespace.id,
            request.shard,
            request.keys[self.positions],
            request.lengths[self.positions],
            self._generations,
            np.zeros(len(self.positions), np.uint64),
        )

    def undo(self, put: Put) -> None:
        """Give back what :meth:`begin` took, as far as it came."""
        core = self._core
        core.end_writing(self.rows, put)
        if not self._renews:
            core.index.abort(self.rows)
        self._give_memory_back()

    def _give_memory_back(self) -> None:
        self._core.tier.give_back(self._slots)
        self._release(list(zip(self.positions.tolist(), self._extents, strict=False)))
        self._slots, self._extents = self._slots[:0], []

    def acts(self, sources: Sequence[memoryview]) -> list[Callable[[], None]]:
        """Return what fills the images from the payloads, in shares for several workers."""
        nbytes = int(self._blocks.lengths.sum(dtype=np.int64))
        return [partial(self._fill, sources, share) for share in shares(len(self._images), nbytes)]

    def _fill(self, sources: Sequence[memoryview], share: range) -> None:
        """Copy and hash each payload, write the header page and zero the padding (*worker*).

        A received payload is where it belongs already.
        """
        request, blocks = self._request, self._blocks
        now, start = self._core.clock.nanos(), record.HEADER_PAGE
        lengths, generations = blocks.lengths.tolist(), blocks.generations.tolist()
        for number in share:
            position = int(self.positions[number])
            image, length = self._images[number], lengths[number]
            payload = image[start : start + length]
            if self._received is None:
                # Not by slice assignment, which would keep the interpreter for the whole copy.
                source = np.frombuffer(sources[position], np.uint8)
                np.copyto(np.frombuffer(payload, np.uint8), source)
            checksum = record.payload_checksum(payload)
            if request.checksums is not None and checksum != int(request.checksums[position]):
                continue
            header = record.Header(
                store=self._core.uuid,
                namespace=blocks.namespace,
                shard=blocks.shard,
                key=blocks.keys[number].tobytes(),
                parent=request.parent_of(position),
                generation=generations[number],
                written_ns=now,
                logical_length=length,
                stored_length=length,
                checksum=checksum,
                label=request.label,
            )
            record.encode_into(header, image[:start])
            padding = image[start + length :]
            padding[:] = bytes(len(padding))
            self._good[number] = True

    def finish(self, put: Put, *, failed: bool) -> None:
        """Make the copied blocks readable where they are in memory; hand all to the writer."""
        core = self._core
        if failed:
            self.undo(put)
            put.settle(self.positions, BlockStatus.FAILED)
            return
        bad = ~self._good
        if bad.any():
            put.settle(self.positions[bad], BlockStatus.MISMATCH)
            self._drop(put, bad)
        if self._renews and (gone := core.writer.hold(self.rows, self._old)).any():
            put.settle(self.positions[gone], BlockStatus.BUSY)
            self._drop(put, gone)
        if not len(self.rows):
            return
        level = self._request.level
        if self._dirty:
            core.end_writing(self.rows, put)
            core.index.fill(self.rows)
            core.tier.keep(self.rows, self._slots)
            core.publish_stored(self.rows)
            if level is Ack.ACCEPTED:
                put.settle(self.positions, BlockStatus.OK)
        entry = Entry(
            rows=self.rows,
            blocks=self._blocks,
            images=self._images,
            begins=self.begins,
            durable=level is Ack.DURABLE,
            namespace=self._request.namespace,
            dirty=self._dirty,
            renews=self._renews,
            extents=self._extents,
            old=self._old,
        )
        if not self._dirty or level is not Ack.ACCEPTED:
            entry.waiter, entry.positions = put, self.positions.tolist()
        core.writer.add(entry)

    def _drop(self, put: Put, bad: np.ndarray) -> None:
        """Leave out blocks, for instance whose payload was not what the client announced."""
        core, good = self._core, ~bad
        core.end_writing(self.rows[bad], put)
        if not self._renews:
            core.index.abort(self.rows[bad])
        if self._dirty:
            core.tier.give_back(self._slots[bad])
            self._slots = self._slots[good]
        else:
            whose = zip(self.positions.tolist(), self._extents, strict=True)
            self._release([one for one, left in zip(whose, bad, strict=True) if left])
            self._extents = [one for one, kept in zip(self._extents, good, strict=True) if kept]
        self.rows, self.positions = self.rows[good], self.positions[good]
        self._old = self._old[good] if self._renews else self._old
        self._images = [one for one, kept in zip(self._images, good, strict=True) if kept]
        self._blocks, self.begins = self._blocks.take(good), self.begins[good]
        self._good = self._good[good]

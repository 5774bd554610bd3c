"""A put: from a client's bytes to rows that can be read, and to an answer.

Payloads are copied into slots of our own and hashed there: what a client changes later is never
written to disk. Blocks that find room in the memory tier can be read at once and are *dirty* until
the writer (:mod:`kvstore.writer`) has brought them to the engine. Others, and new versions of known
blocks, stay in the bounce slab and can be read when they are written. The put is answered when
every block has reached the level asked for, or failed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvstore import events, record, versions
from kvstore.answers import Ack, BlockStatus
from kvstore.errors import InvalidKey, KVStoreError, ReadOnly
from kvstore.index import DIRTY, DISK, DURABLE, GHOST, NONE, WRITING
from kvstore.job import Job
from kvstore.keys import KeyArray, check_block_length, key_array, space_number
from kvstore.writer import Entry, Waiter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.backends.base import U8, U32, U64
    from kvstore.core import Core
    from kvstore.namespaces import Namespace
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


class Put(Job, Waiter):
    """Puts the blocks that are new; the others are answered from the index.

    ``sources`` are the payloads; they are read until the put is answered. ``statuses`` (one
    :class:`BlockStatus` each) are final when it is. Raises Busy when memory has no room now, and
    what :func:`check` refuses; then nothing was taken.
    """

    def __init__(self, core: Core, request: PutRequest, sources: Sequence[memoryview]) -> None:
        Job.__init__(self)
        self.statuses: U8 = np.full(len(request.keys), BlockStatus.FAILED, np.uint8)
        self._core = core
        self._request = request
        self._sources = sources
        self._space = space_number(request.namespace.number, request.shard)
        self._open = np.ones(len(request.keys), np.bool_)
        self._finished = self._over = False
        self._answered: list[Callable[[], None]] = []
        self._copies: dict[int, list[int]] = {}
        self._flushed: list[int] = []
        self._held: U32 = np.zeros(0, np.uint32)
        self._held_generations: U64 = np.zeros(0, np.uint64)
        self._batches: list[_Batch] = []
        check(core, request)
        try:
            self._sort_out()
        except BaseException:
            for batch in self._batches:
                batch.undo()
            core.release(self._held, self._held_generations)
            raise

    def when_answered(self, callback: Callable[[], None]) -> None:
        """Call back on the owner thread once ``statuses`` are final; at once if they are."""
        if self._over:
            callback()
        else:
            self._answered.append(callback)

    # -- begin: on the owner thread ---------------------------------------------------------------

    def _sort_out(self) -> None:
        """Answer what the index knows; make batches of what must be written."""
        index, request = self._core.index, self._request
        rows = index.find(self._space, request.keys)
        self._core.forget_stranded(rows[rows != NONE])
        rows = index.find(self._space, request.keys)
        unknown = rows == NONE
        safe = np.where(unknown, 0, rows)
        unknown |= (index.flags[safe] & GHOST) != 0
        readable = index.readable(rows)
        same = index.sizes[safe] == request.lengths
        busy = np.fromiter(
            (row in self._core.writing for row in rows.tolist()), np.bool_, len(rows)
        )
        if request.overwrite:
            renewed = readable & ~busy & ((index.flags[safe] & DISK) != 0)
            joined = ~unknown & ~renewed
        else:
            renewed = np.zeros(len(rows), np.bool_)
            joined = ~unknown & ~readable & same
            self._settle(np.flatnonzero(~unknown & ~same), BlockStatus.CONFLICT)
        self._hold(rows[readable])
        self._await_level(np.flatnonzero(readable & same & ~renewed & ~joined), rows)
        fresh = self._first_of_each(np.flatnonzero(unknown | renewed))
        self._bring(fresh[~renewed[fresh]], fresh[renewed[fresh]], rows)
        self._join(np.flatnonzero(joined), rows)
        known = index.find(self._space, request.keys)
        self._core.touch(known[known != NONE])
        for batch in self._batches:
            batch.describe()

    def _hold(self, rows: U32) -> None:
        """Keep known rows while we work: they may be parents of what comes."""
        core = self._core
        if self._request.parent:
            parent = np.frombuffer(self._request.parent, np.uint8)[None]
            row = core.index.find(self._space, parent)
            rows = np.concatenate([row[core.index.readable(row)], rows])
        core.index.acquire(rows)
        self._held, self._held_generations = rows, core.index.generations[rows]

    def _await_level(self, positions: Positions, rows: U32) -> None:
        """Settle blocks that are there, at once or when they have reached the level asked for."""
        core, index, level = self._core, self._core.index, self._request.level
        for position, row in zip(positions.tolist(), rows[positions].tolist(), strict=True):
            on_disk = bool(index.flags[row] & DISK)
            generation = int(index.generations[row])
            durable = bool(index.flags[row] & DURABLE) or generation <= core.synced_generation
            if level is Ack.ACCEPTED or (on_disk and (durable or level is Ack.WRITTEN)):
                self._settle([position], BlockStatus.ALREADY_PRESENT)
            elif on_disk:
                self._flushed.append(position)
            elif index.flags[row] & DIRTY:
                core.writer.watch(row, self, position, durable=level is Ack.DURABLE)
            else:
                self._settle([position], BlockStatus.BUSY)

    def _first_of_each(self, positions: Positions) -> Positions:
        """Leave out later copies of a key that this batch itself brings; they join the first."""
        if len(positions) < 2:
            return positions
        keys = np.ascontiguousarray(self._request.keys[positions])
        _, first, inverse = np.unique(
            keys.view(np.dtype((np.void, keys.shape[1]))).ravel(),
            return_index=True,
            return_inverse=True,
        )
        leaders = positions[first[inverse]]
        later = leaders != positions
        for leader, position in zip(
            leaders[later].tolist(), positions[later].tolist(), strict=True
        ):
            self._copies.setdefault(leader, []).append(position)
        kept: Positions = positions[~later]
        return kept

    def _bring(self, new: Positions, renewed: Positions, rows: U32) -> None:
        """Make batches: new blocks through memory as far as there is room, the rest around it."""
        core, lengths = self._core, self._request.lengths
        sizes = record.image_bytes_of(lengths)
        through = np.zeros(len(new), np.bool_)
        if len(new):
            through = core.tier.fits(sizes[new]) & core.writer.has_room(sizes[new])
        for positions, dirty in ((new[through], True), (new[~through], False)):
            if len(positions):
                self._batches.append(_Batch(core, self._request, positions, dirty=dirty))
        if len(renewed):
            batch = _Batch(core, self._request, renewed, dirty=False, renews=rows[renewed])
            self._batches.append(batch)
        for batch in self._batches:
            batch.begin(self)

    def _join(self, positions: Positions, rows: U32) -> None:
        """Wait for other puts that write the same keys; then look again."""
        others: dict[Put, list[int]] = {}
        for position, row in zip(positions.tolist(), rows[positions].tolist(), strict=True):
            other = self._core.writing.get(row)
            if other is None and not self._core.index.flags[row] & (DIRTY | WRITING):
                self._settle([position], BlockStatus.BUSY)
            elif other is None or other.done:
                self._core.writer.watch(row, self, position, durable=False, again=True)
            else:
                others.setdefault(other, []).append(position)
        for other, waiting in others.items():
            other.when_done(partial(self._look_again, waiting))

    def _look_again(self, positions: list[int]) -> None:
        """Put some of the blocks anew, after others that wrote them have come to an end."""
        core = self._core
        try:
            again = Put(core, self._request.take(positions), [self._sources[p] for p in positions])
        except KVStoreError:
            self._settle(positions, BlockStatus.BUSY)
            return
        core.queue(again)
        again.when_answered(lambda: self._settle(positions, again.statuses))

    # -- run: in a worker -------------------------------------------------------------------------

    def run(self) -> None:
        for batch in self._batches:
            batch.fill(self._sources)
        if self._flushed:
            self._core.sync_everything()

    # -- finish: on the owner thread --------------------------------------------------------------

    def finish(self) -> None:
        self._finished = True
        failed = self.failure is not None
        for batch in self._batches:
            batch.finish(self, failed=failed)
        self._core.release(self._held, self._held_generations)
        self._settle(self._flushed, BlockStatus.FAILED if failed else BlockStatus.ALREADY_PRESENT)
        self._answer_if_settled()

    def settle_row(self, position: int, status: int, *, again: bool) -> None:
        """Take the outcome of a row that was watched (called by the writer)."""
        if again:
            self._look_again([position])
        else:
            self._settle([position], status)

    def _settle(self, positions: Positions | list[int], status: int | U8) -> None:
        if not len(positions):
            return
        self.statuses[positions] = status
        self._open[positions] = False
        for position in list(positions):
            for copy in self._copies.pop(int(position), ()):
                self._settle([copy], self._like(int(position), copy))
        self._answer_if_settled()

    def _like(self, first: int, copy: int) -> int:
        """Return the status of a later copy of a key in the same batch."""
        status = int(self.statuses[first])
        if status not in (BlockStatus.OK, BlockStatus.ALREADY_PRESENT):
            return status
        same = self._request.lengths[first] == self._request.lengths[copy]
        return BlockStatus.ALREADY_PRESENT if same else BlockStatus.CONFLICT

    def _answer_if_settled(self) -> None:
        if not self._finished or self._open.any() or self._over:
            return
        self._over = True
        self._count()
        while self._answered:  # emptied: callbacks hold requests, they hold memory of clients
            self._answered.pop(0)()

    def _count(self) -> None:
        counters, counts = self._core.counters, np.bincount(self.statuses, minlength=16)
        counters.stored += int(counts[BlockStatus.OK])
        counters.already_present += int(counts[BlockStatus.ALREADY_PRESENT])
        counters.conflicts += int(counts[BlockStatus.CONFLICT])
        counters.refused_full += int(counts[BlockStatus.FULL])
        counters.write_errors += int(counts[BlockStatus.FAILED])


class _Batch:
    """Blocks of one put that go the same way: through memory (``dirty``) or around it.

    ``renews`` are the rows of known blocks that get a new version; else rows are made.
    """

    def __init__(
        self,
        core: Core,
        request: PutRequest,
        positions: Positions,
        *,
        dirty: bool,
        renews: U32 | None = None,
    ) -> None:
        self._core = core
        self._request = request
        self._positions = positions
        self._dirty = dirty
        self._renews = renews is not None
        self._rows: U32 = np.zeros(0, np.uint32) if renews is None else renews
        self._old: U64 = core.index.generations[self._rows]
        self._slots: U64 = np.zeros(0, np.uint64)
        self._extents: list[Extent] = []
        self._good = np.zeros(len(positions), np.bool_)

    def begin(self, put: Put) -> None:
        """Take memory, rows and generations. Raises Busy, MemoryError."""
        core, request = self._core, self._request
        lengths = request.lengths[self._positions]
        sizes = record.image_bytes_of(lengths)
        if self._dirty:
            self._slots = core.tier.reserve(sizes)
            self._images = core.tier.views(self._slots, lengths)
        else:
            self._extents = core.bounce.allocate(sizes.tolist())
            self._images = [extent.view for extent in self._extents]
        self._generations = core.new_generations(len(lengths))
        if not self._renews:
            self._make_rows(request.keys[self._positions], lengths)
            self._link()
        core.writing.update(dict.fromkeys(self._rows.tolist(), put))

    def _make_rows(self, keys: KeyArray, lengths: U32) -> None:
        core, index = self._core, self._core.index
        space = space_number(self._request.namespace.number, self._request.shard)
        known = index.find(space, keys)
        new, now = known == NONE, core.clock.micros()
        rows = known.copy()
        rows[new] = index.insert(space, keys[new], lengths[new], self._generations[new], now)
        self._rows = rows
        index.realize(rows[~new], lengths[~new], self._generations[~new], now)

    def _link(self) -> None:
        """Tie the new rows to their parents, making ghosts of unknown ones."""
        index, request = self._core.index, self._request
        space = space_number(request.namespace.number, request.shard)
        parents = [request.parent_of(position) for position in self._positions.tolist()]
        with_parent = [number for number, parent in enumerate(parents) if parent]
        if with_parent:
            keys = key_array([parents[number] for number in with_parent])
            index.link(self._rows[with_parent], index.ghosts(space, keys))

    def describe(self) -> None:
        """Describe the versions for engine and journal, once links and stamps are what they are."""
        core, index = self._core, self._core.index
        kind = events.Kind.BEGIN
        self.begins = versions.records(index, core.namespaces, self._rows, kind)
        self.begins["generation"] = self._generations
        self.begins["length"] = self._request.lengths[self._positions]
        self._blocks = versions.blocks_of(self.begins)[0]

    def undo(self) -> None:
        """Give back what :meth:`begin` took, as far as it came."""
        core = self._core
        for row in self._rows.tolist():
            core.writing.pop(row, None)
        if not self._renews:
            core.index.abort(self._rows)
        self._give_memory_back()

    def _give_memory_back(self) -> None:
        self._core.tier.give_back(self._slots)
        self._core.bounce.release(self._extents)
        self._slots, self._extents = self._slots[:0], []

    def fill(self, sources: Sequence[memoryview]) -> None:
        """Copy and hash each payload, write the header page and zero the padding (*worker*)."""
        request, blocks = self._request, self._blocks
        now, start = self._core.clock.nanos(), record.HEADER_PAGE
        lengths, generations = blocks.lengths.tolist(), blocks.generations.tolist()
        for number, position in enumerate(self._positions.tolist()):
            image, length = self._images[number], lengths[number]
            payload = image[start : start + length]
            # Not by slice assignment, which would keep the interpreter for the whole copy.
            np.copyto(np.frombuffer(payload, np.uint8), np.frombuffer(sources[position], np.uint8))
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
            self.undo()
            put._settle(self._positions, BlockStatus.FAILED)
            return
        bad = ~self._good
        if bad.any():
            put._settle(self._positions[bad], BlockStatus.MISMATCH)
            self._drop(bad)
        if self._renews and (gone := core.writer.hold(self._rows, self._old)).any():
            put._settle(self._positions[gone], BlockStatus.OK)
            self._drop(gone)
        if not len(self._rows):
            return
        level = put._request.level
        if self._dirty:
            for row in self._rows.tolist():
                core.writing.pop(row, None)
            core.index.fill(self._rows)
            core.tier.keep(self._rows, self._slots)
            core.publish_stored(self._rows)
            if level is Ack.ACCEPTED:
                put._settle(self._positions, BlockStatus.OK)
        entry = Entry(
            rows=self._rows,
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
            entry.waiter, entry.positions = put, self._positions.tolist()
        core.writer.add(entry)

    def _drop(self, bad: np.ndarray) -> None:
        """Leave out blocks, for instance whose payload was not what the client announced."""
        core, good = self._core, ~bad
        for row in self._rows[bad].tolist():
            core.writing.pop(row, None)
        if not self._renews:
            core.index.abort(self._rows[bad])
        if self._dirty:
            core.tier.give_back(self._slots[bad])
            self._slots = self._slots[good]
        else:
            gone = [one for one, left in zip(self._extents, bad, strict=True) if left]
            core.bounce.release(gone)
            self._extents = [one for one, kept in zip(self._extents, good, strict=True) if kept]
        self._rows, self._positions = self._rows[good], self._positions[good]
        self._old = self._old[good] if self._renews else self._old
        self._images = [one for one, kept in zip(self._images, good, strict=True) if kept]
        self._blocks, self.begins = self._blocks.take(good), self.begins[good]
        self._good = self._good[good]


def check(core: Core, request: PutRequest) -> None:
    """Refuse what may not be put. Raises InvalidKey, ReadOnly."""
    if core.read_only:
        raise ReadOnly(f"the store at {core.path} takes no writes: {core.read_only}")
    key_length = request.keys.shape[1]
    core.check_key_length(request.namespace, request.keys[0].tobytes())
    if request.parent and len(request.parent) != key_length:
        raise InvalidKey(
            f"a parent of {len(request.parent)} bytes for keys of {key_length}",
            "a parent is a key of the same namespace",
        )
    for position in (int(request.lengths.argmin()), int(request.lengths.argmax())):
        length, key = int(request.lengths[position]), request.keys[position].tobytes()
        check_block_length(length, key)
        if not core.space.fits(record.image_bytes(length)):
            raise InvalidKey(
                f"block {key.hex()} of {length} bytes is over a quarter of the capacity",
                "raise capacity",
            )

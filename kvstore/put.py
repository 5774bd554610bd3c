"""A put: from a client's bytes to rows that can be read, and to an answer.

Payloads are copied into slots of our own and hashed there, if they were not received into memory of
ours: what a client changes later is never written to disk. Blocks that find room in the memory tier
can be read at once and are *dirty* until the writer (:mod:`kvstore.writer`) has brought them to the
engine. Others, and new versions of known blocks, stay in the bounce slab and can be read when they
are written. The put is answered when every block has reached the level asked for, or failed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvstore import quota, record
from kvstore.answers import Ack, BlockStatus
from kvstore.batch import Batch
from kvstore.entry import Waiter
from kvstore.errors import InvalidKey, KVStoreError, ReadOnly
from kvstore.index import DIRTY, DISK, DURABLE, GHOST, NONE, WRITING
from kvstore.job import Job
from kvstore.keys import check_block_length, space_number

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.backends.base import U8, U32, U64
    from kvstore.batch import PutRequest
    from kvstore.core import Core
    from kvstore.slab import Extent

Positions = np.ndarray


class Put(Job, Waiter):
    """Puts the blocks that are new; the others are answered from the index.

    ``sources`` are the payloads; they are read until the put is answered. Where they lie in memory
    of ours, ``received`` into extents with room for a header page before them, those that go around
    the tier are used in place; then the extent leaves that list. ``statuses`` (one
    :class:`BlockStatus` each) are final when the put is answered. Raises Busy when memory has no
    room now, and what :func:`check` refuses; then nothing was taken.
    """

    def __init__(
        self,
        core: Core,
        request: PutRequest,
        sources: Sequence[memoryview],
        received: list[Extent | None] | None = None,
    ) -> None:
        Job.__init__(self)
        self.statuses: U8 = np.full(len(request.keys), BlockStatus.FAILED, np.uint8)
        self._core = core
        self._request = request
        self._sources = sources
        self._received = received
        self._space = space_number(request.namespace.number, request.shard)
        self._open = np.ones(len(request.keys), np.bool_)
        self._finished = self._over = False
        self._answered: list[Callable[[], None]] = []
        self._copies: dict[int, list[int]] = {}
        self._flushed: list[int] = []
        self._held: U32 = np.zeros(0, np.uint32)
        self._held_generations: U64 = np.zeros(0, np.uint64)
        self._batches: list[Batch] = []
        check(core, request)
        try:
            self._sort_out()
        except BaseException:
            for batch in self._batches:
                batch.undo(self)
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
        if self._core.forget_stranded(rows[rows != NONE]):
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
            self.settle(np.flatnonzero(~unknown & ~same), BlockStatus.CONFLICT)
        self._hold(rows[readable])
        fresh = self._first_of_each(np.flatnonzero(unknown | renewed))
        if quota.limit_of(self._core, request.namespace) is not None:
            fresh = self._within_quota(fresh)
            rows = index.find(self._space, request.keys)  # ghosts may have left with others
        self._bring(fresh[~renewed[fresh]], fresh[renewed[fresh]], rows)
        # After the memory is taken: a put that got none is made anew, and must not wait twice.
        self._await_level(np.flatnonzero(readable & same & ~renewed & ~joined), rows)
        self._join(np.flatnonzero(joined), rows)
        for batch in self._batches:
            rows[batch.positions] = batch.rows
        self._core.touch(rows[rows != NONE], put=True)
        for batch in self._batches:
            batch.describe()

    def _within_quota(self, fresh: Positions) -> Positions:
        """Return those for which their namespace has room; the others are answered."""
        sizes = self._core.index.record_bytes(self._request.lengths[fresh])
        count = quota.admit(self._core, self._request.namespace, sizes)
        self.settle(fresh[count:], BlockStatus.FULL)
        return fresh[:count]

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
                self.settle([position], BlockStatus.ALREADY_PRESENT)
            elif on_disk:
                self._flushed.append(position)
            elif index.flags[row] & DIRTY:
                core.writer.watch(row, self, position, durable=level is Ack.DURABLE)
            else:
                self.settle([position], BlockStatus.BUSY)

    def _first_of_each(self, positions: Positions) -> Positions:
        """Leave out later copies of a key that this batch itself brings; they join the first."""
        keys = [key.tobytes() for key in self._request.keys[positions]]
        if len(set(keys)) == len(keys):
            return positions
        leaders: dict[bytes, int] = {}
        for key, position in zip(keys, positions.tolist(), strict=True):
            if leaders.setdefault(key, position) != position:
                self._copies.setdefault(leaders[key], []).append(position)
        return np.array(list(leaders.values()))

    def _bring(self, new: Positions, renewed: Positions, rows: U32) -> None:
        """Make batches: new blocks through memory as far as there is room, the rest around it."""
        core, lengths = self._core, self._request.lengths
        sizes = record.image_bytes_of(lengths)
        through = np.zeros(len(new), np.bool_)
        if len(new):
            through = core.tier.fits(sizes[new]) & core.writer.has_room(sizes[new])
        make = partial(Batch, core, self._request, received=self._received)
        for positions, dirty in ((new[through], True), (new[~through], False)):
            if len(positions):
                self._batches.append(make(positions, dirty=dirty))
        if len(renewed):
            self._batches.append(make(renewed, dirty=False, renews=rows[renewed]))
        for batch in self._batches:
            batch.begin(self)

    def _join(self, positions: Positions, rows: U32) -> None:
        """Wait for other puts that write the same keys; then look again."""
        others: dict[Put, list[int]] = {}
        for position, row in zip(positions.tolist(), rows[positions].tolist(), strict=True):
            other = self._core.writing.get(row)
            if other is None and not self._core.index.flags[row] & (DIRTY | WRITING):
                self.settle([position], BlockStatus.BUSY)
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
            self.settle(positions, BlockStatus.BUSY)
            return
        core.queue(again)
        again.when_answered(lambda: self.settle(positions, again.statuses))

    # -- run: in a worker -------------------------------------------------------------------------

    def acts(self) -> list[Callable[[], None]]:
        acts = [act for batch in self._batches for act in batch.acts(self._sources)]
        return [*acts, self._core.sync_everything] if self._flushed else acts

    # -- finish: on the owner thread --------------------------------------------------------------

    def finish(self) -> None:
        self._finished = True
        failed = self.failure is not None
        for batch in self._batches:
            batch.finish(self, failed=failed)
        self._core.release(self._held, self._held_generations)
        self.settle(self._flushed, BlockStatus.FAILED if failed else BlockStatus.ALREADY_PRESENT)
        self._answer_if_settled()

    def settle_row(self, position: int, status: int, *, again: bool) -> None:
        """Take the outcome of a row that was watched (called by the writer)."""
        if again:
            self._look_again([position])
        else:
            self.settle([position], status)

    def settle(self, positions: Positions | list[int], status: int | U8) -> None:
        if not len(positions):
            return
        self.statuses[positions] = status
        self._open[positions] = False
        for position in list(positions):
            for copy in self._copies.pop(int(position), ()):
                self.settle([copy], self._like(int(position), copy))
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
        size = int(core.engine.record_bytes_of(request.lengths[position : position + 1])[0])
        if not core.space.fits(size):
            raise InvalidKey(
                f"block {key.hex()} of {length} bytes is over a quarter of the capacity",
                "raise capacity",
            )
        if size > core.engine.largest_image:
            raise InvalidKey(
                f"block {key.hex()} of {length} bytes is larger than what this store has room for "
                f"in one piece, {core.engine.largest_image - record.HEADER_PAGE} bytes",
                "make a store of a larger capacity",
            )

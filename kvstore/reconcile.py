"""Comparing the index with what the engine really holds, by a scan of the records' headers.

Needed when the journal cannot be trusted to tell everything: it is torn or gone, or the machine
lost power and may have kept some files and not others. A record that the index does not know is
adopted; a version that was superseded or given up is deleted; a row without a record becomes a
miss. The scan goes in steps, so it can run while the store serves.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import TYPE_CHECKING

import numpy as np

from kvstore import events, versions
from kvstore.backends.base import Blocks, Scanned
from kvstore.check import examine
from kvstore.index import DISK, GHOST, NONE, WRITING
from kvstore.job import Step
from kvstore.keys import space_number
from kvstore.removal import discard, retire

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.backends.base import U32, U64
    from kvstore.core import Core
    from kvstore.errors import KVStoreError

log = logging.getLogger(__name__)


class Reconcile:
    """One comparison. ``given_up`` are generations that must not come back.

    ``scanned`` counts records so far. ``done`` is called on the owner thread at the end, unless the
    comparison was cancelled or failed: then it is still due.
    """

    def __init__(self, core: Core, given_up: U64, done: Callable[[], None]) -> None:
        self.scanned = 0
        self._core = core
        self._done = done
        self._base = core.generation
        self._given_up = [given_up]
        self._cancelled = False
        self._scan = core.engine.scan()
        self._batch: Scanned | None = None
        self._adopted: list[U32] = []
        self._written: list[np.ndarray] = []
        self._strange = 0
        self._synced = core.synced_generation
        self._nameonly: list[tuple[bytes, int, bytes, int]] = []
        self._seen = np.zeros(core.index.row_limit, np.bool_)
        core.scan = self
        self._queue(self._read, self._compare)

    def give_up(self, generations: U64) -> None:
        """Note versions that are removed while the scan runs: it may have met them before."""
        self._given_up.append(generations)

    def cancel(self) -> None:
        """Stop at the next step."""
        self._cancelled = True

    def _queue(self, act: Callable[[], None], after: Callable[[], None]) -> None:
        def finished(step: Step) -> None:
            if step.failure is None and not self._cancelled:
                after()
                return
            # Left to the collector of garbage, a scan may be ended in any thread at any moment,
            # also in one that holds a lock which the end of the scan waits for.
            self._core.queue(Step(self._close, lambda _step: None))
            if self._cancelled:
                self._core.scan = None
            else:
                assert step.failure is not None
                self._fail(step.failure)

        self._core.queue(Step(act, finished))

    def _close(self) -> None:
        if isinstance(self._scan, Generator):
            self._scan.close()

    def _fail(self, failure: KVStoreError) -> None:
        """Take no writes over records that nobody knows of, and try again later."""
        core, given_up, done = self._core, np.concatenate(self._given_up), self._done
        core.scan = None
        core.stop_writes(f"the scan of the store failed: {failure.message}")

        def again() -> None:
            if core.scan is None:
                core.retry = None
                Reconcile(core, given_up, finished)

        def finished() -> None:
            core.read_only = ""
            done()

        core.retry = again

    def _read(self) -> None:
        self._batch = next(self._scan, None)

    def _compare(self) -> None:
        batch = self._batch
        if batch is None:
            self._order_by_age()
            self._check_unseen()
            return
        core = self._core
        if core.generation == self._base:
            # Nothing was written yet, so this is the place to learn of numbers that a lost journal
            # gave: they must not be given again.
            highest = int(batch.generations.max(initial=0))
            core.generation = self._base = max(self._base, highest)
        rivals = [at for chosen in _groups(batch) for at in self._rivals(batch, chosen)]
        if rivals:
            self._queue(lambda: self._examine(batch, rivals), lambda: self._take(batch))
        else:
            self._take(batch)

    def _rivals(self, batch: Scanned, chosen: np.ndarray) -> list[int]:
        """Return the positions of records that are newer than another version of their block."""
        core, index, first = self._core, self._core.index, chosen[0]
        namespace = core.namespaces.known(batch.namespaces[first].tobytes())
        keys = batch.keys[chosen][:, : batch.key_lengths[first]]
        rows = index.find(space_number(namespace.number, int(batch.shards[first])), keys)
        safe = np.where(rows == NONE, 0, rows)
        known = (rows != NONE) & ((index.flags[safe] & DISK) != 0)
        generations = batch.generations[chosen]
        newer = known & (generations > index.generations[safe]) & (generations <= self._base)
        newer |= ~_oldest_of_each(keys, generations)
        found: list[int] = chosen[newer].tolist()
        return found

    def _examine(self, batch: Scanned, rivals: list[int]) -> None:
        """Give up and delete those that are not whole.

        A header alone proves nothing: the power may have gone when the rest had not reached the
        disk, and what such a record would replace may be durable.
        """
        engine = self._core.engine
        for at in rivals:
            one = _blocks(batch, np.array([at]))
            if examine(engine, one) == "damaged":
                self._given_up.append(one.generations)
                engine.delete_many(one)

    def _take(self, batch: Scanned) -> None:
        """Bring the index into line with a batch of records."""
        self.scanned += len(batch)
        self._strange += len(batch.strange)
        for finding in batch.strange:
            log.warning("%s: %s: %s", finding.kind, finding.path, finding.detail)
            if finding.identity is not None:
                self._nameonly.append(finding.identity)
        records = [self._compare_group(batch, chosen) for chosen in _groups(batch)]
        new = np.concatenate([events.blank(0, events.Kind.PUT), *records])
        self._queue(lambda: self._save(new), lambda: self._queue(self._read, self._compare))

    def _unfinished(self) -> list[Blocks]:
        """Return the records without a header that no row holds and no sync has covered.

        After a power loss such files are what is left of writes that nobody was promised: the name
        has reached the disk, the content has not. A row that holds one is judged with the others.
        """
        core, found = self._core, []
        for namespace, shard, key, generation in self._nameonly if core.doubt else ():
            if not self._synced < generation <= self._base:
                continue
            space = space_number(core.namespaces.known(namespace).number, shard)
            keys = np.frombuffer(key, np.uint8).reshape(1, -1)
            rows, generations = core.index.find(space, keys), np.array([generation], np.uint64)
            if rows[0] == NONE or not core.index.holds(rows, generations)[0]:
                nothing = np.zeros(1, np.uint32), generations, np.zeros(1, np.uint64)
                found.append(Blocks(namespace, shard, keys, *nothing))
        return found

    def _save(self, records: events.Records) -> None:
        self._core.journal.append(records)

    def _compare_group(self, batch: Scanned, chosen: np.ndarray) -> events.Records:
        """Compare records of one namespace, shard and key length; return what to journal."""
        core, index, first = self._core, self._core.index, chosen[0]
        namespace = core.namespaces.known(batch.namespaces[first].tobytes())
        space = space_number(namespace.number, int(batch.shards[first]))
        keys = batch.keys[chosen][:, : batch.key_lengths[first]]
        generations = batch.generations[chosen]
        given_up = np.concatenate(self._given_up)
        ignored = (generations > self._base) | np.isin(generations, given_up)
        rows = index.find(space, keys)
        safe = np.where(rows == NONE, 0, rows)
        known = (rows != NONE) & ((index.flags[safe] & GHOST) == 0)
        same = known & (index.generations[safe] == generations)
        self._seen[rows[same & (rows < len(self._seen))]] = True
        busy = known & ((index.flags[safe] & WRITING) != 0)
        older = known & ~same & ~ignored & (generations < index.generations[safe])
        newer = known & ~same & ~ignored & ~busy & (generations > index.generations[safe])
        self._delete(batch, chosen[older])
        if newer.any():
            core.queue(retire(core, rows[newer])[0])
        wanted = np.flatnonzero(~ignored & ~busy & (~known | newer))
        newest = _newest_of_each(keys[wanted], generations[wanted])
        self._delete(batch, chosen[wanted[~newest]])
        wanted = wanted[newest]
        return self._adopt(batch, chosen[wanted], space, keys[wanted])

    def _delete(self, batch: Scanned, chosen: np.ndarray) -> None:
        if len(chosen):
            blocks = _blocks(batch, chosen)
            self._core.queue(Step(lambda: self._delete_blocks(blocks), lambda _step: None))

    def _delete_blocks(self, blocks: Blocks) -> None:
        self._core.engine.delete_many(blocks)

    def _adopt(
        self, batch: Scanned, chosen: np.ndarray, space: int, keys: np.ndarray
    ) -> events.Records:
        core, index = self._core, self._core.index
        if not len(chosen):
            return events.blank(0, events.Kind.PUT)
        now = core.clock.micros()
        lengths, generations = batch.lengths[chosen], batch.generations[chosen]
        found = index.find(space, keys)
        new = found == NONE
        rows = found.copy()
        rows[new] = index.insert(space, keys[new], lengths[new], generations[new], now)
        index.realize(rows[~new], lengths[~new], generations[~new], now)
        index.commit(rows, generations, batch.places[chosen])
        ghosts = self._link(batch, chosen, space, rows)
        self._adopted.append(rows)
        self._written.append(batch.written_ns[chosen])
        core.index.set_flags(rows, core.doubt)
        return np.concatenate(
            [
                versions.records(index, core.namespaces, ghosts, events.Kind.GHOST),
                versions.records(index, core.namespaces, rows, events.Kind.PUT),
            ]
        )

    def _link(self, batch: Scanned, chosen: np.ndarray, space: int, rows: U32) -> U32:
        """Tie adopted rows to their parents; return the ghosts made for parents not seen yet."""
        index = self._core.index
        lengths = batch.parent_lengths[chosen]
        with_parent = np.flatnonzero(lengths == batch.key_lengths[chosen])
        if not len(with_parent):
            return rows[:0]
        parents = batch.parents[chosen[with_parent]][:, : lengths[with_parent[0]]]
        unknown = index.find(space, parents) == NONE
        parent_rows = index.ghosts(space, parents)
        index.link(rows[with_parent], parent_rows)
        return np.unique(parent_rows[unknown])

    def _order_by_age(self) -> None:
        """Let adopted rows be used in the order in which they were written: all we know of it."""
        if not self._adopted:
            return
        rows, written = np.concatenate(self._adopted), np.concatenate(self._written)
        rows = rows[np.argsort(written, kind="stable")[::-1]]
        self._core.touch(rows[(self._core.index.flags[rows] & DISK) != 0], asked=False)
        log.info("adopted %d blocks that the journal did not know", len(rows))

    def _check_unseen(self) -> None:
        """Look at the rows that the scan did not meet: nothing is there, or no valid header."""
        index = self._core.index
        rows = np.flatnonzero(~self._seen).astype(np.uint32)
        there = (index.flags[rows] & DISK) != 0
        rows = rows[there & (index.generations[rows] <= self._base)]
        groups = versions.groups(index, self._core.namespaces, rows)
        unfinished = self._unfinished()
        found: list[tuple[U32, U64, str]] = []

        def look() -> None:
            engine = self._core.engine
            for one in unfinished:
                engine.delete_many(one)
            for part, blocks in groups:
                seen = np.array(
                    [
                        examine(engine, blocks.take(slice(number, number + 1)))
                        for number in range(len(blocks))
                    ]
                )
                found.extend(
                    (part[seen == kind], blocks.generations[seen == kind], kind)
                    for kind in ("missing", "damaged")
                )

        def drop() -> None:
            self._strange -= len(unfinished)
            for part, generations, kind in found:
                discard(self._core, part, generations, kind)
                self._strange -= len(part) if kind == "damaged" else 0
            self._end()

        self._queue(look, drop)

    def _end(self) -> None:
        self._core.scan = None
        if self._strange > 0:
            self._core.problems.append(
                f"files in the engine's directory that are no valid records: {self._strange}; "
                "the daemon's log names them, move them out of the store"
            )
        log.info("scan finished: %d records", self.scanned)
        self._done()


def _groups(batch: Scanned) -> list[np.ndarray]:
    """Return positions of the batch by (namespace, shard, key length)."""
    if not len(batch):
        return []
    label = np.column_stack(
        [
            batch.namespaces,
            np.ascontiguousarray(batch.shards).view(np.uint8).reshape(len(batch), 2),
            batch.key_lengths,
        ]
    )
    _, inverse = np.unique(label, axis=0, return_inverse=True)
    inverse = inverse.ravel()
    return [np.flatnonzero(inverse == number) for number in range(int(inverse.max()) + 1)]


def _newest_of_each(keys: np.ndarray, generations: np.ndarray) -> np.ndarray:
    """Return a mask that keeps, of several versions of a key, the highest generation."""
    return _first_of_each(keys, np.argsort(generations, kind="stable")[::-1])


def _oldest_of_each(keys: np.ndarray, generations: np.ndarray) -> np.ndarray:
    return _first_of_each(keys, np.argsort(generations, kind="stable"))


def _first_of_each(keys: np.ndarray, order: np.ndarray) -> np.ndarray:
    view = np.ascontiguousarray(keys).view(np.dtype((np.void, keys.shape[1]))).ravel()
    _, first = np.unique(view[order], return_index=True)
    keep: np.ndarray = np.zeros(len(keys), np.bool_)
    keep[order[first]] = True
    return keep


def _blocks(batch: Scanned, chosen: np.ndarray) -> Blocks:
    first = chosen[0]
    return Blocks(
        batch.namespaces[first].tobytes(),
        int(batch.shards[first]),
        batch.keys[chosen][:, : batch.key_lengths[first]],
        batch.lengths[chosen],
        batch.generations[chosen],
        batch.places[chosen],
    )

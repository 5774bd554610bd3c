"""A put: from complete record images to rows that can be read.

Order of writes, and why. The victims' FREE records come first, then their bytes leave the disk, so
the disk never holds more than it may. A BEGIN record in the journal precedes each record's bytes: a
kill in between leaves a version that the next opening can name and remove without a scan. The PUT
record follows the engine's commit, so the journal never promises bytes that are not there; the
answer follows the PUT record, so what was acknowledged is found again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvstore import events, record, versions
from kvstore.answers import BlockStatus
from kvstore.backends.base import U8, U32, U64, Status, Written
from kvstore.errors import InvalidKey, KVStoreError, ReadOnly
from kvstore.index import DURABLE, GHOST, NONE
from kvstore.job import Job
from kvstore.keys import KeyArray, check_block_length, key_array, space_number
from kvstore.removal import make_room

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.core import Core
    from kvstore.namespaces import Namespace
    from kvstore.removal import Removal

_ANSWER = np.full(256, BlockStatus.FAILED, np.uint8)
_ANSWER[Status.OK] = BlockStatus.OK
_ANSWER[Status.FULL] = BlockStatus.FULL


@dataclass(frozen=True, slots=True)
class PutRequest:
    """Blocks of one namespace and shard: keys (n, key length), payload bytes u32 (n,).

    With ``chain`` each block is the parent of the next; ``parent`` is that of the first block,
    empty if it has none. ``durable`` asks for a sync before the answer.
    """

    namespace: Namespace
    shard: int
    keys: KeyArray
    lengths: U32
    durable: bool = False
    chain: bool = False
    parent: bytes = b""
    label: str = ""

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
            parents=tuple(self.parent_of(position) for position in positions),
        )


class Put(Job):
    """Puts the blocks that are new; the others are answered from the index.

    ``images`` hold the payloads at offset 4096; this job writes the header pages. ``statuses`` is
    the answer per block (:class:`BlockStatus`). ``joined`` maps other puts under way, which write
    some of the same keys, to the positions that wait for them.
    """

    def __init__(self, core: Core, request: PutRequest, images: Sequence[memoryview]) -> None:
        super().__init__()
        self.statuses: U8 = np.full(len(request.keys), BlockStatus.FAILED, np.uint8)
        self.joined: dict[Put, list[int]] = {}
        self._core = core
        self._request = request
        self._space = space_number(request.namespace.number, request.shard)
        self._rows: U32 = np.zeros(0, np.uint32)
        self._held: U32 = np.zeros(0, np.uint32)
        self._held_generations: U64 = np.zeros(0, np.uint64)
        self._removal: Removal | None = None
        self._coming = 0
        self._written: Written | None = None
        self._needs_flush = False
        check(core, request)
        try:
            self._begin_with(images)
        except BaseException:
            self._give_back()
            core.index.abort(self._rows)
            raise

    # -- begin: on the owner thread ---------------------------------------------------------------

    def _begin_with(self, images: Sequence[memoryview]) -> None:
        fresh = self._sort_out()
        if len(fresh) and self._make_room(fresh):
            self._insert(fresh, images)
        else:
            self._use()

    def _sort_out(self) -> np.ndarray:
        """Answer what the index knows; return the positions that must be written."""
        index, request = self._core.index, self._request
        rows = index.find(self._space, request.keys)
        unknown = rows == NONE
        safe = np.where(unknown, 0, rows)
        unknown |= (index.flags[safe] & GHOST) != 0
        same = index.sizes[safe] == request.lengths
        readable = index.readable(rows)
        self.statuses[~unknown & ~same] = BlockStatus.CONFLICT
        self.statuses[readable & same] = BlockStatus.ALREADY_PRESENT
        self._hold(rows[readable])
        for position in np.flatnonzero(~unknown & same & ~readable):
            self.joined.setdefault(self._core.writing[int(rows[position])], []).append(
                int(position)
            )
        return self._first_of_each(np.flatnonzero(unknown))

    def _hold(self, rows: U32) -> None:
        """Keep known rows while we work: they may be parents of what comes."""
        core = self._core
        if self._request.parent:
            parent = np.frombuffer(self._request.parent, np.uint8)[None]
            row = core.index.find(self._space, parent)
            rows = np.concatenate([row[core.index.readable(row)], rows])
        core.index.acquire(rows)
        self._held, self._held_generations = rows, core.index.generations[rows]
        if self._request.durable:
            unsynced = (core.index.flags[rows] & DURABLE) == 0
            unsynced &= self._held_generations > core.synced_generation
            self._needs_flush = bool(unsynced.any())

    def _first_of_each(self, positions: np.ndarray) -> np.ndarray:
        """Leave out later copies of a key that this batch itself brings; they join the first."""
        if len(positions) < 2:
            return positions
        keys = np.ascontiguousarray(self._request.keys[positions])
        _, first, inverse = np.unique(
            keys.view(np.dtype((np.void, keys.shape[1]))).ravel(),
            return_index=True,
            return_inverse=True,
        )
        later = positions[first[inverse]] != positions
        for position in positions[later].tolist():
            self.joined.setdefault(self, []).append(position)
        kept: np.ndarray = positions[~later]
        return kept

    def _make_room(self, fresh: np.ndarray) -> bool:
        """Reserve space for the fresh blocks, choosing victims if need be; False when full."""
        need = int(record.image_bytes_of(self._request.lengths[fresh]).sum())
        removal = make_room(self._core, need)
        if removal is None:
            self.statuses[fresh] = BlockStatus.FULL
            return False
        self._removal = removal
        self._coming = need
        self._core.coming += need
        return True

    def _insert(self, fresh: np.ndarray, images: Sequence[memoryview]) -> None:
        core, index, request = self._core, self._core.index, self._request
        keys, lengths = request.keys[fresh], request.lengths[fresh]
        generations = core.new_generations(len(fresh))
        known = index.find(self._space, keys)
        new = known == NONE
        rows = known.copy()
        rows[new] = index.insert(
            self._space, keys[new], lengths[new], generations[new], core.clock.micros()
        )
        self._rows = rows
        index.realize(rows[~new], lengths[~new], generations[~new], core.clock.micros())
        ghost = self._link(fresh, rows)
        self._use()
        self._fresh = fresh
        self._images = [images[position] for position in fresh]
        self._blocks = versions.groups(index, core.namespaces, rows)[0][1]
        self._begin = versions.records(index, core.namespaces, rows, events.Kind.BEGIN)
        self._ghosts = versions.records(index, core.namespaces, ghost, events.Kind.GHOST)
        core.writing.update(dict.fromkeys(rows.tolist(), self))

    def _use(self) -> None:
        """Note that all blocks of the batch were used, the known ones too."""
        rows = self._core.index.find(self._space, self._request.keys)
        self._core.touch(rows[rows != NONE])

    def _link(self, fresh: np.ndarray, rows: U32) -> U32:
        """Tie the new rows to their parents; return the ghost rows made for unknown ones."""
        index, request = self._core.index, self._request
        parents = [request.parent_of(position) for position in fresh.tolist()]
        with_parent = [number for number, parent in enumerate(parents) if parent]
        self._parents = parents
        if not with_parent:
            return rows[:0]
        keys = key_array([parents[number] for number in with_parent])
        unknown = index.find(self._space, keys) == NONE
        parent_rows = index.ghosts(self._space, keys)
        index.link(rows[with_parent], parent_rows)
        return np.unique(parent_rows[unknown])

    # -- run: in a worker -------------------------------------------------------------------------

    def run(self) -> None:
        core = self._core
        if self._removal is not None:
            self._removal.run()
        if len(self._rows):
            self._write()
        if self._needs_flush:
            core.sync_everything()

    def _write(self) -> None:
        core, request = self._core, self._request
        self._save_key_length()
        self._seal()
        core.journal.append(np.concatenate([self._ghosts, self._begin]))
        written = core.engine.put_many(self._blocks, self._images, sync=request.durable)
        ok = written.statuses == Status.OK
        puts = self._begin[ok].copy()
        puts["kind"] = events.Kind.PUT
        puts["place"] = written.places[ok]
        try:
            end = core.journal.append(puts)
            if request.durable:
                core.journal.sync(end)
        except KVStoreError:
            # The bytes are there but the journal cannot promise them: take them back, so that
            # memory, journal and disk agree that this put failed.
            core.engine.delete_many(self._blocks.take(ok))
            raise
        self._written = written

    def _save_key_length(self) -> None:
        """Keep the length beside the record of the namespace, before its first block."""
        namespace, length = self._request.namespace, self._request.keys.shape[1]
        if namespace.key_length not in (None, length):
            self._core.namespaces.forget(namespace)
        self._core.namespaces.set_key_length(namespace, length)

    def _seal(self) -> None:
        """Write the header page and zero the padding of each image; checksum our own copy."""
        blocks, core = self._blocks, self._core
        now = core.clock.nanos()
        lengths, generations = blocks.lengths.tolist(), blocks.generations.tolist()
        for number, image in enumerate(self._images):
            length = lengths[number]
            payload = image[record.HEADER_PAGE : record.HEADER_PAGE + length]
            header = record.Header(
                store=core.uuid,
                namespace=blocks.namespace,
                shard=blocks.shard,
                key=blocks.keys[number].tobytes(),
                parent=self._parents[number],
                generation=generations[number],
                written_ns=now,
                logical_length=length,
                stored_length=length,
                checksum=record.payload_checksum(payload),
                label=self._request.label,
            )
            record.encode_into(header, image[: record.HEADER_PAGE])
            padding = image[record.HEADER_PAGE + length :]
            padding[:] = bytes(len(padding))

    # -- finish: on the owner thread --------------------------------------------------------------

    def finish(self) -> None:
        try:
            self._finish_rows()
        finally:
            self._give_back()
        if self.failure is not None:
            self.statuses[self.statuses != BlockStatus.CONFLICT] = BlockStatus.FAILED
        self._answer_copies()
        self._count()

    def _give_back(self) -> None:
        """Return what begin took besides the new rows; victims that are hidden must still go."""
        core = self._core
        core.coming -= self._coming
        core.release(self._held, self._held_generations)
        if self._removal is not None:
            self._removal.finish()

    def _finish_rows(self) -> None:
        core, rows = self._core, self._rows
        for row in rows.tolist():
            core.writing.pop(row, None)
        if self._written is None:
            core.index.abort(rows)
            return
        ok = self._written.statuses == Status.OK
        core.index.commit(rows[ok], self._written.places[ok])
        core.index.abort(rows[~ok])
        self.statuses[self._fresh] = _ANSWER[self._written.statuses]
        if self._request.durable:
            core.note_durable(rows[ok])
        if (self._written.statuses == Status.FULL).any():
            core.note_full()

    def _answer_copies(self) -> None:
        """Answer later copies of a key in this batch like the first one."""
        copies = self.joined.pop(self, [])
        rows = self._core.index.find(self._space, self._request.keys[copies])
        readable = self._core.index.readable(rows)
        sizes = self._core.index.sizes[np.where(readable, rows, 0)]
        same = sizes == self._request.lengths[copies]
        answer = np.where(same, BlockStatus.ALREADY_PRESENT, BlockStatus.CONFLICT)
        self.statuses[copies] = np.where(readable, answer, self.statuses[copies])

    def _count(self) -> None:
        counters, counts = self._core.counters, np.bincount(self.statuses, minlength=6)
        counters.stored += int(counts[BlockStatus.OK])
        counters.already_present += int(counts[BlockStatus.ALREADY_PRESENT])
        counters.conflicts += int(counts[BlockStatus.CONFLICT])
        counters.refused_full += int(counts[BlockStatus.FULL])
        counters.write_errors += int(counts[BlockStatus.FAILED])
        stored = self.statuses == BlockStatus.OK
        counters.written_bytes += int(self._request.lengths[stored].sum())


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

"""The index: which blocks we hold, where, in which state, who follows whom, when last used.

A *row* stands for one block, known by (space, key); a *space* is a namespace's number and a shard
(:func:`kvstore.keys.space_number`). Questions and answers are arrays, one call for a whole batch.
Only one thread may call. Time is an argument; nothing here reads a clock.

Life of a row::

    (absent) --insert--> WRITING --commit--> DISK --remove--> HIDDEN --free--> (absent)
    (absent) --ghosts--> GHOST --realize--> WRITING --abort--> as before insert or realize
    DISK with children --remove--> GHOST

A *ghost* is a key without bytes that others name as their parent: a miss that keeps the chain
together. It leaves with its last child. A hidden row is found no more, yet its id, size, place and
generation stay until :meth:`Index.free`, so that a removal can be written down and carried out.

Arrays such as :attr:`Index.flags` are read-only and cover all row ids. They are views: read them
again after an insert, which may move the memory.

Memory at 36-byte keys: 86 bytes of columns (:mod:`kvstore.columns`) and about 10 of hash table
(:mod:`kvstore.hashtable`) a row. Longest stall by growth: 2 ms (:mod:`kvstore.hashtable`); longer
keys than any before: see :meth:`kvstore.columns.Columns.widen`.
"""

from __future__ import annotations

import dataclasses
import secrets
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvstore import record
from kvstore.chains import MAX_DEPTH, Chains, positions_of, renamed, smallest_closed, stuck_among
from kvstore.columns import (
    DIRTY,
    DISK,
    DURABLE,
    GHOST,
    HIDDEN,
    MEM,
    NONE,
    READABLE,
    U16,
    U32,
    U64,
    UNSYNCED,
    WRITING,
    Bools,
    Columns,
)
from kvstore.hashtable import HashTable
from kvstore.holds import Bytes, Holds, RecordBytes
from kvstore.rows import Rows, RowView
from kvstore.shares import Shares

if TYPE_CHECKING:
    from collections.abc import Mapping, Set

    from kvstore.keys import KeyArray

__all__ = [
    "DIRTY", "DISK", "DURABLE", "GHOST", "HIDDEN", "MEM", "NONE", "READABLE", "UNSYNCED", "WRITING",
    "Index", "Rows",
]  # fmt: skip

_USUAL_KEY_BYTES = 36
_FIRST_LOOK = 512


class Heeds(Protocol):
    """A policy, as far as the index is concerned."""

    @property
    def state_bytes(self) -> int: ...
    def gone(self, rows: RowView, gone: U32) -> None: ...


class Index(RowView):
    """Rows by key, and everything that is known of them.

    ``max_rows`` is a hint: address space for so many rows (at most 1 Mi) is reserved at once.
    ``epoch`` is where leases count from, in seconds of the caller's clock. ``record_bytes`` turns
    payload sizes into the bytes that records take. ``seed`` fixes the hash, for tests. The state of
    ``policy`` is counted in :attr:`index_bytes`, and hears of rows before their ids are freed.
    """

    def __init__(
        self,
        max_rows: int = 0,
        *,
        epoch: float = 0.0,
        record_bytes: RecordBytes = record.image_bytes_of,
        seed: int | None = None,
        policy: Heeds | None = None,
    ) -> None:
        super().__init__(Columns(max_rows, _USUAL_KEY_BYTES))
        self._table = HashTable(self._columns, secrets.randbits(64) if seed is None else seed)
        self._chains = Chains(self._columns)
        self._holds = Holds(self._columns, epoch, record_bytes)
        self.record_bytes = record_bytes
        self.shares = Shares(self._columns, record_bytes)
        self._policy = policy
        self._last_stamp = 0
        self.blocks = 0
        """Rows whose bytes the engine has."""
        self.live_bytes = 0
        """Bytes that the records of these take."""
        self.ghost_count = 0
        self.dropped_links = 0

    # -- accounts ---------------------------------------------------------------------------------

    @property
    def index_bytes(self) -> int:
        """Resident bytes of columns, hash table and policy state."""
        policy = self._policy.state_bytes if self._policy is not None else 0
        return self._columns.bytes + self._table.bytes + policy

    @property
    def index_bytes_per_block(self) -> float:
        return self.index_bytes / self.blocks if self.blocks else 0.0

    # -- looking up -------------------------------------------------------------------------------

    def find(self, space: int, keys: KeyArray) -> U32:
        """Return the row of each key (shape (n, length)), ghosts and rows being written included;
        NONE where there is none. Keys may repeat."""
        columns = self._columns
        if not columns.fits(keys.shape[1]):
            return np.full(len(keys), NONE, np.uint32)
        return self._table.find(columns.identify(space, keys))

    def readable(self, rows: U32) -> Bools:
        """Tell which rows have bytes in memory or in the engine; NONE has none."""
        flags = self._columns.flags.take(rows, mode="clip")
        readable: Bools = ((flags & READABLE) != 0) & (rows != NONE)
        return readable

    def contains(self, space: int, keys: KeyArray) -> Bools:
        """Tell which keys can be read."""
        return self.readable(self.find(space, keys))

    def prefix(self, space: int, keys: KeyArray) -> int:
        """Return how many keys from the start of a chain can be read, up to the first miss."""
        at, look = 0, _FIRST_LOOK
        while at < len(keys):
            missing = np.flatnonzero(~self.contains(space, keys[at : at + look]))
            if len(missing):
                return at + int(missing[0])
            at, look = at + look, look * 4
        return len(keys)

    # -- coming -----------------------------------------------------------------------------------

    def insert(self, space: int, keys: KeyArray, sizes: U32, generations: U64, stamp: int) -> U32:
        """Add rows in state WRITING for keys that are distinct and absent (the caller has looked).

        ``stamp`` is now in microseconds; the first key becomes the newest, so that the end of a
        chain is older than its start. Raises InvalidKey, MemoryError.
        """
        self._columns.widen(keys.shape[1])
        rows = self._add(self._columns.identify(space, keys), WRITING)
        self._write_version(rows, sizes, generations, stamp)
        return rows

    def _add(self, identities: U32, flags: int) -> U32:
        columns = self._columns
        rows = columns.allocate(len(identities))
        columns.identities[rows] = identities
        try:
            self._table.insert(rows, identities)
        except MemoryError:
            columns.free(rows)
            raise
        columns.flags[rows] = flags
        return rows

    def _write_version(self, rows: U32, sizes: U32, generations: U64, stamp: int) -> None:
        self._columns.sizes[rows] = sizes
        self._columns.generations[rows] = generations
        self.shares.count(rows, 1)
        self.touch(rows, stamp)

    def realize(self, rows: U32, sizes: U32, generations: U64, stamp: int) -> None:
        """Put ghosts into state WRITING."""
        if np.any(self._columns.flags[rows] != GHOST):
            raise ValueError("only ghosts can be realized")
        self._columns.flags[rows] = WRITING
        self.ghost_count -= len(rows)
        self._write_version(rows, sizes, generations, stamp)

    def ghosts(self, space: int, keys: KeyArray) -> U32:
        """Return the row of each parent key, adding a ghost for each unknown one; keys may repeat.
        Link something to a new ghost at once: one without children leaves with the next link."""
        rows = self.find(space, keys)
        unknown = np.flatnonzero(rows == NONE)
        if len(unknown):
            self._columns.widen(keys.shape[1])
            identities = self._columns.identify(space, keys[unknown])
            plain = identities.view(np.dtype((np.void, identities.shape[1] * 4))).ravel()
            _, first, which = np.unique(plain, return_index=True, return_inverse=True)
            made = self._add(identities[first], GHOST)
            self.ghost_count += len(made)
            rows[unknown] = made[which]
        return rows

    def link(self, rows: U32, parents: U32) -> int:
        """Give rows their parents (see :meth:`kvstore.chains.Chains.link`); return links dropped,
        which are also added to :attr:`dropped_links`."""
        dropped = self._chains.link(rows, parents)
        self.dropped_links += dropped
        self._drop_bare_ghosts(parents[parents != NONE])
        return dropped

    def fill(self, rows: U32) -> None:
        """Take rows from WRITING to MEM and DIRTY: readable, not in the engine yet."""
        if np.any(self._columns.flags[rows] != WRITING):
            raise ValueError("only rows being written can be filled")
        self._columns.flags[rows] = MEM | DIRTY

    def holds(self, rows: U32, generations: U64) -> Bools:
        """Tell which rows still hold the version of that generation."""
        columns = self._columns
        flags = columns.flags[rows]
        there: Bools = columns.generations[rows] == generations
        # A row id that is free keeps its last generation.
        there &= (flags != 0) & ((flags & np.uint8(HIDDEN | GHOST)) == 0)
        return there

    def commit(self, rows: U32, generations: U64, places: U64) -> Bools:
        """Take rows from WRITING or DIRTY to DISK; what is in memory stays there.

        Returns False where the row was removed or given another version meanwhile.
        """
        columns = self._columns
        there = self.holds(rows, generations)
        there &= (columns.flags[rows] & np.uint8(WRITING | DIRTY)) != 0
        rows = rows[there]
        columns.flags[rows] = columns.flags[rows] & np.uint8(MEM) | np.uint8(DISK)
        columns.places[rows] = places[there]
        self._account(rows, 1)
        return there

    def withdraw(self, rows: U32) -> None:
        """Take rows from DISK or DIRTY back to WRITING: nobody can read them, their ids stay."""
        self._account(rows[(self._columns.flags[rows] & np.uint8(DISK)) != 0], -1)
        self._columns.flags[rows] = WRITING

    def replace(self, rows: U32, sizes: U32, generations: U64, places: U64) -> None:
        """Give rows that the engine has another version, which the engine has too.

        References and memory of the old version are the caller's to take first.
        """
        columns = self._columns
        if np.any((columns.flags[rows] & np.uint8(DISK)) == 0) or columns.references[rows].any():
            raise ValueError("only rows on disk, without references, can be replaced")
        self._account(rows, -1)
        self.shares.count(rows, -1)
        self._holds.resize(rows, sizes)
        columns.generations[rows] = generations
        columns.places[rows] = places
        columns.flags[rows] = DISK
        self._account(rows, 1)
        self.shares.count(rows, 1)

    def abort(self, rows: U32) -> None:
        """Take rows from WRITING back to absent, or to a ghost if they have children."""
        rows = rows[self._columns.flags[rows] == WRITING]
        if np.any(self._columns.references[rows]):
            raise ValueError("a row with references cannot be given up")
        self.free(self.remove(rows))

    def _account(self, rows: U32, sign: int) -> None:
        self.blocks += sign * len(rows)
        self.live_bytes += sign * int(self.record_bytes(self._columns.sizes[rows]).sum())

    # -- using ------------------------------------------------------------------------------------

    def touch(self, rows: U32, now: int) -> None:
        """Note that rows are used at ``now`` (microseconds). ``rows[0]``, the start of the chain,
        becomes the newest. Stamps stay unique and increasing even if the clock goes back."""
        first = max(self._last_stamp + 1, now)
        # Backwards, so that of several entries of a row the first, newest one counts.
        self._columns.last_use[rows[::-1]] = np.arange(first, first + len(rows), dtype=np.uint64)
        self._last_stamp = first + len(rows) - 1 if len(rows) else self._last_stamp

    def set_flags(self, rows: U32, flags: int) -> None:
        """Set bits that the caller keeps: UNSYNCED, DURABLE, MEM, DIRTY."""
        self._columns.flags[rows] |= np.uint8(flags)

    def clear_flags(self, rows: U32, flags: int) -> None:
        self._columns.flags[rows] &= np.uint8(~flags & 0xFF)

    def acquire(self, rows: U32) -> None:
        """Add a reference per entry; see :meth:`kvstore.holds.Holds.acquire`."""
        self._holds.acquire(rows)

    def release(self, rows: U32) -> None:
        """Give back a reference per entry. Raises ValueError if a row has fewer."""
        self._drop_bare_ghosts(self._holds.release(rows))

    def take_references(self, rows: U32) -> U16:
        """Return and zero the references of rows whose version leaves.

        The caller answers for them from now on.
        """
        counts = self._holds.take_references(rows)
        self._drop_bare_ghosts(rows)
        return counts

    def lease(self, rows: U32, until: float) -> None:
        """Keep rows from eviction until then (seconds); never shortens a lease."""
        self._holds.lease(rows, until)

    def leased_bytes(self, now: float) -> int:
        """Return the record bytes under live leases; cheap, as :meth:`pinned_bytes` is not."""
        return self._holds.leased_bytes(now)

    @property
    def pins(self) -> Mapping[int, float]:
        """Pinned rows and their deadlines in seconds."""
        return self._holds.pins

    @property
    def firm_pins(self) -> Set[int]:
        return self._holds.firm_pins

    def pin(self, row: int, until: float, *, firm: bool = False) -> None:
        """Keep a row from eviction until then (seconds); see :meth:`kvstore.holds.Holds.pin`."""
        self._holds.pin(row, until, firm=firm)

    def unpin(self, row: int) -> None:
        self._holds.unpin(row)

    def pinned_bytes(self, now: float) -> int:
        return self._holds.pinned_bytes(now)

    # -- leaving ----------------------------------------------------------------------------------

    def evictable(self, rows: U32, now: float) -> Bools:
        """Tell which rows the engine has and nothing holds at ``now`` (seconds). Children are
        another matter: see :meth:`victims`."""
        state = self._columns.flags[rows] & np.uint8(DISK | WRITING | GHOST | HIDDEN)
        evictable: Bools = (state == DISK) & self._holds.free(rows, now)
        return evictable

    def held(self, rows: U32, now: float) -> Bools:
        """Tell which rows a reference, lease or pin holds at ``now`` (seconds)."""
        return ~self._holds.free(rows, now)

    def victims(
        self,
        candidates: U32,
        need: int,
        now: float,
        record_bytes: RecordBytes | Bytes | None = None,
    ) -> U32:
        """Return the rows to evict for ``need`` bytes.

        ``candidates`` are distinct, lowest score first. A row goes only if it is evictable and its
        children go too, before it; see :func:`kvstore.chains.smallest_closed`. All that may go are
        returned if they do not suffice. ``record_bytes``: a function of payload sizes, or an array
        by row id; by default that of the index.
        """
        columns = self._columns
        if need <= 0 or not len(candidates):
            return candidates[:0]
        up = positions_of(columns.parents[candidates], candidates)
        allowed = self.evictable(candidates, now)
        stuck = stuck_among(up, columns.children[candidates], allowed)
        if isinstance(record_bytes, np.ndarray):
            weights = record_bytes[candidates]
        else:
            weights = (record_bytes or self.record_bytes)(columns.sizes[candidates])
        return candidates[smallest_closed(up, stuck, weights, need)]

    def remove(self, rows: U32) -> U32:
        """Hide rows; return those that are gone and wait for :meth:`free`.

        A row that leaves a child behind becomes a ghost. Ghosts that lose their last child are
        freed, also new ones. Repeats, ghosts and hidden rows are left out. Leases and pins end,
        references stay: see :meth:`take_references`.
        """
        columns = self._columns
        _, first = np.unique(rows, return_index=True)
        rows = rows[np.sort(first)]
        flags = columns.flags[rows]
        rows = rows[(flags != 0) & ((flags & (GHOST | HIDDEN)) == 0)]
        self._account(rows[(columns.flags[rows] & DISK) != 0], -1)
        self.shares.count(rows, -1)
        self._holds.lift(rows)
        leaving = self._chains.may_leave(rows)
        gone, staying = rows[leaving], rows[~leaving]
        self._table.delete(gone)
        columns.flags[gone] = HIDDEN
        columns.flags[staying] = GHOST
        self.ghost_count += len(staying)
        self._free_ghosts(self._chains.unlink(gone))
        return gone

    def free(self, rows: U32) -> None:
        """Make ids of hidden rows usable again. Raises ValueError for others, and for used ones."""
        if np.any(self._columns.flags[rows] != HIDDEN) or np.any(self._columns.references[rows]):
            raise ValueError("only hidden rows without references can be freed")
        self._let_go(rows)

    def _let_go(self, rows: U32) -> None:
        if self._policy is not None:
            self._policy.gone(self, rows)
        self._columns.free(rows)

    def _drop_bare_ghosts(self, rows: U32) -> None:
        self._free_ghosts(self._chains.take_bare_ghosts(rows))

    def _free_ghosts(self, rows: U32) -> None:
        if len(rows):
            self._table.delete(rows)
            self._let_go(rows)
            self.ghost_count -= len(rows)

    # -- families ---------------------------------------------------------------------------------

    def ancestors(self, row: int, limit: int = MAX_DEPTH) -> U32:
        """Return up to ``limit`` ancestors of ``row``, parent first; about 0.1 us each."""
        return self._chains.ancestors(row, limit)

    def descendants(self, row: int) -> U32:
        """Return all rows below ``row``, deepest first. Looks at every row."""
        return self._chains.descendants(row)

    # -- checkpoints ------------------------------------------------------------------------------

    def export(self, start: int, stop: int) -> Rows:
        """Return rows with ids in [start, stop) that :meth:`load` may take back: those the engine
        has, ghosts, and rows being written that have children, as ghosts."""
        rows = self.rows_between(start, stop)
        flags = self._columns.flags[rows]
        pending = (flags == WRITING) & (self._columns.children[rows] > 0)
        rows = rows[((flags & (DISK | GHOST)) != 0) | pending]
        found = self.describe(rows)
        ghost = found.ghost | (self._columns.flags[rows] == WRITING)
        return dataclasses.replace(found, ghost=ghost)

    def load(self, loaded: Rows) -> U32:
        """Fill an empty index with rows by their ids, about 1 s for a million.

        Where two rows have the same key, the one with the higher generation is kept; the others,
        whose versions nobody will find, are returned. Impossible links are dropped and counted;
        ghosts without children are left out. Raises InvalidKey, ValueError if not empty.
        """
        if self.row_limit:
            raise ValueError("only an empty index can be loaded")
        columns = self._columns
        columns.widen(int(loaded.key_lengths.max(initial=1)))
        identities = columns.identify_each(loaded.spaces, loaded.keys, loaded.key_lengths)
        losers, winners = self._repeats(loaded, identities)
        kept = ~np.isin(loaded.rows, losers)
        rows = loaded.rows[kept]
        columns.allocate_exactly(rows)
        columns.identities[rows] = identities[kept]
        columns.parents[rows] = renamed(loaded.parents[kept], losers, winners)
        columns.sizes[rows] = loaded.sizes[kept]
        columns.places[rows] = loaded.places[kept]
        columns.generations[rows] = loaded.generations[kept]
        columns.last_use[rows] = loaded.stamps[kept]
        flags = np.where(loaded.unsynced, DISK | UNSYNCED, DISK)
        columns.flags[rows] = np.where(loaded.ghost, GHOST, flags)[kept]
        self._table.insert(rows, identities[kept])
        self._count_loaded(rows)
        return losers

    def _count_loaded(self, rows: U32) -> None:
        flags = self._columns.flags[rows]
        self._account(rows[flags != GHOST], 1)
        self.shares.count(rows[flags != GHOST], 1)
        self.ghost_count = int(np.count_nonzero(flags == GHOST))
        self._last_stamp = int(self._columns.last_use[rows].max(initial=0))
        self.dropped_links += self._chains.adopt(rows)
        self._drop_bare_ghosts(rows[flags == GHOST])

    def _repeats(self, loaded: Rows, identities: U32) -> tuple[U32, U32]:
        """Return rows whose key another row has too, and for each the row that keeps it."""
        hashes = self._table.digest(identities)
        ordered = np.sort(hashes)
        if not np.any(ordered[1:] == ordered[:-1]):
            none: U32 = loaded.rows[:0]
            return none, none
        order = np.argsort(hashes)
        equal = hashes[order[1:]] == hashes[order[:-1]]
        suspects = np.union1d(order[1:][equal], order[:-1][equal])
        best: dict[bytes, int] = {}
        pairs: list[tuple[int, int]] = []
        newest = np.lexsort((~loaded.generations[suspects], loaded.ghost[suspects]))
        for at in suspects[newest].tolist():
            winner = best.setdefault(identities[at].tobytes(), int(loaded.rows[at]))
            if winner != loaded.rows[at]:
                pairs.append((int(loaded.rows[at]), winner))
        found = np.array(pairs, np.uint32).reshape(-1, 2)
        return found[:, 0], found[:, 1]

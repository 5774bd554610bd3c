"""A trace replayed over memory and disk, with the store's index and one of its policies.

The counting rules, which make results comparable:

1. The tiers begin empty and hold so many blocks each. Of a request, the unbroken run of blocks from
   the root that is in memory or on disk counts as hits; misses are the rest.
2. Then every block of its path is used, the deepest first, so that the root is the newest.
3. Every block of the path is in memory then. ``late``: a block that leaves memory without a copy on
   disk is written, as the newest on disk, unless it was last used as the end of a path that is not
   full. ``through``: all blocks of the path that are not on disk are written at once.
4. After the whole request memory lets go of its oldest, then the disk of what the policy chooses.
   With the rule ``leaf`` only blocks without children in either tier leave the disk, as in the
   daemon; with ``order`` whoever is next, which is what the literature counts for LRU.

Without memory every block is written as it comes, if it is still there after the request.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from kvstore import eviction
from kvstore.chains import positions_of, spread_down
from kvstore.columns import DISK, GHOST, MEM, NONE, READABLE
from kvstore.eviction.lru import Lru
from kvstore.index import Index

if TYPE_CHECKING:
    from kvstore.columns import U8, U32, Bools
    from kvstore.eviction import Policy
    from kvstore.holds import Bytes
    from kvstore.replay.trace import I64, Trace

AHEAD = 1024
"""Requests whose rows are looked up at once where the order alone decides who leaves."""
_CHECKS = 16
"""How often orphans are counted in a replay."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is replayed: blocks on disk and in memory, ``late`` or ``through``, ``leaf`` or
    ``order``, and the requests [count_from, count_to) that are counted."""

    policy: str
    disk: int
    memory: int
    write: str = "late"
    rule: str = "leaf"
    count_from: int = 0
    count_to: int | None = None


@dataclass(slots=True)
class Counts:
    """What was counted; ``orphans``: the largest share of blocks with an ancestor missing."""

    refs: int = 0
    hits: int = 0
    memory_hits: int = 0
    writes: int = 0
    peak_ghosts: int = 0
    policy_bytes: int = 0
    orphans: float = 0.0

    def add(self, refs: int, hits: int, memory_hits: int, writes: int) -> None:
        self.refs += refs
        self.hits += hits
        self.memory_hits += memory_hits
        self.writes += writes


class Tiers:
    """One replay: :meth:`run` it for its counts.

    The index is that of the store: a row is MEM and DIRTY in memory only, MEM and DISK in both
    tiers, DISK on disk only. Rows are looked up for a group of requests at once and are WRITING,
    which nobody can read, until their own request comes, and again when they have left both tiers.
    """

    def __init__(self, trace: Trace, plan: Plan, policy: Policy) -> None:
        self._trace, self._plan, self._policy = trace, plan, policy
        self._late = plan.write == "late" and plan.memory > 0
        self._ahead = AHEAD if plan.rule == "order" else 1
        self._index = Index(trace.blocks, seed=0, record_bytes=_one_each, policy=policy)
        self._memory = Lru(MEM)
        self._in_memory = 0
        self._generation = 0
        numbers = np.arange(trace.blocks, dtype="<u8")
        self._keys = numbers.view(np.uint8).reshape(-1, 8)
        self._row_of = np.full(trace.blocks, NONE, np.uint32)
        # By row: was it last used as the end of a path that is not full?
        self._ends = np.zeros(trace.blocks + 1, np.bool_)
        self._partial = trace.partial.tolist()
        self._gone: list[U32] = []
        self._now = 0.0
        self._counts = Counts()

    def run(self) -> Counts:
        trace, plan, counts = self._trace, self._plan, self._counts
        stop = trace.requests if plan.count_to is None else min(plan.count_to, trace.requests)
        checks = -(-stop // _CHECKS)
        check = checks
        for start in range(0, stop, AHEAD):
            paths = trace.paths(start, min(start + AHEAD, stop))
            bounds = list(pairwise(paths.starts.tolist()))
            for first in range(0, len(bounds), self._ahead):
                group = bounds[first : first + self._ahead]
                begin = group[0][0]
                rows = self._look_up(paths.blocks[begin : group[-1][1]])
                for number, (at, end) in enumerate(group, start + first):
                    self._now = float(trace.arrivals[number]) / 1000
                    counted = self._request(rows[at - begin : end - begin], self._partial[number])
                    if number >= plan.count_from:
                        counts.add(*counted)
                self._clear()
            if start + AHEAD >= check:
                check += checks
                self._look_around()
        return counts

    # -- rows -------------------------------------------------------------------------------------

    def _look_up(self, wanted: I64) -> U32:
        """Return the row of each block; those of blocks that are nowhere become WRITING."""
        blocks, index = np.unique(wanted), self._index
        rows = index.find(0, self._keys[blocks])
        new = rows == NONE
        sizes = np.ones(len(blocks), np.uint32)
        generations = np.arange(len(blocks), dtype=np.uint64) + np.uint64(self._generation)
        self._generation += len(blocks)
        rows[new] = index.insert(0, self._keys[blocks[new]], sizes[new], generations[new], 0)
        ghosts = index.flags[rows] == GHOST
        index.realize(rows[ghosts], sizes[ghosts], generations[ghosts], 0)
        self._row_of[blocks] = rows
        parents = self._trace.parents[blocks[new]]
        index.link(rows[new][parents >= 0], self._row_of[parents[parents >= 0]])
        found: U32 = self._row_of[wanted]
        return found

    def _drop(self, rows: U32) -> None:
        """Note that rows are in no tier any more; their ids are freed after the group."""
        self._index.withdraw(rows)
        self._gone.append(rows)

    def _clear(self) -> None:
        if self._gone:
            rows = np.unique(np.concatenate(self._gone))
            self._gone.clear()
            self._index.abort(rows)

    # -- a request --------------------------------------------------------------------------------

    def _request(self, rows: U32, partial: bool) -> tuple[int, int, int, int]:
        """Replay one; return the blocks asked for, hits, of these in memory, and blocks written."""
        index, plan = self._index, self._plan
        flags = index.flags[rows]
        readable = (flags & np.uint8(READABLE)) != 0
        hits = len(rows) if readable.all() else int(readable.argmin())
        memory_hits = int(np.count_nonzero(flags[:hits] & np.uint8(MEM)))
        self._policy.used(index, rows, self._now)
        index.touch(rows, 0)
        self._ends[rows] = False
        self._ends[rows[-1]] = partial
        written = self._bring(rows, flags)
        if self._in_memory > plan.memory:
            written += self._leave_memory(self._in_memory - plan.memory)
        if index.blocks > plan.disk:
            victims = self._evict(index.blocks - plan.disk)
            if not plan.memory:
                # What was the victim of its own request was never worth a write.
                written -= int(np.isin(victims, rows[~readable]).sum())
        return len(rows), hits, memory_hits, written

    def _bring(self, rows: U32, flags: U8) -> int:
        """Take all blocks of a path to memory, unless there is none, and on disk unless ``late``;
        return how many were written."""
        index = self._index
        if self._plan.memory:
            outside = (flags & np.uint8(MEM)) == 0
            index.fill(rows[(flags & np.uint8(READABLE)) == 0])
            index.set_flags(rows[outside], MEM)
            self._in_memory += int(np.count_nonzero(outside))
        if self._late:
            return 0
        absent = rows[(flags & np.uint8(DISK)) == 0]
        self._write(absent)
        return len(absent)

    def _write(self, rows: U32) -> None:
        if len(rows):
            places = np.zeros(len(rows), np.uint64)
            self._index.commit(rows, self._index.generations[rows], places)

    def _leave_memory(self, count: int) -> int:
        """Let the oldest blocks leave memory; return how many of them were written."""
        index = self._index
        leaving = self._memory.oldest(index.last_use, index.flags, count)
        copied = (index.flags[leaving] & np.uint8(DISK)) != 0
        self._in_memory -= len(leaving)
        index.clear_flags(leaving[copied], MEM)
        rest = leaving[~copied]
        if not len(rest):
            return 0
        good = self._admitted(rest)
        written = rest[good]
        if len(written) < len(rest):
            self._drop(rest[~good])
        self._write(written)
        index.clear_flags(written, MEM)
        index.touch(written[::-1], 0)
        return len(written)

    def _admitted(self, rows: U32) -> Bools:
        """Tell which blocks that leave memory are written: no ends, unless others follow them."""
        if not self._late:
            return np.zeros(len(rows), np.bool_)
        admitted: Bools = ~self._ends[rows]
        if self._plan.rule == "leaf":
            admitted |= self._index.children[rows] > 0
        return admitted

    def _evict(self, count: int) -> U32:
        """Let blocks leave the disk; return them."""
        index, policy, now = self._index, self._policy, self._now
        if self._plan.rule == "order":
            victims = policy.candidates(index, count, now)[:count]
        else:
            victims = eviction.choose(policy, index, count, now, 4 * count)
        in_memory = (index.flags[victims] & np.uint8(MEM)) != 0
        self._drop(victims[~in_memory])
        if in_memory.any():
            index.withdraw(victims[in_memory])
            index.fill(victims[in_memory])
        return victims

    # -- looking ----------------------------------------------------------------------------------

    def _look_around(self) -> None:
        counts = self._counts
        counts.orphans = max(counts.orphans, self._orphans())
        counts.peak_ghosts = max(counts.peak_ghosts, self._policy.ghosts)
        counts.policy_bytes = max(counts.policy_bytes, self._policy.state_bytes)

    def _orphans(self) -> float:
        """Return the share of blocks with an ancestor that is nowhere: it would be a ghost."""
        index = self._index
        if not index.ghost_count:
            return 0.0
        rows = index.rows_of(None)
        there = index.readable(rows)
        up = positions_of(index.parents[rows], rows)
        cut = spread_down(up, (~there).astype(np.int64)) > 0
        return int((there & cut).sum()) / max(int(there.sum()), 1)


def _one_each(sizes: U32) -> Bytes:
    """Count blocks instead of bytes."""
    return np.ones(len(sizes), np.int64)

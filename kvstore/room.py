"""Making room in an engine with fixed slots, where free bytes of one length help no other.

What an engine could not write for lack of a slot waits here. Room is made in one of two ways,
whichever costs blocks that were used longer ago: the oldest leaves in slots of the same length
leave; or a whole group of slots of another length (a super-block) is emptied and taken over. Of its
blocks those that find free slots elsewhere move, the most recently used ones first, and the others
leave. Then what waits is put once more; as long as room could be made, again and again.

Order of writes in a move: the new version (BEGIN, bytes, PUT), then FREE of the old one, whose
record becomes a tombstone. So a kill leaves both or one, the newer one counts, and the old one
cannot come back when the new one has been deleted.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import numpy as np

from kvstore import record
from kvstore.backends.base import Status
from kvstore.errors import Busy
from kvstore.index import DISK, GHOST, HIDDEN, WRITING
from kvstore.job import Step
from kvstore.removal import evict
from kvstore.rewrite import ATTEMPTS, Move

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.backends.base import U32, Room
    from kvstore.columns import Bools
    from kvstore.core import Core
    from kvstore.entry import Entry
    from kvstore.removal import Removal

log = logging.getLogger(__name__)

SLACK_SHARE = 64
"""At least this part (1/n) of the blocks in slots of a length leave at a time."""
MOVE_BYTES = 8 << 20
"""So much is read and written at a time when blocks move."""
WAIT_SECONDS = 0.02
MOST_WAITS = 250
"""How often an emptied group is asked whether its last records have gone."""
FEW_WAITS = 5
"""The same for one whose last records stay: somebody holds them, and they fit nowhere else."""


class Rooms:
    """What waits for room in one store. Owner thread only."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._waiting: list[Entry] = []
        self._busy = False
        self._first: Entry | None = None
        self._passed: set[int] = set()
        """Groups that could not be emptied for the first entry."""

    def split(self, entry: Entry, skip: Bools) -> Bools:
        """Take over the blocks of an entry for which there was no room, if room may be made; return
        what is left of ``skip``, the mask of its blocks that were not to be written."""
        late = ~skip & (entry.statuses == Status.NEED_ROOM)
        if not late.any():
            return skip
        if not self._core.may_evict or entry.attempts >= ATTEMPTS or self._core.read_only:
            entry.statuses[late] = Status.FULL
            return skip
        fruitless = bool(late[~skip].all())
        part = entry.split(late)
        part.attempts += fruitless
        if not part.renews:
            self._core.release(part.rows, part.begins["generation"])
        self._core.writer.postpone(entry, part)
        self._waiting.append(part)
        left: Bools = skip[~late]
        return left

    def make(self) -> None:
        """Begin to make room for what waits, unless somebody is at it."""
        if self._waiting and not self._busy:
            self._busy, self._first = True, self._waiting[0]
            self._plan(self._first)

    def shrink(self) -> None:
        """Empty a group because the files take more than they may."""
        if not self._busy and self._core.may_evict and not self._core.read_only:
            everything = np.unique(self._groups_of(_on_disk(self._core)))
            if len(everything):
                self._busy = True
                self._empty(self._least_valuable(everything.astype(np.uint32))[0])

    # -- choosing ---------------------------------------------------------------------------------

    def _plan(self, entry: Entry) -> None:
        """Choose who leaves for the first block of an entry."""
        core, length = self._core, int(entry.blocks.lengths[0])
        room = core.engine.room(length)
        if room.free:
            self._end()
            return
        victims, age = self._oldest(room, length)
        others = room.others[~np.isin(room.others, list(self._passed))]
        group, group_age = self._least_valuable(others)
        if group and (not len(victims) or group_age < age):
            self._empty(group)
        elif len(victims):
            self._run(evict(core, victims), self._end)
        else:
            self._give_up()

    def _oldest(self, room: Room, length: int) -> tuple[U32, float]:
        """Return leaves in slots of a length that were used longest ago, and their mean stamp."""
        core = self._core
        rows = _in_groups(core, _on_disk(core), room.own)
        image = record.image_bytes(length)
        lacking = sum(
            int((record.image_bytes_of(entry.blocks.lengths) == image).sum())
            for entry in self._waiting
        )
        victims = _leaves(core, rows, max(lacking, len(rows) // SLACK_SHARE, 1))
        stamps = core.index.last_use[victims]
        return victims, float(stamps.mean()) if len(victims) else np.inf

    def _least_valuable(self, groups: U32) -> tuple[int, float]:
        """Return the group whose blocks were used longest ago on average; 0 if there is none. One
        in which somebody holds a block comes last: that one can only move."""
        if not len(groups):
            return 0, np.inf
        core = self._core
        rows = _in_groups(core, _on_disk(core), groups)
        mine = self._groups_of(rows)
        size = int(groups.max()) + 1
        held = core.index.held(rows, core.clock.seconds())
        easy = ~np.isin(groups, mine[held])
        if easy.any() and not easy.all():
            return self._least_valuable(groups[easy])
        counts = np.bincount(mine, minlength=size)[groups]
        stamps = self._core.index.last_use[rows].astype(np.float64)
        # Where nothing is yet, something is being written.
        means = np.full(len(groups), np.inf)
        np.divide(np.bincount(mine, stamps, size)[groups], counts, out=means, where=counts > 0)
        if not counts.any():
            return 0, np.inf
        return int(groups[means.argmin()]), float(means.min())

    def _groups_of(self, rows: U32) -> np.ndarray:
        groups: np.ndarray = (self._core.index.places[rows] >> np.uint64(32)).astype(np.int64)
        return groups

    # -- carrying out -----------------------------------------------------------------------------

    def _run(self, removal: Removal, after: Callable[[], None]) -> None:
        removal.when_done(after)
        self._core.queue(removal)

    def _empty(self, group: int) -> None:
        Emptying(self._core, group, self._end, lambda: self._pass_over(group))

    def _pass_over(self, group: int) -> None:
        """Try without a group that could not be emptied."""
        self._passed.add(group)
        if self._first is not None:
            self._plan(self._first)
        else:
            self._end()

    def _give_up(self) -> None:
        """No room can be made: whoever waits for it is told so by the next attempt."""
        if self._first is not None:
            self._first.attempts = ATTEMPTS
        self._end()

    def _end(self) -> None:
        """Let those go on for whom there is room, and the first in any case."""
        room = self._core.engine.room
        ready = [
            entry
            for entry in self._waiting
            if entry is self._first or room(int(entry.blocks.lengths[0])).free
        ]
        self._waiting = [entry for entry in self._waiting if entry not in ready]
        self._busy, self._first = False, None
        self._passed.clear()
        self._core.writer.go_on(ready)
        self.make()


class Emptying:
    """One group of slots being emptied: ``done`` when it is, ``failed`` when that cannot be."""

    def __init__(
        self, core: Core, group: int, done: Callable[[], None], failed: Callable[[], None]
    ) -> None:
        self._core = core
        self._group = group
        self._done, self._failed = done, failed
        self._rows: U32 = np.zeros(0, np.uint32)
        self._left = 1 << 62
        self._waits = 0
        self._go_on()

    def _go_on(self) -> None:
        """Move or evict what is left; wait for what is on its way out."""
        core = self._core
        if core.engine.close_group(self._group):
            self._done()
            return
        rows = self._remaining()
        if not 0 < len(rows) < self._left:
            self._left = 1 << 62
            self._wait(FEW_WAITS if len(rows) else MOST_WAITS)
            return
        self._left = len(rows)
        room = core.engine.room(int(core.index.sizes[rows[0]]))
        going = self._choose(rows, room)
        try:
            if not len(going):
                self._move(rows)
        except Busy:
            # Who holds all buffers may be waiting for this very group.
            going = _leaves(core, rows, len(rows))
            if not len(going):
                self._wait(MOST_WAITS)
        if len(going):
            removal = evict(core, going)
            removal.when_done(self._go_on)
            core.queue(removal)

    def _remaining(self) -> U32:
        """Return rows in the group that nobody is renewing, the most recently used first."""
        core, index = self._core, self._core.index
        rows = self._inside(self._rows)
        if not len(rows):
            # What was being written when we looked first is there by now. Looks at every row.
            rows = self._rows = self._inside(_on_disk(core))
        rows = rows[[row not in core.writing for row in rows.tolist()]]
        newest: U32 = rows[np.argsort(index.last_use[rows])[::-1]]
        return newest

    def _inside(self, rows: U32) -> U32:
        rows = rows[self._core.index.places[rows] >> np.uint64(32) == self._group]
        return rows[_stays(self._core, rows)]

    def _choose(self, rows: U32, room: Room) -> U32:
        """Return the leaves that must leave because the rest would not fit elsewhere: of the group,
        and if they do not suffice, of others with slots of this length."""
        core, lacking = self._core, len(rows) - room.free
        if lacking <= 0:
            return rows[:0]
        going = _leaves(core, rows, lacking)
        if len(going) < lacking:
            others = _in_groups(core, _on_disk(core), room.own)
            more = _leaves(core, others, lacking - len(going))
            going = np.union1d(going, more).astype(np.uint32)
        return going

    def _move(self, rows: U32) -> None:
        core, index = self._core, self._core.index
        spaces = index.spaces[rows].astype(np.uint64) << np.uint64(8) | index.key_lengths[rows]
        rows = rows[spaces == spaces[0]]
        sizes = np.cumsum(record.image_bytes_of(index.sizes[rows]))
        rows = rows[: max(1, int(np.searchsorted(sizes, MOVE_BYTES, "right")))]
        core.queue(Move(core, rows, self._go_on))

    def _wait(self, most: int) -> None:
        """Look again a little later: records leave when their last readers have gone."""
        self._waits += 1
        if self._waits > most:
            self._core.engine.reopen_group(self._group)
            self._failed()
            return
        self._core.queue(Step(lambda: time.sleep(WAIT_SECONDS), lambda _: self._go_on()))


def _stays(core: Core, rows: U32) -> Bools:
    """Tell whose records are in the engine and stay there for all we know."""
    state = core.index.flags[rows] & np.uint8(DISK | WRITING | GHOST | HIDDEN)
    stays: Bools = state == DISK
    return stays


def _on_disk(core: Core) -> U32:
    rows = core.index.rows_of(None)
    return rows[_stays(core, rows)]


def _in_groups(core: Core, rows: U32, groups: U32) -> U32:
    """Return those rows whose records lie in one of the groups."""
    mine = core.index.places[rows] >> np.uint64(32)
    table = np.zeros(int(max(mine.max(initial=0), groups.max(initial=0))) + 1, np.bool_)
    table[groups] = True
    inside: U32 = rows[table[mine]]
    return inside


def _leaves(core: Core, rows: U32, count: int) -> U32:
    """Return ``count`` of the rows, or as many as may go, that were used longest ago."""
    index, now, window = core.index, core.clock.seconds(), max(4 * count, 1024)
    stamps = index.last_use[rows]
    while True:
        oldest = rows
        if window < len(rows):
            oldest = rows[np.argpartition(stamps, window)[:window]]
        oldest = oldest[np.argsort(index.last_use[oldest])]
        victims = index.victims(oldest, count, now, _one)
        if len(victims) >= count or window >= len(rows):
            return victims
        window *= 4


def _one(sizes: U32) -> np.ndarray:
    """Count records instead of bytes."""
    return np.ones(len(sizes), np.int64)

"""Policies to compare with, in replays only: each an order of rows, under the same leaf rule.

They are written to be read, in plain dictionaries whose first entry is the oldest. What a policy
does when it evicts, it does here when the index tells that a row has left: which of the first in
order may leave is not its choice.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.columns import DISK, GHOST, HIDDEN, WRITING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvstore.columns import U32
    from kvstore.eviction import Policy
    from kvstore.rows import RowView

    Queue = OrderedDict[int, int]

_ENTRY_BYTES = 100
"""What a row takes in a dictionary, about."""


class Ordered:
    """What they share: each use of a row, the end of a chain first, and who left. Rows are known by
    number, those that left by the hash of their identity."""

    name = ""

    def __init__(self, room: int) -> None:
        self.room = room
        self.hashes: dict[int, int] = {}
        """Of the rows that are here."""
        self.remembered: Queue = OrderedDict()

    @property
    def state_bytes(self) -> int:
        return _ENTRY_BYTES * (len(self.hashes) + len(self.remembered))

    @property
    def ghosts(self) -> int:
        return len(self.remembered)

    def used(self, rows: RowView, line: U32, now: float, *, heard: int = 0) -> None:
        hashes = rows.digest(line).tolist()
        for row, digest in zip(line[::-1].tolist(), hashes[::-1], strict=True):
            if row in self.hashes:
                self.again(row)
            else:
                self.hashes[row] = digest
                self.came(row, self.remembered.pop(digest, None))

    def gone(self, rows: RowView, gone: U32) -> None:
        for row in gone.tolist():
            if row in self.hashes:
                self.left(row)
                del self.hashes[row]

    def candidates(self, rows: RowView, count: int, now: float) -> U32:
        flags = rows.flags & np.uint8(DISK | WRITING | GHOST | HIDDEN)
        there = memoryview((flags == DISK).view(np.uint8))
        return np.fromiter(islice(filter(there.__getitem__, self.order()), count), np.uint32)

    def capture(self, rows: RowView) -> dict[str, Any]:
        return {}

    def restore(self, rows: RowView, state: Mapping[str, Any]) -> None:
        """A replay is not interrupted."""

    def remember(self, row: int, value: int, most: int) -> None:
        self.remembered[self.hashes[row]] = value
        if len(self.remembered) > most:
            self.remembered.popitem(last=False)

    # -- what makes the difference ----------------------------------------------------------------

    def came(self, row: int, value: int | None) -> None:
        """Take a row; ``value`` is what was remembered of it, if it was."""
        raise NotImplementedError

    def again(self, row: int) -> None:
        raise NotImplementedError

    def left(self, row: int) -> None:
        raise NotImplementedError

    def order(self) -> Iterator[int]:
        """Yield all rows, the one to leave first; nothing changes by it."""
        raise NotImplementedError


class Sieve(Ordered):
    """Zhang et al., SIEVE is simpler than LRU, NSDI 2024: rows in the order of coming; a hand goes
    from the oldest to the newest, and whoever was used since it passed stays where it is."""

    name = "sieve"

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._ahead: Queue = OrderedDict()
        self._passed: Queue = OrderedDict()

    def came(self, row: int, value: int | None) -> None:
        self._ahead[row] = 0

    def again(self, row: int) -> None:
        (self._ahead if row in self._ahead else self._passed)[row] = 1

    def left(self, row: int) -> None:
        self._passed.pop(row, None)
        while row in self._ahead:
            first, used = self._ahead.popitem(last=False)
            if first != row:
                self._passed[first] = 0
            elif not used:
                break
        if not self._ahead:
            self._ahead, self._passed = self._passed, OrderedDict()

    def order(self) -> Iterator[int]:
        line = list(chain(self._ahead.items(), self._passed.items()))
        yield from (row for row, used in line if not used)
        yield from (row for row, used in line if used)


class Arc(Ordered):
    """Megiddo and Modha, ARC: a self-tuning, low overhead replacement cache, FAST 2003: rows used
    once and rows used more often share the room as it pays."""

    name = "arc"

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._once: Queue = OrderedDict()
        self._often: Queue = OrderedDict()
        self._left = [0, 0]
        self._share = 0.0

    def came(self, row: int, value: int | None) -> None:
        if value is None:
            self._once[row] = 0
            return
        more = self._left[1 - value] / max(self._left[value], 1)
        self._left[value] -= 1
        step = max(more, 1.0) * (1 if value == 0 else -1)
        self._share = min(max(self._share + step, 0.0), float(self.room))
        self._often[row] = 0

    def again(self, row: int) -> None:
        self._once.pop(row, None)
        self._often[row] = 0
        self._often.move_to_end(row)

    def left(self, row: int) -> None:
        often = int(row in self._often)
        (self._often if often else self._once).pop(row)
        self._left[often] += 1
        if len(self.remembered) >= self.room:
            _, forgotten = self.remembered.popitem(last=False)
            self._left[forgotten] -= 1
        self.remember(row, often, self.room)

    def order(self) -> Iterator[int]:
        queues = [self._once, self._often]
        yield from chain(*(queues if len(self._once) > self._share else reversed(queues)))


class Mq(Ordered):
    """Zhou, Philbin and Li, The multi-queue replacement algorithm, USENIX 2001: a queue for each
    power of two of the number of uses; who is not used for long goes down by one."""

    name = "mq"
    queues = 8

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._queues: list[Queue] = [OrderedDict() for _ in range(self.queues)]
        self._uses: dict[int, int] = {}
        self._level: dict[int, int] = {}
        self._time = 0

    def came(self, row: int, value: int | None) -> None:
        self._uses[row] = value or 0
        self._file(row, used=True)

    def again(self, row: int) -> None:
        self._queues[self._level[row]].pop(row)
        self._file(row, used=True)

    def _file(self, row: int, *, used: bool) -> None:
        self._time += used
        if used:
            self._uses[row] += 1
            self._level[row] = min(self._uses[row].bit_length() - 1, self.queues - 1)
        self._queues[self._level[row]][row] = self._time + 2 * self.room
        for queue in self._queues[1:]:
            oldest = next(iter(queue), -1)
            if oldest >= 0 and queue[oldest] < self._time:
                del queue[oldest]
                self._level[oldest] -= 1
                self._queues[self._level[oldest]][oldest] = self._time + 2 * self.room

    def left(self, row: int) -> None:
        self._queues[self._level.pop(row)].pop(row)
        self.remember(row, self._uses.pop(row), 4 * self.room)

    def order(self) -> Iterator[int]:
        return chain(*self._queues)


class WTinyLfu(Ordered):
    """Einziger, Friedman and Manes, TinyLFU, ACM TOS 2017: newcomers wait in a window of 1 %, and
    get past it only if they were used more often than who would leave for them. Uses are counted
    exactly, and halved now and then."""

    name = "w-tinylfu"

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._window: Queue = OrderedDict()
        self._trial: Queue = OrderedDict()
        self._kept: Queue = OrderedDict()
        self._uses: dict[int, int] = {}
        self._counted = 0

    def _count(self, row: int) -> None:
        digest = self.hashes[row]
        self._uses[digest] = self._uses.get(digest, 0) + 1
        self._counted += 1
        if self._counted >= 10 * self.room:
            self._uses = {key: uses // 2 for key, uses in self._uses.items() if uses > 1}
            self._counted //= 2

    def came(self, row: int, value: int | None) -> None:
        self._count(row)
        self._window[row] = 0

    def again(self, row: int) -> None:
        self._count(row)
        if row in self._window:
            self._window.move_to_end(row)
            return
        self._trial.pop(row, None)
        self._kept[row] = 0
        self._kept.move_to_end(row)
        if len(self._kept) > 0.8 * self.room:
            self._trial[self._kept.popitem(last=False)[0]] = 0

    def left(self, row: int) -> None:
        if self._window.pop(row, None) is None:
            # Somebody of the window was used more often, and takes its place.
            (self._trial if row in self._trial else self._kept).pop(row)
            if len(self._window) > self._allowed():
                self._trial[self._window.popitem(last=False)[0]] = 0

    def _allowed(self) -> int:
        return max(self.room // 100, 1)

    def order(self) -> Iterator[int]:
        over = max(len(self._window) - self._allowed(), 0)
        newcomers = list(islice(self._window, over))
        others = chain(self._trial, self._kept)
        other = next(others, None)
        for row in newcomers:
            while other is not None and self._asked(other) < self._asked(row):
                yield other
                other = next(others, None)
            yield row
        yield from () if other is None else chain([other], others)
        yield from islice(self._window, over, None)

    def _asked(self, row: int) -> int:
        return self._uses.get(self.hashes[row], 0)


class Gdsf(Ordered):
    """Cherkasova, Improving WWW proxies performance with greedy-dual-size-frequency caching, HP
    Labs 1998: for blocks of one size, uses count above the age that the cache had at the last one.
    """

    name = "gdsf"

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._uses: dict[int, int] = {}
        self._levels: dict[int, Queue] = {}
        self._worth: dict[int, int] = {}
        self._age = 0

    def came(self, row: int, value: int | None) -> None:
        self._uses[row] = 0
        self.again(row)

    def again(self, row: int) -> None:
        self._take_out(row)
        self._uses[row] += 1
        self._worth[row] = self._age + self._uses[row]
        self._levels.setdefault(self._worth[row], OrderedDict())[row] = 0

    def _take_out(self, row: int) -> None:
        worth = self._worth.pop(row, None)
        if worth is not None:
            level = self._levels[worth]
            del level[row]
            if not level:
                del self._levels[worth]

    def left(self, row: int) -> None:
        self._age = max(self._age, self._worth[row])
        self._take_out(row)
        del self._uses[row]

    def order(self) -> Iterator[int]:
        return chain(*(self._levels[worth] for worth in sorted(self._levels)))


COMPARED: dict[str, Callable[[int], Policy]] = {
    one.name: one for one in (Arc, Gdsf, Mq, Sieve, WTinyLfu)
}
"""By name; told the blocks that the disk holds, they are policies."""

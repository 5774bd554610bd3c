"""S3-FIFO on leaves: newcomers wait in a small queue and stay only if they are asked for again.

Yang et al., FIFO queues are all you need for cache eviction, SOSP 2023. A tenth of the room is for
newcomers; who was used twice there moves on to the main queue, in which whoever was used since goes
round again, up to three times. Who left the small queue and comes back soon goes to the main queue
at once. That chains leave from their ends is the index's doing, so a block may stay in its queue
longer than its turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.columns import DISK, GHOST, HIDDEN, WRITING, Arrays
from kvstore.eviction.ghosts import Ghosts
from kvstore.eviction.lru import Lru

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.columns import U8, U32, U64
    from kvstore.rows import RowView

_SMALL, _MAIN = 1, 2
_BOTH = np.uint8(_SMALL | _MAIN)
_USE = 64
"""Uses are counted in the two highest bits, which Lru does not look at."""
_MOST_USES, _PROMOTED = 3, 2
_SMALL_SHARE = 10
_REMEMBERED = np.uint16(1)
_ROUNDS = 8


class _Queues(Arrays):
    """By row: its number in its queue, and queue and uses; 0 for a row that is in none."""

    turns: U64
    states: U8

    def __init__(self) -> None:
        super().__init__({"turns": (np.uint64, ()), "states": (np.uint8, ())}, 1024)


class S3Fifo:
    """Offers newcomers first while they take more than a tenth, then the oldest nobody used."""

    name = "s3fifo"

    def __init__(self) -> None:
        self._queues = _Queues()
        self._ghosts = Ghosts()
        self._small, self._main = Lru(_SMALL), Lru(_MAIN)
        self._turn = 0

    @property
    def state_bytes(self) -> int:
        queues = self._queues
        kept = self._small.state_bytes + self._main.state_bytes + self._ghosts.bytes
        return queues.turns.nbytes + queues.states.nbytes + kept

    @property
    def ghosts(self) -> int:
        return len(self._ghosts)

    def used(self, rows: RowView, line: U32, now: float, *, heard: int = 0) -> None:
        queues = self._queues
        queues.reach(rows.row_limit)
        states = queues.states[line]
        new = line[states == 0]
        asked = line[heard:][states[heard:] != 0]
        uses = queues.states[asked] // _USE
        queues.states[asked[uses < _MOST_USES]] += np.uint8(_USE)
        if len(new):
            back, _, _ = self._ghosts.take(rows.digest(new))
            # The end of the chain is the older one, as everywhere.
            self._file(new[::-1], np.where(back, _MAIN, _SMALL).astype(np.uint8)[::-1])

    def _file(self, rows: U32, states: U8) -> None:
        """Put rows at the end of their queues, in this order."""
        self._queues.turns[rows] = np.arange(self._turn, self._turn + len(rows), dtype=np.uint64)
        self._queues.states[rows] = states
        self._turn += len(rows)

    def gone(self, rows: RowView, gone: U32) -> None:
        queues = self._queues
        queues.reach(rows.row_limit)
        small = gone[(queues.states[gone] & _BOTH) == _SMALL]
        if len(small):
            if self._ghosts.is_full(len(small)):
                here = int(np.count_nonzero(rows.flags & np.uint8(DISK)))
                # Two tables of half as many as there are blocks.
                self._ghosts.turn_over(max(here // 4, len(small)))
            times = np.full(len(small), self._turn & 0xFFFFFFFF, np.uint32)
            self._ghosts.file(rows.digest(small), times, np.full(len(small), _REMEMBERED))
        queues.states[gone] = 0

    def candidates(self, rows: RowView, count: int, now: float) -> U32:
        self._queues.reach(rows.row_limit)
        flags = rows.flags & np.uint8(DISK | WRITING | GHOST | HIDDEN)
        there = self._queues.states[: len(flags)] * (flags == DISK)
        small = np.count_nonzero(there & np.uint8(_SMALL))
        queues = [self._small, self._main]
        if small * _SMALL_SHARE <= np.count_nonzero(there):
            queues.reverse()
        found = self._offered(there, queues[0], count)
        if len(found) < count:
            found = np.concatenate([found, self._offered(there, queues[1], count - len(found))])
        return found

    def _offered(self, there: U8, queue: Lru, count: int) -> U32:
        """Return the oldest of a queue; those that earned it move on or go round meanwhile."""
        queues = self._queues
        for _ in range(_ROUNDS):
            oldest = queue.oldest(queues.turns, there, count)
            states = there[oldest]
            small = (states & _BOTH) == _SMALL
            uses = states // _USE
            stays = np.where(small, uses >= _PROMOTED, uses > 0)
            if not stays.any():
                break
            moved = np.where(small, _MAIN, states - np.uint8(_USE)).astype(np.uint8)
            self._file(oldest[stays], moved[stays])
            there[oldest[stays]] = moved[stays]
        return oldest

    def capture(self, rows: RowView) -> dict[str, Any]:
        self._queues.reach(rows.row_limit)
        return {
            "generations": rows.generations[: rows.row_limit],
            "turns": self._queues.turns[: rows.row_limit],
            "states": self._queues.states[: rows.row_limit],
            "turn": np.array(self._turn),
            **self._ghosts.capture(),
        }

    def restore(self, rows: RowView, state: Mapping[str, Any]) -> None:
        self._queues.reach(rows.row_limit)
        generations = state["generations"]
        same = np.flatnonzero(generations[: rows.row_limit] == rows.generations[: len(generations)])
        self._queues.turns[same] = state["turns"][same]
        self._queues.states[same] = state["states"][same]
        self._turn = int(state["turn"])
        self._ghosts.restore(state)

"""How many bytes the store may hold, and how many must go before more come in.

``capacity`` bounds the physical bytes of the whole store directory as ``du`` counts them. The
evictor steers on *live* bytes (records as stored, header page and padding included): above the high
watermark it makes room down to the low one. Independently, the filesystem keeps a free-space floor
for everybody else on it; below it the store stops growing and gives space back, but never more than
half of what it held when the floor was reached.

Pure arithmetic: every figure is an argument, nothing is read from the system here.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import ConfigError

MIN_CAPACITY = 64 << 20
HIGH_WATERMARK = 0.95
LOW_WATERMARK = 0.92
MAX_RECORD_SHARE = 4
"""A record over this fraction (1/n) of the capacity is refused."""
RESERVE_SHARE = 50
"""At least this part (1/n) of the capacity is kept for journal, checkpoint and quarantine."""
FLOOR_SHARE = 0.05
FLOOR_MIN = 10 << 30
FLOOR_MAX_SHARE = 0.10


def check_capacity(capacity: int) -> int:
    """Refuse a capacity below 64 MiB."""
    if capacity < MIN_CAPACITY:
        raise ConfigError(
            f"capacity is {capacity} bytes", f"set capacity to {MIN_CAPACITY >> 20}MiB or more"
        )
    return capacity


def default_floor(filesystem_bytes: int) -> int:
    """Return the free-space floor: 5 % of the filesystem, at least 10 GiB, at most 10 %."""
    wanted = max(int(filesystem_bytes * FLOOR_SHARE), FLOOR_MIN)
    return min(wanted, int(filesystem_bytes * FLOOR_MAX_SHARE))


def quarantine_limit(capacity: int) -> int:
    """Return the bytes that quarantine may hold: max(1 %, min(64 MiB, 5 %)) of the capacity."""
    return max(capacity // 100, min(64 << 20, capacity // 20))


def journal_reserve(capacity: int) -> int:
    """Return the bytes of room that a journal keeps ahead, so that records can be freed on a full
    disk: 1 % of the capacity, 64 KiB to 4 MiB."""
    return min(max(capacity // 100, 64 << 10), 4 << 20)


@dataclass(frozen=True, slots=True)
class Usage:
    """What is on the disk now, in bytes.

    ``live``: records that rows point at. ``coming``: records being written. ``going``: records on
    their way out, still on the disk. ``stuck``: those that could not be deleted. ``overhead``:
    journal, checkpoint, directories, quarantine. ``free``: what the filesystem has left for us
    (f_bavail).
    """

    live: int
    coming: int
    going: int
    overhead: int
    free: int
    stuck: int = 0

    @property
    def physical(self) -> int:
        return self.live + self.coming + self.going + self.stuck + self.overhead

    @property
    def taken(self) -> int:
        """What records take or will take and nobody is about to free."""
        return self.live + self.coming + self.stuck


class Space:
    """The limits of one store. ``at_floor``: the filesystem has less free than it must have.

    With ``fixed_slots`` the engine's files are made ahead and bounded by themselves: free slots are
    room, and a share of them stays free, or blocks of one length would find none among those of
    others. At the floor no more files are made.
    """

    def __init__(
        self,
        capacity: int,
        space_factor: float,
        floor: int,
        *,
        frees_space: bool,
        fixed_slots: bool = False,
    ) -> None:
        self.capacity = check_capacity(capacity)
        self.floor = floor
        self._factor = space_factor
        self._frees_space = frees_space
        self._fixed_slots = fixed_slots
        self.at_floor = False
        self._live_at_floor: int | None = None
        self._given = 0
        self._given_up = False

    def high(self, overhead: int) -> int:
        """Return the live bytes at which eviction begins."""
        if self._fixed_slots:
            return int((self.capacity - overhead) * HIGH_WATERMARK)
        return min(int(self.capacity * HIGH_WATERMARK / self._factor), self.capacity - overhead)

    def low(self, overhead: int) -> int:
        """Return the live bytes at which eviction ends."""
        return int(self.high(overhead) * LOW_WATERMARK / HIGH_WATERMARK)

    def for_files(self, other: int, free: int, files: int) -> int:
        """Return how many bytes an engine may take that makes ``files`` bytes of them ahead, where
        the store takes ``other`` bytes besides and the filesystem has ``free`` left."""
        limit = self.capacity - max(other, self.capacity // RESERVE_SHARE)
        # At the floor it makes no more, but keeps what it has.
        return min(limit, files + max(0, free - self.floor))

    def fits(self, record_bytes: int) -> bool:
        return record_bytes <= self.capacity // MAX_RECORD_SHARE

    def observe(self, usage: Usage) -> None:
        """Note the free bytes of the filesystem; enter or leave the floor state.

        What we may give is counted from the first time that the floor was reached, and forgotten
        only when others have made room: if our own evictions brought the free space back above the
        floor, somebody who goes on filling the disk would halve the store again and again.
        """
        self.at_floor = usage.free < self.floor
        if self.at_floor:
            self._reach(usage)
        elif usage.free - self._given >= self.floor:
            self._live_at_floor, self._given, self._given_up = None, 0, False

    def _reach(self, usage: Usage) -> None:
        self.at_floor = True
        if self._live_at_floor is None:
            self._live_at_floor = usage.live

    def to_evict(self, usage: Usage, need: int) -> int:
        """Return the bytes that must leave before ``need`` bytes may be written.

        Never more than ``need``: where the store holds more than it may, because its capacity was
        made smaller, a put does not make it grow, and the rest leaves in the background. At the
        floor new blocks go into recycled space only: as much leaves as comes in.
        """
        wanted = usage.taken + need - self.high(usage.overhead)
        wanted = max(wanted, usage.physical + need - self.capacity - usage.going)
        wanted = min(wanted, need)
        if need and usage.free - need < self.floor and not self._fixed_slots:
            self._reach(usage)
        if self.at_floor and not self._fixed_slots:
            wanted = max(wanted, need)
        return max(0, wanted)

    def above_low(self, usage: Usage) -> int:
        """Return the bytes that must leave until the low watermark is reached."""
        return max(0, usage.taken - self.low(usage.overhead)) if not usage.stuck else 0

    def allows(self, usage: Usage, need: int, evicted: int) -> bool:
        """Tell whether ``need`` bytes may be written once ``evicted`` bytes have left."""
        if usage.stuck and usage.taken + need > self.high(usage.overhead):
            # What leaves the index does not leave the disk: evicting more would help nobody.
            return False
        at_floor = self.at_floor and not self._fixed_slots
        if at_floor and usage.free < need and need > self._may_give(usage):
            # The disk is full to the last byte: somebody takes what we free before we can use it.
            return False
        if evicted >= need:
            return True
        after = usage.taken + need - evicted
        return after <= self.high(usage.overhead) and not at_floor

    def floor_surplus(self, usage: Usage) -> int:
        """Return the bytes to give back because the filesystem is below its floor."""
        if not self.at_floor or not self._frees_space or self._given_up:
            return 0
        missing = self.floor - usage.free - usage.going
        return max(0, min(missing, self._may_give(usage)))

    def gave(self, freed: int) -> None:
        """Note that records of so many bytes were evicted for the floor."""
        self._given += freed

    def gave_nothing(self) -> None:
        """Note that a batch evicted for the floor freed nothing: stop until the floor is left."""
        self._given_up = True

    def _may_give(self, usage: Usage) -> int:
        if self._live_at_floor is None:
            return 0
        keep = max(self._live_at_floor // 2, self.capacity // 10)
        return max(0, usage.live - keep)

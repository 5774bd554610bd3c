"""Plain integer counters: incremented on the hot path, read when somebody asks."""

from __future__ import annotations

from dataclasses import dataclass, field

_BUCKETS = 32


@dataclass(slots=True)
class Durations:
    """How long requests took: ``buckets[i]`` counts those of less than 2**i microseconds, and not
    of less than half of that."""

    buckets: list[int] = field(default_factory=lambda: [0] * _BUCKETS)

    def note(self, seconds: float) -> None:
        self.buckets[min(int(seconds * 1e6).bit_length(), _BUCKETS - 1)] += 1


@dataclass(slots=True)
class Counters:
    """Counts since the store was opened."""

    hits: int = 0
    memory_hits: int = 0
    """Of the hits, those that needed no disk."""
    misses: int = 0
    stored: int = 0
    already_present: int = 0
    conflicts: int = 0
    refused_full: int = 0
    refused_admission: int = 0
    """Accepted blocks that were not worth a write, in the mode ``late``."""
    write_errors: int = 0
    read_errors: int = 0
    evictions: int = 0
    evicted_bytes: int = 0
    deleted: int = 0
    warmed: int = 0
    """Blocks that were read into memory ahead of their use."""
    read_bytes: int = 0
    written_bytes: int = 0
    repaired_blocks: int = 0
    """Damaged records that were brought back by their parity or from memory."""
    corrupt_blocks: int = 0
    """Records that failed verification: an alarm."""
    stale_blocks: int = 0
    """A whole record of another key or version was found in a block's place."""
    unsynced_blocks: int = 0
    """Torn by a power loss, written after the last sync: expected."""
    missing_blocks: int = 0
    """No record was found where the index had one."""
    memory_errors: int = 0
    """Copies in memory that failed verification: a fault of this machine's memory."""
    failed_jobs: int = 0

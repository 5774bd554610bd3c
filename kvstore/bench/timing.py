"""Rows of figures, taken round after round so that each round's weather is that of all rows."""

from __future__ import annotations

import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


@dataclass
class Row:
    """Times of one operation, in seconds, one for each round: wall clock and processor."""

    name: str
    seconds: list[float] = field(default_factory=list)
    client_cpu: list[float] = field(default_factory=list)
    daemon_cpu: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)

    def document(self) -> dict[str, object]:
        return {
            "name": self.name,
            "median_seconds": self.median,
            "best_seconds": self.best,
            "seconds": self.seconds,
            "client_cpu_seconds": statistics.median(self.client_cpu),
            "daemon_cpu_seconds": statistics.median(self.daemon_cpu) if self.daemon_cpu else None,
        }


def joined(name: str, rows: Iterable[Row]) -> Row:
    """Return one row with the times of all."""
    found = list(rows)
    return Row(
        name,
        [seconds for row in found for seconds in row.seconds],
        [seconds for row in found for seconds in row.client_cpu],
    )


class Clock:
    """Takes the times of rows; ``daemon_cpu`` returns the daemon's processor time so far."""

    def __init__(self, daemon_cpu: Callable[[], float] | None = None) -> None:
        self._daemon_cpu = daemon_cpu

    @contextmanager
    def time(self, row: Row) -> Iterator[None]:
        """Add the time of what is done inside to ``row``, unless it fails."""
        daemon = self._daemon_cpu() if self._daemon_cpu else 0.0
        client, begun = time.process_time(), time.perf_counter()
        yield
        row.seconds.append(time.perf_counter() - begun)
        row.client_cpu.append(time.process_time() - client)
        if self._daemon_cpu:
            row.daemon_cpu.append(self._daemon_cpu() - daemon)

"""The outcome of a run as one table, a line for each engine, filesystem and phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from tests.faults.lab import Result, Spot

HEADS = ("engine", "filesystem", "phase", "points", "wrong", "lost", "failed opens", "other")
WORDS = {
    "cut": "cut",
    "log": "log",
    "disk": "broken disk",
    "daemon": "daemon",
    "kill": "killed",
    "call": "failing calls",
}
"""What is said of a filesystem: how its power was lost, or what else was done."""


@dataclass
class Count:
    """What was counted in one line, in blocks; ``failed`` in points."""

    points: int = 0
    wrong: int = 0
    lost: int = 0
    failed: int = 0
    other: int = 0

    def add(self, result: Result) -> None:
        self.points += result.points
        self.other += len(result.crashes)
        for verdict in result.verdicts:
            self.wrong += len(verdict.wrong)
            self.lost += len(verdict.lost)
            self.failed += bool(verdict.failed)
            self.other += len(verdict.other)

    @property
    def cells(self) -> tuple[str, ...]:
        return tuple(map(str, (self.points, self.wrong, self.lost, self.failed, self.other)))


def table(results: Iterable[tuple[Spot, Result]]) -> str:
    """Return the table, with sums by kind of fault and phase below it."""
    lines: dict[tuple[str, ...], Count] = defaultdict(Count)
    sums: dict[tuple[str, ...], Count] = defaultdict(Count)
    for spot, result in results:
        where = f"{spot.filesystem} {WORDS[spot.how]}"
        lines[spot.engine, where, spot.phase].add(result)
        sums["all", WORDS[spot.how], spot.phase].add(result)
        sums["all", WORDS[spot.how], "all"].add(result)
    rows: list[tuple[str, ...]] = [HEADS]
    rows += [(*names, *lines[names].cells) for names in sorted(lines)]
    rows += [(*names, *sums[names].cells) for names in sorted(sums)]
    return _laid_out(rows)


def _laid_out(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[at]) for row in rows) for at in range(len(HEADS))]
    words = 3
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at < words else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )

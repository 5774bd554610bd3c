"""What a store has acknowledged, written down outside of it; and the blocks that it was given.

One line a fact, in the order in which things happened, each with the size that the log of the disk
had then: a fact counts for a power loss at a later place of that log. Lines are written by
``writev``, a call that no test strikes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

NOISE = np.random.default_rng(11).bytes(1 << 20)
SIZES = (1, 700, 4096, 5000, 9000, 20_000, 65_536, 100_000)
BEGIN, WRITTEN, DURABLE, GONE, DAMAGED, STARTED, ENDED, ARMED, STRUCK, FAILED = "bwdxyseacf"
NOTHING = -1

_writev = os.writev


def content(number: int, version: int, sizes: Sequence[int] = SIZES) -> bytes:
    """Return the bytes of a version of a block: no two are alike, but for the smallest."""
    chance = random.Random(f"{number} {version}")
    head = b"block %d version %d " % (number, version)
    size, start = chance.choice(sizes), chance.randrange(len(NOISE) // 2)
    return (head + NOISE[start : start + size])[:size]


class Pen:
    """Writes the facts down. ``log`` is the log of the disk, if it keeps one."""

    def __init__(self, path: Path, log: Path | None = None) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._log = log
        self.under_way = 0
        """The number of the operation that writes now, 0 for none."""
        self._operations = 0

    def note(self, kind: str, blocks: Iterable[tuple[int, int]] = ((NOTHING, NOTHING),)) -> None:
        at = os.stat(self._log).st_size if self._log else 0
        lines = "".join(f"{kind} {number} {version} {at}\n" for number, version in blocks)
        _writev(self._file, [lines.encode()])

    def start(self) -> None:
        self._operations += 1
        self.under_way = self._operations
        self.note(STARTED)

    def end(self) -> None:
        self.note(ENDED)
        self.under_way = 0


@dataclass
class Block:
    """What is known of one block: versions that were begun, and the last acknowledged ones."""

    begun: list[int] = field(default_factory=list)
    written: int = NOTHING
    durable: int = NOTHING
    gone: bool = False
    """It may be gone: it was evicted or damaged after its last acknowledgement."""
    damaged: bool = False

    def must_have(self, *, power: bool) -> int:
        """Return the oldest version that may be found, NOTHING if it may be missing."""
        if self.gone:
            return NOTHING
        return self.durable if power else max(self.written, self.durable)


@dataclass
class Told:
    """What had been acknowledged when the store was struck."""

    blocks: dict[int, Block] = field(default_factory=dict)
    durable: int = 0
    """Durable acknowledgements before the phase began and in it."""
    under_way: bool = False
    """Something was being written."""
    doubted: bool = False
    """The engine has failed: what no sync covered becomes a miss, for nobody knows what is
    there."""
    operations: int = 0
    armed_at: int = NOTHING
    """Where the log was when the phase began."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Where the log was at the begin and at the end of each operation of the phase."""


def read(path: Path, upto: int | None = None) -> Told:
    """Return what was told until the log had ``upto`` bytes."""
    told = Told()
    for line in path.read_text().splitlines():
        kind, *numbers = line.split()
        number, version, at = map(int, numbers)
        if upto is not None and at > upto:
            break
        _take(told, kind, number, version, at)
    return told


def _take(told: Told, kind: str, number: int, version: int, at: int) -> None:
    block = told.blocks.setdefault(number, Block()) if number != NOTHING else Block()
    if kind == BEGIN:
        block.begun.append(version)
    elif kind == WRITTEN:
        block.written, block.gone = version, False
    elif kind == DURABLE:
        block.written = block.durable = version
        block.gone = False
        told.durable += 1
    elif kind in (GONE, DAMAGED):
        block.gone, block.damaged = True, kind == DAMAGED
    elif kind == FAILED:
        told.doubted = True
    elif kind == ARMED:
        told.armed_at = at
    elif kind == STARTED:
        told.under_way = True
        told.operations += 1
        if told.armed_at != NOTHING:
            told.spans.append((at, at))
    elif kind == ENDED:
        told.under_way = False
        if told.spans:
            told.spans[-1] = (told.spans[-1][0], at)

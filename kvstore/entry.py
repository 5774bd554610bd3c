"""Blocks of one put, or of a move, on their way to the engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from kvstore.backends.base import U8, U32, U64, Blocks
    from kvstore.columns import Bools
    from kvstore.events import Records
    from kvstore.namespaces import Namespace
    from kvstore.slab import Extent

T = TypeVar("T")


class Waiter:
    """Somebody who waits until rows are written."""

    def settle_row(self, position: int, status: int, *, again: bool) -> None:
        """Take the :class:`BlockStatus` of a row; ``again``: look at the index once more."""
        raise NotImplementedError


@dataclass(eq=False, slots=True)
class Entry:
    """Blocks of one put on their way to the engine, their images complete.

    ``dirty``: in the memory tier, readable; else in the bounce slab (``extents``) until written.
    ``renews``: rows that the engine has already get a new version in place of those of generations
    ``old``; they are held from here on. ``waiter`` is told the outcome at ``positions``.
    ``leaves``: memory needs the room, so they are to leave it once they are written. ``moves``:
    their old versions leave for them, so that they need no room. ``attempts`` to find room.
    """

    rows: U32
    blocks: Blocks
    images: list[memoryview]
    begins: Records
    durable: bool
    namespace: Namespace
    dirty: bool
    renews: bool
    extents: list[Extent]
    old: U64
    waiter: Waiter | None = None
    positions: list[int] = field(default_factory=list)
    statuses: U8 = field(default_factory=lambda: np.zeros(0, np.uint8))
    written: U64 = field(default_factory=lambda: np.zeros(0, np.uint64))
    gone: np.ndarray = field(default_factory=lambda: np.zeros(0, np.bool_))
    reason: str = ""
    leaves: bool = False
    moves: bool = False
    attempts: int = 0

    @property
    def watched(self) -> list[tuple[int, int]]:
        """The versions (row, generation) that somebody may be waiting for."""
        generations = self.old if self.renews else self.begins["generation"]
        return list(zip(self.rows.tolist(), generations.tolist(), strict=True))

    @property
    def bytes(self) -> int:
        return sum(len(image) for image in self.images)

    def split(self, which: Bools) -> Entry:
        """Take blocks out of an entry; return them as one of their own."""
        rest, part = self._some(~which), self._some(which)
        for name in ("rows", "blocks", "images", "begins", "extents", "old", "positions"):
            setattr(self, name, getattr(rest, name))
        self.statuses, self.written = rest.statuses, rest.written
        return part

    def _some(self, which: Bools) -> Entry:
        chosen = np.flatnonzero(which).tolist()

        def some(values: list[T]) -> list[T]:
            return [values[number] for number in chosen] if values else values

        return replace(
            self,
            rows=self.rows[which],
            blocks=self.blocks.take(which),
            images=some(self.images),
            begins=self.begins[which],
            extents=some(self.extents),
            old=self.old[which] if self.renews else self.old,
            positions=some(self.positions),
            statuses=self.statuses[which] if len(self.statuses) else self.statuses,
            written=self.written[which] if len(self.written) else self.written,
        )

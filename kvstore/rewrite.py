"""Writing blocks once more as they are: elsewhere to make room, or because the record is damaged.

Where a good copy of a damaged record is known, in memory or out of its parity chunk, the block is
written again, as a new version with the same bytes. The damaged record goes when the new one is
there, in an order that a kill cannot turn into a loss: BEGIN, bytes, PUT, and only then FREE of the
old version. So a kill leaves both or one, the newer one counts, and the old one cannot come back
when the new one has been deleted. A block that survives power loss is synced before the old record
goes: else a power loss in between would take both.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvstore import events, record, versions
from kvstore.backends.base import Status
from kvstore.backends.judging import compare, judge_all
from kvstore.entry import Entry, Waiter
from kvstore.errors import Busy
from kvstore.index import DISK, DURABLE, MEM
from kvstore.job import Job
from kvstore.record import Verdict
from kvstore.removal import discard

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.backends.base import U8, U32, U64, Blocks
    from kvstore.backends.judging import Judged
    from kvstore.core import Core

log = logging.getLogger(__name__)

ATTEMPTS = 16
"""How often an entry is put again without success, each time after room was made."""


def rewrite(core: Core, rows: U32) -> None:
    """Have blocks with damaged records written again, if that can be done now: whoever meets the
    damage next tries again."""
    if core.read_only or not len(rows):
        return
    for part, _ in versions.groups(core.index, core.namespaces, np.unique(rows)):
        try:
            core.queue(Move(core, part, lambda: None))
        except Busy:
            return


def drop_bad(core: Core, rows: U32, generations: U64, reads: U8, verdicts: U8) -> list[str]:
    """Drop blocks whose records were read and are not there or not whole; return what each is.

    ``reads`` are of :class:`~kvstore.backends.base.Status`, ``verdicts`` of
    :class:`~kvstore.record.Verdict`. A failed read drops nothing, but a block that the device
    refuses again and again is as good as damaged. What memory has too is ``repaired``: no loss, but
    written again.
    """
    kinds = np.full(len(rows), "unreadable", "<U10")
    unreadable = reads == Status.UNREADABLE
    again = unreadable.copy()
    again[unreadable] = core.suspect(rows[unreadable], generations[unreadable])
    read = again | (reads == Status.OK) | (reads == Status.DAMAGED)
    kinds[read] = "damaged"
    kinds[read & (verdicts == Verdict.STALE)] = "stale"
    kinds[reads == Status.MISSING] = "missing"
    inside = (core.index.flags[rows] & MEM) != 0
    saved = inside & core.index.holds(rows, generations) & (kinds != "unreadable")
    kinds[saved] = "repaired"
    rewrite(core, rows[saved])
    for kind in ("missing", "stale", "damaged"):
        discard(core, rows[kinds == kind], generations[kinds == kind], kind)
    found: list[str] = kinds.tolist()
    return found


class Move(Job, Waiter):
    """Takes blocks of one namespace, shard and key length from memory or off the disk, verifies
    them, and has them written in another place as new versions. ``after`` is called when they are
    there, or could not be moved. Raises Busy when no buffer is free."""

    def __init__(self, core: Core, rows: U32, after: Callable[[], None]) -> None:
        Job.__init__(self)
        self._core = core
        self._after = after
        ((self._rows, self._blocks),) = versions.groups(core.index, core.namespaces, rows)
        sizes = record.image_bytes_of(self._blocks.lengths)
        self._extents = core.bounce.allocate(sizes.tolist())
        core.index.acquire(self._rows)
        flags = core.index.flags[self._rows]
        self._inside = np.flatnonzero(flags & MEM)
        slots = core.tier.find(self._rows[self._inside])
        self._copies = core.tier.views(slots, self._blocks.lengths[self._inside])
        old = self._blocks.generations
        self._durable = bool(
            ((flags & DURABLE) != 0).any() or (old <= core.synced_generation).any()
        )
        self._new: U64 = core.new_generations(len(self._rows))
        self._good = np.zeros(len(self._rows), np.bool_)
        self._bad: dict[int, str] = {}
        self._open = 0

    def run(self) -> None:
        images, good = [extent.view for extent in self._extents], self._good.copy()
        for number, copy in zip(self._inside.tolist(), self._copies, strict=True):
            np.copyto(np.frombuffer(images[number], np.uint8), np.frombuffer(copy, np.uint8))
            store, size = self._core.uuid, len(copy)
            verdict, _, _ = compare(store, self._blocks, number, images[number], size)
            good[number] = verdict is Verdict.OK
        others = np.flatnonzero(~good)
        rest = [images[number] for number in others.tolist()]
        read = judge_all(self._core.engine, self._blocks.take(others), rest)
        for number, found in zip(others.tolist(), read, strict=True):
            good[number] = found.good
            if (kind := _kind(found)) is not None:
                self._bad[number] = kind
        for number in np.flatnonzero(good).tolist():
            image = images[number]
            header = replace(record.decode(image), generation=int(self._new[number]))
            record.encode_into(header, image[: record.HEADER_PAGE])
        self._good = good

    def finish(self) -> None:
        core, rows, blocks = self._core, self._rows, self._blocks
        core.release(rows, blocks.generations)
        for number, kind in self._bad.items():
            discard(core, rows[number : number + 1], blocks.generations[number : number + 1], kind)
        good = self._good & core.index.holds(rows, blocks.generations)
        good &= (core.index.flags[rows] & DISK) != 0
        core.bounce.release(
            [extent for extent, keep in zip(self._extents, good, strict=True) if not keep]
        )
        self._extents = [one for one, keep in zip(self._extents, good, strict=True) if keep]
        if not good.any():
            self._after()
            return
        self._hand_over(rows[good], blocks.take(good), self._new[good])

    def _hand_over(self, rows: U32, blocks: Blocks, generations: U64) -> None:
        """Give the images to the writer as new versions of their rows."""
        core = self._core
        begins = versions.records(core.index, core.namespaces, rows, events.Kind.BEGIN)
        begins["generation"] = generations
        core.writer.hold(rows, blocks.generations)
        self._open = len(rows)
        entry = Entry(
            rows=rows,
            blocks=replace(blocks, generations=generations, places=np.zeros(len(rows), np.uint64)),
            images=[extent.view for extent in self._extents],
            begins=begins,
            durable=self._durable,
            namespace=core.namespaces.known(blocks.namespace),
            dirty=False,
            renews=True,
            extents=self._extents,
            old=blocks.generations,
            waiter=self,
            positions=list(range(len(rows))),
            moves=True,
            attempts=ATTEMPTS,
        )
        core.writer.add(entry)

    def settle_row(self, position: int, status: int, *, again: bool) -> None:
        """Take note that a block has been written or not (called by the writer)."""
        self._open -= 1
        if not self._open:
            self._after()


def _kind(found: Judged) -> str | None:
    """Return as what a block is to be discarded, None if it is not."""
    if found.status == Status.MISSING:
        return "missing"
    if found.status not in (Status.OK, Status.DAMAGED) or found.good:
        return None
    return "stale" if found.verdict is Verdict.STALE else "damaged"

"""Verifying what lies on disk, block by block, while the store serves.

A pass goes through all records in the order of their places. It reads each off the disk, whatever
memory holds, and judges it; what is not there or not whole is dropped, as a get would drop it. The
position is kept in ``scrub.json`` in the store: a restart goes on where the last process was. That
file may be gone, old or damaged at no greater cost than looking at some blocks again.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from kvstore import files, record, versions
from kvstore.backends.base import Status
from kvstore.backends.judging import judge_whole
from kvstore.errors import Busy, KVStoreError
from kvstore.index import DISK, UNSYNCED
from kvstore.job import Job, Step
from kvstore.record import Verdict
from kvstore.rewrite import drop_bad, rewrite

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.backends.base import U8, U32, U64
    from kvstore.core import Core

log = logging.getLogger(__name__)

STATE_FILE = "scrub.json"
MAX_STATE_BYTES = 1 << 16
BATCH_BYTES = 4 << 20
BATCH_BLOCKS = 256
"""Read in one go: a worker is back in a few milliseconds."""
SAVE_SECONDS = 10.0
MOST_FINDINGS = 1024
KINDS = ("damaged", "missing", "stale", "unreadable", "repaired")
"""What a block may turn out to be: not whole, not there, another block, refused by the device for
now, damaged but brought back from memory or its parity chunk. One that is refused stays in the
index until it has been for a while."""


class Verify(Job):
    """Reads the records of ``rows`` off the disk and judges them.

    After ``finish``: ``blocks`` and ``bytes`` that were looked at, and ``bad``: kind and row's
    description of those that are not whole. Raises Busy when memory has no room now.
    """

    def __init__(self, core: Core, rows: U32) -> None:
        super().__init__()
        self._core = core
        self._groups = versions.groups(core.index, core.namespaces, rows)
        self.rows = np.concatenate([rows[:0], *(part for part, _ in self._groups)])
        self._generations: U64 = core.index.generations[self.rows]
        sizes = record.image_bytes_of(core.index.sizes[self.rows])
        self._extents = core.bounce.allocate(sizes.tolist())
        core.index.acquire(self.rows)
        self.bytes = int(sizes.sum())
        self._reads: U8 = np.full(len(self.rows), Status.FAILED, np.uint8)
        self._verdicts: U8 = np.full(len(self.rows), Verdict.DAMAGED, np.uint8)
        self._repaired = np.zeros(len(self.rows), np.bool_)
        self._places: list[str] = []
        self.bad: list[dict[str, object]] = []

    def run(self) -> None:
        start = 0
        for part, blocks in self._groups:
            some = slice(start, start + len(part))
            images = [extent.view for extent in self._extents[some]]
            found = judge_whole(self._core.engine, blocks, images)
            self._reads[some] = [one.status for one in found]
            self._verdicts[some] = [one.verdict for one in found]
            self._repaired[some] = [one.repaired or one.bare for one in found]
            self._places += self._core.engine.where(blocks)
            start += len(part)

    def finish(self) -> None:
        core = self._core
        try:
            if self.failure is None:
                self._take_outcome()
        finally:
            core.release(self.rows, self._generations)
            core.bounce.release(self._extents)

    def _take_outcome(self) -> None:
        core, index = self._core, self._core.index
        good = (self._reads == Status.OK) & (self._verdicts == Verdict.OK)
        same = index.holds(self.rows, self._generations)
        index.clear_flags(self.rows[good & same], UNSYNCED)
        repaired = np.flatnonzero(good & same & self._repaired)
        rewrite(core, self.rows[repaired])
        bad = np.flatnonzero(~good & same)
        core.counters.read_errors += int((self._reads[bad] == Status.FAILED).sum())
        rows, generations = self.rows[bad], self._generations[bad]
        kinds = drop_bad(core, rows, generations, self._reads[bad], self._verdicts[bad])
        kinds += ["repaired"] * len(repaired)
        core.counters.repaired_blocks += kinds.count("repaired")
        names = self._names(np.concatenate([bad, repaired])) if kinds else []
        self.bad = [{"kind": kind, **name} for kind, name in zip(kinds, names, strict=True)]

    def _names(self, which: np.ndarray) -> list[dict[str, object]]:
        """Describe blocks for people."""
        everything = [
            {"namespace": blocks.namespace.hex(), "shard": blocks.shard, "key": key.hex()}
            for _, blocks in self._groups
            for key in blocks.key_list()
        ]
        return [{**everything[at], "path": self._places[at]} for at in which.tolist()]


@dataclass
class Progress:
    """Where scrubbing is. ``place`` and ``row``: the last that was looked at. ``rate`` in bytes a
    second, 0 = as fast as one worker can. Times in seconds since 1970; sizes as on disk."""

    state: Literal["idle", "running", "paused"] = "idle"
    rate: int = 0
    place: int = -1
    row: int = -1
    blocks: int = 0
    bytes: int = 0
    found: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    started: float | None = None
    finished: float | None = None
    """When a pass came to its end the last time."""


class Scrub:
    """The passes over one store. Owner thread only; ``tick`` is called once a second with the time
    of ``time.monotonic``."""

    def __init__(self, core: Core, default_rate: int) -> None:
        self._core = core
        self._default_rate = default_rate
        self._path = core.path / STATE_FILE
        self.progress = _load(self._path)
        self.findings: deque[dict[str, object]] = deque(maxlen=MOST_FINDINGS)
        self._numbered = 0
        self._order: U32 | None = None
        self._next = 0
        self._bytes_left = 0
        self._under_way = False
        self._held = False
        self._not_before = 0.0
        self._saved_at = 0.0

    # -- orders -----------------------------------------------------------------------------------

    def start(self, rate: int | None = None) -> str:
        """Begin a pass, or go on with one. ``rate`` in bytes a second, 0 = unlimited, None = the
        setting. Returns ``started``, ``resumed`` or ``already_running``."""
        done = self.progress
        result = {"idle": "started", "paused": "resumed"}.get(done.state, "already_running")
        if done.state == "idle":
            self.progress = done = Progress(started=time.time(), finished=done.finished)
            self._order = None
        done.rate = self._default_rate if rate is None else rate
        done.state = "running"
        self._not_before = 0.0
        self._save()
        self._go_on()
        return result

    def use_rate(self, rate: int) -> None:
        """Take another setting for the rate; a pass that keeps to the old one goes on with it."""
        if self.progress.rate == self._default_rate:
            self.progress.rate = rate
        self._default_rate = rate

    def pause(self) -> bool:
        """Stop until ``start``; tell whether a pass was running."""
        if self.progress.state != "running":
            return False
        self.progress.state = "paused"
        self._save()
        return True

    def stop(self) -> bool:
        """Give the pass up; tell whether there was one."""
        if self.progress.state == "idle":
            return False
        self.progress.state = "idle"
        self._save()
        return True

    def hold(self) -> None:
        """Begin no more work: the store is about to be closed. The next opening goes on."""
        if not self._held:
            self._held = True
            if self.progress.state == "running":
                self._save()

    def tick(self, now: float) -> None:
        if self.progress.state == "running" and now - self._saved_at >= SAVE_SECONDS:
            self._save()
        if now >= self._not_before:
            self._go_on()

    # -- the pass ---------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Queue what comes next, unless it is under way."""
        if self._held or self._under_way or self.progress.state != "running":
            return
        if self._order is None:
            self._put_in_order()
            return
        rows = self._batch(self._order)
        if not len(rows):
            self._end_pass()
            return
        try:
            job = Verify(self._core, rows)
        except Busy:
            # Clients have the memory; the next tick tries again.
            self._next -= len(rows)
            return
        self._under_way = True
        self._core.queue(job)
        job.when_done(lambda: self._verified(job))

    def _put_in_order(self) -> None:
        """Sort the rows by place, a worker's task; those up to the position are left out."""
        core, done = self._core, self.progress
        rows = core.index.rows_of(None)
        rows = rows[(core.index.flags[rows] & DISK) != 0]
        places, sizes = core.index.places[rows], core.index.sizes[rows]
        found: list[tuple[U32, int]] = []

        def act() -> None:
            order = np.lexsort((rows, places))
            after = places[order] > np.uint64(max(done.place, 0))
            after |= (places[order] == np.uint64(max(done.place, 0))) & (rows[order] > done.row)
            order = order[after]
            found.append((rows[order], int(record.image_bytes_of(sizes[order]).sum())))

        def after(step: Step) -> None:
            self._under_way = False
            if step.failure is None:
                (self._order, self._bytes_left), self._next = found[0], 0
                self._go_on()

        self._under_way = True
        core.queue(Step(act, after))

    def _batch(self, order: U32) -> U32:
        """Return the next rows that are on disk, about BATCH_BYTES of them."""
        index = self._core.index
        rows = order[self._next : self._next + BATCH_BLOCKS]
        sizes = np.cumsum(record.image_bytes_of(index.sizes[rows]))
        rows = rows[: max(1, int(np.searchsorted(sizes, BATCH_BYTES, "right")))]
        self._next += len(rows)
        there = rows[index.readable(rows) & ((index.flags[rows] & DISK) != 0)]
        return there if len(there) or self._next >= len(order) else self._batch(order)

    def _verified(self, job: Verify) -> None:
        self._under_way = False
        done = self.progress
        if job.failure is not None:
            # Not the records but the engine failed: they were not looked at, the next tick does.
            self._next -= len(job.rows)
            return
        done.blocks += len(job.rows)
        done.bytes += job.bytes
        self._bytes_left -= job.bytes
        last = job.rows[-1:]
        self._note_position(last)
        for finding in job.bad:
            self._numbered += 1
            done.found[str(finding["kind"])] += 1
            self.findings.append({"number": self._numbered, **finding})
        self._pace(job.bytes)

    def _note_position(self, last: U32) -> None:
        order, at = self._order, self._next - 1
        if order is not None and len(last):
            self.progress.row = int(order[at])
            self.progress.place = int(self._core.index.places[order[at]])

    def _pace(self, nbytes: int) -> None:
        """Go on at once, or when as much may have been read as has been."""
        now, rate = time.monotonic(), self.progress.rate
        if not rate:
            self._go_on()
            return
        self._not_before = max(self._not_before, now - 1.0) + nbytes / rate
        wait = self._not_before - now
        if wait <= 0:
            self._go_on()
        elif self._core.timer is not None:
            self._core.timer(wait, self._go_on)

    def _end_pass(self) -> None:
        done = self.progress
        done.state, done.finished = "idle", time.time()
        self._order = None
        found = ", ".join(f"{count} {kind}" for kind, count in done.found.items() if count)
        log.info("scrub finished: %d blocks, %s", done.blocks, found or "all whole")
        self._save()

    # -- telling and keeping ----------------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """Return what ``kvstore scrub status`` shows; sizes in bytes, times in seconds."""
        done = self.progress
        running = self._order is not None and done.state != "idle"
        total = done.bytes + self._bytes_left if running else None
        seconds = self._bytes_left / done.rate if running and done.rate else None
        return {
            "state": done.state,
            "rate": done.rate,
            "blocks": done.blocks,
            "bytes": done.bytes,
            "total_bytes": total,
            "eta_seconds": None if seconds is None else round(seconds, 1),
            "found": dict(done.found),
            "started": done.started,
            "finished": done.finished,
        }

    def _save(self) -> None:
        """Have a worker write the state; losing it costs nothing but time."""
        self._saved_at = time.monotonic()
        if self._core.read_only:
            return
        data = json.dumps(asdict(self.progress)).encode()
        self._core.queue(Step(lambda: _write(self._path, data), lambda _step: None))


def _write(path: Path, data: bytes) -> None:
    try:
        files.replace(path, data)
    except OSError as error:
        log.warning("cannot write %s: %s", path, error)


def _load(path: Path) -> Progress:
    """Return the state that was left, or a fresh one: this file is never worth an error."""
    try:
        data = files.read_regular(path, MAX_STATE_BYTES)
        found = msgspec.json.decode(data, type=Progress)
    except (OSError, KVStoreError, ValueError):
        return Progress()
    known = set(found.found) <= set(KINDS) and -1 <= found.place < 1 << 64 and found.rate >= 0
    if not (known and -1 <= found.row < 1 << 32):
        return Progress()
    found.found = dict.fromkeys(KINDS, 0) | found.found
    return found

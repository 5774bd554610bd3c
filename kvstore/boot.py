"""What an opening owes to the one before it: leftovers to delete, slots to claim, a scan."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from kvstore import events, layout
from kvstore.index import DISK, UNSYNCED
from kvstore.job import Step
from kvstore.reconcile import Reconcile
from kvstore.removal import Removal
from kvstore.upkeep import DeleteLeftovers

if TYPE_CHECKING:
    from kvstore.checkpoint import Loaded
    from kvstore.core import Core
    from kvstore.settle import Settled

log = logging.getLogger(__name__)


class Boot:
    """What an opening owes to the one before it: leftovers to delete, perhaps a scan.

    ``scan``: somebody wants one whatever the journal says.
    """

    def __init__(self, core: Core, loaded: Loaded, settled: Settled, *, scan: bool = False) -> None:
        self._core = core
        self._loaded = loaded
        self._settled = settled
        self._boot = layout.boot_id()
        stopped = loaded.clean or not len(loaded.events)
        self._untrusted = loaded.torn or loaded.missing
        self._first = self._untrusted or scan
        self._lost_power = not stopped and (not self._boot or self._boot != loaded.boot_id)

    def doubt_rows(self) -> None:
        """After a power loss, mark the rows that no sync covered."""
        if self._lost_power:
            core = self._core
            core.doubt = UNSYNCED
            rows = core.index.rows_of(None)
            doubtful = core.index.generations[rows] > self._settled.synced
            core.index.set_flags(rows[doubtful], UNSYNCED)

    def begin(self) -> bool:
        """Delete leftovers, begin the scan if one is due; True if nothing may be served before it.

        The boot id goes into the journal only when nothing is due any more: a store that is stopped
        in the middle of its scan is scanned again.
        """
        core = self._core
        given_up = self._given_up()
        scan = self._first or self._lost_power
        if len(given_up):
            core.leftovers = given_up
            claim(core, complete=False)
            core.queue(DeleteLeftovers(core))
        if not scan:
            _claim_when_quiet(core)
            core.journal.append(self._mark())
            return False
        reason = self._loaded.reason or "the machine was booted without a clean stop before"
        reason = reason if self._untrusted or self._lost_power else "a repair"
        log.warning("%s: scanning the store: %s", core.path, reason)
        core.scan_due = True
        claim(core, complete=False)
        Reconcile(core, given_up["generation"], self._scanned)
        return self._first

    def _scanned(self) -> None:
        core, mark = self._core, self._mark()
        core.scan_due = False
        _claim_when_quiet(core)
        core.queue(Step(lambda: _append(core, mark), lambda _step: None))
        if self._first:
            core.checkpoint_due = True

    def _mark(self) -> events.Records:
        mark = events.blank(1, events.Kind.OPEN)
        mark["namespace"][0] = np.frombuffer(self._boot.ljust(16, b"\0"), np.uint8)
        mark["generation"] = self._core.record.opens << 32
        return mark

    def _given_up(self) -> events.Records:
        """Return the versions that must go. Where records are missing from the journal, a version
        that was begun may also have been finished and acknowledged: then only those that ended."""
        leftovers = self._settled.leftovers
        if not self._untrusted:
            return leftovers
        return leftovers[np.isin(leftovers["kind"], (events.Kind.FREE, events.Kind.PUT))]


def _append(core: Core, records: events.Records) -> None:
    core.journal.append(records)


def _claim_when_quiet(core: Core) -> None:
    """Have the engine know all records that count, once everybody who is under way is done: what is
    being deleted must be found before its slot passes for a free one."""
    under_way = list(core.active)
    left = len(under_way)

    def one_less() -> None:
        nonlocal left
        left -= 1
        if not left:
            claim(core, complete=True)

    for job in under_way:
        job.when_done(one_less)
    if not under_way:
        claim(core, complete=True)


def claim(core: Core, *, complete: bool) -> None:
    """Tell the engine which records count, those that are on their way out among them."""
    index = core.index
    rows = index.rows_of(None)
    rows = rows[(index.flags[rows] & DISK) != 0]
    removals = (job for job in core.active if isinstance(job, Removal))
    waiting = [one.frees for one in (*core.waiting_removals, *core.stuck, *removals)]
    more = np.concatenate([events.blank(0, events.Kind.FREE), *waiting])
    places = np.append(index.places[rows], more["place"])
    lengths = np.append(index.sizes[rows], more["length"])
    generations = np.append(index.generations[rows], more["generation"])

    def act() -> None:
        core.engine.claim(places, lengths, generations, complete=complete)

    core.queue(Step(act, lambda _step: None))

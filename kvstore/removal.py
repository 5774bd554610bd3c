"""Taking blocks out of the store: by policy, by name, or because they failed verification.

Order of writes, and why. The rows are hidden first, so nobody finds them any more. The FREE records
follow, then the bytes leave the disk, then the row ids may be used again. A kill after FREE leaves
bytes that no row points at; the next opening deletes every version that the journal mentions and no
row holds, so they do not stay.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from kvstore import events, eviction, versions
from kvstore.backends.base import Leaving
from kvstore.eviction.lru import Among
from kvstore.index import DISK, UNSYNCED
from kvstore.job import Job, Step

if TYPE_CHECKING:
    from kvstore.backends.base import U32, U64, Blocks
    from kvstore.core import Core

log = logging.getLogger(__name__)


class Removal(Job):
    """Removes the versions that ``rows`` hold when it is made. Nobody may hold references to them.

    ``bytes`` is what it frees on disk, ``count`` the number of blocks. With ``reason`` the records
    are damaged: a copy goes to quarantine before they are deleted. With ``stays`` the rows
    themselves remain, about to hold other versions. ``evicted``: a rebuild of the index may bring
    them back. ``moved``: the same blocks are elsewhere by now, nobody is told. A removal whose
    bytes could not be deleted joins ``core.stuck`` and may be performed again.
    """

    def __init__(
        self,
        core: Core,
        rows: U32,
        reason: str = "",
        *,
        stays: bool = False,
        evicted: bool = False,
        moved: bool = False,
    ) -> None:
        super().__init__()
        self._core = core
        self._reason = reason
        self._how = Leaving.EVICTED if evicted else Leaving.BLOCK
        self._written_down = False
        self._deleted = False
        self._groups = versions.groups(core.index, core.namespaces, rows)
        self.frees = versions.records(core.index, core.namespaces, rows, events.Kind.FREE)
        self.count = len(rows)
        on_disk = (core.index.flags[rows] & DISK) != 0
        self.bytes = int(core.index.record_bytes(core.index.sizes[rows[on_disk]]).sum())
        self._slots = core.tier.detach(rows)
        core.late.forget(rows)
        if core.scan is not None:
            core.scan.give_up(self.frees["generation"])
        if not moved:
            core.publish_removed(rows)
        self._hidden = rows[:0] if stays else core.index.remove(rows)
        core.going += self.bytes

    @property
    def generation(self) -> int:
        """The version of the only row."""
        return int(self.frees["generation"][0])

    def run(self) -> None:
        core = self._core
        if self.count and not self._written_down:
            core.journal.append(self.frees)
            self._written_down = True
        for _, blocks in self._groups:
            if self._reason:
                core.quarantine.keep(core.engine, blocks, self._reason)
        self._reason = ""
        for _, blocks in self._groups:
            core.engine.delete_many(blocks, self._how)
        self._deleted = True

    def finish(self) -> None:
        """Release row ids and bytes, or keep them taken while the bytes are still there."""
        core = self._core
        core.tier.give_back(self._slots)
        self._slots = self._slots[:0]
        if self._deleted:
            core.index.free(self._hidden)
            core.going -= self.bytes
            self._deleted = False
        elif self.count:
            core.stuck.append(self)


def retire(core: Core, rows: U32, reason: str = "") -> list[Removal]:
    """Hide rows that may be in use; return the removals, of which some wait for readers to go.

    Those without readers are one removal, the first of the list, for the caller to run. The others
    become chores by themselves when their last reader has gone.
    """
    references = core.index.take_references(rows)
    removals = [Removal(core, rows[references == 0], reason)]
    for row, count in zip(rows[references > 0], references[references > 0], strict=True):
        removal = Removal(core, rows[rows == row], reason)
        core.hold(int(row), int(count), removal)
        removals.append(removal)
    return removals


def supersede(core: Core, rows: U32, new: events.Records, places: U64, *, moved: bool) -> None:
    """Give rows new versions that the engine has; the old ones go when their readers have gone.

    ``moved``: the same bytes in another place.
    """
    references = core.index.take_references(rows)
    core.queue(Removal(core, rows[references == 0], stays=True, moved=moved))
    for row, count in zip(rows[references > 0], references[references > 0], strict=True):
        core.hold(int(row), int(count), Removal(core, rows[rows == row], stays=True, moved=moved))
    core.index.replace(rows, new["length"], new["generation"], places)
    if not moved:
        core.publish_stored(rows)


def forget(core: Core, begins: events.Records, blocks: Blocks) -> None:
    """Take back versions that were written for rows which are gone."""
    frees = begins.copy()
    frees["kind"] = events.Kind.FREE

    def act() -> None:
        core.journal.append(frees)
        core.engine.delete_many(blocks)

    core.queue(Step(act, lambda _step: None))


def heed_failures(core: Core) -> None:
    """Stop writing once engine or journal have failed, whichever job met the failure.

    After a failed sync the kernel may call the next one good although bytes are gone. So nothing
    that the engine wrote since its last good sync is trusted any more, nor what a put that was
    under way at that moment still brings, until the store is opened again.
    """
    if core.engine.failed:
        _lose_unsynced(core)
    for name, reason in (("engine", core.engine.failed), ("journal", core.journal.failed)):
        if reason and not core.read_only:
            core.stop_writes(f"the {name} failed: {reason}")


def _lose_unsynced(core: Core) -> None:
    index = core.index
    rows = index.rows_of(None)
    doubtful = (index.flags[rows] & DISK) != 0
    # What may have been promised stays: every read verifies it.
    doubtful &= ~core.perhaps_durable(rows, index.generations[rows])
    if doubtful.any():
        log.error("a sync failed: %d blocks written since the last one are lost", doubtful.sum())
        core.queue(retire(core, rows[doubtful])[0])


def make_room(core: Core, need: int) -> list[Removal] | None:
    """Choose what must leave before ``need`` bytes may be written; None if that cannot be done.

    The caller runs the removal, if there is one, before it writes.
    """
    usage = core.usage()
    wanted = core.space.to_evict(usage, need)
    if wanted and not core.may_evict:
        return None
    core.trim_due = core.trim_due or wanted > 0
    victims = choose_victims(core, wanted)
    freed = int(core.index.record_bytes(core.index.sizes[victims]).sum())
    if not core.space.allows(usage, need, freed):
        return None
    return [evict(core, victims)] if len(victims) else []


def evict(core: Core, victims: U32) -> Removal:
    """Make the removal of chosen victims and count it."""
    removal = Removal(core, victims, evicted=True)
    core.counters.evictions += removal.count
    core.counters.evicted_bytes += removal.bytes
    return removal


def choose_victims(core: Core, wanted: int, namespace: int | None = None) -> U32:
    """Return rows whose records take at least ``wanted`` bytes, or all that may go: what the policy
    would part with first, or of one namespace, by its number, what was not used for longest."""
    index = core.index
    order: eviction.Order = core.policy
    if namespace is not None:
        rows = index.rows_of(None)
        order = Among(rows[index.spaces[rows] >> 16 == namespace])
    return eviction.choose(order, index, wanted, core.clock.seconds())


def discard(core: Core, rows: U32, generations: U64, kind: str) -> None:
    """Drop rows whose records turned out ``missing``, ``stale`` or ``damaged``; count each once.

    Two readers may report the same record; only rows that still hold that version count. What a
    power loss took that was not synced is ``unsynced``: expected, neither kept nor alarmed.
    """
    index = core.index
    current = (index.generations[rows] == generations) & ((index.flags[rows] & DISK) != 0)
    rows = np.unique(rows[current])
    if not len(rows):
        return
    unsynced = (index.flags[rows] & UNSYNCED) != 0
    core.counters.unsynced_blocks += int(unsynced.sum())
    _drop(core, rows[unsynced], "unsynced")
    rows = rows[~unsynced]
    if kind == "damaged":
        core.counters.corrupt_blocks += len(rows)
    elif kind == "stale":
        core.counters.stale_blocks += len(rows)
    else:
        core.counters.missing_blocks += len(rows)
    _drop(core, rows, kind, "failed verification" if kind == "damaged" else "")


def _drop(core: Core, rows: U32, kind: str, reason: str = "") -> None:
    if not len(rows):
        return
    key = core.index.keys_of(rows[:1])[0].tobytes().hex()
    log.warning("%d %s block(s) dropped, first key %s...", len(rows), kind, key[:16])
    core.queue(retire(core, rows, reason)[0])

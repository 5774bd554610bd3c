"""An operation in three steps: begin on the owner thread, run in a worker, finish on the owner.

The thread that owns the store (the daemon's event loop, or the only thread of an offline command)
begins a job: it looks rows up, takes references, reserves space. A worker then calls ``run``, which
does nothing but I/O, copying and hashing on arrays that the job carries; it never touches the
index. Large puts are cut into shares, for several workers at a time. The owner calls
``finish`` with the outcome, which releases whatever ``begin`` took, whether the run succeeded or
not.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from itertools import pairwise
from typing import TYPE_CHECKING

from kvstore.errors import EngineError, KVStoreError

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

SHARE_BYTES = 8 << 20
"""Work of less than twice this is not worth a second worker."""
MOST_SHARES = min(4, os.cpu_count() or 1)


class Job(ABC):
    """One operation under way. ``failure``: what ``run`` raised. ``done``: ``finish`` is over."""

    def __init__(self) -> None:
        self.failure: KVStoreError | None = None
        self.done = False
        self._watchers: list[Callable[[], None]] = []

    def run(self) -> None:
        """Do the slow part, if :meth:`acts` does not say otherwise. Called once, by a worker."""
        raise NotImplementedError

    @abstractmethod
    def finish(self) -> None:
        """Bring the outcome home. Called once, by the owner, after all :meth:`acts`."""

    def acts(self) -> list[Callable[[], None]]:
        """Return the slow part in shares, each for one :meth:`attempt`, in any order, by several
        workers at a time."""
        return [self.run]

    def perform(self) -> None:
        """Do all of the slow part here."""
        for act in self.acts():
            self.attempt(act)

    def attempt(self, act: Callable[[], None]) -> None:
        """Do a share and keep its failure for :meth:`finish`: a worker's outermost frame."""
        try:
            act()
        except KVStoreError as error:
            self.failure = error
        except Exception as error:
            log.exception("%s failed", type(self).__name__)
            self.failure = EngineError(f"{type(self).__name__.lower()} failed: {error!r}")

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call back on the owner thread once the job is done; at once if it is."""
        if self.done:
            callback()
        else:
            self._watchers.append(callback)

    def mark_done(self) -> None:
        self.done = True
        watchers, self._watchers = self._watchers, []
        for callback in watchers:
            callback()


class Step(Job):
    """One step of a longer work: ``act`` in a worker, then ``after`` on the owner thread."""

    def __init__(self, act: Callable[[], None], after: Callable[[Step], None]) -> None:
        super().__init__()
        self._act, self._after = act, after

    def run(self) -> None:
        self._act()

    def finish(self) -> None:
        self._after(self)


def shares(count: int, nbytes: int) -> list[range]:
    """Cut work on ``count`` blocks of ``nbytes`` in all into runs of neighbours, one a worker."""
    workers = max(1, min(MOST_SHARES, nbytes // SHARE_BYTES, count))
    edges = [count * worker // workers for worker in range(workers + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]

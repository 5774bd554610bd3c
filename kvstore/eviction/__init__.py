"""Policies: an order among the blocks that may leave, nothing else.

A policy says which rows it would part with first. That only leaves go, that nothing in use, leased
or pinned goes, and how many, is the index's matter (:meth:`kvstore.index.Index.victims`), below
every policy. The daemon and ``kvstore replay`` use the same objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvstore.errors import UsageError
from kvstore.eviction.adaptive import Adaptive
from kvstore.eviction.fifo import Fifo
from kvstore.eviction.lru import Lru
from kvstore.eviction.s3fifo import S3Fifo

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvstore.columns import U32
    from kvstore.index import Index
    from kvstore.rows import RowView

WINDOW = 1024
"""Candidates looked at first: all of them may be what leaves."""


class Order(Protocol):
    """Who says which rows go first."""

    def candidates(self, rows: RowView, count: int, now: float) -> U32:
        """Return at least ``count`` distinct rows that the engine has, lowest score first. Fewer
        mean that there are no more."""


class Policy(Order, Protocol):
    """What the store asks of a policy. Times are in seconds of a clock that the caller keeps."""

    name: str

    @property
    def state_bytes(self) -> int:
        """Resident bytes of what the policy remembers besides the columns of the index."""

    @property
    def ghosts(self) -> int:
        """Blocks remembered that are here no more."""

    def used(self, rows: RowView, line: U32, now: float, *, heard: int = 0) -> None:
        """Hear of a request for ``line``, a chain from its start, before it is stamped.

        Rows that the policy does not know are new. Of the first ``heard`` it heard already, from
        another part of the same request.
        """

    def gone(self, rows: RowView, gone: U32) -> None:
        """Hear of rows that are in no tier any more, before their ids are freed."""

    def capture(self, rows: RowView) -> dict[str, Any]:
        """Return what is worth keeping over a restart: arrays by name, which may be views."""

    def restore(self, rows: RowView, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`capture` returned. Raises KeyError, ValueError, IndexError or
        TypeError for what never was that."""


POLICIES: dict[str, Callable[[], Policy]] = {
    "adaptive": Adaptive,
    "fifo": Fifo,
    "lru": Lru,
    "s3fifo": S3Fifo,
}


def make(name: str) -> Policy:
    """Return a new policy. Raises UsageError for an unknown name."""
    try:
        return POLICIES[name]()
    except KeyError:
        raise UsageError(
            f"there is no eviction policy {name!r}", f"use one of {', '.join(sorted(POLICIES))}"
        ) from None


def choose(
    policy: Order,
    index: Index,
    need: int,
    now: float,
    window: int = WINDOW,
) -> U32:
    """Return rows whose records take at least ``need`` bytes, or all that may go.

    The policy offers candidates, lowest score first; the index lets only those go whose children
    go too. The ``window`` of candidates grows until they suffice.
    """
    count = window
    while need > 0:
        candidates = policy.candidates(index, count, now)
        victims = index.victims(candidates, need, now)
        freed = int(index.record_bytes(index.sizes[victims]).sum())
        if freed >= need or len(candidates) < count:
            return victims
        count *= 4
    return np.zeros(0, np.uint32)

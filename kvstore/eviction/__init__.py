"""Policies: a score on leaves, nothing else.

A policy says which rows it would part with first. That only leaves go, that nothing in use, leased
or pinned goes, and how many, is the index's matter (:meth:`kvstore.index.Index.victims`), below
every policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvstore.errors import UsageError
from kvstore.eviction.lru import Lru

if TYPE_CHECKING:
    from kvstore.columns import U8, U32, U64


class Policy(Protocol):
    """What the store asks of a policy."""

    @property
    def state_bytes(self) -> int:
        """Resident bytes of what the policy remembers besides its column."""

    def candidates(self, last_use: U64, flags: U8, count: int) -> U32:
        """Return up to ``count`` distinct rows that the engine has, lowest score first. Fewer mean
        that there are no more."""


POLICIES: dict[str, type[Policy]] = {"lru": Lru}


def make(name: str) -> Policy:
    """Return a new policy. Raises UsageError for an unknown name."""
    try:
        return POLICIES[name]()
    except KeyError:
        raise UsageError(
            f"there is no eviction policy {name!r}", f"use one of {', '.join(sorted(POLICIES))}"
        ) from None

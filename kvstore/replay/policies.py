"""All policies that a replay knows: those of the daemon, and others to compare with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore import eviction
from kvstore.errors import UsageError
from kvstore.replay.compared import COMPARED

if TYPE_CHECKING:
    from kvstore.eviction import Policy

_COUNTED_IN_ORDER = frozenset({"lru"})
"""What the literature counts without the leaf rule."""


def names() -> list[str]:
    return sorted({*eviction.POLICIES, *COMPARED})


def check(name: str) -> None:
    """Raises UsageError for an unknown name."""
    if name not in names():
        raise UsageError(f"there is no policy {name!r}", f"use one of {', '.join(names())}")


def usual_rule(name: str) -> str:
    """Return the rule by which a policy is counted unless somebody says otherwise."""
    return "order" if name in _COUNTED_IN_ORDER else "leaf"


def make(name: str, disk: int) -> Policy:
    """Return a new policy for a disk of so many blocks."""
    return COMPARED[name](disk) if name in COMPARED else eviction.make(name)

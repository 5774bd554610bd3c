"""How much of the store one namespace may take, so that one tenant does not push out the others.

What counts are the records of its blocks as stored, those on their way included. A put that would
go beyond the quota has blocks of its own namespace leave: leaves only, those first that were not
used for longest, nothing that is held. What finds no room even so is answered FULL, from the first
block of the put that does not fit. Blocks that have not been written yet cannot leave; a
quota should be several times what is put at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.removal import choose_victims, evict

if TYPE_CHECKING:
    from kvstore.core import Core
    from kvstore.namespaces import Namespace

SLACK_SHARE, MOST_SLACK = 32, 64 << 20
"""This part (1/n) of a quota, and so many bytes at most, leaves beyond what is needed: to choose
means to look at every row of the store, 20 to 40 ms for a million, so it must be rare."""
TRIM_BYTES = 256 << 20


def limit_of(core: Core, namespace: Namespace) -> int | None:
    """Return the quota of a namespace in bytes, its own or everybody's; None if it has none."""
    return core.namespace_quota if namespace.quota is None else namespace.quota


def admit(core: Core, namespace: Namespace, sizes: np.ndarray) -> int:
    """Return how many of the blocks of a put (record bytes), from the first on, have room in the
    quota, now that others left for them."""
    limit, taken = limit_of(core, namespace), core.index.shares
    if limit is None:
        return len(sizes)
    ends = np.cumsum(sizes, dtype=np.int64)
    wanted = int(ends[ends <= limit].max(initial=0))
    excess = taken.of(namespace.number) + wanted - limit
    if wanted and excess > 0:
        _shrink(core, namespace, excess + min(limit // SLACK_SHARE, MOST_SLACK))
    return int(np.searchsorted(ends, limit - taken.of(namespace.number), side="right"))


def trim(core: Core) -> None:
    """Have namespaces lose what they hold beyond their quotas, as after a quota was lowered: a part
    of it each time."""
    for namespace in core.namespaces.all():
        limit = limit_of(core, namespace)
        excess = 0 if limit is None else core.index.shares.of(namespace.number) - limit
        if excess > 0:
            _shrink(core, namespace, min(excess, TRIM_BYTES))


def _shrink(core: Core, namespace: Namespace, wanted: int) -> None:
    victims = choose_victims(core, wanted, namespace.number) if core.may_evict else ()
    if len(victims):
        core.queue(evict(core, np.asarray(victims)))

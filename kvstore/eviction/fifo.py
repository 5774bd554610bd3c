"""First in, first out: the order in which blocks came, whatever is asked for.

Versions are numbered as they come, so the lowest generations go. A chain comes root first; that its
end goes first nevertheless is the leaf rule's doing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.eviction.lru import Lru

if TYPE_CHECKING:
    from kvstore.columns import U32
    from kvstore.rows import RowView


class Fifo(Lru):
    """Offers the rows that came first."""

    name = "fifo"

    def candidates(self, rows: RowView, count: int, now: float) -> U32:
        return self.oldest(rows.generations, rows.flags, count)

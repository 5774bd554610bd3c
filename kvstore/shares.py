"""What the blocks of each namespace take: one integer a namespace, kept up to date by the index."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvstore.columns import U32, Columns
    from kvstore.holds import RecordBytes

_NUMBERS = 1 << 16


class Shares:
    """Record bytes by the number of the namespace: of rows that have a block or are to get one."""

    def __init__(self, columns: Columns, record_bytes: RecordBytes) -> None:
        self._columns = columns
        self._record_bytes = record_bytes
        # Untouched pages of it take no memory.
        self._bytes = np.zeros(_NUMBERS, np.int64)

    def of(self, number: int) -> int:
        return int(self._bytes[number])

    def count(self, rows: U32, sign: int) -> None:
        """Add what the blocks of these rows take, or with -1 take it away."""
        if len(rows):
            sizes = self._record_bytes(self._columns.sizes[rows]).astype(np.int64)
            np.add.at(self._bytes, self._columns.space(rows) >> 16, sign * sizes)

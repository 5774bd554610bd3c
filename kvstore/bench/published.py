"""What the source published for wde-512, and what is wrong with each column.

Seconds, from https://github.com/noooop/wde, docs/persistence_kv_cache.md, measured there on an SSD
rated at 7.4 GB/s. Only ratios to its own copy in memory ("b2b naive") can be compared with ours.
"""

from __future__ import annotations

from kvstore.bench.workload import PUBLISHED

COPY = dict(zip(PUBLISHED, (0.130, 0.033, 0.024, 0.045, 0.065), strict=True))

MSYNC = "a write is a copy into a map and msync, so it reaches the disk, alone among these columns"
NO_READ = "the write test run a second time: no read was measured"
ZEROS = (
    "the blocks had never been written, so all were the kernel's one page of zeros, and nothing "
    "was synced: the speed of the page cache"
)
CACHED = "the files had just been written: hits of the page cache"
SHRUNK = "the blocks were zeros, which LevelDB's compression makes about 20 times smaller"
SMALL_VALUES = "the values were small integers, which compress well"
DROPPED = (
    "blocks for which the server had no room were dropped without an error, and count as moved"
)
NOT_AWAITED = (
    "the clock stops at the last acknowledgement, nothing waits for the data to be written, and "
    "blocks were dropped without an error (up to 31 % when we ran it)"
)
NOT_NAMED = "misses were not named, so nobody knows that all blocks came"

_Column = tuple[tuple[float, ...], str]

COLUMNS: dict[tuple[str, str], _Column] = {
    ("memmap", "write"): ((0.623, 0.139, 0.091, 0.193, 0.308), MSYNC),
    ("memmap", "read"): ((0.636, 0.154, 0.093, 0.218, 0.314), NO_READ),
    ("files", "write"): ((0.556, 0.126, 0.085, 0.180, 0.270), ZEROS),
    ("files", "read"): ((0.473, 0.128, 0.087, 0.176, 0.262), CACHED),
    ("leveldb", "write"): ((2.700, 0.508, 0.301, 0.718, 1.110), SHRUNK),
    ("leveldb", "read"): ((0.492, 0.149, 0.082, 0.164, 0.260), SMALL_VALUES),
    ("memory", "set"): ((0.586, 0.113, 0.077, 0.154, 0.270), DROPPED),
    ("memory", "set deferred"): ((0.406, 0.081, 0.055, 0.110, 0.205), NOT_AWAITED),
    ("memory", "get"): ((0.893, 0.228, 0.137, 0.274, 0.427), NOT_NAMED),
    ("memory", "stream_get"): ((0.346, 0.074, 0.048, 0.078, 0.106), NOT_NAMED),
    ("filesystem", "set"): ((1.086, 0.252, 0.178, 0.345, 0.569), DROPPED),
    ("filesystem", "set deferred"): ((0.340, 0.083, 0.059, 0.115, 0.183), NOT_AWAITED),
    ("filesystem", "get"): ((1.148, 0.261, 0.185, 0.370, 0.556), CACHED),
    ("filesystem", "stream_get"): ((0.462, 0.143, 0.098, 0.161, 0.227), CACHED),
    ("hybrid", "set deferred"): ((0.402, 0.098, 0.069, 0.130, 0.231), NOT_AWAITED),
    ("hybrid", "stream_get"): ((0.356, 0.061, 0.048, 0.085, 0.120), NOT_NAMED),
}
"""By subject and operation: seconds of each model of :data:`PUBLISHED`, and the flaw."""


def ratio(model: str, subject: str, operation: str) -> float | None:
    """Return how many copies in memory the source's figure is; None where it has none."""
    column = COLUMNS.get((subject, operation))
    if column is None or model not in COPY:
        return None
    return column[0][PUBLISHED.index(model)] / COPY[model]


def flaw(subject: str, operation: str) -> str:
    """Return what is wrong with a column that has figures."""
    return COLUMNS[subject, operation][1]

"""``kvstore bench slots``: reference counts of slots in one array, beside dicts, in one run.

Every figure is processor time for an id counted up or down; ids are drawn at random out of all
slots in use, fresh each time. The rivals are dicts from id to count: a class with the checks that
vLLM's allocator made (``RefCounter``, which its pull request 5968 would have replaced), and a bare
one, in line and without a check. The bare array says what the structure itself is worth. Counts are
compared with the truth before anything is timed, and after.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import platform
import statistics
import sys
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvstore import render
from kvstore.errors import KVStoreError, UsageError
from kvstore.slots import I64, PAGE, Arena

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

BATCH = 10_000
BATCHES = 16
"""One after the other for each figure, so that each structure meets its own data in the caches, not
what the one before it left there."""
CHUNK_SLOTS = 4096
FEWEST_SLOTS = 20_000
OURS = "kvstore slots"
PAIRS = ((OURS, "dict, class"), (OURS, "dict, bare"), ("array, bare", "dict, bare"))
BARS = (("one id", 10.0), ("batch", 100.0))
"""Operation, and how many times faster the first of each pair shall be."""
_ONE = np.uint16(1)


class WrongCount(KVStoreError):
    """A structure under test counted wrongly; nothing it did may be timed."""


class Counts(ABC):
    """Reference counts by slot id, one or a batch at a time."""

    name: ClassVar[str]

    @abstractmethod
    def batch(self, ids: I64) -> Callable[[], None]:
        """Return what counts a batch up, then down; what it takes to get there is not timed."""

    @abstractmethod
    def one_by_one(self, ids: Sequence[int]) -> None:
        """Count ids up, then down, one at a time."""

    @abstractmethod
    def up(self, ids: I64) -> None:
        """Count a batch up."""

    @abstractmethod
    def down(self, ids: I64) -> None:
        """Count a batch down."""

    @abstractmethod
    def read(self, ids: I64) -> list[int]:
        """Return the counts."""

    @abstractmethod
    def bytes_per_slot(self) -> float:
        """Return the memory that the counts take."""


class ArenaCounts(Counts):
    """Ours: every id is checked, and a free slot, too few and too many references are refused."""

    name = OURS

    def __init__(self, arena: Arena) -> None:
        self.arena = arena

    def batch(self, ids: I64) -> Callable[[], None]:
        def up_and_down() -> None:
            self.arena.incr(ids)
            self.arena.decr(ids)

        return up_and_down

    def one_by_one(self, ids: Sequence[int]) -> None:
        incr, decr = self.arena.incr_one, self.arena.decr_one
        for slot in ids:
            incr(slot)
        for slot in ids:
            decr(slot)

    def up(self, ids: I64) -> None:
        self.arena.incr(ids)

    def down(self, ids: I64) -> None:
        self.arena.decr(ids)

    def read(self, ids: I64) -> list[int]:
        counts: list[int] = self.arena.counts(ids).tolist()
        return counts

    def bytes_per_slot(self) -> float:
        return self.arena.references.itemsize


class DictCounts(Counts):
    """A class over a dict that asks what vLLM's asked at each step, and answers the new count."""

    name = "dict, class"

    def __init__(self, ids: I64) -> None:
        self.counts: dict[int, int] = dict.fromkeys(ids.tolist(), 0)

    def incr(self, slot: int) -> int:
        assert slot in self.counts
        count = self.counts[slot]
        assert count >= 0
        self.counts[slot] = count + 1
        return count + 1

    def decr(self, slot: int) -> int:
        assert slot in self.counts
        count = self.counts[slot]
        assert count > 0
        self.counts[slot] = count - 1
        return count - 1

    def batch(self, ids: I64) -> Callable[[], None]:
        listed = ids.tolist()
        return lambda: self.one_by_one(listed)

    def one_by_one(self, ids: Sequence[int]) -> None:
        incr, decr = self.incr, self.decr
        for slot in ids:
            incr(slot)
        for slot in ids:
            decr(slot)

    def up(self, ids: I64) -> None:
        for slot in ids.tolist():
            self.counts[slot] += 1

    def down(self, ids: I64) -> None:
        for slot in ids.tolist():
            self.counts[slot] -= 1

    def read(self, ids: I64) -> list[int]:
        return [self.counts[slot] for slot in ids.tolist()]

    def bytes_per_slot(self) -> float:
        return sys.getsizeof(self.counts) / len(self.counts) + sys.getsizeof(1 << 20)


class BareDict(DictCounts):
    name = "dict, bare"

    def one_by_one(self, ids: Sequence[int]) -> None:
        counts = self.counts
        for slot in ids:
            counts[slot] += 1
        for slot in ids:
            counts[slot] -= 1


class BareArray(Counts):
    """numpy for batches, a view of the same memory for one id."""

    name = "array, bare"

    def __init__(self, slots: int) -> None:
        self.array = np.zeros(slots, np.uint16)

    def batch(self, ids: I64) -> Callable[[], None]:
        def up_and_down() -> None:
            self.up(ids)
            self.down(ids)

        return up_and_down

    def one_by_one(self, ids: Sequence[int]) -> None:
        counts = self.array.data
        for slot in ids:
            counts[slot] += 1
        for slot in ids:
            counts[slot] -= 1

    def up(self, ids: I64) -> None:
        np.add.at(self.array, ids, _ONE)

    def down(self, ids: I64) -> None:
        np.subtract.at(self.array, ids, _ONE)

    def read(self, ids: I64) -> list[int]:
        counts: list[int] = self.array[ids].tolist()
        return counts

    def bytes_per_slot(self) -> float:
        return self.array.itemsize


def run(slots: int = 1_000_000, trials: int = 7, seed: int = 20) -> dict[str, Any]:
    """Measure and return a document that JSON can hold; about 10 s at a million slots.

    ``rows`` are nanoseconds for an id counted up or down; ``bars`` how many times faster the first
    of each of :data:`PAIRS` is than the second. Raises WrongCount.
    """
    if slots < FEWEST_SLOTS or trials < 1:
        raise UsageError(
            f"{slots} slots in {trials} trials measure nothing",
            f"use at least {FEWEST_SLOTS} slots and one trial",
        )
    rng = np.random.default_rng(seed)
    chunk = CHUNK_SLOTS * 2 * PAGE
    arena = Arena(-(-slots // CHUNK_SLOTS) * chunk, chunk)
    ids = arena.ids(arena.allocate(np.full(slots, 2 * PAGE, np.uint32)))
    structures = [ArenaCounts(arena), DictCounts(ids), BareDict(ids), BareArray(slots)]
    for structure in structures:
        _check(structure, rng, ids)
    gc.collect()
    gc.disable()
    try:
        times = _times(structures, ids, rng, trials)
    finally:
        gc.enable()
    for structure in structures:
        if any(structure.read(ids)):
            raise WrongCount(
                f"{structure.name} did not count down what it counted up", "report this"
            )
    rows = [_row(*key, values) for key, values in times.items()]
    return {
        "bench": "slots",
        "slots": slots,
        "batch": BATCH,
        "trials": trials,
        "seed": seed,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "processors": os.cpu_count(),
        "rows": rows,
        "bytes_per_slot": {each.name: round(each.bytes_per_slot(), 1) for each in structures},
        "bars": _bars(rows),
    }


def _check(structure: Counts, rng: np.random.Generator, ids: I64) -> None:
    """Count ids, some of them often; then take that back."""
    batch = np.append(rng.choice(ids, 1000), ids[[0, 0, -1, -1, -1]])
    unique, wanted = np.unique(batch, return_counts=True)
    structure.up(batch)
    structure.batch(batch)()
    structure.one_by_one(batch.tolist())
    if structure.read(unique) != wanted.tolist():
        raise WrongCount(f"{structure.name} counts wrongly", "report this")
    if any(structure.read(np.setdiff1d(ids[:FEWEST_SLOTS], unique))):
        raise WrongCount(f"{structure.name} counts slots that nobody named", "report this")
    structure.down(batch)


def _times(
    structures: Sequence[Counts], ids: I64, rng: np.random.Generator, trials: int
) -> dict[tuple[str, str], list[float]]:
    """Return one time per trial, by operation and name of the structure."""
    times: dict[tuple[str, str], list[float]] = {
        (operation, structure.name): [] for operation, _ in BARS for structure in structures
    }
    for _ in range(trials):
        for operation, _ in BARS:
            for structure in structures:
                # Fresh ids for each, or one would warm the caches for the next.
                drawn = [rng.choice(ids, BATCH) for _ in range(BATCHES)]
                times[operation, structure.name].append(_time(structure, operation, drawn))
    return times


def _time(structure: Counts, operation: str, drawn: Sequence[I64]) -> float:
    """Return nanoseconds (of processor time) for an id counted up or down."""
    if operation == "batch":
        acts = [structure.batch(ids) for ids in drawn]
    else:
        acts = [functools.partial(structure.one_by_one, ids.tolist()) for ids in drawn]
    start = time.thread_time()
    for act in acts:
        act()
    return (time.thread_time() - start) / (2 * BATCH * len(drawn)) * 1e9


def _row(operation: str, structure: str, values: Sequence[float]) -> dict[str, Any]:
    return {
        "operation": operation,
        "structure": structure,
        "unit": "ns",
        "median": statistics.median(values),
        "least": min(values),
        "most": max(values),
        "trials": list(values),
    }


def _bars(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found = {(row["operation"], row["structure"]): row["median"] for row in rows}
    bars = []
    for (operation, limit), (first, second) in itertools.product(BARS, PAIRS):
        ratio = found[operation, second] / found[operation, first]
        bars.append(
            {
                "operation": operation,
                "structure": first,
                "rival": second,
                "limit": limit,
                "ratio": ratio,
                "met": ratio >= limit,
            }
        )
    return bars


# -- output ---------------------------------------------------------------------------------------

HEAD = ("operation", "structure", "median", "least", "most", "unit", "x ours")


def table(result: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of :data:`HEAD` for a document of :func:`run`, as text."""
    ours = {row["operation"]: row["median"] for row in result["rows"] if row["structure"] == OURS}
    return [
        [
            row["operation"],
            row["structure"],
            *(f"{row[name]:,.1f}" for name in ("median", "least", "most")),
            row["unit"],
            f"{row['median'] / ours[row['operation']]:.1f}",
        ]
        for row in result["rows"]
    ]


def lines(result: Mapping[str, Any]) -> list[str]:
    """Return the whole result as text."""
    head = (
        f"{result['slots']:,} slots, {result['batch']:,} random ids at a time, up and down, "
        f"median of {result['trials']} trials, time for one id counted up or down"
    )
    memory = ", ".join(f"{name} {value:g}" for name, value in result["bytes_per_slot"].items())
    bars = [
        f"{bar['operation']}: {bar['structure']} is {bar['ratio']:.1f} x faster than "
        f"{bar['rival']}, wanted {bar['limit']:g} x: {'met' if bar['met'] else 'NOT MET'}"
        for bar in result["bars"]
    ]
    return [head, *render.table(HEAD, table(result)), f"bytes for each slot: {memory}", *bars]

"""``kvstore bench slots``: reference counts of slots in one array, beside dicts, in one run.

Every figure is processor time for an id counted up and down again; ids are drawn at random out of
all slots in use, fresh in each trial. Two pairs: the arena beside a dict that refuses what it does
(unknown ids, counts out of bounds), and a bare array beside a bare dict, which refuse nothing of
that: what the structure itself is worth. Counts are compared with the truth before anything is
timed, and after.
"""

from __future__ import annotations

import gc
import itertools
import os
import platform
import statistics
import sys
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np

from kvstore import render
from kvstore.errors import KVStoreError, UsageError
from kvstore.slots import I64, MOST_REFERENCES, PAGE, U64, Arena

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Batch = TypeVar("Batch")

BATCH = 10_000
CHUNK_SLOTS = 4096
FEWEST_SLOTS = 20_000
OURS = "kvstore slots"
PAIRS = ((OURS, "dict, checked"), ("array, bare", "dict, bare"))
BARS = (("one id", 10.0), ("batch", 100.0))
"""Operation, and how many times faster the first of each pair shall be."""
_ONE = np.uint16(1)


class WrongCount(KVStoreError):
    """A structure under test counted wrongly; nothing it did may be timed."""


class Counts(ABC, Generic[Batch]):
    """Reference counts of ``places``, one id or a batch at a time."""

    name: ClassVar[str]

    @abstractmethod
    def prepare(self, places: U64) -> Batch:
        """Return a batch in the form that the other methods take."""

    @abstractmethod
    def up_and_down(self, batch: Batch) -> None:
        """Count a batch up, then down."""

    @abstractmethod
    def one_by_one(self, ids: Sequence[int]) -> None:
        """Count ids up, then down, one at a time."""

    @abstractmethod
    def up(self, batch: Batch) -> None:
        """Count a batch up."""

    @abstractmethod
    def read(self, batch: Batch) -> Sequence[int]:
        """Return the counts."""

    @abstractmethod
    def bytes_per_slot(self) -> float:
        """Return the memory that the counts take."""


class ArenaCounts(Counts[U64]):
    """Ours: what a slot's count costs includes that its place is checked."""

    name = OURS

    def __init__(self, arena: Arena) -> None:
        self.arena = arena

    def prepare(self, places: U64) -> U64:
        return places

    def up_and_down(self, batch: U64) -> None:
        self.arena.incr(batch)
        self.arena.decr(batch)

    def one_by_one(self, ids: Sequence[int]) -> None:
        incr, decr = self.arena.incr_one, self.arena.decr_one
        for place in ids:
            incr(place)
        for place in ids:
            decr(place)

    def up(self, batch: U64) -> None:
        self.arena.incr(batch)

    def read(self, batch: U64) -> Sequence[int]:
        counts: list[int] = self.arena.counts(batch).tolist()
        return counts

    def bytes_per_slot(self) -> float:
        return self.arena.references.itemsize


class CheckedDict(Counts[list[int]]):
    """A class over a dict, as vLLM's first allocator had it, with the checks that ours has."""

    name = "dict, checked"

    def __init__(self, arena: Arena, places: U64) -> None:
        self.counts: dict[int, int] = dict.fromkeys(places.tolist(), 0)

    def prepare(self, places: U64) -> list[int]:
        listed: list[int] = places.tolist()
        return listed

    def incr_one(self, place: int) -> None:
        count = self.counts.get(place)
        if count is None:
            raise ValueError("a free slot cannot be referenced")
        if count == MOST_REFERENCES:
            raise OverflowError("too many references")
        self.counts[place] = count + 1

    def decr_one(self, place: int) -> None:
        count = self.counts.get(place)
        if not count:
            raise ValueError("a slot has fewer references than are given back")
        self.counts[place] = count - 1

    def up_and_down(self, batch: list[int]) -> None:
        self.one_by_one(batch)

    def one_by_one(self, ids: Sequence[int]) -> None:
        incr, decr = self.incr_one, self.decr_one
        for place in ids:
            incr(place)
        for place in ids:
            decr(place)

    def up(self, batch: list[int]) -> None:
        for place in batch:
            self.incr_one(place)

    def read(self, batch: list[int]) -> Sequence[int]:
        return [self.counts[place] for place in batch]

    def bytes_per_slot(self) -> float:
        return sys.getsizeof(self.counts) / len(self.counts) + sys.getsizeof(1 << 40)


class BareDict(CheckedDict):
    name = "dict, bare"

    def one_by_one(self, ids: Sequence[int]) -> None:
        counts = self.counts
        for place in ids:
            counts[place] += 1
        for place in ids:
            counts[place] -= 1


class BareArray(Counts[I64]):
    """Slot ids instead of places; numpy for batches, a view of the same memory for one id."""

    name = "array, bare"

    def __init__(self, arena: Arena, places: U64) -> None:
        self.arena = arena
        self.array = np.zeros(len(arena.references), np.uint16)

    def prepare(self, places: U64) -> I64:
        return self.arena.ids(places)

    def up_and_down(self, batch: I64) -> None:
        np.add.at(self.array, batch, _ONE)
        np.subtract.at(self.array, batch, _ONE)

    def one_by_one(self, ids: Sequence[int]) -> None:
        counts = self.array.data
        for number in ids:
            counts[number] += 1
        for number in ids:
            counts[number] -= 1

    def up(self, batch: I64) -> None:
        np.add.at(self.array, batch, _ONE)

    def read(self, batch: I64) -> Sequence[int]:
        counts: list[int] = self.array[batch].tolist()
        return counts

    def bytes_per_slot(self) -> float:
        return self.array.itemsize


def run(slots: int = 1_000_000, trials: int = 7, seed: int = 20) -> dict[str, Any]:
    """Measure and return a document that JSON can hold; about 5 s at a million slots.

    ``rows`` are nanoseconds for an id counted up and down; ``bars`` how many times faster the first
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
    places = arena.allocate(np.full(slots, 2 * PAGE, np.uint32))
    structures: list[Counts[Any]] = [ArenaCounts(arena)]
    structures += [make(arena, places) for make in (CheckedDict, BareDict, BareArray)]
    for structure in structures:
        _check(structure, rng, places)
    gc.collect()
    gc.disable()
    try:
        times = _times(structures, places, rng, trials)
    finally:
        gc.enable()
    for structure in structures:
        _expect_zero(structure, places)
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


def _check(structure: Counts[Any], rng: np.random.Generator, places: U64) -> None:
    """Count ids, some of them often; then take that back."""
    batch = np.append(rng.choice(places, 1000), places[[0, 0, -1, -1, -1]])
    unique, wanted = np.unique(batch, return_counts=True)
    structure.up(structure.prepare(batch))
    structure.up_and_down(structure.prepare(batch))
    if list(structure.read(structure.prepare(unique))) != wanted.tolist():
        raise WrongCount(f"{structure.name} counts wrongly", "report this")
    others = np.setdiff1d(places[:FEWEST_SLOTS], unique)
    if any(structure.read(structure.prepare(others))):
        raise WrongCount(f"{structure.name} counts slots that nobody named", "report this")
    _take_back(structure, batch)


def _take_back(structure: Counts[Any], batch: U64) -> None:
    if isinstance(structure, ArenaCounts):
        structure.arena.decr(batch)
    elif isinstance(structure, BareArray):
        structure.array[:] = 0
    elif isinstance(structure, CheckedDict):
        structure.counts = dict.fromkeys(structure.counts, 0)


def _expect_zero(structure: Counts[Any], places: U64) -> None:
    if any(structure.read(structure.prepare(places))):
        raise WrongCount(f"{structure.name} did not count down what it counted up", "report this")


def _times(
    structures: Sequence[Counts[Any]], places: U64, rng: np.random.Generator, trials: int
) -> dict[tuple[str, str], list[float]]:
    """Return one time per trial, by operation and name of the structure."""
    times: dict[tuple[str, str], list[float]] = {
        (operation, structure.name): [] for operation, _ in BARS for structure in structures
    }
    for _ in range(trials):
        for operation, name in times:
            structure = next(each for each in structures if each.name == name)
            # Fresh ids for each, or one would warm the caches for the next.
            value = _time(structure, operation, rng.choice(places, BATCH))
            times[operation, name].append(value)
    return times


def _time(structure: Counts[Any], operation: str, places: U64) -> float:
    """Return nanoseconds (of processor time) for an id counted up and down."""
    act: Callable[[Any], None]
    if operation == "batch":
        act, argument = structure.up_and_down, structure.prepare(places)
    elif isinstance(structure, BareArray):
        act, argument = structure.one_by_one, structure.prepare(places).tolist()
    else:
        act, argument = structure.one_by_one, places.tolist()
    start = time.thread_time()
    act(argument)
    return (time.thread_time() - start) / len(places) * 1e9


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
        f"{result['slots']:,} slots, {result['batch']:,} random ids counted up and down, "
        f"median of {result['trials']} trials, time for each id"
    )
    memory = ", ".join(f"{name} {value:g}" for name, value in result["bytes_per_slot"].items())
    bars = [
        f"{bar['operation']}: {bar['structure']} is {bar['ratio']:.1f} x faster than "
        f"{bar['rival']}, wanted {bar['limit']:g} x: {'met' if bar['met'] else 'NOT MET'}"
        for bar in result["bars"]
    ]
    return [head, *render.table(HEAD, table(result)), f"bytes for each slot: {memory}", *bars]

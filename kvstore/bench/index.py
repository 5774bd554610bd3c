"""``kvstore bench index``: the index beside a dict, an OrderedDict and LMDB, in one run.

First part, single operations on ``blocks`` random 36-byte keys; second part, a realistic load:
chains that share their starts, popular ones asked for more often, 512-key look-ups of which the end
misses, the misses added, the least recently used evicted, all at capacity. Every trial uses fresh
keys. Before a structure is timed its answers are compared with the truth, and a wrong one ends the
run: an early published table of this kind timed look-ups in an index that was empty.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvstore import render
from kvstore.bench.rivals import ALL, LmdbMap, OrderedLru, OurIndex, Structure
from kvstore.errors import KVStoreError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvstore.keys import KeyArray

KEY_BYTES = 36
CHAIN = 512
SHARED = 128
PROMPTS = 32
WARM_REQUESTS, REQUESTS = 400, 600
VICTIM_BATCH = 4096
FEWEST_BLOCKS = 20_000
BARS = (
    ("contains", "ms", 30.0),
    ("insert", "ms", 100.0),
    ("choose victims", "us each", 2.0),
    ("memory", "B/block", 100.0),
)
"""Operation, unit and limit at a million blocks."""


class WrongAnswer(KVStoreError):
    """A structure under test answered wrongly; nothing it did may be timed."""


@dataclass
class Figures:
    """Measured values of one structure and operation, one per trial."""

    operation: str
    structure: str
    unit: str
    values: list[float] = field(default_factory=list)
    note: str = ""

    def document(self) -> dict[str, object]:
        return {
            "operation": self.operation,
            "structure": self.structure,
            "unit": self.unit,
            "median": statistics.median(self.values),
            "least": min(self.values),
            "most": max(self.values),
            "trials": self.values,
            "note": self.note,
        }


class Board:
    """Collects figures by operation and structure."""

    def __init__(self) -> None:
        self._figures: dict[tuple[str, str, str], Figures] = {}

    def note(self, operation: str, structure: Structure[Any], unit: str, value: float) -> None:
        key = operation, structure.name, unit
        figures = self._figures.setdefault(key, Figures(*key, note=structure.note))
        figures.values.append(value)

    def documents(self) -> list[dict[str, object]]:
        operations = [operation for operation, _, _ in self._figures]
        rows = sorted(self._figures.values(), key=lambda row: operations.index(row.operation))
        return [figures.document() for figures in rows]


def run(
    blocks: int = 1_000_000,
    trials: int = 5,
    seed: int = 20,
    tell: Callable[[str], object] = lambda _: None,
) -> dict[str, object]:
    """Measure and return a document that JSON can hold; about 90 s at a million blocks.

    ``rows`` are single operations, ``load`` the realistic load, ``bars`` the limits that a million
    blocks must keep. ``tell`` hears how far it is. Raises WrongAnswer.
    """
    if blocks < FEWEST_BLOCKS or trials < 1:
        raise UsageError(
            f"{blocks} blocks in {trials} trials measure nothing",
            f"use at least {FEWEST_BLOCKS} blocks and one trial",
        )
    rng = np.random.default_rng(seed)
    single, load = Board(), Board()
    for trial in range(1, trials + 1):
        for structure in ALL:
            tell(f"trial {trial} of {trials}: {structure.name}")
            _single_operations(single, structure(), rng, blocks)
        tell(f"trial {trial} of {trials}: realistic load")
        _realistic_load(load, rng, blocks // 10)
    rows = single.documents()
    return {
        "bench": "index",
        "blocks": blocks,
        "key_bytes": KEY_BYTES,
        "trials": trials,
        "seed": seed,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "processors": os.cpu_count(),
        "rows": rows,
        "load": load.documents(),
        "bars": _bars(rows) if blocks == 1_000_000 else [],
    }


def _bars(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, object]]:
    found = {
        (row["operation"], row["unit"]): row for row in rows if row["structure"] == OurIndex.name
    }
    return [
        {
            "operation": operation,
            "unit": unit,
            "limit": limit,
            "median": found[operation, unit]["median"],
            "met": found[operation, unit]["median"] <= limit,
        }
        for operation, unit, limit in BARS
    ]


# -- single operations ----------------------------------------------------------------------------


def _random_keys(rng: np.random.Generator, count: int) -> KeyArray:
    return rng.integers(0, 256, (count, KEY_BYTES), dtype=np.uint8)


def _single_operations(
    board: Board, structure: Structure[Any], rng: np.random.Generator, blocks: int
) -> None:
    batch = blocks // 10
    resident = _random_keys(rng, blocks)
    try:
        for at in range(0, blocks, batch):
            structure.insert(structure.prepare(resident[at : at + batch]))
        _look_up(board, structure, rng, resident)
        board.note("memory", structure, "B/block", structure.bytes_per_block())
        if structure.evicts:
            chosen = rng.permutation(blocks)[:batch]
            used = structure.prepare(resident[chosen])
            board.note("touch", structure, "ms", _seconds(lambda: structure.touch(used)) * 1e3)
        fresh = structure.prepare(_random_keys(rng, batch))
        _expect(not any(structure.contains(fresh)), structure, "fresh keys are absent")
        board.note("insert", structure, "ms", _seconds(lambda: structure.insert(fresh)) * 1e3)
        _expect(all(structure.contains(fresh)), structure, "inserted keys are there")
        if structure.evicts:
            _evict(board, structure)
    finally:
        structure.close()


def _look_up(
    board: Board, structure: Structure[Any], rng: np.random.Generator, resident: KeyArray
) -> None:
    """Look up a tenth of the keys, half of them absent, in random order; then one chain."""
    half = len(resident) // 20
    there = rng.permutation(2 * half) < half
    asked = _random_keys(rng, 2 * half)
    asked[there] = resident[rng.integers(0, len(resident), half)]
    keys, wanted = structure.prepare(asked), there.tolist()
    _expect(list(structure.contains(keys)) == wanted, structure, "half of the keys are there")
    value = statistics.median(_seconds(lambda: structure.contains(keys)) for _ in range(3))
    board.note("contains", structure, "ms", value * 1e3)
    chain = np.concatenate([resident[:400], _random_keys(rng, CHAIN - 400)])
    keys = structure.prepare(chain)
    _expect(structure.prefix(keys) == 400, structure, "a prefix of 400")
    value = statistics.median(_seconds(lambda: structure.prefix(keys)) for _ in range(25))
    board.note(f"prefix of {CHAIN}", structure, "us", value * 1e6)


def _evict(board: Board, structure: Structure[Any]) -> None:
    """Evict in batches; for ours also time the choice alone, which is what a policy costs."""
    batches = 4
    if isinstance(structure, OurIndex):
        index = structure.index
        stamps = index.last_use[: index.row_limit]
        oldest = np.argsort(stamps)[:VICTIM_BATCH]
        chosen = structure.choose(VICTIM_BATCH)
        _expect(chosen.tolist() == oldest.tolist(), structure, "the oldest are chosen")
        value = statistics.median(
            _seconds(lambda: structure.choose(VICTIM_BATCH)) for _ in range(5)
        )
        board.note("choose victims", structure, "us each", value / VICTIM_BATCH * 1e6)
    value = sum(_seconds(lambda: structure.evict(VICTIM_BATCH)) for _ in range(batches))
    board.note("evict", structure, "us each", value / (batches * VICTIM_BATCH) * 1e6)


def _seconds(act: Callable[[], object]) -> float:
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        act()
        return time.perf_counter() - start
    finally:
        gc.enable()


def _expect(true: bool, structure: Structure[Any], what: str) -> None:
    if not true:
        raise WrongAnswer(f"{structure.name} is wrong: expected that {what}", "report this")


# -- realistic load -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """Chains of 512 keys: a system prompt that many share, then a conversation's own blocks.

    There are about six times as many different blocks as the cache holds. Conversations are chosen
    by a Zipf law (exponent 0.9), each belongs to one of 32 prompts, popular ones more often.
    """

    prompts: KeyArray
    own: KeyArray
    prompt_of: npt.NDArray[np.int64]
    requests: npt.NDArray[np.int64]

    @classmethod
    def make(cls, rng: np.random.Generator, capacity: int) -> Workload:
        conversations = max(8, capacity * 6 // (CHAIN - SHARED))
        return cls(
            _random_keys(rng, PROMPTS * SHARED).reshape(PROMPTS, SHARED, KEY_BYTES),
            _random_keys(rng, conversations * (CHAIN - SHARED)).reshape(
                conversations, CHAIN - SHARED, KEY_BYTES
            ),
            rng.choice(PROMPTS, conversations, p=_zipf(PROMPTS)),
            rng.choice(conversations, WARM_REQUESTS + REQUESTS, p=_zipf(conversations)),
        )

    def chain(self, conversation: int) -> KeyArray:
        prompt = self.prompts[self.prompt_of[conversation]]
        return np.concatenate([prompt, self.own[conversation]])


def _zipf(count: int) -> npt.NDArray[np.float64]:
    weights = np.arange(1, count + 1, dtype=np.float64) ** np.float64(-0.9)
    shares: npt.NDArray[np.float64] = weights / weights.sum()
    return shares


class Cache:
    """A structure that is kept at ``capacity`` blocks, as a store keeps its index.

    ``hits`` is the number of keys found for each request, ``times`` seconds by operation. The clock
    starts when the keys have come off the wire as one array. "CPU" leaves out what other processes
    of the machine took meanwhile. What cannot evict grows instead.
    """

    def __init__(self, structure: Structure[Any], capacity: int) -> None:
        self.structure = structure
        self.capacity = capacity
        self.held = 0
        self.hits: list[int] = []
        self.times: dict[str, list[float]] = {
            name: [] for name in ("lookup", "evict", "add", "request", "request, CPU")
        }

    def request(self, chain: KeyArray) -> None:
        """Look a chain up, make room for what is missing, add it."""
        structure, start, cpu = self.structure, time.perf_counter(), time.thread_time()
        keys = structure.prepare(chain)
        found = structure.look_up(keys)
        looked = time.perf_counter()
        over = self.held + len(keys) - found - self.capacity
        if structure.evicts and over > 0:
            structure.evict(over)
            self.held -= over
            self.times["evict"].append(time.perf_counter() - looked)
        made_room = time.perf_counter()
        if found < len(keys):
            structure.extend(keys, found)
            self.times["add"].append(time.perf_counter() - made_room)
        self.times["lookup"].append(looked - start)
        self.times["request"].append(time.perf_counter() - start)
        self.times["request, CPU"].append(time.thread_time() - cpu)
        self.held += len(keys) - found
        self.hits.append(found)

    def forget_times(self) -> None:
        for values in self.times.values():
            values.clear()


def _realistic_load(board: Board, rng: np.random.Generator, capacity: int) -> None:
    workload = Workload.make(rng, capacity)
    caches = [Cache(structure(), capacity) for structure in (OurIndex, OrderedLru, LmdbMap)]
    try:
        for cache in caches:
            _serve(cache, workload)
        ours, ordered, _ = caches
        # Leaf-first LRU is plain LRU as long as every chain is used from its end to its start, so
        # both must have held the same blocks all the time.
        _expect(ours.hits == ordered.hits, ours.structure, "hits are those of OrderedDict LRU")
        _expect(0 < sum(ours.hits) < CHAIN * len(ours.hits), ours.structure, "some keys miss")
        for cache in caches:
            _note_load(board, cache)
    finally:
        for cache in caches:
            cache.structure.close()


def _serve(cache: Cache, workload: Workload) -> None:
    chains = [workload.chain(conversation) for conversation in workload.requests.tolist()]
    for chain in chains[:WARM_REQUESTS]:
        cache.request(chain)
    cache.forget_times()
    gc.collect()
    gc.disable()
    try:
        for chain in chains[WARM_REQUESTS:]:
            cache.request(chain)
    finally:
        gc.enable()


def _note_load(board: Board, cache: Cache) -> None:
    for operation, values in cache.times.items():
        if values:
            for percentile in (50, 99):
                value = float(np.percentile(values, percentile)) * 1e6
                board.note(f"{operation} p{percentile}", cache.structure, "us", value)
    if cache.structure.evicts:
        share = sum(cache.hits[WARM_REQUESTS:]) / (CHAIN * REQUESTS) * 100
        board.note("keys hit", cache.structure, "%", share)


# -- output ---------------------------------------------------------------------------------------

HEAD = ("operation", "structure", "median", "least", "most", "unit", "x ours")


def table(result: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of :data:`HEAD` for a document of :func:`run`, as text."""
    rows, marks = [], _marks(result)
    for part in ("rows", "load"):
        ours = {
            (row["operation"], row["unit"]): row["median"]
            for row in result[part]
            if row["structure"] == OurIndex.name
        }
        for row in result[part]:
            own = ours.get((row["operation"], row["unit"]))
            rows.append(
                [
                    f"{'load: ' if part == 'load' else ''}{row['operation']}",
                    row["structure"] + marks.get(row["note"], ""),
                    *(_figure(row[name]) for name in ("median", "least", "most")),
                    row["unit"],
                    f"{row['median'] / own:.2f}" if own else "",
                ]
            )
    return rows


def _marks(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the mark of each footnote: what a structure does not do, and so what it saves."""
    notes = dict.fromkeys(row["note"] for row in (*result["rows"], *result["load"]) if row["note"])
    return {note: f" [{number}]" for number, note in enumerate(notes, 1)}


def _figure(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:,.1f}"


def lines(result: Mapping[str, Any]) -> list[str]:
    """Return the whole result as text."""
    head = (
        f"{result['blocks']:,} blocks, keys of {result['key_bytes']} bytes, batches of a tenth, "
        f"median of {result['trials']} trials with fresh keys"
    )
    bars = [
        f"{bar['operation']}: {_figure(bar['median'])} {bar['unit']}, "
        f"limit {bar['limit']:g}: {'met' if bar['met'] else 'NOT MET'}"
        for bar in result["bars"]
    ]
    footnotes = [f"{mark.strip()} {note}" for note, mark in _marks(result).items()]
    return [head, *render.table(HEAD, table(result)), *footnotes, *bars]

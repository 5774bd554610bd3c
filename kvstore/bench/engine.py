"""``kvstore bench engine``: an engine alone, beside the disk and beside memory, in one run.

The reference reads and writes one preallocated file with O_DIRECT, one block a call, every thread
into a buffer of its own in huge pages: what this machine gives a Python program. The engine moves
record images between the disk and a slab in huge pages, in batches, as the store's workers have it
do. Reads of ``direct`` come from the disk, those of ``mmap`` from the page cache; puts go into
slots that were used before. Rows of a round stand one behind the other, so that all have the same
weather; every block is compared with what was put, once, before anything is timed.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore import record, render
from kvstore.backends import engine_class
from kvstore.backends.base import Blocks, Engine, EngineContext, Leaving, Status
from kvstore.bench import environment
from kvstore.bench.timing import Clock, Row
from kvstore.errors import KVStoreError, UsageError
from kvstore.pages import PAGE, Pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

FOLDER = "engine"
BATCH = 16
"""Blocks in a call of the engine."""
STORE, NAMESPACE = bytes(range(16)), bytes(range(16, 32))
REFERENCE_THREADS = (1, 4, 8)
BARS = (
    ("direct get", "reference read", 0.85),
    ("direct put", "reference write", 0.8),
    ("mmap get", "copy", 0.65),
)
"""Row, what it is measured by, and the least share of its speed."""
MOST_CPU = 0.1
"""Seconds of processor time for a GiB, for the rows of ``direct``."""


class WrongBytes(KVStoreError):
    """A block came back with other bytes; nothing of the run may be believed."""


@dataclass(frozen=True)
class Plan:
    """``blocks`` of ``block_bytes`` each, by ``threads``, ``rounds`` times."""

    blocks: int = 512
    block_bytes: int = 2 << 20
    threads: int = 4
    rounds: int = 5
    directory: Path = Path(".demo")
    engine: str = "superblock"

    @property
    def bytes(self) -> int:
        return self.blocks * self.block_bytes


@dataclass
class _Bench:
    """What all rows share: images full of data to write, room for what is read."""

    plan: Plan
    source: Pages
    target: Pages
    order: list[int]
    rows: dict[str, Row] = field(default_factory=dict)

    @property
    def image_bytes(self) -> int:
        return record.image_bytes(self.plan.block_bytes)

    def images(self, pages: Pages) -> list[memoryview]:
        size = self.image_bytes
        return [pages.memory[at * size : (at + 1) * size] for at in range(self.plan.blocks)]

    def time(self, name: str, threads: int, act: Callable[[Sequence[int]], None]) -> None:
        """Time ``act``, called by every thread with its share of block numbers."""
        row = self.rows.setdefault(name, Row(name))
        shares = [self.order[first::threads] for first in range(threads)]
        with ThreadPoolExecutor(threads) as pool:
            # Threads start before the clock does.
            list(pool.map(time.sleep, [0.001] * threads))
            with Clock().time(row):
                for _ in pool.map(act, shares):
                    pass


def run(plan: Plan, note: Callable[[str], None]) -> dict[str, Any]:
    """Measure; return a document. Raises UsageError, WrongBytes and what engines raise."""
    folder = plan.directory / FOLDER
    if plan.block_bytes % PAGE:
        raise UsageError(
            f"blocks of {plan.block_bytes} bytes cannot be moved with O_DIRECT",
            "give a multiple of 4096",
        )
    if shutil.disk_usage(plan.directory.parent).free < 5 * plan.bytes:
        raise UsageError(f"{plan.directory} has too little room", "give fewer or smaller blocks")
    shutil.rmtree(folder, ignore_errors=True)
    size = plan.blocks * record.image_bytes(plan.block_bytes)
    bench = _Bench(plan, Pages(size), Pages(size), list(range(plan.blocks)))
    for pages in (bench.source, bench.target):
        pages.populate(0, pages.capacity)
    np.frombuffer(bench.source.memory, np.uint64)[:] = np.random.default_rng(5).integers(
        0, 1 << 64, size // 8, np.uint64
    )
    try:
        with ExitStack() as stack:
            _measure(bench, folder, stack, note)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return _document(bench)


def _measure(bench: _Bench, folder: Path, stack: ExitStack, note: Callable[[str], None]) -> None:
    folder.mkdir(parents=True)
    reference = _Reference(bench, folder / "reference")
    stack.callback(reference.close)
    subjects = [_Subject(bench, folder / io, io) for io in ("direct", "mmap")]
    for subject in subjects:
        stack.callback(subject.engine.close)
    rng = random.Random(9)
    for number in range(bench.plan.rounds):
        note(f"round {number + 1} of {bench.plan.rounds}")
        rng.shuffle(bench.order)
        bench.time("copy", 1, _copying(bench))
        for threads in REFERENCE_THREADS:
            bench.time(_named("reference read", threads), threads, reference.read)
        for subject in subjects:
            subject.measure_get()
        for threads in REFERENCE_THREADS:
            bench.time(_named("reference write", threads), threads, reference.write)
        for subject in subjects:
            subject.measure_put()


def _named(name: str, threads: int) -> str:
    return f"{name}, {render.count(threads, 'thread')}"


def _copying(bench: _Bench) -> Callable[[Sequence[int]], None]:
    sources, targets = bench.images(bench.source), bench.images(bench.target)

    def act(numbers: Sequence[int]) -> None:
        for number in numbers:
            np.copyto(
                np.frombuffer(targets[number], np.uint8, bench.plan.block_bytes, PAGE),
                np.frombuffer(sources[number], np.uint8, bench.plan.block_bytes, PAGE),
            )

    return act


class _Reference:
    """One file and one O_DIRECT call for each block."""

    def __init__(self, bench: _Bench, path: Path) -> None:
        self._size = size = bench.plan.block_bytes
        self._sources = bench.images(bench.source)
        self._buffers = Pages(max(REFERENCE_THREADS) * size)
        self._buffers.populate(0, self._buffers.capacity)
        self._free = [
            self._buffers.memory[at * size : (at + 1) * size] for at in range(REFERENCE_THREADS[-1])
        ]
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
            os.posix_fallocate(self._descriptor, 0, bench.plan.bytes)
        except OSError as error:
            raise UsageError(f"{path} takes no O_DIRECT: {error.strerror}") from error
        self.write(range(bench.plan.blocks))
        os.fsync(self._descriptor)

    def read(self, numbers: Sequence[int]) -> None:
        buffer = self._free.pop()
        for number in numbers:
            if os.preadv(self._descriptor, [buffer], number * self._size) != self._size:
                raise WrongBytes("the reference was cut short")
        self._free.append(buffer)

    def write(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            block = self._sources[number][PAGE : PAGE + self._size]
            if os.pwritev(self._descriptor, [block], number * self._size) != self._size:
                raise WrongBytes("the reference was cut short")

    def close(self) -> None:
        os.close(self._descriptor)


class _Subject:
    """The engine with one ``io``, full of blocks."""

    def __init__(self, bench: _Bench, folder: Path, io: str) -> None:
        self._bench = bench
        self._io = io
        self._sources = bench.images(bench.source)
        self._targets = bench.images(bench.target)
        self._generation = 0
        folder.mkdir()
        context = EngineContext(folder, STORE, {"io": io})
        self.engine: Engine = engine_class(bench.plan.engine)(context)
        self.engine.create()
        self.engine.open()
        self._blocks = self._next_version()
        self._put(range(bench.plan.blocks))
        self.engine.flush()
        self._check()

    def _next_version(self) -> Blocks:
        """Return the blocks of the next version, their headers encoded into the images."""
        plan, first = self._bench.plan, self._generation + 1
        self._generation += plan.blocks
        keys = np.arange(plan.blocks, dtype=np.uint64).repeat(4).view(np.uint8).reshape(-1, 32)
        for number, image in enumerate(self._sources):
            payload = image[PAGE : PAGE + plan.block_bytes]
            header = record.Header(
                store=STORE, namespace=NAMESPACE, shard=0, key=keys[number].tobytes(), parent=b"",
                generation=first + number, written_ns=0, logical_length=plan.block_bytes,
                stored_length=plan.block_bytes, checksum=record.payload_checksum(payload),
            )  # fmt: skip
            record.encode_into(header, image[:PAGE])
        return Blocks(
            NAMESPACE,
            0,
            keys,
            np.full(plan.blocks, plan.block_bytes, np.uint32),
            np.arange(first, first + plan.blocks, dtype=np.uint64),
            np.zeros(plan.blocks, np.uint64),
        )

    def _batches(self, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        for start in range(0, len(numbers), BATCH):
            yield np.array(numbers[start : start + BATCH])

    def _put(self, numbers: Sequence[int]) -> None:
        for batch in self._batches(numbers):
            images = [self._sources[number] for number in batch.tolist()]
            written = self.engine.put_many(self._blocks.take(batch), images, sync=False)
            if (written.statuses != Status.OK).any():
                raise WrongBytes("a block was not written")
            self._blocks.places[batch] = written.places

    def _get(self, numbers: Sequence[int]) -> None:
        for batch in self._batches(numbers):
            images = [self._targets[number] for number in batch.tolist()]
            read = self.engine.get_many_into(self._blocks.take(batch), images)
            if (read.statuses != Status.OK).any():
                raise WrongBytes("a block is not there")

    def _check(self) -> None:
        self._get(range(self._bench.plan.blocks))
        for source, target in zip(self._sources, self._targets, strict=True):
            if not np.array_equal(np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)):
                raise WrongBytes("a block came back with other bytes")

    def measure_get(self) -> None:
        # The page cache is read by one thread: more make it slower.
        threads = 1 if self._io == "mmap" else self._bench.plan.threads
        self._bench.time(f"{self._io} get", threads, self._get)

    def measure_put(self) -> None:
        self.engine.delete_many(self._blocks, Leaving.EVICTED)
        self._blocks = self._next_version()
        threads = 1 if self._io == "mmap" else self._bench.plan.threads
        self._bench.time(f"{self._io} put", threads, self._put)
        self.engine.flush()


# -- what is shown --------------------------------------------------------------------------------


def _document(bench: _Bench) -> dict[str, Any]:
    plan, gib = bench.plan, bench.plan.bytes / (1 << 30)
    rows = [
        {
            **row.document(),
            "gib_per_second": gib / row.median,
            "cpu_seconds_per_gib": float(np.median(row.client_cpu)) / gib,
        }
        for row in bench.rows.values()
    ]
    return {
        "engine": plan.engine,
        "blocks": plan.blocks,
        "block_bytes": plan.block_bytes,
        "threads": plan.threads,
        "rounds": plan.rounds,
        "huge_bytes": bench.target.huge_bytes,
        "environment": environment.describe(plan.directory),
        "rows": rows,
        "bars": [_bar(bench.rows, *bar) for bar in BARS],
        "most_cpu_seconds_per_gib": MOST_CPU,
    }


def _bar(rows: Mapping[str, Row], name: str, measure: str, least: float) -> dict[str, Any]:
    """Return the share of the reference's speed that a row has, round by round, and its bar."""
    by = measure if measure in rows else _named(measure, REFERENCE_THREADS[-1])
    pairs = zip(rows[by].seconds, rows[name].seconds, strict=True)
    shares = [reference / own for reference, own in pairs]
    return {
        "row": name,
        "by": by,
        "least": least,
        "median": float(np.median(shares)),
        "best": max(shares),
    }


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Return a document of :func:`run` as text."""
    total = result["blocks"] * result["block_bytes"]
    yield (
        f"engine {result['engine']}: {result['blocks']} blocks of "
        f"{render.size(result['block_bytes'])}, median of {render.count(result['rounds'], 'round')}"
    )
    yield from environment.lines(result["environment"])
    if result["huge_bytes"] < total // 2:
        yield "note: the reference ran without huge pages"
    head = ("row", "s", "GiB/s", "CPU s/GiB")
    body = [
        (
            row["name"],
            f"{row['median_seconds']:.3f}",
            f"{row['gib_per_second']:.2f}",
            f"{row['cpu_seconds_per_gib']:.3f}",
        )
        for row in result["rows"]
    ]
    yield from render.table(head, body)
    for bar in result["bars"]:
        verdict = "met" if bar["median"] >= bar["least"] else "NOT met"
        yield (
            f"{bar['row']}: {bar['median']:.2f} of {bar['by']} (best round {bar['best']:.2f}), at "
            f"least {bar['least']} wanted: {verdict}"
        )

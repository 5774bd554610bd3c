"""``kvstore bench engines``: engines alone, beside the disk and beside memory, in one run.

For each size of blocks, and round after round, so that all have the same weather:

- *copy*: blocks copied in memory by one thread, before every row that is measured by it;
- *reference*: one preallocated file, read and written with O_DIRECT, one block a call, every thread
  into a buffer of its own in huge pages: what this machine gives a Python program;
- every engine moves record images between the disk and a slab in huge pages, as the store's
  workers have it do. It is full; all blocks are evicted, then put again: without a sync, and with
  one for each 64. It is closed, what the page cache has of its files is dropped, and it is opened
  again: the first gets are *cold*, the second ones *warm*.

Every block is compared with what was put, once, before anything is timed.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore import record, render
from kvstore.backends import ALIASES, engine_class, engine_names
from kvstore.backends.base import Blocks, Engine, EngineContext, Leaving, Status
from kvstore.bench import environment
from kvstore.bench.churn import occupied
from kvstore.bench.figures import (
    COLD,
    COPY,
    DURABLE,
    PUT,
    REFERENCE_THREADS,
    WARM,
    Subject,
    document,
    reference_name,
)
from kvstore.bench.timing import Clock, Row, joined
from kvstore.errors import EngineError, KVStoreError, UsageError
from kvstore.pages import PAGE, Pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SIZES = (64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20)
FOLDER = "engines"
BATCH, SYNCED = 16, 64
"""Blocks in a call of the engine; in one that syncs."""
STORE, NAMESPACE = bytes(range(16)), bytes(range(16, 32))
LEAST_BLOCKS = 16
CAPACITY = 4
"""An engine may take so many times what it is to hold."""
SPARE = 2
"""The disk must have so many times the data free for each engine: most take little more than 1."""


class WrongBytes(KVStoreError):
    """A block came back with other bytes; nothing of the run may be believed."""


@dataclass(frozen=True)
class Plan:
    """``data_bytes`` in blocks of each size, ``rounds`` times; ``threads`` call what is O_DIRECT.

    ``engines`` are names; ``mmap`` is ``superblock`` with that ``io``. With ``parity`` each is
    measured once more, with a parity chunk for each block.
    """

    engines: Sequence[str]
    sizes: Sequence[int] = SIZES
    data_bytes: int = 512 << 20
    rounds: int = 3
    threads: int = 4
    directory: Path = Path(".demo")
    parity: bool = False


class _Data:
    """What all subjects share: images full of data to write, room for what is read."""

    def __init__(self, plan: Plan, block_bytes: int) -> None:
        self.block_bytes, self.blocks = block_bytes, plan.data_bytes // block_bytes
        self.order = list(range(self.blocks))
        self.image_bytes = record.image_bytes(block_bytes)
        self.source = Pages(self.blocks * self.image_bytes)
        self.target = Pages(self.blocks * self.image_bytes)
        for pages in (self.source, self.target):
            pages.populate(0, pages.capacity)
        noise = np.random.default_rng(5).integers(0, 1 << 64, self.source.capacity // 8, np.uint64)
        np.frombuffer(self.source.memory, np.uint64)[:] = noise
        self.sources, self.targets = self._images(self.source), self._images(self.target)
        self.sums = [record.payload_checksum(self._payload(image)) for image in self.sources]

    def _images(self, pages: Pages) -> list[memoryview]:
        size = self.image_bytes
        return [pages.memory[at * size : (at + 1) * size] for at in range(self.blocks)]

    def _payload(self, image: memoryview) -> memoryview:
        return image[PAGE : PAGE + self.block_bytes]

    def payload(self, number: int) -> memoryview:
        return self._payload(self.sources[number])

    def time(self, row: Row, threads: int, act: Callable[[Sequence[int]], None]) -> None:
        """Time ``act``, called by every thread with its share of block numbers."""
        shares = [self.order[first::threads] for first in range(threads)]
        with ThreadPoolExecutor(threads) as pool:
            # Threads start before the clock does.
            list(pool.map(time.sleep, [0.001] * threads))
            with Clock().time(row):
                for _ in pool.map(act, shares):
                    pass

    def time_copy(self, row: Row) -> None:
        self.time(row, 1, self._copy)

    def _copy(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            target, source = self._payload(self.targets[number]), self.payload(number)
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))

    def check(self) -> None:
        """Raise WrongBytes unless all that was put was read."""
        for source, target in zip(self.sources, self.targets, strict=True):
            one, other = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
            # Headers may differ in what they say of parity.
            same = record.decode(source[:PAGE]) == record.decode(target[:PAGE])
            if not (same and np.array_equal(one[PAGE:], other[PAGE:])):
                raise WrongBytes("a block came back with other bytes")


class _Reference:
    """One file and one call for each block."""

    def __init__(self, data: _Data, path: Path) -> None:
        self._data, self._size = data, data.block_bytes
        self._buffers = Pages(max(REFERENCE_THREADS) * self._size)
        self._buffers.populate(0, self._buffers.capacity)
        self._free = [
            self._buffers.memory[at * self._size : (at + 1) * self._size]
            for at in range(max(REFERENCE_THREADS))
        ]
        self.subjects = {
            threads: Subject(reference_name(threads), "direct") for threads in REFERENCE_THREADS
        }
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
            os.posix_fallocate(self._descriptor, 0, data.blocks * self._size)
            self._write(range(data.blocks))
            os.fsync(self._descriptor)
        except OSError as error:
            raise UsageError(f"{path} takes no O_DIRECT: {error.strerror}") from error

    def measure(self) -> None:
        for operation, act in ((COLD, self._read), (PUT, self._write)):
            for threads, subject in self.subjects.items():
                self._data.time(subject.row(operation), threads, act)

    def _read(self, numbers: Sequence[int]) -> None:
        buffer = self._free.pop()
        for number in numbers:
            if os.preadv(self._descriptor, [buffer], number * self._size) != self._size:
                raise WrongBytes("the reference was cut short")
        self._free.append(buffer)

    def _write(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            block = self._data.payload(number)
            if os.pwritev(self._descriptor, [block], number * self._size) != self._size:
                raise WrongBytes("the reference was cut short")

    def close(self) -> None:
        os.close(self._descriptor)


class _Engine:
    """An engine full of blocks, and what was measured of it."""

    def __init__(
        self, plan: Plan, data: _Data, folder: Path, name: str, *, parity: bool = False
    ) -> None:
        self._data, self._folder, self._generation = data, folder, 0
        folder.mkdir()
        found = engine_class(name)
        capacity = CAPACITY * plan.data_bytes
        options = {**found.options_for(capacity), "io": "mmap" if name in ALIASES else "auto"}
        context = EngineContext(folder, STORE, options, capacity=capacity, parity=parity)
        self._engine: Engine = found(context)
        self._engine.create()
        self._engine.open()
        io = self._engine.stats().io
        self.subject = Subject(f"{name}, parity" if parity else name, io)
        # The page cache is read by one thread: more make it slower.
        self._threads = plan.threads if io == "direct" else 1
        self._blocks = self._next_version()
        self._put(range(data.blocks), BATCH, sync=False)
        self._engine.flush()
        np.frombuffer(data.target.memory, np.uint64)[:] = 0
        self._get(range(data.blocks))
        data.check()
        self._engine.close()

    def measure(self) -> None:
        """Take a round. The engine is open only here, so that it does nothing in others' time."""
        subject, data = self.subject, self._data
        self._reopen()
        self._measure_put(PUT, self._threads, lambda these: self._put(these, BATCH, sync=False))
        self._measure_put(DURABLE, 1, lambda these: self._put(these, SYNCED, sync=True))
        with subject.spending():
            self._engine.flush()
            self._engine.close()
        taken = occupied(self._folder) / (data.blocks * data.block_bytes)
        subject.space = max(subject.space, taken)
        _drop_cache(self._folder)
        self._reopen()
        data.time(subject.row(COLD), self._threads, self._get)
        data.time_copy(subject.copies)
        data.time(subject.row(WARM), self._threads, self._get)
        self._engine.close()

    def _measure_put(
        self, operation: str, threads: int, act: Callable[[Sequence[int]], None]
    ) -> None:
        fresh = self._next_version()
        with self.subject.spending():
            self._engine.delete_many(self._blocks, Leaving.EVICTED)
            self._blocks = fresh
            self._data.time(self.subject.row(operation), threads, act)
        self.subject.put_bytes += self._data.blocks * self._data.block_bytes

    def _reopen(self) -> None:
        self._engine.open()
        held = self._blocks
        self._engine.claim(held.places, held.lengths, held.generations, complete=True)

    def _next_version(self) -> Blocks:
        """Return the blocks of the next version, their headers encoded into the images."""
        data, first = self._data, self._generation + 1
        self._generation += data.blocks
        keys = np.arange(data.blocks, dtype=np.uint64).repeat(4).view(np.uint8).reshape(-1, 32)
        for number, image in enumerate(data.sources):
            header = record.Header(
                store=STORE, namespace=NAMESPACE, shard=0, key=keys[number].tobytes(), parent=b"",
                generation=first + number, written_ns=0, logical_length=data.block_bytes,
                stored_length=data.block_bytes, checksum=data.sums[number],
            )  # fmt: skip
            record.encode_into(header, image[:PAGE])
        return Blocks(
            NAMESPACE,
            0,
            keys,
            np.full(data.blocks, data.block_bytes, np.uint32),
            np.arange(first, first + data.blocks, dtype=np.uint64),
            np.zeros(data.blocks, np.uint64),
        )

    def _put(self, numbers: Sequence[int], count: int, *, sync: bool) -> None:
        for batch in _batches(numbers, count):
            images = [self._data.sources[number] for number in batch.tolist()]
            done = self._engine.put_many(self._blocks.take(batch), images, sync=sync)
            if (done.statuses != Status.OK).any():
                raise WrongBytes(f"{self.subject.name}: a block was not written")
            self._blocks.places[batch] = done.places

    def _get(self, numbers: Sequence[int]) -> None:
        for batch in _batches(numbers, BATCH):
            images = [self._data.targets[number] for number in batch.tolist()]
            read = self._engine.get_many_into(self._blocks.take(batch), images)
            if (read.statuses != Status.OK).any():
                raise WrongBytes(f"{self.subject.name}: a block is not there")

    def close(self) -> None:
        self._engine.close()


def _batches(numbers: Sequence[int], count: int) -> Iterator[np.ndarray]:
    for start in range(0, len(numbers), count):
        yield np.array(numbers[start : start + count])


def _drop_cache(folder: Path) -> None:
    """Have the page cache forget the files below a folder, which nobody maps now."""
    for where, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(os.path.join(where, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


# -- the run --------------------------------------------------------------------------------------


def run(plan: Plan, note: Callable[[str], None]) -> dict[str, Any]:
    """Measure; return a document. Raises UsageError, WrongBytes and what engines raise."""
    folder = plan.directory / FOLDER
    names, missing = _loadable(plan.engines)
    _check(plan, len(names) * (1 + plan.parity))
    found: dict[str, Any] = {
        "bench": "engines",
        "data_bytes": plan.data_bytes,
        "rounds": plan.rounds,
        "threads": plan.threads,
        "sizes": [],
        "not_measured": missing,
    }
    for block_bytes in plan.sizes:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            found["environment"] = environment.describe(folder)
            data = _Data(plan, block_bytes)
            subjects = _measure(plan, names, data, folder, note)
            found["huge_pages"] = data.target.huge_bytes >= data.target.capacity // 2
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        found["sizes"].append(document(block_bytes, data.blocks, subjects))
    return found


def _check(plan: Plan, engines: int) -> None:
    for size in plan.sizes:
        if size % PAGE:
            raise UsageError(
                f"blocks of {size} bytes cannot be moved with O_DIRECT", "give a multiple of 4096"
            )
        if plan.data_bytes < LEAST_BLOCKS * size:
            raise UsageError(
                f"{plan.data_bytes} bytes of data are too few for blocks of {size}", "give more"
            )
    wanted = (SPARE * engines + 1) * plan.data_bytes
    if shutil.disk_usage(plan.directory.parent).free < wanted:
        raise UsageError(f"{plan.directory} has too little room", "give less data or fewer engines")


def _loadable(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names to measure and, where none were given, why others cannot be."""
    if names:
        for name in names:
            engine_class(name)
        return list(names), []
    found, missing = list(ALIASES), list[str]()
    for name in engine_names():
        try:
            if engine_class(name).capabilities.persistent:
                found.append(name)
        except EngineError as error:
            missing.append(f"{error.message}; {error.hint}")
    return sorted(found), missing


def _measure(
    plan: Plan, names: Sequence[str], data: _Data, folder: Path, note: Callable[[str], None]
) -> list[Subject]:
    size, rng = render.size(data.block_bytes), random.Random(9)
    reference, copies = _Reference(data, folder / "reference"), Subject(COPY)
    engines = []
    try:
        for name in names:
            note(f"blocks of {size}: filling {name}")
            engines.append(_Engine(plan, data, folder / name, name))
            if plan.parity:
                engines.append(_Engine(plan, data, folder / f"{name}-parity", name, parity=True))
        for number in range(plan.rounds):
            rng.shuffle(data.order)
            note(f"blocks of {size}: round {number + 1} of {plan.rounds}")
            reference.measure()
            for engine in engines:
                engine.measure()
    finally:
        reference.close()
        for engine in engines:
            engine.close()
    subjects = [engine.subject for engine in engines]
    copies.rows[WARM] = joined(WARM, [subject.copies for subject in subjects])
    return [copies, *reference.subjects.values(), *subjects]

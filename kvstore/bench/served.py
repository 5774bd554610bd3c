"""What is measured of kvstore: a daemon of its own for each, or the same store without a daemon."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from kvstore import render
from kvstore.answers import Ack
from kvstore.batch import PutRequest
from kvstore.bench.daemon import Daemon, capacity_for
from kvstore.bench.subjects import Subject, drop_cached
from kvstore.bench.workload import BLOCKS, PAGE
from kvstore.errors import KVStoreError
from kvstore.keys import key_array, named, namespace_id
from kvstore.opening import BOUNCE_BYTES, Options, open_store
from kvstore.pages import round_up

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.bench.workload import U8, Model, Workload
    from kvstore.client import Client
    from kvstore.keys import KeyArray

MODES = {"set": "written", "set deferred": "accepted"}
PART_BYTES = 32 << 20


def memory_for(model: Model) -> int:
    """Return a memory tier for all blocks, a task on its way, and half as much again."""
    return max(int(1.5 * (BLOCKS + 64) * (round_up(model.block_bytes, PAGE) + PAGE)), 64 << 20)


def capacity_of(model: Model) -> int:
    """Return a capacity for all blocks, as many new ones, and their versions on the way out."""
    return max(capacity_for(3 * BLOCKS, model.block_bytes), memory_for(model))


def keys_of(names: Sequence[str]) -> list[bytes]:
    return [bytes.fromhex(name) for name in names]


def _note(name: str, io: str, memory: int) -> str:
    if io == "direct" and not memory:
        return (
            f"{name} reads with O_DIRECT, so its warm reads come from the disk like the cold ones"
        )
    return f"{name}: io {io}, {render.size(memory)} of memory for blocks"


class Served(Subject):
    """A daemon with ``engine`` and ``memory`` bytes of memory tier, and one blocking client."""

    modes = tuple(MODES)
    new_keys = True
    streams = True

    def __init__(
        self, name: str, folder: Path, workload: Workload, engine: str, memory: int, io: str
    ) -> None:
        super().__init__(folder, workload)
        self.name = name
        self.chills = engine != "memory"
        self._memory = memory
        self._stack = ExitStack()
        self._options = ("--engine", engine, "--io", io)

    def open(self) -> None:
        capacity = capacity_of(self.workload.model)
        daemon = Daemon(self.folder, capacity, self._memory, options=self._options)
        self._daemon = self._stack.enter_context(daemon)
        self._daemon.start()
        self.daemon_cpu = self._daemon.cpu_seconds
        self._client: Client = self._stack.enter_context(self._daemon.client())
        self.note = _note(self.name, str(self._client.status()["io"]), self._memory)

    def _count(self, name: str) -> int:
        value = self._client.status()[name]
        assert isinstance(value, int)
        return value

    def put(self, names: Sequence[str], numbers: Sequence[int], mode: str) -> int:
        blocks = [self.workload.source[number] for number in numbers]
        statuses = self._client.put_from(keys_of(names), blocks, ack=MODES[mode], overwrite=True)
        return int(np.count_nonzero(statuses))

    def drain(self) -> None:
        self._client.flush()  # what could not be written is missing in the bytes written

    def get(self, names: Sequence[str], numbers: Sequence[int], targets: Sequence[U8]) -> int:
        return int(np.count_nonzero(self._client.get_into(keys_of(names), targets)))

    def stream_get(
        self, names: Sequence[str], numbers: Sequence[int], targets: Sequence[U8]
    ) -> int:
        missing = 0
        for position, _, view in self._client.stream_get(keys_of(names)):
            if view is None:
                missing += 1
            else:
                np.copyto(targets[position], np.frombuffer(view, np.uint8))
        return missing

    def delete(self, names: Sequence[str]) -> None:
        self._client.delete(keys_of(names))

    def chill(self) -> None:
        if self._memory:
            if self._daemon.stop():
                raise KVStoreError("the daemon did not stop cleanly", self._daemon.advice)
            self._daemon.start()
            self._client.status()  # connects
        drop_cached(self._daemon.store / "blocks")

    def close(self) -> None:
        self._stack.close()

    def memory_hits(self) -> int:
        return self._count("memory_hits")

    def written_before(self) -> int:
        return self._count("written_bytes")

    def written_bytes(self, numbers: Sequence[int], before: int) -> int:
        return self._count("written_bytes") - before


class Opened(Subject):
    """The same store in this process and thread: what is left without daemon and client."""

    modes = ("set",)
    new_keys = True

    def __init__(
        self, name: str, folder: Path, workload: Workload, engine: str, memory: int, io: str
    ) -> None:
        super().__init__(folder, workload)
        self.name = name
        self.chills = engine != "memory"
        capacity = capacity_of(workload.model)
        self._options = Options(engine, capacity, 0, "auto", io, memory, BOUNCE_BYTES)
        self._open = False

    def open(self) -> None:
        self._store = open_store(self.folder / "store", self._options)
        self._open = True
        found = self._store.core.namespaces.by_id(namespace_id(named("default")))
        assert found is not None
        self._namespace = found
        self.note = _note(self.name, self._store.core.stats.io, self._options.memory_bytes)

    def put(self, names: Sequence[str], numbers: Sequence[int], mode: str) -> int:
        keys = key_array(keys_of(names))
        step = max(1, PART_BYTES // self.workload.model.block_bytes)
        parts = [slice(at, at + step) for at in range(0, len(numbers), step)]
        return sum(self._put(keys[part], numbers[part]) for part in parts)

    def _put(self, keys: KeyArray, numbers: Sequence[int]) -> int:
        lengths = np.full(len(keys), self.workload.model.block_bytes, np.uint32)
        request = PutRequest(self._namespace, 0, keys, lengths, level=Ack.WRITTEN, overwrite=True)
        job = self._store.put(request, [self.workload.source[number].data for number in numbers])
        self._store.run(job)
        return int(np.count_nonzero(job.statuses))

    def drain(self) -> None:
        flush = self._store.flush()
        self._store.run_chores()
        if flush.failure is not None:
            raise flush.failure

    def get(self, names: Sequence[str], numbers: Sequence[int], targets: Sequence[U8]) -> int:
        keys, views = key_array(keys_of(names)), [target.data for target in targets]
        done = missing = 0
        while done < len(keys):
            job = self._store.get(self._namespace, 0, keys[done:], PART_BYTES, views[done:])
            self._store.run(job)
            missing += int(np.count_nonzero(job.statuses))
            done += job.count
            job.close()
        return missing

    def delete(self, names: Sequence[str]) -> None:
        _, removals = self._store.delete(self._namespace, 0, key_array(keys_of(names)))
        for removal in removals:
            self._store.run(removal)

    def chill(self) -> None:
        if self._options.memory_bytes:
            self.close()
            self.open()
        drop_cached(self.folder / "store" / "blocks")

    def close(self) -> None:
        if self._open:
            self._open = False
            self._store.drain()
            self._store.close()

    def memory_hits(self) -> int:
        return self._store.core.counters.memory_hits

    def written_before(self) -> int:
        return self._store.core.counters.written_bytes

    def written_bytes(self, numbers: Sequence[int], before: int) -> int:
        return self._store.core.counters.written_bytes - before

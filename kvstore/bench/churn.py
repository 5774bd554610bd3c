"""``kvstore bench churn``: what each engine makes of its disk when blocks come and go for long.

A store without a daemon takes several times its capacity in blocks of seven sizes at random, and
evicts what it must. From the second capacity on the directory is measured, as ``du`` does: how many
bytes it takes for each live byte is what an engine's ``space_factor`` stands for. At the end every
block that the store says it has is read and compared.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore import render
from kvstore.answers import Ack, BlockStatus
from kvstore.backends import engine_class, engine_names
from kvstore.batch import PutRequest
from kvstore.errors import EngineError, KVStoreError, UsageError
from kvstore.keys import key_array, named, namespace_id
from kvstore.opening import Options, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvstore.store import Store

SIZES = (65_536, 147_456, 294_912, 458_752, 589_824, 1_310_720, 2_097_152)
BATCH = 8
SEED = 20
MIB = 1 << 20
KEY_BYTES = 32
MEASURE_EVERY = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """``times`` the capacity (bytes) is written to a store below ``directory``."""

    capacity: int
    times: int
    engines: Sequence[str]
    directory: Path


class Churn:
    """One store under load. Blocks are numbered; a number tells the block's size and bytes."""

    def __init__(self, store: Store, path: Path) -> None:
        self._store, self._path = store, path
        found = store.core.namespaces.by_id(namespace_id(named("default")))
        assert found is not None
        self._namespace = found
        rng = np.random.default_rng(SEED)
        self._pool = memoryview(rng.bytes(2 * max(SIZES)))
        self._sizes = rng.choice(SIZES, 1 << 20)
        self.count = self.payload = self.refused = 0
        self.factor = self.physical = 0.0
        self.live = float("inf")

    def _block(self, number: int) -> memoryview:
        start = number * 4099 % max(SIZES)
        return self._pool[start : start + int(self._sizes[number])]

    def put(self) -> None:
        """Put the next batch and let the store do what is due."""
        numbers = range(self.count, self.count + BATCH)
        keys = key_array([_key(number) for number in numbers])
        lengths = self._sizes[list(numbers)].astype(np.uint32)
        job = self._store.put(
            PutRequest(self._namespace, 0, keys, lengths, level=Ack.WRITTEN),
            [self._block(number) for number in numbers],
        )
        self._store.run(job)
        self._store.tick()
        self._store.run_chores()
        self.count += BATCH
        self.payload += int(lengths.sum())
        self.refused += int(np.count_nonzero(job.statuses))

    def measure(self) -> None:
        """Note how much is taken, if it is the most so far, and is live, if it is the least."""
        taken, live = occupied(self._path), self._store.core.index.live_bytes
        self.physical = max(self.physical, taken)
        self.live = min(self.live, live)
        self.factor = max(self.factor, taken / max(live, 1))

    def check(self) -> int:
        """Read what is held; return how many blocks. Raises KVStoreError for a wrong one."""
        keys = key_array([_key(number) for number in range(self.count)])
        held = np.flatnonzero(self._store.contains(self._namespace, 0, keys)).tolist()
        for number in held:
            key = keys[number]
            job = self._store.get(self._namespace, 0, key[None], 4 * max(SIZES))
            self._store.run(job)
            good = job.statuses[0] == BlockStatus.OK and job.payload(0) == self._block(number)
            job.close()
            if not good:
                raise KVStoreError(f"block {key.tobytes().hex()} came back wrong", "report this")
        return len(held)


def _key(number: int) -> bytes:
    return number.to_bytes(8, "little") + bytes(KEY_BYTES - 8)


def occupied(directory: Path) -> int:
    """Return the bytes that all below a directory takes on the device, as ``du`` counts them."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


def written() -> int:
    """Return the bytes that this process has had written to devices (proc_pid_io(5))."""
    found = Path("/proc/self/io").read_text().split("write_bytes: ")[1]
    return int(found.split()[0])


def run(plan: Plan, note: Callable[[str], None]) -> dict[str, Any]:
    """Measure and return a document that JSON can hold."""
    if plan.times < 2:
        raise UsageError("the first capacity is not measured", "write it twice or more")
    names = plan.engines or [name for name in engine_names() if _usable(name)]
    rows = []
    for name in names:
        note(f"engine {name}")
        rows.append(_row(name, plan))
    return {"bench": "churn", "capacity": plan.capacity, "times": plan.times, "rows": rows}


def _usable(name: str) -> bool:
    try:
        return engine_class(name).capabilities.persistent
    except EngineError:
        return False


def _row(name: str, plan: Plan) -> dict[str, Any]:
    path = plan.directory / f"bench-churn-{name}"
    path.parent.mkdir(parents=True, exist_ok=True)
    store = open_store(path, Options(name, plan.capacity, 0, memory_bytes=0))
    try:
        return _churn(name, plan, Churn(store, path))
    finally:
        store.drain()
        store.close()
        shutil.rmtree(path)


def _churn(name: str, plan: Plan, churn: Churn) -> dict[str, Any]:
    begun, cpu, started = written(), time.process_time(), time.monotonic()
    while churn.payload < plan.times * plan.capacity:
        churn.put()
        if churn.payload > plan.capacity and churn.count // BATCH % MEASURE_EVERY == 0:
            churn.measure()
    seconds = time.monotonic() - started
    return {
        "engine": name,
        "declared_factor": engine_class(name).capabilities.space_factor,
        "most_factor": churn.factor,
        "most_of_capacity": churn.physical / plan.capacity,
        "least_live_of_capacity": churn.live / plan.capacity,
        "write_amplification": (written() - begun) / churn.payload,
        "mib_per_second": churn.payload / MIB / seconds,
        "cpu_seconds_per_gib": (time.process_time() - cpu) / churn.payload * (1 << 30),
        "blocks": churn.count,
        "refused": churn.refused,
        "held": churn.check(),
    }


HEAD = (
    "engine",
    "physical/live",
    "declared",
    "of capacity",
    "live",
    "written/put",
    "MiB/s",
    "CPU s/GiB",
    "refused",
)


def lines(result: Mapping[str, Any]) -> list[str]:
    """Return the whole result as text."""
    rows = [
        (
            row["engine"],
            f"{row['most_factor']:.2f}",
            f"{row['declared_factor']:.1f}",
            f"{row['most_of_capacity']:.0%}",
            f"{row['least_live_of_capacity']:.0%}",
            f"{row['write_amplification']:.2f}",
            f"{row['mib_per_second']:,.0f}",
            f"{row['cpu_seconds_per_gib']:.1f}",
            f"{row['refused']} of {row['blocks']}",
        )
        for row in result["rows"]
    ]
    size = render.size(result["capacity"])
    head = f"stores of {size}, {result['times']} times that written, every block held was right"
    return [head, *render.table(HEAD, rows)]

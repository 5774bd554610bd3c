"""The demonstration: a daemon on a demo store, blocks in and out, a kill, a restart, the same hits.

The daemon is the real command in a process of its own. Every block is compared byte for byte. Times
are of one run on this machine; the ratio to a copy in memory of the same blocks is what counts. For
models that are named, tables 2 and 3 come first, with as many rounds as fit into five minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.bench import tables
from kvstore.bench.daemon import (
    SPARE_BYTES,
    Daemon,
    capacity_for,
    check_machine,
    folder_of_our_own,
)
from kvstore.client import Client, raise_for
from kvstore.errors import KVStoreError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Any

KEY_BYTES = 32
MEMORY_BYTES = 256 << 20
BATCH_BYTES = 32 << 20
TABLE_SECONDS = 105.0
"""For each of two tables; with what follows that is less than five minutes."""

Tell = Callable[[str], None]
Pool = npt.NDArray[np.uint8]
"""All blocks, shape (blocks, block_bytes)."""


@dataclass(frozen=True)
class Plan:
    """What to do: so many blocks of so many bytes, in a directory that is removed afterwards."""

    blocks: int
    block_bytes: int
    directory: Path
    keep: bool = False
    models: Sequence[str] = ()

    @property
    def tables(self) -> list[tables.Plan]:
        """The tables to measure first."""
        how = {"models": self.models, "directory": self.directory, "seconds": TABLE_SECONDS}
        return [tables.Plan(number, **how) for number in (2, 3) if self.models]  # type: ignore[arg-type]

    @property
    def total_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def batches(self) -> list[slice]:
        """The blocks in runs of at most 32 MiB: what one request carries."""
        step = max(1, BATCH_BYTES // self.block_bytes)
        return [slice(start, start + step) for start in range(0, self.blocks, step)]

    @property
    def capacity(self) -> int:
        return capacity_for(self.blocks, self.block_bytes)


@dataclass
class Report:
    """What came out. ``seconds`` of each step; rates follow from ``total_bytes``."""

    plan: Plan
    io: str = ""
    tables: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    hits_after_kill: int = 0
    exit_code: int = -1

    def document(self) -> Mapping[str, object]:
        return {
            "blocks": self.plan.blocks,
            "block_bytes": self.plan.block_bytes,
            "io": self.io,
            "tables": self.tables,
            "seconds": self.seconds,
            "hits_after_kill": self.hits_after_kill,
            "exit_code": self.exit_code,
        }


def run(plan: Plan, tell: Tell) -> Report:
    """Do the whole demonstration. Raises KVStoreError."""
    check_room(plan)
    started = time.monotonic()
    with folder_of_our_own(plan.directory, plan.keep):
        report = Report(plan)
        report.tables = [tables.measure(table, tell) for table in plan.tables]
        tell(f"making {plan.blocks} random blocks")
        begun = time.monotonic()
        keys, pool = make_blocks(plan)
        report.seconds["copy"] = time_copy(pool)
        report.seconds["make"] = time.monotonic() - begun - report.seconds["copy"]
        with Daemon(plan.directory, plan.capacity, MEMORY_BYTES) as daemon:
            tell("starting the daemon")
            report.seconds["start"] = daemon.start()
            exercise(daemon, keys, pool, report, tell)
            tell("killing the daemon (SIGKILL) and starting it again")
            daemon.kill()
            report.seconds["restart"] = daemon.start()
            look_again(daemon, keys, pool, report, tell)
            tell("stopping the daemon (SIGTERM)")
            begun = time.monotonic()
            report.exit_code = daemon.stop()
            report.seconds["stop"] = time.monotonic() - begun
        if report.exit_code != 0:
            raise KVStoreError(
                f"the daemon ended with {report.exit_code} after SIGTERM", daemon.advice
            )
        report.seconds["whole"] = time.monotonic() - started
        return report


def exercise(daemon: Daemon, keys: list[bytes], pool: Pool, report: Report, tell: Tell) -> None:
    """Put every block and get it back."""
    with daemon.client() as client:
        report.io = str(client.status().get("io"))
        tell("putting the blocks, each answered when engine and journal have it")
        begun = time.monotonic()
        for part in report.plan.batches:
            statuses = client.put_many(keys[part], [row.data for row in pool[part]], ack="written")
            for key, status in zip(keys[part], statuses, strict=True):
                raise_for(key, int(status))
        report.seconds["put"] = time.monotonic() - begun
        tell("getting them back")
        report.seconds["get"] = get_all(client, report, keys, pool)


def look_again(daemon: Daemon, keys: list[bytes], pool: Pool, report: Report, tell: Tell) -> None:
    """Find and get every block after the daemon was killed."""
    with daemon.client() as client:
        found = client.contains(keys)
        report.hits_after_kill = int(np.count_nonzero(found))
        if report.hits_after_kill != len(keys):
            raise KVStoreError(
                f"only {report.hits_after_kill} of {len(keys)} blocks are hits after the kill"
            )
        tell("all are hits; getting them again")
        report.seconds["get_after_kill"] = get_all(client, report, keys, pool)


def get_all(client: Client, report: Report, keys: list[bytes], pool: Pool) -> float:
    """Get every block, compare it, and return the seconds without the comparisons."""
    seconds, started = 0.0, time.monotonic()
    for part in report.plan.batches:
        begun = time.monotonic()
        found = client.get_many(keys[part])
        seconds += time.monotonic() - begun
        for key, data, block in zip(keys[part], found, pool[part], strict=True):
            if data is None:
                raise KVStoreError(f"block {key.hex()} is a miss")
            if not np.array_equal(np.frombuffer(data, np.uint8), block):
                raise KVStoreError(f"block {key.hex()} came back with other bytes")
    comparing = time.monotonic() - started - seconds
    report.seconds["compare"] = report.seconds.get("compare", 0.0) + comparing
    return seconds


def make_blocks(plan: Plan) -> tuple[list[bytes], Pool]:
    """Return random keys and blocks; random, so that nothing on the way can compress them."""
    random = np.random.default_rng(2026)
    keys = [random.bytes(KEY_BYTES) for _ in range(plan.blocks)]
    pool = np.empty((plan.blocks, plan.block_bytes), np.uint8)
    for block in pool:
        block[:] = np.frombuffer(random.bytes(plan.block_bytes), np.uint8)
    return keys, pool


def time_copy(pool: Pool) -> float:
    """Return the seconds that one thread needs to copy the blocks in memory, in random order.

    The target's pages have been touched before, as those of a pool in use have.
    """
    target = np.ones_like(pool)
    order = np.random.default_rng(1).permutation(len(pool))
    begun = time.monotonic()
    for number in order:
        np.copyto(target[number], pool[number])
    return time.monotonic() - begun


def check_room(plan: Plan) -> None:
    """Refuse to start where the disk or the memory is too small. Raises UsageError."""
    for table in plan.tables:
        table.check()
    check_machine(
        plan.directory,
        plan.capacity + SPARE_BYTES,
        2 * plan.total_bytes + 2 * MEMORY_BYTES,
        "ask for less with --blocks",
    )

"""The demonstration: a daemon on a demo store, blocks in and out, a kill, a restart, the same hits.

The daemon is the real command in a process of its own. Every block is compared byte for byte. Times
are of one run on this machine; the ratio to a copy in memory of the same blocks is what counts.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.client import Client, raise_for
from kvstore.errors import DaemonUnavailable, KVStoreError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY_BYTES = 32
RECORD_OVERHEAD = 8192
"""Header page and padding of one record, at most."""
MEMORY_BYTES = 256 << 20
SPARE_BYTES = 512 << 20
TIME_LIMIT = 300.0
READY_LIMIT = 60.0
BATCH_BYTES = 32 << 20
OURS = {"store", "kv.sock", "daemon.log"}

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
        """Room for all records below the watermark of 95 %, with a tenth to spare."""
        return max(
            64 << 20, int(self.blocks * (self.block_bytes + RECORD_OVERHEAD) * 1.2) + (32 << 20)
        )


@dataclass
class Report:
    """What came out. ``seconds`` of each step; rates follow from ``total_bytes``."""

    plan: Plan
    io: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    hits_after_kill: int = 0
    exit_code: int = -1

    def document(self) -> Mapping[str, object]:
        return {
            "blocks": self.plan.blocks,
            "block_bytes": self.plan.block_bytes,
            "io": self.io,
            "seconds": self.seconds,
            "hits_after_kill": self.hits_after_kill,
            "exit_code": self.exit_code,
        }


def run(plan: Plan, tell: Tell) -> Report:
    """Do the whole demonstration. Raises KVStoreError."""
    check_machine(plan)
    started = time.monotonic()
    with demo_directory(plan):
        report = Report(plan)
        tell(f"making {plan.blocks} random blocks")
        begun = time.monotonic()
        keys, pool = make_blocks(plan)
        report.seconds["copy"] = time_copy(pool)
        report.seconds["make"] = time.monotonic() - begun - report.seconds["copy"]
        with Daemon(plan) as daemon:
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


def check_machine(plan: Plan) -> None:
    """Refuse to start where the disk or the memory is too small. Raises UsageError."""
    parent = plan.directory.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"{parent} is no directory", "name one with --dir")
    free = os.statvfs(parent)
    disk, wanted = free.f_bavail * free.f_frsize, plan.capacity + SPARE_BYTES
    if disk < wanted:
        raise UsageError(
            f"{parent} has {disk >> 20} MiB free, the demo needs {wanted >> 20}",
            "make room, name another place with --dir, or ask for less with --blocks",
        )
    needed = 2 * plan.total_bytes + 2 * MEMORY_BYTES
    memory = available_memory()
    if memory < needed:
        raise UsageError(
            f"{memory >> 20} MiB of memory are free, the demo needs {needed >> 20}",
            "ask for less with --blocks",
        )


def available_memory() -> int:
    """Return the bytes that could be allocated now without swapping, as the kernel estimates."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def demo_directory(plan: Plan) -> Iterator[None]:
    """Make the demo's directory, and remove it afterwards unless it is to be kept."""
    directory = plan.directory
    if directory.exists():
        strange = {path.name for path in directory.iterdir()} - OURS
        if strange:
            raise UsageError(
                f"{directory} holds other things ({', '.join(sorted(strange)[:3])})",
                "name another place with --dir",
            )
        shutil.rmtree(directory)
    directory.mkdir()
    try:
        yield
    finally:
        if not plan.keep:
            shutil.rmtree(directory, ignore_errors=True)


class Daemon:
    """The daemon's process, by the real command. Killed on the way out, whatever happened."""

    def __init__(self, plan: Plan) -> None:
        self._folder = plan.directory
        self._capacity = plan.capacity
        self._deadline = time.monotonic() + TIME_LIMIT
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def socket(self) -> str:
        # Relative where it can be: the path of a socket may have 107 bytes only.
        path = self._folder / "kv.sock"
        return os.path.relpath(path) if len(os.fsencode(path.absolute())) > 100 else str(path)

    @property
    def advice(self) -> str:
        lines = (self._folder / "daemon.log").read_text(errors="replace").splitlines()
        return "the daemon's last words: " + " | ".join(lines[-3:]) if lines else ""

    def client(self) -> Client:
        return Client(self.socket, timeout=max(1.0, self._deadline - time.monotonic()))

    def start(self) -> float:
        """Start the daemon and return the seconds until it is ready."""
        command = [
            *command_of_this_installation(),
            *("--socket", self.socket, "serve", "--store", str(self._folder / "store")),
            *("--engine", "filesystem", "--capacity", str(self._capacity)),
            *("--memory", str(MEMORY_BYTES), "--min-free", str(SPARE_BYTES // 2)),
        ]
        environment = {n: v for n, v in os.environ.items() if not n.startswith("KVSTORE_")}
        begun = time.monotonic()
        with (self._folder / "daemon.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        while time.monotonic() < begun + READY_LIMIT:
            if self._process.poll() is not None:
                raise KVStoreError(f"the daemon ended with {self._process.returncode}", self.advice)
            if self._is_ready():
                return time.monotonic() - begun
            time.sleep(0.005)
        raise KVStoreError(f"the daemon is not ready after {READY_LIMIT:g} s", self.advice)

    def _is_ready(self) -> bool:
        try:
            with self.client() as client:
                state = client.status()["state"]
        except DaemonUnavailable:
            return False
        if state == "degraded":
            raise KVStoreError("the store is degraded", self.advice)
        return state == "ready"

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> int:
        """Stop the daemon as a service manager would; return its exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(70)
        self._process = None
        return code


def command_of_this_installation() -> list[str]:
    """Return how to run ``kvstore`` as installed beside this interpreter."""
    script = Path(sys.executable).with_name("kvstore")
    if not script.exists():
        raise UsageError(f"{script} is not there", "install kvstore into this environment")
    return [str(script)]

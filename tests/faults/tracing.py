"""strace on a running child: it dies before its n-th call, or calls of it fail.

strace 6.1 counts calls for each thread and each call apart. It is attached when the phase begins,
so that nothing before counts.
"""

from __future__ import annotations

import os
import random
import re
import resource
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.drive import Choice

DATA = ("write", "pwrite64", "pwritev", "pwritev2")
SYNCS = ("fsync", "fdatasync", "msync", "syncfs", "sync_file_range")
NAMES = ("openat", "mkdir", "mkdirat", "rename", "renameat", "renameat2", "unlink", "unlinkat")
SPACE = ("fallocate", "ftruncate")
READS = ("pread64", "preadv", "preadv2", "read")
CALLS = (*DATA, *SYNCS, *NAMES[1:], *SPACE)
"""Before which of them a kill comes."""
ERRORS: dict[str, tuple[str, ...]] = {
    "EIO": (*DATA, *SYNCS),
    "EIO reading": READS,
    "EIO once, sync": SYNCS,
    "ENOSPC": (*DATA, *SPACE, "mkdir", "mkdirat", "openat"),
    "EDQUOT": (*DATA, *SPACE, *SYNCS),
    "EROFS": (*NAMES, *SPACE),
    "EMFILE": ("openat",),
    "EFBIG": (*DATA, *SPACE),
    "stall": (*DATA, *SYNCS),
}
FAULTS = (*ERRORS, "short write", "limit")
PATIENCE = 120.0
STALL_MICROSECONDS = 60_000


@dataclass(frozen=True)
class Fault:
    """What happens to a child: strace's word for it, if it is strace that does it."""

    name: str
    inject: str = ""
    calls: tuple[str, ...] = ()


def kill(chance: random.Random, most: int) -> Fault:
    """Return a kill before the n-th call, n up to ``most``: of one kind, or of any."""
    calls = CALLS if chance.random() < 0.4 else chance.sample(CALLS, 3)
    number = min(chance.randint(1, most), chance.randint(1, most))
    return Fault("kill", f"signal=SIGKILL:when={number}", tuple(calls))


def failure(name: str, chance: random.Random) -> Fault:
    """Return one of FAULTS, at a random call: once, some times, or from there on."""
    if name not in ERRORS:
        return Fault(name)
    number = chance.randint(1, 12)
    when = chance.choice((f"{number}", f"{number}..{number + 3}", f"{number}+", f"{number}+3"))
    if "once" in name:
        when = f"{number}"
    if name == "stall":
        return Fault(name, f"delay_enter={STALL_MICROSECONDS}:when={when}", ERRORS[name])
    return Fault(name, f"error={name.split()[0]}:when={when}", ERRORS[name])


class Tracer:
    """strace, attached to a child that waits for it. Use :meth:`attend` in the parent."""

    def __init__(self, fault: Fault, log: Path) -> None:
        self._fault, self._log = fault, log
        self._ready, self._told = os.pipe()

    def wait(self) -> None:
        """In the child: go on when strace is there."""
        os.write(self._told, b"r")
        until = time.monotonic() + PATIENCE
        # A call that fails here is strace's work already.
        with suppress(OSError):
            while b"TracerPid:\t0\n" in Path("/proc/self/status").read_bytes():
                if time.monotonic() > until:
                    raise RuntimeError("strace did not come")
                time.sleep(0.002)

    def attend(self, child: int) -> None:
        """In the parent: attach strace as soon as the child waits, and wait until it has left."""
        os.close(self._told)
        came = os.read(self._ready, 1)
        os.close(self._ready)
        if not came:
            return
        calls = ",".join(self._fault.calls)
        command = ["strace", "-f", "-qq", "-o", str(self._log), "-e", f"trace={calls}"]
        command += ["-e", f"inject={calls}:{self._fault.inject}", "-p", str(child)]
        strace = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        with suppress(subprocess.TimeoutExpired):
            strace.wait(3 * PATIENCE)
        strace.kill()
        strace.wait()

    @property
    def struck(self) -> bool:
        """Whether a call was injected."""
        text = self._log.read_text() if self._log.exists() else ""
        return "(INJECTED)" in text or "(DELAYED)" in text or "+++ killed" in text


def short_writes(chance: random.Random) -> None:
    """Have one write in five be short, for the rest of this process, as on a disk that is full."""
    for name in ("write", "pwrite", "pwritev"):
        setattr(os, name, _short(getattr(os, name), name, chance))


def _short(real: Callable[..., Any], name: str, chance: random.Random) -> Callable[..., Any]:
    def call(descriptor: int, data: Any, *rest: Any) -> Any:
        if chance.random() < 0.2:
            views = [memoryview(data)] if name != "pwritev" else [memoryview(one) for one in data]
            whole = views[0].cast("B")
            half = len(whole) // 8192 * 4096 or len(whole) // 2 or len(whole)
            data = whole[:half] if name != "pwritev" else [whole[:half]]
        return real(descriptor, data, *rest)

    return call


def limit_files(store: Path, chance: random.Random) -> None:
    """Let no file of this process grow much beyond the largest there is (EFBIG)."""
    largest = max(file.stat().st_size for file in store.rglob("*") if file.is_file())
    limit = largest + chance.randint(0, 1 << 17) - (1 << 16)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max(limit, 1 << 14), resource.RLIM_INFINITY))


POINTS = {
    "superblock": (
        *("put.begin", "put.blanked", "put.payload", "put.end", "delete.begin", "delete.end"),
        *("make.opened", "make.reserved", "make.headed", "make.renamed", "header.half"),
        *("reshape.blanked", "reshape.headed"),
    ),
    "lmdb": ("put.begin", "put.end"),
    "leveldb": ("put.begin", "put.end"),
}
MIGRATION = ("begun", "made", "flushed", "saved", "checkpoint", "checked", "finished", "switched")


def point(choice: Choice, chance: random.Random) -> str:
    """Return a kill point that the phase may pass, empty if there is none."""
    names = POINTS.get(choice.kind, ())
    if choice.phase == "migrate":
        names = (*(f"migrate.{name}" for name in MIGRATION), *POINTS.get(choice.target, ()))
    elif choice.phase in ("repair", "recover"):
        names = ()
    return chance.choice(names) if names else ""


def named_points(folder: Path) -> set[str]:
    """Return every kill point that the sources of kvstore name."""
    found = set()
    for path in folder.rglob("*.py"):
        found |= set(re.findall(r'\breach\("([a-z.]+)"\)', path.read_text()))
    return found

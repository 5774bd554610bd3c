"""A daemon to measure: the real command in a process of its own, in a folder that is removed."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.client import Client
from kvstore.errors import DaemonUnavailable, KVStoreError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

SPARE_BYTES = 512 << 20
"""Disk that stays free beside a store that is measured; the daemon's floor is half of it."""
RECORD_OVERHEAD = 8192
"""Header page and padding of one record, at most."""
READY_LIMIT = 60.0
STOP_LIMIT = 70.0
_C_LIBRARY = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
OURS = {"store", "daemon.log", "tables"}


class Daemon:
    """A daemon on ``folder``/store. Killed on the way out, whatever happened.

    ``capacity`` and ``memory`` are in bytes; ``options`` are further flags of ``kvstore serve``;
    ``timeout`` (seconds) is that of its clients.
    """

    def __init__(
        self,
        folder: Path,
        capacity: int,
        memory: int,
        *,
        options: Sequence[str] = (),
        timeout: float = 300.0,
    ) -> None:
        self._folder = folder
        self._flags = [
            *("--store", str(folder / "store"), "--capacity", str(capacity)),
            *("--memory", str(memory), "--min-free", str(SPARE_BYTES // 2), *options),
        ]
        self._timeout = timeout
        # Not in ``folder``: the path of a socket may have 107 bytes only.
        self._socket_folder = tempfile.TemporaryDirectory(prefix="kvstore-")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._socket_folder.cleanup()

    @property
    def store(self) -> Path:
        return self._folder / "store"

    @property
    def socket(self) -> str:
        return f"{self._socket_folder.name}/kv.sock"

    @property
    def advice(self) -> str:
        lines = (self._folder / "daemon.log").read_text(errors="replace").splitlines()
        return "the daemon's last words: " + " | ".join(lines[-3:]) if lines else ""

    def client(self, **how: int | bool | None) -> Client:
        """Return a client; ``how`` may set its ``staging_bytes`` and ``check``."""
        return Client(self.socket, self._timeout, **how)  # type: ignore[arg-type]

    def start(self) -> float:
        """Start the daemon and return the seconds until it is ready."""
        command = [*command_of_this_installation(), "--socket", self.socket, "serve", *self._flags]
        environment = {n: v for n, v in os.environ.items() if not n.startswith("KVSTORE_")}
        begun = time.monotonic()
        with (self._folder / "daemon.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                preexec_fn=_end_with_parent,
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

    def cpu_seconds(self) -> float:
        """Return the processor time that the daemon has used."""
        assert self._process is not None
        # The clock of another process, as clock_getcpuclockid(3) makes its number.
        return time.clock_gettime(~self._process.pid << 3 | 2)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> int:
        """Stop the daemon as a service manager would; return its exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(STOP_LIMIT)
        self._process = None
        return code


def _end_with_parent() -> None:
    """Have the kernel kill this process when the one that measures is killed: prctl(2)."""
    _C_LIBRARY.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def capacity_for(blocks: int, block_bytes: int) -> int:
    """Return a capacity with room for so many records below the watermark, and some to spare."""
    return max(64 << 20, int(blocks * (block_bytes + RECORD_OVERHEAD) * 1.2) + (32 << 20))


def check_machine(folder: Path, disk: int, memory: int, advice: str) -> None:
    """Refuse to start where there is less free than these bytes. Raises UsageError."""
    parent = folder.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"{parent} is no directory", "name one with --dir")
    found = os.statvfs(parent)
    free = found.f_bavail * found.f_frsize
    if free < disk:
        raise UsageError(
            f"{parent} has {free >> 20} MiB free, this needs {disk >> 20}",
            f"make room, name another place with --dir, or {advice}",
        )
    there = available_memory()
    if there < memory:
        raise UsageError(f"{there >> 20} MiB of memory are free, this needs {memory >> 20}", advice)


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
def folder_of_our_own(folder: Path, keep: bool = False) -> Iterator[None]:
    """Have ``folder`` empty and for us alone; remove it afterwards unless it is to be kept.

    Raises UsageError if it holds what no daemon of ours left there, or another run is using it.
    """
    folder.mkdir(exist_ok=True)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _claim(lock, folder)
        try:
            yield
        finally:
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _claim(lock: int, folder: Path) -> None:
    """Lock a folder and empty it of what an earlier run left."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"another run is using {folder}", "wait for it, or name another place with --dir"
        ) from None
    strange = {path.name for path in folder.iterdir()} - OURS
    if strange:
        raise UsageError(
            f"{folder} holds other things ({', '.join(sorted(strange)[:3])})",
            "name another place with --dir",
        )
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def command_of_this_installation() -> list[str]:
    """Return how to run ``kvstore`` as installed beside this interpreter."""
    script = Path(sys.executable).with_name("kvstore")
    if not script.exists():
        raise UsageError(f"{script} is not there", "install kvstore into this environment")
    return [str(script)]

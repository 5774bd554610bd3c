"""The lock of a store: one writer, or any number of readers."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from kvstore import files
from kvstore.errors import ConfigError, StoreLocked, StoreNotFound

_COMMAND_LENGTH = 120


class Lock:
    """An flock on the store's directory, signed in STORE/lock.

    The kernel lets go of it with the process, however that ends, so nothing is ever stale. It is on
    the directory itself, since a file in it can be removed and made anew under the holder. The text
    in the file (process id and command) is only for messages and never decides anything. The
    descriptors are closed on exec: children that are spawned do not hold the lock.
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        self._path = store / "lock"
        self._descriptor = -1
        self._text = -1
        self._exclusive = False

    def acquire(self, exclusive: bool) -> None:
        """Take the lock at once or raise StoreLocked, which says who holds it.

        A shared lock needs nothing but read access, so that a store on a read-only mount can be
        inspected. Whoever may write wants a directory that nobody else may write in.
        Raises ConfigError, PermissionDenied, ReadOnly, StoreNotFound, EngineError.
        """
        if self._descriptor >= 0:
            raise StoreLocked(f"this process already holds the lock of {self._store}", "release it")
        try:
            self._descriptor = self._open()
            if exclusive:
                files.check_private(self._descriptor, self._store)
            self._text = self._open_text(exclusive)
            self._take(exclusive)
        except OSError as error:
            self.release()
            raise files.translate(error, f"lock {self._path}") from error
        except ConfigError:
            self.release()
            raise
        self._exclusive = exclusive
        if exclusive:
            self._sign()

    def release(self) -> None:
        """Let go. May be called twice."""
        if self._descriptor < 0:
            return
        if self._exclusive:
            self._write_text(b"")
        if self._text >= 0:
            os.close(self._text)
        os.close(self._descriptor)
        self._descriptor, self._text, self._exclusive = -1, -1, False

    def _open(self) -> int:
        try:
            return os.open(self._store, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            raise StoreNotFound(f"there is no store at {self._store}", "check the path") from None

    def _open_text(self, exclusive: bool) -> int:
        """Open the file that says who we are; -1 for readers where there is none."""
        flags = os.O_NOFOLLOW | os.O_NONBLOCK
        if exclusive:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | flags, files.FILE_MODE)
        try:
            return os.open(self._path, os.O_RDONLY | flags)
        except FileNotFoundError:
            return -1

    def _take(self, exclusive: bool) -> None:
        mode = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        try:
            fcntl.flock(self._descriptor, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = self._holder()
            self.release()
            raise StoreLocked(
                f"the store at {self._store} is in use by {holder}",
                "ask the daemon that holds it, or stop it first (with systemd: its socket unit)",
            ) from None

    def _holder(self) -> str:
        """Name the process that holds the lock: as the kernel says, else as the file says."""
        pid = _flock_holder(os.fstat(self._descriptor))
        if pid:
            return f"process {pid} ({_command(pid) or 'command unknown'})"
        text = os.pread(self._text, 4 * _COMMAND_LENGTH, 0) if self._text >= 0 else b""
        signed, _, command = _plain(text).partition(" ")
        return f"process {signed} ({command})" if signed.isdigit() else "another process"

    def _sign(self) -> None:
        command = _command(os.getpid()) or "kvstore"
        self._write_text(f"{os.getpid()} {command}\n".encode())

    def _write_text(self, text: bytes) -> None:
        try:
            os.ftruncate(self._text, 0)
            os.pwrite(self._text, text, 0)
        except OSError:
            # A full disk must not keep anyone from opening the store; the text is only a courtesy.
            return


def _flock_holder(file: os.stat_result) -> int:
    """Return the process id that /proc/locks (proc(5)) gives for an flock on a file, or 0.

    A line: ``1: FLOCK ADVISORY WRITE 1234 fe:00:5678 0 EOF``. Waiting ones have ``->``.
    """
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return 0
    wanted = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    for line in lines:
        fields = line.split()
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == wanted:
            return max(int(fields[4]), 0)
    return 0


def _command(pid: int) -> str:
    try:
        return _plain(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return ""


def _plain(text: bytes) -> str:
    """Return text of another process as one short line that cannot play tricks on a terminal."""
    shown = "".join(c if c.isprintable() else " " for c in text.decode(errors="replace"))
    return " ".join(shown.split())[:_COMMAND_LENGTH]

"""The real command and a daemon of it, for tests that drive them as people and scripts do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

COMMAND = Path(sys.executable).with_name("kvstore")
READY_SECONDS = 30.0


@dataclass(frozen=True)
class Ran:
    """What a finished command left: exit code, raw stdout, stderr."""

    code: int
    stdout: bytes
    stderr: str

    @property
    def text(self) -> str:
        return self.stdout.decode()

    def json(self) -> dict[str, object]:
        value = json.loads(self.stdout)
        assert isinstance(value, dict)
        return value


def run_command(
    *arguments: str | Path,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 60.0,
) -> Ran:
    """Run the real command and return what it left."""
    done = subprocess.run(
        [COMMAND, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        env={**os.environ, **(env or {})},
        cwd=cwd,
        timeout=timeout,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr.decode())


@dataclass
class Daemon:
    """A daemon run by the real command, with its store and socket in ``folder``."""

    folder: Path
    options: Sequence[str] = ("--capacity", "256MiB", "--memory", "64MiB", "--min-free", "0")
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    ready_seconds: ClassVar[float] = READY_SECONDS

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def socket(self) -> Path:
        return self.folder / "kv.sock"

    @property
    def log(self) -> str:
        return (self.folder / "daemon.log").read_text()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def run(self, *arguments: str | Path, stdin: bytes = b"") -> Ran:
        """Run a client command against this daemon."""
        return run_command("--socket", self.socket, *arguments, stdin=stdin)

    def status(self) -> dict[str, object]:
        return self.run("status", "--json").json()

    def launch(self, *extra: str) -> None:
        """Start the daemon without waiting for it."""
        paths = ["--socket", str(self.socket), "serve", "--store", str(self.store)]
        command = [str(COMMAND), *paths, *self.options, *extra]
        with (self.folder / "daemon.log").open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=log)

    def start(self, *extra: str) -> None:
        """Start the daemon and wait until it is ready (or degraded)."""
        self.launch(*extra)
        deadline = time.monotonic() + self.ready_seconds
        while time.monotonic() < deadline:
            assert self.process is not None
            assert self.process.poll() is None, f"the daemon ended:\n{self.log}"
            if self.socket.exists():
                ran = self.run("status", "--json")
                if ran.code in (0, 1) and ran.json()["state"] in ("ready", "degraded"):
                    return
            time.sleep(0.02)
        raise AssertionError(f"the daemon is not ready:\n{self.log}")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the end, return the exit code (negative: killed by a signal)."""
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(70)
        self.process = None
        return code

"""Kills a recovery at any of its calls: a program that forks a child for each attempt.

For each line ``STEP STORE NEW`` on stdin (NEW is - for in place) it prints the exit code of a child
that died by 9 before its call number STEP, or ended with 0. It never opens an engine itself, since
a library's threads do not survive a fork.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CALLS = ("fsync", "fdatasync", "rename", "unlink", "rmdir", "mkdir", "pwrite", "write", "pwritev")


class Deaths:
    """The program, running."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.deaths"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def kill_at(self, step: int, store: Path, new: Path | None) -> bool:
        """Tell whether a recovery died at that step; else it got through."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{step} {store} {new or '-'}\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        assert code in (0, 9), code
        return code == 9

    def close(self) -> None:
        self._process.communicate(timeout=30)


def _arm(step: int) -> None:
    left = step

    def count(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if not left:
                os._exit(9)
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, count(getattr(os, name)))


def _attempt(step: int, store: Path, new: Path | None) -> int:
    from tests.ruins import recover

    child = os.fork()
    if not child:
        _arm(step)
        try:
            recover(store, new)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    for line in sys.stdin:
        step, store, new = line.split()
        code = _attempt(int(step), Path(store), None if new == "-" else Path(new))
        print(code, flush=True)


if __name__ == "__main__":
    main()

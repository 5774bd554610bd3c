"""Runs a Python program under strace and reads the order of its system calls off the log.

A call lasts from ``begin`` to ``end`` (line numbers of the log, which is in true order), so "A was
over before B began" is ``A.end < B.begin``, also between threads. Descriptors carry the path they
stand for: ``fsync(5</store/blocks/tmp/1f>)``.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_WHOLE = re.compile(r"(?P<thread>\d+) +(?P<name>\w+)\((?P<args>.*)\) += (?P<result>.*)")
_BEGUN = re.compile(r"(?P<thread>\d+) +(?P<name>\w+)\((?P<args>.*) <unfinished \.\.\.>")
_RESUMED = re.compile(
    r"(?P<thread>\d+) +<\.\.\. (?P<name>\w+) resumed>(?P<args>.*)\) += (?P<result>.*)"
)
_ARGUMENT = re.compile(r'\d+<(?P<descriptor>[^>]*)>|"(?P<text>[^"]*)"')


@dataclass(frozen=True, slots=True)
class Call:
    """One system call; ``paths`` are its descriptors' paths and its strings, in order."""

    name: str
    args: str
    result: str
    begin: int
    end: int

    @property
    def ok(self) -> bool:
        return not self.result.startswith("-1")

    @property
    def paths(self) -> list[str]:
        return [
            found["descriptor"] if found["text"] is None else found["text"]
            for found in _ARGUMENT.finditer(self.args)
        ]


def need_strace() -> None:
    """Skip the test where strace is missing or may not trace."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    probe = subprocess.run(["strace", "-qq", "-o", "/dev/null", "true"], capture_output=True)
    if probe.returncode != 0:
        pytest.skip(f"strace does not work here: {probe.stderr.decode().strip()}")


def run(
    program: str, log: Path, calls: str, *, arguments: Sequence[str] = (), inject: str = ""
) -> tuple[str, list[Call]]:
    """Run Python source under strace; return what it printed and its calls.

    ``calls`` is strace's list of names ("fsync,renameat"); ``inject`` a fault as in strace(1), for
    example "fsync:error=EIO:when=2", whose counter is for each thread. Fails the test if the
    program does.
    """
    need_strace()
    command = ["strace", "-f", "-y", "-qq", "-s", "400", "-o", str(log), "-e", f"trace={calls}"]
    command += ["-e", f"inject={inject}"] if inject else []
    # Stops at the wanted calls alone, ten times as fast; strace 6.1 then forgets signals.
    command += [] if "signal=" in inject else ["--seccomp-bpf"]
    command += [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, parse(log.read_text())


def parse(log: str) -> list[Call]:
    """Return the calls of an ``strace -f -y`` log in the order in which they began."""
    calls: list[Call] = []
    begun: dict[tuple[str, str], tuple[int, str]] = {}
    for number, line in enumerate(log.splitlines()):
        if found := _RESUMED.fullmatch(line):
            start, args = begun.pop((found["thread"], found["name"]))
            args += found["args"]
            calls.append(Call(found["name"], args, found["result"], start, number))
        elif found := _BEGUN.fullmatch(line):
            begun[found["thread"], found["name"]] = number, found["args"]
        elif found := _WHOLE.fullmatch(line):
            calls.append(Call(found["name"], found["args"], found["result"], number, number))
    return sorted(calls, key=lambda call: call.begin)

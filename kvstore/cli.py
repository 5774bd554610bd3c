"""The process ``kvstore``: its first moments and its end. The only room that ends the process.

The commands lie in ``commands/``. They are imported inside of :func:`main`, when Ctrl-C and closed
descriptors have been seen to: that import takes longer than a quick finger. What this file imports
itself is there as soon as Python is; ``signal`` and ``typing`` would take some 15 ms.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command line of this process and end with its exit code."""
    # Whoever starts us with the signal ignored, as nohup and a shell's & do, wants it ignored.
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeded:
        signal.signal(signal.SIGINT, _end_at_once)
    _fill_closed_descriptors()
    _keep_to_ourselves()
    from kvstore.commands.tree import run

    try:
        if heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run(sys.argv[1:])
        if heeded:
            signal.signal(signal.SIGINT, _end_at_once)
    except KeyboardInterrupt:
        _end_at_once()
    sys.exit(code)


def _end_at_once(*_: object) -> NoReturn:
    """Answer Ctrl-C where nothing needs to be tidied up, and no exception would be caught."""
    line = "kvstore: interrupted"
    if "--json" in sys.argv:
        line = (
            f'{{"type": "error", "code": {INTERRUPTED}, "error": "Interrupted", '
            '"message": "interrupted", "hint": ""}'
        )
    os.write(2, line.encode() + b"\n")
    os._exit(INTERRUPTED)


def _keep_to_ourselves() -> None:
    """Let neither files that we or libraries make, nor a core dump, show blocks to others: they are
    prompts. Children inherit it.

    The limit is 1 byte, where one may choose, since the kernel heeds 0 only for core dumps that are
    files: a program that takes them (core(5), "Piping core dumps") is started all the same, but not
    at 1, by which the kernel knows such a program itself (fs/coredump.c). PR_SET_DUMPABLE would do
    it too, but also lock everybody but root out of /proc/PID, where deleted files are saved from.
    """
    import resource

    os.umask(0o077)
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    limit = 0 if hard == 0 else 1
    resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))


def _fill_closed_descriptors() -> None:
    """Let no socket or block file become stdin, stdout or stderr because that one was closed.

    ``sys.stdin`` and ``sys.stdout`` stay None then, by which a command that needs one knows.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115

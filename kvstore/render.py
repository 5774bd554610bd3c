"""Everything a person or a script reads: results on stdout, the rest on stderr.

The only file that prints. With ``--json`` a result is one JSON document on stdout and an error one
JSON line on stderr; sizes are then integers of bytes and durations numbers of seconds.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, NoReturn, TextIO

from kvstore.errors import UsageError

if TYPE_CHECKING:
    from tqdm import tqdm

PROGRESS_SECONDS = 10.0
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_STYLES = {"red": "31", "green": "32", "yellow": "33", "bold": "1"}
_STATE_STYLES = {"ready": "green", "recovering": "yellow", "draining": "yellow", "degraded": "red"}
_NUMBER = re.compile(r"-?[\d,]+(\.\d+)?( [A-Za-z%]+)?")

Row = Sequence[object]


def size(count: float) -> str:
    """Return bytes as people read them, base 1024: ``512 B``, ``64 KiB``, ``1.5 GiB``."""
    value, unit = float(count), 0
    while abs(value) >= 1023.95 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    text = f"{value:.1f}".removesuffix(".0") if unit else f"{value:.0f}"
    return f"{text} {_UNITS[unit]}"


def duration(seconds: float) -> str:
    """Return a duration as people read it: ``850 us``, ``12.5 ms``, ``3.2 s``, ``2 h 5 min``."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def count(number: int, noun: str, plural: str = "") -> str:
    """Return ``1 block``, ``12,000 blocks``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def table(head: Sequence[str], rows: Iterable[Row]) -> list[str]:
    """Return lines of aligned columns, numbers to the right, no trailing blanks."""
    body = [[_cell(value) for value in row] for row in rows]
    numeric = [
        bool(body) and all(_NUMBER.fullmatch(row[column]) for row in body)
        for column in range(len(head))
    ]
    widths = [max(len(row[column]) for row in [list(head), *body]) for column in range(len(head))]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in [list(head), *body]
    ]


def fields(pairs: Iterable[tuple[str, object]]) -> list[str]:
    """Return lines ``name   value`` with the values below each other."""
    texts = [(name, _cell(value)) for name, value in pairs]
    width = max((len(name) for name, _ in texts), default=0)
    return [f"{name:<{width}}  {value}".rstrip() for name, value in texts]


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def plain(value: object) -> object:
    """Return what JSON knows for a value that it does not: numpy numbers, bytes, paths."""
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    for convert in ("tolist", "_asdict"):
        if hasattr(value, convert):
            return getattr(value, convert)()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def compact(value: object) -> str:
    """Return JSON on one line, short: for records inside of tables."""
    text = json.dumps(value, separators=(",", ":"), default=plain, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass
class Output:
    """How this command talks: ``--json``, ``-q``, ``-v``, ``--color``."""

    json: bool = False
    quiet: bool = False
    verbose: int = 0
    color: str = "auto"

    def result(self, document: Mapping[str, object], lines: Iterable[str]) -> None:
        """Write a result: the document with ``--json``, else the lines, but not with ``-q``."""
        if self.json:
            _write(json.dumps(document, default=plain, ensure_ascii=False) + "\n")
        elif not self.quiet:
            _write("".join(line + "\n" for line in lines))

    def text(self, text: str) -> None:
        """Write what was asked for as text, in whatever mode: help, version."""
        _write(text + "\n")

    def line(self, document: Mapping[str, object], lines: Iterable[str]) -> None:
        """Write one of many results, at once: a JSON line with ``--json``, else the lines."""
        self.result(document, lines)
        self.flush()

    def stream(
        self,
        name: str,
        items: Iterable[tuple[Mapping[str, object], str]],
        rest: Mapping[str, object] | None = None,
    ) -> int:
        """Write items as they come and return how many: lines, or ``{"name": [...], "count": n}``.

        A list of a million blocks is never in memory as a whole. ``rest`` are further fields; they
        are read when all items have been written.
        """
        number, head = 0, f'{{"{name}": ['
        for document, line in items:
            if self.json:
                # Not before the first item: what fails at once leaves stdout empty.
                text = json.dumps(document, default=plain, ensure_ascii=False)
                _write((",\n" if number else f"{head}\n") + text)
            else:
                _write(line + "\n")
            number += 1
        if self.json:
            more = json.dumps(rest or {}, default=plain, ensure_ascii=False)
            begun = "" if number else head
            _write(f'{begun}\n], "count": {number}{", " if rest else ""}{more[1:]}\n')
        return number

    def note(self, text: str) -> None:
        """Tell a person what is going on: stderr, not with ``-q`` or ``--json``."""
        if not (self.quiet or self.json):
            sys.stderr.write(text + "\n")

    def confirm(self, question: str, *, yes: bool) -> None:
        """Go on only if the answer is yes. Raises UsageError where nobody can be asked, or for no.

        ``yes``: it was given on the command line.
        """
        if yes:
            return
        if self.json or sys.stdin is None or not sys.stdin.isatty():
            raise UsageError(f"{question} nobody is there to ask", "say so with --yes")
        sys.stderr.write(f"{question} [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise UsageError("nothing was done", "answer y, or say so with --yes")

    def progress(self, total: int | None, unit: str, *, scale: bool = False) -> Progress:
        """Return a counter that a person sees on stderr; ``scale``: it counts bytes."""
        return Progress(total, unit, scale, silent=self.quiet or self.json)

    def error(self, kind: str, code: int, message: str, hint: str = "") -> None:
        """Write the one line about what went wrong and what to do next."""
        if self.json:
            line = {"type": "error", "code": code, "error": kind, "message": message, "hint": hint}
            sys.stderr.write(json.dumps(line, default=plain, ensure_ascii=False) + "\n")
            return
        text = sentences(message, hint)
        sys.stderr.write(f"{self.style('kvstore:', 'red', sys.stderr)} {text}\n")

    def trace(self) -> None:
        """With ``-vv``, show where the error being handled comes from."""
        if self.verbose >= 2:
            sys.stderr.write(traceback.format_exc())

    def check_stdout(self) -> None:
        """Refuse to begin what could not tell its result. Raises UsageError."""
        if self.json or not self.quiet:
            _stdout()

    def flush(self) -> None:
        """Send what was written on its way. Raises OSError that names stdout."""
        if sys.stdout is not None:
            with naming("stdout"):
                sys.stdout.flush()

    def abandon(self) -> None:
        """Let what is still unwritten go nowhere: nobody reads it, or it cannot be written."""
        if sys.stdout is None:
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)

    def style(self, text: str, style: str, stream: IO[str] | None = None) -> str:
        """Return text in a colour, where colour is wanted."""
        if not self.wants_color(stream or sys.stdout):
            return text
        return f"\033[{_STYLES[style]}m{text}\033[0m"

    def wants_color(self, stream: IO[str]) -> bool:
        """``auto`` means a terminal and no NO_COLOR (https://no-color.org)."""
        if self.color != "auto":
            return self.color == "always"
        return stream.isatty() and not os.environ.get("NO_COLOR")

    def state(self, name: str) -> str:
        return self.style(name, _STATE_STYLES.get(name, "bold"))


class Progress:
    """How far a long command is: a bar on a terminal, else a line every ten seconds. A context."""

    def __init__(self, total: int | None, unit: str, scale: bool, *, silent: bool) -> None:
        self._total, self._unit, self._scale = total, unit, scale
        self._done, self._silent = 0, silent
        self._began = self._told = time.monotonic()
        self._bar: tqdm[NoReturn] | None = None

    def __enter__(self) -> Progress:
        if not self._silent and sys.stderr is not None and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=self._total,
                unit=self._unit,
                unit_scale=self._scale,
                unit_divisor=1024 if self._scale else 1000,
                leave=False,
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, number: int, total: int | None = None) -> None:
        """Note that so much more is done; ``total`` if it is known by now."""
        self._done, self._total = self._done + number, total or self._total
        if self._bar is not None:
            self._bar.total = self._total
            self._bar.update(number)
        elif not self._silent and time.monotonic() - self._told >= PROGRESS_SECONDS:
            self._told = time.monotonic()
            left = self._time_left(self._told - self._began)
            sys.stderr.write(f"{self._shown(self._done)} of {self._shown(self._total)}{left}\n")

    def _time_left(self, spent: float) -> str:
        if not self._total or not 0 < self._done < self._total:
            return ""
        return f", about {duration(spent / self._done * (self._total - self._done))} left"

    def _shown(self, number: int | None) -> str:
        if number is None:
            return "unknown"
        return size(number) if self._scale else count(number, self._unit)


def sentences(message: str, hint: str) -> str:
    """Return what went wrong and what to do next, as a person reads it."""
    return f"{_sentence(message, False)} {_sentence(hint, True)}" if hint else message


def _sentence(text: str, first_upper: bool) -> str:
    text = text[:1].upper() + text[1:] if first_upper else text
    return text if text.endswith((".", "?", "!")) else text + "."


def _stdout() -> TextIO:
    if sys.stdout is None:
        raise UsageError("stdout is closed", "redirect it to a file, or to /dev/null")
    return sys.stdout


def _write(text: str) -> None:
    stdout = _stdout()
    with naming("stdout"):
        stdout.write(text)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Let errors of the system name the file as the user knows it."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), name) from error


def write_bytes(data: bytes | memoryview, target: str) -> None:
    """Write a block to a file or, for ``-``, to stdout. A regular file is replaced whole.

    Raises OSError. Devices and pipes are written in place, and nothing is left behind on failure.
    """
    if target == "-":
        stdout = _stdout()
        with naming("stdout"):
            stdout.flush()
            rest = memoryview(data)
            while rest:  # unbuffered (PYTHONUNBUFFERED), a write may take a part only
                rest = rest[stdout.buffer.write(rest) :]
            stdout.buffer.flush()
        return
    with naming(target):
        _write_file(data, target)


def _write_file(data: bytes | memoryview, target: str) -> None:
    import shutil  # both take a while, and few commands write a file
    from pathlib import Path

    path = Path(target)
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = path.resolve()  # through a symlink, as other programs do
    temporary = path.with_name(f".{path.name[:200]}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        if path.exists():
            shutil.copymode(path, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def clear_screen() -> None:
    """Begin at the top again, on a terminal; what is in a pipe or file just goes on."""
    if stdout_is_terminal():
        _write("\033[H\033[J")


def utc(seconds: float) -> str:
    """Return a moment (seconds since 1970) as ``2026-11-30T12:00:00Z``."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def stdout_is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()

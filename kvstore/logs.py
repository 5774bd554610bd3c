"""Log lines of the daemon, on stderr: text for people, JSON for collectors.

However often something happens, the log stays readable and small: of one kind of line there are at
most ``BURST`` in ``SECONDS``, then one that tells how many were left out. Keys are shortened, here
once more where a path or a traceback has one; values are never logged.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
from dataclasses import dataclass

BURST = 10
SECONDS = 60.0
MOST_KINDS = 1000
"""Kinds that are counted at a time: a bound on memory, there are fewer than a hundred."""
_LONG_HEX = re.compile(r"[0-9a-f]{33,}")
"""What must be a key: uuids and the ids of namespaces have 32 digits."""
_DIGITS = 16

Kind = tuple[str, int, str]


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC, ISO 8601), level, logger, message, exception."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _with_short_keys(json.dumps(line, default=str, ensure_ascii=False))


class TextLines(logging.Formatter):
    """``2026-11-30T12:00:00.123Z info: message``; without the time where journald adds it."""

    def __init__(self) -> None:
        stamp = "" if os.environ.get("JOURNAL_STREAM") else "%(asctime)s "
        super().__init__(stamp + "%(levelname)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _utc(record.created)

    def format(self, record: logging.LogRecord) -> str:
        record.levelname = record.levelname.lower()
        return _with_short_keys(super().format(record))


def _utc(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def _with_short_keys(text: str) -> str:
    return _LONG_HEX.sub(lambda found: f"{found[0][:_DIGITS]}...", text)


@dataclass(slots=True)
class _Seen:
    """Lines of one kind since ``began``, a moment of :func:`time.monotonic`."""

    began: float
    count: int = 0
    last: logging.LogRecord | None = None
    """The last one that was left out."""


class Limited(logging.StreamHandler):  # type: ignore[type-arg]  # generic for type checkers only
    """Writes records to stderr, of one kind at most ``BURST`` in ``seconds``.

    A kind is logger, level and message before its arguments are put in. The time begins with the
    first line; at its end a line tells how many of them were left out.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        super().__init__(sys.stderr)
        self._seconds = seconds
        self._seen: dict[Kind, _Seen] = {}

    def emit(self, record: logging.LogRecord) -> None:
        kind, now = (record.name, record.levelno, str(record.msg)), time.monotonic()
        seen = self._seen.get(kind)
        # One of which lines were left out ends by its timer, which tells of them.
        if seen is None or (seen.last is None and now - seen.began >= self._seconds):
            if len(self._seen) >= MOST_KINDS:
                self._seen = {one: it for one, it in self._seen.items() if it.last is not None}
            seen = self._seen[kind] = _Seen(now)
        seen.count += 1
        if seen.count <= BURST:
            super().emit(record)
            return
        if seen.last is None:
            timer = threading.Timer(seen.began + self._seconds - now, self._tell, [kind])
            timer.daemon = True
            timer.start()
        seen.last = record

    def _tell(self, kind: Kind) -> None:
        """Tell how many lines of a kind were left out, and begin anew."""
        self.acquire()
        try:
            seen = self._seen.pop(kind, None)
            if seen is not None and seen.last is not None:
                told = (seen.count - BURST, seen.last.getMessage())
                text = "suppressed %d more lines of this kind, the last: %s"
                super().emit(logging.LogRecord(kind[0], kind[1], "", 0, text, told, None))
        finally:
            self.release()

    def close(self) -> None:
        for kind in list(self._seen):
            self._tell(kind)
        super().close()


def start_logging(level: str, form: str) -> None:
    """Send log records of the program to stderr as ``text`` or ``json`` lines."""
    handler = Limited()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    root = logging.getLogger()
    before, root.handlers[:] = root.handlers[:], [handler]
    for one in before:
        if isinstance(one, Limited):
            one.close()
    root.setLevel(level.upper())

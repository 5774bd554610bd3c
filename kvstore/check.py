"""Looking at records that failed, and keeping them for the operator.

Quarantine is a directory of copies and a ``manifest.jsonl`` with one line for each damaged record.
It has a share of the capacity; once that is used up only manifest lines are written, and when even
those reach the limit nothing more is. ``acknowledged`` tells how much of the manifest an operator
has seen: what follows is an alarm, also after a restart.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import threading
import time
from typing import TYPE_CHECKING

from kvstore import files, layout, record
from kvstore.backends.base import Status
from kvstore.backends.judging import judge_whole
from kvstore.errors import CorruptStore, KVStoreError

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.backends.base import Blocks, Engine

log = logging.getLogger(__name__)

MANIFEST = "manifest.jsonl"
ACKNOWLEDGED = "acknowledged"
_READ_BYTES = 1 << 20
_MANIFEST_SHARE = 8
"""The manifest alone may take this fraction (1/n) of the limit beyond it."""


def examine(engine: Engine, one: Blocks) -> str:
    """Read one record, apart from everything else, and tell what it is.

    Returns ``whole``, ``repaired`` (whole, but by or without its parity chunk), ``missing``,
    ``damaged`` or ``unknown``: what could not be read for another reason may be whole, and must not
    be dropped for it.
    """
    (found,) = judge_whole(engine, one, [_image_of(one)])
    if found.status not in (Status.OK, Status.DAMAGED):
        return "missing" if found.status == Status.MISSING else "unknown"
    if found.repaired or found.bare:
        return "repaired"
    return "whole" if found.good else "damaged"


def _read_alone(engine: Engine, one: Blocks) -> tuple[memoryview, Status]:
    """Return what can be read of one record, in memory of its own.

    The memory goes with its last view: closing it here would fail while the traceback of an error
    still holds one.
    """
    image = _image_of(one)
    read = engine.get_many_into(one, [image])
    return image[: int(read.filled[0])], Status(int(read.statuses[0]))


def _image_of(one: Blocks) -> memoryview:
    return memoryview(mmap.mmap(-1, record.image_bytes(int(one.lengths[0]))))


class Quarantine:
    """Copies of damaged records in ``directory``, at most ``limit`` bytes as ``du`` counts them.

    ``unacknowledged``: records that came since the last :meth:`acknowledge`, whichever process
    found them.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self.directory = directory
        self.limit = limit
        self.bytes = layout.directory_bytes(directory)
        self._lock = threading.Lock()
        self.unacknowledged = _lines_after(directory / MANIFEST, self._seen())

    def acknowledge(self) -> int:
        """Note that an operator has seen all that is here; return how many records were new.

        Raises EngineError if that cannot be written.
        """
        with self._lock:
            count = self.unacknowledged
            try:
                size = _size(self.directory / MANIFEST)
                files.replace(self.directory / ACKNOWLEDGED, f"{size}\n".encode())
            except OSError as error:
                raise files.translate(error, f"write {self.directory / ACKNOWLEDGED}") from error
            self.unacknowledged = 0
        return count

    def _seen(self) -> int:
        """Return how many bytes of the manifest were acknowledged; 0 if that makes no sense."""
        try:
            text = files.read_regular(self.directory / ACKNOWLEDGED, 64).strip()
        except (OSError, CorruptStore):
            return 0
        return int(text) if text.isdigit() else 0

    def keep(self, engine: Engine, blocks: Blocks, reason: str) -> None:
        """Copy what can still be read of each block here and name it in the manifest.

        Failing to keep a copy is logged and never stops the removal: the record is no good.
        """
        for number in range(len(blocks)):
            one = blocks.take(slice(number, number + 1))
            try:
                with self._lock:
                    self.unacknowledged += 1
                    self._keep_one(engine, one, reason)
            except (OSError, KVStoreError) as error:
                log.warning("cannot quarantine %s...: %s", one.keys.tobytes().hex()[:16], error)

    def _keep_one(self, engine: Engine, one: Blocks, reason: str) -> None:
        name = (
            f"{one.namespace.hex()}-{one.shard:04x}-{one.keys.tobytes().hex()}"
            f".{int(one.generations[0]):016x}.kvb"
        )
        image, status = _read_alone(engine, one)
        kept = status != Status.MISSING and self._copy(name, image)
        self._note(one, reason, engine.name, name if kept else None)

    def _copy(self, name: str, data: memoryview) -> bool:
        """Write a copy if the share lasts; tell whether it is there. A failure leaves no piece."""
        if not 0 < len(data) <= self.limit - self.bytes:
            return False
        path = self.directory / name
        try:
            # Nothing that is there already is written into, whoever put it there.
            descriptor = files.open_to_write(path, os.O_EXCL)
        except OSError as error:
            log.warning("cannot make %s: %s", path, error)
            return False
        try:
            files.write_all(descriptor, data)
            self.bytes += os.fstat(descriptor).st_blocks * 512
        except OSError as error:
            log.warning("cannot write %s: %s", path, error)
            path.unlink(missing_ok=True)
            return False
        finally:
            os.close(descriptor)
        return True

    def _note(self, one: Blocks, reason: str, engine: str, name: str | None) -> None:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "reason": reason,
            "engine": engine,
            "namespace": one.namespace.hex(),
            "shard": one.shard,
            "key": one.keys.tobytes().hex(),
            "generation": int(one.generations[0]),
            "length": int(one.lengths[0]),
            "place": int(one.places[0]),
            "file": name,
        }
        text = json.dumps(line).encode() + b"\n"
        if self.bytes + len(text) > self.limit + self.limit // _MANIFEST_SHARE:
            return
        descriptor = files.open_to_write(self.directory / MANIFEST, os.O_APPEND)
        try:
            os.write(descriptor, text)
        finally:
            os.close(descriptor)
        self.bytes += len(text)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _lines_after(path: Path, start: int) -> int:
    """Count the lines of a file behind ``start`` bytes; all of them if it has fewer."""
    try:
        with files.open_regular(path) as opened:
            opened.seek(start if start <= _size(path) else 0)
            return sum(part.count(b"\n") for part in iter(lambda: opened.read(_READ_BYTES), b""))
    except OSError:
        return 0

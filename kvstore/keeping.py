"""Copies of damaged records, made offline, for whoever wants to look at them."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

from kvstore import files, record
from kvstore.backends.raw import Remains
from kvstore.check import MANIFEST

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.backends.raw import Salvage
    from kvstore.salvage import Damaged, Survey


class Keeping:
    """Copies of what is damaged, in a directory, with a line each in its manifest."""

    def __init__(self, directory: Path, survey: Survey) -> None:
        self.directory = directory
        self._survey = survey
        self._lines: list[bytes] = []

    def keep(self, damaged: Damaged, *, copy: bool) -> None:
        """Copy what can be read of a record, if asked, and note it. Raises StoreFull, ..."""
        name = self._name(damaged) if copy and damaged.extent is not None else None
        if name is not None:
            path = self.directory / name
            try:
                files.replace(path, _bytes_of(self._survey.salvage, damaged))
            except OSError as error:
                raise files.translate(error, f"write {path}") from error
        self._lines.append(self._line(damaged, name))

    def _name(self, damaged: Damaged) -> str:
        if damaged.identity is not None:
            namespace, shard, key = damaged.identity
            return f"{namespace.hex()}-{shard:04x}-{key.hex()}.{damaged.generation:016x}.kvb"
        assert damaged.extent is not None
        path = self._survey.path_of(damaged.extent).replace("/", "-")
        return f"{path}.{damaged.extent.offset:x}.kvb"

    def _line(self, damaged: Damaged, name: str | None) -> bytes:
        namespace, shard, key = damaged.identity or (b"", 0, b"")
        extent = damaged.extent
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "reason": damaged.reason,
            "engine": self._survey.record.engine,
            "namespace": namespace.hex(),
            "shard": shard,
            "key": key.hex(),
            "generation": damaged.generation,
            "length": damaged.bytes,
            "path": self._survey.path_of(extent) if extent else None,
            "offset": extent.offset if extent else None,
            "file": name,
        }
        return json.dumps(line).encode() + b"\n"

    def finish(self) -> None:
        """Write the manifest, durably."""
        if not self._lines:
            return
        try:
            descriptor = files.open_to_write(self.directory / MANIFEST, os.O_APPEND)
            try:
                files.write_all(descriptor, b"".join(self._lines))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            files.sync_directory(self.directory)
        except OSError as error:
            raise files.translate(error, f"write {self.directory / MANIFEST}") from error


def _bytes_of(salvage: Salvage, damaged: Damaged) -> bytes:
    """Return what can be read of a record: as an image where its envelope is good."""
    if isinstance(damaged.found, Remains):
        return salvage.files.read(*damaged.found.extent)
    if damaged.found.whole is not None:
        return salvage.files.read(*damaged.found.whole)
    parts = [damaged.found.head.ljust(record.HEADER_PAGE, b"\0")]
    for copies in damaged.found.pieces:
        parts += [salvage.files.read(*extent) for extent in (copies[0] if copies else ())]
    return b"".join(parts)

"""The sizes of a library's files, noted at a clean stop and compared at the next opening.

For libraries to which a file that was cut off, or is gone, looks like an older state of the store.
After a kill there is no note, and nothing is compared.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING

from kvstore.errors import CorruptStore
from kvstore.files import sync_directory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NOTE = "sizes.json"
_PROTOCOL = "LOG"
"""Names of the files in which libraries tell what they do begin so: these are nobody's data, are
never synced, and begin anew whenever the library is opened."""


class Sizes:
    """The files below one folder. ``total``: bytes that they take, when last measured."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.total = 0

    def _now(self) -> dict[str, os.stat_result]:
        found: dict[str, os.stat_result] = {}
        with os.scandir(self._folder) as entries:
            for entry in entries:
                # Libraries remove files while we look.
                with contextlib.suppress(FileNotFoundError):
                    if entry.name != NOTE and entry.is_file(follow_symlinks=False):
                        found[entry.name] = entry.stat(follow_symlinks=False)
        return found

    def measure(self) -> int:
        """Return and keep ``total``; it stays as it was where the folder cannot be read."""
        with contextlib.suppress(OSError):
            self.total = sum(found.st_blocks * 512 for found in self._now().values())
        return self.total

    def note(self) -> None:
        """Write the sizes down; without a note nothing is compared."""
        with contextlib.suppress(OSError):
            sizes = {name: found.st_size for name, found in self._now().items()}
            (self._folder / NOTE).write_text(json.dumps(sizes))

    @contextlib.contextmanager
    def forgotten(self) -> Iterator[None]:
        """Forget the note, durably, before a library is opened for writing inside; it comes back if
        that raises.

        The library changes and removes files as soon as it opens them: with a note beside them, a
        kill or a power loss at that moment would pass for damage ever after. Raises OSError.
        """
        path, note = self._folder / NOTE, b""
        with contextlib.suppress(FileNotFoundError):
            note = path.read_bytes()
            path.unlink()
            sync_directory(self._folder)
        try:
            yield
        except BaseException:
            if note:
                with contextlib.suppress(OSError):
                    path.write_bytes(note)
            raise

    def check(self) -> None:
        """Raise CorruptStore if a file is shorter than it was, or gone."""
        self.measure()
        try:
            noted = json.loads((self._folder / NOTE).read_bytes())
        except (OSError, ValueError):
            return
        sizes = {name: found.st_size for name, found in self._now().items()}
        for name, size in noted.items() if isinstance(noted, dict) else ():
            if sizes.get(name, -1) < size and not name.startswith(_PROTOCOL):
                raise CorruptStore(
                    f"{self._folder / name} is gone or shorter than it was at the last stop",
                    "bring it back from a copy, or run kvstore recover",
                )

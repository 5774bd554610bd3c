"""What engines share whose library frees room only when it merges files."""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from typing import TYPE_CHECKING

from kvstore.backends import base
from kvstore.backends.base import Finding, Status
from kvstore.backends.keyvalue import PIECE_BYTES, PIECES, KeyValueEngine, LibraryError
from kvstore.backends.sizes import Sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LEAST_BUFFER, MOST_BUFFER = 2 << 20, 64 << 20
BUFFER_SHARE = 64
MERGE_SHARE = 16
"""So large a part (1/n) of the capacity may wait to be merged."""
RESERVE_BUFFERS = 4
"""Room for so many buffers must be left before a write: merging needs some, too."""


class MergedEngine(KeyValueEngine):
    """``buffer_bytes``: what the library collects in memory, and the length of its files."""

    def __init__(self, context: base.EngineContext) -> None:
        super().__init__(context)
        share = (context.capacity or 1 << 62) // BUFFER_SHARE
        self.buffer_bytes = min(max(share, LEAST_BUFFER), MOST_BUFFER)
        self.sizes = Sizes(self.folder)
        least = 2 * self.buffer_bytes
        self.merging = Merging(self.merge, max(context.capacity // MERGE_SHARE, least))

    @abstractmethod
    def merge(self, start: bytes, stop: bytes) -> None:
        """Merge the files that hold keys of this range. Raises nothing of the library."""

    def check_room(self) -> None:
        """Raise LibraryError before the library is asked to write what it has no room for: after a
        write that fails halfway its log is in doubt."""
        reserve = RESERVE_BUFFERS * self.buffer_bytes
        try:
            found = os.statvfs(self.folder)
        except OSError as error:
            raise LibraryError(f"{self.folder} is gone: {error.strerror}") from error
        if found.f_bavail * found.f_frsize < reserve:
            raise LibraryError(f"the disk of {self.folder} is full", Status.FULL)
        limit = (self.context.capacity or 1 << 62) - reserve
        if self.sizes.total > limit and self.sizes.measure() > limit:
            self.merging.finish()
            if self.sizes.measure() > limit:
                raise LibraryError(f"{self.folder} takes its whole capacity", Status.FULL)

    def stats(self) -> base.Stats:
        self.require_open()
        self.sizes.measure()
        return base.Stats(0, self.io, self.notes())

    def check(self) -> list[Finding]:
        self.require_open()
        return []


class Merging:
    """Calls ``merge(first key, end)`` in a thread of its own once ``share`` bytes were removed.

    Names are in the order of generations, and what is evicted is mostly the oldest, so the range is
    a small one. Who removes faster than it is merged waits.
    """

    def __init__(self, merge: Callable[[bytes, bytes], None], share: int) -> None:
        self._merge = merge
        self._share = share
        self._lock = threading.Lock()
        self._keys: list[bytes] = []
        self._thread: threading.Thread | None = None

    def removed(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._keys += [key for key in keys if key.startswith(PIECES)]
            waiting = len(self._keys) * PIECE_BYTES
            busy = self._thread is not None and self._thread.is_alive()
            if waiting >= self._share * (1 + busy):
                self._begin()

    def finish(self) -> None:
        """Merge all that waits, and wait for it."""
        with self._lock:
            if self._keys:
                self._begin()
            self._join()

    def stop(self) -> None:
        """Wait for what is under way."""
        with self._lock:
            self._join()

    def _begin(self) -> None:
        self._join()
        ends = (min(self._keys), max(self._keys) + b"\0")
        self._keys = []
        self._thread = threading.Thread(target=self._merge, args=ends, name="merge")
        self._thread.start()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

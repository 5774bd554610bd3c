"""The client's side of shared memory: regions, the extents leased from them, and what is given up.

A region is a memfd that the daemon maps too. From a request to its answer the rows it names belong
to the daemon, which may write late: an extent goes back to the free ones only when every request
that names it has been answered. If one has not, its whole region is abandoned and never used again;
it counts as lost until the daemon says that it is done, or has ended.

Standard library and numpy only: model servers import this module.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import select
import threading
import weakref
from typing import TYPE_CHECKING

from kvstore import errors
from kvstore.protocol import MAX_REGION_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = 4096
MAX_ABANDONED = 4
DEFAULT_REGION_BYTES = 64 << 20
DEFAULT_TOTAL_BYTES = 256 << 20
_MADV_POPULATE_WRITE = 23
_SEALS = 2 | 4
"""F_SEAL_SHRINK and F_SEAL_GROW."""


def pages(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class Witness:
    """Tells whether the daemon has ended, by its pidfd; without one it never knows."""

    def __init__(self, pidfd: int | None = None) -> None:
        self._pidfd = pidfd
        if pidfd is not None:
            weakref.finalize(self, os.close, pidfd)

    def ended(self) -> bool:
        if self._pidfd is None:
            return False
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))


class Region:
    """Shared memory of ``nbytes`` (whole pages, at most 256 MiB), populated, never to be resized.

    Raises OSError where the system has no memfd or no memory for it.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes % PAGE or not 0 < nbytes <= MAX_REGION_BYTES:
            raise ValueError(f"a region of {nbytes} bytes")
        self.nbytes = nbytes
        self.fd = os.memfd_create("kvstore-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, nbytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self._mapping = mmap.mmap(self.fd, nbytes)
        self._populate()
        self.view = memoryview(self._mapping)
        self.registered: tuple[object, int] | None = None
        """The connection that knows this region, and its number there."""
        self.witness = Witness()
        self.abandoned = False
        self.under_way = 0
        """Requests that name rows of this region and have not been answered."""
        self.leased = 0
        self._free = [(0, nbytes)]
        self._lock = threading.Lock()

    def _populate(self) -> None:
        """Have every page now: later a lack of memory would be a SIGBUS instead of an error."""
        with contextlib.suppress(OSError):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        try:
            self._mapping.madvise(_MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            os.posix_fallocate(self.fd, 0, self.nbytes)  # kernels before 5.14

    def take(self, nbytes: int) -> Extent | None:
        """Lease the first free run of at least ``nbytes``."""
        size = pages(nbytes)
        with self._lock:
            if self.abandoned:
                return None
            for at, (offset, length) in enumerate(self._free):
                if length >= size:
                    rest = [(offset + size, length - size)] if length > size else []
                    self._free[at : at + 1] = rest
                    self.leased += 1
                    return Extent(self, offset, size)
        return None

    def give_back(self, extent: Extent) -> None:
        """Take an extent back, whose requests have all been answered."""
        with self._lock:
            self.leased -= 1
            if not self.abandoned:
                self._free.append((extent.offset, extent.nbytes))
                self._free = list(_joined(sorted(self._free)))

    def count(self, extent: Extent, change: int) -> None:
        with self._lock:
            extent.under_way += change
            self.under_way += change

    @property
    def leased_bytes(self) -> int:
        return self.nbytes - sum(length for _, length in self._free)

    @property
    def idle(self) -> bool:
        """Nobody here and no request under way uses it."""
        return not self.leased and not self.under_way


def _joined(runs: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield sorted runs of free bytes with neighbours made one."""
    start, length = runs[0]
    for offset, size in runs[1:]:
        if start + length == offset:
            length += size
        else:
            yield start, length
            start, length = offset, size
    yield start, length


class Extent:
    """A leased run of a region, whole pages, aligned to a page."""

    def __init__(self, region: Region, offset: int, nbytes: int) -> None:
        self.region = region
        self.offset = offset
        self.nbytes = nbytes
        self.view = region.view[offset : offset + nbytes]
        self.under_way = 0
        self.released = False

    def begin(self) -> None:
        """From here on these bytes belong to the daemon as well."""
        self.region.count(self, 1)

    def end(self) -> None:
        """The daemon has answered for a request begun."""
        self.region.count(self, -1)


class Regions:
    """All regions of one client in one process, thread-safe; bounded in bytes and in losses."""

    def __init__(
        self,
        region_bytes: int = DEFAULT_REGION_BYTES,
        total_bytes: int = DEFAULT_TOTAL_BYTES,
    ) -> None:
        self.region_bytes = min(pages(region_bytes), MAX_REGION_BYTES)
        self.total_bytes = total_bytes
        self._live: list[Region] = []
        self._abandoned: list[Region] = []
        self._dropped: list[Region] = []
        self._lock = threading.Lock()

    @property
    def abandoned(self) -> int:
        return len(self._abandoned)

    def exhausted(self) -> bool:
        """Tell whether so many regions are abandoned that no memory may be shared any more."""
        self.sweep()
        return len(self._abandoned) >= MAX_ABANDONED

    def sweep(self) -> None:
        """Drop the abandoned regions that the daemon can no longer touch.

        They are not used again: whoever was told that a request failed may still look at them.
        """
        if not self._abandoned:
            return
        with self._lock:
            gone = [r for r in self._abandoned if r.idle or r.witness.ended()]
            self._abandoned = [r for r in self._abandoned if r not in gone]
            self._dropped += gone

    def dropped(self) -> list[Region]:
        """Return, once, the regions that went out of use; the daemon may unmap them."""
        if not self._dropped:
            return []
        with self._lock:
            gone, self._dropped = self._dropped, []
        return gone

    def lease(self, nbytes: int) -> Extent | None:
        """Lease an extent of at least ``nbytes``, or return None when there is no room for it.

        Raises Busy when too many regions are abandoned, OSError when the system gives no memory.
        """
        if self.exhausted():
            raise errors.Busy(
                f"{MAX_ABANDONED} regions wait for a daemon that does not answer",
                "see kvstore status; they are free again when it answers or ends",
            )
        with self._lock:
            for region in self._live:
                extent = region.take(nbytes)
                if extent is not None:
                    return extent
            size = max(self.region_bytes, pages(nbytes))
            if self._bytes() + size > self.total_bytes:
                self._drop_idle()  # they were too small for what is wanted now
            if size > MAX_REGION_BYTES or self._bytes() + size > self.total_bytes:
                return None
            self._live.append(Region(size))
            return self._live[-1].take(nbytes)

    @property
    def room(self) -> int:
        """Bytes that may still be leased, if they fit in one piece."""
        with self._lock:
            return self.total_bytes - sum(region.leased_bytes for region in self._live)

    def _bytes(self) -> int:
        return sum(region.nbytes for region in self._live)

    def drop_idle(self) -> None:
        """Take the regions out of use that nobody uses now."""
        with self._lock:
            self._drop_idle()

    def _drop_idle(self) -> None:
        self._dropped += [region for region in self._live if region.idle]
        self._live = [region for region in self._live if not region.idle]

    def release(self, extent: Extent) -> None:
        """Give an extent back; may be called twice."""
        with self._lock:
            if extent.released:
                return
            extent.released = True
            if extent.under_way:
                self._abandon(extent.region)
            extent.region.give_back(extent)

    def abandon(self, region: Region) -> None:
        """Never lease memory of this region again; a request that names it was not answered."""
        with self._lock:
            self._abandon(region)

    def _abandon(self, region: Region) -> None:
        if region in self._live:  # after a fork it may be one of the parent's
            region.abandoned = True
            self._live.remove(region)
            self._abandoned.append(region)

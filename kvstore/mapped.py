"""Regions: memory of clients, mapped here so that blocks are copied straight into and out of it.

A region is a memfd that its client made and sealed against shrinking and growing. Without the seals
the client could cut it short under our hands, which ends a process that touches it (SIGBUS); so
whatever is not a sealed memfd of the announced size is refused and its descriptor closed. The
descriptor of a good one is closed too: the mapping is enough. (An ``mmap.mmap`` would keep one of
its own, and clients could use up all that this process may have; so libc is asked.)

Each request that names a region is one of its users from its arrival to its last access; a region
that was given up is unmapped when the last user has left.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import Busy, KVStoreError, PermissionDenied, UsageError
from kvstore.protocol import MAX_REGION_BYTES

if TYPE_CHECKING:
    from kvstore.protocol import U32, U64

PAGE = 4096
MAX_REGIONS = 64
"""Regions of one connection; each costs the kernel a mapping."""
_F_GET_SEALS = 1034
_SEALS = 0x2 | 0x4
"""F_SEAL_SHRINK and F_SEAL_GROW (linux/fcntl.h); Python 3.11 has no names for them."""
_MADV_POPULATE_WRITE = 23
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(slots=True)
class Allowance:
    """Bytes of regions that the daemon maps in all; shared by all connections."""

    limit: int
    used: int = 0


class Region:
    """One mapped memfd of ``size`` bytes; ``memory`` is the mapping."""

    def __init__(self, number: int, memory: memoryview) -> None:
        self.number = number
        self.size = len(memory)
        self._memory: memoryview | None = memory
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()

    def enter(self) -> None:
        self._users += 1
        self._unused.clear()

    def leave(self) -> None:
        self._users -= 1
        if not self._users:
            self._unused.set()

    async def unused(self) -> None:
        """Wait until no request uses the region."""
        await self._unused.wait()

    def rows(self, offsets: U64, lengths: U32) -> list[memoryview]:
        """Return a view of each (offset, length). Raises UsageError if one is outside."""
        # Offsets come from outside: compare without a sum that could wrap around.
        outside = (offsets > self.size) | (lengths > self.size - np.minimum(offsets, self.size))
        if outside.any():
            at = int(outside.argmax())
            raise UsageError(
                f"{lengths[at]} bytes at {offsets[at]} are outside of region {self.number}, "
                f"which has {self.size}",
                "check the client",
            )
        memory = self._memory
        assert memory is not None
        starts, ends = offsets.tolist(), (offsets + lengths).tolist()
        return [memory[start:end] for start, end in zip(starts, ends, strict=True)]

    def unmap(self) -> None:
        """Give the memory back; the caller knows that nobody uses it.

        A view that somebody forgot would keep the mapping until it goes, and be safe that long.
        """
        self._memory = None


class Regions:
    """The regions of one connection: at most ``limit`` bytes, and what ``allowance`` leaves."""

    def __init__(self, limit: int, allowance: Allowance) -> None:
        self._limit = limit
        self._allowance = allowance
        self._by_number: dict[int, Region] = {}
        self._leaving: set[int] = set()
        self._taken = 0

    def __len__(self) -> int:
        return len(self._by_number)

    def enter(self, number: int) -> Region:
        """Become a user of a region; :meth:`Region.leave` ends it. Raises UsageError."""
        region = self._by_number.get(number)
        if region is None or number in self._leaving:
            raise UsageError(f"region {number} is not registered", "register it first")
        region.enter()
        return region

    def reserve(self, size: int) -> None:
        """Take room for a region to come. Raises Busy when there is none."""
        if size < PAGE or size % PAGE or size > MAX_REGION_BYTES:
            raise UsageError(
                f"a region of {size} bytes",
                f"give a multiple of {PAGE}, at most {MAX_REGION_BYTES}",
            )
        if self._taken + size > self._limit or len(self._by_number) >= MAX_REGIONS:
            raise Busy(
                f"this client has {len(self._by_number)} regions of {self._taken} bytes, at most "
                f"{MAX_REGIONS} of {self._limit} are allowed",
                "give one back first",
            )
        if self._allowance.used + size > self._allowance.limit:
            raise Busy(
                f"the regions of all clients have {self._allowance.used} bytes, at most "
                f"{self._allowance.limit} are allowed",
                "use a smaller one, or send blocks in the payload",
            )
        self._taken += size
        self._allowance.used += size

    def give_back(self, size: int) -> None:
        """Return what :meth:`reserve` took."""
        self._taken -= size
        self._allowance.used -= size

    def add(self, memory: memoryview) -> Region:
        """Give a mapping, for which room is reserved, the lowest free number from 1."""
        number = next(n for n in range(1, MAX_REGIONS + 2) if n not in self._by_number)
        region = self._by_number[number] = Region(number, memory)
        return region

    async def remove(self, number: int) -> None:
        """Give up a region: no new users from now on; returns when it is unmapped."""
        region = self._by_number.get(number)
        if region is None or number in self._leaving:
            raise UsageError(f"region {number} is not registered", "register it first")
        self._leaving.add(number)
        try:
            await region.unused()
            self._drop(region)
        finally:
            self._leaving.discard(number)

    def _drop(self, region: Region) -> None:
        del self._by_number[region.number]
        region.unmap()
        self.give_back(region.size)

    def close(self) -> None:
        """Unmap everything; no request is under way any more."""
        for region in list(self._by_number.values()):
            self._drop(region)


def map_region(descriptor: int, size: int) -> memoryview:
    """Map a sealed memfd of ``size`` bytes, its pages entered already (*worker*).

    The mapping goes with the last view of it. Raises UsageError for any other descriptor,
    PermissionDenied for a memfd that may not be written. The descriptor stays the caller's.
    """
    _check(descriptor, size)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, size, protection, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        reason = os.strerror(ctypes.get_errno())
        if ctypes.get_errno() in (errno.EPERM, errno.EACCES):
            raise PermissionDenied(
                f"the memfd of a region may not be written: {reason}", "seal less"
            )
        raise KVStoreError(f"a region cannot be mapped: {reason}", "use a smaller one")
    memory = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    # Kernels before 5.14 cannot populate: then each page is entered when it is first used.
    for advice in (mmap.MADV_DONTDUMP, _MADV_POPULATE_WRITE):
        _libc.madvise(address, size, advice)
    return memoryview(memory).cast("B")


def _check(descriptor: int, size: int) -> None:
    try:
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError:
        raise UsageError("a region's descriptor is no memfd", "make it by memfd_create") from None
    if seals & _SEALS != _SEALS:
        raise UsageError(
            "the memfd of a region may still shrink or grow", "add F_SEAL_SHRINK and F_SEAL_GROW"
        )
    # Huge pages of the hugetlb kind may be lacking at the moment of use: that would end us.
    if os.fstatvfs(descriptor).f_bsize != PAGE:
        raise UsageError("a region in reserved huge pages", "make the memfd without MFD_HUGETLB")
    found = os.fstat(descriptor).st_size
    if found != size:
        raise UsageError(
            f"a region of {found} bytes was announced with {size}", "announce its size"
        )

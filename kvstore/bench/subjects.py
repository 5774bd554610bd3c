"""What is measured: ways to keep 512 blocks. Here those that need nothing of ours.

np.memmap, np.save and plyvel are used directly, as the source's first table did, but the data is
real and a read reads. The O_DIRECT file is the reference: what one thread gets out of this disk
with buffers in huge pages and nothing else in the way.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.bench.workload import BLOCKS, PAGE, U8, Workload
from kvstore.pages import round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


class Unfit(Exception):
    """This machine cannot measure that; the message says why."""


class Subject(ABC):
    """One way to keep blocks, in ``folder``, which is there and empty. ``open`` comes first."""

    name: str
    modes: tuple[str, ...] = ("write",)
    """The ways to write that are timed apart."""
    new_keys = False
    """Whether a write of keys that were never there is timed too."""
    streams = False
    warms = True
    """Whether a second read may be faster than the first."""
    chills = True
    """Whether its reads can be made to come from the disk."""
    note = ""
    """What a reader of its figures must know."""
    daemon_cpu: Callable[[], float] | None = None

    def __init__(self, folder: Path, workload: Workload) -> None:
        self.folder = folder
        self.workload = workload
        self.versions = np.zeros(BLOCKS, np.uint64)
        """Which version of each block it holds, if it dropped nothing."""

    @abstractmethod
    def open(self) -> None:
        """Make it ready. Raises Unfit."""

    @abstractmethod
    def put(self, names: Sequence[str], numbers: Sequence[int], mode: str) -> int:
        """Write blocks of these numbers; return how many were refused."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until all that was put is on the device."""

    @abstractmethod
    def get(self, names: Sequence[str], numbers: Sequence[int], targets: Sequence[U8]) -> int:
        """Read blocks into ``targets``; return how many are missing."""

    def stream_get(
        self, names: Sequence[str], numbers: Sequence[int], targets: Sequence[U8]
    ) -> int:
        """Read blocks as they come."""
        raise NotImplementedError

    def delete(self, names: Sequence[str]) -> None:
        """Remove blocks."""
        raise NotImplementedError

    @abstractmethod
    def chill(self) -> None:
        """Have the next reads come from the disk, as far as this machine is concerned."""

    @abstractmethod
    def close(self) -> None:
        """End it, whether it was opened or not. May be called twice."""

    def memory_hits(self) -> int | None:
        """Return how many reads needed no disk, so far; None where nobody counts."""
        return None

    def written_before(self) -> int:
        """Return what :meth:`written_bytes` is to be told after a put."""
        return 0

    def written_bytes(self, numbers: Sequence[int], before: int) -> int:
        """Return the bytes that the put of these blocks wrote: here, of those that come back right
        from the disk."""
        self.chill()
        scratch = self.workload.scratch
        right = {}
        for number in set(numbers):
            missing = self.get([self.workload.name(number)], [number], [scratch])
            right[number] = not missing and np.array_equal(scratch, self.workload.source[number])
        return sum(right[number] for number in numbers) * self.workload.model.block_bytes


def drop_cached(folder: Path) -> None:
    """Have the kernel forget the contents of all files below ``folder`` that are on the disk."""
    for path in folder.rglob("*"):
        with suppress(OSError):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


class Memmap(Subject):
    """One large file, mapped: a write is a copy, a drain is msync."""

    name = "memmap"

    def open(self) -> None:
        self._path = self.folder / "blocks"
        size = self.workload.model.set_bytes
        with self._path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        self._map()

    def _map(self) -> None:
        shape = BLOCKS, self.workload.model.block_bytes
        self._blocks: Any = np.memmap(self._path, np.uint8, "r+", shape=shape)

    def put(self, names: Sequence[str], numbers: Sequence[int], mode: str) -> int:
        for number in numbers:
            np.copyto(self._blocks[number], self.workload.source[number])
        return 0

    def drain(self) -> None:
        self._blocks.flush()

    def get(self, names: Sequence[str], numbers: Sequence[int], targets: Sequence[U8]) -> int:
        for number, target in zip(numbers, targets, strict=True):
            np.copyto(target, self._blocks[number])
        return 0

    def chill(self) -> None:
        self._blocks = None  # mapped pages cannot be dropped
        drop_cached(self.folder)
        self._map()

    def close(self) -> None:
        self._blocks = None


class Files(Subject):
    """One file a block by np.save, in one folder, neither synced nor renamed."""

    name = "files"

    def open(self) -> None:
        pass

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.npy"

    def put(self, names: Sequence[str], numbers: Sequence[int], mode: str) -> int:
        for name, number in zip(names, numbers, strict=True):
            np.save(self._path(name), self.workload.source[number])
        return 0

    def drain(self) -> None:
        for path in (*self.folder.iterdir(), self.folder):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    def get(self, names: Sequence[str], numbers: Sequence[int], targets: Sequence[U8]) -> int:
        for name, target in zip(names, targets, strict=True):
            np.copyto(target, np.load(self._path(name), allow_pickle=False))
        return 0

    def chill(self) -> None:
        drop_cached(self.folder)

    def close(self) -> None:
        pass


class LevelDb(Subject):
    """LevelDB by plyvel with its default options; batches of a task, not synced."""

    name = "leveldb"
    _db: Any = None

    def open(self) -> None:
        try:
            import plyvel
        except ImportError:
            raise Unfit("plyvel is not installed: pip install 'kvstore[leveldb]'") from None
        self._make = plyvel.DB
        self._db = self._make(str(self.folder / "db"), create_if_missing=True)

    def put(self, names: Sequence[str], numbers: Sequence[int], mode: str) -> int:
        with self._db.write_batch() as batch:
            for name, number in zip(names, numbers, strict=True):
                batch.put(name.encode(), self.workload.source[number].tobytes())
        return 0

    def drain(self) -> None:
        self._db.put(b"drained", b"", sync=True)

    def get(self, names: Sequence[str], numbers: Sequence[int], targets: Sequence[U8]) -> int:
        missing = 0
        for name, target in zip(names, targets, strict=True):
            found = self._db.get(name.encode())
            if found is None:
                missing += 1
            else:
                np.copyto(target, np.frombuffer(found, np.uint8))
        return missing

    def chill(self) -> None:
        self._db.close()
        drop_cached(self.folder)
        self._db = self._make(str(self.folder / "db"))

    def close(self) -> None:
        if self._db is not None:
            self._db.close()


class DirectFile(Subject):
    """The reference: one file, written once, then moved block by block with O_DIRECT."""

    name = "O_DIRECT"
    warms = False
    _descriptor = -1

    def open(self) -> None:
        self._stride = round_up(self.workload.model.block_bytes, PAGE)
        flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT
        try:
            self._descriptor = os.open(self.folder / "blocks", flags, 0o600)
            os.posix_fallocate(self._descriptor, 0, BLOCKS * self._stride)
        except OSError as error:
            raise Unfit(f"{self.folder} takes no O_DIRECT: {error.strerror}") from error

    def put(self, names: Sequence[str], numbers: Sequence[int], mode: str) -> int:
        refused = 0
        for number in numbers:
            block = self.workload.source[number]
            refused += len(block) != os.pwritev(
                self._descriptor, [block.data], number * self._stride
            )
        return refused

    def drain(self) -> None:
        os.fdatasync(self._descriptor)

    def get(self, names: Sequence[str], numbers: Sequence[int], targets: Sequence[U8]) -> int:
        missing = 0
        for number, target in zip(numbers, targets, strict=True):
            got = os.preadv(self._descriptor, [target.data], number * self._stride)
            missing += len(target) != got
        return missing

    def chill(self) -> None:
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._descriptor)


DIRECT = {subject.name: subject for subject in (Memmap, Files, LevelDb)}
"""The subjects of the first table."""

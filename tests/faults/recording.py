"""What a filesystem wrote to its disk, and the disks that a power loss in the middle leaves.

A flush makes everything before it durable; of what came after the last one each 4 KiB is on the
disk or is not. On ext4 some are there in part: what xfs and btrfs keep in place of their own does
not survive half a sector's page, which no store can help.
"""

from __future__ import annotations

import bisect
import mmap
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tests.faults import disks
from tests.faults.fuse_disk import NAME, RECORD

ROOT = Path(__file__).resolve().parent.parent.parent
DROPPED = 0.5
TORN = 0.1
SECTOR = 512
PATIENCE = 120.0


class Write(NamedTuple):
    """One write; ``end`` is the size of the log behind it."""

    offset: int
    start: int
    stop: int
    end: int


class Recorder:
    """A mounted filesystem on a disk that logs, as a context manager."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.point = folder / "mount"
        self.log = folder / "disk.log"
        self._kind, self._folder = kind, folder
        self._base = folder / f"{kind}.base"
        self._image = folder / "disk.img"
        self._fuse = folder / "fuse"

    def __enter__(self) -> Recorder:
        for path in (self.point, self._fuse):
            path.mkdir(exist_ok=True)
        self.log.unlink(missing_ok=True)
        if not self._base.exists():
            disks.make_image(self._kind, self._base)
        disks.run("cp", "--sparse=always", self._base, self._image)
        command = [sys.executable, "-m", "tests.faults.fuse_disk"]
        command += [str(self._image), str(self.log), str(self._fuse)]
        self._server = subprocess.Popen(command, cwd=ROOT)
        try:
            self._wait_for(lambda: (self._fuse / NAME).exists())
            self._device = disks.run("losetup", "--find", "--show", self._fuse / NAME)
            try:
                disks.run("mount", "-t", self._kind, self._device, self.point)
            except OSError:
                disks.run("losetup", "-d", self._device)
                raise
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # In this order: the loop device goes when nobody has it open, and before its file does.
        self._patiently("umount", self.point)
        self._patiently("losetup", "-d", self._device)
        self._wait_for(lambda: not disks.run("losetup", "-j", self._fuse / NAME))
        self._end()

    def breaks(self, broken: bool) -> None:
        """Have the disk refuse writes, or take them again."""
        mark = self._image.with_name(f"{self._image.name}.broken")
        mark.touch() if broken else mark.unlink(missing_ok=True)

    def crashes(self) -> Recording:
        return Recording(self._kind, self._base, self.log, self._folder)

    def _end(self) -> None:
        self._patiently("fusermount3", "-u", self._fuse)
        try:
            self._server.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def _patiently(self, *command: str | Path) -> None:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                disks.run(*command)
                return
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def _wait_for(self, done: object) -> None:
        until = time.monotonic() + PATIENCE
        while not done():  # type: ignore[operator]
            if time.monotonic() > until or self._server.poll() is not None:
                raise TimeoutError("the disk that logs does not answer")
            time.sleep(0.01)


class Recording:
    """A log that is complete."""

    def __init__(self, kind: str, base: Path, log: Path, folder: Path) -> None:
        self._kind, self._base = kind, base
        self._crash = folder / "crash.img"
        self.point = folder / "crash"
        self.point.mkdir(exist_ok=True)
        file = os.open(log, os.O_RDONLY)
        self._data = mmap.mmap(file, 0, prot=mmap.PROT_READ)
        os.close(file)
        self.writes: list[Write] = []
        self._flushes: list[int] = [0]
        """How many writes there were before each flush."""
        self._flushed_at: list[int] = [0]
        self._parse()

    def _parse(self) -> None:
        at = 0
        while at < len(self._data):
            kind, offset, length = RECORD.unpack_from(self._data, at)
            start = at + RECORD.size
            at = start + length
            if kind == b"F":
                self._flushes.append(len(self.writes))
                self._flushed_at.append(at)
            else:
                self.writes.append(Write(offset, start, at, at))

    @contextmanager
    def crashed(self, upto: int, chance: random.Random) -> Iterator[Path]:
        """Mount what the disk holds if the power went when the log had ``upto`` bytes.

        Raises Unmountable.
        """
        self._make(upto, chance)
        try:
            disks.run("mount", "-t", self._kind, "-o", "loop", self._crash, self.point)
        except OSError as error:
            self._crash.unlink()
            raise disks.Unmountable(str(error)) from error
        try:
            yield self.point
        finally:
            disks.run("umount", self.point)
            self._crash.unlink()

    def _make(self, upto: int, chance: random.Random) -> None:
        disks.run("cp", "--sparse=always", self._base, self._crash)
        count = bisect.bisect_right(self.writes, upto, key=lambda write: write.end)
        sure = self._flushes[bisect.bisect_right(self._flushed_at, upto) - 1]
        image = os.open(self._crash, os.O_WRONLY)
        for number, write in enumerate(self.writes[:count]):
            start, stop = write.start, write.stop
            if number >= sure:
                if chance.random() < DROPPED:
                    continue
                if self._kind == "ext4" and chance.random() < TORN:
                    stop = start + chance.randrange(SECTOR, stop - start + 1, SECTOR)
            os.pwrite(image, self._data[start:stop], write.offset)
        os.close(image)

    def close(self) -> None:
        self._data.close()
        with suppress(OSError):
            self._crash.unlink()

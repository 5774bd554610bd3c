"""Filesystems whose power can be cut. Needs root; everything lies in a tmpfs of its own."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.mounts import NO_FLUSH, SHUTDOWN

IMAGE_BYTES = 400 << 20
"""XFS wants 300 MB; most of it stays a hole."""
MKFS = {
    "ext4": ("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"),
    "xfs": ("mkfs.xfs", "-q", "-f"),
    "btrfs": ("mkfs.btrfs", "-q", "-f"),
}


CLONE_NEWNS = 0x20000
MS_REC, MS_PRIVATE = 0x4000, 0x40000


class Unmountable(Exception):
    """The filesystem itself did not survive: nothing that a store could help."""


def run(*command: str | Path) -> str:
    done = subprocess.run([str(one) for one in command], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
    return done.stdout.strip()


def missing() -> str:
    """Say what this machine lacks for the laboratory; empty if nothing."""
    if os.geteuid() != 0:
        return "mounting filesystems needs root"
    tools = ["strace", "losetup", "fusermount3", *(command[0] for command in MKFS.values())]
    lacking = [tool for tool in tools if shutil.which(tool) is None]
    if lacking:
        return f"{', '.join(lacking)} not installed"
    lacking = [path for path in ("/dev/fuse", "/dev/loop-control") if not os.path.exists(path)]
    return f"{', '.join(lacking)} not there" if lacking else ""


def alone() -> None:
    """Give this process a table of mounts of its own.

    Whoever else makes one for himself would take copies of our mounts along, and a filesystem is
    unmounted only when its last mount goes. Nothing is left behind at the end either.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
        raise OSError(ctypes.get_errno(), "no mount namespace of our own")


def make_image(kind: str, path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    run(*MKFS[kind], path)


@contextlib.contextmanager
def memory(folder: Path) -> Iterator[Path]:
    """Mount a tmpfs on a folder: images are written at the speed of memory."""
    folder.mkdir(exist_ok=True)
    run("mount", "-t", "tmpfs", "-o", "size=6g", "faults", folder)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


class Disk:
    """A filesystem in an image, mounted at ``point`` while a store is on it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.point = folder / f"{kind}-mount"
        self._image = folder / f"{kind}.img"
        self.point.mkdir()
        make_image(kind, self._image)
        self._device = run("losetup", "--find", "--show", self._image)
        self._mounted = False

    def mount(self) -> None:
        try:
            run("mount", "-t", self.kind, self._device, self.point)
        except OSError as error:
            raise Unmountable(str(error)) from error
        self._mounted = True

    def unmount(self) -> None:
        if self._mounted:
            run("umount", self.point)
            self._mounted = False

    def lose(self) -> None:
        """Unmount what has been cut off, mount it again: its journal is replayed."""
        self.unmount()
        self.mount()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.unmount()
        run("losetup", "-d", self._device)

    def descriptor(self) -> int:
        return os.open(self.point, os.O_RDONLY | os.O_DIRECTORY)


def cut(descriptor: int) -> None:
    """Cut the power: from now on every call on that filesystem fails, and nothing that was not
    synced reaches the disk. ext4 and xfs (EXT4_IOC_SHUTDOWN, XFS_IOC_GOINGDOWN)."""
    fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", NO_FLUSH))

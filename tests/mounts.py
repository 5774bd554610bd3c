"""Small filesystems of our own, for tests of what a big healthy one never does. Needs root."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SHUTDOWN = 0x8004587D
"""The ioctl EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN."""
NO_FLUSH = 2


@contextlib.contextmanager
def mounted(folder: Path, kind: str, options: str = "", image_mib: int = 0) -> Iterator[Path]:
    """Mount a filesystem in a new directory of ``folder``: of memory, or of an image of this size.

    Skips the test without root or where the kernel refuses.
    """
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    point = folder / f"mounted-{kind}"
    point.mkdir()
    source = kind
    if image_mib:
        image = folder / f"{kind}.img"
        with image.open("wb") as file:
            file.truncate(image_mib << 20)
        _run(f"mkfs.{kind}", "-q", str(image))
        source, options = str(image), f"loop,{options}".rstrip(",")
    if kind == "tmpfs":  # which is everybody's otherwise, and no place for a store
        options = f"mode=700,{options}".rstrip(",")
    _run("mount", "-t", kind, *(("-o", options) if options else ()), source, str(point))
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """Mount a directory a second time, beside itself, so that nothing can be written there."""
    point = folder.parent / "read-only"
    point.mkdir()
    _run("mount", "--bind", str(folder), str(point))
    try:
        _run("mount", "-o", "remount,bind,ro", str(point))
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)


def shut_down(point: Path) -> None:
    """Make every later write and sync of an ext4 or xfs mount fail, as if its disk were gone."""
    descriptor = os.open(point, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", NO_FLUSH))
    finally:
        os.close(descriptor)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip(f"{command[0]} is not installed")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{' '.join(command)}: {error.stderr.decode().strip()}")

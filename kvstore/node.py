"""What this machine has: memory that we may use, filesystems and where they are mounted."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from pathlib import Path
from typing import NamedTuple

from kvstore.errors import KVStoreError


class Mount(NamedTuple):
    """A mounted filesystem: device, mount point, type, and the options of mount and filesystem.

    What is not known is ``unknown`` or empty.
    """

    device: str
    point: str
    kind: str = "unknown"
    options: tuple[str, ...] = ()


def mount_of(path: Path) -> Mount:
    """Return the filesystem that holds ``path``, as far as known.

    From /proc/self/mountinfo (proc(5)): fields 5 mount point and 6 options, and behind " - " type,
    source and the filesystem's own options.
    """
    real = path.resolve()
    where = next((str(parent) for parent in (real, *real.parents) if os.path.ismount(parent)), "/")
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return Mount("unknown", where)
    for line in reversed(lines):
        fields, _, rest = line.partition(" - ")
        # Blanks in names are written as \040.
        if fields.split(" ")[4].replace("\\040", " ") == where:
            kind, device, options = rest.split(" ")[:3]
            names = dict.fromkeys([*fields.split(" ")[5].split(","), *options.split(",")])
            return Mount(device, where, kind, tuple(names))
    return Mount("unknown", where)


_CHECKSUMS = {
    "btrfs": {"nodatacow", "nodatasum"},
    "zfs": set[str](),
    "bcachefs": {"data_checksum=none", "nocow"},
}
"""Filesystems that keep checksums of data, and the mount options without which they do."""
_NONE_AT_ALL = frozenset({"ext2", "ext3", "ext4", "xfs", "f2fs", "tmpfs", "ramfs"})
_GET_FLAGS, _NO_COPY_ON_WRITE = 0x80086601, 0x00800000
"""FS_IOC_GETFLAGS and FS_NOCOW_FL of linux/fs.h: such files of btrfs have no checksums."""


def checksums_data(path: Path) -> bool | None:
    """Tell whether the filesystem of a directory verifies what it reads; None if that is unknown.

    What a property of the filesystem turns off (``zfs set checksum=off``) is not seen.
    """
    mount = mount_of(path)
    if mount.kind in _NONE_AT_ALL:
        return False
    if mount.kind not in _CHECKSUMS:
        return None
    flags = bytearray(8)
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(descriptor, _GET_FLAGS, flags)
        finally:
            os.close(descriptor)
    plain = int.from_bytes(flags, sys.byteorder) & _NO_COPY_ON_WRITE
    return not plain and not _CHECKSUMS[mount.kind] & set(mount.options)


def filesystem_bytes(path: Path) -> int:
    """Return the size of the filesystem that holds ``path``, or will; 0 if it cannot be asked."""
    for place in (path, *path.parents):
        try:
            found = os.statvfs(place)
        except FileNotFoundError:
            continue
        except OSError:
            break
        return found.f_blocks * found.f_frsize
    return 0


def free_bytes(path: Path) -> int:
    """Return the bytes of the filesystem that this process may still fill. Raises KVStoreError."""
    try:
        found = os.statvfs(path)
    except OSError as error:
        raise KVStoreError(f"cannot ask the filesystem of {path}: {error.strerror}") from error
    return found.f_bavail * found.f_frsize


def memory_limit() -> tuple[int, str]:
    """Return the bytes of memory this process may use, and what limits them."""
    limit, where = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "the memory"
    for path in _control_group_files():
        try:
            value = int(path.read_text())
        except (OSError, ValueError):  # absent, or "max"
            continue
        if value < limit:
            limit, where = value, f"the limit in {path}"
    return limit, where


def _control_group_files() -> list[Path]:
    root = Path("/sys/fs/cgroup")
    files = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            base, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        folder = base / group.lstrip("/")
        files += [
            parent / name
            for parent in (folder, *folder.parents)
            if base in (parent, *parent.parents)
        ]
    return files

"""What this machine has: memory that we may use, the size of a filesystem."""

from __future__ import annotations

import os
from pathlib import Path


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

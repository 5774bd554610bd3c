"""Faults put into kvstore itself: a laboratory that does not find them proves nothing.

Each is a function that changes kvstore for the rest of a process; it is called in the child that
drives a store and in the one that judges it. Another one of your own:
``python -m tests.faults --control package.module:function``.
"""

from __future__ import annotations

import importlib
import os
import stat
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvstore import events, record, removal, writer
from kvstore.backends import directio, publish
from kvstore.record import Verdict


def no_file_sync() -> None:
    """Files are not synced; directories are."""
    _sync_only(lambda mode: not stat.S_ISREG(mode))


def no_directory_sync() -> None:
    """Names are not synced; files are."""
    _sync_only(lambda mode: not stat.S_ISDIR(mode))
    for module in (directio, publish):
        vars(module)["syncfs"] = lambda _descriptor: None


def no_verification() -> None:
    """Whatever is read passes for the block that was asked for."""

    def judge(*_: object, **__: object) -> tuple[Verdict, int, str]:
        return Verdict.OK, 0, ""

    vars(record)["judge"] = judge


def journal_first() -> None:
    """The journal promises records before the engine has them."""
    real = writer.Write._write

    def write(self: writer.Write, number: int) -> events.Records:
        entry, wanted = self._entries[number], ~self._skip[number]
        puts: events.Records = entry.begins[wanted].copy()
        puts["kind"] = events.Kind.PUT
        self._core.journal.append(puts)
        return real(self, number)

    setattr(writer.Write, "_write", write)  # noqa: B010


def reuse_first() -> None:
    """Places are used again before the journal says that they are free."""
    waiting: list[events.Records] = []

    def run(self: removal.Removal) -> None:
        core = self._core
        for _, blocks in self._groups:
            core.engine.delete_many(blocks, self._how)
        self._deleted = True
        waiting.append(self.frees)
        if len(waiting) > 2:
            core.journal.append(np.concatenate(waiting))
            waiting.clear()

    setattr(removal.Removal, "run", run)  # noqa: B010


class Control(NamedTuple):
    """A fault, what it must show in (fields of a verdict), and the points that are to find it:
    (how, engine, filesystem, phase)."""

    apply: Callable[[], None]
    shows: tuple[str, ...]
    spots: tuple[tuple[str, str, str, str], ...]


CONTROLS = {
    "no file sync": Control(
        no_file_sync,
        ("lost",),
        (("cut", "filesystem", "xfs", "put"), ("log", "direct", "ext4", "put")),
    ),
    "no directory sync": Control(
        no_directory_sync,
        ("lost",),
        (("cut", "filesystem", "ext4", "put"), ("cut", "filesystem", "xfs", "overwrite")),
    ),
    "no verification on read": Control(
        no_verification,
        ("wrong",),
        (("log", "direct", "ext4", "evict"), ("log", "direct", "xfs", "evict")),
    ),
    "journal before the engine": Control(
        journal_first,
        ("other",),
        (("kill", "lmdb", "ext4", "put"), ("kill", "filesystem", "ext4", "put")),
    ),
    "place reused before FREE": Control(
        reuse_first,
        ("other",),
        (("kill", "direct", "ext4", "evict"), ("kill", "mmap", "xfs", "evict")),
    ),
}


def apply(name: str) -> None:
    """Put a fault into kvstore: one of CONTROLS, or ``module:function``; nothing for ''."""
    if name in CONTROLS:
        CONTROLS[name].apply()
    elif name:
        module, _, function = name.partition(":")
        getattr(importlib.import_module(module), function)()


def _sync_only(wanted: Callable[[int], bool]) -> None:
    for name in ("fsync", "fdatasync"):
        setattr(os, name, _choosing(getattr(os, name), wanted))


def _choosing(real: Callable[[int], None], wanted: Callable[[int], bool]) -> Callable[[int], None]:
    def sync(descriptor: int) -> None:
        if wanted(os.fstat(descriptor).st_mode):
            real(descriptor)

    return sync

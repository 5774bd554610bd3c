"""The daemon without its command: any setting from JSON, and a gate in front of the disk.

``python -m tests.bare_daemon FOLDER SETTINGS``: while the file FOLDER/shut is there, every read and
write of the engine waits, after it has left its name (``get`` or ``put``) in FOLDER/inside; while
FOLDER/broken is there, each of them fails. FOLDER/shut also holds a scan before its end, and
FOLDER/frozen holds the event loop. FOLDER/hung holds whatever is appended to the journal.
"""

from __future__ import annotations

import grp
import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvstore.backends.filesystem import FilesystemEngine
from kvstore.errors import EngineError, KVStoreError
from kvstore.guard import GuardFiles
from kvstore.journal import Journal
from kvstore.opening import Options
from kvstore.server import ServerOptions, serve
from kvstore.store import Store


def gated(folder: Path, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
    def wait_and_act(*arguments: Any, **named: Any) -> Any:
        if (folder / "shut").exists():
            (folder / "inside").write_text(name)
            wait_while(folder / "shut")
        if (folder / "broken").exists():
            raise EngineError("the disk is broken", "mend it")
        return act(*arguments, **named)

    return wait_and_act


def wait_while(path: Path) -> None:
    while path.exists():
        time.sleep(0.005)


def slow_scan(folder: Path, scan: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def go_on(*arguments: Any) -> Iterator[Any]:
        yield from scan(*arguments)
        wait_while(folder / "shut")

    return go_on


def hanging(folder: Path, write: Callable[..., None]) -> Callable[..., None]:
    def wait_and_write(*arguments: Any) -> None:
        wait_while(folder / "hung")
        write(*arguments)

    return wait_and_write


def freezing(folder: Path, tick: Callable[..., None]) -> Callable[..., None]:
    def wait_and_tick(*arguments: Any) -> None:
        wait_while(folder / "frozen")
        tick(*arguments)

    return wait_and_tick


def become(user: int, group: str | None) -> None:
    """Go on as another user, with everything imported that only root may read."""
    if user:
        importlib.import_module("kvstore.watching")
        os.setgroups([] if group is None else [grp.getgrnam(group).gr_gid])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def main() -> int:
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    logging.basicConfig(level=logging.DEBUG, format="%(message)s")
    engine: Any = FilesystemEngine
    engine.get_many_into = gated(folder, "get", engine.get_many_into)
    engine.put_many = gated(folder, "put", engine.put_many)
    engine.scan = slow_scan(folder, engine.scan)
    journal: Any = Journal
    journal._write = hanging(folder, journal._write)
    store: Any = Store
    store.tick = freezing(folder, store.tick)
    memory = settings.pop("memory", 64 << 20)
    late = {name: settings.pop(name) for name in ("write", "max_dirty_age") if name in settings}
    options = Options(capacity=256 << 20, min_free=0, memory_bytes=memory, **late)
    try:
        guard = GuardFiles(**settings.pop("guard", {}))
        become(settings.pop("user", 0), settings.get("socket_group"))
        place = folder / "kv.sock", folder / "store"
        return serve(ServerOptions(*place, options, guard=guard, **settings))
    except KVStoreError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())

"""New settings for a daemon that serves: on SIGHUP, and when the file has changed.

A file that changes counts once it has been left alone for a second, and only as a whole: what is
wrong with it is a problem in ``status`` until it is mended, and the old values stay. Which settings
can change while we serve is a table in :mod:`kvstore.config`; the others wait for a restart, and
``status`` names them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from kvstore import layout, node
from kvstore.errors import KVStoreError
from kvstore.space import default_floor, quarantine_limit
from kvstore.upkeep import fit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.opening import Options
    from kvstore.server import Server, ServerOptions
    from kvstore.store import Store
    from kvstore.watching import Watching

log = logging.getLogger(__name__)

STABLE_SECONDS = 1.0
"""How long a file must be left alone before it is read: somebody may be in the middle of it."""

Signature = tuple[int, int, int, int] | None


@dataclass(frozen=True, slots=True)
class Change:
    """What is configured now. ``options`` are those in force, with what changes while we serve.

    ``taken``: what has changed since the last time, ``waiting``: what differs from what is in force
    and needs a restart; both tell by the name of a setting what it is, in a line for people.
    """

    options: ServerOptions
    taken: dict[str, str]
    waiting: dict[str, str]


class Configuration(Protocol):
    """Where the settings come from. ``file`` need not be there."""

    file: Path

    def read(self) -> Change:
        """Read and judge all settings again (*worker*). Raises KVStoreError: nothing changes."""


class Reloads:
    """Has the server take new settings over, one change after the other; event loop only.

    ``problem``: why what is configured is not what is in force; empty if it is. ``waiting``: names
    of settings that need a restart.
    """

    def __init__(self, server: Server, configuration: Configuration | None) -> None:
        self.problem = ""
        self.waiting: list[str] = []
        self._server = server
        self._configuration = configuration
        self._asked = False
        self._woken = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        # As it was before the settings were read, or nearly so: a change in between is read twice.
        self._seen = None if configuration is None else _signature(configuration.file)

    def ask(self) -> None:
        """Have everything read again, changed or not."""
        self._asked = True
        self._woken.set()

    @contextlib.contextmanager
    def watching(self, watching: Watching) -> Iterator[None]:
        """Take settings over in here, whoever asks."""
        configuration = self._configuration
        if configuration is not None and configuration.file.parent.is_dir():
            wake = partial(self._loop.call_soon_threadsafe, self._woken.set)
            watching.add(configuration.file.parent, wake)
        self._woken.set()  # the file may have changed while the store was opened
        task = self._loop.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()

    async def _run(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            try:
                if self._configuration is not None and await self._is_due(self._configuration):
                    self._asked = False
                    await self._reload(self._configuration)
            except Exception:
                # The outermost frame of a reload: the daemon goes on as it was.
                log.exception("a reload failed")
                self._server.count_failed_request()

    async def _is_due(self, configuration: Configuration) -> bool:
        """Tell whether to read: at once if asked, else when a changed file has come to rest."""
        look = partial(self._server.in_worker, partial(_signature, configuration.file))
        found = await look()
        while not self._asked and found != self._seen:
            before = found
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STABLE_SECONDS):
                    await self._woken_by_asking()
            found = await look()
            if found == before:
                break
        return self._asked or found != self._seen

    async def _woken_by_asking(self) -> None:
        while not self._asked:
            await self._woken.wait()
            self._woken.clear()

    async def _reload(self, configuration: Configuration) -> None:
        supervisor = self._server.supervisor
        supervisor.reloading()
        # Before it is read: what changes after this is looked at again.
        self._seen = await self._server.in_worker(partial(_signature, configuration.file))
        try:
            change = await self._server.in_worker(configuration.read)
            await self._take(change)
        except KVStoreError as error:
            self.problem = f"invalid configuration on disk: {error.message}"
            log.error("the configuration is invalid, all settings stay as they are: %s", error)
        supervisor.ready(self._server.status())

    async def _take(self, change: Change) -> None:
        before, options = self._server.settings, change.options
        taken, waiting = dict(change.taken), dict(change.waiting)
        self._server.adopt(options)
        store = await self._server.ready(self._loop.time())
        if not await self._adjust(store, before.options, options.options):
            told = f"capacity = {options.options.capacity} bytes, for this engine"
            waiting["capacity"] = taken.pop("capacity", told)
        self.problem, self.waiting = "", sorted(waiting)
        log.info("the configuration was read; settings that changed: %d", len(taken))
        for text in taken.values():
            log.info(text)
        for text in waiting.values():
            log.warning("needs a restart: %s", text)

    async def _adjust(self, store: Store, before: Options, after: Options) -> bool:
        """Have an open store keep to other settings; False if the capacity needs an opening."""
        core = store.core
        if after.min_free != before.min_free:
            core.space.floor = await self._server.in_worker(partial(_floor, store, after.min_free))
        core.may_evict = after.when_full == "evict"
        if core.late.on:
            core.late.max_age = after.max_dirty_age
        store.scrub.use_rate(after.scrub_rate)
        return await self._adjust_capacity(store, after.capacity)

    async def _adjust_capacity(self, store: Store, capacity: int | None) -> bool:
        core = store.core
        if capacity in (None, core.space.capacity):
            return True
        assert capacity is not None
        if not core.engine.suits(capacity):
            return False
        core.record = replace(core.record, capacity_bytes=capacity)
        if not core.read_only:
            # If a kill comes first, the next opening finds the setting itself and writes it.
            try:
                await self._server.in_worker(partial(layout.write, core.path, core.record))
            except KVStoreError as error:
                log.warning("the capacity is not in STORE.json yet: %s", error)
        core.space.capacity = capacity
        core.quarantine.limit = quarantine_limit(capacity)
        fit(core)
        return True


def _floor(store: Store, wanted: int | None) -> int:
    return default_floor(node.filesystem_bytes(store.core.path)) if wanted is None else wanted


def _signature(path: Path) -> Signature:
    """Return what differs when a file was changed or replaced; None if it cannot be seen."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev

"""The daemon: opens the store, listens, serves clients, drains, stops.

The event loop's thread owns the store. Everything that touches the disk runs in a few workers and
comes back as one callback per batch. The life of the daemon is :meth:`Server.run`: lock, listen,
open (clients wait meanwhile), serve, drain, stop. Whoever started it, normally systemd, is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from kvstore import __version__, keys
from kvstore.errors import Busy, DaemonUnavailable, KVStoreError
from kvstore.guard import GuardFiles
from kvstore.mapped import Allowance
from kvstore.metrics import Durations
from kvstore.notify import Supervisor
from kvstore.opening import Opening, Options
from kvstore.peers import group_id, own_pidfd
from kvstore.reception import Reception
from kvstore.reload import Reloads
from kvstore.sockets import Doors, handed_over

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvstore.admin import Admin
    from kvstore.job import Job
    from kvstore.namespaces import Namespace
    from kvstore.reload import Configuration
    from kvstore.store import Store

log = logging.getLogger(__name__)
T = TypeVar("T")

TICK_SECONDS = 0.5
"""The order of use survives a kill up to the last tick; the supervisor hears of us that often."""
SWITCH_INTERVAL = 0.0005
"""Seconds for which a thread may keep the interpreter; the default of 5 ms makes I/O wait."""
_ROOM_SECONDS = 0.05
"""How often whoever waits for memory looks again by itself: it becomes free in many ways."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Plain settings of the daemon, as in config.py; times in seconds, sizes in bytes.

    ``listen`` is ``tcp://HOST:PORT``, a loopback address unless ``guard`` is complete; ``admin`` a
    loopback address or the path of a Unix socket. One client has at most ``max_requests`` under
    way, with ``max_client_bytes`` of frames and memory.
    """

    socket: Path
    store: Path
    options: Options
    workers: int = 4
    max_clients: int = 256
    request_timeout: float = 30.0
    drain_timeout: float = 60.0
    listen: str | None = None
    admin: str | None = None
    guard: GuardFiles = field(default_factory=GuardFiles)
    socket_group: str | None = None
    admin_group: str | None = None
    max_requests: int = 64
    max_client_bytes: int = 128 << 20
    max_client_regions: int = 1 << 30
    max_regions: int = 8 << 30


@dataclass(eq=False)
class Server:
    """One daemon over one store."""

    settings: ServerOptions
    configuration: Configuration | None = None
    """Where settings are read again while we serve."""
    _store: Store | None = None
    _stopping: bool = False
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _failed_requests: int = 0
    _doors: Doors | None = None
    _admin: Admin | None = None
    default: Namespace | None = None
    """The namespace ``default``, once somebody has used it."""
    mapping: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a client's region is mapped."""
    warming: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by whoever brings blocks into memory: others keep all workers but one."""
    get_durations: Durations = field(default_factory=Durations)
    put_durations: Durations = field(default_factory=Durations)
    pid: int = field(default_factory=os.getpid)
    pidfd: int | None = None

    # -- life -------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Serve until a signal; return the exit code: 0 after a clean drain, 1 after a bad one."""
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(self.settings.workers, "worker")
        self._memory_changed = asyncio.Event()
        self._is_open = asyncio.Event()
        self._stop = asyncio.Event()
        self.supervisor = Supervisor(os.environ)
        self.pidfd = own_pidfd()
        self.allowance = Allowance(self.settings.max_regions)
        self._guard = self.settings.guard.read()
        self._reception = Reception(self, self._guard)
        self.reloads = Reloads(self, self.configuration)
        self.adopt(self.settings)
        self._opening = Opening(self.settings.store, self.settings.options)
        self._opening.lock(wait=handed_over(os.environ))
        try:
            self._watch_signals()
            doors = self._listen()
            self._reception.open(doors.clients)
            with self._telling(self._tell_of_opening):
                await self._open()
            if not self._stop.is_set():
                await self._serve_and_watch()
            self._reception.close()
            with self._telling(self._tell_of_drain):
                return await self._shut_down()
        finally:
            self.supervisor.close()
            self._stop_listening()
            self._opening.unlock()
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _listen(self) -> Doors:
        settings = self.settings
        self._doors = Doors(
            os.environ,
            settings.socket,
            group_id(settings.socket_group, "socket_group"),
            settings.listen,
            settings.admin,
            guarded=self._guard.complete,
        )
        if self._doors.admin is not None:
            from kvstore.admin import Admin  # its library takes a tenth of a second

            self._admin = Admin(self._doors.admin)
        return self._doors

    def _watch_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        """SIGHUP reads the settings again; any other drains at first, and ends at once then."""
        if number == signal.SIGHUP:
            self.reloads.ask()
            return
        if self._stop.is_set():
            log.error("second signal: ending at once, without a drain")
            os._exit(128 + number)
        log.info("%s: draining", signal.Signals(number).name)
        self._stop.set()

    async def _open(self) -> None:
        started = time.monotonic()
        stop = self._loop.create_task(self._stop.wait())
        stop.add_done_callback(lambda _: self._opening.cancel())
        store = await self.in_worker(self._opening.open)
        stop.cancel()
        if store is None:
            return
        self._store = store
        store.core.timer = self._call_later
        self._is_open.set()
        self.dispatch()
        self.supervisor.ready(store.status())
        log.info(
            "ready: %d blocks, %d bytes, in %.2f s",
            store.core.index.blocks,
            store.core.index.live_bytes,
            time.monotonic() - started,
        )

    def adopt(self, settings: ServerOptions) -> None:
        """Keep to these settings from now on, as far as they may change while we serve: limits of
        memory and who is an administrator count for connections that come after this."""
        self._reception.admin_gid = group_id(settings.admin_group, "admin_group")
        self.allowance.limit = settings.max_regions
        self.settings = settings

    async def _serve_and_watch(self) -> None:
        from kvstore.watching import Watching  # its library takes a twentieth of a second

        watching = Watching()
        assert self._store is not None
        incoming = self._store.incoming
        incoming.found = partial(watching.add, incoming.path, incoming.wake)
        try:
            with self.reloads.watching(watching):
                await self._upkeep()
        finally:
            watching.close()

    async def _upkeep(self) -> None:
        assert self._store is not None
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._stop.wait()
            try:
                self._store.tick()
                self.supervisor.tell(self.status)
                self._publish()
            except Exception:
                # The outermost frame of the upkeep: the daemon goes on serving.
                log.exception("upkeep failed")
                self.count_failed_request()
            self.dispatch()
            self.supervisor.sign()

    @contextlib.contextmanager
    def _telling(self, tell: Callable[[], None]) -> Iterator[None]:
        """Have the supervisor told now and then how far we are."""

        async def repeat() -> None:
            while True:
                tell()
                await asyncio.sleep(TICK_SECONDS)

        task = self._loop.create_task(repeat())
        try:
            yield
        finally:
            task.cancel()

    def _publish(self) -> None:
        if self._admin is not None:
            self._admin.publish(self.status())

    def _tell_of_opening(self) -> None:
        self._publish()
        # After a signal the time for stopping counts, which an opening that hangs must not extend.
        if self._store is None and not self._stop.is_set():
            self.supervisor.recovering(self._opening.status())

    def _tell_of_drain(self) -> None:
        self._publish()
        dirty = self._store.core.writer.dirty_blocks if self._store is not None else 0
        self.supervisor.draining(dirty, len(self._reception))
        self.supervisor.sign()

    async def _shut_down(self) -> int:
        self._stopping = True
        self.supervisor.stopping(self.settings.drain_timeout)
        # Whoever still waits for the store is told that it will not come.
        self._is_open.set()
        if self._store is not None:
            self._store.stop_scan()
        limit = self._loop.time() + self.settings.drain_timeout
        try:
            async with asyncio.timeout_at(limit):
                await self._reception.let_finish()
                while self._tasks:
                    await asyncio.wait(set(self._tasks))
                if self._store is not None:
                    self._store.core.timer = None  # a worker has the store now, and writes all
                    await self.in_worker(self._store.drain)
        except TimeoutError:
            # Workers may still write. The lock must not go before they do, so neither they nor the
            # interpreter are waited for: the kernel ends all of it at once.
            log.error("the drain took longer than %g s: ending", self.settings.drain_timeout)
            if self._doors is not None:
                self._doors.remove_names()
            logging.shutdown()
            os._exit(1)
        except KVStoreError as error:
            log.error("the drain failed: %s", error)
            return 1
        if self._store is not None:
            self._store.close()
        log.info("stopped")
        return 0

    def _stop_listening(self) -> None:
        for one in (self._admin, self._doors):
            if one is not None:
                one.close()
        if self.pidfd is not None:
            os.close(self.pidfd)

    # -- clients ----------------------------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        return self._stopping

    async def ready(self, limit: float) -> Store:
        """Wait for the store to be open. Raises DaemonUnavailable at the limit or in a drain."""
        if self._store is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(limit):
                    await self._is_open.wait()
        if self._store is None and self._stopping:
            raise DaemonUnavailable("the daemon is stopping", "connect again when it is back")
        if self._store is None:
            raise DaemonUnavailable("the store is recovering", "try again, or see kvstore status")
        if self._stopping:
            raise DaemonUnavailable("the daemon is stopping", "connect again when it is back")
        return self._store

    def limit(self, deadline_ms: int) -> float:
        """Return the time of the loop up to which a request that arrived now may wait."""
        seconds = self.settings.request_timeout
        return self._loop.time() + (min(deadline_ms / 1000, seconds) if deadline_ms else seconds)

    def default_namespace(self, store: Store) -> Namespace:
        if self.default is None:
            self.default = store.core.namespaces.by_id(
                keys.namespace_id(keys.named(keys.DEFAULT_NAMESPACE))
            )
            assert self.default is not None
        return self.default

    def count_failed_request(self) -> None:
        self._failed_requests += 1

    # -- work -------------------------------------------------------------------------------------

    async def in_worker(self, act: Callable[[], T]) -> T:
        future = self._loop.run_in_executor(self._pool, act)
        await self.settled([future])
        return future.result()

    async def settled(self, futures: Sequence[asyncio.Future[Any]]) -> None:
        """Wait until all are done, whatever they come to.

        A caller that is cancelled meanwhile learns of it only afterwards: until then a worker uses
        the memory that the caller lent to it.
        """
        cancelled = False
        while pending := [one for one in futures if not one.done()]:
            try:
                await asyncio.wait(pending)
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            for one in futures:
                if not one.cancelled():
                    one.exception()  # seen: nobody else will ask, and asyncio would complain
            raise asyncio.CancelledError

    def start(self, job: Job) -> asyncio.Task[None]:
        """Have a job run and finished; nobody need wait for it."""
        task = self._loop.create_task(self._see_through(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _see_through(self, job: Job) -> None:
        shares = [self._loop.run_in_executor(self._pool, job.attempt, act) for act in job.acts()]
        await self.settled(shares)
        assert self._store is not None
        self._store.finish(job)
        self.memory_changed()
        self.dispatch()

    def dispatch(self) -> None:
        """Start the chores that jobs left behind."""
        assert self._store is not None
        while self._store.chores:
            self.start(self._store.chores.popleft())

    def _call_later(self, seconds: float, act: Callable[[], None]) -> None:
        def call() -> None:
            if self._store is not None and self._store.core.timer is not None:
                act()
                self.dispatch()

        self._loop.call_later(seconds, call)

    async def with_room(self, attempt: Callable[[], T], limit: float) -> T:
        """Repeat what needs memory until there is some. Raises Busy at the limit."""
        while True:
            self._memory_changed.clear()
            try:
                return attempt()
            except Busy as busy:
                if self._loop.time() >= limit:
                    raise Busy("no memory became free in time", "try again") from busy
            self.dispatch()  # what must be written so that there is room
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(limit, self._loop.time() + _ROOM_SECONDS)):
                    await self._memory_changed.wait()

    def memory_changed(self) -> None:
        """Note that memory may have become free."""
        self._memory_changed.set()

    def status(self) -> dict[str, object]:
        answer = self._opening.status() if self._store is None else self._store.status()
        if problem := self.reloads.problem:
            answer["problems"] = [*cast("list[str]", answer["problems"]), problem]
            answer["state"] = "degraded" if answer["state"] == "ready" else answer["state"]
        if self._stopping:
            answer["state"] = "draining"
        return {
            **answer,
            "restart_settings": self.reloads.waiting,
            "version": __version__,
            "pid": self.pid,
            "socket": str(self.settings.socket),
            "clients": len(self._reception),
            "region_bytes": self.allowance.used,
            "failed_requests": self._failed_requests,
            "get_us_buckets": list(self.get_durations.buckets),
            "put_us_buckets": list(self.put_durations.buckets),
        }


def serve(settings: ServerOptions, configuration: Configuration | None = None) -> int:
    """Run the daemon until a signal; return its exit code."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    # The watchdog's SIGABRT then tells in the log where every thread was.
    faulthandler.enable()
    return asyncio.run(Server(settings, configuration).run())

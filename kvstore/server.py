"""The daemon: opens the store, listens, serves clients, drains, stops.

The event loop's thread owns the store. Everything that touches the disk runs in a few workers and
comes back as one callback per batch. The life of the daemon is :meth:`Server.run`: lock, listen,
open (clients wait meanwhile), serve, drain, stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kvstore import __version__, keys
from kvstore.answers import BlockStatus
from kvstore.connection import Connection
from kvstore.errors import (
    Busy,
    ConfigError,
    DaemonUnavailable,
    KVStoreError,
    PermissionDenied,
    StoreLocked,
)
from kvstore.opening import Opening, Options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvstore.backends.base import U8
    from kvstore.get import Get
    from kvstore.job import Job
    from kvstore.namespaces import Namespace
    from kvstore.put import PutRequest
    from kvstore.slab import Extent
    from kvstore.store import Store

log = logging.getLogger(__name__)
T = TypeVar("T")

TICK_SECONDS = 0.5
"""The order of use survives a kill up to the last tick."""
SWITCH_INTERVAL = 0.0005
"""Seconds for which a thread may keep the interpreter; the default of 5 ms makes I/O wait."""
_BACKLOG = 128


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Plain settings of the daemon; times in seconds."""

    socket: Path
    store: Path
    options: Options
    workers: int = 4
    max_clients: int = 256
    request_timeout: float = 30.0
    drain_timeout: float = 60.0


@dataclass(eq=False)
class Server:
    """One daemon over one store."""

    settings: ServerOptions
    _store: Store | None = None
    _stopping: bool = False
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _clients: dict[Connection, asyncio.Task[None]] = field(default_factory=dict)
    _failed_requests: int = 0
    _default: Namespace | None = None

    # -- life -------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Serve until a signal; return the exit code: 0 after a clean drain, 1 after a bad one."""
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(self.settings.workers, "worker")
        self._slab_changed = asyncio.Event()
        self._is_ready = asyncio.Event()
        self._stop = asyncio.Event()
        self._opening = Opening(self.settings.store, self.settings.options)
        self._opening.lock()
        listener = None
        try:
            listener = listen(self.settings.socket)
            self._watch_signals()
            log.info("listening on %s", self.settings.socket)
            accepting = self._loop.create_task(self._accept(listener))
            await self._open()
            if not self._stop.is_set():
                await self._upkeep()
            accepting.cancel()
            return await self._shut_down()
        finally:
            self._remove_socket(listener)
            self._opening.unlock()
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _watch_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        """The first signal drains, the second ends at once."""
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
        self._is_ready.set()
        self._dispatch()
        log.info(
            "ready: %d blocks, %d bytes, in %.2f s",
            store.core.index.blocks,
            store.core.index.live_bytes,
            time.monotonic() - started,
        )

    async def _upkeep(self) -> None:
        assert self._store is not None
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._stop.wait()
            try:
                self._store.tick()
            except Exception:
                # The outermost frame of the upkeep: the daemon goes on serving.
                log.exception("upkeep failed")
                self.count_failed_request()
            self._dispatch()

    async def _shut_down(self) -> int:
        self._stopping = True
        if self._store is not None:
            self._store.stop_scan()
        limit = self._loop.time() + self.settings.drain_timeout
        try:
            async with asyncio.timeout_at(limit):
                await self._let_clients_finish()
                while self._tasks:
                    await asyncio.wait(set(self._tasks))
                if self._store is not None:
                    await self.in_worker(self._store.drain)
        except TimeoutError:
            # Workers may still write. The lock must not go before they do, so neither they nor the
            # interpreter are waited for: the kernel ends all of it at once.
            log.error("the drain took longer than %g s: ending", self.settings.drain_timeout)
            self.settings.socket.unlink(missing_ok=True)
            logging.shutdown()
            os._exit(1)
        except KVStoreError as error:
            log.error("the drain failed: %s", error)
            return 1
        if self._store is not None:
            self._store.close()
        log.info("stopped")
        return 0

    async def _let_clients_finish(self) -> None:
        """Idle clients are dropped at once, those with a request under way after its answer."""
        for connection, task in self._clients.items():
            if connection.idle:
                task.cancel()
        if self._clients:
            await asyncio.wait(set(self._clients.values()))

    def _remove_socket(self, listener: socket.socket | None) -> None:
        if listener is not None:
            listener.close()
            self.settings.socket.unlink(missing_ok=True)

    # -- clients ----------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = await self._loop.sock_accept(listener)
            except OSError as error:
                log.warning("cannot accept a client: %s", error)
                await asyncio.sleep(0.1)
                continue
            sock.setblocking(False)
            if len(self._clients) >= self.settings.max_clients:
                log.warning("refusing a client: %d are connected", len(self._clients))
                sock.close()
                continue
            connection = Connection(self, sock)
            task = self._loop.create_task(connection.serve())
            self._clients[connection] = task
            task.add_done_callback(partial(self._forget, connection))

    def _forget(self, connection: Connection, _: asyncio.Task[None]) -> None:
        del self._clients[connection]

    @property
    def stopping(self) -> bool:
        return self._stopping

    @property
    def patience(self) -> float:
        """Seconds for which a client may stall in the middle of a frame."""
        return self.settings.request_timeout

    async def ready(self, deadline_ms: int) -> Store:
        """Wait for the store to be open. Raises DaemonUnavailable at the deadline or in a drain."""
        if self._store is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._seconds(deadline_ms)):
                    await self._is_ready.wait()
        if self._store is None:
            raise DaemonUnavailable("the store is recovering", "try again, or see kvstore status")
        if self._stopping:
            raise DaemonUnavailable("the daemon is stopping", "connect again when it is back")
        return self._store

    def _seconds(self, deadline_ms: int) -> float:
        limit = self.settings.request_timeout
        return min(deadline_ms / 1000, limit) if deadline_ms else limit

    def default_namespace(self, store: Store) -> Namespace:
        if self._default is None:
            self._default = store.core.namespaces.by_id(
                keys.namespace_id(keys.named(keys.DEFAULT_NAMESPACE))
            )
            assert self._default is not None
        return self._default

    def count_failed_request(self) -> None:
        self._failed_requests += 1

    # -- work -------------------------------------------------------------------------------------

    async def in_worker(self, act: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(self._pool, act)

    async def perform(self, job: Job) -> None:
        """Have a job run by a worker and finish it here.

        A caller that is cancelled meanwhile learns of it only afterwards: until then a worker uses
        the memory that the caller lent to the job.
        """
        task, cancelled = self._start(job), False
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                cancelled = True
        task.result()
        if cancelled:
            raise asyncio.CancelledError

    def _start(self, job: Job) -> asyncio.Task[None]:
        task = self._loop.create_task(self._see_through(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _see_through(self, job: Job) -> None:
        await self._loop.run_in_executor(self._pool, job.perform)
        assert self._store is not None
        self._store.finish(job)
        self._dispatch()

    def _dispatch(self) -> None:
        """Start the chores that jobs left behind."""
        assert self._store is not None
        while self._store.chores:
            self._start(self._store.chores.popleft())

    async def extents(self, store: Store, sizes: Sequence[int], deadline_ms: int) -> list[Extent]:
        """Allocate slab extents, waiting for room. Raises Busy at the deadline."""
        return await self._with_room(lambda: store.core.slab.allocate(sizes), deadline_ms)

    async def _with_room(self, attempt: Callable[[], T], deadline_ms: int) -> T:
        limit = self._loop.time() + self._seconds(deadline_ms)
        while True:
            self._slab_changed.clear()
            try:
                return attempt()
            except Busy:
                try:
                    async with asyncio.timeout_at(limit):
                        await self._slab_changed.wait()
                except TimeoutError:
                    raise Busy("no buffer became free in time", "try again") from None

    def slab_changed(self) -> None:
        self._slab_changed.set()

    def give_back(self, store: Store, extents: list[Extent]) -> None:
        store.core.slab.release(extents)
        self.slab_changed()

    async def put(self, store: Store, request: PutRequest, images: list[memoryview]) -> U8:
        """Put blocks and wait for the answer, also from puts of the same keys by other clients."""
        job = store.put(request, images)
        await self.perform(job)
        if job.failure is not None:
            raise job.failure
        for other, positions in job.joined.items():
            done = asyncio.Event()
            other.when_done(done.set)
            await done.wait()
            # Answered from the index where the other one succeeded; else we write our own copies.
            job.statuses[positions] = await self.put(
                store, request.take(positions), [images[position] for position in positions]
            )
        return job.statuses

    async def get(
        self,
        store: Store,
        namespace: Namespace,
        shard: int,
        wanted: keys.KeyArray,
        budget: int,
        deadline_ms: int,
    ) -> Get:
        job = await self._with_room(
            lambda: store.get(namespace, shard, wanted, budget), deadline_ms
        )
        try:
            await self.perform(job)
        except BaseException:
            job.close()
            self.slab_changed()
            raise
        return job

    async def delete(
        self, store: Store, namespace: Namespace, shard: int, wanted: keys.KeyArray
    ) -> U8:
        """Delete blocks; answered when no record is left that a rebuild could bring back."""
        statuses, removals = store.delete(namespace, shard, wanted)
        await self.perform(removals[0])
        for removal in removals[1:]:
            done = asyncio.Event()
            removal.when_done(done.set)
            await done.wait()
        if any(removal.failure is not None for removal in removals):
            statuses[statuses == BlockStatus.OK] = BlockStatus.FAILED
        return statuses

    async def flush(self, store: Store) -> None:
        job = store.flush()
        await self.perform(job)
        if job.failure is not None:
            raise job.failure

    def status(self) -> dict[str, object]:
        answer = self._opening.status() if self._store is None else self._store.status()
        if self._stopping:
            answer["state"] = "draining"
        return {
            **answer,
            "version": __version__,
            "pid": os.getpid(),
            "socket": str(self.settings.socket),
            "clients": len(self._clients),
            "failed_requests": self._failed_requests,
        }


def listen(path: Path) -> socket.socket:
    """Return a listening Unix socket at ``path``, mode 0600 from its first moment.

    A socket that nobody listens on any more is replaced; anything else in the way is an error.
    Raises StoreLocked when another daemon answers there, ConfigError, PermissionDenied.
    """
    _clear(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    # The mode must be right when the name appears, or somebody may connect in between; no other
    # thread makes files at this point.
    mask = os.umask(0o177)
    try:
        sock.bind(str(path))
    except OSError as error:
        sock.close()
        raise _bind_error(path, error) from error
    finally:
        os.umask(mask)
    sock.listen(_BACKLOG)
    sock.setblocking(False)
    return sock


def _clear(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise _bind_error(path, error) from error
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} is in the way of the socket", "remove it or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # A stopped daemon whose backlog is full would keep us here for ever.
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        except OSError as error:
            raise _bind_error(path, error) from error
        else:
            raise StoreLocked(
                f"another daemon listens on {path}", "stop it, or use --socket with another path"
            )


def _bind_error(path: Path, error: OSError) -> KVStoreError:
    if isinstance(error, PermissionError):
        return PermissionDenied(f"no permission to make the socket {path}", "use --socket")
    if isinstance(error, FileNotFoundError):
        return ConfigError(f"the directory of the socket {path} does not exist", "make it first")
    return ConfigError(f"cannot listen on {path}: {error.strerror or error}", "use --socket")


def serve(settings: ServerOptions) -> int:
    """Run the daemon until a signal; return its exit code."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    return asyncio.run(Server(settings).run())

"""A tier of blocks behind a model server's own memory: questions and copies in the background.

A model server asks from the one thread that schedules its requests, and that must never wait. So
every method here returns at once: what is asked is handed to threads, and what came of it is picked
up later. Whatever goes wrong (a daemon that is slow, gone, restarted, full, or of another mind) is
a miss or a job that failed; nothing is raised.

The rows of the server's pool are used between a job's beginning and its report, and only then:

- The daemon never sees the pool. Blocks travel through memory that the client shares with it, and
  are copied from there into rows, and from rows to there, by the thread that does the job. What the
  daemon does after a deadline, it does to that memory, which the client then does not use again.
- A job is reported by its thread after its last copy, whatever happened, and only there.
- Each job has a deadline, counted from its submission: a queue that stands is reported too.

Standard library and numpy only: model servers import this module.
"""

from __future__ import annotations

import threading
import time
from enum import Enum
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.answers import BlockStatus
from kvstore.errors import DeadlineExceeded, KVStoreError, UnknownNamespace

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Mapping, Sequence

    from kvstore.client import Client

T = TypeVar("T")
Pool = npt.NDArray[np.uint8]
"""The server's memory for blocks, shape (rows, bytes of a row)."""

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0
"""Seconds without a question after the daemon failed one, at first and at most."""
STORING_SHARE = 0.5
"""When so much of the pool waits to be stored, more is refused."""
MAX_REQUESTS = 65_536
"""Requests whose verdicts are kept: more than that were never said to be finished."""


class Verdict(Enum):
    """What is known of a block."""

    MISS = "miss"
    HIT = "hit"
    """A get would have found it; it will not be evicted for the time of a lease."""
    RETRY = "retry"
    """It is being asked; see again in the next step."""


class Limits(NamedTuple):
    """Seconds that something may take."""

    lookup: float = 0.5
    """From the first lookup of a key: then it is a miss, whatever comes."""
    load: float = 10.0
    store: float = 30.0
    close: float = 5.0
    """For the stores that are under way when the server ends."""
    lease: float = 30.0
    """A block that was found stays for so long, until it is loaded."""


DEFAULT_LIMITS = Limits()


class Job(NamedTuple):
    """Blocks to copy between the daemon and rows of the pool, one a key."""

    number: int
    keys: Sequence[bytes]
    rows: Sequence[int]
    stores: bool
    """Out of the pool, else into it."""
    begun: float
    limit: float
    """When it must be reported. Both are of time.monotonic()."""


class Outcome(NamedTuple):
    """What became of a job. ``done``: the keys whose blocks were copied, or were there already."""

    job: Job
    done: Sequence[bytes]
    seconds: float

    @property
    def success(self) -> bool:
        return len(self.done) == len(self.job.keys)


class Lane(threading.Thread):
    """A thread that does one thing after the other."""

    def __init__(self, name: str, log: logging.Logger) -> None:
        super().__init__(name=f"kvstore-{name}", daemon=True)
        self._log = log
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.start()

    def put(self, task: Callable[[], None] | None) -> None:
        """Queue a task; None ends the thread when it comes to it."""
        self._tasks.put(task)

    def run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:
                self._log.exception("kvstore: internal error; it counts as a miss")
            del task  # it may refer to the pool


class Tier:
    """The blocks of one namespace, for one model server with one ``pool``.

    Called from the server's scheduling thread. A daemon that comes later than the server is found.
    """

    def __init__(
        self,
        client: Client,
        record: Mapping[str, object],
        pool: Pool,
        log: logging.Logger,
        limits: Limits = DEFAULT_LIMITS,
        *,
        ack: str = "accepted",
    ) -> None:
        self._client = client
        self._record = record
        self._pool = pool
        self._log = log
        self._limits = limits
        self._ack = ack
        self._namespace: int | None = None
        self._opening = threading.Lock()
        self._lock = threading.Condition()
        self._verdicts: dict[str, dict[bytes, Verdict | float]] = {}
        """By request and key; a number is the time at which it was asked."""
        self._wanted: list[tuple[str, bytes]] = []
        self._touched: list[bytes] = []
        self._done: SimpleQueue[Outcome] = SimpleQueue()
        self._jobs = 0
        self._storing_rows = 0
        self._closed = False
        self._pause = 0.0
        self._paused_until = 0.0
        self._asking, self._loading, self._storing = lanes = (
            Lane("lookup", log),
            Lane("load", log),
            Lane("store", log),
        )
        self._lanes = lanes
        self._loading.put(self._prepare)

    def _prepare(self) -> None:
        """Connect, open the namespace and share memory, so that the first request need not."""

        def lease(_: int, seconds: float) -> None:
            with self._client.staging(1, timeout=seconds):
                pass

        self._attempt(lease, time.monotonic() + self._limits.load, None)

    # -- lookups ----------------------------------------------------------------------------------

    def lookup(self, key: bytes, request: str) -> Verdict:
        """Return what is known of a block; a verdict holds until the request is forgotten."""
        now = time.monotonic()
        with self._lock:
            verdicts = self._verdicts_of(request)
            known = verdicts.get(key)
            if known is None and not self._paused(now):
                verdicts[key] = now
                self._wanted.append((request, key))
                return Verdict.RETRY
            if isinstance(known, Verdict):
                return known
            if known is not None and now < known + self._limits.lookup:
                return Verdict.RETRY
            # A whole request waits for this one answer: it goes on without.
            verdicts[key] = Verdict.MISS
            return Verdict.MISS

    def _verdicts_of(self, request: str) -> dict[bytes, Verdict | float]:
        if request not in self._verdicts and len(self._verdicts) >= MAX_REQUESTS:
            del self._verdicts[next(iter(self._verdicts))]
        return self._verdicts.setdefault(request, {})

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count blocks as used, which the server found in its own memory."""
        self._touched += keys

    def end_step(self) -> None:
        """Hand what was looked up and touched since the last step to the daemon, in one batch."""
        wanted, self._wanted = self._wanted, []
        touched, self._touched = self._touched, []
        if wanted:
            limit = time.monotonic() + self._limits.lookup
            self._asking.put(partial(self._answer, wanted, limit))
        if touched and not self._paused(time.monotonic()):
            self._asking.put(partial(self._tell_used, touched))

    def _answer(self, wanted: Sequence[tuple[str, bytes]], limit: float) -> None:
        keys = list(dict.fromkeys(key for _, key in wanted))

        def ask(namespace: int, seconds: float) -> frozenset[bytes]:
            mask = self._client.contains(
                keys, lease=self._limits.lease, namespace=namespace, timeout=seconds
            )
            return frozenset(keys[n] for n in np.flatnonzero(mask).tolist())

        nothing: frozenset[bytes] = frozenset()
        found = self._attempt(ask, limit, nothing)
        with self._lock:
            for request, key in wanted:
                verdicts = self._verdicts.get(request, {})
                if isinstance(verdicts.get(key), float):
                    verdicts[key] = Verdict.HIT if key in found else Verdict.MISS

    def _tell_used(self, keys: Sequence[bytes]) -> None:
        def tell(namespace: int, seconds: float) -> None:
            self._client.touch(keys, namespace=namespace, timeout=seconds)

        self._attempt(tell, time.monotonic() + self._limits.lookup, None)

    def forget(self, request: str) -> None:
        """Drop the verdicts of a request that has finished."""
        with self._lock:
            self._verdicts.pop(request, None)

    # -- jobs -------------------------------------------------------------------------------------

    def load(self, number: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Copy blocks into rows of the pool."""
        now = time.monotonic()
        self._begin(Job(number, keys, rows, False, now, now + self._limits.load))

    def store(self, number: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Copy rows of the pool to the daemon, but for blocks that it has."""
        now = time.monotonic()
        self._begin(Job(number, keys, rows, True, now, now + self._limits.store))

    def finished(self) -> list[Outcome]:
        """Return what became of the jobs that ended since the last call, each of them once."""
        outcomes = []
        while True:
            try:
                outcomes.append(self._done.get_nowait())
            except Empty:
                return outcomes

    def drain(self) -> None:
        """Wait until nothing touches the pool any more; their deadlines end all jobs."""
        with self._lock:
            self._lock.wait_for(lambda: self._jobs == 0)

    def _begin(self, job: Job) -> None:
        with self._lock:
            # Rows that wait to be stored are in use: without a bound a slow daemon takes them all.
            crowded = job.stores and self._storing_rows > len(self._pool) * STORING_SHARE
            self._jobs += 1
            self._storing_rows += len(job.rows) if job.stores else 0
        act = self._refuse if crowded else self._store if job.stores else self._load
        lane = self._storing if job.stores else self._loading
        if crowded:
            self._do(act, job)
        else:
            lane.put(partial(self._do, act, job))

    def _do(self, act: Callable[[Job], list[bytes]], job: Job) -> None:
        """Do a job and report it, whatever happens."""
        done: list[bytes] = []
        try:
            done = act(job)
        finally:
            if not job.stores:
                self._mark_missing(set(job.keys).difference(done))
            self._done.put(Outcome(job, done, time.monotonic() - job.begun))
            with self._lock:
                self._jobs -= 1
                self._storing_rows -= len(job.rows) if job.stores else 0
                self._lock.notify_all()

    @staticmethod
    def _refuse(_: Job) -> list[bytes]:
        return []

    def _mark_missing(self, keys: set[bytes]) -> None:
        """See to it that these are not found again by the requests that are waiting for them.

        Before the report: a server that is told again that they are there loads them again, for
        ever.
        """
        with self._lock:
            for verdicts in self._verdicts.values():
                for key in keys & verdicts.keys():
                    verdicts[key] = Verdict.MISS

    def _load(self, job: Job) -> list[bytes]:
        done: list[bytes] = []

        def load(namespace: int, seconds: float) -> None:
            size = self._pool.shape[1]
            for position, status, block in self._client.stream_get(
                job.keys, size=size, namespace=namespace, timeout=seconds
            ):
                if status != BlockStatus.OK or block is None:
                    continue
                # One of another length is not ours: the rest of the row would be somebody else's.
                if len(block) == size:
                    np.copyto(self._pool[job.rows[position]], np.frombuffer(block, np.uint8))
                    done.append(job.keys[position])

        self._attempt(load, job.limit, None)
        return done

    def _store(self, job: Job) -> list[bytes]:
        def store(namespace: int, seconds: float) -> list[bytes]:
            limit = time.monotonic() + seconds
            asking = min(seconds, self._limits.lookup)
            there = self._client.contains(job.keys, namespace=namespace, timeout=asking)
            new = np.flatnonzero(~there).tolist()
            done = [key for key, known in zip(job.keys, there, strict=True) if known]
            if new:
                keys = [job.keys[n] for n in new]
                rows = [self._pool[job.rows[n]] for n in new]
                statuses = self._client.put_many(
                    keys,
                    rows,
                    namespace=namespace,
                    ack=self._ack,
                    timeout=max(limit - time.monotonic(), 0.0),
                )
                good = np.flatnonzero(statuses <= BlockStatus.ALREADY_PRESENT)
                done += [keys[n] for n in good.tolist()]
            return done

        return self._attempt(store, job.limit, [])

    # -- the daemon -------------------------------------------------------------------------------

    def _attempt(self, act: Callable[[int, float], T], limit: float, otherwise: T) -> T:
        """Do something with the daemon. What fails begins a pause in which nothing is asked.

        So a daemon that hangs costs one deadline, not one for each request.
        """
        now = time.monotonic()
        if self._closed or now >= limit or self._paused(now):
            return otherwise
        try:
            namespace = self._open(min(limit - now, self._limits.lookup))
            result = act(namespace, max(limit - time.monotonic(), 0.001))
        except KVStoreError as error:
            self._failed(error)
            return otherwise
        if self._pause:
            self._pause = 0.0
            self._log.info("kvstore: the daemon answers again")
        return result

    def _open(self, seconds: float) -> int:
        limit = time.monotonic() + seconds
        if not self._opening.acquire(timeout=seconds):
            raise DeadlineExceeded("another thread waits for the daemon", "see kvstore status")
        try:
            if self._namespace is None:
                left = max(limit - time.monotonic(), 0.001)
                self._namespace = self._client.namespace(self._record, create=True, timeout=left)
            return self._namespace
        finally:
            self._opening.release()

    def _paused(self, now: float) -> bool:
        return now < self._paused_until

    def _failed(self, error: KVStoreError) -> None:
        if isinstance(error, UnknownNamespace):
            self._namespace = None  # the daemon has another store now
        if self._closed:
            return
        if not self._pause:
            self._log.warning("kvstore: %s; misses until it is well again", error)
        self._pause = min(max(FIRST_PAUSE, self._pause * 2), LONGEST_PAUSE)
        self._paused_until = time.monotonic() + self._pause

    def close(self) -> None:
        """Wait a little for stores, then end everything; the pool is not touched or held any more.

        Raises nothing. May be called twice.
        """
        if self._closed:
            return
        for lane in self._lanes:
            lane.put(None)
        self._storing.join(self._limits.close)
        self._closed = True
        while any(lane.is_alive() for lane in self._lanes):
            self._client.close()  # whoever waits for the daemon is told so
            for lane in self._lanes:
                lane.join(0.1)
        self._client.close()
        self._pool = np.empty((0, 0), np.uint8)

"""The engine `lmdb`: records in one memory-mapped B+ tree; reads are copies out of the page cache.

::

    lmdb/data.mdb, lmdb/lock.mdb

A batch is one transaction. LMDB never overwrites a page that the last transaction may need, so a
kill or a power loss costs the transaction under way and nothing else, as long as data is synced
before the meta page: ``sync=False``, and ``map_async`` with it, gave wrong bytes after a power loss
and are never used. ``metasync=False`` is: the last transactions may be lost with the power until a
flush. ``writemap`` is not: a full disk would end the process.

The file grows on demand up to the capacity, and never shrinks: pages of deleted records are used
again. No transaction outlives a call: a reader that stays keeps all pages that were freed since.
Readahead is on, for a value is up to 64 pages, and each would be a transfer of its own without it:
0.02 instead of 0.5 GiB/s where nothing is cached.

LMDB cannot be contained. It verifies nothing and follows page numbers in what it maps, and a page
that the disk cannot read ends the process. ``lmdbfile`` checks the tree at each opening; what is
damaged later is not noticed before it is read. Wrong bytes are never served: the envelope tells.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, ClassVar

import lmdb

from kvstore.backends import base
from kvstore.backends.base import Finding, Status
from kvstore.backends.keyvalue import KeyValueEngine, LibraryError
from kvstore.backends.lmdbfile import check_file
from kvstore.errors import CorruptStore, EngineError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvstore.backends.keyvalue import Get, Pair
    from kvstore.backends.raw import Salvage

DATA = "data.mdb"
MOST_READERS = 512
SPARE_TRANSACTIONS = 16
FULL_BYTES = 1 << 20
"""A disk with less free space than that is full."""
RESERVE_BYTES = 1 << 20
NEAR = 0.9
"""From this part of the limit on, puts leave RESERVE_BYTES free: deleting changes pages, too."""
FEW_KEYS = 64
_RESERVE = b"m"
_TURN = b"n"
"""Written where it matters only that something is."""


class LmdbEngine(KeyValueEngine):
    """One LMDB environment; it has no options."""

    name = "lmdb"
    io: ClassVar[str] = "mmap"
    capabilities = base.Capabilities(
        preferred_threads=2, atomic_batch=True, durable_without_flush=False, alignment=1,
        fixed_slots=False, space_factor=1.1, frees_space=False, contained=False,
    )  # fmt: skip

    @classmethod
    def salvage(cls, context: base.EngineContext) -> Salvage:
        from kvstore.backends.lmdbraw import LmdbSalvage

        return LmdbSalvage(context)

    def __init__(self, context: base.EngineContext) -> None:
        super().__init__(context)
        self._env: lmdb.Environment | None = None
        self._limit = self._page = 0

    def make_table(self) -> None:
        with _edge("making"):
            self._environment(create=True).close()

    def open_table(self) -> None:
        check_file(self.folder / DATA)
        try:
            self._limit = self._map_bytes()
            self._env = self._environment(create=False)
            self._page = self._env.stat()["psize"]
            # Readers of processes that were killed would keep every page that is freed.
            self._env.reader_check()
        except (lmdb.CorruptedError, lmdb.InvalidError, lmdb.VersionMismatchError) as error:
            hint = "run kvstore recover: it copies every block that is whole"
            raise CorruptStore(f"{self.folder} cannot be opened: {error}", hint) from error
        except lmdb.Error as error:
            raise EngineError(f"{self.folder} cannot be opened: {error}") from error

    def close_table(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def _environment(self, *, create: bool) -> lmdb.Environment:
        # Readers write into lock.mdb; the lock of the store keeps writers away from ours.
        return lmdb.open(
            str(self.folder), map_size=self._map_bytes(), create=create, mode=0o600,
            readonly=self.context.read_only, lock=not self.context.read_only, metasync=False,
            readahead=True, max_readers=MOST_READERS, max_spare_txns=SPARE_TRANSACTIONS,
        )  # fmt: skip

    def _map_bytes(self) -> int:
        """Return how large the file may become. Only what is used takes room and memory."""
        found = os.statvfs(self.folder)
        limit = self.context.capacity or found.f_blocks * found.f_frsize
        with contextlib.suppress(FileNotFoundError):
            limit = max(limit, os.stat(self.folder / DATA).st_size)
        return -(-limit // (1 << 16)) << 16

    def _open_env(self) -> lmdb.Environment:
        self.require_open()
        assert self._env is not None
        return self._env

    def write(self, pairs: Iterable[Pair], *, sync: bool) -> None:
        env = self._open_env()
        with self._writing("writing"):
            # Put first and taken out last, so that what deletions need is free in every state.
            scarce = (env.info()["last_pgno"] + 1) * self._page > self._limit * NEAR
            with env.begin(write=True) as transaction:
                if scarce:
                    transaction.put(_RESERVE, bytes(RESERVE_BYTES))
                for key, value in pairs:
                    transaction.put(key, value)
                if scarce:
                    transaction.delete(_RESERVE)
            if sync:
                env.sync(True)

    def make_way(self) -> None:
        # Pages may be used again by the second transaction after the one that freed them.
        for _ in range(2):
            with self._writing("turning"), self._open_env().begin(write=True) as transaction:
                transaction.put(_TURN, b"")

    def remove(self, keys: Sequence[bytes]) -> None:
        try:
            self._remove_once(keys)
        except LibraryError as error:
            if error.status != Status.FULL or len(keys) <= FEW_KEYS:
                raise
            # Each transaction needs pages of its own until it has freed others.
            ordered = sorted(keys)
            for at in range(0, len(ordered), FEW_KEYS):
                self._remove_once(ordered[at : at + FEW_KEYS])

    def _remove_once(self, keys: Sequence[bytes]) -> None:
        with self._writing("deleting"), self._open_env().begin(write=True) as transaction:
            for key in keys:
                transaction.delete(key)

    @contextlib.contextmanager
    def _writing(self, doing: str) -> Iterator[None]:
        """Translate errors. LMDB calls a write that a full disk cut short an EIO; the transaction
        has left nothing then, as with any other that failed before its meta page."""
        try:
            with _edge(doing, broken=True):
                yield
        except LibraryError as error:
            found = os.statvfs(self.folder)
            if error.broken and found.f_bavail * found.f_frsize < FULL_BYTES:
                raise LibraryError(error.message, Status.FULL) from error
            raise

    @contextlib.contextmanager
    def reading(self) -> Iterator[Get]:
        with _edge("reading"), self._open_env().begin(buffers=True) as transaction:

            def get(key: bytes) -> memoryview | None:
                try:
                    return transaction.get(key)
                except lmdb.Error as error:
                    raise _translated("reading", error) from error

            yield get

    def after(self, key: bytes, stop: bytes, count: int) -> list[tuple[bytes, bytes]]:
        found: list[tuple[bytes, bytes]] = []
        with _edge("scanning"), self._open_env().begin() as transaction:
            cursor = transaction.cursor()
            if not cursor.set_range(key + b"\0"):
                return found
            for name, value in cursor:
                if name >= stop or len(found) == count:
                    break
                found.append((name, value))
        return found

    def sync(self) -> None:
        with _edge("syncing", broken=True):
            self._open_env().sync(True)

    def stats(self) -> base.Stats:
        with _edge("asking"):
            found = self._open_env().stat()
        pages = found["branch_pages"] + found["leaf_pages"]
        return base.Stats(pages * found["psize"], self.io, self.notes())

    def check(self) -> list[Finding]:
        self.require_open()
        try:
            check_file(self.folder / DATA)
        except CorruptStore as error:
            return [Finding("bad-tree", f"{self.name}/{DATA}", error.message)]
        except OSError as error:
            raise EngineError(f"{self.folder / DATA} cannot be read: {error.strerror}") from error
        return []


@contextlib.contextmanager
def _edge(doing: str, *, broken: bool = False) -> Iterator[None]:
    """Translate LMDB's errors. ``broken``: one that is not about room leaves writes in doubt."""
    try:
        yield
    except lmdb.Error as error:
        raise _translated(doing, error, broken=broken) from error


def _translated(doing: str, error: lmdb.Error, *, broken: bool = False) -> LibraryError:
    message = f"{doing} failed: {error}"
    if isinstance(error, (lmdb.MapFullError, lmdb.DiskError)):
        return LibraryError(message, Status.FULL)
    damaged = isinstance(error, (lmdb.CorruptedError, lmdb.PageNotFoundError))
    return LibraryError(message, Status.DAMAGED if damaged else Status.FAILED, broken=broken)

"""The engine `sqlite`: records in one database file, by the library that comes with Python.

::

    sqlite/store.db, store.db-wal, store.db-shm

A batch is one transaction, appended to the log (WAL) and copied into the file later. Pages of
64 KiB hold a piece in four. A deleted record's pages are used again; the file never shrinks.

Without ``sync`` a commit is not synced (``synchronous=NORMAL``): power loss costs the last ones and
nothing else. With it, and for a flush, one commit is (``FULL``), and with it the log before it.

There is one connection for writing, under a lock, and one for each thread that reads at the moment.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from typing import TYPE_CHECKING

from kvstore.backends import base
from kvstore.backends.base import Finding, Status
from kvstore.backends.keyvalue import HEADERS, KeyValueEngine, LibraryError
from kvstore.errors import CorruptStore, EngineError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvstore.backends.keyvalue import Get, Pair
    from kvstore.backends.raw import Salvage

FILE = "store.db"
PAGE_BYTES = 65536
CACHE_KIB = 8192
LEAST_LOG, MOST_LOG = 1 << 20, 16 << 20
LOG_SHARE = 64
"""The log is copied into the file when it is about this part (1/n) of the capacity."""
WAIT_SECONDS = 60.0
SCHEMA = """
CREATE TABLE headers (k BLOB PRIMARY KEY, v BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE pieces (k BLOB PRIMARY KEY, v BLOB NOT NULL);
CREATE TABLE flushes (n INTEGER NOT NULL);
INSERT INTO flushes VALUES (0);
"""
_FULL = frozenset({sqlite3.SQLITE_FULL})
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


class SqliteEngine(KeyValueEngine):
    """One SQLite database; it has no options."""

    name = "sqlite"
    capabilities = base.Capabilities(
        preferred_threads=1, atomic_batch=True, durable_without_flush=False, alignment=1,
        fixed_slots=False, space_factor=1.2, frees_space=False, contained=True,
    )  # fmt: skip

    @classmethod
    def salvage(cls, context: base.EngineContext) -> Salvage:
        from kvstore.backends.sqliteraw import SqliteSalvage

        return SqliteSalvage(context)

    def __init__(self, context: base.EngineContext) -> None:
        super().__init__(context)
        self._path = self.folder / FILE
        self._writer: sqlite3.Connection | None = None
        self._lock = threading.Lock()
        self._idle: list[sqlite3.Connection] = []

    def make_table(self) -> None:
        with _edge("making"):
            made = sqlite3.connect(self._path, isolation_level=None)
            try:
                made.execute(f"PRAGMA page_size = {PAGE_BYTES}")
                made.execute("PRAGMA journal_mode = WAL")
                made.executescript(SCHEMA)
            finally:
                made.close()
        os.chmod(self._path, 0o600)

    def open_table(self) -> None:
        os.stat(self._path)
        try:
            self._writer = self._connect()
            limit = self.context.capacity // PAGE_BYTES
            if limit:
                self._writer.execute(f"PRAGMA max_page_count = {limit}")
            self._writer.execute("SELECT k FROM headers LIMIT 1").fetchall()
            self._writer.execute("SELECT k FROM pieces LIMIT 1").fetchall()
            self._writer.execute("SELECT n FROM flushes").fetchall()
        except sqlite3.Error as error:
            self.close_table()
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_CANTOPEN:
                raise EngineError(f"{self._path} cannot be opened: {error}") from error
            hint = "run kvstore recover: it copies every block that is whole"
            raise CorruptStore(f"{self._path} cannot be opened: {error}", hint) from error

    def close_table(self) -> None:
        while self._idle:
            self._idle.pop().close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _mode(self) -> str:
        """Return how to open the file. A reader leaves no trace: without a log nothing is needed
        beside it, with one its index is read only, too."""
        if not self.context.read_only:
            return "mode=rw"
        log = self._path.with_name(f"{FILE}-wal")
        logged = log.exists() and log.stat().st_size > 0
        return "mode=ro&readonly_shm=1" if logged else "mode=ro&immutable=1"

    def _connect(self) -> sqlite3.Connection:
        """Open the file that is there; never make one."""
        made = sqlite3.connect(
            f"{self._path.absolute().as_uri()}?{self._mode()}", uri=True, isolation_level=None,
            check_same_thread=False, timeout=WAIT_SECONDS,
        )  # fmt: skip
        made.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        # Some distributions have it on: then every deleted page is written once more.
        made.execute("PRAGMA secure_delete = OFF")
        share = (self.context.capacity or 1 << 62) // LOG_SHARE
        log_bytes = min(max(share, LEAST_LOG), MOST_LOG)
        made.execute(f"PRAGMA wal_autocheckpoint = {log_bytes // PAGE_BYTES}")
        made.execute(f"PRAGMA journal_size_limit = {log_bytes}")
        return made

    @contextlib.contextmanager
    def _writing(self, *, sync: bool) -> Iterator[sqlite3.Connection]:
        """Give the connection for one transaction that is committed at the end."""
        self.require_open()
        with self._lock:
            writer = self._writer
            assert writer is not None
            writer.execute(f"PRAGMA synchronous = {'FULL' if sync else 'NORMAL'}")
            writer.execute("BEGIN IMMEDIATE")
            try:
                yield writer
                writer.execute("COMMIT")
            except BaseException:
                # SQLite may have ended it already, which is no error here.
                if writer.in_transaction:
                    writer.execute("ROLLBACK")
                raise

    def write(self, pairs: Iterable[Pair], *, sync: bool) -> None:
        with _edge("writing"), self._writing(sync=sync) as writer:
            for key, value in pairs:
                writer.execute(f"INSERT OR REPLACE INTO {_table(key)} VALUES (?, ?)", (key, value))

    def remove(self, keys: Sequence[bytes]) -> None:
        with _edge("deleting"), self._writing(sync=False) as writer:
            for key in keys:
                writer.execute(f"DELETE FROM {_table(key)} WHERE k = ?", (key,))

    def sync(self) -> None:
        with _edge("syncing"), self._writing(sync=True) as writer:
            writer.execute("UPDATE flushes SET n = n + 1")

    @contextlib.contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        """Give a connection that sees one state of the store."""
        self.require_open()
        with _edge("reading"):
            reader = self._idle.pop() if self._idle else self._connect()
            reader.execute("BEGIN")
        try:
            yield reader
        finally:
            with _edge("reading"):
                reader.execute("COMMIT")
                self._idle.append(reader)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Get]:
        with self._reader() as reader:

            def get(key: bytes) -> bytes | None:
                with _edge("reading"):
                    query = f"SELECT v FROM {_table(key)} WHERE k = ?"
                    row: tuple[bytes] | None = reader.execute(query, (key,)).fetchone()
                return None if row is None else row[0]

            yield get

    def after(self, key: bytes, stop: bytes, count: int) -> list[tuple[bytes, bytes]]:
        query = "SELECT k, v FROM headers WHERE k > ? AND k < ? ORDER BY k LIMIT ?"
        with self._reader() as reader, _edge("scanning"):
            return reader.execute(query, (key, stop, count)).fetchall()

    def stats(self) -> base.Stats:
        self.require_open()
        return base.Stats(0, self.io, self.notes())

    def check(self) -> list[Finding]:
        """Have SQLite look at the table of headers; that of the pieces is all of the data."""
        with self._reader() as reader, _edge("checking"):
            said = [row[0] for row in reader.execute("PRAGMA quick_check(headers)").fetchall()]
        where = f"{self.name}/{FILE}"
        return [Finding("bad-tree", where, str(text)) for text in said if text != "ok"]


def _table(key: bytes) -> str:
    return "headers" if key.startswith(HEADERS) else "pieces"


@contextlib.contextmanager
def _edge(doing: str) -> Iterator[None]:
    """Translate SQLite's errors. An I/O error of a write leaves in doubt what a sync covers."""
    try:
        yield
    except sqlite3.Error as error:
        message, code = f"{doing} failed: {error}", getattr(error, "sqlite_errorcode", 0)
        if code & 0xFF in _FULL:
            raise LibraryError(message, Status.FULL) from error
        broken = doing != "reading" and code & 0xFF == sqlite3.SQLITE_IOERR
        status = Status.DAMAGED if code & 0xFF in _DAMAGED else Status.FAILED
        raise LibraryError(message, status, broken=broken) from error

"""The engine `rocksdb`: sorted files for what is small, blob files for the pieces.

::

    rocksdb/...             the files of RocksDB
    rocksdb/sizes.json      sizes of all of them, from a clean stop to the next opening

A batch is one record of its log. Nothing is compressed. Pieces go into blob files, which merging
leaves alone: it moves names only, and so it is cheap. A blob file goes when nothing in it is wanted
any more. As blocks mostly leave in the order in which they came, nearly all files end so, and each
byte is written twice: to the log and to a blob file.

Where blocks leave in another order, blob files stay for a few of them. So once the files take
COLLECT_SHARE of the capacity, what is wanted of the oldest ones is copied to new ones. To copy
always, as RocksDB offers, would write each byte six to eleven times.

As in ``leveldb``, names that were removed are merged once a sixteenth of the capacity has left, and
``sizes.json`` tells whether anything was cut off. RocksDB reads by pread and verifies its sums.

The library raises plain ``Exception`` for everything; its texts begin with the kind of error.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import rocksdict

from kvstore.backends import base
from kvstore.backends.base import Status
from kvstore.backends.keyvalue import HEADERS, PIECES, LibraryError
from kvstore.backends.merged import MergedEngine
from kvstore.errors import CorruptStore, EngineError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvstore.backends.keyvalue import Get, Pair

LEAST_BLOB = 4096
"""Values from so many bytes on go into blob files."""
COLLECT_SHARE = 0.75
COLLECT_AGE = 0.25
"""So large a part of the blob files, the oldest, is copied at a time."""
MOST_OPEN_FILES = 1000
LOG_BYTES = 256 << 10
_COLLECTING = "enable_blob_garbage_collection"


class RocksdbEngine(MergedEngine):
    """One RocksDB database; it has no options."""

    name = "rocksdb"
    capabilities = base.Capabilities(
        preferred_threads=2, atomic_batch=True, durable_without_flush=False, alignment=1,
        fixed_slots=False, space_factor=1.5, frees_space=True, contained=True,
    )  # fmt: skip

    def __init__(self, context: base.EngineContext) -> None:
        super().__init__(context)
        self._db: rocksdict.Rdict | None = None

    def make_table(self) -> None:
        with _edge("making"):
            rocksdict.Rdict(str(self.folder), self._options(create=True)).close()

    def open_table(self) -> None:
        self.sizes.check()
        kind = rocksdict.AccessType
        access = kind.read_only() if self.context.read_only else kind.read_write()
        try:
            with _edge("opening"), self._note_put_aside():
                options = self._options(create=False)
                self._db = rocksdict.Rdict(str(self.folder), options, access_type=access)
        except LibraryError as error:
            message = f"{self.folder} cannot be opened: {error.message}"
            if error.broken:
                raise EngineError(message) from error
            hint = "move the engine's directory away and create the store anew"
            raise CorruptStore(message, hint) from error

    def _note_put_aside(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.context.read_only else self.sizes.forgotten()

    def close_table(self) -> None:
        self.merging.stop()
        if self._db is None:
            return
        with contextlib.suppress(LibraryError), _edge("closing"):
            if not self.context.read_only:
                self._db.flush(True)
        with contextlib.suppress(LibraryError), _edge("closing"):
            self._db.close()
        self._db = None
        if not self.context.read_only:
            self.sizes.note()

    def _options(self, *, create: bool) -> rocksdict.Options:
        made = rocksdict.Options(raw_mode=True)
        made.create_if_missing(create)
        made.set_error_if_exists(create)
        made.set_compression_type(rocksdict.DBCompressionType.none())
        made.set_write_buffer_size(self.buffer_bytes)
        made.set_enable_blob_files(True)
        made.set_min_blob_size(LEAST_BLOB)
        made.set_blob_file_size(self.buffer_bytes)
        made.set_blob_gc_age_cutoff(COLLECT_AGE)
        made.set_max_open_files(MOST_OPEN_FILES)
        made.set_keep_log_file_num(2)
        made.set_max_log_file_size(LOG_BYTES)
        return made

    def _open_db(self) -> rocksdict.Rdict:
        self.require_open()
        assert self._db is not None
        return self._db

    def write(self, pairs: Iterable[Pair], *, sync: bool) -> None:
        db = self._open_db()
        self.check_room()
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key, value in pairs:
            batch.put(key, bytes(value))
            self.sizes.total += len(memoryview(value))
        options = rocksdict.WriteOptions()
        options.sync = sync
        with _edge("writing"):
            db.write(batch, options)

    def remove(self, keys: Sequence[bytes]) -> None:
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key in keys:
            batch.delete(key)
        with _edge("deleting"):
            self._open_db().write(batch)
        self.merging.removed(keys)

    def merge(self, start: bytes, stop: bytes) -> None:
        assert self._db is not None
        with contextlib.suppress(LibraryError), _edge("merging"):
            self._compact(start, stop)
            if 0 < self.context.capacity * COLLECT_SHARE < self.sizes.measure():
                self._db.set_options({_COLLECTING: "true"})
                self._compact(PIECES, HEADERS)
                self._db.set_options({_COLLECTING: "false"})

    def _compact(self, start: bytes, stop: bytes) -> None:
        assert self._db is not None
        options = rocksdict.CompactOptions()
        options.set_bottommost_level_compaction(rocksdict.BottommostLevelCompaction.force())
        self._db.compact_range(start, stop, options)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Get]:
        db = self._open_db()
        with _edge("reading"):
            snapshot = db.snapshot()

        def get(key: bytes) -> bytes | None:
            try:
                value: bytes = snapshot[key]
            except Exception as error:
                if str(error) == "key not found":
                    return None
                raise _translated("reading", error) from error
            return value

        yield get

    @contextlib.contextmanager
    def reading_unverified(self) -> Iterator[Get]:
        options, db = rocksdict.ReadOptions(), self._open_db()
        options.set_verify_checksums(False)

        def get(key: bytes) -> bytes | None:
            with _edge("reading"):
                value: bytes | None = db.get(key, read_opt=options)
                return value

        yield get

    def after(self, key: bytes, stop: bytes, count: int) -> list[tuple[bytes, bytes]]:
        options = rocksdict.ReadOptions()
        options.set_iterate_upper_bound(stop)
        found: list[tuple[bytes, bytes]] = []
        db = self._open_db()
        with _edge("scanning"):
            entries = db.iter(options)
            entries.seek(key + b"\0")
            while entries.valid() and len(found) < count:
                found.append((entries.key(), entries.value()))
                entries.next()
            if not entries.valid():
                entries.status()
        return found

    def sync(self) -> None:
        db = self._open_db()
        with _edge("syncing"):
            db.flush_wal(True)


@contextlib.contextmanager
def _edge(doing: str) -> Iterator[None]:
    """Translate RocksDB's errors. It takes no writes itself after one that failed."""
    try:
        yield
    except Exception as error:
        raise _translated(doing, error) from error


def _translated(doing: str, error: Exception) -> LibraryError:
    message, text = f"{doing} failed: {error}", str(error)
    lost = text.startswith("Corruption") or "No such file or directory" in text
    broken = text.startswith("IO error") and not lost and doing != "reading"
    return LibraryError(message, Status.DAMAGED if lost else Status.FAILED, broken=broken)

"""The engine `leveldb`: records in sorted files that are merged in the background.

::

    leveldb/...             the files of LevelDB
    leveldb/sizes.json      sizes of all of them, from a clean stop to the next opening

A batch is one record of its log. Nothing is compressed: KV tensors gain nothing. Values are large,
so buffers and files are, too: up to 64 MiB. LevelDB is never told to make what it does not find.

Deleted records take room until the files that hold them are merged. Their names are in the order of
generations, so what leaves lies together, and once a sixteenth of the capacity has left, that range
is merged, in a thread of its own.

Reads verify the sums of LevelDB first; where these are wrong, the envelope alone judges.
``paranoid_checks`` is off: with it one flipped bit ends all merging, and a bad record of the log
keeps all closed.
A log or manifest that was cut off looks to LevelDB like an older state, so ``sizes.json`` tells
whether anything is short.

LevelDB cannot open a database without writing. For a reader it is therefore opened in a folder of
links to its files, which takes what LevelDB writes and is removed afterwards: it never changes a
file that it finds.

LevelDB cannot be contained: it maps the first thousand of its files, so a page of them that the
disk cannot read, or a file that is cut off while it is open, ends the process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import plyvel

from kvstore.backends import base
from kvstore.backends.base import Status
from kvstore.backends.keyvalue import LibraryError
from kvstore.backends.merged import MergedEngine
from kvstore.errors import CorruptStore, EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvstore.backends.keyvalue import Get, Pair
    from kvstore.backends.raw import Salvage

T = TypeVar("T")

Entry = tuple[bytes, bytes]

CACHE_BYTES = 8 << 20
BLOCK_BYTES = 512
"""LevelDB sums what it packs together: so little, and a piece shares its sum with no other."""
_NOWHERE = b"\xff"
_MIRROR = "kvstore-leveldb-"
_ITS_OWN = ("LOCK", "LOG", "LOG.old")
"""Files that LevelDB opens for writing as they are."""


class LeveldbEngine(MergedEngine):
    """One LevelDB database; it has no options."""

    name = "leveldb"
    capabilities = base.Capabilities(
        preferred_threads=2, atomic_batch=True, durable_without_flush=False, alignment=1,
        fixed_slots=False, space_factor=2.0, frees_space=True, contained=False,
    )  # fmt: skip

    @classmethod
    def salvage(cls, context: base.EngineContext) -> Salvage:
        from kvstore.backends.leveldbraw import LeveldbSalvage

        return LeveldbSalvage(context)

    def __init__(self, context: base.EngineContext) -> None:
        super().__init__(context)
        self._db: plyvel.DB | None = None
        self._mirror: Path | None = None

    def make_table(self) -> None:
        with _edge("making"):
            self._database(create=True).close()

    def open_table(self) -> None:
        self.sizes.check()
        try:
            if self.context.read_only:
                self._mirror = self._make_mirror()
                self._db = self._database(create=False)
            else:
                with self.sizes.forgotten():
                    self._db = self._database(create=False)
        except plyvel.IOError as error:
            raise EngineError(f"{self.folder} cannot be opened: {error}") from error
        except plyvel.Error as error:
            hint = "run kvstore recover: it copies every block that is whole"
            raise CorruptStore(f"{self.folder} cannot be opened: {error}", hint) from error

    def _make_mirror(self) -> Path:
        _sweep()
        mirror = Path(tempfile.mkdtemp(prefix=f"{_MIRROR}{os.getpid()}-"))
        for entry in self.folder.iterdir():
            if entry.name not in _ITS_OWN:
                (mirror / entry.name).symlink_to(entry.absolute())
        return mirror

    def close_table(self) -> None:
        self.merging.stop()
        if self._mirror is not None:
            if self._db is not None:
                self._db.close()
                self._db = None
            shutil.rmtree(self._mirror, ignore_errors=True)
            self._mirror = None
        if self._db is not None:
            # Nothing lies there to be merged, but what the log holds goes into files.
            self.merge(_NOWHERE, _NOWHERE + b"\0")
            self._db.close()
            self._db = None
            self.sizes.note()

    def _database(self, *, create: bool) -> plyvel.DB:
        return plyvel.DB(
            str(self._mirror or self.folder), create_if_missing=create, error_if_exists=create,
            compression=None, write_buffer_size=self.buffer_bytes, max_file_size=self.buffer_bytes,
            block_size=BLOCK_BYTES, lru_cache_size=CACHE_BYTES, paranoid_checks=False,
        )  # fmt: skip

    def _open_db(self) -> plyvel.DB:
        self.require_open()
        assert self._db is not None
        return self._db

    def write(self, pairs: Iterable[Pair], *, sync: bool) -> None:
        self.check_room()
        with _edge("writing"), self._open_db().write_batch(transaction=True, sync=sync) as batch:
            for key, value in pairs:
                batch.put(key, value)
                self.sizes.total += len(memoryview(value))

    def remove(self, keys: Sequence[bytes]) -> None:
        with _edge("deleting"), self._open_db().write_batch(transaction=True) as batch:
            for key in keys:
                batch.delete(key)
        self.merging.removed(keys)

    def merge(self, start: bytes, stop: bytes) -> None:
        with contextlib.suppress(plyvel.Error):
            assert self._db is not None
            self._db.compact_range(start=start, stop=stop)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Get]:
        with _edge("reading"), self._open_db().snapshot() as snapshot:

            def get(key: bytes) -> bytes | None:
                with _edge("reading"):
                    value: bytes | None = _unless_corrupt(
                        lambda verify: snapshot.get(key, verify_checksums=verify, fill_cache=False)
                    )
                    return value

            yield get

    def after(self, key: bytes, stop: bytes, count: int) -> list[tuple[bytes, bytes]]:
        with _edge("scanning"):
            return _unless_corrupt(lambda verify: self._after(key, stop, count, verify))

    def _after(self, key: bytes, stop: bytes, count: int, verify: bool) -> list[Entry]:
        with self._open_db().iterator(
            start=key, stop=stop, include_start=False, verify_checksums=verify, fill_cache=False
        ) as entries:
            return list(itertools.islice(entries, count))

    def sync(self) -> None:
        # A synced write covers its own log only, and LevelDB never syncs one that it leaves. So all
        # goes from the logs into files, which it syncs; the write tells whether that worked.
        self.merge(_NOWHERE, _NOWHERE + b"\0")
        with _edge("syncing"), self._open_db().write_batch(transaction=True, sync=True) as batch:
            batch.delete(_NOWHERE)


def _sweep() -> None:
    """Remove the links of our processes that were killed while they looked."""
    for left in Path(tempfile.gettempdir()).glob(f"{_MIRROR}*"):
        number = left.name.removeprefix(_MIRROR).partition("-")[0]
        with contextlib.suppress(OSError):
            mine = left.lstat().st_uid == os.geteuid()
            if mine and number.isdigit() and not Path(f"/proc/{number}").exists():
                shutil.rmtree(left)


def _unless_corrupt(read: Callable[[bool], T]) -> T:
    """Read with the sums of LevelDB verified, or without where they are wrong: what is there then
    is for the envelope to judge, and damage costs one record instead of all around it."""
    try:
        return read(True)
    except plyvel.CorruptionError:
        return read(False)


@contextlib.contextmanager
def _edge(doing: str) -> Iterator[None]:
    """Translate LevelDB's errors. It takes no writes itself after one that failed."""
    try:
        yield
    except plyvel.CorruptionError as error:
        raise LibraryError(f"{doing} failed: {error}", Status.DAMAGED) from error
    except plyvel.IOError as error:
        raise LibraryError(f"{doing} failed: {error}", broken=doing != "reading") from error
    except plyvel.Error as error:
        raise LibraryError(f"{doing} failed: {error}") from error

"""The engine `filesystem`: one file per record, named by what the record is.

::

    tmp/<process>-<start>-<number>          files being written
    <namespace, 32 hex>/<fan-out, hex>/<shard, 4 hex>-<key, hex>.<generation, 16 hex>.kvb

The directory ``tmp`` is the mark that an engine was made here: ``create`` makes it in an empty
directory, ``open`` refuses to start without it, nothing else ever makes it. The fan-out number is
xxh3-64 of the key modulo ``fanout``, in two hex digits up to 256, else in three. A file holds
exactly one record image. It is written under a name of its own in ``tmp`` and renamed when
complete, so a reader sees a whole record or none, and what a crash leaves behind lies in one
directory. The name carries the generation: versions never meet, and a late unlink cannot hit a
newer one.

Nothing on disk is trusted: symbolic links are never followed, a fifo does not block, and what is no
regular file is reported, not read. Around this file: ``filetree`` knows names and directories,
``publish`` writes and syncs, ``directio`` moves the bytes.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvstore.backends import base
from kvstore.backends.base import SCAN_BATCH, Finding, Status
from kvstore.backends.directio import (
    DIRECTORY,
    NO_DESCRIPTOR,
    STRANGE,
    Complaints,
    Files,
    read_status,
)
from kvstore.backends.filetree import MAX_FANOUT, TEMPORARY, Entry, Folders, Survey, Tree
from kvstore.backends.misnamed import rename_right
from kvstore.backends.publish import Put, Spool, Syncs, Workshop
from kvstore.backends.scanning import ScanBatch
from kvstore.errors import (
    ConfigError,
    CorruptBlock,
    EngineError,
    KVStoreError,
)
from kvstore.files import move_away
from kvstore.record import HEADER_PAGE, Header, decode, image_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from kvstore.backends.base import Blocks
    from kvstore.backends.raw import Salvage


_MISNAMED = ("wrong-name", "misplaced", "foreign")


class FilesystemEngine(base.Engine):
    """One file per record. Options: ``fanout`` (1 to 4096, fixed at creation) and ``io``.

    ``io`` is ``auto`` (O_DIRECT, or buffered where the filesystem refuses it), ``direct`` (where it
    is refused, ``open`` fails) or ``buffered``.
    """

    name = "filesystem"
    capabilities = base.Capabilities(
        preferred_threads=4, atomic_batch=False, durable_without_flush=False, alignment=4096,
        fixed_slots=False, space_factor=1.0, frees_space=True, contained=True,
    )  # fmt: skip
    recorded_options: ClassVar[Mapping[str, object]] = {"fanout": 256}

    @classmethod
    def salvage(cls, context: base.EngineContext) -> Salvage:
        from kvstore.backends.filesystemraw import FilesystemSalvage

        return FilesystemSalvage(context)

    def __init__(self, context: base.EngineContext) -> None:
        super().__init__(context)
        fanout, self._io = _check_options({**self.recorded_options, **context.options})
        self._tree = Tree(fanout)
        self._files = Files(self._io)
        self._complaints = Complaints()
        self._root = -1
        self._survey = Survey(self._root)
        self._shop: Workshop | None = None

    def suits(self, capacity: int) -> bool:
        return True

    def create(self) -> None:
        self.make_folder(TEMPORARY)

    def open(self) -> None:
        self.close()
        try:
            self._root = os.open(self.context.directory, os.O_RDONLY | os.O_DIRECTORY)
            self._start(os.open(TEMPORARY, DIRECTORY, dir_fd=self._root))
        except OSError as error:
            self.close()
            raise self.opening_failed(error) from error
        except KVStoreError:
            self.close()
            raise
        self.is_open = True

    def close(self) -> None:
        self.is_open = False
        if self._shop is not None:
            os.close(self._shop.spool.folder)
            self._shop = None
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    def put_many(self, blocks: Blocks, images: Sequence[memoryview], *, sync: bool) -> base.Written:
        shop = self._open_shop(writing=True)
        base.check_images(blocks, images)
        put = Put(shop, blocks, sync=sync)
        if not shop.syncs.failed:
            put.write(self.kept(images))
            put.publish()
        return base.Written(np.zeros(len(blocks), np.uint64), put.statuses)

    def get_many_into(self, blocks: Blocks, images: Sequence[memoryview]) -> base.Read:
        self.require_open()
        base.check_images(blocks, images)
        names, namespace = self._tree.names(blocks), blocks.namespace.hex()
        # Setting single elements of numpy arrays would cost more than all other Python here.
        statuses, filled = bytearray(len(blocks)), [0] * len(blocks)
        with Folders(self._root) as folders:
            for i, ((fan, name), image) in enumerate(zip(names, images, strict=True)):
                try:
                    folder = folders.enter(namespace, fan)
                    filled[i] = got = self._files.load(name, folder, image)[0]
                    statuses[i] = Status.OK if got == len(image) else Status.DAMAGED
                except OSError as error:
                    statuses[i] = self._unreadable(error, name)
        return base.Read(np.frombuffer(statuses, np.uint8), np.array(filled, np.uint32))

    def reread(self, one: Blocks, record: memoryview) -> bool:
        self.require_open()
        ((fan, name),) = self._tree.names(one)
        try:
            with Folders(self._root) as folders:
                folder = folders.enter(one.namespace.hex(), fan)
                return self._files.load_around(name, folder, record)
        except OSError as error:
            self._unreadable(error, name)
            return False

    def contains_many(self, blocks: Blocks) -> base.Mask:
        self.require_open()
        found, namespace = np.zeros(len(blocks), np.bool_), blocks.namespace.hex()
        with Folders(self._root) as folders:
            for i, (fan, name) in enumerate(self._tree.names(blocks)):
                try:
                    folder = folders.enter(namespace, fan)
                    mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
                    found[i] = stat.S_ISREG(mode)
                except OSError as error:
                    self._unreadable(error, name)
        return found

    def where(self, blocks: Blocks) -> list[str]:
        namespace = blocks.namespace.hex()
        return [f"{namespace}/{fan}/{name}" for fan, name in self._tree.names(blocks)]

    def delete_many(self, blocks: Blocks, how: base.Leaving = base.Leaving.VERSION) -> int:
        self.require_open(writing=True)
        removed, failure, namespace = 0, "", blocks.namespace.hex()
        with Folders(self._root) as folders:
            for fan, name in self._tree.names(blocks):
                try:
                    os.unlink(name, dir_fd=folders.enter(namespace, fan))
                    removed += 1
                except FileNotFoundError:
                    pass
                except OSError as error:
                    self._complaints.log("removing", name, error)
                    # What is no file holds no record: it stays where it is, for check to report.
                    if error.errno not in STRANGE:
                        failure = failure or f"{name} cannot be removed: {error.strerror}"
        if failure:
            raise EngineError(failure, "see to the filesystem, then delete again")
        return removed

    def forget(self, namespace: bytes) -> None:
        self.require_open(writing=True)
        name = namespace.hex()
        # Directories that hold anything stay. A put at the same time makes its own again.
        with contextlib.suppress(OSError), Folders(self._root) as folders:
            for fan in self._tree.fans:
                with contextlib.suppress(OSError):
                    os.rmdir(fan, dir_fd=folders.enter(name))
            os.rmdir(name, dir_fd=self._root)

    def scan(self) -> Iterator[base.Scanned]:
        self.require_open()
        # One page at a time leaves a disk idle: four threads halve the time, on fast ones more.
        threads = self.capabilities.preferred_threads
        with ThreadPoolExecutor(threads, "scan") as pool:
            found = self._tree.walk(self._root)
            while chunk := list(itertools.islice(found, SCAN_BATCH)):
                batch = ScanBatch()
                size = -(-len(chunk) // threads)
                parts = [chunk[at : at + size] for at in range(0, len(chunk), size)]
                for item in itertools.chain.from_iterable(pool.map(self._read_headers, parts)):
                    if isinstance(item, Finding):
                        batch.report(item)
                    else:
                        batch.add(item)
                yield batch.take()

    def put_right(self, finding: Finding, target: Path) -> str:
        """Give whole records their own names; what is none, or has no place, moves away."""
        self._open_shop(writing=True)
        path = self.context.directory / finding.path
        if finding.kind == "unreadable":
            return ""
        if finding.kind in _MISNAMED:
            inside = list(path.rglob("*")) if path.is_dir() and not path.is_symlink() else [path]
            done = [rename_right(self._tree, self.context, one) for one in inside]
            if done == [True]:
                return "mended"
        return "moved" if move_away(path, target) else ""

    def flush(self) -> None:
        shop = self._open_shop()
        if not self.context.read_only:
            shop.syncs.everything()

    def stats(self) -> base.Stats:
        failed = self._open_shop().syncs.failed
        notes = tuple(note for note in (self._files.note, failed) if note)
        return base.Stats(self._survey.step(), self._files.io, notes)

    @property
    def failed(self) -> str:
        return self._shop.syncs.failed if self._shop is not None else ""

    def check(self) -> list[Finding]:
        spool = self._open_shop().spool
        found = [item for item in self._tree.walk(self._root) if isinstance(item, Finding)]
        try:
            with Folders(self._root) as folders, os.scandir(folders.enter(TEMPORARY)) as entries:
                for entry in entries:
                    path = f"{TEMPORARY}/{entry.name}"
                    if not entry.is_file(follow_symlinks=False):
                        found.append(Finding("foreign", path, "not a file of this engine"))
                    elif not spool.owns(entry.name):
                        found.append(Finding("leftover", path, "an unfinished write"))
        except OSError as error:
            raise EngineError(f"{TEMPORARY} cannot be listed: {error.strerror}") from error
        return found

    def _open_shop(self, *, writing: bool = False) -> Workshop:
        self.require_open(writing=writing)
        assert self._shop is not None
        return self._shop

    def _start(self, temporary: int) -> None:
        """Begin anew with ``tmp`` open; raises OSError, EngineError."""
        self._files, self._complaints = Files(self._io), Complaints()
        spool = Spool(temporary, self._files, self._complaints)
        syncs = Syncs(self._root, self._complaints)
        self._shop = Workshop(self._root, self._tree, spool, syncs, self._complaints)
        self._survey = Survey(self._root)
        if not self.context.read_only:
            spool.remove_leftovers()
            self._probe(spool)

    def _probe(self, spool: Spool) -> None:
        """Write a page, so that it is known from the start whether O_DIRECT works here."""
        name = spool.new_name()
        try:
            os.close(spool.write(name, memoryview(mmap.mmap(-1, HEADER_PAGE))))
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise EngineError(
                    f"the filesystem of {self.context.directory} refuses O_DIRECT",
                    "use io=auto or io=buffered",
                ) from error
            # A full or failing disk shows at the first put; what is stored can still be read.
        spool.discard(name)

    def _unreadable(self, error: OSError, name: str) -> Status:
        status = read_status(error)
        if status != Status.MISSING:
            self._complaints.log("reading", name, error)
        return status

    def _read_headers(self, items: Sequence[Entry | Finding]) -> list[Header | Finding]:
        """Return what the headers of the entries say; those that are gone are left out."""
        page = memoryview(mmap.mmap(-1, HEADER_PAGE))
        found: list[Header | Finding] = []
        with Folders(self._root) as folders:
            for item in items:
                if isinstance(item, Finding):
                    found.append(item)
                    continue
                try:
                    found.append(self._read_header(folders, item, page))
                except CorruptBlock as error:
                    found.append(Finding("bad-header", item.path, error.message, item.identity))
                except FileNotFoundError:
                    continue
                except OSError as error:
                    if error.errno in NO_DESCRIPTOR:
                        raise EngineError(f"the scan stopped: {error.strerror}") from error
                    found.append(Finding("unreadable", item.path, str(error.strerror)))
        return found

    def _read_header(self, folders: Folders, entry: Entry, page: memoryview) -> Header | Finding:
        folder = folders.enter(entry.namespace, entry.fan)
        filled, size = self._files.load(entry.name, folder, page)
        if size < 0:
            return Finding("foreign", entry.path, "not a file")
        header = decode(page[:filled])
        if header.store != self.context.store_uuid:
            return Finding("other-store", entry.path, f"belongs to store {header.store.hex()}")
        if entry.identity != (header.namespace, header.shard, header.key, header.generation):
            return Finding("wrong-name", entry.path, f"holds block {header.key.hex()}")
        if size < image_bytes(header.stored_length):
            return Finding("short", entry.path, f"has {size} bytes, too few for its payload")
        return header


def _check_options(options: Mapping[str, object]) -> tuple[int, object]:
    """Return fanout and io; raises ConfigError."""
    unknown = sorted(set(options) - {"fanout", "io"})
    if unknown:
        raise ConfigError(
            f"the filesystem engine has no option {unknown[0]!r}", "its options are fanout and io"
        )
    fanout = options["fanout"]
    if type(fanout) is not int or not 1 <= fanout <= MAX_FANOUT:
        raise ConfigError(f"fanout={fanout!r} is out of range", f"use 1 to {MAX_FANOUT}")
    return fanout, options.get("io", "auto")

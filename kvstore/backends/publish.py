"""How a record's file comes to be: written in ``tmp``, complete, then given its name; and when all
of that is durable.

Durable means, in this order: fsync of each file, rename, sync of each directory. After a failed
sync of a directory or of the filesystem the kernel may have dropped the pages and forgotten the
error, so a second sync proves nothing: no more is written until the engine is opened again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore.backends.base import Status
from kvstore.backends.directio import (
    CREATE,
    NO_DESCRIPTOR,
    Complaints,
    Files,
    syncfs,
    syncfs_reports_errors,
    write_status,
)
from kvstore.backends.filetree import TEMPORARY, Folders, Tree
from kvstore.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.backends.base import Blocks

SYNC_EACH = 8
"""Up to so many directories of a batch are synced one by one, more by one syncfs."""
SYNC_GROUP = 32
"""Files synced together: the first fsync commits the metadata of all, 40 % less time at 64 KiB."""


class Spool:
    """The directory ``tmp``, open as ``folder``: files being written, under names of their own."""

    def __init__(self, folder: int, files: Files, complaints: Complaints) -> None:
        self.folder = folder
        self._files = files
        self._complaints = complaints
        # Ours alone even if files of an earlier process with our number could not be removed.
        self._prefix = f"{os.getpid():x}-{time.time_ns():x}-"
        self._counter = itertools.count()

    def new_name(self) -> str:
        return f"{self._prefix}{next(self._counter):x}"

    def owns(self, name: str) -> bool:
        return name.startswith(self._prefix)

    def write(self, name: str, image: memoryview) -> int:
        """Return the descriptor of a new file that holds ``image``.

        Raises OSError, after which there may be a file to :meth:`discard`.
        """
        descriptor = self._files.open(name, CREATE, self.folder)
        try:
            self._files.write(descriptor, image)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def discard(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self.folder)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._complaints.log("removing", f"{TEMPORARY}/{name}", error)

    def remove_leftovers(self) -> None:
        """Remove the files that an earlier process did not finish; leave what is no file."""
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    self.discard(entry.name)


class Syncs:
    """What is durable, as far as we know, and whether a sync has failed (``failed`` says how)."""

    def __init__(self, root: int, complaints: Complaints) -> None:
        self.failed = ""
        # Older kernels keep quiet in syncfs, so that only fsync tells whether a file was written.
        self.every_file = not syncfs_reports_errors()
        self._root = root
        self._complaints = complaints
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        # Directories made for a namespace, and how many of them were made at its last sync.
        self._made: dict[str, int] = {}
        self._settled: dict[str, int] = {}

    def make_folder(self, parent: int, name: str, namespace: str) -> None:
        # Counted before anybody else can put into it and ask whether its entry is durable.
        with self._lock:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=parent)
            self._made[namespace] = self._made.get(namespace, 0) + 1

    def settle(self, folders: Folders, namespace: str) -> None:
        """Make the entries of a namespace's directories durable; raises OSError.

        An earlier process may have made them and died, so the first time counts as unsettled.
        """
        with self._lock:
            made = self._made.get(namespace, 0)
            if self._settled.get(namespace, -1) >= made:
                return
        os.fsync(folders.enter(namespace))
        os.fsync(self._root)
        with self._lock:
            self._settled[namespace] = max(made, self._settled.get(namespace, -1))

    def everything(self) -> None:
        """Sync the whole filesystem. Raises EngineError, also ever after one that failed."""
        # One at a time: the kernel tells a failure to one caller only, all others must learn of it.
        with self._sync_lock:
            if not self.failed:
                try:
                    syncfs(self._root)
                except OSError as error:
                    self.fail(error)
            if self.failed:
                raise EngineError(self.failed, "see to the disk, then open the store again")

    def fail(self, error: OSError) -> None:
        self.failed = f"a sync failed ({error.strerror}), so nothing more is written"
        self._complaints.log("syncing", "the filesystem", error)


class _Draft(NamedTuple):
    """A file that waits to be renamed; sorts by directory, then in the given order."""

    fan: str
    number: int
    name: str
    temporary: str


@dataclass(frozen=True, slots=True)
class Workshop:
    """What a put needs of an open engine."""

    root: int
    tree: Tree
    spool: Spool
    syncs: Syncs
    complaints: Complaints


class Put:
    """One ``put_many`` under way. All its files are written before the first gets its name."""

    def __init__(self, shop: Workshop, blocks: Blocks, *, sync: bool) -> None:
        self.statuses = np.full(len(blocks), Status.FAILED, np.uint8)
        self._shop = shop
        self._blocks = blocks
        self._namespace = blocks.namespace.hex()
        self._sync = sync
        self._sync_files = sync or shop.syncs.every_file
        self._held: list[tuple[int, _Draft]] = []
        self._complete: list[_Draft] = []

    def write(self, images: Iterable[memoryview]) -> None:
        """Write every image under a temporary name, and sync the files in groups if asked to."""
        group = SYNC_GROUP if self._sync_files else 1
        names = self._shop.tree.names(self._blocks)
        for number, ((fan, name), image) in enumerate(zip(names, images, strict=True)):
            draft = _Draft(fan, number, name, self._shop.spool.new_name())
            try:
                self._held.append((self._write(draft, image), draft))
            except OSError as error:
                self._refuse(draft, error)
            if len(self._held) >= group:
                self._finish()
        self._finish()

    def publish(self) -> None:
        """Give complete files their names, directory by directory, and sync the directories."""
        fans = {draft.fan for draft in self._complete}
        each = len(fans) <= SYNC_EACH
        with Folders(self._shop.root, self._shop.syncs.make_folder) as folders:
            try:
                self._place_all(folders, sync=self._sync and each)
                if self._sync and (self.statuses == Status.OK).any():
                    self._sync_above(folders, each=each)
            except OSError as error:
                self._shop.syncs.fail(error)
                self._withdraw(folders)
            except EngineError:
                self._withdraw(folders)

    def _sync_above(self, folders: Folders, *, each: bool) -> None:
        if each:
            self._shop.syncs.settle(folders, self._namespace)
        else:
            self._shop.syncs.everything()

    def _write(self, draft: _Draft, image: memoryview) -> int:
        try:
            return self._shop.spool.write(draft.temporary, image)
        except OSError as error:
            if not self._held or error.errno not in NO_DESCRIPTOR:
                raise
        # Files that wait to be synced are descriptors that we can give up.
        self._finish()
        return self._shop.spool.write(draft.temporary, image)

    def _finish(self) -> None:
        """Sync and close the files that are held; what cannot be synced was not written."""
        for descriptor, draft in self._held:
            try:
                try:
                    if self._sync_files:
                        os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                self._complete.append(draft)
            except OSError as error:
                self._refuse(draft, error)
        self._held.clear()

    def _place_all(self, folders: Folders, *, sync: bool) -> None:
        """Rename; raises OSError only if the sync of a directory fails."""
        self._complete.sort()
        for fan, group in itertools.groupby(self._complete, attrgetter("fan")):
            placed = [draft for draft in group if self._place(folders, draft)]
            self.statuses[[draft.number for draft in placed]] = Status.OK
            if sync and placed:
                os.fsync(folders.enter(self._namespace, fan))

    def _place(self, folders: Folders, draft: _Draft) -> bool:
        try:
            try:
                self._rename(folders, draft)
            except FileNotFoundError:
                # The directory was removed since we opened it: begin again from the top.
                folders.leave(0)
                self._rename(folders, draft)
        except OSError as error:
            self._refuse(draft, error)
            return False
        return True

    def _rename(self, folders: Folders, draft: _Draft) -> None:
        folder = folders.enter(self._namespace, draft.fan)
        spool = self._shop.spool.folder
        os.rename(draft.temporary, draft.name, src_dir_fd=spool, dst_dir_fd=folder)

    def _withdraw(self, folders: Folders) -> None:
        """After a failed sync: take back what has its name already, since it is not durable."""
        for draft in self._complete:
            with contextlib.suppress(OSError):
                os.unlink(draft.name, dir_fd=folders.enter(self._namespace, draft.fan))
            self._shop.spool.discard(draft.temporary)
        self.statuses[self.statuses == Status.OK] = Status.FAILED

    def _refuse(self, draft: _Draft, error: OSError) -> None:
        self._shop.spool.discard(draft.temporary)
        self._shop.complaints.log("writing", draft.name, error)
        self.statuses[draft.number] = write_status(error)

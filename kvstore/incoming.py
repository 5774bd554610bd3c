"""What somebody drops into ``STORE/incoming``: verified, put like a client's block, then removed.

Taken are record images (``*.kvb``, of this store or of another one: see docs/formats.md) and
records of namespaces (``<id>.json``). A file must be whole when it gets its name; one that is not
fails its checksums and is looked at again when it has changed. What cannot be taken stays where it
is, is named in ``status``, and counts as used like everything in the store's directory.

Why a kill loses nothing: a file is removed only when its block survives a power loss. If we end
between the two, or the file cannot be removed, the next look finds a block that is there already,
and removes the file.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import numpy as np

from kvstore import dropped
from kvstore.answers import Ack, BlockStatus
from kvstore.batch import PutRequest
from kvstore.dropped import File, Identity, Look
from kvstore.errors import Busy, KVStoreError, ReadOnly
from kvstore.job import Step
from kvstore.keys import key_array
from kvstore.layout import INCOMING
from kvstore.put import Put

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.core import Core
    from kvstore.record import Header

log = logging.getLogger(__name__)

LOOK_SECONDS = 30.0
"""How often the directory is looked at although nobody says that something has come."""
NAMED = 8
"""Files that ``status`` names."""

_AGAIN = {
    BlockStatus.FULL: "there is no room for it now",
    BlockStatus.BUSY: "somebody else is writing its block",
    BlockStatus.FAILED: "it could not be written, see the log",
}
"""Why a file stays for the next look."""


class Incoming:
    """The directory of one open store. Owner thread only, but for :meth:`wake`.

    ``found`` is called when the directory is another one than at the last look.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self.path = core.path / INCOMING
        self.taken = self.present = 0
        self.found: Callable[[], None] = lambda: None
        self.problem = ""
        """Why nothing is taken; empty if something would be."""
        self._refused: dict[str, tuple[Identity, str]] = {}
        self._waiting: dict[str, str] = {}
        self._spaces = 0
        self._folder = (0, 0)
        self._look_at = 0.0
        self._under_way = self._held = False

    def wake(self) -> None:
        """Have somebody look soon. Any thread may call."""
        self._look_at = 0.0

    def hold(self) -> None:
        """Begin no more work: the store is about to be closed."""
        self._held = True

    def tick(self, now: float) -> None:
        """Look, if it is time to. ``now`` is that of ``time.monotonic``."""
        if self._held or self._under_way or self._core.read_only or now < self._look_at:
            return
        self._under_way = True
        self._look_at = now + LOOK_SECONDS
        known = len(self._core.namespaces)
        if known != self._spaces:  # what was refused for want of its namespace may be taken now
            self._refused.clear()
            self._spaces = known
        refused = {name: identity for name, (identity, _) in self._refused.items()}
        looks: list[Look] = []

        def act() -> None:
            try:
                looks.append(dropped.look(self._core.namespaces, self.path, refused))
            except KVStoreError as error:  # a problem of whoever owns the directory, no fault
                looks.append(Look(problem=error.message))

        self._core.queue(Step(act, lambda _: self._looked(looks)))

    def status(self) -> dict[str, object]:
        """Return counts of files: ``taken`` in, ``present`` (their blocks were there), ``waiting``
        for another look, ``refused``."""
        return {
            "taken": self.taken,
            "present": self.present,
            "waiting": len(self._waiting),
            "refused": len(self._refused),
        }

    def notes(self) -> list[str]:
        """Return what administrators should know, a line each."""
        stays = {name: reason for name, (_, reason) in self._refused.items()} | self._waiting
        lines = [f"{INCOMING}/{name!a} stays: {why}" for name, why in sorted(stays.items())[:NAMED]]
        if len(stays) > NAMED:
            lines.append(f"{len(stays) - NAMED} more files stay in {INCOMING}/")
        if len(self._refused) >= dropped.MOST_REFUSED:
            lines.append(f"nothing more is taken from {INCOMING}/ until some of them are removed")
        return [*([self.problem] if self.problem else []), *lines]

    # -- one look ---------------------------------------------------------------------------------

    def _looked(self, looks: list[Look]) -> None:
        """Take what was found; files whose blocks are there go at the end, all at once."""
        self._waiting.clear()
        self.problem = looks[0].problem if looks else "see the log"
        if self.problem:
            self._under_way = False
            return
        found = looks[0]
        if found.folder != self._folder:
            self._folder = found.folder
            self.found()
            self.wake()  # for what came before somebody watched
        self._refused = {name: one for name, one in self._refused.items() if name in found.names}
        if found.young:
            self._look_at = min(self._look_at, time.monotonic() + dropped.REST_SECONDS)
        left = _Countdown(len(found.files), lambda: self._remove(found))
        for file in found.files:
            self._refused.pop(file.name, None)  # it is another one, or it has changed
            self._take(file, left.one_less)
        left.one_less()

    def _take(self, file: File, done: Callable[[], None]) -> None:
        if file.refusal or file.header is None:
            if file.refusal:
                self._refuse(file)
            done()
            return
        try:
            put = Put(self._core, self._request(file.header), [file.payload])
        except (Busy, ReadOnly) as error:
            self._waiting[file.name] = error.message
            done()
        except KVStoreError as error:
            file.refusal = error.message
            self._refuse(file)
            done()
        else:
            self._core.queue(put)
            put.when_answered(lambda: self._answered(file, int(put.statuses[0]), done))

    def _request(self, header: Header) -> PutRequest:
        namespace = self._core.namespaces.by_id(header.namespace)
        if namespace is None:
            raise KVStoreError(dropped.unknown(header.namespace))
        return PutRequest(
            namespace,
            header.shard,
            key_array([header.key]),
            np.array([header.stored_length], np.uint32),
            level=Ack.DURABLE,
            parent=header.parent,
            label=header.label,
            checksums=np.array([header.checksum], np.uint64),
        )

    def _answered(self, file: File, status: int, done: Callable[[], None]) -> None:
        file.payload = memoryview(b"")
        if status in (BlockStatus.OK, BlockStatus.ALREADY_PRESENT):
            file.done = True
            self.taken += status == BlockStatus.OK
            self.present += status == BlockStatus.ALREADY_PRESENT
        elif status in _AGAIN:
            self._waiting[file.name] = _AGAIN[BlockStatus(status)]
        else:
            file.refusal = "a block of another length has its key"
            self._refuse(file)
        done()

    def _refuse(self, file: File) -> None:
        log.warning("%s/%s is not taken: %s", INCOMING, ascii(file.name), file.refusal)
        if len(self._refused) < dropped.MOST_REFUSED:
            self._refused[file.name] = file.identity, file.refusal

    def _remove(self, found: Look) -> None:
        done = [file for file in found.files if file.done]

        def act() -> None:
            dropped.remove(self.path, done)

        def after(_: Step) -> None:
            for file in done:
                if file.refusal:
                    self._refuse(file)
            if done:
                log.info("took %d files from %s", len(done), self.path)
            self._under_way = False
            # Where nothing could be done now, the same files would be met again.
            if found.more and (done or not self._waiting):
                self.wake()

        self._core.queue(Step(act, after))


class _Countdown:
    """Calls ``act`` when it was called once more often than ``count``."""

    def __init__(self, count: int, act: Callable[[], None]) -> None:
        self._left, self._act = count + 1, act

    def one_less(self) -> None:
        self._left -= 1
        if not self._left:
            self._act()

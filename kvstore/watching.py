"""Who tells us that something happened in a directory: inotify, by way of watchdog.

It only wakes somebody up, who then looks for himself. So nothing depends on which events there are:
editors, copying tools and mounted configuration maps all make others.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers.inotify import InotifyObserver

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from watchdog.observers.api import ObservedWatch

log = logging.getLogger(__name__)
# It complains of events that come while it is being stopped.
logging.getLogger("watchdog").setLevel(logging.CRITICAL)

_OF_READERS = ("opened", "closed_no_write")
"""Events that looking makes too: whoever looks must not wake itself up."""


class _Call(FileSystemEventHandler):
    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def on_any_event(self, event: FileSystemEvent) -> None:
        if event.event_type not in _OF_READERS:
            self._call()


class Watching:
    """Directories that are watched until :meth:`close`. Calls come from threads of its own."""

    def __init__(self) -> None:
        self._observer: InotifyObserver | None = None
        self._watches: dict[Path, ObservedWatch] = {}

    def add(self, folder: Path, call: Callable[[], object]) -> None:
        """Have ``call`` called when something happens in ``folder``, not below it.

        A folder that is added again is watched anew: it may be another one under the same name.
        Where that is not possible nothing will call, and the log says why.
        """
        try:
            if self._observer is None:
                self._observer = InotifyObserver()
                self._observer.start()
            if folder in self._watches:
                with contextlib.suppress(KeyError):
                    self._observer.unschedule(self._watches.pop(folder))
            self._watches[folder] = self._observer.schedule(_Call(call), str(folder))
        except OSError as error:
            log.warning("changes in %s will not be noticed by themselves: %s", folder, error)

    def close(self) -> None:
        """Watch nothing any more. May be called twice."""
        if self._observer is not None:
            self._observer.stop()
            self._observer.join(1.0)
            self._observer = None

"""The moment of a fault: before the n-th call that writes, at a named point, or after a time.

``os`` itself is watched, so that a strike is at the same place whenever it is repeated. What a
library calls by itself is not seen so; a time, and strace (:mod:`tests.faults.tracing`), are for
that.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from kvstore import killpoints

CALLS: tuple[str, ...] = (
    "write",
    "pwrite",
    "pwritev",
    "fsync",
    "fdatasync",
    "rename",
    "replace",
    "unlink",
)
CALLS += ("mkdir", "rmdir", "ftruncate", "posix_fallocate", "link")
Act = Callable[[], None]


class Strike:
    """Counts calls from :meth:`arm` on, and acts once. ``calls``: how many there were."""

    def __init__(self) -> None:
        self.calls = 0
        self.done = False
        self._at = 0
        self._act: Act = lambda: None

    def watch(self) -> None:
        """Replace the calls of ``os``, for the rest of this process."""
        for name in CALLS:
            setattr(os, name, self._counted(getattr(os, name)))

    def before_call(self, number: int, act: Act) -> None:
        """Act before the ``number``-th call from now on, counted from 1."""
        self.calls, self._at, self._act = 0, number, act

    def after_time(self, seconds: float, act: Act) -> None:
        def wait() -> None:
            time.sleep(seconds)
            self._strike(act)

        threading.Thread(target=wait, daemon=True).start()

    def at_point(self, name: str, count: int) -> None:
        """Die at the ``count``-th time that a kill point of :mod:`kvstore.killpoints` is reached.

        Needs a process that was started with a kill point armed, whichever.
        """
        vars(killpoints).update(_name=name, _wanted=count)

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self._at:
                self._strike(self._act)
            return real(*args, **kwargs)

        return call

    def _strike(self, act: Act) -> None:
        act()
        self.done = True

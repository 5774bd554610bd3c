"""Named points in the write path at which a test has the process killed, as if by SIGKILL.

For crashes between two steps that no system call separates, so that no outside hand could time
them. A test arms one by the environment variable KVSTORE_KILL_POINT=NAME or NAME:N (the N-th time)
before the process starts; otherwise :func:`reach` is an empty function.
"""

from __future__ import annotations

import itertools
import os
import signal

VARIABLE = "KVSTORE_KILL_POINT"

_name, _, _count = os.environ.get(VARIABLE, "").partition(":")
_wanted = int(_count or 1)
_reached = itertools.count(1)

if _name:

    def reach(name: str) -> None:
        """Kill this process if ``name`` is the point that was armed."""
        if name == _name and next(_reached) == _wanted:
            os.kill(os.getpid(), signal.SIGKILL)

else:

    def reach(name: str) -> None:
        """Do nothing: no point is armed."""

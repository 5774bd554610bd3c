"""What the policy learned, kept over a restart in ``policy.npz`` of the store.

It is advice: a file that is missing, damaged, of another store or policy costs what was learned and
nothing else. So it is written beside each checkpoint and at the end of a drain, without a share in
what these promise. Rows count only as far as they still hold the version that the file says.
"""

from __future__ import annotations

import logging
import os
import zipfile
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore import files
from kvstore.errors import CorruptStore

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.core import Core

log = logging.getLogger(__name__)

FILE = "policy.npz"
_UNFIT = (CorruptStore, OSError, KeyError, ValueError, IndexError, TypeError, EOFError, MemoryError)


def capture(core: Core) -> dict[str, Any]:
    """Return what is to be written: views of what goes on changing (owner thread).

    A file that mixes two moments is as good: each row in it is judged by itself.
    """
    state = core.policy.capture(core.index)
    if state:
        state |= {"policy": np.array(core.policy.name), "uuid": np.frombuffer(core.uuid, np.uint8)}
    return state


def save(directory: Path, state: dict[str, Any]) -> int:
    """Write it (*worker*); return the bytes of the file. What fails is logged."""
    path = directory / FILE
    try:
        if not state:
            path.unlink(missing_ok=True)
            return 0
        descriptor = files.create_temporary(path)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                np.savez(file, **state)
            files.publish(path, descriptor)
            return os.fstat(descriptor).st_size
        finally:
            files.discard_temporary(path)
            os.close(descriptor)
    except OSError as error:
        log.warning("what the eviction policy learned is not kept: %s: %s", path, error.strerror)
        return 0


def restore(core: Core) -> None:
    """Have the policy go on with what is there, if it fits."""
    path = core.path / FILE
    try:
        with files.open_regular(path) as file:
            core.checkpoint_bytes += os.fstat(file.fileno()).st_size
            with np.load(file, allow_pickle=False) as arrays:
                state = dict(arrays)
        if state["uuid"].tobytes() == core.uuid and str(state["policy"]) == core.policy.name:
            core.policy.restore(core.index, state)
    except FileNotFoundError:
        return
    except (*_UNFIT, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        log.warning("the eviction policy begins anew: %s does not fit: %s", path, error)

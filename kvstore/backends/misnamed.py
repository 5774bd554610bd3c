"""Records of the `filesystem` engine under the name of another: given their own, as a repair.

Two files that were swapped change names in one step of the kernel, so that a kill loses neither.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

import numpy as np

from kvstore import files, record
from kvstore.backends.base import Blocks
from kvstore.errors import CorruptBlock, CorruptStore
from kvstore.parity import MOST_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.backends.base import EngineContext
    from kvstore.backends.filetree import Tree
    from kvstore.record import Header

_EXCHANGE = 2
_AT_FDCWD = -100
_libc = ctypes.CDLL(None, use_errno=True)


def rename_right(tree: Tree, context: EngineContext, path: Path) -> bool:
    """Give the record in a file its own name; tell whether it has it now.

    It must be a whole one of this store, and whatever has that name already must not be. Raises
    OSError.
    """
    header = _whole(context, path)
    if header is None:
        return False
    right = path_of(tree, context, header)
    if right == path:
        return True
    try:
        right.parent.mkdir(files.DIRECTORY_MODE, parents=True, exist_ok=True)
        if not (right.is_symlink() or right.exists()):
            os.rename(path, right)
        elif _is_named(tree, context, right) or not _exchange(path, right):
            return False
    except (FileExistsError, NotADirectoryError):
        return False
    files.sync_directory(right.parent)
    files.sync_directory(path.parent)
    return True


def path_of(tree: Tree, context: EngineContext, header: Header) -> Path:
    """Return the path that a record belongs to."""
    blocks = Blocks(
        header.namespace,
        header.shard,
        np.frombuffer(header.key, np.uint8).reshape(1, -1),
        np.array([header.stored_length], np.uint32),
        np.array([header.generation], np.uint64),
        np.zeros(1, np.uint64),
    )
    ((fan, name),) = tree.names(blocks)
    return context.directory / header.namespace.hex() / fan / name


def _whole(context: EngineContext, path: Path) -> Header | None:
    """Return the header of a file that is a whole record of this store, else None."""
    try:
        with files.open_regular(path) as opened:
            image = memoryview(opened.read(MOST_BYTES))
        header = record.decode(image[: record.HEADER_PAGE])
    except (OSError, CorruptStore, CorruptBlock):
        return None
    if header.store != context.store_uuid:
        return None
    verdict, _, _ = record.judge_as(header, image, len(image))
    return header if verdict == record.Verdict.OK else None


def _is_named(tree: Tree, context: EngineContext, path: Path) -> bool:
    """Tell whether a file is a whole record under its own name."""
    header = _whole(context, path)
    return header is not None and path_of(tree, context, header) == path


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names at once (renameat2(2)); False where the filesystem cannot."""
    paths = os.fsencode(one), os.fsencode(other)
    done: int = _libc.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _EXCHANGE)
    return done == 0

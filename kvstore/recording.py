"""What clients ask for, told as it happens: the requests of a trace, without their keys.

A block is named by a hash of its key that is salted anew for each recording, so that a trace tells
who shares a prefix with whom and nothing that could be guessed from tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from kvstore.asked import Asked, Document, send_part
from kvstore.columns import NONE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.columns import U32
    from kvstore.core import Core
    from kvstore.underway import Request

PART_SECONDS = 0.5
MOST_WAITING = 1 << 18
"""Blocks that wait for a reader; what comes while there are more is counted as lost."""
_ID_BITS = 53
"""What JSON carries in every language."""


class Recording:
    """The requests since the last :meth:`take`, until :meth:`close`."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._salt = secrets.token_bytes(16)
        self._waiting: list[tuple[float, int, list[int]]] = []
        self._blocks = self._lost = 0
        core.listeners.append(self._hear)

    def _hear(self, line: U32, heard: int) -> None:
        if self._blocks + len(line) > MOST_WAITING:
            self._lost += 1
            return
        now = self._core.clock.seconds()
        for start, stop in self._chains(line):
            self._waiting.append((now, max(heard - start, 0), self._names(line[start:stop])))
        self._blocks += len(line)

    def _chains(self, line: U32) -> Iterator[tuple[int, int]]:
        """Yield where the chains of what was asked for together begin and end."""
        parents = self._core.index.parents[line]
        first = np.flatnonzero((parents[1:] != line[:-1]) | (parents[1:] == NONE)) + 1
        edges = [0, *first.tolist(), len(line)]
        yield from pairwise(edges)

    def _names(self, rows: U32) -> list[int]:
        index = self._core.index
        spaces = index.spaces[rows].tolist()
        names = []
        for space, row in zip(spaces, rows, strict=True):
            key = space.to_bytes(4, "little") + index.keys_of(row.reshape(1))[0].tobytes()
            digest = hashlib.blake2b(key, key=self._salt, digest_size=8).digest()
            names.append(int.from_bytes(digest, "little") >> 64 - _ID_BITS)
        return names

    def take(self) -> Document:
        """Return what came: seconds since 1970, how many blocks are known of the same request
        already, and all of its blocks from the start of the chain; and how many were lost."""
        told: Document = {"requests": self._waiting, "lost": self._lost}
        self._waiting, self._blocks, self._lost = [], 0, 0
        return told

    def close(self) -> None:
        self._core.listeners.remove(self._hear)


async def record(request: Request, _: Asked) -> Document:
    """What is asked for from now on, in parts, until the client has had enough."""
    recording = Recording((await request.store()).core)
    try:
        while True:
            await send_part(request, recording.take())
            await asyncio.sleep(PART_SECONDS)
    finally:
        recording.close()

"""Requests put together from what a daemon tells of them, and written as a trace.

A model server asks for what is there, in one part or several, and puts the rest when it has been
computed: three or more calls that are one request of a trace.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

JOIN_SECONDS = 60.0
"""A put that comes later than this after the look-up is a request of its own."""


@dataclass
class _Request:
    came: float
    ids: list[int]


class Joiner:
    """Takes calls in the order of time, gives requests in that order."""

    def __init__(self, block_tokens: int) -> None:
        self._tokens = block_tokens
        self._open: deque[_Request] = deque()
        self._start: float | None = None

    def add(self, now: float, heard: int, ids: Sequence[int]) -> Iterator[str]:
        """Take a call for ``ids``, of which an earlier call of the same request named the first
        ``heard``; yield what is complete by now, as JSON lines."""
        yield from self._close(now - JOIN_SECONDS)
        ids = list(ids)
        for request in reversed(self._open) if heard else ():
            if request.ids == ids[: len(request.ids)]:
                request.ids = ids
                return
        self._open.append(_Request(now, ids))

    def rest(self) -> Iterator[str]:
        """Yield all that is left."""
        yield from self._close(float("inf"))

    def _close(self, before: float) -> Iterator[str]:
        while self._open and self._open[0].came < before:
            request = self._open.popleft()
            self._start = request.came if self._start is None else self._start
            yield json.dumps(
                {
                    "timestamp": round((request.came - self._start) * 1000),
                    "input_length": len(request.ids) * self._tokens,
                    "output_length": 0,
                    "hash_ids": request.ids,
                    "block_tokens": self._tokens,
                }
            )

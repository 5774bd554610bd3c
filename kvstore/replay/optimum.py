"""The most hits that any policy can have with so many blocks, knowing the future.

Belady's rule with bypass: whenever there are too many blocks, drop the one whose next use is
farthest, the deepest first. A parent is used whenever its child is, so what is kept is closed
towards the roots and this is the exact optimum for blocks of equal size when only unbroken
prefixes count (L. A. Belady, A study of replacement algorithms, IBM Systems Journal 5(2), 1966).

What makes it fast: the blocks that are kept for the same next request lie on its path, one below
the other. So the state is one stretch of depths per awaited request, and dropping the deepest
blocks of the farthest request shortens one stretch.
"""

from __future__ import annotations

import heapq
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.replay.trace import I64, Trace

_AT_ONCE = 256


def optimum(trace: Trace, blocks: int, count_from: int = 0, count_to: int | None = None) -> int:
    """Return the most hits that requests [count_from, count_to) can have with room for so many
    blocks, when every request before them is served too."""
    stop = trace.requests if count_to is None else min(count_to, trace.requests)
    kept: dict[int, tuple[int, int]] = {}
    awaited: list[int] = []
    total = hits = 0
    for number, stretches in enumerate(reversed(list(_stretches(trace, stop)))):
        start, end = kept.pop(number, (0, 0))
        total -= end - start
        hits += end - start if number >= count_from else 0
        for following, first, last in stretches:
            total += last - first
            if following in kept:
                last = kept[following][1]
            else:
                heapq.heappush(awaited, -following)
            kept[following] = (first, last)
        while total > blocks:
            farthest = -awaited[0]
            first, last = kept.get(farthest, (0, 0))
            leaving = min(total - blocks, last - first)
            total -= leaving
            if leaving < last - first:
                kept[farthest] = (first, last - leaving)
            else:
                kept.pop(farthest, None)
                heapq.heappop(awaited)
    return hits


def _stretches(trace: Trace, stop: int) -> Iterator[list[tuple[int, int, int]]]:
    """Yield for each request, last one first, the later requests that use its blocks next, each
    with the depths [first, last) of these; blocks that nobody uses again are left out."""
    following = np.full(trace.blocks, stop, np.int64)
    for start in reversed(range(0, stop, _AT_ONCE)):
        paths = trace.paths(start, min(start + _AT_ONCE, stop))
        for at in reversed(range(len(paths.starts) - 1)):
            path = paths.blocks[paths.starts[at] : paths.starts[at + 1]]
            yield _runs(following[path], stop)
            following[path] = start + at


def _runs(following: I64, never: int) -> list[tuple[int, int, int]]:
    edges = [0, *(np.flatnonzero(following[1:] != following[:-1]) + 1).tolist(), len(following)]
    named = following[edges[:-1]].tolist()
    return [(n, *ends) for n, ends in zip(named, pairwise(edges), strict=True) if n != never]

"""A trace: requests over a tree of blocks.

Blocks are numbered by first use, a parent before its children, so a request is known by its deepest
block: the way up from there is its path. Nothing may be concluded from blocks with higher numbers
than those reached so far.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Paths:
    """The blocks of several requests, root first, one request behind the other; request i has
    ``blocks[starts[i]:starts[i + 1]]``."""

    blocks: I64
    starts: I64


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in time order over a tree of blocks.

    ``parents`` (one per block): the block before it, -1 for a root. ``leaves``, ``lengths``,
    ``arrivals`` (ms), ``input_tokens`` and ``output_tokens`` have an entry per request; a path has
    ``lengths[i]`` blocks, of ``block_tokens`` tokens each.
    """

    name: str
    parents: I32
    leaves: I32
    lengths: I32
    arrivals: I64
    input_tokens: I64
    output_tokens: I64
    block_tokens: int

    @property
    def requests(self) -> int:
        return len(self.leaves)

    @property
    def blocks(self) -> int:
        """Different blocks."""
        return len(self.parents)

    @property
    def refs(self) -> int:
        """Blocks asked for, each as often as it is."""
        return int(self.lengths.sum())

    @property
    def seconds(self) -> float:
        """Time from the first request to the last."""
        return float(self.arrivals[-1] - self.arrivals[0]) / 1000 if self.requests else 0.0

    @property
    def partial(self) -> Bools:
        """Tell which requests end in a block that is not full."""
        ends: Bools = self.lengths.astype(np.int64) * self.block_tokens > self.input_tokens
        return ends

    def paths(self, start: int, stop: int) -> Paths:
        """Return the paths of requests [start, stop), climbing all of them at once."""
        lengths = self.lengths[start:stop].astype(np.int64)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        blocks = np.empty(int(starts[-1]), np.int64)
        order = np.argsort(-lengths, kind="stable")
        at, into = self.leaves[start:stop][order], starts[1:][order] - 1
        longer = np.searchsorted(-lengths[order], -np.arange(int(lengths.max(initial=0))))
        for count in longer.tolist():
            blocks[into[:count]] = at[:count]
            at, into = self.parents[at[:count]], into[:count] - 1
        return Paths(blocks, starts)

    def first(self, requests: int) -> Trace:
        """Return the trace as it was after so many requests."""
        used = int(self.leaves[:requests].max(initial=-1)) + 1
        return replace(
            self,
            parents=self.parents[:used],
            leaves=self.leaves[:requests],
            lengths=self.lengths[:requests],
            arrivals=self.arrivals[:requests],
            input_tokens=self.input_tokens[:requests],
            output_tokens=self.output_tokens[:requests],
        )


class Builder:
    """Makes a trace of requests that come one by one, in time order.

    ``group``: so many blocks of the source become one, what is left at the end of a path is
    dropped, a block that is not full first.
    """

    def __init__(self, name: str, block_tokens: int, group: int = 1) -> None:
        self._name = name
        self._tokens = block_tokens
        self._group = group
        self._parents: list[int] = []
        self._known: dict[Hashable, int] = {}
        self._requests: list[tuple[int, int, float, int, int]] = []

    def add(
        self,
        arrival: float,
        input_tokens: int,
        output_tokens: int,
        ids: Sequence[int],
        scope: Hashable = None,
    ) -> None:
        """Add a request at ``arrival`` ms. An id names a block after the ids before it, within
        ``scope``. A request without a whole block is left out."""
        if self._group > 1:
            full = ids[: input_tokens // self._tokens]
            names: Sequence[Hashable] = list(zip(*[iter(full)] * self._group, strict=False))
        else:
            names = ids
        leaf = -1
        for name in names:
            leaf = self._block((leaf, name) if leaf >= 0 else (leaf, name, scope), leaf)
        if names:
            self._requests.append((leaf, len(names), arrival, input_tokens, output_tokens))

    def _block(self, key: Hashable, parent: int) -> int:
        block = self._known.setdefault(key, len(self._parents))
        if block == len(self._parents):
            self._parents.append(parent)
        return block

    def finish(self) -> Trace:
        columns = np.array(self._requests, np.float64).reshape(-1, 5).T.astype(np.int64)
        return Trace(
            self._name,
            np.array(self._parents, np.int32),
            columns[0].astype(np.int32),
            columns[1].astype(np.int32),
            columns[2],
            columns[3],
            columns[4],
            self._tokens * self._group,
        )

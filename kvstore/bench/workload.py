"""The workload wde-512: 8 tasks that each move 64 of 512 blocks, chosen at random.

From the benchmarks of https://github.com/noooop/wde (docs/persistence_kv_cache.md), with five model
shapes of 16 tokens a block. Source and target ids of a task are drawn apart, without repeats inside
a task; each side has a pool of 512 blocks, touched before the clock starts.
What differs from there: the data is random, so nothing can compress it, and a set overwrites, so
that it writes. Each version of a block has other bytes, so a write that was dropped is found out.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.errors import KVStoreError
from kvstore.pages import HUGE_PAGE, Pages, round_up

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCKS = 512
TASKS = 8
TASK_BLOCKS = 64
BLOCK_TOKENS = 16
PAGE = 4096

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Model:
    """A model whose KV blocks are moved: 2 bytes a value, keys and values of all layers."""

    name: str
    id: str
    layers: int
    kv_heads: int
    head_dim: int

    @property
    def block_bytes(self) -> int:
        return self.layers * 2 * BLOCK_TOKENS * self.kv_heads * self.head_dim * 2

    @property
    def set_bytes(self) -> int:
        """Bytes of all blocks, and of all moves of a round."""
        return BLOCKS * self.block_bytes


MODELS = {
    model.name: model
    for model in (
        Model("q32b", "Qwen/Qwen2.5-32B-Instruct-GPTQ-Int4", 64, 8, 128),
        Model("q7b", "Qwen/Qwen2.5-7B-Instruct", 28, 4, 128),
        Model("q3b", "Qwen/Qwen2.5-3B-Instruct", 36, 2, 128),
        Model("glm4", "THUDM/glm-4-9b-chat-1m-hf", 40, 4, 128),
        Model("l8b", "NousResearch/Hermes-3-Llama-3.1-8B", 32, 8, 128),
        Model("tiny", "no model, for trying out", 2, 2, 32),
    )
}
PUBLISHED = ("q32b", "q7b", "q3b", "glm4", "l8b")


@dataclass(frozen=True)
class Task:
    """Blocks ``sources`` of our pool; where reads bring them in the target pool."""

    sources: list[int]
    targets: list[int]


class WrongBytes(KVStoreError):
    """A block came back with other bytes; nothing of the run may be believed."""


class Workload:
    """The pools of one model and the tasks of each round."""

    def __init__(self, model: Model, seed: int = 2026) -> None:
        self.model = model
        self._random = random.Random(seed)
        rng = np.random.default_rng(seed)
        pools = [_Pool(model), _Pool(model)]
        self.source, self.target = (pool.blocks for pool in pools)
        self.huge = all(pool.huge for pool in pools)
        """Whether the pools lie in huge pages, but for a rest."""
        self.scratch = self.target.pop()
        for block in self.source:
            np.copyto(block, np.frombuffer(rng.bytes(model.block_bytes), np.uint8))

    def tasks(self) -> list[Task]:
        """Draw the tasks of a round."""
        draw = self._random.sample
        return [
            Task(draw(range(BLOCKS), TASK_BLOCKS), draw(range(BLOCKS), TASK_BLOCKS))
            for _ in range(TASKS)
        ]

    def whole(self) -> list[Task]:
        """Return tasks that move every block once, to its own place."""
        numbers = list(range(BLOCKS))
        parts = [numbers[at : at + TASK_BLOCKS] for at in range(0, BLOCKS, TASK_BLOCKS)]
        return [Task(part, part) for part in parts]

    def name(self, number: int, kind: str = "kvcache") -> str:
        """Return the key of a block as the source has it: 32 hexadecimal digits."""
        text = f"{kind}:{self.model.id}:{BLOCK_TOKENS}:{number}"
        return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()

    def copy(self, tasks: Sequence[Task]) -> None:
        """Move the blocks in memory: the baseline, one thread."""
        for task in tasks:
            for source, target in zip(task.sources, task.targets, strict=True):
                np.copyto(self.target[target], self.source[source])

    def stamp(self, versions: U64) -> None:
        """Make our blocks those of these versions, one number for each of the 512."""
        for block, version in zip(self.source, versions, strict=False):
            block[:8] = np.frombuffer(version.tobytes(), np.uint8)

    def blank(self) -> None:
        """Make sure that no block of an earlier read lies in the target pool."""
        for block in self.target:
            block[:: PAGE // 8] ^= 0xFF

    def check(self, tasks: Sequence[Task], who: str) -> None:
        """Compare what the last reads of each target brought. Raises WrongBytes."""
        last = {t: s for task in tasks for s, t in zip(task.sources, task.targets, strict=True)}
        for target, source in last.items():
            if not np.array_equal(self.target[target], self.source[source]):
                raise WrongBytes(f"{who} returned other bytes for block {self.name(source)}")


class _Pool:
    """Blocks, and one more, on whole pages, in huge pages if possible, that have been touched."""

    def __init__(self, model: Model) -> None:
        stride = round_up(model.block_bytes, PAGE)
        memory = Pages((BLOCKS + 1) * stride)
        memory.populate(0, memory.capacity)
        whole = np.frombuffer(memory.memory, np.uint8)
        self.blocks = [whole[at * stride :][: model.block_bytes] for at in range(BLOCKS + 1)]
        self.huge = memory.huge_bytes >= 0.9 * memory.capacity - HUGE_PAGE

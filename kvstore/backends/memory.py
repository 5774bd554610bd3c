"""The reference engine: records in a dictionary. Read this first, then the others.

It does what the contract says in the plainest way and is the model that all tests compare with. Its
records last as long as the object; it keeps nothing in its directory but the mark that it was made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.backends import base
from kvstore.backends.scanning import ScanBatch
from kvstore.errors import StoreExists, StoreNotFound
from kvstore.record import decode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.backends.base import Blocks

Name = tuple[bytes, int, bytes, int]  # namespace, shard, key, generation


class MemoryEngine(base.Engine):
    """Keeps images in memory. Needs no lock: each step is one operation on the dictionary."""

    name = "memory"
    capabilities = base.Capabilities(
        preferred_threads=1, atomic_batch=False, durable_without_flush=False, alignment=1,
        fixed_slots=False, space_factor=1.0, frees_space=True, contained=True, persistent=False,
    )  # fmt: skip

    def __init__(self, context: base.EngineContext) -> None:
        super().__init__(context)
        self._mark = context.directory / "memory"
        self._records: dict[Name, base.U8] = {}

    def suits(self, capacity: int) -> bool:
        return True

    def create(self) -> None:
        if self._mark.exists():
            raise StoreExists(f"{self.context.directory} already has a memory engine")
        self._mark.touch()

    def open(self) -> None:
        if not self._mark.is_file():
            raise StoreNotFound(f"no memory engine in {self.context.directory}", "create one")
        self.is_open = True

    def close(self) -> None:
        self.is_open = False

    def put_many(self, blocks: Blocks, images: Sequence[memoryview], *, sync: bool) -> base.Written:
        self.require_open(writing=True)
        base.check_images(blocks, images)
        for name, image in zip(_names(blocks), self.kept(images), strict=True):
            self._records[name] = np.array(image, np.uint8)
        return base.Written(np.zeros(len(blocks), np.uint64), np.zeros(len(blocks), np.uint8))

    def get_many_into(self, blocks: Blocks, images: Sequence[memoryview]) -> base.Read:
        self.require_open()
        base.check_images(blocks, images)
        statuses = np.full(len(blocks), base.Status.MISSING, np.uint8)
        filled = np.zeros(len(blocks), np.uint32)
        for i, (name, image) in enumerate(zip(_names(blocks), images, strict=True)):
            if (stored := self._records.get(name)) is not None:
                size = filled[i] = min(len(stored), len(image))
                np.copyto(np.frombuffer(image, np.uint8)[:size], stored[:size])
                statuses[i] = base.Status.OK if size == len(image) else base.Status.DAMAGED
        return base.Read(statuses, filled)

    def reread(self, one: Blocks, record: memoryview) -> bool:
        stored = self._records.get(_names(one)[0])
        if stored is None or len(stored) > len(record):
            return False
        np.copyto(np.frombuffer(record, np.uint8)[: len(stored)], stored)
        return True

    def contains_many(self, blocks: Blocks) -> base.Mask:
        self.require_open()
        return np.array([name in self._records for name in _names(blocks)], np.bool_)

    def delete_many(self, blocks: Blocks, how: base.Leaving = base.Leaving.VERSION) -> int:
        self.require_open(writing=True)
        return sum(self._records.pop(name, None) is not None for name in _names(blocks))

    def scan(self) -> Iterator[base.Scanned]:
        self.require_open()
        images = list(self._records.values())
        for first in range(0, len(images), base.SCAN_BATCH):
            batch = ScanBatch()
            for image in images[first : first + base.SCAN_BATCH]:
                batch.add(decode(image.data))
            yield batch.take()

    def flush(self) -> None:
        self.require_open()

    def stats(self) -> base.Stats:
        return base.Stats(overhead_bytes=0, io="memory")

    def check(self) -> list[base.Finding]:
        return []


def _names(blocks: Blocks) -> list[Name]:
    versions = zip(blocks.key_list(), blocks.generations.tolist(), strict=True)
    return [(blocks.namespace, blocks.shard, key, generation) for key, generation in versions]

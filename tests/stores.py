"""A store driven in the test's own thread, and blocks to put into it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvstore.answers import Ack, BlockStatus
from kvstore.batch import PutRequest
from kvstore.index import DISK
from kvstore.keys import key_array, named, namespace_id
from kvstore.opening import Opening, Options, open_store
from kvstore.put import Put
from kvstore.store import Store
from kvstore.writer import LateError

MIB = 1 << 20
CAPACITY = 64 * MIB


def key(number: int) -> bytes:
    return hashlib.sha256(b"key %d" % number).digest()


def block(number: int, size: int = 4096) -> bytes:
    return np.random.default_rng(number).bytes(size)


def options(**changes: object) -> Options:
    values: dict[str, object] = {"capacity": CAPACITY, "min_free": 0, "bounce_bytes": 16 * MIB}
    return Options(**{**values, **changes})  # type: ignore[arg-type]


class Local:
    """An open store with calls that take bytes; ``store`` is the real thing."""

    def __init__(self, path: Path, **changes: object) -> None:
        self.path = path
        self.store: Store = open_store(path, options(**changes))
        self.core = self.store.core
        found = self.core.namespaces.by_id(namespace_id(named("default")))
        assert found is not None
        self.namespace = found

    def put(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[bytes],
        *,
        shard: int = 0,
        durable: bool = False,
        chain: bool = False,
        parent: bytes = b"",
        label: str = "",
    ) -> list[int]:
        job = self.begin_put(
            keys, blocks, shard=shard, durable=durable, chain=chain, parent=parent, label=label
        )
        self.store.run(job)
        answered: list[bool] = []
        job.when_answered(lambda: answered.append(True))
        assert answered, "the put was not answered"
        return [int(status) for status in job.statuses]

    def begin_put(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[bytes],
        *,
        shard: int = 0,
        durable: bool = False,
        level: Ack = Ack.WRITTEN,
        **more: object,
    ) -> Put:
        """Begin a put without performing it."""
        request = PutRequest(
            self.namespace,
            shard,
            key_array(keys),
            np.array([len(one) for one in blocks], np.uint32),
            level=Ack.DURABLE if durable else level,
            **more,  # type: ignore[arg-type]
        )
        return self.store.put(request, [memoryview(one) for one in blocks])

    def get(self, keys: Sequence[bytes], *, shard: int = 0) -> list[bytes | None]:
        names = key_array(keys)
        found: list[bytes | None] = []
        while len(found) < len(names):
            job = self.store.get(self.namespace, shard, names[len(found) :], 8 * MIB)
            self.store.run(job)
            found += [
                bytes(job.payload(position)) if status == BlockStatus.OK else None
                for position, status in enumerate(job.statuses)
            ]
            job.close()
            self.store.run_chores()
        return found

    def contains(self, keys: Sequence[bytes], *, shard: int = 0) -> list[bool]:
        mask = self.store.contains(self.namespace, shard, key_array(keys))
        return [bool(one) for one in mask]

    def delete(self, keys: Sequence[bytes], *, shard: int = 0) -> int:
        statuses, removals = self.store.delete(self.namespace, shard, key_array(keys))
        self.store.run(removals[0])
        return int((statuses == BlockStatus.OK).sum())

    def flush(self) -> list[LateError]:
        """Make all that was put survive power loss; return what could not be written."""
        flush = self.store.flush()
        self.store.run_chores()
        if flush.failure is not None:
            raise flush.failure
        return self.store.take_errors()

    def rows(self) -> np.ndarray:
        """Return the rows whose block is on disk."""
        index = self.core.index
        rows = index.rows_of(None)
        there: np.ndarray = rows[(index.flags[rows] & DISK) != 0]
        return there

    def tick(self) -> None:
        self.store.tick()
        self.store.run_chores()

    def later(self, seconds: float) -> None:
        """Let time pass for what the store does by itself."""
        self.store._upkeep.tick(0.0)
        self.store.run_chores()
        self.store._upkeep.tick(seconds)
        self.store.run_chores()

    def stop(self) -> None:
        """End as after SIGTERM."""
        self.store.drain()
        self.store.close()

    def kill(self) -> None:
        """End as after SIGKILL: nothing is saved, the kernel keeps what was written."""
        self.store.close()

    def files(self) -> list[Path]:
        """Return the block files, sorted by name."""
        return sorted((self.path / "blocks").rglob("*.kvb"))


__all__ = ["CAPACITY", "MIB", "Local", "Opening", "block", "key", "options"]

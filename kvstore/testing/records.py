"""Records for tests: made, put, read back, deleted and judged.

What a store owes an engine around these calls is done here and nowhere else in the suite.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvstore.backends.base import SCAN_BATCH, Blocks, Engine, Status
from kvstore.backends.judging import judge
from kvstore.keys import key_array
from kvstore.record import (
    HEADER_PAGE,
    Header,
    Verdict,
    encode_into,
    image_bytes,
    payload_checksum,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

STORE = bytes(range(16))
NAMESPACE = bytes(range(16, 32))
OTHER_NAMESPACE = bytes(16)
WRITTEN_NS = 1_700_000_000_000_000_000


def key_of(number: int, length: int = 32) -> bytes:
    """Return a key that looks like a hash."""
    return hashlib.sha512(number.to_bytes(8, "little")).digest()[:length]


def make_blocks(
    keys: Sequence[bytes],
    lengths: int | Sequence[int] = 5000,
    generations: int | Sequence[int] = 1,
    *,
    namespace: bytes = NAMESPACE,
    shard: int = 0,
) -> Blocks:
    """Return blocks of one namespace and shard, places 0; one number stands for all blocks."""
    count = len(keys)
    return Blocks(
        namespace,
        shard,
        key_array(keys),
        np.broadcast_to(np.array(lengths, np.uint32), count).copy(),
        np.broadcast_to(np.array(generations, np.uint64), count).copy(),
        np.zeros(count, np.uint64),
    )


def blank_images(blocks: Blocks) -> list[memoryview]:
    """Return page-aligned memory for each block, filled with what no record contains."""
    images = []
    for length in blocks.lengths.tolist():
        image = memoryview(mmap.mmap(-1, image_bytes(length)))
        np.frombuffer(image, np.uint8)[:] = 0xA5
        images.append(image)
    return images


def payload_of(key: bytes, generation: int, length: int) -> bytes:
    """Return the bytes that a test stores under a key: no two keys or generations share them."""
    seed = hashlib.sha256(key + generation.to_bytes(8, "little")).digest()[:8]
    return np.random.default_rng(int.from_bytes(seed, "little")).bytes(length)


def full_images(blocks: Blocks, *, parent: bytes = b"", label: str = "") -> list[memoryview]:
    """Return complete record images of store STORE with payloads of :func:`payload_of`."""
    images = blank_images(blocks)
    columns = zip(
        blocks.key_list(), blocks.lengths.tolist(), blocks.generations.tolist(), images, strict=True
    )
    for key, length, generation, image in columns:
        payload = payload_of(key, generation, length)
        image[HEADER_PAGE:] = payload.ljust(len(image) - HEADER_PAGE, b"\0")
        header = Header(
            store=STORE, namespace=blocks.namespace, shard=blocks.shard, key=key, parent=parent,
            generation=generation, written_ns=WRITTEN_NS + generation % 1000, logical_length=length,
            stored_length=length, checksum=payload_checksum(payload), label=label,
        )  # fmt: skip
        encode_into(header, image[:HEADER_PAGE])
    return images


def put(engine: Engine, blocks: Blocks, *, sync: bool = False, **record: str | bytes) -> Blocks:
    """Put records that must be taken; return the blocks with their places."""
    images = full_images(blocks, **record)  # type: ignore[arg-type]
    written = engine.put_many(blocks, images, sync=sync)
    assert written.statuses.tolist() == [Status.OK] * len(blocks)
    return replace(blocks, places=written.places)


def delete(engine: Engine, blocks: Blocks) -> int:
    """Delete records by name; return how many were there."""
    return engine.delete_many(blocks)


def reopen(engine: Engine, *held: Blocks) -> None:
    """Open an engine whose records are known, as a store with a journal does."""
    engine.open()
    for blocks in held:
        assert_stored(engine, blocks)


def rebuild(engine: Engine) -> dict[Identity, int]:
    """Open an engine and learn from a scan what it holds, as a store without a journal does."""
    engine.open()
    return scanned(engine)


def verdicts(engine: Engine, blocks: Blocks) -> list[Verdict | None]:
    """Read blocks and judge them; None where the engine says that nothing is there."""
    images = blank_images(blocks)
    read = engine.get_many_into(blocks, images)
    found: list[Verdict | None] = []
    for i in range(len(blocks)):
        if read.statuses[i] == Status.MISSING:
            found.append(None)
            continue
        status, filled = int(read.statuses[i]), int(read.filled[i])
        judged = judge(engine, blocks, i, images[i], status, filled)
        found.append(judged.verdict if judged.status == Status.OK else Verdict.DAMAGED)
    return found


def assert_stored(engine: Engine, blocks: Blocks) -> None:
    assert verdicts(engine, blocks) == [Verdict.OK] * len(blocks)
    assert engine.contains_many(blocks).all()


def assert_absent(engine: Engine, blocks: Blocks) -> None:
    assert verdicts(engine, blocks) == [None] * len(blocks)
    assert not engine.contains_many(blocks).any()


Identity = tuple[bytes, int, bytes, int]


def scanned(engine: Engine) -> dict[Identity, int]:
    """Return what a scan finds as (namespace, shard, key, generation) -> place."""
    found: dict[Identity, int] = {}
    for batch in engine.scan():
        assert len(batch) <= SCAN_BATCH
        assert batch.strange == ()
        for i in range(len(batch)):
            key = batch.keys[i, : batch.key_lengths[i]].tobytes()
            name = (batch.namespaces[i].tobytes(), int(batch.shards[i]), key)
            identity = (*name, int(batch.generations[i]))
            assert identity not in found
            found[identity] = int(batch.places[i])
    return found


def identities(blocks: Blocks) -> list[Identity]:
    """Return the name of each block as :func:`scanned` has it."""
    versions = zip(blocks.key_list(), blocks.generations.tolist(), strict=True)
    return [(blocks.namespace, blocks.shard, key, generation) for key, generation in versions]


def occupied(directory: Path) -> int:
    """Return the bytes that all below a directory takes on the device, as ``du`` counts them."""
    total = 0
    for folder, _, names in os.walk(directory):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(path).st_blocks * 512
    return total

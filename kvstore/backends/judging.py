"""What was read, compared with what was asked for; and a lost chunk brought back.

Whoever reads a record off the disk has it judged here: a record that is damaged in one chunk and
has a parity chunk is a hit all the same. What comes back is judged like any other record.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore import parity, record
from kvstore.backends.base import Status
from kvstore.errors import CorruptBlock
from kvstore.record import HEADER_PAGE, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.backends.base import Blocks, Engine

# As integers: members of an enum are slow to look up, and this is asked for each block.
_TOLD = (int(Status.OK), int(Status.DAMAGED))
_LOST = (*_TOLD, int(Status.UNREADABLE))
"""What may be read of a record that lost a chunk."""


class Judged(NamedTuple):
    """``status``: what the read said, OK also for a record that was ``repaired``. ``verdict``:
    DAMAGED too where nothing was read. ``checksum`` of the payload, 0 unless OK. ``filled``: bytes
    of the image that were read. ``bare``: whole, but its parity chunk is not."""

    status: int
    verdict: Verdict
    checksum: int
    reason: str
    filled: int
    repaired: bool = False
    bare: bool = False

    @property
    def good(self) -> bool:
        return self.status == Status.OK and self.verdict is Verdict.OK


def compare(
    store: bytes, blocks: Blocks, number: int, image: memoryview, filled: int
) -> tuple[Verdict, int, str]:
    """Judge ``filled`` bytes of an image as the record of one block of a batch; see
    :func:`kvstore.record.judge`."""
    return record.judge(
        image,
        filled,
        store=store,
        namespace=blocks.namespace,
        shard=blocks.shard,
        key=blocks.keys[number].tobytes(),
        generation=int(blocks.generations[number]),
        length=int(blocks.lengths[number]),
    )


def judge(
    engine: Engine, blocks: Blocks, number: int, image: memoryview, status: int, filled: int
) -> Judged:
    """Judge what ``get_many_into`` read of one block of a batch, with its status and the bytes that
    were filled.

    If that is damaged and can be brought back, it is in ``image`` afterwards; else ``image`` is
    left as it is.
    """
    verdict, checksum, reason = Verdict.DAMAGED, 0, ""
    if status in _TOLD:
        store = engine.context.store_uuid
        verdict, checksum, reason = compare(store, blocks, number, image, filled)
    if engine.context.parity and verdict is Verdict.DAMAGED and status in _LOST:
        found = _bring_back(engine, blocks, number, image)
        if found:
            return Judged(int(Status.OK), Verdict.OK, found, "", len(image), repaired=True)
    return Judged(status, verdict, checksum, reason, filled)


def judge_all(engine: Engine, blocks: Blocks, images: Sequence[memoryview]) -> list[Judged]:
    """Read records into ``images`` and judge them."""
    read = engine.get_many_into(blocks, images)
    columns = zip(images, read.statuses.tolist(), read.filled.tolist(), strict=True)
    return [
        judge(engine, blocks, number, image, status, filled)
        for number, (image, status, filled) in enumerate(columns)
    ]


def judge_whole(engine: Engine, blocks: Blocks, images: Sequence[memoryview]) -> list[Judged]:
    """Do as :func:`judge_all`, and look at the parity chunks as well; each record is read once."""
    if not engine.context.parity:
        return judge_all(engine, blocks, images)
    return [_judge_one(engine, blocks, number, image) for number, image in enumerate(images)]


def _judge_one(engine: Engine, blocks: Blocks, number: int, image: memoryview) -> Judged:
    one = blocks.take(slice(number, number + 1))
    whole = _read_whole(engine, one)
    if whole is not None:
        verdict, checksum, _ = compare(engine.context.store_uuid, one, 0, whole, len(image))
        if verdict is Verdict.OK:
            _copy(whole[: len(image)], image)
            header = record.decode(whole[:HEADER_PAGE])
            bare = header.parity is not None and not parity.spare_is_whole(whole, header)
            return Judged(int(Status.OK), verdict, checksum, "", len(image), bare=bare)
    # The plain way tells what else it may be.
    return judge_all(engine, one, [image])[0]


def _read_whole(engine: Engine, one: Blocks) -> memoryview | None:
    """Return a record with its parity chunk as far as it can be read, None if nothing is there."""
    whole = memoryview(mmap.mmap(-1, int(engine.record_bytes_of(one.lengths)[0])))
    return whole if engine.reread(one, whole) else None


def _copy(source: memoryview, target: memoryview) -> None:
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _bring_back(engine: Engine, blocks: Blocks, number: int, image: memoryview) -> int:
    """Read one record again, with its parity chunk; if it is whole then, fill the image and return
    its checksum, else 0."""
    one = blocks.take(slice(number, number + 1))
    whole = _read_whole(engine, one)
    if whole is None:
        return 0
    try:
        header = record.decode(whole[:HEADER_PAGE])
    except CorruptBlock:
        return 0
    if header.stored_length != int(one.lengths[0]):
        return 0
    # What the device refused at once it may give page by page: then nothing is lost.
    parity.repair(whole, header)
    verdict, checksum, _ = compare(engine.context.store_uuid, one, 0, whole, len(image))
    if verdict is Verdict.OK:
        _copy(whole[: len(image)], image)
    return checksum

"""An engine that fails on order."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.backends.base import (
    Blocks,
    Engine,
    Finding,
    Leaving,
    Mask,
    Read,
    Room,
    Scanned,
    Stats,
    Written,
    check_images,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvstore.backends.base import U8, U32, U64, Status


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong at calls number ``at`` to ``at + times - 1`` of a method, counted from 1.

    First the call is delayed by ``delay`` seconds. Then, with ``error``, it raises without reaching
    the engine, or with ``afterwards`` when the engine has done its work. With ``status``, the
    numbered ``blocks`` of the batch (None: all) get that status from ``put_many`` or
    ``get_many_into`` and do not reach the engine; the others do.
    """

    method: str
    at: int = 1
    times: int = 1
    error: Exception | None = None
    afterwards: bool = False
    status: Status | None = None
    blocks: tuple[int, ...] | None = None
    delay: float = 0.0


class FaultyEngine(Engine):
    """Passes everything on to ``inner``, except where a fault strikes. ``calls`` counts methods."""

    def __init__(self, inner: Engine, faults: Iterable[Fault] = ()) -> None:
        super().__init__(inner.context)
        self.inner = inner
        self.name = inner.name
        self.capabilities = inner.capabilities
        self.faults = list(faults)
        self.calls: Counter[str] = Counter()
        self._lock = threading.Lock()

    def create(self) -> None:
        self._before("create")
        self.inner.create()

    def open(self) -> None:
        self._before("open")
        self.inner.open()
        self.is_open = True

    def close(self) -> None:
        self._before("close")
        self.inner.close()
        self.is_open = False

    def put_many(self, blocks: Blocks, images: Sequence[memoryview], *, sync: bool) -> Written:
        fault = self._before("put_many")
        check_images(blocks, images)
        spared = _spared(fault, len(blocks))
        kept = [image for image, keep in zip(images, spared, strict=True) if keep]
        inner = self.inner.put_many(blocks.take(spared), kept, sync=sync)
        places = np.zeros(len(blocks), np.uint64)
        places[spared] = inner.places
        _after(fault)
        return Written(places, _statuses(fault, spared, inner.statuses))

    def get_many_into(self, blocks: Blocks, images: Sequence[memoryview]) -> Read:
        fault = self._before("get_many_into")
        check_images(blocks, images)
        spared = _spared(fault, len(blocks))
        kept = [image for image, keep in zip(images, spared, strict=True) if keep]
        inner = self.inner.get_many_into(blocks.take(spared), kept)
        filled = np.zeros(len(blocks), np.uint32)
        filled[spared] = inner.filled
        _after(fault)
        return Read(_statuses(fault, spared, inner.statuses), filled)

    def reread(self, one: Blocks, record: memoryview) -> bool:
        self._before("reread")
        return self.inner.reread(one, record)

    def contains_many(self, blocks: Blocks) -> Mask:
        self._before("contains_many")
        return self.inner.contains_many(blocks)

    def delete_many(self, blocks: Blocks, how: Leaving = Leaving.VERSION) -> int:
        fault = self._before("delete_many")
        removed = self.inner.delete_many(blocks, how)
        _after(fault)
        return removed

    def record_bytes_of(self, lengths: U32) -> npt.NDArray[np.int64]:
        return self.inner.record_bytes_of(lengths)

    @property
    def largest_image(self) -> int:
        return self.inner.largest_image

    def claim(self, places: U64, lengths: U32, generations: U64, *, complete: bool) -> None:
        self._before("claim")
        self.inner.claim(places, lengths, generations, complete=complete)

    def allow(self, physical_bytes: int) -> None:
        self._before("allow")
        self.inner.allow(physical_bytes)

    def room(self, length: int) -> Room:
        return self.inner.room(length)

    def close_group(self, group: int) -> bool:
        return self.inner.close_group(group)

    def reopen_group(self, group: int) -> None:
        self.inner.reopen_group(group)

    def forget(self, namespace: bytes) -> None:
        self._before("forget")
        self.inner.forget(namespace)

    def scan(self) -> Iterator[Scanned]:
        self._before("scan")
        yield from self.inner.scan()

    def flush(self) -> None:
        fault = self._before("flush")
        self.inner.flush()
        _after(fault)

    def stats(self) -> Stats:
        self._before("stats")
        return self.inner.stats()

    def check(self) -> list[Finding]:
        self._before("check")
        return self.inner.check()

    def _before(self, method: str) -> Fault | None:
        """Count a call; delay or raise as the fault says that strikes it, if one does."""
        with self._lock:
            self.calls[method] += 1
            number = self.calls[method]
        for fault in self.faults:
            if fault.method == method and fault.at <= number < fault.at + fault.times:
                time.sleep(fault.delay)
                if fault.error and not fault.afterwards:
                    raise fault.error
                return fault
        return None


def _after(fault: Fault | None) -> None:
    if fault and fault.error:
        raise fault.error


def _spared(fault: Fault | None, count: int) -> Mask:
    """Return which blocks of a batch reach the engine."""
    spared = np.ones(count, np.bool_)
    if fault and fault.status is not None:
        spared[slice(None) if fault.blocks is None else list(fault.blocks)] = False
    return spared


def _statuses(fault: Fault | None, spared: Mask, inner: U8) -> U8:
    statuses = np.full(len(spared), fault.status if fault and fault.status else 0, np.uint8)
    statuses[spared] = inner
    return statuses

"""``kvstore bench transfer``: blocks that are warm in the daemon's memory, out of it and into it.

A get that is a hit in memory and a put that is answered as accepted are copies between the daemon's
slab and a region. So the baseline is such a copy and nothing else: one thread, np.copyto, between
anonymous memory in huge pages and a populated memfd region, of random blocks of the same working
set, in the same rounds. A ratio of 1 is as fast as that copy; 0.5 takes twice as long.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore import render
from kvstore.answers import BlockStatus
from kvstore.bench import environment
from kvstore.bench.daemon import (
    SPARE_BYTES,
    Daemon,
    capacity_for,
    check_machine,
    folder_of_our_own,
)
from kvstore.bench.timing import Clock, Row
from kvstore.errors import KVStoreError, UsageError
from kvstore.pages import Pages
from kvstore.protocol import MAX_REGION_BYTES
from kvstore.regions import Region, pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from kvstore.client import Client, Staging

    U8 = npt.NDArray[np.uint8]
    Tell = Callable[[str], object]

WORKING_SET = 640 << 20
BAR = 0.5
BARRED = ("stream_get", "put_staged accepted")
OUT, IN = "copy out", "copy in"
BASELINE_OF = {
    OUT: OUT,
    IN: IN,
    "get_staged": OUT,
    "stream_get": OUT,
    "get_into": OUT,
    "put_staged accepted": IN,
    "put_from accepted": IN,
}


@dataclass(frozen=True)
class Plan:
    """So many rounds, each moving so many blocks of so many bytes by every row."""

    rounds: int = 9
    blocks: int = 64
    block_bytes: int = 2 << 20
    check: bool = True
    directory: Path = Path(".demo")
    working_set: int = WORKING_SET

    @property
    def batch_bytes(self) -> int:
        return self.blocks * pages(self.block_bytes)

    @property
    def resident(self) -> int:
        """Blocks that are in memory all the time; every batch is drawn from them."""
        return max(self.blocks, -(-self.working_set // self.block_bytes))

    @property
    def memory(self) -> int:
        """Room for all blocks and a batch, of which a quarter may be dirty, and as much again."""
        return max(2 * (self.resident * pages(self.block_bytes) + self.batch_bytes), 64 << 20)

    @property
    def capacity(self) -> int:
        """Room for every block that is ever put: none is deleted or evicted.

        Making files right after others were deleted costs some filesystems much time (ext4 looks
        for inodes that were not in use a moment ago), and that is not what is measured here.
        """
        put = 2 * (self.rounds + 1) * self.blocks + self.memory // self.block_bytes
        return max(capacity_for(self.resident + put, self.block_bytes), self.memory)

    def check_room(self) -> None:
        """Raises UsageError where a batch, the disk or the memory is too small."""
        if self.batch_bytes > MAX_REGION_BYTES:
            raise UsageError(
                f"{self.blocks} blocks of {self.block_bytes} bytes do not fit into a region of "
                f"{MAX_REGION_BYTES >> 20} MiB",
                "ask for less with --blocks or --block-size",
            )
        needed = 2 * self.resident * self.block_bytes + 6 * self.batch_bytes + (512 << 20)
        advice = "ask for less with --blocks or --block-size"
        check_machine(self.directory, self.capacity + SPARE_BYTES, needed, advice)


class Bench:
    """Blocks of our own, and the same blocks in a daemon's memory."""

    def __init__(self, plan: Plan, daemon: Daemon, client: Client, staging: Staging) -> None:
        self._plan = plan
        self._client = client
        self._staging = staging
        self._rng = np.random.default_rng(2026)
        self._clock = Clock(daemon.cpu_seconds)
        self._pages = Pages(plan.resident * pages(plan.block_bytes))
        self._pages.populate(0, self._pages.capacity)
        self.huge_bytes = self._pages.huge_bytes
        self._source = self._cut(self._pages.memory, plan.resident)
        for block in self._source:
            block[:] = np.frombuffer(self._rng.bytes(plan.block_bytes), np.uint8)
        self._region = Region(plan.batch_bytes)
        self._shared = self._cut(self._region.view, plan.blocks)
        # Ones, not zeros: every page has been touched.
        self._targets = list(np.ones((plan.blocks, plan.block_bytes), np.uint8))
        self._fresh = plan.resident
        self.rows = {name: Row(name) for name in BASELINE_OF}

    def _cut(self, memory: memoryview, count: int) -> list[U8]:
        """Return views of the blocks that lie on whole pages in ``memory``."""
        stride, size = pages(self._plan.block_bytes), self._plan.block_bytes
        whole = np.frombuffer(memory, np.uint8)
        return [whole[at * stride : at * stride + size] for at in range(count)]

    # -- before -----------------------------------------------------------------------------------

    def fill(self) -> None:
        """Put the blocks, see that they are in memory and come back right. Raises KVStoreError."""
        step = self._plan.blocks
        for start in range(0, self._plan.resident, step):
            numbers = list(range(start, min(start + step, self._plan.resident)))
            self._expect(self._client.put_many(_keys(numbers), self._blocks(numbers)))
            self._client.flush()
            self._client.get_into(_keys(numbers), self._targets[: len(numbers)])
            self._compare(numbers, self._targets)
        there = self._client.status()["memory_blocks"]
        if there != self._plan.resident:
            raise KVStoreError(
                f"only {there} of {self._plan.resident} blocks are in the daemon's memory",
                "ask for less with --blocks or --block-size",
            )
        # Every page of the slab has been touched when others come to lie in it.
        for _ in range(-(-self._plan.memory // self._plan.batch_bytes)):
            fresh = self._new_numbers()
            self._put("put_from accepted", fresh, self._draw())
            self._settle()

    def prove(self) -> None:
        """Have every way of moving blocks prove that it moves the right ones."""
        numbers = self._draw()
        self._slots()
        self._expect(self._client.get_staged(_keys(numbers), self._staging).statuses)
        self._compare(numbers, self._slots())
        for position, _, view in self._client.stream_get(_keys(numbers)):
            self._compare([numbers[position]], [b"" if view is None else view])
        for name in ("put_staged accepted", "put_from accepted"):
            fresh = self._new_numbers()
            self._put(name, fresh, numbers)
            self._expect(self._client.get_into(_keys(fresh), self._targets))
            self._compare(numbers, self._targets)
            self._settle()

    def _compare(self, numbers: Sequence[int], found: Sequence[U8 | memoryview | bytes]) -> None:
        for number, view in zip(numbers, found, strict=False):
            if not np.array_equal(np.frombuffer(view, np.uint8), self._source[number]):
                raise KVStoreError(f"block {_keys([number])[0].hex()} came back with other bytes")

    def check(self) -> None:
        """Raises KVStoreError where a get was answered by the disk."""
        status = self._client.status()
        if status["memory_hits"] != status["hits"]:
            raise KVStoreError("blocks left the daemon's memory while they were measured", "")

    # -- rounds -----------------------------------------------------------------------------------

    def round(self) -> None:
        """Time every row once."""
        self._copy(OUT)
        self._get("get_staged", self._get_staged)
        self._get("stream_get", self._stream_get)
        self._get("get_into", self._get_into)
        self._copy(IN)
        for name in ("put_staged accepted", "put_from accepted"):
            fresh, sources = self._new_numbers(), self._draw()
            self._put(name, fresh, sources, self.rows[name])
            self._settle()

    def _copy(self, name: str) -> None:
        pairs = list(zip(self._shared, [self._source[n] for n in self._draw()], strict=True))
        if name == IN:
            for shared, source in pairs:  # so that the blocks stay what they are
                np.copyto(shared, source)
            pairs = [(source, shared) for shared, source in pairs]
        with self._clock.time(self.rows[name]):
            for target, source in pairs:
                np.copyto(target, source)

    def _get(self, name: str, act: Callable[[list[bytes]], None]) -> None:
        keys = _keys(self._draw())
        self._slots()
        with self._clock.time(self.rows[name]):
            act(keys)

    def _get_staged(self, keys: list[bytes]) -> None:
        self._expect(self._client.get_staged(keys, self._staging).statuses)

    def _get_into(self, keys: list[bytes]) -> None:
        self._expect(self._client.get_into(keys, self._targets))

    def _stream_get(self, keys: list[bytes]) -> None:
        if any(view is None for _, _, view in self._client.stream_get(keys)):
            raise KVStoreError("a block that is in the daemon's memory is a miss", "report this")

    def _put(self, name: str, fresh: list[int], sources: list[int], row: Row | None = None) -> None:
        keys, blocks = _keys(fresh), self._blocks(sources)
        if name.startswith("put_staged"):
            for slot, block in zip(self._slots(), blocks, strict=True):
                np.copyto(np.frombuffer(slot, np.uint8), block)
        with self._clock.time(row or Row(name)):
            if name.startswith("put_staged"):
                statuses = self._client.put_staged(keys, self._staging)
            else:
                statuses = self._client.put_from(keys, blocks)
        self._expect(statuses)

    def _settle(self) -> None:
        """Wait until blocks that were put are written, and have them leave memory first."""
        if self._client.flush():
            raise KVStoreError("blocks that were accepted could not be written", "see the disk")
        self._client.touch(_keys(range(self._plan.resident)))

    def _slots(self) -> list[memoryview]:
        return self._staging.slots([self._plan.block_bytes] * self._plan.blocks)

    def _draw(self) -> list[int]:
        numbers: list[int] = self._rng.permutation(self._plan.resident)[
            : self._plan.blocks
        ].tolist()
        return numbers

    def _new_numbers(self) -> list[int]:
        self._fresh += self._plan.blocks
        return list(range(self._fresh - self._plan.blocks, self._fresh))

    def _blocks(self, numbers: Sequence[int]) -> list[U8]:
        return [self._source[number] for number in numbers]

    def _expect(self, statuses: npt.NDArray[np.uint8]) -> None:
        if statuses.any():
            status = BlockStatus(int(statuses.max()))
            raise KVStoreError(f"a block was answered {status.name} instead of OK", "report this")


def _keys(numbers: Iterable[int]) -> list[bytes]:
    return [hashlib.sha256(b"transfer%d" % number).digest() for number in numbers]


def run(plan: Plan, tell: Tell) -> dict[str, Any]:
    """Measure and return a document that JSON can hold. Raises KVStoreError."""
    plan.check_room()
    with ExitStack() as stack:
        stack.enter_context(folder_of_our_own(plan.directory))
        found = environment.describe(plan.directory)
        daemon = stack.enter_context(Daemon(plan.directory, plan.capacity, plan.memory))
        daemon.start()
        check = None if plan.check else False
        # A client has 256 MiB to share; what is leased must not be taken from what it needs itself.
        total = plan.batch_bytes + (256 << 20)
        client = stack.enter_context(daemon.client(check=check, staging_bytes=total))
        staging = stack.enter_context(client.staging(plan.batch_bytes))
        bench = Bench(plan, daemon, client, staging)
        tell(f"putting {plan.resident} blocks of {render.size(plan.block_bytes)}")
        bench.fill()
        bench.prove()
        for number in range(plan.rounds):
            tell(f"round {number + 1} of {plan.rounds}")
            bench.round()
        bench.check()
        daemon.stop()
    found["source_huge_bytes"] = bench.huge_bytes
    return _document(plan, found, list(bench.rows.values()))


def _document(plan: Plan, found: Mapping[str, object], rows: list[Row]) -> dict[str, Any]:
    by_name = {row.name: row for row in rows}
    documents: list[dict[str, Any]] = []
    for row in rows:
        base = by_name[BASELINE_OF[row.name]]
        ratios = {"ratio": base.median / row.median, "best_ratio": base.best / row.best}
        documents.append({**row.document(), "baseline": base.name, **ratios})
    ratio = {document["name"]: document["ratio"] for document in documents}
    return {
        "bench": "transfer",
        "environment": found,
        "rounds": plan.rounds,
        "blocks": plan.blocks,
        "block_bytes": plan.block_bytes,
        "working_set_bytes": plan.resident * plan.block_bytes,
        "checksums": plan.check,
        "rows": documents,
        "bars": [
            {"row": name, "limit": BAR, "ratio": ratio[name], "met": ratio[name] >= BAR}
            for name in BARRED
        ],
    }


# -- output ---------------------------------------------------------------------------------------

HEAD = ("row", "median ms", "best ms", "GiB/s", "ratio", "best", "daemon CPU ms", "client CPU ms")


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Return the whole result as text."""
    batch = result["blocks"] * result["block_bytes"]
    checks = "checked by the client too" if result["checksums"] else "not checked by the client"
    yield (
        f"{result['blocks']} blocks of {render.size(result['block_bytes'])} at a time, of "
        f"{render.size(result['working_set_bytes'])} in memory, {checks}; {result['rounds']} rounds"
    )
    yield from environment.lines(result["environment"])
    huge = render.size(result["environment"]["source_huge_bytes"])
    yield f"of the anonymous memory {huge} lie in huge pages"
    yield from render.table(
        HEAD,
        [
            (
                row["name"],
                *(f"{row[name] * 1e3:.1f}" for name in ("median_seconds", "best_seconds")),
                f"{batch / (1 << 30) / row['median_seconds']:.2f}",
                *(f"{row[name]:.2f}" for name in ("ratio", "best_ratio")),
                *(f"{row[f'{who}_cpu_seconds'] * 1e3:.0f}" for who in ("daemon", "client")),
            )
            for row in result["rows"]
        ],
    )
    yield f"ratio: time of {OUT} (for a get) or {IN} (for a put), divided by that of the row"
    for bar in result["bars"]:
        verdict = "met" if bar["met"] else "NOT MET"
        yield f"{bar['row']}: {bar['ratio']:.2f} of a copy, wanted {bar['limit']:g}: {verdict}"

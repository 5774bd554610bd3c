"""The phases: what a store is doing when it is struck. Runs in a child of the laboratory's own.

A phase goes on until it has been struck, or for so many rounds. Whatever is about to be changed is
told to the oracle first, and what was acknowledged right after.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore import fsck, layout, mend, migrate, opening, target, upkeep
from kvstore.answers import Ack, BlockStatus
from kvstore.core import REMOVED
from kvstore.errors import KVStoreError
from kvstore.removal import choose_victims
from tests.faults import oracle
from tests.faults.oracle import Pen, content
from tests.faults.strike import Strike
from tests.here import Here
from tests.ruins import lose_journal, recover
from tests.stores import MIB, Local, key

ENGINES = ("filesystem", "direct", "mmap", "lmdb", "leveldb")
"""As they are called here: ``direct`` and ``mmap`` are two ways to open the engine superblock."""
PHASES = ("put", "overwrite", "evict", "checkpoint", "journal", "migrate", "repair")
OFFLINE = ("migrate", "repair", "recover")
"""Phases that no daemon has the store in."""
BEFORE = 24
"""Blocks that are durable before a phase begins, at least."""
SAME = (9000, 20_000)
"""Lengths where slots are to be used again."""
DAMAGED = 3
OK = (BlockStatus.OK, BlockStatus.ALREADY_PRESENT)


@dataclass(frozen=True)
class Choice:
    """What a point does; all of it follows from its number and the seed."""

    engine: str
    phase: str
    io: str
    memory: int
    late: bool
    target: str
    rounds: int
    seed: str

    @property
    def sizes(self) -> Sequence[int]:
        return SAME if self.phase == "evict" else oracle.SIZES

    @property
    def kind(self) -> str:
        return "superblock" if self.engine in ("direct", "mmap") else self.engine

    def options(self) -> dict[str, object]:
        """Return the options to open the store with."""
        return {
            "engine": self.kind,
            "io": self.io,
            "memory_bytes": self.memory,
            "write": "late" if self.late else "through",
            "max_dirty_age": 0.0,
            "bounce_bytes": 8 * MIB,
        }


def choose(engine: str, phase: str, seed: str, rounds: int = 1 << 30) -> Choice:
    chance = random.Random(seed)
    io = {"direct": "direct", "mmap": "mmap"}.get(engine, "auto")
    if engine == "filesystem":
        io = chance.choice(("auto", "direct", "buffered"))
    memory = chance.choice((0, 32 * MIB))
    kinds = sorted({"filesystem", "superblock", "lmdb", "leveldb"} - {engine})
    kinds = [kind for kind in kinds if kind != "superblock" or engine not in ("direct", "mmap")]
    late = bool(memory) and chance.random() < 0.4
    return Choice(engine, phase, io, memory, late, chance.choice(kinds), rounds, seed)


def stay_here() -> None:
    """Look at engines in this process, for the rest of it."""
    for module in (opening, fsck, mend):
        vars(module)["Child"] = Here


class Drive:
    """One store, driven."""

    def __init__(self, path: Path, choice: Choice, pen: Pen, strike: Strike) -> None:
        self._path, self._choice, self._pen, self._strike = path, choice, pen, strike
        self._chance = random.Random(f"{choice.seed} drive")
        self._versions: dict[int, int] = {}
        self._waiting: dict[int, int] = {}
        """Versions that were accepted, until a flush has made them durable."""
        self._sizes = choice.sizes
        self._local = Local(path, **choice.options())
        self._rounds = choice.rounds
        self._torn = False

    @property
    def versions(self) -> dict[int, int]:
        return self._versions

    def prepare(self) -> None:
        """Bring the store to where the phase begins."""
        while len(self._versions) < BEFORE:
            self._put_some(durable=True)
        for _ in range(2):
            self._put_some(durable=False)
        if self._choice.phase == "evict":
            self._watch()
        elif self._choice.phase == "journal":
            upkeep.MIN_JOURNAL_BYTES = 8192
            self._torn = self._chance.random() < 0.5
            if self._torn:
                self._end(clean=False)
                self._tear_journal()
        elif self._choice.phase in OFFLINE:
            self._leave()

    def run(self) -> None:
        """Do what the phase is about."""
        if self._torn:
            self._writing(self._open_again)
        phase: Callable[[], None] = getattr(self, f"_{self._choice.phase}")
        while not self._strike.done and self._rounds > 0:
            self._rounds -= 1
            with suppress(KVStoreError):
                phase()

    def look(self) -> None:
        """Read some of the oldest blocks, as a client of a store in trouble would."""
        if self._local.core.engine.failed:
            self._pen.note(oracle.FAILED)
        with suppress(KVStoreError):
            self._local.get([key(number) for number in list(self._versions)[:6]])

    # -- phases -----------------------------------------------------------------------------------

    def _put(self) -> None:
        acts = (self._put_durable, self._put_durable, self._put_written, self._put_accepted)
        self._chance.choice((*acts, self._flush))()

    def _overwrite(self) -> None:
        numbers = self._some()
        for number in numbers:
            self._versions[number] += 1
        self._write(numbers, durable=self._chance.random() < 0.6, overwrite=True)

    def _evict(self) -> None:
        core = self._local.core
        size = self._chance.randint(1, 8) * 20_000

        def act() -> None:
            if core.index.live_bytes > 300_000:
                self._local.store.run(self._local.store.evict_rows(choose_victims(core, size)))

        self._writing(act)
        self._put_some(durable=self._chance.random() < 0.6)

    def _checkpoint(self) -> None:
        self._local.store.checkpoint()
        self._put_some(durable=self._chance.random() < 0.6)

    def _journal(self) -> None:
        """Use blocks until the journal is long enough to be written anew, between puts."""
        for _ in range(6):
            self._local.get([key(number) for number in self._some()])
            self._writing(lambda: self._local.later(60))
        self._put_some(durable=self._chance.random() < 0.6)

    def _migrate(self) -> None:
        self._rounds = 0
        migrate.BATCH_BLOCKS, target.SYNC_BYTES = 6, 1

        def act() -> None:
            with migrate.Migration(self._path, self._choice.target, min_free=0) as migration:
                migration.run(lambda _blocks, _bytes: None)

        self._writing(act)

    def _repair(self) -> None:
        self._rounds = 0
        self._writing(lambda: repair(self._path))

    def _recover(self) -> None:
        self._rounds = 0
        self._writing(lambda: recover(self._path))

    # -- what phases consist of -------------------------------------------------------------------

    def _some(self) -> list[int]:
        return self._chance.sample(sorted(self._versions), self._chance.randint(1, 5))

    def _put_some(self, *, durable: bool, level: Ack = Ack.WRITTEN) -> None:
        first = len(self._versions)
        numbers = list(range(first, first + self._chance.randint(1, 6)))
        self._versions.update(dict.fromkeys(numbers, 0))
        self._write(numbers, durable=durable, level=level)

    def _put_durable(self) -> None:
        self._put_some(durable=True)

    def _put_written(self) -> None:
        self._put_some(durable=False)

    def _put_accepted(self) -> None:
        self._put_some(durable=False, level=Ack.ACCEPTED)

    def _write(
        self,
        numbers: list[int],
        *,
        durable: bool,
        level: Ack = Ack.WRITTEN,
        overwrite: bool = False,
    ) -> None:
        blocks = [(number, self._versions[number]) for number in numbers]
        self._pen.start()
        self._pen.note(oracle.BEGIN, blocks)
        try:
            job = self._local.begin_put(
                [key(number) for number in numbers],
                [content(*one, self._sizes) for one in blocks],
                durable=durable,
                level=level,
                overwrite=overwrite,
                chain=self._chance.random() < 0.5,
            )
            self._local.store.run(job)
            self._acknowledge(blocks, [int(one) for one in job.statuses], durable, level)
        finally:
            self._pen.end()

    def _acknowledge(
        self, blocks: list[tuple[int, int]], statuses: list[int], durable: bool, level: Ack
    ) -> None:
        good = [one for one, status in zip(blocks, statuses, strict=True) if status in OK]
        if not durable:
            self._waiting.update(good)
        if durable or level == Ack.WRITTEN:
            self._pen.note(oracle.DURABLE if durable else oracle.WRITTEN, good)

    def _flush(self) -> None:
        self._pen.start()
        try:
            lost = {error.key for error in self._local.flush()}
            kept = [one for one in self._waiting.items() if key(one[0]).hex() not in lost]
            self._waiting.clear()
            # A version that was overwritten meanwhile is not what the flush has made durable.
            self._pen.note(
                oracle.DURABLE, [one for one in kept if self._versions[one[0]] == one[1]]
            )
        finally:
            self._pen.end()

    def _writing(self, act: Callable[[], object]) -> None:
        self._pen.start()
        try:
            act()
        finally:
            self._pen.end()

    def _watch(self) -> None:
        """Tell the oracle of every block that leaves, before it does."""
        numbers = {key(number): number for number in range(100_000)}

        def seen(_first: int, kinds: np.ndarray, keys: np.ndarray) -> None:
            left = [numbers[one.tobytes()] for one in keys[kinds == REMOVED]]
            self._pen.note(oracle.GONE, [(number, 0) for number in left])

        self._local.store.subscribe(self._local.namespace, seen)

    def _leave(self) -> None:
        """Close the store and do to it what the phase needs."""
        phase = self._choice.phase
        self._end(clean=phase == "migrate" or self._chance.random() < 0.5)
        if phase == "recover":
            lose_journal(self._path)
        else:
            numbers = self._chance.sample(sorted(self._versions), DAMAGED)
            if phase == "repair":
                self._pen.note(oracle.DAMAGED, damage(self._path, numbers, self._versions))

    def _end(self, *, clean: bool) -> None:
        if clean:
            self._local.stop()
        else:
            self._local.kill()

    def _open_again(self) -> None:
        self._local = Local(self._path, **self._choice.options())

    def _tear_journal(self) -> None:
        """Spoil the last record, so that the next opening scans and begins a journal anew."""
        blocks = self._path / layout.read(self._path).blocks
        path = max(blocks.glob("journal.*"))
        data = bytearray(path.read_bytes())
        last = len(data.rstrip(b"\0")) - 1
        data[last] ^= 0xFF
        path.write_bytes(data)


def damage(path: Path, numbers: list[int], versions: dict[int, int]) -> list[tuple[int, int]]:
    """Flip a byte of payloads, wherever they lie on the disk; return which blocks those were."""
    damaged = []
    for number in numbers:
        data = content(number, versions[number])
        found = [file for file in sorted(path.rglob("*")) if file.is_file() and len(data) >= 700]
        for file in found:
            before = file.read_bytes()
            at = before.find(data[:512])
            if at >= 0:
                with file.open("r+b") as opened:
                    opened.seek(at + 100)
                    opened.write(bytes([before[at + 100] ^ 1]))
                damaged.append((number, versions[number]))
    return damaged


def repair(path: Path) -> fsck.Report:
    """Check and repair as ``kvstore fsck --repair --verify-data`` does; return the last check."""
    report = check(path)
    if not report.to_do:
        return report
    folder = mend.new_folder(path, None)
    return mend.until_done(report, lambda: check(path), folder, 300, mend.Done())


def check(path: Path) -> fsck.Report:
    """Check all of a store and its payloads."""
    lock = layout.Lock(path)
    lock.acquire(exclusive=False)
    try:
        return fsck.Check(path, fsck.Options(depth=fsck.PAYLOADS)).run()
    finally:
        lock.release()

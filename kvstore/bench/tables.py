"""``kvstore bench table1``, ``table2``, ``table3``: the source's three tables, measured honestly.

The first is of np.memmap, np.save and LevelDB used directly, the second of a daemon with blocks in
memory or in files, the third of memory over files. In every round each subject does each operation
once, between copies of the same moves in memory. What a set leaves to be done later is timed apart,
as its drain. Reads are warm (a pass over all blocks came before) or cold (the daemon started anew,
the page cache dropped: cold for this machine, not for a host beneath it).
"""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore import render
from kvstore.backends import engine_names
from kvstore.bench import environment, published
from kvstore.bench.daemon import SPARE_BYTES, check_machine, folder_of_our_own
from kvstore.bench.served import Opened, Served, capacity_of, memory_for
from kvstore.bench.subjects import DIRECT, DirectFile, Subject, Unfit
from kvstore.bench.timing import Clock, Row
from kvstore.bench.workload import BLOCKS, MODELS, PUBLISHED, Model, Task, Workload
from kvstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Tell = Callable[[str], object]

COPY = "copy"
ENGINES = {1: tuple(DIRECT), 2: ("memory", "filesystem"), 3: ("filesystem",)}
HYBRID = "hybrid"
LEAST_WRITTEN = 0.99
TABLES = "tables"
"""The folder below that of the run which holds what is measured."""


@dataclass(frozen=True)
class Plan:
    """Which table, of what, how often. ``seconds``: no further round begins after so long."""

    table: int
    models: Sequence[str] = PUBLISHED
    engines: Sequence[str] = ()
    rounds: int = 3
    directory: Path = Path(".demo")
    local: bool = False
    io: str = "auto"
    seconds: float = float("inf")

    @property
    def chosen(self) -> Sequence[str]:
        return self.engines or ENGINES[self.table]

    def check(self) -> None:
        """Raises UsageError for what cannot be measured here."""
        engines = list(DIRECT) if self.table == 1 else engine_names()
        for kind, named, there in (
            ("model", self.models, list(MODELS)),
            ("engine", self.engines, engines),
        ):
            unknown = [name for name in named if name not in there]
            if unknown:
                raise UsageError(
                    f"this table has no {kind} {unknown[0]!r}", f"choose of {', '.join(there)}"
                )
        biggest = max((MODELS[name] for name in self.models), key=lambda model: model.set_bytes)
        check_machine(
            self.directory,
            self._disk(biggest) + SPARE_BYTES,
            self._memory(biggest),
            f"leave {biggest.name} out with --model",
        )

    def _disk(self, model: Model) -> int:
        each = 2 * model.set_bytes if self.table == 1 else capacity_of(model)
        return model.set_bytes + len(self.chosen) * each

    def _memory(self, model: Model) -> int:
        tiers = {1: 0, 2: 2 * memory_for(model), 3: memory_for(model)}[self.table]
        return 2 * model.set_bytes + tiers + (512 << 20)


@dataclass
class Figures(Row):
    """A row of a table: one operation of one subject. Times in seconds, one for each round."""

    subject: str = ""
    operation: str = ""
    state: str = ""
    drains: list[float] = field(default_factory=list)
    moved_bytes: int = 0
    written_bytes: list[int] = field(default_factory=list)
    missed: int = 0
    memory_hits: list[int] = field(default_factory=list)

    @property
    def written(self) -> int:
        """Return the bytes really written in the worst round."""
        return min(self.written_bytes, default=0)

    @property
    def fault(self) -> str:
        """Return why this row is no success; else nothing."""
        if self.missed:
            return f"{self.missed} blocks were refused or missing"
        if self.written_bytes and self.written < LEAST_WRITTEN * self.moved_bytes:
            return f"only {self.written} of {self.moved_bytes} bytes were written after the drain"
        return ""


class Bench:
    """The rows of one model."""

    def __init__(self, workload: Workload, subjects: list[Subject]) -> None:
        self._workload = workload
        self._subjects = subjects
        self._rows: dict[tuple[str, str, str], Figures] = {}

    @property
    def rows(self) -> list[Figures]:
        """The copy first, then all rows in order of subjects."""
        order = [COPY, *(subject.name for subject in self._subjects)]
        return sorted(self._rows.values(), key=lambda row: order.index(row.subject))

    def _row(self, subject: str, operation: str, state: str = "") -> Figures:
        name = " ".join(part for part in (subject, operation, state) if part)
        new = Figures(name, subject=subject, operation=operation, state=state)
        new.moved_bytes = self._workload.model.set_bytes
        return self._rows.setdefault((subject, operation, state), new)

    def fill(self, tell: Tell) -> None:
        """Put every block into every subject and see that it comes back right."""
        for subject in self._subjects:
            tell(f"{subject.name}: putting {BLOCKS} blocks and comparing what comes back")
            self._workload.stamp(subject.versions)
            for task in self._workload.whole():
                subject.put(self._names(task), task.sources, subject.modes[0])
            subject.drain()
            self.prove(subject)

    def prove(self, subject: Subject) -> None:
        """Read every block in every way and compare it. Raises WrongBytes."""
        reads = [subject.get, subject.stream_get] if subject.streams else [subject.get]
        whole = self._workload.whole()
        self._workload.stamp(subject.versions)
        for read in reads:
            self._workload.blank()
            for task in whole:
                read(self._names(task), task.sources, self._targets(task))
            self._workload.check(whole, subject.name)

    def round(self, tell: Tell) -> None:
        """Have every subject do every operation once."""
        for subject in self._subjects:
            tell(f"  {subject.name}")
            self._copy()
            for mode in subject.modes:
                self._write(subject, mode)
            if subject.new_keys:
                self._write_new(subject)
            self._copy()
            self._reads(subject)
            self._copy()

    def _copy(self) -> None:
        tasks = self._workload.tasks()
        with Clock().time(self._row(COPY, "")):
            self._workload.copy(tasks)

    def _write(self, subject: Subject, mode: str) -> None:
        """Write new versions of blocks that are there."""
        moves = [(self._names(task), task.sources) for task in self._workload.tasks()]
        newer = subject.versions.max() + np.uint64(1)
        for _, numbers in moves:
            subject.versions[numbers] = newer
        self._workload.stamp(subject.versions)
        self._time_write(subject, mode, self._row(subject.name, mode), moves)

    def _write_new(self, subject: Subject) -> None:
        """Write under keys that were never there; they are deleted again."""
        mode = subject.modes[-1]
        row = self._row(subject.name, mode, "new keys")
        kind = f"new {len(row.seconds)}"
        moves = [
            ([self._workload.name(number, kind) for number in task.sources], task.sources)
            for task in self._workload.whole()
        ]
        self._time_write(subject, mode, row, moves)
        for names, _ in moves:
            subject.delete(names)

    def _time_write(
        self,
        subject: Subject,
        mode: str,
        row: Figures,
        moves: list[tuple[list[str], list[int]]],
    ) -> None:
        before = subject.written_before()
        clock, drain = Clock(subject.daemon_cpu), Row("drain")
        with clock.time(row):
            for names, numbers in moves:
                row.missed += subject.put(names, numbers, mode)
        with clock.time(drain):
            subject.drain()
        row.drains += drain.seconds
        moved = [number for _, numbers in moves for number in numbers]
        row.written_bytes.append(subject.written_bytes(moved, before))

    def _reads(self, subject: Subject) -> None:
        operation = "get" if subject.new_keys else "read"
        if subject.warms:
            self._pass(subject)
            self._read(subject, operation, subject.get, "warm")
            if subject.streams:
                self._read(subject, "stream_get", subject.stream_get, "warm")
        if subject.chills:
            subject.chill()
            self._read(subject, operation, subject.get, "cold")
        if subject.chills and subject.streams:
            subject.chill()
            self._read(subject, "stream_get", subject.stream_get, "cold")

    def _pass(self, subject: Subject) -> None:
        for task in self._workload.whole():
            subject.get(self._names(task), task.sources, self._targets(task))

    def _read(
        self,
        subject: Subject,
        operation: str,
        read: Callable[[list[str], list[int], list[Any]], int],
        state: str,
    ) -> None:
        row = self._row(subject.name, operation, state)
        tasks = self._workload.tasks()
        moves = [(self._names(task), task.sources, self._targets(task)) for task in tasks]
        before = subject.memory_hits()
        with Clock(subject.daemon_cpu).time(row):
            for names, numbers, targets in moves:
                row.missed += read(names, numbers, targets)
        after = subject.memory_hits()
        if before is not None and after is not None:
            row.memory_hits.append(after - before)
        if not row.missed:
            self._workload.check(tasks, subject.name)

    def _names(self, task: Task) -> list[str]:
        return [self._workload.name(number) for number in task.sources]

    def _targets(self, task: Task) -> list[Any]:
        return [self._workload.target[number] for number in task.targets]


def run(plan: Plan, tell: Tell) -> dict[str, Any]:
    """Measure and return a document that JSON can hold. Raises KVStoreError.

    ``faults`` names the rows that are no success.
    """
    plan.check()
    with folder_of_our_own(plan.directory):
        return measure(plan, tell)


def measure(plan: Plan, tell: Tell) -> dict[str, Any]:
    """The same in a folder that is there already, and ours."""
    found = environment.describe(plan.directory)
    ends = time.monotonic() + plan.seconds
    results = []
    for number, name in enumerate(plan.models):
        left = ends - time.monotonic()
        if left > 0:  # what is left is shared by the models that are left
            part = time.monotonic() + left / (len(plan.models) - number)
            results.append(_measure_model(plan, MODELS[name], part, tell))
    return {
        "bench": f"table{plan.table}",
        "table": plan.table,
        "environment": found,
        "local": plan.local,
        "models": results,
        "not_measured": list(plan.models[len(results) :]),
        "faults": [
            f"{result['model']}: {row['name']}: {row['fault']}"
            for result in results
            for row in result["rows"]
            if row["fault"]
        ],
    }


def _measure_model(plan: Plan, model: Model, ends: float, tell: Tell) -> dict[str, Any]:
    size = render.size(model.block_bytes)
    tell(f"table {plan.table}, {model.name}: {BLOCKS} blocks of {size}")
    workload = Workload(model)
    folder = plan.directory / TABLES
    notes = (
        [] if workload.huge else ["our own blocks do not lie in huge pages, which slows all rows"]
    )
    rounds = 0
    try:
        with ExitStack() as stack:
            subjects = list(_open(plan, folder, workload, stack, notes))
            bench = Bench(workload, subjects)
            bench.fill(tell)
            longest = 0.0
            while rounds < plan.rounds and (not rounds or time.monotonic() + longest < ends):
                tell(f"round {rounds + 1} of {plan.rounds}")
                begun = time.monotonic()
                bench.round(tell)
                rounds, longest = rounds + 1, max(longest, time.monotonic() - begun)
            for subject in subjects:
                bench.prove(subject)
            notes += [note for subject in subjects if (note := subject.note)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "model": model.name,
        "id": model.id,
        "blocks": BLOCKS,
        "block_bytes": model.block_bytes,
        "rounds": rounds,
        "rows": [_row(model, row, bench.rows[0]) for row in bench.rows],
        "notes": notes,
    }


def _open(
    plan: Plan, folder: Path, workload: Workload, stack: ExitStack, notes: list[str]
) -> Iterator[Subject]:
    for subject in _subjects(plan, folder, workload):
        subject.folder.mkdir(parents=True)
        stack.callback(subject.close)
        try:
            subject.open()
        except Unfit as error:
            notes.append(f"{subject.name} was not measured: {error}")
            continue
        yield subject


def _subjects(plan: Plan, folder: Path, workload: Workload) -> Iterator[Subject]:
    yield DirectFile(folder / "reference", workload)
    for engine in plan.chosen:
        if plan.table == 1:
            yield DIRECT[engine](folder / engine, workload)
            continue
        make = Opened if plan.local else Served
        # The engine called memory is for tests; what a user has of blocks in memory is the tier.
        tier = memory_for(workload.model) if plan.table == 3 or engine == "memory" else 0
        name = engine
        if plan.table == 3:
            name = HYBRID if plan.chosen == ENGINES[3] else f"{HYBRID} {engine}"
        yield make(name, folder / name.replace(" ", "-"), workload, engine, tier, plan.io)


def _row(model: Model, row: Figures, copy: Figures) -> dict[str, Any]:
    drain = sorted(row.drains)[len(row.drains) // 2] if row.drains else None
    subject = row.subject.split(" ")[0]
    known = row.state in ("", "warm")
    return {
        **row.document(),
        "subject": row.subject,
        "operation": row.operation,
        "state": row.state,
        "drain_seconds": drain,
        "times_copy": row.median / copy.median,
        "best_times_copy": row.best / copy.best,
        "drained_times_copy": None if drain is None else (row.median + drain) / copy.median,
        "published_times_copy": (
            published.ratio(model.name, subject, row.operation) if known else None
        ),
        "moved_bytes": row.moved_bytes,
        "written_bytes": row.written if row.written_bytes else None,
        "written_blocks": row.written // model.block_bytes if row.written_bytes else None,
        "missed": row.missed,
        "memory_hits": min(row.memory_hits, default=None),
        "fault": row.fault,
    }

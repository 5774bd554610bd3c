"""Runs the laboratory: ``python -m tests.faults --points N --seed S``; see ``--help``.

The exit code is 0 if every promise was kept at every point, and every negative control was found.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import random
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

os.environ["KVSTORE_KILL_POINT"] = "armed.later"
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from tests.faults import controls, disks, served
from tests.faults.drive import ENGINES, PHASES
from tests.faults.judge import Verdict
from tests.faults.lab import LOSSES, Lab, Result, Spot
from tests.faults.table import table

FILESYSTEMS = {
    "cut": ("ext4", "xfs"),
    "log": ("ext4", "xfs", "btrfs"),
    "disk": ("ext4", "xfs", "btrfs"),
    "daemon": ("ext4", "xfs"),
    "kill": ("ext4", "xfs"),
    "call": ("ext4", "xfs"),
}
SHARES = {"cut": 0.5, "log": 0.5, "disk": 0.1, "daemon": 0.05, "kill": 0.55, "call": 0.3}
"""Points of each kind, as a part of the power losses that are asked for."""
CONTROL_TRIES = 24
SKIPPED = 77
"""Exit code where this machine has no laboratory."""


class Task(NamedTuple):
    """A point to run; its name and the seed say all about it."""

    spot: Spot
    turn: int

    @property
    def name(self) -> str:
        return ":".join([*asdict(self.spot).values(), str(self.turn)])

    @classmethod
    def named(cls, text: str) -> Task:
        *spot, turn = text.split(":")
        return cls(Spot(*spot), int(turn))


def plan(points: int, seed: str) -> list[Task]:
    """Choose points: every engine, filesystem and phase in turn, for each kind of fault."""
    tasks: list[Task] = []
    for how, share in SHARES.items():
        count = round(points * share) or int(points > 0)
        each = LOSSES if how in ("log", "disk") else 1
        tasks += itertools.islice(_turns(how, seed), -(-count // each))
    random.Random(f"{seed} order").shuffle(tasks)
    return tasks


def _turns(how: str, seed: str) -> Iterator[Task]:
    phases = {"kill": (*PHASES, "recover"), "daemon": served.PHASES}.get(how, PHASES)
    spots = [Spot(how, *one) for one in itertools.product(ENGINES, FILESYSTEMS[how], phases)]
    random.Random(f"{seed} {how}").shuffle(spots)
    for turn in itertools.count():
        yield from (Task(spot, turn) for spot in spots)


def run(tasks: Sequence[Task], folder: Path, asked: argparse.Namespace) -> None:
    """Run points one after the other and write each result to ``folder/results``."""
    with disks.memory(folder / "memory") as memory, (folder / "results").open("w") as results:
        lab = Lab(memory, asked.control)
        try:
            for task in tasks:
                result = lab.run(task.spot, f"{asked.seed} {task.name}")
                results.write(json.dumps([task.name, asdict(result)]) + "\n")
                results.flush()
                _tell(task, result, asked)
        finally:
            lab.close()


def _tell(task: Task, result: Result, asked: argparse.Namespace) -> None:
    for words in [*result.crashes, *(v.words for v in result.verdicts if v.bad)]:
        again = ["--seed", asked.seed, "--point", task.name]
        again += ["--control", asked.control] if asked.control else []
        print(f"{task.name}: {words[:1500]}\n  again: {_command(again)}", flush=True)


def _command(arguments: Sequence[str]) -> str:
    return f"python -m tests.faults {shlex.join(arguments)}"


def run_all(tasks: Sequence[Task], asked: argparse.Namespace) -> list[tuple[Spot, Result]]:
    """Run points in so many processes and return what came of them."""
    with tempfile.TemporaryDirectory(prefix="faults-", dir=asked.folder) as name:
        folders = [Path(name) / str(worker) for worker in range(asked.jobs)]
        children = []
        for worker, folder in enumerate(folders):
            folder.mkdir()
            child = os.fork()
            if not child:
                _work(tasks[worker :: asked.jobs], folder, asked)
            children.append(child)
        codes = [os.waitpid(child, 0)[1] for child in children]
        if any(codes):
            raise SystemExit("the laboratory itself failed")
        return [one for folder in folders for one in _read(folder / "results")]


def _work(tasks: Sequence[Task], folder: Path, asked: argparse.Namespace) -> None:
    try:
        run(tasks, folder, asked)
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def _read(path: Path) -> Iterator[tuple[Spot, Result]]:
    for line in path.read_text().splitlines():
        name, found = json.loads(line)
        found["verdicts"] = [Verdict(**one) for one in found["verdicts"]]
        yield Task.named(name).spot, Result(**found)


def check_controls(asked: argparse.Namespace) -> list[str]:
    """Put each fault into kvstore and look whether the laboratory finds it; return those missed."""
    missed = []
    for name, control in controls.CONTROLS.items():
        found = _seek(name, control, asked)
        print(f"control: {name}: {found or 'NOT FOUND'}", flush=True)
        if not found:
            missed.append(name)
    return missed


def _seek(control_name: str, control: controls.Control, asked: argparse.Namespace) -> str:
    points = 0
    with (
        tempfile.TemporaryDirectory(prefix="faults-", dir=asked.folder) as folder,
        disks.memory(Path(folder) / "memory") as memory,
    ):
        lab = Lab(memory, control_name)
        try:
            for turn in range(CONTROL_TRIES):
                spot = Spot(*control.spots[turn % len(control.spots)])
                result = lab.run(spot, f"{asked.seed} {control_name} {turn}", losses=4)
                points += result.points
                for verdict in result.verdicts:
                    shown = [line for name in control.shows for line in getattr(verdict, name)]
                    if shown:
                        return f"found at point {points}: {shown[0]}"
        finally:
            lab.close()
    return ""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description="The fault laboratory of kvstore."
    )
    parser.add_argument("--points", type=int, default=1000, help="power losses (1000)")
    parser.add_argument("--seed", default="", help="repeats a run")
    parser.add_argument("--point", default="", help="run this point alone")
    parser.add_argument("--only", default="", help="only points whose names have this part")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--control", default="", help="put a fault into kvstore: MODULE:FUNCTION")
    parser.add_argument("--no-controls", action="store_true", help="leave the controls out")
    parser.add_argument("--folder", type=Path, help="for what is temporary")
    asked = parser.parse_args(arguments)
    asked.seed = asked.seed or str(secrets.randbelow(1 << 32))
    return asked


def main() -> int:
    asked = parse()
    if lacking := disks.missing():
        print(f"no laboratory here: {lacking}")
        return SKIPPED
    logging.disable(logging.CRITICAL)
    disks.alone()
    print(f"seed {asked.seed}", flush=True)
    begun = time.monotonic()
    if asked.point:
        tasks, asked.jobs = [Task.named(asked.point)], 1
    else:
        tasks = [task for task in plan(asked.points, asked.seed) if asked.only in task.name]
    results = run_all(tasks, asked)
    print(table(results))
    idle = sum(result.idle for _, result in results)
    dead = sum(result.unmountable for _, result in results)
    print(
        f"{time.monotonic() - begun:.0f} s; {idle} strikes that met nothing and {dead} "
        "filesystems that did not survive are not counted"
    )
    alone = asked.point or asked.control or asked.no_controls
    missed = [] if alone else check_controls(asked)
    return int(bool(missed) or any(result.bad for _, result in results))


if __name__ == "__main__":
    sys.exit(main())

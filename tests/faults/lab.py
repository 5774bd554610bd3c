"""One point of the laboratory: a store is driven, struck, opened again and judged."""

from __future__ import annotations

import faulthandler
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.errors import KVStoreError
from tests.faults import controls, disks, judge, oracle, tracing
from tests.faults.disks import Disk
from tests.faults.drive import OFFLINE, Choice, Drive, choose, stay_here
from tests.faults.judge import Verdict
from tests.faults.oracle import Pen, Told
from tests.faults.recording import Recorder, Recording
from tests.faults.strike import Strike
from tests.faults.tracing import Tracer

HUNG_SECONDS = 240.0
TRIES = 8
ROUNDS = 14
"""How long a phase goes on that nothing strikes while it runs."""
ENOUGH = 20
"""Durable acknowledgements before a power loss."""
LONGEST = 0.05
"""Seconds after which a timed strike comes, at most."""
BROKEN_SECONDS = 0.03
ARMED_SECONDS = 120.0
LOSSES = 5
"""Places of one recording at which the power is lost."""


@dataclass(frozen=True)
class Spot:
    """Where in the table a point belongs."""

    how: str
    engine: str
    filesystem: str
    phase: str


@dataclass
class Result:
    """What came of a point: so many strikes counted, and what was found at each."""

    points: int = 0
    verdicts: list[Verdict] = field(default_factory=list)
    idle: int = 0
    """Strikes that met nothing being written, or no call to strike: they do not count."""
    unmountable: int = 0
    crashes: list[str] = field(default_factory=list)
    """What ended a driver and is none of the errors that a caller of kvstore expects."""

    def add(self, verdict: Verdict) -> None:
        self.points += 1
        self.verdicts.append(verdict)

    @property
    def bad(self) -> bool:
        return bool(self.crashes) or any(verdict.bad for verdict in self.verdicts)


@dataclass
class Scene:
    """What a child of the laboratory plays."""

    pen: Pen
    strike: Strike
    under_way: bool = False


Arm = Callable[[Scene], None]


class Lab:
    """Folders and disks of one process that runs points. ``control``: a fault put into kvstore."""

    def __init__(self, folder: Path, control: str = "") -> None:
        self.folder = folder
        self.control = control
        self.facts = folder / "facts"
        self._disks: dict[str, Disk] = {}
        self._outcome = folder / "outcome"
        self._hung = folder / "hung"

    def close(self) -> None:
        for disk in self._disks.values():
            disk.close()

    def run(self, spot: Spot, seed: str, losses: int = LOSSES) -> Result:
        """Run a point; everything about it follows from ``seed``."""
        from tests.faults import served

        acts: dict[str, Callable[[], Result]] = {
            "cut": lambda: self._until_struck(Cut(self, spot, seed)),
            "kill": lambda: self._until_struck(Kill(self, spot, seed)),
            "call": lambda: self._until_struck(Fail(self, spot, seed)),
            "daemon": lambda: self._until_struck(served.Cut(self, spot, seed)),
            "log": lambda: self._record(spot, seed, losses),
            "disk": lambda: self._record(spot, seed, losses, breaks=True),
        }
        return acts[spot.how]()

    def _until_struck(self, point: Point) -> Result:
        for _ in range(TRIES):
            if point.attempt():
                break
            point.result.idle += 1
        return point.result

    # -- power lost on a disk that logs -----------------------------------------------------------

    def _record(self, spot: Spot, seed: str, losses: int, *, breaks: bool = False) -> Result:
        """Record what a phase writes, and lose the power at some places of that log.

        With ``breaks`` the disk refuses writes for a moment: the kernel tells so once and forgets
        what it could not write, and the next sync succeeds.
        """
        result, chance = Result(), random.Random(f"{seed} strike")
        choice = choose(spot.engine, spot.phase, seed, rounds=ROUNDS)
        self.facts.unlink(missing_ok=True)
        with Recorder(spot.filesystem, self.folder) as recorder:
            store, delay = recorder.point / "store", chance.uniform(0, LONGEST)

            def attend(_: int) -> None:
                if breaks and self.wait_until_armed():
                    time.sleep(delay)
                    recorder.breaks(True)
                    time.sleep(BROKEN_SECONDS)
                    recorder.breaks(False)

            seen = self.drive(store, choice, lambda _: None, log=recorder.log, attend=attend)
        result.crashes += seen["crashes"]
        recording = recorder.crashes()
        try:
            for upto in moments(oracle.read(self.facts), chance, losses):
                told = oracle.read(self.facts, upto)
                if told.durable >= ENOUGH and told.under_way:
                    self._lose(recording, upto, told, choice, chance, result)
                else:
                    result.idle += 1
            if breaks:
                # What is acknowledged after the disk has come back counts most.
                end, told = recorder.log.stat().st_size, oracle.read(self.facts)
                self._lose(recording, end, told, choice, chance, result)
        finally:
            recording.close()
        return result

    def _lose(
        self,
        recording: Recording,
        upto: int,
        told: Told,
        choice: Choice,
        chance: random.Random,
        result: Result,
    ) -> None:
        """Look at the store on what the disk held when its log had ``upto`` bytes."""
        try:
            with recording.crashed(upto, chance) as point:
                result.add(self.judge(point / "store", choice, told, power=True))
        except disks.Unmountable:
            result.unmountable += 1

    def wait_until_armed(self) -> bool:
        """Wait until the phase has begun; False if that takes too long."""
        until = time.monotonic() + ARMED_SECONDS
        while time.monotonic() < until:
            if self.facts.exists() and oracle.read(self.facts).armed_at != oracle.NOTHING:
                return True
            time.sleep(0.002)
        return False

    # -- what all points share --------------------------------------------------------------------

    def disk(self, kind: str) -> Disk:
        if kind not in self._disks:
            self._disks[kind] = Disk(kind, self.folder)
            self._disks[kind].mount()
        return self._disks[kind]

    def fresh(self, disk: Disk) -> Path:
        """Return where a new store goes."""
        for left in disk.point.glob("store*"):
            shutil.rmtree(left)
        self.facts.unlink(missing_ok=True)
        return disk.point / "store"

    def drive(
        self,
        store: Path,
        choice: Choice,
        arm: Arm,
        *,
        log: Path | None = None,
        attend: Callable[[int], None] = lambda _: None,
        afterwards: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Drive a store in a child until it is struck; return what the child saw, and its end.

        The parent may ``attend`` to the child; ``afterwards`` is the last thing that a child does.
        """

        def play(scene: Scene) -> None:
            stay_here()
            controls.apply(self.control)
            drive = Drive(store, choice, scene.pen, scene.strike)
            drive.prepare()
            scene.strike.watch()
            scene.pen.note(oracle.ARMED)
            arm(scene)
            drive.run()
            drive.look()

        seen = self.child(play, log=log, attend=attend, afterwards=afterwards)
        crash = str(seen.pop("crash"))
        # What an offline command meets in its files ends as one line for the user.
        known = not crash or (crash.startswith("OSError") and choice.phase in OFFLINE)
        # The named exception of promise 2: engines that map their files.
        mapped = seen["code"] == -signal.SIGBUS and choice.kind in ("lmdb", "leveldb")
        return {**seen, "crashes": [] if known or mapped else [crash]}

    def child(
        self,
        play: Callable[[Scene], None],
        *,
        log: Path | None = None,
        attend: Callable[[int], None] = lambda _: None,
        afterwards: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Play a scene in a child. Returns its exit ``code``, the ``crash`` that ended it in words,
        and what it saw."""
        self._outcome.unlink(missing_ok=True)
        child = os.fork()
        if not child:
            self._in_child(play, Scene(Pen(self.facts, log), Strike()), afterwards)
        attend(child)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        seen: dict[str, Any] = {"code": code, "crash": "", "under_way": False, "calls": 0}
        if self._outcome.exists() and (text := self._outcome.read_text()):
            seen |= json.loads(text)
        elif code != -signal.SIGKILL:
            seen["crash"] = f"the driver ended by {code} {self._hung.read_text()}"
        return seen

    def _in_child(
        self, play: Callable[[Scene], None], scene: Scene, afterwards: Callable[[], None]
    ) -> None:
        """Play and end; what is raised and is none of our errors is told."""
        crash = ""
        try:
            hung = os.open(self._hung, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            told = os.open(self._outcome, os.O_WRONLY | os.O_CREAT)
            faulthandler.dump_traceback_later(HUNG_SECONDS, exit=True, file=hung)
            try:
                play(scene)
            except KVStoreError:
                pass
            except BaseException as error:
                crash = f"{type(error).__name__}: {error}{judge.where(error)}"
            afterwards()
            seen = {"crash": crash, "under_way": scene.under_way, "calls": scene.strike.calls}
            os.writev(told, [json.dumps(seen).encode()])
            os._exit(0)
        finally:
            os._exit(1)

    def judge(
        self, store: Path, choice: Choice, told: Told | None = None, *, power: bool
    ) -> Verdict:
        """Say what the store has afterwards."""
        result, known = self.folder / "verdict", told or oracle.read(self.facts)
        return judge.apart(store, known, choice, result, power=power, control=self.control)


def moments(told: Told, chance: random.Random, count: int) -> list[int]:
    """Choose places of a log at which some operation of the phase is under way."""
    spans = [(begin, end) for begin, end in told.spans if end > begin]
    if not spans:
        return []
    chosen = chance.choices(spans, [end - begin for begin, end in spans], k=count)
    return [chance.randrange(begin, end) for begin, end in chosen]


class Point:
    """A point that strikes once, at a moment that has to be tried for."""

    def __init__(self, lab: Lab, spot: Spot, seed: str, rounds: int = 1 << 30) -> None:
        self.lab, self.spot = lab, spot
        self.disk = lab.disk(spot.filesystem)
        self.chance = random.Random(f"{seed} strike")
        self.choice = choose(spot.engine, spot.phase, seed, rounds=rounds)
        self.result = Result()

    def attempt(self) -> bool:
        """Strike and judge; return False if the strike met nothing."""
        raise NotImplementedError


class Cut(Point):
    """The power is cut by an ioctl while something is being written."""

    def __init__(self, lab: Lab, spot: Spot, seed: str) -> None:
        super().__init__(lab, spot, seed)
        self._timed = self.choice.kind in ("lmdb", "leveldb") and self.chance.random() < 0.6
        self._most = 400 if spot.phase in OFFLINE else 80
        self._longest = LONGEST

    def attempt(self) -> bool:
        store = self.lab.fresh(self.disk)
        descriptor = self.disk.descriptor()
        number, seconds = self.chance.randint(1, self._most), self.chance.uniform(0, self._longest)

        def arm(scene: Scene) -> None:
            if self._timed:
                scene.strike.after_time(seconds, lambda: _cut(scene, descriptor))
            else:
                scene.strike.before_call(number, lambda: _cut(scene, descriptor))

        try:
            seen = self.lab.drive(store, self.choice, arm)
        finally:
            os.close(descriptor)
        self.disk.lose()
        self.result.crashes += seen["crashes"]
        if not seen["under_way"] or oracle.read(self.lab.facts).durable < ENOUGH:
            self._most = max(1, min(self._most, seen["calls"]))
            self._longest *= 0.7
            return False
        self.result.add(self.lab.judge(store, self.choice, power=True))
        return True


def _cut(scene: Scene, descriptor: int) -> None:
    """Cut the power; note whether one operation was under way all the while."""
    before = scene.pen.under_way
    scene.pen.note(oracle.STRUCK)
    disks.cut(descriptor)
    scene.under_way = bool(before) and scene.pen.under_way == before


class Kill(Point):
    """Whoever drives the store is killed, before a call or at a named point."""

    def __init__(self, lab: Lab, spot: Spot, seed: str) -> None:
        super().__init__(lab, spot, seed, ROUNDS)
        self._most = 40

    def attempt(self) -> bool:
        store, most = self.lab.fresh(self.disk), self._most
        name = tracing.point(self.choice, self.chance) if self.chance.random() < 0.5 else ""
        if name:
            count = self.chance.randint(1, max(1, most // 5))
            seen = self.lab.drive(store, self.choice, lambda s: s.strike.at_point(name, count))
        else:
            tracer = Tracer(tracing.kill(self.chance, most), self.lab.folder / "strace.log")
            seen = self.lab.drive(store, self.choice, lambda _: tracer.wait(), attend=tracer.attend)
        self.result.crashes += seen["crashes"]
        if seen["code"] != -signal.SIGKILL:
            self._most = max(1, most // 3)
            return False
        self.result.add(self.lab.judge(store, self.choice, power=False))
        return True


class Fail(Point):
    """Calls fail during a phase; afterwards whoever drives the store is killed, or power is cut."""

    def __init__(self, lab: Lab, spot: Spot, seed: str) -> None:
        super().__init__(lab, spot, seed, ROUNDS // 2)
        self._power = self.chance.random() < 0.5

    def attempt(self) -> bool:
        fault = tracing.failure(self.chance.choice(tracing.FAULTS), self.chance)
        store = self.lab.fresh(self.disk)
        descriptor = self.disk.descriptor()
        tracer = Tracer(fault, self.lab.folder / "strace.log") if fault.calls else None

        def arm(_: Scene) -> None:
            if tracer is not None:
                tracer.wait()
            elif fault.name == "limit":
                tracing.limit_files(store, self.chance)
            else:
                tracing.short_writes(self.chance)

        def afterwards() -> None:
            if self._power:
                disks.cut(descriptor)

        attend = tracer.attend if tracer else lambda _: None
        try:
            seen = self.lab.drive(store, self.choice, arm, attend=attend, afterwards=afterwards)
        finally:
            os.close(descriptor)
        if self._power:
            with suppress(disks.Unmountable):
                self.disk.lose()
        self.result.crashes += [f"{fault.name} {fault.inject}: {one}" for one in seen["crashes"]]
        if tracer and not tracer.struck:
            return False
        verdict = self.lab.judge(store, self.choice, power=self._power)
        self.result.add(verdict.after(f"{fault.name} {fault.inject}"))
        return True

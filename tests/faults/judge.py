"""What a store has after a fault, compared with what it had acknowledged before.

Runs in a child: damage may end whoever looks. The machine is taken to have been booted since where
the power was cut, for that is how the next opening knows.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from kvstore import layout
from kvstore.answers import BlockStatus
from kvstore.errors import KVStoreError
from tests.faults import controls, oracle
from tests.faults.drive import Choice, check, repair, stay_here
from tests.faults.oracle import Told, content
from tests.ruins import recover
from tests.soak import disk_bytes
from tests.stores import Local, key

FRESH = range(900_000, 900_004)
SLACK_BYTES = 256 << 10
SLACK_SHARE = 0.02
ALARMS = ("corrupt_blocks", "stale_blocks", "missing_blocks")
"""Counters that no fault here may raise; what was not synced has one of its own."""
ANOTHER_BOOT = b"another boot id."


@dataclass
class Verdict:
    """What was wrong, in words; all empty where the promises were kept."""

    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """It did not open, serve or accept."""
    other: list[str] = field(default_factory=list)
    """It served, but miscounted, alarmed without reason or left work for fsck."""

    @property
    def bad(self) -> bool:
        return any((self.wrong, self.lost, self.failed, self.other))

    @property
    def words(self) -> str:
        return "; ".join([*self.wrong, *self.lost, *self.failed, *self.other])

    def after(self, what: str) -> Verdict:
        """Return the same with what happened before in each line."""
        lines = asdict(self).items()
        return Verdict(**{name: [f"{what}: {one}" for one in found] for name, found in lines})


class Opened(Protocol):
    """A store to look at: in this process, or served by a daemon."""

    def contains(self, keys: Sequence[bytes]) -> list[bool]: ...
    def get(self, keys: Sequence[bytes]) -> list[bytes | None]: ...
    def put(
        self, keys: Sequence[bytes], blocks: Sequence[bytes], *, durable: bool
    ) -> list[int]: ...


def judge(path: Path, told: Told, choice: Choice, *, power: bool) -> Verdict:
    """Open a store that was struck and look at everything in it."""
    verdict = Verdict()
    chance = random.Random(f"{choice.seed} judge")
    # A child of its own for the engine is what a daemon has, but takes half a second.
    if chance.random() < 0.9:
        stay_here()
    if power:
        layout.boot_id = lambda: ANOTHER_BOOT
    try:
        if choice.phase == "recover":
            # A recovery that was killed is begun once more; until then nothing need open.
            recover(path)
        local = Local(path, **_options(path, choice))
    except KVStoreError as error:
        verdict.failed.append(f"it does not open: {type(error).__name__}: {error}")
        return verdict
    compare(local, told, choice, verdict, power=power)
    use(local, verdict)
    _count(local, choice, verdict)
    local.stop()
    if chance.random() < 0.3 or choice.phase in ("repair", "recover"):
        _fsck(path, choice, verdict)
    return verdict


def _options(path: Path, choice: Choice) -> dict[str, object]:
    """Return how to open what may have changed its engine meanwhile."""
    options = choice.options()
    if layout.read(path).engine != choice.kind:
        del options["engine"], options["io"]
    return options


def compare(opened: Opened, told: Told, choice: Choice, verdict: Verdict, *, power: bool) -> None:
    """Look at every block that was ever begun."""
    numbers = sorted(told.blocks)
    keys = [key(number) for number in numbers]
    said = opened.contains(keys)
    for number, there, data in zip(numbers, said, opened.get(keys), strict=True):
        block, name = told.blocks[number], f"block {number}"
        found = [one for one in block.begun if data == content(number, one, choice.sizes)]
        least = block.must_have(power=power or told.doubted)
        if data is not None and not found:
            verdict.wrong.append(f"{name} has {len(data)} bytes that nobody put")
        elif data is not None and max(found) < least:
            verdict.lost.append(f"{name} is version {found} after {least} was acknowledged")
        elif data is None and least != oracle.NOTHING:
            verdict.lost.append(f"{name}, version {least}, was acknowledged and is gone")
        # What a power loss took before it was synced is noticed when it is read.
        if there != (data is not None) and not power and not block.damaged:
            verdict.other.append(f"{name}: contains says {there}, get says {data is not None}")


def use(opened: Opened, verdict: Verdict) -> None:
    """Put new blocks durably and read them back."""
    keys, blocks = [key(n) for n in FRESH], [content(n, 0) for n in FRESH]
    try:
        statuses = opened.put(keys, blocks, durable=True)
        back = opened.get(keys)
    except KVStoreError as error:
        verdict.failed.append(f"it takes no blocks: {error}")
        return
    if any(status != BlockStatus.OK for status in statuses) or back != blocks:
        verdict.failed.append(f"new blocks came to {statuses}")


def _count(local: Local, choice: Choice, verdict: Verdict) -> None:
    """Compare what the store says of itself with what ``du`` says."""
    local.tick()
    local.core.take(local.core.measure())
    status = local.store.status()
    used = int(str(status["used_bytes"]))
    count_bytes(used, local.path, local.core.engine.capabilities.space_factor, verdict)
    # The damage that a phase has done itself is found by the read before.
    if choice.phase not in ("repair", "recover"):
        verdict.other += [f"{name} is {status[name]}" for name in ALARMS if status[name]]
        verdict.other += [f"degraded: {problem}" for problem in local.store.problems()]


def count_bytes(used: int, path: Path, factor: float, verdict: Verdict) -> None:
    """Compare ``used`` with the files. Libraries keep room inside of theirs that is nobody's."""
    real = disk_bytes(path)
    slack = SLACK_BYTES + (SLACK_SHARE if factor == 1.0 else 1.0) * real
    if abs(used - real) > slack:
        verdict.other.append(f"it says it takes {used} bytes; du says {real}")


def _fsck(path: Path, choice: Choice, verdict: Verdict) -> None:
    """A store that was served and ended cleanly has nothing left to repair."""
    report = repair(path) if choice.phase in ("repair", "recover") else check(path)
    found = [f"{one.id} {one.path}: {one.detail}" for one in report.faults]
    verdict.other += [f"fsck: {text}" for text in found]


def apart(
    path: Path, told: Told, choice: Choice, result: Path, *, power: bool, control: str
) -> Verdict:
    """Judge in a child of this process; its death is a failure to open."""
    result.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        try:
            controls.apply(control)
            verdict = judge(path, told, choice, power=power)
        except BaseException as error:
            verdict = Verdict(failed=[f"{type(error).__name__}: {error}{where(error)}"])
        result.write_text(json.dumps(asdict(verdict)))
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code or not result.exists():
        return Verdict(failed=[f"whoever opened it ended by {code}"])
    return Verdict(**json.loads(result.read_text()))


def where(error: BaseException) -> str:
    """Return where an error was raised, innermost frame last."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return f" at {' '.join(frames[-4:])}"

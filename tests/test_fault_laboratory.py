"""The short form of ``make faults``; see :mod:`tests.faults`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.backends import superfile
from tests.faults import disks, tracing
from tests.faults.__main__ import SKIPPED, plan
from tests.faults.drive import ENGINES, PHASES
from tests.faults.oracle import Pen, read

ROOT = Path(__file__).resolve().parent.parent
POINTS = "24"


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(1200)
def test_promises_are_kept_at_some_points_and_controls_are_found(tmp_path: Path) -> None:
    if lacking := disks.missing():
        pytest.skip(lacking)
    seed = "20261205"
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults", "--points", POINTS, "--seed", seed],
        cwd=ROOT,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    print(done.stdout)
    if done.returncode == SKIPPED:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stderr


def test_a_plan_has_every_engine_and_phase_and_is_the_same_again() -> None:
    tasks = plan(1000, "7")
    assert tasks == plan(1000, "7")
    lost = [task.spot for task in tasks if task.spot.how in ("cut", "log")]
    assert {(spot.engine, spot.phase) for spot in lost} == {
        (engine, phase) for engine in ENGINES for phase in PHASES
    }
    assert {spot.filesystem for spot in lost} == {"ext4", "xfs", "btrfs"}


def test_the_oracle_forgets_what_came_after_a_place_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"")
    pen = Pen(tmp_path / "facts", log)
    pen.start()
    pen.note("b", [(1, 0)])
    log.write_bytes(bytes(100))
    pen.note("d", [(1, 0)])
    pen.end()
    pen.start()
    pen.note("b", [(1, 1)])
    log.write_bytes(bytes(200))
    pen.note("w", [(1, 1)])
    pen.end()
    early, late = read(tmp_path / "facts", 99), read(tmp_path / "facts", 200)
    assert (early.under_way, early.blocks[1].durable, early.blocks[1].begun) == (True, -1, [0])
    assert (late.under_way, late.blocks[1].begun) == (False, [0, 1])
    assert late.blocks[1].must_have(power=True) == 0
    assert late.blocks[1].must_have(power=False) == 1


def test_the_laboratory_knows_the_kill_points_of_every_write_path() -> None:
    known = {point for points in tracing.POINTS.values() for point in points}
    known |= {f"migrate.{name}" for name in tracing.MIGRATION}
    there = tracing.named_points(Path(superfile.__file__).parent.parent)
    assert known <= there
    assert {name for name in there - known if not name.startswith("former.")} == set()

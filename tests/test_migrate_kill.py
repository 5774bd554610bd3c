"""A change of engine that is killed: the store is the old one or the new one, never less."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore import former, layout
from kvstore.errors import NotFound
from kvstore.migrate import Migration
from tests.migrating import ENGINES, Local, block, fill, holding, key, left
from tests.strace_log import run as traced

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
LONG = os.environ.get("PROMISES") == "long"

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from kvstore import former, migrate, target
path, what = Path(sys.argv[2]), sys.argv[3]
if what == "rollback":
    former.go_back(path)
elif what == "delete":
    former.delete(path)
else:
    migrate.BATCH_BLOCKS, target.SYNC_BYTES = int(sys.argv[4]), int(sys.argv[5])
    with migrate.Migration(path, what, min_free=0) as migration:
        rate = int(sys.argv[6]) or None
        migration.run(lambda _blocks, _bytes: None, rate=rate)
"""


def start(
    path: Path, what: str, point: str = "", batch: int = 6, rate: int = 0
) -> subprocess.Popen[bytes]:
    how = [str(batch), "1", str(rate)]
    command = [sys.executable, "-c", PROGRAM, str(ROOT), str(path), what, *how]
    return subprocess.Popen(command, env={**os.environ, "KVSTORE_KILL_POINT": point})


def killed(path: Path, what: str, point: str) -> None:
    assert start(path, what, point).wait(60) == -signal.SIGKILL, point


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    source = tmp_path_factory.mktemp("made") / "store"
    fill(source, "filesystem", 40, capacity=256 * MIB)

    def copy(to: Path) -> Path:
        shutil.copytree(source, to)
        return to

    return copy


@pytest.fixture(scope="module")
def changed(made: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = made(tmp_path_factory.mktemp("changed") / "store")
    with Migration(path, "sqlite", min_free=0) as migration:
        migration.run(lambda _blocks, _bytes: None)
    return path


POINTS = [
    *("migrate.begun", "migrate.made", "migrate.flushed:2", "migrate.saved"),
    *("migrate.checkpoint", "migrate.finished"),
]


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_on_the_way_costs_nothing(
    made: Callable[[Path], Path], tmp_path: Path, point: str
) -> None:
    engine = "superblock" if point.endswith(("saved", "flushed:2", "checkpoint")) else "lmdb"
    path = made(tmp_path / "store")
    before = holding(path)
    killed(path, engine, point)
    assert layout.read(path).engine == "filesystem"
    assert holding(path) == before
    # Between two runs the store serves as if nothing were.
    local = Local(path, capacity=None)
    assert local.get([key(1)]) == [block(1, 700)]
    local.stop()
    before = holding(path)
    with Migration(path, engine, min_free=0) as migration:
        there = migration.plan().present
        assert (there > 0) == (point not in ("migrate.begun", "migrate.made"))
        outcome = migration.run(lambda _blocks, _bytes: None)
    assert outcome.present == there
    assert outcome.switched
    assert holding(path) == before


def test_a_kill_behind_the_switch(made: Callable[[Path], Path], tmp_path: Path) -> None:
    path = made(tmp_path / "store")
    before = holding(path)
    killed(path, "lmdb", "migrate.switched")
    assert layout.read(path).engine == "lmdb"
    assert holding(path) == before
    with Migration(path, "lmdb") as migration:
        assert migration.already
    assert (path / former.MIGRATING).exists()
    assert former.go_back(path).given_up == ""
    assert holding(path) == before
    assert left(path) == ["blocks"]


def test_a_kill_while_going_back(changed: Path, tmp_path: Path) -> None:
    before = holding(changed)
    for point in ("former.back", "former.renamed"):
        path = tmp_path / point
        shutil.copytree(changed, path)
        killed(path, "rollback", point)
        assert not (path / former.MIGRATING).exists()
        assert layout.read(path).engine == "filesystem"
        assert holding(path) == before
        with Migration(path, "sqlite", min_free=0) as migration:
            assert migration.plan().present == 0
            migration.run(lambda _blocks, _bytes: None)
        assert holding(path) == before
        assert not list(path.glob("*.gone"))


def test_a_kill_while_the_former_blocks_are_deleted(changed: Path, tmp_path: Path) -> None:
    before = holding(changed)
    for point in ("former.renamed", "former.forgotten"):
        path = tmp_path / point
        shutil.copytree(changed, path)
        killed(path, "delete", point)
        assert holding(path) == before
        with pytest.raises(NotFound, match=r"is gone|was deleted"):
            former.go_back(path)
        assert former.delete(path) > 0
        assert layout.read(path).previous is None
        assert left(path) == ["blocks-sqlite"]


def test_the_copy_is_durable_before_the_store_is_switched(
    made: Callable[[Path], Path], tmp_path: Path
) -> None:
    path = made(tmp_path / "store")
    _, calls = traced(
        PROGRAM,
        tmp_path / "log",
        "fsync,fdatasync,syncfs,rename,renameat,renameat2,pwrite64,pwritev,write",
        arguments=[str(ROOT), str(path), "sqlite", "6", "1", "0"],
    )
    (switch,) = [
        call for call in calls if call.name.startswith("rename") and '/STORE.json"' in call.args
    ]
    before = [call for call in calls if call.end < switch.begin]

    def last(names: tuple[str, ...], part: str) -> float:
        found = [
            call
            for call in before
            if call.name in names and (part in call.args or any(part in p for p in call.paths))
        ]
        return max(call.end for call in found)

    syncs, writes = ("fsync", "fdatasync"), ("pwrite64", "pwritev", "write")
    # Records before the journal that names them; journal and checkpoint before STORE.json.
    journalled = [c for c in before if c.name in writes and any("/journal." in p for p in c.paths)]
    engine = [c for c in before if c.name in syncs and any("/sqlite/" in p for p in c.paths)]
    assert min(call.end for call in engine) < journalled[1].begin
    assert last(writes, "/blocks-sqlite/journal.") < last(syncs, "/blocks-sqlite/journal.")
    assert last(("rename", "renameat", "renameat2"), "/checkpoint.") < last(syncs, "/blocks-sqlite")
    assert last(writes, "/sqlite/") < last(syncs, "/sqlite/") < switch.begin


@pytest.mark.skipif(not LONG, reason="20,000 blocks from each engine: PROMISES=long")
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("target", ["lmdb", "superblock"])
@pytest.mark.parametrize("source", ENGINES)
def test_twenty_thousand_blocks_killed_twice(tmp_path: Path, source: str, target: str) -> None:
    if source == target:
        pytest.skip("the same engine")
    path, dice = tmp_path / "store", random.Random(source + target)
    local = Local(path, engine=source, capacity=4096 * MIB)
    for start_at in range(0, 20_000, 250):
        numbers = range(start_at, start_at + 250)
        blocks = [block(n, 1 + n * 97 % 30_000) for n in numbers]
        local.put([key(n) for n in numbers], blocks, chain=True)
    local.store.touch(local.namespace, 0, np_keys(dice.sample(range(20_000), 2000)))
    local.tick()
    local.stop()
    before, order = holding(path)
    for _ in range(2):
        # At this rate a run takes 25 s.
        process = start(path, target, batch=256, rate=16 * MIB)
        time.sleep(dice.uniform(3.0, 9.0))
        process.kill()
        process.wait()
        assert layout.read(path).engine == source
    with Migration(path, target, min_free=0) as migration:
        print("present after two kills:", migration.plan().present)
        migration.run(lambda _blocks, _bytes: None)
    after, order_after = holding(path)
    assert after == before
    assert order_after == order


def np_keys(numbers: list[int]) -> np.ndarray:
    return np.frombuffer(b"".join(map(key, numbers)), np.uint8).reshape(len(numbers), 32)

"""kvstore recover: the command, its plan and its exits; killed anywhere, a second run completes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import layout
from kvstore.commands.documents import DOCUMENTS
from kvstore.commands.shapes import unlike
from kvstore.lock import Lock
from tests import ruins as lib
from tests.command import COMMAND, Daemon, run_command
from tests.deaths import Deaths
from tests.mounts import mounted, read_only
from tests.ruins import COUNT, DELETED, ENGINES, Copies, digest, look, recover, zero
from tests.stores import MIB, Local, block

LONG = os.environ.get("PROMISES") == "long"
ALL = set(range(COUNT)) - {DELETED}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become others")


@pytest.fixture(scope="module")
def ruins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copies]:
    folder = tmp_path_factory.mktemp("ruins")
    yield Copies(folder)
    shutil.rmtree(folder)


def break_engine(path: Path, engine: str) -> None:
    """Make the engine refuse to open, or lose its blocks."""
    if engine == "lmdb":
        zero(path / "blocks/lmdb/data.mdb", 0, 8192)
    elif engine == "leveldb":
        (path / "blocks/leveldb/CURRENT").unlink()
    elif engine == "sqlite":
        zero(path / "blocks/sqlite/store.db", 0, 65536)
    else:
        lib.lose_journal(path)


# -- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_a_plan_then_a_store_that_serves(tmp_path: Path, ruins: Copies, engine: str) -> None:
    path = ruins.copy(engine, tmp_path / "store")
    break_engine(path, engine)
    before = digest(path)
    plan = run_command("recover", path, "-n", "--json")
    assert plan.code == 0, plan.stderr
    assert unlike(plan.json(), DOCUMENTS["recover"]) == []
    assert (plan.json()["kept"], plan.json()["dry_run"]) == (len(ALL), True)
    asked = run_command("recover", path)
    assert asked.code == 2
    assert "23 blocks kept" in asked.stderr
    assert "say so with --yes" in asked.stderr.lower()
    assert {k: v for k, v in digest(path).items() if k != "lock"} == {
        k: v for k, v in before.items() if k != "lock"
    }
    ran = run_command("recover", path, "-y", "--json")
    assert ran.code == 0, ran.stderr
    assert unlike(ran.json(), DOCUMENTS["recover"]) == []
    assert ran.json()["next_command"] == f"kvstore serve --store {path}"
    assert look(path).there == ALL


@pytest.mark.parametrize("engine", ENGINES)
def test_a_new_store_leaves_the_old_one_alone(tmp_path: Path, ruins: Copies, engine: str) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    path = ruins.copy(engine, folder / "store", kill=True)
    break_engine(path, engine)
    before = digest(folder)
    with read_only(folder) if os.geteuid() == 0 else _same(folder) as seen:
        ran = run_command("recover", seen / "store", "--to", tmp_path / "new", "-y")
    assert ran.code == 0, ran.stderr
    assert digest(folder) == before
    assert layout.read(tmp_path / "new").uuid != layout.read(path).uuid
    assert look(tmp_path / "new").there == ALL
    again = run_command("recover", path, "--to", tmp_path / "new", "-y")
    assert again.code == 1
    assert "already a store" in again.stderr


def _same(folder: Path) -> Any:
    import contextlib

    return contextlib.nullcontext(folder)


def test_a_new_store_may_have_another_engine(tmp_path: Path, ruins: Copies) -> None:
    path = ruins.copy("lmdb", tmp_path / "store")
    break_engine(path, "lmdb")
    for engine in ENGINES if LONG else ("superblock", "sqlite"):
        new = tmp_path / engine
        ran = run_command("recover", path, "--to", new, "--engine", engine, "-y", "-q")
        assert (ran.code, ran.stdout, ran.stderr) == (0, b"", "")
        assert layout.read(new).engine == engine
        assert look(new).there == ALL


@pytest.mark.parametrize("times", [1, 2])
def test_what_a_change_of_engine_keeps_is_no_leftover(
    tmp_path: Path, ruins: Copies, times: int
) -> None:
    path = ruins.copy("filesystem", tmp_path / "store")
    assert run_command("migrate", path, "--to", "lmdb").code == 0
    former = digest(path / "blocks")
    for _ in range(times):
        zero(path / layout.read(path).blocks / "lmdb/data.mdb", 0, 8192)
        assert run_command("recover", path, "-y").code == 0
        assert run_command("fsck", path).code == 0
    assert digest(path / "blocks") == former
    assert look(path).there == ALL
    assert len(list((path / "quarantine").glob("blocks*"))) == times


def test_what_is_wrong_is_said(tmp_path: Path, ruins: Copies) -> None:
    path = ruins.copy("sqlite", tmp_path / "store")
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("x")
    cases: list[tuple[list[object], int, str]] = [
        ([tmp_path / "none"], 10, "no store"),
        ([tmp_path / "empty"], 10, "no directory of an engine"),
        ([path, "--store", tmp_path], 2, "two stores"),
        ([path, "--engine", "lmdb"], 13, "uses the engine sqlite"),
        ([path, "--to", tmp_path / "full"], 1, "not ours"),
        ([path, "--to", path / "new"], 2, "lies in"),
        ([path, "--to", tmp_path / "a/b"], 2, "no directory"),
        ([path, "--to", tmp_path / "new", "--engine", "bogus"], 13, "no engine 'bogus'"),
    ]
    for arguments, code, says in cases:
        ran = run_command("recover", *map(str, arguments), "-y", "--json")
        assert (ran.code, ran.stdout) == (code, b""), (arguments, ran.stderr)
        told = json.loads(ran.stderr)
        assert says in f"{told['message']} {told['hint']}", arguments
    assert look(path).there == ALL
    newer = path / "STORE.json"
    newer.write_text(newer.read_text().replace('"format": 1', '"format": 99'))
    assert run_command("recover", path, "-y").code == 15


def test_a_store_in_use_is_11(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    daemon.start()
    try:
        for more in ([], ["-n"], ["--to", str(tmp_path / "new")]):
            ran = run_command("recover", daemon.store, "-y", *more)
            assert ran.code == 11, ran.stderr
            assert f"process {daemon.pid}" in ran.stderr
    finally:
        daemon.stop()
    assert not (tmp_path / "new").exists()


def test_a_store_being_read_cannot_be_rebuilt(tmp_path: Path, ruins: Copies) -> None:
    path = ruins.copy("filesystem", tmp_path / "store")
    lock = Lock(path)
    lock.acquire(exclusive=False)
    assert run_command("recover", path, "-y").code == 11
    assert run_command("recover", path, "-n").code == 0
    lock.release()


@pytest.mark.parametrize(("engine", "count"), [("lmdb", 14), ("leveldb", 11), ("sqlite", 14)])
def test_no_room_for_old_and_new_is_14_and_changes_nothing(
    tmp_path: Path, engine: str, count: int
) -> None:
    path = tmp_path / "store"
    local = Local(path, engine=engine, capacity=64 * MIB)
    big = [block(n, 2 * MIB) for n in range(count)]
    for n in range(count):
        local.put([lib.name(n)], big[n : n + 1])
    local.stop()
    break_engine(path, engine)
    before = {k: v for k, v in digest(path).items() if k != "lock"}
    ran = run_command("recover", path, "-y")
    assert ran.code == 14, ran.stderr
    assert "--to" in ran.stderr
    assert {k: v for k, v in digest(path).items() if k != "lock"} == before
    assert run_command("recover", path, "-y", "--quarantine", tmp_path / "away").code == 0
    assert (tmp_path / "away").is_dir()
    assert not (path / "blocks").exists()
    local = Local(path)
    assert local.get([lib.name(n) for n in range(count)]) == big
    local.stop()


def test_a_disk_that_is_too_small_is_14(tmp_path: Path, ruins: Copies) -> None:
    path = ruins.copy("sqlite", tmp_path / "store")
    with mounted(tmp_path, "tmpfs", "size=8m") as point:
        ran = run_command("recover", path, "--to", point / "new", "-y")
        assert ran.code == 14, ran.stderr
        # Root makes it, for the owner of the store to write there.
        assert [*point.iterdir(), *point.glob("new/*")] == [point / "new"]


def test_what_is_damaged_goes_where_it_is_told(tmp_path: Path, ruins: Copies) -> None:
    path = ruins.copy("filesystem", tmp_path / "store")
    victim = sorted((path / "blocks").rglob("*.kvb"))[3]
    spoiled = bytearray(victim.read_bytes())
    spoiled[4096] ^= 1
    victim.write_bytes(spoiled)
    ran = run_command("recover", path, "-y", "--quarantine", tmp_path / "away")
    assert ran.code == 0
    assert "1 quarantined" in ran.text
    (copy,) = (tmp_path / "away").glob("*.kvb")
    assert copy.read_bytes() == spoiled
    assert not victim.exists()
    assert list((path / "quarantine").iterdir()) == []
    assert len(look(path).there) == len(ALL) - 1


@needs_root
def test_root_leaves_nothing_that_the_owner_cannot_open(tmp_path: Path, ruins: Copies) -> None:
    shared = Path("/tmp") / f"recover-{os.getpid()}"
    shared.mkdir(mode=0o711)
    try:
        for engine in ENGINES if LONG else ("filesystem", "lmdb"):
            path = ruins.copy(engine, shared / engine)
            break_engine(path, engine)
            for file in (path, *path.rglob("*")):
                os.chown(file, 12345, 12346)
            (shared / "parent").mkdir(exist_ok=True)
            new = shared / "parent" / engine
            for more in (["--to", str(new)], []):
                ran = run_command("recover", path, "-y", *more)
                assert ran.code == 0, ran.stderr
            owners = {
                (file.lstat().st_uid, file.lstat().st_gid)
                for top in (path, new)
                for file in (top, *top.rglob("*"))
            }
            assert owners == {(12345, 12346)}
            for file in (new, *new.rglob("*")):
                os.chown(file, 0, 0)  # to look into it as root
            assert look(new).there == ALL
    finally:
        shutil.rmtree(shared)


# -- killed ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deaths() -> Iterator[Deaths]:
    program = Deaths()
    yield program
    program.close()


@pytest.mark.parametrize("fresh", [False, True], ids=["in place", "to"])
@pytest.mark.parametrize("engine", ENGINES)
def test_killed_anywhere_a_second_run_completes(
    tmp_path: Path, ruins: Copies, deaths: Deaths, engine: str, fresh: bool
) -> None:
    source = ruins.copy(engine, tmp_path / "source", kill=True)
    break_engine(source, engine)
    spoil(source, engine)
    step, path, new = 1, tmp_path / "store", tmp_path / "new"
    while True:
        shutil.copytree(source, path)
        killed = deaths.kill_at(step, path, new if fresh else None)
        survey = recover(path, new) if fresh and killed else None
        if not fresh and killed:
            survey = recover(path)
        if survey is not None:
            assert len(survey.kept) == len(ALL) - 1, step
        target = new if fresh else path
        folder = layout.read(target).blocks
        assert [one.name for one in target.glob("blocks*")] == [folder], step
        assert not list(target.glob("*.new"))
        assert not (target / "unfinished").exists(), step
        if LONG or step % 4 == 1 or not killed:
            assert len(look(target).there) == len(ALL) - 1, step
        shutil.rmtree(path)
        shutil.rmtree(new, ignore_errors=True)
        if not killed:
            break
        step += 1 + step // (8 if LONG else 3)
    assert step > 10


def spoil(path: Path, engine: str) -> None:
    """Damage the payload of one record that lies in one place only."""
    needle = lib.value(4)[1000:1100]
    for file in (path / "blocks").rglob("*"):
        if file.is_file() and (data := file.read_bytes()).count(needle):
            file.write_bytes(data.replace(needle, bytes(100)))


def test_an_interrupted_command_says_so_and_can_be_repeated(tmp_path: Path, ruins: Copies) -> None:
    path = ruins.copy("sqlite", tmp_path / "store")
    with subprocess.Popen(
        [COMMAND, "recover", path, "--to", tmp_path / "new", "-y"], stderr=subprocess.PIPE
    ) as process:
        process.kill()
        process.wait()
    ran = run_command("recover", path, "--to", tmp_path / "new", "-y")
    assert ran.code == 0, ran.stderr
    assert look(tmp_path / "new").there == ALL

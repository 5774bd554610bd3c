"""kvstore fsck: the real command; shares of the payloads; repairs that are killed anywhere."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore import findings, fsck, isolate, mend, opening
from kvstore.commands.documents import LINES
from kvstore.commands.shapes import unlike
from kvstore.errors import CorruptStore, EngineHung
from kvstore.fsck import PAYLOADS, Check, Options
from kvstore.isolate import Array, Child, Document
from tests.command import Daemon, Ran, run_command
from tests.damage_matrix import lost_blocks, make_store
from tests.here import Here
from tests.mounts import read_only
from tests.store_damages import DAMAGES, Scene
from tests.stores import Local, block, key

ROOT = Path(__file__).parent.parent
LONG = os.environ.get("PROMISES") == "long"


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Give a fresh copy of a store of an engine."""
    folder = tmp_path_factory.mktemp("stores")
    made: dict[str, Path] = {}

    def copy(engine: str) -> Path:
        if engine not in made:
            made[engine] = folder / engine
            make_store(made[engine], engine)
        number = len(list(folder.iterdir()))
        return Path(shutil.copytree(made[engine], folder / f"{engine}-{number}"))

    return copy


Stores = Callable[[str], Path]


def spoil(path: Path, *damages: str) -> Path:
    for damage in damages:
        DAMAGES[damage](Scene(path))
    return path


def lines_of(ran: Ran) -> list[dict[str, object]]:
    return [json.loads(line) for line in ran.text.splitlines()]


def state_of(folder: Path) -> dict[str, tuple[int, int, int]]:
    found = {p: p.lstat() for p in folder.rglob("*")}
    return {str(p): (s.st_mtime_ns, s.st_size, s.st_mode) for p, s in found.items()}


# -- the command ----------------------------------------------------------------------------------


def test_a_clean_store_is_told_so_and_left_alone(stores: Stores) -> None:
    path = stores("filesystem")
    before = state_of(path)
    ran = run_command("fsck", path, "--verify-data=100%")
    assert (ran.code, ran.stderr) == (0, "")
    assert ": clean: 20 blocks" in ran.text
    assert state_of(path) == before


def test_findings_are_lines_and_the_last_one_names_the_next_command(stores: Stores) -> None:
    path = spoil(stores("filesystem"), "flipped payload", "leftovers")
    ran = run_command("fsck", path, "--verify-data=100%", "--json")
    *found, summary = lines_of(ran)
    assert ran.code == 5
    finding, last = LINES["fsck"]
    assert [unlike(one, finding) for one in found] == [[]] * len(found)
    assert unlike(summary, last) == []
    assert [one["id"] for one in found if one["severity"] == "damage"] == ["payload-damaged"]
    assert summary["corrupt"] == {"header": 0, "payload": 1, "key_mismatch": 0, "truncated": 0}
    assert summary["next_command"] == f"kvstore fsck --repair {path}"
    assert run_command("fsck", path).code == 0, "headers are whole"


def test_a_repair_asks_plans_and_tells(stores: Stores, tmp_path: Path) -> None:
    path = spoil(stores("filesystem"), "flipped payload")
    words = ("fsck", path, "--verify-data=100%", "--repair")
    before = state_of(path)
    refused = run_command(*words)
    assert refused.code == 2
    assert "say so with --yes" in refused.stderr.lower()
    planned = run_command(*words, "-n")
    assert planned.code == 5
    assert "1 payload-damaged" in planned.stderr
    assert state_of(path) == before
    elsewhere = tmp_path / "kept"
    elsewhere.mkdir()
    done = run_command(*words, "--yes", "--quarantine", elsewhere, "--json")
    assert done.code == 0, done.stderr
    summary = lines_of(done)[-1]
    assert (summary["repaired"], summary["dropped"], summary["left"]) == (1, 1, 0)
    assert len(list(elsewhere.glob("fsck-*/*.kvb"))) == 1
    assert run_command(*words, "--yes").code == 0
    assert lost_blocks(path) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--verify-data=5"], "rite a share (5%) or a size (20GiB)"),
        (["--verify-data=0%"], "rite a share"),
        (["--verify-data=200%"], "rite a share"),
        (["--verify-data", "somewhere"], "rite a share"),
        (["--max-duration", "soon"], "rite 90s"),
        (["--quick", "--verify-data=5%"], "rop it"),
        (["-n"], "--repair"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], says: str, tmp_path: Path) -> None:
    ran = run_command("fsck", "--store", tmp_path, *words)
    assert ran.code == 2
    assert says in ran.stderr


def test_codes_of_what_cannot_be_checked(stores: Stores, tmp_path: Path) -> None:
    assert run_command("fsck", tmp_path / "nowhere").code == 10
    assert run_command("fsck", tmp_path).code == 10
    assert run_command("fsck", spoil(stores("filesystem"), "newer format")).code == 15
    spoiled = run_command("fsck", spoil(stores("filesystem"), "spoiled store file"))
    assert spoiled.code == 5
    assert "kvstore recover" in spoiled.text


def test_a_daemon_keeps_it_away(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    daemon.start()
    try:
        assert run_command("fsck", daemon.store).code == 11
        assert run_command("fsck", daemon.store, "--repair", "-y").code == 11
    finally:
        daemon.stop(signal.SIGKILL)
    ran = run_command("fsck", daemon.store)
    assert (ran.code, "damage" in ran.text) == (0, False), "a kill is no damage"


@pytest.mark.root
@pytest.mark.parametrize("engine", ["superblock", "leveldb"])
def test_a_read_only_mount_will_do(engine: str, stores: Stores) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    path = spoil(stores(engine), "flipped payload")
    with read_only(path) as seen:
        ran = run_command("fsck", seen, "--verify-data=50%", "--json")
        assert ran.code in (0, 5)
        assert run_command("fsck", seen, "--verify-data=100%").code == 5
        assert run_command("fsck", seen, "--verify-data=100%", "--repair", "-y").code == 1
    (path.parent / "read-only").rmdir()


@pytest.mark.root
def test_run_by_root_all_stays_the_owners(stores: Stores) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    path = Path(shutil.move(stores("filesystem"), folder / "store"))
    spoil(path, "flipped payload", "lost index", "lost directories")
    for one in (path, *path.rglob("*")):
        os.lchown(one, 12345, 12345)
    ran = run_command("fsck", path, "--verify-data=100%", "--repair", "-y")
    assert ran.code == 0, ran.stderr + ran.text
    assert {one.lstat().st_uid for one in (path, *path.rglob("*"))} == {12345}
    shutil.rmtree(folder)


def test_the_page_lists_every_class() -> None:
    page = (ROOT / "docs" / "fsck.md").read_text()
    assert all(line in page for line in findings.table())
    assert set(findings.OF_ENGINES.values()) <= set(findings.CLASSES)


# -- shares of the payloads -----------------------------------------------------------------------


def test_shares_go_on_where_the_last_one_ended(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = spoil(stores("filesystem"), "flipped payload")
    monkeypatch.setattr(fsck, "Child", Here)
    reports = [Check(path, Options(depth=PAYLOADS, share=0.25)).run() for _ in range(8)]
    assert [report.checked for report in reports] == [5] * 8
    seen = [report.counts["payload-damaged"] for report in reports]
    assert sum(seen[:4]) == 1
    assert seen[:4] == seen[4:]


def test_a_check_that_is_late_stops_and_says_so(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stores("filesystem")
    monkeypatch.setattr(fsck, "Child", Here)
    report = Check(path, Options(depth=PAYLOADS, max_seconds=0.0)).run()
    assert not report.finished
    assert report.checked == 0


def test_a_spoiled_cursor_is_no_fault(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stores("filesystem")
    monkeypatch.setattr(fsck, "Child", Here)
    for text in (b"", b"[]", b'{"uuid": 1}', b"\xff", b'{"place": []}'):
        (path / "fsck.json").write_bytes(text)
        report = Check(path, Options(depth=PAYLOADS, share=0.5)).run()
        assert (report.found, report.checked) == ([], 10)


# -- children that die or keep silent -------------------------------------------------------------


def run_child() -> None:
    """Be a child that ends as the environment says: ``python -m tests.test_fsck``."""

    def check(_: Document, __: list[Array]) -> Iterator[tuple[Document, list[Array]]]:
        os.kill(os.getpid(), getattr(signal, os.environ["END_BY"]))
        yield {"findings": []}, []

    isolate.serve({"check": check})


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Child]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("END_BY", "SIGBUS")
    return functools.partial(Child, module="tests.test_fsck")


def test_death_is_a_finding(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, dying: Callable[..., Child]
) -> None:
    monkeypatch.setattr(fsck, "Child", dying)
    report = Check(stores("lmdb"), Options()).run()
    (found,) = report.found
    assert found.id == "engine-died"
    assert "SIGBUS" in found.detail


def test_silence_is_an_error(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, dying: Callable[..., Child]
) -> None:
    monkeypatch.setenv("END_BY", "SIGSTOP")
    monkeypatch.setattr(fsck, "Child", dying)
    with pytest.raises(EngineHung):
        Check(stores("lmdb"), Options(engine_seconds=2.0)).run()


@pytest.mark.parametrize("engine", ["lmdb", "leveldb"])
def test_an_opening_after_a_kill_looks_at_the_engine_in_a_child_first(
    engine: str, stores: Stores, monkeypatch: pytest.MonkeyPatch, dying: Callable[..., Child]
) -> None:
    path = stores(engine)
    Local(path).kill()
    real = Child
    monkeypatch.setattr(opening, "Child", dying)
    with pytest.raises(CorruptStore, match="SIGBUS") as raised:
        Local(path)
    assert "kvstore recover" in raised.value.hint
    monkeypatch.setattr(opening, "Child", real)
    local = Local(path)
    assert local.get([key(3)]) == [block(3, 9000)]
    local.stop()
    monkeypatch.setattr(opening, "Child", dying)
    Local(path).kill()  # after a clean stop nobody looks


def test_a_contained_engine_is_opened_at_once(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, dying: Callable[..., Child]
) -> None:
    path = stores("superblock")
    Local(path).kill()
    monkeypatch.setattr(opening, "Child", dying)
    Local(path).kill()


# -- repairs that are killed ----------------------------------------------------------------------

_FRESH = multiprocessing.get_context("forkserver")
_FRESH.set_forkserver_preload([__name__])
WATCHED = (
    *("rename", "unlink", "fsync", "fdatasync", "rmdir", "mkdir", "chmod", "ftruncate", "open"),
    *("write", "pwrite", "pwritev", "posix_fallocate"),
)


def repair_until(path: Path, calls: int) -> None:
    """Repair a store, but end at the so-many-th call that changes something on disk."""
    left = calls

    def watched(call: Callable[..., object]) -> Callable[..., object]:
        def act(*args: object, **kwargs: object) -> object:
            nonlocal left
            changes = call.__name__ != "open" or any(
                isinstance(one, int) and one & os.O_CREAT for one in args
            )
            left -= changes
            if left < 0:
                os._exit(9)
            return call(*args, **kwargs)

        return act

    for name in WATCHED:
        setattr(os, name, watched(getattr(os, name)))
    fsck.Child = mend.Child = Here  # type: ignore[assignment,attr-defined]
    report = Check(path, Options(depth=PAYLOADS)).run()
    mend.until_done(
        report,
        lambda: Check(path, Options(depth=PAYLOADS).after(report)).run(),
        mend.new_folder(path, None),
        60.0,
        mend.Done(),
    )


def killed(path: Path, calls: int) -> bool:
    process = _FRESH.Process(target=repair_until, args=(path, calls))
    process.start()
    process.join()
    assert process.exitcode in (0, 9)
    return process.exitcode == 9


CASES = {
    "filesystem": (
        *("flipped payload", "swapped", "unknown record", "of another store", "leftovers"),
        *("lost directories", "spoiled namespace"),
    ),
    "superblock": ("flipped header", "torn journal", "symlink", "spoiled structure"),
    "sqlite": ("lost structure",),
}
LOST = {"filesystem": 1, "superblock": 1, "sqlite": 0}


@pytest.mark.parametrize("engine", CASES if LONG else ["filesystem", "superblock"])
def test_a_repair_that_was_killed_anywhere_is_repeated(engine: str, stores: Stores) -> None:
    path, at, step = stores(engine), 0, 1 if LONG else 17
    spoil(path, *CASES[engine])
    work = path.with_name("killed")
    while True:
        shutil.copytree(path, work, symlinks=True)
        ended = not killed(work, at)
        if not ended:
            assert not killed(work, 1 << 30)
        report = Check(work, Options(depth=PAYLOADS)).run()
        assert report.faults == [], f"after {at} calls"
        assert lost_blocks(work) <= LOST[engine], f"after {at} calls"
        shutil.rmtree(work)
        if ended:
            assert at > 10
            return
        at += step


if __name__ == "__main__":
    run_child()

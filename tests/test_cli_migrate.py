"""``kvstore migrate`` as people and scripts call it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore import layout
from kvstore.commands.documents import DOCUMENTS
from kvstore.commands.shapes import unlike
from kvstore.commands.tree import run
from tests.command import COMMAND, Daemon, Ran, run_command
from tests.migrating import Local, block, key


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store of 20 blocks that was stopped cleanly."""
    local = Local(tmp_path / "store", capacity=128 << 20)
    local.put([key(n) for n in range(20)], [block(n) for n in range(20)], chain=True)
    local.stop()
    return tmp_path / "store"


Command = Callable[..., Ran]


@pytest.fixture
def kvstore(capsysbinary: pytest.CaptureFixture[bytes]) -> Command:
    """Return what runs a command line here, which is ten times as quick as a process of its own."""

    def call(*arguments: str | Path) -> Ran:
        capsysbinary.readouterr()
        code = run([str(one) for one in arguments])
        out, err = capsysbinary.readouterr()
        return Ran(code, out, err.decode())

    return call


def documented(ran: Ran, name: str, code: int = 0) -> dict[str, object]:
    assert ran.code == code, ran.stderr
    assert unlike(ran.json(), DOCUMENTS[name]) == []
    return ran.json()


def test_the_whole_way_there_and_back(kvstore: Command, store: Path) -> None:
    before = sorted(os.listdir(store))
    plan = documented(kvstore("migrate", store, "--to", "lmdb", "-n", "--json"), "migrate --to")
    assert (plan["blocks"], plan["dry_run"], plan["switched"]) == (20, True, False)
    assert sorted(os.listdir(store)) == before
    ran = kvstore("migrate", "--store", store, "--to", "lmdb")
    assert ran.code == 0, ran.stderr
    assert "copied 20 of 20 blocks" in ran.text
    assert "has the engine lmdb now" in ran.text
    assert "from filesystem to lmdb" in ran.stderr
    again = documented(kvstore("migrate", store, "--to", "lmdb", "--json"), "migrate --to")
    assert again["already"] is True
    assert "already" in kvstore("migrate", store, "--to", "lmdb").text
    told = kvstore("inspect", store, "--json").json()
    assert (told["engine"], told["blocks"]) == ("lmdb", 20)
    back = documented(kvstore("migrate", store, "--rollback", "--json"), "migrate --rollback")
    assert (back["engine"], back["given_up"]) == ("filesystem", None)
    nothing = kvstore("migrate", store, "--rollback")
    assert nothing.code == 4
    assert "was not changed" in nothing.stderr


def test_deleting_the_former_blocks_asks(kvstore: Command, store: Path) -> None:
    assert kvstore("migrate", store, "--to", "sqlite", "-q").stdout == b""
    name = "migrate --delete-source"
    plan = documented(kvstore("migrate", store, "--delete-source", "-n", "--json"), name)
    asked = kvstore("migrate", store, "--delete-source")
    assert asked.code == 2
    assert "--yes" in asked.stderr
    assert (store / "blocks").is_dir()
    done = documented(kvstore("migrate", store, "--delete-source", "-y", "--json"), name)
    assert done["freed_bytes"] == plan["freed_bytes"]
    assert not (store / "blocks").exists()
    assert kvstore("migrate", store, "--delete-source").code == 0


def test_a_running_daemon_is_in_the_way(kvstore: Command, daemon: Daemon) -> None:
    for what in (["--to", "lmdb"], ["--rollback"], ["--delete-source", "-y"]):
        ran = kvstore("migrate", daemon.store, *what)
        assert ran.code == 11, what
        assert "in use by process" in ran.stderr


def test_a_daemon_serves_what_was_migrated(daemon: Daemon, tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_bytes(b"x" * 5000)
    assert daemon.run("put", "00ff12ab", "-i", source, "--label", "a", "--durable").code == 0
    assert daemon.run("pin", "00ff12ab", "--for", "1h").code == 0
    assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
    ran = run_command("migrate", daemon.store, "--to", "superblock")
    assert ran.code == 0, ran.stderr
    daemon.start()
    status = daemon.status()
    assert (status["engine"], status["blocks"], status["pinned_blocks"]) == ("superblock", 1, 1)
    assert "former blocks (filesystem)" in str(status["notes"])
    assert daemon.run("get", "00ff12ab", "-o", tmp_path / "out").code == 0
    assert (tmp_path / "out").read_bytes() == b"x" * 5000
    assert daemon.run("inspect", "00ff12ab", "--json").json()["envelope"]["label"] == "a"  # type: ignore[index]
    assert daemon.run("put", "00ff12ac", "-i", source, "--wait").code == 0
    assert daemon.stop() == 0
    refused = run_command("migrate", daemon.store, "--rollback")
    assert refused.code == 1
    assert "1 blocks have come in" in refused.stderr


def test_ctrl_c_and_again(store: Path) -> None:
    local = Local(store, capacity=None)
    for n in range(100, 140):
        local.put([key(n)], [block(n, 1 << 20)])
    local.stop()
    call = [str(COMMAND), "migrate", str(store), "--to", "filesystem", "--json"]
    assert subprocess.run(call, capture_output=True).returncode == 0
    call[4:5] = ["sqlite", "--rate", "8MiB/s", "--jobs", "1"]
    process = subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    copy = store / "blocks-sqlite" / "sqlite" / "store.db-wal"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not (copy.exists() and copy.stat().st_size > 4 << 20):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert b"interrupted" in err
    assert layout.read(store).engine == "filesystem"
    ran = documented(run_command("migrate", store, "--to", "sqlite", "--json"), "migrate --to")
    assert ran["switched"] is True
    assert int(str(ran["present"])) > 0
    assert int(str(ran["present"])) + int(str(ran["copied"])) == 60


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "wants one thing"),
        (["--to", "lmdb", "--rollback"], "wants one thing"),
        (["a", "b", "--to", "lmdb"], "two stores"),
        (["a", "--to", "lmdb", "--merge"], "--merge is for SRC"),
        (["a", "--to", "lmdb", "--field", "x=y"], "--field is for SRC"),
        (["a", "b", "c"], "wants one thing"),
        (["lmdb:a", "vllm-fs:b"], "only read"),
        (["a", "./a"], "both"),
        (["vllm-fs:a", "b", "--field", "x"], "NAME=VALUE"),
        (["a", "--rollback", "-n"], "no plan"),
    ],
)
def test_wrong_usage(kvstore: Command, arguments: list[str], word: str) -> None:
    ran = kvstore("migrate", *arguments)
    assert (ran.code, word in ran.stderr) == (2, True), ran.stderr


def test_other_ends(
    kvstore: Command, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kvstore("migrate", tmp_path / "nothing", "--to", "lmdb").code == 10
    assert kvstore("migrate", store, "--to", "lmbd").code == 13
    monkeypatch.setenv("KVSTORE_MIN_FREE", "1000TiB")
    full = kvstore("migrate", store, "--to", "lmdb")
    assert full.code == 14
    assert "min_free" in full.stderr
    assert kvstore("migrate", f"vllm-fs:{tmp_path}/nothing", tmp_path / "new").code == 4
    assert not (tmp_path / "new").exists()


def test_damage_is_told(store: Path) -> None:
    (file,) = (store / "blocks").rglob(f"*-{key(7).hex()}.*")
    os.truncate(file, 5000)
    ran = run_command("migrate", store, "--to", "leveldb")
    assert ran.code == 3
    assert re.search(rf"left behind: \w+ 0 {key(7).hex()}: only 904 of 4096 bytes", ran.text)


def test_between_two_stores(kvstore: Command, store: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    call = ["migrate", f"filesystem:{store}", f"sqlite:{target}", "--capacity", "128MiB", "--json"]
    assert documented(kvstore(*call, "-n"), "migrate")["blocks"] == 20
    assert not target.exists()
    assert documented(kvstore(*call), "migrate")["copied"] == 20
    assert kvstore(*call).code == 1
    assert documented(kvstore(*call, "--merge"), "migrate")["present"] == 20
    told = kvstore("inspect", target, "--json").json()
    assert (told["engine"], told["blocks"]) == ("sqlite", 20)


SYSTEM_PYTHON = Path(f"/usr/bin/python3.{sys.version_info[1]}")


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a store away")
@pytest.mark.skipif(not SYSTEM_PYTHON.exists(), reason="needs a Python that everybody may read")
def test_root_becomes_the_owner(store: Path) -> None:
    owner = 54321
    base = Path("/tmp") / f"kvstore-migrate-{os.getpid()}"
    shutil.copytree(store, base)
    try:
        for path in (base, *base.rglob("*")):
            os.chown(path, owner, owner)
        ours = [path for path in sys.path if path and not path.startswith(sys.base_prefix)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(ours)}
        program = "from kvstore.cli import main; main()"
        call = [str(SYSTEM_PYTHON), "-c", program, "migrate", str(base), "--to", "lmdb"]
        done = subprocess.run(call, capture_output=True, text=True, env=env, cwd="/")
        assert done.returncode == 0, done.stderr
        assert layout.read(base).engine == "lmdb"
        assert {path.stat().st_uid for path in base.rglob("*")} == {owner}
    finally:
        shutil.rmtree(base)

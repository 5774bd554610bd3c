"""Nobody else reads or exchanges what we keep: modes, owners, core dumps."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.lock import Lock
from tests.command import Daemon, run_command

OURS = ("", "blocks", "namespaces", "incoming", "quarantine")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    assert run_command("create", tmp_path / "store", "--capacity", "64MiB").code == 0
    return tmp_path / "store"


@pytest.mark.parametrize("part", OURS)
@pytest.mark.parametrize("mode", [0o720, 0o702, 0o1777])
def test_a_store_that_others_may_write_in_is_refused(store: Path, part: str, mode: int) -> None:
    (store / part).chmod(mode)
    for _ in range(2):
        lock = Lock(store)
        with pytest.raises(ConfigError, match="others may write in") as refused:
            lock.acquire(exclusive=True)
        assert str(store / part) in refused.value.message
        assert refused.value.hint == f"run chmod go-w {store / part}"
    lock.acquire(exclusive=False)  # looking is always allowed
    lock.release()
    (store / part).chmod(0o755)
    lock.acquire(exclusive=True)
    lock.release()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give directories away")
@pytest.mark.parametrize("part", OURS)
def test_a_store_of_somebody_else_is_refused(store: Path, part: str) -> None:
    os.chown(store / part, 4321, -1)
    with pytest.raises(ConfigError, match="belongs to user 4321"):
        Lock(store).acquire(exclusive=True)
    os.symlink(store / part, store / "link")
    os.chown(store / part, 0, -1)
    Lock(store).acquire(exclusive=True)


@pytest.mark.parametrize(
    "command",
    [
        ("serve", "--store"),
        ("create",),
        ("migrate", "--to", "sqlite"),
        ("recover", "--yes"),
    ],
)
def test_commands_that_write_refuse_such_a_store(store: Path, command: tuple[str, ...]) -> None:
    if command == ("create",):
        store = store.with_name("empty")
        store.mkdir()
    store.chmod(0o777)
    before = sorted(store.rglob("*"))
    ran = run_command("--socket", store.parent / "kv.sock", *command, store)
    assert ran.code == ConfigError.exit_code, ran.text
    assert f"chmod go-w {store}" in ran.stderr
    assert sorted(store.rglob("*")) == before


def test_what_commands_write_is_for_nobody_else(store: Path, tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        assert run_command("create", tmp_path / "second", "--engine", "leveldb").code == 0
    finally:
        os.umask(mask)
    open_to_others = [
        path for path in (tmp_path / "second").rglob("*") if path.lstat().st_mode & 0o077
    ]
    assert open_to_others == []


CRASH = """
import os, sys
from kvstore import cli
if sys.argv[1] == "private":
    cli._keep_to_ourselves()
os.abort()
"""


@pytest.mark.parametrize("how", ["private", "open"])
def test_a_crash_leaves_no_core_dump(tmp_path: Path, how: str) -> None:
    """With a negative control: without our limit there is one."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    if hard == 0:
        pytest.skip("core dumps are forbidden here already")

    def allow() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))

    child = subprocess.Popen(
        [sys.executable, "-c", CRASH, how],
        cwd=tmp_path,
        preexec_fn=allow,
        stderr=subprocess.DEVNULL,
    )
    _, status = os.waitpid(child.pid, 0)
    child.returncode = -os.WTERMSIG(status)
    assert os.WTERMSIG(status) == signal.SIGABRT
    assert os.WCOREDUMP(status) == (how == "open")
    assert bool(list(tmp_path.iterdir())) == (how == "open" and _cores_are_files())


def _cores_are_files() -> bool:
    return not Path("/proc/sys/kernel/core_pattern").read_text().startswith(("|", "/", "@"))


def test_the_daemon_keeps_to_itself(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    try:
        daemon.start()
        assert "Umask:\t0077" in Path(f"/proc/{daemon.pid}/status").read_text()
        limits = Path(f"/proc/{daemon.pid}/limits").read_text()
        (cores,) = (line for line in limits.splitlines() if line.startswith("Max core file size"))
        assert cores.split()[4:6] in (["1", "1"], ["0", "0"])
    finally:
        assert daemon.stop() == 0

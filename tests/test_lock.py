"""The lock of a store: who gets it, who is named, and that it never goes stale."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.errors import EngineError, ReadOnly, StoreLocked, StoreNotFound
from kvstore.layout import Lock
from tests.mounts import mounted

HOLDER = """
import sys
from pathlib import Path
from kvstore.layout import Lock
lock = Lock(Path(sys.argv[1]))
lock.acquire(exclusive=sys.argv[2] == "exclusive")
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held_by_another(store: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    """Have another process hold the lock."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(store), how],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def refusal(store: Path, exclusive: bool) -> str:
    with pytest.raises(StoreLocked) as caught:
        Lock(store).acquire(exclusive)
    assert caught.value.exit_code == 11
    return caught.value.message


@pytest.mark.parametrize(
    ("held", "wanted", "granted"),
    [
        ("exclusive", "exclusive", False),
        ("exclusive", "shared", False),
        ("shared", "exclusive", False),
        ("shared", "shared", True),
    ],
)
def test_one_writer_or_many_readers(held: str, wanted: str, granted: bool, tmp_path: Path) -> None:
    with held_by_another(tmp_path, held):
        if granted:
            lock = Lock(tmp_path)
            lock.acquire(exclusive=False)
            lock.release()
        else:
            assert str(tmp_path) in refusal(tmp_path, wanted == "exclusive")
    Lock(tmp_path).acquire(exclusive=True)


@pytest.mark.parametrize("held", ["exclusive", "shared"])
def test_the_holder_is_named_by_process_and_command(held: str, tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("99999999 some stale text\n")
    with held_by_another(tmp_path, held) as child:
        message = refusal(tmp_path, exclusive=True)
    assert f"in use by process {child.pid} ({sys.executable} -c" in message
    # The command holds newlines; the message is one line.
    assert message.isprintable()
    assert len(message) < 300


def test_without_proc_the_text_of_the_file_names_the_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    with held_by_another(tmp_path, "exclusive") as child:
        monkeypatch.setattr(Path, "read_text", refuse)
        message = refusal(tmp_path, exclusive=True)
        assert f"in use by process {child.pid} ({sys.executable}" in message
        (tmp_path / "lock").write_bytes(b"\xff\xfe garbage")
        assert "in use by another process" in refusal(tmp_path, exclusive=True)
        (tmp_path / "lock").write_bytes(b"17 \x1b[2Jgarbage\n")
        assert refusal(tmp_path, exclusive=True).isprintable()


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    with held_by_another(tmp_path, "exclusive") as child:
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert (tmp_path / "lock").read_text().startswith(str(child.pid))
        Lock(tmp_path).acquire(exclusive=True)


def test_the_text_is_there_while_held_and_gone_after(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    lock.acquire(exclusive=True)
    text = (tmp_path / "lock").read_text()
    assert text.split()[0] == str(os.getpid())
    assert len(text) <= 140
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600
    lock.release()
    lock.release()
    assert (tmp_path / "lock").read_text() == ""
    lock.acquire(exclusive=True)
    lock.release()


def test_one_lock_is_not_taken_twice(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    lock.acquire(exclusive=True)
    with pytest.raises(StoreLocked, match="this process"):
        lock.acquire(exclusive=True)
    # The refusal has not let go of it.
    refusal(tmp_path, exclusive=False)
    lock.release()


def test_a_second_lock_in_the_same_process_is_refused(tmp_path: Path) -> None:
    first, second = Lock(tmp_path), Lock(tmp_path)
    first.acquire(exclusive=True)
    assert f"process {os.getpid()}" in refusal(tmp_path, exclusive=True)
    first.release()
    second.acquire(exclusive=True)
    second.release()


def test_a_refused_lock_gives_its_descriptor_back(tmp_path: Path) -> None:
    holder = Lock(tmp_path)
    holder.acquire(exclusive=True)
    before = len(os.listdir("/proc/self/fd"))
    refused = Lock(tmp_path)
    for exclusive in (True, False):
        with pytest.raises(StoreLocked):
            refused.acquire(exclusive)
        assert len(os.listdir("/proc/self/fd")) == before
    holder.release()
    assert len(os.listdir("/proc/self/fd")) == before - 2
    refused.acquire(exclusive=True)
    refused.release()


def test_readers_write_nothing(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("12 left behind\n")
    lock = Lock(tmp_path)
    lock.acquire(exclusive=False)
    lock.release()
    assert (tmp_path / "lock").read_text() == "12 left behind\n"


def test_children_that_are_spawned_do_not_hold_the_lock(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    lock.acquire(exclusive=True)
    with subprocess.Popen(["sleep", "60"], close_fds=False) as child:
        lock.release()
        Lock(tmp_path).acquire(exclusive=True)
        child.kill()


def test_a_full_disk_does_not_keep_anyone_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", refuse)
    lock = Lock(tmp_path)
    lock.acquire(exclusive=True)
    refusal(tmp_path, exclusive=True)
    lock.release()


def test_no_directory_is_no_store(tmp_path: Path) -> None:
    for exclusive in (True, False):
        with pytest.raises(StoreNotFound, match="absent"):
            Lock(tmp_path / "absent").acquire(exclusive)


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("precious")
    (tmp_path / "lock").symlink_to(tmp_path / "outside")
    for exclusive in (True, False):
        with pytest.raises(EngineError, match="lock"):
            Lock(tmp_path).acquire(exclusive)
    assert (tmp_path / "outside").read_text() == "precious"


@pytest.mark.root
@pytest.mark.parametrize("file_is_there", [True, False])
def test_a_read_only_mount_can_be_locked_shared(file_is_there: bool, tmp_path: Path) -> None:
    with mounted(tmp_path, "tmpfs") as point:
        if file_is_there:
            (point / "lock").touch()
        subprocess.run(["mount", "-o", "remount,ro", str(point)], check=True)
        first, second = Lock(point), Lock(point)
        first.acquire(exclusive=False)
        second.acquire(exclusive=False)
        first.release()
        second.release()
        with pytest.raises(ReadOnly, match="Read-only"):
            Lock(point).acquire(exclusive=True)


def test_removing_the_file_lets_nobody_in(tmp_path: Path) -> None:
    holder = Lock(tmp_path)
    holder.acquire(exclusive=True)
    (tmp_path / "lock").unlink()
    with pytest.raises(StoreLocked, match=str(os.getpid())):
        Lock(tmp_path).acquire(exclusive=True)
    holder.release()

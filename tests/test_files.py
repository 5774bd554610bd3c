"""What lies around a store: size on the device, mount point, small files, permissions."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore import files, layout, node
from kvstore.errors import CorruptStore
from tests.mounts import mounted
from tests.test_layout import RECORD, fail_with


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    layout.create_directories(path)
    return path


def test_bytes_are_counted_as_du_does(store: Path, tmp_path: Path) -> None:
    (store / "blocks" / "deep").mkdir()
    (store / "blocks" / "deep" / "a").write_bytes(bytes(100_000))
    os.link(store / "blocks" / "deep" / "a", store / "incoming" / "same")
    (store / "sparse").touch()
    os.truncate(store / "sparse", 1 << 30)
    (tmp_path / "outside").write_bytes(bytes(1 << 20))
    (store / "link").symlink_to(tmp_path / "outside")
    (store / "loop").symlink_to(store)
    shown = subprocess.run(
        ["du", "-s", "-B1", str(store)], capture_output=True, text=True, check=True
    )
    assert layout.directory_bytes(store) == int(shown.stdout.split()[0]) < 1 << 20
    assert layout.directory_bytes(tmp_path / "absent") == 0


def test_creation_is_logged_with_device_and_mount_point(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvstore.layout"):
        layout.warn_created(store, RECORD)
    shown = subprocess.run(
        ["findmnt", "-n", "-o", "SOURCE,TARGET", "-T", str(store)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    device, target = shown.stdout.split()
    assert f"on device {device} mounted at {target}" in caplog.text
    assert str(store) in caplog.text


@pytest.mark.root
def test_a_mount_point_with_a_blank_is_found(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    with mounted(tmp_path / "a b", "tmpfs") as point:
        (point / "below").mkdir()
        assert node.mount_of(point / "below")[:2] == ("tmpfs", str(point))


def test_the_boot_id_is_that_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Path("/proc/sys/kernel/random/boot_id").read_text()
    assert layout.boot_id().hex() == text.strip().replace("-", "")
    monkeypatch.setattr(Path, "read_text", fail_with(errno.EACCES))
    assert layout.boot_id() == b""


def test_small_files_are_read_up_to_their_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert files.read_regular(tmp_path / "file", 5) == b"12345"
    with pytest.raises(CorruptStore, match="more than 4 bytes"):
        files.read_regular(tmp_path / "file", 4)


def test_data_is_written_whole_although_the_kernel_takes_it_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    files.replace(tmp_path / "file", b"0123456789" * 10)
    monkeypatch.undo()
    assert (tmp_path / "file").read_bytes() == b"0123456789" * 10


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    files.replace(tmp_path / "file", b"data")
    files.read_regular(tmp_path / "file", 10)
    files.sync_directory(tmp_path)
    with pytest.raises(CorruptStore, match="not a regular file"):
        files.read_regular(tmp_path / "directory", 10)
    with pytest.raises(OSError, match="directory"):
        files.replace(tmp_path / "directory", b"data")
    assert len(os.listdir("/proc/self/fd")) == before
    assert {path.name for path in tmp_path.iterdir()} == {"directory", "file"}


def as_nobody(action: Callable[[], object]) -> str:
    """Run a function in a child that has given up root; return what it raised, as text."""
    source, target = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65_534)
            os.setuid(65_534)
            action()
            os.write(target, b"nothing")
        except BaseException as error:
            os.write(target, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(target)
    with os.fdopen(source) as reader:
        return reader.read()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="giving up root needs root")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_without_permission_that_is_said_with_path_and_next_step(
    store: Path, tmp_path: Path
) -> None:
    layout.write(store, RECORD)
    for parent in (tmp_path, *tmp_path.parents):
        if parent.owner() == "root" and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    assert as_nobody(lambda: layout.read(store)) == (
        f"PermissionDenied: cannot read {store}/STORE.json: Permission denied. "
        "run as the store's owner, or give this user access"
    )
    refused = as_nobody(lambda: layout.create_directories(tmp_path / "other"))
    assert refused.startswith(f"PermissionDenied: cannot create a store at {tmp_path}/other")
    # The owner and mode of what a store is made of keep everyone else out.
    store.chmod(0o755)
    (store / "STORE.json").chmod(0o644)
    assert as_nobody(lambda: layout.read(store)) == "nothing"
    assert as_nobody(lambda: layout.write(store, RECORD)).startswith("PermissionDenied")

"""What lies around a store: its size on the device, where it is mounted, small files, boot id."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
from pathlib import Path

import pytest

from kvstore import files, layout
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
        assert layout.mount_of(point / "below") == ("tmpfs", str(point))


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

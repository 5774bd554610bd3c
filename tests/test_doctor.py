"""kvstore doctor: every check has been seen to fail, and says what to do."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import pytest

from kvstore import doctor, layout, node
from kvstore.doctor import CHECKS, Found, Subject, examine
from kvstore.opening import Options, create_store
from tests.command import run_command
from tests.mounts import mounted
from tests.stores import MIB


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    create_store(tmp_path / "kv", Options(capacity=64 * MIB))
    run = tmp_path / "run"
    run.mkdir(mode=0o750)
    return Subject(tmp_path / "kv", 64 * MIB, 0, run / "kv.sock")


def found(subject: Subject, name: str) -> Found:
    return CHECKS[name](subject)


def test_a_sound_node_fails_nowhere(subject: Subject) -> None:
    told = dict(examine(subject))
    assert [name for name, one in told.items() if one.state == "fail"] == []
    for name in ("versions", "store", "owner", "free-space", "capacity", "clock", "socket"):
        assert told[name].state == "ok", told[name]


def test_every_finding_says_what_to_do(subject: Subject) -> None:
    bad = subject._replace(store=subject.store / "no", memory=1 << 50, min_free=1 << 60)
    for name, one in examine(bad):
        assert one.state in ("ok", "unknown") or one.fix, name
    assert found(bad, "store").state == "warn"
    assert found(bad, "memory").state == "fail"
    assert found(subject._replace(min_free=1 << 60), "free-space").state == "fail"


def test_a_damaged_store(subject: Subject) -> None:
    (subject.store / "STORE.json").write_text("{")
    assert found(subject, "store").state == "fail"
    assert found(subject, "capacity").state == "unknown"


@pytest.mark.parametrize(("mode", "state"), [(0o700, "ok"), (0o750, "warn"), (0o777, "fail")])
def test_who_may_reach_the_store(subject: Subject, mode: int, state: str) -> None:
    subject.store.chmod(mode)
    assert found(subject, "owner").state == state


def test_a_store_of_somebody_else(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: subject.store.stat().st_uid + 1)
    assert found(subject, "owner").state == "fail"


@pytest.mark.parametrize(
    ("mount", "state"),
    [
        (node.Mount("d", "/", "ext4", ("rw", "relatime")), "ok"),
        (node.Mount("d", "/", "xfs", ("rw",)), "ok"),
        (node.Mount("d", "/", "ext4", ("ro",)), "fail"),
        (node.Mount("d", "/", "ext4", ("rw", "nobarrier")), "warn"),
        (node.Mount("d", "/", "tmpfs", ("rw",)), "warn"),
        (node.Mount("d", "/", "fuse.sshfs", ("rw",)), "warn"),
        (node.Mount("unknown", "/"), "warn"),
    ],
)
def test_filesystems(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, mount: node.Mount, state: str
) -> None:
    monkeypatch.setattr(node, "mount_of", lambda _: mount)
    assert found(subject, "filesystem").state == state


@pytest.mark.root
def test_a_real_mount(tmp_path: Path) -> None:
    with mounted(tmp_path, "tmpfs") as point:
        subject = Subject(point, MIB, 0, tmp_path / "kv.sock")
        assert "tmpfs" in found(subject, "filesystem").message
        assert found(subject, "root-device").state == "ok"


def test_a_clock_that_went_back(subject: Subject) -> None:
    journal = next((subject.store / layout.BLOCKS).glob("journal.*"))
    os.utime(journal, (time.time() + 3600,) * 2)
    assert found(subject, "clock").state == "fail"


def test_limits(subject: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    assert found(subject, "descriptors").state == "warn"
    monkeypatch.setattr(doctor, "HUGE_PAGES", tmp_path / "pages")
    (tmp_path / "pages").write_text("always madvise [never]\n")
    assert found(subject, "huge-pages").state == "warn"
    monkeypatch.setattr(doctor, "BOOT_ID", tmp_path / "none")
    assert found(subject, "boot-id").state == "warn"


def test_who_may_replace_the_socket(subject: Subject) -> None:
    subject.socket.parent.chmod(0o777)
    assert found(subject, "socket").state == "fail"
    subject.socket.parent.chmod(0o1777)
    assert found(subject, "socket").state == "ok"


def test_the_command(subject: Subject) -> None:
    environment = {"KVSTORE_MIN_FREE": "0", "KVSTORE_MEMORY": "1MiB"}
    ran = run_command("doctor", subject.store, env=environment)
    assert (ran.code, "fail" in ran.text.splitlines()[-1]) == (0, False)
    subject.store.chmod(0o777)
    ran = run_command("doctor", "--store", subject.store, env=environment)
    assert ran.code == 1
    assert f"chmod 700 {subject.store}" in ran.text

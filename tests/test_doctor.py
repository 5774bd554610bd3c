"""kvstore doctor: every check has been seen to fail, and says what to do."""

from __future__ import annotations

import mmap
import os
import resource
import time
from pathlib import Path

import pytest

from kvstore import doctor, layout, node
from kvstore.commands import vllm
from kvstore.doctor import CHECKS, Found, Subject, examine
from kvstore.namespaces import Namespaces
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


# -- vLLM -----------------------------------------------------------------------------------------


def of_vllm(subject: Subject, name: str) -> Found:
    return vllm.CHECKS[name](subject)


def test_keys_of_a_vllm_that_do_not_last(subject: Subject) -> None:
    known = Namespaces(subject.store / "namespaces")
    known.open({"engine": "vllm", "seed": "0"}, True)
    assert of_vllm(subject, "vllm-keys").state == "ok"
    known.open({"engine": "vllm", "random_seed": 1}, True)
    one = of_vllm(subject, "vllm-keys")
    assert (one.state, "PYTHONHASHSEED" in one.fix) == ("fail", True)
    assert of_vllm(subject._replace(store=subject.store / "no"), "vllm-keys").state == "unknown"


@pytest.mark.parametrize(("version", "state"), [("0.32.0", "ok"), ("0.99", "fail")])
def test_the_version_of_vllm(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, version: str, state: str
) -> None:
    assert of_vllm(subject, "vllm-version").state == "unknown"
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    assert of_vllm(subject, "vllm-version").state == state


def test_memory_that_a_killed_vllm_left(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "SHARED_MEMORY", tmp_path)
    assert of_vllm(subject, "vllm-memory").state == "ok"
    path = tmp_path / "vllm_offload_x.mmap"
    path.write_bytes(bytes(5000))
    assert of_vllm(subject, "vllm-memory").state == "warn"
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        assert of_vllm(subject, "vllm-memory").state == "ok"


def test_doctor_vllm_without_a_daemon(subject: Subject) -> None:
    ran = run_command(
        "--socket", subject.socket, "doctor", "vllm", "--store", subject.store, "--json"
    )
    found = {one["id"]: one["state"] for one in ran.json()["checks"]}  # type: ignore[attr-defined]
    assert found["vllm-daemon"] == "warn"
    assert ran.code == 0


def unit(
    load: str = "loaded", active: str = "active", file: str = "enabled", old: str = "no"
) -> str:
    return f"LoadState={load}\nActiveState={active}\nUnitFileState={file}\nNeedDaemonReload={old}\n"


@pytest.mark.parametrize(
    ("told", "state"),
    [
        (unit(), "ok"),
        (unit(load="not-found"), "ok"),
        (unit(load="bad-setting"), "fail"),
        (unit(active="failed"), "fail"),
        (unit(old="yes"), "warn"),
        (unit(file="disabled"), "warn"),
        (None, "unknown"),
    ],
)
def test_units(
    subject: Subject,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    told: str | None,
    state: str,
) -> None:
    """What a systemctl says that is not the real one."""
    stand_in = tmp_path / "bin" / "systemctl"
    stand_in.parent.mkdir()
    says = "exit 1" if told is None else f"cat <<'END'\n{told}END"
    stand_in.write_text(f"#!/bin/sh\n{says}\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(stand_in.parent), prepend=os.pathsep)
    monkeypatch.setattr(doctor, "SYSTEMD", tmp_path)
    assert dict(examine(subject))["units"].state == state
    monkeypatch.setattr(doctor, "SYSTEMD", tmp_path / "none")
    assert found(subject, "units").state == "ok"

"""The files of systemd/: valid, closed to the outside, alike where they should be, installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.command import COMMAND, run_command

ROOT = Path(__file__).parent.parent
SYSTEMD = ROOT / "systemd"
SERVICES = ("kvstore.service", "kvstore@.service")
SOCKETS = ("kvstore.socket", "kvstore@.socket", "kvstore-admin.socket")
TEMPLATE_ONLY = ("Description=", "RequiresMountsFor=", "Requires=", "StateDirectory=", "Also=")


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("no systemd-analyze")
    return subprocess.run(
        [tool, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )


def systemd_version() -> int:
    return int(analyze("--version").stdout.split()[1])


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """All units with the command of these tests, since systemd wants to see it."""
    folder = tmp_path / "units"
    shutil.copytree(SYSTEMD, folder)
    for name in SERVICES:
        text = (folder / name).read_text()
        assert text.count("ExecStart=kvstore ") == 1
        (folder / name).write_text(text.replace("ExecStart=kvstore ", f"ExecStart={COMMAND} "))
    return folder


def settings_of(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("name", [*SERVICES, *SOCKETS])
def test_a_unit_is_valid(units: Path, name: str) -> None:
    """An unknown key is only a line on stderr, with exit code 0."""
    done = analyze("verify", units / name.replace("@.", "@one."))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", SERVICES)
def test_a_unit_is_checked_for_what_it_says(units: Path, name: str) -> None:
    unit = units / name
    unit.write_text(unit.read_text().replace("WatchdogSec=", "WatchDogSec="))
    assert "WatchDogSec" in analyze("verify", units / name.replace("@.", "@one.")).stderr


@pytest.mark.parametrize("name", ["tcp.conf", "notify-reload.conf"])
def test_a_drop_in_is_valid(units: Path, name: str) -> None:
    if name == "notify-reload.conf" and systemd_version() < 253:
        pytest.skip("needs systemd 253")
    (units / "kvstore.service.d").mkdir()
    shutil.copy(units / name, units / "kvstore.service.d")
    done = analyze("verify", units / "kvstore.service")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_exposes_little(units: Path, name: str) -> None:
    """At most 1.0 of 10."""
    done = analyze("security", "--offline=yes", "--threshold=10", "--no-pager", units / name)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_sees_the_boot_id_and_the_users_of_its_clients(name: str) -> None:
    told = settings_of(SYSTEMD / name)
    assert not [line for line in told if line.startswith(("ProcSubset=", "PrivateUsers="))]


@pytest.mark.parametrize("kind", ["service", "socket"])
def test_one_store_and_one_of_several_are_served_alike(kind: str) -> None:
    one, several = (settings_of(SYSTEMD / f"kvstore{at}.{kind}") for at in ("", "@"))
    assert len(one) == len(several)
    differ = [(a, b) for a, b in zip(one, several, strict=True) if a != b]
    assert all("%i" in b for _, b in differ), differ
    if kind == "service":
        names = {a.partition("=")[0] + "=" for a, _ in differ}
        assert names == {*TEMPLATE_ONLY, "Environment="}


def test_the_page_has_the_exit_codes_of_serve() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    told = dict(re.findall(r"^\| (\d+) \|.*\| (yes|no)\b", page, re.M))
    shown = run_command("serve", "--help").text.split("EXIT STATUS")[1]
    assert list(told) == re.findall(r"^ +(\d+) ", shown, re.M)
    unit = (SYSTEMD / "kvstore.service").read_text()
    final = re.findall(r"^RestartPreventExitStatus=(.*)", unit, re.M)[0].split()
    assert {code for code, again in told.items() if again == "no"} == {"0", *final}


def test_the_packaged_configuration_never_makes_a_store(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    environ = {"STATE_DIRECTORY": str(tmp_path / "store")}
    ran = run_command("--config", SYSTEMD / "kvstore.toml", "serve", env=environ)
    assert ran.code == 10
    assert "kvstore create" in ran.stderr
    assert list((tmp_path / "store").iterdir()) == []


# -- make install ---------------------------------------------------------------------------------


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", *arguments],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_a_prefix_where_systemd_does_not_look_is_refused(tmp_path: Path) -> None:
    done = make("install", "PREFIX=/opt/kvstore", f"DESTDIR={tmp_path}")
    assert done.returncode != 0
    assert "PREFIX is /opt/kvstore" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_python_that_no_service_sees_is_refused(tmp_path: Path) -> None:
    done = make("install", f"DESTDIR={tmp_path}", "FIND_PYTHON=echo /root/python")
    assert done.returncode != 0
    assert "no Python 3.11 or later that a service may use" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_outlives_an_uninstall(tmp_path: Path) -> None:
    local = tmp_path / "usr" / "local"
    ours = ["bin/kvstore", "lib/kvstore/pyvenv.cfg", "share/kvstore/tcp.conf"]
    ours += ["lib/sysusers.d/kvstore.conf", "lib/tmpfiles.d/kvstore.conf"]
    ours += [f"lib/systemd/system/{name}" for name in (*SERVICES, *SOCKETS)]
    others = [tmp_path / "etc" / "kvstore" / "kvstore.toml", local / "lib/systemd/system/x.service"]
    for path in (*(local / name for name in ours), *others):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert make("uninstall", f"DESTDIR={tmp_path}").returncode == 0
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == set(others)

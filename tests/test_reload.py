"""New settings for a daemon that serves: taken over as a whole, or not at all and told."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from kvstore import config
from kvstore.client import Client
from kvstore.opening import Options
from kvstore.server import ServerOptions
from tests.command import Daemon, run_command
from tests.stores import block, key
from tests.talk import eventually
from tests.test_notify import Ear

START = """
capacity = "256MiB"
min_free = 0
memory = "64MiB"
"""
DESIGN = Path(__file__).parent.parent / "docs" / "design.md"


class Configured(Daemon):
    """A daemon whose settings are in a file."""

    @property
    def file(self) -> Path:
        return self.folder / "etc" / "kvstore.toml"

    def write(self, text: str) -> None:
        """Give the file another content as editors do: beside it, then renamed."""
        beside = self.file.with_name(".kvstore.toml.swp")
        beside.write_text(text)
        os.replace(beside, self.file)

    def reload(self, text: str) -> None:
        """Give the file another content and have it read at once."""
        self.write(text)
        os.kill(self.pid, signal.SIGHUP)

    def status(self) -> dict[str, object]:
        with Client(str(self.socket)) as client:
            return dict(client.status())

    def problems(self) -> str:
        return str(self.status()["problems"])

    def wait_for(self, name: str, value: object) -> None:
        assert eventually(lambda: self.status()[name] == value, 10), (self.status(), self.log)


def configured(folder: Path, text: str = START) -> Configured:
    daemon = Configured(folder, ())
    daemon.file.parent.mkdir()
    daemon.file.write_text(text)
    daemon.options = ("--config", str(daemon.file))
    return daemon


def end(daemon: Daemon) -> None:
    if daemon.process is not None:
        daemon.process.kill()
        daemon.process.wait()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Configured]:
    daemon = configured(tmp_path_factory.mktemp("reload"))
    try:
        daemon.start()
        yield daemon
    finally:
        end(daemon)


@pytest.fixture
def daemon(shared: Configured) -> Iterator[Configured]:
    """The daemon, with the file as it began and blocks that must be there at the end."""
    shared.reload(START)
    shared.wait_for("state", "ready")
    shared.wait_for("capacity_bytes", 256 << 20)
    pid = shared.pid
    with Client(str(shared.socket)) as client:
        client.put_many([key(n) for n in range(20)], [block(n) for n in range(20)])
        yield shared
        assert client.status()["pid"] == pid  # the same connection, too
        assert client.contains([key(n) for n in range(20)]).all()


# -- what is taken over ---------------------------------------------------------------------------


def test_a_changed_file_counts_once_it_is_left_alone(daemon: Configured) -> None:
    daemon.write(START.replace("min_free = 0", 'min_free = "5MiB"'))
    before = time.monotonic()
    daemon.wait_for("min_free_bytes", 5 << 20)
    assert time.monotonic() - before > 0.8
    assert f"min_free = 5 MiB ({daemon.file})" in daemon.log


def test_a_smaller_capacity_evicts_and_is_kept(daemon: Configured) -> None:
    with Client(str(daemon.socket)) as client:
        for start in range(100, 200, 10):
            client.put_many(
                [key(n) for n in range(start, start + 10)],
                [block(n, 1 << 20) for n in range(start, start + 10)],
                ack="written",
            )
        client.contains([key(n) for n in range(20)], lease=60)
        daemon.reload(START.replace("256MiB", "64MiB"))
        daemon.wait_for("capacity_bytes", 64 << 20)
        assert "to fit the capacity" in daemon.log
        assert eventually(lambda: int(str(client.status()["used_bytes"])) <= 64 << 20, 10)
    assert '"capacity_bytes": 67108864' in (daemon.store / "STORE.json").read_text()


def test_limits_and_the_log_change_too(daemon: Configured) -> None:
    daemon.reload(START + "max_clients = 1\n[log]\nlevel = 'debug'\nformat = 'json'\n")
    assert eventually(lambda: '"message": "max_clients = 1 ' in daemon.log, 10)
    daemon.run("status")
    assert '"message": "refusing a client: 1 are connected"' in daemon.log
    daemon.file.write_text(START)
    assert eventually(lambda: daemon.log.count("max_clients = 256 (default)") == 2, 10)


def test_what_needs_a_restart_is_named(daemon: Configured) -> None:
    daemon.reload(START.replace("64MiB", "65MiB") + "workers = 2\nmax_requests = 9\n")
    daemon.wait_for("restart_settings", ["memory", "workers"])
    assert "restart to apply: memory, workers\n" in daemon.run("status").text
    assert f"needs a restart: workers = 2 ({daemon.file})" in daemon.log
    assert f"info: max_requests = 9 ({daemon.file})" in daemon.log
    assert daemon.status()["state"] == "ready"
    daemon.reload(START)
    daemon.wait_for("restart_settings", [])


def test_an_engine_that_cannot_grow_waits_for_a_restart(tmp_path: Path) -> None:
    daemon = configured(tmp_path, START + 'engine = "lmdb"\n')
    try:
        daemon.start()
        daemon.reload(START.replace("256MiB", "300MiB") + 'engine = "lmdb"\n')
        daemon.wait_for("restart_settings", ["capacity"])
        assert daemon.status()["capacity_bytes"] == 256 << 20
        assert "needs a restart: capacity = 300 MiB" in daemon.log
    finally:
        end(daemon)


# -- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('capacity = "1GiB', "not valid TOML"),
        ('capacity = "1GB"', "setting capacity"),
        ('capacty = "1GiB"', "'capacty'"),
        ("max_clients = 7\nmemory = '900TiB'", "above 80 %"),
        ("max_clients = 7\nadmin_group = 'nobody-has-it'", "no group"),
        ("max_clients = 7\nlisten = 'tcp://0.0.0.0:1'", "other machines"),
    ],
)
def test_an_invalid_file_changes_nothing_until_it_is_mended(
    daemon: Configured, text: str, says: str
) -> None:
    daemon.reload(f"min_free = '3MiB'\n{text}")
    daemon.wait_for("state", "degraded")
    assert "invalid configuration on disk: " in daemon.problems()
    assert says in daemon.problems()
    assert daemon.run("status").code == 1
    assert daemon.status()["min_free_bytes"] == 0
    daemon.reload(START)
    daemon.wait_for("state", "ready")
    assert daemon.problems() == "[]"


def test_a_mended_file_is_noticed(daemon: Configured) -> None:
    for text, state in (("=", "degraded"), (START, "ready")):
        daemon.write(text)
        daemon.wait_for("state", state)


def test_a_half_written_file_is_not_read(daemon: Configured) -> None:
    """A slow editor: valid so far at each moment, and whole only at the end."""
    before = daemon.log.count("the configuration was read")
    with daemon.file.open("w") as file:
        for line in [*START.splitlines(), "max_requests = 5", "max_clients = 50"]:
            file.write(line + "\n")
            file.flush()
            time.sleep(0.4)
    assert eventually(lambda: "max_clients = 50 " in daemon.log, 10)
    assert daemon.log.count("the configuration was read") == before + 1


def test_a_file_that_is_removed_keeps_what_it_said(daemon: Configured) -> None:
    daemon.reload(START.replace("min_free = 0", 'min_free = "7MiB"'))
    daemon.wait_for("min_free_bytes", 7 << 20)
    daemon.file.unlink()
    daemon.wait_for("state", "degraded")
    assert f"{daemon.file} " in daemon.problems()
    assert daemon.status()["min_free_bytes"] == 7 << 20


def test_a_file_that_cannot_be_read_keeps_what_it_said(daemon: Configured) -> None:
    daemon.file.unlink()
    daemon.file.mkdir()
    daemon.wait_for("state", "degraded")
    assert "cannot be read: Is a directory" in daemon.problems()
    daemon.file.rmdir()


def test_a_folder_that_comes_back_is_read_on_a_signal(daemon: Configured) -> None:
    """Nobody watches the new one; that is what the signal is for."""
    shutil.rmtree(daemon.file.parent)
    daemon.wait_for("state", "degraded")
    daemon.file.parent.mkdir()
    daemon.file.write_text(START)
    os.kill(daemon.pid, signal.SIGHUP)
    daemon.wait_for("state", "ready")


# -- signals --------------------------------------------------------------------------------------


def test_a_reload_is_told_to_the_service_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ear = Ear(str(tmp_path / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", ear.name)
    daemon = configured(tmp_path)
    try:
        daemon.launch()
        ear.until("READY")
        for text, state in (("x", "degraded: invalid configuration on disk"), (START, "ready: 0")):
            daemon.file.write_text(text)
            before = time.monotonic()
            os.kill(daemon.pid, signal.SIGHUP)
            since = int(ear.until("RELOADING", "1")["MONOTONIC_USEC"]) / 1e6
            assert before <= since <= time.monotonic()
            assert ear.until("READY", "1")["STATUS"].startswith(state)
        assert daemon.stop() == 0
    finally:
        end(daemon)
        ear.close()


def test_signals_at_any_moment_end_nothing(tmp_path: Path) -> None:
    """From the first moment on that a daemon can be told of, through a drain."""
    daemon = configured(tmp_path)
    try:
        daemon.launch()
        assert eventually(lambda: daemon.socket.exists(), 20)
        for _ in range(20):
            os.kill(daemon.pid, signal.SIGHUP)
            time.sleep(0.02)
        daemon.wait_for("state", "ready")
        with Client(str(daemon.socket)) as client:
            for number in range(50):
                os.kill(daemon.pid, signal.SIGHUP)
                assert client.put(key(number), block(number)) == "stored"
        os.kill(daemon.pid, signal.SIGHUP)
        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGTERM)
        os.kill(daemon.pid, signal.SIGHUP)
        assert daemon.process.wait(20) == 0
        assert "Traceback" not in daemon.log
        daemon.start()
        assert daemon.status()["blocks"] == 50
    finally:
        end(daemon)


# -- the table ------------------------------------------------------------------------------------


def test_every_live_setting_is_one_that_the_daemon_takes_over() -> None:
    taken = {field.name for options in (Options, ServerOptions) for field in fields(options)}
    assert set(config._FIELDS) >= config.LIVE
    assert config.LIVE - taken == {"log_level", "log_format"}


def test_the_page_tells_what_needs_a_restart() -> None:
    table = DESIGN.read_text().split("| setting | default | change |")[1].split("\n\n")[0]
    told: dict[str, str] = {}
    for names, change in re.findall(r"^\| (.*?) \|.*\| (\w+) \|$", table, re.M):
        told |= dict.fromkeys(re.findall(r"`([\w.]+)`", names), change)
    shown = run_command("config", "show", "--json").json()["settings"]
    assert isinstance(shown, list)
    assert told == {one["name"]: one["change"] for one in shown}
    assert "live" in run_command("config", "show", "--origin").text

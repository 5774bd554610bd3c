"""What the service manager hears of a daemon, whatever the disk does."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvstore.client import Client
from kvstore.notify import DRAIN_GRACE_SECONDS, Supervisor, describe
from kvstore.sockets import unix_listener
from tests.command import Daemon
from tests.stores import block, key
from tests.talk import Bare

SILENCE = 1.0
"""Seconds after which the fake service manager would take the daemon for dead."""
READY = {"state": "ready", "blocks": 1234, "live_bytes": 5 << 30, "capacity_bytes": 9 << 30}


class Ear:
    """A service manager that only listens. A name that begins with ``@`` is abstract."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind("\0" + name[1:] if name.startswith("@") else name)
        self.heard: list[dict[str, str]] = []

    def close(self) -> None:
        self._sock.close()

    def listen(self, seconds: float) -> list[dict[str, str]]:
        """Take in what comes for a while, and return just that."""
        before, limit = len(self.heard), time.monotonic() + seconds
        while (left := limit - time.monotonic()) > 0:
            self._take(left)
        return self.heard[before:]

    def until(self, name: str, value: str = "", seconds: float = 20) -> dict[str, str]:
        """Take in messages up to one with this field, whose value begins so."""
        limit = time.monotonic() + seconds
        while (left := limit - time.monotonic()) > 0:
            heard = self.heard[-1] if self._take(left) else {}
            if name in heard and heard[name].startswith(value):
                return heard
        raise AssertionError(f"no {name}={value}... among {self.heard}")

    def values(self, name: str) -> list[str]:
        return [message[name] for message in self.heard if name in message]

    def _take(self, seconds: float) -> bool:
        self._sock.settimeout(seconds)
        with suppress(TimeoutError):
            lines = self._sock.recv(1 << 16).decode().split("\n")
            self.heard.append(dict(line.split("=", 1) for line in lines))
            return True
        return False


@pytest.fixture
def ear(tmp_path: Path) -> Iterator[Ear]:
    opened = Ear(str(tmp_path / "notify"))
    yield opened
    opened.close()


@pytest.fixture
def service(tmp_path: Path, ear: Ear, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bare]:
    """A daemon with a gate, not started yet, under a watchdog that listens."""
    monkeypatch.setenv("NOTIFY_SOCKET", ear.name)
    monkeypatch.setenv("WATCHDOG_USEC", str(int(SILENCE * 1e6)))
    daemon = Bare(tmp_path)
    yield daemon
    daemon.open()
    if daemon.process is not None:
        daemon.process.kill()
        daemon.process.wait()


def assert_alive(heard: list[dict[str, str]], seconds: float) -> None:
    """No silence among messages of so many seconds would have got the daemon killed."""
    assert sum("WATCHDOG" in message for message in heard) >= seconds / SILENCE, heard


# -- the messages ---------------------------------------------------------------------------------


@pytest.mark.parametrize("abstract", [False, True])
def test_messages_reach_both_kinds_of_address(tmp_path: Path, abstract: bool) -> None:
    ear = Ear(f"@kvstore-test-{os.getpid()}" if abstract else str(tmp_path / "notify"))
    environ = {"NOTIFY_SOCKET": ear.name, "WATCHDOG_USEC": "30000000", "HOME": "/"}
    supervisor = Supervisor(environ)
    assert environ == {"HOME": "/"}
    supervisor.ready({**READY, "problems": []})
    supervisor.sign()
    supervisor.sign()
    supervisor.stopping(60)
    supervisor.close()
    supervisor.close()
    ear.listen(0.1)
    ear.close()
    assert ear.heard == [
        {"READY": "1", "STATUS": "ready: 1,234 blocks, 5,120 of 9,216 MiB"},
        {"WATCHDOG": "1"},
        {
            "STOPPING": "1",
            "STATUS": "draining",
            "EXTEND_TIMEOUT_USEC": str(int((60 + DRAIN_GRACE_SECONDS) * 1e6)),
        },
        {"STATUS": "stopped"},
    ]


@pytest.mark.parametrize("address", ["", "vsock:2:1234", "/nowhere/notify", "@nobody-listens"])
def test_nobody_who_listens_is_no_error(address: str, caplog: pytest.LogCaptureFixture) -> None:
    supervisor = Supervisor({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1"})
    for _ in range(3):
        supervisor.ready({**READY, "problems": []})
        supervisor.sign()
    supervisor.close()
    assert len(caplog.records) == (1 if address else 0)


def test_a_supervisor_that_is_slow_misses_nothing_that_counts(ear: Ear) -> None:
    supervisor = Supervisor({"NOTIFY_SOCKET": ear.name})
    for number in range(2000):  # far more than its queue takes
        supervisor.draining(number, 0)
    supervisor.ready({**READY, "problems": []})
    ear.listen(0.2)
    assert not ear.values("READY")
    supervisor.draining(7, 1)
    assert ear.until("READY")["STATUS"] == "draining (blocks to write: 7, clients: 1)"
    supervisor.close()


def test_a_problem_is_one_line_and_no_other_field(ear: Ear) -> None:
    status = {**READY, "state": "degraded", "problems": ["/a\nREADY=1\udcff is full", "b", "c"]}
    assert describe(status) == "degraded: /a\nREADY=1\udcff is full (and 2 more)"
    supervisor = Supervisor({"NOTIFY_SOCKET": ear.name})
    supervisor.tell(lambda: status)
    supervisor.tell(lambda: status)
    ear.listen(0.1)
    supervisor.close()
    assert ear.heard == [{"STATUS": "degraded: /a READY=1? is full (and 2 more)"}]


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}, True),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getppid())}, False),
        ({"WATCHDOG_USEC": "0"}, False),
        ({"WATCHDOG_USEC": "soon"}, False),
        ({}, False),
    ],
)
def test_signs_are_given_only_where_they_are_wanted(
    ear: Ear, environ: dict[str, str], wanted: bool
) -> None:
    supervisor = Supervisor({"NOTIFY_SOCKET": ear.name, **environ})
    supervisor.sign()
    supervisor.close()
    ear.listen(0.1)
    assert ear.values("WATCHDOG") == (["1"] if wanted else [])


# -- a daemon's life ------------------------------------------------------------------------------


def test_a_life_is_told_in_order(service: Bare, ear: Ear) -> None:
    service.launch()
    assert ear.until("READY")["STATUS"] == "ready: 0 blocks, 0 of 256 MiB"
    with Client(str(service.socket)) as client:  # ready means that nobody has to wait
        assert client.put(key(1), b"x") == "stored"
    assert_alive(ear.listen(3), 3)
    assert service.stop() == 0
    ear.listen(0.1)
    told = [name for message in ear.heard for name in message if name in ("READY", "STOPPING")]
    assert told == ["READY", "STOPPING"]
    assert ear.values("STATUS")[-2:] == ["draining (blocks to write: 0, clients: 0)", "stopped"]


def test_ready_is_told_when_the_recovery_is_over(service: Bare, ear: Ear) -> None:
    service.launch()
    ear.until("READY")
    with Client(str(service.socket)) as client:
        client.put_many([key(n) for n in range(300)], [block(n) for n in range(300)], ack="written")
    service.stop(signal.SIGKILL)
    for journal in (service.store / "blocks").glob("journal.*"):
        journal.unlink()
    service.shut()
    ear.heard.clear()
    service.launch()
    ear.until("STATUS", "recovering: scanning, 300 records scanned")
    heard = ear.listen(3)
    assert len([one for one in heard if int(one["EXTEND_TIMEOUT_USEC"]) >= 60e6]) >= 2
    assert not ear.values("READY")
    service.open()
    assert ear.until("READY")["STATUS"] == "ready: 300 blocks, 2 of 256 MiB"
    assert service.stop() == 0


def test_a_recovery_that_is_told_to_stop_is_not_extended(service: Bare, ear: Ear) -> None:
    service.launch()
    ear.until("READY")
    service.stop(signal.SIGKILL)
    for journal in (service.store / "blocks").glob("journal.*"):
        journal.unlink()
    service.shut()
    service.launch()
    ear.until("STATUS", "recovering: scanning")
    os.kill(service.pid, signal.SIGTERM)
    ear.listen(0.5)
    assert not [one for one in ear.listen(2) if "EXTEND_TIMEOUT_USEC" in one]
    service.open()
    assert service.stop() in (0, 128 + signal.SIGTERM)


def test_a_disk_that_hangs_does_not_get_the_daemon_killed(service: Bare, ear: Ear) -> None:
    """The only worker hangs: nothing that goes to a worker comes back."""
    service.settings = {"workers": 1}
    service.launch()
    ear.until("READY")
    with Client(str(service.socket)) as client:
        service.shut()
        client.put(key(1), block(1))
        ear.listen(1)
        assert service.inside()
        assert_alive(ear.listen(3), 3)
        service.open()
        client.flush()


def test_a_journal_that_hangs_keeps_neither_status_nor_memory_waiting(
    service: Bare, ear: Ear
) -> None:
    service.launch()
    ear.until("READY")
    with Client(str(service.socket), timeout=2.0) as client:
        client.put(key(1), block(1), ack="durable")
        (service.folder / "hung").touch()
        client.put(key(2), block(2))  # accepted: the writer waits for the journal
        for _ in range(8):  # each leaves something to append
            assert client.get(key(1)) == block(1)
            assert "ready" in str(client.status()["state"])
            assert_alive(ear.listen(SILENCE), SILENCE)
        (service.folder / "hung").unlink()
        client.flush()


def test_an_event_loop_that_hangs_gives_no_signs(service: Bare, ear: Ear) -> None:
    service.launch()
    ear.until("READY")
    assert_alive(ear.listen(2), 2)
    (service.folder / "frozen").touch()
    ear.listen(1)
    assert ear.listen(2 * SILENCE) == []
    # What the service manager does then leaves the place in the log.
    assert service.stop(signal.SIGABRT) == -signal.SIGABRT
    assert "in wait_and_tick" in service.log


def test_a_drain_asks_for_its_time_and_tells_what_is_left(service: Bare, ear: Ear) -> None:
    service.settings = {"drain_timeout": 400.0}
    service.launch()
    ear.until("READY")
    service.shut()
    with Client(str(service.socket)) as client:
        client.put_many([key(n) for n in range(5)], [block(n) for n in range(5)])
    os.kill(service.pid, signal.SIGTERM)
    assert int(ear.until("STOPPING")["EXTEND_TIMEOUT_USEC"]) > 400e6
    ear.until("STATUS", "draining (blocks to write: 5,")
    assert_alive(ear.listen(3), 3)
    service.open()
    assert service.process is not None
    assert service.process.wait(20) == 0


def test_a_daemon_without_a_supervisor_opens_no_socket_for_it(daemon: Daemon) -> None:
    links = [os.readlink(entry) for entry in Path(f"/proc/{daemon.pid}/fd").iterdir()]
    with_supervisor = [link for link in links if link.startswith("socket:")]
    assert len(with_supervisor) <= 3  # the listener and asyncio's own pair


# -- under a unit that forbids much ----------------------------------------------------------------


def test_a_group_that_is_right_is_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unit forbids to change owners."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chown", refuse)
    with unix_listener(tmp_path / "kv.sock", tmp_path.stat().st_gid):
        assert (tmp_path / "kv.sock").stat().st_mode & 0o777 == 0o660

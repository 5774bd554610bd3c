"""The service under a real systemd: its life, and what goes wrong in it.

Installed as docs/operations.md says. ``make boot`` shows every command with its answer.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.machine import Machine
from tests.talk import eventually

PYTHON = "/usr/local/lib/kvstore/bin/python"
SOCKET = "/run/kvstore/kvstore.sock"
ENOUGH = "/run/enough"
"""While this is not there, clients knock and the store is being checked."""
KNOCKING = f"""
import collections, json, pathlib, sys, time
from kvstore.client import Client
from kvstore.errors import KVStoreError
answers = collections.Counter()
while not pathlib.Path("{ENOUGH}").exists():
    try:
        with Client("{SOCKET}", timeout=float(sys.argv[1])) as client:
            answers["hit" if client.get(bytes.fromhex("00ff")) == b"x" else "miss"] += 1
    except KVStoreError as error:
        answers[type(error).__name__] += 1
    time.sleep(0.02)
print(json.dumps(answers))
"""
OPEN_PRIVATE = f"""
import sys
from kvstore.client import Client
with Client("{SOCKET}") as client:
    client.namespace({{"name": "mine", "private": 1}}, create=sys.argv[1] == "make")
"""

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture(scope="module")
def with_a_block(machine: Machine) -> Machine:
    machine.run("systemctl start kvstore; printf x | kvstore put 00ff -i - --durable")
    return machine


@pytest.fixture
def service(with_a_block: Machine) -> Iterator[Machine]:
    """The machine with its service running, which holds a block."""
    with_a_block.run("systemctl reset-failed 'kvstore*'; systemctl start kvstore")
    yield with_a_block
    with_a_block.run(
        f"rm -rf {ENOUGH} /run/systemd/system/kvstore.service.d; systemctl daemon-reload"
    )


def knock(machine: Machine, patience: float = 0.5) -> subprocess.Popen[str]:
    """Have a client ask for the block 00ff again and again, each time with so much patience."""
    (machine.root / "opt" / "knock.py").write_text(KNOCKING)
    return machine.begin(f"{PYTHON} /opt/knock.py {patience}")


def answers(machine: Machine, knocking: subprocess.Popen[str]) -> dict[str, int]:
    """End the client that knocks and return what it was answered, by kind."""
    machine.run(f"touch {ENOUGH}")
    out, err = knocking.communicate(timeout=120)
    print(f"the client that knocks: {out}{err}")
    counted: dict[str, int] = json.loads(out)
    return counted


def drop_in(machine: Machine, settings: str) -> None:
    """Change the unit until the end of the test."""
    folder = "/run/systemd/system/kvstore.service.d"
    lines = settings.replace("\n", "\\n")
    machine.run(
        f"mkdir -p {folder}; printf '{lines}\\n' >{folder}/test.conf; systemctl daemon-reload"
    )


# -- as installed ---------------------------------------------------------------------------------


def test_the_units_are_valid_as_installed(machine: Machine) -> None:
    folder = "/usr/local/lib/systemd/system"
    found = machine.run(
        f"cd {folder}; systemd-analyze verify {folder}/kvstore.service {folder}/kvstore.socket "
        f"{folder}/kvstore@one.service {folder}/kvstore@one.socket {folder}/kvstore-admin.socket"
    )
    assert (found.stdout, found.stderr) == ("", "")


def test_the_service_is_ready_and_keeps_others_out(service: Machine) -> None:
    assert service.show("ActiveState") == "active"
    assert service.show("StatusText").startswith("ready: ")
    assert service.run(f"stat -c '%A %U %G' {SOCKET}").stdout.split()[0::2] == [
        "srw-rw----",
        "kvstore",
    ]
    status = f"env KVSTORE_SOCKET={SOCKET} kvstore status"
    service.run(f"runuser -u alice -- {status}")
    assert "no permission" in service.run(f"runuser -u carol -- {status}", check=False).stderr


def test_clients_are_told_apart_by_their_user(service: Machine) -> None:
    """PrivateUsers=yes would show all of them as one."""
    (service.root / "opt" / "open_private.py").write_text(OPEN_PRIVATE)
    command = f"{PYTHON} /opt/open_private.py"
    service.run(f"runuser -u alice -- {command} make")
    service.run(f"runuser -u alice -- {command} open")
    refused = service.run(f"runuser -u bob -- {command} open", check=False)
    assert "UnknownNamespace" in refused.stderr


def test_the_service_reaches_nothing_but_its_store(service: Machine) -> None:
    """Seen from inside of it, with all that root may: nothing else can be written."""
    inside = f"nsenter -t {service.show('MainPID')} -m -n"
    service.run(f"{inside} touch /var/lib/kvstore/x; {inside} rm /var/lib/kvstore/x")
    for place in ("/etc/kvstore", "/usr/local/lib/kvstore", "/var", "/var/lib"):
        refused = service.run(f"{inside} touch {place}/x", check=False)
        assert "Read-only file system" in refused.stderr
    assert service.run(f"{inside} cat /proc/net/dev").stdout.count(":") == 1  # lo, and nothing else
    assert service.run(f"{inside} ls /root /home").stdout.split() == ["/home:", "/root:"]


# -- ends and beginnings --------------------------------------------------------------------------


def test_a_kill_is_followed_by_a_warm_restart_without_a_scan(service: Machine) -> None:
    before = int(service.show("NRestarts"))
    service.run("systemctl kill -s KILL --kill-who=main kvstore")
    assert service.run("kvstore get 00ff").stdout == "x"  # it waited at the socket
    assert service.show("NRestarts") == str(before + 1)
    assert service.shows("ActiveState", "active")
    assert "scanning the store" not in service.run("journalctl -u kvstore -o cat").stdout


def test_a_restart_turns_no_client_away(service: Machine) -> None:
    knocking = knock(service, patience=20)
    service.run("sleep 1; systemctl restart kvstore; systemctl restart kvstore; kvstore get 00ff")
    counted = answers(service, knocking)
    # Nobody listens for a while, and yet all are answered but who was connected at the end.
    assert counted.keys() <= {"hit", "DaemonUnavailable"}
    assert counted.get("DaemonUnavailable", 0) <= 2
    assert counted["hit"] > 2


def test_a_daemon_that_hangs_is_started_again_and_is_warm(service: Machine) -> None:
    drop_in(service, "[Service]\nWatchdogSec=2")
    service.run("systemctl restart kvstore")
    time.sleep(4)  # twice the time after which silence would be noticed
    before = int(service.show("NRestarts"))
    service.run("kill -STOP $(systemctl show -P MainPID kvstore)")
    assert service.shows("NRestarts", str(before + 1))
    assert service.run("kvstore get 00ff").stdout == "x"
    log = service.run("journalctl -u kvstore -o cat").stdout
    assert "Failed with result 'watchdog'" in log
    assert "(most recent call first)" in log  # where each thread was


def test_a_stop_writes_what_is_in_memory_only(service: Machine) -> None:
    service.run("printf y | kvstore put 00fe -i -; systemctl stop kvstore")
    assert (service.show("Result"), service.show("ExecMainStatus")) == ("success", "0")
    service.run("systemctl start kvstore")
    assert service.run("kvstore get 00fe").stdout == "y"


def test_stopping_the_socket_stops_all(service: Machine) -> None:
    service.run("systemctl stop kvstore.socket")
    assert service.show("ActiveState") == "inactive"
    assert service.run("kvstore get 00ff", check=False).returncode == 12
    service.run("kvstore fsck /var/lib/kvstore; systemctl start kvstore")
    assert service.run("kvstore get 00ff").stdout == "x"


def test_clients_knock_while_the_store_is_checked(service: Machine) -> None:
    """They start a daemon that cannot have its store: it waits, and the socket stays open."""
    starts = service.show("NRestarts")
    # It gets the lock as soon as the daemon lets go of it, and keeps it for a while.
    checking = service.begin(
        "flock --shared /var/lib/kvstore bash -c "
        f"'kvstore fsck /var/lib/kvstore; until test -e {ENOUGH}; do sleep 0.1; done'"
    )
    knocking = knock(service)
    service.run("systemctl stop kvstore")
    assert service.shows("StatusText", "recovering: the store at /var/lib/kvstore is in use by")
    assert "in use by process" in service.run("kvstore status", check=False).stdout
    counted = answers(service, knocking)
    out, err = checking.communicate(timeout=60)
    print(out, err)
    assert checking.returncode == 0
    assert service.run("kvstore get 00ff").stdout == "x"
    assert "DaemonUnavailable" in counted
    assert counted.keys() <= {"hit", "DaemonUnavailable", "DeadlineExceeded"}
    assert service.show("ActiveState", "kvstore.socket") == "active"
    assert service.show("NRestarts") == starts


# -- configuration --------------------------------------------------------------------------------


@pytest.fixture
def spoiled(service: Machine) -> Iterator[Machine]:
    """The machine with its service stopped, and a configuration that does not hold."""
    file = "/etc/kvstore/kvstore.toml"
    service.run(f"systemctl stop kvstore; cp {file} /opt/saved; echo 'capacity = 1' >>{file}")
    yield service
    service.run(f"cp /opt/saved {file}")


def test_a_start_that_cannot_succeed_is_not_repeated(spoiled: Machine) -> None:
    assert spoiled.run("systemctl start kvstore", check=False).returncode != 0
    time.sleep(1.5)  # more than RestartSec
    assert spoiled.show("ExecMainStatus") == "13"
    assert (spoiled.show("ActiveState"), spoiled.show("NRestarts")) == ("failed", "0")


def test_clients_who_knock_do_not_make_it_loop(spoiled: Machine) -> None:
    """Five starts, then the socket closes; after mending one start brings all of it back."""
    begun = spoiled.run("date '+%F %T.%N'").stdout.strip()
    knocking = knock(spoiled)
    assert spoiled.shows("Result", "service-start-limit-hit", "kvstore.socket")
    counted = answers(spoiled, knocking)
    assert counted.keys() <= {"DaemonUnavailable", "DeadlineExceeded"}
    log = spoiled.run(f"journalctl -u kvstore -o cat --since '{begun}'").stdout
    assert log.count("Main process exited, code=exited, status=13") <= 5
    spoiled.run("cp /opt/saved /etc/kvstore/kvstore.toml")
    spoiled.run("systemctl reset-failed kvstore kvstore.socket; systemctl start kvstore")
    assert spoiled.run("kvstore get 00ff").stdout == "x"


def test_a_reload_changes_settings_and_drops_no_client(service: Machine) -> None:
    file, pid = "/etc/kvstore/kvstore.toml", service.show("MainPID")
    knocking = knock(service)
    service.run(f"cp {file} /opt/saved; echo 'capacity = \"3GiB\"' >>{file}")
    service.run("systemctl reload kvstore")
    wanted = f'"capacity_bytes": {3 << 30}'
    assert eventually(lambda: wanted in service.run("kvstore status --json").stdout)
    service.run(f"echo 'capacity = 1' >>{file}; systemctl reload kvstore")
    assert service.shows("StatusText", "degraded: ")
    service.run(f"cp /opt/saved {file}; systemctl reload kvstore")
    assert service.shows("StatusText", "ready: ")
    assert answers(service, knocking).keys() == {"hit"}
    assert service.show("MainPID") == pid


def test_a_file_that_is_dropped_is_taken_in(service: Machine) -> None:
    dropped, socket = "/var/lib/kvstore/incoming/a.kvb", f"KVSTORE_SOCKET={SOCKET}"
    service.run(f"runuser -u kvstore -- env {socket} kvstore get 00ff --record -o {dropped}")
    assert eventually(lambda: service.run(f"test -e {dropped}", check=False).returncode == 1, 20)
    assert '"present": 1' in service.run("kvstore status --json").stdout


# -- monitoring -----------------------------------------------------------------------------------


def answered(machine: Machine, path: str) -> str:
    """Return what monitoring is answered; nothing if nobody does."""
    show = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())"
    ask = f"{PYTHON} -c '{show}' http://127.0.0.1:9470{path}"
    return machine.run(f"{ask} 2>/dev/null | head -c 1500", check=False).stdout


def test_monitoring_is_off_until_its_socket_is_enabled(service: Machine) -> None:
    assert not answered(service, "/metrics")
    service.run("systemctl enable kvstore-admin.socket; systemctl restart kvstore")
    assert eventually(lambda: answered(service, "/readyz"))
    assert "kvstore_blocks" in answered(service, "/metrics")
    service.run("systemctl kill -s KILL --kill-who=main kvstore")
    assert service.run("kvstore get 00ff").stdout == "x"
    assert answered(service, "/healthz")
    service.run("systemctl disable --now kvstore-admin.socket; systemctl restart kvstore")
    assert not answered(service, "/metrics")

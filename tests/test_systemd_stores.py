"""Several stores under a real systemd, one of each engine, on a disk that may hang."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

from tests.machine import DISK, ROOT, Machine

LONG = os.environ.get("PROMISES") == "long"
STALL, WATCHDOG = (60, 30) if LONG else (5, 2)
"""Seconds for which the disk hangs, and after which a silent daemon is ended: more than twice."""
ENGINES = ("filesystem", "superblock", "mmap", "lmdb", "leveldb", "sqlite", "rocksdb")
PYTHON = "/usr/local/lib/kvstore/bin/python"
CONFIGURATION = 'create = "never"\nstore = "{store}"\nio = "{io}"\nmemory = "16MiB"\nmin_free = 0\n'
DROP_IN = f"""[Unit]
RequiresMountsFor={DISK}
[Service]
ReadWritePaths={DISK}
WatchdogSec={WATCHDOG}
"""
BLOCKS = """
import hashlib, sys
from kvstore.client import Client
act, names = sys.argv[1], sys.argv[2:]
keys = [bytes([n]) * 32 for n in range(8)]
for name in names:
    blocks = [hashlib.shake_128(name.encode() + key).digest(200_000) for key in keys]
    with Client(f"/run/kvstore/{name}.sock") as client:
        if act == "put":
            client.put_many(keys, blocks, ack="durable")
        found = [bytes(block) for block in client.get_many(keys)]
        assert found == blocks, f"{name}: not what was put"
    print(f"{name}: {act} 8 blocks, got 8 of them")
"""

FIRST, SECOND = "a1" * 32, "a2" * 32

pytestmark = [pytest.mark.root, pytest.mark.slow]


def unit(name: str) -> str:
    return f"kvstore@{name}"


@pytest.fixture(scope="module")
def stores(machine: Machine) -> Iterator[Machine]:
    """The machine with a store of each engine, all of them served."""
    (machine.root / "opt" / "blocks.py").write_text(BLOCKS)
    for engine in ENGINES:
        io = {"superblock": "direct", "mmap": "mmap"}.get(engine, "auto")
        text = CONFIGURATION.format(store=f"{DISK}/{engine}", io=io)
        (machine.root / "etc" / "kvstore" / f"{engine}.toml").write_text(text)
    folder = machine.root / "etc" / "systemd" / "system" / "kvstore@.service.d"
    folder.mkdir()
    (folder / "disk.conf").write_text(DROP_IN)
    machine.run(
        f"systemctl daemon-reload; chown kvstore:kvstore {DISK}\n"
        f"for name in {' '.join(ENGINES)}; do\n"
        f"runuser -u kvstore -- kvstore create {DISK}/$name --engine $name --capacity 64MiB\n"
        "done"
    )
    machine.run(f"systemctl start {' '.join(map(unit, ENGINES))}")
    yield machine
    machine.run(f"systemctl stop {' '.join(unit(name) + '.socket' for name in ENGINES)}")


def test_every_engine_works_under_the_hardening(stores: Machine) -> None:
    names, units = " ".join(ENGINES), " ".join(map(unit, ENGINES))
    stores.run(f"{PYTHON} /opt/blocks.py put {names}")
    stores.run(
        f"systemctl kill -s KILL --kill-who=main {units}; {PYTHON} /opt/blocks.py get {names}"
    )
    for name in ENGINES:
        assert (stores.show("NRestarts", unit(name)), stores.show("ActiveState", unit(name))) == (
            "1",
            "active",
        )


def test_stores_know_nothing_of_each_other(stores: Machine) -> None:
    one, other = (f"kvstore --socket /run/kvstore/{name}.sock" for name in ("sqlite", "lmdb"))
    stores.run(f"printf x | {one} put {FIRST} -i -")
    assert stores.run(f"{other} get {FIRST}", check=False).returncode == 4
    stores.run(f"systemctl stop {unit('lmdb')}.socket")
    assert stores.run(f"{one} get {FIRST}").stdout == "x"
    assert stores.run(f"{other} get {FIRST}", check=False).returncode == 12
    stores.run(f"systemctl start {unit('lmdb')}")


def test_a_store_has_metrics_of_its_own(stores: Machine) -> None:
    """By the commands of docs/operations.md."""
    page = (ROOT / "docs" / "operations.md").read_text()
    (commands,) = re.findall(r"^```\n(sed [^`]*kvstore-admin[^`]*)^```", page, re.M)
    stores.run(commands.replace("llama", "sqlite"))
    ask = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9471/metrics').read(300))"
    assert 'engine="sqlite"' in stores.run(f'{PYTHON} -c "{ask}"').stdout


def test_a_disk_that_hangs_does_not_get_the_daemon_killed(stores: Machine) -> None:
    """The next one would meet the same disk, and have lost what was in memory only."""
    command = "kvstore --socket /run/kvstore/filesystem.sock"
    stores.run(f"printf x | {command} put {FIRST} -i - --durable")
    pid = stores.show("MainPID", unit("filesystem"))
    with stores.frozen_disk():
        stores.run(f"printf y | {command} put {SECOND} -i -")
        stores.run(f"sleep {STALL}; {command} status")
        assert stores.run(f"{command} get {FIRST}").stdout == "x"
    stores.run(f"{command} flush")
    assert stores.show("MainPID", unit("filesystem")) == pid
    stores.run(f"systemctl kill -s KILL --kill-who=main {unit('filesystem')}")
    assert stores.run(f"{command} get {SECOND}").stdout == "y"


def test_a_store_without_a_configuration_is_not_served(stores: Machine) -> None:
    assert stores.run(f"systemctl start {unit('nobody')}", check=False).returncode != 0
    assert stores.show("ExecMainStatus", unit("nobody")) == "13"
    log = stores.run(f"journalctl -u {unit('nobody')} -o cat").stdout
    assert "/etc/kvstore/nobody.toml does not exist" in log
    stores.run(f"systemctl stop {unit('nobody')}.socket; systemctl reset-failed")

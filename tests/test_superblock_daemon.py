"""A daemon on the engine superblock: kills, crowds, and a great many small blocks.

With ``PROMISES=long``, as ``make promises`` sets it, at the size that the promise names.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.answers import BlockStatus
from kvstore.client import Client
from kvstore.errors import KVStoreError
from kvstore.layout import directory_bytes
from tests.command import Daemon
from tests.stores import MIB, block, key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("tidy")

LONG = os.environ.get("PROMISES") == "long"
MANY = 200_000 if LONG else 20_000
KILLS = 20 if LONG else 5
CAPACITY = 256 * MIB
SIZES = (1, 5000, 65_536, 147_456, 300_001, 589_824, 1_310_720)


@pytest.fixture(params=["superblock", "mmap"])
def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Daemon]:
    options = ("--engine", request.param, "--memory", "32MiB", "--min-free", "0")
    daemon = Daemon(tmp_path, (*options, "--capacity", str(CAPACITY)))
    try:
        yield daemon
    finally:
        if daemon.process is not None:
            daemon.process.kill()
            daemon.process.wait()


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


class Crowd:
    """Clients that put, get and delete; ``wrong`` names what must not happen."""

    def __init__(self, daemon: Daemon, clients: int, turn: int = 0) -> None:
        self._daemon = daemon
        self._first = turn * 100_000
        self._stop = threading.Event()
        self.wrong: list[str] = []
        self.refused: list[int] = []
        self.deleted: set[int] = set()
        self.put = 0
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(clients)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, who: int) -> None:
        rng = random.Random(who)
        try:
            with Client(str(self._daemon.socket), timeout=60) as client:
                number = who * 10_000_000 + self._first
                while not self._stop.is_set():
                    number = self._turn(client, rng, number)
        except KVStoreError:
            pass  # The daemon was killed.

    def _turn(self, client: Client, rng: random.Random, number: int) -> int:
        mine = range(number, number + rng.randrange(1, 9))
        statuses = client.put_many(
            [key(n) for n in mine], [block(n, size_of(n)) for n in mine], ack="written"
        )
        self.refused += [status for status in statuses.tolist() if status != BlockStatus.OK]
        self.put += len(mine)
        asked = [rng.randrange(max(0, number - 300), mine.stop) for _ in range(8)]
        for n, found in zip(asked, client.get_many([key(n) for n in asked]), strict=True):
            if found is not None and found != block(n, size_of(n)):
                self.wrong.append(f"block {n} has other bytes")
            if found is not None and n in self.deleted:
                self.wrong.append(f"block {n} came back")
        if rng.random() < 0.3:
            victim = rng.choice(asked)
            client.delete([key(victim)])
            self.deleted.add(victim)
        return mine.stop


def test_a_crowd_on_a_full_store(daemon: Daemon) -> None:
    """Several times the capacity passes through by four clients at once: no put fails."""
    daemon.start()
    crowd = Crowd(daemon, 4)
    time.sleep(60 if LONG else 12)
    crowd.end()
    assert not crowd.wrong
    assert set(crowd.refused) <= {BlockStatus.ALREADY_PRESENT}
    status = daemon.status()
    assert status["state"] == "ready"
    assert status["corrupt_blocks"] == status["stale_blocks"] == status["missing_blocks"] == 0
    assert int(str(status["evictions"])) > 0
    assert directory_bytes(daemon.store) <= CAPACITY * 1.05
    assert "Traceback" not in daemon.log
    assert daemon.stop() == 0


def test_kills_in_the_middle(daemon: Daemon) -> None:
    """Whatever the moment: no wrong bytes, nothing deleted comes back, no scan is needed."""
    rng = random.Random(11)
    deleted: set[int] = set()
    for turn in range(KILLS):
        daemon.start()
        assert "scanning" not in daemon.log
        crowd = Crowd(daemon, 3, turn)
        crowd.deleted |= deleted
        time.sleep(rng.uniform(0.5, 3))
        daemon.stop(signal.SIGKILL)
        crowd.end()
        deleted |= crowd.deleted
        assert not crowd.wrong
        assert "Traceback" not in daemon.log
    daemon.start()
    status = daemon.status()
    assert status["corrupt_blocks"] == status["stale_blocks"] == 0
    assert daemon.stop() == 0


def test_acknowledged_blocks_survive_a_kill(daemon: Daemon) -> None:
    daemon.start()
    names = [key(n) for n in range(200)]
    with Client(str(daemon.socket)) as client:
        assert not client.put_many(
            names, [block(n, 100_000) for n in range(200)], ack="written"
        ).any()
        client.delete(names[:50])
    daemon.stop(signal.SIGKILL)
    daemon.start()
    with Client(str(daemon.socket)) as client:
        found = client.get_many(names)
        assert found == [None] * 50 + [block(n, 100_000) for n in range(50, 200)]
    daemon.stop(signal.SIGKILL)
    for path in (daemon.store / "blocks").iterdir():
        if path.name.startswith(("journal", "checkpoint")):
            path.unlink()
    daemon.start()
    with Client(str(daemon.socket)) as client:
        found = client.get_many(names)
        assert found == [None] * 50 + [block(n, 100_000) for n in range(50, 200)]
    assert daemon.stop() == 0


@pytest.mark.slow
def test_a_great_many_small_blocks(tmp_path: Path) -> None:
    """Ready within a second after SIGKILL; with the journal gone, all found by the scan."""
    options = ("--engine", "superblock", "--memory", "64MiB", "--min-free", "0")
    daemon = Daemon(tmp_path, (*options, "--capacity", "3GiB"))
    keys = [key(n) for n in range(MANY)]
    data = np.random.default_rng(1).bytes(4096)
    try:
        daemon.start()
        with Client(str(daemon.socket), timeout=120) as client:
            for start in range(0, MANY, 1000):
                part = keys[start : start + 1000]
                assert not client.put_many(part, [data] * 1000, ack="written").any()
        daemon.stop(signal.SIGKILL)
        daemon.start()
        line = [one for one in daemon.log.splitlines() if "ready:" in one][-1]
        print(line)
        assert f"{MANY} blocks" in line
        assert float(line.rsplit("in ", 1)[1].split()[0]) < 3.0, "0.6 s on an idle machine"
        daemon.stop(signal.SIGKILL)
        for path in (daemon.store / "blocks").iterdir():
            if path.name.startswith(("journal", "checkpoint")):
                path.unlink()
        daemon.start()
        with Client(str(daemon.socket), timeout=120) as client:
            assert client.contains(keys).all()
            for found in client.get_many(keys[:: MANY // 100]):
                assert found is not None
                assert bytes(found) == data
        assert daemon.stop() == 0
    finally:
        if daemon.process is not None:
            daemon.process.kill()
            daemon.process.wait()

"""The disk never overflows: capacity as ``du`` counts it, and the floor of the filesystem."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstore import node
from kvstore.answers import BlockStatus
from kvstore.client import Client
from tests.command import Daemon
from tests.mounts import mounted
from tests.stores import MIB, Local, block, key


@contextmanager
def running(folder: Path, *options: str) -> Iterator[Daemon]:
    daemon = Daemon(folder, options)
    try:
        daemon.start()
        yield daemon
    finally:
        if daemon.process is not None:
            daemon.process.kill()
            daemon.process.wait()


class Sampler(threading.Thread):
    """Notes ``du`` of a directory and the live bytes of a daemon every 0.2 s."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__(daemon=True)
        self.used: list[int] = []
        self.live: list[int] = []
        self._daemon = daemon
        self._stop_it = threading.Event()

    def run(self) -> None:
        with Client(str(self._daemon.socket)) as client:
            while not self._stop_it.wait(0.2):
                # Files go while du walks: it complains, and counts the rest.
                du = subprocess.run(
                    ["du", "-s", "-B1", str(self._daemon.store)], capture_output=True, check=False
                )
                self.used.append(int(du.stdout.split()[0]))
                self.live.append(int(str(client.status()["live_bytes"])))

    def end(self) -> None:
        self._stop_it.set()
        self.join()


@pytest.mark.slow
def test_two_gib_through_a_capacity_of_256_mib(tmp_path: Path) -> None:
    capacity = 256 * MIB
    with running(
        tmp_path, "--capacity", "256MiB", "--memory", "64MiB", "--min-free", "0"
    ) as daemon:
        sampler = Sampler(daemon)
        sampler.start()
        with Client(str(daemon.socket)) as client:
            for start in range(0, 2048, 16):
                numbers = range(start, start + 16)
                statuses = client.put_many(
                    [key(n) for n in numbers],
                    [block(n, MIB) for n in numbers],
                    chain=start % 64 > 0,
                )
                assert not statuses.any()
        sampler.end()
        assert max(sampler.used) <= 1.10 * capacity
        full = next(n for n, live in enumerate(sampler.live) if live >= 0.9 * capacity)
        assert len(sampler.live) - full > 5
        assert min(sampler.live[full:]) >= 0.85 * capacity
        with Client(str(daemon.socket)) as client:
            for n in range(2048 - 64, 2048):
                assert client.get(key(n)) == block(n, MIB)
        assert daemon.stop() == 0


@pytest.mark.slow
@pytest.mark.root
def test_another_process_fills_the_filesystem(tmp_path: Path) -> None:
    with (
        mounted(tmp_path, "ext4", image_mib=2048) as mount,
        running(mount, "--capacity", "1GiB", "--memory", "64MiB") as daemon,
        Client(str(daemon.socket)) as client,
    ):
        names = [key(n) for n in range(300)]
        for start in range(0, 300, 20):
            numbers = range(start, start + 20)
            assert not client.put_many(
                names[start : start + 20], [block(n, 2 * MIB) for n in numbers]
            ).any()
        foreign = mount / "foreign"
        _fill(foreign)
        time.sleep(4)
        there = np.flatnonzero(client.contains(names))
        assert len(there) >= 150, "more than half of the blocks left"
        status = client.status()
        assert status["state"] == "degraded"
        assert "floor" in str(status["problems"])
        for n in there[::10].tolist():
            assert client.get(names[n]) == block(n, 2 * MIB)
        before = int(str(status["live_bytes"]))
        client.put_many([key(1000)], [block(1000, 2 * MIB)], ack="written")
        assert int(str(client.status()["live_bytes"])) <= before, "grew below the floor"
        foreign.unlink()
        time.sleep(1.5)
        assert client.put(key(1001), block(1001, 2 * MIB), ack="written") == "stored"
        assert client.status()["state"] == "ready"
        assert client.get(key(1001)) == block(1001, 2 * MIB)
        assert daemon.stop() == 0


@pytest.mark.root
def test_on_a_disk_full_to_the_last_byte_blocks_are_recycled(tmp_path: Path) -> None:
    with (
        mounted(tmp_path, "ext4", image_mib=300) as mount,
        running(mount, "--capacity", "250MiB", "--memory", "64MiB", "--min-free", "0") as daemon,
        Client(str(daemon.socket)) as client,
    ):
        names = [key(n) for n in range(40)]
        assert not client.put_many(names, [block(n, MIB) for n in range(40)]).any()
        _fill(mount / "foreign")
        time.sleep(1.5)
        assert client.put(key(100), block(100, 3 * MIB), ack="written") == "stored"
        there = client.contains(names)
        assert there.sum() == 37, "only as much may leave as comes in"
        assert client.get(key(100)) == block(100, 3 * MIB)
        assert client.delete([names[n] for n in np.flatnonzero(there)[:2]]) == 2, (
            "deleting must work on a full disk"
        )
        assert daemon.stop() == 0
        daemon.start()
        with Client(str(daemon.socket)) as again:
            there[np.flatnonzero(there)[:2]] = False
            assert again.contains(names).tolist() == there.tolist()


@pytest.mark.root
def test_a_write_that_hits_the_end_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full although it had room a moment ago: full is answered, nothing is left."""
    with mounted(tmp_path, "ext4", image_mib=300) as mount:
        local = Local(mount / "store", capacity=250 * MIB)
        for start in (0, 8, 16, 24, 32):
            numbers = range(start, start + 8)
            local.put([key(n) for n in numbers], [block(n, MIB) for n in numbers])
        _fill(mount / "foreign")
        monkeypatch.setattr(node, "free_bytes", lambda _path: 1 << 40)
        assert local.put([key(100)], [block(100, 4 * MIB)]) == [BlockStatus.FULL]
        assert local.contains([key(100)]) == [False]
        assert not list((local.path / "blocks" / "tmp").iterdir())
        assert local.get([key(5)]) == [block(5, MIB)]
        assert local.core.coming == local.core.going == 0
        assert local.put([key(101)], [block(101, MIB)]) == [BlockStatus.OK], "recycled"
        (mount / "foreign").unlink()
        assert local.put([key(100)], [block(100, 4 * MIB)]) == [BlockStatus.OK]
        local.kill()


def _fill(path: Path) -> None:
    subprocess.run(["dd", "if=/dev/zero", f"of={path}", "bs=1M"], capture_output=True, check=False)
    subprocess.run(["sync", "-f", str(path.parent)], check=True)

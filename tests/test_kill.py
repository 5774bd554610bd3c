"""SIGKILL at random moments: every acknowledged block is a hit afterwards, byte for byte."""

from __future__ import annotations

import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvstore.answers import BlockStatus
from kvstore.client import Client
from kvstore.errors import KVStoreError
from tests.command import Daemon
from tests.stores import block, key

ROUNDS = 20
BLOCKS = 2000
SIZES = (1, 4096, 5000, 20_000, 65_536, 100_000, 300_000)
BATCH = 16


def _size(number: int) -> int:
    return SIZES[number % len(SIZES)]


def _put_all(daemon: Daemon, first: int, acknowledged: list[int]) -> None:
    """Put blocks in batches until done or the daemon is gone; note what was acknowledged."""
    try:
        with Client(str(daemon.socket)) as client:
            for start in range(first, first + BLOCKS, BATCH):
                numbers = range(start, min(start + BATCH, first + BLOCKS))
                statuses = client.put_many(
                    [key(n) for n in numbers],
                    [block(n, _size(n)) for n in numbers],
                    chain=True,
                    ack="written",
                )
                acknowledged += [
                    n
                    for n, status in zip(numbers, statuses, strict=True)
                    if status == BlockStatus.OK
                ]
    except KVStoreError:
        pass


@pytest.mark.slow
def test_acknowledged_blocks_survive_kills_at_random_moments(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    daemon = Daemon(tmp_path, ("--capacity", "8GiB", "--memory", "64MiB", "--min-free", "0"))
    acknowledged: list[int] = []
    try:
        for turn in range(ROUNDS):
            daemon.start()
            writer = threading.Thread(
                target=_put_all, args=(daemon, turn * BLOCKS, acknowledged), daemon=True
            )
            writer.start()
            time.sleep(rng.uniform(0.02, 0.8))
            daemon.stop(signal.SIGKILL)
            writer.join()
            assert "Traceback" not in daemon.log
            if turn % 5 == 4:
                _check(daemon, acknowledged)
    finally:
        if daemon.process is not None:
            daemon.process.kill()
            daemon.process.wait()


def _check(daemon: Daemon, acknowledged: list[int]) -> None:
    daemon.start()
    assert "scanning" not in daemon.log
    with Client(str(daemon.socket)) as client:
        for start in range(0, len(acknowledged), 64):
            numbers = acknowledged[start : start + 64]
            blocks = client.get_many([key(n) for n in numbers])
            for n, found in zip(numbers, blocks, strict=True):
                assert found is not None, f"block {n} was acknowledged and is gone"
                assert found == block(n, _size(n)), f"block {n} has wrong bytes"
    status = daemon.status()
    files = len(list((daemon.store / "blocks").rglob("*.kvb")))
    assert status["blocks"] == files, "a kill left files that nobody counts"
    assert status["blocks"] >= len(acknowledged)
    assert not list((daemon.store / "blocks" / "tmp").iterdir())
    assert daemon.stop() == 0


def _wait_until_it_fits(daemon: Daemon, capacity: int) -> None:
    """Blocks beyond a smaller capacity leave in the background, while the daemon serves."""
    deadline = time.monotonic() + 120
    while int(str(daemon.status()["used_bytes"])) > capacity:
        assert time.monotonic() < deadline, daemon.log
        time.sleep(0.2)


@pytest.mark.slow
def test_a_hundred_thousand_blocks_are_ready_within_a_second(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, ("--capacity", "4GiB", "--memory", "64MiB", "--min-free", "0"))
    keys = [key(n) for n in range(100_000)]
    data = block(1)
    try:
        daemon.start()
        with Client(str(daemon.socket)) as client:
            for start in range(0, len(keys), 1000):
                assert not client.put_many(
                    keys[start : start + 1000], [data] * 1000, ack="written"
                ).any()
            used = [keys[n] for n in range(0, len(keys), 1000)]
            client.get_many(used)
            time.sleep(2)
        daemon.stop(signal.SIGKILL)
        daemon.start()
        line = [one for one in daemon.log.splitlines() if "ready:" in one][-1]
        seconds = float(line.rsplit("in ", 1)[1].split()[0])
        print(line)
        assert "100000 blocks" in line
        assert seconds < 3.0, "0.2 s on an idle machine"
        assert daemon.stop() == 0
        daemon.options = ("--capacity", "450MiB", "--memory", "64MiB", "--min-free", "0")
        daemon.start()
        _wait_until_it_fits(daemon, 450 << 20)
        with Client(str(daemon.socket)) as client:
            assert client.contains(used).all(), "the most recently used did not survive"
            assert 40_000 < np.count_nonzero(client.contains(keys)) < 60_000
    finally:
        if daemon.process is not None:
            daemon.process.kill()
            daemon.process.wait()


@pytest.mark.slow
def test_the_blocks_read_last_survive_a_smaller_capacity(tmp_path: Path) -> None:
    """1,000 blocks, 100 read, 2 s later SIGKILL, capacity cut to half: those 100 stay."""
    options = ("--memory", "64MiB", "--min-free", "0")
    daemon = Daemon(tmp_path, ("--capacity", "160MiB", *options))
    rng = random.Random(3)
    try:
        daemon.start()
        with Client(str(daemon.socket)) as client:
            client.put_many(
                [key(n) for n in range(1000)],
                [block(n, 140_000) for n in range(1000)],
                ack="written",
            )
            used = [key(n) for n in rng.sample(range(1000), 100)]
            for one in used:
                assert client.get(one) is not None
        time.sleep(2)
        daemon.stop(signal.SIGKILL)
        daemon.options = ("--capacity", "80MiB", *options)
        daemon.start()
        _wait_until_it_fits(daemon, 80 << 20)
        with Client(str(daemon.socket)) as client:
            assert client.contains(used).all()
            there = int(client.contains([key(n) for n in range(1000)]).sum())
        assert 450 < there < 560
        status = daemon.status()
        assert status["used_bytes"] <= 80 << 20  # type: ignore[operator]
    finally:
        if daemon.process is not None:
            daemon.process.kill()
            daemon.process.wait()

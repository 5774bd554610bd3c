"""The data plane's promises, kept by a real daemon and real clients.

With ``PROMISES=long``, as ``make promises`` sets it, a hundred clients crowd in, and ten thousand
blocks are put and got under a client that scribbles: that takes minutes.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.client import Client
from kvstore.errors import DaemonUnavailable, KVStoreError
from tests.command import Daemon
from tests.stores import MIB, block, key
from tests.talk import bare

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 512 << 10
LONG = os.environ.get("PROMISES") == "long"
CROWD_CLIENTS = 100 if LONG else 24
SCRIBBLED_TURNS = 625 if LONG else 60
"""Batches of 16 puts and 16 gets."""


@pytest.fixture
def roomy(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with a memory tier of 256 MiB on an empty store of 1 GiB."""
    daemon = Daemon(tmp_path, ("--capacity", "1GiB", "--memory", "256MiB", "--min-free", "0"))
    try:
        daemon.start()
        yield daemon
    finally:
        if daemon.process is not None:
            daemon.process.kill()
            daemon.process.wait()


def anonymous_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    found = re.search(r"^RssAnon:\s+(\d+) kB", text, re.MULTILINE)
    assert found
    return int(found[1]) << 10


def test_late_writes_reach_no_memory_that_is_used_again(roomy: Daemon) -> None:
    """The daemon is stopped in the middle, deadlines pass, memory is used for other blocks, and the
    daemon goes on: no byte of that memory changes, and no key ever holds another block's bytes."""
    names = [key(n) for n in range(64)]
    with Client(str(roomy.socket)) as client:
        assert not client.put_many(names, [block(n, SIZE) for n in range(64)], ack="written").any()
    for turn in range(4):
        with Client(str(roomy.socket), timeout=0.4) as hasty:
            hasty.get_many(names[:8])
            stop = threading.Timer(0.002 * turn, os.kill, (roomy.pid, signal.SIGSTOP))
            stop.start()
            for _ in range(3):
                try:
                    hasty.get_many(names)
                except KVStoreError:
                    break
            with suppress(KVStoreError):
                hasty.put_many([key(1000 + turn)], [block(1000 + turn, SIZE)])
            stop.join()
            os.kill(roomy.pid, signal.SIGSTOP)
            for n in range(3):
                # Whatever memory the client gives now must be its own.
                with suppress(KVStoreError), hasty.staging(4 * MIB) as staging:
                    staging.view[:] = bytes([n + 1]) * (4 * MIB)
                    os.kill(roomy.pid, signal.SIGCONT)
                    time.sleep(0.3)
                    assert bytes(staging.view) == bytes([n + 1]) * (4 * MIB)
            os.kill(roomy.pid, signal.SIGCONT)
    with Client(str(roomy.socket)) as client:
        for n, found in enumerate(client.get_many(names)):
            assert found is not None
            assert bytes(found) == block(n, SIZE)
        for turn in range(4):
            late = client.get(key(1000 + turn))
            assert late is None or late == block(1000 + turn, SIZE)


def test_a_client_that_scribbles_hurts_only_itself(roomy: Daemon) -> None:
    """Its region changes all the time: what the store keeps is what it hashed, and stays whole."""
    with Client(str(roomy.socket)) as client, Client(str(roomy.socket)) as honest:
        assert not honest.put_many(
            [key(n) for n in range(32)], [block(n, SIZE) for n in range(32)]
        ).any()
        stop = threading.Event()
        with client.staging(16 * MIB) as staging:
            slots = staging.slots([SIZE] * 16)

            def scribble() -> None:
                rng = np.random.default_rng(0)
                while not stop.is_set():
                    slots[int(rng.integers(16))][int(rng.integers(SIZE))] = int(rng.integers(256))

            scribbler = threading.Thread(target=scribble)
            scribbler.start()
            try:
                for turn in range(SCRIBBLED_TURNS):
                    names = [key(10_000 + 16 * turn + n) for n in range(16)]
                    client.put_staged(names, staging)
                    client.get_staged([key(16 * (turn % 2) + n) for n in range(16)], staging)
            finally:
                stop.set()
                scribbler.join()
        for n, found in enumerate(honest.get_many([key(n) for n in range(32)])):
            assert found is not None
            assert bytes(found) == block(n, SIZE)
    status = roomy.status()
    assert status["corrupt_blocks"] == status["stale_blocks"] == status["memory_errors"] == 0
    assert not list((roomy.store / "quarantine").iterdir())


def test_accepted_blocks_survive_sigterm(roomy: Daemon) -> None:
    names = [key(n) for n in range(5000)]
    with Client(str(roomy.socket)) as client:
        for start in range(0, 5000, 250):
            part = range(start, start + 250)
            statuses = client.put_many(names[start : start + 250], [block(n, 9000) for n in part])
            assert not statuses.any()
    assert roomy.stop() == 0
    roomy.start()
    with Client(str(roomy.socket)) as client:
        assert client.contains(names).all()
        for n in range(0, 5000, 97):
            assert client.get(names[n]) == block(n, 9000)


def test_a_lease_outlives_a_full_store(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, ("--capacity", "128MiB", "--memory", "64MiB", "--min-free", "0"))
    try:
        daemon.start()
        with Client(str(daemon.socket)) as client:
            names = [key(n) for n in range(8)]
            client.put_many(names, [block(n, MIB) for n in range(8)], ack="written")
            assert client.contains(names, lease=8.0).all()
            for start in range(100, 300, 20):
                part = range(start, start + 20)
                client.put_many(
                    [key(n) for n in part], [block(n, MIB) for n in part], ack="written"
                )
            assert not client.contains([key(100)]).any()
            found = [None if one is None else bytes(one) for one in client.get_many(names)]
            assert found == [block(n, MIB) for n in range(8)]
    finally:
        if daemon.process is not None:
            daemon.process.kill()
            daemon.process.wait()


def test_a_stream_that_is_left_frees_every_reference(roomy: Daemon) -> None:
    names = [key(n) for n in range(64)]
    with Client(str(roomy.socket)) as client:
        client.put_many(names, [block(n, MIB) for n in range(64)], ack="written")
        for taken in (0, 1, 5):
            stream = client.stream_get(names)
            for _ in range(taken):
                next(stream)
            stream.close()
        assert client.delete(names) == 64
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        status = roomy.status()
        if status["live_bytes"] == 0 and not list((roomy.store / "blocks").rglob("*.kvb")):
            break
        time.sleep(0.2)
    assert not list((roomy.store / "blocks").rglob("*.kvb"))


CROWD_LIMIT = (256 + 128 + 128) * MIB
"""The memory tier, the bounce slab, and the rest of the daemon."""
CROWD = """
import sys
sys.path.insert(0, sys.argv[3])
from kvstore.client import Client
from kvstore.errors import KVStoreError
from tests.stores import block, key
number = int(sys.argv[2])
data = block(number, 256 << 10)
names = [key(1000 * number + n) for n in range(64)]
with Client(sys.argv[1], timeout=60) as client:
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(3):
        client.put_many(names, [data] * 64)
        for found in client.get_many(names):
            assert found is None or bytes(found) == data, "wrong bytes"
print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(1200 if LONG else 300)
def test_a_crowd_of_clients_stays_within_memory(roomy: Daemon, tmp_path: Path) -> None:
    """Many clients with batches of 64 x 256 KiB at once, some killed in the middle."""
    root = str(Path(__file__).resolve().parent.parent)
    crowd = [
        subprocess.Popen(
            [sys.executable, "-c", CROWD, str(roomy.socket), str(n), root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for n in range(CROWD_CLIENTS)
    ]
    try:
        for one in crowd:
            assert one.stdout is not None
            assert one.stdout.readline() == b"ready\n"
        before = anonymous_bytes(roomy.pid)
        for one in crowd:
            assert one.stdin is not None
            one.stdin.write(b"\n")
            one.stdin.flush()
        time.sleep(0.5)
        for one in crowd[::4]:
            one.kill()
        peak = before
        while any(one.poll() is None for one in crowd):
            peak = max(peak, anonymous_bytes(roomy.pid))
            time.sleep(0.1)
        print(f"{CROWD_CLIENTS} clients: RssAnon {peak >> 20} MiB of {CROWD_LIMIT >> 20} at most")
        assert peak < CROWD_LIMIT
        assert all(one.returncode == 0 for n, one in enumerate(crowd) if n % 4)
    finally:
        for one in crowd:
            one.kill()
            one.wait()
            for pipe in (one.stdin, one.stdout):
                if pipe is not None:
                    pipe.close()
    with Client(str(roomy.socket)) as client:
        assert client.put(key(999_999), b"x") == "stored"  # a key of nobody in the crowd
    assert len(os.listdir(f"/proc/{roomy.pid}/fd")) < 60
    assert roomy.stop() == 0


def test_what_a_failing_disk_takes_is_named_and_ends_with_1(tmp_path: Path) -> None:
    names, blocks = [key(n) for n in range(50)], [block(n) for n in range(50)]
    with bare(tmp_path) as daemon:
        with Client(str(daemon.socket)) as client:
            (tmp_path / "broken").touch()
            assert not client.put_many(names, blocks).any(), "accepted"
            lost = client.flush()
            assert {one.key for one in lost} == {name.hex() for name in names}
            assert client.flush() == []
            # This time nobody asks.
            others = [key(n) for n in range(100, 107)]
            assert not client.put_many(others, blocks[:7]).any()
        assert daemon.stop() == 1
        assert "7 accepted blocks could not be" in daemon.log


def test_puts_after_the_end_are_refused(roomy: Daemon) -> None:
    with Client(str(roomy.socket), timeout=2) as client:
        client.put(key(1), b"x")
        roomy.stop()
        with pytest.raises(DaemonUnavailable):
            client.put(key(2), b"y")

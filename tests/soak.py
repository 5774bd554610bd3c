"""A mixed load with faults, as long as one likes: ``python -m tests.soak --seconds N --seed S``.

Several client processes put, get, stream, overwrite, delete and flush blocks of 1 B to 4 MiB,
inline and through shared memory, in a store so small that it evicts all the time. Clients are
killed in the middle and replaced; the daemon is killed and terminated in turns and started again.
All the time:

- a block that is read is, byte for byte, one that was put under its key; never one older than a
  version that was acknowledged as ``written``, and none at all after an acknowledged delete;
- after each restart the blocks last acknowledged as ``written`` are there;
- the store takes at most 110 % of its capacity on the disk;
- while a daemon runs, its descriptors and threads stay in their bounds and its anonymous memory has
  no slope; at the end, with no client left, descriptors are as few as at first;
- the daemon counts no corrupt, stale or missing block and no failure of its own.

A client proves its blocks itself and tells the soak, on its standard output, what was acknowledged
(``w`` slot number version) and what it is about to change (``x`` slot number).
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvstore.answers import BlockStatus
from kvstore.client import Client
from kvstore.errors import Busy, DaemonUnavailable, KVStoreError
from tests.command import Daemon
from tests.fuzz_socket import process_figures
from tests.stores import MIB
from tests.talk import eventually, watches

ROOT = Path(__file__).parent.parent
CAPACITY = 128 * MIB
MEMORY = 32 * MIB
BOUNCE = 128 * MIB
NUMBERS = 200
"""Blocks of one client: with a few clients several times the capacity."""
LARGEST = 4 * MIB
VERSIONS = 40
HEADER = struct.Struct("<IIQ")
NOISE = np.random.default_rng(7).bytes(LARGEST + MIB)
SURVIVE_BYTES = CAPACITY // 10
"""So much of what was acknowledged last is looked for after a restart."""
ANON_LIMIT = MEMORY + BOUNCE + 256 * MIB
ANON_SLOPE_BYTES = 32 * MIB
"""Most growth of a straight line through the anonymous memory of one daemon's life."""
MAX_THREADS = 16
OK = (BlockStatus.OK, BlockStatus.ALREADY_PRESENT)


def name(slot: int, number: int) -> bytes:
    return struct.pack("<8sII16x", b"soak", slot, number)


def content(slot: int, number: int, version: int) -> bytes:
    """Return the block of a version; the first bytes of all but the smallest say which it is."""
    chance = random.Random(f"{slot} {number} {version}")
    length = int(LARGEST ** chance.random())
    start = chance.randrange(MIB)
    if length < HEADER.size:
        return NOISE[start : start + length]
    return HEADER.pack(slot, number, version) + NOISE[start : start + length - HEADER.size]


def version_of(slot: int, number: int, data: memoryview) -> int | None:
    """Return which version this is, byte for byte; -1 if it is too small to tell, None if none."""
    if len(data) < HEADER.size:
        some = any(content(slot, number, version) == data for version in range(VERSIONS))
        return -1 if some else None
    said = HEADER.unpack(data[: HEADER.size])
    if said[:2] != (slot, number) or said[2] >= VERSIONS:
        return None
    return said[2] if content(slot, number, said[2]) == data else None


# -- a client -------------------------------------------------------------------------------------


class Wrong(AssertionError):
    """The daemon answered what it must not."""


class Worker:
    """One client process: the only one that puts and deletes keys of its ``slot``."""

    def __init__(self, address: str, slot: int, seed: int) -> None:
        self._client = Client(address, 20, staging_bytes=64 * MIB)
        self._slot = slot
        self._chance = random.Random(f"{seed} {slot}")
        self._versions = [0] * NUMBERS
        """The last version that was tried."""
        self._floor = [0] * NUMBERS
        """The last version that was acknowledged as written: an older one must not come back."""
        self._deleted: set[int] = set()
        self._unsure: set[int] = set()
        """Numbers of a change without an answer: it may come to pass at any time."""
        self.done = 0

    def run(self) -> None:
        acts: list[tuple[Callable[[], None], int]] = [
            *((self._put, 30), (self._put_staged, 6), (self._get, 20), (self._get_into, 8)),
            *((self._get_staged, 6), (self._stream, 14), (self._contains, 6), (self._delete, 5)),
            *((self._flush, 1), (self._foreign, 6), (self._reconnect, 1)),
        ]
        while True:
            act = self._chance.choices([act for act, _ in acts], [weight for _, weight in acts])[0]
            try:
                act()
                self.done += 1
            except DaemonUnavailable:
                time.sleep(0.1)
            except Busy:
                time.sleep(0.02)

    def _some(self, most: int = 16) -> list[int]:
        """Return numbers whose largest possible blocks a batch may carry."""
        return self._chance.sample(range(NUMBERS), self._chance.randint(1, most))

    def _names(self, numbers: Sequence[int]) -> list[bytes]:
        return [name(self._slot, number) for number in numbers]

    def _tell(self, kind: str, numbers: Sequence[int]) -> None:
        lines = [f"{kind} {self._slot} {n} {self._versions[n]}\n" for n in numbers]
        os.write(1, "".join(lines).encode())

    # -- changes ----------------------------------------------------------------------------------

    def _begin(self, numbers: Sequence[int]) -> None:
        self._tell("x", numbers)
        self._unsure_before = self._unsure.copy()
        self._unsure.update(numbers)

    def _end(self, numbers: Sequence[int], statuses: Sequence[int], level: str) -> None:
        """Note what was answered for a put; it is sure unless something before was not."""
        self._unsure = self._unsure_before
        good = [n for n, status in zip(numbers, statuses, strict=True) if status in OK]
        self._deleted.difference_update(numbers)
        if level != "accepted":
            sure = [n for n in good if n not in self._unsure]
            for number in sure:
                self._floor[number] = self._versions[number]
            self._tell("w", sure)
        bad = {int(status) for status in statuses} - {*OK, BlockStatus.FULL, BlockStatus.BUSY}
        if bad - {BlockStatus.CONFLICT}:
            raise Wrong(f"a put came to {bad}")

    def _prepare(self, numbers: Sequence[int]) -> tuple[bool, list[bytes]]:
        """Choose the versions to put: the next ones with the flag overwrite."""
        overwrite = self._chance.random() < 0.3
        for number in numbers:
            if overwrite and self._versions[number] < VERSIONS - 1:
                self._versions[number] += 1
        return overwrite, [content(self._slot, n, self._versions[n]) for n in numbers]

    def _put(self) -> None:
        numbers = self._some()
        overwrite, blocks = self._prepare(numbers)
        level = self._chance.choice(("accepted", "accepted", "written", "written", "durable"))
        self._begin(numbers)
        statuses = self._client.put_many(
            self._names(numbers),
            blocks,
            ack=level,
            overwrite=overwrite,
            chain=self._chance.random() < 0.3,
            parent=name(self._slot, numbers[0] ^ 1) if self._chance.random() < 0.2 else None,
        )
        self._end(numbers, statuses.tolist(), level)

    def _put_staged(self) -> None:
        numbers = self._some(4)
        overwrite, blocks = self._prepare(numbers)
        with self._client.staging(sum(len(block) + 4096 for block in blocks)) as staging:
            for slot, block in zip(staging.slots(map(len, blocks)), blocks, strict=True):
                slot[:] = block
            self._begin(numbers)
            statuses = self._client.put_staged(
                self._names(numbers), staging, ack="written", overwrite=overwrite
            )
        self._end(numbers, statuses.tolist(), "written")

    def _delete(self) -> None:
        numbers = self._some(6)
        self._begin(numbers)
        self._client.delete(self._names(numbers))
        self._unsure = self._unsure_before
        self._deleted.update(set(numbers) - self._unsure)

    def _flush(self) -> None:
        if lost := self._client.flush():
            raise Wrong(f"blocks could not be kept: {lost}")

    # -- questions --------------------------------------------------------------------------------

    def _check(self, number: int, data: memoryview | None) -> None:
        if data is None:
            return
        version = version_of(self._slot, number, data)
        if version is None:
            raise Wrong(f"block {number} of {self._slot} has {len(data)} bytes of something else")
        if number in self._unsure:
            return
        if number in self._deleted:
            raise Wrong(f"block {number} of {self._slot} was deleted and is version {version}")
        if 0 <= version < self._floor[number]:
            raise Wrong(
                f"block {number} of {self._slot} is version {version} "
                f"after {self._floor[number]} was acknowledged as written"
            )

    def _get(self) -> None:
        numbers = self._some()
        for number, data in zip(numbers, self._client.get_many(self._names(numbers)), strict=True):
            self._check(number, data)

    def _get_into(self) -> None:
        numbers = self._some(4)
        buffers = [np.empty(LARGEST, np.uint8) for _ in numbers]
        statuses = self._client.get_into(self._names(numbers), buffers)
        for number, status, buffer in zip(numbers, statuses.tolist(), buffers, strict=True):
            if status == BlockStatus.OK:
                # The length is not told: what is shorter than its header says is not compared.
                said = HEADER.unpack(buffer[: HEADER.size].tobytes())
                if said[:2] == (self._slot, number) and said[2] < VERSIONS:
                    length = len(content(*said))
                    self._check(number, buffer.data[:length])

    def _get_staged(self) -> None:
        numbers = self._some(4)
        with self._client.staging(len(numbers) * LARGEST) as staging:
            slots = staging.slots([LARGEST] * len(numbers))
            sizes = self._client.get_staged(self._names(numbers), staging)
            for number, status, length, slot in zip(
                numbers, sizes.statuses.tolist(), sizes.lengths.tolist(), slots, strict=True
            ):
                if status == BlockStatus.OK:
                    self._check(number, slot[:length])

    def _stream(self) -> None:
        numbers = self._some(24)
        leave = self._chance.choice((None, None, 1, 5))
        steps = self._client.stream_get(self._names(numbers))
        try:
            for count, (position, _, data) in enumerate(steps):
                self._check(numbers[position], data)
                if count == leave:
                    break
        finally:
            steps.close()

    def _contains(self) -> None:
        numbers = self._some()
        lease = self._chance.choice((0.0, 5.0))
        there = self._client.contains(self._names(numbers), lease=lease)
        wrong = {n for n, found in zip(numbers, there, strict=True) if found} & self._deleted
        if wrong - self._unsure:
            raise Wrong(f"blocks {wrong} of {self._slot} were deleted and are there")
        self._client.touch(self._names(numbers))

    def _foreign(self) -> None:
        """Read what another client puts meanwhile."""
        slot = max(0, self._slot + self._chance.choice((-2, -1, 1)))
        numbers = self._some(8)
        found = self._client.get_many([name(slot, number) for number in numbers])
        for number, data in zip(numbers, found, strict=True):
            if data is not None and version_of(slot, number, data) is None:
                raise Wrong(f"block {number} of {slot} has {len(data)} bytes of something else")

    def _reconnect(self) -> None:
        self._client.close()


def work(address: str, slot: int, seed: int) -> None:
    try:
        Worker(address, slot, seed).run()
    except (KVStoreError, Wrong) as error:
        print(f"soak client {slot}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise


# -- the soak -------------------------------------------------------------------------------------


class Sample(NamedTuple):
    at: float
    anonymous: int
    descriptors: int
    threads: int


class Block(NamedTuple):
    slot: int
    number: int
    version: int


class Soak:
    """``clients`` processes against a daemon that lives ``life`` seconds at a time."""

    def __init__(self, folder: Path, seconds: float, seed: int, clients: int, life: float) -> None:
        self._daemon = Daemon(
            folder,
            ("--capacity", str(CAPACITY), "--memory", str(MEMORY), "--min-free", "0"),
        )
        self._seconds, self._seed, self._count, self._life = seconds, seed, clients, life
        self._chance = random.Random(seed)
        self._clients: dict[int, subprocess.Popen[bytes]] = {}
        self._slots = 0
        self._written: dict[tuple[int, int], Block] = {}
        """What was acknowledged as written and not touched since, oldest first."""
        self._rest: dict[int, bytes] = {}
        self._samples: list[Sample] = []
        self._errors = (folder / "clients.log").open("ab")
        self.lives: list[list[Sample]] = []
        self.killed = self.looked_for = self.largest = self.evictions = 0

    def run(self) -> None:
        end = time.monotonic() + self._seconds
        try:
            self._daemon.start()
            assert eventually(lambda: watches(self._daemon.pid))
            self._idle = self._descriptors()
            number = 0
            # A busy machine may take longer to come to its first eviction.
            last = end + 3 * min(self._seconds, 60)
            while (now := time.monotonic()) < end or (not self.evictions and now < last):
                self._live(now + min(self._life, max(end - now, 5)))
                number += 1
                if time.monotonic() < end:
                    self._restart(signal.SIGKILL if number % 2 else signal.SIGTERM)
            self._finish()
        finally:
            for client in self._clients.values():
                client.kill()
                client.wait()
            self._errors.close()
            if self._daemon.process is not None:
                self._daemon.process.kill()
                self._daemon.process.wait()

    def _live(self, until: float) -> None:
        """Let clients work, killing one now and then, and watch the daemon."""
        self._samples = []
        self.lives.append(self._samples)
        kill_at, look_at = time.monotonic() + self._chance.uniform(0.3, 3), 0.0
        while (now := time.monotonic()) < until:
            while len(self._clients) < self._count:
                self._spawn()
            if now >= kill_at:
                slot = self._chance.choice(list(self._clients))
                self._clients[slot].kill()
                self._reap(slot, killed=True)
                kill_at = now + self._chance.uniform(0.3, 3)
            if now >= look_at:
                self._look()
                look_at = now + 1
            self._read()
            time.sleep(0.05)
        self._look()
        self._judge(self._samples)

    def _spawn(self) -> None:
        self._slots += 1
        command = [sys.executable, "-m", "tests.soak", "--client", str(self._slots)]
        command += ["--address", str(self._daemon.socket), "--seed", str(self._seed)]
        client = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0
        )
        assert client.stdout is not None
        os.set_blocking(client.stdout.fileno(), False)
        self._clients[self._slots] = client

    def _reap(self, slot: int, *, killed: bool) -> None:
        client = self._clients.pop(slot)
        code = client.wait()
        self._read_one(slot, client)
        assert client.stdout is not None
        client.stdout.close()
        # What it was about to change when it died may have come to pass: those lines were first.
        self.killed += killed
        if not killed or code != -signal.SIGKILL:
            raise AssertionError(f"client {slot} ended by {code}:\n{self._told()}")

    def _told(self) -> str:
        return Path(self._errors.name).read_text()[-3000:]

    def _read(self) -> None:
        for slot, client in list(self._clients.items()):
            self._read_one(slot, client)
            if client.poll() is not None:
                self._reap(slot, killed=False)

    def _read_one(self, slot: int, client: subprocess.Popen[bytes]) -> None:
        """Note what a client says of its blocks."""
        assert client.stdout is not None
        while data := client.stdout.read(1 << 16):
            *lines, rest = (self._rest.get(slot, b"") + data).split(b"\n")
            self._rest[slot] = rest
            for line in lines:
                kind, *fields = line.split()
                block = Block(*map(int, fields))
                self._written.pop(block[:2], None)
                if kind == b"w":
                    self._written[block[:2]] = block

    # -- what must always be so -------------------------------------------------------------------

    def _descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self._daemon.pid}/fd"))

    def _look(self) -> None:
        """Measure the daemon, its store, and what it says of itself."""
        process = self._daemon.process
        assert process is not None
        assert process.poll() is None, f"the daemon ended:\n{self._daemon.log[-3000:]}"
        figures = process_figures(process.pid)
        now = Sample(time.monotonic(), figures["RssAnon"], self._descriptors(), figures["Threads"])
        self._samples.append(now)
        taken = disk_bytes(self._daemon.store)
        self.largest = max(self.largest, taken)
        assert taken <= 1.1 * CAPACITY, f"{taken} bytes of {CAPACITY} on the disk"
        assert now.anonymous <= ANON_LIMIT, now
        assert now.threads <= MAX_THREADS, now
        assert now.descriptors <= self._idle + 3 * self._count + 16, now
        with Client(str(self._daemon.socket), 30) as client:
            status = client.status()
        self.evictions = max(self.evictions, int(str(status["evictions"])))
        for figure in ("corrupt_blocks", "stale_blocks", "missing_blocks", "failed_requests"):
            assert not status[figure], status
        assert not status["failed_jobs"], status
        assert int(str(status["quarantine_bytes"])) <= 4096, status
        assert status["state"] == "ready", status
        log = self._daemon.log
        assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:4000]

    def _judge(self, samples: list[Sample]) -> None:
        """Look for a slope in the second half of a daemon's life: the first fills its memory."""
        settled = samples[len(samples) // 2 :]
        if len(settled) < 10:
            return
        at = np.array([sample.at for sample in settled])
        for figure, bound in (("anonymous", ANON_SLOPE_BYTES), ("descriptors", 4), ("threads", 4)):
            values = np.array([getattr(sample, figure) for sample in settled], np.float64)
            growth = float(np.polyfit(at - at[0], values, 1)[0] * (at[-1] - at[0]))
            assert growth <= bound, f"{figure} grow by {growth:.0f}: {settled}"

    def _restart(self, number: int) -> None:
        """End the daemon under its clients, start it again, look for what must have survived."""
        code = self._daemon.stop(number)
        expected = 0 if number == signal.SIGTERM else -number
        assert code == expected, f"the daemon ended by {code}:\n{self._daemon.log[-3000:]}"
        for client in self._clients.values():
            client.send_signal(signal.SIGSTOP)
        time.sleep(0.05)
        self._read()
        self._daemon.start()
        self._look_for_survivors()
        for client in self._clients.values():
            client.send_signal(signal.SIGCONT)

    def _look_for_survivors(self) -> None:
        left = SURVIVE_BYTES
        with Client(str(self._daemon.socket), 60) as client:
            for block in reversed(list(self._written.values())):
                expected = content(*block)
                left -= len(expected)
                if left < 0:
                    break
                self.looked_for += 1
                found = client.get(name(block.slot, block.number))
                assert found is not None, f"{block} was written and is gone"
                version = version_of(block.slot, block.number, memoryview(found))
                assert version in (block.version, -1), f"{block} is version {version}"

    def _finish(self) -> None:
        for slot in list(self._clients):
            self._clients[slot].kill()
            self._reap(slot, killed=True)
        limit = time.monotonic() + 30
        while self._descriptors() > self._idle and time.monotonic() < limit:
            time.sleep(0.1)
        assert self._descriptors() <= self._idle, "descriptors are left open"
        with Client(str(self._daemon.socket), 30) as client:
            client.flush()
            status = client.status()
            assert status["dirty_blocks"] == 0, status
            assert status["region_bytes"] == 0, status
        assert self._daemon.stop() == 0
        assert "Traceback" not in self._daemon.log

    def summary(self) -> str:
        lines = [
            f"{self._slots} clients, {self.killed} of them killed; {len(self.lives)} lives of the "
            f"daemon; {self.looked_for} blocks looked for after restarts; most evictions in a life "
            f"{self.evictions}; most bytes on the disk {100 * self.largest / CAPACITY:.0f} %"
        ]
        for samples in self.lives:
            half = samples[len(samples) // 2]
            lines.append(
                f"anonymous memory {half.anonymous >> 20} MiB after half of a life, "
                f"{samples[-1].anonymous >> 20} at its end; descriptors {half.descriptors}, "
                f"{samples[-1].descriptors}; threads {half.threads}, {samples[-1].threads}"
            )
        return "\n".join(lines)


def disk_bytes(folder: Path) -> int:
    """Return what ``du`` would say, of a folder in use."""
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(root, file)).st_blocks * 512
    return total


def soak(folder: Path, seconds: float, seed: int, clients: int = 4, life: float = 60) -> Soak:
    """Run a soak; raises AssertionError when something is not as it must be."""
    run = Soak(folder, seconds, seed, clients, life)
    run.run()
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--life", type=float, default=300, help="seconds that each daemon lives")
    parser.add_argument("--folder", type=Path, help="where the store goes; default: temporary")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.client is not None:
        work(asked.address, asked.client, asked.seed)
        return
    print(f"seed {asked.seed}", flush=True)
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        life = min(asked.life, asked.seconds / 3)
        print(soak(Path(folder), asked.seconds, asked.seed, asked.clients, life).summary())


if __name__ == "__main__":
    main()

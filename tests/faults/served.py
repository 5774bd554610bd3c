"""The same with the real daemon: clients put over its socket, the power is cut under it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore.client import Client
from kvstore.errors import KVStoreError
from kvstore.keys import named, namespace_id
from tests.command import Daemon
from tests.faults import disks, judge, lab, oracle
from tests.faults.judge import ANOTHER_BOOT, Verdict
from tests.faults.oracle import content
from tests.stores import key

PHASES = ("put", "overwrite", "evict")
ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = f"""
import sys
from kvstore import layout
from kvstore.cli import main
if sys.argv.pop(1) == "rebooted":
    layout.boot_id = lambda: {ANOTHER_BOOT!r}
sys.exit(main())
"""
BATCH = 4
DEFAULT = namespace_id(named("default")).hex()
WAIT_SECONDS = 180.0


class Rebootable(Daemon):
    """A daemon whose store lies on another disk, and whose machine may have been booted since."""

    ready_seconds = 180.0

    def __init__(self, folder: Path, disk: Path, options: Sequence[str], *, rebooted: bool) -> None:
        super().__init__(folder, options)
        self._disk = disk
        self._boot = "rebooted" if rebooted else "same"

    @property
    def store(self) -> Path:
        return self._disk / "store"

    def launch(self, *extra: str) -> None:
        self.socket.unlink(missing_ok=True)
        paths = ["--socket", str(self.socket), "serve", "--store", str(self.store)]
        command = [sys.executable, "-c", PROGRAM, self._boot, *paths, *self.options, *extra]
        with (self.folder / "daemon.log").open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=log, cwd=ROOT)


class Reached:
    """A served store, looked at as :mod:`tests.faults.judge` looks at an open one."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [bool(one) for one in self._client.contains(list(keys))]

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        found = self._client.get_many(list(keys))
        return [None if one is None else bytes(one) for one in found]

    def put(self, keys: Sequence[bytes], blocks: Sequence[bytes], *, durable: bool) -> list[int]:
        level = "durable" if durable else "written"
        return [int(one) for one in self._client.put_many(list(keys), list(blocks), ack=level)]


class Cut(lab.Point):
    """The power is cut under a daemon that somebody puts into."""

    def attempt(self) -> bool:
        store, self._left = self.lab.fresh(self.disk), 0
        daemon = self._daemon(store, rebooted=False)
        descriptor = self.disk.descriptor()
        delay = self.chance.uniform(0.01, 0.15)
        under_way = False

        def attend(_: int) -> None:
            nonlocal under_way
            if not self.lab.wait_until_armed():
                return
            time.sleep(delay)
            under_way = self._cut(descriptor)
            daemon.stop(signal.SIGKILL)

        try:
            daemon.start()
            seen = self.lab.child(lambda scene: self._play(daemon, scene), attend=attend)
        finally:
            os.close(descriptor)
            if daemon.process is not None:
                daemon.stop(signal.SIGKILL)
        self.disk.lose()
        if seen["crash"]:
            self.result.crashes.append(seen["crash"])
        if not under_way or oracle.read(self.lab.facts).durable < lab.ENOUGH:
            return False
        self.result.add(self._judge(store))
        return True

    def _daemon(self, store: Path, *, rebooted: bool) -> Rebootable:
        choice = self.choice
        options = ["--capacity", "64MiB", "--min-free", "0", "--memory", str(choice.memory)]
        options += ["--engine", choice.kind, "--io", choice.io]
        options += ["--write", "late"] if choice.late else []
        return Rebootable(self.lab.folder, store.parent, options, rebooted=rebooted)

    def _cut(self, descriptor: int) -> bool:
        before = oracle.read(self.lab.facts).operations
        disks.cut(descriptor)
        after = oracle.read(self.lab.facts)
        return after.under_way and after.operations == before

    # -- the client -------------------------------------------------------------------------------

    def _play(self, daemon: Daemon, scene: lab.Scene) -> None:
        chance, versions = random.Random(self.chance.random()), dict[int, int]()
        with Client(str(daemon.socket), 5) as client:
            while len(versions) < 2 * lab.ENOUGH:
                self._put(client, scene, versions, self._new(versions), durable=True)
            scene.pen.note(oracle.ARMED)
            while True:
                durable = chance.random() < 0.6
                old = self.spot.phase == "overwrite"
                numbers = chance.sample(sorted(versions), BATCH) if old else self._new(versions)
                if self.spot.phase == "evict":
                    self._evict(client, scene, versions)
                self._put(client, scene, versions, numbers, durable=durable)

    def _new(self, versions: dict[int, int]) -> list[int]:
        first = len(versions)
        return list(range(first, first + BATCH))

    def _put(
        self,
        client: Client,
        scene: lab.Scene,
        versions: dict[int, int],
        numbers: list[int],
        *,
        durable: bool,
    ) -> None:
        for number in numbers:
            versions[number] = versions.get(number, -1) + 1
        blocks = [(number, versions[number]) for number in numbers]
        scene.pen.start()
        scene.pen.note(oracle.BEGIN, blocks)
        statuses = client.put_many(
            [key(number) for number in numbers],
            [content(*one, self.choice.sizes) for one in blocks],
            ack="durable" if durable else "written",
            overwrite=self.spot.phase == "overwrite",
        )
        good = [one for one, status in zip(blocks, statuses, strict=True) if status == 0]
        scene.pen.note(oracle.DURABLE if durable else oracle.WRITTEN, good)
        scene.pen.end()

    def _evict(self, client: Client, scene: lab.Scene, versions: dict[int, int]) -> None:
        """Have the oldest chains leave; each block is told to the oracle first."""
        oldest = sorted(versions)[self._left : self._left + BATCH]
        self._left += BATCH
        scene.pen.note(oracle.GONE, [(number, 0) for number in oldest])
        scene.pen.start()
        for number in oldest:
            asked = {"op": "evict", "namespace": DEFAULT, "shard": 0, "key": key(number).hex()}
            list(client.follow({**asked, "chain": True, "dry_run": False}))
        scene.pen.end()

    # -- afterwards -------------------------------------------------------------------------------

    def _judge(self, store: Path) -> Verdict:
        verdict, told = Verdict(), oracle.read(self.lab.facts)
        daemon = self._daemon(store, rebooted=True)
        try:
            daemon.start()
            with Client(str(daemon.socket), WAIT_SECONDS) as client:
                reached = Reached(client)
                judge.compare(reached, told, self.choice, verdict, power=True)
                judge.use(reached, verdict)
                client.flush()
                time.sleep(1.2)
                self._look(client.status(), store, verdict)
            if code := daemon.stop():
                verdict.failed.append(f"the daemon ended by {code}")
        except (AssertionError, KVStoreError) as error:
            verdict.failed.append(str(error)[-500:])
        finally:
            if daemon.process is not None:
                daemon.stop(signal.SIGKILL)
        if "Traceback" in daemon.log:
            verdict.other.append(f"the daemon's log: {daemon.log[-1000:]}")
        return verdict

    def _look(self, status: dict[str, Any], store: Path, verdict: Verdict) -> None:
        factor = 1.0 if self.choice.kind in ("filesystem", "superblock") else 2.0
        judge.count_bytes(int(status["used_bytes"]), store, factor, verdict)
        verdict.other += [f"degraded: {problem}" for problem in status["problems"]]
        verdict.other += [f"{name} is {status[name]}" for name in judge.ALARMS if status[name]]

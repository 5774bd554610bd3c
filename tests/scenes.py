"""A daemon with what lies beside it: what is there, what changed, how a request was refused."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvstore import protocol
from kvstore.answers import Ack
from kvstore.client import Client
from kvstore.errors import KVStoreError
from kvstore.events import Kind
from kvstore.journal import RECORD
from tests.command import COMMAND, Daemon, run_command

KEY_BYTES = 4
VICTIM, PROBE = b"\xbb", b"\xee"
"""First bytes of the keys that tests damage, and of those that prove that the daemon serves."""
FILE_HEADER_BYTES = 128
NOTICE_SECONDS = 15.0
_FAN = re.compile(r"blocks/[0-9a-f]{32}/[0-9a-f]{2}$")


class Told(NamedTuple):
    """How a request failed: exit code, class of the error, message, hint."""

    code: int
    error: str
    message: str
    hint: str


@dataclass
class Served:
    """A running daemon and every block that must be a hit there."""

    daemon: Daemon
    blocks: dict[bytes, bytes] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def start(self) -> None:
        if self.daemon.process is None:
            self.daemon.start()
            for size in (1, 5000, 300_000):
                self.put(b"\xaa", size)

    @property
    def ended(self) -> bool:
        return self.daemon.process is None or self.daemon.process.poll() is not None

    def kill(self) -> None:
        if self.daemon.process is not None:
            self.daemon.process.kill()
            self.daemon.process.wait()

    def put(self, first: bytes, size: int) -> bytes:
        """Store a block of its own; return its key."""
        key = first + next(self._numbers).to_bytes(KEY_BYTES - 1, "big")
        data = os.urandom(size)
        with Client(str(self.daemon.socket)) as client:
            assert client.put(key, data, ack="durable") == "stored"
        self.blocks[key] = data
        return key

    def check(self) -> None:
        """Put and get another key, get all the others, and leave no work behind."""
        self.put(PROBE, 6000)
        with Client(str(self.daemon.socket)) as client:
            found = client.get_many(list(self.blocks))
            client.flush()
            assert client.status()["failed_requests"] == 0
        wrong = [
            key.hex()
            for (key, data), view in zip(self.blocks.items(), found, strict=True)
            if view is None or bytes(view) != data
        ]
        assert wrong == []

    def wait_for_free(self, least: int, most: int) -> None:
        """Wait until the daemon has noticed how much its filesystem has left, in bytes."""
        deadline = time.monotonic() + NOTICE_SECONDS
        with Client(str(self.daemon.socket)) as client:
            while not least <= int(str(client.status()["free_bytes"])) <= most:
                assert time.monotonic() < deadline, client.status()
                time.sleep(0.05)

    def file(self, key: bytes) -> Path:
        (path,) = self.daemon.store.glob(f"blocks/*/*/*-{key.hex()}.*.kvb")
        return path


@dataclass
class Scene:
    """Where a condition is set up. ``values`` fill the braces in the strings of its row."""

    served: Served
    folder: Path
    stack: contextlib.ExitStack
    values: dict[str, object]
    user: int | None = None
    repair: Callable[[], object] = lambda: None

    @property
    def store(self) -> Path:
        return self.served.daemon.store

    @property
    def input(self) -> Path:
        """What the command reads from stdin."""
        return self.folder / "input"

    def serve(self, served: Served) -> None:
        """Let the row be about another daemon than the one that all rows share."""
        self.served = served
        self.stack.callback(served.kill)
        served.start()
        self.values.update(places(served, self.folder))

    def victim(self, size: int = 5000) -> Path:
        """Store a block that need not survive; return its file."""
        key = self.served.put(VICTIM, size)
        del self.served.blocks[key]
        self.values["key"] = key.hex()
        return self.served.file(key)

    def stopped_store(self) -> Path:
        """Make a store that nobody serves."""
        other = self.folder / "other"
        assert run_command("create", other, "--capacity", "64MiB").code == 0
        self.values["other"] = other
        return other

    def snapshot(self) -> dict[str, str]:
        return {
            f"{place}/{name}": digest
            for place, folder in (("store", self.store), ("folder", self.folder))
            for name, digest in snapshot(folder).items()
        }


def places(served: Served, folder: Path) -> dict[str, object]:
    daemon = served.daemon
    return {
        "pid": daemon.pid,
        "store": daemon.store,
        "socket": daemon.socket,
        "folder": folder,
        "new": folder / "new",
        "unused": folder / "unused.sock",
        "present": next(iter(served.blocks)).hex(),
    }


def snapshot(folder: Path) -> dict[str, str]:
    """Return what each file is: a digest of its content, or the kind of thing it is.

    Of the journal only what tells of blocks counts, so neither the order of use nor the marks of
    syncs; and what is about a probe does not count at all.
    """
    found = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if f"-{PROBE.hex()}" in path.name or path.is_socket():
            continue
        if path.is_symlink():
            found[name] = f"link to {path.readlink()}"
        elif path.is_dir():
            if not _FAN.search(str(path)):
                found[name] = "directory"
        elif path.name.startswith("journal."):
            found[name] = digest(block_events(path))
        elif os.access(path, os.R_OK):
            found[name] = digest(path.read_bytes())
        else:
            found[name] = "closed to us"
    return found


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def block_events(journal: Path) -> bytes:
    records = np.frombuffer(journal.read_bytes()[FILE_HEADER_BYTES:], RECORD)
    told = np.isin(records["kind"], (Kind.BEGIN, Kind.PUT, Kind.FREE, Kind.GHOST, Kind.PIN))
    chosen: bytes = records[told & (records["key"][:, 0] != PROBE[0])].tobytes()
    return chosen


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> set[str]:
    return {name for name in {*before, *after} if before.get(name) != after.get(name)}


# -- asking ---------------------------------------------------------------------------------------


def ask(scene: Scene, asking: str | Callable[[Scene], object]) -> Told:
    """Run the command as text and as JSON, which must agree; or make the call."""
    if callable(asking):
        try:
            asking(scene)
        except KVStoreError as error:
            return Told(error.exit_code, type(error).__name__, error.message, error.hint)
        raise AssertionError("nothing was refused")
    words = [word.format(**scene.values) for word in shlex.split(asking)]
    code, text = run(scene, words)
    again, line = run(scene, [*words, "--json"])
    assert again == code, line
    told = json.loads(line)
    assert (told["type"], told["code"]) == ("error", code)
    assert text.startswith(f"kvstore: {told['message']}")
    assert text.lower().rstrip(".").endswith(told["hint"].lower().rstrip("."))
    return Told(code, told["error"], told["message"], told["hint"])


def run(scene: Scene, words: list[str]) -> tuple[int, str]:
    """Run the command; return its exit code and the last line of stderr. stdout must be empty."""
    variables = {name: str(value) for name, value in scene.values.items() if name.isupper()}
    with scene.input.open("rb") as source:
        done = subprocess.run(
            [COMMAND, *words],
            stdin=source,
            capture_output=True,
            env={**os.environ, **variables},
            timeout=60,
            check=False,
            user=scene.user,
            extra_groups=None if scene.user is None else [],
        )
    assert done.stdout == b""
    lines = done.stderr.decode().splitlines()
    assert "Traceback" not in done.stderr.decode()
    if "serve" not in words:
        assert len(lines) == 1, lines
    return done.returncode, lines[-1]


def frame(key: bytes, data: bytes, length: int | None = None) -> Callable[[Scene], object]:
    """Return a put by a client that checks nothing; it announces ``length``, if given."""
    announced = len(data) if length is None else length
    meta = key + announced.to_bytes(4, "little") + protocol.short(b"") * 3
    header = protocol.Frame(
        protocol.Op.PUT,
        key_length=len(key),
        ack=Ack.WRITTEN,
        count=1,
        meta_bytes=len(meta),
        payload_bytes=announced,
    )

    def send(scene: Scene) -> None:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(30)
            sock.connect(str(scene.values["socket"]))
            sock.sendall(header.pack() + meta + data)
            with sock.makefile("rb") as answers:
                reply = protocol.unpack(answers.read(protocol.HEADER_BYTES))
                assert reply.flags & protocol.Flag.ERROR
                raise protocol.error_from(json.loads(answers.read(reply.meta_bytes)))

    return send

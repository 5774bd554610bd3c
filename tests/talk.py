"""A client that checks nothing: frames as a test spells them, on a socket of its own."""

from __future__ import annotations

import array
import contextlib
import fcntl
import itertools
import json
import mmap
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypedDict

from kvstore import protocol
from kvstore.protocol import HEADER_BYTES, Flag, Frame, Op
from tests.command import Daemon

ROOT = Path(__file__).parent.parent
PAGE = 4096
SEALS = 2 | 4
F_ADD_SEALS = 1033


class Reply(NamedTuple):
    frame: Frame
    meta: bytes
    payload: bytes

    @property
    def json(self) -> dict[str, Any]:
        value = json.loads(self.meta)
        assert isinstance(value, dict)
        return value

    @property
    def error(self) -> str:
        """The class of the error that this is; empty if it is none."""
        return str(self.json["error"]) if self.frame.flags & Flag.ERROR else ""

    @property
    def more(self) -> bool:
        return bool(self.frame.flags & Flag.MORE)


class Talker:
    """One connection. Request ids count from 1 unless a test gives one."""

    def __init__(self, place: Path | tuple[str, int], timeout: float = 20) -> None:
        family = socket.AF_UNIX if isinstance(place, Path) else socket.AF_INET
        self.sock = socket.socket(family, socket.SOCK_STREAM)
        self.sock.settimeout(timeout)
        try:
            self.sock.connect(str(place) if isinstance(place, Path) else place)
        except OSError:
            self.sock.close()
            raise
        self.descriptors: list[int] = []
        self._numbers = itertools.count(1)

    def __enter__(self) -> Talker:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []

    def send(
        self,
        op: int,
        meta: bytes = b"",
        payload: bytes = b"",
        descriptors: Sequence[int] = (),
        **fields: Any,
    ) -> int:
        """Send a request; return its id."""
        number = fields.pop("request", None) or next(self._numbers)
        lengths = {"meta_bytes": len(meta), "payload_bytes": len(payload)}
        frame = Frame(op, request=number, **{**lengths, **fields})
        data = frame.pack() + meta + payload
        if descriptors:
            sent = socket.send_fds(self.sock, [data], list(descriptors))
            data = data[sent:]
        self.sock.sendall(data)
        return number

    def receive(self) -> Reply:
        header = self._exactly(HEADER_BYTES)
        frame = protocol.unpack(header, reply=True)
        return Reply(frame, self._exactly(frame.meta_bytes), self._exactly(frame.payload_bytes))

    def _exactly(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            part, ancillary, _, _ = self.sock.recvmsg(length - len(data), socket.CMSG_SPACE(64))
            if not part:
                raise EOFError(f"{len(data)} of {length} bytes")
            for level, kind, found in ancillary:
                assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
                self.descriptors += array.array("i", found)
            data += part
        return bytes(data)

    def ask(self, op: int, meta: bytes = b"", payload: bytes = b"", **fields: Any) -> Reply:
        """Send a request and take its only reply."""
        number = self.send(op, meta, payload, **fields)
        reply = self.receive()
        assert reply.frame.request == number, reply
        return reply

    def ended(self) -> bool:
        """Tell whether the daemon has closed the connection, after what it still had to say."""
        with contextlib.suppress(ConnectionError):
            while self.sock.recv(1 << 16):
                pass
        return True

    # -- requests ---------------------------------------------------------------------------------

    def json(self, op: int, /, **value: object) -> Reply:
        return self.ask(op, protocol.dump(value))

    def status(self) -> dict[str, Any]:
        return self.json(Op.ADMIN, op="status").json

    def namespace(self, record: dict[str, object], *, create: bool = True) -> Reply:
        return self.json(Op.NAMESPACE, record=record, create=create)

    def put(self, keys: Sequence[bytes], blocks: Sequence[bytes], **fields: Any) -> Reply:
        return self.ask(Op.PUT, *put_parts(keys, blocks), **head(keys), **fields)

    def get(self, keys: Sequence[bytes], **fields: Any) -> list[bytes | None]:
        """Get blocks in the payload."""
        self.send(Op.GET, b"".join(keys), **head(keys), **fields)
        found: list[bytes | None] = []
        while True:
            reply = self.receive()
            assert not reply.error, reply
            found += blocks_of(reply)
            if not reply.more:
                return found

    def contains(self, keys: Sequence[bytes], **fields: Any) -> list[int]:
        meta = b"".join(keys) + struct.pack("<I", 0)
        return list(self.ask(Op.CONTAINS, meta, **head(keys), **fields).meta)

    def register(self, descriptors: Sequence[int], size: int) -> Reply:
        number = self.send(Op.REGISTER, protocol.dump({"bytes": size}), descriptors=descriptors)
        reply = self.receive()
        assert reply.frame.request == number
        return reply

    def cancel(self, number: int) -> int:
        return self.send(Op.CANCEL, struct.pack("<Q", number))


class Head(TypedDict):
    """What a header says of the keys."""

    key_length: int
    count: int


def head(keys: Sequence[bytes]) -> Head:
    return {"key_length": len(keys[0]), "count": len(keys)}


def put_parts(
    keys: Sequence[bytes], blocks: Sequence[bytes], checksums: Sequence[int] = ()
) -> tuple[bytes, bytes]:
    """Return metadata and payload of a put without region, parent, label and hints."""
    lengths = struct.pack(f"<{len(blocks)}I", *map(len, blocks))
    sums = struct.pack(f"<{len(checksums)}Q", *checksums)
    return b"".join(keys) + lengths + sums + b"\0\0\0", b"".join(blocks)


def region_put(keys: Sequence[bytes], offsets: Sequence[int], lengths: Sequence[int]) -> bytes:
    return b"".join(
        [
            *keys,
            struct.pack(f"<{len(lengths)}I", *lengths),
            struct.pack(f"<{len(offsets)}Q", *offsets),
            b"\0\0\0",
        ]
    )


def region_get(keys: Sequence[bytes], offsets: Sequence[int], room: Sequence[int]) -> bytes:
    return b"".join(
        [
            *keys,
            struct.pack(f"<{len(offsets)}Q", *offsets),
            struct.pack(f"<{len(room)}I", *room),
        ]
    )


def outcome(reply: Reply) -> tuple[list[int], list[int], list[int]]:
    """Return status, length and checksum of each block in the reply to a get."""
    count, meta = reply.frame.count, protocol.Meta(reply.meta)
    return meta.u8(count).tolist(), meta.u32(count).tolist(), meta.u64(count).tolist()


def blocks_of(reply: Reply) -> Iterator[bytes | None]:
    statuses, lengths, _ = outcome(reply)
    at = 0
    for status, length in zip(statuses, lengths, strict=True):
        yield reply.payload[at : at + length] if status == 0 else None
        at += length
    assert at == len(reply.payload)


class Shared:
    """A memfd of ours, sealed unless a test says otherwise, and our mapping of it."""

    def __init__(self, size: int, seals: int = SEALS, flags: int = os.MFD_ALLOW_SEALING) -> None:
        self.size = size
        self.descriptor = os.memfd_create("test", flags | os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, size)
        if seals:
            fcntl.fcntl(self.descriptor, F_ADD_SEALS, seals)
        self.memory = mmap.mmap(self.descriptor, size)

    def __enter__(self) -> Shared:
        return self

    def __exit__(self, *_: object) -> None:
        self.memory.close()
        os.close(self.descriptor)


# -- the daemon from outside ----------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def activated(daemon: Bare, *listeners: socket.socket) -> None:
    """Start the daemon as systemd does: sockets from descriptor 3 on."""
    moves = " ".join(f"{3 + n}<&{one.fileno()}" for n, one in enumerate(listeners))
    script = (
        f"exec {moves}; export LISTEN_PID=$$ LISTEN_FDS={len(listeners)}; "
        f'exec "$0" -m tests.bare_daemon "$1" "{{}}"'
    )
    with (daemon.folder / "daemon.log").open("ab") as log:
        daemon.process = subprocess.Popen(
            ["bash", "-c", script, sys.executable, str(daemon.folder)],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            pass_fds=[one.fileno() for one in listeners],
        )


def wait_ready(daemon: Daemon, place: Path | tuple[str, int] | None = None) -> None:
    """Wait until the daemon serves; by the socket alone, without our client."""
    limit = time.monotonic() + 30
    while time.monotonic() < limit:
        assert daemon.process is not None
        assert daemon.process.poll() is None, daemon.log
        with contextlib.suppress(OSError, EOFError), Talker(place or daemon.socket) as talker:
            if talker.status()["state"] in ("ready", "degraded"):
                return
        time.sleep(0.02)
    raise AssertionError(f"the daemon is not ready:\n{daemon.log}")


def descriptors_of(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


def comes_to(daemon: Daemon, descriptors: int) -> bool:
    """Tell whether the daemon's descriptors come down to so many: it opens some for a moment, to
    look at its store."""
    deadline = time.monotonic() + 5
    while descriptors_of(daemon) > descriptors:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def mapped_regions(daemon: Daemon) -> int:
    """Count the daemon's mappings of memfds of ours."""
    return Path(f"/proc/{daemon.pid}/maps").read_text().count("/memfd:test")


def eventually(condition: Any, seconds: float = 10) -> bool:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


def watches(pid: int) -> bool:
    """Whether a daemon watches its directories, which it begins in a moment after it is ready."""
    targets = []
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            targets.append(os.readlink(one))
    return any("inotify" in target for target in targets)


class Bare(Daemon):
    """A daemon with any settings of the server; see :mod:`tests.bare_daemon`."""

    settings: dict[str, object]

    def launch(self, *extra: str) -> None:
        settings = json.dumps(getattr(self, "settings", {}))
        command = [sys.executable, "-m", "tests.bare_daemon", str(self.folder), settings, *extra]
        with (self.folder / "daemon.log").open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=log, cwd=ROOT)

    def start(self, *extra: str) -> None:
        self.launch(*extra)
        wait_ready(self)

    def shut(self) -> None:
        """Let the next access of the disk wait."""
        (self.folder / "inside").unlink(missing_ok=True)
        (self.folder / "shut").touch()

    def open(self) -> None:
        (self.folder / "shut").unlink(missing_ok=True)

    def inside(self) -> bool:
        """Tell whether somebody waits at the gate."""
        return (self.folder / "inside").exists()


@contextlib.contextmanager
def bare(folder: Path, **settings: object) -> Iterator[Bare]:
    daemon = Bare(folder)
    daemon.settings = settings
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.open()
        if daemon.process is not None:
            daemon.process.kill()
            daemon.process.wait()

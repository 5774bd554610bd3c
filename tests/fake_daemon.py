"""A daemon in a thread that speaks the protocol and misbehaves as a test says.

It keeps blocks in a dictionary. ``script`` sees each request first; what it returns true for is not
answered here.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from kvstore import errors, protocol
from kvstore.answers import BlockStatus
from kvstore.protocol import Flag, Frame, Meta, Op


@dataclass
class Asked:
    """A request as it came in."""

    frame: Frame
    meta: bytes
    payload: bytes
    peer: Peer
    answered: bool = False

    @property
    def keys(self) -> list[bytes]:
        size = self.frame.key_length
        return [self.meta[n * size : (n + 1) * size] for n in range(self.frame.count)]

    @property
    def fields(self) -> Meta:
        """What follows the keys."""
        return Meta(self.meta[self.frame.key_length * self.frame.count :])

    def answer(
        self, meta: bytes = b"", payload: bytes = b"", /, *, op: int | None = None, **header: Any
    ) -> None:
        frame = Frame(self.frame.op if op is None else op, request=self.frame.request)
        frame = replace(frame, count=self.frame.count)
        frame = replace(frame, **header, meta_bytes=len(meta), payload_bytes=len(payload))
        self.answered = not frame.flags & Flag.MORE
        self.peer.send(frame.pack() + meta + payload)

    def fail(self, error: errors.KVStoreError) -> None:
        self.answer(protocol.error_meta(error), flags=Flag.ERROR)

    def rows(self) -> list[memoryview]:
        """Return the memory that a get names."""
        count, fields = self.frame.count, self.fields
        offsets, lengths = fields.u64(count).tolist(), fields.u32(count).tolist()
        memory = memoryview(self.peer.regions[self.frame.region])
        return [memory[o : o + n] for o, n in zip(offsets, lengths, strict=True)]


@dataclass
class Peer:
    """One client's connection."""

    sock: socket.socket
    regions: dict[int, mmap.mmap] = field(default_factory=dict)
    handles: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        with self.lock, contextlib.suppress(OSError):
            if fds:
                sent = socket.send_fds(self.sock, [data], list(fds))
                data = data[sent:]
            self.sock.sendall(data)

    def receive(self, size: int) -> tuple[bytes, list[int]]:
        data, fds = b"", []
        while len(data) < size:
            if self.sock.family == socket.AF_UNIX:
                part, got, _, _ = socket.recv_fds(self.sock, size - len(data), 4)
                fds += got
            else:
                part = self.sock.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data, fds


class FakeDaemon:
    """Listens at ``address``; its pidfd is that of a process that a test may end."""

    def __init__(self, path: Path | None) -> None:
        self.blocks: dict[tuple[int, int, bytes], bytes] = {}
        self.asked: list[Asked] = []
        self.script: Callable[[Asked], object] | None = None
        self.takes_regions = True
        self.checksum: str | None = "xxh3-64"
        self.limits: dict[str, int] = {}
        self.body = subprocess.Popen(["sleep", "600"])
        if path is None:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        else:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(path))
            self._listener.listen()
            self.address = str(path)
        self.peers: list[Peer] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, act: Callable[[], None]) -> None:
        thread = threading.Thread(target=act, daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop_all()
        self.end()
        for thread in self._threads:
            thread.join(10)

    def end(self) -> None:
        """End the process that the pidfd stands for."""
        self.body.kill()
        self.body.wait()

    def drop_all(self) -> None:
        for peer in list(self.peers):
            with contextlib.suppress(OSError):
                peer.sock.shutdown(socket.SHUT_RDWR)

    def operations(self) -> list[Op]:
        return [Op(one.frame.op) for one in self.asked]

    def of(self, op: Op) -> list[Asked]:
        return [one for one in self.asked if one.frame.op == op]

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            peer = Peer(sock)
            self.peers.append(peer)
            self._start(lambda peer=peer: self._serve(peer))  # type: ignore[misc]

    def _serve(self, peer: Peer) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                self._one(peer)
        peer.sock.close()

    def _one(self, peer: Peer) -> None:
        header, fds = peer.receive(protocol.HEADER_BYTES)
        frame = protocol.unpack(header)
        meta, payload = peer.receive(frame.meta_bytes)[0], peer.receive(frame.payload_bytes)[0]
        asked = Asked(frame, meta, payload, peer)
        try:
            self.asked.append(asked)
            if self.script is None or not self.script(asked):
                self.serve(asked, fds)
        except errors.KVStoreError as error:
            asked.fail(error)
        finally:
            for fd in fds:
                os.close(fd)

    def serve(self, asked: Asked, fds: Sequence[int] = ()) -> None:
        """Answer as a daemon should."""
        act = getattr(self, "_" + Op(asked.frame.op).name.lower())
        act(asked, *([fds] if asked.frame.op == Op.REGISTER else []))

    def _hello(self, asked: Asked) -> None:
        hello = {"version": protocol.VERSION, "checksum": self.checksum, "limits": self.limits}
        meta = protocol.dump(hello)
        frame = replace(asked.frame, meta_bytes=len(meta), flags=0)
        fds = []
        if asked.peer.sock.family == socket.AF_UNIX:
            fds = [os.pidfd_open(self.body.pid)]
        asked.peer.send(frame.pack() + meta, fds)
        for fd in fds:
            os.close(fd)

    def _namespace(self, asked: Asked) -> None:
        asked.peer.handles += 1
        asked.answer(protocol.dump({"handle": asked.peer.handles}))

    def _register(self, asked: Asked, fds: Sequence[int]) -> None:
        size = Meta(asked.meta).json()["bytes"]
        if not self.takes_regions:
            raise errors.UsageError("no regions here", "")
        assert len(fds) == 1
        assert os.fstat(fds[0]).st_size == size
        number = len(asked.peer.regions) + 1
        asked.peer.regions[number] = mmap.mmap(fds[0], int(str(size)))
        asked.answer(protocol.dump({"region": number}))

    def _unregister(self, asked: Asked) -> None:
        asked.answer()

    def _put(self, asked: Asked) -> None:
        frame, fields = asked.frame, asked.fields
        lengths = fields.u32(frame.count).tolist()
        starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        memory = memoryview(asked.payload)
        if frame.region:
            starts = fields.u64(frame.count).tolist()
            memory = memoryview(asked.peer.regions[frame.region])
        sums = fields.u64(frame.count).tolist() if frame.flags & Flag.CHECKSUM else None
        statuses = bytearray(frame.count)
        for number, key in enumerate(asked.keys):
            data = bytes(memory[starts[number] :][: lengths[number]])
            if sums and sums[number] != xxhash.xxh3_64_intdigest(data):
                statuses[number] = BlockStatus.MISMATCH
                continue
            self.blocks[frame.handle, frame.shard, key] = data
        asked.answer(bytes(statuses))

    def find(self, asked: Asked) -> list[bytes | None]:
        frame = asked.frame
        return [self.blocks.get((frame.handle, frame.shard, key)) for key in asked.keys]

    def _get(self, asked: Asked) -> None:
        found = self.find(asked)
        step = len(found) if asked.frame.region else 16
        for start in range(0, len(found), step):
            flags = Flag.MORE if start + step < len(found) else 0
            self.reply(asked, found[start : start + step], flags, start)

    def reply(
        self, asked: Asked, found: Sequence[bytes | BlockStatus | None], flags: int = 0, at: int = 0
    ) -> None:
        """Answer a get with these blocks for its keys from ``at`` on."""
        rows = asked.rows()[at:] if asked.frame.region else None
        statuses, lengths, sums, payload = bytearray(), [], [], []
        for number, block in enumerate(found):
            data = block if isinstance(block, bytes) else b""
            status = block if isinstance(block, BlockStatus) else BlockStatus.OK
            if block is None:
                status = BlockStatus.MISS
            elif data and rows is not None and len(data) > len(rows[number]):
                status = BlockStatus.TOO_LARGE
            elif data and rows is not None:
                rows[number][: len(data)] = data
            elif data:
                payload.append(data)
            statuses.append(status)
            lengths.append(len(data))
            sums.append(xxhash.xxh3_64_intdigest(data) if data else 0)
        meta = (
            bytes(statuses) + np.array(lengths, "<u4").tobytes() + np.array(sums, "<u8").tobytes()
        )
        asked.answer(meta, b"".join(payload), flags=flags, count=len(found))

    def _stream_get(self, asked: Asked) -> None:
        found = self.find(asked)
        for number, block in enumerate(found):
            flags = Flag.MORE if number < len(found) - 1 else 0
            self.reply(asked, [block], flags, number)

    def _contains(self, asked: Asked) -> None:
        mask = bytes(block is not None for block in self.find(asked))
        if asked.frame.flags & Flag.PREFIX:
            run = (mask + b"\0").index(0)
            asked.answer(run.to_bytes(4, "little"))
        else:
            asked.answer(mask)

    def _touch(self, asked: Asked) -> None:
        asked.answer()

    def _statuses(self, asked: Asked) -> bytes:
        return bytes(
            BlockStatus.MISS if block is None else BlockStatus.OK for block in self.find(asked)
        )

    def _delete(self, asked: Asked) -> None:
        statuses = self._statuses(asked)
        for key in asked.keys:
            self.blocks.pop((asked.frame.handle, asked.frame.shard, key), None)
        asked.answer(statuses)

    def _pin(self, asked: Asked) -> None:
        asked.answer(self._statuses(asked))

    _unpin = _pin

    def _flush(self, asked: Asked) -> None:
        asked.answer(protocol.dump({"errors": []}))

    def _cancel(self, asked: Asked) -> None:
        target = int.from_bytes(asked.meta, "little")
        for other in self.asked:
            if other.frame.request == target and other.peer is asked.peer:
                if other.frame.op != Op.SUBSCRIBE and not other.answered:
                    other.fail(errors.Cancelled("cancelled", ""))
                asked.answer()

    def _subscribe(self, asked: Asked) -> None:
        asked.answer((1).to_bytes(8, "little"))

    def _admin(self, asked: Asked) -> None:
        request = Meta(asked.meta).json()
        if request["op"] == "list":
            rows = [["00" * 16, shard, key.hex()] for _, shard, key in self.blocks]
            asked.answer(protocol.dump({"blocks": rows, "next": None}))
        else:
            asked.answer(protocol.dump({"state": "ready"}))

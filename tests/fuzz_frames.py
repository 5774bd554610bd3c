"""Frames for the fuzzer of the socket: valid ones of every operation, changed field by field."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import select
import socket
import struct
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvstore import protocol
from kvstore.errors import ProtocolError
from kvstore.protocol import HEADER, HEADER_BYTES, Flag, Frame, Op
from tests.stores import MIB, key
from tests.talk import Shared

POOL = [key(n) for n in range(64)]
"""The keys that frames are about before they are changed."""
NOISE = random.Random(1).randbytes(2 * MIB)
REGION_BYTES = 1 * MIB
SMALL = (1, 2, 100, 4095, 4096, 4097, 20_000, 65_536)
LARGE = (300_000, MIB)
NUMBERS: tuple[int, ...] = (
    0,
    1,
    2,
    3,
    7,
    8,
    31,
    33,
    64,
    65,
    127,
    128,
    255,
    256,
    0x7FFF,
    0x8000,
    0xFFFF,
)
NUMBERS += (4095, 4096, 1 << 24, (1 << 24) + 1, 1 << 26, (1 << 26) + 1, (1 << 31) - 1, 1 << 31)
NUMBERS += ((1 << 32) - 4096, (1 << 32) - 1, 1 << 32, 1 << 63, (1 << 64) - 4096, (1 << 64) - 1)
VALUES: tuple[object, ...] = (
    *(None, True, False, 0, 1, -1, 1 << 31, 1 << 63, 1 << 64, -(1 << 70), 10**400, 0.5, 1e308),
    *(float("nan"), float("inf"), "", "x", "status", "list", "\ud800", "\0", "ä" * 300, "9" * 5000),
    *([], {}, [[]], [0] * 3000, {"": {}}, {"name": None}, {"name": ["\udfff"]}, {"private": 1}),
)
TEXTS = (
    *(b"", b"{", b"}", b"null", b"[]", b'"x"', b"0", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"{}x"),
    *(b'{"op":', b'{"op":"status","op":1}', b'{"bytes":' + b"9" * 5000 + b"}", b'{"a":NaN}'),
    *(b'{"record":' + b"[" * 60_000, b'{"record":' + b'{"a":' * 20_000, b"{}" + b" " * 100_000),
)


@dataclass
class Sent:
    """A frame as bytes, what was done to it, and whether its header tells its length."""

    data: bytes
    descriptors: list[int] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    frame: Frame | None = None
    """The header as the daemon must read it; None: the connection is spoiled by this frame."""

    def __str__(self) -> str:
        op = self.data[4] if len(self.data) > 4 else -1
        name = Op(op).name if op in set(Op) else str(op)
        told = ", ".join(self.changes) or "as it should be"
        return f"{name} ({told}), {len(self.data)} bytes: {self.data[:120].hex()}"


class Palette:
    """Descriptors to send: good regions, and everything that is none. They live as long as it."""

    def __init__(self) -> None:
        self.good = [Shared(REGION_BYTES) for _ in range(3)]
        self._stack = contextlib.ExitStack()
        for shared in self.good:
            self._stack.enter_context(shared)
        self.bad = [*self._files(), *self._memory(), *self._sockets()]
        for descriptor in self.bad:
            self._stack.callback(os.close, descriptor)

    def close(self) -> None:
        self._stack.close()

    def _files(self) -> list[int]:
        file, name = tempfile.mkstemp()
        os.unlink(name)
        os.ftruncate(file, REGION_BYTES)
        devices = [os.open(path, os.O_RDWR) for path in ("/dev/null", "/dev/zero")]
        directory = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
        return [file, directory, os.open("/", os.O_PATH), *devices]

    def _memory(self) -> list[int]:
        """Return memfds without seals, with some, with too many, of another size, empty."""
        made = [Shared(REGION_BYTES, seals=seals) for seals in (0, 2, 4)]
        made.append(Shared(REGION_BYTES + 4096))
        for shared in made:
            shared.memory.close()
        frozen = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.ftruncate(frozen, REGION_BYTES)
        fcntl.fcntl(frozen, 1033, 2 | 4 | 8)
        empty = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        return [*(shared.descriptor for shared in made), frozen, empty]

    def _sockets(self) -> list[int]:
        ends = [one.detach() for one in socket.socketpair()]
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM).detach()
        poll = select.epoll()
        epoll = os.dup(poll.fileno())
        poll.close()
        return [*os.pipe(), *ends, listener, epoll, os.pidfd_open(os.getpid())]


class Maker:
    """Makes the frames of one conversation. Numbers of requests count from 1."""

    def __init__(self, chance: random.Random, palette: Palette) -> None:
        self.chance = chance
        self.palette = palette
        self.number = 0
        self._makers: dict[Op, Callable[[], tuple[Frame, bytes, bytes, list[int]]]] = {
            Op.HELLO: lambda: self._spoken(Op.HELLO, {"version": 1}),
            Op.NAMESPACE: self._namespace,
            Op.REGISTER: self._register,
            Op.UNREGISTER: lambda: (Frame(Op.UNREGISTER, region=self._region()), b"", b"", []),
            Op.PUT: self._put,
            Op.GET: lambda: self._get(Op.GET),
            Op.STREAM_GET: lambda: self._get(Op.STREAM_GET),
            Op.CONTAINS: lambda: self._asked(Op.CONTAINS, self._u32(), Flag.PREFIX),
            Op.TOUCH: lambda: self._asked(Op.TOUCH),
            Op.DELETE: lambda: self._asked(Op.DELETE),
            Op.PIN: lambda: self._asked(Op.PIN, self._u32()),
            Op.UNPIN: lambda: self._asked(Op.UNPIN),
            Op.FLUSH: lambda: (Frame(Op.FLUSH), b"", b"", []),
            Op.CANCEL: self._cancel,
            Op.SUBSCRIBE: lambda: (Frame(Op.SUBSCRIBE, handle=self._handle()), b"", b"", []),
            Op.ADMIN: self._admin,
        }
        self._weights = [_WEIGHTS.get(op, 4) for op in self._makers]

    def next(self, changed: float) -> Sent:
        """Return the next frame, with the probability ``changed`` one that is changed."""
        chance = self.chance
        self.number += 1
        op = chance.choices(list(self._makers), self._weights)[0]
        frame, meta, payload, descriptors = self._makers[op]()
        frame = replace(frame, request=self.number)
        sent = Sent(b"", descriptors)
        while chance.random() < changed:
            changed *= 0.7
            frame, meta, payload = self._change(sent, frame, meta, payload)
        lengths = {"meta_bytes": len(meta), "payload_bytes": len(payload)}
        header = bytearray(replace(frame, **lengths).pack())
        if "header" in sent.changes:
            self._change_header(sent, header)
        sent.data = bytes(header) + meta + payload
        if "longer header" in sent.changes:
            extra = chance.randrange(1, 985)
            struct.pack_into("<H", header, 6, HEADER_BYTES + extra)
            sent.data = bytes(header) + NOISE[:extra] + meta + payload
        sent.frame = told_truly(sent.data)
        return sent

    # -- as they should be ------------------------------------------------------------------------

    def _keys(self) -> list[bytes]:
        return self.chance.sample(POOL, self.chance.choice((1, 1, 2, 3, 8, 30)))

    def _handle(self) -> int:
        return self.chance.choice((0, 0, 0, 0, 1, 2, 3))

    def _region(self) -> int:
        return self.chance.choice((0, 1, 1, 2, 3))

    def _head(self, op: Op, keys: Sequence[bytes], **fields: int) -> Frame:
        chance = self.chance
        return Frame(
            op,
            handle=self._handle(),
            shard=chance.choice((0, 0, 0, 1, 65_535)),
            key_length=len(keys[0]),
            count=len(keys),
            deadline_ms=chance.choice((0, 0, 0, 1, 20, 1000, 0xFFFFFFFF)),
            **fields,
        )

    def _spoken(
        self, op: Op, value: dict[str, object], descriptors: Sequence[int] = ()
    ) -> tuple[Frame, bytes, bytes, list[int]]:
        return Frame(op), protocol.dump(value), b"", list(descriptors)

    def _namespace(self) -> tuple[Frame, bytes, bytes, list[int]]:
        record: dict[str, object] = {"name": f"fuzz {self.chance.randrange(6)}"}
        create = self.chance.random() < 0.8
        return self._spoken(Op.NAMESPACE, {"record": record, "create": create})

    def _register(self) -> tuple[Frame, bytes, bytes, list[int]]:
        shared = self.chance.choice(self.palette.good)
        return self._spoken(Op.REGISTER, {"bytes": shared.size}, [shared.descriptor])

    def _put(self) -> tuple[Frame, bytes, bytes, list[int]]:
        chance = self.chance
        keys = self._keys()
        sizes = [chance.choice(SMALL) for _ in keys]
        if chance.random() < 0.05:
            sizes[0] = chance.choice(LARGE)
        region = self._region() if sum(sizes) < REGION_BYTES and chance.random() < 0.4 else 0
        payload, offsets = b"", b""
        if region:
            starts = [chance.randrange(REGION_BYTES - size + 1) for size in sizes]
            offsets = struct.pack(f"<{len(starts)}Q", *starts)
        else:
            start = chance.randrange(4096)
            payload = b"".join(NOISE[start : start + size] for size in sizes)
        hints = chance.choice((b"", b"", b'{"session":"s","end_of_session":true,"priority":3}'))
        tail = (chance.choice((b"", POOL[0])), chance.choice((b"", b"label")), hints)
        flags = chance.choice((0, 0, Flag.CHAIN, Flag.OVERWRITE, Flag.OVERWRITE | Flag.CHAIN))
        checks = b""
        if chance.random() < 0.1:
            flags |= Flag.CHECKSUM
            checks = NOISE[: 8 * len(keys)]
        lengths = struct.pack(f"<{len(sizes)}I", *sizes)
        meta = b"".join([*keys, lengths, offsets, checks, *map(protocol.short, tail)])
        ack = chance.choices((0, 1, 2), (10, 6, 1))[0]
        frame = self._head(Op.PUT, keys, flags=int(flags), ack=ack, region=region)
        return frame, meta, payload, []

    def _get(self, op: Op) -> tuple[Frame, bytes, bytes, list[int]]:
        keys, region, meta = self._keys(), self._region(), b""
        if region:
            rooms = [self.chance.choice(SMALL) for _ in keys]
            starts = [self.chance.randrange(REGION_BYTES - room + 1) for room in rooms]
            meta = struct.pack(f"<{len(keys)}Q{len(keys)}I", *starts, *rooms)
        return self._head(op, keys, region=region), b"".join(keys) + meta, b"", []

    def _u32(self) -> bytes:
        return struct.pack("<I", self.chance.choice((0, 1, 5000, 600_000, 0xFFFFFFFF)))

    def _asked(
        self, op: Op, tail: bytes = b"", flag: int = 0
    ) -> tuple[Frame, bytes, bytes, list[int]]:
        keys = self._keys()
        frame = self._head(op, keys, flags=self.chance.choice((0, flag)))
        return frame, b"".join(keys) + tail, b"", []

    def _cancel(self) -> tuple[Frame, bytes, bytes, list[int]]:
        number = max(0, self.number - self.chance.choice((1, 1, 1, 2, 3, 10)))
        return Frame(Op.CANCEL), struct.pack("<Q", number), b"", []

    def _admin(self) -> tuple[Frame, bytes, bytes, list[int]]:
        listed: dict[str, object] = {
            "op": "list",
            "handle": self.chance.choice((None, 0, 1)),
            "start": 0,
        }
        status: dict[str, object] = {"op": "status"}
        return self._spoken(Op.ADMIN, self.chance.choice((status, listed)))

    # -- as they should not be --------------------------------------------------------------------

    def _change(
        self, sent: Sent, frame: Frame, meta: bytes, payload: bytes
    ) -> tuple[Frame, bytes, bytes]:
        chance = self.chance
        kinds = ["field", "field", "meta", "meta", "payload", "descriptors", "header"]
        kinds += ["longer header", "all lengths"] if chance.random() < 0.5 else []
        if frame.op in protocol.JSON_OPS:
            kinds += ["json"] * 8
        kind = chance.choice(kinds)
        sent.changes.append(kind)
        if kind == "field":
            name, bits = chance.choice(_FIELDS)
            frame = replace(frame, **{name: self._number(bits, getattr(frame, name))})
            sent.changes[-1] = name
        elif kind == "meta":
            meta = self._bytes(meta)
        elif kind == "json":
            meta = self._json(meta)
        elif kind == "payload":
            payload = chance.choice((b"x", payload[:-1], payload + b"x", NOISE[:5000], b""))
        elif kind == "descriptors":
            every = [*self.palette.bad, *(shared.descriptor for shared in self.palette.good)]
            sent.descriptors = chance.choices(every, k=chance.choice((1, 1, 1, 2, 3, 17)))
        elif kind == "all lengths" and frame.op == Op.PUT and frame.count < 1000:
            at = frame.count * frame.key_length
            value = struct.pack("<I", self._number(32, 0))
            meta = meta[:at] + value * frame.count + meta[at + 4 * frame.count :]
        return frame, meta, payload

    def _change_header(self, sent: Sent, header: bytearray) -> None:
        """Let the header tell lengths that are not those of the frame, or be no header."""
        values = list(HEADER.unpack(header))
        at, bits = self.chance.choice(((-1, 32), (-2, 32), (-4, 32), (3, 16), (0, 0)))
        if bits:
            values[at] = self._number(bits, values[at])
        else:
            values[0] = self.chance.choice((b"KVF2", b"GET ", b"\0\0\0\0", b"\x16\x03\x01\x02"))
        header[:] = HEADER.pack(*values)
        sent.changes.append(f"header field {at}")

    def _number(self, bits: int, old: int) -> int:
        chance = self.chance
        top = (1 << bits) - 1
        choices = (chance.choice(NUMBERS), old + 1, old - 1, top, chance.getrandbits(bits))
        return chance.choice(choices) & top

    def _bytes(self, meta: bytes) -> bytes:
        """Change metadata: cut it, lengthen it, overwrite a number in it."""
        chance, data = self.chance, bytearray(meta)
        kind = chance.randrange(5)
        at = chance.randrange(len(data)) if data else 0
        if kind == 0:
            del data[at:]
        elif kind == 1:
            data += NOISE[: chance.choice((1, 4, 8, 255, 70_000))]
        elif kind == 2:
            width = chance.choice((1, 4, 8))
            data[at : at + width] = self._number(8 * width, 0).to_bytes(width, "little")
        elif kind == 3:
            data[at : at + 1] = b""
        else:
            for _ in range(4):
                if data:
                    data[chance.randrange(len(data))] = chance.randrange(256)
        return bytes(data)

    def _json(self, meta: bytes) -> bytes:
        chance = self.chance
        if chance.random() < 0.25:
            return chance.choice(TEXTS)
        try:
            value: Any = json.loads(meta)
        except (ValueError, RecursionError):
            return chance.choice(TEXTS)
        if not isinstance(value, dict):
            return protocol.dump(chance.choice(VALUES))
        inner = value["record"] if isinstance(value.get("record"), dict) else value
        target = chance.choice((value, inner))
        name = chance.choice([*target, "op", "handle", "start", "record", "bytes", "\ud800", ""])
        if chance.random() < 0.15:
            target.pop(name, None)
        else:
            target[name] = chance.choice(VALUES)
        if chance.random() < 0.3:
            return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
        return protocol.dump(value)


_WEIGHTS = {Op.PUT: 20, Op.GET: 14, Op.STREAM_GET: 10, Op.REGISTER: 6, Op.CANCEL: 8, Op.FLUSH: 1}
_FIELDS = (
    *(("op", 8), ("flags", 8), ("request", 64), ("handle", 16), ("shard", 16), ("key_length", 8)),
    *(("ack", 8), ("region", 16), ("count", 32), ("count", 8), ("deadline_ms", 32)),
)


def told_truly(data: bytes) -> Frame | None:
    """Return the header if the daemon can tell by it where the next frame begins."""
    try:
        frame = protocol.unpack(data[:HEADER_BYTES])
    except ProtocolError:
        return None
    length = frame.header_bytes + frame.meta_bytes + frame.payload_bytes
    return frame if length == len(data) else None

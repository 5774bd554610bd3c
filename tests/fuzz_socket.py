"""Clients that misbehave, against a daemon that must go on as if nothing were.

``python -m tests.fuzz_socket --frames N --seed S``. Several clients talk at a time, each on a
connection of its own: frames of every operation, many of them changed (:mod:`tests.fuzz_frames`),
cut to pieces, cut short, with descriptors of all kinds; then they wait for what they are owed, stop
sending, stop reading, stall or vanish. What is checked all the time:

- a frame whose header tells its length is answered, once, by whole frames that make sense, and a
  connection of such frames is never closed;
- after every :data:`ROUND` frames a well-behaved client puts and gets;
- the daemon runs, its log holds no traceback, it counts no failure of its own;
- when nobody talks, its descriptors and threads are as many as at first, no region is mapped, and
  its anonymous memory has not grown by more than :data:`ANON_BOUND` since the run was young;
- at the end every block can be deleted: no file, no block in memory, nothing dirty is left, and all
  of the memory for blocks in flight can be had.

What a conversation sends depends on seed and number alone; ``--only NUMBER`` repeats one of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import secrets
import select
import socket
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from kvstore import errors, protocol
from kvstore.answers import BlockStatus
from kvstore.client import Client
from kvstore.protocol import HEADER_BYTES, Flag, Op
from tests.fuzz_frames import Maker, Palette, Sent
from tests.stores import MIB, block, key
from tests.talk import Bare, Talker, bare, descriptors_of, eventually, mapped_regions, watches

ROUND = 250
CLIENTS = 8
PATIENCE = 4.0
GAP = 1.0
"""Seconds after which a client of ours was so slow that the daemon may have lost patience."""
ANSWER_SECONDS = 30.0
SAMPLES = 10
ANON_BOUND = 24 * MIB
SETTINGS = {"memory": 32 * MIB, "request_timeout": PATIENCE}


class Failure(AssertionError):
    """The daemon did something that it must not."""


class Caller:
    """One misbehaving client: sends pieces of frames and reads replies, without ever waiting."""

    def __init__(self, place: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(20)
        self.sock.connect(str(place))
        self.sock.setblocking(False)
        self.out: deque[tuple[memoryview, list[int]]] = deque()
        self.owed: dict[int, int] = {}
        """Requests that want an answer -> their operation."""
        self.feeds: set[int] = set()
        self.exact = True
        """Nothing was sent after which the daemon may close or leave something unanswered."""
        self.over = False
        self.deaf = False
        self.answers: Counter[str] = Counter()
        self._in = bytearray()
        self._looked = time.monotonic()

    def push(self, sent: Sent, pieces: list[int]) -> None:
        """Send a frame later, cut at ``pieces``."""
        frame = sent.frame
        if frame is None or frame.request in self.owed or frame.request in self.feeds:
            self.exact = False
        elif self.exact:
            self.owed[frame.request] = frame.op
            if frame.op == Op.SUBSCRIBE:
                self.feeds.add(frame.request)
        view = memoryview(sent.data)
        cuts = [0, *sorted(pieces), len(view)]
        where = random.Random(len(view)).randrange(len(cuts) - 1) if pieces else 0
        for number, (start, end) in enumerate(itertools.pairwise(cuts)):
            if end > start:
                here = sent.descriptors if number == (where if where < 2 else 0) else []
                self.out.append((view[start:end], here))

    def pump(self) -> bool:
        """Send and read what is possible; return whether anything was."""
        now = time.monotonic()
        if now - self._looked > GAP:
            self.exact = False
        self._looked = now
        moved = self._send()
        if not self.deaf:
            moved = self._receive() or moved
        return moved

    def _send(self) -> bool:
        if not self.out or self.over:
            return False
        view, descriptors = self.out.popleft()
        try:
            if descriptors:
                done = socket.send_fds(self.sock, [view], descriptors)
            else:
                done = self.sock.send(view)
        except BlockingIOError:
            self.out.appendleft((view, descriptors))
            return False
        except OSError as error:
            if isinstance(error, (BrokenPipeError, ConnectionResetError)):
                self._closed()
            else:  # too many descriptors on their way: without them
                self.out.appendleft((view, []))
            return False
        if done < len(view):
            self.out.appendleft((view[done:], []))
        return True

    def _receive(self) -> bool:
        try:
            data = self.sock.recv(1 << 20)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._closed()
            return False
        self._in += data
        for part in self._frames():
            self._take(*part)
        return True

    def _closed(self) -> None:
        self.over = True
        if self.exact and (self.owed or self.out):
            left = {number: Op(op).name for number, op in self.owed.items() if op in set(Op)}
            raise Failure(f"a connection was closed that did nothing wrong, unanswered: {left}")

    def _frames(self) -> Iterator[tuple[protocol.Frame, bytes, bytes]]:
        at = 0
        while len(self._in) - at >= HEADER_BYTES:
            frame = protocol.unpack(self._in[at : at + HEADER_BYTES], reply=True)
            start = at + frame.header_bytes
            middle = start + frame.meta_bytes
            end = middle + frame.payload_bytes
            if len(self._in) < end:
                break
            yield frame, bytes(self._in[start:middle]), bytes(self._in[middle:end])
            at = end
        del self._in[:at]

    def _take(self, frame: protocol.Frame, meta: bytes, payload: bytes) -> None:
        number, failed = frame.request, bool(frame.flags & Flag.ERROR)
        if failed:
            self._note_error(meta)
        if failed and not number and frame.op == Op.ADMIN:  # the connection is spoiled
            if self.exact and self.owed.get(0) != Op.ADMIN:
                raise Failure(f"told of a spoiled connection: {meta!r}")
            self.owed.pop(0, None)
        elif number in self.owed:
            op = self.owed[number]
            if frame.op != op and self.exact:
                raise Failure(f"operation {op} was answered by {frame.op}")
            if frame.op in (Op.GET, Op.STREAM_GET) and not failed:
                check_blocks(frame, meta, payload)
            if failed or not frame.flags & Flag.MORE:
                del self.owed[number]
                if failed:
                    self.feeds.discard(number)
        elif self.exact and not (frame.op == Op.EVENT and number in self.feeds):
            raise Failure(f"an answer that nobody is owed: {frame}")

    def _note_error(self, meta: bytes) -> None:
        told = protocol.Meta(meta).json()
        name, message = str(told["error"]), str(told["message"])
        if not isinstance(getattr(errors, name, None), type) or "the daemon failed" in message:
            raise Failure(f"an error of the daemon's own: {told}")
        self.answers[name] += 1


def check_blocks(frame: protocol.Frame, meta: bytes, payload: bytes) -> None:
    """Compare the blocks of a reply with the checksums in it."""
    fields = protocol.Meta(meta)
    statuses, lengths = fields.u8(frame.count), fields.u32(frame.count).tolist()
    sums, at = fields.u64(frame.count).tolist(), 0
    if not payload:
        return
    for position, status in enumerate(statuses.tolist()):
        if status == BlockStatus.OK:
            end = at + lengths[position]
            if xxhash.xxh3_64_intdigest(payload[at:end]) != sums[position]:
                raise Failure("a block that is not what its checksum says")
            at = end
    if at != len(payload):
        raise Failure(f"{len(payload)} bytes for blocks of {at}")


ENDS = ("wait", "half", "vanish", "cut", "cut and half", "cut and stay", "deaf")
END_WEIGHTS = (40, 20, 20, 10, 5, 1, 4)


class Conversation:
    """What one client does from beginning to end; ``step`` until ``done``."""

    def __init__(self, seed: int, number: int, place: Path, palette: Palette) -> None:
        self.number = number
        self.done = False
        self.sent: list[Sent] = []
        self._chance = random.Random(f"{seed} {number}")
        self._maker = Maker(self._chance, palette)
        self.caller = Caller(place)
        self._left = self._chance.choice((1, 3, 10, 30, 100))
        self._changed = self._chance.choice((0.0, 0.3, 0.6, 0.9))
        self._framed = self._chance.random() < 0.6
        """No frame spoils the connection, so that it lasts."""
        self.end = self._chance.choices(ENDS, END_WEIGHTS)[0]
        self._limit: float | None = None
        self._half = False

    def step(self) -> int:
        """Go on a little; return how many frames were begun."""
        caller = self.caller
        if self._left and len(caller.out) < 20 and not caller.over:
            return self._push()
        moved = caller.pump()
        if self._left and not caller.over:
            return 0
        if self._limit is None:
            self._begin_end()
        if not moved:
            self._go_on_ending()
        return 0

    def stop(self) -> None:
        """Begin no further frame."""
        if self._left and self.end.startswith("cut"):
            self.end = "half"
        self._left = 0

    def _push(self) -> int:
        chance = self._chance
        sent = self._maker.next(self._changed)
        while self._framed and sent.frame is None:
            sent = self._maker.next(self._changed)
        self._left -= 1
        self.sent.append(sent)
        pieces: list[int] = []
        if chance.random() < 0.2:
            pieces = [chance.randrange(len(sent.data)) for _ in range(chance.choice((1, 3, 10)))]
        if not self._left and self.end.startswith("cut"):
            sent.data = sent.data[: chance.randrange(1, len(sent.data))]
            sent.frame = None
        self.caller.push(sent, pieces)
        for _ in range(chance.choice((0, 1, 1, 3))):
            self.caller.pump()
        return 1

    def _begin_end(self) -> None:
        seconds = {"vanish": 0.0, "cut": 0.1, "deaf": 0.5}.get(self.end, ANSWER_SECONDS)
        if self.end == "wait" and not self.caller.exact:
            seconds = 0.2
        self._limit = time.monotonic() + seconds
        self.caller.deaf = self.end == "deaf"
        if self.end in ("vanish", "cut", "deaf", "cut and stay"):
            self.caller.exact = False

    def _go_on_ending(self) -> None:
        caller, late = self.caller, time.monotonic() > (self._limit or 0)
        if caller.over or (self.end == "wait" and caller.exact and not self._open()):
            self.close()
        elif self.end in ("half", "cut and half") and not caller.out and not self._half:
            self._half = True
            with suppress(OSError):
                caller.sock.shutdown(socket.SHUT_WR)
        elif late and (self.end in ("vanish", "cut", "deaf") or not caller.exact):
            if self.end in ("half", "cut and half", "cut and stay"):
                raise Failure(f"a connection with the end {self.end!r} was not closed")
            self.close()
        elif late:
            raise Failure(f"no answer in {ANSWER_SECONDS:g} s: {caller.owed}")

    def _open(self) -> bool:
        return bool(self.caller.owed or self.caller.out)

    def close(self) -> None:
        self.done = True
        self.caller.sock.close()

    def __str__(self) -> str:
        frames = "\n".join(f"  {number} {sent}" for number, sent in enumerate(self.sent, 1))
        return f"conversation {self.number}, end {self.end!r}:\n{frames}"


class Sample(NamedTuple):
    """What the daemon takes while nobody talks to it."""

    frames: int
    anonymous: int
    descriptors: int
    threads: int


def process_figures(pid: int) -> dict[str, int]:
    """Return figures of /proc/PID/status; those of memory in bytes."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    return found


class Fuzzer:
    """A run of ``frames`` against one daemon."""

    def __init__(self, daemon: Bare, seed: int, frames: int, only: int | None = None) -> None:
        self.daemon = daemon
        self.samples: list[Sample] = []
        self.answers: Counter[str] = Counter()
        self.conversations = 0
        self._seed = seed
        self._frames = frames
        self._only = only
        self._recent: deque[Conversation] = deque(maxlen=2 * CLIENTS)
        self._log = 0
        self._good = Client(str(daemon.socket), 60)
        self._puts = 0

    def run(self) -> None:
        palette = Palette()
        try:
            self._behave()  # the first put fixes the length of keys in the default namespace
            self._run(palette)
            self._good.close()
            self._clean_up()
        except BaseException:
            told = Path(tempfile.gettempdir()) / f"fuzz_socket_{self._seed}.txt"
            told.write_text("\n".join([*map(str, self._recent), "", self.daemon.log]))
            print(f"seed {self._seed}: conversations and the log are in {told}", file=sys.stderr)
            raise
        finally:
            self._good.close()
            palette.close()

    def _run(self, palette: Palette) -> None:
        talking: list[Conversation] = []
        frames = since = 0
        chance = random.Random(self._seed)
        every = max(1, self._frames // SAMPLES)
        assert eventually(lambda: watches(self.daemon.pid))
        self._sample(0)
        while frames < self._frames or talking:
            while len(talking) < CLIENTS and frames < self._frames and not self._at_end():
                talking.append(self._begin(palette))
            if not talking:
                break
            one = chance.choice(talking)
            begun = self._step(one)
            frames, since = frames + begun, since + begun
            if not begun:
                self._rest(talking)
            if one.done:
                self.answers += one.caller.answers
                talking.remove(one)
            if since >= ROUND:
                since = 0
                self._behave()
                self._look()
            if frames // every >= len(self.samples) and begun:
                self._let_end(talking)
                self._sample(frames)
        self._sample(frames)

    @staticmethod
    def _step(one: Conversation) -> int:
        try:
            return one.step()
        except Failure as failure:
            raise Failure(f"{one}\n{failure}") from failure

    def _at_end(self) -> bool:
        return self._only is not None and self.conversations > 0

    def _begin(self, palette: Palette) -> Conversation:
        number = self.conversations if self._only is None else self._only
        self.conversations += 1
        one = Conversation(self._seed, number, self.daemon.socket, palette)
        self._recent.append(one)
        return one

    @staticmethod
    def _rest(talking: list[Conversation]) -> None:
        """Wait a moment if no client can do anything."""
        reading = [one.caller.sock for one in talking if not one.done and not one.caller.deaf]
        writing = [one.caller.sock for one in talking if not one.done and one.caller.out]
        select.select(reading, writing, [], 0.002)

    def _let_end(self, talking: list[Conversation]) -> None:
        """Cut all conversations short and see them to their ends."""
        while talking:
            for one in list(talking):
                one.stop()
                self._step(one)
                if one.done:
                    self.answers += one.caller.answers
                    talking.remove(one)
            self._rest(talking)

    # -- what must always be so -------------------------------------------------------------------

    def _behave(self) -> None:
        """Put and get as a good client does, sometimes on a new connection."""
        self._puts += 1
        if self._puts % 8 == 0:
            self._good.close()
        numbers = range(1_000_000 + 3 * self._puts, 1_000_003 + 3 * self._puts)
        keys = [key(n) for n in numbers]
        blocks = [block(n, size) for n, size in zip(numbers, (1, 5000, 400_000), strict=True)]
        if self._puts % 2:
            del keys[2:], blocks[2:]  # inline
        statuses = self._good.put_many(keys, blocks, ack="written" if self._puts % 4 else "durable")
        if statuses.any():
            raise Failure(f"a good client's put came to {statuses}")
        if [bytes(one or b"") for one in self._good.get_many(keys)] != blocks:
            raise Failure("a good client got something else than it put")
        self._good.delete(keys)

    def _look(self) -> None:
        """Look whether the daemon runs and has written of trouble."""
        process = self.daemon.process
        if process is None or process.poll() is not None:
            raise Failure(f"the daemon has ended:\n{self.daemon.log[-3000:]}")
        with (self.daemon.folder / "daemon.log").open("rb") as log:
            log.seek(max(0, self._log - 100))
            news = log.read().decode(errors="replace")
            self._log = log.tell()
        for bad in ("Traceback", "never retrieved", "never awaited", "rror in atexit"):
            if bad in news:
                raise Failure(f"the daemon's log:\n{news[news.index(bad) - 300 :][:4000]}")

    def _sample(self, frames: int) -> None:
        """Measure the daemon while nobody talks to it: all is as before but a little memory."""
        self._good.close()
        self._look()
        with Talker(self.daemon.socket) as talker:
            idle = {"clients": 1, "dirty_blocks": 0, "queued_blocks": 0, "region_bytes": 0}
            if not eventually(lambda: idle.items() <= talker.status().items(), 20):
                status = talker.status()
                raise Failure(f"not idle: { {name: status[name] for name in idle} }")
            status = talker.status()
            if status["failed_requests"] or status["failed_jobs"] or status["state"] != "ready":
                raise Failure(f"the daemon counts failures: {status}")
            figures = process_figures(self.daemon.pid)
            before = self._descriptors()
        eventually(lambda: self._descriptors() < before)
        if self.samples:
            eventually(lambda: self._descriptors() <= self.samples[0].descriptors)
        now = Sample(frames, figures["RssAnon"], self._descriptors(), figures["Threads"])
        self.samples.append(now)
        print(f"{frames:,} frames, {self.conversations:,} conversations", flush=True)
        first = self.samples[0]
        young = self.samples[min(len(self.samples) - 1, 2 * SAMPLES // 5)]
        if now.descriptors > first.descriptors:
            folder = Path(f"/proc/{self.daemon.pid}/fd")
            targets = sorted(os.readlink(one) for one in folder.iterdir())
            raise Failure(f"descriptors grow: {self.samples}: {targets}")
        if now.threads > first.threads + 4:  # workers begin when they are needed
            raise Failure(f"threads grow: {self.samples}")
        if not eventually(lambda: not mapped_regions(self.daemon)):
            raise Failure("a region is still mapped")
        if now.anonymous > young.anonymous + ANON_BOUND:
            raise Failure(f"anonymous memory grows: {self.samples}")

    def _descriptors(self) -> int:
        return descriptors_of(self.daemon)

    def _clean_up(self) -> None:
        """Delete everything: what a forgotten reference holds would stay."""
        with Talker(self.daemon.socket, timeout=60) as talker:
            for (handle, shard), keys in self._blocks(talker).items():
                for start in range(0, len(keys), 1000):
                    some = keys[start : start + 1000]
                    where: dict[str, Any] = {"handle": handle, "shard": shard}
                    where |= {"count": len(some), "key_length": len(some[0])}
                    reply = talker.ask(Op.DELETE, b"".join(some), **where)
                    if reply.error or any(reply.meta):
                        raise Failure(f"a block cannot be deleted: {reply}")
            empty = {"blocks": 0, "live_bytes": 0, "memory_blocks": 0, "dirty_blocks": 0}
            if not eventually(lambda: empty.items() <= talker.status().items(), 20):
                raise Failure(f"something is left: {talker.status()}")
            if not eventually(lambda: not self._files(), 20):
                raise Failure(f"files are left: {self._files()[:5]}")
            quarter = [block(n, 15 * MIB) for n in range(4)]
            for first in (2_000_000, 2_000_100):  # half of the memory for blocks in flight, twice
                names = [key(first + n) for n in range(4)]
                if any(talker.put(names, quarter).meta):
                    raise Failure("memory for blocks in flight is missing")
        code = self.daemon.stop()
        self.daemon.process = None
        if code:
            raise Failure(f"the daemon ended by {code}:\n{self.daemon.log[-3000:]}")

    def _files(self) -> list[Path]:
        return list((self.daemon.store / "blocks").rglob("*.kvb"))

    def _blocks(self, talker: Talker) -> dict[tuple[int, int], list[bytes]]:
        """Return the keys of all blocks by handle and shard."""
        folder, handles = self.daemon.store / "namespaces", {}
        rows: list[Any] = []
        start: int | None = 0
        while start is not None:
            answer = talker.json(Op.ADMIN, op="list", start=start).json
            rows += answer["blocks"]
            start = answer["next"]
        found: dict[tuple[int, int], list[bytes]] = {}
        for identity, shard, name in rows:
            if identity not in handles:
                record = json.loads((folder / f"{identity}.json").read_text())["record"]
                handles[identity] = int(talker.namespace(record, create=False).json["handle"])
            found.setdefault((handles[identity], shard), []).append(bytes.fromhex(name))
        return found

    def summary(self) -> str:
        first, last = self.samples[0], self.samples[-1]
        young = self.samples[min(len(self.samples) - 1, 2 * SAMPLES // 5)]
        errors_told = ", ".join(f"{count} {name}" for name, count in self.answers.most_common())
        return (
            f"{last.frames} frames in {self.conversations} conversations, errors answered: "
            f"{errors_told}\nanonymous memory {first.anonymous >> 20} MiB at first, "
            f"{young.anonymous >> 20} MiB after {young.frames} frames, "
            f"{last.anonymous >> 20} MiB at the end; descriptors {first.descriptors}, "
            f"{last.descriptors}; threads {first.threads}, {last.threads}"
        )


def fuzz(folder: Path, frames: int, seed: int, only: int | None = None) -> Fuzzer:
    """Run the fuzzer; raises Failure or AssertionError if the daemon does."""
    with bare(folder, **SETTINGS) as daemon:
        fuzzer = Fuzzer(daemon, seed, frames, only)
        fuzzer.run()
        return fuzzer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    parser.add_argument("--only", type=int, help="the number of one conversation")
    parser.add_argument("--folder", type=Path, help="where the store goes; default: temporary")
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        print(fuzz(Path(folder), asked.frames, asked.seed, asked.only).summary())
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()

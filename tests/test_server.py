"""The daemon under several clients: joins, drains, deadlines, garbage, clients that go away."""

from __future__ import annotations

import os
import signal
import socket
import stat
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore import protocol
from kvstore.answers import BlockStatus
from kvstore.client import Client
from kvstore.errors import (
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidKey,
    KVStoreError,
    UnknownNamespace,
)
from kvstore.keys import named
from kvstore.protocol import Frame, Op
from tests.stores import MIB, block, key
from tests.talk import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.command import Daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(str(daemon.socket)) as opened:
        yield opened


def raw(daemon: Daemon) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(10)
    sock.connect(str(daemon.socket))
    return sock


def assert_serving(daemon: Daemon) -> None:
    with Client(str(daemon.socket)) as fresh:
        name = os.urandom(32)
        assert fresh.put(name, b"alive") == "stored"
        assert fresh.get(name) == b"alive"


def test_the_socket_is_ours_alone(daemon: Daemon) -> None:
    assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o600


def test_a_batch_larger_than_a_frame(client: Client) -> None:
    names = [key(n) for n in range(100)]
    blocks = [block(n, MIB) for n in range(100)]
    assert not client.put_many(names, blocks, chain=True).any()
    found = client.get_many([*names, key(1000)])
    assert [None if one is None else bytes(one) for one in found] == [*blocks, None]
    assert client.prefix([*names, key(1000)]) == 100


def test_a_block_of_the_largest_size(client: Client) -> None:
    largest = block(1, 63 * MIB)
    assert client.put(key(1), largest) == "stored"
    assert client.get(key(1)) == largest


def test_namespaces_are_opened_by_their_record(daemon: Daemon, client: Client) -> None:
    with pytest.raises(UnknownNamespace, match="does not exist"):
        client.namespace(named("llama"))
    llama = client.namespace(named("llama"), create=True)
    client.put(key(1), b"for llama", namespace=llama)
    assert client.get(key(1)) is None
    with Client(str(daemon.socket)) as other:
        assert other.get(key(1), namespace=other.namespace(named("llama"))) == b"for llama"


def test_many_clients_put_the_same_keys(daemon: Daemon) -> None:
    """All of them succeed, every block is written once."""
    names = [key(n) for n in range(64)]
    blocks = [block(n, 50_000) for n in range(64)]

    def put(turn: int) -> np.ndarray:
        order = np.random.default_rng(turn).permutation(64)
        with Client(str(daemon.socket)) as one:
            return one.put_many([names[n] for n in order], [blocks[n] for n in order])

    with ThreadPoolExecutor(8) as pool:
        answers = np.concatenate(list(pool.map(put, range(8))))
    assert set(answers) <= {BlockStatus.OK, BlockStatus.ALREADY_PRESENT}
    status = daemon.status()
    assert status["stored"] == 64
    assert status["written_bytes"] == 64 * 50_000
    with Client(str(daemon.socket)) as one:
        assert [None if found is None else bytes(found) for found in one.get_many(names)] == blocks


def test_one_client_shared_by_threads(client: Client) -> None:
    def work(turn: int) -> None:
        for n in range(20):
            name = key(1000 * turn + n)
            client.put(name, name)
            assert client.get(name) == name

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))


def test_readers_and_writers_under_eviction(daemon: Daemon) -> None:
    """Much more than fits, by several clients at once: no wrong byte, no error, all accounted."""

    def work(turn: int) -> None:
        rng = np.random.default_rng(turn)
        with Client(str(daemon.socket)) as one:
            for _ in range(60):
                numbers = rng.integers(0, 600, 4).tolist()
                statuses = one.put_many([key(n) for n in numbers], [block(n, MIB) for n in numbers])
                assert set(statuses) <= {BlockStatus.OK, BlockStatus.ALREADY_PRESENT}
                numbers = rng.integers(0, 600, 4).tolist()
                found = one.get_many([key(n) for n in numbers])
                for n, data in zip(numbers, found, strict=True):
                    assert data is None or data == block(n, MIB)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))

    def accounted() -> bool:
        """What is evicted leaves the disk a moment after the index."""
        status = daemon.status()
        try:
            sizes = [path.stat().st_size for path in (daemon.store / "blocks").rglob("*.kvb")]
        except FileNotFoundError:
            return False
        return (len(sizes), sum(sizes)) == (status["blocks"], status["live_bytes"])

    with Client(str(daemon.socket)) as one:
        assert one.flush() == []  # what was accepted only is in no file yet
    assert eventually(accounted)
    status = daemon.status()
    assert status["failed_requests"] == status["failed_jobs"] == 0
    assert status["missing_blocks"] == status["corrupt_blocks"] == status["stale_blocks"] == 0
    assert status["evictions"] > 0  # type: ignore[operator]


def test_a_client_lives_through_a_restart(daemon: Daemon, client: Client) -> None:
    llama = client.namespace(named("llama"), create=True)
    client.put(key(1), b"x", namespace=llama, ack="written")
    daemon.stop(signal.SIGKILL)
    with pytest.raises(DaemonUnavailable, match=str(daemon.socket)):
        client.get(key(1))
    daemon.start()
    assert client.get(key(1), namespace=llama) == b"x"


def test_a_client_survives_a_fork(daemon: Daemon, client: Client) -> None:
    client.put(key(1), b"parent")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if client.get(key(1)) == b"parent" else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.get(key(1)) == b"parent"


def test_a_stopped_daemon_is_a_missed_deadline(daemon: Daemon) -> None:
    with Client(str(daemon.socket), timeout=0.5) as hasty:
        hasty.put(key(1), b"x")
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            with pytest.raises(DeadlineExceeded, match="in time"):
                hasty.get(key(1))
            assert time.monotonic() - started < 5
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert hasty.get(key(1)) == b"x"


def test_sigterm_finishes_requests_and_marks_the_journal(daemon: Daemon) -> None:
    stored: list[int] = []

    def put() -> None:
        with Client(str(daemon.socket)) as one:
            for n in range(1000):
                one.put(key(n), block(n, 100_000))
                stored.append(n)

    def put_until_refused() -> None:
        with pytest.raises(DaemonUnavailable):
            put()

    writer = threading.Thread(target=put_until_refused)
    writer.start()
    time.sleep(0.3)
    assert daemon.stop() == 0
    writer.join()
    assert not daemon.socket.exists()
    daemon.start()
    assert "scanning" not in daemon.log
    with Client(str(daemon.socket)) as one:
        assert one.contains([key(n) for n in stored]).all()


def test_a_second_signal_ends_at_once(daemon: Daemon) -> None:
    with raw(daemon) as stuck:
        # A request of which only the beginning comes keeps the drain waiting.
        header = Frame(Op.PUT, key_length=32, count=1, meta_bytes=39, payload_bytes=9).pack()
        stuck.sendall(header)
        time.sleep(0.2)
        os.kill(daemon.pid, signal.SIGTERM)
        time.sleep(0.3)
        assert daemon.process is not None
        assert daemon.process.poll() is None
        assert daemon.stop() == 128 + signal.SIGTERM
    daemon.start()


def test_requests_wait_until_the_store_is_open(daemon: Daemon) -> None:
    with Client(str(daemon.socket)) as one:
        one.put_many([key(n) for n in range(500)], [block(n) for n in range(500)], ack="written")
    daemon.stop(signal.SIGKILL)
    for journal in (daemon.store / "blocks").glob("journal.*"):
        journal.unlink()
    daemon.launch()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            with Client(str(daemon.socket)) as one:
                assert one.contains([key(n) for n in range(500)]).all()
                break
        except DaemonUnavailable:
            time.sleep(0.01)
    else:
        pytest.fail(daemon.log)


def test_a_second_daemon_is_refused(daemon: Daemon) -> None:
    ran = daemon.run("serve", "--store", str(daemon.store))
    assert ran.code == 11
    assert str(daemon.pid) in ran.stderr
    assert_serving(daemon)


def test_a_stale_socket_is_replaced_and_anything_else_is_not(daemon: Daemon) -> None:
    daemon.stop(signal.SIGKILL)
    assert daemon.socket.exists()
    daemon.start()
    daemon.stop()
    daemon.socket.write_text("precious")
    daemon.launch()
    assert daemon.process is not None
    assert daemon.process.wait(20) == 13
    assert daemon.socket.read_text() == "precious"
    assert str(daemon.socket) in daemon.log


def packed(op: int, meta: bytes = b"", /, **fields: int) -> bytes:
    return Frame(op, request=1, **{"meta_bytes": len(meta), **fields}).pack() + meta


ONE_KEY = {"key_length": 32, "count": 1}
GARBAGE = [
    b"\x00" * protocol.HEADER_BYTES,
    b"\xff" * protocol.HEADER_BYTES,
    b"GET / HTTP/1.1\r\nHost: localhost:7700\r\n\r\n",
    packed(99),
    packed(Op.PUT, meta_bytes=0xFFFFFFFF, **ONE_KEY),
    packed(Op.PUT, meta_bytes=40, payload_bytes=0xFFFFFFFF, **ONE_KEY),
    packed(Op.GET, key_length=32, count=5),
    packed(Op.GET, key_length=32, count=0xFFFFFFFF),
    packed(Op.ADMIN, b"[]"),
    packed(Op.ADMIN, b"{{{"),
    packed(Op.ADMIN, meta_bytes=(128 << 10) + 1),
    packed(Op.GET, b"k" * 32, payload_bytes=4, **ONE_KEY) + b"k" * 4,
    Frame(Op.ADMIN, request=1).pack()[:6] + b"\x00\x00" + bytes(32),
    Frame(Op.ADMIN, request=1).pack()[:6] + b"\x01\x04" + bytes(32),
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_answered_or_dropped_and_nobody_else_notices(
    daemon: Daemon, garbage: bytes
) -> None:
    with raw(daemon) as sock:
        sock.sendall(garbage)
        header = sock.recv(protocol.HEADER_BYTES, socket.MSG_WAITALL)
        if header:
            reply = protocol.unpack(header)
            assert reply.flags & protocol.Flag.ERROR
            message = sock.recv(reply.meta_bytes, socket.MSG_WAITALL)
            assert isinstance(protocol.error_from(protocol.Meta(message).json()), KVStoreError)
    assert_serving(daemon)
    assert "Traceback" not in daemon.log


REFUSED = [
    (Op.GET, 0, 65, 1, b"k" * 65, InvalidKey),
    (Op.GET, 0, 0, 1, b"", InvalidKey),
    (Op.CONTAINS, 77, 32, 1, b"k" * 32 + bytes(4), UnknownNamespace),
    (Op.PUT, 0, 32, 0, b"", KVStoreError),
]


@pytest.mark.parametrize(("op", "handle", "length", "count", "meta", "error"), REFUSED)
def test_a_refused_request_leaves_the_connection_usable(
    daemon: Daemon,
    op: Op,
    handle: int,
    length: int,
    count: int,
    meta: bytes,
    error: type[KVStoreError],
) -> None:
    frame = Frame(
        op, handle=handle, request=7, key_length=length, count=count, meta_bytes=len(meta)
    )
    with raw(daemon) as sock:
        for _ in range(2):
            sock.sendall(frame.pack() + meta)
            reply = protocol.unpack(sock.recv(protocol.HEADER_BYTES, socket.MSG_WAITALL))
            assert reply.request == 7
            answer = sock.recv(reply.meta_bytes, socket.MSG_WAITALL)
            assert isinstance(protocol.error_from(protocol.Meta(answer).json()), error)


def test_a_refused_put_has_its_payload_skipped(client: Client) -> None:
    client.put(key(1), b"x")
    with pytest.raises(InvalidKey, match="33 bytes"):
        client.put(b"k" * 33, block(1, MIB))
    assert client.put(key(2), b"y") == "stored"


def test_clients_that_vanish_in_the_middle_leave_nothing_behind(daemon: Daemon) -> None:
    for turn in range(20):
        with raw(daemon) as sock:
            meta = key(turn) + struct.pack("<I", 5 * MIB) + b"\0\0\0"
            frame = Frame(
                Op.PUT, key_length=32, count=1, meta_bytes=len(meta), payload_bytes=5 * MIB
            )
            sock.sendall(frame.pack() + meta + b"z" * (1000 * turn))
    with Client(str(daemon.socket)) as one:
        names = [key(1000 + n) for n in range(60)]
        assert not one.put_many(names, [block(n, MIB) for n in range(60)]).any()
        assert one.contains([key(n) for n in range(20)]).sum() == 0
    for _ in range(10):
        with raw(daemon) as sock:
            keys = b"".join(names)
            frame = Frame(Op.GET, key_length=32, count=60, meta_bytes=len(keys))
            sock.sendall(frame.pack() + keys)
            sock.recv(100)
    with Client(str(daemon.socket)) as one:
        assert all(one.get_many(names))
    assert len(os.listdir(f"/proc/{daemon.pid}/fd")) < 40
    assert daemon.stop() == 0


def test_a_chain_longer_than_the_store_keeps_its_beginning(client: Client) -> None:
    names = [key(n) for n in range(200)]
    statuses = client.put_many(names, [block(n, 2 * MIB) for n in range(200)], chain=True)
    kept = client.prefix(names)
    assert kept > 90
    assert (statuses[:kept] == BlockStatus.OK).all()
    assert (statuses[kept:] == BlockStatus.FULL).all()
    assert client.contains(names).sum() == kept


def test_a_store_that_is_taken_away_is_a_problem(daemon: Daemon, client: Client) -> None:
    client.put(key(1), b"x")
    daemon.store.rename(daemon.folder / "elsewhere")
    time.sleep(1.5)
    status = client.status()
    assert status["state"] == "degraded"
    assert str(daemon.store) in str(status["problems"])
    (daemon.folder / "elsewhere").rename(daemon.store)
    time.sleep(1.5)
    assert client.status()["state"] == "ready"
    assert client.get(key(1)) == b"x"

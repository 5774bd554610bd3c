"""The tier behind a model server's memory: never waits, never raises, touches no row late."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.answers import BlockStatus
from kvstore.client import Client
from kvstore.errors import StoreFull, UnknownNamespace
from kvstore.integrations.tiering import Lane, Limits, Outcome, Tier, Verdict
from kvstore.protocol import Op
from tests.command import Daemon
from tests.fake_daemon import Asked, FakeDaemon

ROWS, ROW = 16, 65536
LIMITS = Limits(lookup=5.0, load=20.0, store=20.0, close=5.0)
SHORT = Limits(lookup=0.5, load=0.7, store=0.7, close=0.3)
"""For what has no answer; connection and shared memory are there before."""
RECORD = {"engine": "test", "row_bytes": ROW}
LOG = logging.getLogger("test")


def key(number: int) -> bytes:
    return b"%036d" % number


class Server:
    """A model server with a pool of its own."""

    def __init__(self, address: str, limits: Limits = LIMITS) -> None:
        self.memory = bytearray(ROWS * ROW)
        # As vLLM lends it: two dimensions, format b.
        self.view = memoryview(self.memory).cast("b", (ROWS, ROW))
        self.pool = np.asarray(self.view).view(np.uint8)
        self.tier = Tier(Client(address), RECORD, self.pool, LOG, limits)

    def fill(self, rows: range) -> None:
        for row in rows:
            self.pool[row] = np.random.default_rng(row).integers(0, 256, ROW, np.uint8)

    def outcome(self) -> Outcome:
        """Return what became of the one job under way."""
        self.tier.drain()
        (outcome,) = self.tier.finished()
        return outcome

    def ask(self, *keys: bytes, request: str = "r") -> list[Verdict]:
        """Return the verdicts that a request gets, once there are any."""
        while True:
            found = [self.tier.lookup(one, request) for one in keys]
            self.tier.end_step()
            if Verdict.RETRY not in found:
                return found
            time.sleep(0.005)

    def close(self) -> None:
        self.tier.close()


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeDaemon]:
    daemon = FakeDaemon(tmp_path / "socket")
    yield daemon
    daemon.close()


@pytest.fixture
def server(fake: FakeDaemon) -> Iterator[Server]:
    server = Server(fake.address)
    yield server
    server.close()


@pytest.fixture
def hasty(fake: FakeDaemon) -> Iterator[Server]:
    """One whose deadlines are short."""
    server = Server(fake.address)
    namespace = server.tier._open(20.0)
    names = [key(n) for n in range(8)]
    server.tier._client.put_many(names, list(server.pool[:8]), namespace=namespace)
    assert len(list(server.tier._client.stream_get(names, namespace=namespace))) == 8
    server.tier._limits = SHORT
    fake.blocks.clear()
    fake.asked.clear()
    yield server
    server.close()


def silent(*operations: Op) -> Callable[[Asked], bool]:
    """Return a script that answers all but these, and confirms no cancel."""
    return lambda asked: asked.frame.op in (*operations, Op.CANCEL)


# -- against a daemon as it is --------------------------------------------------------------------


def test_rows_come_back_after_restarts_of_both(daemon: Daemon) -> None:
    first = Server(str(daemon.socket))
    first.fill(range(8))
    expected = first.pool[:8].copy()
    first.tier.store(1, [key(n) for n in range(8)], range(8))
    outcome = first.outcome()
    assert (outcome.job.number, outcome.success, len(outcome.done)) == (1, True, 8)
    first.close()
    daemon.stop()
    daemon.start()

    second = Server(str(daemon.socket))
    assert second.ask(key(0), key(7), key(8)) == [Verdict.HIT, Verdict.HIT, Verdict.MISS]
    second.tier.load(2, [key(n) for n in range(8)], range(15, 7, -1))
    assert second.outcome().success
    assert np.array_equal(second.pool[15:7:-1], expected)
    assert not second.pool[:8].any()

    daemon.stop(9)
    daemon.start()
    second.tier.load(3, [key(3)], [0])
    second.tier.drain()
    second.tier._paused_until = 0.0  # the connection that broke may have cost a pause
    second.tier.load(4, [key(3)], [0])
    second.tier.drain()
    assert second.tier.finished()[-1].success
    assert np.array_equal(second.pool[0], expected[3])
    second.close()


def test_what_is_there_is_not_sent_again(fake: FakeDaemon, server: Server) -> None:
    server.tier.store(1, [key(1)], [1])
    assert server.outcome().success
    server.tier.store(2, [key(1), key(2)], [1, 2])
    assert server.outcome().success
    assert [asked.keys for asked in fake.of(Op.PUT)] == [[key(1)], [key(2)]]


# -- lookups --------------------------------------------------------------------------------------


def test_a_step_asks_once_for_all_requests(fake: FakeDaemon, server: Server) -> None:
    fake.blocks[1, 0, key(1)] = bytes(ROW)
    for request in ("a", "b"):
        for number in range(10):
            assert server.tier.lookup(key(number), request) == Verdict.RETRY
    server.tier.end_step()
    for request in ("a", "b"):
        found = server.ask(*map(key, range(10)), request=request)
        assert [n for n, one in enumerate(found) if one == Verdict.HIT] == [1]
    (asked,) = fake.of(Op.CONTAINS)
    assert len(asked.keys) == 10


def test_a_verdict_holds_until_its_request_is_forgotten(fake: FakeDaemon, server: Server) -> None:
    assert server.ask(key(1)) == [Verdict.MISS]
    fake.blocks[1, 0, key(1)] = bytes(ROW)
    assert server.ask(key(1)) == [Verdict.MISS]
    assert server.ask(key(1), request="other") == [Verdict.HIT]
    server.tier.forget("r")
    assert server.ask(key(1)) == [Verdict.HIT]


def test_no_answer_is_a_miss_and_then_nobody_waits(fake: FakeDaemon, hasty: Server) -> None:
    fake.script = silent(Op.CONTAINS)
    started = time.monotonic()
    assert hasty.tier.lookup(key(1), "r") == Verdict.RETRY
    assert time.monotonic() - started < 0.1
    assert hasty.ask(key(1)) == [Verdict.MISS]
    while not hasty.tier._pause:
        time.sleep(0.01)
    assert hasty.tier.lookup(key(2), "s") == Verdict.MISS  # at once: the daemon is let alone
    fake.script = None
    hasty.tier._paused_until = 0.0
    assert hasty.ask(key(3), request="t") == [Verdict.MISS]
    assert hasty.tier._pause == 0.0


def test_a_late_answer_changes_no_verdict(fake: FakeDaemon, hasty: Server) -> None:
    """A request that was told of a miss goes on; it is not told something else in between."""
    fake.blocks[1, 0, key(1)] = bytes(ROW)
    assert hasty.tier.lookup(key(1), "r") == Verdict.RETRY
    time.sleep(SHORT.lookup)
    assert hasty.tier.lookup(key(1), "r") == Verdict.MISS
    hasty.tier._answer([("r", key(1))], time.monotonic() + 5)
    assert fake.of(Op.CONTAINS)
    assert hasty.tier.lookup(key(1), "r") == Verdict.MISS


def test_nobody_listening_is_a_miss(tmp_path: Path) -> None:
    server = Server(str(tmp_path / "nobody"))
    assert server.ask(key(1)) == [Verdict.MISS]
    server.tier.store(1, [key(1)], [1])
    server.tier.load(2, [key(1)], [1])
    server.tier.drain()
    assert [(one.job.number, one.success) for one in server.tier.finished()] in (
        [(1, False), (2, False)],
        [(2, False), (1, False)],
    )
    server.close()


def test_uses_are_told_in_one_batch(fake: FakeDaemon, server: Server) -> None:
    server.tier.touch([key(1)])
    server.tier.touch([key(2), key(3)])
    server.tier.end_step()
    server.tier.end_step()
    server.ask(key(9))
    (asked,) = fake.of(Op.TOUCH)
    assert asked.keys == [key(1), key(2), key(3)]


# -- loads ----------------------------------------------------------------------------------------


def test_a_failed_load_is_a_miss_before_it_is_reported(fake: FakeDaemon, server: Server) -> None:
    """Else the server, which looks the block up again, would load it for ever."""
    fake.blocks[1, 0, key(1)] = fake.blocks[1, 0, key(2)] = bytes(ROW)
    for request in ("r", "s"):
        assert server.ask(key(1), key(2), request=request) == [Verdict.HIT] * 2
    del fake.blocks[1, 0, key(2)]
    server.tier.load(1, [key(1), key(2)], [1, 2])
    while not (outcomes := server.tier.finished()):
        time.sleep(0.001)
    for request in ("r", "s"):
        assert server.tier.lookup(key(1), request) == Verdict.HIT
        assert server.tier.lookup(key(2), request) == Verdict.MISS
    assert (outcomes[0].success, list(outcomes[0].done)) == (False, [key(1)])


@pytest.mark.parametrize("size", [1, ROW - 1, ROW + 1, 3 * ROW])
def test_a_block_of_another_length_is_a_miss(fake: FakeDaemon, server: Server, size: int) -> None:
    fake.blocks[1, 0, key(1)] = b"x" * size
    server.tier.load(1, [key(1)], [1])
    outcome = server.outcome()
    assert not outcome.success
    assert not outcome.done
    assert not server.pool.any()


def test_rows_of_a_load_that_was_given_up_are_not_written(fake: FakeDaemon, hasty: Server) -> None:
    """They are somebody else's as soon as the load has been reported."""
    fake.script = silent(Op.STREAM_GET)
    blocks = {key(n): bytes([n]) * ROW for n in range(1, 9)}
    for name, block in blocks.items():
        fake.blocks[1, 0, name] = block
    hasty.tier.load(1, list(blocks), range(8))
    assert not hasty.outcome().success
    hasty.pool[:] = 255
    (asked,) = fake.of(Op.STREAM_GET)
    assert asked.frame.region, "the blocks were to come through shared memory"
    for row, block in zip(asked.rows(), blocks.values(), strict=True):
        row[:ROW] = block
    fake.serve(asked)
    time.sleep(0.1)
    assert (hasty.pool == 255).all()


def test_what_came_before_the_deadline_is_kept(fake: FakeDaemon, hasty: Server) -> None:
    names = [key(n) for n in range(1, 9)]
    for name in names:
        fake.blocks[1, 0, name] = name[-1:] * ROW

    def half(asked: Asked) -> bool:
        if asked.frame.op == Op.STREAM_GET:
            fake.reply(asked, [fake.blocks[1, 0, names[0]]], 1 << 0, 0)
        return asked.frame.op in (Op.STREAM_GET, Op.CANCEL)

    fake.script = half
    hasty.tier.load(1, names, range(8))
    outcome = hasty.outcome()
    assert (outcome.success, list(outcome.done)) == (False, names[:1])
    assert (hasty.pool[0] == names[0][-1]).all()


def test_a_queue_that_stands_is_reported_too(fake: FakeDaemon, hasty: Server) -> None:
    fake.script = silent(Op.STREAM_GET)
    started = time.monotonic()
    for number in range(20):
        hasty.tier.load(number, [key(number)], [number % ROWS])
    hasty.tier.drain()
    assert [one.job.number for one in hasty.tier.finished()] == list(range(20))
    assert time.monotonic() - started < 5  # not twenty deadlines one after the other
    assert hasty.tier.finished() == []


# -- stores ---------------------------------------------------------------------------------------


def test_rows_of_a_store_that_was_given_up_are_not_read(fake: FakeDaemon, hasty: Server) -> None:
    """What the daemon takes late is what the row held while the job was under way."""
    fake.script = silent(Op.PUT)
    hasty.pool[:8] = 1
    hasty.tier.store(1, [key(n) for n in range(8)], range(8))
    assert not hasty.outcome().success
    hasty.pool[:8] = 2
    (asked,) = fake.of(Op.PUT)
    fake.serve(asked)
    assert {block[:1] for block in fake.blocks.values()} == {b"\1"}


def test_a_full_store_costs_nothing_but_the_store(fake: FakeDaemon, server: Server) -> None:
    def refuse(asked: Asked) -> bool:
        if asked.frame.op == Op.PUT:
            asked.answer(bytes([BlockStatus.OK, BlockStatus.FULL]))
        return asked.frame.op == Op.PUT

    fake.script = refuse
    server.tier.store(1, [key(1), key(2)], [1, 2])
    outcome = server.outcome()
    assert (outcome.success, list(outcome.done)) == (False, [key(1)])
    assert server.ask(key(2)) == [Verdict.MISS]
    assert not server.tier._pause


def test_stores_that_wait_take_half_of_the_pool_at_most(fake: FakeDaemon, hasty: Server) -> None:
    fake.script = silent(Op.PUT)
    for number in range(ROWS):
        hasty.tier.store(number, [key(number)], [number])
    refused = [one.job.number for one in hasty.tier.finished()]
    assert set(range(ROWS // 2 + 1, ROWS)) <= set(refused)
    hasty.tier.drain()
    assert hasty.tier._storing_rows == 0


# -- the daemon changes ---------------------------------------------------------------------------


def test_another_store_is_opened_anew(fake: FakeDaemon, server: Server) -> None:
    assert server.ask(key(1)) == [Verdict.MISS]

    def forgotten(asked: Asked) -> bool:
        if asked.frame.op == Op.CONTAINS:
            asked.fail(UnknownNamespace("gone", ""))
        return asked.frame.op == Op.CONTAINS

    fake.script = forgotten
    assert server.ask(key(2)) == [Verdict.MISS]
    fake.script = None
    server.tier._paused_until = 0.0
    assert server.ask(key(3)) == [Verdict.MISS]
    assert server.tier._namespace == 2


def test_what_the_daemon_refuses_is_a_miss(fake: FakeDaemon, server: Server) -> None:
    def refuse(asked: Asked) -> bool:
        if asked.frame.op == Op.NAMESPACE:
            asked.fail(StoreFull("1024 namespaces", ""))
        return asked.frame.op == Op.NAMESPACE

    fake.script = refuse
    assert server.ask(key(1)) == [Verdict.MISS]


def test_an_internal_error_is_a_job_that_failed(fake: FakeDaemon, server: Server) -> None:
    server.tier.load(1, [key(1)], [ROWS + 5])
    fake.blocks[1, 0, key(1)] = bytes(ROW)
    server.tier.drain()
    assert [one.success for one in server.tier.finished()] == [False]
    server.tier.load(2, [key(1)], [3])
    assert server.outcome().success


# -- the end --------------------------------------------------------------------------------------


def release(server: Server) -> None:
    """Take the memory back, as vLLM does; BufferError if somebody has a view of it."""
    del server.pool
    server.view.release()
    server.memory.append(0)


def lanes() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if isinstance(one, Lane)}


def test_the_end_leaves_no_thread_and_lets_go_of_the_pool(fake: FakeDaemon) -> None:
    before = lanes()
    server = Server(fake.address)
    server.fill(range(8))
    server.tier.store(1, [key(n) for n in range(8)], range(8))
    server.close()
    server.close()
    assert lanes() == before
    release(server)
    assert len(fake.blocks) == 8  # what was under way is kept


@pytest.mark.parametrize("operation", [Op.PUT, Op.STREAM_GET, Op.CONTAINS, Op.HELLO])
def test_a_daemon_that_hangs_does_not_keep_the_server_from_ending(
    fake: FakeDaemon, operation: Op
) -> None:
    fake.script = silent(operation)
    server = Server(fake.address, LIMITS._replace(lookup=1.0, close=0.2))
    for number in range(4):
        server.tier.store(number, [key(n) for n in range(8)], range(8))
        server.tier.load(number + 4, [key(n) for n in range(8)], range(8))
        server.tier.lookup(key(number), "r")
        server.tier.end_step()
    time.sleep(0.2)
    started = time.monotonic()
    server.close()
    assert time.monotonic() - started < 4
    assert sorted(one.job.number for one in server.tier.finished()) == list(range(8))
    release(server)

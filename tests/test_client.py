"""Both clients against a daemon that does as it likes."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from kvstore import errors, protocol
from kvstore.aclient import AsyncClient
from kvstore.answers import Ack, BlockStatus
from kvstore.client import Client, connect
from kvstore.keys import named
from kvstore.protocol import PUT_BYTES, Flag, Meta, Op
from kvstore.waiting import Address
from tests.fake_daemon import Asked, FakeDaemon
from tests.talk import eventually

MIB = 1 << 20
HOUR = 3600.0


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    made = FakeDaemon(tmp_path / "socket")
    yield made
    made.close()


@pytest.fixture(params=["unix", "tcp"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FakeDaemon]:
    made = FakeDaemon(tmp_path / "socket" if request.param == "unix" else None)
    yield made
    made.close()


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[Client]:
    with Client(daemon.address, timeout=10) as opened:
        yield opened


def key(number: int) -> bytes:
    return b"key" + number.to_bytes(5, "big")


def block(number: int, size: int) -> bytes:
    return random.Random(number).randbytes(size)


def many(count: int, size: int) -> tuple[list[bytes], list[bytes]]:
    return [key(n) for n in range(count)], [block(n, size) for n in range(count)]


def whole(found: list[memoryview | None]) -> list[bytes | None]:
    return [None if view is None else bytes(view) for view in found]


def in_threads(*acts: Callable[[], Any]) -> list[Any]:
    """Run all at once; return what each returned or raised."""
    results: list[Any] = [None] * len(acts)

    def run(number: int) -> None:
        try:
            results[number] = acts[number]()
        except errors.KVStoreError as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


def silent(*operations: Op, confirm: bool = False) -> Callable[[Asked], bool]:
    """Return a script that leaves these operations, and their cancels unless told, unanswered."""
    return lambda asked: asked.frame.op in {*operations, *([] if confirm else [Op.CANCEL])}


# -- what goes in comes out -----------------------------------------------------------------------


def test_blocks_of_a_known_length_get_no_more_room_than_that(
    daemon: FakeDaemon, client: Client
) -> None:
    keys, blocks = many(8, 70_000)
    client.put_many(keys, blocks)
    found = [bytes(view or b"") for _, _, view in client.stream_get(keys, size=70_000)]
    assert found == blocks
    (asked,) = daemon.of(Op.STREAM_GET)
    assert [len(row) for row in asked.rows()] == [70_000] * 8
    short = [bytes(view or b"") for _, _, view in client.stream_get(keys, size=50_000)]
    assert short == blocks


@pytest.mark.parametrize("size", [1, 5000, 3 * MIB])
def test_blocks_come_back_as_they_were(either: FakeDaemon, size: int) -> None:
    names, blocks = many(12, size)
    with connect(either.address) as client:
        assert not client.put_many(names, blocks).any()
        assert [either.blocks[0, 0, name] for name in names] == blocks
        assert whole(client.get_many([*names, key(99)])) == [*blocks, None]
        assert client.get(names[3]) == blocks[3]
        buffers = [bytearray(size) for _ in names]
        assert not client.get_into(names, buffers).any()
        assert buffers == blocks
        streamed = [(p, s, bytes(view or b"")) for p, s, view in client.stream_get(names)]
        assert streamed == [(n, BlockStatus.OK, data) for n, data in enumerate(blocks)]


def test_large_blocks_travel_through_shared_memory_and_small_ones_do_not(
    daemon: FakeDaemon, client: Client
) -> None:
    client.put(key(1), b"small")
    assert not daemon.of(Op.REGISTER)
    client.put(key(2), block(2, MIB))
    assert daemon.of(Op.PUT)[-1].payload == b""
    assert len(daemon.of(Op.REGISTER)) == 1
    client.put(key(3), block(3, MIB))
    assert len(daemon.of(Op.REGISTER)) == 1


def test_a_daemon_that_takes_no_regions_gets_blocks_inline(
    daemon: FakeDaemon, client: Client
) -> None:
    daemon.takes_regions = False
    names, blocks = many(3, MIB)
    assert not client.put_many(names, blocks).any()
    assert whole(client.get_many(names)) == blocks
    assert len(daemon.of(Op.REGISTER)) == 1
    with pytest.raises(errors.UsageError), client.staging(MIB):
        pass


def test_a_system_without_memfd_gets_blocks_inline(
    daemon: FakeDaemon, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    names, blocks = many(3, MIB)
    assert not client.put_many(names, blocks).any()
    assert whole(client.get_many(names)) == blocks


@pytest.mark.parametrize("staging_bytes", [0, 4096, 256 * MIB])
def test_many_blocks_are_got_at_once_where_no_memory_is_shared(
    daemon: FakeDaemon, staging_bytes: int
) -> None:
    names, blocks = many(200, 1000)
    with Client(daemon.address, staging_bytes=staging_bytes) as client:
        client.put_many(names, blocks)
        assert whole(client.get_many(names[:1])) == blocks[:1]
        before = len(daemon.of(Op.STREAM_GET))
        if staging_bytes == 256 * MIB:
            with client.staging(staging_bytes):
                assert whole(client.get_many(names)) == blocks
        else:
            assert whole(client.get_many(names)) == blocks
        assert len(daemon.of(Op.STREAM_GET)) - before <= 4


def test_batches_larger_than_a_request_are_cut(daemon: FakeDaemon, client: Client) -> None:
    names, blocks = many(PUT_BYTES // MIB + 20, MIB)
    client.put_many(names, blocks, chain=True, parent=b"top")
    asked = daemon.of(Op.PUT)
    assert sum(one.frame.count for one in asked) == len(names)
    assert len(asked) == 2
    assert whole(client.get_many(names)) == blocks


def test_a_daemon_may_ask_for_larger_puts_through_a_region(
    daemon: FakeDaemon, client: Client
) -> None:
    daemon.limits = {"put_bytes": 3 * PUT_BYTES}
    count = 4 * PUT_BYTES // (2 * MIB)
    names, _ = many(count, 1)
    with client.staging(2 * MIB * count) as staging:
        for slot in staging.slots([2 * MIB] * count):
            slot[:1] = b"x"
        assert not client.put_staged(names, staging).any()
    sizes = [2 * one.frame.count for one in daemon.of(Op.PUT)]
    assert sizes == [30, 94, 4]


@pytest.mark.parametrize("chain", [True, False])
def test_a_chain_is_put_no_further_than_its_first_gap(
    daemon: FakeDaemon, client: Client, chain: bool
) -> None:
    names, blocks = many(PUT_BYTES // MIB + 20, MIB)

    def script(asked: Asked) -> bool:
        if asked.frame.op != Op.PUT or len(daemon.of(Op.PUT)) != 1:
            return False
        asked.answer(bytes(asked.frame.count - 1) + bytes([BlockStatus.FULL]))
        return True

    daemon.script = script
    statuses = client.put_many(names, blocks, chain=chain)
    asked = daemon.of(Op.PUT)
    assert len(asked) == (1 if chain else 2)
    gap = asked[0].frame.count - 1
    assert np.flatnonzero(statuses == BlockStatus.FULL).tolist() == (
        list(range(gap, len(names))) if chain else [gap]
    )


def test_a_label_that_is_not_unicode_is_refused(client: Client) -> None:
    with pytest.raises(errors.UsageError, match="label"):
        client.put(key(0), b"x", label="\udfff")


def test_blocks_of_unexpected_length_are_asked_for_again(client: Client) -> None:
    client.put(key(0), b"tiny")
    assert client.get(key(0)) == b"tiny"
    names, blocks = many(5, 5 * MIB)
    client.put_many(names, blocks)
    assert whole(client.get_many(names)) == blocks
    client._operations._lengths.clear()
    assert [bytes(view or b"") for _, _, view in client.stream_get(names)] == blocks


@pytest.mark.parametrize("size", [3000, MIB])
def test_a_buffer_too_short_is_told(client: Client, size: int) -> None:
    client.put(key(1), block(1, size))
    client.put(key(2), block(2, size))
    buffers = [bytearray(size - 1), bytearray(size + 9), bytearray(size)]
    statuses = client.get_into([key(1), key(2), key(3)], buffers)
    assert statuses.tolist() == [BlockStatus.TOO_LARGE, BlockStatus.OK, BlockStatus.MISS]
    assert buffers[1] == block(2, size) + bytes(9)
    with pytest.raises(errors.UsageError):
        client.get_into([key(1)], [b"read-only"])
    with pytest.raises(errors.UsageError):
        client.get_into([key(1)], [])


def test_arrays_are_buffers(client: Client) -> None:
    data = np.arange(1 << 18, dtype=np.float32).reshape(512, 512)
    client.put_from([key(1)], [data])
    target = np.zeros_like(data)
    assert client.get_into([key(1)], [target]).tolist() == [BlockStatus.OK]
    assert (target == data).all()


def test_staging_needs_no_copy(daemon: FakeDaemon, client: Client) -> None:
    with client.staging(4 * MIB) as staging:
        for number, slot in enumerate(staging.slots([MIB, 5000, 3])):
            slot[:] = block(number, len(slot))
        statuses = client.put_staged([key(0), key(1), key(2)], staging)
        assert statuses.tolist() == [0, 0, 0]
        slots = staging.slots([MIB, MIB, 4])
        statuses, lengths = client.get_staged([key(1), key(9), key(0)], staging)
        assert statuses.tolist() == [BlockStatus.OK, BlockStatus.MISS, BlockStatus.TOO_LARGE]
        assert lengths.tolist() == [5000, 0, MIB]
        assert slots[0][:5000] == block(1, 5000) == staging.view[:5000]
        with pytest.raises(errors.UsageError):
            client.get_staged([key(1)], staging)
        with pytest.raises(errors.UsageError):
            staging.slots([2 * MIB, 2 * MIB, 1])
    assert daemon.blocks[0, 0, key(1)] == block(1, 5000)
    count = PUT_BYTES // MIB + 5
    with client.staging(count * MIB) as staging:
        for number, slot in enumerate(staging.slots([MIB] * count)):
            slot[:] = bytes([number]) * MIB
        assert not client.put_staged([key(n) for n in range(count)], staging, chain=True).any()
    assert len(daemon.of(Op.PUT)) == 3
    assert all(daemon.blocks[0, 0, key(n)] == bytes([n]) * MIB for n in range(count))
    with pytest.raises(ValueError, match="released"):
        slots[0][0]
    with pytest.raises(errors.UsageError):
        client.get_staged([key(1)] * 3, staging)


@pytest.mark.parametrize("nbytes", [0, -5000])
def test_no_less_than_a_byte_is_leased(client: Client, nbytes: int) -> None:
    with pytest.raises(errors.UsageError, match="leased"), client.staging(nbytes):
        pass
    with client.staging(4096) as staging:
        assert staging.nbytes == 4096


@pytest.mark.parametrize("seconds", [-1, 1 << 32])
def test_times_that_cannot_be_sent_are_refused(client: Client, seconds: int) -> None:
    with pytest.raises(errors.UsageError, match="time"):
        client.contains([key(1)], lease=seconds)
    with pytest.raises(errors.UsageError, match="time"):
        client.pin([key(1)], seconds)


def test_there_is_no_staging_over_tcp() -> None:
    daemon = FakeDaemon(None)
    try:
        with (
            Client(daemon.address) as client,
            pytest.raises(errors.UsageError),
            client.staging(MIB),
        ):
            pass
    finally:
        daemon.close()


# -- what is sent ---------------------------------------------------------------------------------


def test_a_put_says_all_that_was_asked(daemon: FakeDaemon, client: Client) -> None:
    client.put_many(
        [key(1), key(2)],
        [b"one", b"three"],
        shard=7,
        ack="durable",
        chain=True,
        parent=b"above",
        label="café",
        overwrite=True,
        session="s1",
        end_of_session=True,
        priority=3,
    )
    asked = daemon.of(Op.PUT)[0]
    frame, fields = asked.frame, asked.fields
    assert (frame.shard, frame.ack, frame.count) == (7, Ack.DURABLE, 2)
    assert frame.flags == Flag.CHAIN | Flag.OVERWRITE | Flag.CHECKSUM
    assert 9000 < frame.deadline_ms <= 10_000
    assert fields.u32(2).tolist() == [3, 5]
    assert fields.u64(2).tolist() == [xxhash.xxh3_64_intdigest(d) for d in (b"one", b"three")]
    assert fields.short() == b"above"
    assert fields.short().decode() == "café"
    hints = Meta(fields.short()).json()
    assert hints == {"session": "s1", "end_of_session": True, "priority": 3}


def test_no_checksum_is_sent_to_a_daemon_with_another(daemon: FakeDaemon) -> None:
    daemon.checksum = "crc32"
    with Client(daemon.address) as client:
        client.put(key(1), b"x")
        assert client.get(key(1)) == b"x"
    with Client(daemon.address, check=False) as client:
        client.put(key(1), b"x")
    assert [one.frame.flags & Flag.CHECKSUM for one in daemon.of(Op.PUT)] == [0, 0]


def test_questions_say_all_that_was_asked(daemon: FakeDaemon, client: Client) -> None:
    client.put(key(1), b"x")
    assert client.contains([key(1), key(2)]).tolist() == [True, False]
    assert client.prefix([key(1), key(2)], lease=0) == 1
    assert client.pin([key(1), key(2)], 60).tolist() == [BlockStatus.OK, BlockStatus.MISS]
    assert client.unpin([key(2)]).tolist() == [BlockStatus.MISS]
    client.touch([key(1)])
    assert client.delete([key(1), key(2)]) == 1
    numbers = [
        one.fields.u32(1)[0] for one in daemon.asked if one.frame.op in (Op.CONTAINS, Op.PIN)
    ]
    assert numbers == [5000, 0, 60]
    assert daemon.operations()[-2:] == [Op.TOUCH, Op.DELETE]


def test_empty_batches_ask_nothing(daemon: FakeDaemon, client: Client) -> None:
    assert client.put_many([], []).tolist() == []
    assert whole(client.get_many([])) == []
    assert client.contains([]).tolist() == []
    assert list(client.stream_get([])) == []
    assert daemon.asked == []


def test_flush_tells_what_was_lost(daemon: FakeDaemon, client: Client) -> None:
    assert client.flush() == []
    lost = {"namespace": "ab", "shard": 2, "key": "00ff", "reason": "disk"}

    def script(asked: Asked) -> bool:
        asked.answer(protocol.dump({"errors": [lost]}))
        return True

    daemon.script = script
    assert [tuple(one) for one in client.flush()] == [("ab", 2, "00ff", "disk")]


@pytest.mark.parametrize(
    "text", ["tcp://host", "tcp://:1", "tcp://h:0", "tcp://h:70000", "tcp://h:x"]
)
def test_addresses_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(errors.UsageError):
        connect(text)


def test_addresses_are_read() -> None:
    assert Address.parse("tcp://[::1]:80") == Address("::1", 80)
    assert Address.parse("/run/x") == Address.parse("unix:///run/x") == Address("/run/x")


# -- many requests at once ------------------------------------------------------------------------


def test_replies_in_any_order_reach_those_who_asked(daemon: FakeDaemon, client: Client) -> None:
    names, blocks = many(8, 400_000)
    client.put_many(names, blocks)
    waiting: list[Asked] = []

    def script(asked: Asked) -> bool:
        if asked.frame.op != Op.STREAM_GET:
            return False
        waiting.append(asked)
        if len(waiting) == 8:
            for one in random.Random(2).sample(waiting, 8):
                daemon.serve(one)
        return True

    daemon.script = script
    results = in_threads(*(lambda name=name: client.get(name) for name in names))
    assert results == blocks
    assert len(daemon.peers) == 1


@pytest.mark.timeout(120)
def test_many_threads_share_one_connection(daemon: FakeDaemon, client: Client) -> None:
    chance = random.Random(3)

    def script(asked: Asked) -> bool:
        if asked.frame.op not in (Op.STREAM_GET, Op.PUT, Op.CONTAINS) or chance.random() < 0.3:
            return False
        threading.Timer(chance.random() * 0.01, daemon.serve, [asked]).start()
        return True

    daemon.script = script

    def work(thread: int) -> int:
        for turn in range(40):
            size = (10, 5000, 300_000)[turn % 3]
            names = [key(thread * 1000 + turn * 4 + n) for n in range(3)]
            blocks = [block(thread * 1000 + turn * 4 + n, size) for n in range(3)]
            assert not client.put_many(names, blocks).any()
            assert whole(client.get_many(names)) == blocks
            assert client.contains(names).all()
        return thread

    assert in_threads(*(lambda n=n: work(n) for n in range(6))) == list(range(6))
    assert len(daemon.peers) == 1
    assert client._operations._session.regions.abandoned == 0


def test_one_slow_request_holds_nobody_up(daemon: FakeDaemon, client: Client) -> None:
    slow = threading.Event()

    def script(asked: Asked) -> bool:
        if asked.frame.op == Op.FLUSH:

            def later() -> None:
                slow.wait(30)
                daemon.serve(asked)

            threading.Thread(target=later).start()
            return True
        return False

    daemon.script = script

    def quick() -> float:
        time.sleep(0.1)
        begun = time.monotonic()
        client.put(key(1), b"x")
        assert client.get(key(1)) == b"x"
        took = time.monotonic() - begun
        slow.set()
        return took

    flushed, took = in_threads(client.flush, quick)
    assert flushed == []
    assert took < 2


def test_sending_and_receiving_more_than_the_sockets_hold_does_not_lock(
    daemon: FakeDaemon, client: Client
) -> None:
    daemon.takes_regions = False
    names, blocks = many(16, 2 * MIB)
    client.put_many(names, blocks)
    results = in_threads(
        lambda: client.get_many(names),
        lambda: client.put_many([key(100 + n) for n in range(16)], blocks).any(),
        lambda: client.get_many(names),
    )
    assert results[0] == results[2] == blocks
    assert not results[1]


# -- late, lost and wrong answers -----------------------------------------------------------------


def test_the_next_part_is_sent_wholly_while_one_waits_for_the_first(
    daemon: FakeDaemon, client: Client
) -> None:
    def script(asked: Asked) -> bool:
        """Answer the first part when the second one is there."""
        if asked.frame.op != Op.PUT:
            return False
        first, *others = daemon.of(Op.PUT)
        if others:
            daemon.serve(first)
        else:
            time.sleep(0.5)  # nothing is read: the socket takes a part of the next frame
        return not others

    client.status()
    connection = client._operations._session._connection
    assert connection is not None
    connection._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32768)
    names = [number.to_bytes(64, "big") for number in range(8192)]
    daemon.script = script
    assert not client.put_many(names, [b"block"] * len(names)).any()
    assert len(daemon.of(Op.PUT)) == 2


def test_a_cancel_that_is_confirmed_costs_no_memory(daemon: FakeDaemon, client: Client) -> None:
    names, blocks = many(2, MIB)
    client.put_many(names, blocks)
    daemon.script = silent(Op.STREAM_GET, confirm=True)
    begun = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded):
        client.get_many(names, timeout=0.2)
    assert time.monotonic() - begun < 2
    assert cancelled(daemon) == {daemon.of(Op.STREAM_GET)[-1].frame.request}
    daemon.script = None
    assert whole(client.get_many(names)) == blocks
    assert client._operations._session.regions.abandoned == 0
    assert len(daemon.of(Op.REGISTER)) == 1
    assert len(daemon.peers) == 1


def scribble(asked: Asked) -> None:
    """Write late into all the memory of a request."""
    for row in asked.rows():
        row[:] = b"\xee" * len(row)


def test_late_writes_reach_no_memory_that_is_used_again(daemon: FakeDaemon, client: Client) -> None:
    names, blocks = many(4, MIB)
    client.put_many(names, blocks)
    for round_ in range(3):
        daemon.script = silent(Op.STREAM_GET)
        with pytest.raises(errors.DeadlineExceeded):
            client.get_many(names, timeout=0.1)
        late = daemon.of(Op.STREAM_GET)[-1]
        assert client._operations._session.regions.abandoned == round_ + 1

        def meddle(asked: Asked, late: Asked = late) -> bool:
            # While others put and get, the daemon wakes up and writes what it was asked for long
            # ago; memory that had been leased again would change under them.
            if asked.frame.op in (Op.STREAM_GET, Op.PUT):
                scribble(late)
            if asked.frame.op == Op.STREAM_GET:
                daemon.serve(asked)
                scribble(late)
                return True
            return False

        daemon.script = meddle
        other = [key(100 + n) for n in range(4)]
        assert not client.put_many(other, blocks).any()
        assert [daemon.blocks[0, 0, name] for name in other] == blocks
        assert whole(client.get_many(names)) == blocks
        assert all(one.frame.region != late.frame.region for one in daemon.asked[-2:])
        with client.staging(40 * MIB) as staging:
            staging.view[:] = bytes(40 * MIB)
            scribble(late)
            assert not np.frombuffer(staging.view, np.uint8).any()


def cancelled(daemon: FakeDaemon) -> set[int]:
    """Return the requests that the daemon was asked to cancel."""
    return {int.from_bytes(one.meta, "little") for one in daemon.of(Op.CANCEL)}


def exhaust(daemon: FakeDaemon, client: Client) -> None:
    """Lose as much memory as may be lost. A busy machine may not even get to asking in time."""
    daemon.script = silent(Op.STREAM_GET)
    regions = client._operations._session.regions
    while not regions.exhausted():
        with pytest.raises(errors.DeadlineExceeded):
            client.get_many([key(0)] * 2, timeout=0.05)
    assert regions.abandoned == 4


def test_after_four_losses_all_is_a_miss_at_once_until_the_daemon_ends(
    daemon: FakeDaemon, client: Client
) -> None:
    names, blocks = many(2, MIB)
    client.put_many(names, blocks)
    exhaust(daemon, client)
    daemon.script = None
    asked, begun = len(daemon.asked), time.monotonic()
    buffers = [bytearray(MIB), bytearray(10)]
    assert whole(client.get_many(names)) == [None, None]
    assert client.get_into(names, buffers).tolist() == [BlockStatus.MISS] * 2
    assert [s for _, s, _ in client.stream_get(names)] == [BlockStatus.MISS] * 2
    assert not client.contains(names).any()
    assert client.prefix(names) == 0
    for size in (1, MIB):
        with pytest.raises(errors.Busy):
            client.put(key(5), bytes(size))
    assert len(daemon.asked) == asked
    assert time.monotonic() - begun < 5, "waited for a daemon that does not answer"
    daemon.end()
    assert whole(client.get_many(names)) == blocks
    assert client.put(key(5), block(5, MIB)) == "stored"


def test_a_daemon_that_registers_nothing_makes_all_a_miss_too(
    daemon: FakeDaemon, client: Client
) -> None:
    client.put(key(0), b"x")
    daemon.script = lambda asked: True
    for _ in range(4):
        with pytest.raises(errors.DeadlineExceeded):
            client.get_many([key(0)] * 2, timeout=0.05)
    asked = len(daemon.asked)
    assert whole(client.get_many([key(0)] * 2)) == [None, None]
    assert len(daemon.asked) == asked
    daemon.script = None
    for one in daemon.of(Op.CANCEL):
        daemon.serve(one)
    assert whole(client.get_many([key(0)] * 2)) == [b"x", b"x"]


def test_a_closed_connection_confirms_nothing(daemon: FakeDaemon, client: Client) -> None:
    names, blocks = many(2, MIB)
    client.put_many(names, blocks)

    def script(asked: Asked) -> bool:
        if asked.frame.op == Op.STREAM_GET:
            daemon.drop_all()
        return asked.frame.op == Op.STREAM_GET

    daemon.script = script
    with pytest.raises(errors.DaemonUnavailable):
        client.get_many(names)
    late = daemon.of(Op.STREAM_GET)[0]
    assert client._operations._session.regions.abandoned == 1
    daemon.script = None
    assert whole(client.get_many(names)) == blocks
    assert len(daemon.peers) == 2
    with client.staging(40 * MIB) as staging:
        staging.view[:] = bytes(40 * MIB)
        scribble(late)
        assert not np.frombuffer(staging.view, np.uint8).any()


def test_a_late_confirmation_ends_a_loss(daemon: FakeDaemon, client: Client) -> None:
    names, blocks = many(2, MIB)
    client.put_many(names, blocks)
    exhaust(daemon, client)
    assert whole(client.get_many(names)) == [None, None]
    daemon.script = None
    gets = {one.frame.request for one in daemon.of(Op.STREAM_GET)}
    assert eventually(lambda: gets <= cancelled(daemon))
    for cancel in daemon.of(Op.CANCEL):
        daemon.serve(cancel)
    assert whole(client.get_many(names)) == blocks
    regions = client._operations._session.regions
    regions.sweep()  # what was confirmed while the get waited
    assert regions.abandoned == 0
    lost = {one.frame.region for one in daemon.of(Op.STREAM_GET)[:-1]}
    assert daemon.of(Op.STREAM_GET)[-1].frame.region not in lost
    assert {one.frame.region for one in daemon.of(Op.UNREGISTER)} >= lost


def test_a_refused_cancel_confirms_nothing(daemon: FakeDaemon, client: Client) -> None:
    client.put(key(0), block(0, MIB))

    def script(asked: Asked) -> bool:
        if asked.frame.op == Op.CANCEL:
            asked.fail(errors.Busy("not now", ""))
        return asked.frame.op in (Op.STREAM_GET, Op.CANCEL)

    daemon.script = script
    with pytest.raises(errors.DeadlineExceeded):
        client.get_many([key(0)] * 2, timeout=0.05)
    assert client._operations._session.regions.abandoned == 1


def test_late_answers_are_dropped(daemon: FakeDaemon, client: Client) -> None:
    daemon.takes_regions = False
    names, blocks = many(2, MIB)
    client.put_many(names, blocks)
    daemon.script = silent(Op.STREAM_GET)
    with pytest.raises(errors.DeadlineExceeded):
        client.get_many(names, timeout=0.1)
    daemon.script = None
    late = threading.Thread(target=daemon.serve, args=(daemon.of(Op.STREAM_GET)[0],))
    late.start()
    assert whole(client.get_many(names[::-1])) == blocks[::-1]
    late.join(10)
    client.status()
    assert len(daemon.peers) == 1
    assert client._operations._session._connection is not None
    assert client._operations._session._connection.under_way <= 1  # the cancel itself


def test_staging_is_lost_with_its_request(daemon: FakeDaemon, client: Client) -> None:
    with client.staging(MIB) as staging:
        staging.slots([MIB])
        daemon.script = silent(Op.GET)
        with pytest.raises(errors.DeadlineExceeded):
            client.get_staged([key(1)], staging, timeout=0.05)
        daemon.script = None
        with pytest.raises(errors.Busy):
            client.put_staged([key(1)], staging)
    assert client._operations._session.regions.abandoned == 1


@pytest.mark.parametrize(
    "header",
    [{"op": Op.PUT}, {"count": 3}, {"count": 0}, {"flags": Flag.MORE, "count": 2}],
    ids=lambda header: str(header),
)
def test_answers_that_do_not_fit_are_refused(
    daemon: FakeDaemon, client: Client, header: dict[str, int]
) -> None:
    def script(asked: Asked) -> bool:
        if asked.frame.op != Op.STREAM_GET:
            return False
        asked.answer(bytes([BlockStatus.MISS]) * 3 + bytes(36), b"", **header)
        if header.get("flags"):
            asked.answer(bytes(13), count=1)
        return True

    daemon.script = script
    with pytest.raises(errors.ProtocolError):
        client.get_many([key(1), key(2)])
    daemon.script = None
    assert client.get(key(1)) is None
    assert len(daemon.peers) == (2 if "op" in header else 1)


def test_an_answer_to_nobody_fails_all_who_wait(daemon: FakeDaemon, client: Client) -> None:
    waiting = threading.Barrier(2)

    def script(asked: Asked) -> bool:
        if asked.frame.op == Op.FLUSH:
            return True
        if asked.frame.op == Op.TOUCH:
            time.sleep(0.1)
            asked.frame = replace(asked.frame, request=4711)
            asked.answer()
            return True
        return False

    def both(act: Callable[[], object]) -> object:
        waiting.wait(10)
        return act()

    daemon.script = script
    client.status()
    results = in_threads(lambda: both(client.flush), lambda: both(lambda: client.touch([key(1)])))
    assert all(isinstance(result, errors.ProtocolError) for result in results)


def test_garbage_ends_the_connection(daemon: FakeDaemon, client: Client) -> None:
    def script(asked: Asked) -> bool:
        if asked.frame.op == Op.STREAM_GET:
            asked.peer.send(bytes(64))
        return asked.frame.op == Op.STREAM_GET

    daemon.script = script
    with pytest.raises(errors.ProtocolError):
        client.get(key(1))
    daemon.script = None
    assert client.get(key(1)) is None


def test_a_daemon_that_dies_in_the_middle_of_an_answer_is_told(
    daemon: FakeDaemon, client: Client
) -> None:
    client.put(key(1), block(1, 100_000))

    def script(asked: Asked) -> bool:
        if asked.frame.op != Op.STREAM_GET:
            return False
        meta, data = bytes(1) + (100_000).to_bytes(4, "little") + bytes(8), bytes(50_000)
        frame = replace(asked.frame, meta_bytes=len(meta), payload_bytes=100_000, flags=0)
        asked.peer.send(frame.pack() + meta + data)
        daemon.drop_all()
        return True

    daemon.script = script
    with pytest.raises(errors.DaemonUnavailable) as caught:
        client.get(key(1))
    assert not isinstance(caught.value, errors.DeadlineExceeded)
    daemon.script = None
    assert client.get(key(1)) == block(1, 100_000)


def test_a_restarted_daemon_is_found_again_with_its_namespaces(
    daemon: FakeDaemon, client: Client
) -> None:
    first = client.namespace(named("one"), create=True)
    second = client.namespace(named("two"), create=True)
    client.put(key(1), b"in one", namespace=first)
    daemon.drop_all()
    time.sleep(0.05)
    assert client.put(key(1), b"in two", namespace=second) == "stored"
    # The daemon gave the number 1 to the namespace that was asked for first after the restart.
    assert daemon.blocks[1, 0, key(1)] == b"in two"
    assert daemon.of(Op.NAMESPACE)[-1].meta == protocol.dump(
        {"record": named("two"), "create": False}
    )
    with pytest.raises(errors.UsageError):
        client.get(key(1), namespace=3)


def test_nobody_listens(tmp_path: Path) -> None:
    with Client(str(tmp_path / "socket")) as client, pytest.raises(errors.DaemonUnavailable):
        client.status()


@pytest.mark.parametrize("blocking", [True, False])
def test_a_full_queue_is_waited_for(tmp_path: Path, blocking: bool) -> None:
    path = tmp_path / "full"
    with socket.socket(socket.AF_UNIX) as listener, ExitStack() as others:
        listener.bind(str(path))
        listener.listen(0)
        with suppress(BlockingIOError):
            while True:
                other = others.enter_context(socket.socket(socket.AF_UNIX))
                other.setblocking(False)
                other.connect(str(path))

        async def ask() -> None:
            async with AsyncClient(str(path), timeout=0.5) as client:
                await client.status()

        began = time.monotonic()
        with pytest.raises(errors.DaemonUnavailable, match="no daemon answers"):
            Client(str(path), timeout=0.5).status() if blocking else asyncio.run(ask())
        assert time.monotonic() - began > 0.3
        accepted: list[Any] = []
        accepting = threading.Timer(0.2, lambda: accepted.append(listener.accept()))
        accepting.start()
        # Connected this time, and not answered.
        with pytest.raises(errors.DeadlineExceeded):
            Client(str(path), timeout=0.6).status() if blocking else asyncio.run(ask())
        accepting.join()
        others.enter_context(accepted[0][0])


def test_a_daemon_that_never_says_hello_is_given_up(daemon: FakeDaemon) -> None:
    daemon.script = lambda asked: True
    begun = time.monotonic()
    with Client(daemon.address, timeout=0.2) as client, pytest.raises(errors.DeadlineExceeded):
        client.status()
    assert time.monotonic() - begun < 1.5


def test_waiting_for_another_to_connect_has_a_limit_too(daemon: FakeDaemon) -> None:
    daemon.script = lambda asked: True
    with Client(daemon.address, timeout=2) as client:
        begun = time.monotonic()
        results = in_threads(client.status, lambda: client.status(timeout=0.2))
        assert time.monotonic() - begun < 5
        assert all(isinstance(result, errors.DeadlineExceeded) for result in results)


def test_the_deadline_is_of_the_whole_call(daemon: FakeDaemon, client: Client) -> None:
    names, blocks = many(70, MIB)

    def script(asked: Asked) -> bool:
        if asked.frame.op == Op.PUT:
            time.sleep(0.4)
        return False

    daemon.script = script
    begun = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded):
        client.put_many(names, blocks, timeout=0.6)
    assert time.monotonic() - begun < 2
    deadlines = [one.frame.deadline_ms for one in daemon.of(Op.PUT)]
    assert deadlines == sorted(deadlines, reverse=True)
    assert deadlines[-1] < 300


def test_a_daemon_that_reads_nothing_does_not_hang_a_put(
    daemon: FakeDaemon, client: Client
) -> None:
    daemon.takes_regions = False
    client.put(key(1), block(1, MIB))
    resume = threading.Event()
    daemon.script = lambda asked: asked.frame.op == Op.FLUSH and resume.wait(10)
    data = bytearray(block(2, 30 * MIB))
    results = in_threads(
        lambda: client.flush(timeout=3), lambda: client.put(key(2), data, timeout=0.5)
    )
    assert isinstance(results[1], errors.DeadlineExceeded)
    # The rest of the frame must not be sent from memory that is the caller's again.
    data[:] = bytes(len(data))
    resume.set()
    daemon.script = None
    assert client.get(key(1)) == block(1, MIB)
    assert (0, 0, key(2)) not in daemon.blocks


# -- no room, damage ------------------------------------------------------------------------------


def test_busy_is_repeated_until_the_deadline(daemon: FakeDaemon, client: Client) -> None:
    refusals = iter([True, True, False])

    def script(asked: Asked) -> bool:
        if asked.frame.op == Op.PUT and next(refusals, False):
            raise errors.Busy("no buffer", "")
        return False

    daemon.script = script
    assert client.put(key(1), block(1, MIB)) == "stored"
    assert len(daemon.of(Op.PUT)) == 3

    def always(asked: Asked) -> bool:
        raise errors.Busy("no buffer", "")

    daemon.script = always
    begun = time.monotonic()
    with pytest.raises(errors.Busy):
        client.put(key(2), block(1, MIB), timeout=0.3)
    assert 0.1 < time.monotonic() - begun < 1


@pytest.mark.parametrize("size", [10, 200_000])
def test_only_blocks_that_had_no_room_are_put_again_under_their_parents(
    daemon: FakeDaemon, client: Client, size: int
) -> None:
    names, blocks = many(6, size)
    first = True

    def script(asked: Asked) -> bool:
        nonlocal first
        if asked.frame.op != Op.PUT or not first:
            return False
        first = False
        busy, full = BlockStatus.BUSY, BlockStatus.FULL
        asked.answer(bytes([0, busy, busy, full, 1, busy]))
        return True

    daemon.script = script
    statuses = client.put_many(names, blocks, chain=True, parent=b"top")
    assert statuses.tolist() == [0, 0, 0, BlockStatus.FULL, 1, 0]
    again = daemon.of(Op.PUT)[1:]
    assert [one.keys for one in again] == [names[1:3], names[5:]]
    parents = []
    for one in again:
        fields, count = one.fields, one.frame.count
        fields.take(count * (4 + 8 + (8 if one.frame.region else 0)))
        parents.append(fields.short())
    assert parents == [names[0], names[4]]
    assert [daemon.blocks[0, 0, names[n]] for n in (1, 2, 5)] == [blocks[n] for n in (1, 2, 5)]


def test_blocks_that_stay_busy_are_told(daemon: FakeDaemon, client: Client) -> None:
    def script(asked: Asked) -> bool:
        if asked.frame.op == Op.PUT:
            asked.answer(bytes([BlockStatus.BUSY]))
        return asked.frame.op == Op.PUT

    daemon.script = script
    with pytest.raises(errors.Busy):
        client.put(key(1), b"x", timeout=0.2)
    assert client.put_many([key(1)], [b"x"], timeout=0.2).tolist() == [BlockStatus.BUSY]


@pytest.mark.parametrize("size", [100, MIB])
def test_bytes_that_do_not_match_their_checksum_are_no_hit(
    daemon: FakeDaemon, client: Client, size: int
) -> None:
    names, blocks = many(2, size)
    client.put_many(names, blocks)

    def script(asked: Asked) -> bool:
        if asked.frame.op not in (Op.GET, Op.STREAM_GET):
            return False
        meta = bytes(2) + np.array([size] * 2, "<u4").tobytes()
        meta += np.array([xxhash.xxh3_64_intdigest(data) for data in blocks], "<u8").tobytes()
        wrong = blocks[1][:-1] + bytes([blocks[1][-1] ^ 1])
        if asked.frame.region:
            for row, data in zip(asked.rows(), (blocks[0], wrong), strict=True):
                row[:size] = data
            asked.answer(meta)
        else:
            asked.answer(meta, blocks[0] + wrong)
        return True

    daemon.script = script
    assert whole(client.get_many(names)) == [blocks[0], None]
    buffers = [bytearray(size), bytearray(size)]
    expected = [BlockStatus.OK, BlockStatus.MISMATCH]
    assert client.get_into(names, buffers).tolist() == expected
    streamed = list(client.stream_get(names))
    assert [status for _, status, _ in streamed] == expected
    assert streamed[1][2] is None
    with client.staging(4 * MIB) as staging:
        staging.slots([size, size])
        assert client.get_staged(names, staging).statuses.tolist() == expected


# -- streams and events ---------------------------------------------------------------------------


def test_a_stream_yields_blocks_as_they_come(daemon: FakeDaemon, client: Client) -> None:
    names, blocks = many(3, MIB)
    client.put_many(names, blocks)
    go_on = threading.Event()

    def script(asked: Asked) -> bool:
        if asked.frame.op != Op.STREAM_GET:
            return False
        daemon.reply(asked, [blocks[0]], Flag.MORE)

        def rest() -> None:
            go_on.wait(10)
            daemon.reply(asked, [None, blocks[2]], 0, 1)

        threading.Thread(target=rest).start()
        return True

    daemon.script = script
    stream = client.stream_get(names)
    position, status, view = next(stream)
    assert (position, status, bytes(view or b"")) == (0, BlockStatus.OK, blocks[0])
    go_on.set()
    assert [(p, s, v and bytes(v)) for p, s, v in stream] == [
        (1, BlockStatus.MISS, None),
        (2, BlockStatus.OK, blocks[2]),
    ]
    assert not daemon.of(Op.CANCEL)


def test_closing_a_stream_cancels_it(daemon: FakeDaemon, client: Client) -> None:
    names, blocks = many(3, MIB)
    client.put_many(names, blocks)

    def script(asked: Asked) -> bool:
        if asked.frame.op == Op.STREAM_GET:
            daemon.reply(asked, [blocks[0]], Flag.MORE)
        return asked.frame.op == Op.STREAM_GET

    daemon.script = script
    stream = client.stream_get(names)
    next(stream)
    stream.close()
    cancelled = int.from_bytes(daemon.of(Op.CANCEL)[0].meta, "little")
    assert cancelled == daemon.of(Op.STREAM_GET)[0].frame.request
    assert client._operations._session.regions.abandoned == 0
    daemon.script = None
    assert whole(client.get_many(names)) == blocks


def events(asked: Asked, first: int, kinds: bytes, *names: bytes, flags: int = 0) -> None:
    meta = first.to_bytes(8, "little") + kinds + b"".join(names)
    asked.answer(meta, op=Op.EVENT, count=len(kinds), key_length=8, flags=flags)


def test_a_subscription_tells_what_happens(daemon: FakeDaemon, client: Client) -> None:
    feed = client.subscribe()
    begin = next(feed)
    assert (begin.sequence, len(begin.keys)) == (1, 0)
    asked = daemon.of(Op.SUBSCRIBE)[0]
    events(asked, 1, b"\1\2", key(1), key(2))
    client.put(key(1), b"x")
    events(asked, 9, b"\1", key(3), flags=Flag.GAP)
    one, two = next(feed), next(feed)
    assert (one.sequence, one.stored, one.removed, one.gap) == (1, [key(1)], [key(2)], False)
    assert (two.sequence, two.stored, two.gap) == (9, [key(3)], True)
    feed.close()
    assert len(daemon.of(Op.CANCEL)) == 1
    assert client.get(key(1)) == b"x"


def test_a_quiet_subscription_ends_if_asked_to(client: Client) -> None:
    assert len(list(client.subscribe(timeout=0.1))) == 1


def test_a_slow_reader_of_events_learns_that_it_lost_some(
    daemon: FakeDaemon, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.exchange.MAX_EVENTS", 2)
    feed = client.subscribe()
    next(feed)
    asked = daemon.of(Op.SUBSCRIBE)[0]
    for number in range(4):
        events(asked, number + 1, b"\1", key(number))
    client.status()
    assert [next(feed).sequence for _ in range(2)] == [1, 2]
    events(asked, 5, b"\1", key(5))
    last = next(feed)
    assert (last.sequence, last.gap) == (5, True)


def test_a_subscription_ends_with_its_connection(daemon: FakeDaemon, client: Client) -> None:
    feed = client.subscribe()
    next(feed)
    daemon.drop_all()
    with pytest.raises(errors.DaemonUnavailable):
        next(feed)


# -- processes ------------------------------------------------------------------------------------


def test_a_child_process_talks_on_its_own(daemon: FakeDaemon, client: Client) -> None:
    names, blocks = many(2, MIB)
    client.put_many(names, blocks)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            good = whole(client.get_many(names)) == blocks
            client.put(key(7), block(7, MIB))
            code = 0 if good else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert whole(client.get_many([*names, key(7)])) == [*blocks, block(7, MIB)]
    assert len(daemon.peers) == 2
    assert len({id(one.peer) for one in daemon.of(Op.REGISTER)}) == 2


@pytest.mark.parametrize("going_on", [True, False])
def test_a_child_process_cannot_go_on_with_a_stream_of_its_parent(
    daemon: FakeDaemon, client: Client, going_on: bool
) -> None:
    # Three parts, for their lengths are not known: one is under way while another is read.
    names, blocks = many(150, 5000)
    client.put_many(names, blocks)
    stream = client.stream_get(names)
    next(stream)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if going_on:
                with pytest.raises(errors.DaemonUnavailable, match="another process"):
                    list(stream)
            else:
                stream.close()
            code = 0 if whole(client.get_many(names[:2])) == blocks[:2] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sum(status == BlockStatus.OK for _, status, _ in stream) == 149


def test_a_client_gives_its_descriptors_back(daemon: FakeDaemon) -> None:
    names, blocks = many(2, MIB)

    def descriptors() -> int:
        for peer in daemon.peers:
            for region in peer.regions.values():
                region.close()
        return len(os.listdir("/proc/self/fd"))

    def once() -> None:
        with Client(daemon.address) as client:
            client.put_many(names, blocks)

    once()
    # The daemon's threads close their ends a little later than we do ours.
    assert eventually(lambda: all(peer.sock.fileno() < 0 for peer in daemon.peers))
    gc.collect()  # what tests before this one left behind
    before = descriptors()
    for _ in range(3):
        once()
    assert eventually(lambda: descriptors() <= before)


# -- asyncio --------------------------------------------------------------------------------------


async def collect(steps: Any) -> list[Any]:
    return [step async for step in steps]


def test_asyncio_does_the_same(either: FakeDaemon) -> None:
    names, blocks = many(6, MIB)

    async def act() -> None:
        async with AsyncClient(either.address) as client:
            assert not (await client.put_many(names, blocks)).any()
            assert whole(await client.get_many([*names, key(99)])) == [*blocks, None]
            assert await client.get(key(1)) == blocks[1]
            buffers = [bytearray(MIB) for _ in names]
            assert not (await client.get_into(names, buffers)).any()
            assert buffers == blocks
            found = [bytes(view or b"") async for _, _, view in client.stream_get(names)]
            assert found == blocks
            assert (await client.contains(names)).all()
            assert len(await collect(client.list())) == 6
            assert await client.put(key(0), blocks[0]) == "stored"
            assert (await client.status())["state"] == "ready"
            if client._session._connection and client._session._connection.shares_memory:
                async with client.staging(MIB) as staging:
                    staging.slots([MIB])[0][:] = blocks[5]
                    await client.put_staged([key(50)], staging)
                assert await client.get(key(50)) == blocks[5]

    asyncio.run(act())


def test_asyncio_has_many_requests_under_way(daemon: FakeDaemon) -> None:
    names, blocks = many(30, 300_000)
    waiting: list[Asked] = []

    def script(asked: Asked) -> bool:
        if asked.frame.op != Op.STREAM_GET:
            return False
        waiting.append(asked)
        if len(waiting) == 30:
            for one in random.Random(4).sample(waiting, 30):
                daemon.serve(one)
        return True

    async def act() -> None:
        async with AsyncClient(daemon.address) as client:
            await asyncio.gather(*(client.put(*pair) for pair in zip(names, blocks, strict=True)))
            daemon.script = script
            assert await asyncio.gather(*(client.get(name) for name in names)) == blocks

    asyncio.run(act())
    assert len(daemon.peers) == 1


@pytest.mark.parametrize("confirm", [True, False])
def test_a_cancelled_task_cancels_its_request(daemon: FakeDaemon, confirm: bool) -> None:
    names, blocks = many(2, MIB)

    async def act() -> None:
        async with AsyncClient(daemon.address) as client:
            await client.put_many(names, blocks)
            daemon.script = silent(Op.STREAM_GET, confirm=confirm)
            task = asyncio.create_task(client.get_many(names))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(daemon.of(Op.CANCEL)) == 1
            assert client._session.regions.abandoned == (0 if confirm else 1)
            late = daemon.of(Op.STREAM_GET)[0]

            def script(asked: Asked) -> bool:
                scribble(late)
                return False

            daemon.script = script
            assert whole(await client.get_many(names)) == blocks

    asyncio.run(act())


def test_a_task_that_is_cancelled_again_and_again_leases_nothing_for_ever(
    daemon: FakeDaemon,
) -> None:
    names, blocks = many(9, 8 * MIB)

    async def act() -> None:
        async with AsyncClient(daemon.address) as client:
            daemon.script = silent(Op.PUT, confirm=False)
            task = asyncio.create_task(client.put_many(names, blocks))
            while len(daemon.of(Op.PUT)) < 2:
                await asyncio.sleep(0.01)
            while not task.done():
                task.cancel()
                await asyncio.sleep(0.05)
            daemon.script = None
            for cancel in daemon.of(Op.CANCEL):
                daemon.serve(cancel)
            await client.get(names[0])
            assert client._session.regions.abandoned == 0

    asyncio.run(act())


def test_asyncio_keeps_deadlines(daemon: FakeDaemon) -> None:
    async def act() -> None:
        async with AsyncClient(daemon.address) as client:
            await client.put(key(1), b"x")
            daemon.script = silent(Op.STREAM_GET)
            with pytest.raises(errors.DeadlineExceeded):
                await client.get(key(1), timeout=0.1)
            daemon.script = None
            assert await client.get(key(1)) == b"x"

    asyncio.run(act())


def test_asyncio_sends_more_than_the_socket_holds(daemon: FakeDaemon) -> None:
    daemon.takes_regions = False
    names, blocks = many(8, 4 * MIB)

    async def act() -> None:
        async with AsyncClient(daemon.address) as client:
            puts = [client.put(name, data) for name, data in zip(names, blocks, strict=True)]
            assert await asyncio.gather(*puts) == ["stored"] * 8
            assert await asyncio.gather(*map(client.get, names)) == blocks

    asyncio.run(act())


def test_asyncio_client_goes_on_in_another_loop(daemon: FakeDaemon) -> None:
    client = AsyncClient(daemon.address)
    assert asyncio.run(client.put(key(1), block(1, MIB))) == "stored"
    assert asyncio.run(client.get(key(1))) == block(1, MIB)
    client.close()


def test_a_blocking_client_works_inside_an_event_loop(client: Client) -> None:
    async def act() -> list[Any]:
        client.put_many([key(1), key(2)], [b"x", b"y"])
        return [bytes(view or b"") for _, _, view in client.stream_get([key(1), key(2)])]

    assert asyncio.run(act()) == [b"x", b"y"]

"""The wire from a client that checks nothing: regions, interleaving, cancellation, sudden ends."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

from kvstore import protocol
from kvstore.answers import Ack, BlockStatus
from kvstore.feed import Feed
from kvstore.keys import named
from kvstore.mapped import Allowance, Regions
from kvstore.protocol import Event, Flag, Frame, Op
from kvstore.service import register
from tests.fuzz_socket import process_figures
from tests.stores import MIB, block, key
from tests.talk import (
    PAGE,
    Bare,
    Head,
    Shared,
    Talker,
    bare,
    blocks_of,
    comes_to,
    descriptors_of,
    eventually,
    head,
    mapped_regions,
    outcome,
    put_parts,
    region_get,
    region_put,
)

SIZE = 1 * MIB
ONE: Head = {"key_length": 32, "count": 1}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Bare]:
    """A daemon without memory tier: every get goes to the disk, behind the gate.

    Its workers are so many that not all of them wait there.
    """
    with bare(tmp_path, memory=0, workers=64) as started:
        yield started


@pytest.fixture
def talker(daemon: Bare) -> Iterator[Talker]:
    with Talker(daemon.socket) as opened:
        yield opened


def silent(talker: Talker, seconds: float = 0.3) -> bool:
    """Tell whether nothing comes for a while."""
    return not select.select([talker.sock], [], [], seconds)[0]


def stored(talker: Talker, count: int, size: int = 5000) -> tuple[list[bytes], list[bytes]]:
    keys, blocks = [key(n) for n in range(count)], [block(n, size) for n in range(count)]
    assert talker.put(keys, blocks, ack=Ack.WRITTEN).meta == bytes(count)
    return keys, blocks


# -- hello ----------------------------------------------------------------------------------------


def test_hello_tells_limits_and_passes_a_pidfd(daemon: Bare, talker: Talker) -> None:
    told = talker.json(Op.HELLO, version=protocol.VERSION).json
    assert told["version"] == protocol.VERSION
    assert told["pid"] == daemon.pid
    assert told["checksum"] == "xxh3-64"
    assert told["limits"]["payload_bytes"] == protocol.MAX_PAYLOAD_BYTES
    (pidfd,) = talker.descriptors
    assert not select.select([pidfd], [], [], 0.1)[0]
    daemon.stop(signal.SIGKILL)
    assert select.select([pidfd], [], [], 5)[0]


# -- regions --------------------------------------------------------------------------------------


def test_blocks_travel_through_a_region(daemon: Bare, talker: Talker) -> None:
    data = block(1, 5000)
    with Shared(SIZE) as shared:
        assert talker.register([shared.descriptor], SIZE).json == {"region": 1}
        shared.memory[100:5100] = data
        assert (
            talker.ask(Op.PUT, region_put([key(1)], [100], [5000]), region=1, **ONE).meta == b"\0"
        )
        shared.memory[:] = b"\xff" * SIZE
        meta = region_get([key(2), key(1)], [0, 8192], [4096, 6000])
        reply = talker.ask(Op.GET, meta, region=1, **head([key(1)] * 2))
        miss, sums = int(BlockStatus.MISS), xxhash.xxh3_64_intdigest(data)
        assert outcome(reply) == ([miss, 0], [0, 5000], [0, sums])
        assert not reply.payload
        assert shared.memory[8192:13192] == data
        rest = shared.memory[:8192] + shared.memory[13192:]
        assert rest == b"\xff" * len(rest), "touched outside of the block"


def test_a_target_that_is_too_small_is_left_alone(talker: Talker) -> None:
    stored(talker, 1, 5000)
    with Shared(SIZE) as shared:
        talker.register([shared.descriptor], SIZE)
        reply = talker.ask(Op.GET, region_get([key(0)], [0], [4999]), region=1, **ONE)
        statuses, lengths, _ = outcome(reply)
        assert (statuses, lengths) == ([BlockStatus.TOO_LARGE], [5000])
        assert shared.memory[:] == bytes(SIZE)


def bad_descriptors(folder: Path) -> dict[str, tuple[list[int], int]]:
    """Return descriptors that are no region, and the size announced with them."""
    file = os.open(folder / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, SIZE)
    in_memory = os.open("/dev/shm", os.O_RDWR | os.O_TMPFILE)
    os.ftruncate(in_memory, SIZE)
    good, sealed = Shared(SIZE), Shared(SIZE, seals=6)
    sealed.memory.close()
    fresh = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fresh, SIZE)
    import fcntl

    fcntl.fcntl(fresh, 1033, 2 | 4 | 8)
    return {
        "a file": ([file], SIZE),
        "a file in memory": ([in_memory], SIZE),
        "a directory": ([os.open(folder, os.O_RDONLY)], SIZE),
        "a socket": ([socket.socket(socket.AF_UNIX).detach()], SIZE),
        "no seals": ([Shared(SIZE, seals=0).descriptor], SIZE),
        "may grow": ([Shared(SIZE, seals=2).descriptor], SIZE),
        "may shrink": ([Shared(SIZE, seals=4).descriptor], SIZE),
        "may not be written": ([fresh], SIZE),
        "smaller than announced": ([good.descriptor], SIZE + PAGE),
        "larger than announced": ([good.descriptor], SIZE - PAGE),
        "none": ([], SIZE),
        "two": ([good.descriptor, sealed.descriptor], SIZE),
        "three": ([good.descriptor] * 3, SIZE),
        "many": ([good.descriptor] * 100, SIZE),
        "of no bytes": ([good.descriptor], 0),
        "no whole pages": ([Shared(5000).descriptor], 5000),
        "too large": ([good.descriptor], protocol.MAX_REGION_BYTES + PAGE),
    }


def test_only_sealed_memfds_become_regions(daemon: Bare, talker: Talker, tmp_path: Path) -> None:
    talker.status()
    before = descriptors_of(daemon)
    for what, (descriptors, size) in bad_descriptors(tmp_path).items():
        reply = talker.register(descriptors, size)
        assert reply.error in ("UsageError", "PermissionDenied"), what
        assert comes_to(daemon, before), what
        assert mapped_regions(daemon) == 0, what
    for meta in (b"{}", b'{"bytes":true}', b'{"bytes":"4096"}', b"[]"):
        assert talker.ask(Op.REGISTER, meta).error
    assert talker.status()["region_bytes"] == 0
    with Shared(SIZE) as shared:
        assert talker.register([shared.descriptor], SIZE).json == {"region": 1}
    assert comes_to(daemon, before)
    assert mapped_regions(daemon) == 1


def test_descriptors_that_nobody_asked_for_are_closed(daemon: Bare, talker: Talker) -> None:
    talker.status()
    before = descriptors_of(daemon)
    with Shared(SIZE) as shared:
        status = protocol.dump({"op": "status"})
        for _ in range(3):
            talker.send(Op.ADMIN, status, descriptors=[shared.descriptor])
            assert talker.receive().error == "ProtocolError"
        # In the middle of a frame nobody looks for them.
        frame = Frame(Op.ADMIN, request=9, meta_bytes=len(status)).pack()
        talker.sock.sendall(frame)
        socket.send_fds(talker.sock, [status], [shared.descriptor])
        assert talker.receive().json["state"] == "ready"
    assert comes_to(daemon, before)


OUTSIDE = [
    ([SIZE], [1]),
    ([SIZE - 1], [2]),
    ([0, SIZE - 4096], [10, 4097]),
    ([(1 << 64) - 1], [2]),
    ([(1 << 64) - 100], [200]),
    ([1 << 63], [4096]),
]


@pytest.mark.parametrize(("offsets", "lengths"), OUTSIDE)
def test_rows_outside_of_a_region_are_refused(
    talker: Talker, offsets: list[int], lengths: list[int]
) -> None:
    keys = [key(n) for n in range(len(offsets))]
    with Shared(SIZE) as shared:
        talker.register([shared.descriptor], SIZE)
        put = region_put(keys, offsets, lengths)
        assert talker.ask(Op.PUT, put, region=1, **head(keys)).error == "UsageError"
        get = region_get(keys, offsets, lengths)
        for op in (Op.GET, Op.STREAM_GET):
            assert talker.ask(op, get, region=1, **head(keys)).error == "UsageError"
        last = region_get(keys[:1], [SIZE - 1], [1])
        assert not talker.ask(Op.GET, last, region=1, **ONE).error


def test_regions_have_limits_and_give_them_back(tmp_path: Path) -> None:
    with (
        bare(tmp_path, max_client_regions=3 * MIB, max_regions=4 * MIB) as daemon,
        Shared(MIB) as one,
        Shared(2 * MIB) as two,
        Talker(daemon.socket) as second,
    ):
        with Talker(daemon.socket) as first:
            assert first.register([two.descriptor], 2 * MIB).json == {"region": 1}
            assert first.register([one.descriptor], MIB).json == {"region": 2}
            assert first.register([one.descriptor], MIB).error == "Busy"
            assert second.register([two.descriptor], 2 * MIB).error == "Busy"
            assert second.register([one.descriptor], MIB).json == {"region": 1}
            assert not first.ask(Op.UNREGISTER, region=1).error
            assert first.ask(Op.UNREGISTER, region=1).error == "UsageError"
            assert first.register([one.descriptor], MIB).json == {"region": 1}
            assert first.status()["region_bytes"] == 3 * MIB
        assert eventually(lambda: second.status()["region_bytes"] == MIB)
        assert mapped_regions(daemon) == 1


def test_regions_are_mapped_one_at_a_time() -> None:
    """Else a few clients with large ones would take all workers from those who read and write."""
    running, most, told = 0, 0, []

    async def in_worker(_: object) -> memoryview:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return memoryview(bytearray(PAGE))

    async def answer(meta: bytes) -> None:
        told.append(json.loads(meta)["region"])

    async def register_all() -> None:
        server = SimpleNamespace(mapping=asyncio.Lock(), in_worker=in_worker)
        connection = SimpleNamespace(local=True, regions=Regions(MIB, Allowance(MIB)))
        asked = protocol.dump({"bytes": PAGE})
        requests: list[Any] = [
            SimpleNamespace(
                server=server,
                connection=connection,
                meta=protocol.Meta(asked),
                descriptors=[0],
                answered=True,
                answer=answer,
            )
            for _ in range(5)
        ]
        await asyncio.gather(*map(register, requests))

    asyncio.run(register_all())
    assert (most, sorted(told)) == (1, [1, 2, 3, 4, 5])


def test_a_region_belongs_to_its_connection(daemon: Bare, talker: Talker) -> None:
    with Shared(SIZE) as shared, Talker(daemon.socket) as other:
        talker.register([shared.descriptor], SIZE)
        meta = region_get([key(1)], [0], [10])
        assert other.ask(Op.GET, meta, region=1, **ONE).error == "UsageError"


def test_unregister_waits_for_the_last_access(daemon: Bare, talker: Talker) -> None:
    _, blocks = stored(talker, 1)
    with Shared(SIZE) as shared:
        talker.register([shared.descriptor], SIZE)
        daemon.shut()
        meta = region_get([key(0)], [0], [5000])
        reading = talker.send(Op.GET, meta, region=1, **ONE)
        assert eventually(daemon.inside)
        leaving = talker.send(Op.UNREGISTER, region=1)
        late = talker.ask(Op.GET, meta, region=1, **ONE)
        assert late.error == "UsageError", "no new use of a region that is being given up"
        assert silent(talker)
        assert mapped_regions(daemon) == 1
        daemon.open()
        assert [talker.receive().frame.request for _ in range(2)] == [reading, leaving]
        assert shared.memory[:5000] == blocks[0]
        assert mapped_regions(daemon) == 0


# -- puts -----------------------------------------------------------------------------------------


def test_a_wrong_checksum_is_a_mismatch(talker: Talker) -> None:
    keys, blocks = [key(1), key(2)], [b"first", b"second"]
    sums = [xxhash.xxh3_64_intdigest(one) for one in blocks]
    parts = put_parts(keys, blocks, [sums[0], sums[1] ^ 1])
    reply = talker.ask(Op.PUT, *parts, flags=Flag.CHECKSUM, ack=Ack.WRITTEN, **head(keys))
    assert list(reply.meta) == [BlockStatus.OK, BlockStatus.MISMATCH]
    assert talker.get(keys) == [b"first", None]


def test_overwrite_brings_a_new_version(talker: Talker) -> None:
    talker.put([key(1)], [b"old"], ack=Ack.WRITTEN)
    assert talker.put([key(1)], [b"newer"]).meta == bytes([BlockStatus.CONFLICT])
    reply = talker.put([key(1)], [b"newer"], flags=Flag.OVERWRITE, ack=Ack.WRITTEN)
    assert reply.meta == b"\0"
    assert talker.get([key(1)]) == [b"newer"]


@pytest.mark.parametrize("ack", [3, 255])
def test_an_unknown_level_is_refused(talker: Talker, ack: int) -> None:
    assert talker.put([key(1)], [b"x"], ack=ack).error == "UsageError"
    assert talker.get([key(1)]) == [None]


# -- many at a time -------------------------------------------------------------------------------


def test_a_slow_request_holds_up_no_other(daemon: Bare, talker: Talker) -> None:
    keys, blocks = stored(talker, 3)
    daemon.shut()
    slow = talker.send(Op.GET, b"".join(keys), **head(keys))
    assert eventually(daemon.inside)
    assert talker.contains(keys) == [1, 1, 1]
    assert talker.status()["state"] == "ready"
    daemon.open()
    reply = talker.receive()
    assert reply.frame.request == slow
    assert list(blocks_of(reply)) == blocks


def test_hundreds_of_requests_on_one_connection(talker: Talker) -> None:
    keys = [key(n) for n in range(300)]
    blocks = [block(n, 1 + 97 * n) for n in range(300)]
    for name, data in zip(keys, blocks, strict=True):
        talker.send(Op.PUT, *put_parts([name], [data]), **ONE)
    assert sorted(talker.receive().frame.request for _ in keys) == list(range(1, 301))
    for start in range(0, 300, 20):
        some = zip(keys[start : start + 20], blocks[start : start + 20], strict=True)
        expected = {talker.send(Op.GET, name, **ONE): data for name, data in some}
        for _ in range(20):
            reply = talker.receive()
            assert reply.payload == expected.pop(reply.frame.request)


def test_a_client_is_held_back_at_its_limit(tmp_path: Path) -> None:
    with bare(tmp_path, memory=0, max_requests=2) as daemon, Talker(daemon.socket) as talker:
        keys, _ = stored(talker, 3)
        daemon.shut()
        first, second = (talker.send(Op.GET, name, **ONE) for name in keys[:2])
        assert eventually(daemon.inside)
        cancelling = talker.cancel(second)
        third = talker.send(Op.CONTAINS, keys[0] + bytes(4), **ONE)
        assert silent(talker)
        with Talker(daemon.socket) as other:
            assert other.contains(keys) == [1, 1, 1], "others are not held back"
        daemon.open()
        answered = {
            reply.frame.request: reply.error for reply in (talker.receive() for _ in "1234")
        }
        assert answered == {first: "", second: "Cancelled", cancelling: "", third: ""}


def test_an_id_in_use_ends_the_connection(daemon: Bare, talker: Talker) -> None:
    keys, _ = stored(talker, 1)
    daemon.shut()
    talker.send(Op.GET, keys[0], request=77, **ONE)
    assert eventually(daemon.inside)
    talker.send(Op.CONTAINS, keys[0] + bytes(4), request=77, **ONE)
    reply = talker.receive()
    assert (reply.frame.request, reply.error) == (0, "ProtocolError")
    daemon.open()
    assert talker.ended()


def test_a_cancel_has_a_number_of_its_own(daemon: Bare, talker: Talker) -> None:
    stored(talker, 1)
    daemon.shut()
    number = talker.send(Op.GET, key(0), **ONE)
    assert eventually(daemon.inside)
    talker.send(Op.CANCEL, struct.pack("<Q", number), request=number)
    assert talker.receive().error == "ProtocolError"
    assert talker.ended()
    daemon.open()


def test_two_cancels_may_have_one_number(daemon: Bare, talker: Talker) -> None:
    stored(talker, 1)
    daemon.shut()
    number = talker.send(Op.GET, key(0), **ONE)
    assert eventually(daemon.inside)
    for _ in range(2):
        talker.send(Op.CANCEL, struct.pack("<Q", number), request=77)
    daemon.open()
    assert [talker.receive().frame.request for _ in range(3)] == [number, 77, 77]


def test_longer_headers_of_later_clients_are_read(talker: Talker) -> None:
    meta = protocol.dump({"op": "status"})
    header = bytearray(Frame(Op.ADMIN, request=5, meta_bytes=len(meta)).pack())
    struct.pack_into("<H", header, 6, 64)
    talker.sock.sendall(bytes(header) + b"?" * 24 + meta)
    assert talker.receive().json["state"] == "ready"


def test_unknown_operations_are_skipped_with_all_they_bring(talker: Talker) -> None:
    for op in (0, Op.EVENT, 99, 255):
        assert talker.ask(op, b"meta", b"payload" * 1000).error == "ProtocolError"
    assert talker.ask(Op.GET, key(1), b"payload", **ONE).error == "ProtocolError"
    assert talker.get([key(1)]) == [None]


# -- cancel ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [Op.GET, Op.STREAM_GET])
def test_a_cancel_is_confirmed_after_the_last_access(daemon: Bare, talker: Talker, op: Op) -> None:
    keys, _ = stored(talker, 20, MIB)
    with Shared(20 * MIB) as shared:
        talker.register([shared.descriptor], 20 * MIB)
        daemon.shut()
        meta = region_get(keys, [n * MIB for n in range(20)], [MIB] * 20)
        reading = talker.send(op, meta, region=1, **head(keys))
        assert eventually(daemon.inside)
        cancelling, again = talker.cancel(reading), talker.cancel(reading)
        assert silent(talker), "confirmed while a worker may still write"
        daemon.open()
        reply = talker.receive()
        assert (reply.frame.request, reply.error) == (reading, "Cancelled")
        shared.memory[:] = b"\xee" * (20 * MIB)
        assert {talker.receive().frame.request for _ in range(2)} == {cancelling, again}
        assert silent(talker)
        assert shared.memory[:] == b"\xee" * (20 * MIB), "written after the confirmation"
        assert not talker.ask(Op.UNREGISTER, region=1).error
    assert mapped_regions(daemon) == 0


def test_cancelling_what_is_over_or_never_was(talker: Talker) -> None:
    done = talker.send(Op.GET, key(1), **ONE)
    assert talker.receive().frame.request == done
    for number in (done, 1 << 63, 0):
        cancelling = talker.cancel(number)
        reply = talker.receive()
        assert (reply.frame.request, reply.error, reply.meta) == (cancelling, "", b"")


def test_a_cancel_that_comes_right_before_its_request(talker: Talker) -> None:
    stored(talker, 1)
    cancel = struct.pack("<Q", 99)
    before = Frame(Op.CANCEL, request=98, meta_bytes=len(cancel)).pack() + cancel
    after = Frame(Op.GET, request=99, meta_bytes=32, **ONE).pack() + key(0)
    for _ in range(20):
        talker.sock.sendall(before + after)
        replies = {reply.frame.request: reply for reply in (talker.receive(), talker.receive())}
        assert replies.keys() == {98, 99}
        assert replies[99].error in ("", "Cancelled")


def test_a_put_that_waits_is_cancelled(daemon: Bare, talker: Talker) -> None:
    with Shared(SIZE) as shared:
        talker.register([shared.descriptor], SIZE)
        daemon.shut()
        meta = region_put([key(1)], [0], [5000])
        writing = talker.send(Op.PUT, meta, region=1, ack=Ack.WRITTEN, **ONE)
        assert eventually(daemon.inside)
        cancelling = talker.cancel(writing)
        assert silent(talker), "a put reads its rows until it is answered"
        daemon.open()
        replies = [talker.receive() for _ in range(2)]
        assert [reply.frame.request for reply in replies] == [writing, cancelling]
        assert replies[0].error == "Cancelled"
    assert talker.put([key(2)], [b"y"]).meta == b"\0"


def test_a_cancelled_get_sends_whole_frames_only(daemon: Bare, talker: Talker) -> None:
    """The client reads nothing for a while: the cancellation comes in the middle of a reply."""
    keys, blocks = stored(talker, 40, MIB)
    reading = talker.send(Op.GET, b"".join(keys), **head(keys))
    time.sleep(0.3)
    cancelling = talker.cancel(reading)
    found: list[bytes | None] = []
    while not (reply := talker.receive()).error:
        assert reply.frame.request == reading
        found += blocks_of(reply)
    assert (reply.frame.request, reply.error) == (reading, "Cancelled")
    assert talker.receive().frame.request == cancelling
    assert found == blocks[: len(found)]
    assert len(found) < len(keys)
    assert talker.get(keys) == blocks


# -- streams --------------------------------------------------------------------------------------


def test_a_stream_names_blocks_and_misses_in_order(talker: Talker) -> None:
    stored(talker, 12, MIB)
    wanted = [key(n) for n in (11, 99, 3, 3, 0, 100, *range(1, 10))]
    expected = [block(n, MIB) if n < 12 else None for n in (11, 99, 3, 3, 0, 100, *range(1, 10))]
    talker.send(Op.STREAM_GET, b"".join(wanted), **head(wanted))
    replies = [talker.receive()]
    while replies[-1].more:
        replies.append(talker.receive())
    assert [one for reply in replies for one in blocks_of(reply)] == expected
    assert len(replies) > 2, "as soon as they are there, not all at the end"


def test_a_stream_into_a_region_answers_as_rows_arrive(daemon: Bare, talker: Talker) -> None:
    keys, blocks = stored(talker, 12, MIB)
    with Shared(12 * MIB) as shared:
        talker.register([shared.descriptor], 12 * MIB)
        meta = region_get(keys, [n * MIB for n in range(12)], [MIB] * 12)
        talker.send(Op.STREAM_GET, meta, region=1, **head(keys))
        at, replies = 0, 0
        while at < 12:
            reply = talker.receive()
            statuses, lengths, _ = outcome(reply)
            assert not any(statuses)
            assert set(lengths) == {MIB}
            for number in range(at, at + len(statuses)):
                assert shared.memory[number * MIB : (number + 1) * MIB] == blocks[number]
            at, replies = at + len(statuses), replies + 1
            assert reply.more == (at < 12)
        assert replies > 2


def test_a_get_into_a_region_is_answered_once(talker: Talker) -> None:
    keys, blocks = stored(talker, 30, MIB)
    with Shared(30 * MIB) as shared:
        talker.register([shared.descriptor], 30 * MIB)
        meta = region_get(keys, [n * MIB for n in range(30)], [MIB] * 30)
        reply = talker.ask(Op.GET, meta, region=1, **head(keys))
        assert not reply.more
        assert outcome(reply)[0] == [0] * 30
        assert shared.memory[:] == b"".join(blocks)


@pytest.mark.parametrize("op", [Op.GET, Op.STREAM_GET, Op.CONTAINS, Op.TOUCH])
def test_no_keys_at_all(talker: Talker, op: Op) -> None:
    meta = bytes(4) if op == Op.CONTAINS else b""
    reply = talker.ask(op, meta, key_length=32, count=0)
    assert (reply.error, reply.meta, reply.more) == ("", b"", False)


# -- subscriptions --------------------------------------------------------------------------------


def events_of(talker: Talker, count: int) -> list[tuple[int, int, bytes]]:
    """Return (sequence number, kind, key) of so many events."""
    found: list[tuple[int, int, bytes]] = []
    while len(found) < count:
        reply = talker.receive()
        assert reply.frame.op == Op.EVENT
        meta = protocol.Meta(reply.meta)
        first, size = int(meta.u64(1)[0]), reply.frame.count
        kinds = meta.u8(size).tolist()
        keys = meta.keys(size, reply.frame.key_length)
        found += [(first + n, kinds[n], keys[n].tobytes()) for n in range(size)]
    return found


def test_events_come_in_order_until_the_subscription_is_cancelled(
    daemon: Bare, talker: Talker
) -> None:
    keys = [key(n) for n in range(3)]
    with Talker(daemon.socket) as other:
        number = talker.send(Op.SUBSCRIBE)
        reply = talker.receive()
        following = int.from_bytes(reply.meta, "little")
        handle = other.namespace(named("another")).json["handle"]
        other.put([key(9)], [b"x"], ack=Ack.WRITTEN, handle=handle)
        other.put(keys, [b"a", b"b", b"c"], ack=Ack.WRITTEN)
        other.ask(Op.DELETE, keys[1], **ONE)
        found = events_of(talker, 4)
        assert [sequence for sequence, _, _ in found] == list(range(following, following + 4))
        assert {(kind, name) for _, kind, name in found[:3]} == {(Event.STORED, k) for k in keys}
        assert found[3][1:] == (Event.REMOVED, keys[1])
        cancelling = talker.cancel(number)
        assert talker.receive().frame.request == cancelling
        other.put([key(5)], [b"z"], ack=Ack.WRITTEN)
        assert silent(talker)
    assert int.from_bytes(talker.ask(Op.SUBSCRIBE).meta, "little") == following + 5


def test_subscriptions_have_a_limit(talker: Talker) -> None:
    replies = [talker.ask(Op.SUBSCRIBE).error for _ in range(65)]
    assert replies == [""] * 64 + ["Busy"]


class Watched:
    """Stands for a store and for a connection whose client reads when it is told to."""

    def __init__(self) -> None:
        self.next_sequence = 1
        self.read = asyncio.Event()
        self.frames: list[tuple[int, int, int]] = []

    def subscribe(self, _: object, watcher: Any) -> Watched:
        self.watcher = watcher
        return self

    def publish(self, count: int) -> None:
        kinds = np.ones(count, np.uint8)
        self.watcher(self.next_sequence, kinds, np.zeros((count, 4), np.uint8))
        self.next_sequence += count

    async def send(self, _: Frame, meta: bytes, **fields: int) -> None:
        first = int.from_bytes(meta[:8], "little")
        self.frames.append((first, fields["count"], fields["flags"]))
        await self.read.wait()

    def close(self) -> None:
        pass


def test_a_slow_subscriber_loses_events_and_is_told() -> None:
    async def scene() -> list[tuple[int, int, int]]:
        watched: Any = Watched()
        feed = Feed(watched, Frame(Op.SUBSCRIBE), watched, watched)
        feed.start()
        for count in (10, 40_000, 25_000, 1000, 5):
            watched.publish(count)
            await asyncio.sleep(0)
        watched.read.set()
        await asyncio.sleep(0.05)
        watched.publish(7)
        await asyncio.sleep(0.05)
        await feed.close()
        frames: list[tuple[int, int, int]] = watched.frames
        return frames

    assert asyncio.run(scene()) == [
        (1, 10, 0),
        (11, 40_000, 0),
        (40_011, 25_000, 0),
        (66_011, 5, Flag.GAP),
        (66_016, 7, 0),
    ]


# -- sudden ends ----------------------------------------------------------------------------------


def test_a_client_that_only_stops_sending_is_answered(daemon: Bare, talker: Talker) -> None:
    keys, blocks = stored(talker, 2)
    daemon.shut()
    talker.send(Op.GET, b"".join(keys), **head(keys))
    talker.sock.shutdown(socket.SHUT_WR)
    assert eventually(daemon.inside)
    time.sleep(0.8)
    daemon.open()
    assert list(blocks_of(talker.receive())) == blocks
    assert talker.ended()


def test_clients_that_die_leave_nothing_behind(daemon: Bare, talker: Talker) -> None:
    keys, _ = stored(talker, 8, MIB)
    talker.status()
    before = descriptors_of(daemon)
    daemon.shut()
    meta = region_get(keys, [n * MIB for n in range(8)], [MIB] * 8)
    for op in (Op.GET, Op.STREAM_GET) * 3:
        with Shared(8 * MIB) as shared, Talker(daemon.socket) as doomed:
            doomed.register([shared.descriptor], 8 * MIB)
            doomed.send(op, meta, region=1, **head(keys))
            doomed.send(op, b"".join(keys), **head(keys))
            lengths = region_put([key(50)], [0], [MIB])
            doomed.send(Op.PUT, lengths, region=1, ack=Ack.WRITTEN, **ONE)
            doomed.send(Op.SUBSCRIBE)
            doomed.send(Op.PUT, put_parts([key(51)], [block(51, MIB)])[0], **ONE)
            assert eventually(daemon.inside)
            # Only what has begun uses its region: what came before this answer has.
            doomed.send(Op.CONTAINS, keys[0] + bytes(4), **ONE)
            while doomed.receive().frame.op != Op.CONTAINS:
                pass
    assert mapped_regions(daemon) == 6, "kept while workers may use them"
    daemon.open()
    assert eventually(lambda: talker.status()["clients"] == 1)
    assert comes_to(daemon, before)
    assert mapped_regions(daemon) == 0
    assert talker.status()["region_bytes"] == 0
    assert talker.status()["failed_requests"] == 0
    talker.ask(Op.DELETE, b"".join([*keys, key(50)]), **head([*keys, key(50)]))
    gone = lambda: not list((daemon.store / "blocks").rglob("*.kvb"))  # noqa: E731
    assert eventually(gone), "a reference keeps a block"
    # All of the memory for blocks in flight is there again: half of it at once, twice.
    for first in (100, 200):
        names = [key(first + n) for n in range(60)]
        assert talker.put(names, [block(n, MIB) for n in range(60)]).meta == bytes(60)
        talker.ask(Op.DELETE, b"".join(names), **head(names))
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log


def test_announced_metadata_takes_no_memory_before_it_is_there(daemon: Bare) -> None:
    # The slab may still be on its way into memory: 64 MiB and what passes by it.
    before = process_figures(daemon.pid)["RssAnon"]
    with ExitStack() as stack:
        for _ in range(40):
            talker = stack.enter_context(Talker(daemon.socket))
            header = Frame(Op.GET, meta_bytes=protocol.MAX_META_BYTES).pack()
            talker.sock.sendall(header + bytes(100_000))
        with Talker(daemon.socket) as other:
            assert eventually(lambda: other.status()["clients"] == 41)
        time.sleep(0.3)
        assert process_figures(daemon.pid)["RssAnon"] - before < 256 * MIB, "40 times 16 MiB"


def test_metadata_of_every_size_arrives_whole(talker: Talker) -> None:
    for count in (1, 1023, 1024, 1025, 3000, protocol.MAX_KEYS):
        keys = [struct.pack("<16I", *[n] * 16) for n in range(count)]
        assert talker.put(keys[-1:], [b"x"]).meta == b"\0"
        assert talker.contains(keys)[-2:] == [0, 1][-count:]
        assert talker.ask(Op.DELETE, keys[-1], **head(keys[-1:])).meta == b"\0"


def test_a_stalled_client_is_dropped_after_its_patience(tmp_path: Path) -> None:
    with bare(tmp_path, request_timeout=1.0) as daemon, Talker(daemon.socket) as idle:
        stored(idle, 30, MIB)
        with Talker(daemon.socket) as half, Talker(daemon.socket) as deaf:
            half.sock.sendall(Frame(Op.GET, meta_bytes=32).pack()[:20])
            deaf.send(Op.GET, b"".join(key(n) for n in range(30)), **head([key(0)] * 30))
            started = time.monotonic()
            assert half.ended()
            assert 0.5 < time.monotonic() - started < 8
            assert eventually(lambda: idle.status()["clients"] == 1)
        assert idle.get([key(1)]) == [block(1, MIB)], "patience does not count between frames"


def test_a_drain_answers_what_is_under_way(daemon: Bare, talker: Talker) -> None:
    keys, blocks = stored(talker, 2)
    daemon.shut()
    talker.send(Op.GET, b"".join(keys), **head(keys))
    with Talker(daemon.socket) as idle:
        idle.status()
        assert eventually(daemon.inside)
        os.kill(daemon.pid, signal.SIGTERM)
        assert idle.ended()
    assert daemon.process is not None
    assert daemon.process.poll() is None
    daemon.open()
    assert list(blocks_of(talker.receive())) == blocks
    assert talker.ended()
    assert daemon.process.wait(20) == 0

"""Put, get, contains, delete and eviction, on the filesystem engine, in one thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import record
from kvstore.answers import Ack, BlockStatus
from kvstore.backends.filesystem import FilesystemEngine
from kvstore.batch import PutRequest
from kvstore.errors import Busy, EngineError, InvalidKey, ReadOnly
from kvstore.keys import key_array, named
from kvstore.service import MAX_LEASE_MS
from kvstore.slab import Extent
from tests.stores import MIB, Local, block, key

OK, PRESENT, CONFLICT, FULL = (
    BlockStatus.OK,
    BlockStatus.ALREADY_PRESENT,
    BlockStatus.CONFLICT,
    BlockStatus.FULL,
)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    opened = Local(tmp_path / "store")
    yield opened
    opened.kill()


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 65_536, 1_000_001, 4 * MIB])
def test_a_block_comes_back_byte_for_byte(local: Local, size: int) -> None:
    assert local.put([key(1)], [block(1, size)]) == [OK]
    assert local.get([key(1)]) == [block(1, size)]


@pytest.mark.parametrize("length", [1, 8, 20, 32, 36, 64])
def test_keys_of_any_length_and_value(local: Local, length: int) -> None:
    keys = [bytes(length), b"\xff" * length, bytes(length - 1) + b"\x01"]
    assert local.put(keys, [block(n) for n in range(3)]) == [OK] * 3
    assert local.get(keys) == [block(n) for n in range(3)]


def test_an_unknown_key_is_a_miss(local: Local) -> None:
    local.put([key(1)], [block(1)])
    assert local.get([key(2), key(1), key(3)]) == [None, block(1), None]
    assert local.contains([key(2), key(1)]) == [False, True]
    assert (local.core.counters.hits, local.core.counters.misses) == (1, 2)


def test_shards_and_namespaces_are_apart(local: Local) -> None:
    local.put([key(1)], [block(1)], shard=1)
    assert local.get([key(1)], shard=2) == [None]
    local.namespace = local.core.namespaces.open(named("other"), create=True)
    assert local.get([key(1)], shard=1) == [None]
    local.put([key(1)], [block(2)], shard=1)
    assert local.get([key(1)], shard=1) == [block(2)]


def test_a_second_put_keeps_the_first_block(local: Local) -> None:
    assert local.put([key(1)], [block(1)]) == [OK]
    assert local.put([key(1)], [block(1)]) == [PRESENT]
    assert local.put([key(1)], [block(2, 5000)]) == [CONFLICT]
    assert local.get([key(1)]) == [block(1)]
    assert len(local.files()) == 1


def test_a_key_twice_in_one_batch_is_written_once(local: Local) -> None:
    keys = [key(1), key(2), key(1), key(1)]
    blocks = [block(1), block(2), block(1), block(1, 5000)]
    assert local.put(keys, blocks) == [OK, OK, PRESENT, CONFLICT]
    assert local.get(keys[:2]) == blocks[:2]
    assert len(local.files()) == 2


def test_a_batch_larger_than_the_memory_for_blocks_in_flight_is_read_in_parts(local: Local) -> None:
    for number in range(24):
        local.put([key(number)], [block(number, MIB)])
    assert local.get([key(n) for n in range(24)]) == [block(n, MIB) for n in range(24)]


def test_no_buffer_is_lost(local: Local) -> None:
    local.put([key(n) for n in range(8)], [block(n) for n in range(8)])
    local.get([key(n) for n in range(16)])
    assert local.core.bounce.free_bytes == local.core.bounce.capacity
    job = local.store.get(local.namespace, 0, np.frombuffer(key(1), np.uint8)[None], MIB)
    whole = local.core.bounce.allocate([local.core.bounce.free_bytes])
    with pytest.raises(Busy):
        local.store.get(local.namespace, 0, np.frombuffer(key(2), np.uint8)[None], MIB)
    local.core.bounce.release(whole)
    local.store.run(job)
    job.close()
    assert not local.core.index.references.any()


def test_deleted_blocks_are_gone_from_disk(local: Local) -> None:
    local.put([key(n) for n in range(4)], [block(n) for n in range(4)])
    assert local.delete([key(1), key(2), key(9)]) == 2
    assert local.contains([key(n) for n in range(4)]) == [True, False, False, True]
    assert len(local.files()) == 2
    assert local.put([key(1)], [block(1)]) == [OK]
    assert local.get([key(1)]) == [block(1)]


def test_a_deleted_block_with_children_keeps_its_chain(local: Local) -> None:
    keys = [key(n) for n in range(5)]
    local.put(keys, [block(n) for n in range(5)], chain=True)
    assert local.delete([keys[2]]) == 1
    assert local.contains(keys) == [True, True, False, True, True]
    assert local.store.prefix(local.namespace, 0, np.array([list(k) for k in keys], np.uint8)) == 2
    assert local.put([keys[2]], [block(2)]) == [OK]
    assert local.get(keys) == [block(n) for n in range(5)]


def test_a_block_is_read_while_it_is_deleted(local: Local) -> None:
    """The reader gets the bytes; the file goes when the reader has gone."""
    local.put([key(1)], [block(1)])
    reading = local.store.get(local.namespace, 0, np.frombuffer(key(1), np.uint8)[None], MIB)
    _, removals = local.store.delete(local.namespace, 0, np.frombuffer(key(1), np.uint8)[None])
    local.store.run(removals[0])
    assert local.contains([key(1)]) == [False]
    assert len(local.files()) == 1
    local.store.run(reading)
    assert bytes(reading.payload(0)) == block(1)
    reading.close()
    local.store.run_chores()
    assert local.files() == []
    assert removals[1].done


def test_a_label_lands_in_the_envelope(local: Local) -> None:
    local.put([key(1)], [block(1)], label="système prompt", parent=key(0))
    header = record.decode(local.files()[0].read_bytes())
    assert (header.label, header.parent, header.key) == ("système prompt", key(0), key(1))


@pytest.mark.parametrize("length", [0, 17 * MIB])
def test_lengths_out_of_bounds_are_refused(local: Local, length: int) -> None:
    request = PutRequest(
        local.namespace, 0, np.frombuffer(key(1), np.uint8)[None], np.array([length], np.uint32)
    )
    with pytest.raises(InvalidKey, match=key(1).hex()):
        local.store.put(request, [memoryview(bytearray(8192))])
    assert local.files() == []


def test_keys_of_another_length_are_refused_until_the_namespace_is_empty(local: Local) -> None:
    local.put([key(1)], [block(1)])
    with pytest.raises(InvalidKey, match=r"16 bytes.*32"):
        local.put([b"k" * 16], [block(2)])
    local.delete([key(1)])
    assert local.put([b"k" * 16], [block(2)]) == [OK]
    with pytest.raises(InvalidKey, match=r"32 bytes.*16"):
        local.put([key(1)], [block(1)])


def test_a_full_store_evicts_the_least_recently_used_leaf(local: Local) -> None:
    count = 70
    for number in range(count):
        local.put([key(number)], [block(number, MIB)])
        local.get([key(0)])
    there = local.contains([key(n) for n in range(count)])
    assert there[0], "a block in use must stay"
    assert not any(there[1:8])
    assert all(there[-50:])
    status = local.store.status()
    assert 0.85 * 64 * MIB < status["live_bytes"] <= 0.95 * 64 * MIB  # type: ignore[operator]
    assert local.core.counters.evictions == there.count(False)
    assert len(local.files()) == there.count(True)


def test_no_block_stays_without_its_parent(local: Local) -> None:
    """Chains lose their ends first, whatever was touched in what order."""
    rng = np.random.default_rng(5)
    chains = [[key(100 * c + n) for n in range(10)] for c in range(20)]
    for keys in chains:
        local.put(keys, [block(n, MIB // 2) for n in range(10)], chain=True)
        for _ in range(5):
            chain = chains[rng.integers(len(chains))]
            local.get(chain[: rng.integers(1, 10)])
    assert local.core.counters.evictions > 20
    for keys in chains:
        there = local.contains(keys)
        assert there == sorted(there, reverse=True), "a gap in a chain"


def test_a_chain_is_extended_in_parts(local: Local) -> None:
    keys = [key(n) for n in range(6)]
    local.put(keys[:3], [block(n) for n in range(3)], chain=True)
    local.put(keys[3:], [block(n) for n in range(3, 6)], chain=True, parent=keys[2])
    index = local.core.index
    rows = index.find(0, np.array([list(k) for k in keys], np.uint8))
    assert index.parents[rows[1:]].tolist() == rows[:-1].tolist()
    stamps = index.last_use[rows].tolist()
    assert stamps == sorted(stamps, reverse=True), "the root must be the newest of its chain"


def test_pinned_leased_and_referenced_blocks_are_not_evicted(local: Local) -> None:
    local.put([key(n) for n in range(3)], [block(n, MIB) for n in range(3)])
    rows = local.core.index.find(0, np.array([list(key(n)) for n in range(3)], np.uint8))
    now = local.core.clock.seconds()
    local.core.index.pin(int(rows[0]), now + 1000)
    local.core.index.lease(rows[1:2], now + 1000)
    local.core.index.acquire(rows[2:3])
    for number in range(100, 180):
        local.put([key(number)], [block(number, MIB)])
    assert local.contains([key(n) for n in range(3)]) == [True, True, True]
    local.core.index.release(rows[2:3])


def test_when_nothing_may_go_puts_answer_full(local: Local) -> None:
    for number in range(60):
        local.put([key(number)], [block(number, MIB)])
    held = local.rows()
    local.core.index.acquire(held)
    assert local.put([key(99)], [block(99, MIB)]) == [FULL]
    assert local.contains([key(n) for n in range(60)]) == [True] * 60
    assert local.core.counters.refused_full == 1
    local.core.index.release(held)
    assert local.put([key(99)], [block(99, MIB)]) == [OK]


def test_touching_everything_keeps_blocks_evictable(local: Local) -> None:
    """Fault 1 of the source system: a refreshing lookup took blocks out of the order for ever."""
    for number in range(57):
        local.put([key(number)], [block(number, MIB)])
    local.core.touch(local.rows())
    assert local.put([key(99)], [block(99, 2 * MIB)]) == [OK]


def test_a_read_only_store_refuses_puts_and_serves_gets(local: Local) -> None:
    local.put([key(1)], [block(1)])
    local.core.stop_writes("testing")
    with pytest.raises(ReadOnly, match="testing"):
        local.put([key(2)], [block(2)])
    assert local.get([key(1)]) == [block(1)]
    assert local.store.status()["state"] == "degraded"


def test_a_list_names_every_block_once(local: Local) -> None:
    for number in range(9):
        local.put([key(number)], [block(number)], shard=number % 3)
    found, start = [], 0
    while True:
        part, following = local.store.list_rows(None, start, 2)
        found += part
        if following is None:
            break
        start = following
    assert sorted(k for _, _, k in found) == sorted(key(n).hex() for n in range(9))
    assert {(n, s) for n, s, _ in found} == {(local.namespace.id.hex(), s) for s in range(3)}


def test_status_counts_what_du_counts(local: Local) -> None:
    import subprocess

    for number in range(30):
        local.put([key(number)], [block(number, 300_000)])
    local.core.take(local.core.measure())
    used = local.store.status()["used_bytes"]
    du = subprocess.run(["du", "-s", "-B1", local.path], capture_output=True, check=True)
    assert used == pytest.approx(int(du.stdout.split()[0]), rel=0.01)


def test_a_put_holds_its_parent_while_it_is_deleted(local: Local) -> None:
    """The reference goes back to the version that was held, though it has left its row."""
    local.put([key(0)], [block(0)])
    job = local.begin_put([key(1)], [block(1)], parent=key(0))
    _, removals = local.store.delete(local.namespace, 0, key_array([key(0)]))
    local.store.run(removals[0])
    local.store.run(job)
    assert job.statuses.tolist() == [OK]
    assert removals[1].done
    assert local.core.writing == {}
    assert local.core.active == set()
    assert not local.core.index.references.any()
    assert len(local.files()) == 1


def test_a_put_that_cannot_begin_takes_nothing(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(57):
        local.put([key(number)], [block(number, MIB)])

    def fail(*_: object) -> None:
        raise MemoryError("no memory for rows")

    with monkeypatch.context() as broken:
        broken.setattr(local.core.index, "insert", fail)
        with pytest.raises(MemoryError):
            local.put([key(0), key(200)], [block(0, MIB), block(200, 8 * MIB)])
    assert local.core.coming == 0
    assert not local.core.index.references.any()
    assert local.core.bounce.free_bytes == local.core.bounce.capacity
    assert local.core.writing == {}
    assert len(local.files()) == local.core.index.blocks
    assert local.put([key(200)], [block(200, 8 * MIB)]) == [OK]


def test_bytes_that_cannot_be_deleted_are_tried_again(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.put([key(1)], [block(1)])

    def fail(_: object) -> int:
        raise EngineError("cannot unlink")

    with monkeypatch.context() as broken:
        broken.setattr(local.core.engine, "delete_many", fail)
        with pytest.raises(EngineError):
            local.delete([key(1)])
    assert local.contains([key(1)]) == [False]
    assert local.core.going > 0
    local.later(10)
    assert local.core.going == 0
    assert local.files() == []


@pytest.mark.parametrize("durable", [False, True])
def test_after_a_failed_sync_nothing_unsynced_is_served(
    local: Local, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    local.put([key(1)], [block(1)])
    local.flush()
    local.put([key(2)], [block(2)])
    local.put([key(3)], [block(3)], durable=True)
    late = local.begin_put([key(4)], [block(4)])
    late.perform()

    def fail(*_: object, **__: object) -> None:
        raise EngineError("a sync failed")

    monkeypatch.setattr(FilesystemEngine, "failed", "a sync failed")
    monkeypatch.setattr(FilesystemEngine, "flush", fail)
    if durable:
        monkeypatch.setattr(FilesystemEngine, "put_many", fail)
        assert local.put([key(5)], [block(5)], durable=True) == [BlockStatus.FAILED]
    else:
        with pytest.raises(EngineError):
            local.flush()
    local.store.finish(late)
    local.store.run_chores()
    assert local.contains([key(n) for n in range(1, 6)]) == [True, False, True, False, False]
    assert local.store.status()["state"] == "degraded"
    with pytest.raises(ReadOnly, match="sync"):
        local.put([key(6)], [block(6)])
    assert local.get([key(1), key(3)]) == [block(1), block(3)]


def test_a_read_only_store_remembers_no_use(local: Local) -> None:
    local.put([key(1)], [block(1)])
    local.tick()
    local.core.stop_writes("testing")
    for _ in range(10):
        local.get([key(1)])
    assert local.core.touched == []


def test_two_key_lengths_cannot_begin_together(local: Local) -> None:
    first = local.begin_put([key(1)], [block(1)])
    with pytest.raises(InvalidKey, match=r"16 bytes.*32"):
        local.put([b"k" * 16], [block(2)])
    local.store.run(first)
    assert local.get([key(1)]) == [block(1)]


def test_eviction_goes_on_in_the_background_to_the_low_watermark(local: Local) -> None:
    for number in range(62):
        local.put([key(number)], [block(number, MIB)])
    before = local.core.counters.evictions
    assert before <= 3, "a put evicts only what it needs"
    local.tick()
    live = local.store.status()["live_bytes"]
    assert live <= 0.92 * 64 * MIB  # type: ignore[operator]
    assert live >= 0.89 * 64 * MIB  # type: ignore[operator]


@pytest.mark.parametrize("memory", [0, 16 * MIB])
def test_received_payloads_need_no_further_memory(tmp_path: Path, memory: int) -> None:
    """All memory for blocks in flight is taken by what came in: it is written from there."""
    local = Local(tmp_path / "store", memory_bytes=memory)
    bounce = local.core.bounce
    names, blocks = [key(n) for n in range(5)], [block(n, 3 * MIB) for n in range(5)]
    received: list[Extent | None] = list(bounce.allocate([3 * MIB + 4096] * 5))
    rest = bounce.allocate([bounce.free_bytes])
    for extent, data in zip(received, blocks, strict=True):
        assert extent is not None
        extent.view[4096:] = data
    sources = [extent.view[4096:] for extent in received if extent is not None]
    lengths = np.full(5, 3 * MIB, np.uint32)
    sums = np.array([record.payload_checksum(data) for data in blocks], np.uint64)
    sums[2] ^= np.uint64(1)
    request = PutRequest(
        local.namespace, 0, key_array(names), lengths, level=Ack.WRITTEN, checksums=sums
    )
    job = local.store.put(request, sources, received)
    local.store.run(job)
    assert job.statuses.tolist() == [OK, OK, BlockStatus.MISMATCH, OK, OK]
    bounce.release([extent for extent in received if extent is not None])
    bounce.release(rest)
    assert bounce.free_bytes == bounce.capacity
    blocks[2:3] = []
    names[2:3] = []
    assert local.get(names) == blocks
    local.stop()


def test_a_lease_lasts_as_long_as_clients_are_told_it_may(local: Local) -> None:
    local.put([key(1)], [block(1)])
    local.store.contains(local.namespace, 0, key_array([key(1)]), MAX_LEASE_MS / 1000)
    row, now = local.core.index.rows_of(None), local.core.clock.seconds()
    assert not local.core.index.evictable(row, now + MAX_LEASE_MS / 1000 - 5)[0]
    assert local.core.index.evictable(row, now + MAX_LEASE_MS / 1000 + 5)[0]

"""Parity: one lost chunk of a payload comes back, two do not, and no wrong byte ever does."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import fsck, layout, mend, parity, rebuild, record, salvage
from kvstore.backends.base import Status
from kvstore.errors import ConfigError, ReadOnly
from kvstore.fsck import PAYLOADS, Check, Report
from kvstore.fsck import Options as Depth
from kvstore.importers.store import StoreSource
from kvstore.lookup import AtRest
from kvstore.merge import Merge
from kvstore.migrate import Migration
from kvstore.scrub import KINDS
from kvstore.summary import summarize
from kvstore.testing import Fault, FaultyEngine
from kvstore.testing.records import full_images, key_of, make_blocks
from tests.damage import copies, failures, file_of
from tests.here import Here
from tests.migrating import ENGINES
from tests.stores import MIB, Local, block, key

GOLDEN = Path(__file__).parent / "golden"
LONG = os.environ.get("PROMISES") == "long"
SIZE = 300_000
"""Five chunks, two pieces of a key/value engine."""
VICTIM = 2
LENGTHS = [1, 4096, 5000, 65_536, 65_537, SIZE, 2 * MIB, 16 * MIB, 16 * MIB + 1, 64 * MIB]


def opened(path: Path, engine: str | None = None, **changes: object) -> Local:
    return Local(path, **{"engine": engine, "parity": "xor", **changes})


def make(path: Path, engine: str, **changes: object) -> None:
    """Make a store of a few blocks that was stopped cleanly."""
    local = opened(path, engine, **changes)
    names = [key(number) for number in range(5)]
    assert not any(local.put(names, [block(number, SIZE) for number in range(5)], chain=True))
    local.stop()


def spoil(path: Path, *offsets: int, number: int = VICTIM, data: bytes | None = None) -> None:
    """Flip a bit of the payload of a block at each offset, wherever the files have it."""
    payload, found = block(number, SIZE) if data is None else data, 0
    for file in sorted(path.rglob("*")):
        if file.is_file():
            held = bytearray(file.read_bytes())
            places = [_find(held, payload[offset : offset + 40]) for offset in offsets]
            for at in [at for some in places for at in some]:
                held[at] ^= 4
                found += 1
            file.write_bytes(held)
    assert found >= len(offsets)


def _find(data: bytearray, part: bytes) -> Iterator[int]:
    at = data.find(part)
    while at >= 0:
        yield at
        at = data.find(part, at + 1)


def spare_of(payload: bytes) -> bytes:
    """Return the parity chunk, worked out anew: chunks of 64 KiB, the last one filled up."""
    chunks = [
        payload[at : at + 65_536].ljust(65_536, b"\0") for at in range(0, len(payload), 65_536)
    ]
    spare: bytes = np.bitwise_xor.reduce([np.frombuffer(c, np.uint8) for c in chunks]).tobytes()
    return spare


# -- chunks ---------------------------------------------------------------------------------------


def protected(length: int) -> tuple[memoryview, record.Header]:
    blocks = make_blocks([key_of(1)], length)
    (image,) = full_images(blocks, parent=key_of(0), label="ein Name")
    room = memoryview(mmap.mmap(-1, len(image) + parity.chunk_bytes(length)))
    whole = parity.protect(image, room)
    header = record.decode(whole[: record.HEADER_PAGE])
    assert header == record.decode(image)
    assert whole[record.HEADER_PAGE : len(image)] == image[record.HEADER_PAGE :]
    return whole, header


@pytest.mark.parametrize("length", LENGTHS)
def test_any_one_chunk_comes_back_and_two_do_not(length: int) -> None:
    whole, header = protected(length)
    good, size = bytes(whole), parity.chunk_bytes(length)
    assert len(whole) == parity.kept_bytes(header) == parity.record_bytes_of(
        np.array([length], np.uint32), parity=True
    )  # fmt: skip
    assert size % 4096 == 0
    assert -(-length // size) <= parity.MOST_CHUNKS
    assert size <= 65_536 or size <= -(-length // 256) + 4095
    starts = list(range(0, length, size))
    for start in {starts[0], starts[len(starts) // 2], starts[-1]}:
        whole[4096 + start : 4096 + min(start + size, length)] = bytes(min(size, length - start))
        if bytes(whole) == good:
            continue
        assert parity.repair(whole, header)
        assert bytes(whole) == good
    if len(starts) > 1:
        whole[4096] ^= 1
        whole[4096 + length - 1] ^= 1
        assert not parity.repair(whole, header)


def test_the_parity_chunk_is_what_the_page_says() -> None:
    whole, header = protected(SIZE)
    assert header.parity is not None
    payload = bytes(whole[4096 : 4096 + SIZE])
    assert bytes(whole[record.image_bytes(SIZE) :]) == spare_of(payload)
    parts = [*(payload[at : at + 65_536] for at in range(0, SIZE, 65_536)), spare_of(payload)]
    sums = b"".join(record.payload_checksum(part).to_bytes(8, "little")[:4] for part in parts)
    assert header.parity == record.Parity(65_536, sums)


def test_the_golden_record_with_parity() -> None:
    plain = (GOLDEN / "envelope.kvb").read_bytes()
    golden = (GOLDEN / "parity.kvb").read_bytes()
    whole = parity.protect(memoryview(bytearray(plain)), memoryview(bytearray(len(golden))))
    assert bytes(whole) == golden
    header = record.decode(golden)
    assert header == record.decode(plain)
    assert header.parity is not None
    assert header.parity.chunk_bytes == len(golden) - len(plain) == 4096
    damaged = bytearray(golden)
    damaged[4097] ^= 0xFF
    assert parity.repair(memoryview(damaged), header)
    assert damaged == golden


def test_damage_of_the_parity_chunk_itself_repairs_nothing() -> None:
    whole, header = protected(SIZE)
    assert parity.spare_is_whole(whole, header)
    whole[-1] ^= 1
    assert not parity.spare_is_whole(whole, header)
    assert not parity.repair(whole, header)
    whole[4096] ^= 1
    assert not parity.repair(whole, header)


def test_an_envelope_with_other_sums_is_no_reason_to_believe_them() -> None:
    """The payload's checksum has the last word, whatever chunk the sums call damaged."""
    whole, header = protected(SIZE)
    assert header.parity is not None
    for sums in (b"", header.parity.sums[:-4], header.parity.sums + bytes(4)):
        strange = record.Parity(65_536, sums)
        assert parity.split(whole, replace(header, parity=strange)) is None
    assert parity.split(whole, replace(header, parity=record.Parity(4096, b""))) is None


# -- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_a_damaged_chunk_is_a_hit_and_is_written_again(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "store"
    make(path, engine)
    spoil(path, 100_000, 100_500)
    local = opened(path)
    before = local.core.index.generations[local.rows()].max()
    assert local.get([key(VICTIM)]) == [block(VICTIM, SIZE)]
    assert local.core.counters.repaired_blocks == 1
    assert failures(local) == {}
    assert local.core.index.generations[local.rows()].max() > before
    assert local.get([key(n) for n in range(5)]) == [block(n, SIZE) for n in range(5)]
    assert local.core.counters.repaired_blocks == 1
    local.kill()
    again = opened(path)
    assert again.get([key(n) for n in range(5)]) == [block(n, SIZE) for n in range(5)]
    assert again.core.counters.repaired_blocks == 0
    assert again.store.scrub.status()["found"] == dict.fromkeys(KINDS, 0)
    again.stop()
    assert Check(path, Depth(depth=PAYLOADS)).run().faults == []


@pytest.mark.parametrize("engine", ENGINES)
def test_two_damaged_chunks_are_a_miss(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "store"
    make(path, engine)
    spoil(path, 0, 299_000)
    local = opened(path)
    names = [key(number) for number in range(5)]
    assert local.get(names) == [None if n == VICTIM else block(n, SIZE) for n in range(5)]
    assert failures(local) == {"corrupt_blocks": 1}
    assert local.core.counters.repaired_blocks == 0
    # RocksDB gives nothing of a piece whose sum is wrong.
    assert len(copies(path)) == (engine != "rocksdb")
    local.stop()


@pytest.mark.parametrize("engine", ENGINES)
def test_without_parity_one_damaged_chunk_is_a_miss(tmp_path: Path, engine: str) -> None:
    """The negative control: the same damage, and nothing to bring the chunk back."""
    path = tmp_path / "store"
    make(path, engine, parity="off")
    spoil(path, 100_000)
    local = opened(path, parity=None)
    assert local.get([key(VICTIM)]) == [None]
    assert failures(local) == {"corrupt_blocks": 1}
    local.stop()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_parity_chunk_may_be_damaged_itself(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "store"
    make(path, engine)
    spare = spare_of(block(VICTIM, SIZE))
    spoil(path, 5000, data=spare)
    local = opened(path)
    assert local.get([key(VICTIM)]) == [block(VICTIM, SIZE)]
    assert local.core.counters.repaired_blocks == 0
    local.stop()
    spoil(path, 100_000)
    local = opened(path)
    assert local.get([key(VICTIM)]) == [None]
    assert failures(local) == {"corrupt_blocks": 1}
    local.stop()


def test_a_damaged_table_of_sums_is_a_damaged_header(tmp_path: Path) -> None:
    local = opened(tmp_path / "store")
    assert not any(local.put([key(1)], [block(1, SIZE)]))
    path = file_of(local, key(1))
    data = bytearray(path.read_bytes())
    data[data.index(b"\x06\x00", 96) + 8] ^= 1
    path.write_bytes(data)
    assert local.get([key(1)]) == [None]
    assert failures(local) == {"corrupt_blocks": 1}
    local.kill()


def test_what_the_device_refuses_comes_back(tmp_path: Path) -> None:
    """A bad sector: the read of the whole record fails, a page by page one gets all others."""
    local = opened(tmp_path / "store")
    assert not any(local.put([key(1)], [block(1, SIZE)]))
    engine = local.core.engine
    fault = Fault("get_many_into", times=2, status=Status.UNREADABLE)
    local.core.engine = FaultyEngine(engine, [fault])
    assert local.get([key(1)]) == [block(1, SIZE)]
    local.core.engine = engine
    local.kill()


def test_a_cut_off_record_lacks_more_than_a_chunk(tmp_path: Path) -> None:
    local = opened(tmp_path / "store")
    for number, left in ((1, 4096 + 270_000), (2, 4096 + 150_000)):
        assert not any(local.put([key(number)], [block(number, SIZE)]))
        with file_of(local, key(number)).open("r+b") as file:
            file.truncate(left)
    # The parity chunk is behind the payload, so it went first.
    assert local.get([key(1), key(2)]) == [None, None]
    local.kill()


# -- scrub ----------------------------------------------------------------------------------------


def scrub(local: Local) -> dict[str, int]:
    local.store.scrub.start(0)
    local.store.run_chores()
    local.store.run_chores()
    found: dict[str, int] = local.store.scrub.status()["found"]  # type: ignore[assignment]
    return {kind: count for kind, count in found.items() if count}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_scrub_writes_damaged_blocks_again(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "store"
    make(path, engine)
    spoil(path, 100_000)
    spoil(path, 7, number=3)
    spoil(path, 60_000, data=spare_of(block(4, SIZE)))
    local = opened(path)
    assert scrub(local) == {"repaired": 3}
    assert {one["key"] for one in local.store.scrub.findings} == {key(n).hex() for n in (2, 3, 4)}
    assert scrub(local) == {}
    assert not local.store.problems()
    assert local.get([key(n) for n in range(5)]) == [block(n, SIZE) for n in range(5)]
    assert local.core.counters.repaired_blocks == 3
    local.kill()
    again = opened(path)
    assert scrub(again) == {}
    again.stop()


def test_a_scrub_writes_again_what_memory_has(tmp_path: Path) -> None:
    """No parity: the copy in memory is the good one. Its links and its use stay."""
    local = Local(tmp_path / "store", memory_bytes=8 * MIB)
    names = [key(number) for number in range(3)]
    blocks = [block(number, SIZE) for number in range(3)]
    assert not any(local.put(names, blocks, chain=True))
    file_of(local, key(0)).unlink()
    data = bytearray(file_of(local, key(1)).read_bytes())
    data[9000] ^= 1
    file_of(local, key(1)).write_bytes(data)
    assert scrub(local) == {"repaired": 2}
    assert scrub(local) == {}
    assert local.core.counters.repaired_blocks == 2
    assert failures(local) == {}
    local.kill()
    again = Local(tmp_path / "store")
    assert again.get(names) == blocks
    row = int(again.core.index.find(0, np.frombuffer(key(2), np.uint8)[None])[0])
    assert len(again.core.index.ancestors(row)) == 2
    again.stop()


def test_a_copy_in_memory_that_is_damaged_too_does_not_count(tmp_path: Path) -> None:
    local = Local(tmp_path / "store", memory_bytes=8 * MIB)
    assert not any(local.put([key(1)], [block(1, SIZE)]))
    rows = local.rows()
    image = local.core.tier.views(local.core.tier.find(rows), local.core.index.sizes[rows])[0]
    image[5000] ^= 1
    file_of(local, key(1)).unlink()
    scrub(local)
    assert failures(local) == {"missing_blocks": 1}
    assert local.get([key(1)]) == [None]
    local.kill()


def test_a_durable_block_is_synced_before_its_damaged_record_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power loss in between would take both records of a block that was to survive one."""
    local = opened(tmp_path / "store")
    assert not any(local.put([key(1)], [block(1, SIZE)], durable=True))
    assert not any(local.put([key(2)], [block(2, SIZE)]))
    seen: list[tuple[str, bool]] = []
    engine = local.core.engine
    put, delete = engine.put_many, engine.delete_many

    def put_many(blocks: Any, images: Any, *, sync: bool) -> Any:
        seen.append(("put", sync))
        return put(blocks, images, sync=sync)

    def delete_many(blocks: Any, how: Any) -> Any:
        seen.append(("delete", False))
        return delete(blocks, how)

    monkeypatch.setattr(engine, "put_many", put_many)
    monkeypatch.setattr(engine, "delete_many", delete_many)
    for number, durable in ((2, False), (1, True)):
        path = file_of(local, key(number))
        data = bytearray(path.read_bytes())
        data[9000] ^= 1
        path.write_bytes(data)
        assert local.get([key(number)]) == [block(number, SIZE)]
        assert seen == [("put", durable), ("delete", False)]
        seen.clear()
    local.kill()


# -- checks, repairs, recovery --------------------------------------------------------------------


def check(path: Path) -> Report:
    return Check(path, Depth(depth=PAYLOADS)).run()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_repair_writes_the_block_again(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsck, "Child", Here)
    monkeypatch.setattr(mend, "Child", Here)
    path = tmp_path / "store"
    make(path, engine)
    assert check(path).found == []
    spoil(path, 100_000)
    spoil(path, 60_000, number=4, data=spare_of(block(4, SIZE)))
    first = check(path)
    assert {(one.id, one.key) for one in first.found} == {
        ("payload-repairable", key(2).hex()), ("parity-damaged", key(4).hex())
    }  # fmt: skip
    done = mend.Done()
    last = mend.until_done(first, lambda: check(path), mend.new_folder(path, None), 60.0, done)
    assert last.faults == []
    assert check(path).found == []
    assert (done.repaired, done.dropped, done.quarantined) == (2, 0, 0)
    local = opened(path)
    assert local.get([key(n) for n in range(5)]) == [block(n, SIZE) for n in range(5)]
    assert local.core.counters.repaired_blocks == 0
    local.stop()


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "rocksdb"])
def test_a_salvage_brings_a_chunk_back(tmp_path: Path, engine: str) -> None:
    """STORE.json is gone too; that records have parity chunks is seen from their envelopes."""
    path = tmp_path / "store"
    make(path, engine)
    spoil(path, 100_000)
    spoil(path, 0, 299_000, number=3)
    (path / layout.STORE_FILE).unlink()
    with salvage.survey(path, engine=engine) as found:
        assert len(found.kept) == 4
        rebuild.in_place(found)
    assert layout.read(path).parity
    local = opened(path)
    names = [key(number) for number in range(5)]
    assert local.get(names) == [None if n == 3 else block(n, SIZE) for n in range(5)]
    local.stop()


def test_inspect_tells_of_the_damage(tmp_path: Path) -> None:
    path = tmp_path / "store"
    make(path, "filesystem")
    spoil(path, 100_000)
    with AtRest(path) as store:
        told = store.tell(store.find(key(VICTIM).hex(), None, None))
        assert (told["verdict"], told["record_bytes"]) == ("repaired", 4096 + 303_104 + 65_536)
        assert store.tell(store.find(key(1).hex(), None, None))["verdict"] == "ok"


# -- copying --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), [("filesystem", "lmdb"), ("sqlite", "superblock")])
def test_parity_comes_along_to_another_engine(tmp_path: Path, source: str, target: str) -> None:
    path = tmp_path / "store"
    make(path, source)
    spoil(path, 100_000)
    with Migration(path, target, min_free=0) as migration:
        outcome = migration.run(lambda _blocks, _bytes: None)
    assert (outcome.copied, outcome.left) == (5, [])
    spoil(path / f"blocks-{target}", 7, number=3)
    local = opened(path, engine=target)
    assert local.get([key(n) for n in range(5)]) == [block(n, SIZE) for n in range(5)]
    assert local.core.counters.repaired_blocks == 1
    local.stop()


@pytest.mark.parametrize(("source", "target"), [("off", "xor"), ("xor", "off")])
def test_blocks_are_merged_into_a_store_with_or_without(
    tmp_path: Path, source: str, target: str
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    make(old, "filesystem", parity=source)
    opened(new, parity=target).stop()
    source_of = StoreSource(old)
    Merge(source_of, source_of.listing(), new, min_free=0).run(lambda _: None)
    source_of.close()
    spoil(new, 100_000)
    local = opened(new, parity=None)
    found = local.get([key(n) for n in range(5)])
    lost = VICTIM if target == "off" else -1
    assert found == [None if n == lost else block(n, SIZE) for n in range(5)]
    local.stop()


# -- room, settings, formats ----------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES if LONG else ["filesystem", "superblock"])
def test_the_room_of_parity_chunks_is_counted(tmp_path: Path, engine: str) -> None:
    """Twice the capacity passes through; the directory never takes more than that."""
    path, capacity = tmp_path / "store", 64 * MIB
    local = opened(path, engine, capacity=capacity)
    blocks = [block(n, 65_536) for n in range(16)]
    for number in range(0, 2 * capacity // (132 << 10), 16):
        assert not any(local.put([key(number + n) for n in range(16)], blocks))
        if number % 128 == 0:
            local.tick()
            assert layout.directory_bytes(path) <= capacity
    live = local.core.index.live_bytes
    assert live >= local.core.index.blocks * (4096 + 2 * 65_536)
    local.stop()
    assert summarize(path).live_bytes == live
    again = opened(path)
    assert again.core.index.live_bytes == live
    assert again.core.counters.evictions == 0
    again.stop()


def test_files_have_the_bytes_that_are_counted(tmp_path: Path) -> None:
    local = opened(tmp_path / "store")
    sizes = [1, 4096, 5000, 65_536, 65_537, SIZE]
    assert not any(
        local.put([key(n) for n in range(6)], [block(n, s) for n, s in enumerate(sizes)])
    )
    assert local.core.index.live_bytes == sum(path.stat().st_size for path in local.files())
    local.kill()


def test_parity_is_chosen_when_the_store_is_made(tmp_path: Path) -> None:
    path = tmp_path / "store"
    opened(path).stop()
    before = (path / layout.STORE_FILE).read_bytes()
    assert layout.read(path).features["ro_compat"] == ("parity",)
    with pytest.raises(ConfigError, match="made with parity xor"):
        opened(path, parity="off")
    assert (path / layout.STORE_FILE).read_bytes() == before
    Local(path, parity=None).stop()
    other = tmp_path / "other"
    Local(other).stop()
    with pytest.raises(ConfigError, match=f"kvstore migrate {other}"):
        opened(other)


def test_who_does_not_know_parity_may_only_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store"
    make(path, "filesystem")
    monkeypatch.setitem(layout.KNOWN_FEATURES, "ro_compat", frozenset())
    assert "parity" in layout.read(path).read_only_reason
    with pytest.raises(ReadOnly):
        Local(path, parity=None)
    with AtRest(path) as store:
        assert store.tell(store.find(key(VICTIM).hex(), None, None))["verdict"] == "ok"

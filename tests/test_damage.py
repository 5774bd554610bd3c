"""Damage on disk: a miss or the right bytes, counted once, kept, made good by the next put."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstore import core, record
from kvstore.answers import BlockStatus
from kvstore.backends.base import Status
from kvstore.client import Client
from kvstore.keys import key_array
from kvstore.testing import Fault, FaultyEngine
from tests.command import Daemon
from tests.damage import (
    HEADER_BYTES,
    LABEL,
    OK,
    OTHER,
    PAGE,
    ROOT,
    SIZES,
    VICTIM,
    assert_nothing_is_held,
    copies,
    failures,
    file_of,
    flip,
    manifest,
    paddings,
    put_family,
    regions,
)
from tests.mounts import mounted
from tests.stores import MIB, Local, block, key


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    opened = Local(tmp_path / "store")
    yield opened
    assert_nothing_is_held(opened)
    opened.kill()


# -- every byte region ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "region"), [(size, region) for size in SIZES for region in regions(size)]
)
def test_a_flipped_byte_is_a_miss_counted_once_and_kept(
    local: Local, size: int, region: str
) -> None:
    put_family(local, size)
    path = file_of(local, VICTIM)
    damaged = flip(path, regions(size)[region])
    assert local.get([ROOT, VICTIM, OTHER, VICTIM]) == [block(0, size), None, block(2, size), None]
    assert local.get([VICTIM]) == [None]
    assert failures(local) == {"corrupt_blocks": 1}
    assert local.contains([VICTIM]) == [False]
    assert local.core.index.blocks == 2
    assert not path.exists()
    (line,) = manifest(local.path)
    assert (line["key"], line["length"], line["shard"]) == (VICTIM.hex(), size, 0)
    (copy,) = copies(local.path)
    assert (copy.name, copy.read_bytes()) == (line["file"], damaged)
    assert local.store.status()["state"] == "degraded"

    assert local.put([VICTIM], [block(1, size)]) == [OK]
    assert local.get([ROOT, VICTIM, OTHER]) == [block(n, size) for n in range(3)]
    assert failures(local) == {"corrupt_blocks": 1}


@pytest.mark.parametrize(
    ("size", "region"), [(size, region) for size in SIZES for region in paddings(size)]
)
def test_a_flipped_byte_of_padding_is_a_right_hit(local: Local, size: int, region: str) -> None:
    put_family(local, size)
    path = file_of(local, VICTIM)
    damaged = flip(path, paddings(size)[region])
    assert local.get([ROOT, VICTIM, OTHER]) == [block(n, size) for n in range(3)]
    assert failures(local) == {}
    assert path.read_bytes() == damaged
    assert list((local.path / "quarantine").iterdir()) == []


def test_every_byte_of_a_header_matters(local: Local) -> None:
    """One after the other, in the same block: the count goes up by one each time."""
    local.core.quarantine.limit = 0
    for offset in range(HEADER_BYTES):
        assert local.put([VICTIM], [block(1, 9)], parent=ROOT, label=LABEL) == [OK]
        flip(file_of(local, VICTIM), offset)
        assert local.get([VICTIM]) == [None], f"byte {offset}"
        assert failures(local) == {"corrupt_blocks": offset + 1}
    assert record.encode(_header(local)).ljust(PAGE, b"\0")[HEADER_BYTES:] == bytes(
        PAGE - HEADER_BYTES
    )


def _header(local: Local) -> record.Header:
    assert local.put([VICTIM], [block(1, 9)], parent=ROOT, label=LABEL) == [OK]
    header = record.decode(file_of(local, VICTIM).read_bytes())
    assert len(record.encode(header)) == HEADER_BYTES
    return header


def test_what_was_put_again_survives_a_kill(local: Local) -> None:
    """Neither the damaged version nor its removal comes back with the journal."""
    put_family(local, 5000)
    flip(file_of(local, VICTIM), PAGE)
    assert local.get([VICTIM]) == [None]
    local.kill()
    again = Local(local.path)
    assert again.contains([ROOT, VICTIM, OTHER]) == [True, False, True]
    assert again.put([VICTIM], [block(9, 7000)]) == [OK]
    again.kill()
    again = Local(local.path)
    assert again.get([ROOT, VICTIM, OTHER]) == [block(0, 5000), block(9, 7000), block(2, 5000)]
    assert (failures(again), len(again.files())) == ({}, 3)
    again.kill()


def test_a_damaged_block_with_children_leaves_them_their_place_in_the_chain(local: Local) -> None:
    names, blocks = [key(n) for n in range(4)], [block(n) for n in range(4)]
    local.put(names, blocks, chain=True)
    flip(file_of(local, names[1]), PAGE)
    assert local.get(names) == [blocks[0], None, blocks[2], blocks[3]]
    assert local.store.prefix(local.namespace, 0, key_array(names)) == 1
    assert local.put([names[1]], [blocks[1]]) == [OK]
    assert local.store.prefix(local.namespace, 0, key_array(names)) == 4
    rows = local.core.index.find(0, key_array(names))
    assert local.core.index.parents[rows[1:]].tolist() == rows[:-1].tolist()


# -- whole records that are not the right ones ----------------------------------------------------


def _other(**fields: object) -> Callable[[record.Header], record.Header]:
    return lambda header: replace(header, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        _other(store=b"another store.." + b"."),
        _other(namespace=b"another model..."),
        _other(shard=1),
        _other(key=OTHER),
        lambda header: replace(header, generation=header.generation - 1),
        lambda header: replace(header, generation=header.generation + 1),
    ],
    ids=["store", "namespace", "shard", "key", "older", "newer"],
)
def test_a_valid_record_of_another_identity_is_stale(
    local: Local, change: Callable[[record.Header], record.Header]
) -> None:
    put_family(local, 5000)
    path = file_of(local, VICTIM)
    image = bytearray(path.read_bytes())
    record.encode_into(change(record.decode(image)), memoryview(image))
    path.write_bytes(image)
    assert local.get([ROOT, VICTIM, OTHER]) == [block(0, 5000), None, block(2, 5000)]
    assert failures(local) == {"stale_blocks": 1}
    assert (manifest(local.path), copies(local.path)) == ([], [])
    assert local.store.status()["state"] == "ready"
    assert local.put([VICTIM], [block(1, 5000)]) == [OK]
    assert local.get([VICTIM]) == [block(1, 5000)]


def test_swapped_files_are_stale_both(local: Local) -> None:
    put_family(local, 5000)
    one, other = file_of(local, VICTIM), file_of(local, OTHER)
    images = one.read_bytes(), other.read_bytes()
    one.write_bytes(images[1])
    other.write_bytes(images[0])
    assert local.get([OTHER, ROOT, VICTIM]) == [None, block(0, 5000), None]
    assert failures(local) == {"stale_blocks": 2}


# -- counted as often as it happened --------------------------------------------------------------


def test_two_gets_under_way_count_a_damaged_block_once(local: Local) -> None:
    put_family(local, 5000)
    flip(file_of(local, VICTIM), PAGE)
    jobs = [local.store.get(local.namespace, 0, key_array([VICTIM]), MIB) for _ in range(2)]
    for job in jobs:
        job.perform()
    for job in jobs:
        local.store.finish(job)
        assert job.statuses.tolist() == [BlockStatus.MISS]
        job.close()
    local.store.run_chores()
    assert failures(local) == {"corrupt_blocks": 1}
    assert (len(manifest(local.path)), len(copies(local.path))) == (1, 1)
    assert len(local.files()) == 2


@pytest.mark.parametrize("child", [False, True], ids=["alone", "with a child, in the same row"])
def test_a_get_that_read_the_damaged_version_does_not_take_the_next_one_away(
    local: Local, child: bool
) -> None:
    put_family(local, 5000)
    if child:
        local.put([key(3)], [block(3)], parent=VICTIM)
    flip(file_of(local, VICTIM), PAGE)
    late = local.store.get(local.namespace, 0, key_array([VICTIM]), MIB)
    late.perform()
    assert local.get([VICTIM]) == [None]
    assert local.put([VICTIM], [block(7, 5000)]) == [OK]
    local.store.run(late)
    late.close()
    assert local.get([VICTIM]) == [block(7, 5000)]
    assert failures(local) == {"corrupt_blocks": 1}
    assert len(local.files()) == 3 + child
    assert len(manifest(local.path)) == 1


def test_damage_is_a_miss_also_where_the_journal_takes_no_more(tmp_path: Path) -> None:
    """The removal cannot be written down, so the file stays until the store is opened again."""
    local = Local(tmp_path / "store")
    put_family(local, 5000)
    path = file_of(local, VICTIM)
    flip(path, PAGE)
    local.core.journal.close()
    assert local.get([VICTIM, OTHER, VICTIM]) == [None, block(2, 5000), None]
    assert local.get([VICTIM]) == [None]
    assert failures(local) == {"corrupt_blocks": 1}
    assert path.exists()
    local.kill()
    again = Local(tmp_path / "store")
    assert again.get([ROOT, VICTIM, OTHER]) == [block(0, 5000), None, block(2, 5000)]
    assert failures(again) == {"corrupt_blocks": 1}
    assert not path.exists()
    assert_nothing_is_held(again)
    again.kill()


# -- quarantine -----------------------------------------------------------------------------------


def test_quarantine_keeps_copies_while_its_share_lasts_then_lines_while_theirs_does(
    local: Local,
) -> None:
    local.core.quarantine.limit = limit = 30_000
    start = local.core.quarantine.bytes
    names = [key(n) for n in range(100)]
    local.put(names, [b"%d" % n for n in range(100)])
    for path in local.files():
        flip(path, PAGE)
    assert local.get(names) == [None] * 100
    assert failures(local) == {"corrupt_blocks": 100}
    kept, lines = copies(local.path), manifest(local.path)
    assert len(kept) == (limit - start) // 8192
    assert [line["file"] for line in lines[: len(kept)]] == [path.name for path in _by(lines, kept)]
    assert {line["file"] for line in lines[len(kept) :]} == {None}
    assert len(kept) < len(lines) < 100
    text = sum(len(json.dumps(line)) + 1 for line in lines)
    assert 0.95 * limit * 9 / 8 < start + len(kept) * 8192 + text <= limit * 9 / 8
    assert local.put(names, [b"%d" % n for n in range(100)]) == [OK] * 100
    assert local.get(names) == [b"%d" % n for n in range(100)]


def _by(lines: list[dict[str, object]], paths: list[Path]) -> list[Path]:
    """Return the copies in the order in which the manifest names them."""
    order = [line["file"] for line in lines]
    return sorted(paths, key=lambda path: order.index(path.name))


def test_the_share_of_quarantine_is_a_share_of_the_capacity_also_after_a_restart(
    local: Local,
) -> None:
    """64 MiB: 5 % of it, which ten copies of 300 kB fill."""
    assert local.core.quarantine.limit == 64 * MIB // 20
    names = [key(n) for n in range(12)]
    local.put(names, [block(n, 300_000) for n in range(12)])
    for path in local.files():
        flip(path, PAGE)
    assert local.get(names) == [None] * 12
    assert (len(copies(local.path)), len(manifest(local.path))) == (10, 12)
    local.kill()
    again = Local(local.path)
    again.put([VICTIM], [block(1, 300_000)])
    flip(file_of(again, VICTIM), PAGE)
    assert again.get([VICTIM]) == [None]
    assert (len(copies(local.path)), len(manifest(local.path))) == (10, 13)
    again.kill()


def _no_directory(path: Path) -> None:
    path.rmdir()


def _a_file(path: Path) -> None:
    path.rmdir()
    path.write_text("precious")


def _links_to_elsewhere(path: Path) -> None:
    """As the manifest and as the copy."""
    victim = next(path.parent.rglob(f"*-{VICTIM.hex()}.*.kvb"))
    name = f"{victim.parts[-3]}-{victim.name}"
    (path.parent.parent / "thesis.txt").write_text("precious")
    for link in ("manifest.jsonl", name):
        (path / link).symlink_to(path.parent.parent / "thesis.txt")


@pytest.mark.parametrize("spoil", [_no_directory, _a_file, _links_to_elsewhere])
def test_without_quarantine_a_damaged_block_goes_all_the_same(
    local: Local, spoil: Callable[[Path], None]
) -> None:
    put_family(local, 5000)
    path = file_of(local, VICTIM)
    flip(path, PAGE)
    spoil(local.path / "quarantine")
    assert local.get([VICTIM, OTHER]) == [None, block(2, 5000)]
    assert failures(local) == {"corrupt_blocks": 1}
    assert local.core.counters.failed_jobs == 0
    assert not path.exists()
    assert local.put([VICTIM], [block(1, 5000)]) == [OK]
    assert local.get([VICTIM]) == [block(1, 5000)]
    for precious in (local.path / "quarantine", local.path.parent / "thesis.txt"):
        assert not precious.is_file() or precious.read_text() == "precious"


@pytest.mark.root
def test_a_full_disk_leaves_no_piece_of_a_copy(tmp_path: Path) -> None:
    with mounted(tmp_path, "tmpfs", "size=16m") as point:
        local = Local(point / "store")
        put_family(local, 300_000)
        flip(file_of(local, VICTIM), PAGE)
        with (point / "filling").open("wb", buffering=0) as file:
            while os.statvfs(point).f_bavail > 2:
                file.write(bytes(PAGE))
        assert local.get([ROOT, VICTIM, OTHER]) == [block(0, 300_000), None, block(2, 300_000)]
        assert copies(local.path) == []
        assert [line["file"] for line in manifest(local.path)] == [None]
        assert local.put([VICTIM], [block(1, 200_000)]) == [OK]
        assert local.get([VICTIM]) == [block(1, 200_000)]
        assert_nothing_is_held(local)
        local.kill()


# -- through a daemon -----------------------------------------------------------------------------


def test_damage_under_a_daemon_with_many_readers(daemon: Daemon) -> None:
    blocks, harmless = {}, set()
    cases = [
        (size, place) for size in SIZES for place in {**regions(size), **paddings(size)}.items()
    ]
    for number, (size, (region, _)) in enumerate(cases):
        blocks[key(number)] = block(number, size)
        harmless |= {key(number)} if region in paddings(size) else set()
    names = list(blocks)
    with Client(str(daemon.socket)) as client:
        for name in names:
            client.put(name, blocks[name], ack="written", parent=key(1000), label=LABEL)
    for name, (_, (_, offset)) in zip(names, cases, strict=True):
        (path,) = daemon.store.glob(f"blocks/*/*/*-{name.hex()}.*.kvb")
        flip(path, offset)
    # A new process: what it had in memory would hide the damage.
    assert daemon.stop() == 0
    daemon.start()

    damaged = len(names) - len(harmless)
    assert (
        _read_by_many(daemon, names)
        == [[blocks[name] if name in harmless else None for name in names]] * READERS
    )
    status = daemon.status()
    assert (status["corrupt_blocks"], status["stale_blocks"]) == (damaged, 0)
    assert (status["state"], status["blocks"]) == ("degraded", len(harmless))
    assert f"{damaged} damaged blocks" in str(status["problems"])
    assert status["failed_requests"] == 0
    _check_quarantine(daemon, {name.hex() for name in names if name not in harmless})

    with Client(str(daemon.socket)) as client:
        for name in names:
            client.put(name, blocks[name])
        assert [bytes(view or b"") for view in client.get_many(names)] == list(blocks.values())
    assert daemon.status()["corrupt_blocks"] == damaged
    daemon.stop(signal.SIGKILL)
    daemon.start()
    assert _read_by_many(daemon, names) == [list(blocks.values())] * READERS
    assert daemon.status()["corrupt_blocks"] == 0


READERS = 4


def _read_by_many(daemon: Daemon, names: list[bytes]) -> list[list[bytes | None]]:
    """Let several clients read the same keys at the same time, each in an order of its own."""
    results: list[list[bytes | None]] = [[] for _ in range(READERS)]

    def read(reader: int) -> None:
        order = np.random.default_rng(reader).permutation(len(names)).tolist()
        found: dict[int, bytes | None] = {}
        with Client(str(daemon.socket)) as client:
            for start in range(0, len(order), 7):
                part = order[start : start + 7]
                views = client.get_many([names[n] for n in part])
                for n, view in zip(part, views, strict=True):
                    found[n] = None if view is None else bytes(view)
        results[reader] = [found[n] for n in range(len(names))]

    threads = [threading.Thread(target=read, args=(reader,)) for reader in range(READERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _check_quarantine(daemon: Daemon, damaged: set[str]) -> None:
    with Client(str(daemon.socket)) as client:
        client.flush()
    lines = manifest(daemon.store)
    assert Counter(str(line["key"]) for line in lines) == Counter(damaged)
    assert {line["file"] for line in lines} == {path.name for path in copies(daemon.store)}


def test_a_device_that_fails_for_a_moment_costs_no_block(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_family(local, 5000)
    fault = Fault("get_many_into", status=Status.UNREADABLE, times=3)
    local.core.engine = FaultyEngine(local.core.engine, [fault])
    local.core.engine.is_open = True
    assert local.get([VICTIM]) == [None]
    assert local.get([VICTIM]) == [None]
    assert local.contains([VICTIM]) == [True]
    assert "could not be read" in str(local.store.status()["problems"])
    monkeypatch.setattr(core, "SUSPICION_SECONDS", 0.0)
    assert local.get([VICTIM]) == [None]
    assert local.contains([VICTIM]) == [False], "it went on failing: let the key be put again"
    assert local.put([VICTIM], [block(1, 5000)]) == [OK]
    assert local.get([VICTIM]) == [block(1, 5000)]

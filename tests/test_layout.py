"""The directory of a store: STORE.json, creation and its refusals, what du says."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kvstore import layout
from kvstore.errors import (
    CorruptStore,
    EngineError,
    FormatUnsupported,
    KVStoreError,
    PermissionDenied,
    ReadOnly,
    StoreExists,
    StoreFull,
    StoreNotFound,
)
from tests.mounts import mounted

GOLDEN = Path(__file__).parent / "golden"
RECORD = layout.StoreRecord(
    uuid=bytes(range(16)),
    engine="filesystem",
    capacity_bytes=1 << 40,
    created="2026-11-30T12:34:56Z",
    engine_options={"fanout": 256},
    epoch=2,
    opens=17,
    features={"compat": ("shiny",), "ro_compat": (), "incompat": ()},
    unknown={"colour": "green", "nested": {"list": [1, 2, None]}},
)
PARTS = {"namespaces", "blocks", "incoming", "quarantine"}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    layout.create_directories(path)
    layout.write(path, RECORD)
    return path


def snapshot(path: Path) -> dict[str, tuple[int, bytes]]:
    """Return everything below ``path``: mode and content."""
    return {
        str(item.relative_to(path)): (
            item.lstat().st_mode,
            item.read_bytes() if item.is_file() else b"",
        )
        for item in sorted(path.rglob("*"))
    }


def document() -> dict[str, object]:
    value = json.loads(layout.encode(RECORD))
    assert isinstance(value, dict)
    return value


def fail_with(number: int) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


# -- STORE.json -----------------------------------------------------------------------------------


def test_the_golden_store_json_says_what_was_written_and_is_written_again(tmp_path: Path) -> None:
    data = (GOLDEN / "STORE.json").read_bytes()
    assert layout.decode(data, tmp_path) == RECORD
    assert layout.encode(RECORD) == data


def test_what_is_written_is_read_back(store: Path) -> None:
    assert layout.read(store) == RECORD
    changed = replace(RECORD, opens=18, capacity_bytes=1)
    layout.write(store, changed)
    assert layout.read(store) == changed
    assert (store / "STORE.json").stat().st_mode & 0o777 == 0o600
    assert {path.name for path in store.iterdir()} == {*PARTS, "STORE.json"}


def test_unknown_fields_and_features_survive_a_rewrite(store: Path) -> None:
    layout.write(store, replace(layout.read(store), opens=18))
    found = json.loads((store / "STORE.json").read_bytes())
    assert found["colour"] == "green"
    assert found["nested"] == {"list": [1, 2, None]}
    assert found["features"]["compat"] == ["shiny"]
    assert list(found)[-2:] == ["colour", "nested"]


def test_new_records_have_uuids_of_their_own() -> None:
    first, second = (layout.new_record(engine="memory", capacity=5) for _ in range(2))
    assert first.uuid != second.uuid
    assert (first.epoch, first.opens, first.format, first.blocks) == (1, 0, 1, "blocks")
    assert first.engine_options == {"fanout": 256}
    assert abs(time.time() - _seconds(first.created)) < 5
    assert first.writable
    assert layout.new_record(engine="x", capacity=5, engine_options={}).engine_options == {}


def _seconds(text: str) -> float:
    from calendar import timegm

    return timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ"))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"format": 2}, "format 2"),
        ({"format": 10**30, "features": "something else altogether"}, "format 1000"),
        ({"features": {"compat": [], "ro_compat": [], "incompat": ["b", "a"]}}, "a, b"),
    ],
)
def test_a_newer_store_is_refused_and_left_alone(
    change: dict[str, object], word: str, store: Path
) -> None:
    (store / "STORE.json").write_text(json.dumps(document() | change))
    before = snapshot(store)
    with pytest.raises(FormatUnsupported, match=word) as caught:
        layout.read(store)
    assert caught.value.exit_code == 15
    assert str(store) in str(caught.value)
    assert "newer kvstore" in caught.value.hint
    assert snapshot(store) == before


def test_a_store_with_unknown_ro_compat_features_is_read_but_never_written(store: Path) -> None:
    features = {"compat": [], "ro_compat": ["zoned"], "incompat": []}
    (store / "STORE.json").write_text(json.dumps(document() | {"features": features}))
    before = snapshot(store)
    record = layout.read(store)
    assert not record.writable
    assert "zoned" in record.read_only_reason
    with pytest.raises(ReadOnly, match="zoned"):
        layout.write(store, replace(record, opens=18))
    assert snapshot(store) == before


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"format": 0}, "format"),
        ({"format": True}, "format"),
        ({"format": None}, "format"),
        ({"features": None}, "features"),
        ({"features": {"compat": [], "ro_compat": []}}, "incompat"),
        ({"features": {"compat": [], "ro_compat": [1], "incompat": []}}, "ro_compat"),
        ({"uuid": "00"}, "uuid"),
        ({"uuid": "zz" * 16}, "uuid"),
        ({"uuid": 5}, "uuid"),
        ({"engine": ""}, "engine"),
        ({"engine": "a/b"}, "engine"),
        ({"engine_options": []}, "engine_options"),
        ({"blocks": "../elsewhere"}, "blocks"),
        ({"blocks": ".."}, "blocks"),
        ({"blocks": "a\0b"}, "blocks"),
        ({"epoch": -1}, "epoch"),
        ({"epoch": 1.5}, "epoch"),
        ({"capacity_bytes": 0}, "capacity_bytes"),
        ({"capacity_bytes": "big"}, "capacity_bytes"),
        ({"created": 5}, "created"),
        ({"opens": 2**32}, "opens"),
    ],
)
def test_fields_that_make_no_sense_are_damage(
    change: dict[str, object], word: str, store: Path
) -> None:
    (store / "STORE.json").write_text(json.dumps(document() | change))
    assert_damaged(store, word)


PREVIOUS = layout.Previous("lmdb", {"x": 1}, "blocks-lmdb", 1, 5, 1 << 40, 4096)


def test_what_an_earlier_engine_left_is_kept(store: Path) -> None:
    layout.write(store, replace(RECORD, previous=PREVIOUS))
    assert layout.read(store) == replace(RECORD, previous=PREVIOUS)
    layout.write(store, replace(layout.read(store), previous=None))
    assert "previous" not in json.loads((store / "STORE.json").read_bytes())


@pytest.mark.parametrize(
    ("previous", "word"),
    [
        ([], "previous"),
        ({**asdict(PREVIOUS), "blocks": "blocks"}, "directory of the blocks"),
        ({**asdict(PREVIOUS), "blocks": "../elsewhere"}, "blocks"),
        ({**asdict(PREVIOUS), "engine_options": 1}, "engine_options"),
        ({**asdict(PREVIOUS), "epoch": -1}, "epoch"),
        ({**asdict(PREVIOUS), "copied": "1"}, "copied"),
        ({**asdict(PREVIOUS), "generation": None}, "generation"),
        ({**asdict(PREVIOUS), "bytes": -1}, "bytes"),
    ],
)
def test_a_former_engine_that_makes_no_sense_is_damage(
    previous: object, word: str, store: Path
) -> None:
    (store / "STORE.json").write_text(json.dumps(document() | {"previous": previous}))
    assert_damaged(store, word)


@pytest.mark.parametrize("name", sorted({*document()} - {"engine_options", *RECORD.unknown}))
def test_a_field_that_is_not_there_is_damage(name: str, store: Path) -> None:
    broken = document()
    del broken[name]
    (store / "STORE.json").write_text(json.dumps(broken))
    assert_damaged(store, name)


def assert_damaged(store: Path, word: str) -> None:
    before = snapshot(store)
    with pytest.raises(CorruptStore, match=word) as caught:
        layout.read(store)
    assert caught.value.exit_code == 5
    assert str(store / "STORE.json") in caught.value.message
    assert "restore it from a copy" in caught.value.hint
    assert snapshot(store) == before


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[]", "object"),
        (b"null", "object"),
        (b"\xff\xfe\x00", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"format": ' + b"9" * 5000 + b"}", "JSON"),
        (b" " * ((1 << 20) + 1), "more than"),
    ],
)
def test_bytes_that_are_no_store_json_are_damage(data: bytes, word: str, store: Path) -> None:
    (store / "STORE.json").write_bytes(data)
    assert_damaged(store, word)


def test_every_truncation_is_damage(store: Path) -> None:
    data = layout.encode(RECORD)
    for length in range(len(data) - 2):
        with pytest.raises(CorruptStore):
            layout.decode(data[:length], store)


def test_no_store_says_what_is_there_instead(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound, match="no store at") as caught:
        layout.read(tmp_path / "absent")
    assert caught.value.exit_code == 10
    assert f"kvstore create {tmp_path / 'absent'}" in caught.value.hint
    with pytest.raises(StoreNotFound, match=r"no STORE\.json") as caught:
        layout.read(tmp_path)
    assert "kvstore recover" in caught.value.hint
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreNotFound, match="not a directory"):
        layout.read(tmp_path / "file")
    with pytest.raises(StoreNotFound):
        layout.read(tmp_path / "file" / "below")


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_a_store_json_that_is_no_file_is_refused(kind: str, store: Path, tmp_path: Path) -> None:
    path = store / "STORE.json"
    path.rename(tmp_path / "elsewhere")
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises((CorruptStore, EngineError)) as caught:
        layout.read(store)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("number", "error", "word"),
    [
        (errno.EACCES, PermissionDenied, "owner"),
        (errno.EPERM, PermissionDenied, "owner"),
        (errno.EROFS, ReadOnly, "remount"),
        (errno.ENOSPC, StoreFull, "free some space"),
        (errno.EDQUOT, StoreFull, "free some space"),
        (errno.EIO, EngineError, "kernel log"),
    ],
)
@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_rewrite_that_fails_leaves_the_old_file(
    call: str, number: int, error: type[KVStoreError], word: str, store: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    before = snapshot(store)
    monkeypatch.setattr(os, call, fail_with(number))
    with pytest.raises(error, match=r"STORE\.json") as caught:
        layout.write(store, replace(RECORD, opens=18))
    monkeypatch.undo()
    assert word in caught.value.hint
    assert snapshot(store) == before


def test_a_rewrite_goes_on_after_a_crash_left_its_temporary(store: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    (store / "STORE.json.new").symlink_to(outside)
    layout.write(store, replace(RECORD, opens=18))
    assert outside.read_bytes() == b"precious"
    assert layout.read(store).opens == 18
    assert not (store / "STORE.json").is_symlink()


def test_a_rewrite_is_durable_in_this_order(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(descriptor: int) -> None:
        steps.append("fsync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def note_rename(source: Path, target: Path) -> None:
        steps.append(f"rename to {target.name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    layout.write(store, RECORD)
    assert steps == ["fsync STORE.json.new", "rename to STORE.json", "fsync store"]


def test_the_largest_numbers_fit(store: Path) -> None:
    largest = replace(RECORD, opens=2**32 - 1, epoch=2**64 - 1, capacity_bytes=2**63)
    largest = replace(largest, blocks="b" * 255)
    layout.write(store, largest)
    assert layout.read(store) == largest
    for wrong in (
        replace(largest, epoch=2**64),
        replace(largest, capacity_bytes=2**63 + 1),
        replace(largest, blocks="b" * 256),
    ):
        with pytest.raises(CorruptStore):
            layout.write(store, wrong)


def test_what_cannot_be_read_back_is_not_written(store: Path) -> None:
    before = snapshot(store)
    for broken in (
        replace(RECORD, opens=2**32),
        replace(RECORD, uuid=b"short"),
        replace(RECORD, blocks="../x"),
    ):
        with pytest.raises(CorruptStore):
            layout.write(store, broken)
    assert snapshot(store) == before


# -- creating -------------------------------------------------------------------------------------


def test_a_missing_directory_is_made_with_its_parts(tmp_path: Path) -> None:
    path = tmp_path / "new"
    layout.create_directories(path)
    assert {item.name for item in path.iterdir()} == PARTS
    for item in (path, *path.iterdir()):
        assert item.stat().st_mode & 0o777 == 0o700


def test_an_empty_directory_is_accepted_and_so_is_lost_and_found(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    layout.create_directories(tmp_path)
    assert {item.name for item in tmp_path.iterdir()} == {*PARTS, "lost+found"}


def test_the_parent_must_exist(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound, match="does not exist") as caught:
        layout.create_directories(tmp_path / "typo" / "store")
    assert "mounted" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["precious", ".hidden", "blocks", "lock"])
def test_a_directory_that_is_not_ours_is_refused_and_left_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"data")
    before = snapshot(tmp_path)
    with pytest.raises(StoreExists, match="not ours") as caught:
        layout.create_directories(tmp_path)
    assert name in caught.value.message
    assert snapshot(tmp_path) == before


def test_a_store_is_not_made_twice(store: Path) -> None:
    before = snapshot(store)
    with pytest.raises(StoreExists, match="already a store"):
        layout.create_directories(store)
    assert snapshot(store) == before


def test_a_file_in_the_place_of_the_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"data")
    with pytest.raises(StoreExists, match="not a directory"):
        layout.create_directories(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"data"


def test_the_parts_are_durable_when_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []

    def note(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "fsync", note)
    layout.create_directories(tmp_path / "store")
    assert synced == [tmp_path / "store", tmp_path]


def test_what_was_made_can_be_taken_back(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    made = layout.create_directories(tmp_path)
    layout.write(tmp_path, RECORD)
    (tmp_path / "blocks" / "journal").write_bytes(b"ours")
    layout.unmake(tmp_path, made)
    assert [path.name for path in tmp_path.iterdir()] == ["lost+found"]
    made = layout.create_directories(tmp_path / "store")
    layout.unmake(tmp_path / "store", made)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("number", "error"),
    [(errno.ENOSPC, StoreFull), (errno.EACCES, PermissionDenied), (errno.EROFS, ReadOnly)],
)
@pytest.mark.parametrize("there", [True, False])
def test_a_creation_that_fails_half_way_is_undone(
    number: int, error: type[KVStoreError], there: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path, mkdir = tmp_path / "store", os.mkdir
    if there:
        path.mkdir()

    def refuse(target: Path, mode: int = 0o777) -> None:
        if Path(target).name == "incoming":
            fail_with(number)()
        mkdir(target, mode)

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(error, match=str(path)):
        layout.create_directories(path)
    assert path.exists() == there
    assert not there or list(path.iterdir()) == []


@pytest.mark.root
def test_a_read_only_filesystem_says_so_with_the_path(tmp_path: Path) -> None:
    with mounted(tmp_path, "tmpfs") as point:
        layout.create_directories(point / "store")
        layout.write(point / "store", RECORD)
        subprocess.run(["mount", "-o", "remount,ro", str(point)], check=True)
        assert layout.read(point / "store") == RECORD
        with pytest.raises(ReadOnly, match=r"STORE\.json"):
            layout.write(point / "store", RECORD)
        with pytest.raises(ReadOnly, match=str(point / "other")):
            layout.create_directories(point / "other")


@pytest.mark.root
def test_a_full_filesystem_says_so_with_the_path(tmp_path: Path) -> None:
    with mounted(tmp_path, "tmpfs", "size=1m,nr_inodes=9") as point:
        layout.create_directories(point / "store")
        layout.write(point / "store", RECORD)
        before = snapshot(point / "store")
        with pytest.raises(StoreFull, match=str(point / "other")):
            layout.create_directories(point / "other")
        assert not (point / "other").exists()
        with contextlib.suppress(OSError):
            for number in range(100):
                (point / str(number)).touch()
        with pytest.raises(StoreFull, match=r"STORE\.json"):
            layout.write(point / "store", replace(RECORD, opens=18))
        assert set(snapshot(point / "store")) == set(before)


def test_a_creation_that_was_interrupted_is_begun_anew(tmp_path: Path) -> None:
    store = tmp_path / "store"
    layout.create_directories(store)
    (store / "blocks" / "tmp").mkdir()
    (store / "blocks" / "journal.0000000000000001").write_bytes(b"x" * 128)
    (store / "namespaces" / f"{'ab' * 16}.json").write_text("{}")
    assert layout.create_directories(store)
    assert sorted(p.name for p in store.iterdir()) == sorted(
        ["blocks", "incoming", "namespaces", "quarantine"]
    )
    assert not any((store / "blocks").iterdir())


def test_a_store_without_its_record_is_not_taken_for_an_interrupted_creation(
    tmp_path: Path,
) -> None:
    layout.create_directories(tmp_path / "store")
    block = tmp_path / "store" / "blocks" / "data.mdb"
    block.write_bytes(b"precious")
    with pytest.raises(StoreExists):
        layout.create_directories(tmp_path / "store")
    assert block.read_bytes() == b"precious"

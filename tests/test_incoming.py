"""Files dropped into STORE/incoming: taken in when they are good, left and named when not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore import dropped, files, incoming, namespaces, record
from kvstore.client import Client
from kvstore.keys import key_array, named, namespace_id
from kvstore.layout import directory_bytes
from tests.command import Daemon
from tests.stores import MIB, Local, block, key
from tests.talk import eventually

OTHER = bytes(range(16))
"""The uuid of a store of which nobody knows."""
DEFAULT = namespace_id(named("default"))
STRANGE = namespace_id(named("strange"))


def image(number: int, size: int = 4096, **changes: object) -> bytes:
    """Return the record of a block as another store has it."""
    payload = block(number, size)
    fields: dict[str, object] = {
        "store": OTHER,
        "namespace": DEFAULT,
        "shard": 0,
        "key": key(number),
        "parent": b"",
        "generation": 7,
        "written_ns": 1,
        "logical_length": size,
        "stored_length": size,
        "checksum": record.payload_checksum(payload),
    }
    header = record.encode(record.Header(**{**fields, **changes}))  # type: ignore[arg-type]
    whole = header.ljust(record.HEADER_PAGE, b"\0") + payload
    return whole.ljust(record.image_bytes(size), b"\0")


def drop(path: Path, name: str, data: bytes, mode: int = 0o600) -> Path:
    """Write a file a while ago, and give it its name."""
    beside = path / "incoming" / f".{name}"
    beside.write_bytes(data)
    beside.chmod(mode)
    os.utime(beside, (1e9, 1e9))
    return beside.rename(path / "incoming" / name)


def look(local: Local) -> None:
    local.store.incoming.wake()
    local.tick()


def there(local: Local) -> list[str]:
    return sorted(path.name for path in (local.path / "incoming").iterdir())


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    opened = Local(tmp_path / "store")
    yield opened
    opened.kill()


def counts(local: Local) -> tuple[int, int, int, int]:
    found = local.store.incoming.status()
    return tuple(found[name] for name in ("taken", "present", "waiting", "refused"))  # type: ignore[return-value]


# -- what is taken --------------------------------------------------------------------------------


def test_a_record_becomes_a_block_with_parent_and_label(local: Local) -> None:
    drop(local.path, "a.kvb", image(1))
    drop(local.path, "b.kvb", image(2, parent=key(1), label="from afar", shard=0))
    whole = image(3, 100_000, shard=5)
    drop(local.path, "c.kvb", whole[: record.HEADER_PAGE + 100_000])  # without its padding
    look(local)
    assert there(local) == []
    assert local.get([key(1), key(2)]) == [block(1), block(2)]
    assert local.get([key(3)], shard=5) == [block(3, 100_000)]
    rows = local.core.index.find(local.namespace.number << 16, key_array([key(1), key(2)]))
    assert local.core.index.parents[rows[1]] == rows[0]
    assert counts(local) == (3, 0, 0, 0)
    look(local)
    local.stop()
    again = Local(local.path)
    assert again.get([key(1), key(2)]) == [block(1), block(2)]
    generation = int(again.core.index.generations[again.rows()].min())
    assert generation >> 32 == 1  # a version of this store, not of the other one
    again.kill()


def test_a_record_of_the_filesystem_engine_and_one_of_a_command_are_such_files(
    local: Local, tmp_path: Path
) -> None:
    source = Local(tmp_path / "source")
    source.put([key(n) for n in range(3)], [block(n) for n in range(3)], label="made here")
    for number, path in enumerate(source.files()):
        shutil.copy2(path, local.path / "incoming" / f"{number}.kvb")
        os.utime(local.path / "incoming" / f"{number}.kvb", (1e9, 1e9))
    source.kill()
    look(local)
    assert local.get([key(n) for n in range(3)]) == [block(n) for n in range(3)]


def test_what_is_there_already_is_removed_and_counted(local: Local) -> None:
    local.put([key(1)], [block(1)])
    drop(local.path, "a.kvb", image(1))
    look(local)
    assert (there(local), counts(local)) == ([], (0, 1, 0, 0))


def test_an_unknown_namespace_waits_for_its_record(local: Local) -> None:
    drop(local.path, "a.kvb", image(1, namespace=STRANGE))
    look(local)
    assert counts(local) == (0, 0, 0, 1)
    assert f"drop {STRANGE.hex()}.json too" in local.store.incoming.notes()[0]
    drop(local.path, f"{STRANGE.hex()}.json", namespaces.encode(named("strange"), None))
    look(local)
    look(local)
    assert (there(local), counts(local)) == ([], (1, 0, 0, 0))
    assert (local.path / "namespaces" / f"{STRANGE.hex()}.json").exists()


def test_a_private_namespace_stays_its_owners(local: Local) -> None:
    private = {"name": "mine", "private": 1}
    identity = namespace_id(private)
    drop(local.path, f"{identity.hex()}.json", namespaces.encode(private, None, 4321))
    look(local)
    made = local.core.namespaces.by_id(identity)
    assert made is not None
    assert made.owner == 4321


def test_many_files_are_taken_in_batches(local: Local) -> None:
    for number in range(150):
        drop(local.path, f"{number}.kvb", image(number))
    look(local)
    assert len(there(local)) == 150 - dropped.BATCH_FILES
    for _ in range(3):
        local.tick()
    assert counts(local) == (150, 0, 0, 0)


def test_a_full_store_makes_room_as_for_any_put(tmp_path: Path) -> None:
    local = Local(tmp_path / "store")
    for start in range(0, 60, 10):
        numbers = range(start, start + 10)
        local.put([key(n) for n in numbers], [block(n, MIB) for n in numbers])
    drop(local.path, "a.kvb", image(100, 8 * MIB))
    look(local)
    assert local.contains([key(100)]) == [True]
    assert local.core.counters.evictions > 0
    for _ in range(20):
        local.later(1.0)
    assert directory_bytes(local.path) <= local.core.space.capacity
    local.kill()


def test_no_room_means_that_it_waits(tmp_path: Path) -> None:
    local = Local(tmp_path / "store", when_full="read-only")
    for start in range(0, 60, 10):
        numbers = range(start, start + 10)
        local.put([key(n) for n in numbers], [block(n, MIB) for n in numbers])
    drop(local.path, "a.kvb", image(100, 8 * MIB))
    look(local)
    assert (there(local), counts(local)) == (["a.kvb"], (0, 0, 1, 0))
    assert "no room" in local.store.incoming.notes()[0]
    local.delete([key(n) for n in range(20)])
    local.tick()
    look(local)
    assert (there(local), counts(local)) == ([], (1, 0, 0, 0))
    local.kill()


# -- what is not ----------------------------------------------------------------------------------


def broken(at: int) -> bytes:
    data = bytearray(image(1))
    data[at] ^= 1
    return bytes(data)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.kvb", broken(40), "checksum of the header"),
        ("a.kvb", broken(5000), "the payload has checksum"),
        ("a.kvb", image(1)[:6000], "only 1904 of 4096 bytes"),
        ("a.kvb", b"", "cut off"),
        ("a.kvb", b"KVB1" + bytes(100), "header"),
        ("a.kvb", image(1, namespace=STRANGE), "is not known"),
        ("a.kvb", image(1, key=b"short"), "bytes, those of namespace"),
        ("a.kvb", image(1, 20 * MIB), "over a quarter of the capacity"),
        ("a.kvb", image(1, extra=b"\x09\x00\x01\x00x"), "would be lost"),
        ("a.tar", image(1), "neither a record"),
        (f"{STRANGE.hex()}.json", b"{}", "no namespace"),
        (f"{STRANGE.hex()}.json", namespaces.encode(named("other"), None), "another id"),
        ("x.json", b"{}", "no id of a namespace"),
    ],
)
def test_what_cannot_be_taken_stays_and_is_named(
    local: Local, name: str, data: bytes, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    local.put([key(0)], [block(0)])
    drop(local.path, name, data)
    look(local)
    assert (there(local), counts(local)) == ([name], (0, 0, 0, 1))
    (note,) = local.store.incoming.notes()
    assert note.startswith(f"incoming/'{name}' stays: ")
    assert says in note
    before = len(caplog.records)
    look(local)
    assert len(caplog.records) == before  # it is not even read again
    drop(local.path, name, image(1))
    look(local)
    mended = name.endswith(".kvb")
    assert counts(local) == ((1, 0, 0, 0) if mended else (0, 0, 0, 1))


def test_a_block_of_another_length_wins(local: Local) -> None:
    local.put([key(1)], [block(1, 100)])
    drop(local.path, "a.kvb", image(1))
    look(local)
    assert counts(local) == (0, 0, 0, 1)
    assert local.get([key(1)]) == [block(1, 100)]


def link(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def hard_link(path: Path, outside: Path) -> None:
    os.link(outside, path)


def pipe(path: Path, _: Path) -> None:
    os.mkfifo(path)


def bound_socket(path: Path, _: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def folder(path: Path, _: Path) -> None:
    path.mkdir()


def for_all(path: Path, outside: Path) -> None:
    shutil.copy2(outside, path)
    path.chmod(0o666)


def of_a_stranger(path: Path, outside: Path) -> None:
    if os.geteuid():
        pytest.skip("only root gives files away")
    shutil.copy2(outside, path)
    os.chown(path, 4321, 4321)


KINDS = [link, hard_link, pipe, bound_socket, folder, for_all, of_a_stranger]


@pytest.mark.parametrize("make", KINDS)
def test_only_plain_files_of_our_own_are_opened(
    local: Local, tmp_path: Path, make: Callable[[Path, Path], None]
) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(image(1))
    os.utime(outside, (1e9, 1e9))
    path = local.path / "incoming" / "a.kvb"
    make(path, outside)
    os.utime(path, (1e9, 1e9), follow_symlinks=False)
    look(local)
    assert counts(local) == (0, 0, 0, 1)
    assert local.contains([key(1)]) == [False]
    assert outside.read_bytes() == image(1)


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_directory_where_others_write_is_left_alone(local: Local, mode: int) -> None:
    drop(local.path, "a.kvb", image(1))
    (local.path / "incoming").chmod(mode)
    look(local)
    assert there(local) == ["a.kvb"]
    assert "others own it or may write there" in local.store.incoming.notes()[0]
    (local.path / "incoming").chmod(0o700)
    look(local)
    assert there(local) == []


def test_a_link_in_place_of_the_directory_is_not_followed(local: Local, tmp_path: Path) -> None:
    (local.path / "incoming").rmdir()
    (tmp_path / "elsewhere" / "incoming").mkdir(parents=True)
    drop(tmp_path / "elsewhere", "a.kvb", image(1))
    (local.path / "incoming").symlink_to(tmp_path / "elsewhere" / "incoming")
    look(local)
    assert "cannot look into" in local.store.incoming.notes()[0]
    assert local.contains([key(1)]) == [False]


def test_a_missing_directory_is_made(local: Local) -> None:
    (local.path / "incoming").rmdir()
    look(local)
    assert (local.path / "incoming").stat().st_mode & 0o777 == files.DIRECTORY_MODE
    drop(local.path, "a.kvb", image(1))
    look(local)
    assert local.contains([key(1)]) == [True]


def test_files_that_are_still_written_are_waited_for(local: Local) -> None:
    for name in ("a.kvb.new", ".a.kvb"):
        (local.path / "incoming" / name).write_bytes(image(1)[:5000])
    (local.path / "incoming" / "a.kvb").write_bytes(image(1)[:5000])
    look(local)
    assert counts(local) == (0, 0, 0, 0)
    assert local.store.incoming._look_at < time.monotonic() + 2


def test_refusals_are_bounded(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropped, "MOST_REFUSED", 5)
    for number in range(20):
        drop(local.path, f"{number:02}.tar", b"x")
    drop(local.path, "z.kvb", image(1))
    monkeypatch.setattr(dropped, "BATCH_FILES", 5)
    for _ in range(4):
        look(local)
    assert counts(local) == (0, 0, 0, 5)
    assert "until some of them are removed" in local.store.incoming.notes()[-1]
    for path in (local.path / "incoming").glob("*.tar"):
        path.unlink()
    look(local)
    look(local)
    assert (there(local), counts(local)) == ([], (1, 0, 0, 0))


def test_what_lies_there_counts_as_used(local: Local) -> None:
    before = local.core.usage().physical
    drop(local.path, "a.tar", bytes(3 * MIB))
    local.later(1.0)
    assert local.core.usage().physical - before >= 3 * MIB


# -- crashes --------------------------------------------------------------------------------------


def test_a_kill_before_the_removal_is_a_repetition(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop(local.path, "a.kvb", image(1))
    monkeypatch.setattr(dropped, "remove", lambda *_: None)
    look(local)
    local.kill()
    monkeypatch.undo()
    again = Local(local.path)
    assert there(again) == ["a.kvb"]
    look(again)
    assert (there(again), counts(again)) == ([], (0, 1, 0, 0))
    assert again.get([key(1)]) == [block(1)]
    again.kill()


def test_a_file_is_removed_only_when_its_block_is_durable(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop(local.path, "a.kvb", image(1))
    order: list[str] = []
    put_many, sync, remove = local.core.engine.put_many, local.core.journal.sync, dropped.remove

    def watched_put(*args: object, **named: object) -> object:
        order.append(f"put {named}")
        return put_many(*args, **named)  # type: ignore[arg-type]

    def watched_sync(*args: object) -> None:
        order.append("sync")
        sync(*args)  # type: ignore[arg-type]

    def watched_remove(*args: object) -> None:
        order.append("remove")
        remove(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(local.core.engine, "put_many", watched_put)
    monkeypatch.setattr(local.core.journal, "sync", watched_sync)
    monkeypatch.setattr(dropped, "remove", watched_remove)
    look(local)
    assert order == ["put {'sync': True}", "sync", "remove"]


def test_another_file_under_the_same_name_stays(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop(local.path, "a.kvb", image(1))
    remove = dropped.remove

    def late(*args: object) -> None:
        drop(local.path, "a.kvb", image(2))
        remove(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(dropped, "remove", late)
    look(local)
    assert there(local) == ["a.kvb"]
    monkeypatch.undo()
    look(local)
    assert local.contains([key(1), key(2)]) == [True, True]


# -- a daemon -------------------------------------------------------------------------------------


def test_a_daemon_takes_what_comes_and_what_was_there(daemon: Daemon) -> None:
    daemon.stop()
    daemon.start("--write", "late")
    daemon.run("put", "0102", "-i", "-", "--label", "note", stdin=b"hello")
    file = daemon.folder / "x.kvb"
    refused = daemon.run("get", "0102", "--record", "-o", file)
    assert (refused.code, file.exists()) == (1, False)  # it is not on disk yet
    assert "kvstore flush" in refused.stderr
    daemon.run("flush")
    assert daemon.run("get", "0102", "--record", "-o", file).code == 0
    daemon.run("delete", "0102")
    os.replace(file, daemon.store / "incoming" / "x.kvb")
    before = time.monotonic()
    assert eventually(lambda: daemon.run("get", "0102").stdout == b"hello", 20)
    assert time.monotonic() - before < incoming.LOOK_SECONDS / 2  # somebody told it
    envelope = daemon.run("inspect", "0102", "--json").json()["envelope"]
    assert isinstance(envelope, dict)
    assert envelope["label"] == "note"
    # Killed while files lie there: they are taken by the next one.
    daemon.stop(signal.SIGKILL)
    namespace = namespace_id(named("strange"))
    drop(daemon.store, f"{namespace.hex()}.json", namespaces.encode(named("strange"), None))
    drop(daemon.store, "y.kvb", image(2, namespace=namespace))
    drop(daemon.store, "z.kvb", b"rubbish")
    daemon.start()
    strange = ("get", key(2).hex(), "--namespace", "strange")
    assert eventually(lambda: daemon.run(*strange).stdout == block(2), 20)
    found = daemon.status()
    assert found["state"] == "ready"
    assert found["incoming"] == {"taken": 1, "present": 0, "waiting": 0, "refused": 1}
    assert "incoming/'z.kvb' stays" in json.dumps(found["notes"])
    assert daemon.stop() == 0


def test_files_are_taken_while_clients_work(daemon: Daemon) -> None:
    with Client(str(daemon.socket)) as client:
        for number in range(200):
            drop(daemon.store, f"{number}.kvb", image(number, 50_000))
            client.put(key(1000 + number), block(number))
        names = [key(number) for number in range(200)]
        assert eventually(lambda: client.contains(names).all(), 30)
        found = client.get_many(names)
        assert [bytes(one or b"") for one in found] == [block(n, 50_000) for n in range(200)]
    assert eventually(lambda: not any((daemon.store / "incoming").iterdir()), 10)

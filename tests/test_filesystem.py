"""The filesystem engine: layout, direct transfers, and files that are not what they should be."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import socket
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvstore.backends.base import EngineContext, Status
from kvstore.backends.directio import ALIGNMENT
from kvstore.backends.filesystem import FilesystemEngine
from kvstore.errors import (
    ConfigError,
    CorruptStore,
    EngineError,
    PermissionDenied,
    StoreExists,
    StoreNotFound,
)
from kvstore.record import Verdict, image_bytes
from kvstore.testing.records import (
    NAMESPACE,
    OTHER_NAMESPACE,
    STORE,
    assert_absent,
    assert_stored,
    blank_images,
    full_images,
    identities,
    key_of,
    make_blocks,
    put,
    scanned,
    verdicts,
)
from tests.mounts import mounted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.backends.base import Blocks


def start(directory: Path, *, create: bool = True, **options: object) -> FilesystemEngine:
    """Return an open engine in ``directory``, which is made if it must be created."""
    engine = FilesystemEngine(EngineContext(directory, STORE, options))
    if create:
        directory.mkdir()
        engine.create()
    engine.open()
    return engine


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "blocks"


@pytest.fixture
def engine(directory: Path) -> Iterator[FilesystemEngine]:
    engine = start(directory)
    yield engine
    engine.close()


def file_of(engine: FilesystemEngine, block: Blocks) -> Path:
    """Return where the one record lies, found by its name alone."""
    name = f"{block.shard:04x}-{block.key_list()[0].hex()}.{int(block.generations[0]):016x}.kvb"
    (path,) = (engine.context.directory / block.namespace.hex()).glob(f"*/{name}")
    return path


def findings(engine: FilesystemEngine) -> list[tuple[str, str]]:
    """Return (kind, path) of everything strange that a scan reports, in order."""
    return sorted((item.kind, item.path) for batch in engine.scan() for item in batch.strange)


def checked(engine: FilesystemEngine) -> list[tuple[str, str]]:
    return sorted((item.kind, item.path) for item in engine.check())


# Layout


@pytest.mark.parametrize(("fanout", "digits"), [(1, 2), (16, 2), (256, 2), (257, 3), (4096, 3)])
def test_a_record_is_a_file_named_by_its_identity(
    directory: Path, fanout: int, digits: int
) -> None:
    engine = start(directory, fanout=fanout)
    blocks = put(engine, make_blocks([key_of(1, 36)], 5000, 0xABC, shard=0x12))
    fan = f"{xxh3_64_intdigest(key_of(1, 36)) % fanout:0{digits}x}"
    name = f"0012-{key_of(1, 36).hex()}.0000000000000abc.kvb"
    path = directory / NAMESPACE.hex() / fan / name
    assert path.read_bytes() == bytes(full_images(blocks)[0])
    assert path.stat().st_size == image_bytes(5000) == 4096 + 8192
    assert [p for p in directory.rglob("*") if p.is_file()] == [path]
    engine.close()


def test_nobody_else_may_read_the_blocks(engine: FilesystemEngine, directory: Path) -> None:
    put(engine, make_blocks([key_of(1)]))
    for path in directory.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_the_longest_name_fits(engine: FilesystemEngine) -> None:
    blocks = make_blocks([key_of(1, 64)], 100, (1 << 64) - 1, shard=0xFFFF)
    assert_stored(engine, put(engine, blocks))
    assert len(file_of(engine, blocks).name) < 255


def test_another_fanout_finds_files_in_the_wrong_place(directory: Path) -> None:
    engine = start(directory, fanout=128)
    blocks = put(engine, make_blocks([key_of(i) for i in range(20)], 100))
    engine.close()
    other = start(directory, create=False, fanout=256)
    moved = np.array([xxh3_64_intdigest(key) % 256 >= 128 for key in blocks.key_list()])
    assert 0 < moved.sum() < 20
    assert_absent(other, blocks.take(moved))
    assert_stored(other, blocks.take(~moved))
    assert [kind for kind, _ in findings(other)] == ["misplaced"] * moved.sum()
    other.close()


@pytest.mark.parametrize(
    "options",
    [
        {"fanout": 0},
        {"fanout": 4097},
        {"fanout": "256"},
        {"fanout": True},
        {"io": "fast"},
        {"x": 1},
    ],
)
def test_options_that_make_no_sense(directory: Path, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        FilesystemEngine(EngineContext(directory, STORE, options))


# Creating and opening


@pytest.mark.parametrize("stranger", ["file", ".hidden", "tmp"])
def test_creating_where_anything_is(directory: Path, stranger: str) -> None:
    directory.mkdir()
    (directory / stranger).mkdir()
    with pytest.raises(StoreExists):
        FilesystemEngine(EngineContext(directory, STORE)).create()
    assert [path.name for path in directory.iterdir()] == [stranger]


def test_a_new_disk_has_lost_and_found(directory: Path) -> None:
    (directory / "lost+found").mkdir(parents=True)
    engine = FilesystemEngine(EngineContext(directory, STORE))
    engine.create()
    engine.open()
    assert engine.check() == []
    engine.close()


def test_neighbours_in_the_same_directory_are_ignored(
    engine: FilesystemEngine, directory: Path
) -> None:
    for name in ("journal.0000000000000001", "checkpoint.0000000000000001"):
        (directory / name).write_bytes(b"not ours")
    assert engine.check() == []
    assert findings(engine) == []


def test_without_its_mark_nothing_is_opened_or_made(directory: Path) -> None:
    engine = start(directory)
    put(engine, make_blocks([key_of(1)]))
    engine.close()
    (directory / "tmp").rmdir()
    with pytest.raises(StoreNotFound, match="tmp is missing"):
        engine.open()
    assert not (directory / "tmp").exists()
    mark = directory / "tmp"
    mark.write_bytes(b"")
    with pytest.raises(CorruptStore):
        engine.open()
    mark.unlink()
    mark.symlink_to("/tmp")
    with pytest.raises(CorruptStore):
        engine.open()


def test_a_directory_that_may_not_be_opened(
    engine: FilesystemEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    engine.close()
    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(PermissionDenied):
        engine.open()


def test_leftovers_go_when_the_engine_opens(directory: Path, tmp_path: Path) -> None:
    start(directory).close()
    target = tmp_path / "precious"
    target.write_bytes(b"keep me")
    (directory / "tmp" / "1f-2e-3").write_bytes(b"half a record")
    (directory / "tmp" / "folder").mkdir()
    (directory / "tmp" / "link").symlink_to(target)
    reader = FilesystemEngine(EngineContext(directory, STORE, read_only=True))
    reader.open()
    strange = [("foreign", "tmp/folder"), ("foreign", "tmp/link")]
    assert checked(reader) == [*strange, ("leftover", "tmp/1f-2e-3")]
    reader.close()
    engine = start(directory, create=False)
    assert checked(engine) == strange
    assert target.read_bytes() == b"keep me"
    engine.close()


def test_opening_and_failing_to_open_leak_no_descriptor(directory: Path) -> None:
    engine = start(directory)
    engine.close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        engine.open()
        engine.open()
        engine.stats()
        engine.close()
    (directory / "tmp").rmdir()
    for _ in range(3):
        with pytest.raises(StoreNotFound):
            engine.open()
    assert len(os.listdir("/proc/self/fd")) == before


# Direct transfers


def resident_pages(path: Path) -> int:
    """Return how many pages of a file the page cache holds (mincore(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        pages = -(-size // mmap.PAGESIZE)
        vector = (ctypes.c_ubyte * pages)()
        held = np.frombuffer(mapped, np.uint8)
        assert libc.mincore(ctypes.c_void_p(held.ctypes.data), ctypes.c_size_t(size), vector) == 0
        del held
        return sum(page & 1 for page in vector)


def need_real_direct_io(directory: Path) -> None:
    command = ["stat", "-f", "-c", "%T", str(directory)]
    kind = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if kind not in ("ext2/ext3", "xfs", "btrfs"):
        pytest.skip(f"{kind} keeps pages in memory whatever it is told")


def test_direct_io_leaves_no_page_in_the_cache(engine: FilesystemEngine, directory: Path) -> None:
    need_real_direct_io(directory)
    blocks = put(engine, make_blocks([key_of(1), key_of(2)], 300_000))
    paths = [file_of(engine, blocks.take(slice(i, i + 1))) for i in range(2)]
    assert [resident_pages(path) for path in paths] == [0, 0]
    assert_stored(engine, blocks)
    assert len(scanned(engine)) == 2
    assert [resident_pages(path) for path in paths] == [0, 0]
    assert engine.stats().io == "direct"
    assert engine.stats().notes == ()


def test_buffered_io_on_request(directory: Path) -> None:
    engine = start(directory, io="buffered")
    blocks = put(engine, make_blocks([key_of(1)], 300_000))
    assert_stored(engine, blocks)
    # The other side of the test above: here the pages are there.
    assert resident_pages(file_of(engine, blocks)) > 70
    assert engine.stats().io == "buffered"
    assert engine.stats().notes == ()
    engine.close()


def refuse_direct(monkeypatch: pytest.MonkeyPatch, function: str) -> list[str]:
    """Make ``os.open``, ``os.preadv`` or ``os.pwritev`` refuse O_DIRECT; return a list of refusals.

    Like real filesystems, a refused open leaves the new file behind.
    """
    real: Callable[..., int] = getattr(os, function)
    refused: list[str] = []

    def is_direct(*arguments: Any) -> bool:
        if function == "open":
            return bool(arguments[1] & os.O_DIRECT)
        return bool(fcntl.fcntl(arguments[0], fcntl.F_GETFL) & os.O_DIRECT)

    def refusing(*arguments: Any, **named: Any) -> int:
        if not is_direct(*arguments):
            return real(*arguments, **named)
        if function == "open":
            os.close(real(arguments[0], arguments[1] & ~os.O_DIRECT, *arguments[2:], **named))
        refused.append(function)
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, function, refusing)
    return refused


@pytest.mark.parametrize("function", ["open", "pwritev"])
def test_refused_direct_io_falls_back_when_opening(
    directory: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    refused = refuse_direct(monkeypatch, function)
    engine = start(directory)
    assert engine.stats().io == "buffered"
    assert "O_DIRECT" in engine.stats().notes[0]
    assert_stored(engine, put(engine, make_blocks([key_of(1), key_of(2)])))
    assert refused == [function]
    assert list((directory / "tmp").iterdir()) == []
    engine.close()


@pytest.mark.parametrize("function", ["open", "preadv"])
def test_refused_direct_io_falls_back_at_the_first_read(
    directory: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    engine = start(directory)
    blocks = put(engine, make_blocks([key_of(1), key_of(2)]))
    engine.close()
    refused = refuse_direct(monkeypatch, function)
    reader = FilesystemEngine(EngineContext(directory, STORE, read_only=True))
    reader.open()
    assert_stored(reader, blocks)
    assert refused == [function]
    assert reader.stats().io == "buffered"
    reader.close()


@pytest.mark.parametrize("function", ["open", "pwritev"])
def test_direct_io_or_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    start(directory, io="direct").close()
    refuse_direct(monkeypatch, function)
    with pytest.raises(EngineError, match="refuses O_DIRECT"):
        start(directory, create=False, io="direct")


@pytest.mark.root
def test_a_filesystem_without_direct_io(tmp_path: Path) -> None:
    with mounted(tmp_path, "ramfs") as point:
        engine = start(point / "blocks")
        assert engine.stats().io == "buffered"
        assert_stored(engine, put(engine, make_blocks([key_of(1), key_of(2)]), sync=True))
        engine.close()


def test_one_image_that_is_not_aligned_changes_nothing_else(engine: FilesystemEngine) -> None:
    need_real_direct_io(engine.context.directory)
    blocks = make_blocks([key_of(1)])
    (image,) = full_images(blocks)
    crooked = memoryview(mmap.mmap(-1, len(image) + ALIGNMENT))[8 : 8 + len(image)]
    crooked[:] = image
    assert engine.put_many(blocks, [crooked], sync=False).statuses.tolist() == [Status.OK]
    assert_stored(engine, blocks)
    crooked[:] = bytes(len(image))
    assert engine.get_many_into(blocks, [crooked]).statuses.tolist() == [Status.OK]
    assert crooked == image
    assert engine.stats().io == "direct"


@pytest.mark.parametrize("function", ["preadv", "pwritev"])
@pytest.mark.parametrize("first", [4096, 100])
def test_what_moves_in_pieces_arrives(
    engine: FilesystemEngine, monkeypatch: pytest.MonkeyPatch, function: str, first: int
) -> None:
    need_real_direct_io(engine.context.directory)
    real: Callable[[int, list[memoryview], int], int] = getattr(os, function)
    calls = []

    def short(descriptor: int, images: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if offset:
            return real(descriptor, images, offset)
        return min(first, real(descriptor, [images[0][:4096]], 0))

    blocks = make_blocks([key_of(1)], 100_000)
    if function == "pwritev":
        monkeypatch.setattr(os, function, short)
        put(engine, blocks)
        # What is left after 100 bytes can only be moved buffered.
        assert calls == ([0, 4096] if first == 4096 else [0, 100, 100])
        assert_stored(engine, blocks)
    else:
        put(engine, blocks)
        monkeypatch.setattr(os, function, short)
        read = engine.get_many_into(blocks, blank_images(blocks))
        # A device that gives up in the middle of its own blocks is left alone.
        assert read.filled.tolist() == [image_bytes(100_000) if first == 4096 else 100]
        assert read.statuses.tolist() == [Status.OK if first == 4096 else Status.DAMAGED]
    assert engine.stats().io == "direct"


# Damage


@pytest.fixture
def three(engine: FilesystemEngine) -> Blocks:
    return put(engine, make_blocks([key_of(i) for i in range(3)], 9000))


@pytest.mark.parametrize("size", [0, 100, 4095, 4096, 4609, 8192, 12288, 12289, 16383])
def test_a_file_that_was_cut(engine: FilesystemEngine, three: Blocks, size: int) -> None:
    os.truncate(file_of(engine, three.take(slice(1, 2))), size)
    read = engine.get_many_into(three, blank_images(three))
    assert read.statuses.tolist() == [Status.OK, Status.DAMAGED, Status.OK]
    assert read.filled.tolist() == [16384, size, 16384]
    assert verdicts(engine, three) == [Verdict.OK, Verdict.DAMAGED, Verdict.OK]
    assert engine.contains_many(three).all()
    assert engine.stats().notes == ()


def test_a_file_that_grew_is_still_a_hit(engine: FilesystemEngine, three: Blocks) -> None:
    with file_of(engine, three.take(slice(1, 2))).open("ab") as file:
        file.write(b"more")
    assert_stored(engine, three)


def test_a_file_that_is_gone(engine: FilesystemEngine, three: Blocks) -> None:
    file_of(engine, three.take(slice(1, 2))).unlink()
    assert verdicts(engine, three) == [Verdict.OK, None, Verdict.OK]
    assert engine.delete_many(three) == 2


def make_symlink(path: Path) -> None:
    copy = path.parent.parent.parent.parent / "elsewhere"
    copy.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(copy)


def make_socket(path: Path) -> None:
    path.unlink()
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket may have 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.bind("s")
            os.rename("s", path.name)
    finally:
        os.chdir(here)


def replace_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def do(path: Path) -> None:
        path.unlink()
        make(path)

    return do


STRANGERS = {
    "directory": replace_by(lambda path: path.mkdir()),
    "symlink": make_symlink,
    "dangling": replace_by(lambda path: path.symlink_to("nowhere")),
    "fifo": replace_by(lambda path: os.mkfifo(path)),
    "socket": make_socket,
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_what_is_no_file_is_not_read(
    engine: FilesystemEngine, three: Blocks, tmp_path: Path, kind: str
) -> None:
    path = file_of(engine, three.take(slice(1, 2)))
    STRANGERS[kind](path)
    before = len(os.listdir("/proc/self/fd"))
    images = blank_images(three)
    read = engine.get_many_into(three, images)
    assert read.statuses.tolist() == [Status.OK, Status.DAMAGED, Status.OK]
    assert read.filled[1] == 0
    assert set(bytes(images[1])) == {0xA5}
    assert engine.contains_many(three).tolist() == [True, False, True]
    relative = str(path.relative_to(engine.context.directory))
    assert findings(engine) == checked(engine) == [("foreign", relative)]
    assert engine.stats().io == engine._files.io
    assert engine.stats().notes == ()
    assert engine.delete_many(three) == (2 if kind == "directory" else 3)
    assert path.is_dir() == (kind == "directory")
    assert len(os.listdir("/proc/self/fd")) == before
    if kind == "symlink":
        assert (tmp_path / "elsewhere").stat().st_size == 16384


@pytest.mark.parametrize("kind", STRANGERS)
@pytest.mark.parametrize("level", ["namespace", "fan"])
def test_a_directory_that_was_replaced(
    engine: FilesystemEngine, three: Blocks, tmp_path: Path, level: str, kind: str
) -> None:
    one = three.take(slice(1, 2))
    path = file_of(engine, one).parent
    path = path if level == "fan" else path.parent
    shutil.move(path, tmp_path / "moved")
    path.write_bytes(b"")
    if kind == "symlink":
        path.unlink()
        path.symlink_to(tmp_path / "moved")
    else:
        STRANGERS[kind](path)
    expected = [None] if kind == "directory" else [Verdict.DAMAGED]
    before = len(os.listdir("/proc/self/fd"))
    assert verdicts(engine, one) == expected
    assert not engine.contains_many(one).any()
    assert engine.delete_many(one) == 0
    statuses = engine.put_many(one, full_images(one), sync=True).statuses.tolist()
    assert statuses == [Status.OK if kind == "directory" else Status.FAILED]
    relative = str(path.relative_to(engine.context.directory))
    assert checked(engine) == ([] if kind == "directory" else [("foreign", relative)])
    assert not engine.failed
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(list((tmp_path / "moved").rglob("*.kvb"))) == (1 if level == "fan" else 3)


def test_files_that_were_swapped_are_stale(engine: FilesystemEngine, three: Blocks) -> None:
    one, two = (file_of(engine, three.take(slice(i, i + 1))) for i in range(2))
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    assert verdicts(engine, three) == [Verdict.STALE, Verdict.STALE, Verdict.OK]
    kinds = [kind for kind, _ in findings(engine)]
    assert kinds == ["wrong-name", "wrong-name"]


def test_a_put_replaces_nothing_but_a_file(engine: FilesystemEngine, three: Blocks) -> None:
    path = file_of(engine, three.take(slice(1, 2)))
    path.unlink()
    path.mkdir()
    statuses = engine.put_many(three, full_images(three), sync=False).statuses.tolist()
    assert statuses == [Status.OK, Status.FAILED, Status.OK]
    assert list((engine.context.directory / "tmp").iterdir()) == []


def test_each_kind_of_failure_is_logged_once(
    engine: FilesystemEngine, three: Blocks, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(3):
        path = file_of(engine, three.take(slice(i, i + 1)))
        path.unlink()
        path.symlink_to("nowhere")
    for _ in range(3):
        verdicts(engine, three)
    assert [record.message.split(" ")[0] for record in caplog.records] == ["reading"]
    assert key_of(0).hex() in caplog.text


def test_what_cannot_be_removed_is_an_error(
    engine: FilesystemEngine, three: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.unlink
    stubborn = file_of(engine, three.take(slice(0, 1))).name

    def unlink(name: str, *, dir_fd: int) -> None:
        if name == stubborn:
            raise OSError(errno.EROFS, "Read-only file system")
        real(name, dir_fd=dir_fd)

    monkeypatch.setattr("os.unlink", unlink)
    with pytest.raises(EngineError, match=key_of(0).hex()):
        engine.delete_many(three)
    assert engine.contains_many(three).tolist() == [True, False, False]


def test_a_directory_removed_under_a_put_is_made_again(
    engine: FilesystemEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = make_blocks([key_of(1)])
    put(engine, make_blocks([key_of(1)], generations=2))
    real = os.rename

    def rename(*arguments: Any, **named: Any) -> None:
        monkeypatch.setattr("os.rename", real)
        shutil.rmtree(engine.context.directory / NAMESPACE.hex())
        real(*arguments, **named)

    monkeypatch.setattr("os.rename", rename)
    put(engine, blocks, sync=True)
    assert_stored(engine, blocks)


# Scanning


def test_a_scan_reports_what_it_cannot_believe(engine: FilesystemEngine, directory: Path) -> None:
    blocks = put(engine, make_blocks([key_of(i) for i in range(6)], 9000))
    paths = [file_of(engine, blocks.take(slice(i, i + 1))) for i in range(6)]
    garbage, cut, cut_header, moved, renamed, _good = paths
    names = [str(path.relative_to(directory)) for path in paths]
    garbage.write_bytes(b"x" * 16384)
    os.truncate(cut, 12288)
    os.truncate(cut_header, 50)
    (fan,) = {f"{n:02x}" for n in range(2)} - {moved.parent.name, "00"} or {"01"}
    elsewhere = moved.parent.parent / fan / moved.name
    elsewhere.parent.mkdir(exist_ok=True)
    moved.rename(elsewhere)
    renamed.rename(renamed.with_name(renamed.name.replace("0000-", "0001-")))
    (directory / NAMESPACE.hex() / "zz").mkdir()
    (directory / "notes.txt").write_text("hello")
    (garbage.parent / garbage.name.upper()).write_bytes(b"")
    (garbage.parent / "0000-abc.0000000000000001.kvb").write_bytes(b"")
    folder = f"{NAMESPACE.hex()}/{garbage.parent.name}"
    foreign = [
        ("foreign", f"{folder}/{garbage.name.upper()}"),
        ("foreign", f"{folder}/0000-abc.0000000000000001.kvb"),
        ("foreign", f"{NAMESPACE.hex()}/zz"),
        ("foreign", "notes.txt"),
        ("misplaced", str(elsewhere.relative_to(directory))),
    ]
    assert checked(engine) == sorted(foreign)
    assert findings(engine) == sorted(
        [
            *foreign,
            ("bad-header", names[0]),
            ("short", names[1]),
            ("bad-header", names[2]),
            ("wrong-name", names[4].replace("0000-", "0001-")),
        ]
    )
    found = [key for batch in engine.scan() for key in batch.keys[:, :32]]
    assert [key.tobytes() for key in found] == [key_of(5)]


def test_records_of_another_store_are_reported(engine: FilesystemEngine, three: Blocks) -> None:
    engine.close()
    other = FilesystemEngine(replace(engine.context, store_uuid=bytes(16)))
    other.open()
    assert [kind for kind, _ in findings(other)] == ["other-store"] * 3
    assert sum(len(batch) for batch in other.scan()) == 0
    other.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
def test_a_scan_that_is_short_of_something_does_not_blame_the_records(
    engine: FilesystemEngine, three: Blocks, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def failing(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.preadv", failing)
    if number == errno.EIO:
        assert [kind for kind, _ in findings(engine)] == ["unreadable"] * 3
    else:
        with pytest.raises(EngineError, match="the scan stopped"):
            findings(engine)


def test_findings_come_in_bounded_batches(engine: FilesystemEngine, three: Blocks) -> None:
    folder = file_of(engine, three.take(slice(0, 1))).parent
    for number in range(5000):
        (folder / str(number)).touch()
    sizes = [(len(batch), len(batch.strange)) for batch in engine.scan()]
    assert all(records + strange <= 4096 for records, strange in sizes)
    assert sum(records for records, _ in sizes) == 3
    assert sum(strange for _, strange in sizes) == 5000


def test_an_unfinished_scan_leaks_nothing(engine: FilesystemEngine) -> None:
    put(engine, make_blocks([key_of(i) for i in range(5000)], 1))
    before = len(os.listdir("/proc/self/fd"))
    found = engine.scan()
    next(found)
    found.close()  # type: ignore[attr-defined]
    assert len(os.listdir("/proc/self/fd")) == before


# Figures and giving up namespaces


def bytes_of_directories(directory: Path) -> int:
    folders = [directory, *(path for path in directory.rglob("*") if path.is_dir())]
    return sum(path.stat().st_blocks * 512 for path in folders)


def test_overhead_is_what_directories_take(engine: FilesystemEngine, directory: Path) -> None:
    for number in range(5):
        keys = [key_of(i) for i in range(60)]
        put(engine, make_blocks(keys, 1, namespace=bytes([number]) * 16))
    figures = [engine.stats().overhead_bytes for _ in range(12)]
    assert figures[-1] == bytes_of_directories(directory)
    assert figures == sorted(figures)
    shutil.rmtree(directory / (bytes([1]) * 16).hex())
    figures = [engine.stats().overhead_bytes for _ in range(24)]
    assert figures[-1] == bytes_of_directories(directory)


def test_a_forgotten_namespace_leaves_no_directory(
    engine: FilesystemEngine, directory: Path
) -> None:
    kept = put(engine, make_blocks([key_of(i) for i in range(40)]))
    gone = put(engine, make_blocks(kept.key_list(), namespace=OTHER_NAMESPACE))
    engine.delete_many(gone)
    engine.forget(OTHER_NAMESPACE)
    engine.forget(bytes(16))
    assert sorted(path.name for path in directory.iterdir()) == [NAMESPACE.hex(), "tmp"]
    engine.delete_many(kept.take(slice(1, None)))
    engine.forget(NAMESPACE)
    assert_stored(engine, kept.take(slice(0, 1)))
    assert len(list((directory / NAMESPACE.hex()).iterdir())) == 1
    assert set(scanned(engine)) == {identities(kept)[0]}

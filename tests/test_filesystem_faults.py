"""The filesystem engine: what is durable when, failing syncs, full devices, no descriptors."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.backends.base import EngineContext, Status
from kvstore.backends.filesystem import FilesystemEngine
from kvstore.errors import EngineError
from kvstore.testing.records import (
    STORE,
    assert_absent,
    assert_stored,
    full_images,
    key_of,
    make_blocks,
    put,
    scanned,
)
from tests import strace_log
from tests.mounts import mounted, shut_down

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstore.backends.base import Blocks

CALLS = "renameat,renameat2,fsync,fdatasync,syncfs,mkdirat"

PROGRAM = """
import sys
from pathlib import Path
from kvstore.backends.base import EngineContext
from kvstore.backends.filesystem import FilesystemEngine
from kvstore.errors import EngineError
from kvstore.testing.records import STORE, full_images, key_of, make_blocks, scanned

def statuses(blocks, sync=True):
    return engine.put_many(blocks, full_images(blocks), sync=sync).statuses.tolist()

engine = FilesystemEngine(EngineContext(Path(sys.argv[1]), STORE, {"fanout": 64}))
engine.open()
"""


def start(directory: Path, **options: object) -> FilesystemEngine:
    directory.mkdir()
    engine = FilesystemEngine(EngineContext(directory, STORE, options))
    engine.create()
    engine.open()
    return engine


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    start(tmp_path / "blocks", fanout=64).close()
    return tmp_path / "blocks"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FilesystemEngine]:
    engine = start(tmp_path / "own", fanout=64)
    yield engine
    engine.close()


def trace(
    directory: Path, program: str, *, inject: str = ""
) -> tuple[list[str], list[strace_log.Call]]:
    """Run PROGRAM and ``program`` under strace; return lines printed and calls in ``directory``."""
    printed, calls = strace_log.run(
        PROGRAM + program,
        directory.parent / "strace.log",
        CALLS,
        arguments=[str(directory)],
        inject=inject,
    )
    inside = [call for call in calls if call.paths and call.paths[0].startswith(str(directory))]
    return printed.splitlines(), inside


def put_statuses(engine: FilesystemEngine, blocks: Blocks, *, sync: bool = False) -> list[int]:
    statuses: list[int] = engine.put_many(blocks, full_images(blocks), sync=sync).statuses.tolist()
    return statuses


def leftovers(engine: FilesystemEngine) -> list[str]:
    return os.listdir(engine.context.directory / "tmp")


# The order of a durable put


def check_order(calls: list[strace_log.Call], count: int) -> None:
    """Check fsync(file) < rename < sync of its directory for ``count`` files."""
    renames = [call for call in calls if call.name.startswith("rename") and call.ok]
    assert len(renames) == count
    for rename in renames:
        spool, temporary, folder, _ = rename.paths
        synced = [c for c in calls if c.name == "fsync" and c.paths == [f"{spool}/{temporary}"]]
        assert len(synced) == 1
        assert synced[0].ok
        assert synced[0].end < rename.begin
        published = [
            c for c in calls if c.name == "syncfs" or (c.name == "fsync" and c.paths == [folder])
        ]
        assert any(c.ok and rename.end < c.begin for c in published)


def names_of(calls: list[strace_log.Call]) -> set[str]:
    return {call.name for call in calls}


def test_files_then_names_then_directories(directory: Path) -> None:
    _, calls = trace(directory, "print(statuses(make_blocks([key_of(1), key_of(2)])))")
    check_order(calls, 2)
    assert "syncfs" not in names_of(calls)
    made = [call for call in calls if call.name == "mkdirat"]
    last_rename = max(call.end for call in calls if call.name.startswith("rename"))
    for parent in {call.paths[0] for call in made}:
        # The entries of new directories are durable too, from the root down.
        assert any(
            c.name == "fsync" and c.paths == [parent] and c.begin > last_rename for c in calls
        )
    assert {call.paths[0] for call in made} >= {str(directory)}


def test_many_directories_are_synced_together(directory: Path) -> None:
    _, calls = trace(directory, "print(statuses(make_blocks([key_of(i) for i in range(70)])))")
    check_order(calls, 70)
    assert len([call for call in calls if call.name == "syncfs"]) == 1
    folders = {call.paths[2] for call in calls if call.name.startswith("rename")}
    assert not any(call.name == "fsync" and call.paths[0] in folders for call in calls)


def test_each_directory_is_synced_once_for_a_batch(directory: Path) -> None:
    # fanout 64: of 2,000 keys, 40 that share two directories.
    program = """
from kvstore.backends.filetree import Tree
tree = Tree(64)
keys = [key_of(i) for i in range(2000) if tree.fan(key_of(i)) in ("07", "08")][:40]
print(statuses(make_blocks(keys)))
"""
    printed, calls = trace(directory, program)
    assert printed == [str([0] * 40)]
    check_order(calls, 40)
    folders = [call.paths[2] for call in calls if call.name.startswith("rename")]
    synced = [call.paths[0] for call in calls if call.name == "fsync"]
    assert [synced.count(folder) for folder in sorted(set(folders))] == [1, 1]


def test_known_directories_are_not_synced_again(directory: Path) -> None:
    program = """
for generation in (1, 2, 3):
    statuses(make_blocks([key_of(1)], generations=generation))
statuses(make_blocks([key_of(2)]))
"""
    _, calls = trace(directory, program)
    check_order(calls, 4)
    assert [call.paths[0] for call in calls if call.name == "fsync"].count(str(directory)) == 2


def test_directories_of_an_earlier_process_count_as_unsynced(directory: Path) -> None:
    trace(directory, "statuses(make_blocks([key_of(1)]), sync=False)")
    _, calls = trace(directory, "statuses(make_blocks([key_of(1)], generations=2))")
    (rename,) = (call for call in calls if call.name.startswith("rename"))
    folder = rename.paths[2]
    synced = [call.paths[0] for call in calls if call.name == "fsync" and call.begin > rename.end]
    assert synced == [folder, os.path.dirname(folder), str(directory)]


def test_a_put_that_is_not_synced_syncs_nothing(directory: Path) -> None:
    program = "statuses(make_blocks([key_of(i) for i in range(20)]), sync=False)"
    _, calls = trace(directory, program)
    assert not names_of(calls) & {"fsync", "fdatasync", "syncfs"}
    _, calls = trace(directory, program + "\nengine.flush()")
    last_rename = max(call.end for call in calls if call.name.startswith("rename"))
    (flush,) = (call for call in calls if call.name == "syncfs")
    assert flush.begin > last_rename


def test_a_new_engine_is_durable(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from kvstore.backends.base import EngineContext
from kvstore.backends.filesystem import FilesystemEngine
FilesystemEngine(EngineContext(Path(sys.argv[1]), bytes(16))).create()
"""
    blocks = tmp_path / "blocks"
    blocks.mkdir()
    _, calls = strace_log.run(program, tmp_path / "log", "mkdir,fsync", arguments=[str(blocks)])
    (made,) = (call for call in calls if call.paths == [str(blocks / "tmp")])
    assert any(call.paths == [str(blocks)] and call.begin > made.end for call in calls)


def test_old_kernels_need_every_file_synced(
    engine: FilesystemEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(descriptor)
        real(descriptor)

    monkeypatch.setattr("os.fsync", fsync)
    put(engine, make_blocks([key_of(1), key_of(2)]))
    assert len(synced) == 0
    engine.close()
    old = os.uname_result(("Linux", "old", "4.18.0-553.el8", "", "x86_64"))
    monkeypatch.setattr("os.uname", lambda: old)
    engine.open()
    put(engine, make_blocks([key_of(3), key_of(4)]))
    assert len(synced) == 2


# Syncs that fail


def test_a_file_that_cannot_be_synced_was_not_written(directory: Path) -> None:
    program = """
blocks = make_blocks([key_of(1), key_of(2), key_of(3)])
print(statuses(blocks))
print(engine.contains_many(blocks).tolist(), bool(engine.failed))
import os
print(os.listdir(sys.argv[1] + "/tmp"))
print(statuses(blocks))
"""
    printed, _ = trace(directory, program, inject="fsync:error=EIO:when=2")
    assert printed == [
        str([Status.OK.value, Status.FAILED.value, Status.OK.value]),
        "[True, False, True] False",
        "[]",
        "[0, 0, 0]",
    ]


# Syncs of a put of one block: its file, its fan-out directory, the namespace's, the root.
@pytest.mark.parametrize("number", [2, 3, 4])
def test_a_directory_that_cannot_be_synced_stops_the_engine(directory: Path, number: int) -> None:
    program = """
before = make_blocks([key_of(7)])
print(statuses(before, sync=False))
blocks = make_blocks([key_of(1)])
print(statuses(blocks))
print(engine.contains_many(blocks).tolist(), bool(engine.failed), engine.stats().notes)
try:
    engine.flush()
except EngineError as error:
    print("flush failed")
print(statuses(make_blocks([key_of(2)])), statuses(make_blocks([key_of(3)]), sync=False))
print(engine.contains_many(before).tolist())
engine.close()
engine.open()
print(statuses(blocks), bool(engine.failed))
engine.flush()
"""
    printed, calls = trace(directory, program, inject=f"fsync:error=EIO:when={number}")
    assert printed == [
        "[0]",
        "[4]",
        "[False] True ('a sync failed (Input/output error), so nothing more is written',)",
        "flush failed",
        "[4] [4]",
        "[True]",
        "[0] False",
    ]
    # Only the flush after opening again reached the kernel.
    assert len([call for call in calls if call.name == "syncfs"]) == 1


def test_a_failed_flush_is_not_tried_again(directory: Path) -> None:
    program = """
print(statuses(make_blocks([key_of(1)]), sync=False))
for _ in range(3):
    try:
        engine.flush()
        print("durable")
    except EngineError as error:
        print(error.message)
print(statuses(make_blocks([key_of(2)]), sync=False))
"""
    printed, calls = trace(directory, program, inject="syncfs:error=EIO:when=1")
    failed = "a sync failed (Input/output error), so nothing more is written"
    assert printed == ["[0]", failed, failed, failed, "[4]"]
    assert len([call for call in calls if call.name == "syncfs"]) == 1


def test_many_directories_that_cannot_be_synced(directory: Path) -> None:
    program = """
blocks = make_blocks([key_of(i) for i in range(70)])
print(set(statuses(blocks)), engine.contains_many(blocks).any(), bool(engine.failed))
"""
    printed, _ = trace(directory, program, inject="syncfs:error=ENOSPC:when=1")
    assert printed == ["{4} False True"]


@pytest.mark.root
def test_a_disk_that_goes_away(tmp_path: Path) -> None:
    with mounted(tmp_path, "ext4", image_mib=64) as point:
        engine = start(point / "blocks")
        blocks = put(engine, make_blocks([key_of(1)]))
        engine.flush()
        put(engine, make_blocks([key_of(2)]))
        shut_down(point)
        for _ in range(2):
            with pytest.raises(EngineError, match="sync failed"):
                engine.flush()
        assert engine.failed
        assert put_statuses(engine, make_blocks([key_of(3)])) == [Status.FAILED]
        read = engine.get_many_into(blocks, full_images(blocks))
        assert read.statuses.tolist() == [Status.UNREADABLE]
        engine.close()
        engine.open()
        assert put_statuses(engine, make_blocks([key_of(3)])) == [Status.FAILED]
        engine.close()


# No room


def fill(engine: FilesystemEngine, size: int, *, sync: bool, batch: int = 16) -> Blocks:
    """Put batches until one is refused in part; return it, with what the engine promised kept."""
    number = 0
    while True:
        blocks = make_blocks([key_of(number + i) for i in range(batch)], size)
        statuses = put_statuses(engine, blocks, sync=sync)
        assert set(statuses) <= {Status.OK, Status.FULL}
        number += batch
        assert number < 5000
        if Status.FULL in statuses:
            stored = engine.contains_many(blocks)
            assert stored.tolist() == [status == Status.OK for status in statuses]
            assert_stored(engine, blocks.take(stored))
            assert_absent(engine, blocks.take(~stored))
            assert leftovers(engine) == []
            return blocks


@pytest.mark.root
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
@pytest.mark.parametrize("io", ["auto", "buffered"])
def test_a_full_device(tmp_path: Path, kind: str, sync: bool, io: str) -> None:
    options = "size=16m" if kind == "tmpfs" else ""
    with mounted(tmp_path, kind, options, image_mib=0 if kind == "tmpfs" else 16) as point:
        engine = start(point / "blocks", io=io)
        how = engine.stats().io
        refused = fill(engine, 300_000, sync=sync)
        stored = scanned(engine)
        assert len(stored) > 20
        # A small record still fits where a large one does not; deleting makes room again.
        assert Status.OK in put_statuses(engine, make_blocks([key_of(9999)], 1))
        engine.delete_many(make_blocks([key_of(i) for i in range(16)], 300_000))
        engine.flush()
        assert put_statuses(engine, refused.take(slice(0, 8)), sync=sync) == [Status.OK] * 8
        assert engine.failed == ""
        assert engine.stats().io == how
        engine.close()
        engine.open()
        engine.close()


@pytest.mark.root
def test_no_inodes_left(tmp_path: Path) -> None:
    with mounted(tmp_path, "tmpfs", "size=16m,nr_inodes=40") as point:
        engine = start(point / "blocks")
        fill(engine, 1000, sync=False, batch=8)
        engine.close()


def test_a_full_device_takes_the_first_blocks_of_a_batch(directory: Path) -> None:
    program = """
blocks = make_blocks([key_of(i) for i in range(5)])
print(statuses(blocks, sync=False), engine.contains_many(blocks).tolist())
"""
    printed, _ = strace_log.run(
        PROGRAM + program,
        directory.parent / "log",
        "pwritev,pwritev2",
        arguments=[str(directory)],
        # The first write is the probe when the engine opens.
        inject="pwritev,pwritev2:error=ENOSPC:when=4+",
    )
    assert printed.strip() == "[0, 0, 3, 3, 3] [True, True, False, False, False]"


def limited(program: str, directory: Path, limit: int, value: int) -> list[str]:
    """Run PROGRAM with a resource limit that is set when the engine is open."""
    lines = [
        "import resource, os",
        f"resource.setrlimit({limit}, ({value}, {value}))",
        program,
        'print(os.listdir(sys.argv[1] + "/tmp"))',
    ]
    command = [sys.executable, "-c", PROGRAM + "\n".join(lines), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("limit", [65536, 100_000])
def test_files_may_not_grow_so_large(directory: Path, limit: int) -> None:
    program = """
blocks = make_blocks([key_of(i) for i in range(3)], [5000, 200_000, 50_000])
for sync in (False, True):
    print(statuses(blocks, sync=sync), engine.contains_many(blocks).tolist(), engine.stats().notes)
"""
    expected = "[0, 3, 0] [True, False, True] ()"
    printed = limited(program, directory, resource.RLIMIT_FSIZE, limit)
    assert printed == [expected, expected, "[]"]


# No descriptors


def test_without_descriptors_nothing_breaks(directory: Path) -> None:
    program = """
blocks = make_blocks([key_of(i) for i in range(4)])
print(statuses(blocks))
hogs = []
try:
    while True:
        hogs.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
print(statuses(blocks, sync=False))
from kvstore.testing.records import blank_images
print(engine.get_many_into(blocks, blank_images(blocks)).statuses.tolist())
print(engine.contains_many(blocks).any())
for use in (lambda: engine.delete_many(blocks), lambda: list(engine.scan()), engine.check):
    try:
        use()
        print("done")
    except EngineError as error:
        print("EngineError")
engine.stats()
for hog in hogs:
    os.close(hog)
print(statuses(blocks, sync=False), engine.contains_many(blocks).all(), bool(engine.failed))
"""
    assert limited(program, directory, resource.RLIMIT_NOFILE, 30) == [
        "[0, 0, 0, 0]",
        "[4, 4, 4, 4]",
        "[4, 4, 4, 4]",
        "False",
        "EngineError",
        "EngineError",
        "EngineError",
        "[0, 0, 0, 0] True False",
        "[]",
    ]


def test_with_few_descriptors_a_durable_batch_is_synced_in_small_groups(directory: Path) -> None:
    program = """
hogs = []
try:
    while True:
        hogs.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
for hog in hogs[-4:]:
    os.close(hog)
blocks = make_blocks([key_of(i) for i in range(60)])
print(set(statuses(blocks)), engine.contains_many(blocks).all())
"""
    printed = limited(program, directory, resource.RLIMIT_NOFILE, 40)
    assert printed == ["{0} True", "[]"]


def test_failures_of_all_kinds_leak_no_descriptor(
    engine: FilesystemEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = put(engine, make_blocks([key_of(i) for i in range(4)]))
    before = len(os.listdir("/proc/self/fd"))

    def failing(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    fresh = make_blocks([key_of(i) for i in range(50, 54)])
    uses: list[Callable[[], object]] = [
        lambda: put_statuses(engine, fresh),
        lambda: put_statuses(engine, fresh, sync=True),
        lambda: engine.get_many_into(blocks, full_images(blocks)),
        lambda: list(engine.scan()),
    ]
    for function in ("pwritev", "fsync", "rename", "preadv", "fstat", "mkdir", "scandir"):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, failing)
            for use in uses:
                use()
        engine.close()
        engine.open()
    assert len(os.listdir("/proc/self/fd")) == before
    assert leftovers(engine) == []
    assert_stored(engine, blocks)

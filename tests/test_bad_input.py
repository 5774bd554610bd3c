"""Bad input, in one table: the exit code, what is said, what stays as it is, and who goes on.

Every condition is asked of the real command (or of the real daemon by a client, where the command
would not let it through). The message names the path or the key, the hint says what to do next.
Nothing changes in the store of the daemon and in the folder beside it but what the row lists, and
the daemon serves as before: old blocks, and new ones.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import pytest

from kvstore.client import Client
from tests.command import COMMAND, Daemon, run_command
from tests.mounts import mounted
from tests.scenes import Scene, Served, ask, changed, frame, places, run

NOBODY = 65534
SETTLE_SECONDS = 15.0


# -- conditions -----------------------------------------------------------------------------------


def mixed_batch(scene: Scene) -> None:
    with Client(str(scene.values["socket"])) as client:
        client.put_many([b"\xdd" * 4, b"\xdd" * 5], [b"data", b"more"])


def nothing(_: Scene) -> None:
    """The command itself is the condition."""


def input_of(size: int) -> Callable[[Scene], None]:
    return lambda scene: os.truncate(scene.input, size)


def config(text: str) -> Callable[[Scene], None]:
    def write(scene: Scene) -> None:
        path = scene.folder / "kvstore.toml"
        path.write_text(text)
        scene.values["config"] = path

    return write


def misspelt_variable(scene: Scene) -> None:
    scene.values["KVSTORE_CAPACTY"] = "1GiB"


def empty_folder(scene: Scene) -> None:
    (scene.folder / "new").mkdir()


def strangers_folder(scene: Scene) -> None:
    (scene.folder / "new").mkdir()
    (scene.folder / "new" / "thesis.txt").write_text("precious")


def changed_record(change: Callable[[str], str]) -> Callable[[Scene], None]:
    def rewrite(scene: Scene) -> None:
        path = scene.stopped_store() / "STORE.json"
        path.write_text(change(path.read_text()))

    return rewrite


def a_newer_format(text: str) -> str:
    return text.replace('"format": 1', '"format": 2')


def an_unknown_feature(text: str) -> str:
    return text.replace('"incompat": []', '"incompat": ["telepathy"]')


def half_of_it(text: str) -> str:
    return text[: len(text) // 2]


def nobody_asks(scene: Scene) -> None:
    """Without root it is the permissions that are taken away, instead of ours."""
    path = scene.stopped_store() / "STORE.json"
    if os.geteuid():
        path.chmod(0)
        scene.stack.callback(path.chmod, 0o600)
    else:
        become_nobody(scene)


def become_nobody(scene: Scene) -> None:
    if os.geteuid():
        pytest.skip("only root can run a command as somebody else")
    scene.values["XDG_CONFIG_HOME"] = "/nonexistent"
    scene.user = NOBODY
    try:
        code, _ = run(scene, ["frobnicate"])
    except PermissionError:
        code = -1
    if code != 2:
        pytest.skip(f"nobody may not run {COMMAND}")


def immutable_store(scene: Scene) -> None:
    """What even root may not change."""
    other = scene.stopped_store()
    if os.geteuid() or subprocess.run(["chattr", "-R", "+i", other], check=False).returncode:
        pytest.skip("files cannot be made immutable here, or not without root")
    scene.stack.callback(lambda: subprocess.run(["chattr", "-R", "-i", other], check=True))


def read_only_mount(scene: Scene) -> None:
    point = scene.stack.enter_context(mounted(scene.folder, "tmpfs", "size=16m"))
    scene.values["other"], scene.values["new"] = point / "store", point / "new"
    assert run_command("create", point / "store", "--capacity", "64MiB").code == 0
    subprocess.run(["mount", "-o", "remount,ro", point], check=True)


def full_mount(scene: Scene) -> None:
    point = scene.stack.enter_context(mounted(scene.folder, "tmpfs", "size=16m"))
    fill(point)
    scene.values["new"] = point / "new"


def full_output(scene: Scene) -> None:
    point = scene.stack.enter_context(mounted(scene.folder, "tmpfs", "size=16m"))
    fill(point)
    scene.values["new"] = point


def fill(point: Path) -> Path:
    """Fill a filesystem to its last byte; return the file that does it."""
    path = point / "filling"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 20, 4096):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)
    assert os.statvfs(point).f_bavail == 0
    return path


def small_disk(scene: Scene, options: str) -> Path:
    """Let the row be about a daemon whose store has a small filesystem of its own."""
    point = scene.stack.enter_context(mounted(scene.folder, "tmpfs", options))
    home = scene.folder.with_name(f"{scene.folder.name}-home")
    home.mkdir()
    (home / "store").symlink_to(point)
    scene.serve(Served(Daemon(home, OPTIONS)))
    input_of(1 << 20)(scene)
    return point


def full_disk(scene: Scene) -> None:
    filling = fill(small_disk(scene, "size=16m"))
    scene.served.wait_for_free(0, 0)

    def repair() -> None:
        filling.unlink()
        scene.served.wait_for_free(1 << 20, 1 << 40)

    scene.repair = repair


def full_disk_unforeseen(scene: Scene) -> None:
    """There are bytes left, but nothing to give a file its name."""
    point = small_disk(scene, "size=16m,nr_inodes=200")
    free = os.statvfs(point).f_ffree
    for number in range(free):
        (point / f"filling-{number}").touch()

    def repair() -> None:
        for number in range(free):
            (point / f"filling-{number}").unlink()
        scene.served.wait_for_free(1 << 20, 1 << 40)

    scene.repair = repair


def truncated(scene: Scene) -> None:
    path = scene.victim()
    os.truncate(path, 6000)


def emptied(scene: Scene) -> None:
    os.truncate(scene.victim(), 0)


def removed(scene: Scene) -> None:
    scene.victim().unlink()


def a_directory_instead(scene: Scene) -> None:
    path = scene.victim()
    path.unlink()
    path.mkdir()
    (path / "thesis.txt").write_text("precious")


def a_link_instead(scene: Scene) -> None:
    """The link even leads to the very record."""
    path = scene.victim()
    path.rename(scene.folder / "moved.kvb")
    path.symlink_to(scene.folder / "moved.kvb")


def swapped(scene: Scene) -> None:
    one = scene.victim()
    other = scene.victim()
    spare = one.with_suffix(".spare")
    one.rename(spare)
    other.rename(one)
    spare.rename(other)


# -- the table ------------------------------------------------------------------------------------


class Row(NamedTuple):
    """``asking`` is a command line or a call; ``changes`` are patterns of files, each of which must
    match a change, and every change one of them."""

    condition: str
    prepare: Callable[[Scene], None]
    asking: str | Callable[[Scene], object]
    code: int
    error: str
    names: tuple[str, ...]
    hint: str
    changes: tuple[str, ...] = ()


OPTIONS = ("--capacity", "64MiB", "--memory", "0", "--min-free", "0")
SERVE = "--socket {unused} serve --memory 64MiB --store"
CONFIGURED = f"{SERVE} {{new}} --config {{config}}"
CLIENT = "--socket {socket}"
PUT = f"{CLIENT} put -i -"
GET_DD = f"{CLIENT} get dddddddd -o {{folder}}/output"
GET = f"{CLIENT} get {{key}} -o {{folder}}/output"
JOURNAL = "store/blocks/journal.*"
FILE = "store/blocks/*/*/*-{key}.*.kvb"
COPY = "store/quarantine/*-{key}.*.kvb"
MANIFEST = "store/quarantine/manifest.jsonl"
BOUNDS = "1 to 64 bytes"
PUT_IT = "was evicted, or is under another namespace"

ROWS = [
    # Settings.
    Row("an unknown setting in the file", config("capcity = '1GiB'"), CONFIGURED,
        13, "ConfigError", ("'capcity'", "{config}"), "did you mean 'capacity'?"),
    Row("an unknown setting in the environment", misspelt_variable, f"{SERVE} {{new}}",
        13, "ConfigError", ("KVSTORE_CAPACTY",), "did you mean KVSTORE_CAPACITY?"),
    Row("an unknown setting as a flag", nothing, f"{SERVE} {{new}} --capcity 1GiB",
        2, "NoSuchOption", ("--capcity",), "kvstore serve --help"),
    Row("a bad size", nothing, f"{SERVE} {{new}} --capacity 12XB",
        13, "ConfigError", ("capacity (--capacity)", "12XB"), "write a size like 64GiB"),
    Row("a bad size in the file", config("capacity = '1GB'"), CONFIGURED,
        13, "ConfigError", ("capacity", "{config}", "1GB"), "write a size like 64GiB"),
    Row("too small a capacity", nothing, f"{SERVE} {{new}} --capacity 67108863",
        13, "ConfigError", ("capacity (--capacity)", "67108863"), "at least 64MiB"),
    Row("too small a capacity at creation", nothing, "create {new} --capacity 63MiB",
        13, "ConfigError", ("capacity (--capacity)", "66060288"), "at least 64MiB"),
    Row("an unknown engine for an empty directory", empty_folder,
        "create {new} --engine bogus --capacity 64MiB",
        13, "ConfigError", ("'bogus'",), "filesystem"),
    Row("an unknown engine", nothing, "create {new} --engine bogus --capacity 64MiB",
        13, "ConfigError", ("'bogus'",), "filesystem"),
    # Stores.
    Row("no store, and none may be made", nothing, f"{SERVE} {{new}} --create never",
        10, "StoreNotFound", ("{new}",), "kvstore create {new}"),
    Row("no store for an offline command", nothing, "inspect {new}",
        10, "StoreNotFound", ("{new}",), "kvstore create {new}"),
    Row("no directory to make a store in", nothing, "create {new}/store --capacity 64MiB",
        10, "StoreNotFound", ("{new}/store",), "make that directory"),
    Row("a directory that is not ours", strangers_folder, f"{SERVE} {{new}}",
        1, "StoreExists", ("{new}", "thesis.txt"), "choose an empty directory"),
    Row("a newer format", changed_record(a_newer_format), f"{SERVE} {{other}}",
        15, "FormatUnsupported", ("{other}", "format 2"), "use a newer kvstore"),
    Row("a newer format, offline", changed_record(a_newer_format), "inspect {other}",
        15, "FormatUnsupported", ("{other}", "format 2"), "use a newer kvstore"),
    Row("an unknown feature", changed_record(an_unknown_feature), f"{SERVE} {{other}}",
        15, "FormatUnsupported", ("{other}", "telepathy"), "use a newer kvstore"),
    Row("a damaged STORE.json", changed_record(half_of_it), f"{SERVE} {{other}}",
        5, "CorruptStore", ("{other}/STORE.json",), "restore it from a copy"),
    Row("a locked store", nothing, f"{SERVE} {{store}}",
        11, "StoreLocked", ("{store}", "process {pid} "), "ask the daemon that holds it"),
    Row("a locked store, offline", nothing, "inspect {store}",
        11, "StoreLocked", ("{store}", "process {pid} "), "ask the daemon that holds it"),
    Row("a store that is there already", nothing, "create {store} --capacity 64MiB",
        1, "StoreExists", ("{store}",), "open it, or choose another place"),
    Row("no permission", nobody_asks, f"{SERVE} {{other}}",
        1, "PermissionDenied", ("{other}/STORE.json",), "run as the store's owner"),
    Row("no permission, offline", nobody_asks, "inspect {other}",
        1, "PermissionDenied", ("{other}/STORE.json",), "run as the store's owner"),
    Row("no permission for the socket", become_nobody, f"{PUT} ddddddd1",
        1, "PermissionDenied", ("{socket}",), "or a member of its socket_group"),
    Row("an immutable store", immutable_store, f"{SERVE} {{other}}",
        1, "PermissionDenied", ("{other}/lock",), "run as the store's owner"),
    Row("a read-only filesystem", read_only_mount, f"{SERVE} {{other}}",
        1, "ReadOnly", ("{other}",), "remount it read-write"),
    Row("a read-only filesystem at creation", read_only_mount, "create {new} --capacity 64MiB",
        1, "ReadOnly", ("{new}",), "remount it read-write"),
    Row("a full disk at creation", full_mount, "create {new} --capacity 64MiB",
        14, "StoreFull", ("{new}",), "free some space"),
    Row("a full disk", full_disk, f"{PUT} ddddddd2",
        14, "StoreFull", ("ddddddd2",), "free the disk"),
    Row("a full disk that shows when it is written to", full_disk_unforeseen, f"{PUT} ddddddd6",
        14, "StoreFull", ("ddddddd6",), "free the disk",
        (JOURNAL, "folder/mounted-tmpfs/blocks/journal.*")),
    # Keys and blocks.
    Row("a key of 0 bytes", nothing, f"{PUT} ''",
        2, "InvalidKey", ("key '' has 0 bytes",), BOUNDS),
    Row("a key of 65 bytes", nothing, f"{PUT} {'cd' * 65}",
        2, "InvalidKey", ("cdcdcdcd", "65 bytes"), BOUNDS),
    Row("a key that is no hex", nothing, f"{PUT} 00zz",
        2, "InvalidKey", ("'00zz'",), "two hex digits a byte"),
    Row("half a digit too few", nothing, f"{PUT} 001",
        2, "InvalidKey", ("'001'", "odd number of digits"), "two hex digits a byte"),
    Row("a parent of one digit", nothing, f"{PUT} dddddddd --parent 0",
        2, "InvalidKey", ("'0'", "odd number of digits"), "two hex digits a byte"),
    Row("a key with 0x", nothing, f"{CLIENT} contains 0x00ff",
        2, "InvalidKey", ("'0x00ff'",), "leave out 0x"),
    Row("a key with blanks", nothing, f"{CLIENT} delete 'dd dd dd dd'",
        2, "InvalidKey", ("'dd dd dd dd'", "blanks"), "two hex digits a byte"),
    Row("a namespace by its id", nothing, f"{GET_DD} --namespace {'ab' * 16}",
        4, "UnknownNamespace", ("ab" * 16, "does not exist"), "kvstore inspect --namespaces"),
    Row("a new namespace named like an id", nothing,
        f"{PUT} dddddddd --create-namespace --namespace {'AB' * 16}",
        2, "UsageError", ("ab" * 16, "by its id"), "@FILE.json"),
    Row("an input in no directory", nothing, f"{CLIENT} put dddddddd -i /nodir/block",
        2, "UsageError", ("/nodir/block", "No such file"), "- for stdin"),
    Row("an output in no directory", nothing, f"{CLIENT} get {{present}} -o /nodir/block",
        1, "FileNotFoundError", ("/nodir/block: No such file",), "check the path"),
    Row("an output on a full disk", full_output, f"{CLIENT} get {{present}} -o {{new}}/block",
        14, "OSError", ("{new}/block: No space left",), "free some space"),
    Row("an output on a full device", nothing, f"{CLIENT} get {{present}} -o /dev/full",
        14, "OSError", ("/dev/full: No space left",), "free some space"),
    Row("a key of 0 bytes on the wire", nothing, frame(b"", b"data"),
        2, "InvalidKey", ("key of 0 bytes",), BOUNDS),
    Row("a key of 65 bytes on the wire", nothing, frame(b"\xcd" * 65, b"data"),
        2, "InvalidKey", ("key of 65 bytes",), BOUNDS),
    Row("keys of two lengths in a batch", nothing, mixed_batch,
        2, "InvalidKey", ("4 bytes", "dddddddddd", "5 bytes"), "keys of one length"),
    Row("keys of two lengths in a command", nothing, f"{CLIENT} contains dddddddd dddddddddd",
        2, "InvalidKey", ("4 bytes", "dddddddddd", "5 bytes"), "keys of one length"),
    Row("a key of another length than the namespace has", nothing, f"{PUT} dddddddddd",
        2, "InvalidKey", ("dddddddddd", "5 bytes", "have 4"), "another namespace"),
    Row("a block of 0 bytes", input_of(0), f"{PUT} ddddddd3",
        2, "InvalidKey", ("ddddddd3", "0 bytes"), "1 to 67108864 bytes"),
    Row("a block of 0 bytes on the wire", nothing, frame(b"\xdd" * 4, b""),
        2, "InvalidKey", ("dddddddd", "0 bytes"), "1 to 67108864 bytes"),
    Row("a block over 64 MiB", input_of((64 << 20) + 1), f"{PUT} ddddddd4",
        2, "InvalidKey", ("ddddddd4", "67108864 bytes"), "1 to 67108864 bytes"),
    Row("a block over 64 MiB on the wire", nothing, frame(b"\xdd" * 4, b"", (64 << 20) + 1),
        1, "ProtocolError", ("67108865",), "at most"),
    Row("a block over a quarter of the capacity", input_of(17 << 20), f"{PUT} ddddddd5",
        2, "InvalidKey", ("ddddddd5", "17825792 bytes"), "raise capacity"),
    Row("another length under the same key", nothing, f"{PUT} {{present}}",
        1, "KeyConflict", ("{present}", "another length"), "delete it first"),
    Row("an unknown namespace", nothing, f"{GET_DD} --namespace llama",
        4, "UnknownNamespace", ("'llama'",), "check its record"),
    Row("an unknown namespace to put into", nothing, f"{PUT} dddddddd --namespace llama",
        4, "UnknownNamespace", ("'llama'",), "--create-namespace"),
    # Block files.
    Row("a file that was truncated", truncated, GET,
        4, "NotFound", ("{key}",), PUT_IT, (FILE, JOURNAL, MANIFEST, COPY)),
    Row("a file that was emptied", emptied, GET,
        4, "NotFound", ("{key}",), PUT_IT, (FILE, JOURNAL, MANIFEST)),
    Row("a file that was removed", removed, GET,
        4, "NotFound", ("{key}",), PUT_IT, (JOURNAL,)),
    Row("a file replaced by a directory", a_directory_instead, GET,
        4, "NotFound", ("{key}",), PUT_IT, (JOURNAL, MANIFEST)),
    Row("a file replaced by a link", a_link_instead, GET,
        4, "NotFound", ("{key}",), PUT_IT, (FILE, JOURNAL, MANIFEST)),
    Row("a file swapped with another", swapped, GET,
        4, "NotFound", ("{key}",), PUT_IT, (FILE, JOURNAL)),
]  # fmt: skip


# -- the test -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Served]]:
    """The daemon of all rows, if it runs: one that ended is not used again."""
    running: list[Served] = []
    yield running
    for served in running:
        served.kill()


@pytest.fixture
def scene(
    shared: list[Served], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    if not shared or shared[-1].ended:
        shared.append(Served(Daemon(tmp_path_factory.mktemp("served"), OPTIONS)))
        shared[-1].start()
    folder = tmp_path / "beside"
    folder.mkdir()
    (folder / "input").write_bytes(b"data")
    with contextlib.ExitStack() as stack:
        yield Scene(shared[-1], folder, stack, places(shared[-1], folder))


@pytest.mark.parametrize("row", ROWS, ids=[row.condition for row in ROWS])
def test_bad_input_is_refused_by_name_and_changes_nothing_else(scene: Scene, row: Row) -> None:
    row.prepare(scene)
    before = scene.snapshot()
    told = ask(scene, row.asking)
    assert (told.code, told.error) == (row.code, row.error), told
    for name in row.names:
        assert name.format(**scene.values) in told.message
    assert row.hint.format(**scene.values) in told.hint
    expected = [pattern.format(**scene.values) for pattern in row.changes]
    settle(scene, before, expected)
    scene.repair()
    before = scene.snapshot()
    scene.served.check()
    settle(scene, before, [])


def settle(scene: Scene, before: Mapping[str, str], expected: list[str]) -> None:
    """Wait until what changed is what should have; work that nobody waits for may come late."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        found = changed(before, scene.snapshot())
        strange = {n for n in found if not any(fnmatchcase(n, pattern) for pattern in expected)}
        absent = [p for p in expected if not any(fnmatchcase(n, p) for n in found)]
        if not strange and not absent:
            return
        assert time.monotonic() < deadline, (strange, absent)
        time.sleep(0.05)

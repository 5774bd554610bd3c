"""``kvstore migrate SRC DST`` between stores."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore.commands.merging import told_apart
from kvstore.errors import (
    ConfigError,
    CorruptStore,
    StoreExists,
    StoreFull,
    StoreLocked,
    StoreNotFound,
)
from kvstore.events import Kind
from kvstore.importers.store import StoreSource
from kvstore.merge import Merge, Merged, make
from tests.migrating import Held, Local, block, fill, holding, key

MIB = 1 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("merge") / "source"
    fill(path, "filesystem", 40, capacity=256 * MIB)
    return path


def bring(source: Path, target: Path, told: Callable[[int], None] = lambda _: None) -> Merged:
    origin = StoreSource(source)
    try:
        return Merge(origin, origin.listing(), target, min_free=0).run(told)
    finally:
        origin.close()


def content(held: dict[tuple[bytes, int, bytes], Held]) -> dict[object, object]:
    """Return what comes along of each block; a new version has another generation and time."""
    return {
        name: (one.parent, one.label, one.payload, one.pin and (one.pin[0] // 10**8, one.pin[1]))
        for name, one in held.items()
    }


@pytest.mark.parametrize("engine", ["sqlite", "superblock"])
def test_a_new_store_gets_everything(source: Path, tmp_path: Path, engine: str) -> None:
    target = tmp_path / "target"
    assert make(target, engine, 256 * MIB, merge=False)
    merged = bring(source, target)
    there, order = holding(source)
    blocks = sum(one.kind == Kind.PUT for one in there.values())
    assert (merged.copied, merged.present, merged.left) == (blocks, 0, [])
    copied, order_copied = holding(target)
    assert content(copied) == content(there)
    assert order_copied == order
    again = bring(source, target)
    assert (again.copied, again.present) == (0, blocks)
    assert holding(target) == (copied, order_copied)
    assert holding(source) == (there, order)


def test_merging_keeps_what_is_there(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    local = Local(target, capacity=256 * MIB)
    local.put([key(1)], [block(1, 700)])
    local.put([key(2)], [b"of another length"])
    local.put([key(1000)], [block(1000)])
    local.stop()
    merged = bring(source, target)
    assert merged.present == 1
    assert [(one.key, one.reason) for one in merged.left] == [
        (key(2).hex(), "a block of another length has this key")
    ]
    local = Local(target, capacity=None)
    assert local.get([key(2), key(4), key(1000)]) == [
        b"of another length",
        block(4, 65536),
        block(1000),
    ]
    local.stop()


def test_damaged_blocks_of_the_source_are_left(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "source"
    shutil.copytree(source, path)
    (file,) = (path / "blocks").rglob(f"*-{key(10).hex()}.*")
    file.write_bytes(file.read_bytes()[:-4096])
    make(tmp_path / "target", None, 256 * MIB, merge=False)
    merged = bring(path, tmp_path / "target")
    assert [one.key for one in merged.left] == [key(10).hex()]


def test_private_namespaces_keep_their_owner(tmp_path: Path) -> None:
    path = tmp_path / "source"
    local = Local(path, capacity=64 * MIB)
    local.namespace = local.core.namespaces.open({"name": "p", "private": 1}, True, owner=4321)
    local.put([key(1)], [block(1)])
    local.stop()
    make(tmp_path / "target", None, 64 * MIB, merge=False)
    assert bring(path, tmp_path / "target").copied == 1
    local = Local(tmp_path / "target", capacity=None)
    assert [one.owner for one in local.core.namespaces if one.owner] == [4321]
    local.stop()


def test_ctrl_c_leaves_what_is_there(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.merge.BATCH_BLOCKS", 4)
    make(tmp_path / "target", None, 256 * MIB, merge=False)
    calls = 0

    def told(_: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt

    first = bring(source, tmp_path / "target", told)
    assert first.interrupted
    assert 0 < first.copied < first.blocks
    second = bring(source, tmp_path / "target")
    assert (second.present, second.copied) == (first.copied, first.blocks - first.copied)
    assert content(holding(tmp_path / "target")[0]) == content(holding(source)[0])


def test_what_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreExists, match="--merge"):
        make(source, None, None, merge=False)
    with pytest.raises(StoreNotFound):
        StoreSource(tmp_path / "nothing").listing()
    with pytest.raises(ConfigError, match="filesystem, not lmdb"):
        StoreSource(source, engine="lmdb").listing()
    large = tmp_path / "large"
    local = Local(large, capacity=256 * MIB)
    with pytest.raises(StoreLocked):
        StoreSource(large).listing()
    for n in range(80):
        local.put([key(n)], [np.random.default_rng(n).bytes(MIB)])
    local.stop()
    make(tmp_path / "target", None, 64 * MIB, merge=False)
    with pytest.raises(StoreFull, match="has room for"):
        bring(large, tmp_path / "target")
    for journal in (large / "blocks").glob("journal.*"):
        journal.write_bytes(b"")
    with pytest.raises(CorruptStore, match="is not known"):
        StoreSource(large).listing()


def test_names_before_a_colon() -> None:
    assert told_apart("lmdb:/a/b") == ("lmdb", Path("/a/b"))
    assert told_apart("vllm-fs:kv") == ("vllm-fs", Path("kv"))
    assert told_apart("mmap:kv") == ("mmap", Path("kv"))
    assert told_apart("disk:kv") == (None, Path("disk:kv"))
    assert told_apart("./lmdb:kv") == (None, Path("./lmdb:kv"))

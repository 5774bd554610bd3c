"""Raw readers: blocks come back from files whose metadata is gone, whatever the engine."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import layout, salvage
from kvstore.backends import engine_class
from kvstore.backends.base import EngineContext
from kvstore.backends.raw import Extents, Raw, RawFiles, Search
from kvstore.errors import FormatUnsupported
from kvstore.keys import key_array
from kvstore.record import Header, encode, payload_checksum
from tests.damage import copies, manifest
from tests.ruins import (
    COUNT,
    DELETED,
    ENGINES,
    Copies,
    cut,
    look,
    lose_journal,
    name,
    recover,
    value,
    zero,
)
from tests.stores import Local, block

LONG = os.environ.get("PROMISES") == "long"
SEED = int(os.environ.get("SEED", random.randrange(1 << 32)))
ROUNDS = 400 if LONG else 40
ALL = set(range(COUNT)) - {DELETED}


@pytest.fixture(scope="module")
def ruins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copies]:
    folder = tmp_path_factory.mktemp("ruins")
    yield Copies(folder)
    shutil.rmtree(folder)


# -- metadata that is gone ------------------------------------------------------------------------


def _superblocks(path: Path) -> list[Path]:
    return sorted((path / "blocks/super").glob("*.sb"))


def _headers_gone(path: Path) -> None:
    for file in _superblocks(path):
        zero(file)
        zero(file, file.stat().st_size - 4096)


def _names_gone(path: Path) -> None:
    for number, file in enumerate(sorted((path / "blocks").rglob("*.kvb"))):
        file.rename(path / "blocks" / f"file-{number}")


def _misnamed(path: Path) -> None:
    """Swap files, as a wrong repair would."""
    files = sorted((path / "blocks").rglob("*.kvb"))
    for one, other in zip(files[::2], files[1::2], strict=False):
        one.rename(path / "x")
        other.rename(one)
        (path / "x").rename(other)


def _metas_gone(path: Path) -> None:
    zero(path / "blocks/lmdb/data.mdb", 0, 8192)


def _one_meta_gone(path: Path) -> None:
    zero(path / "blocks/lmdb/data.mdb")


def _current_gone(path: Path) -> None:
    (path / "blocks/leveldb/CURRENT").unlink()


def _manifest_gone(path: Path) -> None:
    (file,) = (path / "blocks/leveldb").glob("MANIFEST-*")
    file.unlink()


def _footers_gone(path: Path) -> None:
    _current_gone(path)
    for file in (path / "blocks/leveldb").glob("*.ldb"):
        cut(file, file.stat().st_size - 48)


def _first_page_gone(path: Path) -> None:
    zero(path / "blocks/sqlite/store.db", 0, 65536)


LOSSES: list[tuple[str, Callable[[Path], None]]] = [
    *((engine, lose_journal) for engine in ENGINES),
    ("filesystem", _names_gone),
    ("filesystem", _misnamed),
    ("superblock", _headers_gone),
    ("lmdb", _metas_gone),
    ("lmdb", _one_meta_gone),
    ("leveldb", _current_gone),
    ("leveldb", _manifest_gone),
    ("leveldb", _footers_gone),
    ("sqlite", _first_page_gone),
]


def case(value: object) -> str:
    return getattr(value, "__name__", str(value)).strip("_")


@pytest.mark.parametrize("kill", [False, True], ids=["stopped", "killed"])
@pytest.mark.parametrize(("engine", "lose"), LOSSES, ids=case)
def test_all_blocks_come_back(
    tmp_path: Path, ruins: Copies, engine: str, lose: Callable[[Path], None], kill: bool
) -> None:
    path = ruins.copy(engine, tmp_path / "store", kill=kill)
    lose(path)
    survey = recover(path, tmp_path / "new")
    assert (len(survey.kept), survey.damaged, survey.lost) == (len(ALL), [], [])
    assert look(tmp_path / "new").there == ALL
    assert len(recover(path).kept) == len(ALL)
    assert look(path).there == ALL
    again = recover(path)
    assert (len(again.kept), again.damaged, again.lost) == (len(ALL), [], [])


@pytest.mark.parametrize("lost", ["gone", "damaged", "with the journal"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_store_without_its_marker_is_known_by_its_files(
    tmp_path: Path, ruins: Copies, engine: str, lost: str
) -> None:
    path = ruins.copy(engine, tmp_path / "store")
    before = layout.read(path)
    if lost == "damaged":
        (path / "STORE.json").write_text("{")
    else:
        (path / "STORE.json").unlink()
    if lost == "with the journal":
        lose_journal(path)
        shutil.rmtree(path / "namespaces")
    survey = recover(path)
    after = layout.read(path)
    assert not survey.known
    assert (after.uuid, after.engine) == (before.uuid, before.engine)
    assert after.engine_options == before.engine_options
    assert after.epoch > before.epoch or lost == "with the journal"
    assert after.opens >= before.opens
    assert look(path).there == ALL


@pytest.mark.parametrize("engine", ["filesystem", "superblock", "lmdb"])
def test_a_marker_with_a_wrong_field_is_not_believed(
    tmp_path: Path, ruins: Copies, engine: str
) -> None:
    """STORE.json has no checksum, so any byte of it may have become another."""
    path = ruins.copy(engine, tmp_path / "store")
    good = layout.read(path)
    data = (path / "STORE.json").read_bytes()
    for offset in range(0, len(data), 1 if LONG else 11):
        spoiled = bytearray(data)
        spoiled[offset] ^= 1 << offset % 7
        (path / "STORE.json").write_bytes(spoiled)
        try:
            with salvage.survey(path) as survey:
                found = survey.record
        except FormatUnsupported:
            continue
        told = bytes(spoiled[max(0, offset - 20) : offset + 20])
        assert len(survey.kept) == len(ALL), told
        assert (found.uuid, found.engine) == (good.uuid, good.engine), told
        assert found.blocks == good.blocks, told
        assert found.engine_options.keys() == good.engine_options.keys(), told
        assert found.opens >= good.opens or survey.history.complete is False, told


@pytest.mark.parametrize("engine", ENGINES)
def test_order_of_use_chains_and_pins_are_kept(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "store"
    local = Local(path, engine=engine)
    names = [name(n) for n in range(6)]
    local.put(names, [value(n) for n in range(6)], chain=True)
    # Its parent is not there: only a ghost ties them together.
    local.put([name(9)], [value(9)], parent=name(8), shard=3, label="a label")
    local.get([name(1)])
    local.store.pin(local.namespace, 0, key_array(names[:2]), 3000.0, firm=True)
    local.store.pin(local.namespace, 0, key_array(names[2:3]), 3000.0)
    local.stop()
    before = _remembered(path)
    assert len(before[0]) == 7
    assert len(before[2]) == 3
    for new in (tmp_path / "new", None):
        recover(path, new)
        assert _remembered(new or path) == before
        local = Local(new or path)
        assert local.get([name(9)], shard=3) == [value(9)]
        local.stop()
    lose_journal(path)
    recover(path)
    assert _remembered(path)[1] == before[1]


def _remembered(path: Path) -> tuple[Any, Any, Any]:
    """Return blocks in the order of their use, their parents, their pins."""
    found = layout.read(path)
    history = salvage.History(path / found.blocks, found.uuid, found.epoch, found.opens)
    assert history.complete
    blocks = [one for one in history.at if history.live(one) is not None]
    parents = {one: history.parent(one) for one in history.at}
    return sorted(blocks, key=history.stamp), parents, sorted(history.pins())


@pytest.mark.parametrize("engine", ENGINES)
def test_of_several_versions_the_newest_counts(tmp_path: Path, engine: str) -> None:
    path, newer = tmp_path / "store", block(77, len(value(1)))
    local = Local(path, engine=engine)
    local.put([name(1), name(2)], [value(1), value(2)])
    local.store.run(local.begin_put([name(1)], [newer], overwrite=True))
    local.kill()
    lose_journal(path)
    survey = recover(path, tmp_path / "new")
    assert len(survey.kept) == 2
    local = Local(tmp_path / "new")
    assert local.get([name(1), name(2)]) == [newer, value(2)]
    local.stop()


# -- damaged records ------------------------------------------------------------------------------


def _extents(path: Path) -> dict[int, Raw]:
    """Return where the record of each block lies."""
    found = layout.read(path)
    context = EngineContext(path / "blocks", found.uuid, found.engine_options, True)
    reader = engine_class(found.engine).salvage(context)
    numbers = {name(n): n for n in range(COUNT)}
    raws = [one for one in reader.find() if isinstance(one, Raw)]
    reader.close()
    return {numbers[raw.header.key]: raw for raw in raws if not reader.buried(raw.header)}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_damaged_record_is_quarantined_and_named(
    tmp_path: Path, ruins: Copies, engine: str
) -> None:
    path = ruins.copy(engine, tmp_path / "store")
    extent = _extents(path)[4].pieces[0][0][-1]
    files = RawFiles(path / "blocks")
    zero(path / "blocks" / files.paths[extent.file], extent.offset + 100, 1)
    for new in (tmp_path / "new", None):
        survey = recover(path, new)
        assert [one.identity and one.identity[2] for one in survey.damaged] == [name(4)]
        assert "checksum" in survey.damaged[0].reason
        (line,) = manifest(new or path)
        assert line["key"] == name(4).hex()
        assert line["path"] == files.paths[extent.file]
        in_place_copy = engine in ("filesystem", "superblock")
        assert len(copies(new or path)) == (new is not None or in_place_copy)
        assert look(new or path).there == ALL - {4}
    assert recover(path).damaged == []
    kept = list((path / "quarantine").glob("blocks.1/*"))
    assert bool(kept) is (engine not in ("filesystem", "superblock"))


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_gone_is_named_lost(tmp_path: Path, ruins: Copies, engine: str) -> None:
    path = ruins.copy(engine, tmp_path / "store")
    raw = _extents(path)[4]
    files = RawFiles(path / "blocks")
    for copies_of in raw.pieces:
        extent = copies_of[0][0]
        before = 4096 if raw.whole else len(raw.head) + 4
        zero(path / "blocks" / files.paths[extent.file], extent.offset - before, before)
    zero_headers(path, raw)
    survey = recover(path, tmp_path / "new")
    # Names of files tell what was in them.
    damaged = [one.identity for one in survey.damaged if one.identity]
    assert [one[2] for one in (*survey.lost, *damaged)] == [name(4)]
    assert len(damaged) == (engine == "filesystem")
    assert look(tmp_path / "new").there == ALL - {4}


def zero_headers(path: Path, raw: Raw) -> None:
    """Zero every other copy of a record's envelope."""
    for file in (path / "blocks").rglob("*"):
        if file.is_file() and not file.name.startswith(("journal", "checkpoint")):
            data = file.read_bytes()
            if raw.head in data:
                file.write_bytes(data.replace(raw.head, bytes(len(raw.head))))


def test_a_file_that_was_cut_costs_what_lay_behind(tmp_path: Path, ruins: Copies) -> None:
    for engine, file in (("lmdb", "lmdb/data.mdb"), ("sqlite", "sqlite/store.db")):
        path = ruins.copy(engine, tmp_path / engine)
        target = path / "blocks" / file
        size = target.stat().st_size // 2 // 65536 * 65536
        found = _extents(path)
        cut(target, size)
        behind = {
            n
            for n, raw in found.items()
            if not all(any(_before(copy, size) for copy in piece) for piece in raw.pieces)
        }
        assert 0 < len(behind) < len(ALL)
        survey = recover(path, tmp_path / f"{engine}-new")
        assert len(survey.kept) == len(ALL - behind)
        assert look(tmp_path / f"{engine}-new").there == ALL - behind


def _before(copy: Extents, size: int) -> bool:
    return all(extent.offset + extent.length <= size for extent in copy)


def test_payloads_that_look_like_records_are_not_taken_for_some(tmp_path: Path) -> None:
    """A client may store what looks like another block of the same store."""
    for engine in ENGINES:
        path = tmp_path / engine
        local = Local(path, engine=engine)
        forged = b"wrong bytes"
        header = Header(
            store=local.core.uuid, namespace=local.namespace.id, shard=0, key=name(1), parent=b"",
            generation=(1 << 32) + 999, written_ns=1, logical_length=len(forged),
            stored_length=len(forged), checksum=payload_checksum(forged),
        )  # fmt: skip
        head = encode(header)
        image = head.ljust(4096, b"\0") + forged.ljust(4096, b"\0")
        bait = image * 3 + (head + bytes(4) + forged) * 3
        local.put([name(1), name(2)], [value(1), bait * 40])
        local.stop()
        lose_journal(path)
        recover(path, tmp_path / f"{engine}-new")
        local = Local(tmp_path / f"{engine}-new")
        assert local.get([name(1), name(2)]) == [value(1), bait * 40]
        local.stop()


# -- parts ----------------------------------------------------------------------------------------


def test_envelopes_are_found_wherever_windows_begin_and_end() -> None:
    payload = b"x" * 200
    head = encode(
        Header(
            store=bytes(16),
            namespace=bytes(16),
            shard=0,
            key=b"k",
            parent=b"",
            generation=1,
            written_ns=1,
            logical_length=200,
            stored_length=200,
            checksum=payload_checksum(payload),
        )
    )
    for shift in (0, 1, 31, 32, 33, 4095, 4096, 4097):
        data = bytearray((4 << 20) * 2 + 5000)
        spots = [0, (4 << 20) - shift, (4 << 20) - 4096 - shift, len(data) - len(head)]
        for spot in spots:
            data[spot : spot + len(head)] = head
        stream = bytes(data)
        assert [hit.at for hit in _search(stream)] == sorted(spots)


def _search(stream: bytes) -> Search:
    return Search(lambda at, size: stream[at : at + size], len(stream))


def test_a_search_ends_where_nothing_can_be_read() -> None:
    assert list(Search(lambda _at, _size: b"", 1 << 30)) == []
    assert list(Search(lambda at, size: bytes(min(size, max(0, 100 - at))), 1 << 30)) == []


def test_a_page_that_the_device_refuses_costs_itself_only(
    tmp_path: Path, ruins: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ruins.copy("superblock", tmp_path / "store")
    raw = _extents(path)[4]
    bad = raw.pieces[0][0][0].offset
    bad_path, real = RawFiles(path / "blocks").paths[raw.pieces[0][0][0].file], os.preadv

    def refuse(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        size = sum(map(len, buffers))
        at = os.readlink(f"/proc/self/fd/{descriptor}")
        if at.endswith(bad_path) and offset < bad + 4096 and offset + size > bad:
            raise OSError(5, "Input/output error")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse)
    with salvage.survey(path) as survey:
        assert {one.identity and one.identity[2] for one in survey.damaged} == {name(4)}
        assert len(survey.kept) == len(ALL) - 1
        assert any("device" in problem for problem in survey.problems)


# -- any damage -----------------------------------------------------------------------------------


def _damage(generator: random.Random, path: Path) -> tuple[str, int, int]:
    """Do some damage; return the file, relative to blocks, and the range that it may have hit."""
    files = [
        file for file in sorted(path.rglob("*")) if file.is_file() and file.name not in ("lock",)
    ]
    file = generator.choice(files)
    size = file.stat().st_size
    place = os.path.relpath(file, path / "blocks")
    how = generator.choice(["zero", "noise", "flip", "flip", "cut", "gone"])
    at = generator.randrange(max(size, 1))
    with file.open("r+b") as opened:
        if how == "cut":
            opened.truncate(at)
            return place, at, size
        if how in ("zero", "noise"):
            at, length = at // 4096 * 4096, min(4096, size - at // 4096 * 4096)
            data = bytes(length) if how == "zero" else generator.randbytes(length)
        elif how == "flip":
            opened.seek(at)
            length, data = 1, bytes([(opened.read(1) or b"\0")[0] ^ 1 << generator.randrange(8)])
        else:
            file.unlink()
            return place, 0, size
        opened.seek(at)
        opened.write(data[: max(size - at, 0)])
    return place, at, at + length


def _hit(raw: Raw, files: RawFiles, place: str, start: int, stop: int) -> bool:
    """Tell whether a range of a file touches a record or what leads to it."""
    margin = 4096 if raw.whole else len(raw.head) + 64
    return any(
        files.paths[extent.file] == place
        and extent.offset - margin < stop
        and extent.offset + extent.length > start
        for copies_of in raw.pieces
        for extent in copies_of[0]
    )


@pytest.mark.timeout(7200 if LONG else 300)
@pytest.mark.parametrize("engine", ENGINES)
def test_any_damage_costs_what_it_hit_and_nothing_else(
    tmp_path: Path, ruins: Copies, engine: str
) -> None:
    generator = random.Random(f"{SEED}-{engine}")
    for turn in range(ROUNDS):
        path, new = tmp_path / "store", tmp_path / "new"
        ruins.copy(engine, path, kill=bool(turn % 2))
        extents, files = _extents(path), RawFiles(path / "blocks")
        place, start, stop = _damage(generator, path)
        told = f"SEED={SEED}, {engine}, turn {turn}: {place} from {start} to {stop}"
        try:
            survey = recover(path, new if generator.random() < 0.5 else None)
            back = look(new if new.exists() else path)
        except FormatUnsupported:
            # One flipped digit of "format": nobody can know what a newer one means.
            assert place == "../STORE.json", told
            shutil.rmtree(path)
            continue
        except BaseException as error:
            raise AssertionError(told) from error
        safe = {n for n, raw in extents.items() if not _hit(raw, files, place, start, stop)}
        assert safe <= back.there, told
        assert DELETED not in back.there or place.startswith("journal"), told
        assert len(survey.kept) == len(back.there), told
        shutil.rmtree(path)
        shutil.rmtree(new, ignore_errors=True)

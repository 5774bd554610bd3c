"""Namespaces: their files, the length of their keys, and what damage leaves usable."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from kvstore import namespaces
from kvstore.errors import (
    CorruptStore,
    EngineError,
    InvalidKey,
    ReadOnly,
    StoreFull,
    UnknownNamespace,
)
from kvstore.keys import MAX_NAMESPACES, named, namespace_id
from kvstore.namespaces import Namespaces

GOLDEN = Path(__file__).parent / "golden"
RECORD: dict[str, object] = {
    "model": "Modèle-7B ☃",
    "dtype": "bfloat16",
    "tokens_per_block": 16,
    "groups": [{"bytes": 65536, "kind": "full"}],
}
DEFAULT = namespace_id(named("default"))


@pytest.fixture
def found(tmp_path: Path) -> Namespaces:
    return loaded(tmp_path)


def loaded(directory: Path, read_only: bool = False) -> Namespaces:
    made = Namespaces(directory, read_only)
    made.load()
    return made


def path_of(directory: Path, identity: bytes) -> Path:
    return directory / f"{identity.hex()}.json"


# -- files ----------------------------------------------------------------------------------------


def test_the_golden_file_says_what_was_written_and_is_written_again() -> None:
    (path,) = GOLDEN.glob("????????????????????????????????.json")
    identity = bytes.fromhex(path.stem)
    assert namespaces.decode(path.read_bytes(), identity) == (RECORD, 36)
    assert namespaces.encode(RECORD, 36) == path.read_bytes()
    assert namespace_id(RECORD) == identity


def test_a_namespace_is_found_again_with_its_key_length(found: Namespaces, tmp_path: Path) -> None:
    made = found.open(RECORD, create=True)
    assert (made.id, made.record, made.key_length) == (namespace_id(RECORD), RECORD, None)
    assert found.open(RECORD, create=False) is made
    assert found.by_id(made.id) is found.by_number(made.number) is found.known(made.id) is made
    found.set_key_length(made, 36)
    again = loaded(tmp_path).open(RECORD, create=False)
    assert (again.record, again.key_length) == (RECORD, 36)
    assert path_of(tmp_path, made.id).stat().st_mode & 0o777 == 0o600


def test_an_unknown_one_is_made_only_on_request(found: Namespaces, tmp_path: Path) -> None:
    with pytest.raises(UnknownNamespace, match=namespace_id(RECORD).hex()):
        found.open(RECORD, create=False)
    assert found.by_id(namespace_id(RECORD)) is None
    assert list(tmp_path.iterdir()) == []


def test_the_default_namespace_is_always_there(found: Namespaces, tmp_path: Path) -> None:
    default = found.by_id(DEFAULT)
    assert default is not None
    assert default.record == {"name": "default"}
    assert list(tmp_path.iterdir()) == []
    found.set_key_length(default, 8)
    again = loaded(tmp_path).by_id(DEFAULT)
    assert again is not None
    assert again.key_length == 8


def test_numbers_are_distinct_and_only_for_this_process(found: Namespaces) -> None:
    made = [found.open({"name": str(number)}, create=True) for number in range(20)]
    assert len({namespace.number for namespace in made}) == 20
    assert len(found) == 21
    assert {namespace.id for namespace in found} == {*(item.id for item in made), DEFAULT}


def test_a_file_is_durable_before_anyone_may_use_the_namespace(
    found: Namespaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        assert found.by_id(namespace_id(RECORD)) is None
        steps.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    found.open(RECORD, create=True)
    assert len(steps) == 2
    assert steps[0] == f"{namespace_id(RECORD).hex()}.json.new"


def test_a_namespace_that_cannot_be_written_is_not_made(
    found: Namespaces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StoreFull):
        found.open(RECORD, create=True)
    assert found.by_id(namespace_id(RECORD)) is None
    assert list(tmp_path.iterdir()) == []


def test_at_most_so_many_are_made(tmp_path: Path) -> None:
    for number in range(MAX_NAMESPACES - 1):
        record = {"name": str(number)}
        path_of(tmp_path, namespace_id(record)).write_bytes(namespaces.encode(record, None))
    found = loaded(tmp_path)
    assert len(found) == MAX_NAMESPACES
    with pytest.raises(StoreFull, match="1024"):
        found.open(RECORD, create=True)
    assert found.open({"name": "7"}, create=True).record == {"name": "7"}


def test_a_record_without_canonical_form_is_refused(found: Namespaces) -> None:
    with pytest.raises(InvalidKey):
        found.open({"rope": 1.5}, create=True)


# -- key length -----------------------------------------------------------------------------------


def test_another_key_length_is_refused_until_it_is_forgotten(
    found: Namespaces, tmp_path: Path
) -> None:
    made = found.open(RECORD, create=True)
    found.set_key_length(made, 32)
    found.set_key_length(made, 32)
    with pytest.raises(InvalidKey, match=r"36 bytes.*have 32") as caught:
        found.set_key_length(made, 36)
    assert caught.value.exit_code == 2
    found.forget(made)
    assert loaded(tmp_path).open(RECORD, create=False).key_length is None
    found.forget(made)
    found.set_key_length(made, 36)
    assert loaded(tmp_path).open(RECORD, create=False).key_length == 36


def test_the_same_key_length_costs_no_write(
    found: Namespaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = found.open(RECORD, create=True)
    found.set_key_length(made, 32)
    monkeypatch.setattr(os, "open", None)
    found.set_key_length(made, 32)


def test_a_length_that_cannot_be_written_is_not_fixed(
    found: Namespaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = found.open(RECORD, create=True)

    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(EngineError):
        found.set_key_length(made, 32)
    assert made.key_length is None


def test_of_two_first_puts_at_once_one_fixes_the_length(found: Namespaces) -> None:
    made = found.open(RECORD, create=True)
    refused = []

    def put(length: int) -> None:
        try:
            found.set_key_length(made, length)
        except InvalidKey:
            refused.append(length)

    threads = [threading.Thread(target=put, args=(length,)) for length in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7
    assert made.key_length not in refused


# -- damage ---------------------------------------------------------------------------------------

GOOD = namespaces.encode(RECORD, 36)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"[" * 60_000,
        b'{"record": "text", "key_length": 1}',
        GOOD[:-10],
        GOOD.replace(b"7B", b"8B"),
        GOOD.replace(b": 36", b": 0"),
        GOOD.replace(b": 36", b": 65"),
        GOOD.replace(b": 36", b": true"),
        GOOD.replace(b": 36", b": 36.0"),
        GOOD.replace(b'"key_length"', b'"key_lengths"'),
        GOOD.replace(b"bfloat16", b"\\ud800"),
        GOOD.replace(b"16,", b"1.5,").replace(b"16\n", b"1.5\n"),
        b" " * 200_000,
    ],
)
def test_a_damaged_file_is_reported_and_its_blocks_are_kept_but_not_served(
    data: bytes, tmp_path: Path
) -> None:
    identity = namespace_id(RECORD)
    path_of(tmp_path, identity).write_bytes(data)
    found = loaded(tmp_path)
    assert len(found.problems) == 1
    assert str(path_of(tmp_path, identity)) in found.problems[0]
    assert found.by_id(identity) is None
    assert found.known(identity).record is None
    assert len(found) == 1
    assert path_of(tmp_path, identity).read_bytes() == data
    # Whoever has the whole record brings it back.
    number = found.known(identity).number
    opened = found.open(RECORD, create=False)
    assert (opened.number, opened.record) == (number, RECORD)
    assert loaded(tmp_path).problems == []


@pytest.mark.parametrize("kind", ["directory", "pipe", "link"])
def test_what_is_no_file_is_damage(kind: str, tmp_path: Path) -> None:
    path = path_of(tmp_path, namespace_id(RECORD))
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        (tmp_path / "elsewhere").write_bytes(GOOD)
        path.symlink_to(tmp_path / "elsewhere")
    assert len(loaded(tmp_path).problems) == 1


def test_a_damaged_default_can_still_be_used(tmp_path: Path) -> None:
    path_of(tmp_path, DEFAULT).write_bytes(b"damaged")
    found = loaded(tmp_path)
    assert len(found.problems) == 1
    default = found.by_id(DEFAULT)
    assert default is not None
    found.set_key_length(default, 4)
    assert loaded(tmp_path).problems == []


def test_other_files_are_passed_over(tmp_path: Path) -> None:
    identity = namespace_id(RECORD).hex()
    for name in ("README", f"{identity}.json.new", f"{identity.upper()}.json", "00.json", ".json"):
        (tmp_path / name).write_bytes(b"?")
    found = loaded(tmp_path)
    assert (found.problems, len(found)) == ([], 1)


def test_a_directory_that_is_gone_is_made_again_when_needed(tmp_path: Path) -> None:
    found = loaded(tmp_path / "namespaces")
    assert found.problems == [f"{tmp_path / 'namespaces'} is missing"]
    found.open(RECORD, create=True)
    assert loaded(tmp_path / "namespaces").by_id(namespace_id(RECORD)) is not None
    assert (tmp_path / "namespaces").stat().st_mode & 0o777 == 0o700


def test_a_directory_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(EngineError, match="file"):
        loaded(tmp_path / "file")


def test_ids_found_in_records_get_a_number_without_a_file(
    found: Namespaces, tmp_path: Path
) -> None:
    stranger = found.known(bytes(16))
    assert stranger is found.known(bytes(16)) is found.by_number(stranger.number)
    assert found.by_id(bytes(16)) is None
    assert list(tmp_path.iterdir()) == []
    found.set_key_length(stranger, 5)
    assert list(tmp_path.iterdir()) == []


def test_there_are_no_more_numbers_than_fit(found: Namespaces) -> None:
    with pytest.raises(CorruptStore, match="65536"):  # noqa: PT012 - the last of many
        for number in range(70_000):
            found.known(number.to_bytes(16, "little"))
    assert max(number for number in range(65_536) if found.by_number(number)) == 65_535


# -- read only ------------------------------------------------------------------------------------


def test_a_read_only_store_makes_nothing_and_serves_what_is_there(tmp_path: Path) -> None:
    loaded(tmp_path).open(RECORD, create=True)
    path_of(tmp_path, namespace_id({"a": 1})).write_bytes(b"damaged")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    found = loaded(tmp_path, read_only=True)
    opened = found.open(RECORD, create=True)
    for refused in (
        lambda: found.open({"b": 1}, create=True),
        lambda: found.set_key_length(opened, 3),
    ):
        with pytest.raises(ReadOnly):
            refused()
    assert found.open({"a": 1}, create=False).record == {"a": 1}
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_file_is_plain_json(found: Namespaces, tmp_path: Path) -> None:
    made = found.open(RECORD, create=True)
    document = json.loads(path_of(tmp_path, made.id).read_bytes())
    assert document == {"record": RECORD, "key_length": None}

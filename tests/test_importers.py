"""Other systems' directories: what is taken, what is not, and that they are served afterwards."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvstore.commands.documents import LINES
from kvstore.commands.shapes import unlike
from kvstore.errors import ConfigError, NotFound, UsageError
from kvstore.importers import IMPORTERS, check, importer_class
from kvstore.importers.base import Entry, Listing
from kvstore.importers.hicache import parse
from kvstore.importers.vllm_fs import digest_of
from tests.command import Daemon, run_command
from tests.stores import block

CONFIG = {
    "model_name": "org/tiny",
    "tokens_per_hash": 32,
    "blocks_per_file": 1,
    "tp_size": 1,
    "pp_size": 1,
    "pcp_size": 1,
    "dcp_size": 1,
    "dtype": "bfloat16",
    "kv_cache_groups": [{"tokens_per_block": 32, "layer_names": ["a", "b"]}],
    "inference_engine": "vllm",
    "parallel_agnostic": False,
}


def digest(number: int) -> str:
    return hashlib.sha256(b"%d" % number).hexdigest()


def write(path: Path, data: bytes, used: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, (1_700_000_000 + used,) * 2)
    return path


def vllm(root: Path, count: int, size: int = 8192, rank: int = 0) -> list[Path]:
    """Make a directory as vLLM's file tier does, with ``count`` blocks."""
    base = f"org_tiny_{digest_of(CONFIG)}"
    write(root / base / "config.json", json.dumps(CONFIG).encode())
    made = []
    for number in range(count):
        name = digest(number)
        folder = root / f"{base}_r{rank}" / name[:3] / f"{name[3:5]}_g{number % 2}"
        made.append(write(folder / f"{name}.bin", block(number, size), used=number))
    return made


def hicache(root: Path, count: int, suffix: str = "_org-tiny_0_1", size: int = 6000) -> list[Path]:
    return [
        write(root / f"{digest(number)}{suffix}.bin", block(number, size), used=number)
        for number in range(count)
    ]


def lmcache(root: Path, count: int, salt: str = "", size: int = 6000) -> list[Path]:
    name = "org-SEP-tiny@0x02010200@{group:x}@{hash}{salt}.data"
    return [
        write(
            root / name.format(group=number % 2, hash=digest(number), salt=salt),
            block(number, size),
            used=number,
        )
        for number in range(count)
    ]


MAKERS: dict[str, Callable[[Path, int], list[Path]]] = {
    "vllm-fs": vllm,
    "hicache": hicache,
    "lmcache-fs": lmcache,
}


def listing(name: str, root: Path, *, length: int | None = None, **fields: str | int) -> Listing:
    return importer_class(name)(root, fields, length=length).listing()


def kinds(found: Listing) -> list[str]:
    return sorted(one.kind for one in found.findings)


def keys(entries: Sequence[Entry]) -> set[str]:
    return {one.key.hex() for one in entries}


# -- each of them ---------------------------------------------------------------------------------


def test_a_directory_of_vllm(tmp_path: Path) -> None:
    vllm(tmp_path, 6)
    found = listing("vllm-fs", tmp_path, weights="3f2a")
    assert found.findings == []
    assert keys(found.entries) == {digest(n) + f"{n % 2:08x}" for n in range(6)}
    record = dict(found.entries[0].space.record)
    assert record["source"] == "vllm-fs"
    assert record["weights"] == "3f2a"
    assert record["parallel_agnostic"] == 0
    assert record["kv_cache_groups"] == CONFIG["kv_cache_groups"]
    assert [one.used for one in found.entries] == sorted(one.used for one in found.entries)


def test_what_vllm_leaves_is_told_apart(tmp_path: Path) -> None:
    made = vllm(tmp_path, 8)
    os.truncate(made[0], 4096)
    os.truncate(made[1], 4095)
    os.truncate(made[2], 0)
    write(made[3].parent / f"{digest(3)}.bin_123.tmp", b"x")
    base = made[3].parents[3] / f"org_tiny_{digest_of(CONFIG)}"
    write(base / ".o_direct_probe_7.tmp", b"")
    write(made[3].parent / f"{digest(77)}.bin", block(1, 8192))
    (made[4].parent / "notes.txt").write_text("mine")
    made[5].unlink()
    made[5].symlink_to(made[6])
    found = listing("vllm-fs", tmp_path)
    assert kinds(found) == [
        *("empty", "foreign", "foreign", "misplaced"),
        *("temporary", "temporary", "truncated", "truncated"),
    ]
    assert keys(found.entries) == {digest(n) + f"{n % 2:08x}" for n in (3, 4, 6, 7)}
    assert check("vllm-fs", tmp_path) == found.findings


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "missing"),
        (b"", "cannot be read"),
        (b"[]", "no object"),
        (b'{"model_name":"other"}', "another folder"),
    ],
)
def test_a_configuration_that_does_not_fit(
    tmp_path: Path, content: bytes | None, word: str
) -> None:
    made = vllm(tmp_path, 2)
    config = made[0].parents[3] / f"org_tiny_{digest_of(CONFIG)}" / "config.json"
    config.unlink()
    if content is not None:
        config.write_bytes(content)
    found = listing("vllm-fs", tmp_path)
    assert found.entries == []
    assert [one.kind for one in found.findings] == ["config"]
    assert word in found.findings[0].detail


def test_a_directory_of_hicache(tmp_path: Path) -> None:
    hicache(tmp_path, 4, "_org-tiny_1_2")
    hicache(tmp_path, 3, ".mamba_org-tiny_1_2", size=500)
    write(tmp_path / f".{digest(1)[:32]}.tmp", b"x")
    write(tmp_path / f"{digest(9)}_org-tiny.bin", block(1))
    os.truncate(tmp_path / f"{digest(0)}_org-tiny_1_2.bin", 100)
    found = listing("hicache", tmp_path, dtype="bfloat16")
    assert kinds(found) == ["foreign", "temporary", "truncated"]
    records = sorted((dict(one.space.record) for one in found.entries), key=repr)
    assert records[-1] == {
        "source": "hicache", "model": "org-tiny", "tp_size": 2, "dtype": "bfloat16",
    }  # fmt: skip
    assert [one.shard for one in found.entries] == [1] * 6
    assert len({one.space.id for one in found.entries}) == 2


@pytest.mark.parametrize(
    "pool", ["mamba", "auxiliary_swa", "draft", "draft_swa", "deepseek_v4_c4_indexer_scale"]
)
def test_pools_of_hicache(tmp_path: Path, pool: str) -> None:
    hicache(tmp_path, 1, f".{pool}_org_model_0_1")
    (entry,) = listing("hicache", tmp_path).entries
    assert (entry.space.record["pool"], entry.space.record["model"]) == (pool, "org_model")


def test_ranks_beyond_a_shard_are_left(tmp_path: Path) -> None:
    hicache(tmp_path / "a", 1, "_m_70000_70001")
    vllm(tmp_path / "b", 1, rank=70000)
    assert kinds(listing("hicache", tmp_path / "a")) == ["foreign"]
    assert kinds(listing("vllm-fs", tmp_path / "b")) == ["foreign"]


@pytest.mark.parametrize(
    ("rest", "mla", "expected"),
    [
        ("m_0_1", False, ("m", {"tp_rank": 0, "tp_size": 1})),
        ("llama_3_8_0_1", False, ("llama_3_8", {"tp_rank": 0, "tp_size": 1})),
        (
            *("m_1_2_4_3", False),
            ("m", {"tp_rank": 1, "tp_size": 2, "pp_size": 4, "pp_rank": 3}),
        ),
        (
            *("m_0_1_cp1_2", False),
            ("m", {"cp_rank": 1, "cp_size": 2, "tp_rank": 0, "tp_size": 1}),
        ),
        ("m", False, None),
        ("m_2_2", False, None),
        ("m_x_1", True, ("m_x_1", {})),
        (
            *("m_cp0_2_tp8_dcp1_4_page64", False),
            (
                "m",
                {
                    "tp_size": 8,
                    "dcp_rank": 1,
                    "dcp_size": 4,
                    "page": 64,
                    "cp_rank": 0,
                    "cp_size": 2,
                },
            ),
        ),
        ("_0_1", False, ("", {"tp_rank": 0, "tp_size": 1})),
    ],
)
def test_suffixes_of_hicache(
    rest: str, mla: bool, expected: tuple[str, dict[str, int]] | None
) -> None:
    assert parse(rest, mla=mla) == expected


def test_a_directory_of_lmcache(tmp_path: Path) -> None:
    lmcache(tmp_path, 4)
    lmcache(tmp_path, 2, salt="@tenant")
    write(tmp_path / f"org-SEP-tiny@0x02010200@1@{digest(1).upper()}.data", block(1, 6000), used=-9)
    write(tmp_path / f"org-SEP-tiny@0x02010200@{digest(1)}.data", block(1))
    write(tmp_path / f"org-SEP-tiny@2@1@{digest(1)}@bfloat16.data", block(1))
    write(tmp_path / "a.tmp", block(1))
    write(tmp_path / "sub" / f"org-SEP-tiny@0x02010200@0@{digest(8)}.data", block(1))
    found = listing("lmcache-fs", tmp_path)
    assert kinds(found) == ["duplicate", "foreign", "foreign", "foreign", "temporary"]
    plain = [one for one in found.entries if "salted" not in one.space.record]
    salted = [one for one in found.entries if "salted" in one.space.record]
    assert keys(plain) == {digest(n) + f"{n % 2:08x}" for n in range(4)}
    assert {len(one.key) for one in salted} == {52}
    assert dict(plain[0].space.record) == {
        "source": "lmcache-fs", "model": "org/tiny", "world_size": 2, "local_world_size": 2,
    }  # fmt: skip
    assert {one.shard for one in found.entries} == {1}


def test_padded_files_are_cut_to_the_length_of_a_block(tmp_path: Path) -> None:
    lmcache(tmp_path, 3, size=8192)
    os.truncate(tmp_path / f"org-SEP-tiny@0x02010200@0@{digest(0)}.data", 5000)
    found = listing("lmcache-fs", tmp_path, length=6000)
    assert [one.length for one in found.entries] == [6000, 6000]
    assert kinds(found) == ["truncated"]


def test_most_keys_have_the_right_length(tmp_path: Path) -> None:
    lmcache(tmp_path, 3)
    write(tmp_path / f"org-SEP-tiny@0x02010200@0@{digest(5)[:32]}.data", block(1, 6000))
    found = listing("lmcache-fs", tmp_path)
    assert kinds(found) == ["key-length"]
    assert len(found.entries) == 3


def test_unknown_names_and_places(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no importer 'vllm'"):
        check("vllm", tmp_path)
    for name in IMPORTERS:
        with pytest.raises(NotFound):
            check(name, tmp_path / "nothing")
        assert check(name, tmp_path) == []


# -- into a store ---------------------------------------------------------------------------------


def test_directories_are_imported_and_served(daemon: Daemon, tmp_path: Path) -> None:
    assert daemon.stop() == 0
    for name, make in MAKERS.items():
        files = make(tmp_path / name, 12)
        os.truncate(files[11], 4096)
        before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}
        source = f"{name}:{tmp_path / name}"
        call = ["migrate", source, str(daemon.store), "--merge", "--field", "weights=3f2a"]
        ran = run_command(*call, "--json")
        assert ran.code == 3, ran.stderr
        told = ran.json()
        assert (told["copied"], told["present"]) == (11, 0)
        assert [one["kind"] for one in told["findings"]] == ["truncated"]  # type: ignore[attr-defined]
        assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files} == before
    again = run_command(*call, "--json").json()
    assert (again["copied"], again["present"]) == (0, 11)
    daemon.start()
    for name in MAKERS:
        entry = listing(name, tmp_path / name, weights="3f2a").entries[3]
        record = tmp_path / "record.json"
        record.write_text(json.dumps(dict(entry.space.record)))
        where = ["--namespace", f"@{record}", "--shard", str(entry.shard)]
        got = daemon.run("get", entry.key.hex(), *where, "-o", tmp_path / "out")
        assert got.code == 0, got.stderr
        assert (tmp_path / "out").read_bytes() == entry.path.read_bytes()
    told = daemon.run("inspect", entry.key.hex(), *where[2:], "--json").json()
    assert told["envelope"]["label"] == f"origin unverified: {name}"  # type: ignore[index]


def test_the_namespace_may_be_named(tmp_path: Path) -> None:
    root, store = tmp_path / "source", tmp_path / "store"
    hicache(root, 3)
    ran = run_command(
        "migrate",
        f"hicache:{root}",
        f"sqlite:{store}",
        "--namespace",
        "mine",
        "--capacity",
        "64MiB",
    )
    assert ran.code == 0, ran.stderr
    shares = run_command("inspect", store, "--json").json()["namespaces"]
    assert {one["record"]["name"]: one["blocks"] for one in shares}["mine"] == 3  # type: ignore[attr-defined]
    hicache(root, 3, "_other_0_1")
    ran = run_command("migrate", f"hicache:{root}", store, "--merge", "--namespace", "mine")
    assert ran.code == UsageError.exit_code
    assert "2 namespaces" in ran.stderr


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_fsck_of_a_directory(tmp_path: Path, name: str) -> None:
    made = MAKERS[name](tmp_path, 6)
    where = f"{name}:{tmp_path}"
    ran = run_command("fsck", where)
    assert (ran.code, ran.text) == (0, f"{tmp_path}: clean: 0 findings\n")
    os.truncate(made[2], 100)
    ran = run_command("fsck", where, "--json")
    assert ran.code == 5
    finding, summary = (json.loads(line) for line in ran.text.splitlines())
    assert [unlike(finding, LINES["fsck IMPORTER:DIR"][0])] == [[]]
    assert (finding["id"], finding["path"]) == ("truncated", str(made[2]))
    assert unlike(summary, LINES["fsck IMPORTER:DIR"][1]) == []
    assert run_command("fsck", where, "--repair").code == 2

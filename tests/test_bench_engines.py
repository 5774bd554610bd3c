"""``kvstore bench engines`` measures right blocks, and stops at wrong ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.backends.superblock import SuperblockEngine
from kvstore.bench import engines as bench
from kvstore.bench import figures
from kvstore.bench.figures import COLD, DURABLE, PUT, WARM
from kvstore.errors import ConfigError, UsageError
from tests.command import COMMAND, run_command

MIB = 1 << 20


def plan(tmp_path: Path, **changes: Any) -> bench.Plan:
    values = {"engines": ["superblock"], "sizes": [69_632], "data_bytes": 2 * MIB, "rounds": 2}
    return bench.Plan(**{**values, **changes}, directory=tmp_path / "demo")


def test_every_engine_is_measured_beside_copy_and_reference(tmp_path: Path) -> None:
    ran = run_command(
        "bench", "engines", "--block-size", "64KiB", "--block-size", "1MiB", "--data", "16MiB",
        "--rounds", "1", "--json", "--dir", str(tmp_path / "demo"),
    )  # fmt: skip
    assert ran.code == 0, ran.stderr
    result: dict[str, Any] = ran.json()
    assert [size["block_bytes"] for size in result["sizes"]] == [64 << 10, MIB]
    for size in result["sizes"]:
        subjects = {one["subject"]: one for one in size["subjects"]}
        assert {"filesystem", "superblock", "mmap", "lmdb", "sqlite"} <= set(subjects)
        for name, subject in subjects.items():
            rows = {row["name"]: row for row in subject["rows"]}
            assert all(row["gib_per_second"] > 0 for row in rows.values())
            if name == "copy":
                assert set(rows) == {WARM}
            elif name.startswith("reference"):
                assert set(rows) == {PUT, COLD}
            else:
                assert set(rows) == {PUT, DURABLE, COLD, WARM}
                assert subject["space_amplification"] >= 1.0
                assert 0 < subject["write_amplification"] < 10
                assert subject["put_cpu_seconds_per_gib"] > 0
                assert 0 < subject["warm_get_of_copy"] < 2
    small, large = result["sizes"]
    assert small["bars"] == []
    wanted = {bar[:3] for bar in figures.BARS if bar[2] == "copy"}
    assert wanted <= {(bar["subject"], bar["row"], bar["by"]) for bar in large["bars"]}
    assert not list((tmp_path / "demo").iterdir())


def test_the_text_names_what_was_met(tmp_path: Path) -> None:
    changes = {"engines": ["mmap", "lmdb"], "sizes": [MIB], "data_bytes": 16 * MIB}
    text = "\n".join(figures.lines(bench.run(plan(tmp_path, **changes), lambda _: None)))
    assert text.count("wanted: ") == 2
    assert "reference, 8 threads" in text
    assert "16 blocks of 1 MiB, median of 2 rounds" in text


def test_an_engine_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "engine_names", lambda: ["leveldb", "lmdb"])
    monkeypatch.setitem(sys.modules, "kvstore.backends.leveldb", None)
    result = bench.run(plan(tmp_path, engines=[], rounds=1), lambda _: None)
    names = [subject["subject"] for subject in result["sizes"][0]["subjects"]]
    assert names[-2:] == ["lmdb", "mmap"]
    assert "pip install 'kvstore[leveldb]'" in result["not_measured"][0]


def test_wrong_bytes_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SuperblockEngine.get_many_into

    def get(self: SuperblockEngine, blocks: Any, images: Any) -> Any:
        read = real(self, blocks, images)
        np.frombuffer(images[0], np.uint8)[5000] ^= 1
        return read

    monkeypatch.setattr(SuperblockEngine, "get_many_into", get)
    with pytest.raises(bench.WrongBytes):
        bench.run(plan(tmp_path), lambda _: None)
    assert not list((tmp_path / "demo").iterdir())


@pytest.mark.root
def test_filesystems_of_their_own_are_mounted_and_gone_after(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    script = Path(__file__).parent.parent / "bench" / "filesystems.sh"
    environment = {"FOLDER": str(tmp_path), "SIZE": "256M", "KVSTORE": str(COMMAND)}
    arguments = ["--engine", "superblock", "--block-size", "1MiB", "--data", "16MiB"]
    ran = subprocess.run(
        [script, *arguments, "--rounds", "1"],
        env={**os.environ, **environment, "KINDS": "tmpfs ext4 none"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    parts = dict(part.split("\n", 1) for part in ran.stdout.split("== ")[1:])
    assert "left out" in parts["none"]
    for kind in ("tmpfs", "ext4"):
        assert f"filesystem {kind} " in parts[kind] or "left out" in parts[kind]
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"sizes": [70_000]}, "O_DIRECT"),
        ({"sizes": [MIB]}, "too few"),
        ({"data_bytes": 1 << 50}, "too little room"),
    ],
)
def test_what_cannot_be_measured(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        bench.run(plan(tmp_path, **changes), lambda _: None)


def test_an_unknown_engine_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no engine 'paper'"):
        bench.run(plan(tmp_path, engines=["lmdb", "paper"]), print)
    assert not (tmp_path / "demo").exists()

"""``kvstore bench engine`` measures right blocks, and stops at wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.backends.superblock import SuperblockEngine
from kvstore.bench import engine as bench
from kvstore.errors import UsageError
from tests.command import run_command


def plan(tmp_path: Path, **changes: Any) -> bench.Plan:
    return bench.Plan(
        **{"blocks": 20, "block_bytes": 69_632, "rounds": 2, **changes}, directory=tmp_path / "demo"
    )


def test_every_row_is_measured(tmp_path: Path) -> None:
    ran = run_command(
        "bench", "engine", "--blocks", "16", "--block-size", "64KiB", "--rounds", "1", "--json",
        "--dir", str(tmp_path / "demo"),
    )  # fmt: skip
    result: dict[str, Any] = ran.json()
    names = {row["name"].partition(",")[0] for row in result["rows"]}
    assert names == {
        *("copy", "reference read", "reference write"),
        *("direct get", "direct put", "mmap get", "mmap put"),
    }
    assert [bar["row"] for bar in result["bars"]] == [row for row, _, _ in bench.BARS]
    assert all(row["gib_per_second"] > 0 for row in result["rows"])
    assert not list((tmp_path / "demo").iterdir())


def test_the_text_names_what_was_met(tmp_path: Path) -> None:
    text = "\n".join(bench.lines(bench.run(plan(tmp_path), lambda _: None)))
    assert text.count("wanted: ") == 3
    assert "reference read, 8 threads" in text


def test_wrong_bytes_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SuperblockEngine.get_many_into

    def get(self: SuperblockEngine, blocks: Any, images: Any) -> Any:
        read = real(self, blocks, images)
        np.frombuffer(images[0], np.uint8)[5000] ^= 1
        return read

    monkeypatch.setattr(SuperblockEngine, "get_many_into", get)
    with pytest.raises(bench.WrongBytes):
        bench.run(plan(tmp_path), lambda _: None)


def test_blocks_of_odd_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="O_DIRECT"):
        bench.run(plan(tmp_path, block_bytes=70_000), lambda _: None)


def test_a_disk_without_room(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too little room"):
        bench.run(plan(tmp_path, blocks=1 << 20, block_bytes=64 << 20), lambda _: None)

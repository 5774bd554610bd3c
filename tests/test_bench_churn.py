"""``kvstore bench churn`` measures engines that hold right blocks, and stops at wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.bench import churn as bench
from kvstore.errors import KVStoreError
from tests.command import run_command


def test_a_row_for_an_engine(tmp_path: Path) -> None:
    ran = run_command(
        "bench", "churn", "--engine", "filesystem", "--engine", "lmdb", "--capacity", "64MiB",
        "--times", "2", "--dir", str(tmp_path), "--json",
    )  # fmt: skip
    assert ran.code == 0, ran.stderr
    result: dict[str, Any] = ran.json()
    assert [row["engine"] for row in result["rows"]] == ["filesystem", "lmdb"]
    for row in result["rows"]:
        assert 1.0 <= row["most_factor"] < 1.5
        assert row["most_of_capacity"] <= 1.1
        assert 0.5 < row["least_live_of_capacity"] <= 1
        assert 0 < row["held"] < row["blocks"]
        assert row["refused"] == 0
    assert list(tmp_path.iterdir()) == []
    assert len(bench.lines(result)) == 4


def test_a_wrong_block_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench.Churn.check

    def check(churn: bench.Churn) -> int:
        churn._pool = memoryview(bytes(len(churn._pool)))
        return real(churn)

    monkeypatch.setattr(bench.Churn, "check", check)
    plan = bench.Plan(64 << 20, 2, ["filesystem"], tmp_path)
    with pytest.raises(KVStoreError, match="came back wrong"):
        bench.run(plan, print)
    assert list(tmp_path.iterdir()) == []

"""``kvstore bench transfer`` measures right answers, and stops at wrong ones."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.bench import transfer as bench
from kvstore.bench.daemon import folder_of_our_own
from kvstore.bench.timing import Row
from kvstore.client import Client
from kvstore.errors import DaemonUnavailable, KVStoreError, UsageError
from tests.command import run_command

SMALL = ("--blocks", "8", "--block-size", "1MiB", "--rounds", "2")


def small(folder: Path) -> bench.Plan:
    return bench.Plan(1, 4, 300_000, directory=folder / "demo", working_set=4 << 20)


def answers(path: Path) -> bool:
    try:
        with Client(str(path), timeout=5) as client:
            return bool(client.status())
    except DaemonUnavailable:
        return False


def test_every_row_is_measured_beside_its_copy(tmp_path: Path) -> None:
    ran = run_command("bench", "transfer", *SMALL, "--json", cwd=tmp_path)
    assert ran.code == 0, ran.stderr
    result: dict[str, Any] = ran.json()
    assert (result["rounds"], result["blocks"], result["block_bytes"]) == (2, 8, 1 << 20)
    assert result["working_set_bytes"] == 640 << 20
    rows = {row["name"]: row for row in result["rows"]}
    assert set(rows) == set(bench.BASELINE_OF)
    for row in rows.values():
        assert len(row["seconds"]) == 2
        assert row["best_seconds"] <= row["median_seconds"]
        base = rows[row["baseline"]]["median_seconds"]
        assert row["ratio"] == pytest.approx(base / row["median_seconds"])
    assert rows["stream_get"]["daemon_cpu_seconds"] > 0
    assert [bar["row"] for bar in result["bars"]] == list(bench.BARRED)
    assert {"cores", "kernel", "huge_pages", "shmem_huge_pages", "load_average"} <= set(
        result["environment"]
    )
    assert list(tmp_path.iterdir()) == []


def test_the_text_has_all_rows_and_bars(tmp_path: Path) -> None:
    result = bench.run(small(tmp_path), lambda _: None)
    text = list(bench.lines(result))
    assert all(any(line.startswith(name) for line in text) for name in bench.BASELINE_OF)
    assert sum(line.endswith((": met", ": NOT MET")) for line in text) == len(bench.BARRED)


def test_wrong_bytes_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Client.stream_get

    def swapped(client: Client, keys: list[bytes]) -> Iterator[Any]:
        return real(client, [*keys[1:], keys[0]])

    monkeypatch.setattr(Client, "stream_get", swapped)
    with pytest.raises(KVStoreError, match="other bytes"):
        bench.run(small(tmp_path), lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_a_miss_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.Bench, "prove", lambda self: self._client.delete(bench._keys([0])))
    monkeypatch.setattr(bench.Bench, "_draw", lambda self: [0, 1, 2, 3])
    with pytest.raises(KVStoreError, match="MISS"):
        bench.run(small(tmp_path), lambda _: None)


def test_blocks_that_are_not_in_memory_are_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.Plan, "memory", 2 << 20)
    with pytest.raises(KVStoreError, match="in the daemon's memory"):
        bench.run(small(tmp_path), lambda _: None)


def test_a_batch_must_fit_into_a_region(tmp_path: Path) -> None:
    ran = run_command("bench", "transfer", "--blocks", "512", "--dir", tmp_path / "demo")
    assert (ran.code, "region" in ran.stderr) == (2, True)


def test_ratios_are_of_the_copy_in_the_same_direction() -> None:
    rows = [Row(name, [1.0], [0.0]) for name in bench.BASELINE_OF]
    for row in rows:
        row.seconds = {bench.OUT: [3.0], bench.IN: [8.0]}.get(row.name, [12.0, 6.0, 10.0])
    result: dict[str, Any] = bench._document(bench.Plan(), {}, rows)
    found = {row["name"]: (row["ratio"], row["best_ratio"]) for row in result["rows"]}
    assert found["stream_get"] == (0.3, 0.5)
    assert found["put_from accepted"] == (0.8, 8 / 6)
    assert [bar["met"] for bar in result["bars"]] == [False, True]


def test_the_daemon_ends_with_a_bench_that_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 40)  # longer than the path of a socket may be
    code = f"""
from pathlib import Path
from kvstore.bench.daemon import Daemon
folder = Path({str(folder)!r})
folder.mkdir()
daemon = Daemon(folder, 64 << 20, 1 << 20)
daemon.start()
print(daemon.socket, flush=True)
input()
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        socket = Path(process.stdout.readline().decode().rstrip())
        assert answers(socket)
        process.kill()
    deadline = time.monotonic() + 10
    while answers(socket):
        assert time.monotonic() < deadline
    with folder_of_our_own(folder):  # what it left is ours to remove
        assert list(folder.iterdir()) == []


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    again = folder_of_our_own(folder)
    with folder_of_our_own(folder), pytest.raises(UsageError, match="another run"):
        again.__enter__()
    assert not folder.exists()

"""``kvstore bench table1``, ``table2``, ``table3`` measure right answers, and tell wrong ones."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from kvstore.bench import demo, published, subjects, tables, tabletext
from kvstore.bench.served import Served
from kvstore.bench.subjects import Files
from kvstore.bench.workload import BLOCKS, MODELS, PUBLISHED, Workload, WrongBytes
from tests.command import run_command

WRITES = {"set", "set deferred", "write"}


def measured(number: int, folder: Path, *more: str) -> list[dict[str, Any]]:
    """Run the real command with the smallest blocks; return the rows."""
    name = f"table{number}"
    ran = run_command(
        "bench", name, "--model", "tiny", "--rounds", "1", "--json", *more, cwd=folder
    )
    assert ran.code == 0, ran.stderr
    result: dict[str, Any] = ran.json()
    assert (result["bench"], result["faults"]) == (name, [])
    assert {"filesystem", "mount_options", "huge_pages", "kernel"} <= set(result["environment"])
    (model,) = result["models"]
    assert (model["blocks"], model["block_bytes"], model["rounds"]) == (512, 8192, 1)
    assert list(folder.iterdir()) == []
    rows: list[dict[str, Any]] = model["rows"]
    return rows


def check(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Check what is the same of every row; return them by name."""
    copy = rows[0]
    assert (copy["name"], copy["times_copy"]) == ("copy", 1.0)
    for row in rows[1:]:
        assert len(row["seconds"]) == 1
        assert row["times_copy"] == row["median_seconds"] / copy["median_seconds"]
        assert row["missed"] == 0
        writes = row["operation"] in WRITES
        assert (row["drain_seconds"] is not None) == writes
        assert row["written_bytes"] == (512 * 8192 if writes else None)
    return {row["name"]: row for row in rows}


def test_the_first_table_is_of_nothing_of_ours(tmp_path: Path) -> None:
    rows = check(measured(1, tmp_path))
    parts = ("write", "read warm", "read cold")
    wanted = {f"{name} {part}" for name in ("memmap", "files", "leveldb") for part in parts}
    assert wanted <= set(rows)


def test_the_second_table_is_of_memory_and_files(tmp_path: Path) -> None:
    rows = check(measured(2, tmp_path))
    for operation in ("set", "set deferred", "set deferred new keys", "get warm"):
        assert {f"memory {operation}", f"filesystem {operation}"} <= set(rows)
    for operation in ("get warm", "stream_get warm"):
        assert rows[f"memory {operation}"]["memory_hits"] == 512
        assert rows[f"filesystem {operation}"]["memory_hits"] == 0
    assert rows["memory get warm"]["daemon_cpu_seconds"] > 0


def test_the_third_table_is_of_memory_over_files(tmp_path: Path) -> None:
    rows = check(measured(3, tmp_path))
    assert rows["hybrid get warm"]["memory_hits"] == 512
    # What a task has brought into memory may be drawn again by a later one.
    for operation in ("get", "stream_get"):
        assert 0 < rows[f"hybrid {operation} cold"]["memory_hits"] < 300


def test_a_table_without_a_daemon(tmp_path: Path) -> None:
    rows = check(measured(2, tmp_path, "--local", "--engine", "filesystem"))
    assert {"filesystem set", "filesystem get warm", "filesystem get cold"} < set(rows)
    assert rows["filesystem set"]["daemon_cpu_seconds"] is None


# -- the workload ---------------------------------------------------------------------------------


def test_blocks_have_the_sizes_of_their_models() -> None:
    sizes = {"q32b": 4194304, "q7b": 917504, "q3b": 589824, "glm4": 1310720, "l8b": 2097152}
    assert {name: MODELS[name].block_bytes for name in PUBLISHED} == sizes


def test_tasks_are_those_of_the_source() -> None:
    workload = Workload(MODELS["tiny"])
    tasks = workload.tasks()
    assert len(tasks) == 8
    for task in tasks:
        assert len(set(task.sources)) == len(set(task.targets)) == 64
        assert task.sources != task.targets
        assert set(task.sources + task.targets) <= set(range(512))
    distinct = len({number for task in tasks for number in task.sources})
    assert 300 < distinct < 370  # 512 * (1 - (7/8)**8) = 336 are expected
    assert workload.tasks() != tasks
    key = hashlib.md5(b"kvcache:no model, for trying out:16:3").hexdigest()
    assert workload.name(3) == key


def test_the_copy_moves_the_blocks() -> None:
    workload = Workload(MODELS["tiny"])
    tasks = workload.tasks()
    with pytest.raises(WrongBytes):
        workload.check(tasks, "nobody")
    workload.copy(tasks)
    workload.check(tasks, "copy")
    workload.blank()
    with pytest.raises(WrongBytes):
        workload.check(tasks, "nobody")


def test_published_figures_are_ratios_to_their_own_copy() -> None:
    assert published.ratio("q32b", "memmap", "write") == pytest.approx(4.79, abs=0.01)
    assert published.ratio("l8b", "hybrid", "stream_get") == pytest.approx(1.85, abs=0.01)
    assert published.ratio("tiny", "memmap", "write") is None
    assert published.ratio("q7b", "hybrid", "get") is None
    for (subject, operation), (seconds, _) in published.COLUMNS.items():
        assert len(seconds) == len(PUBLISHED)
        assert published.flaw(subject, operation)


# -- what must not pass for a success -------------------------------------------------------------


def run(number: int, folder: Path, engine: str) -> dict[str, Any]:
    plan = tables.Plan(number, ["tiny"], [engine], 1, folder / "demo")
    return tables.run(plan, lambda _: None)


def test_a_write_that_was_dropped_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lossy(Files):
        """Drops some blocks of each task, once it has them all; later tasks may bring some."""

        def put(self, names: Any, numbers: Any, mode: str) -> int:
            skipped = 8 * (len(list(self.folder.iterdir())) == BLOCKS)
            return super().put(names[skipped:], numbers[skipped:], mode)

    monkeypatch.setitem(subjects.DIRECT, "files", Lossy)
    with pytest.raises(WrongBytes, match="files returned other bytes"):
        run(1, tmp_path, "files")
    monkeypatch.setattr(Workload, "check", lambda self, tasks, who: None)
    (fault,) = run(1, tmp_path, "files")["faults"]
    assert fault.startswith("tiny: files write: only ")


def test_a_put_that_a_daemon_drops_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Served.put, []

    def lossy(served: Served, names: Any, numbers: Any, mode: str) -> int:
        calls.append(mode)
        skipped = int(len(calls) > 8)  # the blocks must be there first
        return real(served, names[skipped:], numbers[skipped:], mode)

    monkeypatch.setattr(Served, "put", lossy)
    monkeypatch.setattr(Workload, "check", lambda self, tasks, who: None)
    faults = run(2, tmp_path, "filesystem")["faults"]
    assert [fault.split(":")[1] for fault in faults] == [
        " filesystem set",
        " filesystem set deferred",
        " filesystem set deferred new keys",
    ]
    assert f"only {504 * 8192} of {512 * 8192} bytes" in faults[0]


def test_a_miss_is_a_fault_and_no_figure_to_be_proud_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Served.stream_get

    def missing(served: Served, names: Any, numbers: Any, targets: Any) -> int:
        return real(served, names, numbers, targets) + 1

    monkeypatch.setattr(Served, "stream_get", missing)
    result = run(2, tmp_path, "memory")
    assert result["faults"] == [
        "tiny: memory stream_get warm: 8 blocks were refused or missing",
    ]
    assert list(tabletext.lines(result))[-1] == f"FAILED: {result['faults'][0]}"


def test_faults_are_exit_code_1() -> None:
    row = tables.Figures("x", moved_bytes=1000, written_bytes=[995, 990])
    assert row.fault == ""
    row.written_bytes.append(989)
    assert "989 of 1000" in row.fault
    row.missed = 2
    assert row.fault.startswith("2 blocks")


# -- the rest -------------------------------------------------------------------------------------


def test_text_has_every_row_and_every_footnote(tmp_path: Path) -> None:
    result = run(1, tmp_path, "memmap")
    result["models"][0]["rows"][3]["published_times_copy"] = 4.25
    text = list(tabletext.lines(result))
    (row,) = [line for line in text if line.startswith("memmap") and "write" in line]
    assert "4.2 [1]" in row
    assert f"[1] {published.MSYNC}" in text
    assert any("512 = 4 MiB" in line for line in text)
    assert any("wde-512" in line for line in text)


def test_a_missing_library_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "plyvel", None)
    (model,) = run(1, tmp_path, "leveldb")["models"]
    assert "leveldb was not measured: plyvel is not installed" in model["notes"][0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["table1", "--model", "gpt9"], "q32b"),
        (["table1", "--engine", "filesystem"], "memmap"),
        (["table2", "--engine", "nothing"], "nothing"),
        (["table3", "--dir", "/nowhere/demo"], "/nowhere"),
        (["table3", "--rounds", "0"], "--rounds"),
    ],
)
def test_wrong_usage_is_2(arguments: list[str], says: str, tmp_path: Path) -> None:
    ran = run_command("bench", *arguments, cwd=tmp_path)
    assert (ran.code, says in ran.stderr) == (2, True), ran.stderr


def test_no_picture_without_matplotlib(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    arguments = ("table1", "--model", "tiny", "--plot", str(tmp_path / "p.png"))
    ran = run_command("bench", *arguments, env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    assert (ran.code, ran.text) == (2, "")
    assert "kvstore[plot]" in ran.stderr
    assert not (tmp_path / ".demo").exists()


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "p.png"
    arguments = ("table1", "--model", "tiny", "--engine", "memmap", "--plot", str(picture))
    assert run_command("bench", *arguments, cwd=tmp_path).code == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_make_run_measures_before_it_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "TABLE_SECONDS", 0.1)
    plan = demo.Plan(8, 300_000, tmp_path / "demo", models=["tiny", "q3b"])
    report = demo.run(plan, lambda _: None)
    assert [table["table"] for table in report.tables] == [2, 3]
    for table in report.tables:
        # The time is over after one round, and no other model is begun.
        assert [(part["model"], part["rounds"]) for part in table["models"]] == [("tiny", 1)]
        assert (table["faults"], table["not_measured"]) == ([], ["q3b"])
        assert "not measured, for the time was over: q3b" in list(tabletext.lines(table))
    assert (report.hits_after_kill, report.exit_code) == (8, 0)
    assert list(tmp_path.iterdir()) == []

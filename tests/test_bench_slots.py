"""``kvstore bench slots`` measures right counts, and stops at wrong ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvstore.bench import slots as bench
from kvstore.errors import UsageError
from kvstore.slots import I64, Arena
from tests.command import run_command


def test_every_structure_is_measured() -> None:
    ran = run_command("bench", "slots", "--slots", "20000", "--trials", "2", "--json")
    result: dict[str, Any] = ran.json()
    assert (result["slots"], result["trials"], result["batch"]) == (20_000, 2, 10_000)
    names = list(dict.fromkeys(name for pair in bench.PAIRS for name in pair))
    measured = {(row["operation"], row["structure"]) for row in result["rows"]}
    assert measured == {(operation, name) for operation, _ in bench.BARS for name in names}
    for row in result["rows"]:
        assert len(row["trials"]) == 2
        assert 0 < row["least"] <= row["median"] <= row["most"]
    assert set(result["bytes_per_slot"]) == set(names)
    assert result["bytes_per_slot"][bench.OURS] == 2
    assert result["bytes_per_slot"]["dict, class"] > 50


def test_one_array_is_far_faster_than_a_dict() -> None:
    result = bench.run(200_000, 3)
    ratios = {(bar["operation"], bar["structure"]): bar["ratio"] for bar in result["bars"]}
    # Wide margins: this machine is busy with other tests.
    assert ratios["batch", bench.OURS] > 20
    assert ratios["batch", "array, bare"] > 20
    assert ratios["one id", "array, bare"] > 1.5


def test_the_table_has_a_row_for_each_figure(capsys: pytest.CaptureFixture[str]) -> None:
    result = bench.run(20_000, 1, 4)
    rows = bench.table(result)
    assert len(rows) == len(result["rows"]) == 8
    assert {len(row) for row in rows} == {len(bench.HEAD)}
    assert [row[-1] for row in rows if row[1] == bench.OURS] == ["1.0", "1.0"]
    text = bench.lines(result)
    assert len(text) == len(rows) + 3 + len(result["bars"])
    assert not capsys.readouterr().out


def test_bars_are_ratios_to_the_second_of_a_pair() -> None:
    medians = {bench.OURS: 2.0, "dict, class": 20.0, "dict, bare": 10.0, "array, bare": 1.0}
    rows = [
        {"operation": operation, "structure": name, "median": median}
        for operation, _ in bench.BARS
        for name, median in medians.items()
    ]
    bars = bench._bars(rows)
    assert [bar["ratio"] for bar in bars] == [10.0, 5.0, 10.0] * 2
    assert [bar["met"] for bar in bars] == [True, False, True, False, False, False]


def test_too_few_slots_measure_nothing() -> None:
    for slots, trials in ((100, 1), (20_000, 0)):
        with pytest.raises(UsageError, match="measure nothing"):
            bench.run(slots, trials)


def test_counting_a_repeated_id_once_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    up, down = Arena.incr, Arena.decr
    monkeypatch.setattr(Arena, "incr", lambda arena, ids: up(arena, np.unique(ids)))
    monkeypatch.setattr(Arena, "decr", lambda arena, ids: down(arena, np.unique(ids)))
    with pytest.raises(bench.WrongCount, match="kvstore slots counts wrongly"):
        bench.run(20_000, 1)


def test_counting_others_too_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Arena.counts

    def noisy(arena: Arena, ids: I64) -> Any:
        return real(arena, ids) + (len(ids) > 10_000)

    monkeypatch.setattr(Arena, "counts", noisy)
    with pytest.raises(bench.WrongCount, match="slots that nobody named"):
        bench.run(20_000, 1)


def test_counting_up_without_down_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "decr_one", lambda arena, slot: None)
    with pytest.raises(bench.WrongCount, match="kvstore slots counts wrongly"):
        bench.run(20_000, 1)


def test_counts_are_looked_at_after_the_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench._times

    def dirty(structures: Sequence[bench.Counts], ids: I64, *more: Any) -> Any:
        structures[1].up(ids[:1])
        return real(structures, ids, *more)

    monkeypatch.setattr(bench, "_times", dirty)
    with pytest.raises(bench.WrongCount, match="dict, class did not count down"):
        bench.run(20_000, 1)

"""``kvstore bench slots`` measures right counts, and stops at wrong ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.bench import slots as bench
from kvstore.errors import UsageError
from kvstore.slots import U64, Arena
from tests.command import run_command


def test_every_structure_is_measured() -> None:
    ran = run_command("bench", "slots", "--slots", "20000", "--trials", "2", "--json")
    result: dict[str, Any] = ran.json()
    assert (result["slots"], result["trials"], result["batch"]) == (20_000, 2, 10_000)
    names = [name for pair in bench.PAIRS for name in pair]
    measured = {(row["operation"], row["structure"]) for row in result["rows"]}
    assert measured == {(operation, name) for operation, _ in bench.BARS for name in names}
    for row in result["rows"]:
        assert len(row["trials"]) == 2
        assert 0 < row["least"] <= row["median"] <= row["most"]
    assert set(result["bytes_per_slot"]) == set(names)
    assert result["bytes_per_slot"][bench.OURS] == 2
    assert result["bytes_per_slot"]["dict, checked"] > 50


def test_one_array_is_far_faster_than_a_dict() -> None:
    result = bench.run(200_000, 3)
    ratios = {(bar["operation"], bar["structure"]): bar["ratio"] for bar in result["bars"]}
    # Wide margins: this machine is busy with other tests.
    assert ratios["batch", bench.OURS] > 5
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
    medians = dict(
        zip([n for pair in bench.PAIRS for n in pair], (2.0, 20.0, 1.0, 99.0), strict=True)
    )
    rows = [
        {"operation": operation, "structure": name, "median": median}
        for operation, _ in bench.BARS
        for name, median in medians.items()
    ]
    bars = bench._bars(rows)
    assert [bar["ratio"] for bar in bars] == [10.0, 99.0, 10.0, 99.0]
    assert [bar["met"] for bar in bars] == [True, True, False, False]


def test_too_few_slots_measure_nothing() -> None:
    for slots, trials in ((100, 1), (20_000, 0)):
        with pytest.raises(UsageError, match="measure nothing"):
            bench.run(slots, trials)


def test_counting_a_repeated_id_once_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    up, down = Arena.incr, Arena.decr
    monkeypatch.setattr(Arena, "incr", lambda arena, places: up(arena, np.unique(places)))
    monkeypatch.setattr(Arena, "decr", lambda arena, places: down(arena, np.unique(places)))
    with pytest.raises(bench.WrongCount, match="kvstore slots counts wrongly"):
        bench.run(20_000, 1)


def test_counting_others_too_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Arena.counts

    def noisy(arena: Arena, places: U64) -> Any:
        return real(arena, places) + (len(places) > 10_000)

    monkeypatch.setattr(Arena, "counts", noisy)
    with pytest.raises(bench.WrongCount, match="slots that nobody named"):
        bench.run(20_000, 1)


def test_counting_up_without_down_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "decr_one", lambda arena, place: None)
    with pytest.raises(bench.WrongCount, match="did not count down"):
        bench.run(20_000, 1)

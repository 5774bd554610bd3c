"""``kvstore bench index`` measures right answers, and stops at wrong ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.bench import index as bench
from kvstore.bench.rivals import ALL, LmdbMap, OrderedLru, OurIndex, PlainDict
from kvstore.columns import U32, Bools
from kvstore.errors import UsageError
from kvstore.index import Index
from kvstore.keys import KeyArray
from tests.command import run_command


def test_every_structure_is_measured() -> None:
    ran = run_command("bench", "index", "--blocks", "20000", "--trials", "2", "--json")
    result: dict[str, Any] = ran.json()
    assert (result["blocks"], result["trials"], result["bars"]) == (20_000, 2, [])
    measured: dict[str, set[str]] = {}
    for row in result["rows"] + result["load"]:
        measured.setdefault(row["structure"], set()).add(row["operation"])
        # LMDB never evicts, so at this size it may run out of anything to add.
        assert len(row["trials"]) == 2 or (row["structure"] == LmdbMap.name and row["trials"])
        assert row["least"] <= row["median"] <= row["most"]
    plain = {"contains", "prefix of 512", "insert", "memory"}
    assert measured[PlainDict.name] == plain
    assert plain < measured[LmdbMap.name] < measured[OrderedLru.name] | {"add p50"}
    assert measured[OurIndex.name] == measured[OrderedLru.name] | {"choose victims"}
    assert {"lookup p50", "lookup p99", "evict p99", "add p99"} < measured[OurIndex.name]


def test_the_table_has_a_row_for_each_figure(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    result = bench.run(20_000, 1, 4, told.append)
    assert told[0] == f"trial 1 of 1: {ALL[0].name}"
    assert len(told) == len(ALL) + 1
    rows = bench.table(result)
    assert len(rows) == len(result["rows"]) + len(result["load"])  # type: ignore[arg-type]
    assert {len(row) for row in rows} == {len(bench.HEAD)}
    text = bench.lines(result)
    notes = [line for line in text if line.startswith("[")]
    assert [line[:3] for line in notes] == ["[1]", "[2]", "[3]", "[4]"]
    assert len(text) == len(rows) + 2 + len(notes)
    assert not capsys.readouterr().out


def test_bars_are_judged_at_a_million() -> None:
    rows = [
        {"operation": name, "unit": unit, "structure": OurIndex.name, "median": limit * factor}
        for (name, unit, limit), factor in zip(bench.BARS, (0.5, 1.0, 1.5, 2.0), strict=True)
    ]
    assert [bar["met"] for bar in bench._bars(rows)] == [True, True, False, False]


def test_too_few_blocks_measure_nothing() -> None:
    with pytest.raises(UsageError, match="measure nothing"):
        bench.run(100)
    with pytest.raises(UsageError, match="measure nothing"):
        bench.run(20_000, 0)


def test_a_false_miss_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Index.contains

    def forgetful(index: Index, space: int, keys: KeyArray) -> Bools:
        mask = real(index, space, keys)
        mask[-1:] = False
        return mask

    monkeypatch.setattr(Index, "contains", forgetful)
    with pytest.raises(bench.WrongAnswer, match="kvstore index is wrong"):
        bench.run(20_000, 1)


def test_evicting_the_wrong_blocks_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    real = OurIndex.choose

    def shifted(index: OurIndex, count: int) -> U32:
        return real(index, count + 1)[1:] if count < bench.VICTIM_BATCH else real(index, count)

    monkeypatch.setattr(OurIndex, "choose", shifted)
    with pytest.raises(bench.WrongAnswer, match="hits are those of OrderedDict"):
        bench.run(20_000, 1)


def test_an_empty_structure_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainDict, "insert", lambda self, keys: None)
    with pytest.raises(bench.WrongAnswer, match="dict is wrong"):
        bench.run(20_000, 1)


def test_rivals_agree_with_a_set() -> None:
    rng = np.random.default_rng(2)
    keys = rng.integers(0, 256, (3000, 36), dtype=np.uint8)
    for make in (OurIndex, PlainDict, OrderedLru, LmdbMap):
        structure: Any = make()
        structure.insert(structure.prepare(keys[:2000]))
        asked = structure.prepare(keys[::-1])
        assert list(structure.contains(asked)) == [False] * 1000 + [True] * 2000
        assert structure.prefix(structure.prepare(keys)) == 2000
        assert structure.bytes_per_block() > 36
        if structure.evicts:
            structure.touch(structure.prepare(keys[:500]))
            structure.evict(1500)
            assert sum(structure.contains(structure.prepare(keys))) == 500
            assert structure.prefix(structure.prepare(keys)) == 500
        structure.close()

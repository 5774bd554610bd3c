"""The damage matrix holds: each damage, on each engine, found, repaired and lost as it says."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import fsck, mend
from tests.damage_matrix import cell, make_store, read_page
from tests.here import Here
from tests.store_damages import DAMAGES, ENGINES

MATRIX = read_page()
APART = ("cut file", "emptied file", "lost structure", "spoiled structure")
"""What may end a process that opens lmdb."""


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    folder = tmp_path_factory.mktemp("stores")
    made = {engine: folder / engine for engine in ENGINES}
    for engine, path in made.items():
        make_store(path, engine)
    yield made
    shutil.rmtree(folder)


def test_the_matrix_has_every_damage_of_every_engine() -> None:
    assert list(MATRIX) == [(damage, engine) for damage in DAMAGES for engine in ENGINES]
    real = {damage for (damage, _), outcome in MATRIX.items() if outcome.exit}
    assert len(real) >= 22


@pytest.mark.parametrize(("damage", "engine"), MATRIX, ids=[" ".join(one) for one in MATRIX])
def test_a_damage_is_found_repaired_and_lost_as_the_matrix_says(
    damage: str,
    engine: str,
    stores: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if os.geteuid() != 0 and damage in ("other owner", "device"):
        pytest.skip("needs root")
    if engine != "lmdb" or damage not in APART:
        monkeypatch.setattr(fsck, "Child", Here)
        monkeypatch.setattr(mend, "Child", Here)
    shutil.copytree(stores[engine], tmp_path / "store")
    assert cell(tmp_path / "store", damage) == MATRIX[damage, engine]

"""The short form of ``make soak``; see :mod:`tests.soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import soak


@pytest.mark.slow
def test_a_mixed_load_with_faults(tmp_path: Path) -> None:
    seed = 20_261_204
    print(f"seed {seed}")
    run = soak(tmp_path, 22, seed, clients=3, life=5)
    print(run.summary())
    assert run.evictions
    assert run.looked_for

"""A store on the engine superblock: room in fixed slots, kills, rebuilds.

With ``PROMISES=long``, as ``make promises`` sets it, at the size that the promise names.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

from kvstore.answers import BlockStatus
from kvstore.layout import directory_bytes
from kvstore.record import image_bytes
from tests.stores import MIB, Local, block, key

LONG = os.environ.get("PROMISES") == "long"
CHURN_CAPACITY = 4096 * MIB if LONG else 256 * MIB
LEAST_LIVE = 0.85 if LONG else 0.78
"""Small super-blocks lose more at their ends."""
CHURN_SIZES = [65_536, 147_456, 294_912, 458_752, 589_824, 917_504, 1_310_720]


def opened(path: Path, **changes: object) -> Local:
    values: dict[str, object] = {"engine": "superblock", "capacity": 128 * MIB, "bounce_bytes": 64 * MIB}
    return Local(path, **{**values, **changes})


def occupied(path: Path) -> int:
    return directory_bytes(path)


def lose_journal(path: Path) -> None:
    for file in (path / "blocks").iterdir():
        if file.name.startswith(("journal", "checkpoint")):
            file.unlink()


def test_blocks_are_there_after_a_stop_and_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "store"
    names = [key(n) for n in range(200)]
    blocks = [block(n, 1000 + 317 * n) for n in range(200)]
    local = opened(path)
    assert not any(local.put(names[:100], blocks[:100]))
    local.stop()
    local = opened(path)
    assert not any(local.put(names[100:], blocks[100:]))
    local.kill()
    local = opened(path)
    assert local.get(names) == blocks
    before = occupied(path)
    assert not any(local.put([key(1000 + n) for n in range(50)], blocks[100:150]))
    assert occupied(path) <= before + 5 * MIB
    assert local.get(names) == blocks
    local.stop()


def test_the_scan_finds_everything_when_the_journal_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "store"
    names = [key(n) for n in range(200)]
    local = opened(path)
    assert not any(local.put(names, [block(n, 2000 + 331 * n) for n in range(200)]))
    assert local.delete(names[:40]) == 40
    local.kill()
    lose_journal(path)
    local = opened(path)
    assert local.get(names) == [None] * 40 + [block(n, 2000 + 331 * n) for n in range(40, 200)]
    assert not any(local.put(names[:40], [block(n, 5000) for n in range(40)]))
    assert local.get(names[:41])[39:] == [block(39, 5000), block(40, 2000 + 331 * 40)]
    local.stop()


def test_churn_of_seven_sizes(tmp_path: Path) -> None:
    """No put fails, the files stay within the capacity, and what is live is most of it."""
    path, rng = tmp_path / "store", random.Random(7)
    local = opened(path, capacity=CHURN_CAPACITY)
    passed, number, sizes = 0, 0, {}
    while passed < (3 if LONG else 5) * CHURN_CAPACITY:
        count = rng.randrange(1, 9)
        names = [key(number + n) for n in range(count)]
        made = [block(number + n, rng.choice(CHURN_SIZES)) for n in range(count)]
        assert not any(local.put(names, made)), f"after {passed} bytes"
        sizes.update({number + n: len(one) for n, one in enumerate(made)})
        number, passed = number + count, passed + sum(len(one) for one in made)
        if rng.random() < 0.1:
            local.tick()
    usage = local.core.usage()
    assert occupied(path) <= CHURN_CAPACITY * 1.1
    assert usage.live >= LEAST_LIVE * CHURN_CAPACITY
    for n in range(number):
        (found,) = local.get([key(n)])
        assert found is None or found == block(n, sizes[n])
    local.stop()
    local = opened(path, capacity=CHURN_CAPACITY)
    assert local.core.usage().live >= LEAST_LIVE * CHURN_CAPACITY
    local.stop()

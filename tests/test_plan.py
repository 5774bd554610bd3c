"""What an eviction on request takes: closed under children, smallest, the same batch by batch."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from kvstore import plan
from kvstore.index import GHOST, NONE
from kvstore.keys import key_array
from kvstore.plan import Plan, Wanted
from tests.stores import Local, block, key


@pytest.fixture
def local(tmp_path: Path) -> Local:
    return Local(tmp_path / "store")


def forest(local: Local, seed: int, count: int = 60) -> None:
    """Put blocks that follow earlier ones at random; delete some, so that ghosts are left."""
    chance = random.Random(seed)
    for number in range(count):
        parent = key(chance.randrange(number)) if number and chance.random() < 0.8 else b""
        local.put([key(number)], [block(number, chance.randrange(1, 9000))], parent=parent)
    for number in chance.sample(range(count), count // 6):
        local.delete([key(number)])


def now(local: Local) -> float:
    return local.core.clock.seconds()


def choose(local: Local, wanted: Wanted) -> Plan:
    return plan.choose(plan.snapshot(local.core.index, now(local)), wanted)


def carry_out(local: Local, chosen: Plan) -> int:
    """Evict it batch by batch, as the daemon does; return how many left."""
    gone = 0
    for part in chosen.parts():
        rows = plan.still(local.core.index, part, now(local))
        local.store.run(local.store.evict_rows(rows))
        gone += len(rows)
    return gone


def orphans(local: Local) -> int:
    """Count blocks whose parent was there before and is a ghost now, by the index's own links."""
    index = local.core.index
    rows = local.rows()
    parents = index.parents[rows]
    linked = parents[parents != NONE]
    return int((index.flags[linked] & GHOST != 0).sum())


@pytest.mark.parametrize("seed", range(6))
def test_all_of_a_forest_leaves_batch_by_batch(
    local: Local, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "BATCH_BLOCKS", 4)
    forest(local, seed)
    chosen = choose(local, Wanted())
    assert chosen.pinned == chosen.used == chosen.needed == 0
    assert carry_out(local, chosen) == int((~chosen.ghost).sum())
    assert local.core.index.blocks == local.core.index.ghost_count == 0


@pytest.mark.parametrize("seed", range(6))
def test_a_part_of_a_forest_is_closed_and_smallest(
    local: Local, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "BATCH_BLOCKS", 4)
    forest(local, seed)
    index, before = local.core.index, orphans(local)
    need = index.live_bytes // 3
    chosen = choose(local, Wanted(bytes=need))
    last = chosen.weights[~chosen.ghost][-1]
    assert need <= chosen.weights.sum() < need + last
    live = index.live_bytes
    carry_out(local, chosen)
    assert live - index.live_bytes == chosen.weights.sum()
    assert orphans(local) <= before


def test_what_is_held_keeps_what_it_follows(local: Local) -> None:
    names = [key(number) for number in range(8)]
    local.put(names, [b"x"] * 8, chain=True)
    local.store.pin(local.namespace, 0, key_array(names[3:4]), 60)
    local.store.contains(local.namespace, 0, key_array(names[5:6]), 30)
    chosen = choose(local, Wanted())
    assert (chosen.pinned, chosen.used, chosen.needed) == (1, 1, 4)
    assert len(chosen.rows) == 2
    assert choose(local, Wanted(bytes=8192)).needed == 0, "enough may go: nothing is kept back"


def test_what_changed_since_the_plan_stays(local: Local) -> None:
    names = [key(number) for number in range(6)]
    local.put(names, [b"x"] * 6, chain=True)
    chosen = choose(local, Wanted())
    local.put([key(7)], [b"x"], parent=names[2])  # another one follows: 0 to 2 are needed
    local.delete(names[5:])
    local.put(names[5:], [b"y"], parent=names[4])  # a new version of the end: 3 and 4 are needed
    assert carry_out(local, chosen) == 0
    assert local.contains(names) == [True] * 6


def test_conditions_add_up(local: Local) -> None:
    local.put([key(n) for n in range(4)], [b"x"] * 4, chain=True)
    stamp = local.core.clock.micros()
    local.put([key(n) for n in range(4, 8)], [b"x"] * 4, chain=True)
    index = local.core.index
    rows = {bytes(index.keys_of(index.rows_of(None)[n : n + 1])[0]): n for n in range(8)}

    def taken(wanted: Wanted) -> set[int]:
        return {number for number in range(8) if rows[key(number)] in choose(local, wanted).rows}

    assert taken(Wanted(before=stamp)) == {0, 1, 2, 3}
    assert taken(Wanted(before=stamp, below=rows[key(2)])) == {2, 3}
    assert taken(Wanted(below=rows[key(5)])) == {5, 6, 7}
    assert taken(Wanted(namespace=99)) == set()
    assert taken(Wanted(bytes=0)) == set()
    assert taken(Wanted(rows=np.array([rows[key(7)]], np.uint32))) == {7}


def test_recent_is_what_was_used_last(local: Local) -> None:
    local.put([key(n) for n in range(6)], [b"x"] * 6)
    for number in (4, 1, 3):
        local.get([key(number)])
    index = local.core.index
    rows, generations = plan.recent(plan.snapshot(index, now(local)), 3 * 8192 + 100, None)
    assert [bytes(one) for one in index.keys_of(rows)] == [key(4), key(1), key(3)]
    assert index.holds(rows, generations).all()


def test_family_is_a_table_of_contents() -> None:
    #      0 - 1 - 2 - 3      and 6 alone
    #           \- 4 - 5
    up = np.array([-1, 0, 1, 2, 1, 4, -1])
    assert plan.family(up, 1, 99) == ([(0, 0), (1, 1), (2, 2), (3, 3), (4, 2), (5, 3)], False)
    assert plan.family(up, 4, 99) == ([(0, 0), (1, 1), (4, 2), (5, 3)], False)
    assert plan.family(up, 6, 99) == ([(6, 0)], False)
    assert plan.family(up, 1, 3) == ([(0, 0), (1, 1), (2, 2)], True)
    assert plan.family(up, 1, 6)[1] is False

"""What every policy keeps: its contract, its bounds, and what it knows over a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import eviction, memo, record
from kvstore.columns import DISK, U32
from kvstore.eviction import reuse
from kvstore.eviction.adaptive import Adaptive
from kvstore.eviction.ghosts import Ghosts, Table
from kvstore.index import Index
from kvstore.removal import choose_victims
from tests.stores import Local, block, key

NAMES = sorted(eviction.POLICIES)


class Rows:
    """An index with a policy, driven as a store drives it; a chain has keys of 16 bytes."""

    def __init__(self, name: str) -> None:
        self.policy = eviction.make(name)
        self.index = Index(seed=1, policy=self.policy, record_bytes=one_each)
        self.now = 1000.0
        self.generation = 0

    def ask(self, keys: np.ndarray, seconds: float = 1.0) -> U32:
        """Ask for a chain and put what is missing."""
        index, self.now = self.index, self.now + seconds
        rows = index.find(1, keys)
        new = rows == 0xFFFFFFFF
        count = int(new.sum())
        generations = np.arange(self.generation, self.generation + count, dtype=np.uint64)
        self.generation += count
        stamp = int(self.now * 1e6)
        rows[new] = index.insert(1, keys[new], np.full(count, 1, np.uint32), generations, stamp)
        index.link(rows[1:], rows[:-1])
        index.commit(rows[new], generations, generations)
        self.policy.used(index, rows, self.now)
        index.touch(rows, stamp)
        return rows

    def leave(self, count: int) -> U32:
        victims = eviction.choose(self.policy, self.index, count, self.now)
        self.index.free(self.index.remove(victims))
        return victims


def one_each(sizes: U32) -> np.ndarray:
    return np.ones(len(sizes), np.int64)


def chains(seed: int, count: int, shared: int = 40) -> list[np.ndarray]:
    """Chains of up to 30 blocks with common starts; asked for again by chance."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, 256, (shared, 12, 16), dtype=np.uint8)
    made: list[np.ndarray] = []
    for _ in range(count):
        if made and rng.random() < 0.5:
            made.append(made[-int(rng.integers(1, min(len(made), 200) + 1))])
            continue
        own = rng.integers(0, 256, (int(rng.integers(1, 18)), 16), dtype=np.uint8)
        made.append(np.concatenate([starts[int(rng.integers(shared))], own]))
    return made


def filled(name: str, blocks: int = 1500, requests: int = 400) -> Rows:
    rows = Rows(name)
    for chain in chains(5, requests):
        rows.ask(chain)
        if rows.index.blocks > blocks:
            rows.leave(rows.index.blocks - blocks)
    return rows


@pytest.mark.parametrize("name", NAMES)
def test_candidates_are_distinct_and_on_disk_and_as_many_as_asked_for(name: str) -> None:
    rows = filled(name)
    for count in (1, 50, 1000, 5000):
        found = rows.policy.candidates(rows.index, count, rows.now)
        assert len(np.unique(found)) == len(found) >= min(count, rows.index.blocks)
        assert np.all(rows.index.flags[found] & DISK)


@pytest.mark.parametrize("name", NAMES)
def test_no_chain_loses_its_start(name: str) -> None:
    rows = filled(name, blocks=700)
    assert rows.index.blocks == 700
    assert rows.index.ghost_count == 0


@pytest.mark.parametrize("name", NAMES)
def test_memory_keeps_its_bounds(name: str) -> None:
    rows = filled(name, blocks=1000, requests=700)
    policy = rows.policy
    assert policy.ghosts <= 4 * 1000
    per_row = 32 * rows.index.row_limit + 16 * policy.ghosts
    assert policy.state_bytes <= per_row + 64 * 4096  # pages that are not full


@pytest.mark.parametrize("name", NAMES)
def test_the_same_leave_after_a_restart(name: str) -> None:
    rows = filled(name)
    state = {key: np.array(value) for key, value in rows.policy.capture(rows.index).items()}
    again = eviction.make(name)
    again.restore(rows.index, state)
    for policy in (again, rows.policy):
        assert policy.ghosts == rows.policy.ghosts
    found = [one.candidates(rows.index, 200, rows.now + 9).tolist() for one in (again, rows.policy)]
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["adaptive", "s3fifo"])
def test_a_state_of_another_shape_is_refused(name: str) -> None:
    rows = filled(name, requests=300)
    good = rows.policy.capture(rows.index)
    for field in good:
        without = {key: value for key, value in good.items() if key != field}
        with pytest.raises(KeyError):
            eviction.make(name).restore(rows.index, without)
    bad: Any = {**good, "young_prints": np.zeros((3, 3), np.uint32)}
    with pytest.raises(ValueError, match="shape"):
        eviction.make(name).restore(rows.index, bad)


def test_what_comes_back_soon_outlives_what_does_not() -> None:
    """Conversations come back after a minute, single questions never: adaptive learns which."""
    kept = {}
    for name in ("lru", "adaptive"):
        rows, rng, hits = Rows(name), np.random.default_rng(2), 0
        talks: list[tuple[float, np.ndarray]] = []
        for number in range(1600):
            if talks and talks[0][0] <= rows.now:
                _, chain = talks.pop(0)
                hits += int(rows.index.contains(1, chain).sum()) if number > 800 else 0
                own = rng.integers(0, 256, (2, 16), dtype=np.uint8)
                chain = np.concatenate([chain, own])
                if len(chain) < 20:
                    talks.append((rows.now + 60, chain))
            else:
                chain = rng.integers(0, 256, (4, 16), dtype=np.uint8)
                if number % 8 == 0:
                    talks.append((rows.now + 60, chain))
            rows.ask(chain, 0.5)
            if rows.index.blocks > 350:
                rows.leave(rows.index.blocks - 350)
        kept[name] = hits
    assert kept["adaptive"] > 1.1 * kept["lru"]


def test_ample_room_is_used_in_the_order_of_use() -> None:
    rows, order = filled("adaptive", blocks=100_000), filled("lru", blocks=100_000)
    assert rows.leave(300).tolist() == order.leave(300).tolist()


def test_a_batch_of_many_is_chosen_from_a_sample_and_all_the_same_is_enough() -> None:
    rows = Rows("adaptive")
    rng = np.random.default_rng(1)
    for _ in range(40):
        rows.ask(rng.integers(0, 256, (1000, 16), dtype=np.uint8))
    policy = rows.policy
    assert isinstance(policy, Adaptive)
    policy._late, policy._found = 1.0, 1.0
    before = rows.index.blocks
    victims = rows.leave(3000)
    assert len(victims) == 3000
    assert rows.index.blocks == before - 3000
    assert rows.index.ghost_count == 0


# -- ghosts ---------------------------------------------------------------------------------------


def test_ghosts_are_found_once() -> None:
    ghosts = Ghosts()
    hashes = np.random.default_rng(3).integers(0, 2**64, 5000, np.uint64)
    seen, marks = np.arange(5000, dtype=np.uint32), np.full(5000, 7, np.uint16)
    assert ghosts.is_full(5000)
    ghosts.turn_over(5000)
    lost = ghosts.file(hashes, seen, marks)
    assert len(ghosts) + len(lost[0]) == 5000
    assert len(lost[0]) < 200
    there, times, found = ghosts.take(hashes[:1000])
    assert there.mean() > 0.95
    assert np.array_equal(times[there], seen[:1000][there])
    assert np.all(found[there] == 7)
    assert not ghosts.take(hashes[:1000])[0].any()
    assert len(ghosts) == 5000 - len(lost[0]) - int(there.sum())


def test_a_full_table_forgets_the_oldest_of_a_bucket() -> None:
    table = Table(1)
    same_bucket = np.arange(1, 40, dtype=np.uint64)
    times = np.arange(100, 139, dtype=np.uint32)
    lost, _ = table.file(same_bucket, times, np.ones(39, np.uint16))
    assert sorted(lost.tolist()) == list(range(100, 123))
    assert table.count == 16
    assert table.take(same_bucket)[0].tolist() == [False] * 23 + [True] * 16


# -- the table of worth ---------------------------------------------------------------------------


def test_worth_follows_what_came_back() -> None:
    learned = reuse.Reuse()
    often, never = (reuse.mark(np.array([count]), 1, np.array([False])) for count in (2, 1))
    ages = np.array([8.0])
    learned.returned += 1000 * reuse.tally(reuse.cells_of(often, ages))
    waiting = 1000 * reuse.tally(reuse.cells_of(never, np.array([60.0])))
    learned.learn(waiting)
    young = np.array([1.0])
    worth = [float(learned.worth_of(reuse.cells_of(one, young))[0]) for one in (often, never)]
    assert worth[0] > 10 * worth[1]
    too_old = float(learned.worth_of(reuse.cells_of(often, np.array([600.0])))[0])
    assert too_old < worth[0] / 10


def test_ages_fall_into_bins_by_the_root_of_two() -> None:
    marks = np.ones(7, np.uint16)
    ages = np.array([0.0, 0.49, 0.5, 0.75, 1.0, 2.0, 1e12])
    assert (reuse.cells_of(marks, ages) % reuse.BINS).tolist() == [0, 0, 1, 2, 3, 5, 47]


# -- stores ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("clean", [True, False])
def test_a_store_opened_again_parts_with_the_same_blocks(
    tmp_path: Path, name: str, clean: bool
) -> None:
    local = Local(tmp_path / "store", policy=name)
    for number in range(12):
        keys = [key(number * 10 + at) for at in range(4)]
        local.put(keys, [block(at) for at in range(4)], chain=True)
        local.store.touch(local.namespace, 0, np.frombuffer(keys[0], np.uint8)[None])
    if clean:
        local.store.drain()
    else:
        local.store.checkpoint()
        local.store.run_chores()
    assert (tmp_path / "store" / memo.FILE).exists() == (name in ("adaptive", "s3fifo"))
    need = 10 * record.image_bytes(4096)
    expected = choose_victims(local.core, need).tolist()
    local.store.close()
    again = Local(tmp_path / "store", policy=name)
    assert choose_victims(again.core, need).tolist() == expected
    again.store.close()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x93NUMPY", bytes(5000)])
def test_what_does_not_fit_costs_what_was_learned_and_no_more(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    local = Local(tmp_path / "store", policy="adaptive")
    local.put([key(1)], [block(1)])
    local.store.drain()
    local.store.close()
    (tmp_path / "store" / memo.FILE).write_bytes(content)
    again = Local(tmp_path / "store", policy="adaptive")
    assert again.core.index.blocks == 1
    assert "begins anew" in caplog.text
    again.store.close()

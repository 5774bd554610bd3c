"""Policies: the exact order of LRU, and what leaf-first eviction leaves behind."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore import eviction
from kvstore.columns import DISK, GHOST, HIDDEN, U8, U32, U64, UNSYNCED, WRITING
from kvstore.errors import UsageError
from kvstore.eviction.lru import Lru
from kvstore.index import Index


def oldest(last_use: U64, flags: U8, count: int) -> list[int]:
    """The definition: sort everything."""
    there = np.flatnonzero((flags & (DISK | WRITING | GHOST | HIDDEN)) == DISK)
    found: list[int] = there[np.argsort(last_use[there])][:count].tolist()
    return found


def test_policies_have_names() -> None:
    assert isinstance(eviction.make("lru"), Lru)
    with pytest.raises(UsageError, match="no eviction policy 'best'"):
        eviction.make("best")


@pytest.mark.parametrize("rows", [0, 1, 10, 3000, 100_000])
def test_lru_offers_the_oldest_first(rows: int) -> None:
    rng = np.random.default_rng(rows)
    last_use = rng.permutation(rows * 2).astype(np.uint64)[:rows]
    others = [WRITING, GHOST, HIDDEN, DISK | WRITING, DISK | HIDDEN, 0]
    flags = rng.choice([DISK, DISK | UNSYNCED, *others], rows).astype(np.uint8)
    for count in (1, 7, 1000, 50_000, 10**6):
        found = Lru().oldest(last_use, flags, count)
        assert found.dtype == np.uint32
        assert found.tolist() == oldest(last_use, flags, count)


@pytest.mark.parametrize("seed", range(4))
def test_lru_stays_exact_while_rows_are_used_and_leave(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, policy = 60_000, Lru()
    last_use = rng.permutation(rows).astype(np.uint64)
    flags = np.full(rows, DISK, np.uint8)
    clock = rows
    for _ in range(150):
        used = rng.integers(0, rows, int(rng.integers(0, 800)))
        last_use[used] = np.arange(clock, clock + len(used))
        clock += len(used)
        count = int(rng.integers(1, 1500))
        found = policy.oldest(last_use, flags, count)
        assert found.tolist() == oldest(last_use, flags, count)
        leaving = found[rng.random(len(found)) < 0.6]
        flags[leaving] = rng.choice([0, HIDDEN, GHOST], len(leaving))
        back = np.flatnonzero(flags == 0)[: int(rng.integers(0, 900))]
        flags[back] = DISK
        last_use[back] = np.arange(clock, clock + len(back))
        clock += len(back)


def test_lru_offers_rows_again_that_were_not_taken() -> None:
    last_use, flags = np.arange(50, dtype=np.uint64), np.full(50, DISK, np.uint8)
    policy = Lru()
    first = policy.oldest(last_use, flags, 10).tolist()
    assert policy.oldest(last_use, flags, 10).tolist() == first == list(range(10))


def test_lru_never_loses_sight_of_a_row() -> None:
    """Fault 1 and 2 of the original server: touched and restored blocks must stay evictable."""
    last_use, flags = np.arange(5000, dtype=np.uint64), np.full(5000, DISK, np.uint8)
    policy = Lru()
    policy.oldest(last_use, flags, 1)
    last_use[:] = np.arange(5000, 10_000)
    assert len(policy.oldest(last_use, flags, 5000)) == 5000


def test_lru_says_what_it_remembers() -> None:
    policy, rows = Lru(), 300_000
    index = Index(policy=policy)
    nothing = index.index_bytes
    policy.oldest(np.arange(rows, dtype=np.uint64), np.full(rows, DISK, np.uint8), 100)
    assert index.index_bytes - nothing == policy.state_bytes
    assert 0 < policy.state_bytes < rows


class Cache:
    """An index at capacity with LRU, as a store drives it."""

    def __init__(self, blocks: int) -> None:
        self.index, self.policy, self.blocks = Index(seed=1), Lru(), blocks
        self.clock = 0

    def put_chain(self, keys: np.ndarray) -> None:
        index = self.index
        self.clock += 1_000_000
        found = index.find(1, keys)
        new = ~index.readable(found)
        index.touch(found[~new], self.clock)
        count = int(new.sum())
        self.make_room(index.blocks + count - self.blocks)
        found = index.find(1, keys[new])
        absent = found == 0xFFFFFFFF
        sizes, numbers = np.full(count, 4096, np.uint32), np.arange(count, dtype=np.uint64)
        found[absent] = index.insert(
            1, keys[new][absent], sizes[absent], numbers[absent], self.clock
        )
        ghosts = found[~absent]
        index.realize(ghosts, sizes[~absent], numbers[~absent], self.clock)
        rows = index.find(1, keys)
        index.link(rows[1:], rows[:-1])
        index.commit(found, index.generations[found], numbers)

    def make_room(self, blocks: int) -> None:
        index = self.index
        while blocks > 0:
            candidates = self.policy.candidates(index, 4 * blocks + 64, 0.0)
            victims = index.victims(candidates, blocks * 8192, 0.0)
            assert len(victims)
            gone = index.remove(victims)
            assert sorted(gone) == sorted(victims)
            index.free(gone)
            blocks -= len(victims)


def test_eviction_leaves_no_orphans() -> None:
    """Chains with shared starts through a full cache: every cached block has its parent cached."""
    rng = np.random.default_rng(3)
    cache = Cache(400)
    starts = rng.integers(0, 256, (8, 20, 16), dtype=np.uint8)
    for _ in range(300):
        start = starts[int(rng.zipf(1.5)) % 8][: int(rng.integers(1, 21))]
        own = rng.integers(0, 256, (int(rng.integers(0, 30)), 16), dtype=np.uint8)
        cache.put_chain(np.concatenate([start, own]))
        index = cache.index
        assert index.blocks <= 400
        assert index.ghost_count == 0
        rows: U32 = index.rows_of(None)
        parents = index.parents[rows]
        assert index.readable(parents[parents != 0xFFFFFFFF]).all()
    assert index.blocks > 300
    assert index.dropped_links == 0


def test_the_order_of_use_decides() -> None:
    cache = Cache(3)
    keys = np.arange(4, dtype=np.uint8).reshape(4, 1, 1).repeat(8, axis=2)
    for key in (0, 1, 2, 0, 3):
        cache.put_chain(keys[key])
    there = [bool(cache.index.contains(1, keys[key])[0]) for key in range(4)]
    assert there == [True, False, True, True]

"""The index, point by point. Long random sequences are in test_index_model.py."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from kvstore import chains
from kvstore.columns import NONE, U32, U64, Arrays, Columns
from kvstore.errors import InvalidKey
from kvstore.hashtable import HashTable
from kvstore.index import DISK, DURABLE, GHOST, HIDDEN, MEM, UNSYNCED, WRITING, Index
from kvstore.keys import KeyArray, space_number

SPACE = space_number(3, 0)


def random_keys(seed: int, count: int, length: int = 36) -> KeyArray:
    return np.random.default_rng(seed).integers(0, 256, (count, length), dtype=np.uint8)


def numbered(count: int, start: int = 0) -> U64:
    return np.arange(start, start + count, dtype=np.uint64)


def insert(index: Index, keys: KeyArray, space: int = SPACE, size: int = 1000) -> U32:
    """Insert keys as finished blocks."""
    sizes = np.full(len(keys), size, np.uint32)
    rows = index.insert(space, keys, sizes, numbered(len(keys), 1), 0)
    assert index.commit(rows, index.generations[rows], numbered(len(keys))).all()
    return rows


def chain(index: Index, length: int, seed: int = 1) -> U32:
    """Insert a chain, start first."""
    rows = insert(index, random_keys(seed, length))
    assert index.link(rows[1:], rows[:-1]) == 0
    return rows


def one(row: int | np.uint32) -> U32:
    return np.array([row], np.uint32)


@pytest.fixture
def index() -> Index:
    return Index(seed=1)


class TestAnswers:
    def test_a_key_that_differs_in_one_byte_is_another(self, index: Index) -> None:
        base = random_keys(1, 1)
        changed = np.repeat(base, 36, axis=0)
        changed[np.arange(36), np.arange(36)] ^= 1
        row = insert(index, base)
        assert (index.find(SPACE, changed) == NONE).all()
        rows = insert(index, changed)
        assert index.find(SPACE, changed).tolist() == rows.tolist()
        assert index.find(SPACE, base) == row

    def test_all_byte_values_are_allowed(self, index: Index) -> None:
        keys = np.array([[0] * 8, [255] * 8, [0] * 7 + [1], [1] + [0] * 7], np.uint8)
        rows = insert(index, keys)
        assert index.find(SPACE, keys).tolist() == rows.tolist()
        assert index.keys_of(rows).tolist() == keys.tolist()

    @pytest.mark.parametrize("fill", [0, 7])
    def test_a_key_and_its_continuation_are_different(self, index: Index, fill: int) -> None:
        found = {}
        for length in [5, *range(1, 5), *range(6, 65)]:
            key = np.full((1, length), fill, np.uint8)
            assert index.find(SPACE, key) == NONE
            found[length] = insert(index, key)
        for length, row in found.items():
            key = np.full((1, length), fill, np.uint8)
            assert index.find(SPACE, key) == row
            assert index.keys_of(row).tolist() == key.tolist()

    def test_spaces_do_not_see_each_other(self, index: Index) -> None:
        keys = random_keys(1, 10)
        spaces = [space_number(0, 0), space_number(0, 1), space_number(1, 0), (1023 << 16) + 65535]
        rows = [insert(index, keys, space) for space in spaces]
        for space, mine in zip(spaces, rows, strict=True):
            assert index.find(space, keys).tolist() == mine.tolist()
            assert set(index.spaces[mine].tolist()) == {space}
            assert index.rows_of(space).tolist() == mine.tolist()

    def test_a_batch_may_repeat_keys(self, index: Index) -> None:
        keys = random_keys(1, 3)
        rows = insert(index, keys[:2])
        asked = keys[[0, 1, 0, 2, 2, 1]]
        assert index.find(SPACE, asked).tolist() == [*rows[[0, 1, 0]], NONE, NONE, rows[1]]
        assert index.contains(SPACE, asked).tolist() == [True, True, True, False, False, True]

    def test_an_empty_batch_and_an_empty_index(self, index: Index) -> None:
        nothing = np.zeros((0, 36), np.uint8)
        assert len(index.find(SPACE, nothing)) == len(insert(index, nothing)) == 0
        assert index.prefix(SPACE, nothing) == index.blocks == index.index_bytes_per_block == 0
        assert index.find(SPACE, random_keys(1, 2)).tolist() == [NONE, NONE]
        assert not index.readable(np.array([NONE, NONE], np.uint32)).any()
        assert len(index.remove(np.zeros(0, np.uint32))) == 0

    def test_keys_out_of_bounds_are_refused(self, index: Index) -> None:
        with pytest.raises(InvalidKey, match="65 bytes"):
            insert(index, random_keys(1, 1, 65))
        with pytest.raises(InvalidKey, match="out of range"):
            insert(index, random_keys(1, 1), space_number(1024, 0))
        assert index.row_limit == 0

    def test_a_prefix_ends_at_the_first_miss(self, index: Index) -> None:
        keys = random_keys(1, 3000)
        rows = insert(index, keys)
        assert index.prefix(SPACE, keys) == 3000
        for missing in (2999, 2560, 2559, 512, 511, 0):
            index.remove(rows[missing : missing + 1])
            assert index.prefix(SPACE, keys) == missing

    def test_only_finished_blocks_can_be_read(self, index: Index) -> None:
        keys = random_keys(1, 3)
        rows = index.insert(SPACE, keys, np.full(3, 5, np.uint32), numbered(3), 0)
        assert index.find(SPACE, keys).tolist() == rows.tolist()
        assert not index.contains(SPACE, keys).any()
        index.commit(rows[:1], index.generations[rows[:1]], numbered(1))
        index.abort(rows[1:2])
        assert index.contains(SPACE, keys).tolist() == [True, False, False]
        assert index.find(SPACE, keys).tolist() == [rows[0], NONE, rows[2]]
        assert index.blocks == 1


class TestGrowth:
    def test_many_rows_come_and_go(self, index: Index) -> None:
        """Against a dict, over many splits, with recycled ids and longer keys on the way."""
        rng = np.random.default_rng(7)
        known: dict[bytes, int] = {}
        for turn in range(36):
            length = 36 if turn < 24 else 64
            keys = random_keys(turn, int(rng.integers(1, 12_000)), length)
            rows = insert(index, keys, length)
            known.update(zip(map(bytes, keys), rows.tolist(), strict=True))
            keys_now = list(known)
            chosen = rng.choice(len(keys_now), len(keys_now) // 8, replace=False).tolist()
            leaving = [keys_now[at] for at in chosen]
            gone = np.array([known.pop(key) for key in leaving], np.uint32)
            assert sorted(index.remove(gone)) == sorted(gone)
            index.free(gone)
            self.compare(index, known, leaving[:500])
        assert len(index._table._counts) > 4
        assert index.row_limit < 2 * len(known)

    @staticmethod
    def compare(index: Index, known: dict[bytes, int], gone: list[bytes]) -> None:
        for length in (36, 64):
            keys = [key for key in known if len(key) == length]
            array = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, length)
            assert index.find(length, array).tolist() == [known[key] for key in keys]
            missing = [key for key in gone if len(key) == length]
            array = np.frombuffer(b"".join(missing), np.uint8).reshape(-1, length)
            assert (index.find(length, array) == NONE).all()
        assert index.blocks == len(known) == len(index._table)

    @pytest.mark.parametrize(("count", "recovers"), [(270, True), (1200, False)])
    def test_full_buckets_overflow(
        self, index: Index, monkeypatch: pytest.MonkeyPatch, count: int, recovers: bool
    ) -> None:
        """All keys in two buckets, at the end and at the start of a segment, with one print.

        Beyond 255 rows past a bucket its count cannot go down again; answers stay right.
        """
        last = np.uint64(511 << 16)

        def few(_: HashTable, identities: U32) -> U64:
            return np.where(identities[:, 1] & 1, last, np.uint64(0))

        monkeypatch.setattr(HashTable, "digest", few)
        keys = random_keys(1, count)
        rows = insert(index, keys)
        for kept in (count, *range(count // 90 * 90, -1, -90)):
            index.remove(rows[kept:])
            rows = rows[:kept]
            assert index.find(SPACE, keys[:kept]).tolist() == rows.tolist()
            assert (index.find(SPACE, keys[kept:]) == NONE).all()
        assert not index._table.prints.any()
        assert recovers is not bool(index._table.passed.any())
        again = insert(index, keys[:100])
        assert index.find(SPACE, keys[:100]).tolist() == again.tolist()

    def test_a_count_that_was_too_high_is_not_trusted_again(self, index: Index) -> None:
        table, bucket = index._table, np.zeros(300, np.intp)
        table._pass(bucket[:254], 1)
        table._pass(bucket[:4], -1)
        assert table.passed[0] == 250
        table._pass(bucket, 1)
        table._pass(bucket, -1)
        assert table.passed[0] == 255

    def test_what_an_empty_slot_once_held_does_not_count(
        self, index: Index, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A recycled row id lands in the bucket in which an empty slot still names it."""
        monkeypatch.setattr(HashTable, "digest", lambda _, ids: np.zeros(len(ids), np.uint64))
        keys = random_keys(1, 18)
        for at in range(17):
            insert(index, keys[at : at + 1])
        last, first = index.find(SPACE, keys[15:16]), index.find(SPACE, keys[:1])
        index.remove(np.append(last, first))
        index.free(np.append(first, last))
        assert insert(index, keys[17:]) == last
        overflowed = index.find(SPACE, keys[16:17])
        index.remove(np.append(last, overflowed))
        assert index.find(SPACE, keys[[15, 16, 17]]).tolist() == [NONE, NONE, NONE]
        assert index.contains(SPACE, keys[1:15]).all()

    def test_too_many_equal_hashes_are_an_error_and_no_more(
        self, index: Index, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvstore.hashtable._MAX_DEPTH", 6)
        real, rest = HashTable.digest, np.uint64(2**48 - 1)
        monkeypatch.setattr(HashTable, "digest", lambda table, ids: real(table, ids) & rest)
        before = insert(index, random_keys(1, 5))
        with pytest.raises(MemoryError, match="hash"):
            insert(index, random_keys(2, 9000))
        assert index.find(SPACE, random_keys(1, 5)).tolist() == before.tolist()
        assert index.rows_of(None).tolist() == before.tolist()
        assert (index.find(SPACE, random_keys(2, 9000)) == NONE).all()
        assert len(insert(index, random_keys(3, 4000))) == 4000
        assert index.row_limit <= 9005
        assert index.contains(SPACE, random_keys(3, 4000)).all()

    def test_a_view_that_is_held_goes_stale_but_never_dangles(self) -> None:
        index = Index(max_rows=1)
        insert(index, random_keys(1, 10))
        held, stamps = index.flags, index.last_use
        room = index._columns.room
        insert(index, random_keys(2, 3 * room))
        assert index._columns.room > 3 * room
        assert (held[:10] == DISK).all()
        assert (stamps[:10] == index.last_use[:10]).all()
        assert index.contains(SPACE, random_keys(1, 10)).all()
        assert index.contains(SPACE, random_keys(2, 3 * room)).all()

    def test_no_memory_leaves_the_columns_usable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        columns = Columns(1, 36)
        columns.allocate(10)
        columns.flags[:10] = 1

        def refuse(self: Arrays, rows: int) -> None:
            raise MemoryError

        monkeypatch.setattr(Arrays, "_grow", refuse)
        with pytest.raises(MemoryError):
            columns.allocate(columns.room)
        assert columns.used == 10
        assert columns.allocate(1).tolist() == [10]

    def test_fields_are_for_reading_only(self, index: Index) -> None:
        rows = insert(index, random_keys(1, 2))
        for name in ("flags", "sizes", "places", "generations", "last_use", "parents", "children"):
            with pytest.raises(ValueError, match="read-only"):
                getattr(index, name)[rows] = 1
            with pytest.raises(AttributeError):
                setattr(index, name, rows)
        with pytest.raises(ValueError, match="read-only"):
            index.references[rows] = 1
        index.policy[rows] = 9
        assert index.policy[rows].tolist() == [9, 9]

    def test_lookups_make_no_object_per_key(self, index: Index) -> None:
        keys = random_keys(1, 20_000)
        insert(index, keys)
        index.contains(SPACE, keys)
        tracemalloc.start()
        try:
            index.contains(SPACE, keys)
            blocks = sum(s.count for s in tracemalloc.take_snapshot().statistics("filename"))
        finally:
            tracemalloc.stop()
        assert blocks < 1000

    def test_memory_is_what_the_index_says(self) -> None:
        """Resident memory of a process, before and after a million rows, against 100 B a block."""
        program = """
import numpy as np
from kvstore.index import Index
from kvstore.eviction import make

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def fill(index, policy, batches):
    rng = np.random.default_rng(1)
    sizes, numbers = np.full(10_000, 1 << 20, np.uint32), np.arange(10_000, dtype=np.uint64)
    for _ in range(batches):
        keys = rng.integers(0, 256, (10_000, 36), dtype=np.uint8)
        index.commit(index.insert(5, keys, sizes, numbers, 0), numbers, numbers)
    policy.candidates(index, 4096, 0.0)

fill(Index(), make("lru"), 100)  # Memory for numpy's passing arrays, which malloc keeps.
before = resident()
policy = make("lru")
index = Index(policy=policy)
fill(index, policy, 100)
print((resident() - before) / index.blocks, index.index_bytes_per_block)
"""
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        resident, said = map(float, done.stdout.split())
        assert said <= 100
        assert said - 2 <= resident <= said + 8


class TestUse:
    def test_the_end_of_a_chain_is_older_than_its_start(self, index: Index) -> None:
        rows = chain(index, 5)
        assert (np.diff(index.last_use[rows].astype(np.int64)) == -1).all()
        index.touch(rows[[2, 0, 4]], 1_000_000)
        order = rows[np.argsort(index.last_use[rows])]
        assert order.tolist() == rows[[3, 1, 4, 0, 2]].tolist()
        assert index.last_use[rows[2]] == 1_000_002

    def test_stamps_rise_even_if_the_clock_does_not(self, index: Index) -> None:
        rows = insert(index, random_keys(1, 4))
        index.touch(rows, 500)
        for now in (500, 3, 500):
            before = int(index.last_use[rows].max())
            index.touch(rows[::-1], now)
            assert int(index.last_use[rows].min()) == before + 1
        assert len(np.unique(index.last_use[rows])) == 4

    def test_of_repeated_rows_the_first_counts(self, index: Index) -> None:
        a, b = insert(index, random_keys(1, 2))
        index.touch(np.array([a, b, a], np.uint32), 0)
        assert index.last_use[a] > index.last_use[b]

    def test_references_count_repeats(self, index: Index) -> None:
        a, b = insert(index, random_keys(1, 2))
        many = np.array([a, b, a, a], np.uint32)
        index.acquire(many)
        assert index.references[[a, b]].tolist() == [3, 1]
        with pytest.raises(ValueError, match="fewer references"):
            index.release(np.array([b, a, b], np.uint32))
        assert index.references[[a, b]].tolist() == [3, 1]
        assert not index.evictable(many, 0).any()
        index.release(many)
        assert index.references[[a, b]].tolist() == [0, 0]
        assert index.evictable(many, 0).all()

    def test_references_do_not_wrap(self, index: Index) -> None:
        (row,) = insert(index, random_keys(1, 1))
        index.acquire(np.full(65_535, row, np.uint32))
        with pytest.raises(OverflowError, match="65535"):
            index.acquire(one(row))
        assert index.references[row] == 65_535

    def test_leases_end_by_themselves_and_are_never_shortened(self) -> None:
        index = Index(epoch=50.0, seed=1)
        rows = insert(index, random_keys(1, 3), size=4096)
        index.lease(rows[:2], 55.0)
        index.lease(rows[1:], 52.04)
        assert index.leased_bytes(51.0) == 3 * 8192
        assert index.evictable(rows, 52.0).tolist() == [False, False, False]
        assert index.evictable(rows, 52.1).tolist() == [False, False, True]
        assert index.leased_bytes(52.1) == 2 * 8192
        assert index.leased_bytes(55.0) == 0
        assert index.evictable(rows, 55.0).all()

    def test_a_lease_in_the_past_is_none(self) -> None:
        index = Index(epoch=50.0, seed=1)
        rows = insert(index, random_keys(1, 1))
        index.lease(rows, 40.0)
        assert index.leased_bytes(0.0) == 0
        assert index.evictable(rows, 50.0).all()

    def test_a_lease_goes_with_its_row(self, index: Index) -> None:
        rows = insert(index, random_keys(1, 2), size=4096)
        index.lease(rows, 9.0)
        index.free(index.remove(rows[:1]))
        assert index.leased_bytes(0.0) == 8192
        again = insert(index, random_keys(2, 1), size=4096)
        assert again.tolist() == rows[:1].tolist()
        assert index.evictable(again, 0.0).all()

    def test_pins_hold_until_their_deadline(self, index: Index) -> None:
        rows = insert(index, random_keys(1, 3), size=4096)
        index.pin(int(rows[0]), 10.0)
        index.pin(int(rows[1]), 5.0)
        assert dict(index.pins) == {rows[0]: 10.0, rows[1]: 5.0}
        assert index.evictable(rows, 0.0).tolist() == [False, False, True]
        assert index.pinned_bytes(0.0) == 2 * 8192
        assert index.evictable(rows, 5.0).tolist() == [False, True, True]
        index.unpin(int(rows[0]))
        index.unpin(int(rows[2]))
        assert index.evictable(rows, 0.0).all()
        assert index.pinned_bytes(5.0) == 0

    def test_a_pin_goes_with_its_row(self, index: Index) -> None:
        rows = insert(index, random_keys(1, 2))
        index.pin(int(rows[0]), 10.0)
        index.free(index.remove(rows))
        assert not index.pins

    def test_flags_of_the_caller(self, index: Index) -> None:
        rows = insert(index, random_keys(1, 2))
        index.set_flags(rows, DURABLE | UNSYNCED)
        index.clear_flags(rows[:1], UNSYNCED)
        assert index.flags[rows].tolist() == [DISK | DURABLE, DISK | DURABLE | UNSYNCED]
        assert index.contains(SPACE, random_keys(1, 2)).all()
        assert index.evictable(rows, 0).all()


class TestChains:
    def test_a_row_gets_a_parent_only_once(self, index: Index) -> None:
        a, b, c = insert(index, random_keys(1, 3))
        assert index.link(one(c), one(a)) == 0
        assert index.link(one(c), one(a)) == 0
        assert index.link(one(c), one(b)) == 1
        assert index.dropped_links == 1
        assert index.parents[c] == a
        assert index.children[[a, b, c]].tolist() == [1, 0, 0]
        assert index.children_of(int(a)).tolist() == [c]

    def test_a_row_may_be_named_twice(self, index: Index) -> None:
        a, b, c, d = insert(index, random_keys(1, 4))
        assert index.link(np.array([c, c], np.uint32), np.array([a, a], np.uint32)) == 0
        assert index.link(np.array([d, d], np.uint32), np.array([a, b], np.uint32)) == 1
        assert index.children[[a, b]].tolist() == [2, 0]

    def test_cycles_are_dropped(self, index: Index) -> None:
        a, _, c = chain(index, 3)
        assert index.link(one(a), one(a)) == 1
        assert index.link(one(a), one(c)) == 1
        assert index.parents[a] == NONE
        x, y, z = insert(index, random_keys(2, 3))
        rows, parents = np.array([x, y, z], np.uint32), np.array([y, z, x], np.uint32)
        assert index.link(rows, parents) == 1
        assert index.parents[rows].tolist() == [y, z, NONE]
        assert index.dropped_links == 3

    def test_a_parent_in_another_space_is_dropped(self, index: Index) -> None:
        (a,), (b,) = insert(index, random_keys(1, 1)), insert(index, random_keys(1, 1), SPACE + 1)
        assert index.link(one(a), one(b)) == 1
        assert index.children[b] == 0

    def test_hidden_and_free_rows_are_no_parents(self, index: Index) -> None:
        a, b, c = insert(index, random_keys(1, 3))
        index.remove(one(a))
        assert index.link(one(b), one(a)) == 1
        assert index.link(one(a), one(b)) == 1
        index.free(one(a))
        assert index.link(one(b), one(a)) == 1
        assert index.link(one(b), one(NONE)) == 0
        assert index.link(one(b), one(c)) == 0

    def test_depth_ends_at_65535(self, index: Index) -> None:
        rows = insert(index, random_keys(1, 65_540))
        assert index.link(rows[1:], rows[:-1]) == 1
        assert index.parents[rows[65_536]] == NONE
        assert index.depths[rows[65_535]] == 65_535
        assert index.depths[rows[65_539]] == 3

    def test_depth_ends_at_65535_also_for_chains_from_the_end(self, index: Index) -> None:
        rows = insert(index, random_keys(1, 65_540))[::-1]
        for at in range(0, len(rows), 4096):
            # Every second link first, so that rows with children are linked later.
            part = rows[at : at + 4097]
            index.link(part[1:-1:2], part[2::2])
            index.link(part[0:-1:2], part[1::2])
        longest = max(len(index.ancestors(int(row))) for row in rows[::4096])
        assert longest <= 65_535
        assert 1 <= index.dropped_links <= 2

    def test_depth_counts_what_was_linked_late(
        self, index: Index, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(chains, "MAX_DEPTH", 4)
        rows, late = chain(index, 3), chain(index, 3, seed=2)
        assert index.link(late[:1], rows[1:2]) == 0
        # The last of the late ones now lies at depth 4, though its column still says 2.
        (new,) = insert(index, random_keys(3, 1))
        assert index.link(one(new), late[2:]) == 1
        assert index.link(one(new), late[1:2]) == 0
        assert index.depths[[*late, new]].tolist() == [2, 3, 4, 4]

    def test_depth_forgets_what_has_left(
        self, index: Index, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(chains, "MAX_DEPTH", 4)
        index.free(index.remove(chain(index, 5)))
        rows, late = chain(index, 2, seed=2), chain(index, 2, seed=3)
        assert index.link(late[:1], rows[1:]) == 0
        new = insert(index, random_keys(4, 2))
        assert index.link(new, np.array([late[1], new[0]], np.uint32)) == 1
        assert index.depths[new].tolist() == [4, 0]

    def test_endless_walks_are_cut(self, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = chain(index, 200)
        monkeypatch.setattr(chains, "_MAX_STEPS", 100)
        a, b = chain(index, 2, seed=2)
        assert index.link(one(a), one(rows[150])) == 1
        assert index.link(one(a), one(rows[50])) == 0
        assert index.depths[[a, b]].tolist() == [51, 1]

    def test_family(self, index: Index) -> None:
        rows = chain(index, 6)
        side = insert(index, random_keys(2, 2))
        index.link(side, np.array([rows[2], side[0]], np.uint32))
        assert index.ancestors(int(side[1])).tolist() == [side[0], *rows[2::-1]]
        assert index.ancestors(int(rows[0])).tolist() == []
        below = index.descendants(int(rows[1])).tolist()
        assert sorted(below) == sorted([*rows[2:], *side])
        for row in below:
            for ancestor in index.ancestors(row).tolist():
                if ancestor in below:
                    assert below.index(row) < below.index(ancestor)

    def test_an_unknown_parent_becomes_a_ghost_and_then_real(self, index: Index) -> None:
        keys = random_keys(1, 3)
        rows = insert(index, keys[1:])
        parents = index.ghosts(SPACE, keys[[0, 0]])
        assert parents[0] == parents[1]
        index.link(rows, parents)
        assert index.ghost_count == 1
        assert index.find(SPACE, keys[:1]) == parents[0]
        assert not index.contains(SPACE, keys[:1])
        index.realize(parents[:1], np.array([5], np.uint32), numbered(1, 9), 0)
        assert index.flags[parents[0]] == WRITING
        index.commit(parents[:1], index.generations[parents[:1]], numbered(1))
        assert index.contains(SPACE, keys).all()
        assert index.ghost_count == 0
        assert index.generations[parents[0]] == 9
        with pytest.raises(ValueError, match="ghosts"):
            index.realize(parents[:1], np.array([5], np.uint32), numbered(1, 9), 0)

    def test_a_ghost_nobody_links_to_does_not_stay(self, index: Index) -> None:
        (row,) = insert(index, random_keys(1, 1))
        ghost = index.ghosts(SPACE, random_keys(2, 1))
        other = index.ghosts(SPACE + 1, random_keys(2, 1))
        assert index.link(one(row), other) == 1
        assert index.ghost_count == 1
        assert index.link(one(row), ghost) == 0
        assert index.rows_of(None).tolist() == sorted([int(row), int(ghost[0])])

    def test_a_ghost_with_a_reference_waits(self, index: Index) -> None:
        a, b = chain(index, 2)
        index.acquire(one(a))
        index.remove(one(a))
        index.free(index.remove(one(b)))
        assert index.ghost_count == 1
        index.release(one(a))
        assert index.ghost_count == 0
        assert len(index.rows_of(None)) == 0

    def test_a_ghost_goes_when_its_references_are_taken(self, index: Index) -> None:
        a, b = chain(index, 2)
        index.acquire(one(a))
        index.remove(one(a))
        index.remove(one(b))
        assert index.take_references(one(a)) == 1
        assert index.ghost_count == 0

    def test_aborting_a_ghost_with_children_makes_it_one_again(self, index: Index) -> None:
        keys = random_keys(1, 2)
        child = insert(index, keys[1:])
        parent = index.ghosts(SPACE, keys[:1])
        index.link(child, parent)
        index.realize(parent, np.array([5], np.uint32), numbered(1, 9), 0)
        index.abort(parent)
        assert index.flags[parent[0]] == GHOST
        assert index.parents[child[0]] == parent[0]
        index.free(index.remove(child))
        assert len(index.rows_of(None)) == index.ghost_count == 0


class TestRemoval:
    def test_a_row_is_hidden_until_freed(self, index: Index) -> None:
        keys = random_keys(1, 2)
        rows = insert(index, keys, size=4096)
        gone = index.remove(rows[[1, 1]])
        assert gone.tolist() == [rows[1]]
        assert index.flags[rows[1]] == HIDDEN
        assert index.find(SPACE, keys).tolist() == [rows[0], NONE]
        assert (index.blocks, index.live_bytes) == (1, 8192)
        assert index.generations[rows[1]] == 2
        assert index.keys_of(gone).tolist() == keys[1:].tolist()
        assert len(index.remove(gone)) == 0
        again = insert(index, keys[1:])
        assert again[0] not in rows
        index.free(gone)
        assert insert(index, random_keys(2, 1)).tolist() == gone.tolist()

    def test_a_row_with_children_becomes_a_ghost_and_goes_with_the_last(self, index: Index) -> None:
        rows = chain(index, 4)
        assert len(index.remove(rows[:3])) == 0
        assert (index.flags[rows[:3]] == GHOST).all()
        assert (index.blocks, index.ghost_count) == (1, 3)
        assert index.remove(rows[3:]).tolist() == [rows[3]]
        assert (index.blocks, index.ghost_count) == (0, 0)
        assert index.rows_of(None).tolist() == [rows[3]]

    def test_a_whole_chain_leaves_in_one_call(self, index: Index) -> None:
        rows = chain(index, 3000)
        assert index.remove(rows).tolist() == rows.tolist()
        assert index.ghost_count == 0
        index.free(rows)
        assert len(index.rows_of(None)) == index.live_bytes == 0

    def test_a_ghost_above_another_child_stays(self, index: Index) -> None:
        a, b = chain(index, 2)
        (c,) = insert(index, random_keys(2, 1))
        index.link(one(c), one(a))
        index.remove(one(a))
        index.remove(one(b))
        assert index.flags[a] == GHOST
        assert index.children[a] == 1

    def test_references_move_to_the_caller(self, index: Index) -> None:
        rows = insert(index, random_keys(1, 2))
        index.acquire(rows[[0, 0, 1]])
        gone = index.remove(rows)
        with pytest.raises(ValueError, match="references"):
            index.free(gone)
        assert index.take_references(gone).tolist() == [2, 1]
        index.free(gone)
        with pytest.raises(ValueError, match="hidden"):
            index.free(gone)

    def test_what_was_removed_cannot_be_committed(self, index: Index) -> None:
        keys = random_keys(1, 2)
        rows = index.insert(SPACE, keys, np.full(2, 5, np.uint32), numbered(2), 0)
        index.remove(rows[:1])
        assert index.commit(rows, index.generations[rows], numbered(2)).tolist() == [False, True]
        assert index.contains(SPACE, keys).tolist() == [False, True]
        assert index.blocks == 1


class TestVictims:
    def test_children_go_before_their_parents(self, index: Index) -> None:
        rows = chain(index, 5)
        for need, count in ((1, 1), (8192, 1), (8193, 2), (3 * 8192, 3), (10**9, 5)):
            victims = index.victims(rows, need, 0.0)
            assert victims.tolist() == rows[::-1][:count].tolist()

    def test_nothing_is_needed(self, index: Index) -> None:
        rows = chain(index, 2)
        assert len(index.victims(rows, 0, 0.0)) == 0
        assert len(index.victims(rows[:0], 100, 0.0)) == 0

    def test_a_child_that_must_stay_keeps_all_its_ancestors(self, index: Index) -> None:
        rows = chain(index, 5)
        side = insert(index, random_keys(2, 1))
        index.link(side, rows[2:3])
        index.acquire(rows[3:4])
        assert index.victims(np.append(rows, side), 10**9, 0.0).tolist() == [rows[4], side[0]]
        index.release(rows[3:4])
        # Not a candidate is as good as not evictable.
        assert index.victims(rows, 10**9, 0.0).tolist() == [rows[4], rows[3]]

    def test_the_smallest_set_of_lowest_scores(self, index: Index) -> None:
        """A parent with a low score waits for its child with a high one; others come first."""
        a, b = chain(index, 2)
        c, d = insert(index, random_keys(2, 2))
        candidates = np.array([a, c, b, d], np.uint32)
        assert index.victims(candidates, 8192, 0.0).tolist() == [c]
        assert index.victims(candidates, 2 * 8192, 0.0).tolist() == [c, b]
        assert index.victims(candidates, 3 * 8192, 0.0).tolist() == [c, b, a]
        assert index.victims(candidates, 4 * 8192, 0.0).tolist() == [c, b, a, d]

    def test_sizes_may_be_given(self, index: Index) -> None:
        rows = insert(index, random_keys(1, 3), size=10)
        by_row = np.zeros(index.row_limit, np.int64)
        by_row[rows] = [7, 2, 1]
        assert len(index.victims(rows, 8, 0.0, by_row)) == 2
        assert len(index.victims(rows, 21, 0.0, lambda sizes: sizes.astype(np.int64))) == 3

    def test_ghosts_and_rows_being_written_stay(self, index: Index) -> None:
        rows = chain(index, 3)
        index.remove(rows[:1])
        new = index.insert(SPACE, random_keys(2, 1), np.array([5], np.uint32), numbered(1), 0)
        candidates = np.concatenate([rows, new])
        assert index.victims(candidates, 10**9, 0.0).tolist() == [rows[2], rows[1]]

    def test_long_chains_in_any_order(self, index: Index) -> None:
        rows = chain(index, 4096)
        shuffled = np.random.default_rng(1).permutation(rows)
        for candidates in (rows, rows[::-1], shuffled):
            assert index.victims(candidates, 10**12, 0.0).tolist() == rows[::-1].tolist()


class TestCheckpoint:
    def filled(self) -> Index:
        index = Index(seed=5)
        chain(index, 20)
        rows = insert(index, random_keys(3, 4, 64), space_number(9, 2))
        index.remove(chain(index, 6, seed=4)[:3])
        index.free(index.remove(rows[:1]))
        index.set_flags(rows[2:3], UNSYNCED)
        index.remove(rows[3:])
        return index

    def test_export_and_load_agree(self) -> None:
        before = self.filled()
        exported = before.export(0, before.row_limit)
        assert len(exported) == before.blocks + before.ghost_count
        after = Index(seed=6)
        assert len(after.load(exported)) == 0
        rows = exported.rows
        assert after.rows_of(None).tolist() == rows.tolist()
        for name in ("flags", "parents", "children", "depths", "last_use", "sizes", "places"):
            wanted = getattr(before, name)[rows]
            if name in ("sizes", "places"):
                wanted = np.where(exported.ghost, 0, wanted)
            assert getattr(after, name)[rows].tolist() == wanted.tolist(), name
        for field in dataclasses.fields(exported):
            again = getattr(after.export(0, after.row_limit), field.name)
            assert again.tolist() == getattr(exported, field.name).tolist()
        assert (after.blocks, after.live_bytes) == (before.blocks, before.live_bytes)
        assert after.ghost_count == before.ghost_count == 3
        assert after.contains(SPACE, random_keys(1, 20)).all()

    def test_life_goes_on_after_load(self) -> None:
        before = self.filled()
        after = Index(seed=6)
        after.load(before.export(0, before.row_limit))
        newest = int(after.last_use.max())
        rows = insert(after, random_keys(9, 40))
        assert len(np.intersect1d(rows, before.export(0, before.row_limit).rows)) == 0
        assert int(after.last_use[rows].min()) > newest
        assert after.row_limit == len(after.rows_of(None))

    def test_slices_are_complete(self) -> None:
        index = self.filled()
        whole = index.export(0, index.row_limit)
        parts = [index.export(start, start + 7) for start in range(0, index.row_limit, 7)]
        assert np.concatenate([part.rows for part in parts]).tolist() == whole.rows.tolist()

    def test_a_parent_being_written_is_exported_as_a_ghost(self, index: Index) -> None:
        keys = random_keys(1, 3)
        rows = index.insert(SPACE, keys, np.full(3, 5, np.uint32), numbered(3), 0)
        index.link(rows[1:2], rows[:1])
        index.commit(rows[1:2], index.generations[rows[1:2]], numbered(1))
        exported = index.export(0, index.row_limit)
        assert exported.rows.tolist() == rows[:2].tolist()
        assert exported.ghost.tolist() == [True, False]

    def test_only_an_empty_index_is_loaded(self) -> None:
        index = self.filled()
        with pytest.raises(ValueError, match="empty"):
            index.load(index.export(0, index.row_limit))

    def test_nothing_can_be_loaded(self, index: Index) -> None:
        assert len(index.load(Index().export(0, 0))) == 0
        assert index.contains(SPACE, random_keys(1, 1)).tolist() == [False]

    def test_of_two_rows_with_one_key_the_newer_is_kept(self) -> None:
        source = Index(seed=1)
        rows = insert(source, random_keys(1, 5))
        source.link(rows[2:3], rows[1:2])
        exported = source.export(0, 5)
        keys, generations = exported.keys.copy(), exported.generations.copy()
        keys[3], keys[4] = keys[1], keys[1]
        generations[[1, 3, 4]] = [7, 9, 8]
        index = Index(seed=2)
        losers = index.load(dataclasses.replace(exported, keys=keys, generations=generations))
        assert sorted(losers.tolist()) == sorted([rows[1], rows[4]])
        assert index.find(SPACE, random_keys(1, 2)).tolist() == [rows[0], rows[3]]
        # The child of a row that lost follows the one that won.
        assert index.parents[rows[2]] == rows[3]
        assert sorted(index.rows_of(None)) == sorted(rows[[0, 2, 3]])

    def test_a_block_wins_over_a_ghost_of_the_same_key(self) -> None:
        source = Index(seed=1)
        rows = chain(source, 3)
        exported = source.export(0, 3)
        keys = exported.keys.copy()
        keys[2] = keys[0]
        ghost = np.array([False, False, True])
        index = Index(seed=2)
        assert index.load(dataclasses.replace(exported, keys=keys, ghost=ghost)) == rows[2]
        assert index.contains(SPACE, random_keys(1, 2)).all()

    def test_impossible_links_are_dropped(self) -> None:
        source = Index(seed=1)
        rows = chain(source, 8)
        other = insert(source, random_keys(2, 1), SPACE + 1)
        exported = source.export(0, 9)
        parents = exported.parents.copy()
        parents[2], parents[1] = rows[2], 4_000_000_000
        parents[5], parents[7] = rows[6], other[0]
        index = Index(seed=2)
        index.load(dataclasses.replace(exported, parents=parents))
        found = index.parents[rows].tolist()
        assert found == [NONE, NONE, NONE, rows[2], rows[3], NONE, NONE, NONE]
        assert index.children[rows].tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
        assert index.depths[rows].tolist() == [0, 0, 0, 1, 2, 0, 0, 0]
        assert index.dropped_links == 5

    def test_a_ghost_without_children_is_not_kept(self) -> None:
        source = Index(seed=1)
        rows = chain(source, 5)
        exported = source.export(0, 5)
        ghost = np.array([True, False, True, True, True])
        index = Index(seed=2)
        index.load(dataclasses.replace(exported, ghost=ghost))
        assert index.rows_of(None).tolist() == rows[:2].tolist()
        assert index.ghost_count == 1

    def test_a_chain_over_the_limit_is_cut(self) -> None:
        source = Index(seed=1)
        rows = insert(source, random_keys(1, 65_600))
        exported = source.export(0, source.row_limit)
        parents = np.append(np.uint32(NONE), rows[:-1])
        index = Index(seed=2)
        index.load(dataclasses.replace(exported, parents=parents))
        assert index.dropped_links == 1
        assert index.parents[rows[65_536]] == NONE
        assert index.depths[rows[[65_535, 65_536, 65_599]]].tolist() == [65_535, 0, 63]


def test_a_block_in_memory_is_readable_before_the_engine_has_it() -> None:
    index = Index(seed=1)
    keys = random_keys(1, 3)
    rows = index.insert(7, keys, np.full(3, 1000, np.uint32), numbered(3), 0)
    assert not index.contains(7, keys).any()
    index.fill(rows)
    assert index.contains(7, keys).all()
    assert (index.blocks, index.live_bytes) == (0, 0)
    assert not index.evictable(rows, 0.0).any()
    with pytest.raises(ValueError, match="being written"):
        index.fill(rows)
    index.remove(rows[:1])
    there = index.commit(rows, numbered(3), numbered(3))
    assert there.tolist() == [False, True, True]
    assert index.blocks == 2
    assert (index.flags[rows[1:]] == MEM | DISK).all()


def test_a_late_commit_of_another_version_changes_nothing() -> None:
    index = Index(seed=1)
    keys = random_keys(1, 1)
    rows = index.insert(7, keys, np.full(1, 1000, np.uint32), numbered(1), 0)
    index.fill(rows)
    assert not index.commit(rows, numbered(1) + np.uint64(5), numbered(1)).any()
    assert index.blocks == 0


def test_a_block_on_disk_can_be_replaced() -> None:
    index = Index(seed=1)
    rows = index.insert(7, random_keys(1, 2), np.full(2, 1000, np.uint32), numbered(2), 0)
    with pytest.raises(ValueError, match="on disk"):
        index.replace(rows, np.full(2, 1000, np.uint32), numbered(2), numbered(2))
    index.commit(rows, index.generations[rows], numbered(2))
    index.lease(rows, 5.0)
    before = index.live_bytes
    larger = np.full(2, 1000, np.uint32) + np.uint32(1 << 20)
    index.replace(rows, larger, numbered(2) + np.uint64(9), numbered(2) + np.uint64(1))
    assert index.live_bytes == before + 2 * (1 << 20)
    assert index.generations[rows].tolist() == (numbered(2) + 9).tolist()
    assert index.leased_bytes(0.0) == index.live_bytes
    index.acquire(rows)
    with pytest.raises(ValueError, match="references"):
        index.replace(rows, larger, numbered(2), numbered(2))

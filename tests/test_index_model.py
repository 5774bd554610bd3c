"""The index against a plain model in Python objects, under seeded random operations."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvstore import chains
from kvstore.columns import DISK, GHOST, HIDDEN, NONE, WRITING
from kvstore.index import Index
from kvstore.record import image_bytes

EPOCH = 1000.0
SPACES = {7 << 16: 32, 7 << 16 | 1: 32, 9 << 16: 5}
"""Space numbers and the length of their keys."""
KEYS_PER_SPACE = 14


@dataclass(eq=False)
class Row:
    """One row of the model. ``children`` is computed, never stored."""

    space: int
    key: bytes
    number: int
    state: str
    size: int = 0
    generation: int = 0
    place: int = 0
    stamp: int = 0
    references: int = 0
    lease: int = 0
    parent: Row | None = None

    @property
    def depth(self) -> int:
        return 0 if self.parent is None else self.parent.depth + 1

    def is_below(self, other: Row) -> bool:
        return self is other or (self.parent is not None and self.parent.is_below(other))


@dataclass
class Model:
    rows: dict[tuple[int, bytes], Row] = field(default_factory=dict)
    pins: dict[int, float] = field(default_factory=dict)
    last_stamp: int = 0
    dropped: int = 0

    def children(self, row: Row) -> list[Row]:
        return [other for other in self.rows.values() if other.parent is row]

    def by_number(self, number: int) -> Row:
        return next(row for row in self.rows.values() if row.number == number)

    def stamp(self, rows: list[Row], now: int) -> None:
        first = max(self.last_stamp + 1, now)
        done: set[int] = set()
        for place, row in enumerate(rows):
            if row.number not in done:
                row.stamp = first + len(rows) - 1 - place
                done.add(row.number)
        self.last_stamp = first + len(rows) - 1 if rows else self.last_stamp

    def deepest(self) -> int:
        return max((row.depth for row in self.rows.values()), default=0)

    def link(self, pairs: list[tuple[Row, Row]]) -> int:
        had_children = {row.number for row in self.rows.values() if self.children(row)}
        bare = [pair for pair in pairs if pair[0].number not in had_children]
        late = [pair for pair in pairs if pair[0].number in had_children]
        dropped = sum(not self._link_one(row, parent) for row, parent in bare + late)
        self.drop_bare_ghosts([parent for _, parent in pairs])
        self.dropped += dropped
        return dropped

    def _link_one(self, row: Row, parent: Row) -> bool:
        if row is parent or row.space != parent.space:
            return False
        if row.parent is not None:
            return row.parent is parent
        below = self.deepest() if self.children(row) else 0
        if parent.is_below(row) or parent.depth + 1 + below > chains.MAX_DEPTH:
            return False
        row.parent = parent
        return True

    def drop_bare_ghosts(self, rows: list[Row]) -> None:
        for start in rows:
            row: Row | None = start
            while row is not None and self.rows.get((row.space, row.key)) is row:
                if row.state != "ghost" or row.references or self.children(row):
                    break
                del self.rows[row.space, row.key]
                row = row.parent

    def remove(self, rows: list[Row]) -> list[Row]:
        leaving = list(rows)
        while True:
            stuck = [row for row in leaving if any(c not in leaving for c in self.children(row))]
            if not stuck:
                break
            leaving = [row for row in leaving if row not in stuck]
        for row in rows:
            row.lease = 0
            self.pins.pop(row.number, None)
            row.state = "hidden" if row in leaving else "ghost"
        for row in leaving:
            del self.rows[row.space, row.key]
        self.drop_bare_ghosts([row.parent for row in leaving if row.parent is not None])
        return leaving

    def evictable(self, row: Row, now: float) -> bool:
        pinned = self.pins.get(row.number, -math.inf) > now
        leased = row.lease > math.floor((now - EPOCH) * 10)
        return row.state == "disk" and not row.references and not leased and not pinned

    def victims(self, candidates: list[Row], need: int, now: float) -> list[Row]:
        def may_go(row: Row) -> bool:
            inside = row in candidates and self.evictable(row, now)
            return inside and all(may_go(child) for child in self.children(row))

        def position(row: Row) -> int:
            below = [position(child) for child in self.children(row)]
            return max([candidates.index(row), *below])

        going = [row for row in candidates if may_go(row)]
        going.sort(key=lambda row: (position(row), -row.depth))
        taken: list[Row] = []
        while going and sum(image_bytes(row.size) for row in taken) < need:
            taken.append(going.pop(0))
        return taken


class Machine:
    """Does the same to an index and to the model, and compares what comes out."""

    def __init__(self, seed: int, single_links: bool = False) -> None:
        self.random = random.Random(seed)
        self.single_links = single_links
        self.index = Index(epoch=EPOCH, seed=seed)
        self.model = Model()
        self.now = EPOCH
        self.generation = 0
        self.hidden: list[int] = []
        self.universe = {
            space: [self.random.randbytes(length) for _ in range(KEYS_PER_SPACE - 1)]
            + [bytes(length)]
            for space, length in SPACES.items()
        }

    # -- choosing ---------------------------------------------------------------------------------

    def some_space(self) -> int:
        return self.random.choice(list(SPACES))

    def some_keys(self, space: int, most: int = 6) -> list[bytes]:
        return self.random.sample(self.universe[space], self.random.randint(0, most))

    def some_rows(self, *states: str) -> list[Row]:
        known = [row for row in self.model.rows.values() if row.state in states]
        return self.random.sample(known, self.random.randint(0, min(len(known), 6)))

    def array(self, space: int, keys: list[bytes]) -> np.ndarray:
        return np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), SPACES[space])

    @staticmethod
    def numbers(rows: list[Row]) -> np.ndarray:
        return np.array([row.number for row in rows], np.uint32)

    # -- operations -------------------------------------------------------------------------------

    def put(self) -> None:
        space = self.some_space()
        keys = self.some_keys(space)
        new = [key for key in keys if (space, key) not in self.model.rows]
        known = [self.model.rows[space, key] for key in keys if (space, key) in self.model.rows]
        ghosts = [row for row in known if row.state == "ghost"]
        made = [self._version(Row(space, key, 0, "writing")) for key in new]
        sizes, generations = self._versions(made)
        now = self.us()
        numbers = self.index.insert(space, self.array(space, new), sizes, generations, now)
        assert len(numbers) == len(new)
        for row, number in zip(made, numbers.tolist(), strict=True):
            row.number = number
            self.model.rows[space, row.key] = row
        self.model.stamp(made, now)
        for row in ghosts:
            self._version(row).state = "writing"
        self.index.realize(self.numbers(ghosts), *self._versions(ghosts), now)
        self.model.stamp(ghosts, now)
        if self.random.random() < 0.8:
            self.link(space, made + ghosts)

    def _version(self, row: Row) -> Row:
        self.generation += 1
        row.generation = self.generation
        row.size = self.random.randint(1, 20_000)
        return row

    @staticmethod
    def _versions(rows: list[Row]) -> tuple[np.ndarray, np.ndarray]:
        sizes = np.array([row.size for row in rows], np.uint32)
        return sizes, np.array([row.generation for row in rows], np.uint64)

    def link(self, space: int, rows: list[Row]) -> None:
        """Link to random keys, unknown ones included, in a chain or criss-cross."""
        if self.random.random() < 0.5:
            first = self.random.choice(self.universe[space])
            keys = [first, *[row.key for row in rows[:-1]]] if rows else []
        else:
            keys = [self.random.choice(self.universe[space]) for _ in rows]
        if self.single_links:
            rows, keys = rows[:1], keys[:1]
        unknown = {key for key in keys if (space, key) not in self.model.rows}
        numbers = self.index.ghosts(space, self.array(space, keys))
        for key, number in zip(keys, numbers.tolist(), strict=True):
            if key in unknown:
                self.model.rows.setdefault((space, key), Row(space, key, number, "ghost"))
            assert self.model.rows[space, key].number == number
        parents = [self.model.rows[space, key] for key in keys]
        wanted = self.model.link(list(zip(rows, parents, strict=True)))
        assert self.index.link(self.numbers(rows), numbers) == wanted

    def link_existing(self) -> None:
        rows = self.some_rows("disk", "ghost", "writing")
        parents = self.some_rows("disk", "ghost", "writing")
        pairs = list(zip(rows, parents, strict=False))[: 1 if self.single_links else None]
        wanted = self.model.link(pairs)
        numbers = self.numbers([row for row, _ in pairs])
        assert self.index.link(numbers, self.numbers([row for _, row in pairs])) == wanted

    def commit(self) -> None:
        rows = self.some_rows("writing")
        places = np.array([self.random.getrandbits(64) for _ in rows], np.uint64)
        numbers = self.numbers(rows)
        assert self.index.commit(numbers, self.index.generations[numbers], places).all()
        for row, place in zip(rows, places.tolist(), strict=True):
            row.state, row.place = "disk", place

    def abort(self) -> None:
        rows = self.some_rows("writing")
        if any(row.references for row in rows):
            with pytest.raises(ValueError, match="references"):
                self.index.abort(self.numbers(rows))
        self._take_references(rows)
        self.index.abort(self.numbers(rows))
        self.model.remove(rows)

    def touch(self) -> None:
        rows = self.some_rows("disk")
        rows += self.random.sample(rows, len(rows) // 2)
        now = self.us()
        self.index.touch(self.numbers(rows), now)
        self.model.stamp(rows, now)

    def acquire(self) -> None:
        rows = self.some_rows("disk", "ghost") * 2
        self.index.acquire(self.numbers(rows))
        for row in rows:
            row.references += 1

    def release(self) -> None:
        held = [row for row in self.model.rows.values() for _ in range(row.references)]
        rows = self.random.sample(held, self.random.randint(0, len(held)))
        self.index.release(self.numbers(rows))
        for row in rows:
            row.references -= 1
        self.model.drop_bare_ghosts([row for row in rows if not row.references])

    def release_too_many(self) -> None:
        rows = self.some_rows("disk")
        over = [row for row in rows for _ in range(row.references + 1)]
        if over:
            with pytest.raises(ValueError, match="fewer references"):
                self.index.release(self.numbers(over))

    def lease(self) -> None:
        rows, until = self.some_rows("disk"), self.now + self.random.uniform(-1, 8)
        self.index.lease(self.numbers(rows + rows[:1]), until)
        for row in rows:
            row.lease = max(row.lease, math.ceil((until - EPOCH) * 10), 0)

    def pin(self) -> None:
        for row in self.some_rows("disk")[:2]:
            until = self.now + self.random.uniform(0, 8)
            self.index.pin(row.number, until)
            self.model.pins[row.number] = until

    def unpin(self) -> None:
        for row in self.some_rows("disk"):
            self.index.unpin(row.number)
            self.model.pins.pop(row.number, None)

    def wait(self) -> None:
        self.now += self.random.uniform(0, 3)

    def remove(self) -> None:
        rows = self.some_rows("disk", "disk", "writing")
        self._take_references(rows)
        self._remove(rows)

    def _take_references(self, rows: list[Row]) -> None:
        counts = self.index.take_references(self.numbers(rows))
        assert counts.tolist() == [row.references for row in rows]
        for row in rows:
            row.references = 0

    def _remove(self, rows: list[Row]) -> None:
        gone = self.index.remove(self.numbers(rows + rows[:2]))
        assert gone.tolist() == [row.number for row in self.model.remove(rows)]
        self.hidden += gone.tolist()

    def free(self) -> None:
        chosen = self.random.sample(self.hidden, self.random.randint(0, len(self.hidden)))
        self.index.free(np.array(chosen, np.uint32))
        self.hidden = [number for number in self.hidden if number not in chosen]

    def victims(self) -> None:
        candidates = list(self.model.rows.values())
        candidates.sort(key=lambda row: row.stamp)
        if self.random.random() < 0.5:
            self.random.shuffle(candidates)
        candidates = candidates[: self.random.randint(0, len(candidates))]
        need = self.random.choice([0, 1, 30_000, 200_000, 10**9])
        found = self.index.victims(self.numbers(candidates), need, self.now)
        wanted = self.model.victims(candidates, need, self.now)
        assert found.tolist() == [row.number for row in wanted]
        if self.random.random() < 0.5:
            self._remove(wanted)

    def us(self) -> int:
        # Sometimes the clock stands still or goes back.
        return int(self.now * 1e6) - self.random.choice([0, 0, 10_000_000])

    # -- comparing --------------------------------------------------------------------------------

    OPERATIONS = (
        *[put] * 4, *[commit] * 3, abort, *[touch] * 2, acquire, *[release] * 2, release_too_many,
        lease, pin, unpin, wait, remove, free, *[victims] * 3, link_existing,
    )  # fmt: skip

    def step(self) -> None:
        self.random.choice(self.OPERATIONS)(self)
        self.compare()

    def compare(self) -> None:
        for space, keys in self.universe.items():
            self._compare_space(space, keys + self.random.choices(keys, k=3))
        rows = list(self.model.rows.values())
        disk = [row for row in rows if row.state == "disk"]
        index, model = self.index, self.model
        assert index.blocks == len(disk)
        assert index.live_bytes == sum(image_bytes(row.size) for row in disk)
        taken: dict[int, int] = {}
        for (space, _), row in self.model.rows.items():
            size = image_bytes(row.size) if row.state != "ghost" else 0
            taken[space >> 16] = taken.get(space >> 16, 0) + size
        assert {number: index.shares.of(number) for number in taken} == taken
        assert index.ghost_count == sum(row.state == "ghost" for row in rows)
        assert index.dropped_links == model.dropped
        leased = [row for row in disk if row.lease > math.floor((self.now - EPOCH) * 10)]
        assert index.leased_bytes(self.now) == sum(image_bytes(row.size) for row in leased)
        pinned = [row for row in disk if model.pins.get(row.number, 0) > self.now]
        assert index.pinned_bytes(self.now) == sum(image_bytes(row.size) for row in pinned)
        wanted = [model.evictable(row, self.now) for row in rows]
        assert index.evictable(self.numbers(rows), self.now).tolist() == wanted
        assert sorted(index.rows_of(None)) == sorted([*self.numbers(rows), *self.hidden])
        assert (index.flags[np.array(self.hidden, np.uint32)] == HIDDEN).all()
        self._compare_rows(rows)

    def _compare_space(self, space: int, keys: list[bytes]) -> None:
        rows = [self.model.rows.get((space, key)) for key in keys]
        array = self.array(space, keys)
        found = self.index.find(space, array)
        assert found.tolist() == [NONE if row is None else row.number for row in rows]
        there = [row is not None and row.state == "disk" for row in rows]
        assert self.index.contains(space, array).tolist() == there
        assert self.index.prefix(space, array) == [*there, False].index(False)

    def _compare_rows(self, rows: list[Row]) -> None:
        index, numbers = self.index, self.numbers(rows)
        flags = {"disk": DISK, "ghost": GHOST, "writing": WRITING}
        assert index.flags[numbers].tolist() == [flags[row.state] for row in rows]
        assert index.spaces[numbers].tolist() == [row.space for row in rows]
        assert index.references[numbers].tolist() == [row.references for row in rows]
        parents = [NONE if row.parent is None else row.parent.number for row in rows]
        assert index.parents[numbers].tolist() == parents
        children = [len(self.model.children(row)) for row in rows]
        assert index.children[numbers].tolist() == children
        assert index.last_use[numbers].tolist() == [row.stamp for row in rows]
        real = [row for row in rows if row.state != "ghost"]
        numbers = self.numbers(real)
        assert index.sizes[numbers].tolist() == [row.size for row in real]
        assert index.generations[numbers].tolist() == [row.generation for row in real]
        disk = [row for row in real if row.state == "disk"]
        assert index.places[self.numbers(disk)].tolist() == [row.place for row in disk]
        self._compare_depths(rows)

    def _compare_depths(self, rows: list[Row]) -> None:
        slack = self.index._chains._slack
        for row, depth in zip(rows, self.index.depths[self.numbers(rows)].tolist(), strict=True):
            assert depth <= row.depth <= depth + slack
            assert row.depth <= chains.MAX_DEPTH


@pytest.mark.parametrize("seed", range(24))
def test_the_index_does_what_the_model_does(seed: int) -> None:
    machine = Machine(seed)
    for _ in range(250):
        machine.step()
    export = machine.index.export(0, machine.index.row_limit)
    assert len(export) >= machine.index.blocks


@pytest.mark.parametrize("seed", range(100, 112))
def test_depths_stay_within_the_limit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "MAX_DEPTH", 4)
    machine = Machine(seed, single_links=True)
    for _ in range(250):
        machine.step()
    assert machine.model.dropped

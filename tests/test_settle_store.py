"""A store that lives, checkpoints and dies at random moments: settling must find what it held.

The model store emits the events a real one would, in the same order: a ghost before its child,
BEGIN before the bytes, PUT after them, FREE before bytes are deleted and row ids used again. A
checkpoint begins by starting the journal anew, waits for what was under way, and captures rows
slice by slice while everything goes on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kvstore.events import NONE, Kind, Records
from kvstore.settle import settle
from tests.journal_samples import NAMESPACE, OTHER_NAMESPACE, event, joined, touch

SPACES = [(NAMESPACE, 0), (NAMESPACE, 1), (OTHER_NAMESPACE, 0)]
KEYS = 14


@dataclass
class Block:
    """A row of the model: live with a generation, being written (``coming``), or a ghost."""

    space: int
    key: bytes
    parent: int = NONE
    generation: int | None = None
    coming: int | None = None
    last_use: int = 0
    pinned: int = 0


@dataclass
class Removal:
    """A version on its way out: hidden, then FREE in the journal, then deleted."""

    row: int
    block: Block
    generation: int
    hidden: bool
    journaled: bool = False


@dataclass
class Checkpoint:
    waits_for: list[object]
    next_row: int = 0
    records: list[Records] = field(default_factory=list)


class LivingStore:
    """With ``lazy`` a removal's FREE may come much later than the moment its row is hidden."""

    def __init__(self, chance: random.Random, lazy: bool) -> None:
        self.chance, self.lazy = chance, lazy
        self.rows: dict[int, Block] = {}
        self.journal: list[Records] = []
        self.base: list[Records] = []
        self.on_disk: set[int] = set()
        self.begun: set[int] = set()
        self.removals: list[Removal] = []
        self.writing: dict[int, Callable[[], None]] = {}
        self.checkpoint: Checkpoint | None = None
        self.taken: set[int] = set()
        self.generation = self.stamp = self.synced = 0

    # -- small things -----------------------------------------------------------------------------

    def next_stamp(self) -> int:
        self.stamp += self.chance.choice([1, 1, 5])
        return self.stamp

    def note(self, kind: Kind, row: int, block: Block, **fields: int) -> Records:
        namespace, shard = SPACES[block.space]
        values = {"parent": block.parent, "last_use": block.last_use, "shard": shard} | fields
        return event(kind, row, key=block.key, namespace=namespace, **values)

    def put_event(self, kind: Kind, row: int, block: Block, generation: int) -> Records:
        fields = {"generation": generation, "length": generation % 999, "place": generation * 3}
        return self.note(kind, row, block, **fields)

    def free_row(self) -> int:
        taken = {*self.rows, *self.taken}
        return next(number for number in range(10_000) if number not in taken)

    def children(self, row: int) -> list[int]:
        return [number for number, block in self.rows.items() if block.parent == row]

    def find(self, space: int, key: bytes) -> int | None:
        for number, block in self.rows.items():
            if (block.space, block.key) == (space, key):
                return number
        return None

    def pick(self, wanted: Callable[[Block], bool]) -> int | None:
        found = [number for number, block in self.rows.items() if wanted(block)]
        return self.chance.choice(found) if found else None

    # -- what a store does ------------------------------------------------------------------------

    def put(self) -> None:
        space, key = self.chance.randrange(len(SPACES)), bytes([self.chance.randrange(KEYS)])
        row = self.find(space, key)
        if row is not None and self.rows[row].coming is not None:
            return
        if row is None:
            row = self.free_row()
            self.rows[row] = Block(space, key)
        block = self.rows[row]
        # A live row's link is in its PUT: it changes only with the version.
        unlinked = block.parent == NONE and block.generation is None
        if unlinked and self.chance.random() < 0.7:
            self.link(row, bytes([self.chance.randrange(KEYS)]))
        self.generation += 1
        generation = block.coming = self.generation
        if block.generation is None:
            block.last_use = self.next_stamp()
        self.journal.append(self.put_event(Kind.BEGIN, row, block, generation))
        self.on_disk.add(generation)
        self.begun.add(generation)
        self.writing[row] = lambda: self.end_put(row, generation)

    def link(self, row: int, key: bytes) -> None:
        space = self.rows[row].space
        parent = self.find(space, key)
        above = parent
        while above is not None and above != NONE:
            if above == row:
                return
            above = self.rows[above].parent
        if parent is None:
            parent = self.free_row()
            self.rows[parent] = Block(space, key, last_use=self.next_stamp())
            self.journal.append(self.note(Kind.GHOST, parent, self.rows[parent]))
        self.rows[row].parent = parent

    def end_put(self, row: int, generation: int) -> None:
        block = self.rows[row]
        block.coming = None
        if self.chance.random() < 0.2:
            self.removals.append(Removal(row, block, generation, hidden=False, journaled=True))
            if block.generation is None:
                self.drop_if_childless(row)
            return
        old, block.generation = block.generation, generation
        self.journal.append(self.put_event(Kind.PUT, row, block, generation))
        if old is not None:
            self.removals.append(Removal(row, block, old, hidden=False))

    def remove(self) -> None:
        row = self.pick(lambda block: block.generation is not None and block.coming is None)
        if row is None:
            return
        block = self.rows[row]
        assert block.generation is not None
        removal = Removal(row, block, block.generation, hidden=not self.children(row))
        self.removals.append(removal)
        block.generation, block.pinned = None, 0
        if removal.hidden:
            self.taken.add(row)
            self.drop_if_childless(row)
        if not self.lazy:
            self.journal_free(removal)

    def drop_if_childless(self, row: int) -> None:
        block = self.rows.get(row)
        if block and block.generation is None and block.coming is None and not self.children(row):
            del self.rows[row]
            self.drop_if_childless(block.parent)

    def journal_free(self, removal: Removal) -> None:
        self.journal.append(
            self.put_event(Kind.FREE, removal.row, removal.block, removal.generation)
        )
        removal.journaled = True

    def go_on_removing(self) -> None:
        if not self.removals:
            return
        removal = self.chance.choice(self.removals)
        if not removal.journaled:
            self.journal_free(removal)
            return
        self.on_disk.discard(removal.generation)
        self.removals.remove(removal)
        if removal.hidden:
            self.taken.discard(removal.row)

    def use(self) -> None:
        rows = [number for number, block in self.rows.items() if block.generation is not None]
        rows = self.chance.sample(rows, min(len(rows), self.chance.randint(0, 25)))
        if rows:
            first = self.next_stamp()
            for place, row in enumerate(rows):
                self.rows[row].last_use = first + place
            self.stamp = first + len(rows) - 1
            self.journal.append(touch(rows, first))

    def pin(self) -> None:
        row = self.pick(lambda block: block.generation is not None)
        if row is not None:
            self.rows[row].pinned = self.chance.choice([0, 10**15 + self.next_stamp()])
            self.journal.append(event(Kind.PIN, row, last_use=self.rows[row].pinned))

    def sync(self) -> None:
        coming = [block.coming for block in self.rows.values() if block.coming is not None]
        self.synced = max(self.synced, min(coming, default=self.generation + 1) - 1)
        self.journal.append(event(Kind.SYNC, generation=self.synced))

    def finish_a_put(self) -> None:
        if self.writing:
            self.writing.pop(self.chance.choice(sorted(self.writing)))()

    # -- checkpoints ------------------------------------------------------------------------------

    def go_on_with_checkpoint(self) -> None:
        if self.checkpoint is None:
            self.older = [*self.base, *self.journal]
            self.journal = []
            self.checkpoint = Checkpoint([*self.writing.values(), *self.removals])
            return
        under_way = [*self.writing.values(), *self.removals]
        if any(job in under_way for job in self.checkpoint.waits_for):
            return
        end = max(self.rows, default=-1) + 1
        if self.checkpoint.next_row < end:
            self.capture_slice()
        else:
            self.finish_checkpoint()

    def capture_slice(self) -> None:
        checkpoint = self.checkpoint
        assert checkpoint is not None
        start = checkpoint.next_row
        checkpoint.next_row = start + self.chance.randint(1, 8)
        for row in range(start, checkpoint.next_row):
            block = self.rows.get(row)
            if block is None:
                continue
            if block.coming is not None:
                checkpoint.records.append(self.put_event(Kind.LEFTOVER, row, block, block.coming))
            if block.generation is not None:
                checkpoint.records.append(self.put_event(Kind.PUT, row, block, block.generation))
            elif self.children(row):
                checkpoint.records.append(self.note(Kind.GHOST, row, block))

    def finish_checkpoint(self) -> None:
        assert self.checkpoint is not None
        records = self.checkpoint.records
        records += [
            self.put_event(Kind.LEFTOVER, removal.row, removal.block, removal.generation)
            for removal in self.removals
        ]
        records += [
            event(Kind.PIN, row, last_use=block.pinned)
            for row, block in self.rows.items()
            if block.pinned
        ]
        records.append(event(Kind.SYNC, generation=self.synced))
        self.base, self.checkpoint = records, None

    # -- living and dying -------------------------------------------------------------------------

    def live(self, steps: int) -> Records:
        actions = [
            self.put, self.put, self.put, self.finish_a_put, self.finish_a_put, self.finish_a_put,
            self.remove, self.go_on_removing, self.go_on_removing, self.use, self.pin, self.sync,
            self.go_on_with_checkpoint, self.go_on_with_checkpoint,
        ]  # fmt: skip
        for _ in range(steps):
            self.chance.choice(actions)()
        unfinished = self.older if self.checkpoint is not None else self.base
        return joined(*unfinished, *self.journal)

    def needed_ghosts(self) -> set[int]:
        found = set()
        for block in self.rows.values():
            row = block.parent if block.generation is not None else NONE
            while row != NONE and row not in found and self.rows[row].generation is None:
                found.add(row)
                row = self.rows[row].parent
        return found


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_a_store_that_dies_is_found_as_it_was(seed: int, lazy: bool) -> None:
    store = LivingStore(random.Random(seed), lazy)
    settled = settle(store.live(steps=random.Random(-seed).choice([10, 100, 400, 1000])))
    rows = settled.rows
    found = dict(zip(rows["row"].tolist(), rows, strict=True))
    alive = {row: block for row, block in store.rows.items() if block.generation is not None}
    live_rows = {row for row, record in found.items() if record["kind"] == Kind.PUT}

    # A removal whose FREE was not written yet may come back; nothing else may differ.
    returned = live_rows - set(alive)
    pending = {
        removal.row: removal.generation for removal in store.removals if not removal.journaled
    }
    assert all(pending[row] == int(found[row]["generation"]) for row in returned)
    assert set(alive) - live_rows == set()
    assert lazy or not returned
    for row, block in alive.items():
        record = found[row]
        namespace, shard = SPACES[block.space]
        assert int(record["generation"]) == block.generation
        assert bytes(record["key"])[: record["key_length"]] == block.key
        assert (bytes(record["namespace"]), int(record["shard"])) == (namespace, shard)
        assert int(record["place"]) == 3 * int(record["generation"])
        if not returned:
            assert int(record["parent"]) == block.parent
    if not returned:
        assert set(found) - live_rows == store.needed_ghosts()
        assert settled.pins == {row: block.pinned for row, block in alive.items() if block.pinned}

    order = sorted(alive, key=lambda row: alive[row].last_use)
    assert sorted(alive, key=lambda row: int(found[row]["last_use"])) == order

    held = {int(record["generation"]) for row, record in found.items() if row in live_rows}
    leftover = set(settled.leftovers["generation"].tolist())
    assert not leftover & held
    assert store.on_disk - held <= leftover <= store.begun
    assert settled.max_generation == store.generation or not store.generation
    assert settled.synced == store.synced


def test_the_model_store_does_everything_it_should() -> None:
    """Otherwise the test above proves little."""
    seen: dict[str, int] = dict.fromkeys(["ghosts", "leftovers", "pins", "checkpoints", "late"], 0)
    for seed in range(60):
        store = LivingStore(random.Random(seed), lazy=True)
        events = store.live(1000)
        settled = settle(events)
        seen["ghosts"] += int((settled.rows["kind"] == Kind.GHOST).sum())
        seen["leftovers"] += len(settled.leftovers)
        seen["pins"] += len(settled.pins)
        seen["checkpoints"] += bool(store.base)
        seen["late"] += sum(not removal.journaled for removal in store.removals)
    assert min(seen.values()) >= 20

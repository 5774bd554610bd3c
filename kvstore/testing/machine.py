"""Random operations on an engine and on a memory engine, which must agree."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvstore.backends.base import EngineContext
from kvstore.backends.memory import MemoryEngine
from kvstore.testing.processes import visit_elsewhere
from kvstore.testing.records import (
    NAMESPACE,
    OTHER_NAMESPACE,
    STORE,
    Identity,
    delete,
    identities,
    key_of,
    make_blocks,
    put,
    reopen,
    scanned,
    verdicts,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.backends.base import Blocks, Engine

SIZES = (1, 4095, 4096, 4097, 9000)

batches = st.lists(st.integers(0, 7), min_size=1, max_size=6, unique=True)
spaces = st.sampled_from([(NAMESPACE, 0), (NAMESPACE, 7), (OTHER_NAMESPACE, 0)])
versions = st.integers(1, 2)


class EngineMachine(RuleBasedStateMachine):
    """``engine`` must do what ``model`` does. ``places`` of what is stored are all that the model
    does not know, and ``sizes`` are kept to ask both for what they have."""

    make: Callable[[], Engine]

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.engine = self.make()
        self.model = MemoryEngine(EngineContext(Path(self.folder.name), STORE))
        self.model.create()
        self.model.open()
        self.places: dict[Identity, int] = {}
        self.sizes: dict[Identity, int] = {}
        self.visited = False

    def blocks(self, space: tuple[bytes, int], numbers: list[int], version: int) -> Blocks:
        """Return blocks with the size and place of those that are stored."""
        namespace, shard = space
        keys = [key_of(number) for number in numbers]
        blocks = make_blocks(keys, 5000, version, namespace=namespace, shard=shard)
        names = identities(blocks)
        blocks.lengths[:] = [self.sizes.get(name, 5000) for name in names]
        blocks.places[:] = [self.places.get(name, 0) for name in names]
        return blocks

    def new(self, space: tuple[bytes, int], numbers: list[int], version: int, size: int) -> Blocks:
        """Return blocks of this size, those left out that are stored already."""
        blocks = self.blocks(space, numbers, version)
        fresh = np.array([name not in self.sizes for name in identities(blocks)], np.bool_)
        blocks.lengths[:] = size
        return blocks.take(fresh)

    def note(self, blocks: Blocks) -> None:
        """Give the model what the engine has taken."""
        put(self.model, blocks)
        names = identities(blocks)
        self.sizes.update(zip(names, blocks.lengths.tolist(), strict=True))
        self.places.update(zip(names, blocks.places.tolist(), strict=True))

    def held(self) -> list[Blocks]:
        """Return all that is stored, each record apart."""
        found = []
        for name, place in self.places.items():
            namespace, shard, key, version = name
            block = make_blocks([key], self.sizes[name], version, namespace=namespace, shard=shard)
            block.places[0] = place
            found.append(block)
        return found

    @rule(space=spaces, numbers=batches, version=versions, size=st.sampled_from(SIZES))
    def put(self, space: tuple[bytes, int], numbers: list[int], version: int, size: int) -> None:
        self.note(put(self.engine, self.new(space, numbers, version, size)))

    @rule(space=spaces, numbers=batches, version=versions)
    def get(self, space: tuple[bytes, int], numbers: list[int], version: int) -> None:
        blocks = self.blocks(space, numbers, version)
        assert verdicts(self.engine, blocks) == verdicts(self.model, blocks)
        there = self.engine.contains_many(blocks).tolist()
        assert there == self.model.contains_many(blocks).tolist()

    @rule(space=spaces, numbers=batches, version=versions)
    def delete(self, space: tuple[bytes, int], numbers: list[int], version: int) -> None:
        blocks = self.blocks(space, numbers, version)
        assert delete(self.engine, blocks) == delete(self.model, blocks)
        for name in identities(blocks):
            self.sizes.pop(name, None)
            self.places.pop(name, None)

    @rule()
    def scan(self) -> None:
        found = scanned(self.engine)
        assert set(found) == set(scanned(self.model))
        assert found == self.places

    @rule(space=spaces)
    def forget(self, space: tuple[bytes, int]) -> None:
        self.engine.forget(space[0])

    @rule()
    def flush(self) -> None:
        self.engine.flush()

    @precondition(lambda self: self.engine.capabilities.persistent)
    @rule()
    def reopen(self) -> None:
        self.engine.close()
        reopen(self.engine, *self.held())

    # Once is enough: a process takes longer than all the rest.
    @precondition(lambda self: self.engine.capabilities.persistent and not self.visited)
    @rule(space=spaces, numbers=batches, version=versions, size=st.sampled_from(SIZES))
    def reopen_elsewhere(
        self, space: tuple[bytes, int], numbers: list[int], version: int, size: int
    ) -> None:
        """Close, let a new process open it and put something, and open again."""
        self.visited = True
        self.engine.close()
        visit = visit_elsewhere(self.engine, self.held(), self.new(space, numbers, version, size))
        self.note(visit.put)
        reopen(self.engine, *self.held())
        assert visit.found == self.places

    def teardown(self) -> None:
        self.folder.cleanup()
        # It is closed only where a step failed: that is what shall be told.
        if self.engine.is_open:
            findings = self.engine.check()
            self.engine.close()
            assert findings == []


def run_machine(
    make: Callable[[], Engine], *, examples: int = 25, steps: int = 30, shrink: bool = True
) -> None:
    """Run random operations; ``make`` returns an empty, open engine each time it is called.

    Without ``shrink`` a failure is told as it was found, which is quicker.
    """
    machine = type("Machine", (EngineMachine,), {"make": staticmethod(make)})
    profile = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[phase for phase in Phase if shrink or phase != Phase.shrink],
    )
    run_state_machine_as_test(machine, settings=profile)

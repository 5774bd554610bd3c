"""Random operations on an engine and on a dictionary, which must agree."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from kvstore.record import Verdict
from kvstore.testing.records import (
    NAMESPACE,
    OTHER_NAMESPACE,
    Identity,
    key_of,
    make_blocks,
    put,
    scanned,
    verdicts,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.backends.base import Blocks, Engine

SIZES = (1, 4095, 4096, 4097, 9000)

batches = st.lists(st.integers(0, 7), min_size=1, max_size=6, unique=True)
spaces = st.sampled_from([(NAMESPACE, 0), (NAMESPACE, 7), (OTHER_NAMESPACE, 0)])
versions = st.integers(1, 3)


class EngineMachine(RuleBasedStateMachine):
    """``model`` maps each identity to (size, place) of the record that must be there."""

    make: Callable[[], Engine]

    def __init__(self) -> None:
        super().__init__()
        self.engine = self.make()
        self.model: dict[Identity, tuple[int, int]] = {}

    def blocks(self, space: tuple[bytes, int], numbers: list[int], version: int) -> Blocks:
        """Return blocks with size and place of the model where it has them."""
        namespace, shard = space
        keys = [key_of(number) for number in numbers]
        known = [self.model.get((namespace, shard, key, version), (5000, 0)) for key in keys]
        blocks = make_blocks(
            keys, [size for size, _ in known], version, namespace=namespace, shard=shard
        )
        return replace(blocks, places=np.array([place for _, place in known], np.uint64))

    @rule(space=spaces, numbers=batches, version=versions, size=st.sampled_from(SIZES))
    def put(self, space: tuple[bytes, int], numbers: list[int], version: int, size: int) -> None:
        numbers = [n for n in numbers if (*space, key_of(n), version) not in self.model]
        if numbers:
            keys = [key_of(number) for number in numbers]
            blocks = make_blocks(keys, size, version, namespace=space[0], shard=space[1])
            places = put(self.engine, blocks).places.tolist()
            for key, place in zip(keys, places, strict=True):
                self.model[(*space, key, version)] = (size, place)

    @rule(space=spaces, numbers=batches, version=versions)
    def get(self, space: tuple[bytes, int], numbers: list[int], version: int) -> None:
        expected = [(*space, key_of(number), version) in self.model for number in numbers]
        blocks = self.blocks(space, numbers, version)
        found = verdicts(self.engine, blocks)
        assert found == [Verdict.OK if there else None for there in expected]
        assert self.engine.contains_many(blocks).tolist() == expected

    @rule(space=spaces, numbers=batches, version=versions)
    def delete(self, space: tuple[bytes, int], numbers: list[int], version: int) -> None:
        removed = self.engine.delete_many(self.blocks(space, numbers, version))
        gone = [self.model.pop((*space, key_of(n), version), None) for n in numbers]
        assert removed == sum(record is not None for record in gone)

    @rule()
    def scan(self) -> None:
        found = scanned(self.engine)
        assert found == {name: place for name, (_, place) in self.model.items()}

    @rule(space=spaces)
    def forget(self, space: tuple[bytes, int]) -> None:
        self.engine.forget(space[0])

    @rule(flush=st.booleans())
    def reopen(self, flush: bool) -> None:
        if flush:
            self.engine.flush()
        self.engine.close()
        self.engine.open()

    def teardown(self) -> None:
        assert self.engine.check() == []
        self.engine.close()


def run_machine(make: Callable[[], Engine], *, examples: int = 25, steps: int = 20) -> None:
    """Run random operations; ``make`` returns an empty, open engine each time it is called."""
    machine = type("Machine", (EngineMachine,), {"make": staticmethod(make)})
    profile = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=profile)

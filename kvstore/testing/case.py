"""What all tests of an engine start from: who makes it, and one that is open."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest

from kvstore.backends.base import Blocks, Engine, EngineContext
from kvstore.testing.records import STORE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class EngineCase:
    """What a test class of an engine says about it, and the fixtures made of that."""

    capacity: ClassVar[int] = 16 << 20
    """What an engine takes at most in the test of space, in bytes. Ten times as much is put."""

    def make(self, context: EngineContext) -> Engine:
        """Return an engine that was neither created nor opened."""
        raise NotImplementedError

    def damage(self, engine: Engine, block: Blocks) -> None:
        """Spoil the payload of one record on disk, behind the back of the open engine."""
        pytest.skip("this engine does not say how to damage a record")

    def start(self, directory: Path) -> Engine:
        """Return an open, empty engine that is to keep within ``capacity``."""
        engine = self.make(EngineContext(directory, STORE))
        engine.create()
        engine.open()
        return engine

    @pytest.fixture
    def context(self, tmp_path: Path) -> EngineContext:
        directory = tmp_path / "blocks"
        directory.mkdir()
        return EngineContext(directory, STORE)

    @pytest.fixture
    def engine(self, context: EngineContext) -> Iterator[Engine]:
        engine = self.make(context)
        engine.create()
        engine.open()
        yield engine
        engine.close()

    @pytest.fixture
    def persistent(self, engine: Engine) -> Engine:
        if not engine.capabilities.persistent:
            pytest.skip("records of this engine do not outlive the process")
        return engine

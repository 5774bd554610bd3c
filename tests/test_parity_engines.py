"""The rules of the engine contract once more, with parity chunks. In the long form only."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from kvstore.backends.base import Blocks, Engine, EngineContext
from kvstore.testing import EngineTests
from tests import test_engines, test_superblock

pytestmark = pytest.mark.skipif(os.environ.get("PROMISES") != "long", reason="PROMISES=long")


class WithParity(EngineTests):
    def make(self, context: EngineContext) -> Engine:
        return super().make(replace(context, parity=True))

    def damage(self, engine: Engine, block: Blocks) -> None:
        pytest.skip("what it damages is brought back: see test_parity.py")


class TestMemory(WithParity, test_engines.TestMemory):
    pass


class TestFilesystem(WithParity, test_engines.TestFilesystem):
    pass


class TestSuperblock(WithParity, test_superblock.TestDirect):
    pass


class TestLmdb(WithParity, test_engines.TestLmdb):
    # Of half of that seven records take all: holes between them weigh too much.
    capacity = 32 << 20


class TestLeveldb(WithParity, test_engines.TestLeveldb):
    pass


class TestSqlite(WithParity, test_engines.TestSqlite):
    pass


class TestRocksdb(WithParity, test_engines.TestRocksdb):
    pass
